#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Clones over one backing image read it once, hold it in memory once, and each has figures of its own.

usage: test_serve_clones.py WEIR
"""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile

from harness import *
from harness import require as check

WEIR = sys.argv[1]
CLONES = 3
SIZE = 4 * MIB
BLOCKS = SIZE // 4096


class Serve:
    def __init__(self, folder, disks, *args):
        self.dir = folder
        self.nbd, self.control = os.path.join(folder, "nbd"), os.path.join(folder, "control")
        self.p = subprocess.Popen([WEIR, "serve", "--nbd", "unix:" + self.nbd, "--control", self.control, *args, *disks],
                                  stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        line = self.p.stderr.readline()
        while line and "ready" not in line:
            line = self.p.stderr.readline()
        check(line, "the server starts")

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.p.terminate()
        rc = self.p.wait(20)
        err = self.p.stderr.read()
        self.p.stderr.close()
        check(kind or rc == 0, f"it ends well: {rc}: {err}")

    def ask(self, command, **args):
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(self.control)
            s.settimeout(30)
            s.sendall(json.dumps({"command": command, **args}).encode() + b"\n")
            return json.loads(s.makefile().readline())

    def volumes(self):
        return self.ask("stats")["result"]["cache"]["volumes"]

    def read(self, name):
        out = os.path.join(self.dir, "out")
        subprocess.run(["nbdcopy", "--connections=1", "--requests=1", "--request-size=65536", "--no-extents", f"nbd+unix:///{name}?socket={self.nbd}", out], check=True)
        with open(out, "rb") as f:
            return f.read()

    def write(self, name, at, data):
        subprocess.run(["qemu-io", "-f", "raw", "-c", f"write -P {data} {at} 64k", f"nbd+unix:///{name}?socket={self.nbd}"], check=True, stdout=subprocess.DEVNULL)


def make(folder, base_format, extra=()):
    """A base with contents, and clones of it. What the base holds."""
    content = os.urandom(SIZE - 64 * 1024) + bytes(64 * 1024)
    raw = os.path.join(folder, "base.raw")
    with open(raw, "wb") as f:
        f.write(content)
    if base_format == "qcow2":
        subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", *extra, raw, os.path.join(folder, "base.qcow2")], check=True)
    disks = []
    for i in range(CLONES):
        disks.append(os.path.join(folder, f"c{i}.qcow2"))
        subprocess.run([WEIR, "image", "create", "-f", "qcow2", "-b", "base." + base_format, "-F", base_format, disks[-1]], check=True, stdout=subprocess.DEVNULL)
    return content, disks


def base_of(v):
    names = [n for n in v if v[n]["shared"]]
    check(len(names) == 1, f"one base: {list(v)}")
    return v[names[0]]


def clones(base_format, extra=(), more=True):
    with tempfile.TemporaryDirectory(prefix="weir-clones-") as folder:
        content, disks = make(folder, base_format, extra)
        with Serve(folder, disks) as s:
            for i in range(CLONES):
                check(s.read(f"c{i}.qcow2") == content, "each clone reads what the base holds")
            v = s.volumes()
            base = base_of(v)
            check(base["data"]["misses"] + base["read_ahead"]["blocks"] == BLOCKS, f"each block of the base is read once: {base}")
            check(base["data_blocks"] == BLOCKS and base["bytes"] == SIZE - 64 * 1024, f"and held once: {base}")
            for i in range(CLONES):
                c = v[f"c{i}.qcow2"]
                d = c["data"]
                check(c["bytes"] == 0 and c["data_blocks"] == 0, f"the clones hold nothing of it: {c}")
                check(d["reads"] == BLOCKS == d["hits"] + d["joined"] + d["misses"], f"each has figures of its own: {d}")
                check(not i or d["hits"] == 0 and d["shared"] == d["misses"] > BLOCKS // 2, f"what was in memory is said: {d}")
            if not more:
                return
            # A clone's own blocks are its own.
            s.write("c1.qcow2", 65536, 7)
            own = bytearray(content)
            own[65536:131072] = bytes([7]) * 65536
            for _ in range(2):
                check(s.read("c1.qcow2") == own and s.read("c0.qcow2") == content and s.read("c2.qcow2") == content, "a write is seen by its clone alone")
            v = s.volumes()
            check(v["c1.qcow2"]["bytes"] == 65536 and v["c0.qcow2"]["bytes"] == 0, "and cached for it alone")
            # Who is not to be cached is not, through the base either.
            check(s.ask("cache-set", volume="c0.qcow2", primarycache="none")["ok"], "none")
            before = base_of(s.volumes())["data"]
            check(s.read("c0.qcow2") == content, "uncached")
            check(base_of(s.volumes())["data"] == before, "primarycache=none keeps out of the base's cache, too")
            p = subprocess.run([WEIR, "advise", s.control], capture_output=True, text=True, timeout=30, check=True)
            check(p.stdout.count("\n") >= CLONES and "base" not in p.stdout, p.stdout)


def ten_reads_of_a_raw_base_are_one():
    clones("raw")


def and_of_a_compressed_qcow2_base():
    clones("qcow2", ("-c",), more=False)


def one_clone_alone_is_cached_above_its_format():
    with tempfile.TemporaryDirectory(prefix="weir-clones-") as folder:
        content, disks = make(folder, "raw")
        with Serve(folder, disks[:1]) as s:
            check(s.read("c0.qcow2") == content and s.read("c0.qcow2") == content, "it reads what the base holds")
            v = s.volumes()
            check(v["c0.qcow2"]["data"]["hits"] >= BLOCKS and base_of(v)["data"]["reads"] == 0, f"from its own memory: {v}")


def other_options_make_another_disk():
    with tempfile.TemporaryDirectory(prefix="weir-clones-") as folder:
        content, disks = make(folder, "raw")
        with Serve(folder, [disks[0], disks[1] + ",cache=writeback"]) as s:
            check(s.read("c0.qcow2") == content and s.read("c1.qcow2") == content, "both read what the base holds")
            check(len([n for n in s.volumes() if n.startswith("base ")]) in (1, 2), "by their own descriptors")
            check(s.volumes()["c1.qcow2"]["data"]["shared"] == 0, "nothing is shared")


need("nbdcopy", "qemu-img", "qemu-io")
sys.exit(run_tests([ten_reads_of_a_raw_base_are_one, and_of_a_compressed_qcow2_base, one_clone_alone_is_cached_above_its_format,
                    other_options_make_another_disk]))
