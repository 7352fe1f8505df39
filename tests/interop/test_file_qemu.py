#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""weir and QEMU share an image: its locks, its map, its bytes.

usage: test_file_qemu.py DISK_SHELL
"""
import json
import os
import subprocess
import sys
import tempfile

from file_lib import *


def output(*args):
    p = run(*args)
    return p.returncode, p.stdout, p.stderr


class qemu_io:
    """qemu-io with the image open until the block ends. A command's output shows that it is."""

    def __init__(self, image, *flags):
        self.p = subprocess.Popen(["qemu-io", "-f", "raw", *flags, image], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.p.stdin.write("length\n")
        self.p.stdin.flush()
        line = self.p.stdout.readline()
        assert "MiB" in line, line

    def __enter__(self):
        return self.p.pid

    def __exit__(self, *_):
        self.p.stdin.close()
        self.p.wait(timeout=30)
        self.p.stdout.close()


def qemu_may(image, *args):
    code, out, err = output("qemu-io", "-f", "raw", *args, image)
    return code == 0 and "Failed" not in err and "Failed" not in out


def qemu_may_read(image):
    return qemu_may(image, "-r", "-c", "read 0 512")


def qemu_may_write(image):
    return qemu_may(image, "-c", "write 0 512")


def test_qemu_respects_weir(image):
    with Disk(image):
        code, _, err = output("qemu-img", "convert", "-f", "raw", "-O", "raw", image, image + ".copy")
        check("qemu-img does not copy an image that weir writes", code != 0 and "lock" in err, err)
        code, _, err = output("qemu-img", "resize", "-f", "raw", image, "+1M")
        check("qemu-img does not resize an image that weir writes", code != 0 and "lock" in err, err)
        code, _, err = output("qemu-img", "info", "-U", "-f", "raw", image)
        check("qemu-img -U looks at it", code == 0, err)
        source = "driver=raw,file.driver=file,file.locking=off,file.filename=" + image
        code, _, err = output("qemu-img", "convert", "--image-opts", "-O", "raw", source, image + ".copy")
        check("qemu-img with file.locking=off copies it all the same", code == 0, err)
        check("QEMU does not write an image that weir writes", not qemu_may_write(image))
        check("QEMU does not read an image that weir writes", not qemu_may_read(image))
    with Disk(image, "read-only"):
        code, _, err = output("qemu-img", "info", "-f", "raw", image)
        check("qemu-img accepts an image that weir reads", code == 0, err)
        check("QEMU reads an image that weir reads", qemu_may_read(image))
        check("QEMU does not write an image that weir reads", not qemu_may_write(image))
    with Disk(image, "log"):
        check("QEMU does not read a log", not qemu_may_read(image))
        check("QEMU does not write a log", not qemu_may_write(image))
        code, _, err = output("qemu-img", "check", "-f", "raw", image)
        check("qemu-img does not check a log", code != 0 and "lock" in err, err)
    check("QEMU writes an image that weir has closed", qemu_may_write(image))


def test_weir_respects_qemu(image):
    with qemu_io(image) as pid:
        for mode in ("", "read-only", "log"):
            error = open_error(image, mode)
            check("weir (%s) refuses an image that QEMU writes, and names it" % mode, "qemu-io (process %d)" % pid in error, error)
        check("weir reads it unlocked", not open_error(image, "unlocked"))
        check("locking=off opens it", not open_error(image + ",locking=off"))
    with qemu_io(image, "-r") as pid:
        check("weir reads an image that QEMU reads", not open_error(image, "read-only"))
        error = open_error(image)
        check("weir does not write an image that QEMU reads", "process %d" % pid in error, error)
    check("weir writes an image that QEMU has closed", not open_error(image))


def qemu_map(image):
    _, out, _ = output("qemu-img", "map", "--output=json", "-f", "raw", image)
    return [(e["start"], e["length"], "data" if e["data"] else "zero") for e in json.loads(out)]


def weir_map(image, options=""):
    with Disk(image + options, "read-only") as d:
        return d.map()


def test_the_map_is_qemus(image):
    for size in (16 * MIB, 16 * MIB + 1536):
        with open(image, "wb") as f:
            f.truncate(size)
        check("an empty image is one hole", weir_map(image) == qemu_map(image) == [(0, size, "zero")])
        with Disk(image) as d:
            d.all("write 65536 131072 1", "write 1048576 4096 2", "write 3000000 5 3", "write %d 1000 4" % (size - 1000),
                  "write 8388608 4194304 5", "zero 9437184 65536", "zero 10485760 65536 unmap", "discard 11534336 1048576", "flush")
        ours, theirs = weir_map(image), qemu_map(image)
        check("the map of %d bytes is what qemu-img map says" % size, ours == theirs, "%s, not %s" % (ours, theirs))
        check("the same with threads and the page cache", weir_map(image, ",aio=threads,cache=writeback") == theirs)


def test_qemu_reads_what_weir_wrote(image):
    for option in ("cache=none", "cache=writeback", "aio=threads,cache=directsync", "aio=native", "cache=writethrough"):
        size = 4 * MIB + 700
        with open(image, "wb") as f:
            f.truncate(size)
        with Disk("%s,%s" % (image, option)) as d:
            d.all("write 0 100000 11", "write 99999 2 22", "write %d 700 33" % (size - 700), "write %d 1 44" % (size - 1), "flush")
        with open(image, "rb") as f:
            data = f.read()
        want = bytearray(size)
        want[0:100000] = b"\x11" * 100000
        want[99999:100001] = b"\x22" * 2
        want[size - 700:size] = b"\x33" * 699 + b"\x44"
        check("%s: the file has the bytes and the size" % option, data == bytes(want), "%d bytes" % len(data))
        code, out, _ = output("qemu-io", "-f", "raw", "-r", "-c", "read -P 0x11 0 99999", "-c", "read -P 0x22 99999 2", image)
        check("%s: QEMU reads the same" % option, code == 0 and "verification failed" not in out, out)


def main():
    need("qemu-io", "qemu-img")
    with tempfile.TemporaryDirectory(prefix="test-file-qemu-", dir=".") as folder:
        image = os.path.join(folder, "image.raw")
        with open(image, "wb") as f:
            f.truncate(8 * MIB)
        test_qemu_respects_weir(image)
        test_weir_respects_qemu(image)
        test_the_map_is_qemus(image)
        test_qemu_reads_what_weir_wrote(image)
    return status()


sys.exit(main())
