# SPDX-License-Identifier: MIT
"""RBD images in a cluster that is well: the disk contract, what Ceph's own tools say about the result, snapshots, clones, the lock, sizes."""
import json
import os
import subprocess
import sys
import time

import nbd
from cluster import rbd, the as c
from file_lib import Disk, open_error
from harness import MIB, equal, require, run
from serve_lib import Serve, control, until

WEIR = os.path.abspath(sys.argv[1])
CONFORM = os.path.abspath(sys.argv[3])
with open(sys.argv[1], "rb") as f:
    SANITIZED = b"__asan_init" in f.read()


def resident(pid):
    with open("/proc/%d/status" % pid) as s:
        return int(s.read().split("VmRSS:")[1].split()[0]) << 10


def an_image_is_a_disk_with_and_without_librbds_cache():
    running = []
    for name, options in (("plain", ""), ("cached", ",rbd_cache=true,rbd_cache_policy=writeback,error-after=60s")):
        c.create(name, "3000K")
        running.append((name, subprocess.Popen([CONFORM, c.disk(name, options), "slow"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                               stderr=subprocess.STDOUT, text=True)))
    for name, p in running:
        out = p.communicate(timeout=120)[0]
        require(p.returncode == 0, "%s: %s" % (name, out))


def cephs_tools_agree_with_what_was_written():
    model = bytearray(20 * MIB)
    with Disk(c.create("tools", "20M")) as d:
        for off, length, byte in ((0, 70000, 0x11), (5 * MIB - 1000, 2000, 0x22), (9 * MIB + 1, 3 * MIB, 0x33), (20 * MIB - 512, 512, 0x44)):
            d.all("write %d %d %x" % (off, length, byte))
            model[off:off + length] = bytes([byte]) * length
        # Exact, at any alignment, with and without the space.
        for off, length, flags in ((100, 333, ""), (9 * MIB + 77, 70001, "unmap"), (10 * MIB, MIB, "unmap")):
            d.all("zero %d %d %s" % (off, length, flags))
            model[off:off + length] = bytes(length)
        mine = [(off, off + length) for off, length, kind in d.map() if kind == "data"]
    c.rbd("export", "--no-progress", "tools", "tools.out")
    with open("tools.out", "rb") as f:
        require(f.read() == model, "rbd export gives what was written")
    theirs = [(e["offset"], e["offset"] + e["length"]) for e in c.rbd_json("diff", "tools") if e["exists"] in (True, "true")]
    joined = []
    for a, b in theirs:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    equal(mine, joined, "the extents, by rbd diff")
    used = c.rbd_json("du", "tools")["images"][0]["used_size"]
    require(sum(b - a for a, b in mine) <= used <= 20 * MIB, "rbd du counts %d bytes, the extents %s" % (used, mine))


def a_discard_is_cut_to_what_the_cluster_frees():
    with Disk(c.create("discard")) as d:
        limits = dict(w.split("=") for w in d.do("limits"))
        equal(limits["discard_gran"], "65536", "the granularity that is told")
        d.all("write 0 1048576 aa", "discard 4096 4096", "discard 200000 150000")
        equal(d.do("read 4096 4096"), ["all", "aa"], "less than a granule")
        equal(d.do("read 262144 65536"), ["all", "00"], "a whole granule inside")
        equal(d.do("read 200000 60000"), ["all", "aa"], "the edge")
    with Disk(c.disk("discard", ",rbd_skip_partial_discard=false")) as d:
        d.all("discard 4096 4096")
        equal(d.do("read 4096 4096"), ["all", "00"], "as librbd's own option has it")


def a_snapshot_stays_and_a_clone_reads_its_parent():
    with Disk(c.create("parent")) as d:
        d.all("write 0 8388608 11")
        with c.image("parent") as i:
            i.create_snap("s")
        d.all("write 0 4096 22")
        with Disk(c.disk("parent@s"), "read-only") as s:
            equal(s.do("read 0 4096"), ["all", "11"], "the snapshot")
            equal(s.map(), [(0, 8 * MIB, "data"), (8 * MIB, 8 * MIB, "zero")], "its extents")
            require(s.do("write 0 512 1") == -30, "a snapshot is read-only")
    require("a snapshot cannot be written" in open_error(c.disk("parent@s")), "a snapshot opened to be written")
    with c.image("parent") as i:
        i.protect_snap("s")
    rbd.RBD().clone(c.io, "parent", "s", c.io, "child", features=rbd.RBD_FEATURE_LAYERING | rbd.RBD_FEATURE_EXCLUSIVE_LOCK)
    with Disk(c.disk("child")) as d:
        equal(d.map(), [(0, 8 * MIB, "data"), (8 * MIB, 8 * MIB, "zero")], "what the parent has is data of the clone")
        d.all("write 4096 4096 33", "zero 4194304 65536 unmap")
        for off, byte in ((0, "11"), (4096, "33"), (8192, "11"), (4 * MIB, "00"), (4 * MIB + 65536, "11")):
            equal(d.do("read %d 4096" % off), ["all", byte], "the clone at %d" % off)


def namespaces_and_ids_are_part_of_the_name():
    rbd.RBD().namespace_create(c.io, "ns")
    c.create("img", "4M", ns="ns")
    with Disk("rbd:rbd/ns/img,conf=%s,id=admin" % c.conf) as d:
        d.all("write 0 4096 55")
    require(c.export("img", ns="ns")[:4096] == b"\x55" * 4096, "the image in the namespace")


def no_thread_of_a_server_can_start_a_program():
    with Serve("--name", "v", c.create("confined", "4M")) as w:
        equal(control("weir.control", command="status")["confined"]["landlock"], False, "files can be opened, as Ceph's library does")
        tasks = os.listdir("/proc/%d/task" % w.proc.pid)
        require(len(tasks) > 5, "librbd has threads")
        for task in tasks:
            with open("/proc/%d/task/%s/status" % (w.proc.pid, task)) as f:
                text = f.read()
            require("Seccomp:\t2" in text and "NoNewPrivs:\t1" in text, text)
        w.end()


def one_writer_and_many_readers():
    disk = c.create("locked")
    with Disk(disk) as d:
        d.all("write 0 4096 11")
        began = time.monotonic()
        require("is in use by another client" in open_error(disk), "a second writer is refused")
        require(time.monotonic() - began < 10, "at once")
        with Disk(disk, "read-only") as reader:
            equal(reader.do("read 0 4096"), ["all", "11"], "a reader")
        d.all("write 4096 4096 22")
    with Disk(disk) as d:
        equal(d.do("read 4096 4096"), ["all", "22"], "after a clean close the lock is free")


def a_living_client_that_would_give_its_lock_away_keeps_it():
    c.create("polite")
    with c.image("polite") as i:
        i.write(bytes(4096), 0)
        require(i.is_exclusive_lock_owner(), "a write takes the lock")
        began = time.monotonic()
        require("is in use by another client" in open_error(c.disk("polite")), "its image is refused")
        require(time.monotonic() - began < 20, "without waiting for its death")
        require(i.is_exclusive_lock_owner(), "and it still has it")
        i.write(bytes(4096), 0)


def a_size_that_changes_outside_is_seen():
    disk = c.create("size", "8M")
    with Serve("--name", "v", disk) as w:
        with c.image("size") as i:
            i.resize(12 * MIB)
        w.wait_for("has grown, and so has the volume, to 12 MiB")
        equal(json.loads(run("nbdinfo", "--json", w.uri()).stdout)["exports"][0]["export-size"], 12 * MIB, "the size that a client sees")
        run("qemu-io", "-f", "raw", "-c", "write -P 0x77 0 12M", w.uri())
        with c.image("size") as i:
            i.resize(4 * MIB)
        w.wait_for("has been shrunk to 4 MiB")
        equal(run("qemu-io", "-f", "raw", "-c", "read -P 0x77 0 4M", w.uri()).returncode, 0, "what is left can be read")
        p = run("qemu-io", "-f", "raw", "-c", "read 4M 4k", "-c", "write 8M 4k", w.uri())
        equal(p.stdout.count("Input/output error"), 2, "what is gone fails: " + p.stdout)
        w.end()


def two_reactors_serve_an_image_each():
    disks = [c.create(name, "4M") for name in ("left", "right")]
    with Serve("--reactors", "2", "--name", "left", disks[0], "--name", "right", disks[1]) as w:
        equal(len(control("weir.control", command="stats")["reactors"]), 2, "reactors")
        handles = []
        for name in ("left", "right"):
            handles.append(nbd.NBD())
            handles[-1].connect_uri(w.uri(name))
        data = [bytes([k + 1 + n]) * 65536 for n in range(64) for k in (0, 100)]
        for n in range(64):
            for k, h in enumerate(handles):
                h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data[2 * n + k])), n * 65536, completion=lambda _: 1)
        for h in handles:
            while h.aio_in_flight():
                h.poll(-1)
            h.flush()
        for k, h in enumerate(handles):
            require(h.pread(4 * MIB, 0) == b"".join(data[k::2]), "what the client of reactor %d wrote" % k)
        w.end()
    for k, name in enumerate(("left", "right")):
        require(c.export(name) == b"".join(data[k::2]), "image %s" % name)


def memory_stays_within_the_budget_with_librbd():
    """What librbd and the cluster's client take is nobody's to count: it is looked at, and the cache gives way."""
    size, limit = 32 * MIB, 72 * MIB
    with Serve("--memory", str(limit), "--cache-size", "200M", "--name", "v", c.create("memory", "32M")) as w:
        h = nbd.NBD()
        h.connect_uri(w.uri())
        data = os.urandom(MIB)
        for off in range(0, size, MIB):
            h.pwrite(data, off)
        h.flush()
        most = before = resident(w.proc.pid)
        for off in range(0, size, MIB):
            h.pread(MIB, off)
            most = max(most, resident(w.proc.pid))
        m = control("weir.control", command="memory")
        print("at most %.1f MiB resident of %.1f, %.1f before: %s" % (most / MIB, limit / MIB, before / MIB, m))
        require(m["committed"] <= limit, "so says the budget: %s" % m)
        require(m["parts"]["read cache"]["bytes"] > 4 * MIB, "the cache is used: %s" % m)
        require(SANITIZED or most <= limit * 1.02, "%d bytes are resident of %d: %s" % (most, limit, m))
        h.shutdown()
        w.end()


def fio_finds_what_it_wrote_over_nbd():
    with Serve("--name", "v", c.create("fio", "32M")) as w:
        p = run("fio", "--name=x", "--ioengine=nbd", "--uri=" + w.uri(), "--rw=randrw", "--bsrange=512-256k", "--blockalign=512", "--size=32M",
                "--io_size=24M", "--iodepth=16", "--verify=crc32c", "--verify_fatal=1", "--fsync=32", timeout=60)
        require(p.returncode == 0, p.stdout + p.stderr)


def image(*args):
    p = run(WEIR, "image", *args)
    require(p.returncode == 0, "weir image %s: %s" % (" ".join(args), p.stderr))


def content(path):
    with open(path, "rb") as f:
        return f.read()


def an_image_is_copied_from_and_to():
    data = bytearray(9 * MIB)
    for off, length, byte in ((0, 70000, 0x11), (3 * MIB - 1000, 2000, 0x22), (8 * MIB + 512, MIB - 512, 0x33)):
        data[off:off + length] = bytes([byte]) * length
    with open("src.raw", "wb") as f:
        f.write(data)
    # Over something else: zeroes are copied, too, and what lies beyond stays.
    stale = c.create("stale", "10M")
    with c.image("stale") as i:
        i.write(b"\xee" * (10 * MIB), 0)
    image("convert", "-q", "src.raw", stale)
    require(c.export("stale") == data + b"\xee" * MIB, "what was there is overwritten")
    with c.image("stale") as i:
        i.resize(9 * MIB)
        i.create_snap("s")
        i.write(b"\xdd" * 4096, 0)
    # From one to another, of a snapshot; what is zero takes no space in a new one.
    image("convert", "-q", c.disk("stale@s"), c.create("copy", "9M"))
    require(c.export("copy") == data, "a copy of a snapshot")
    used = [e["offset"] // (4 * MIB) for e in c.rbd_json("diff", "copy") if e["exists"] in (True, "true")]
    require(1 not in used, "the object of zeroes is not there: %s" % used)
    # Out of the cluster into a compressed image, and from that into an image within an image.
    image("convert", "-q", "-c", "-O", "qcow2", c.disk("copy"), "out.qcow2")
    box = c.create("box", "24M")
    image("create", "-q", "-f", "qcow2", box, "9M")
    image("convert", "-q", "-n", "-O", "qcow2", "out.qcow2", box)
    image("convert", "-q", "-f", "qcow2", box, "back.raw")
    require(content("back.raw") == data, "what has been in and out of the cluster, and of images")


def what_cannot_be_opened_is_said_with_the_way_out():
    conf = ",conf=" + c.conf
    c.create("unlocked", "4M", features=rbd.RBD_FEATURE_LAYERING)
    for disk, says in (
            ("rbd:pool" + conf, "write rbd:POOL/IMAGE"), ("rbd:a/b/c/d" + conf, "write rbd:POOL/IMAGE"), ("rbd:rbd/" + conf, "write rbd:POOL/IMAGE"),
            ("rbd:rbd/x@" + conf, "write rbd:POOL/IMAGE"), ("rbd:nowhere/img" + conf, "has no pool \"nowhere\""),
            ("rbd:rbd/none" + conf, "no such image"), ("rbd:rbd/plain@none" + conf, "snapshot"),
            ("rbd:rbd/plain,conf=/nonexistent", "say which it is with conf=FILE"), ("rbd:rbd/plain,colour=red" + conf, "unknown option \"colour\""),
            ("rbd:rbd/plain,rbd_cache=perhaps" + conf, "does not take rbd_cache=perhaps"), ("rbd:rbd/plain,error-after=soon" + conf, "error-after"),
            ("rbd:rbd/unlocked" + conf, "rbd feature enable rbd/unlocked exclusive-lock"),
            ("rbd:rbd/plain,id=nobody" + conf, "does not let client.nobody in")):
        error = open_error(disk, "read-only" if "@none" in disk else "")
        require(says in error, "%s: %s" % (disk, error))
    require("belongs on a fast device" in open_error(c.disk("plain"), "log"), "a log in the cluster")
    with Disk(c.disk("plain", user="reader"), "read-only") as d:
        require(isinstance(d.do("read 0 4096"), list), "who may only read can do that")
    with Disk(c.disk("unlocked", ",locking=off")) as d:
        d.all("write 0 4096 1")
