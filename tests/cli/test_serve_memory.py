#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The memory of `weir serve` stays within --memory, as the kernel counts it, whatever clients do; it shrinks within a second when told to.

usage: test_serve_memory.py WEIR VHOST_BENCH
"""
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

from harness import *
from harness import require as check

WEIR, BENCH = sys.argv[1:3]
# A sanitizer's own memory is beyond any budget.
SANITIZED = b"__asan_init" in open(WEIR, "rb").read() or b"__tsan_init" in open(WEIR, "rb").read()


def resident(pid, guest=False):
    """What the kernel says, to the page: all but the memory of a guest, a memory file that is the guest's."""
    with open(f"/proc/{pid}/smaps" if guest else f"/proc/{pid}/smaps_rollup") as f:
        lines = f.read().splitlines()
    total, is_guest = 0, False
    for line in lines:
        if line.startswith("Rss:") and not is_guest:
            total += int(line.split()[1]) << 10
        elif not line.split()[0].endswith(":"):
            is_guest = "/memfd:guest" in line
    return total


class Serve:
    all, folders = [], []

    def __init__(self, *args, size=64, log=False, guest=False, more=()):
        self.guest = guest
        self.dir = tempfile.mkdtemp(prefix="weir-memory-")
        self.nbd, self.control, self.image = (os.path.join(self.dir, n) for n in ("nbd", "control", "a.raw"))
        piece = os.urandom(4 * MIB)
        with open(self.image, "wb") as f:
            for _ in range(size // 4):
                f.write(piece)
        if log:
            subprocess.run([WEIR, "log", "create", "--size", "128M", os.path.join(self.dir, "log")], check=True, stdout=subprocess.DEVNULL)
            args += ("--cache", "writeback", "--log", os.path.join(self.dir, "log"))
        self.p = subprocess.Popen([WEIR, "serve", "--nbd", "unix:" + self.nbd, "--control", self.control, *args, self.image, *more],
                                  stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        Serve.all.append(self)
        line = self.p.stderr.readline()
        while line and "ready" not in line:
            line = self.p.stderr.readline()
        check(line, "the server starts")
        self.samples, self.stop = [], False
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    def watch(self):
        while not self.stop and self.p.poll() is None:
            try:
                self.samples.append((time.monotonic(), resident(self.p.pid, self.guest)))
            except (OSError, LookupError):
                return  # it ends
            time.sleep(0.06 if self.guest else 0.02)

    def ask(self, command, **args):
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(self.control)
            s.settimeout(30)
            s.sendall(json.dumps({"command": command, **args}).encode() + b"\n")
            return json.loads(s.makefile().readline())

    def memory(self):
        return self.ask("memory")["result"]

    def uri(self):
        return f"nbd+unix:///a.raw?socket={self.nbd}"

    def read_all(self, size=1 * MIB):
        subprocess.run(["nbdcopy", "--connections=4", "--requests=16", f"--request-size={size}", "--no-extents", self.uri(), "null:"], check=True)

    def write_all(self):
        subprocess.run(["nbdcopy", "--connections=4", "--requests=16", "--request-size=1048576", "--flush", self.image + ".new", self.uri()], check=True)

    def most(self, since=0.0):
        return max([resident(self.p.pid, self.guest)] + [v for t, v in self.samples if t >= since])

    def end(self):
        self.stop = True
        self.watcher.join()
        self.p.terminate()
        rc = self.p.wait(20)
        check(rc == 0, f"it ends well: {rc}: {self.p.stderr.read()}")
        self.p.stderr.close()
        shutil.rmtree(self.dir)


def within(what, bytes_, limit):
    check(SANITIZED or bytes_ <= limit * 1.02, f"{what}: {bytes_ / MIB:.1f} MiB of {limit / MIB:.0f}")


def resident_memory_stays_within_the_budget_under_load():
    limit = 88 * MIB
    s = Serve("--memory", str(limit), "--cache-size", "200M", "--cache", "writeback")
    for size in (1 * MIB, 262144):
        s.read_all(size)
    m = s.memory()
    print(f"reads: at most {s.most() / MIB:.1f} MiB resident, {m}")
    check(m["limit"] == limit and m["committed"] <= limit, f"so says the budget: {m}")
    within("reads", s.most(), limit)
    check(SANITIZED or s.most() > limit * 0.6, f"memory that is there is used: {s.most() / MIB:.1f} MiB")
    check(sum(p["bytes"] for p in m["parts"].values()) <= m["committed"], "the parts are no more than the sum")
    # Told to, while it works.
    reader = threading.Thread(target=s.read_all)
    reader.start()
    small = 70 * MIB
    # By its own clock it answers after a second at the latest, whether it has shrunk or not.
    r = s.ask("memory", size=small)
    answered = time.monotonic()
    check(r["ok"] and r["result"]["committed"] <= small, f"it has shrunk: {r}")
    reader.join()
    s.read_all()
    print(f"when shrunk at most {s.most(answered) / MIB:.1f} MiB")
    within("smaller", s.most(answered), small)
    p = subprocess.run([WEIR, "stat", "--memory", s.control], capture_output=True, text=True, timeout=30, check=True)
    check("read cache" in p.stdout and f"of {small // MIB} MiB" in p.stdout, p.stdout)
    p = subprocess.run([WEIR, "stat", "--prometheus", s.control], capture_output=True, text=True, timeout=30, check=True)
    check(f"weir_memory_limit_bytes {small}" in p.stdout and 'weir_memory_bytes{part="NBD requests"}' in p.stdout, p.stdout[-2000:])
    # And back.
    subprocess.run([WEIR, "stat", "--json", "--set-memory", str(limit), s.control], stdout=subprocess.DEVNULL, timeout=30, check=True)
    deadline = time.monotonic() + 20
    while s.memory()["parts"]["read cache"]["bytes"] < 24 * MIB and time.monotonic() < deadline:
        s.read_all()
    check(s.memory()["parts"]["read cache"]["bytes"] >= 24 * MIB, "the cache has grown back")
    within("grown back", s.most(), limit)
    s.end()


def so_it_does_with_a_log_that_is_written():
    limit = 96 * MIB
    s = Serve("--memory", str(limit), "--drain", log=True, size=32)
    shutil.copy(s.image, s.image + ".new")
    s.write_all()
    s.read_all()
    m = s.memory()
    print(f"writes: at most {s.most() / MIB:.1f} MiB resident, {m}")
    within("writes", s.most(), limit)
    check(m["parts"]["write log"]["floor"] >= 24 * MIB and m["committed"] <= limit, f"the log's buffers count in full: {m}")
    s.ask("drain")
    check(s.memory()["parts"]["destage buffers"]["peak"] > 0, f"and those of destage as they are used: {s.memory()}")
    s.end()


def large_requests_are_served_over_a_full_cache():
    limit = 96 * MIB
    s = Serve("--memory", str(limit), "--cache-size", "200M", "--cache", "writeback")
    for size in (65536, 32 * MIB):
        before, full = time.monotonic(), False
        while not full and time.monotonic() - before < 15:
            subprocess.run(["nbdcopy", "--connections=1", "--requests=1", f"--request-size={size}", "--no-extents", s.uri(), "null:"], check=True, timeout=20)
            m = s.memory()
            full = size > 65536 or limit - m["committed"] < 8 * MIB
        print(f"reads of {size} bytes: {time.monotonic() - before:.1f} s, {m}")
        check(full, "the cache has what is left")
    within("large reads", s.most(), limit)
    s.end()


class Folder:
    """With a qcow2 image of 16 MiB, a cache device and a key."""

    def __init__(self):
        self.path = tempfile.mkdtemp(prefix="weir-memory-")
        Serve.folders.append(self.path)
        self.qcow2, self.device, self.file = (os.path.join(self.path, n) for n in ("b.qcow2", "device", "file"))
        with open(self.file, "wb") as f:
            f.write(os.urandom(16 * MIB))
        subprocess.run([WEIR, "image", "convert", "-O", "qcow2", self.file, self.qcow2], check=True, stdout=subprocess.DEVNULL)
        self.keys = os.path.join(self.path, "keys.psk")
        with open(self.keys, "w") as f:
            f.write("vm:" + 32 * "5a" + "\n")
        os.chmod(self.keys, 0o600)


def tls_formats_and_several_reactors_are_within_it():
    limit, f = 84 * MIB, Folder()
    s = Serve("--memory", str(limit), "--cache-size", "200M", "--reactors", "2", "--tls", "require", "--tls-creds", f.path, "--cache", "writeback",
              "--name", "a.raw", "--name", "b.qcow2", size=32, more=(f.qcow2,))
    copies = [subprocess.Popen(["nbdcopy", "--connections=4", "--requests=16", "--request-size=1048576", "--no-extents",
                                f"nbds+unix://vm@/{name}?socket={s.nbd}&tls-psk-file={f.keys}", "null:"]) for name in ("a.raw", "b.qcow2")]
    check([c.wait(60) for c in copies] == [0, 0], "all is read")
    m = s.memory()
    print(f"TLS: at most {s.most() / MIB:.1f} MiB resident, {m}")
    check(m["parts"]["NBD connections"]["peak"] > 300 << 10 and m["committed"] <= limit, f"sessions count: {m}")
    within("TLS", s.most(), limit)
    s.end()


def so_are_the_second_level_files_of_the_host_and_virtual_machines():
    limit, f = 84 * MIB, Folder()
    vm = os.path.join(f.path, "vm")
    made = run(WEIR, "cache", "create", "--size", "64M", f.device)
    check(made.returncode == 0, made.stderr)
    fuse = ["--fuse", f.file] if os.access("/dev/fuse", os.W_OK) and os.geteuid() == 0 else []
    s = Serve("--memory", str(limit), "--cache-size", "200M", "--cache-device", f.device, "--cache", "writeback", *fuse, "--vhost-user", vm,
              "--vhost-user", vm + "2,volume=b.qcow2", "--name", "a.raw", "--name", "b.qcow2", size=32, guest=True, more=(f.qcow2,))
    for name in ("a.raw", "b.qcow2", "a.raw"):
        subprocess.run(["nbdcopy", "--requests=16", "--request-size=262144", "--no-extents", f"nbd+unix:///{name}?socket={s.nbd}", "null:"], check=True)
        if fuse and name == "b.qcow2":
            subprocess.run(["dd", "if=" + f.file, "of=/dev/null", "bs=1M", "status=none"], check=True)
    # A machine's memory is its own: requests go from there to the cache and back.
    for path, rw in ((vm, "randread"), (vm + "2", "randwrite")):
        out = run(BENCH, path, rw, "qd=32", "bs=65536", "queues=2", "ops=300", "seconds=60").stdout
        check(json.loads(out)["ops"] >= 300, out)
    m, second = s.memory(), s.ask("stats")["result"]["cache"]["second"]
    print(f"second level, {'FUSE, ' if fuse else ''}vhost-user: at most {s.most() / MIB:.1f} MiB resident, {m}")
    check(second["written_bytes"] > 8 * MIB and m["committed"] <= limit, f"it is fed: {second}")
    within("second level", s.most(), limit)
    s.end()


class Client:
    """Of one export."""

    def __init__(self, server, name):
        self.s = socket.socket(socket.AF_UNIX)
        self.s.settimeout(15)
        self.s.connect(server.nbd)
        self.f = self.s.makefile("rb")
        self.name = name

    def begin(self):
        self.want(18)
        self.s.sendall(struct.pack(">IQII", 3, 0x49484156454F5054, 1, len(self.name)) + self.name.encode())
        self.want(10)
        return self

    def want(self, n):
        got = self.f.read(n)
        check(len(got) == n, f"the server sends {n} bytes and not {len(got)}")
        return got

    def request(self, kind, off, length):
        self.s.sendall(struct.pack(">IHHQQI", 0x25609513, 0, kind, 7, off, length))

    def read(self, off, length):
        self.request(0, off, length)
        check(self.want(16)[4:8] == bytes(4), "a read succeeds")
        self.want(length)

    def close(self):
        self.f.close()
        self.s.close()


def clients_of_one_export_leave_some_of_a_small_budget_to_the_others():
    s = Serve("--memory", str(96 * MIB), "--cache-size", "200M", "--cache", "writeback", "--name", "a.raw", "--name", "mem", size=64, more=("mem:64M",))
    slow = [Client(s, "a.raw").begin() for _ in range(4)]
    for c in slow:
        c.request(1, 0, 32 * MIB)   # and no payload
    time.sleep(0.2)
    other = Client(s, "mem").begin()
    before = time.monotonic()
    for i in range(4):
        other.read(8 * MIB * i, 8 * MIB)
    took = time.monotonic() - before
    m = s.memory()
    print(f"{took:.2f} s, {m}")
    check(took < 5, f"another export is served: {took:.1f} s")
    for c in slow + [other]:
        c.close()
    s.end()


def what_one_export_has_free_another_one_gets():
    s = Serve("--memory", str(72 * MIB), "--cache-size", "4M", "--cache", "writeback", "--name", "a.raw", "--name", "mem", size=64, more=("mem:64M",))
    a, b = Client(s, "a.raw").begin(), Client(s, "mem").begin()
    a.read(0, 32 * MIB)
    before = time.monotonic()
    for i in range(4):      # a's pool is in use, and has 32 MiB
        a.read(0, 4096)
        b.read(0, 32 * MIB)
        a.read(0, 32 * MIB)
    took = time.monotonic() - before
    print(f"{took:.2f} s, {s.memory()}")
    check(took < 10, f"they take turns: {took:.1f} s")
    a.close()
    b.close()
    s.end()


def a_burst_of_clients_over_a_full_cache_is_let_in():
    s = Serve("--memory", str(72 * MIB), "--cache-size", "200M", "--cache", "writeback")
    subprocess.run(["nbdcopy", "--connections=1", "--requests=1", "--request-size=65536", "--no-extents", s.uri(), "null:"], check=True, timeout=20)
    clients = [Client(s, "a.raw") for _ in range(200)]
    for c in clients:
        c.begin().read(0, 4096)
    st = s.ask("status")["result"]["nbd"]
    check(st["refused"] == 0, f"nobody is refused: {st['refused']} of {st['accepted']}")
    for c in clients:
        c.close()
    s.end()


def what_cannot_fit_is_refused_by_name():
    p = subprocess.run([WEIR, "serve", "--nbd", "unix:/tmp/none", "--memory", "40M", "null:1M"], capture_output=True, text=True, check=False)
    check(p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr)
    least = re.search(r"at least (\d+) MiB is needed: program 16 MiB, .*NBD requests 2 MiB", p.stderr)
    check(least, p.stderr)
    s = Serve("--memory", least[1] + "M", size=4)
    r = s.ask("memory", size="30M")
    check(not r["ok"] and "program 16 MiB" in r["error"], f"nor at run time: {r}")
    check(s.memory()["limit"] == int(least[1]) * MIB, "the limit is as before")
    s.read_all()
    within("the least", s.most(), int(least[1]) * MIB)
    s.end()


def without_leftovers(test):
    def run_it():
        try:
            test()
        finally:
            for s in Serve.all:
                s.p.kill()
                shutil.rmtree(s.dir, ignore_errors=True)
            for path in Serve.folders:
                shutil.rmtree(path, ignore_errors=True)
    run_it.__name__ = test.__name__
    return run_it


need("nbdcopy")
sys.exit(run_tests([without_leftovers(t) for t in (resident_memory_stays_within_the_budget_under_load, so_it_does_with_a_log_that_is_written,
                                                    tls_formats_and_several_reactors_are_within_it, so_are_the_second_level_files_of_the_host_and_virtual_machines,
                                                    large_requests_are_served_over_a_full_cache,
                                                    clients_of_one_export_leave_some_of_a_small_budget_to_the_others,
                                                    what_one_export_has_free_another_one_gets,
                                                    a_burst_of_clients_over_a_full_cache_is_let_in,
                                                    what_cannot_fit_is_refused_by_name)], chosen=sys.argv[3:]))
