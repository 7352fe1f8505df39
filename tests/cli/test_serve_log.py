#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""`weir serve` with a write log: several disks on one log, kills, hanging images, draining, and who may open what.

usage: test_serve_log.py WEIR
"""
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

from harness import *
from harness import require as check

WEIR = os.path.abspath(sys.argv[1])
TIMEOUT = 30
BLOCK = 4096


def weir(*args):
    return run(WEIR, *args, timeout=TIMEOUT)


class Bed:
    """A folder with images and a log, as the current folder."""

    def __init__(self, images=("a.raw",), logs=("log",)):
        self.dir = tempfile.mkdtemp(prefix="weir-log-")
        os.chdir(self.dir)
        for name in images:
            with open(name, "wb") as f:
                f.truncate(16 << 20)
        for name in logs:
            with open(name, "wb") as f:
                f.truncate(64 << 20)
        p = weir("log", "create", *logs)
        check(p.returncode == 0, p.stderr)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        os.chdir("/")
        shutil.rmtree(self.dir, ignore_errors=True)


class Serve:
    def __init__(self, *args, logs=("log",)):
        argv = [WEIR, "serve", "--nbd", "unix:nbd", "--control", "control"]
        for name in logs:
            argv += ["--log", name]
        with open("out", "w") as f:
            self.proc = subprocess.Popen(argv + list(args), stdin=subprocess.DEVNULL, stdout=f, stderr=f)
        end = time.monotonic() + TIMEOUT
        while "weir: ready\n" not in self.text():
            check(self.proc.poll() is None and time.monotonic() < end, "the server starts: " + self.text())
            time.sleep(0.01)

    def text(self):
        with open("out") as f:
            return f.read()

    def kill(self):
        self.proc.kill()
        self.proc.wait()

    def end(self, sig=signal.SIGTERM):
        self.proc.send_signal(sig)
        return self.proc.wait(TIMEOUT)

    def wait_for(self, text):
        end = time.monotonic() + TIMEOUT
        while text not in self.text():
            check(time.monotonic() < end, "%r in %s" % (text, self.text()))
            time.sleep(0.01)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, tb):
        if kind:
            print(self.text())
        if self.proc.poll() is None:
            self.kill()


class Client:
    def __init__(self, name=b""):
        self.s = socket.socket(socket.AF_UNIX)
        self.s.connect("nbd")
        self.s.settimeout(TIMEOUT)
        self.s.recv(18, socket.MSG_WAITALL)
        self.s.sendall(struct.pack(">IQII", 3, 0x49484156454F5054, 1, len(name)) + name)
        self.s.recv(10, socket.MSG_WAITALL)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.s.close()

    def do(self, cmd, off=0, data=b"", length=None):
        n = len(data) if length is None else length
        self.s.sendall(struct.pack(">IHHQQI", 0x25609513, 0, cmd, 1, off, n) + data)
        reply = self.s.recv(16, socket.MSG_WAITALL)
        check(len(reply) == 16 and struct.unpack(">II", reply[:8])[1] == 0, "request %d: %r" % (cmd, reply))

    def write(self, block, byte, blocks=1):
        self.do(1, block * BLOCK, bytes([byte]) * (BLOCK * blocks))

    def read(self, block):
        self.do(0, block * BLOCK, length=BLOCK)
        return self.s.recv(BLOCK, socket.MSG_WAITALL)

    def flush(self):
        self.do(3)


def ask(command, **kw):
    """The lines of one answer."""
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("control")
        s.settimeout(TIMEOUT)
        s.sendall(json.dumps(dict(command=command, **kw)).encode() + b"\n")
        lines = []
        with s.makefile() as f:
            while not lines or "ok" not in lines[-1]:
                lines.append(json.loads(f.readline()))
        return lines


def until(what, cond):
    end = time.monotonic() + TIMEOUT
    while not cond():
        check(time.monotonic() < end, what)
        time.sleep(0.01)


def in_flight(n):
    """Waits until the server has so many requests of its clients."""
    until("%d requests are in flight" % n, lambda: sum(c["in_flight"] for c in ask("status")[0]["result"]["nbd"]["connections"]) >= n)


def block(byte):
    return bytes([byte]) * BLOCK


def image_block(name, n):
    with open(name, "rb") as f:
        f.seek(n * BLOCK)
        return f.read(BLOCK)


SLOW = "delay:write=1h,flush=1h:"


def disks_of_one_process_share_a_log_and_keep_their_data_apart():
    with Bed(("a.raw", "b.raw", "c.raw")):
        disks = [SLOW + d for d in ("a.raw", "b.raw", "c.raw")]
        with Serve(*disks) as s:
            for i, name in enumerate((b"a.raw", b"b.raw", b"c.raw")):
                with Client(name) as c:
                    c.write(3, i + 1)
                    c.flush()
            check(len(ask("status")[0]["result"]["log"]["volumes"]) == 3, "three volumes")
            s.kill()
        with Serve(*disks):
            for i, name in enumerate((b"a.raw", b"b.raw", b"c.raw")):
                with Client(name) as c:
                    check(c.read(3) == block(i + 1), "%r after SIGKILL" % name)


def names_that_were_swapped_are_refused_and_nothing_is_lost():
    with Bed(("a.raw", "b.raw")):
        disks = [SLOW + "a.raw", SLOW + "b.raw"]
        with Serve(*disks, "--name", "x", "--name", "y") as s:
            for i, name in enumerate((b"x", b"y")):
                with Client(name) as c:
                    c.write(0, i + 1)
                    c.flush()
            s.kill()
        p = weir("serve", "--nbd", "unix:nbd", "--log", "log", *disks, "--name", "y", "--name", "x")
        check(p.returncode == 1 and p.stderr.count("weir serve: ") == 1 and "--name" in p.stderr, p.stderr)
        with Serve(*disks, "--name", "x", "--name", "y"):
            for i, name in enumerate((b"x", b"y")):
                with Client(name) as c:
                    check(c.read(0) == block(i + 1), "%r afterwards" % name)


def a_hanging_image_leaves_what_was_written_safe_in_the_log():
    with Bed():
        with Serve("delay:read=1h,write=1h,flush=1h:a.raw") as s:
            with Client() as c:
                c.write(1, 7)
                c.write(2, 8)
            with Client() as c:
                c.s.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 0, 1, 1 << 20, BLOCK))
                in_flight(1)
                check(s.end() == 0, "exit status: " + s.text())
            check("hangs" in s.text(), s.text())
        with Serve("a.raw"), Client() as c:
            check(c.read(1) == block(7) and c.read(2) == block(8), "written before the end, never flushed")


def an_image_on_a_server_that_hangs_or_is_gone_does_not_hold_up_the_end():
    for how in (signal.SIGSTOP, signal.SIGKILL):
        with Bed():
            def store():
                p = subprocess.Popen([WEIR, "serve", "--nbd", "unix:store", "a.raw"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                while "ready" not in p.stderr.readline():
                    check(p.poll() is None, "the image's server starts")
                return p
            p = store()
            try:
                with Serve("nbd+unix:///?socket=store", "--name", "a") as s:
                    with Client() as c:
                        c.write(1, 7)
                        c.flush()
                    while ask("status")[0]["result"]["log"]["volumes"][0]["dirty_bytes"]:
                        time.sleep(0.05)
                    p.send_signal(how)
                    with Client() as c:
                        c.write(1, 8)
                        c.flush()
                        c.write(2, 9)
                        # One request of the guest, and soon a destage, hang in it.
                        c.s.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 0, 1, 1 << 20, BLOCK))
                        in_flight(1)
                        time.sleep(1.2)     # the destage is due after a second
                        check(ask("status")[0]["ok"], "status")
                        check(s.end() == 0, "exit status: " + s.text())
                    check("hangs; exiting without it: all that was written is safe" in s.text(), s.text())
                if how == signal.SIGSTOP:
                    p.send_signal(signal.SIGCONT)
                else:
                    p.wait()
                    p = store()
                with Serve("nbd+unix:///?socket=store", "--name", "a"), Client() as c:
                    check(c.read(1) == block(8) and c.read(2) == block(9), "flushed, and acknowledged from memory")
            finally:
                p.kill()
                p.wait()


def an_image_whose_log_is_dirty_is_not_served_without_it():
    with Bed():
        with Serve(SLOW + "a.raw") as s:
            with Client() as c:
                c.write(1, 7)
                c.flush()
            s.kill()
        p = weir("serve", "--nbd", "unix:nbd", "a.raw")
        check(p.returncode == 1 and "log" in p.stderr and "--discard-log" in p.stderr, p.stderr)
        p = weir("serve", "--nbd", "unix:nbd", "--read-only", "a.raw")
        check(p.returncode == 1, "read-only as well")
        with Serve("a.raw", "--discard-log", logs=()) as s, Client() as c:
            check(c.read(1) == bytes(BLOCK), "the data was given up")


def drain_at_the_end_completes_the_image():
    with Bed():
        with Serve("a.raw", "--drain") as s:
            with Client() as c:
                for i in range(100):
                    c.write(i, i + 1)
            check(s.end() == 0, "exit status")
            check("drained" in s.text(), s.text())
        for i in range(100):
            check(image_block("a.raw", i) == block(i + 1), "block %d" % i)
        with Serve("a.raw", logs=()):
            pass


def a_second_signal_cuts_a_drain_short_without_loss():
    with Bed():
        with Serve("delay:write=1h:a.raw", "--drain") as s:
            with Client() as c:
                c.write(1, 9)
            s.proc.send_signal(signal.SIGTERM)
            until("the drain begins", lambda: ask("status")[0]["result"]["state"] == "draining")
            time.sleep(0.5)
            check(s.proc.poll() is None, "the drain goes on")
            check(ask("status")[0]["result"]["state"] == "draining", "state")
            check(s.end() == 0, "exit status")
        with Serve("a.raw"), Client() as c:
            check(c.read(1) == block(9), "what was not drained")


def the_drain_command_tells_its_progress_and_its_end():
    with Bed():
        with Serve("delay:write=20ms,parallel=1:a.raw") as s:
            with Client() as c:
                for i in range(100):
                    c.write(7 * i, 1)
                c.flush()
            lines = ask("drain")
            check(lines[-1]["ok"], lines)
            check(all("progress" in x for x in lines[:-1]), lines)
            check(ask("status")[0]["result"]["log"]["volumes"][0]["dirty_bytes"] == 0, "nothing is dirty")
            check(ask("drain", volume="a.raw")[-1]["ok"], "one volume")
            check("'nope'" in ask("drain", volume="nope")[-1]["error"], "an unknown volume")
        check(image_block("a.raw", 0) == block(1), "the image")


def closing_the_connection_cancels_a_drain():
    with Bed():
        with Serve("delay:write=200ms,parallel=1:a.raw") as s:
            with Client() as c:
                for i in range(100):
                    c.write(7 * i, 1)
                c.flush()
            with socket.socket(socket.AF_UNIX) as k:
                k.connect("control")
                k.sendall(b'{"command": "drain"}\n')
                until("the drain begins", lambda: any(t["name"] == "drain" for t in ask("tasks")[0]["result"]["tasks"]))
            end = time.monotonic() + TIMEOUT
            while any(t["name"] == "drain" for t in ask("tasks")[0]["result"]["tasks"]):
                check(time.monotonic() < end, "the drain ends")
                time.sleep(0.1)
            check(ask("status")[0]["ok"], "status")


def two_logs_mirror_each_other():
    with Bed(logs=("log", "mirror")):
        with Serve(SLOW + "a.raw", logs=("log", "mirror")) as s:
            check(len(ask("status")[0]["result"]["log"]["devices"]) == 2, "two devices")
            with Client() as c:
                c.write(1, 7)
                c.flush()
            s.kill()
        with Serve("a.raw", logs=("log", "mirror")), Client() as c:
            check(c.read(1) == block(7), "after SIGKILL")


def all_but_a_damaged_record_can_be_had_while_serving():
    with Bed():
        with Serve(SLOW + "a.raw") as s:
            with Client() as c:
                for i in range(3):
                    c.write(i, i + 1)
                    c.flush()
            s.kill()
        with open("log", "r+b") as f:
            at = f.read().find(block(2))
            f.seek(at + 100)
            f.write(b"rot")
        with Serve("a.raw") as s:
            check(ask("drain")[-1]["ok"] is False, "a drain")
            volume = ask("status")[0]["result"]["log"]["volumes"][0]
            check(volume["damaged"] and volume["unreadable"] == {"offset": BLOCK, "length": BLOCK}, volume)
            check(ask("drain", ignore_damage=True)[-1]["ok"] is False, "all volumes at once")
            check(ask("drain", volume="a.raw", ignore_damage=True)[-1]["ok"], "ignoring it")
            check("bytes 4096+4096 are lost" in s.text(), s.text())
            check(ask("status")[0]["result"]["log"]["volumes"][0]["lost_bytes"] == BLOCK, "status")
            with Client() as c:
                check(c.read(0) == block(1) and c.read(1) == bytes(BLOCK) and c.read(2) == block(3), "the rest")
                c.write(1, 9)
                c.flush()
            check(ask("drain")[-1]["ok"] and image_block("a.raw", 1) == block(9), "as good as any volume")


def write_some(n, byte, first=0):
    with Client() as c:
        for i in range(n):
            c.write(first + i, byte)
            c.flush()


def devices(command="status"):
    return [d["state"] for d in ask(command)[0]["result"]["log"]["devices"]]


def a_side_of_the_mirror_that_hangs_is_given_up_and_can_be_replaced():
    with Bed(logs=("log", "mirror")):
        with open("new", "wb") as f:
            f.truncate(64 << 20)
        # The superblocks are written at the start; the first batch lies behind them.
        hangs = "fault:op=write,off=256K,len=64M,stall=1h:mirror"
        with Serve(SLOW + "a.raw", "--log-timeout", "500ms", logs=("log", hangs)) as s:
            write_some(20, 7)
            check(devices() == ["in sync", "hanging"], devices())
            check("does not answer" in s.text(), s.text())
            check(ask("log-rebuild")[-1]["error"].count("has not answered"), "the same side again")
            p = weir("log", "rebuild", "--control", "control", "new")
            check(p.returncode == 0 and "complete" in p.stdout, p.stdout + p.stderr)
            check(devices() == ["in sync", "in sync"], devices())
            write_some(20, 8, 20)
            # Its last request never returns.
            check(s.end() == 0, "exit status: " + s.text())
            check("mirror hangs" in s.text(), s.text())
        os.unlink("log")
        with Serve("a.raw", logs=("new",)), Client() as c:
            check(c.read(1) == block(7) and c.read(39) == block(8), "the new side alone")


def a_device_that_hangs_is_no_failure_where_the_time_for_the_end_is_over():
    """As on a machine that is too busy: the process stands still from the moment at which only that device is left, until the alarm has come."""
    for i in range(10):
        with Bed(logs=("log", "mirror")):
            with Serve(SLOW + "a.raw", "--log-timeout", "200ms", "--pid-file", "pid",
                       logs=("log", "fault:op=write,off=256K,len=64M,stall=1h:mirror")) as s:
                write_some(5, 7)
                check(devices() == ["in sync", "hanging"], devices())
                s.proc.send_signal(signal.SIGTERM)
                until("the control socket goes", lambda: not os.path.exists("control"))
                time.sleep(0.02 * (i + 1))
                s.proc.send_signal(signal.SIGSTOP)
                time.sleep(1)
                s.proc.send_signal(signal.SIGCONT)
                status = s.proc.wait(TIMEOUT)
                if status:      # it was stopped too soon
                    check("stopping takes too long" in s.text(), s.text())
                    continue
                if "mirror hangs; exiting without it" in s.text():      # too late: it had given up by itself
                    continue
                check("mirror hangs until the last moment; exiting without it" in s.text(), s.text())
                check(not os.path.exists("pid"), "the pid file goes: all is well")
            with Serve("a.raw", logs=("log",)), Client() as c:
                check(c.read(4) == block(7), "what was written")
            return
    check(False, "it was never at the point where only the device is left")


def an_end_on_a_file_system_with_whole_seconds_is_no_hang():
    """The image's time says nothing until its second is over; the end waits for that, and not so long that it is taken for a hang."""
    with Bed():
        with open("fs.img", "wb") as f:
            f.truncate(24 << 20)
        os.mkdir("fs")
        try:
            made = run("/usr/sbin/mkfs.ext4", "-q", "-F", "-I", "128", "-O", "^has_journal", "fs.img").returncode == 0
        except OSError:
            made = False
        if not made or run("/usr/bin/mount", "-o", "loop", "fs.img", "fs").returncode:
            check(os.getuid() != 0, "root can make and mount an ext4")
            return
        try:
            with open("fs/a.raw", "wb") as f:
                f.truncate(8 << 20)
            for phase in (0.05, 0.3):
                with Serve("fs/a.raw") as s:
                    with Client() as c:
                        c.write(1, 7)
                        c.flush()
                    until("the part of the second", lambda: phase < time.time() % 1 < phase + 0.1)
                    check(ask("drain")[-1]["ok"], "drained")
                    check(s.end() == 0 and "hang" not in s.text(), "phase %.2f: %s" % (phase, s.text()))
        finally:
            run("/usr/bin/umount", "fs")


def a_side_that_was_replaced_is_rebuilt_while_the_volumes_are_served():
    with Bed(logs=("log", "mirror")):
        with open("new", "wb") as f:
            f.write(b"a letter")
            f.truncate(64 << 20)
        with Serve(SLOW + "a.raw", logs=("log", "fault:op=write,after=20:mirror")) as s:
            write_some(60, 7)
            check(devices() == ["in sync", "out"], devices())
            p = weir("log", "rebuild", "--control", "control", "new")
            check(p.returncode == 1 and "--force" in p.stderr, p.stderr)
            check(ask("log-rebuild", device="nowhere")[-1]["ok"] is False, "a device that is not there")
            check(ask("log-rebuild", nonsense=1)[-1]["ok"] is False, "an unknown argument")
            # Slow enough to be looked at, and stopped by going away.
            with socket.socket(socket.AF_UNIX) as k:
                k.connect("control")
                k.sendall(b'{"command": "log-rebuild", "device": "delay:write=300ms:new", "force": true}\n')
                end = time.monotonic() + TIMEOUT
                while not any(j["name"] == "log rebuild" and j["total"] for j in ask("tasks")[0]["result"]["jobs"]):
                    check(time.monotonic() < end, "the rebuild shows in tasks")
                write_some(2, 8, 60)
                check(devices() == ["in sync", "rebuilding"], devices())
            while ask("tasks")[0]["result"]["jobs"]:
                check(time.monotonic() < end, "the rebuild ends")
                time.sleep(0.1)
            check(devices() == ["in sync", "out"], devices())
            # A crash in the middle is like one before.
            with socket.socket(socket.AF_UNIX) as k:
                k.connect("control")
                k.sendall(b'{"command": "log-rebuild", "device": "delay:write=300ms:new", "force": true}\n')
                while not ask("tasks")[0]["result"]["jobs"]:
                    check(time.monotonic() < end, "the second rebuild")
                write_some(1, 9, 62)
                s.kill()
        with Serve(SLOW + "a.raw", logs=("log", "new")):
            check(devices() == ["in sync", "out"], devices())
            p = weir("log", "rebuild", "--control", "control")
            check(p.returncode == 0, p.stderr)
            write_some(1, 5, 63)
        with Serve("a.raw", logs=("new",)), Client() as c:
            for i, byte in ((0, 7), (59, 7), (60, 8), (62, 9), (63, 5)):
                check(c.read(i) == block(byte), "block %d of the new side alone" % i)


def every_log_and_sync_mode_keeps_what_a_flush_covered():
    for opts in (("--logmode", "write"), ("--destage", "ordered"), ("--sync", "always"), ("--logmode", "write", "--destage", "ordered"),
                 ("--quota", "8M", "--log-memory", "8M")):
        with Bed():
            with Serve(SLOW + "a.raw", *opts) as s:
                with Client() as c:
                    c.write(5, 3)
                    c.flush()
                    c.write(6, 4)
                s.kill()
            with Serve("a.raw", *opts), Client() as c:
                check(c.read(5) == block(3), "%r: flushed" % (opts,))
                if "write" in opts or "always" in opts:
                    check(c.read(6) == block(4), "%r: acknowledged" % (opts,))


def pump(a, b):
    try:
        while data := a.recv(65536):
            b.sendall(data)
    except OSError:
        pass


def test_a_device_that_answers_after_the_end_does_no_harm():
    """`log-rebuild` opens a device that takes its time, and the server ends meanwhile."""
    with Bed():
        other = subprocess.Popen([WEIR, "serve", "mem:64M", "--name", "x", "--nbd", "unix:other"], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.PIPE, text=True)
        try:
            while not other.stderr.readline().strip().endswith("ready"):
                pass
            slow = socket.socket(socket.AF_UNIX)
            slow.bind("slow")
            slow.listen(1)
            slow.settimeout(10)
            s = Serve("a.raw")
            with socket.socket(socket.AF_UNIX) as k:
                k.connect("control")
                k.sendall(b'{"command": "log-rebuild", "device": "nbd+unix:///x?socket=slow"}\n')
                near = slow.accept()[0]
                s.proc.send_signal(signal.SIGTERM)
                time.sleep(0.3)
                far = socket.socket(socket.AF_UNIX)
                far.connect("other")
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()
                status = s.proc.wait(10)
                check(status == 0, "the server ends in order: %d" % status)
        finally:
            other.kill()
            other.wait()


if "\"log\"" in weir("log").stderr and "no" in weir("log").stderr:
    skip("this build has no `weir log`")
sys.exit(run_tests(tests_of(globals())))
