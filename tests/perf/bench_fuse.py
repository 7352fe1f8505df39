#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""
bench.py's rows for disks as files: weir and qemu-storage-daemon, each with its own FUSE export of the same disk, in turns. The client is fio on that file,
with O_DIRECT and io_uring; sync is 8192 bytes and an fsync, one after another. Needs root.
"""
import os
import subprocess

from bench_lib import GiB, Server

PLAN = [
    ("fuse sync", ["weir fuse", "weir fuse + log", "qsd fuse"]),
    *((f"fuse {rw} qd{qd}", ["weir fuse", "qsd fuse"]) for rw in ("randread", "randwrite") for qd in (1, 32)),
    *((f"fuse {rw} qd{qd} ", ["weir fuse null", "qsd fuse null-co"]) for rw in ("randread", "randwrite") for qd in (1, 32)),
]


class FuseServer(Server):
    def up(self):
        return os.stat(self.uris[0]).st_size > 0

    def stop(self):
        super().stop()
        subprocess.run(["umount", "-l", self.uris[0]], stderr=subprocess.DEVNULL, check=False)


class Fuse:
    """The rows' servers. `b` is the bench."""

    def __init__(self, b):
        self.b = b
        self.path = os.path.join(b.d, "fuse")

    def server(self, who):
        b = self.b
        open(self.path, "w").close()
        if who.startswith("weir"):
            argv = [b.a.weir, "serve", "--fuse", self.path, "--cache-size", "0", "--discard-log"]
            argv += (["--log", b.log] if who.endswith("+ log") else []) + ["null:1T" if who.endswith("null") else b.file]
        else:
            node = "driver=null-co,node-name=f0,size=1099511627776" if who.endswith("null-co") else \
                f"driver=file,node-name=f0,filename={b.file},cache.direct=on,aio=io_uring"
            argv = ["qemu-storage-daemon", "--blockdev", node, "--export", f"type=fuse,id=e0,node-name=f0,mountpoint={self.path},writable=on"]
        return FuseServer(b.d, argv, [self.path], [])

    def jobs(self, workload):
        o = ["--filename=" + self.path, "--direct=1", f"--size={min(self.b.a.size, GiB)}", "--allow_file_create=0"]
        if workload == "fuse sync":
            return [o + ["--ioengine=psync", "--rw=write", "--bs=8192", "--fsync=1", "--size=100m"]]
        _, rw, qd = workload.split()
        return [o + ["--ioengine=io_uring", f"--rw={rw}", "--bs=4k", "--iodepth=" + qd[2:]]]
