#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The miss ratios that test_cache_oracle.c has for its generated trace, from another program than weir's: LRU, and ARC as figure 4 of the FAST '03
paper has it, step by step, on plain ordered dictionaries and with a real number for p.

usage: cache_reference.py        prints the table
"""
from collections import OrderedDict

REQUESTS, SPACE, MASK = 60000, 9000, (1 << 64) - 1


def trace():
    """A hot set that moves, runs, and loops, by Knuth's generator (MMIX): test_cache_oracle.c makes the same."""
    x, keys = 42, []

    def below(n):
        nonlocal x
        x = (x * 6364136223846793005 + 1442695040888963407) & MASK
        return (x >> 33) % n

    kind = left = run = base = 0
    for _ in range(REQUESTS):
        if left == 0:
            kind, left, run = below(5), 1 + below(SPACE // 16), below(SPACE)
            if below(8) == 0:
                base = below(SPACE)
        left -= 1
        if kind == 1:
            keys.append(run % SPACE)
            run += 1
        elif kind == 2:
            keys.append((run + left % (SPACE // 20 + 1)) % SPACE)
        else:
            keys.append((base + below(1 + below(1 + below(SPACE)))) % SPACE)
    return keys


def lru(keys, c):
    cache, misses = OrderedDict(), 0
    for k in keys:
        if k in cache:
            cache.move_to_end(k)
            continue
        misses += 1
        if len(cache) == c:
            cache.popitem(last=False)
        cache[k] = None
    return misses / len(keys)


def arc(keys, c):
    t1, t2, b1, b2 = OrderedDict(), OrderedDict(), OrderedDict(), OrderedDict()
    p, misses = 0.0, 0

    def replace(x):
        if t1 and (len(t1) > p or (x in b2 and len(t1) == p)):
            b1[t1.popitem(last=False)[0]] = None
        else:
            b2[t2.popitem(last=False)[0]] = None

    for x in keys:
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).pop(x)
            t2[x] = None
            continue
        misses += 1
        if x in b1:
            p = min(p + max(len(b2) / len(b1), 1), c)
            replace(x)
            del b1[x]
            t2[x] = None
        elif x in b2:
            p = max(p - max(len(b1) / len(b2), 1), 0)
            replace(x)
            del b2[x]
            t2[x] = None
        else:
            l1, l2 = len(t1) + len(b1), len(t2) + len(b2)
            if l1 == c:
                if len(t1) < c:
                    b1.popitem(last=False)
                    replace(x)
                else:
                    t1.popitem(last=False)
            elif l1 + l2 >= c:
                if l1 + l2 == 2 * c:
                    b2.popitem(last=False)
                replace(x)
            t1[x] = None
    return misses / len(keys)


if __name__ == "__main__":
    requests = trace()
    distinct = len(set(requests))
    print("distinct", distinct)
    for fraction in (0.01, 0.05, 0.10, 0.20, 0.40, 0.70):
        size = int(fraction * distinct)
        print(f"\t{{ {fraction:.2f}, {arc(requests, size):.5f}, {lru(requests, size):.5f}, 0 }},")
