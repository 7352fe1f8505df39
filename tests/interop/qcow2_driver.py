#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Images that weir serves are QEMU's images: the same requests to an image, by QEMU and by weir in turns, and to a raw file leave the same contents, and
qemu-img check finds nothing. And what weir refuses to open.

usage: qcow2_driver.py WEIR
"""
import filecmp
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

from harness import *

WEIR = os.path.abspath(sys.argv[1])
SEED = int(os.environ.get("WEIR_SEED", "20260101"))


def ok(*args, stdin=None):
    p = run(*args, **({"input": stdin} if stdin else {}))
    check(" ".join(args), p.returncode == 0, p.stdout + p.stderr)
    return p.stdout


class Serve:
    """weir serve on DISK, for as long as it lasts."""

    def __init__(self, disk, *options):
        if os.path.exists("sock"):
            os.unlink("sock")
        self.process = subprocess.Popen([WEIR, "serve", *options, "--name", "v", "--nbd", "unix:sock", disk], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.uri = "nbd+unix:///v?socket=" + os.path.abspath("sock")
        self.image = disk.split(",")[0]
        end = time.monotonic() + 60
        # Its file is there a little before it can be connected to.
        with socket.socket(socket.AF_UNIX) as s:
            while s.connect_ex("sock") and self.process.poll() is None:
                require(time.monotonic() < end, "the server starts")
                time.sleep(0.005)

    def end(self, sig=signal.SIGTERM):
        self.process.send_signal(sig)
        self.said = self.process.communicate(timeout=60)[1]
        check("weir ends well", self.process.returncode in (0, -sig) or "corrupt" in self.said, self.said)
        if sig == signal.SIGKILL:
            wait_unlocked(self.image)


def requests(rng, size, n):
    """Random requests for qemu-io."""
    out = []
    for _ in range(n):
        unit = rng.choice([512, 4096, 65536])
        off = rng.randrange(size // unit) * unit
        length = min(rng.choice([1, 1, 3, 16]) * unit, size - off)
        out.append(rng.choice(["write -P %d" % rng.randrange(1, 256), "write -P %d" % rng.randrange(1, 256), "write -z", "write -z -u"])
                   + " %d %d" % (off, length))
        if rng.random() < 0.1:
            out.append("flush")
    return "\n".join(out) + "\nflush\n"


def write_raw(text):
    """What these requests make of the file "raw"."""
    with open("raw", "r+b") as f:
        for words in map(str.split, text.splitlines()):
            if words[0] == "write":
                f.seek(int(words[-2]))
                f.write(bytes([int(words[2]) if words[1] == "-P" else 0]) * int(words[-1]))


def by_turns(what, image, size, rng, rounds=1):
    """weir and QEMU write to the image in turns, and write_raw() the same to raw."""
    for i in range(rounds):
        text = requests(rng, size, 30)
        before = failures()
        # Flushes cost most of the time, and no power is cut here.
        s = Serve(image + ",discard=unmap" + rng.choice(["", ",cache=unsafe", ",cache=unsafe", ",cache=unsafe"]))
        ok("qemu-img", "compare", "-f", "raw", "-F", "raw", s.uri, "raw")
        ok("qemu-io", "-f", "raw", s.uri, stdin=text)
        write_raw(text)
        ok("qemu-img", "compare", "-f", "raw", "-F", "raw", s.uri, "raw")
        s.end()
        p = run("qemu-img", "check", image)
        check("%s: round %d: clean" % (what, i), p.returncode == 0, p.stdout + p.stderr)
        ok("qemu-img", "compare", "-f", "qcow2", "-F", "raw", image, "raw")
        if failures() > before:
            print("  (%s, round %d, after:\n%s)" % (what, i, text))
        text = requests(rng, size, 20)
        ok("qemu-io", "-t", "unsafe", "-f", "qcow2", image, stdin=text)
        write_raw(text)


def size_of(kind):
    """Small, and never less than three clusters."""
    return (6 if "2M" in kind else 3) * MIB


def new_raw(size):
    with open("raw", "wb") as f:
        f.truncate(size)


KINDS = ["", "cluster_size=512", "cluster_size=4k,refcount_bits=1", "cluster_size=2M", "extended_l2=on", "extended_l2=on,cluster_size=2M", "compat=0.10",
         "refcount_bits=64,cluster_size=16k", "lazy_refcounts=on", "preallocation=metadata", "preallocation=metadata,extended_l2=on"]


def plain_images_of_every_kind(rng):
    for kind in KINDS:
        ok("qemu-img", "create", "-q", "-f", "qcow2", *(["-o", kind] if kind else []), "a.qcow2", str(size_of(kind)))
        new_raw(size_of(kind))
        by_turns(kind, "a.qcow2", size_of(kind), rng)


def overlays_over_shorter_and_longer_files(rng):
    for kind in ["", "cluster_size=4k", "extended_l2=on", "compat=0.10", "cluster_size=2M"]:
        size = size_of(kind)
        for base in rng.sample((size // 2 + 1536, size + 2 * MIB), 1):
            with open("base,1.raw", "wb") as f:
                f.write(rng.randbytes(MIB // 2) + bytes(MIB // 2) + rng.randbytes(MIB // 2))
                f.truncate(base)
            ok("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base,1.raw", "mid.qcow2", str(size - MIB))
            ok("qemu-io", "-t", "unsafe", "-f", "qcow2", "mid.qcow2", stdin=requests(rng, size - MIB, 20))
            if rng.random() < 0.5:
                ok("qemu-img", "convert", "-c", "-O", "qcow2", "-o", "compression_type=" + rng.choice(["zlib", "zstd"]), "mid.qcow2", "c.qcow2")
                os.rename("c.qcow2", "mid.qcow2")
            ok("qemu-img", "create", "-q", "-f", "qcow2", *(["-o", kind] if kind else []), "-F", "qcow2", "-b", "mid.qcow2", "a.qcow2", str(size))
            ok("qemu-img", "convert", "-O", "raw", "a.qcow2", "raw")
            by_turns("overlay " + kind, "a.qcow2", size, rng, 1)


def compressed_clusters_are_read_and_replaced(rng):
    with open("text.raw", "wb") as f:
        f.write(b"".join(b"line %d of a file that compresses\n" % i for i in range(25000)) + rng.randbytes(MIB // 2))
        f.truncate(3 * MIB)
    for kind in ["compression_type=zlib", "compression_type=zstd", "compression_type=zlib,cluster_size=512", "compression_type=zstd,cluster_size=2M",
                 "compression_type=zlib,extended_l2=on"]:
        ok("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", "-o", kind, "text.raw", "a.qcow2")
        shutil.copy("text.raw", "raw")
        by_turns(kind, "a.qcow2", 3 * MIB, rng, 1)


def snapshots_keep_their_contents(rng):
    for kind in rng.sample(["", "extended_l2=on", "cluster_size=4k", "compat=0.10"], 2):
        ok("qemu-img", "create", "-q", "-f", "qcow2", *(["-o", kind] if kind else []), "a.qcow2", str(3 * MIB))
        ok("qemu-io", "-t", "unsafe", "-f", "qcow2", "a.qcow2", stdin=requests(rng, 3 * MIB, 20))
        ok("qemu-img", "snapshot", "-c", "one", "a.qcow2")
        ok("qemu-img", "convert", "-O", "raw", "a.qcow2", "raw")
        shutil.copy("raw", "one")
        by_turns("snapshot " + kind, "a.qcow2", 3 * MIB, rng, 1)
        ok("qemu-img", "snapshot", "-c", "two", "a.qcow2")
        ok("qemu-img", "convert", "-O", "raw", "a.qcow2", "two")
        shutil.copy("two", "raw")
        by_turns("snapshots " + kind, "a.qcow2", 3 * MIB, rng, 1)
        for name in ("one", "two"):
            ok("qemu-img", "convert", "-O", "raw", "-l", "snapshot.name=" + name, "a.qcow2", "got")
            check("the contents of " + name, filecmp.cmp("got", name, shallow=False))
        ok("qemu-img", "snapshot", "-a", "one", "a.qcow2")
        ok("qemu-img", "snapshot", "-d", "two", "a.qcow2")
        ok("qemu-img", "check", "-q", "a.qcow2")


def data_files(rng):
    for kind in ["data_file=data", "data_file=data,data_file_raw=on", "data_file=data,extended_l2=on"]:
        if os.path.exists("data"):
            os.unlink("data")
        ok("qemu-img", "create", "-q", "-f", "qcow2", "-o", kind, "a.qcow2", str(size_of(kind)))
        new_raw(size_of(kind))
        by_turns(kind, "a.qcow2", size_of(kind), rng)
        if "raw" in kind:
            ok("qemu-img", "compare", "-f", "raw", "-F", "raw", "data", "raw")
    # One that ends within a cluster: zeroes up to there, and a little more of it.
    os.unlink("data")
    base = rng.randbytes(200 * 1024)
    with open("base.raw", "wb") as f:
        f.write(base)
    ok("qemu-img", "create", "-q", "-f", "qcow2", "-o", "data_file=data,cluster_size=16k", "-b", "base.raw", "-F", "raw", "a.qcow2", "150k")
    s = Serve("a.qcow2,discard=unmap")
    p = run("qemu-io", "-f", "raw", "-c", "write -z 149k 1k", "-c", "write -P 1 146k 1k", "-c", "write -z -u 148k 2k", "-c", "discard 149k 1k", "-c", "flush", s.uri)
    check("zeroes up to the end of a data file", p.returncode == 0 and "rror" not in p.stdout + p.stderr, p.stdout + p.stderr)
    s.end()
    ok(WEIR, "image", "resize", "-q", "a.qcow2", "155k")
    with open("raw", "wb") as f:
        f.write(base[:146 * 1024] + b"\1" * 1024 + base[147 * 1024:148 * 1024] + bytes(7 * 1024))
    ok("qemu-img", "check", "-q", "a.qcow2")
    ok("qemu-img", "compare", "-f", "qcow2", "-F", "raw", "a.qcow2", "raw")


def a_kill_leaves_leaks_at_most(rng):
    leaked = 0
    for kind in ["", "extended_l2=on", "cluster_size=4k"]:
        ok("qemu-img", "create", "-q", "-f", "qcow2", *(["-o", kind] if kind else []), "a.qcow2", "3M")
        s = Serve("a.qcow2")
        ok("qemu-io", "-f", "raw", s.uri, stdin=requests(rng, 3 * MIB, 60))
        ok("qemu-img", "convert", "-f", "raw", "-O", "raw", s.uri, "raw")
        s.end(signal.SIGKILL)
        p = run("qemu-img", "check", "a.qcow2")
        check("a kill leaves no corruption", p.returncode in (0, 3), p.stdout + p.stderr)
        ok("qemu-img", "compare", "-f", "qcow2", "-F", "raw", "a.qcow2", "raw")
        if kind == "extended_l2=on":
            ok("qemu-img", "check", "-q", "-r", "leaks", "a.qcow2")
            continue
        leaks = p.returncode == 3
        leaked += leaks
        before = os.stat("a.qcow2")
        ok(WEIR, "image", "check", "-q", "--repair=leaks", "a.qcow2")
        p = run("qemu-img", "check", "--output=json", "a.qcow2")
        check("which weir gives back", p.returncode == 0, p.stdout + p.stderr)
        now = os.stat("a.qcow2")
        check("with its space", not leaks or
              (now.st_blocks < before.st_blocks and now.st_size == json.loads(p.stdout)["image-end-offset"] < before.st_size),
              "%d to %d blocks, %d to %d bytes" % (before.st_blocks, now.st_blocks, before.st_size, now.st_size))
        ok("qemu-img", "compare", "-f", "qcow2", "-F", "raw", "a.qcow2", "raw")
    check("what was reserved was leaked", leaked)


def with_a_log_in_between(rng):
    ok("qemu-img", "create", "-q", "-f", "qcow2", "-o", "extended_l2=on", "a.qcow2", "3M")
    new_raw(3 * MIB)
    ok(WEIR, "log", "create", "--size", "32M", "log")
    for i in range(3):
        text = requests(rng, 3 * MIB, 40)
        s = Serve("a.qcow2", "--log", "log", *(["--drain"] if i == 2 else []))
        ok("qemu-img", "compare", "-f", "raw", "-F", "raw", s.uri, "raw")
        ok("qemu-io", "-f", "raw", s.uri, stdin=text)
        write_raw(text)
        s.end(signal.SIGKILL if i == 0 else signal.SIGTERM)
    ok("qemu-img", "compare", "-f", "qcow2", "-F", "raw", "a.qcow2", "raw")
    p = run("qemu-img", "check", "a.qcow2")
    check("after the log was emptied: clean, leaks aside", p.returncode in (0, 3), p.stdout + p.stderr)


# --- What is refused ---

def refused(what, words, disk, *options):
    s = Serve(disk, *options)
    try:
        said = s.process.communicate(timeout=60)[1]
    except subprocess.TimeoutExpired:
        s.process.kill()
        said = "it was served; " + s.process.communicate()[1]
    check(what, s.process.returncode not in (0, -9) and all(w in said for w in words), said)


def served(what, disk, *options):
    s = Serve(disk, *options)
    p = run("qemu-io", "-r", "-f", "raw", "-c", "read 0 64k", s.uri)
    check(what, p.returncode == 0, p.stderr)
    s.end()


def poke(name, off, data):
    with open(name, "r+b") as f:
        f.seek(off)
        f.write(data)


def backing(name, fmt="raw", size=MIB):
    """An image that names this backing file, though it may not exist."""
    ok("qemu-img", "create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", fmt, "a.qcow2", str(size))


def names_are_followed_only_where_they_may_lead(rng):
    os.makedirs("dir/sub", exist_ok=True)
    ok("qemu-img", "create", "-q", "-f", "raw", "out.raw", "1M")
    shutil.copy("out.raw", "dir/sub/in.raw")
    for name, good in (("sub/in.raw", True), ("../out.raw", False), ("sub/../../out.raw", False), (os.path.abspath("out.raw"), False)):
        backing(name)
        os.rename("a.qcow2", "dir/a.qcow2")
        if good:
            served("backing file " + name, "dir/a.qcow2")
            refused("backing=none", ["backing=none"], "dir/a.qcow2,backing=none")
        else:
            refused("backing file " + name, ["backing=allow"], "dir/a.qcow2")
            served("backing=allow " + name, "dir/a.qcow2,backing=allow")
    ok("qemu-img", "create", "-q", "-f", "qcow2", "a.qcow2", "1M")
    for name in ('json:{"driver":"null-co"}', "nbd://127.0.0.1:1/x", "missing.raw"):
        raw = name.encode()
        poke("a.qcow2", 8, struct.pack(">QI", 4096, len(raw)))
        poke("a.qcow2", 4096, raw)
        refused("a name that is no file: " + name, ["json:"] if "json" in name else ["no such file"], "a.qcow2,backing_fmt=raw")
    refused("a format that nobody names", ["backing_fmt"], "a.qcow2")


def loops_and_long_chains_end(rng):
    backing("x.qcow2", "qcow2")
    os.rename("a.qcow2", "x.qcow2")
    refused("its own backing file, written", ["this process"], "x.qcow2")
    refused("its own backing file, read", ["chain"], "x.qcow2", "--read-only")
    ok("qemu-img", "create", "-q", "-f", "qcow2", "c0.qcow2", "1M")
    ok("qemu-io", "-f", "qcow2", "-c", "write -P 9 0 1M", "c0.qcow2")
    for i in range(1, 17):
        ok("qemu-img", "create", "-q", "-f", "qcow2", "-b", "c%d.qcow2" % (i - 1), "-F", "qcow2", "c%d.qcow2" % i)
    s = Serve("c15.qcow2")
    p = run("qemu-io", "-f", "raw", "-c", "read -P 9 4k 900k", "-c", "write -P 8 12k 4k", "-c", "flush", "-c", "read -P 8 12k 4k", s.uri)
    check("sixteen images", p.returncode == 0 and "failed" not in p.stdout, p.stdout + p.stderr)
    s.end()
    refused("seventeen images", ["16"], "c16.qcow2")


def bits_are_respected(rng):
    ok("qemu-img", "create", "-q", "-f", "qcow2", "a.qcow2", "1M")
    ok("qemu-io", "-f", "qcow2", "-c", "write -P 5 0 64k", "a.qcow2")
    poke("a.qcow2", 72, struct.pack(">Q", 2))
    refused("corrupt, written", ["corrupt"], "a.qcow2")
    served("corrupt, read", "a.qcow2", "--read-only")
    poke("a.qcow2", 72, struct.pack(">Q", 1 << 9))
    refused("an unknown incompatible feature", ["feature 9"], "a.qcow2", "--read-only")
    poke("a.qcow2", 72, struct.pack(">QQQ", 0, 1 << 40, 1 << 50))
    served("unknown compatible and autoclear features", "a.qcow2")
    with open("a.qcow2", "rb") as f:
        check("nothing was changed by reading", struct.unpack(">QQQ", f.read()[72:96]) == (0, 1 << 40, 1 << 50))
    s = Serve("a.qcow2")
    ok("qemu-io", "-f", "raw", "-c", "write 0 4k", s.uri)
    s.end()
    with open("a.qcow2", "rb") as f:
        check("autoclear bits are cleared by a write, others kept", struct.unpack(">QQQ", f.read()[72:96]) == (0, 1 << 40, 0))


def unknown_header_extensions_are_kept(rng):
    """Through writes, another size, snapshots and a repair: the table of feature names, under a type that nobody knows."""
    ok("qemu-img", "create", "-q", "-f", "qcow2", "a.qcow2", "1M")
    with open("a.qcow2", "rb") as f:
        head = f.read(4096)
    at = head.find(bytes.fromhex("6803f857"))
    check("QEMU wrote a table of feature names", at > 0)
    poke("a.qcow2", at, bytes.fromhex("12345678"))
    want = bytes.fromhex("12345678") + head[at + 4:at + 8 + struct.unpack(">I", head[at + 4:at + 8])[0]]
    s = Serve("a.qcow2")
    ok("qemu-io", "-f", "raw", "-c", "write 0 4k", s.uri)
    s.end()
    ok(WEIR, "image", "resize", "-q", "a.qcow2", "700G")
    ok(WEIR, "image", "snapshot", "-q", "-c", "one", "a.qcow2")
    ok(WEIR, "image", "snapshot", "-q", "-a", "one", "a.qcow2")
    poke("a.qcow2", 72, struct.pack(">Q", 2))
    ok(WEIR, "image", "check", "-q", "--repair=all", "a.qcow2")
    with open("a.qcow2", "rb") as f:
        check("it is there, as it was", f.read(4096)[at:at + len(want)] == want)
    ok("qemu-img", "check", "-q", "a.qcow2")


def lazy_refcounts_are_repaired(rng):
    ok("qemu-img", "create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on", "a.qcow2", "1M")
    run("qemu-io", "-f", "qcow2", "-c", "write -P 5 0 300k", "-c", "flush", "-c", "abort", "a.qcow2")
    with open("a.qcow2", "rb") as f:
        check("QEMU left the dirty bit", f.read()[79] & 1)
    served("dirty, read", "a.qcow2", "--read-only")
    s = Serve("a.qcow2")
    p = run("qemu-io", "-f", "raw", "-c", "read -P 5 0 300k", "-c", "write -P 6 500k 100k", "-c", "flush", s.uri)
    check("dirty, written", p.returncode == 0 and "failed" not in p.stdout, p.stdout + p.stderr)
    s.end()
    check("it says so", "lazy refcounts" in s.said, s.said)
    ok("qemu-img", "check", "-q", "a.qcow2")


def a_write_into_tables_marks_the_image_as_corrupt(rng):
    ok("qemu-img", "create", "-q", "-f", "qcow2", "a.qcow2", "1M")
    ok("qemu-io", "-f", "qcow2", "-c", "write -P 5 0 64k", "a.qcow2")
    with open("a.qcow2", "rb") as f:
        image = f.read()
    l1 = struct.unpack(">Q", image[40:48])[0]
    l2 = struct.unpack(">Q", image[l1:l1 + 8])[0] & 0xfffffffffffe00
    for name, host in (("the header", 0x8000000000000000), ("L1", l1 | 1 << 63), ("L2", l2 | 1 << 63), ("the end", 1 << 40 | 1 << 63), ("nowhere", 0x8000000000010200)):
        if name == "the header":
            continue	# offset 0 is "unallocated"
        with open("b.qcow2", "wb") as f:
            f.write(image)
        poke("b.qcow2", l2, struct.pack(">Q", host))
        s = Serve("b.qcow2")
        p = run("qemu-io", "-f", "raw", "-c", "write 0 4k", s.uri)
        check("a write to %s fails" % name, "rror" in p.stdout + p.stderr, p.stdout + p.stderr)
        s.end()
        with open("b.qcow2", "rb") as f:
            now = f.read()
        check("data at %s: the corrupt bit is set" % name, now[79] & 2, s.said)
        check("data at %s: nothing else is changed" % name, now[80:len(image)] == image[80:l2] + struct.pack(">Q", host) + image[l2 + 8:])
        refused("and it is not opened for writing again", ["corrupt"], "b.qcow2")


def other_programs_are_locked_out(rng):
    ok("qemu-img", "create", "-q", "-f", "raw", "base.raw", "1M")
    backing("base.raw")
    s = Serve("a.qcow2")
    for name, fmt in (("a.qcow2", "qcow2"), ("base.raw", "raw")):
        p = run("qemu-io", "-f", fmt, "-c", "write 0 512", name)
        check("%s is locked" % name, "lock" in p.stdout + p.stderr, p.stdout + p.stderr)
    s.end()


def main():
    need("qemu-img", "qemu-io")
    print("WEIR_SEED=%d" % SEED)
    only = sys.argv[2:]
    with tempfile.TemporaryDirectory() as d:
        os.chdir(d)
        for test in (plain_images_of_every_kind, overlays_over_shorter_and_longer_files, compressed_clusters_are_read_and_replaced,
                     snapshots_keep_their_contents, data_files, a_kill_leaves_leaks_at_most, with_a_log_in_between,
                     names_are_followed_only_where_they_may_lead, loops_and_long_chains_end, bits_are_respected, unknown_header_extensions_are_kept, lazy_refcounts_are_repaired,
                     a_write_into_tables_marks_the_image_as_corrupt, other_programs_are_locked_out):
            if not only or test.__name__ in only:
                began = time.time()
                test(random.Random(SEED))
                print("%s (%.1f s)" % (test.__name__, time.time() - began), flush=True)
        os.chdir("/")
    sys.exit(status())


main()
