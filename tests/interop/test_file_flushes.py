#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What reaches the kernel, counted from outside: flushes, stable writes, and nothing beside them.

usage: test_file_flushes.py DISK_TOOL

With aio=threads every operation is a system call of its own, which strace sees.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

tool = os.path.abspath(sys.argv[1])
failures = 0


def counts(image, options, *commands):
    """Runs the commands and counts plain writes, writes with RWF_DSYNC and fdatasyncs on the image."""
    trace = image + ".trace"
    # -P would miss descriptors that the tool opens through /proc; -y names the file instead.
    p = subprocess.run(["strace", "-f", "-y", "-o", trace, "-e", "trace=pwritev2,pwrite64,pwritev,fdatasync,fsync,io_submit",
                        tool, "w", "%s,%s" % (image, options), *commands],
                       stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stdout + p.stderr
    n = {"write": 0, "dsync": 0, "flush": 0}
    with open(trace) as f:
        for line in f:
            if os.path.basename(image) + ">" not in line or "resumed" in line:
                continue
            if re.search(r"fdatasync|fsync", line):
                n["flush"] += 1
            else:
                n["dsync" if "RWF_DSYNC" in line else "write"] += 1
    return n


def check(what, got, **want):
    global failures
    want = {"write": 0, "dsync": 0, "flush": 0, **want}
    good = got == want
    print("%s: %s%s" % ("ok" if good else "FAILED", what, "" if good else ": %s, wanted %s" % (got, want)), flush=True)
    failures += not good


def main():
    if not shutil.which("strace"):
        print("skipped: strace is not installed")
        return 77
    if subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True).returncode:
        print("skipped: strace may not trace here")
        return 77
    pairs = [c for i in range(8) for c in ("w:%d:4096:1" % (i * 4096), "f")]
    stable = ["w:%d:4096:1:f" % (i * 4096) for i in range(8)]
    with tempfile.TemporaryDirectory(prefix="test-file-flushes-", dir=".") as folder:
        image = os.path.join(folder, "image.raw")
        with open(image, "wb") as f:
            f.truncate((1 << 20) + 100)
        for cache in ("none", "writeback"):
            t = "aio=threads,cache=" + cache
            check(cache + ": each of 8 flushes with a write before it is one fdatasync", counts(image, t, *pairs), write=8, flush=8)
            check(cache + ": the first flush is never left out, the next ones have nothing to do",
                  counts(image, t, "f", "f", "f"), flush=1)
            check(cache + ": a stable write is one system call", counts(image, t, *stable), dsync=8)
            check(cache + ": and a flush behind stable writes has only the past before the opening to flush",
                  counts(image, t, *stable, "f", "f"), dsync=8, flush=1)
            check(cache + ": a stable write is no flush of another", counts(image, t, "f", "w:0:4096:1", "w:4096:4096:1:f", "f"),
                  write=1, dsync=1, flush=2)
            check(cache + ": write zeroes and discard need a flush, too", counts(image, t, "f", "z:0:4096", "f", "d:0:4096", "f"), flush=3)
        check("directsync: each write is stable by itself", counts(image, "aio=threads,cache=directsync", *pairs), dsync=8, flush=1)
        check("writethrough: each write is followed by a flush", counts(image, "aio=threads,cache=writethrough", *pairs), write=8, flush=8)
        check("unsafe: nothing is flushed", counts(image, "aio=threads,cache=unsafe", *pairs, *stable), write=16)
        check("the last bytes of an odd size: the same, and their flush is the file's",
              counts(image, "aio=threads,cache=none", "w:1048576:100:1", "f", "w:1048576:100:1:f"), write=1, dsync=1, flush=1)
    return 1 if failures else 0


sys.exit(main())
