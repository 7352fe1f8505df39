#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""`weir serve --vhost-user`: sockets and their disks, options, status, the end.

usage: test_serve_vhost.py WEIR VHOST_BENCH
"""
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import harness

WEIR, BENCH = sys.argv[1:3]


def check(cond, what):
    harness.check(what, cond)


def refused(rc, text, *args):
    p = subprocess.run([WEIR, "serve", *args], capture_output=True, text=True, timeout=20, check=False)
    check(p.returncode == rc and text in p.stderr and p.stderr.count("\n") == 1, f"{args}: {p.returncode}: {p.stderr}")


def control(path, **request):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        s.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(s.makefile().readline())
        return answer["result"] if answer["ok"] else answer["error"]


def resize(ctl):
    check(control(ctl, command="resize", volume="two", size="64M") == {"size": 64 << 20}, "it grows")
    check(control(ctl, command="resize", volume="two", size=(64 << 20) + 512) == {"size": (64 << 20) + 512}, "it grows by a sector")
    check("lose its end" in control(ctl, command="resize", volume="two", size="16M"), "it does not shrink by chance")
    check(control(ctl, command="resize", volume="two", size="16M", shrink=True) == {"size": 16 << 20}, "it shrinks when told to")
    for size in (0, -1, 1000, "x", "", None, [], (1 << 63) - 512, "16E"):
        check("multiple of 512" in control(ctl, command="resize", volume="two", size=size), f"the size {size} is refused")
    check("no volume 'six'" in control(ctl, command="resize", volume="six", size="1G"), "an unknown volume is named")
    sizes = [v["size"] for v in control(ctl, command="status")["volumes"]]
    check(sizes == [16 << 20, 16 << 20], f"sizes: {sizes}")


def bench(path, *args):
    p = subprocess.run([BENCH, path, *args], capture_output=True, text=True, timeout=60, check=False)
    check(p.returncode == 0, f"a front end on {path}: {p.stderr}")
    return json.loads(p.stdout) if p.returncode == 0 else {}


def main():
    refused(2, "nothing would be served", "mem:1M")
    refused(2, "begins with no path", "--vhost-user", ",queues=1", "mem:1M")
    refused(2, "no path of a socket", "--vhost-user", "x" * 120, "mem:1M")
    refused(2, "queues", "--vhost-user", "s,queues=65", "mem:1M")
    refused(2, "queues", "--vhost-user", "s,queues=0", "mem:1M")
    refused(2, "block-size", "--vhost-user", "s,block-size=1000", "mem:1M")
    refused(2, "serial", "--vhost-user", "s,serial=" + "x" * 21, "mem:1M")
    refused(2, "color", "--vhost-user", "s,color=red", "mem:1M")
    with tempfile.TemporaryDirectory(prefix="weir-vhost-") as d:
        a, b, c = (os.path.join(d, n) for n in ("a", "b,b", "c"))
        ctl = os.path.join(d, "control")
        p = subprocess.run([WEIR, "serve", "--vhost-user", a, "--vhost-user", c, "mem:1M"], capture_output=True, text=True, timeout=20, check=False)
        check(p.returncode == 1 and "more sockets than disks" in p.stderr, p.stderr)
        p = subprocess.run([WEIR, "serve", "--vhost-user", a + ",volume=x", "mem:1M"], capture_output=True, text=True, timeout=20, check=False)
        check(p.returncode == 1 and "no volume 'x'" in p.stderr, p.stderr)
        argv = [WEIR, "serve", "--control", ctl, "--vhost-user", a, "--vhost-user", b.replace(",", ",,") + ",queues=2,serial=number-1", "--vhost-user",
                c + ",volume=one", "--nbd", "unix:" + os.path.join(d, "n"), "--name", "one", "--name", "two", "mem:16M", "mem:32M"]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as server:
            lines = []
            while "weir: ready\n" not in lines:
                lines.append(server.stderr.readline())
                check(lines[-1], "the server starts")
            for path in (a, b, c):
                check(f"weir: vhost-user on {path}\n" in lines, f"{path} is announced")
            bench(a, "randwrite", "qd=4", "seconds=1")
            bench(b, "randwrite", "queues=2", "qd=16", "seconds=1")
            bench(c, "randread", "seconds=1")
            status = control(ctl, command="status")
            check([v["volume"] for v in status["vhost_user"]] == ["one", "two", "one"], "the sockets' disks")
            check(all(v["requests"] > 0 and v["errors"] == 0 and not v["connected"] for v in status["vhost_user"]), f"{status['vhost_user']}")
            resize(ctl)
            # a second front end waits; the first one, that says nothing, does not keep the process from its end
            hold = socket.socket(socket.AF_UNIX)
            hold.connect(a)
            end = time.monotonic() + 20
            while not control(ctl, command="status")["vhost_user"][0]["connected"]:
                check(time.monotonic() < end, "connected")
                time.sleep(0.005)
            started = time.monotonic()
            server.send_signal(signal.SIGTERM)
            check(server.wait(10) == 0, "the end")
            check(time.monotonic() - started < 5, "the end comes soon")
            check(not any(os.path.exists(path) for path in (a, b, c)), "no socket is left")
    sys.exit(harness.status())


main()
