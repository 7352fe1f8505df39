#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""What the benches share: the load of the machine, and servers as processes."""
import os
import signal
import subprocess
import time

TICK = os.sysconf("SC_CLK_TCK")
GiB = 1 << 30
DISTURBED = 0.12	# of all processors, by others during a cell


def cpu_idle():
    with open("/proc/stat") as f:
        v = list(map(int, f.readline().split()[1:9]))
    return v[3] + v[4], sum(v)


def wait_quiet(limit=20.0, sample=1.0):
    """True once the machine was below 12 % busy for `sample` seconds; False if that did not happen within the limit."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        i0, t0 = cpu_idle()
        time.sleep(sample)
        i1, t1 = cpu_idle()
        if t1 > t0 and (i1 - i0) / (t1 - t0) > 0.88:
            return True
    return False


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as f:
        v = f.read().rsplit(")", 1)[1].split()
    return (int(v[11]) + int(v[12])) / TICK


class Server:
    """A server process on unix sockets in `d`; `uris` are its exports."""

    def __init__(self, d, argv, uris, sockets, env=None):
        for s in sockets:
            if os.path.exists(s):
                os.unlink(s)
        self.uris = uris
        self.err = open(os.path.join(d, "server.log"), "w")
        self.p = subprocess.Popen(argv, stdout=self.err, stderr=self.err, stdin=subprocess.DEVNULL, env=env)
        end = time.monotonic() + 20
        while not all(os.path.exists(s) for s in sockets) or not self.up():
            if self.p.poll() is not None or time.monotonic() > end:
                with open(self.err.name) as f:
                    raise RuntimeError(f"{argv[0]} did not start: {f.read()}")
            time.sleep(0.01)
        self.cpu0 = cpu_seconds(self.p.pid)

    def up(self):
        return subprocess.run(["nbdinfo", "--size", self.uris[0]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              check=False).returncode == 0

    def start_clock(self):
        self.cpu0 = cpu_seconds(self.p.pid)

    def cpu(self):
        return cpu_seconds(self.p.pid) - self.cpu0

    def stop(self):
        if self.p.poll() is None:
            self.p.send_signal(signal.SIGTERM)
        try:
            self.p.wait(10)
        except subprocess.TimeoutExpired:
            self.p.kill()
            self.p.wait()
        self.err.close()


class VhostServer(Server):
    def up(self):
        return True
