# SPDX-License-Identifier: MIT
"""`weir serve` for a test, and how its figures are asked for."""
import json
import os
import signal
import socket
import subprocess
import sys
import time

from harness import MIB, require, run

try:
    import nbd
except ImportError:
    nbd = None

WEIR = os.path.abspath(sys.argv[1])
TIMEOUT = 60
BLOCK = 4096
SPAN = 8 * MIB         # of an image that a Writer goes round in


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
    """In the current folder: sockets NAME.nbd and NAME.control, messages in NAME.out. At the end of the block it is killed if it still runs."""

    def __init__(self, *args, name="weir", env=None):
        self.name = name
        with open(name + ".out", "w") as f:
            self.proc = subprocess.Popen([WEIR, "serve", "--nbd", "unix:%s.nbd" % name, "--control", name + ".control", *args], stdin=subprocess.DEVNULL,
                                         stdout=f, stderr=f, env=dict(os.environ, **env) if env else None)
        self.wait_for("weir: ready\n")

    def text(self):
        with open(self.name + ".out") as f:
            return f.read()

    def wait_for(self, text, timeout=TIMEOUT):
        end = time.monotonic() + timeout
        while text not in self.text():
            require(self.proc.poll() is None and time.monotonic() < end, "weir says %r: %s" % (text, self.text()))
            time.sleep(0.01)

    def uri(self, name="v"):
        return "nbd+unix:///%s?socket=%s.nbd" % (name, self.name)

    def status(self, timeout=TIMEOUT):
        return control(self.name + ".control", timeout, command="status")

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

    def dirty(self):
        return self.status()["volumes"][0]["disk"]["dirty_bytes"]

    def end(self):
        """Tells it to end, and sees to it that this went well and took less than a second: it has an alarm for 0.9 s, set by the signal, whose clock is
        the kernel's, and which ends it with status 1."""
        began = time.monotonic()
        self.proc.send_signal(signal.SIGTERM)
        status = self.proc.wait(TIMEOUT)
        took = time.monotonic() - began
        require(status == 0 and "stopping takes too long" not in self.text(), "ends well: status %d after %.2f s: %s" % (status, took, self.text()))
        return took

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def until(what, cond, timeout=TIMEOUT):
    end = time.monotonic() + timeout
    while not cond():
        require(time.monotonic() < end, what)
        time.sleep(0.02)


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
        self.h.pwrite(content(n), n * BLOCK % SPAN)
        self.h.flush()
        self.have[n * BLOCK % SPAN] = n
        return time.monotonic() - began

    def write_many(self, numbers, flush=False):
        """So quickly that nothing of it has reached the image when it returns."""
        for n in numbers:
            self.h.pwrite(content(n), n * BLOCK % SPAN)
            self.have[n * BLOCK % SPAN] = n
        if flush:
            self.h.flush()

    def verify(self):
        for off, n in self.have.items():
            require(self.h.pread(BLOCK, off) == content(n), "block %d at %d is there" % (n, off))

    def write_until_it_fails(self, numbers, pause):
        """Where the write was that failed, if one did: what is there now is not known."""
        for n in numbers:
            try:
                self.write(n)
            except nbd.Error:
                return n * BLOCK % SPAN
            time.sleep(pause)
        return None

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


def refused(*options):
    p = run(WEIR, "serve", "--nbd", "unix:refused.nbd", *options, timeout=60)
    require(p.returncode, "is refused")
    return p.stderr
