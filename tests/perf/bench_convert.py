#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""
weir image convert and qemu-img convert in turns: a sparse file of SIZE GiB, a fifth of it data in pieces of 64 KiB to 1 MiB, half of them noise and half text.

usage: bench_convert.py WEIR FOLDER [ROUNDS [GiB]]

Both end with what they wrote on stable media: weir flushes by itself, qemu-img with -t writeback does not and has an fsync behind it, whose time counts; its
other row is -t none with -m 16 -W, its best. Seconds, and processor time of the tool (user + system), medians and all rounds.
"""
import os
import random
import resource
import statistics
import subprocess
import sys
import time

WEIR, FOLDER = os.path.abspath(sys.argv[1]), sys.argv[2]
ROUNDS, GIB = int((sys.argv[3:4] or [3])[0]), int((sys.argv[4:5] or [4])[0])


def make(path):
    r = random.Random(1)
    text = b"".join(b"%d: a line of text, as logs and sources have them\n" % r.randrange(1 << 40) for _ in range(40000))
    size, data = GIB << 30, 0
    with open(path, "wb") as f:
        f.truncate(size)
        while data < size // 5:
            n = r.choice([64, 128, 256, 1024]) << 10
            f.seek(r.randrange(size - n) >> 16 << 16)
            at = r.randrange(len(text) - n) if len(text) > n else 0
            f.write(r.randbytes(n) if r.random() < 0.5 else text[at:at + n])
            data += n
        os.fsync(f.fileno())


def measure(argv, out):
    if os.path.exists(out):
        os.unlink(out)
    os.sync()
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(argv, check=True)
    fd = os.open(out, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime


def main():
    os.makedirs(FOLDER, exist_ok=True)
    os.chdir(FOLDER)
    if not os.path.exists("src.raw"):
        make("src.raw")
    # What is read by the rows from qcow2.
    for name, more in (("src.qcow2", []), ("srcc.qcow2", ["-c"])):
        if not os.path.exists(name):
            subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", *more, "src.raw", name], check=True)
    print("| | weir, s | qemu-img | `-t none` | weir, CPU s | qemu-img | `-t none` |\n|---|---|---|---|---|---|---|", flush=True)
    for what, src, fmt, options in (("raw to raw", "src.raw", "raw", []), ("raw to qcow2", "src.raw", "qcow2", []), ("qcow2 to raw", "src.qcow2", "raw", []),
                                    ("raw to compressed, zlib", "src.raw", "qcow2", ["-c"]),
                                    ("raw to compressed, zstd", "src.raw", "qcow2", ["-c", "-o", "compression_type=zstd"]),
                                    ("compressed to raw", "srcc.qcow2", "raw", [])):
        of = src.split(".")[-1]
        sides = ([WEIR, "image", "convert", "-q", "--force", "-f", of, "-O", fmt, *options, src, "out.img"],
                 ["qemu-img", "convert", "-f", of, "-O", fmt, "-m", "16", *options, src, "out.img"],
                 ["qemu-img", "convert", "-f", of, "-O", fmt, "-m", "16", "-W", "-t", "none", *options, src, "out.img"])
        got = [[], [], []]
        for _ in range(ROUNDS):
            for i, argv in enumerate(sides):
                if "-c" in options and "-W" in argv:
                    argv = [a for a in argv if a != "-W"]
                got[i].append(measure(argv, "out.img"))
        text = ["%.2f (%s)" % (statistics.median(x[k] for x in side), " ".join("%.2f" % x[k] for x in side)) for k in (0, 1) for side in got]
        print("| %s | %s |" % (what, " | ".join(text)), flush=True)
    os.unlink("out.img")


main()
