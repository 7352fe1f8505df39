# SPDX-License-Identifier: MIT
"""`weir serve` on images of a test's cluster, and how its figures are asked for."""
import json
import os
import signal
import socket
import subprocess
import sys
import time

from harness import require

WEIR = os.path.abspath(sys.argv[1])
TIMEOUT = 60
BLOCK = 4096


def control(path, timeout=TIMEOUT, **request):
    """The result of a command on the control socket."""
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(timeout)
        s.connect(path)
        s.sendall(json.dumps(request).encode() + b"\n")
        data = b""
        while not data.endswith(b"\n"):
            more = s.recv(1 << 16)
            require(more, "the control socket answers")
            data += more
    answer = json.loads(data.splitlines()[-1])
    require(answer["ok"], answer)
    return answer["result"]


class Serve:
    """In the current folder: sockets `nbd` and `control`, messages in `out`. At the end of the block it is killed if it still runs."""

    def __init__(self, *args, ready=True):
        with open("out", "w") as f:
            self.proc = subprocess.Popen([WEIR, "serve", "--nbd", "unix:nbd", "--control", "control", *args], stdin=subprocess.DEVNULL,
                                         stdout=f, stderr=f)
        self.wait_for("weir: ready\n")

    def text(self):
        with open("out") as f:
            return f.read()

    def wait_for(self, text, timeout=TIMEOUT):
        end = time.monotonic() + timeout
        while text not in self.text():
            require(self.proc.poll() is None and time.monotonic() < end, "weir says %r: %s" % (text, self.text()))
            time.sleep(0.01)

    def uri(self, name="v"):
        return "nbd+unix:///%s?socket=nbd" % name

    def status(self, timeout=TIMEOUT):
        return control("control", timeout, command="status")

    def disk(self):
        """The lowest layer of the first volume."""
        d = self.status()["volumes"][0]["disk"]
        while "file" in d:
            d = d["file"]
        return d

    def kill(self):
        if self.proc.poll() is None:
            self.proc.kill()
        self.proc.wait()

    def end(self):
        """(exit status, seconds)"""
        began = time.monotonic()
        self.proc.send_signal(signal.SIGTERM)
        return self.proc.wait(TIMEOUT), time.monotonic() - began

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def until(what, cond, timeout=TIMEOUT):
    end = time.monotonic() + timeout
    while not cond():
        require(time.monotonic() < end, what)
        time.sleep(0.02)
