#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""SIGKILL of a serving process under load, and the durability contract checked each time.

Two volumes share one small log, so destaging goes on all the time; each has a checker that keeps several writes in flight over libnbd, and
fio writes beside it in every other round. After each kill the server is started again and each volume must be the result of a prefix of
its writes in log order, one that holds all that was promised, with no write torn.

Order. Two writes are ordered in the log if one was acknowledged before the other was issued. So a volume holds a prefix iff: with T the latest
time of issue of any write found, every write acknowledged before T is there, or a later one to its place. Promised are the writes
acknowledged before the last acknowledged flush was issued, and FUA writes, and with logmode=write every acknowledged write.

usage: kill_rounds.py WEIR [ROUNDS]
"""
import contextlib
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

from harness import *

try:
    import nbd
except ImportError:
    skip("python3-libnbd is not installed")

WEIR = sys.argv[1]
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 50 * int(os.environ.get("WEIR_SCALE") or 1)
SEED = seed()
TIMEOUT = 30
PLACES, SLOT = 160, 16384           # the checker's; fio has what is behind them
CHECKED = PLACES * SLOT
SIZE = CHECKED + (8 << 20)
MODES = ("flush", "write")


class Broken(Exception):
    pass


def place_range(place):
    """A place of its own size and alignment, from one byte to almost a slot."""
    off = place * 37 % 777
    return place * SLOT + off, 1 + place * 7919 % (SLOT - 800) if place % 8 else 1 + place % 700


def content(place, n):
    length = place_range(place)[1]
    return (struct.pack("<I", n ^ 0xA5A50000) * (length // 4 + 1))[:length]


class Write:
    __slots__ = ("n", "place", "issued", "acked", "fua")

    def __init__(self, n, place, issued, fua):
        self.n, self.place, self.issued, self.acked, self.fua = n, place, issued, None, fua


class Checker:
    """One volume. `base` is what each place is known to hold; `writes` are those since."""

    def __init__(self, name, mode, rng):
        self.name, self.mode, self.rng = name, mode, rng
        self.base = [0] * PLACES
        self.n = self.clock = self.total = 0
        self.writes, self.flushed, self.error = [], None, None

    def tick(self):
        self.clock += 1
        return self.clock

    def load(self, uri, started):
        try:
            self._load(uri, started)
        except nbd.Error:
            pass                            # the kill
        except Exception as e:              # noqa: a thread's error must not get lost
            self.error = e
        finally:
            started.set()

    def _load(self, uri, started):
        h = nbd.NBD()
        h.connect_uri(uri)
        busy, flying = set(), set()
        depth = self.rng.choice((1, 4, 16))

        def wrote(w, error):
            if not error.value:
                w.acked = self.tick()
            busy.discard(w.place)
            flying.discard(w)
            return 1

        def flushed(token, issued, error):
            if not error.value and (self.flushed is None or issued > self.flushed):
                self.flushed = issued
            flying.discard(token)
            return 1

        while True:
            while len(flying) < depth:
                if self.rng.random() < 0.1:
                    token, issued = object(), self.tick()
                    flying.add(token)
                    h.aio_flush(lambda e, t=token, i=issued: flushed(t, i, e))
                    continue
                place = self.rng.randrange(PLACES)
                if place in busy:
                    continue
                self.n += 1
                w = Write(self.n, place, self.tick(), self.rng.random() < 0.1)
                self.writes.append(w)
                busy.add(place)
                flying.add(w)
                buf = nbd.Buffer.from_bytearray(bytearray(content(place, w.n)))
                h.aio_pwrite(buf, place_range(place)[0], lambda e, w=w: wrote(w, e), nbd.CMD_FLAG_FUA if w.fua else 0)
            started.set()
            h.poll(1000)

    def read(self, uri):
        h = nbd.NBD()
        h.connect_uri(uri)
        data = h.pread(CHECKED, 0)
        h.shutdown()
        return data

    def verify(self, data):
        """`data` is what the volume holds after the restart; it becomes the base of the next round."""
        by_place = {}
        for w in self.writes:
            by_place.setdefault(w.place, []).append(w)
        found, newest = [], 0
        for place in range(PLACES):
            off, length = place_range(place)
            have, candidates = data[off:off + length], by_place.get(place, [])
            n = next((w for w in reversed(candidates) if have == content(place, w.n)), None)
            if n:
                newest = max(newest, n.issued)
            elif have != (content(place, self.base[place]) if self.base[place] else bytes(length)):
                raise Broken("%s, place %d: a torn write, or what nobody wrote: %s..." % (self.name, place, bytes(have[:16]).hex()))
            found.append(n)
        for place, writes in by_place.items():
            at = found[place].issued if found[place] else 0
            for w in writes:
                if w.issued <= at or w.acked is None:
                    continue
                if w.acked < newest:
                    raise Broken("%s, place %d: write %d is missing, though one that was issued after its end is there" % (self.name, place, w.n))
                if self.flushed is not None and w.acked < self.flushed:
                    raise Broken("%s, place %d: write %d is missing, though a flush covered it" % (self.name, place, w.n))
                if w.fua or self.mode == "write":
                    raise Broken("%s, place %d: write %d is missing, though it was acknowledged as durable" % (self.name, place, w.n))
        for place, w in enumerate(found):
            if w:
                self.base[place] = w.n
        self.total += sum(w.acked is not None for w in self.writes)
        self.writes, self.flushed = [], None


class Server:
    def __init__(self, d, mode, *more):
        self.sock = d + "/s"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.sock)
        # Slow images: what the log holds has not reached them when the kill comes.
        with open(d + "/serve.log", "w") as log:
            self.proc = subprocess.Popen([WEIR, "serve", "--log", d + "/log", "--logmode", mode, "--nbd", "unix:" + self.sock,
                                          *more, "--name", "a", "delay:write=2ms,flush=4ms:%s/a" % d, "--name", "b", d + "/b"],
                                         stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + TIMEOUT
        while True:
            with open(d + "/serve.log") as f:
                text = f.read()
            if "ready\n" in text:
                break
            if self.proc.poll() is not None or time.monotonic() > end:
                self.proc.kill()
                self.proc.wait()
                raise Broken("the server does not get ready: " + text)
            time.sleep(0.003)

    def uri(self, name):
        return "nbd+unix:///%s?socket=%s" % (name, self.sock)

    def kill(self):
        self.proc.kill()
        self.proc.wait()

    def end(self):
        self.proc.send_signal(signal.SIGTERM)
        if self.proc.wait(TIMEOUT):
            raise Broken("the server's exit status is %d" % self.proc.returncode)


def fio(server):
    return subprocess.Popen(["fio", "--name=x", "--ioengine=nbd", "--uri=" + server.uri("b"), "--rw=randwrite", "--bs=4k", "--iodepth=16",
                             "--offset=%d" % CHECKED, "--size=%d" % (SIZE - CHECKED), "--time_based=1", "--runtime=60", "--fsync=8", "--thread"],
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def verify(checkers, server):
    for c in checkers:
        c.verify(c.read(server.uri(c.name)))


def rounds(d, mode, count, rng):
    subprocess.run([WEIR, "log", "create", "--size", "32M", d + "/log"], check=True, stdout=subprocess.DEVNULL)
    for name in "ab":
        with open(d + "/" + name, "wb") as f:
            f.truncate(SIZE)
    checkers = [Checker(name, mode, random.Random(rng.random())) for name in "ab"]
    server, load, have_fio = None, None, shutil.which("fio")
    try:
        for r in range(count):
            server = Server(d, mode)
            verify(checkers, server)
            load = fio(server) if have_fio and r % 2 else None
            started = [threading.Event() for _ in checkers]
            threads = [threading.Thread(target=c.load, args=(server.uri(c.name), s), daemon=True) for c, s in zip(checkers, started)]
            for t in threads:
                t.start()
            for s in started:
                s.wait(TIMEOUT)
            time.sleep(rng.uniform(0, 0.3))
            server.kill()
            for t in threads:
                t.join(TIMEOUT)
                if t.is_alive():
                    raise Broken("a client does not end when the server does")
            if load:
                load.kill()
                load.wait()
            for c in checkers:
                if c.error:
                    raise c.error
        server = Server(d, mode, "--drain")
        verify(checkers, server)
        server.end()
        # The log is empty now: the images must hold the same.
        for c in checkers:
            with open(d + "/" + c.name, "rb") as f:
                c.verify(f.read(CHECKED))
        return [c.total for c in checkers]
    finally:
        for p in (load, server and server.proc):
            if p and p.poll() is None:
                p.kill()
                p.wait()


def main():
    if subprocess.run([WEIR, "log", "-h"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        skip("this weir cannot create a log")
    if not shutil.which("fio"):
        print("fio is not installed: the checkers are the only load")
    rng, failed = random.Random(SEED), False
    for mode in MODES:
        count, start = max(1, ROUNDS // len(MODES)), time.monotonic()
        d = tempfile.mkdtemp(prefix="weir-kill-")
        try:
            writes = rounds(d, mode, count, rng)
            print("logmode=%s: %d kills in %.0f s, %d and %d acknowledged writes: each volume was a prefix that held all that was promised"
                  % (mode, count, time.monotonic() - start, *writes), flush=True)
        except Broken as e:
            failed = True
            print("FAILED: logmode=%s: %s" % (mode, e))
        finally:
            if failed and os.environ.get("WEIR_KEEP"):
                print("kept: " + d)
            else:
                shutil.rmtree(d, ignore_errors=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
