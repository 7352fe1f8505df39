#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""
etcd on a file system on a mapped Ceph image: its own etcd_disk_wal_fsync_duration_seconds, with and without weir's log, and on the local disk.

usage: etcd_rbd.py [--weir PROGRAM] [--dir DIR] [--seconds N] [--rounds N] [--clients N] [--store bluestore|memstore]

A cluster of one OSD runs on this machine, and its disk is the disk that the log is on. Clients put values of 300 characters, one after the other each, through etcd's
HTTP gateway. Quantiles are those of etcd's histogram (buckets from 1 ms on, each twice as wide as the last) between the beginning and the end of the load, interpolated
in the bucket as Prometheus does; the bound of the bucket stands beside. Rounds are interleaved. Needs root, FUSE and loop devices.
On a quiet machine: tests/perf/etcd_rbd.py --seconds 20 --rounds 5
"""
import argparse
import base64
import contextlib
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
a.add_argument("--weir", default=os.path.join(HERE, "../../build/src/cli/weir"))
a.add_argument("--dir", default="/var/tmp")
a.add_argument("--seconds", type=float, default=15)
a.add_argument("--rounds", type=int, default=5)
a.add_argument("--clients", type=int, default=4)
a.add_argument("--store", default="bluestore")
a = a.parse_args()
WEIR = os.path.abspath(a.weir)
sys.argv[1:] = [WEIR]
sys.path[1:1] = [os.path.join(HERE, "../interop"), os.path.join(HERE, "../ceph")]
import etcd         # noqa: the path is set above
from cluster import Cluster, why_not     # noqa

CASES = ("local disk", "Ceph", "Ceph + log")
SIZE = "512M"


def sh(*args):
    p = subprocess.run(args, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if p.returncode:
        sys.exit("%s: %s" % (" ".join(args), p.stderr.strip()))
    return p.stdout.strip()


@contextlib.contextmanager
def mounted(case, c, n):
    """A file system at "m" in this folder."""
    if case == "local disk":
        os.makedirs("m")
        yield
        return
    name = "etcd%d" % n
    options = []
    if "log" in case:
        sh(WEIR, "log", "create", "--size", "256M", "log")
        options = ["--log", "log"]
    dev = sh(WEIR, "map", "--fuse-dir", os.path.abspath("fuse"), "--name", name, *options, c.create(name, SIZE))
    try:
        sh("mkfs.ext4", "-q", "-E", "nodiscard", dev)
        os.makedirs("m")
        sh("mount", dev, "m")
        try:
            yield
        finally:
            sh("umount", "m")
    finally:
        sh(WEIR, "unmap", dev)


def histogram(e):
    text = e.get("/metrics").decode()
    name = "etcd_disk_wal_fsync_duration_seconds_"
    return ([(float(le.replace("+Inf", "inf")), int(n)) for le, n in re.findall(name + r'bucket{le="([^"]+)"} (\d+)', text)],
            float(re.search(name + r"sum (\S+)", text).group(1)))


def quantile(buckets, q):
    """(by interpolation, the bound of the bucket), in ms."""
    want, below, least = q * buckets[-1][1], 0, 0.0
    for bound, n in buckets:
        if n >= want and n > below:
            return (least + (bound - least) * (want - below) / (n - below)) * 1e3, bound * 1e3
        below, least = n, bound
    return float("inf"), float("inf")


def load(e):
    """Puts in the given time."""
    end, done = time.monotonic() + a.seconds, []

    def client(i):
        conn, n = http.client.HTTPConnection("127.0.0.1", e.port, timeout=60), 0
        while time.monotonic() < end:
            body = json.dumps({"key": etcd.b64("k%d-%d" % (i, n)), "value": base64.b64encode(os.urandom(225)).decode()})
            conn.request("POST", "/v3/kv/put", body)
            answer = conn.getresponse()
            answer.read()
            if answer.status != 200:
                raise RuntimeError("a put failed: %d" % answer.status)
            n += 1
        done.append(n)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(a.clients)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if len(done) != a.clients:
        sys.exit("a client of etcd failed")
    return sum(done)


def cell(case, c, n):
    with tempfile.TemporaryDirectory(prefix="weir-etcd-", dir=a.dir) as d:
        os.chdir(d)
        try:
            with mounted(case, c, n), etcd.Etcd() as e:
                before, sum0 = histogram(e)
                puts = load(e)
                after, sum1 = histogram(e)
        finally:
            os.chdir("/")
    buckets = [(le, k - j) for (le, k), (_, j) in zip(after, before)]
    count = buckets[-1][1]
    p50, p99 = quantile(buckets, 0.5), quantile(buckets, 0.99)
    row = {"puts": puts / a.seconds, "fsyncs": count / a.seconds, "mean": (sum1 - sum0) / max(count, 1) * 1e3, "p50": p50[0], "p99": p99[0], "bound": p99[1]}
    print("%-10s  %6.0f puts/s  %6.0f fsyncs/s  mean %6.2f ms  p50 %6.2f ms  p99 %7.2f ms (below %.0f ms)" %
          (case, row["puts"], row["fsyncs"], row["mean"], row["p50"], row["p99"], row["bound"]), flush=True)
    return row


def main():
    reason = why_not()
    if reason or os.geteuid():
        sys.exit(reason or "only root may mount")
    rows = {case: [] for case in CASES}
    with Cluster(a.store) as c:
        for r in range(a.rounds):
            for i, case in enumerate(CASES):
                rows[case].append(cell(case, c, r * len(CASES) + i))
    print("\n%d rounds of %g s, %d clients, values of 300 characters, %s; medians (least to most), ms of etcd_disk_wal_fsync_duration_seconds" %
          (a.rounds, a.seconds, a.clients, a.store))
    print("| | puts/s | fsync mean | p50 | p99 |\n|---|---:|---:|---:|---:|")
    for case in CASES:
        print("| %s | %.0f | %s |" % (case, statistics.median(x["puts"] for x in rows[case]), " | ".join(
            "%.2f (%.2f to %.2f)" % (statistics.median(v), min(v), max(v)) for v in ([x[k] for x in rows[case]] for k in ("mean", "p50", "p99")))))


main()
