# SPDX-License-Identifier: MIT
"""For the tests of the NBD client: an NBD server that loses, stalls and lies as it is told, and the client, driven from here.

Every test is called as `X.py DISK_SHELL`.
"""
import contextlib
import os
import random
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

SHELL = sys.argv[1] if len(sys.argv) > 1 else "disk_shell"
TIMEOUT = 30

READ, WRITE, DISC, FLUSH, TRIM, CACHE, ZERO, STATUS = range(8)
CMDS = ["read", "write", "disc", "flush", "trim", "cache", "zero", "status"]
FUA, NO_HOLE, DF, REQ_ONE, FAST, PAYLOAD = 1, 2, 4, 8, 16, 32
HAS, RO, F_FLUSH, F_FUA, ROT, F_TRIM, F_ZERO, F_DF, MULTI, F_CACHE, F_FAST = 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048
ALL = HAS | F_FLUSH | F_FUA | F_TRIM | F_ZERO | MULTI | F_CACHE | F_FAST
ERR = 1 << 31


def until(cond, what):
    end = time.monotonic() + TIMEOUT
    while not cond():
        check(time.monotonic() < end, what)
        time.sleep(0.01)


@contextlib.contextmanager
def folder():
    path = tempfile.mkdtemp(prefix="weir-nbdc-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Shell:
    """disk_shell as a context manager. call() waits for the answer, send() returns a tag for wait()."""

    def __init__(self, disk, mode="", fails=False):
        self.log = tempfile.TemporaryFile("w+")
        self.proc = subprocess.Popen([SHELL, disk, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, bufsize=1)
        self.cond = threading.Condition()
        self.answers, self.next, self.ended, self.opened = {}, 0, False, None
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        with self.cond:
            check(self.cond.wait_for(lambda: self.opened or self.ended, TIMEOUT), "the disk opens or fails in time")
        if not fails:
            check(self.opened and self.opened.startswith("ok"), "%s opens: %s %s" % (disk, self.opened, self.stderr()))
            self.size = int(self.opened.split()[1])

    def _read(self):
        for line in self.proc.stdout:
            tag, _, rest = line.rstrip("\n").partition(" ")
            with self.cond:
                if tag == "open":
                    self.opened = rest
                else:
                    self.answers[tag] = rest
                self.cond.notify_all()
        with self.cond:
            self.ended = True
            self.cond.notify_all()

    def send(self, *words):
        self.next += 1
        tag = "t%d" % self.next
        self.proc.stdin.write(" ".join([tag] + [str(w) for w in words]) + "\n")
        return tag

    def done(self, tag):
        with self.cond:
            return tag in self.answers

    def wait(self, tag, timeout=TIMEOUT):
        with self.cond:
            check(self.cond.wait_for(lambda: tag in self.answers or self.ended, timeout), "an answer in time to %s; %s" % (tag, self.stderr()))
            check(tag in self.answers, "an answer before the end; " + self.stderr())
            return self.answers.pop(tag)

    def call(self, *words):
        return self.wait(self.send(*words))

    def ok(self, *words):
        r = self.call(*words)
        check(r.startswith("ok"), "%r answers %r; %s" % (words, r, self.stderr()))
        return r[3:]

    def error(self, number, *words):
        r = self.call(*words)
        check(r.startswith("-%d " % number), "%r answers %r, wanted -%d; %s" % (words, r, number, self.stderr()))

    def limits(self):
        return {k: int(v) for k, v in (w.split("=") for w in self.ok("limits").split())}

    def stderr(self):
        self.log.seek(0)
        return self.log.read()

    def close(self):
        self.proc.stdin.close()
        equal(self.proc.wait(TIMEOUT), 0, "the shell's exit status; " + self.stderr())

    def __enter__(self):
        return self

    def __exit__(self, kind, value, tb):
        try:
            if not kind:
                self.close()
        finally:
            if self.proc.poll() is None:
                self.proc.kill()
                self.proc.wait()


class Request:
    def __init__(self, flags, cmd, cookie, off, length, data):
        self.flags, self.cmd, self.cookie, self.off, self.length, self.data = flags, cmd, cookie, off, length, data


class Gone(Exception):
    pass


class Fake:
    """An NBD server with a volatile cache that a kill() loses, wholly or in part. `hook(conn, request)` sees each request first; if it
    returns true, it has dealt with it (or with the connection)."""

    def __init__(self, path, size=4 << 20, flags=ALL, structured=True, extended=False, meta=True, block=(512, 4096, 1 << 25), hook=None,
                 greet=None, seed=1):
        self.path, self.size, self.flags, self.block = path, size, flags, block
        self.structured, self.extended, self.meta, self.hook, self.greet = structured, extended, meta, hook, greet
        self.view, self.stable = bytearray(size), bytearray(size)
        self.lock, self.rng = threading.RLock(), random.Random(seed)
        self.unflushed = []     # (off, length) of volatile changes
        self.count = dict.fromkeys(CMDS, 0)
        self.conns, self.listener, self.accepted, self.flush_delay = [], None, 0, 0.005
        self.start()

    def uri(self, options=""):
        return "nbd+unix:///x?socket=%s%s" % (self.path, options and "," + options)

    def start(self):
        s = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        s.bind(self.path)
        s.listen(16)
        self.listener = s
        threading.Thread(target=self._accept, args=(s,), daemon=True).start()

    def _accept(self, s):
        while True:
            try:
                fd, _ = s.accept()
            except OSError:
                return
            with self.lock:
                if self.listener is not s:
                    fd.close()
                    return
                self.accepted += 1
                c = Conn(self, fd)
                self.conns.append(c)
            threading.Thread(target=c.run, daemon=True).start()

    def cut(self):
        """Drops all connections; the server and its cache live on."""
        with self.lock:
            conns, self.conns = self.conns, []
        for c in conns:
            c.drop()

    def kill(self):
        """The process dies: what was not flushed is lost, sector by sector, at random."""
        with self.lock:
            s, self.listener = self.listener, None
            if s:
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_RDWR)
                s.close()
            conns, self.conns = self.conns, []
            for c in conns:
                c.drop()
            for off, length in self.unflushed:
                for at in range(off, off + length, 512):
                    if self.rng.random() < 0.3:
                        self.stable[at:at + 512] = self.view[at:at + 512]
            self.view[:] = self.stable
            self.unflushed = []

    def stop(self):
        self.kill()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stop()

    # What a request does; returns (error, data or extents).
    def do(self, r):
        end, align = r.off + r.length, self.block[0] if self.block else 1
        if r.cmd == FLUSH:
            for off, length in self.unflushed:
                self.stable[off:off + length] = self.view[off:off + length]
            self.unflushed = []
        elif end > self.size or r.off % align or r.length % align:
            return 22, None
        elif r.cmd == READ:
            return 0, bytes(self.view[r.off:end])
        elif r.cmd in (WRITE, ZERO):
            self.view[r.off:end] = r.data if r.cmd == WRITE else bytes(r.length)
            if r.flags & FUA:
                self.stable[r.off:end] = self.view[r.off:end]
                # What was volatile below it is stable with it.
            else:
                self.unflushed.append((r.off, r.length))
        elif r.cmd == STATUS:
            zero = not any(self.view[r.off:end])
            return 0, [(r.length, 3 if zero else 0)]
        return 0, None


class Conn:
    def __init__(self, srv, sock):
        self.srv, self.s, self.send_lock = srv, sock, threading.Lock()
        self.structured = self.extended = self.meta = False

    def drop(self):
        with contextlib.suppress(OSError):
            self.s.shutdown(socket.SHUT_RDWR)
        self.s.close()

    def recv(self, n):
        out = b""
        while len(out) < n:
            try:
                got = self.s.recv(n - len(out))
            except OSError:
                raise Gone()
            if not got:
                raise Gone()
            out += got
        return out

    def send(self, data):
        try:
            with self.send_lock:
                self.s.sendall(data)
        except OSError:
            raise Gone()

    def opt(self, option, kind, data=b""):
        self.send(struct.pack(">QIII", 0x3E889045565A9, option, kind, len(data)) + data)

    def info(self, option):
        self.opt(option, 3, struct.pack(">HQH", 0, self.srv.size, self.srv.flags))
        if self.srv.block:
            self.opt(option, 3, struct.pack(">HIII", 3, *self.srv.block))

    def handshake(self):
        if self.srv.greet:
            self.srv.greet(self)
        self.send(struct.pack(">QQH", 0x4E42444D41474943, 0x49484156454F5054, 3))
        self.recv(4)
        while True:
            _, option, length = struct.unpack(">QII", self.recv(16))
            self.recv(length)
            if option == 11 and self.srv.extended:
                self.extended = True
                self.opt(option, 1)
            elif option == 8 and self.srv.structured:
                self.structured = True
                self.opt(option, 1)
            elif option == 10 and self.srv.meta:
                self.meta = True
                self.opt(option, 4, struct.pack(">I", 7) + b"base:allocation")
                self.opt(option, 1)
            elif option == 7:
                self.info(option)
                self.opt(option, 1)
                return
            else:
                self.opt(option, ERR + 1)

    def run(self):
        try:
            self.handshake()
            while True:
                r = self.request()
                if r.cmd == DISC:
                    break
                with self.srv.lock:
                    if self not in self.srv.conns:
                        raise Gone()
                    self.srv.count[CMDS[r.cmd]] += 1
                if self.srv.hook and self.srv.hook(self, r):
                    continue
                with self.srv.lock:
                    if self not in self.srv.conns:
                        raise Gone()
                    error, result = self.srv.do(r)
                if r.cmd == FLUSH:
                    time.sleep(self.srv.flush_delay)    # what other connections write meanwhile is not covered
                self.reply(r, error, result)
        except Gone:
            pass
        self.drop()

    def request(self):
        if self.extended:
            _, flags, cmd, cookie, off, length = struct.unpack(">IHHQQQ", self.recv(32))
            data = self.recv(length) if flags & PAYLOAD else None
        else:
            _, flags, cmd, cookie, off, length = struct.unpack(">IHHQQI", self.recv(28))
            data = self.recv(length) if cmd == WRITE else None
        return Request(flags, cmd, cookie, off, length, data)

    def chunk(self, r, kind, payload=b"", done=True, length=None, cookie=None, off=None, magic=None):
        flags, cookie = int(done), r.cookie if cookie is None else cookie
        length = len(payload) if length is None else length
        if self.extended:
            self.send(struct.pack(">IHHQQQ", magic or 0x6E8A278C, flags, kind, cookie, r.off if off is None else off, length) + payload)
        else:
            self.send(struct.pack(">IHHQI", magic or 0x668E33EF, flags, kind, cookie, length) + payload)

    def simple(self, r, error=0, data=b"", cookie=None, magic=0x67446698):
        self.send(struct.pack(">IIQ", magic, error, r.cookie if cookie is None else cookie) + data)

    def data(self, r, off, data, done=True):
        self.chunk(r, 1, struct.pack(">Q", off) + data, done)

    def error(self, r, number, text=b"", done=True):
        self.chunk(r, 0x8001, struct.pack(">IH", number, len(text)) + text, done)

    def reply(self, r, error=0, result=None):
        if not self.extended and (not self.structured or r.cmd not in (READ, STATUS)):
            self.simple(r, error, result or b"")
        elif error:
            self.error(r, error, b"as told")
        elif r.cmd == READ:
            self.data(r, r.off, result)
        elif r.cmd == STATUS and self.extended:
            self.chunk(r, 6, struct.pack(">II", 7, len(result)) + b"".join(struct.pack(">QQ", *e) for e in result))
        elif r.cmd == STATUS:
            self.chunk(r, 5, struct.pack(">I", 7) + b"".join(struct.pack(">II", *e) for e in result))
        else:
            self.chunk(r, 0)
