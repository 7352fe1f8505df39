#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""RBD images whose cluster, lock or server fails: what was acknowledged to a flush is there, and nobody writes who must not.

usage: test_rbd_faults.py WEIR [TEST ...]
"""
import os
import shutil
import signal
import sys
import tempfile
import time

import cluster
from harness import MIB, equal, require, run, run_tests, skip, tests_of

try:
    import nbd
except ImportError:
    skip("python3-libnbd is not installed")
from rbd_lib import BLOCK, WEIR, Serve, until

SIZE = 8 * MIB
c = None


def content(n):
    return n.to_bytes(8, "little") * (BLOCK // 8)


class Writer:
    """Numbered blocks, each flushed; what was acknowledged is kept in `have`."""

    def __init__(self, w, have=None):
        self.h = nbd.NBD()
        self.h.connect_uri(w.uri())
        self.have = {} if have is None else have

    def write(self, n):
        began = time.monotonic()
        self.h.pwrite(content(n), n * BLOCK % SIZE)
        self.h.flush()
        self.have[n * BLOCK % SIZE] = n
        return time.monotonic() - began

    def write_many(self, numbers, flush=False):
        """So quickly that nothing of it has reached the image when it returns."""
        for n in numbers:
            self.h.pwrite(content(n), n * BLOCK % SIZE)
            self.have[n * BLOCK % SIZE] = n
        if flush:
            self.h.flush()

    def verify(self):
        for off, n in self.have.items():
            require(self.h.pread(BLOCK, off) == content(n), "block %d at %d is there" % (n, off))

    def fails(self):
        try:
            self.h.pwrite(content(1), 0)
            self.h.flush()
            return False
        except nbd.Error:
            return True


def log(name="log"):
    p = run(WEIR, "log", "create", "--size", "32M", name)
    require(p.returncode == 0, p.stderr)
    return ("--log", name)


def image_holds(image, have):
    c.rbd("export", "--no-progress", image, "export")
    with open("export", "rb") as f:
        data = f.read()
    for off, n in have.items():
        require(data[off:off + BLOCK] == content(n), "block %d is in the image at %d" % (n, off))


def refused(*options):
    p = run(WEIR, "serve", "--nbd", "unix:nbd", *options, timeout=60)
    require(p.returncode, "is refused")
    return p.stderr


def own_address(image):
    return c.rbd_json("status", image)["watchers"][0]["address"]


def a_server_that_was_killed_goes_on_where_it_was():
    disk, have = c.create("kill", "8M"), {}
    options = (*log(), "--name", "v", disk)
    with Serve(*options) as w:
        writer = Writer(w, have)
        for n in range(1, 200):
            writer.write(n)
        w.kill()
    with Serve(*options) as w:
        writer = Writer(w, have)
        writer.verify()
        for n in range(150, 250):
            writer.write(n)
        equal(w.end()[0], 0, "the end")
    p = run(WEIR, "log", "drain", "log")
    require(p.returncode == 0, p.stderr + p.stdout)
    image_holds("kill", have)


def an_osd_that_dies_and_returns_stops_nobody_who_has_a_log():
    disk = c.create("osd", "8M")
    with Serve(*log(), "--name", "v", "--control", "control", disk) as w:
        writer = Writer(w)
        for n in range(1, 100):
            writer.write(n)
        c.osd.kill()
        slowest = max(writer.write(n) for n in range(100, 400))
        require(slowest < 5, "a write and flush while the OSD is dead took %.1f s" % slowest)
        w.status(timeout=5)
        c.osd.start()
        for n in range(400, 500):
            writer.write(n)
        until("the log is empty again", lambda: w.status()["volumes"][0]["disk"]["dirty_bytes"] == 0)
        writer.verify()
        equal(w.end()[0], 0, "the end")
    image_holds("osd", writer.have)


def a_monitor_that_dies_and_returns_is_not_missed():
    with Serve("--name", "v", c.create("mon", "8M")) as w:
        writer = Writer(w)
        writer.write(1)
        c.mon.kill()
        for n in range(2, 50):
            writer.write(n)
        c.mon.start()
        for n in range(50, 100):
            writer.write(n)
        writer.verify()
        equal(w.end()[0], 0, "the end")


def a_cluster_that_is_gone_for_longer_than_the_log_lasts_loses_nothing():
    disk = c.create("long", "64M")
    data = bytes(range(256)) * 4096
    with Serve(*log(), "--name", "v", disk) as w:
        h = Writer(w).h
        c.osd.send(signal.SIGSTOP)
        flying, done = [], 0
        for i in range(40):                 # more than the log of 32M holds
            buf = nbd.Buffer.from_bytearray(bytearray(data))
            flying.append(h.aio_pwrite(buf, i * MIB))
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            h.poll(50)
        waiting = [k for k in flying if not h.aio_command_completed(k)]
        require(waiting, "the log is full, and writers wait")
        require(len(waiting) < 40, "but it took what it could")
        w.status(timeout=5)
        c.osd.send(signal.SIGCONT)
        until("all are written when the cluster is back",
              lambda: h.poll(100) >= 0 and not h.aio_in_flight())
        h.flush()
        for i in range(40):
            require(h.pread(MIB, i * MIB) == data, "MiB %d" % i)
        equal(w.end()[0], 0, "the end")


def without_a_log_a_cluster_that_hangs_pauses_or_fails():
    with Serve("--name", "v", c.create("pause", "8M")) as w:
        writer = Writer(w)
        writer.write(1)
        c.osd.send(signal.SIGSTOP)
        cookie = writer.h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(content(2))), 2 * BLOCK)
        time.sleep(0.5)
        writer.h.poll(0)
        require(not writer.h.aio_command_completed(cookie), "a write waits")
        until("the status tells how long", lambda: w.disk()["waiting_ns"] > 0, 5)
        c.osd.send(signal.SIGCONT)
        until("it ends when the cluster is back", lambda: writer.h.poll(100) >= 0 and writer.h.aio_command_completed(cookie))
        equal(writer.h.pread(BLOCK, 2 * BLOCK), content(2), "what was written")
        w.end()
    with Serve("--name", "v", c.disk("pause", ",error-after=300ms")) as w:
        writer = Writer(w)
        c.osd.send(signal.SIGSTOP)
        began = time.monotonic()
        require(writer.fails(), "a write fails")
        require(time.monotonic() - began < 5, "soon")
        try:
            writer.h.pread(BLOCK, 0)
            require(False, "a read fails")
        except nbd.Error:
            pass
        c.osd.send(signal.SIGCONT)
        until("it works again when the cluster is back", lambda: not writer.fails())
        equal(writer.h.pread(BLOCK, 2 * BLOCK), content(2), "what was written before")
        equal(w.end()[0], 0, "the end")


def a_server_ends_in_time_though_the_cluster_hangs():
    disk = c.create("term", "8M")
    options = (*log(), "--name", "v", disk)
    with Serve(*options) as w:
        writer = Writer(w)
        c.osd.send(signal.SIGSTOP)
        for n in range(1, 300):
            writer.write(n)
        time.sleep(1.2)                     # destage has begun, and hangs
        status, took = w.end()
        c.osd.send(signal.SIGCONT)
        equal(status, 0, "the exit status: " + w.text())
        require(took < 1.5, "it took %.1f s" % took)
        require("safe in the log" in w.text(), w.text())
    with Serve(*options) as w:
        Writer(w, writer.have).verify()
        w.end()


def a_client_that_is_shut_out_writes_nothing_more_and_keeps_its_log():
    disk = c.create("fence", "8M")
    options = (*log(), "--name", "v", disk)
    with Serve(*options) as w:
        writer = Writer(w)
        for n in range(1, 100):
            writer.write(n)
        c.ceph("osd", "blocklist", "add", own_address("fence"))
        for n in range(100, 200):           # may be in the log before it is known
            if writer.fails():
                break
            writer.write(n)
            time.sleep(0.05)
        w.wait_for("the cluster has blocklisted this client")
        require(writer.fails(), "the guest's writes fail")
        require(w.disk()["fenced"], "the status tells it")
        equal(w.end()[0], 0, "the end: " + w.text())
    with Serve(*options) as w:
        writer.have.pop(0, None)            # what fails() wrote may be there or not
        Writer(w, writer.have).verify()
        w.end()


def an_image_that_is_removed_underneath_is_noticed():
    disk = c.create("gone", "8M")
    with Serve("--name", "v", disk) as w:
        writer = Writer(w)
        writer.write(1)
        c.run("rados", "-p", "rbd", "rm", "rbd_header." + w.disk()["image_id"])
        w.wait_for("the image has been removed")
        require(writer.fails(), "writes fail")


def the_image_names_its_log_and_one_that_is_elsewhere_is_refused():
    disk = c.create("mark", "8M")
    mine, other = (*log("log"), "--name", "v", disk), (*log("other"), "--name", "v", disk)
    meta = lambda: c.rbd("image-meta", "ls", "mark")
    with Serve(*mine) as w:
        writer = Writer(w)
        before = meta()
        for n in range(1, 100):
            writer.write(n)
        equal(meta(), before, "the metadata while the log turns dirty")
        require("weir-log-1" in before, before)
        writer.write_many(range(100, 200))
        took = w.end()[1]
        require(took < 1.5, "closing with a dirty log took %.1f s" % took)
    host = os.uname().nodename
    for options in (other, ("--name", "v", disk)):
        p = refused(*options)
        require("on host " + host in p and "KiB of dirty data" in p and "closed" in p, p)
    with Serve(*mine) as w:                 # nobody was there meanwhile
        Writer(w, writer.have).verify()
        until("the log is empty", lambda: w.status()["volumes"][0]["disk"]["dirty_bytes"] == 0)
        w.end()
    require("weir-log-1" not in meta(), "a clean detach removes it")
    image_holds("mark", writer.have)


def a_log_is_not_replayed_over_what_somebody_else_wrote():
    for image, kill in (("between", False), ("crashed", True)):
        disk = c.create(image, "8M")
        options = (*log(image), "--name", "v", disk)
        with Serve(*options) as w:
            writer = Writer(w)
            writer.write_many(range(1, 50), flush=kill)
            if kill:
                w.kill()
            else:
                w.end()
        c.rbd("export", "--no-progress", image, image + ".out")     # a reader changes nothing
        if not kill:
            with Serve(*options) as w:
                writer = Writer(w, writer.have)
                writer.write_many(range(50, 60))
                w.end()
        c.rbd("bench", "--io-type", "write", "--io-size", "4096", "--io-total", "4096", image)
        p = refused(*options)
        require("was changed by something else" in p and "--force-replay" in p, p)
        p = refused("--name", "v", disk)
        require("its newest data may be in write log" in p, p)
        with Serve(*options, "--force-replay") as w:
            Writer(w, writer.have).verify()
            w.end()


def main():
    global c
    cluster.skip_without(WEIR)
    folder = tempfile.mkdtemp(prefix="weir-rbd-")
    os.chdir(folder)
    try:
        with cluster.Cluster("bluestore") as c:
            return run_tests([t for t in tests_of(globals()) if t is not main and (not sys.argv[2:] or t.__name__ in sys.argv[2:])], folders=True, chosen=[])
    finally:
        os.chdir("/")
        shutil.rmtree(folder, ignore_errors=True)


sys.exit(main())
