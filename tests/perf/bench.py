#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""
Speed against the peers: weir with and without its log, qemu-storage-daemon and nbdkit over NBD on the same file, and the file itself.

usage: tests/perf/bench.py [--weir PATH] [--dir DIR] [--rounds N] [--tries N] [--seconds N] [--quick] [--only WORKLOAD,...] [--json FILE] [--markdown FILE]

bench_qcow2.py has the rows for qcow2 images (--only qcow2), bench_fuse.py those for disks as files (--only fuse), bench_rbd.py those for Ceph images (--only
rbd), which are left out without Ceph, and bench_tls.py those over TLS (--only tls).

Everything is interleaved: a round runs each cell once, and the table shows medians over the rounds with the smallest and the largest value. Before each
cell the machine must have been quiet for a second (bounded wait), and a cell during which other processes took more than 12 % of the processors is repeated, three times at most;
how many cells were disturbed all the same is printed. All sides give the same durability:
qemu-storage-daemon runs with cache.direct=on, nbdkit's file plugin answers a flush with fdatasync, and the raw file is written with O_DIRECT and RWF_DSYNC.
Over vhost-user the client is tests/perf/vhost_bench, a front end without a virtual machine, and switches the cache on, since qemu-storage-daemon 7.2 neither
flushes nor writes through otherwise.
The raw file, qemu-storage-daemon and everything over vhost-user write 8192 bytes where the others write 8000: they take whole sectors only. The client is fio's nbd engine: its cost, and that of two socket crossings, is part of every NBD row.
"""
import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import bench_fuse
import bench_qcow2
import bench_rbd
import bench_tls
from bench_lib import DISTURBED, GiB, Server, TICK, VhostServer, cpu_idle, wait_quiet


SLOW = "delay:read=4ms,write=4ms,flush=8ms:"	# a cluster over the network, or a hard disk
SPAN_M = 400	# of it that the rows "mixed" and "second" use

class Bench:
    def __init__(self, a, d):
        self.a, self.d = a, d
        self.file = os.path.join(d, "disk.raw")
        self.log = os.path.join(d, "log")
        self.sock = os.path.join(d, "s")
        self.cells = {}		# (workload, who) -> list of results
        self.busy = self.total = 0
        self.process = {}
        self.qcow2 = bench_qcow2.Qcow2(self)
        self.fuse = bench_fuse.Fuse(self)
        self.rbd = bench_rbd.Rbd(self)
        self.tls = bench_tls.Tls(self)

    # --- set-up ---

    def prepare(self):
        with open(self.file, "wb") as f:
            block = os.urandom(1 << 20)
            for _ in range(self.a.size >> 20):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
        subprocess.run([self.a.weir, "log", "create", "--size", "1G", self.log], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)

    def weir(self, *disks, log=False, extra=()):
        argv = [self.a.weir, "serve", "--nbd", "unix:" + self.sock, *([] if "--cache-size" in extra else ["--cache-size", "0"])]
        names = [f"v{i}" for i in range(len(disks))]
        for n in names:
            argv += ["--name", n]
        if log:
            # Each cell begins with an empty log; what the last one left is dropped.
            argv += ["--log", self.log]
        argv += ["--discard-log", *extra, *disks]
        return Server(self.d, argv, [f"nbd+unix:///{n}?socket={self.sock}" for n in names], [self.sock])

    def cache_device(self):
        """An empty one."""
        path = os.path.join(self.d, "cache-device")
        if not os.path.exists(path):
            subprocess.run([self.a.weir, "cache", "create", "--size", "1G", path], check=True, stdout=subprocess.DEVNULL)
        else:
            subprocess.run([self.a.weir, "cache", "create", path], check=True, stdout=subprocess.DEVNULL)
        return path

    def qsd(self, aio):
        return self.qsd_node(f"driver=file,node-name=f0,filename={self.file},cache.direct=on,aio={aio}")

    def qsd_node(self, node):
        return Server(self.d, ["qemu-storage-daemon", "--blockdev", node, "--nbd-server",
                               f"addr.type=unix,addr.path={self.sock},max-connections=32", "--export",
                               "type=nbd,id=e0,node-name=f0,name=v0,writable=on"],
                      [f"nbd+unix:///v0?socket={self.sock}"], [self.sock])

    def weir_vhost(self, disk, *extra):
        return VhostServer(self.d, [self.a.weir, "serve", "--vhost-user", self.sock, "--name", "v0",
                                    *([] if "--cache-size" in extra else ["--cache-size", "0"]), "--discard-log", *extra, disk], [self.sock], [self.sock])

    def qsd_vhost(self, node):
        return VhostServer(self.d, ["qemu-storage-daemon", "--blockdev", node, "--export",
                                    f"type=vhost-user-blk,id=e0,node-name=f0,addr.type=unix,addr.path={self.sock},writable=on,num-queues=4"],
                           [self.sock], [self.sock])

    def nbdkit(self, *plugin):
        return Server(self.d, ["nbdkit", "-f", "-U", self.sock, *plugin], [f"nbd+unix:///?socket={self.sock}"], [self.sock])

    def server(self, who):
        if " tls" in who:
            return self.tls.server(who)
        if " fuse" in who:
            return self.fuse.server(who)
        return {
            "weir": lambda: self.weir(self.file),
            "weir + log": lambda: self.weir(self.file, log=True),
            "qsd io_uring": lambda: self.qsd("io_uring"),
            "qsd native": lambda: self.qsd("native"),
            "nbdkit file": lambda: self.nbdkit("file", self.file),
            "weir cached": lambda: self.weir(self.file, extra=("--cache-size", "1300M")),
            "qsd page cache": lambda: self.qsd_node(f"driver=file,node-name=f0,filename={self.file},cache.direct=off,aio=threads"),
            "weir, 16M cache": lambda: self.weir(self.file, extra=("--cache-size", "16M")),
            "weir, cache not used": lambda: self.weir(self.file, extra=("--cache-size", "64M", "--primarycache", "none")),
            "4 ms": lambda: self.weir(SLOW + self.file),
            "4 ms + log and cache": lambda: self.weir(SLOW + self.file, log=True, extra=("--cache-size", "512M")),
            "4 ms, 64M cache": lambda: self.weir(SLOW + self.file, extra=("--cache-size", "64M")),
            "4 ms, 64M cache + device": lambda: self.weir(SLOW + self.file, extra=("--cache-size", "64M", "--cache-device", self.cache_device(),
                                                                                  "--cache-device-rate", "1G")),
            "weir null": lambda: self.weir("null:1T"),
            "qsd null-co": lambda: self.qsd_node("driver=null-co,node-name=f0,size=1099511627776"),
            "nbdkit null": lambda: self.nbdkit("null", "1T"),
            "weir vhost": lambda: self.weir_vhost(self.file),
            "weir vhost, polling": lambda: self.weir_vhost(self.file, "--poll-us", "50"),
            "weir vhost + log": lambda: self.weir_vhost(self.file, "--log", self.log),
            "weir vhost + log, polling": lambda: self.weir_vhost(self.file, "--log", self.log, "--poll-us", "50"),
            "qsd vhost": lambda: self.qsd_vhost(f"driver=file,node-name=f0,filename={self.file},cache.direct=on,aio=io_uring"),
            "weir vhost cached": lambda: self.weir_vhost(self.file, "--cache-size", "512M", "--memory", "1G"),
            "qsd vhost page cache": lambda: self.qsd_vhost(f"driver=file,node-name=f0,filename={self.file},cache.direct=off,aio=threads"),
            "weir vhost null": lambda: self.weir_vhost("null:1T"),
            "weir vhost null, polling": lambda: self.weir_vhost("null:1T", "--poll-us", "50"),
            "weir vhost mem": lambda: self.weir_vhost("mem:1G"),
            "qsd vhost null-co": lambda: self.qsd_vhost("driver=null-co,node-name=f0,size=1099511627776"),
            "8 ms": lambda: self.weir(f"delay:write=8ms,flush=8ms:{self.file}"),
            "8 ms + log": lambda: self.weir(f"delay:write=8ms,flush=8ms:{self.file}", log=True),
            "mem + log": lambda: self.weir("mem:1G", log=True),
            "1 client": lambda: self.weir("mem:1G", log=True),
            "16 clients": lambda: self.weir("mem:1G", "mem:1G", "mem:1G", "mem:1G", log=True),
            "16 clients, null disks": lambda: self.weir("null:1T", "null:1T", "null:1T", "null:1T"),
            "2 null disks, 1 reactor": lambda: self.weir("null:1T", "null:1T"),
            "2 null disks, 2 reactors": lambda: self.weir("null:1T", "null:1T", extra=("--reactors", "2")),
            "2 mem disks, 1 reactor": lambda: self.weir("mem:1G", "mem:1G"),
            "2 mem disks, 2 reactors": lambda: self.weir("mem:1G", "mem:1G", extra=("--reactors", "2")),
        }[who]()

    # --- one cell ---

    def fio(self, jobs):
        """`jobs`: list of option lists. Returns fio's JSON."""
        argv = ["fio", "--output-format=json", f"--runtime={self.a.seconds}", "--time_based=1", "--randrepeat=0", "--norandommap=1"]
        for i, j in enumerate(jobs):
            argv += [f"--name=j{i}", *j]
        out = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if out.returncode:
            raise RuntimeError("fio failed: " + out.stdout[:2000])
        return json.loads(out.stdout[out.stdout.index("{"):])

    def nbd_jobs(self, workload, uris, who):
        size = f"--size={min(self.a.size, GiB)}"
        if workload.startswith("sync"):
            # qemu-storage-daemon refuses what is not a multiple of the sector when it opens a file for direct I/O.
            o = ["--rw=write", "--bs=" + ("8192" if who.startswith("qsd") else "8000"), "--fsync=1", "--size=100m"]
            n = 4 if workload == "sync16" else 1
            return [["--ioengine=nbd", "--uri=" + u, f"--numjobs={n}", *o] for u in uris]
        rw, qd = workload.split()[-2:]
        if rw in ("mixed", "second"):
            size = f"--size={min(self.a.size, SPAN_M << 20)}"
        if rw == "mixed":
            size += " --rwmixread=75"
        rw = {"cached": "randread", "missed": "randread", "second": "randread", "mixed": "randrw"}.get(rw, rw)
        return [["--ioengine=nbd", "--uri=" + u, f"--rw={rw}", "--bs=4k", "--iodepth=" + qd[2:], *size.split()]
                for u in (uris if workload.startswith("volumes") else uris[:1])]

    def raw_jobs(self, workload, who):
        o = ["--ioengine=io_uring", "--direct=1", "--filename=" + self.file, f"--size={min(self.a.size, GiB)}"]
        if workload.endswith("sync") or workload.startswith("vhost sync"):
            # Between two writes of a client that waits for its answers the disk rests; some disks answer later after a rest.
            return [o + ["--rw=write", "--bs=8192", "--sync=dsync"] + (["--thinktime=60"] if who != "raw file" else [])]
        rw, qd = workload.split()
        return [o + [f"--rw={rw}", "--bs=4k", "--iodepth=" + qd[2:]]]

    def vhost(self, workload, server):
        """One run of the front end; `workload` is "vhost RW qdN [NqQUEUES]"."""
        words = workload.split()
        rw = {"sync": "writeflush", "cached": "randread"}.get(words[1], words[1])
        argv = [self.a.front, server.uris[0], rw, f"seconds={self.a.seconds}", "qd=" + words[2][2:], "bs=" + ("8000" if rw == "writeflush" else "4096"),
                f"span={min(self.a.size, SPAN_M << 20 if words[1] == 'cached' else GiB)}"]
        if len(words) > 3:
            argv.append("queues=" + words[3][2:])
        out = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
        if out.returncode:
            raise RuntimeError("vhost_bench failed: " + out.stderr[:2000])
        r = json.loads(out.stdout)
        return {"iops": r["iops"], "p50_us": r["p50_ns"] / 1e3, "p99_us": r["p99_ns"] / 1e3, "ios": r["ops"]}

    @staticmethod
    def digest(result, workload):
        ios = rate = 0
        lat50, lat99 = [], []
        for j in result["jobs"]:
            side = j["read"] if j["read"]["total_ios"] else j["write"]
            ios += j["read"]["total_ios"] + j["write"]["total_ios"]
            rate += j["read"]["iops"] + j["write"]["iops"]
            p50, p99 = (side["clat_ns"]["percentile"][k] for k in ("50.000000", "99.000000"))
            # A write and its flush are two requests: what a caller waits for is both.
            if workload.startswith("sync") and j["sync"]["total_ios"]:
                s = j["sync"]["lat_ns"]["percentile"]
                p50, p99 = p50 + s["50.000000"], p99 + s["99.000000"]
            lat50.append(p50)
            lat99.append(p99)
        return {"iops": rate, "p50_us": statistics.median(lat50) / 1e3, "p99_us": max(lat99) / 1e3, "ios": ios}

    def measure(self, workload, who, server):
        """One run of a cell; adds the share of the processors that others took meanwhile."""
        idle, total = cpu_idle()
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        if server:
            server.start_clock()
        if workload.startswith("vhost") and server:
            r = self.vhost(workload, server)
        elif workload.startswith("qcow2"):
            r = self.qcow2.run(workload.split(), server)
        elif workload.startswith("tls"):
            r = self.digest(self.fio(self.tls.jobs(workload, server, who)), workload[4:])
        elif workload.startswith("fuse"):
            r = self.digest(self.fio(self.fuse.jobs(workload)), workload[5:])
        else:
            r = self.digest(self.fio(self.nbd_jobs(workload, server.uris, who) if server else self.raw_jobs(workload, who)), workload)
        used = server.cpu() if server else 0
        if server:
            r["cpu_us"] = used * 1e6 / max(r["ios"], 1)
        child = resource.getrusage(resource.RUSAGE_CHILDREN)
        used += child.ru_utime + child.ru_stime - own.ru_utime - own.ru_stime
        idle_now, total_now = cpu_idle()
        r["others"] = max(0.0, (total_now - total - (idle_now - idle) - used * TICK) / max(total_now - total, 1))
        return r

    def cell(self, workload, who):
        of = {"qcow2": self.qcow2.cell, "rbd": self.rbd.cell}.get(workload.split()[0], self.best_of)
        best = of(workload, who)
        self.total += 1
        self.busy += best["others"] > DISTURBED
        self.cells.setdefault((workload, who), []).append(best)
        return best

    def best_of(self, workload, who):
        best = None
        server = None if who.startswith("raw file") else self.server(who)
        try:
            if workload.split()[0] in ("cached", "mixed", "second"):	# all that will be read, once
                span = min(self.a.size, GiB if workload.startswith("cached") else SPAN_M << 20)
                subprocess.run(["fio", "--name=warm", "--ioengine=nbd", "--uri=" + server.uris[0], "--rw=read", "--bs=256k",
                                "--iodepth=4", f"--size={span}"], check=True, stdout=subprocess.DEVNULL)
            if workload.startswith("vhost cached"):
                # Large pieces at random come past every place within a second or two.
                subprocess.run([self.a.front, server.uris[0], "randread", "seconds=4", "qd=4", "bs=262144", f"span={min(self.a.size, SPAN_M << 20)}"], check=True,
                               stdout=subprocess.DEVNULL)
            for _ in range(self.a.tries):
                wait_quiet(self.a.quiet)
                r = self.measure(workload, who, server)
                if best is None or r["others"] < best["others"]:
                    best = r
                if best["others"] <= DISTURBED:
                    break
        finally:
            if server:
                server.stop()
        return best

    # --- the whole ---

    PLAN = [
        ("sync", ["raw file", "raw file, 60 us apart", "weir", "weir + log", "qsd io_uring", "qsd native", "nbdkit file"]),
        ("sync slow", ["8 ms", "8 ms + log", "mem + log"]),
        ("sync16", ["16 clients", "16 clients, null disks"]),
        ("sync1", ["1 client"]),
        ("sync null", ["weir null", "qsd null-co"]),
        ("randread qd1", ["raw file", "weir", "weir + log", "qsd io_uring", "qsd native", "nbdkit file"]),
        ("randread qd32", ["raw file", "weir", "weir + log", "qsd io_uring", "qsd native", "nbdkit file"]),
        ("randwrite qd1", ["raw file", "weir", "weir + log", "qsd io_uring", "qsd native", "nbdkit file"]),
        ("randwrite qd32", ["raw file", "weir", "weir + log", "qsd io_uring", "qsd native", "nbdkit file"]),
        ("cached qd1", ["weir cached", "qsd page cache", "nbdkit file"]),
        ("cached qd32", ["weir cached", "qsd page cache", "nbdkit file"]),
        ("missed qd1", ["weir", "weir, 16M cache", "weir, cache not used"]),
        ("missed qd32", ["weir", "weir, 16M cache", "weir, cache not used"]),
        ("mixed qd64", ["4 ms", "4 ms + log and cache"]),
        ("second qd16", ["4 ms", "4 ms, 64M cache", "4 ms, 64M cache + device"]),
        ("randread qd1 ", ["weir null", "qsd null-co", "nbdkit null"]),
        ("randread qd32 ", ["weir null", "qsd null-co", "nbdkit null"]),
        ("randwrite qd1 ", ["weir null", "qsd null-co"]),
        ("randwrite qd32 ", ["weir null", "qsd null-co"]),
        ("volumes randread qd32", ["2 null disks, 1 reactor", "2 null disks, 2 reactors", "2 mem disks, 1 reactor", "2 mem disks, 2 reactors"]),
        ("vhost sync qd1", ["raw file", "weir vhost", "weir vhost, polling", "weir vhost + log", "weir vhost + log, polling", "qsd vhost"]),
        ("vhost randread qd1", ["weir vhost", "weir vhost, polling", "qsd vhost"]),
        ("vhost randread qd32", ["weir vhost", "qsd vhost"]),
        ("vhost randread qd32 nq4", ["weir vhost", "qsd vhost"]),
        ("vhost randwrite qd1", ["weir vhost", "weir vhost, polling", "qsd vhost"]),
        ("vhost randwrite qd32", ["weir vhost", "qsd vhost"]),
        ("vhost cached qd1", ["weir vhost cached", "qsd vhost page cache"]),
        ("vhost cached qd32", ["weir vhost cached", "qsd vhost page cache"]),
        ("vhost randread qd1 ", ["weir vhost null", "weir vhost null, polling", "weir vhost mem", "qsd vhost null-co"]),
        ("vhost randread qd32 ", ["weir vhost null", "weir vhost null, polling", "weir vhost mem", "qsd vhost null-co"]),
        ("vhost randread qd128 ", ["weir vhost null", "weir vhost null, polling", "qsd vhost null-co"]),
        *bench_fuse.PLAN,
        *bench_qcow2.PLAN,
        *bench_rbd.PLAN,
        *bench_tls.PLAN,
    ]

    def run(self):
        plan = [(w, who) for w, whos in self.PLAN for who in whos if not self.a.only or any((w + " ").startswith(o + " ") for o in self.a.only)]
        for n in range(self.a.rounds):
            for i, (w, who) in enumerate(plan):
                r = self.cell(w, who)
                print(f"round {n + 1}/{self.a.rounds}  {i + 1:2}/{len(plan)}  {w:23} {who:24} {r['iops']:9.0f}/s  p50 {r['p50_us']:8.0f} us  "
                      f"p99 {r['p99_us']:8.0f} us  others {r['others'] * 100:3.0f} %", file=sys.stderr, flush=True)

    # --- figures of the process itself ---

    def start(self):
        """Seconds from exec to `ready` with about 1 GiB of dirty log in records of 8000 bytes, each round; and the dirty bytes."""
        log, image = os.path.join(self.d, "log-start"), f"delay:write=100s:{self.file}"
        argv = [self.a.weir, "serve", "--nbd", "unix:" + self.sock, "--name", "v0", "--log", log]
        subprocess.run([self.a.weir, "log", "create", "--size", "2G", log], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = Server(self.d, [*argv, "--discard-log", image], [f"nbd+unix:///v0?socket={self.sock}"], [self.sock])
        fio = ["fio", "--name=fill", "--ioengine=nbd", f"--uri=nbd+unix:///v0?socket={self.sock}", "--rw=write", "--bs=8000", "--iodepth=32",
               "--size=1000m", "--fsync=1000"]
        subprocess.run(fio, check=True, stdout=subprocess.DEVNULL)
        server.p.kill()
        server.p.wait()
        server.stop()
        times = []
        for _ in range(self.a.rounds):
            wait_quiet(self.a.quiet)
            begin = time.monotonic()
            p = subprocess.Popen([*argv, image], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
            if any("ready" in line for line in p.stderr):
                times.append(time.monotonic() - begin)
            p.kill()
            p.wait()
            p.stderr.close()
        status = json.loads(subprocess.run([self.a.weir, "log", "status", "--json", log], check=True, stdout=subprocess.PIPE).stdout)
        os.unlink(log)
        return times, sum(v.get("dirty_bytes", 0) for v in status.get("volumes", []))

    def memory(self):
        """Resident KiB of a process at rest with one volume and with 16, all on one log and each with a connection that was used."""
        out = []
        for n in (1, 16):
            server = self.weir(*["mem:1G"] * n, log=True)
            for u in server.uris:
                subprocess.run(["nbdinfo", "--size", u], stdout=subprocess.DEVNULL, check=True)
            with open(f"/proc/{server.p.pid}/status") as f:
                out.append(int(next(x for x in f if x.startswith("VmRSS")).split()[1]))
            server.stop()
        return out

    def run_process(self):
        if self.a.only and "process" not in self.a.only:
            return
        times, dirty = self.start()
        one, many = self.memory()
        self.process = {"ready_s": times, "dirty_bytes": dirty, "rss_kib_1_volume": one, "rss_kib_16_volumes": many}
        print(f"start with {dirty >> 20} MiB dirty: {', '.join(f'{t:.2f}' for t in times)} s to ready; resident at rest {one} KiB with 1 volume, "
              f"{many} KiB with 16", file=sys.stderr)

    def rows(self):
        for w, whos in self.PLAN:
            for who in whos:
                rs = self.cells.get((w, who))
                if rs:
                    yield w, who, rs

    def markdown(self):
        def med(rs, k):
            return statistics.median(r[k] for r in rs)

        out = ["| work | server | per second | least | most | p50, us | p99, us | server CPU, us per I/O |",
               "|---|---|---:|---:|---:|---:|---:|---:|"]
        for w, who, rs in self.rows():
            if w.startswith("qcow2"):
                continue
            cpu = f"{med(rs, 'cpu_us'):.1f}" if "cpu_us" in rs[0] else ""
            out.append(f"| {w.strip()} | {who} | {med(rs, 'iops'):.0f} | {min(r['iops'] for r in rs):.0f} | {max(r['iops'] for r in rs):.0f} | "
                       f"{med(rs, 'p50_us'):.0f} | {med(rs, 'p99_us'):.0f} | {cpu} |")
        images = self.qcow2.markdown()
        out = [*(out if len(out) > 2 else []), *(["", images] if images and len(out) > 2 else [images])]
        out.append("")
        out.append(f"{self.a.rounds} rounds of {self.a.seconds} s a cell, medians; {self.total - self.busy} of {self.total} cells were undisturbed by "
                   f"other processes (at most {DISTURBED * 100:.0f} % of the processors).")
        return "\n".join(out)

    def median(self, work, who, key):
        rs = self.cells.get((work, who))
        return statistics.median(r[key] for r in rs) if rs and key in rs[0] else None

    def targets(self):
        """The targets: (what, measured, wanted, the least or the most that is wanted)."""
        m, out = self.median, []

        def add(what, value, wanted, least):
            if value is not None and wanted is not None:
                out.append((what, value, wanted, least))

        def ratio(a, b):
            return a / b if a and b else None

        def best(work, names, key="iops"):
            return max((m(work, n, key) for n in names if m(work, n, key)), default=None)

        # Two round trips: a write of 8000 bytes to a null disk and its flush.
        trips = m("sync null", "weir null", "p50_us")
        if trips and m("sync", "raw file", "p50_us"):
            add("write + flush, log: p50, us", m("sync", "weir + log", "p50_us"), m("sync", "raw file", "p50_us") + trips + 10, False)
            add("write + flush, log: p99, us", m("sync", "weir + log", "p99_us"), 1.5 * m("sync", "raw file", "p99_us") + trips, False)
        peers = [n for n in ("qsd io_uring", "qsd native", "nbdkit file") if m("sync", n, "iops")]
        if peers:
            peer = max(peers, key=lambda n: m("sync", n, "iops"))
            add("write + flush, log: rate over " + peer, ratio(m("sync", "weir + log", "iops"), m("sync", peer, "iops")), 1.6, True)
            add("write + flush, log: p99 over its p99", ratio(m("sync", "weir + log", "p99_us"), m("sync", peer, "p99_us")), 1, False)
        slow = "sync slow"
        add("8 ms image: rate with over without a log", ratio(m(slow, "8 ms + log", "iops"), m(slow, "8 ms", "iops")), 100, True)
        add("8 ms image with a log: rate over mem: with one", ratio(m(slow, "8 ms + log", "iops"), m(slow, "mem + log", "iops")), 0.9, True)
        many, one = ("sync16", "16 clients"), ("sync1", "1 client")
        add("16 clients on 4 volumes over 1 on 1: rate", ratio(m(*many, "iops"), m(*one, "iops")), 3, True)
        add("16 clients on 4 volumes over 1 on 1: p99", ratio(m(*many, "p99_us"), m(*one, "p99_us")), 3, False)
        for work, least in (("randread qd1", 1.3), ("randwrite qd1", 1.3), ("randread qd32", 2), ("randwrite qd32", 2)):
            add(work + ": rate over the better qsd, no log", ratio(m(work, "weir", "iops"), best(work, ("qsd io_uring", "qsd native"))), least, True)
        for work, least in (("randread qd1", 1.3), ("randwrite qd1", 1.3), ("randread qd32", 1.5), ("randwrite qd32", 1.5)):
            add(f"vhost-user {work}: rate over qsd", ratio(m("vhost " + work, "weir vhost", "iops"), m("vhost " + work, "qsd vhost", "iops")), least, True)
        for work in ("vhost randread qd1 ", "vhost randread qd32 "):
            add(f"{work}on null: rate over qsd's null-co", ratio(m(work, "weir vhost null", "iops"), m(work, "qsd vhost null-co", "iops")), 1.5, True)
        add("vhost-user write + flush, log: rate over qsd", ratio(m("vhost sync qd1", "weir vhost + log", "iops"), m("vhost sync qd1", "qsd vhost", "iops")),
            1.8, True)
        raw = m("vhost sync qd1", "raw file", "p50_us")
        for who in ("weir vhost + log, polling", "weir vhost, polling"):
            add(f"write + flush, {who}: p50 over one RWF_DSYNC write", ratio(m("vhost sync qd1", who, "p50_us"), raw), 1.15, False)
        for qd in ("qd1", "qd32"):
            peers = [n for n in ("qsd page cache", "nbdkit file") if m("cached " + qd, n, "cpu_us")]
            if peers:
                peer = min(peers, key=lambda n: m("cached " + qd, n, "cpu_us"))
                add(f"cached reads {qd}: rate over {peer}", ratio(m("cached " + qd, "weir cached", "iops"), m("cached " + qd, peer, "iops")), 1.3, True)
                add(f"cached reads {qd}: I/O per CPU second over {peer}", ratio(m("cached " + qd, peer, "cpu_us"), m("cached " + qd, "weir cached", "cpu_us")), 1.3, True)
            hit, peer = ("vhost cached " + qd, "weir vhost cached"), ("vhost cached " + qd, "qsd vhost page cache")
            add(f"vhost-user, cached reads {qd}: rate over qsd page cache", ratio(m(*hit, "iops"), m(*peer, "iops")), 1.3, True)
            add(f"vhost-user, cached reads {qd}: I/O per CPU second over qsd page cache", ratio(m(*peer, "cpu_us"), m(*hit, "cpu_us")), 1.3, True)
            for who, most in (("weir, 16M cache", 2), ("weir, cache not used", 0.2)):
                with_it, without = m("missed " + qd, who, "cpu_us"), m("missed " + qd, "weir", "cpu_us")
                if with_it and without:
                    add(f"missed {qd}: {who}: more CPU per I/O, us", with_it - without, most, False)
        add("75/25 at QD64 on 4 ms: log and cache over none", ratio(m("mixed qd64", "4 ms + log and cache", "iops"), m("mixed qd64", "4 ms", "iops")), 1, True)
        add("second level on 4 ms: over memory alone", ratio(m("second qd16", "4 ms, 64M cache + device", "iops"), m("second qd16", "4 ms, 64M cache", "iops")), 1, True)
        self.qcow2.targets(add)
        self.rbd.targets(add)
        if self.process:
            p = self.process
            add(f"start to ready with {p['dirty_bytes'] >> 20} MiB of dirty log, s", statistics.median(p["ready_s"]), 0.5, False)
            add("resident at rest, MiB", p["rss_kib_1_volume"] / 1024, 20, False)
            add("resident for each further idle volume, MiB", (p["rss_kib_16_volumes"] - p["rss_kib_1_volume"]) / 15 / 1024, 2, False)
        return out

    def targets_table(self):
        out = ["| target | measured | wanted | |", "|---|---:|---:|---|"]
        for what, value, wanted, least in self.targets():
            met = value >= wanted if least else value <= wanted
            verdict = "met" if met else f"missed by {100 * abs(value - wanted) / wanted:.0f} %"
            out.append(f"| {what} | {value:.2f} | {'at least' if least else 'at most'} {wanted:.2f} | {verdict} |")
        return "\n".join(out)

    def json(self):
        return {"rounds": self.a.rounds, "seconds": self.a.seconds, "cells": self.total, "disturbed_cells": self.busy, "process": self.process,
                "results": [{"work": w.strip(), "server": who, "runs": rs} for w, who, rs in self.rows()]}


def main():
    p = argparse.ArgumentParser(description="weir against its peers; see the top of this file")
    p.add_argument("--weir", default="build/src/cli/weir")
    p.add_argument("--dir", help="where the file and the log lie (default: the temporary directory)")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=int, default=3)
    p.add_argument("--size", type=int, default=1, help="GiB of the file")
    p.add_argument("--quiet", type=float, default=20, help="seconds to wait for a quiet machine before each cell")
    p.add_argument("--tries", type=int, default=3, help="runs of a cell that other processes disturb")
    p.add_argument("--quick", action="store_true", help="2 rounds of 1 s, no waiting, no repeats")
    p.add_argument("--only", help='workloads, or their first words: sync, sync16, randread, vhost, "qcow2 fresh", ..., process')
    p.add_argument("--json", help="default: bench-results/TIME.json")
    p.add_argument("--markdown", help="default: bench-results/TIME.md")
    a = p.parse_args()
    a.weir = os.path.abspath(a.weir)
    a.front = os.path.join(os.path.dirname(a.weir), "../../tests/perf/vhost_bench")
    a.size *= GiB
    a.only = a.only.split(",") if a.only else None
    if a.quick:
        a.rounds, a.seconds, a.quiet, a.tries = 2, 1, 0, 1
    # Whoever ends it early gets what was measured, too.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    d = tempfile.mkdtemp(prefix="weir-bench-", dir=a.dir)
    b = Bench(a, d)
    whole = True
    try:
        b.prepare()
        b.run()
        b.run_process()
    except KeyboardInterrupt:
        print("interrupted: what was measured so far", file=sys.stderr)
        whole = False
    except RuntimeError as e:
        print(f"ended early, with what was measured so far: {e}", file=sys.stderr)
        whole = False
    finally:
        shutil.rmtree(d, ignore_errors=True)
    stem = os.path.join("bench-results", time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    report = b.markdown() + ("\n\n" + b.targets_table() if b.targets() else "")
    print(report)
    for path, text in ((a.json or stem + ".json", lambda: json.dumps(b.json(), indent=1)), (a.markdown or stem + ".md", lambda: report)):
        if path:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            with open(path, "w") as f:
                f.write(text() + "\n")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
