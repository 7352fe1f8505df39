#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The second level of the read cache of `weir serve`: it outlasts stops and crashes, and not a change of the image by somebody else.

usage: test_serve_cache_device.py WEIR
"""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from harness import *
from harness import require as check

WEIR = sys.argv[1]
FOLDER = tempfile.mkdtemp(prefix="weir-cache-device-")
NBD, CONTROL, IMAGE, QCOW2, DEVICE = (os.path.join(FOLDER, n) for n in ("nbd", "control", "a.raw", "b.qcow2", "device"))
MIB = 1 << 20


def run(*args):
    return subprocess.run([WEIR, *args], capture_output=True, text=True, timeout=60, check=False)


class Serve:
    running = []

    def __init__(self, *args):
        self.p = subprocess.Popen([WEIR, "serve", "--nbd", "unix:" + NBD, "--control", CONTROL, "--cache-size", "20M", "--cache-device", DEVICE,
                                   *args, IMAGE, QCOW2], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        Serve.running.append(self.p)
        line = self.p.stderr.readline()
        while line and "ready" not in line:
            line = self.p.stderr.readline()
        check(line, "the server starts")
        for name in ("a.raw", "b.qcow2"):
            check(self.ask("cache-set", volume=name, limit="1M")["ok"], "little memory")

    def ask(self, command, **args):
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(CONTROL)
            s.settimeout(30)
            s.sendall(json.dumps({"command": command, **args}).encode() + b"\n")
            return json.loads(s.makefile().readline())

    def second(self):
        return self.ask("stats")["result"]["cache"]["second"]

    def kept(self, volume):
        return self.ask("stats")["result"]["cache"]["volumes"][volume]["second"]["kept"]

    def read_all(self):
        for name in ("a.raw", "b.qcow2"):
            out = os.path.join(FOLDER, "out")
            subprocess.run(["nbdcopy", "--connections=1", "--requests=1", "--request-size=4096", "--no-extents",
                            f"nbd+unix:///{name}?socket={NBD}", out], check=True)
            with open(out, "rb") as f, open(IMAGE, "rb") as g:
                check(f.read() == g.read(), f"{name}: what is read is what the image holds")

    def end(self):
        self.p.send_signal(signal.SIGTERM)
        check(self.p.wait(20) == 0, "it ends well")
        self.p.stderr.close()

    def kill(self):
        self.p.kill()
        self.p.wait()
        self.p.stderr.close()


def write(path, at, data):
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(data)


def devices_are_made_and_others_refused():
    p = run("cache", "create", DEVICE)
    check(p.returncode == 1 and "--size" in p.stderr, p.stderr)
    p = run("cache", "create", "--size", "64M", DEVICE)
    check(p.returncode == 0 and os.stat(DEVICE).st_blocks * 512 >= 64 * MIB, "the file is there, with its space" + p.stderr)
    foreign = os.path.join(FOLDER, "foreign")
    with open(foreign, "wb") as f:
        f.write(b"precious" * 200000)
    p = run("cache", "create", foreign)
    check(p.returncode == 1 and "--force" in p.stderr, "what is no cache is not overwritten: " + p.stderr)
    p = run("serve", "--nbd", "unix:" + NBD, "--cache-device", foreign, "null:1M")
    check(p.returncode == 1 and "is no cache device" in p.stderr, "nor taken for one: " + p.stderr)
    with open(foreign, "rb") as f:
        check(f.read() == b"precious" * 200000, "and it is as it was")
    p = run("serve", "--nbd", "unix:" + NBD, "--cache-size", "8M", "--cache-device", DEVICE, "null:1M")
    check(p.returncode == 1 and "--cache-size" in p.stderr, "too little memory for an index: " + p.stderr)


def it_outlasts_stops_and_crashes():
    s = Serve()
    s.read_all()
    s.read_all()
    check(s.second()["hits"] > 500, f"what left memory comes from the device: {s.second()}")
    s.end()
    status = json.loads(run("cache", "status", "--json", DEVICE).stdout)
    check(all(v["settled"] for v in status["volumes"]), f"all is of use: {status}")
    for end in (Serve.kill, Serve.end):
        s = Serve()
        check(s.kept("a.raw") and s.kept("b.qcow2"), "it is kept")
        check(until(lambda: s.second()["state"] == "on", 10), "and found")
        check(s.second()["kept"] > 500, f"blocks of it: {s.second()}")
        s.read_all()
        end(s)


def it_does_not_outlast_a_change():
    data = os.urandom(8192)
    write(IMAGE, 100000, data)
    s = Serve()
    check(not s.kept("a.raw") and s.kept("b.qcow2"), "only the image that was changed begins anew")
    subprocess.run(["nbdcopy", IMAGE, f"nbd+unix:///b.qcow2?socket={NBD}"], check=True)
    s.read_all()
    # In the middle of it. Once more, since a read takes longer than a volume needs to rest where there is much else to do.
    subprocess.run(["nbdcopy", IMAGE, f"nbd+unix:///b.qcow2?socket={NBD}"], check=True)
    s.kill()
    s = Serve()
    check(not s.kept("b.qcow2"), "what was written to and had no time to rest is not kept")
    s.read_all()
    s.end()
    s = Serve("--secondarycache", "none")
    check(s.kept("a.raw") and s.kept("b.qcow2"), "it is kept")
    s.read_all()
    check(s.second()["hits"] == 0 and s.second()["fed"] == 0, f"and not used: {s.second()}")
    check(s.ask("cache-set", volume="a.raw", secondarycache="all")["ok"], "now it is")
    s.read_all()
    check(s.second()["hits"] > 0, f"used: {s.second()}")
    check(not s.ask("cache-set", volume="a.raw", secondarycache="some")["ok"], "no such setting")
    s.end()


def until(cond, seconds):
    for _ in range(int(seconds * 100)):
        if cond():
            return True
        time.sleep(0.01)
    return False


if not shutil.which("nbdcopy"):
    print("nbdcopy is missing (Debian: libnbd-bin)")
    sys.exit(77)
try:
    with open(IMAGE, "wb") as image:
        image.write(os.urandom(4 * MIB))
    check(run("image", "convert", "-O", "qcow2", IMAGE, QCOW2).returncode == 0, "an image")
    devices_are_made_and_others_refused()
    it_outlasts_stops_and_crashes()
    it_does_not_outlast_a_change()
finally:
    for p in Serve.running:     # after a failure; it would hold our output open
        p.kill()
        p.wait()
    shutil.rmtree(FOLDER)
