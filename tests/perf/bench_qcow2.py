#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""
bench.py's rows for qcow2 images: weir with and without its log and qemu-storage-daemon, in turns.

Work is "qcow2 WHAT CLUSTERS qdN". WHAT: 4 KiB random writes into a `fresh` image of 4 GiB, or into an `overlay` of 2 GiB over a full raw file; `seqwrite`, 64 KiB one
after another into a fresh image of 4 GiB; 4 KiB random reads `cold`, all over an image of 1 TiB with tables and no data, whose tables no cache of 32 MiB holds (both
servers' default), and `warm`, from 1 GiB of data whose tables have been read. CLUSTERS: their size, "s" behind it for subclusters.

Each cell of writes has a new image, and begins with its first write. Both sides give the same durability: direct I/O, and one flush behind the last write, whose time
counts: the rate is writes / (time of writing + flush). That matters over a backing file, where weir may owe copies (cow-debt, 256 MiB) which this flush pays. With a log, that flush
is the log's: the image gets the data later. A flush before the first write tells that the client is one that flushes, as every guest is: until it has seen one, weir's log
makes each write durable.

Bytes that were written, from the first write to the end of that flush, for each byte of the guest: once by the server (write_bytes in /proc/PID/io, the log included), and
once by the whole device below the directory (/sys/dev/block/*/stat: the file system's journal and whoever else writes, too).
"""
import os
import subprocess
import time

from bench_lib import DISTURBED, GiB, Server, wait_quiet

CLUSTERS = ("16k", "64k", "2M", "64ks", "2Ms")
WRITERS = ["weir", "weir + log", "qsd"]
SIZE = {"fresh": 4 * GiB, "overlay": 2 * GiB, "seqwrite": 4 * GiB}
SECONDS = 2
PLAN = [
    *((f"qcow2 {what} {c} qd{qd}", WRITERS if c[0] in "62" and c != "64ks" else ["weir", "qsd"])
      for what in ("fresh", "overlay") for qd in (1, 32) for c in CLUSTERS),
    *((f"qcow2 seqwrite {c} qd8", WRITERS) for c in ("64k", "2M")),
    *((f"qcow2 {what} 64k qd{qd}", ["weir", "qsd"]) for what in ("cold", "warm") for qd in (1, 32)),
]


def device_stat(path):
    """Bytes written to the device below `path` since the start; None if it is not known."""
    dev = os.stat(path).st_dev
    try:
        with open(f"/sys/dev/block/{os.major(dev)}:{os.minor(dev)}/stat") as f:
            return int(f.read().split()[6]) * 512
    except OSError:
        return None


def process_written(pid):
    with open(f"/proc/{pid}/io") as f:
        return int(next(x for x in f if x.startswith("write_bytes")).split()[1])


class Qcow2:
    """The rows' files in b.d, and their cells."""

    def __init__(self, b):
        self.b = b
        self.image, self.base = (os.path.join(b.d, n) for n in ("image.qcow2", "base.raw"))
        self.cold, self.warm = (os.path.join(b.d, n) for n in ("cold.qcow2", "warm.qcow2"))

    @staticmethod
    def create(path, *argv):
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *argv], check=True)
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)

    def prepare(self, words):
        """What is made once, if it is needed."""
        what = words[1]
        if what == "overlay" and not os.path.exists(self.base):
            block = os.urandom(1 << 20)
            with open(self.base, "wb") as f:
                for _ in range(SIZE[what] >> 20):
                    f.write(block)
                os.fsync(f.fileno())
        elif what == "cold" and not os.path.exists(self.cold):
            self.create(self.cold, "-o", "preallocation=metadata", self.cold, "1T")
        elif what == "warm" and not os.path.exists(self.warm):
            subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-t", "none", self.b.file, self.warm], check=True)

    def new_image(self, words):
        """The image of a cell."""
        what, c = words[1:3]
        self.prepare(words)
        if what in ("cold", "warm"):
            return getattr(self, what)
        if os.path.exists(self.image):
            os.unlink(self.image)
        options = f"cluster_size={c.rstrip('s')},extended_l2={'on' if c.endswith('s') else 'off'}"
        backing = ["-b", os.path.basename(self.base), "-F", "raw"] if what == "overlay" else []
        self.create(self.image, "-o", options, *backing, self.image, str(SIZE[what]))
        return self.image

    def server(self, who, words, image):
        if who.startswith("weir"):
            return self.b.weir(image, log="log" in who)
        node = f"driver=qcow2,node-name=f0,file.driver=file,file.filename={image},file.cache.direct=on,file.aio=io_uring"
        if words[1] == "overlay":
            node += f",backing.driver=raw,backing.file.driver=file,backing.file.filename={self.base},backing.file.cache.direct=on,backing.file.aio=io_uring"
        return self.b.qsd_node(node)

    def job(self, words, uri):
        what, qd = words[1], words[3][2:]
        size = {"cold": 1 << 40, "warm": min(self.b.a.size, GiB)}.get(what) or SIZE[what]
        rw, bs = {"seqwrite": ("write", "64k"), "cold": ("randread", "4k"), "warm": ("randread", "4k")}.get(what, ("randwrite", "4k"))
        return ["--ioengine=nbd", "--uri=" + uri, f"--rw={rw}", f"--bs={bs}", "--iodepth=" + qd, f"--size={size}", f"--runtime={min(self.b.a.seconds, SECONDS)}",
                *(["--end_fsync=1"] if "write" in rw else [])]

    @staticmethod
    def flush(uri):
        try:
            import nbd	# pylint: disable=import-outside-toplevel
        except ImportError:
            subprocess.run(["fio", "--name=flush", "--ioengine=nbd", "--uri=" + uri, "--rw=write", "--bs=4k", "--size=4k", "--end_fsync=1"], check=True,
                           stdout=subprocess.DEVNULL)
            return
        h = nbd.NBD()
        h.connect_uri(uri)
        h.flush()
        h.shutdown()

    def run(self, words, server):
        """One run of fio; the rates count the flush at the end."""
        pid = server.p.pid
        wrote, device = process_written(pid), device_stat(self.b.d)
        job = self.b.fio([self.job(words, server.uris[0])])["jobs"][0]
        side = job["write"] if job["write"]["total_ios"] else job["read"]
        writes = side is job["write"]
        r = {"iops": side["total_ios"] * 1000 / max(job["job_runtime"], 1), "ios": side["total_ios"], "p50_us": side["clat_ns"]["percentile"]["50.000000"] / 1e3,
             "p99_us": side["clat_ns"]["percentile"]["99.000000"] / 1e3}
        if writes:
            r["flush_ms"] = max(0, job["job_runtime"] - min(self.b.a.seconds, SECONDS) * 1000)
            r["written"] = (process_written(pid) - wrote) / side["io_bytes"]
            if device is not None:
                r["device"] = (device_stat(self.b.d) - device) / side["io_bytes"]
        return r

    def cell(self, work, who):
        """A cell, with a new image for each try."""
        words, best = work.split(), None
        for _ in range(min(self.b.a.tries, 2)):
            server = self.server(who, words, self.new_image(words))
            try:
                if words[1] == "warm":
                    subprocess.run(["fio", "--name=warm", "--ioengine=nbd", "--uri=" + server.uris[0], "--rw=read:60k", "--bs=4k", "--iodepth=32",
                                    f"--size={min(self.b.a.size, GiB)}", "--io_size=64m"], check=True, stdout=subprocess.DEVNULL)
                elif words[1] != "cold":
                    self.flush(server.uris[0])
                wait_quiet(min(self.b.a.quiet, 3), 0.4)
                r = self.b.measure(work, who, server)
            finally:
                server.stop()
            if best is None or r["others"] < best["others"]:
                best = r
            if best["others"] <= DISTURBED:
                break
        return best

    # --- what came out ---

    def markdown(self):
        out = ["| work | server | per second, flush included | least | most | p50, us | p99, us | flush, ms | server CPU, us per I/O | written per byte | device, written per byte |",
               "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]
        for work, whos in PLAN:
            for who in whos:
                rs = self.b.cells.get((work, who))
                if rs:
                    m = self.b.median
                    opt = " | ".join("" if m(work, who, k) is None else f"{m(work, who, k):.{n}f}" for k, n in (("flush_ms", 0), ("cpu_us", 1), ("written", 2), ("device", 2)))
                    out.append(f"| {work[6:]} | {who} | {m(work, who, 'iops'):.0f} | {min(r['iops'] for r in rs):.0f} | {max(r['iops'] for r in rs):.0f} | "
                               f"{m(work, who, 'p50_us'):.0f} | {m(work, who, 'p99_us'):.0f} | {opt} |")
        return "\n".join(out) if len(out) > 2 else ""

    def targets(self, add):
        m = self.b.median
        for work, whos in PLAN:
            for who in (w for w in whos if w != "qsd"):
                a, q = m(work, who, "iops"), m(work, "qsd", "iops")
                if a and q:
                    add(f"{work}: rate of {who} over qsd", a / q, 1.5, True)
                flat = m(work.replace(" 2M ", " 64k "), who, "iops")
                if " 2M " in work and a and flat:
                    add(f"{work}: rate of {who} over that with 64k", a / flat, 0.8, True)
            if " fresh " in work and work.split()[2].endswith("s"):
                add(f"{work}: written by weir per byte", m(work, "weir", "written"), 1.3, False)
                add(f"{work}: written to the device per byte, weir", m(work, "weir", "device"), 1.3, False)
