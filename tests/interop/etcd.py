#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""etcd on a file system on a disk that `weir map` has made a device: what it acknowledged is there after weir was killed; what its own histogram says of fsync.

usage: etcd.py WEIR [TEST ...]
"""
import base64
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

from fuse_lib import MIB, WEIR, clear, control, need_fuse
from harness import check, need, require, run, run_tests, skip, tests_of

SLOW = "delay:write=16ms,flush=16ms:disk"


def free_port(host="127.0.0.1"):
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]


def b64(text):
    return base64.b64encode(text.encode()).decode()


class Mapped:
    """The disk as a device, its file system mounted at "m"."""

    def __init__(self, log, make=True):
        p = run(WEIR, "map", "--via", "fuse", "--fuse-dir", "d", "--name", "disk", *(["--log", "log.w"] if log else []), SLOW)
        require(p.returncode == 0, "weir map: " + p.stderr)
        self.device = p.stdout.strip()
        status = control("d/disk.sock", command="status")
        require(bool(status["log"]) == log, "the log is in use")
        self.pid = status["pid"]
        os.makedirs("m", exist_ok=True)
        if make:
            p = run("mkfs.ext4", "-q", "-E", "nodiscard", self.device)
            require(p.returncode == 0, "mkfs.ext4: " + p.stderr)
        p = run("mount", self.device, "m")
        require(p.returncode == 0, "mount: " + p.stderr)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        run("umount", "-l", "m")
        p = run(WEIR, "unmap", self.device)
        check("weir unmap", p.returncode == 0, p.stderr)


class Etcd:
    def __init__(self):
        self.port, peer = free_port(), free_port()
        url, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{peer}"
        with open("etcd.log", "a") as log:
            self.proc = subprocess.Popen(["etcd", "--data-dir", "m/etcd", "--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer,
                                          "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer, "--force-new-cluster"],
                                         stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while not self.healthy():
            require(self.proc.poll() is None and time.monotonic() < end, "etcd starts: " + open("etcd.log").read()[-1500:])
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.proc.poll() is None:
            self.proc.kill()
        self.proc.wait()

    def healthy(self):
        try:
            return b'"true"' in self.get("/health")
        except (OSError, http.client.HTTPException):
            return False

    def get(self, path):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        c.request("GET", path)
        return c.getresponse().read()

    def call(self, path, **body):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        c.request("POST", path, json.dumps(body))
        r = c.getresponse()
        answer = json.loads(r.read())
        require(r.status == 200, f"{path}: {answer}")
        return answer

    def put(self, key, value):
        self.call("/v3/kv/put", key=b64(key), value=b64(value))

    def everything(self):
        kvs = self.call("/v3/kv/range", key=b64("k"), range_end=b64("l"))["kvs"]
        return {base64.b64decode(kv["key"]).decode(): base64.b64decode(kv["value"]).decode() for kv in kvs}

    def fsyncs(self):
        """Of etcd_disk_wal_fsync_duration_seconds: how many were within so many ms, and the sum in ms."""
        text = self.get("/metrics").decode()
        name = "etcd_disk_wal_fsync_duration_seconds_"
        within = {float(le) * 1e3: int(n) for le, n in re.findall(name + r'bucket{le="([0-9.e+-]+|\+Inf)"} (\d+)', text)}
        return within, float(re.search(name + r"sum (\S+)", text).group(1)) * 1e3


def since(before, now):
    """The same of what came in between, and its mean."""
    within = {le: n - before[0][le] for le, n in now[0].items()}
    return within, (now[1] - before[1]) / max(1, within[float("inf")])


def bound(within, share):
    """The least bound of the histogram that so many are within, in ms."""
    return min(le for le, n in within.items() if n and n >= share * within[float("inf")])


def told(what, within, mean):
    return f"{what}: {within[float('inf')]} fsyncs, mean {mean:.1f} ms, half within {bound(within, 0.5):.0f} ms, 99 % within {bound(within, 0.99):.0f} ms"


def disk(with_log):
    with open("disk", "wb") as f:
        f.truncate(160 * MIB)
    if with_log:
        p = run(WEIR, "log", "create", "--size", "128M", "log.w")
        require(p.returncode == 0, p.stderr)


without_log = []


def its_own_histogram_shows_the_image_without_a_log():
    """The yardstick of the next test: here each fsync of the WAL waits for the slow image, so that what is faster there is the log."""
    disk(False)
    with Mapped(False), Etcd() as etcd:
        before = etcd.fsyncs()
        for i in range(20):
            etcd.put(f"k{i}", "v")
        within, mean = since(before, etcd.fsyncs())
    print(told("without a log", within, mean))
    check("an fsync for each put", within[float("inf")] >= 20, within)
    # A write and a flush.
    check("none was faster than the image", not any(n for le, n in within.items() if le <= 32), within)
    without_log.append(within)


def what_was_acknowledged_is_there_after_weir_was_killed():
    """weir dies in the middle of puts, and with it, to etcd, the disk; etcd is killed, too. What any put returned for must be read afterwards."""
    disk(True)
    acknowledged, stop = {}, threading.Event()

    def write(etcd, writer):
        try:
            for n in range(100000):
                if stop.is_set():
                    return
                key, value = f"k{writer}-{n}", os.urandom(30).hex()
                etcd.put(key, value)
                acknowledged[key] = value
        except (OSError, http.client.HTTPException, AssertionError, ValueError):
            pass  # the disk is gone

    with Mapped(True) as mapped, Etcd() as etcd:
        before = etcd.fsyncs()
        threads = [threading.Thread(target=write, args=(etcd, i)) for i in range(2)]
        for t in threads:
            t.start()
        end = time.monotonic() + 60
        while len(acknowledged) < 150 and time.monotonic() < end:
            time.sleep(0.01)
        within, mean = since(before, etcd.fsyncs())
        os.kill(mapped.pid, signal.SIGKILL)
        time.sleep(0.1)
        etcd.proc.send_signal(signal.SIGKILL)
        stop.set()
        for t in threads:
            t.join()
    require(len(acknowledged) >= 150, f"only {len(acknowledged)} puts in a minute")
    print(f"{told('with a log', within, mean)}; killed after {len(acknowledged)} puts")
    for slow in without_log:
        check("half of the fsyncs are faster than the fastest without a log", bound(within, 0.5) < bound(slow, 0), (within, slow))
    with Mapped(True, make=False), Etcd() as etcd:
        found = etcd.everything()
    lost = [k for k, v in acknowledged.items() if found.get(k) != v]
    check("everything that was acknowledged", not lost, f"{len(lost)} of {len(acknowledged)} are missing or wrong: {sorted(lost)[:5]}")


if __name__ == "__main__":
    need_fuse()
    need("etcd", "mkfs.ext4")
    if not os.path.exists("/dev/loop-control"):
        skip("there are no loop devices")
    try:
        sys.exit(run_tests(tests_of(globals()), folders=True))
    finally:
        clear()
