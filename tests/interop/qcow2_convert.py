#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""weir image convert onto a backing file, compressed or not, and out of snapshots: QEMU reads the same.

usage: qcow2_convert.py WEIR
"""
from qcow2_lib import *  # noqa: F403


def raw(path, size, rng, base=None):
    """A raw file: parts of `base`, zeroes, and data of its own."""
    with open(path, "wb") as f:
        f.truncate(size)
        for at in range(0, size, 16384):
            n = min(16384, size - at)
            old = base[at:at + n] if base else b""
            new = rng.choice([old, old, b"", rng.randbytes(64) * 256, old[:5000] + b"x" * 3000 + old[8000:]])
            f.seek(at)
            f.write(new[:n])
    with open(path, "rb") as f:
        return f.read()


def only_what_differs_from_the_backing_file_is_written():
    seed = int(os.environ.get("WEIR_SEED", 1))
    for n, (compress, options) in enumerate((c, o) for c in ([], ["-c"]) for o in (
            "cluster_size=64k", "compat=v2", "cluster_size=128k,extended_l2=on", "cluster_size=4k,compression_type=zstd")):
        print("WEIR_SEED=%d" % (seed + n))
        rng = random.Random(seed + n)
        sizes = [rng.choice([2 << 20, (1 << 20) + 512, 300 * 1024]) for _ in range(2)]
        base = raw("base.raw", sizes[0], rng)
        raw("src.raw", sizes[1], rng, base)
        kind = rng.choice(["raw", "qcow2"])
        name = "base.raw"
        if kind == "qcow2":
            name = "base.qcow2"
            qemu_img("convert", "-f", "raw", "-O", "qcow2", "base.raw", name)
        out = json.loads(weir("convert", "--json", "--force", "-f", "raw", *compress, "-o", "%s,backing_file=%s,backing_fmt=%s" % (options, name, kind),
                              "src.raw", "out.qcow2"))
        equal("src.raw", "out.qcow2", "-f", "raw", "-F", "qcow2")
        clean("%s %s: consistent" % (compress, options), "out.qcow2")
        info = json.loads(qemu_img("info", "--output=json", "out.qcow2"))
        check("it names the backing file", info["backing-filename"] == name, info)
        if sizes[0] >= sizes[1]:
            check("what the backing file has is not written", out["backing-bytes"] > 0, out)
        # An image that is its backing file costs tables only.
        weir("convert", "-q", "--force", "-f", "raw", *compress, "-o", "%s,backing_file=%s,backing_fmt=%s" % (options, name, kind), "base.raw", "same.qcow2")
        used = json.loads(qemu_img("map", "--output=json", "same.qcow2"))
        check("nothing is written where all is equal", all(x["depth"] == 1 or not x["data"] for x in used), used)


def a_snapshot_is_copied():
    for options in ("cluster_size=64k", "cluster_size=16k,extended_l2=on", "compat=v2"):
        qemu_img("create", "-q", "-f", "qcow2", "-o", options, "s.qcow2", "3M")
        qemu_io("s.qcow2", "write -q -P 1 0 1M")
        weir("snapshot", "-q", "-c", "one", "s.qcow2")
        qemu_io("s.qcow2", "write -q -P 2 512k 1M", "discard -q 0 64k")
        qemu_img("snapshot", "-c", "two", "s.qcow2")
        qemu_io("s.qcow2", "write -q -P 3 2M 512k")
        weir("resize", "-q", "s.qcow2", "4M") if "v2" not in options else None
        for which, name in (("one", "one"), ("2", "two")):
            qemu_img("convert", "-f", "qcow2", "-O", "raw", "-l", "snapshot.name=" + name, "s.qcow2", "qemu.raw")
            weir("convert", "-q", "--force", "-l", which, "s.qcow2", "weir.raw")
            equal("qemu.raw", "weir.raw", "-f", "raw", "-F", "raw")
            weir("convert", "-q", "--force", "-c", "-l", which, "s.qcow2", "weir.qcow2")
            equal("qemu.raw", "weir.qcow2", "-f", "raw", "-F", "qcow2")
        clean("the image is as it was", "s.qcow2")
    p = run(WEIR, "image", "convert", "-l", "none", "s.qcow2", "x.raw")
    check("a snapshot that is not there: one line", p.returncode == 1 and "no snapshot" in p.stderr and len(p.stderr.splitlines()) == 1, p.stderr)
    p = run(WEIR, "image", "convert", "-f", "raw", "-l", "one", "s.qcow2", "x.raw")
    check("a raw source has none", p.returncode == 1 and "raw" in p.stderr, p.stderr)
    p = run(WEIR, "serve", "--nbd", "unix:sock", "s.qcow2,snapshot=one")
    check("a snapshot is not served writable", p.returncode == 1 and "read-only" in p.stderr, p.stderr)
    check("nothing is left of a copy that failed", not [f for f in os.listdir(".") if f.startswith("x.raw")], os.listdir("."))


def what_gets_smaller_is_compressed():
    rng = random.Random(1)
    noise = rng.randbytes(65536)
    parts = [noise, bytes(range(256)) * 256, noise[:4000] * 17, b"text, " * 12000, noise[:32768] + bytes(32768), bytes(b & 63 for b in noise)]
    with open("s.raw", "wb") as f:
        f.write(b"".join(p[:65536] for p in parts))
    weir("convert", "-q", "-c", "s.raw", "s.qcow2")
    equal("s.raw", "s.qcow2", "-f", "raw", "-F", "qcow2")
    c = weir_check("s.qcow2")[1]
    check("all but the noise", c["compressed-clusters"] == len(parts) - 1, c)


if __name__ == "__main__":
    need("qemu-img", "qemu-io")
    sys.exit(run_tests([only_what_differs_from_the_backing_file_is_written, a_snapshot_is_copied, what_gets_smaller_is_compressed], folders=True))
