#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The life of `weir serve`: ready, names, sockets, the end, and the control socket.

usage: test_serve.py WEIR
"""
import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time

from harness import *
from harness import require as check

WEIR = sys.argv[1]
TIMEOUT = 20
HANGS = "delay:read=1h,write=1h,flush=1h:mem:64M"


class Serve:
    def __init__(self, *args, env=None, wait=True):
        self.dir = tempfile.mkdtemp(prefix="weir-serve-")
        self.nbd = os.path.join(self.dir, "nbd")
        self.control = os.path.join(self.dir, "control")
        self.log = os.path.join(self.dir, "log")
        argv = [WEIR, "serve", "--nbd", "unix:" + self.nbd, "--control", self.control, *args]
        with open(self.log, "w") as f:
            self.proc = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=f, stderr=f, env=dict(os.environ, **(env or {})))
        end = time.monotonic() + TIMEOUT
        while wait and "weir: ready\n" not in self.text():
            check(self.proc.poll() is None and time.monotonic() < end, "the server starts: " + self.text())
            time.sleep(0.01)

    def text(self):
        with open(self.log) as f:
            return f.read()

    def end(self, sig=signal.SIGTERM):
        """Returns (exit status, seconds)."""
        start = time.monotonic()
        self.proc.send_signal(sig)
        rc = self.proc.wait(TIMEOUT)
        return rc, time.monotonic() - start

    def __enter__(self):
        return self

    def __exit__(self, kind, value, tb):
        if kind:
            print(self.text())
        if self.proc.poll() is None:
            self.proc.kill()
            self.proc.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


class Control:
    def __init__(self, s):
        self.s = socket.socket(socket.AF_UNIX)
        self.s.connect(s.control)
        self.s.settimeout(TIMEOUT)
        self.f = self.s.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.f.close()
        self.s.close()

    def line(self):
        return json.loads(self.f.readline())

    def send(self, data):
        self.s.sendall(data)

    def do(self, command, **kw):
        self.send(json.dumps(dict(command=command, **kw)).encode() + b"\n")
        return self.line()

    def ok(self, command, **kw):
        r = self.do(command, **kw)
        check(r["ok"] is True, r)
        return r["result"]

    def error(self, data):
        self.send(data + b"\n")
        r = self.line()
        check(r["ok"] is False and r["error"], r)
        return r["error"]


def nbd_connect(s, name=b""):
    """A minimal client in transmission, with simple replies."""
    c = socket.socket(socket.AF_UNIX)
    c.connect(s.nbd)
    c.settimeout(TIMEOUT)
    check(len(c.recv(18, socket.MSG_WAITALL)) == 18, "the greeting")
    c.sendall(struct.pack(">IQII", 3, 0x49484156454F5054, 1, len(name)) + name)
    size = struct.unpack(">QH", c.recv(10, socket.MSG_WAITALL))[0]
    return c, size


def nbd_send(c, cmd, off=0, data=b"", length=None):
    c.sendall(struct.pack(">IHHQQI", 0x25609513, 0, cmd, 1, off, len(data) if length is None else length) + data)


def nbd_reply(c):
    reply = c.recv(16, socket.MSG_WAITALL)
    return struct.unpack(">IIQ", reply)[1] if len(reply) == 16 else None


def in_flight(s, n):
    """Waits until the server has so many requests of its clients."""
    end = time.monotonic() + TIMEOUT
    with Control(s) as k:
        while sum(c["in_flight"] for c in k.ok("status")["nbd"]["connections"]) < n:
            check(time.monotonic() < end, "%d requests are in flight" % n)
            time.sleep(0.005)


def ready_means_that_clients_can_connect_and_systemd_is_told():
    with tempfile.TemporaryDirectory() as d, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as n:
        path = os.path.join(d, "notify")
        n.bind(path)
        n.settimeout(TIMEOUT)
        with Serve("mem:64M", env={"NOTIFY_SOCKET": path}) as s:
            nbd_connect(s)[0].close()
            check(n.recv(1000).startswith(b"READY=1\n"), "READY=1")
            check(s.end()[0] == 0, "exit status")
            check(n.recv(1000).startswith(b"STOPPING=1\n"), "STOPPING=1")


def sigterm_and_sigint_end_it():
    for sig in (signal.SIGTERM, signal.SIGINT):
        with Serve("mem:64M") as s:
            c, _ = nbd_connect(s)
            nbd_send(c, 1, 0, b"x" * 4096)
            check(nbd_reply(c) == 0, "a write")
            rc, t = s.end(sig)
            check(rc == 0 and t < 5, "exit %d after %.1f s" % (rc, t))
            check(c.recv(1) == b"", "the client sees the end")
            check(not os.path.exists(s.nbd) and not os.path.exists(s.control), "the sockets are gone")


def a_request_in_flight_is_answered_before_the_end():
    with Serve("delay:write=200ms:mem:64M") as s:
        c, _ = nbd_connect(s)
        nbd_send(c, 1, 0, b"x" * 4096)
        in_flight(s, 1)
        s.proc.send_signal(signal.SIGTERM)
        check(nbd_reply(c) == 0, "the write is answered")
        check(s.proc.wait(TIMEOUT) == 0, "exit status")


def a_client_that_goes_on_sending_does_not_delay_the_end():
    with Serve("mem:64M") as s:
        c, _ = nbd_connect(s)
        c.setblocking(False)
        # Until the server has all the requests in flight that it takes. Small ones: 128 MiB of new memory for their data are work enough to outlast its second on a
        # machine that does other things, and that is not what this is about.
        with contextlib.suppress(BlockingIOError):
            while True:
                nbd_send(c, 0, 0, b"", 16384)
        rc, t = s.end()
        check(rc == 0 and t < 5, "exit %d after %.1f s" % (rc, t))


def a_hanging_image_does_not_delay_the_end():
    with Serve(HANGS) as s:
        c, _ = nbd_connect(s)
        nbd_send(c, 1, 0, b"x" * 4096)
        nbd_send(c, 0, 0, b"", 4096)
        in_flight(s, 2)
        rc, t = s.end()
        check(rc == 1 and t < 5, "exit %d after %.1f s" % (rc, t))
        check("'mem' hangs" in s.text(), s.text())
        check(not os.path.exists(s.nbd), "the socket is gone")


def volumes_are_found_by_name_and_the_first_is_the_default():
    with Serve("mem:1M", "mem:2M", "mem:3M", "--name", "one", "--name", "two", "--name", "three") as s:
        for name, size in ((b"", 1), (b"one", 1), (b"two", 2), (b"three", 3)):
            c, got = nbd_connect(s, name)
            check(got == size << 20, "%r has %d bytes" % (name, got))
            c.close()


def a_stale_socket_is_replaced_and_a_live_one_is_not():
    with Serve("mem:1M") as s:
        s.proc.kill()
        s.proc.wait()
        check(os.path.exists(s.nbd), "SIGKILL leaves the socket")
        argv = [WEIR, "serve", "mem:2M", "--nbd", "unix:" + s.nbd]
        second = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        try:
            while "ready" not in second.stderr.readline():
                check(second.poll() is None, "the second server starts")
            third = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT)
            check(third.returncode == 1 and third.stderr.count("\n") == 1, third.stderr)
            check("another process listens there" in third.stderr and s.nbd in third.stderr, third.stderr)
            c, size = nbd_connect(s)
            check(size == 2 << 20, "the second server still answers")
            c.close()
        finally:
            second.terminate()
            second.wait()
            second.stderr.close()
        check(not os.path.exists(s.nbd), "the socket is gone")


def a_socket_that_another_server_has_taken_over_is_left_alone():
    with Serve("mem:1M") as s:
        os.rename(s.nbd, s.nbd + ".old")
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(s.nbd)
            check(s.end()[0] == 0, "exit status")
            check(os.path.exists(s.nbd), "the other's socket is there")


def the_control_socket_is_private_and_knows_its_commands():
    with Serve("mem:64M", "--name", "disk") as s, Control(s) as k:
        check(stat.S_IMODE(os.stat(s.control).st_mode) == 0o600, "mode")
        check({"status", "stats", "tasks", "drain", "shutdown", "help"} <= set(k.ok("help")), "help")
        c, _ = nbd_connect(s)
        r = k.ok("status")
        check(r["state"] == "serving" and r["pid"] == s.proc.pid and r["log"] is None, r)
        check(r["volumes"][0]["name"] == "disk", r)
        check([x["export"] for x in r["nbd"]["connections"]] == ["disk"], r)
        check("unix:" + s.nbd in r["nbd"]["addresses"], r)
        nbd_send(c, 0, 0, b"", 4096)
        nbd_reply(c)
        r = k.ok("stats")
        check(r["volumes"] and r["runtime"]["spawned"] > 0, r)
        check(any(t["name"] == "nbd connection" for t in k.ok("tasks")["tasks"]), "tasks")
        check(k.do("help", id=[1, {"a": None}])["id"] == [1, {"a": None}], "the id is repeated")
        check("no log" in k.error(b'{"command": "drain"}'), "drain without a log")


def the_first_answer_comes_from_a_process_that_has_given_up_what_it_can():
    """Commands are carried out with the rights that are left, though the socket is there before."""
    user = () if os.geteuid() else ("--user", "nobody")
    with Serve("mem:1M", "null:1M", "--reactors", "2", *user, wait=False) as s:
        end, k = time.monotonic() + TIMEOUT, None
        while not k:
            check(s.proc.poll() is None and time.monotonic() < end, "it listens: " + s.text())
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                k = Control(s)
        with k:
            r = k.ok("status")
            with open(f"/proc/{s.proc.pid}/status") as f:
                st = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
        check(r["state"] == "serving" and len(r["volumes"]) == 2 and r["nbd"]["addresses"], r)
        check(st["NoNewPrivs"] == "1" and (st["Seccomp"] == "2") == r["confined"]["seccomp"], st)
        check(not user or (set(st["Uid"].split()) == {"65534"} and int(st["CapPrm"], 16) == 0 and r["confined"]["uid"] == 65534), st)


def malformed_requests_get_precise_errors():
    with Serve("mem:64M") as s, Control(s) as k:
        for data, text in ((b"x", "not JSON"), (b"{", "not JSON"), (b"[]", "object"), (b"3", "not JSON"), (b"{}", "command"),
                           (b'{"command": 3}', "command"), (b'{"command": "no"}', "'no'"), (b'{"command": "\xff"}', "not JSON"),
                           (b'{"command": "status", "x": 1}', '"x"'), (b'{"command": "help", "command": "help"}', "not JSON"),
                           (b"[" * 4000, "nested"), (b'{"command": "status"} x', "not JSON"), (b'{"command": "a\\u0000b"}', "JSON")):
            check(text in k.error(data), data[:50])
        k.send(b"y" * 100000 + b"\n")
        check("4096" in k.line()["error"], "a long line")
        k.send(b'\n\r\n  \n{"command": "help"}\r\n')
        check(k.line()["ok"], "empty lines are skipped")
        k.send(b'{"command": "help"}\n' * 100)
        for _ in range(100):
            check(k.line()["ok"], "many requests in one piece")
        for i in range(len(b'{"command": "help"}\n')):
            k.send(b'{"command": "help"}\n'[i:i + 1])
        check(k.line()["ok"], "one request in many pieces")


def many_and_slow_control_clients_are_bounded():
    with Serve("mem:64M") as s:
        idle = [Control(s) for _ in range(100)]
        with Control(s) as k:
            k.ok("status")
            slow = Control(s)
            slow.s.setblocking(False)
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                while True:
                    slow.s.send(b'{"command": "tasks"}\n' * 100)
            k.ok("status")
            slow.s.close()
        for i in idle:
            i.__exit__()
        with Control(s) as k:
            k.ok("status")
        check(s.end()[0] == 0, "exit status")


def shutdown_ends_the_process():
    with Serve("mem:64M") as s, Control(s) as k:
        k.ok("shutdown")
        check(s.proc.wait(TIMEOUT) == 0, "exit status")


def fails(*args):
    """What a server says that cannot start."""
    with Serve(*args, wait=False) as s:
        check(s.proc.wait(TIMEOUT) == 1, "it does not start: " + s.text())
        return s.text()


def content(path):
    with open(path) as f:
        return f.read()


def a_start_that_fails_leaves_the_pid_file_of_another():
    with Serve("mem:1M") as d:
        pid, image, other = (os.path.join(d.dir, x) for x in ("pid", "image", "other"))
        for path in (image, other):
            with open(path, "wb") as f:
                f.truncate(1 << 20)
        with Serve("--pid-file", pid, image) as s:
            own = f"{s.proc.pid}\n"
            # The file is asked for before the image, which is locked as well.
            for disk in (image, other):
                text = fails("--pid-file", pid, disk)
                check(f"belongs to process {s.proc.pid}, which is running" in text, text)
                check(content(pid) == own, "the first's number stays")
            s.proc.kill()
            s.proc.wait()
        check(content(pid) == own, "a kill leaves it")
        # Nothing holds it now, and it says still that its process was killed.
        check("no such file" in fails("--pid-file", pid, os.path.join(d.dir, "absent")), "the image is not there")
        with Serve(other):
            check("lock" in fails("--pid-file", pid, other), "the image is locked")
        check("control" in fails("--pid-file", pid, "--control", os.path.join(d.dir, "absent", "c"), image), "no place for the control socket")
        check(content(pid) == own, "starts that fail leave it")
        with Serve("--pid-file", pid, image) as s:
            check(content(pid) == f"{s.proc.pid}\n", "the next has it")
            check(s.end()[0] == 0 and not os.path.exists(pid), "and takes it away with all written")


def an_end_without_a_cache_device_that_hangs_takes_the_pid_file_away():
    with Serve("mem:1M") as d:
        pid, device, image = (os.path.join(d.dir, x) for x in ("pid", "device", "image"))
        with open(image, "wb") as f:
            f.truncate(1 << 20)
        subprocess.run([WEIR, "cache", "create", "--size", "64M", device], check=True, stderr=subprocess.DEVNULL)
        with Serve("--cache-size", "20M", "--cache-device", "delay:write=1h,flush=1h:" + device, "--pid-file", pid, image) as s:
            check(os.path.exists(pid) and s.end()[0] == 0, "nothing is lost with it: " + s.text())
            check("the cache device hangs" in s.text() and not os.path.exists(pid), s.text())


def a_pid_file_of_another_at_its_place_is_left():
    with Serve("mem:1M") as d:
        pid = os.path.join(d.dir, "pid")
        with Serve("--pid-file", pid, "mem:1M") as s:
            os.unlink(pid)
            with Serve("--pid-file", pid, "mem:1M") as t:
                check(s.end()[0] == 0 and content(pid) == f"{t.proc.pid}\n", "the second's stays")


def polling_does_not_change_what_is_served():
    with Serve("mem:1M", "--poll-us", "50") as s:
        c, _ = nbd_connect(s)
        for i in range(100):
            nbd_send(c, 1, 512 * i, b"p" * 512)
            check(nbd_reply(c) == 0, "a write")


sys.exit(run_tests(tests_of(globals())))
