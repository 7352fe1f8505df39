#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""
bench.py's rows for Ceph images (--only rbd): weir with and without its log, and librbd by fio's rbd engine, in turns on a cluster of one OSD on this machine.

STORE is `bluestore` on a file of this disk, or `memstore`, which stands for a fast cluster; both run all the time. The images were written once before. The work:

rbd STORE sync THINK    8000 bytes and a flush at depth 1, with a pause of THINK before each; p50 and p99 are of write and flush together. The raw file is the local disk
                        that the log is on, 8192 bytes with O_DIRECT and O_DSYNC there.
rbd STORE half          the same without a pause, in an empty log and in one that is more than half full (of scattered records, so that destage is busy all the while)
rbd STORE drain         how many such writes a second the log gives to the cluster when it is told to: one behind the other, and scattered (no two are neighbours)
rbd STORE close         from SIGTERM until the process has ended, with a log that is more than half full
rbd STORE randrw qd64   4 KiB, 75 % reads; p50 and p99 of the writes. The cache holds half of the image, which has been read once before; what the log still holds at the end
                        is not in the figure.

What the machine itself does to a client whose disk, and whose two processors, a cluster uses as well, is told by a raw file *beside the same work*: a second weir, whose log is in memory
(/dev/shm), gets as many bytes a second as weir's own client wrote in its cell of the same round, by a feeder with a request every 5 ms (or every write, if they are fewer), and destages them to the
cluster in its own bursts and sizes. So the raw file meets what the client of a log meets beside its own destage, and what is left between the two is the log's. In the rows `half` that log is
empty, or more than half full of the same records, in the beginning.

The client of the synchronous rows is a loop in this file, over libnbd, librbd's Python binding or pwrite(2): fio tells write and flush apart only, and the sum of their
percentiles is not the percentile of the sum. The loop's own cost is some 10 us, for all the same.
"""
import atexit
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time

try:
    import nbd
except ImportError:
    nbd = None

from bench_lib import DISTURBED, TICK, cpu_idle, cpu_seconds, wait_quiet

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../ceph"))
from cluster import Cluster, why_not       # noqa: it lies elsewhere

STORES = ("bluestore", "memstore")
THINK = {"0ms": 0, "2ms": 2000, "10ms": 10000}
LIBRBD = {"librbd": "rbd_cache=false", "librbd writearound": "rbd_cache=true rbd_cache_policy=writearound",
          "librbd writeback": "rbd_cache=true rbd_cache_policy=writeback"}
SIZE_M, SPAN_M = 256, 64
HALF = ("weir + log, empty", "weir + log, half full")
BESIDE = "raw file, the same work"
HALF_BESIDE = ("raw file, an empty log", "raw file, a half full log")
LIKE = {BESIDE: "weir + log", **dict(zip(HALF_BESIDE, HALF))}   # whose work it is that the raw file is beside
MEMORY = "/dev/shm"
FEED_S = 0.005
RECORD, STRIDE = 8000, 12288


def memory_holds(size):
    """A log in memory is possible."""
    try:
        v = os.statvfs(MEMORY)
    except OSError:
        return False
    return os.access(MEMORY, os.W_OK) and v.f_bavail * v.f_frsize > size + (64 << 20)


BESIDES = memory_holds(1 << 30)
PLAN = [] if why_not() or not nbd else [row for store in STORES for row in (
    *((f"rbd {store} sync {think}", (["raw file"] if store == "bluestore" else []) + ["weir + log"] + ([BESIDE] if BESIDES else []) +
       (["weir"] if think == "0ms" else []) + [*LIBRBD])
      for think in THINK),
    (f"rbd {store} half", [*HALF, *(HALF_BESIDE if BESIDES else ())]),
    (f"rbd {store} drain", ["weir + log", "weir + log, scattered"]),
    (f"rbd {store} close", ["weir + log"]),
    (f"rbd {store} randrw qd64", ["weir + log and cache", "weir", "librbd"]))]


class Rbd:
    def __init__(self, b):
        self.b, self.c, self.clusters = b, None, {}
        self.log = os.path.join(b.d, "log-rbd")
        self.memory = None      # a folder there
        atexit.register(self.stop)

    def stop(self):
        if self.memory:
            shutil.rmtree(self.memory, ignore_errors=True)
        self.memory = None
        for c in self.clusters.values():
            c.__exit__()
        self.clusters = {}

    def need(self, store):
        if store not in self.clusters:
            self.c = self.clusters[store] = Cluster(store).__enter__()
            self.c.create("img", "%dM" % SIZE_M)
            self.fio(["--rw=write", "--bs=1M", "--iodepth=8", "--size=%dM" % SIZE_M], "librbd", None, timed=False)
        if not os.path.exists(self.log):
            subprocess.run([self.b.a.weir, "log", "create", "--size", "256M", self.log], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.c = self.clusters[store]

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

    def memory_log(self, size):
        """Of the size of the one that it stands for: what destage does depends on how full a log is."""
        if not self.memory:
            self.memory = tempfile.mkdtemp(prefix="weir-bench-", dir=MEMORY)
        path = os.path.join(self.memory, size)
        if not os.path.exists(path):
            subprocess.run([self.b.a.weir, "log", "create", "--size", size, path], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return path

    def server(self, words, who):
        small = words[2] in ("half", "close")
        if who in LIKE:
            log = ("--log", self.memory_log("256M" if small else "1G"))
        elif who.startswith("weir"):
            log = ("--log", self.log if small else self.b.log) if "log" in who else ()
        else:
            return None
        self.control = os.path.join(self.b.d, "control")
        server = self.b.weir(self.c.disk("img"), extra=("--control", self.control, *log, *(("--cache-size", "128M") if "cache" in who else ())))
        if "cache" in who:
            self.fio(["--rw=read", "--bs=256k", "--iodepth=4", "--size=%dM" % SIZE_M], who, server, timed=False)
        return server

    def beside(self, words, who, server, most=10**9):
        """The raw file while `server` destages what its feeder gives it."""
        argv = [sys.executable, __file__, "feed", server.uris[0], repr(self.like * RECORD), repr(max(1 / self.like, FEED_S)), str(SPAN_M << 20)]
        feeder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not feeder.stdout.readline():
            raise RuntimeError("the feeder failed")
        try:
            r = self.sync(THINK[words[3]] if words[2] == "sync" else 0, who, None, most)
        finally:
            fed = feeder.communicate("")[0]
        r["fed_bytes_s"] = float(fed)
        return r

    def sync(self, think, who, server, most=10**9):
        where = ["rbd", "img", LIBRBD[who]] if who in LIBRBD else ["nbd", server.uris[0], ""] if server else ["raw", self.b.file, ""]
        out = subprocess.run([sys.executable, __file__, *where, str(think), str(self.b.a.seconds), str(SPAN_M << 20), str(most)], stdin=subprocess.DEVNULL,
                             capture_output=True, text=True, env=self.c.env, check=False)
        if out.returncode:
            raise RuntimeError("the client failed: " + out.stderr[-1000:])
        return json.loads(out.stdout)

    def daemons(self):
        return sum(cpu_seconds(d.proc.pid) for c in self.clusters.values() for d in (c.osd, c.mon))

    def records(self, server, most, stride=STRIDE, full=2.0):
        """Records, many at once, until there are so many or the log is so full; with this stride no two are neighbours. Returns how many."""
        h = nbd.NBD()
        h.connect_uri(server.uris[0])
        h.flush()               # from now on writes are acknowledged from memory
        data = nbd.Buffer.from_bytearray(bytearray(os.urandom(RECORD)))
        n = 0
        while n < most and self.fill() < full:
            for n in range(n + 1, n + 257):
                h.aio_pwrite(data, n * stride % ((SIZE_M << 20) - stride), completion=lambda _: 1)
                while h.aio_in_flight() >= 32:
                    h.poll(-1)
            while h.aio_in_flight():
                h.poll(-1)
            h.flush()
        h.shutdown()
        return n

    def fill(self):
        log = self.command("status")["log"]
        return log["used_bytes"] / log["size"]

    def dirty(self):
        return self.command("status")["volumes"][0]["disk"]["dirty_bytes"]

    def drain(self, who, server):
        """Merged destage does not know whether there was a flush behind each record, so they are put into the log quickly."""
        r = {"ios": self.records(server, 4096, STRIDE if "scattered" in who else RECORD), "p50_us": 0, "p99_us": 0}
        dirty = self.dirty()
        begin = time.monotonic()
        self.command("drain")
        r["iops"] = dirty / RECORD / (time.monotonic() - begin)
        return r

    def half(self, who, server):
        """The writes fit between the middle of the log and the watermark from which on a writer is slowed."""
        if who in (HALF[1], HALF_BESIDE[1]):
            self.records(server, 100000, full=0.51)
        r = self.beside(["rbd", "", "half"], who, server, most=1000) if who in LIKE else self.sync(0, "weir", server, most=1000)
        r["full"] = self.fill()
        return r

    def close(self, server):
        self.records(server, 100000, full=0.51)
        dirty = self.dirty()
        begin = time.monotonic()
        server.stop()
        took = time.monotonic() - begin
        return {"iops": 1 / took, "ios": 1, "p50_us": took * 1e6, "p99_us": took * 1e6, "dirty": dirty}

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
        if words[2] == "sync" and who in LIKE:
            return self.beside(words, who, server)
        if words[2] == "sync":
            return self.sync(THINK[words[3]], who, server)
        if words[2] == "drain":
            return self.drain(who, server)
        if words[2] == "half":
            return self.half(who, server)
        if words[2] == "close":
            return self.close(server)
        job = ["--rw=randrw", "--rwmixread=75", "--bs=4k", "--iodepth=64", f"--size={SIZE_M}M"]
        j = self.fio(job, who, server)["jobs"][0]
        p = j["write"]["clat_ns"]["percentile"]
        return {"iops": j["read"]["iops"] + j["write"]["iops"], "ios": j["read"]["total_ios"] + j["write"]["total_ios"],
                "p50_us": p["50.000000"] / 1e3, "p99_us": p["99.000000"] / 1e3}

    def measured(self, words, who, server):
        idle, total = cpu_idle()
        own, daemons = os.times(), self.daemons()
        r = self.run(words, who, server)
        used = server.cpu() if server and words[2] != "close" else 0
        if used and who not in LIKE:
            r["cpu_us"] = used * 1e6 / max(r["ios"], 1)
        now, (idle_now, total_now) = os.times(), cpu_idle()
        used += sum(now[:4]) - sum(own[:4]) + self.daemons() - daemons
        r["others"] = max(0.0, (total_now - total - (idle_now - idle) - used * TICK) / max(total_now - total, 1))
        return r

    def cell(self, work, who):
        words, best = work.split(), None
        if who in LIKE:
            self.like = self.b.cells[(work, LIKE[who])][-1]["iops"]     # which comes before it in each round
        self.need(words[1])
        for _ in range(min(self.b.a.tries, 2)):
            server = self.server(words, who)
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


    def targets(self, add):
        def m(work, who, key):
            return self.b.median(work, who, key)

        def ratio(a, b):
            return a / b if a and b else None

        for store in STORES:
            for think in THINK:
                work, raw = f"rbd {store} sync {think}", m(f"rbd bluestore sync {think}", "raw file", "p99_us")
                p99 = m(work, "weir + log", "p99_us")
                add(f"{work}, log: p99 over the raw file's", ratio(p99, raw), 1.5, False)
                for key in ("p50", "p99"):
                    add(f"{work}, log: {key} over the raw file's beside the same work", ratio(m(work, "weir + log", key + "_us"), m(work, BESIDE, key + "_us")), 1.5, False)
                best = min((v for v in (m(work, who, "p99_us") for who in LIBRBD) if v), default=None)
                if store == "bluestore":
                    add(f"{work}, log: librbd's best p99 over it", ratio(best, p99), 5, True)
            with_it, without = (m(f"rbd {store} sync {think}", "weir + log", "p50_us") for think in ("2ms", "0ms"))
            disk = ratio(*(m(f"rbd bluestore sync {think}", "raw file", "p50_us") for think in ("2ms", "0ms")))
            add(f"rbd {store}, log: p50 with 2 ms between over that with none" + (f" (raw file: {disk:.2f})" if disk else ""), ratio(with_it, without), 1.1, False)
            work = f"rbd {store} half"
            machine = ratio(*(m(work, who, "p50_us") for who in HALF_BESIDE[::-1]))
            add(f"rbd {store}, log: p50 when more than half full over that when empty" + (f" (the raw file beside the same work: {machine:.2f})" if machine else ""),
                ratio(*(m(work, who, "p50_us") for who in HALF[::-1])), 1.1, False)
            for key in ("p50", "p99"):
                add(f"{work} full, log: {key} over the raw file's beside the same work", ratio(m(work, HALF[1], key + "_us"), m(work, HALF_BESIDE[1], key + "_us")), 1.5, False)
            alone = m(f"rbd {store} sync 0ms", "librbd", "iops")
            add(f"rbd {store}: drain rate over the cluster's at depth 1", ratio(m(f"rbd {store} drain", "weir + log", "iops"), alone), 10, True)
            took = m(f"rbd {store} close", "weir + log", "p50_us")
            add(f"rbd {store}: closing with a log more than half full, s", took and took / 1e6, 1, False)
            alone = m(f"rbd {store} randrw qd64", "librbd", "iops")
            add(f"rbd {store} randrw: rate of weir over librbd", ratio(m(f"rbd {store} randrw qd64", "weir", "iops"), alone), 0.95, True)
            add(f"rbd {store} randrw: rate of weir + log and cache over librbd", ratio(m(f"rbd {store} randrw qd64", "weir + log and cache", "iops"), alone), 1.4, True)


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


def client(kind, target, options, think, seconds, span, most):
    write, size = writer(kind, target, options)
    took, off, start = [], 0, time.perf_counter()
    write(0)                # the lock, the object
    while time.perf_counter() < start + float(seconds) and len(took) < int(most):
        if int(think):
            time.sleep(int(think) / 1e6)
        begin = time.perf_counter()
        write(off)
        took.append(time.perf_counter() - begin)
        off = (off + size) % (int(span) - size + 1) // size * size
    rate, took = len(took) / (time.perf_counter() - start), sorted(took)
    print(json.dumps({"iops": rate, "ios": len(took), "p50_us": took[len(took) // 2] * 1e6, "p99_us": took[len(took) * 99 // 100] * 1e6}))


def feed(uri, rate, period, span):
    """Writes `rate` bytes a second, one piece and a flush each `period`, until its standard input ends. Prints what rate it was."""
    rate, period, span = float(rate), float(period), int(span)
    h = nbd.NBD()
    h.connect_uri(uri)
    data, off, done = os.urandom(int(rate * period) + 1), 0, 0
    print("ready", flush=True)
    start = time.perf_counter()
    while not select.select([sys.stdin], [], [], max(0, start + done / rate - time.perf_counter()))[0]:
        # What it is late by is made up for, but not in pieces that are larger: a burst of the guest is none of the work that it stands for.
        if off + len(data) > span:
            off = 0
        h.pwrite(data, off)
        h.flush()
        off += len(data)
        done += len(data)
    print(done / (time.perf_counter() - start))


if __name__ == "__main__":
    if sys.argv[1] == "feed":
        feed(*sys.argv[2:])
    else:
        client(*sys.argv[1:])
