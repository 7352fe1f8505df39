#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""weir image convert onto a backing file, compressed or not, out of snapshots, and from and to NBD servers: QEMU reads the same.

usage: qcow2_convert.py WEIR
"""
from qcow2_lib import *  # noqa: F403
import shutil


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


def an_nbd_server_is_a_source_and_a_target():
    qemu_img("create", "-q", "-f", "qcow2", "s.qcow2", "3M")
    qemu_io("s.qcow2", "write -q -P 1 0 1M", "write -q -P 2 2M 300k")
    qemu_img("create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "inner.qcow2", "3M")
    shutil.copy("inner.qcow2", "box")
    for name, size in (("d.raw", 3 << 20), ("box", 6 << 20)):   # the box holds an image, with room for it
        with open(name, "ab") as f:
            f.truncate(size)
    p = subprocess.Popen([WEIR, "serve", "--nbd", "unix:sock", "--name", "s", "--name", "d", "--name", "box", "s.qcow2", "d.raw", "box"],
                         stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in p.stderr:
        if line.strip().endswith("ready"):
            break
    try:
        uri = "nbd+unix:///%s?socket=sock"
        weir("convert", "-q", "-O", "qcow2", uri % "s", "out.qcow2")
        weir("convert", "-q", "-c", "-O", "qcow2", uri % "s", "packed.qcow2")
        weir("convert", "-q", "-n", "out.qcow2", uri % "d")
        weir("convert", "-q", "-n", "-O", "qcow2", "packed.qcow2", uri % "box")
        weir("convert", "-q", "-f", "qcow2", uri % "box", "back.raw")
        q = run(WEIR, "image", "convert", "-O", "qcow2", "out.qcow2", uri % "d")
        check("a disk is not made an image of: one line", q.returncode == 1 and len(q.stderr.splitlines()) == 1 and "no qcow2 image" in q.stderr, q.stderr)
    finally:
        p.terminate()
        p.wait(30)
        p.stderr.close()
    for name, form in (("out.qcow2", "qcow2"), ("packed.qcow2", "qcow2"), ("d.raw", "raw"), ("back.raw", "raw"), ("box", "qcow2")):
        equal("s.qcow2", name, "-f", "qcow2", "-F", form)
    for name in ("out.qcow2", "packed.qcow2", "box"):
        clean("%s: consistent" % name, name)


if __name__ == "__main__":
    need("qemu-img", "qemu-io")
    sys.exit(run_tests([only_what_differs_from_the_backing_file_is_written, a_snapshot_is_copied, what_gets_smaller_is_compressed,
                        an_nbd_server_is_a_source_and_a_target], folders=True))
