#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""
bench.py's rows for Ceph images (--only rbd): weir with and without its log, and librbd by fio's rbd engine, in turns on a cluster of one OSD on this machine.

Work is "rbd STORE sync THINK" (8000 bytes and a flush at depth 1, with a pause of THINK before each; p50 and p99 are of the write plus of the flush), "rbd STORE randrw qd64"
(4 KiB, 75 % reads; p50 and p99 of the writes) or "rbd STORE drain" (how many of such synchronous writes a second the log gives to the cluster). STORE: `bluestore` on a
file of this disk, or `memstore`, which stands for a fast cluster. The images were written once before. The raw file is the local disk that the log is on, 8192 bytes there.

The client of the synchronous rows is a loop in this file, over libnbd, librbd's Python binding or pwrite(2): fio tells write and flush apart only, and the sum of their
percentiles is not the percentile of the sum. The loop's own cost is some 10 us, for all the same.
"""
import atexit
import json
import os
import socket
import subprocess
import sys
import time

from bench_lib import DISTURBED, TICK, cpu_idle, cpu_seconds, wait_quiet

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../ceph"))
from cluster import Cluster, why_not       # noqa: it lies elsewhere

STORES = ("bluestore", "memstore")
THINK = {"0ms": 0, "2ms": 2000, "10ms": 10000}
LIBRBD = {"librbd": "rbd_cache=false", "librbd writearound": "rbd_cache=true rbd_cache_policy=writearound",
          "librbd writeback": "rbd_cache=true rbd_cache_policy=writeback"}
SIZE_M, SPAN_M = 256, 64
SYNC = ["weir + log", "weir", *LIBRBD]
PLAN = [] if why_not() else [row for store in STORES for row in (
    *((f"rbd {store} sync {think}", (["raw file"] if store == "bluestore" else []) + SYNC) for think in THINK),
    (f"rbd {store} randrw qd64", ["weir + log and cache", "weir", "librbd"]),
    (f"rbd {store} drain", ["weir + log"]))]


class Rbd:
    def __init__(self, b):
        self.b, self.c, self.store = b, None, None
        atexit.register(self.stop)

    def stop(self):
        if self.c:
            self.c.__exit__()
        self.c = None

    def need(self, store):
        if self.c and self.store == store:
            return
        self.stop()
        self.store = store
        self.c = Cluster(store).__enter__()
        self.c.create("img", "%dM" % SIZE_M)
        self.fio(["--rw=write", "--bs=1M", "--iodepth=8", "--size=%dM" % SIZE_M], "librbd", None, timed=False)

    def fio(self, job, who, server, timed=True):
        argv = ["fio", "--output-format=json", "--name=x", "--randrepeat=0", "--norandommap=1", *job]
        argv += [f"--runtime={self.b.a.seconds}", "--time_based=1"] if timed else []
        env = dict(self.c.env)
        if who in LIBRBD:
            argv += ["--ioengine=rbd", "--clientname=admin", "--pool=rbd", "--rbdname=img"]
            env["CEPH_ARGS"] = " ".join("--" + o for o in LIBRBD[who].split())
        else:
            argv += ["--ioengine=nbd", "--uri=" + server.uris[0]]
        out = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, check=False)
        if out.returncode:
            raise RuntimeError("fio failed: " + out.stderr[:1000] + out.stdout[:1000])
        return json.loads(out.stdout[out.stdout.index("{"):])

    def server(self, who):
        if not who.startswith("weir"):
            return None
        self.control = os.path.join(self.b.d, "control")
        return self.b.weir(self.c.disk("img"), log="log" in who,
                           extra=("--control", self.control, *(("--cache-size", "128M") if "cache" in who else ())))

    def sync(self, think, who, server, span_m=SPAN_M):
        where = ["rbd", "img", LIBRBD[who]] if who in LIBRBD else ["nbd", server.uris[0], ""] if server else ["raw", self.b.file, ""]
        out = subprocess.run([sys.executable, __file__, *where, str(think), str(self.b.a.seconds), str(span_m << 20)], stdin=subprocess.DEVNULL,
                             capture_output=True, text=True, env=self.c.env, check=False)
        if out.returncode:
            raise RuntimeError("the client failed: " + out.stderr[-1000:])
        return json.loads(out.stdout)

    def daemons(self):
        return sum(cpu_seconds(d.proc.pid) for d in (self.c.osd, self.c.mon))

    def drain(self, server):
        """Synchronous writes for a while, each to another place, and then what the log still holds goes to the image as fast as it can."""
        r = self.sync(0, "weir", server, SIZE_M)
        dirty = self.command("status")["volumes"][0]["disk"]["dirty_bytes"]
        begin = time.monotonic()
        self.command("drain")
        r["iops"] = dirty / 8000 / (time.monotonic() - begin)
        return r

    def command(self, name):
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(self.control)
            s.sendall(json.dumps({"command": name}).encode() + b"\n")
            for line in s.makefile():
                answer = json.loads(line)
                if "ok" in answer:
                    return answer.get("result")
        raise RuntimeError(f"no answer to {name}")

    def run(self, words, who, server):
        if words[2] == "sync":
            return self.sync(THINK[words[3]], who, server)
        if words[2] == "drain":
            return self.drain(server)
        job = ["--rw=randrw", "--rwmixread=75", "--bs=4k", "--iodepth=64", f"--size={SIZE_M}M"]
        j = self.fio(job, who, server)["jobs"][0]
        p = j["write"]["clat_ns"]["percentile"]
        return {"iops": j["read"]["iops"] + j["write"]["iops"], "ios": j["read"]["total_ios"] + j["write"]["total_ios"],
                "p50_us": p["50.000000"] / 1e3, "p99_us": p["99.000000"] / 1e3}

    def measured(self, words, who, server):
        idle, total = cpu_idle()
        own, daemons = os.times(), self.daemons()
        r = self.run(words, who, server)
        used = server.cpu() if server else 0
        if server:
            r["cpu_us"] = used * 1e6 / max(r["ios"], 1)
        now, (idle_now, total_now) = os.times(), cpu_idle()
        used += sum(now[2:4]) - sum(own[2:4]) + self.daemons() - daemons
        r["others"] = max(0.0, (total_now - total - (idle_now - idle) - used * TICK) / max(total_now - total, 1))
        return r

    def cell(self, work, who):
        words, best = work.split(), None
        self.need(words[1])
        for _ in range(min(self.b.a.tries, 2)):
            server = self.server(who)
            try:
                if server:
                    server.start_clock()
                wait_quiet(min(self.b.a.quiet, 5), 0.5)
                r = self.measured(words, who, server)
            finally:
                if server:
                    server.stop()
            if best is None or r["others"] < best["others"]:
                best = r
            if best["others"] <= DISTURBED:
                break
        return best


# --- the client of the synchronous rows ---

def writer(kind, target, options):
    """(function that writes at an offset and flushes, bytes it writes)"""
    data = os.urandom(8192)[:8192 if kind == "raw" else 8000]
    if kind == "raw":
        import mmap
        buf = mmap.mmap(-1, 8192)
        buf.write(data)
        fd = os.open(target, os.O_RDWR | os.O_DIRECT | os.O_DSYNC)
        return lambda off: os.pwrite(fd, buf, off), 8192
    if kind == "nbd":
        import nbd
        h = nbd.NBD()
        h.connect_uri(target)
        return lambda off: (h.pwrite(data, off), h.flush()), 8000
    import rados
    import rbd
    cluster = rados.Rados(conffile="", conf=dict(o.split("=") for o in options.split()))
    cluster.connect()
    image = rbd.Image(cluster.open_ioctx("rbd"), target)
    atexit.register(lambda: (image.close(), cluster.shutdown()))
    return lambda off: (image.write(data, off), image.flush()), 8000


def client(kind, target, options, think, seconds, span):
    write, size = writer(kind, target, options)
    took, off, start = [], 0, time.perf_counter()
    write(0)                # the lock, the object
    while time.perf_counter() < start + float(seconds):
        if int(think):
            time.sleep(int(think) / 1e6)
        begin = time.perf_counter()
        write(off)
        took.append(time.perf_counter() - begin)
        off = (off + size) % (int(span) - size + 1) // size * size
    rate, took = len(took) / (time.perf_counter() - start), sorted(took)
    print(json.dumps({"iops": rate, "ios": len(took), "p50_us": took[len(took) // 2] * 1e6, "p99_us": took[len(took) * 99 // 100] * 1e6}))


if __name__ == "__main__":
    client(*sys.argv[1:])
