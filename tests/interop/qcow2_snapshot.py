#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Snapshots: what QEMU makes weir lists, applies and deletes, and the other way round; after every step both call the image clean, and every
snapshot still has its contents.

usage: qcow2_snapshot.py WEIR
"""
from qcow2_lib import *  # noqa: F403

OPTIONS = ("cluster_size=4k", "cluster_size=512,refcount_bits=64", "", "compat=0.10", "extended_l2=on,cluster_size=16k", "cluster_size=2M,refcount_bits=8",
           "cluster_size=4k,compression_type=zstd,lazy_refcounts=on", "cluster_size=64k,refcount_bits=4")


class Image:
    """An image, and what it and its snapshots should hold."""

    def __init__(self, r, options, mixed):
        self.r, self.options, self.mixed = r, options, mixed
        self.n = 0
        self.snapshots = {}
        qemu_img("create", "-q", "-f", "qcow2", *(["-o", options] if options else []), "s.qcow2", "9M")
        self.data = bytearray(9 * MIB)

    def write(self):
        for _ in range(self.r.randint(1, 4)):
            n = self.r.choice([512, 4096, 65536, 300 << 10])
            at = self.r.randrange(len(self.data) - n) // 512 * 512
            kind = self.r.choice(["write", "write", "zero", "compressed"])
            value = self.r.randint(1, 255)
            # Compressed clusters share one on disk: too many for narrow refcounts.
            if kind == "compressed" and "refcount_bits=4" in self.options:
                continue
            if kind == "compressed":
                cluster = 2 * MIB
                at, n = at // cluster * cluster, cluster
                if at + n > len(self.data):
                    continue
                # QEMU writes compressed only what is not allocated; another program may refuse.
                run("qemu-io", "-f", "qcow2", "-c", "discard %d %d" % (at, n), "s.qcow2")
                if run("qemu-io", "-f", "qcow2", "-c", "write -c -P %d %d %d" % (value, at, n), "s.qcow2").returncode:
                    qemu_io("s.qcow2", "write -P %d %d %d" % (value, at, n))
            elif kind == "zero":
                value = 0
                qemu_io("s.qcow2", "write -z %s %d %d" % (self.r.choice(["", "-u"]), at, n))
            else:
                qemu_io("s.qcow2", "write -P %d %d %d" % (value, at, n))
            self.data[at:at + n] = bytes([value]) * n

    def tool(self, option, name):
        if self.mixed and self.r.random() < 0.4:
            qemu_img("snapshot", option, name, "s.qcow2")
            return "qemu"
        weir("snapshot", "-q", option, name, "s.qcow2")
        return "weir"

    def step(self):
        kind = self.r.choice(["create", "create", "apply", "delete"]) if self.snapshots else "create"
        if kind == "create" and len(self.snapshots) >= 6:
            kind = "delete"
        if kind == "create":
            self.n += 1
            name = "s%d" % self.n
            who = self.tool("-c", name)
            self.snapshots[name] = bytes(self.data)
        elif kind == "apply":
            name = self.r.choice(sorted(self.snapshots))
            who = self.tool("-a", name)
            self.data = bytearray(self.snapshots[name])
        else:
            name = self.r.choice(sorted(self.snapshots))
            who = self.tool("-d", name)
            del self.snapshots[name]
        return "%s %s by %s" % (kind, name, who)

    def verify(self, what):
        clean(what + ": QEMU calls it clean", "s.qcow2")
        status, w = weir_check("s.qcow2")
        check(what + ": weir calls it clean", status == 0, w)
        names = [s["name"] for s in json.loads(weir("snapshot", "--json", "s.qcow2"))]
        check(what + ": the list", sorted(names) == sorted(self.snapshots), "%s %s" % (names, sorted(self.snapshots)))
        for name, data in [(None, bytes(self.data)), *self.snapshots.items()]:
            qemu_img("convert", "-O", "raw", *(["-l", "snapshot.name=" + name] if name else []), "s.qcow2", "s.raw")
            check(what + ": the contents of %s" % (name or "the disk"), open("s.raw", "rb").read() == data)


def random_snapshots():
    r = random.Random(seed())
    for options in OPTIONS[:max(1, int(len(OPTIONS) * min(scale(), 1)))]:
        for n in range(max(1, int(scale()))):
            image = Image(r, options, mixed=True)
            history = []
            for _ in range(4):
                image.write()
                history.append(image.step())
            image.write()
            image.verify("%s, %s" % (options or "default", "; ".join(history)))


def what_either_makes_the_other_applies_and_deletes():
    for options in ("extended_l2=on,cluster_size=16k,refcount_bits=64", "compat=0.10,cluster_size=4k"):
        qemu_img("create", "-q", "-f", "qcow2", "-o", options, "s.qcow2", "2M")
        tools = {"qemu": lambda *a: qemu_img("snapshot", *a, "s.qcow2"), "weir": lambda *a: weir("snapshot", "-q", *a, "s.qcow2")}
        # With a machine's state in it, which lies behind the end of the disk.
        qemu_io("s.qcow2", "write -q -P 1 200k 1M", "write -q -z -u 512k 64k", "write -q -b -P 9 0 100k")
        tools["qemu"]("-c", "by qemu")
        qemu_io("s.qcow2", "write -q -P 2 900k 1M", "discard -q 200k 128k")
        tools["weir"]("-c", "by weir")
        qemu_io("s.qcow2", "write -q -P 3 0 2M")
        holds = {"by qemu": ["read -P 1 200k 312k", "read -P 0 512k 64k", "read -P 1 576k 648k", "read -b -P 9 0 100k"],
                 "by weir": ["read -P 0 512k 64k", "read -P 1 576k 324k", "read -P 2 900k 1M"]}
        for maker, other in (("qemu", "weir"), ("weir", "qemu"), ("qemu", "weir")):
            tools[other]("-a", "by " + maker)
            qemu_io("s.qcow2", *holds["by " + maker])
            clean("%s: %s applies what %s made" % (options, other, maker), "s.qcow2")
        weir("convert", "-q", "--force", "-l", "by weir", "s.qcow2", "w.raw")
        must("qemu-io", "-r", "-f", "raw", "-c", "read -P 2 900k 1M", "w.raw")
        tools["weir"]("-d", "by qemu")
        tools["qemu"]("-d", "by weir")
        qemu_io("s.qcow2", *holds["by qemu"])
        clean("%s: each deletes the other's" % options, "s.qcow2")
        status, w = weir_check("s.qcow2")
        check("%s: weir agrees" % options, status == 0, w)


def sizes_follow_the_snapshot():
    qemu_img("create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "s.qcow2", "1M")
    qemu_io("s.qcow2", "write -P 1 0 1M")
    weir("snapshot", "-c", "small", "s.qcow2")
    qemu_img("resize", "-q", "s.qcow2", "64M")
    qemu_io("s.qcow2", "write -P 2 60M 1M")
    weir("snapshot", "-c", "large", "s.qcow2")
    for name, size in (("small", MIB), ("large", 64 * MIB), ("small", MIB)):
        weir("snapshot", "-a", name, "s.qcow2")
        check("the disk has the size of " + name, json.loads(weir("info", "--json", "s.qcow2"))["virtual-size"] == size)
        clean(name + " is clean", "s.qcow2")
        qemu_io("s.qcow2", "read -P 1 0 1M", *(["read -P 2 60M 1M"] if name == "large" else []))


def what_qemu_tells_weir_tells():
    qemu_img("create", "-q", "-f", "qcow2", "s.qcow2", "1M")
    weir("snapshot", "-q", "-c", "weir's", "s.qcow2")
    qemu_img("snapshot", "-c", "ümlaut", "s.qcow2")
    theirs = json.loads(qemu_img("info", "--output=json", "s.qcow2"))["snapshots"]
    mine = json.loads(weir("info", "--json", "s.qcow2"))["snapshots"]
    for a, b in zip(theirs, mine):
        check("a snapshot's facts are QEMU's", all(b.get(k) == v for k, v in a.items()), "%s %s" % (a, b))


def refused(words, *args):
    before = open("s.qcow2", "rb").read()
    p = run(WEIR, "image", "snapshot", *args, "s.qcow2")
    check("%s is refused in one line" % (args,), p.returncode in (1, 2) and len(p.stderr.splitlines()) == 1, "%d %s" % (p.returncode, p.stderr))
    for w in words:
        check("%s says %r" % (args, w), w in p.stderr, p.stderr)
    check("%s changes nothing" % (args,), open("s.qcow2", "rb").read() == before)


def what_cannot_be_is_refused():
    qemu_img("create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "s.qcow2", "1M")
    qemu_io("s.qcow2", "write 0 64k")
    weir("snapshot", "-c", "one", "s.qcow2")
    refused(["already"], "-c", "one")
    refused(["no snapshot", "two"], "-a", "two")
    refused(["no snapshot", "-l"], "-d", "two")
    refused(["1 to 255"], "-c", "")
    refused(["1 to 255"], "-c", "x" * 256)
    refused(["only one of"], "-c", "x", "-d", "one")
    t = Tables("s.qcow2")
    t.set_refcount(t.l1, 0)
    refused(["damaged", "weir image check"], "-c", "x")
    t.set_refcount(t.l1, 1)
    t.put(72, 2)
    refused(["corrupt", "--repair=all"], "-d", "one")
    qemu_img("create", "-q", "-f", "qcow2", "-o", "data_file=d.raw", "s.qcow2", "1M")
    refused(["another file"], "-c", "x")
    qemu_img("create", "-q", "-f", "qcow2", "-o", "refcount_bits=1", "s.qcow2", "1M")
    qemu_io("s.qcow2", "write 0 64k")
    refused(["refcount_bits", "1 bits"], "-c", "x")
    with open("s.qcow2", "wb") as f:
        f.truncate(4096)
    refused(["no qcow2 image"], "-c", "x")


if __name__ == "__main__":
    need("qemu-img", "qemu-io")
    sys.exit(run_tests([random_snapshots, what_either_makes_the_other_applies_and_deletes, sizes_follow_the_snapshot, what_qemu_tells_weir_tells, what_cannot_be_is_refused], folders=True))
