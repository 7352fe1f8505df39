# SPDX-License-Identifier: MIT
"""What the NBD interop tests share: a server process, a client that speaks raw bytes, and checks.

Every test is called as `nbd_X.py WEIR`.
"""
import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

from harness import *
from harness import require as check

WEIR = sys.argv[1] if len(sys.argv) > 1 else "weir"
TIMEOUT = 20

OPT_MAGIC = 0x49484156454F5054
REP_MAGIC = 0x3E889045565A9
REQUEST_MAGIC = 0x25609513
EXT_REQUEST_MAGIC = 0x21E41C71
SIMPLE_MAGIC = 0x67446698
STRUCTURED_MAGIC = 0x668E33EF
EXT_REPLY_MAGIC = 0x6E8A278C

EXPORT_NAME, ABORT, LIST, STARTTLS, INFO, GO, STRUCTURED, LIST_META, SET_META, EXTENDED = 1, 2, 3, 5, 6, 7, 8, 9, 10, 11
ACK, SERVER, REP_INFO, META = 1, 2, 3, 4
ERR = 1 << 31
UNSUP, POLICY, INVALID, UNKNOWN, TOO_BIG, EXT_REQD = ERR + 1, ERR + 2, ERR + 3, ERR + 6, ERR + 9, ERR + 10
READ, WRITE, DISC, FLUSH, TRIM, CACHE, ZERO, STATUS = range(8)
FUA, NO_HOLE, DF, REQ_ONE, FAST, PAYLOAD = 1, 2, 4, 8, 16, 32
EPERM, EIO, EINVAL, ENOSPC, EOVERFLOW, ENOTSUP = 1, 5, 22, 28, 75, 95


@contextlib.contextmanager
def folder():
    path = tempfile.mkdtemp(prefix="weir-nbd-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Server:
    """`weir serve` with one Unix socket, as a context manager; `disks` are DISK strings or options."""

    def __init__(self, *disks, nbd=None):
        self.killed = False
        self.dir = tempfile.mkdtemp(prefix="weir-nbd-")
        self.sock = os.path.join(self.dir, "nbd.sock")
        args = [WEIR, "serve", *(disks or ("mem:64M",)), "--nbd", nbd or "unix:" + self.sock]
        self.log = open(os.path.join(self.dir, "log"), "w+")
        self.proc = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        end = time.monotonic() + TIMEOUT
        while "ready" not in self.text():
            if self.proc.poll() is not None or time.monotonic() > end:
                print(self.text())
                raise RuntimeError("the server did not start")
            time.sleep(0.01)

    def text(self):
        with open(self.log.name) as f:
            return f.read()

    def uri(self, name=""):
        return "nbd+unix:///%s?socket=%s" % (name, self.sock)

    def fds(self):
        return len(os.listdir("/proc/%d/fd" % self.proc.pid))

    def left_none(self, fds):
        """All clients are gone, and there are no more descriptors than before; there may be fewer, since the last client from before them may have been about to go."""
        end = time.monotonic() + TIMEOUT
        while self.fds() > fds and time.monotonic() < end:
            time.sleep(0.02)
        check(self.fds() <= fds, "%d descriptors, %d before" % (self.fds(), fds))

    def rss(self):
        with open("/proc/%d/status" % self.proc.pid) as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmRSS"))

    def alive(self):
        check(self.proc.poll() is None, "the server is alive: " + self.text())

    def stop(self):
        if self.killed:
            return 0
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGTERM)
        return self.proc.wait(TIMEOUT)

    def kill(self):
        self.killed = True
        self.proc.kill()
        self.proc.wait()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, tb):
        try:
            rc = self.stop()
            if rc or kind:
                print(self.text())
            if not kind:
                equal(rc, 0, "the server's exit status")
        finally:
            if self.proc.poll() is None:
                self.proc.kill()
                self.proc.wait()
            shutil.rmtree(self.dir, ignore_errors=True)


class Closed(Exception):
    """The server ended the connection."""


class Raw:
    """A client that sends what it is told to."""

    def __init__(self, server, flags=3, hello=True):
        self.s = socket.socket(socket.AF_UNIX)
        self.s.connect(server.sock)
        self.s.settimeout(TIMEOUT)
        self.extended = self.structured = False
        if hello:
            magic, opt, sflags = struct.unpack(">QQH", self.recv(18))
            equal((magic, opt, sflags), (0x4E42444D41474943, OPT_MAGIC, 3), "the greeting")
            self.send(struct.pack(">I", flags))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.s.close()

    def send(self, data):
        try:
            self.s.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            raise Closed()

    def recv(self, n):
        out = bytearray(n)
        at = 0
        while at < n:
            try:
                got = self.s.recv_into(memoryview(out)[at:])
            except ConnectionResetError:
                raise Closed()
            if not got:
                raise Closed()
            at += got
        return bytes(out)

    def closed(self):
        """True if the server has nothing more to say and hangs up."""
        try:
            return self.s.recv(1) == b""
        except ConnectionResetError:
            return True

    def option(self, opt, data=b"", length=None):
        self.send(struct.pack(">QII", OPT_MAGIC, opt, len(data) if length is None else length) + data)

    def reply(self, opt):
        magic, ropt, kind, length = struct.unpack(">QIII", self.recv(20))
        equal((magic, ropt), (REP_MAGIC, opt), "the option reply's header")
        return kind, self.recv(length)

    def ask(self, opt, data=b"", length=None):
        """Sends an option; returns the replies up to the final one."""
        self.option(opt, data, length)
        replies = []
        while True:
            replies.append(self.reply(opt))
            if replies[-1][0] == ACK or replies[-1][0] & ERR:
                return replies

    def negotiate(self, structured=False, extended=False, meta=False, name=b""):
        if structured:
            equal(self.ask(STRUCTURED)[-1][0], ACK, "the reply to STRUCTURED_REPLY")
            self.structured = True
        if extended:
            equal(self.ask(EXTENDED)[-1][0], ACK, "the reply to EXTENDED_HEADERS")
            self.extended = True
        if meta:
            equal(len(self.ask(SET_META, meta_data(name, b"base:allocation"))), 2, "the replies to SET_META_CONTEXT")
        replies = self.ask(GO, go_data(name))
        equal(replies[-1][0], ACK, "the reply to GO")
        for kind, data in replies:
            if kind == REP_INFO and data[:2] == b"\0\0":
                self.size, self.flags = struct.unpack(">QH", data[2:])
        return self

    def request(self, cmd, off=0, length=0, flags=0, data=b"", cookie=1, magic=None):
        if self.extended:
            self.send(struct.pack(">IHHQQQ", magic or EXT_REQUEST_MAGIC, flags, cmd, cookie, off, length) + data)
        else:
            self.send(struct.pack(">IHHQQI", magic or REQUEST_MAGIC, flags, cmd, cookie, off, length) + data)

    def chunk(self):
        """(flags, type, cookie, payload) of a structured or extended chunk; (error, None, cookie, None) of a simple reply."""
        magic = struct.unpack(">I", self.recv(4))[0]
        if magic == SIMPLE_MAGIC:
            error, cookie = struct.unpack(">IQ", self.recv(12))
            check(not self.extended, "no simple reply with extended headers")
            return error, None, cookie, None
        if self.extended:
            equal(magic, EXT_REPLY_MAGIC, "the magic of a reply")
            flags, kind, cookie, self.off, length = struct.unpack(">HHQQQ", self.recv(28))
        else:
            equal(magic, STRUCTURED_MAGIC, "the magic of a reply")
            flags, kind, cookie, length = struct.unpack(">HHQI", self.recv(16))
        return flags, kind, cookie, self.recv(length)

    def result(self, cookie=1):
        """The NBD error of a request that is answered without data."""
        flags, kind, got, payload = self.chunk()
        equal(got, cookie, "the cookie")
        if kind is None:
            return flags
        equal(flags, 1, "the chunk's flags")
        if kind == 0x8001:
            error, length = struct.unpack(">IH", payload[:6])
            equal(length, len(payload) - 6, "the length of the error's text")
            return error
        equal(kind, 0, "the chunk's type")
        return 0

    def do(self, *args, **kw):
        self.request(*args, **kw)
        return self.result()


def go_data(name=b"", infos=()):
    return struct.pack(">I", len(name)) + name + struct.pack(">H%dH" % len(infos), len(infos), *infos)


def meta_data(name=b"", *queries):
    out = struct.pack(">I", len(name)) + name + struct.pack(">I", len(queries))
    for q in queries:
        out += struct.pack(">I", len(q)) + q
    return out


