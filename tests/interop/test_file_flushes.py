#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""What reaches the kernel, counted from outside: flushes, stable writes, and nothing beside them.

usage: test_file_flushes.py DISK_SHELL

With aio=threads every operation is a system call of its own, which strace sees.
"""
import os
import re
import sys
import tempfile

from file_lib import *


def counts(image, options, *commands):
    """Runs the commands and counts plain writes, writes with RWF_DSYNC and fdatasyncs on the image."""
    trace = image + ".trace"
    # -P would miss descriptors that are opened through /proc; -y names the file instead.
    under = ["strace", "-f", "-y", "-o", trace, "-e", "trace=pwritev2,pwrite64,pwritev,fdatasync,fsync,io_submit"]
    with Disk("%s,%s" % (image, options), under=under) as d:
        d.all(*commands)
    n = {"write": 0, "dsync": 0, "flush": 0}
    with open(trace) as f:
        for line in f:
            if os.path.basename(image) + ">" not in line or "resumed" in line:
                continue
            if re.search(r"fdatasync|fsync", line):
                n["flush"] += 1
            else:
                n["dsync" if "RWF_DSYNC" in line else "write"] += 1
    return n


def expect(what, got, **want):
    want = {"write": 0, "dsync": 0, "flush": 0, **want}
    check(what, got == want, "%s, wanted %s" % (got, want))


def main():
    need("strace")
    if run("strace", "-o", "/dev/null", "true").returncode:
        skip("strace may not trace here")
    pairs = [c for i in range(8) for c in ("write %d 4096 1" % (i * 4096), "flush")]
    writes = pairs[::2]
    stable = ["write %d 4096 1 fua" % (i * 4096) for i in range(8)]
    with tempfile.TemporaryDirectory(prefix="test-file-flushes-", dir=".") as folder:
        image = os.path.join(folder, "image.raw")
        with open(image, "wb") as f:
            f.truncate(MIB + 100)
        for cache in ("none", "writeback"):
            t = "aio=threads,cache=" + cache
            expect(cache + ": each of 8 flushes with a write before it is one fdatasync", counts(image, t, *pairs), write=8, flush=8)
            expect(cache + ": the first flush is never left out, the next ones have nothing to do",
                  counts(image, t, "flush", "flush", "flush"), flush=1)
            expect(cache + ": a stable write is one system call", counts(image, t, *stable), dsync=8)
            expect(cache + ": and a flush behind stable writes has only the past before the opening to flush",
                  counts(image, t, *stable, "flush", "flush"), dsync=8, flush=1)
            expect(cache + ": a stable write is no flush of another", counts(image, t, "flush", "write 0 4096 1", "write 4096 4096 1 fua", "flush"),
                  write=1, dsync=1, flush=2)
            expect(cache + ": write zeroes and discard need a flush, too", counts(image, t, "flush", "zero 0 4096", "flush", "discard 0 4096", "flush"), flush=3)
        expect("directsync: each write is stable by itself", counts(image, "aio=threads,cache=directsync", *writes), dsync=8)
        expect("writethrough: each write is followed by a flush", counts(image, "aio=threads,cache=writethrough", *writes), write=8, flush=8)
        expect("unsafe: nothing is flushed", counts(image, "aio=threads,cache=unsafe", *pairs, *stable), write=16)
        expect("the last bytes of an odd size: the same, and their flush is the file's",
              counts(image, "aio=threads,cache=none", "write 1048576 100 1", "flush", "write 1048576 100 1 fua"), write=1, dsync=1, flush=1)
    return status()


sys.exit(main())
