#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""weir and QEMU share an image: its locks, its map, its bytes.

usage: test_file_qemu.py DISK_TOOL
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

tool = os.path.abspath(sys.argv[1])
MIB = 1 << 20
failures = 0


def check(what, cond, detail=""):
    global failures
    print("%s: %s" % ("ok" if cond else "FAILED", what) + ("" if cond else ": %s" % detail), flush=True)
    failures += not cond


def run(*args):
    p = subprocess.run(args, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    return p.returncode, p.stdout, p.stderr


class Holder:
    """A program that has the image open until the block ends."""

    def __init__(self, *args, ready):
        self.p = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = ready

    def __enter__(self):
        line = self.p.stdout.readline()
        assert self.ready in line, line
        return self.p.pid

    def __exit__(self, *_):
        self.p.stdin.close()
        self.p.wait(timeout=30)
        self.p.stdout.close()


def weir(mode, image):
    return Holder(tool, mode, image, "hold", ready="ready")


class qemu_io(Holder):
    """qemu-io says nothing by itself: a command's output shows that the image is open."""

    def __init__(self, image, *flags):
        super().__init__("qemu-io", "-f", "raw", *flags, image, ready="MiB")

    def __enter__(self):
        self.p.stdin.write("length\n")
        self.p.stdin.flush()
        return super().__enter__()


def qemu_may(image, *args):
    code, out, err = run("qemu-io", "-f", "raw", *args, image)
    return code == 0 and "Failed" not in err and "Failed" not in out


def qemu_may_read(image):
    return qemu_may(image, "-r", "-c", "read 0 512")


def qemu_may_write(image):
    return qemu_may(image, "-c", "write 0 512")


def test_qemu_respects_weir(image):
    with weir("w", image):
        code, _, err = run("qemu-img", "convert", "-f", "raw", "-O", "raw", image, image + ".copy")
        check("qemu-img does not copy an image that weir writes", code != 0 and "lock" in err, err)
        code, _, err = run("qemu-img", "resize", "-f", "raw", image, "+1M")
        check("qemu-img does not resize an image that weir writes", code != 0 and "lock" in err, err)
        code, _, err = run("qemu-img", "info", "-U", "-f", "raw", image)
        check("qemu-img -U looks at it", code == 0, err)
        source = "driver=raw,file.driver=file,file.locking=off,file.filename=" + image
        code, _, err = run("qemu-img", "convert", "--image-opts", "-O", "raw", source, image + ".copy")
        check("qemu-img with file.locking=off copies it all the same", code == 0, err)
        check("QEMU does not write an image that weir writes", not qemu_may_write(image))
        check("QEMU does not read an image that weir writes", not qemu_may_read(image))
    with weir("r", image):
        code, _, err = run("qemu-img", "info", "-f", "raw", image)
        check("qemu-img accepts an image that weir reads", code == 0, err)
        check("QEMU reads an image that weir reads", qemu_may_read(image))
        check("QEMU does not write an image that weir reads", not qemu_may_write(image))
    with weir("l", image):
        check("QEMU does not read a log", not qemu_may_read(image))
        check("QEMU does not write a log", not qemu_may_write(image))
        code, _, err = run("qemu-img", "check", "-f", "raw", image)
        check("qemu-img does not check a log", code != 0 and "lock" in err, err)
    check("QEMU writes an image that weir has closed", qemu_may_write(image))


def test_weir_respects_qemu(image):
    with qemu_io(image) as pid:
        for mode in "wrl":
            code, _, err = run(tool, mode, image)
            check("weir (%s) refuses an image that QEMU writes, and names it" % mode,
                  code == 1 and "qemu-io (process %d)" % pid in err and err.count("\n") == 1, err)
        code, _, err = run(tool, "u", image)
        check("weir reads it unlocked", code == 0, err)
        code, _, err = run(tool, "w", image + ",locking=off")
        check("locking=off opens it", code == 0, err)
    with qemu_io(image, "-r") as pid:
        code, _, err = run(tool, "r", image)
        check("weir reads an image that QEMU reads", code == 0, err)
        code, _, err = run(tool, "w", image)
        check("weir does not write an image that QEMU reads", code == 1 and "process %d" % pid in err, err)
    code, _, err = run(tool, "w", image)
    check("weir writes an image that QEMU has closed", code == 0, err)


def qemu_map(image):
    _, out, _ = run("qemu-img", "map", "--output=json", "-f", "raw", image)
    return [(e["start"], e["length"], "data" if e["data"] else "zero") for e in json.loads(out)]


def weir_map(image, *options):
    _, out, _ = run(tool, "r", ",".join([image, *options]), "map")
    rows = []
    for line in out.splitlines():
        off, length, kind = line.split()
        if rows and rows[-1][2] == kind:
            rows[-1] = (rows[-1][0], rows[-1][1] + int(length), kind)
        else:
            rows.append((int(off), int(length), kind))
    return rows


def test_the_map_is_qemus(image):
    for size in (16 * MIB, 16 * MIB + 1536):
        with open(image, "wb") as f:
            f.truncate(size)
        check("an empty image is one hole", weir_map(image) == qemu_map(image) == [(0, size, "zero")])
        code, out, err = run(tool, "w", image, "w:65536:131072:1", "w:1048576:4096:2", "w:3000000:5:3",
                             "w:%d:1000:4" % (size - 1000), "w:8388608:4194304:5", "z:9437184:65536", "z:10485760:65536:u",
                             "d:11534336:1048576", "f")
        check("the commands succeed", code == 0, out + err)
        ours, theirs = weir_map(image), qemu_map(image)
        check("the map of %d bytes is what qemu-img map says" % size, ours == theirs, "%s, not %s" % (ours, theirs))
        check("the same with threads and the page cache", weir_map(image, "aio=threads", "cache=writeback") == theirs)


def test_qemu_reads_what_weir_wrote(image):
    for option in ("cache=none", "cache=writeback", "aio=threads,cache=directsync", "aio=native", "cache=writethrough"):
        size = 4 * MIB + 700
        with open(image, "wb") as f:
            f.truncate(size)
        code, out, err = run(tool, "w", "%s,%s" % (image, option), "w:0:100000:0x11", "w:99999:2:0x22",
                             "w:%d:700:0x33" % (size - 700), "w:%d:1:0x44" % (size - 1), "f")
        check("%s: the writes succeed" % option, code == 0, out + err)
        with open(image, "rb") as f:
            data = f.read()
        want = bytearray(size)
        want[0:100000] = b"\x11" * 100000
        want[99999:100001] = b"\x22" * 2
        want[size - 700:size] = b"\x33" * 699 + b"\x44"
        check("%s: the file has the bytes and the size" % option, data == bytes(want), "%d bytes" % len(data))
        code, out, _ = run("qemu-io", "-f", "raw", "-r", "-c", "read -P 0x11 0 99999", "-c", "read -P 0x22 99999 2", image)
        check("%s: QEMU reads the same" % option, code == 0 and "verification failed" not in out, out)


def main():
    missing = [p for p in ("qemu-io", "qemu-img") if not shutil.which(p)]
    if missing:
        print("skipped: %s is not installed" % missing[0])
        return 77
    with tempfile.TemporaryDirectory(prefix="test-file-qemu-", dir=".") as folder:
        image = os.path.join(folder, "image.raw")
        with open(image, "wb") as f:
            f.truncate(8 * MIB)
        test_qemu_respects_weir(image)
        test_weir_respects_qemu(image)
        test_the_map_is_qemus(image)
        test_qemu_reads_what_weir_wrote(image)
    return 1 if failures else 0


sys.exit(main())
