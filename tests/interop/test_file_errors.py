#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""A device's errors, once each, through a FUSE file of qemu-storage-daemon: what they spoil stays spoiled, and only that.

usage: test_file_errors.py DISK_SHELL
"""
import json
import os
import subprocess
import sys
import tempfile
import time

from file_lib import *

EIO = -5
MODES = ("cache=none", "cache=none,aio=threads", "cache=none,aio=native", "cache=directsync", "cache=writeback",
         "cache=writeback,aio=threads", "cache=writethrough")


class Faulty:
    """A file that fails the first request of `iotype` ("flush" or "write") with EIO, and works before and after."""

    def __init__(self, folder, iotype):
        self.path = os.path.join(folder, "mount")
        backing = os.path.join(folder, "backing")
        for name in (self.path, backing):
            with open(name, "wb") as f:
                f.truncate(2 * MIB)
        rule = {"event": "none", "iotype": iotype, "errno": 5, "once": True, "immediately": True}
        node = {"driver": "raw", "node-name": "n", "file": {
            "driver": "blkdebug", "inject-error": [rule], "image": {"driver": "file", "filename": backing}}}
        export = {"type": "fuse", "id": "e", "node-name": "n", "mountpoint": self.path, "writable": True}
        self.p = subprocess.Popen(["qemu-storage-daemon", "--blockdev", json.dumps(node), "--export", json.dumps(export)],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        deadline = time.monotonic() + 30
        while not os.path.ismount(self.path):
            if self.p.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise OSError("qemu-storage-daemon: " + self.p.stderr.read())
            time.sleep(0.01)
        return self.path

    def __exit__(self, *_):
        self.p.terminate()
        self.p.wait(timeout=30)


def sticky(what, d):
    check(what + ": nor does any later flush or write succeed",
          [d.do("flush"), d.do("write 0 4096 2"), d.do("write 0 4096 2 fua"), d.do("zero 0 4096"), d.do("flush")] == [EIO] * 5)
    check(what + ": reads go on", d.do("read 0 512") != EIO)


def a_failed_flush(folder, mode):
    with Faulty(folder, "flush") as path, Disk("%s,%s" % (path, mode)) as d:
        what = mode + ", flush fails"
        stable = "directsync" in mode or "writethrough" in mode
        first = d.do("write 0 4096 1")
        if stable:
            check(what + ": the write that needed it fails", first == EIO, first)
        else:
            check(what + ": the write before it succeeds", first == [], first)
            check(what + ": the flush fails", d.do("flush") == EIO)
        sticky(what, d)


def a_failed_flush_of_a_stable_write(folder, mode):
    with Faulty(folder, "flush") as path, Disk("%s,%s" % (path, mode)) as d:
        what = mode + ", flush of a write with FUA fails"
        answer = d.do("write 0 4096 1 fua")
        check(what + ": the write fails", answer == EIO, answer)
        sticky(what, d)


def a_failed_flush_among_several(folder, mode):
    """The kernel tells an error of write-back once; all who waited for what it lost must hear of it."""
    with Faulty(folder, "flush") as path, Disk("%s,%s" % (path, mode)) as d:
        if d.do("write 0 4096 1") == []:
            answers = d.at_once(*["flush"] * 5)
            check(mode + ": of five flushes at once none succeeds", all(a[0] == str(EIO) for a in answers), answers)
            check(mode + ": nor one behind them", d.do("flush") == EIO)


def a_failed_write(folder, mode):
    with Faulty(folder, "write") as path, Disk("%s,%s" % (path, mode)) as d:
        what = mode + ", write fails"
        answer = d.do("write 0 4096 1")
        check(what + ": it says so", answer == EIO, answer)
        check(what + ": nothing that was promised is lost, and the disk goes on",
              [d.do("write 0 4096 2"), d.do("flush")] == [[], []])
        check(what + ": with the data of the second", d.do("read 0 4096") == ["all", "02"])


def main():
    need("qemu-storage-daemon")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        skip("/dev/fuse cannot be opened")
    for mode in MODES:
        for test in (a_failed_flush, a_failed_flush_of_a_stable_write, a_failed_flush_among_several, a_failed_write):
            with tempfile.TemporaryDirectory(prefix="test-file-errors-", dir=".") as folder:
                test(folder, mode)
    return status()


sys.exit(main())
