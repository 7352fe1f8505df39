# SPDX-License-Identifier: MIT
"""What the qcow2 tests share: QEMU's tools, weir's, and the tables of an image."""
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile

from harness import *

WEIR = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else "weir"
COPIED, COMPRESSED = 1 << 63, 1 << 62
OFFSET = 0x00fffffffffffe00


def must(*args):
    p = run(*args)
    if p.returncode:
        raise AssertionError("%s: exit %d: %s%s" % (" ".join(map(str, args)), p.returncode, p.stdout[-1500:], p.stderr[-1500:]))
    return p.stdout


def qemu_img(*args):
    return must("qemu-img", *args)


def qemu_io(image, *commands):
    out = must("qemu-io", "-f", "qcow2", *[x for c in commands for x in ("-c", c)], image)
    if "failed" in out or "error" in out.lower():
        raise AssertionError("qemu-io %s: %s" % (commands, out))
    return out


def weir(*args):
    return must(WEIR, "image", *args)


def qemu_check(image, *options):
    """(corruptions, leaks, check errors) of qemu-img check."""
    p = run("qemu-img", "check", "--output=json", *options, image)
    at = p.stdout.find("{")
    if at < 0:
        return None
    c = json.loads(p.stdout[at:])
    return c.get("corruptions", 0), c.get("leaks", 0), c["check-errors"]


def clean(what, image):
    """QEMU finds nothing."""
    found = qemu_check(image)
    return check(what, found == (0, 0, 0), found)


def weir_check(image, *options):
    """(exit status, the JSON) of weir image check."""
    p = run(WEIR, "image", "check", "--json", *options, image)
    return p.returncode, json.loads(p.stdout) if p.stdout.startswith("{") else p.stderr


def equal(a, b, *options):
    p = run("qemu-img", "compare", *options, a, b)
    return check("%s and %s are equal" % (a, b), p.returncode == 0, p.stdout + p.stderr)


class Tables:
    """The tables of an image, for a test that damages them."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as f:
            self.head = f.read(112)
        (self.version, _, _, self.cluster_bits, self.size, _, self.l1_size, self.l1, self.rt, self.rt_clusters, self.snapshots,
         self.snapshot_table) = struct.unpack(">IQIIQIIQQIIQ", self.head[4:72])
        self.cluster = 1 << self.cluster_bits
        self.incompat = struct.unpack(">Q", self.head[72:80])[0] if self.version > 2 else 0
        self.order = struct.unpack(">I", self.head[96:100])[0] if self.version > 2 else 4
        self.ext = bool(self.incompat & 16)
        self.entry = 16 if self.ext else 8

    def get(self, off, n=8):
        with open(self.path, "rb") as f:
            f.seek(off)
            return int.from_bytes(f.read(n), "big")

    def put(self, off, value, n=8):
        with open(self.path, "r+b") as f:
            f.seek(off)
            f.write(value.to_bytes(n, "big"))

    def l2(self, guest):
        """The offset of the L1 entry, and of the L2 table."""
        at = self.l1 + guest // (self.cluster * self.cluster // self.entry) * 8
        return at, self.get(at) & OFFSET

    def l2_entry(self, guest):
        """The offset of the L2 entry, and the entry."""
        _, table = self.l2(guest)
        at = table + guest // self.cluster % (self.cluster // self.entry) * self.entry
        return at, self.get(at)

    def refcount_at(self, host):
        """The offset of a refcount of 16 bits."""
        assert self.order == 4
        index = host // self.cluster
        block = self.get(self.rt + index // (self.cluster // 2) * 8)
        return block + index % (self.cluster // 2) * 2

    def refcount(self, host):
        return self.get(self.refcount_at(host), 2)

    def set_refcount(self, host, value):
        self.put(self.refcount_at(host), value, 2)
