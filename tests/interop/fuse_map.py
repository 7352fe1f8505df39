#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""weir map and weir unmap: a disk as a block device, what is shown of it, and that nothing is left.

usage: fuse_map.py WEIR [TEST ...]
"""
import json
import os
import signal
import sys
import time

from fuse_lib import MIB, WEIR, Server, clear, mounts, need_fuse, opened
from harness import check, equal, require, run, run_tests, skip, tests_of


def image(size=16 * MIB, name="a.img"):
    with open(name, "wb") as f:
        f.truncate(size)
    return name


def weir(*args, status=0):
    # This is about files; tests/guest has a kernel with an NBD client.
    if args[0] == "map" and "--list" not in args:
        args = ("map", "--via", "fuse", *args[1:])
    p = run(WEIR, *args, timeout=90)
    require(p.returncode == status, "weir %s: %d: %s%s" % (args, p.returncode, p.stdout, p.stderr))
    return p.stdout.strip() if status == 0 else p.stderr.strip()


def listed(folder=None):
    """What is mapped in this folder."""
    return [m for m in json.loads(weir("map", "--list", "--json")) if (m["file"] or "").startswith((folder or os.getcwd()) + "/")]


def unmap_all(folder=None):
    for m in listed(folder):
        run(WEIR, "unmap", m["device"] or m["file"])
    clear()


def until(what, fn):
    end = time.monotonic() + 20
    while not fn():
        require(time.monotonic() < end, what)
        time.sleep(0.01)


def opened_by(pid):
    return len(os.listdir("/proc/%d/fd" % pid))


def gone(pid):
    try:
        with open("/proc/%d/stat" % pid) as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def a_mapped_disk_holds_a_file_system_and_unmap_leaves_nothing():
    image(32 * MIB)
    image(64 * MIB, "l.img")
    weir("log", "create", "l.img")
    os.mkdir("m")
    device = weir("map", "--fuse-dir", "d", "--log", "l.img", "a.img")
    try:
        m, = listed()
        equal((m["device"], m["volume"], m["size"], m["read_only"], m["dead"], m["own"]), (device, "a.img", 32 * MIB, False, False, True), "the list")
        with open("/sys/block/%s/loop/dio" % os.path.basename(device)) as f:
            equal(f.read().strip(), "1", "direct I/O")
        lines = weir("map", "--list").splitlines()
        where = lines[0].index("SERVER")
        check("the table's columns", any(line.startswith(device) and line[where:].startswith("pid %d" % m["pid"]) for line in lines[1:]), lines)
        check("it is not mapped twice", "is mapped already, as " + device in weir("map", "--fuse-dir", "d", "a.img", status=1))
        equal(run("mkfs.ext4", "-q", device).returncode, 0, "mkfs")
        equal(run("mount", device, "m").returncode, 0, "mount")
        with open("m/file", "wb") as f:
            f.write(b"content")
        check("a device in use stays", "is in use" in weir("unmap", device, status=1))
        run("umount", "m")
        weir("unmap", device)
        equal((listed(), mounts(), os.listdir("d")), ([], [], []), "what is left")
        check("the server has ended", gone(m["pid"]))
        check("again, and it says that there is none", "is no device or file of weir" in weir("unmap", device, status=1))
        weir("log", "drain", "l.img")
        equal(run("e2fsck", "-fn", "a.img").returncode, 0, "fsck of the image")
    finally:
        run("umount", "m")
        unmap_all()


def unmap_takes_away_what_a_killed_server_has_left():
    image()
    os.mkdir("m")
    device = weir("map", "--fuse-dir", "d", "a.img")
    try:
        with open(device, "r+b") as f:
            f.write(b"x" * 4096)
            f.flush()
            os.fsync(f.fileno())
        os.kill(listed()[0]["pid"], signal.SIGKILL)
        until("it is dead", lambda: listed()[0]["dead"])
        check("a new one does not cover it", "weir unmap %s first" % device in weir("map", "--fuse-dir", "d", "a.img", status=1))
        weir("unmap", device)
        equal((listed(), mounts(), os.listdir("d")), ([], [], []), "what is left")
        check("the device is free", not os.path.exists("/sys/block/%s/loop/backing_file" % os.path.basename(device)))
        again = weir("map", "--fuse-dir", "d", "--read-only", "a.img")
        with open(again, "rb") as f:
            equal(f.read(4097), b"x" * 4096 + b"\0", "what was synced")
        equal(listed()[0]["read_only"], True, "read-only")
        with open("/sys/block/%s/ro" % os.path.basename(again)) as f:
            equal(f.read().strip(), "1", "the device is read-only")
    finally:
        unmap_all()


def a_loop_device_whose_file_is_gone_can_be_unmapped():
    image()
    device = weir("map", "--fuse-dir", "d", "a.img")
    try:
        os.kill(listed()[0]["pid"], signal.SIGKILL)
        until("it is dead", lambda: listed()[0]["dead"])
        run("umount", "-l", "d/a.img")
        weir("unmap", device)
        check("the device is free", not os.path.exists("/sys/block/%s/loop/backing_file" % os.path.basename(device)))
    finally:
        unmap_all()


def a_running_server_is_mapped_and_goes_on():
    image()
    image(name="b.img")
    with Server("--fuse", "f", "--fuse", "g,,h", "a.img", "b.img") as s:
        try:
            check("one is to be chosen", "choose one with --volume" in weir("map", "ctl", status=1))
            check("that there is", "no volume 'c'" in weir("map", "--fuse-dir", "d", "--volume", "c", "ctl", status=1))
            device = weir("map", "--volume", "b.img", "--block-size", "4096", "ctl")
            equal(sorted((m["device"] or "", os.path.basename(m["file"]), m["own"]) for m in listed()),
                  [("", "f", False), (device, "g,h", False)], "the list")
            with open("/sys/block/%s/queue/logical_block_size" % os.path.basename(device)) as f:
                equal(f.read().strip(), "4096", "the block size")
            with opened(device) as fd:
                os.pwrite(fd, b"y" * 4096, 0)
                os.fsync(fd)
            equal(s.ask("resize", volume="b.img", size=20 * MIB), {"size": 20 * MIB}, "resize")
            equal(run("losetup", "-c", device).returncode, 0, "losetup -c")
            equal(run("blockdev", "--getsize64", device).stdout.strip(), str(20 * MIB), "the device's size")
            weir("unmap", device)
            equal(sorted(m["device"] or "" for m in listed()), ["", ""], "devices afterwards")
            equal(s.proc.poll(), None, "the server goes on")
        finally:
            unmap_all()
    with open("b.img", "rb") as f:
        equal(f.read(4096), b"y" * 4096, "what was written")


def a_running_server_without_a_file_gets_one_for_the_mapping():
    image()
    with Server("--nbd", "unix:n", "--name", "v", "a.img") as s:
        if any(s.ask("status")["confined"][how] for how in ("landlock", "seccomp")):
            check("one that is confined says so", "with --no-sandbox" in weir("map", "--fuse-dir", "d", "ctl", status=1))
    with Server("--nbd", "unix:n", "--name", "v", "--no-sandbox", "a.img") as s:
        first = 0
        try:
            for turn in range(6):
                device = weir("map", "--fuse-dir", "d", "ctl")
                with opened(device) as fd:
                    equal(os.pread(fd, 1, 0), b"\0" if turn == 0 else b"x", "what is there in turn %d" % turn)
                    os.pwrite(fd, b"x" * 4096, 0)
                    os.fsync(fd)
                m, = listed()
                equal((m["device"], m["volume"], m["own"]), (device, "v", True), "the list")
                weir("unmap", device)
                equal((listed(), os.listdir("d"), s.proc.poll()), ([], [], None), "what is left")
                # One descriptor of the last mount is kept until the next; not one for each.
                first = first or opened_by(s.proc.pid)
                until("as many descriptors as after the first turn", lambda: opened_by(s.proc.pid) <= first)
            equal(len(s.ask("status")["fuse"]), 1, "files that the server remembers")
        finally:
            unmap_all()


def a_pid_file_stays_only_after_a_kill():
    image()
    with Server("--nbd", "unix:n", "--pid-file", "p", "a.img") as s:
        with open("p") as f:
            equal(int(f.read()), s.proc.pid, "the number")
        s.proc.send_signal(signal.SIGTERM)
        equal(s.proc.wait(20), 0, "the end")
        check("it is gone", not os.path.exists("p"))
    with Server("--nbd", "unix:n", "--pid-file", "p", "a.img") as s:
        s.proc.kill()
        s.proc.wait()
        check("it stays", os.path.exists("p"))
    with Server("--nbd", "unix:n", "--pid-file", "p", "a.img") as s:
        with open("p") as f:
            equal(int(f.read()), s.proc.pid, "the number of the next")


def what_cannot_be_mapped_is_refused_with_a_reason():
    image()
    check("no disk", "DISK is missing" in weir("map", status=2))
    check("two disks, one log", "one weir serve --fuse" in weir("map", "--log", "l", "a", "b", status=2))
    check("a block size", "power of two" in weir("map", "--block-size", "1000", "a.img", status=2))
    check("no such image", "no such file" in weir("map", "--fuse-dir", "d", "nosuch.img", status=1))
    check("a name", "cannot be the name of a file" in weir("map", "--fuse-dir", "d", "--name", "a/b", "a.img", status=1))
    check("nothing to unmap", "give DEVICE, or --all" in weir("unmap", status=2))
    check("what is not weir's", "is no device or file of weir" in weir("unmap", "a.img", status=1))
    equal(os.listdir("d") if os.path.exists("d") else [], [], "what is left")
    p = run(WEIR, "map", "--via", "nbd", "--fuse-dir", "d", "--file", "a.img")
    check("a file by NBD", p.returncode == 1 and "--via nbd makes none" in p.stderr, p.stderr)
    p = run(WEIR, "map", "--via", "nbd", "--fuse-dir", "d", "nosuch.img")
    check("NBD is not there, or else the image", p.returncode == 1 and ("modprobe nbd loads it" in p.stderr or "no such file" in p.stderr), p.stderr)
    path = weir("map", "--fuse-dir", "d", "--file", "a.img")
    equal((path, os.stat(path).st_size), (os.path.abspath("d/a.img"), 16 * MIB), "--file")
    with opened(path):
        check("an open file stays", "is in use" in weir("unmap", path, status=1))
    weir("unmap", path)
    equal(os.listdir("d"), [], "what is left of it")


if __name__ == "__main__":
    need_fuse()
    if not os.path.exists("/dev/loop-control"):
        skip("this kernel has no loop devices")
    sys.exit(run_tests(tests_of(globals()), folders=True))
