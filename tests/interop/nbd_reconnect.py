#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The NBD client and servers that go away: what was acknowledged is there again, a flush tells the truth, and nothing waits that was told not to.

The fake server forgets, sector by sector, what was not flushed when it is killed; the real ones are killed under load.

usage: nbd_reconnect.py DISK_SHELL WEIR
"""
import itertools

from nbd_fake import *

WEIR = sys.argv.pop(2)
SEED = int(os.environ.get("WEIR_SEED") or 20260101)
SCALE = int(os.environ.get("WEIR_SCALE") or 1)


class Load:
    """Random changes in flight together, never two of them on one region; knows what must be read, and what must be stable."""

    REGIONS, REGION = 256, 16384

    def __init__(self, sh, rng, depth=16, flushes=0.06):
        self.sh, self.rng, self.depth, self.flushes = sh, rng, depth, flushes
        self.seen = [0] * (self.REGIONS * self.REGION // 512)       # by sector: the byte of the last acknowledged change
        self.durable = {}                                           # sector: byte that a FUA write or a flush has made stable
        self.flight, self.failed = {}, []

    def start(self):
        region = self.rng.choice([r for r in range(self.REGIONS) if r not in {f[1] for f in self.flight.values()}])
        first = self.rng.randrange(self.REGION // 512)
        n = self.rng.randint(1, self.REGION // 512 - first)
        sector = region * self.REGION // 512 + first
        dice, byte = self.rng.random(), self.rng.randint(1, 255)
        if dice < self.flushes:
            tag, region, sector, n, kind = self.sh.send("flush"), None, 0, 0, "flush"
        elif dice < 0.2:
            byte, kind = 0, "zero"
            tag = self.sh.send("zero", sector * 512, n * 512, *self.rng.choice([[], ["unmap"], ["fua"]]))
        else:
            fua = dice < 0.35
            kind = "fua" if fua else "write"
            tag = self.sh.send("write", sector * 512, n * 512, "%02x" % byte, *(["fua"] if fua else []))
        covers = list(self.seen) if kind == "flush" else None
        busy = {s for f in self.flight.values() for s in f[2]}
        self.flight[tag] = (kind, region, range(sector, sector + n), byte, covers, busy)

    def reap(self, block=False):
        for tag in list(self.flight):
            if not (block or self.sh.done(tag)):
                continue
            kind, _, sectors, byte, covers, busy = self.flight[tag]
            answer = self.sh.wait(tag)
            del self.flight[tag]
            if answer != "ok":
                self.failed.append((kind, answer))
            elif kind == "flush":
                # What was acknowledged when it was sent is stable, unless it has been changed since.
                for s, b in enumerate(covers):
                    if s not in busy and self.seen[s] == b:
                        self.durable[s] = b
            else:
                for s in sectors:
                    self.seen[s] = byte
                    self.durable.pop(s, None)
                    if kind == "fua":
                        self.durable[s] = byte

    def run(self, n):
        for _ in range(n):
            while len(self.flight) >= self.depth:
                self.reap()
                time.sleep(0.0005)
            self.start()

    def settle(self):
        self.reap(block=True)
        check(not self.failed, "nothing fails: %r; %s" % (self.failed[:3], self.sh.stderr()))

    def verify_seen(self):
        """Through the client, run by run."""
        tags, at = [], 0
        for byte, group in itertools.groupby(self.seen):
            n = len(list(group))
            tags.append((at, n, byte, self.sh.send("read", at * 512, n * 512)))
            at += n
        for at, n, byte, tag in tags:
            equal(self.sh.wait(tag), "ok all %02x" % byte, "sectors %d..%d" % (at, at + n))

    def verify_durable(self, image):
        """On the server's stable media; what is in flight may be there or not."""
        busy = {s for f in self.flight.values() for s in f[2]}
        for s, b in self.durable.items():
            if s not in busy and image[s * 512:s * 512 + 512] != bytes([b]) * 512:
                raise AssertionError("sector %d was stable with %02x, has %r" % (s, b, image[s * 512:s * 512 + 4]))


SIZE = Load.REGIONS * Load.REGION


def kills(rounds, changes, options="", cut=False, flushes=0.06, **kw):
    print("  WEIR_SEED=%d" % SEED)
    rng = random.Random(SEED)
    with folder() as d, Fake(d + "/s", size=SIZE, seed=SEED, **kw) as srv, Shell(srv.uri(options)) as sh:
        load = Load(sh, rng, flushes=flushes)
        for _ in range(rounds * SCALE):
            load.run(rng.randrange(changes))
            load.reap()
            if cut:
                srv.cut()
            else:
                srv.kill()
                load.verify_durable(srv.stable)
                if rng.random() < 0.5:
                    load.run(8 if len(load.flight) < 8 else 0)      # while nobody is there
                srv.start()
            load.run(rng.randrange(changes))
            load.settle()
            load.verify_seen()
        sh.ok("flush")
        load.reap(block=True)
        srv.kill()
        for s, b in enumerate(load.seen):
            check(srv.stable[s * 512:s * 512 + 512] == bytes([b]) * 512, "sector %d is stable after the last flush" % s)
        srv.start()
        sh.ok("read", 0, 512)
        return sh.ok("status")


def acknowledged_changes_survive_a_server_that_forgets():
    status = kills(12, 150)
    check('"changes_replayed":0' not in status, "something was replayed: " + status)


def they_survive_over_several_connections():
    kills(6, 100, "connections=4")


def they_survive_with_a_small_copy():
    status = kills(4, 600, "replay=1M", flushes=0.002)
    check('"flushes_for_room":0' not in status, "the client flushed by itself: " + status)


def they_survive_with_extended_headers():
    kills(3, 100, extended=True)


def they_survive_a_cut_that_the_server_survives():
    kills(8, 100, cut=True)


def they_survive_without_fua():
    kills(3, 100, flags=ALL & ~F_FUA)


def the_copy_comes_before_any_read():
    order = []

    def hook(c, r):
        order.append(CMDS[r.cmd])
        return False

    with folder() as d, Fake(d + "/s") as srv, Shell(srv.uri()) as sh:
        for i in range(20):
            sh.ok("write", i * 4096, 4096, "%02x" % (i + 1))
        srv.kill()
        tags = [sh.send("read", i * 4096, 4096) for i in range(20)]
        flush = sh.send("flush")
        time.sleep(0.2)
        srv.hook = hook
        srv.start()
        for i, tag in enumerate(tags):
            equal(sh.wait(tag), "ok all %02x" % (i + 1), "a read")
        equal(sh.wait(flush), "ok", "the flush")
        equal(order[:20], ["write"] * 20, "what comes first")
        srv.kill()
        equal(bytes(srv.stable[4096:8192]), b"\2" * 4096, "what the flush covered")
        srv.start()


def only_the_newest_version_is_sent_again():
    with folder() as d, Fake(d + "/s") as srv, Shell(srv.uri()) as sh:
        for i in range(50):
            sh.ok("write", 4096, 4096, "%02x" % i)
        sh.ok("write", 0, 65536, "77")
        sh.ok("write", 8192, 512, "78", "fua")
        srv.kill()
        equal(bytes(srv.stable[8192:8704]), b"\x78" * 512, "the FUA write")
        sent = []
        srv.hook = lambda c, r: r.cmd in (WRITE, ZERO) and sent.append((r.off, r.length, r.flags)) and False
        srv.start()
        sh.ok("read", 0, 512)
        equal(sorted(sent), [(0, 8192, 0), (8704, 65536 - 8704, 0)], "what is sent again: not a byte over the FUA write")


def a_flush_that_was_in_flight_covers_what_came_before():
    with folder() as d:
        srv = Fake(d + "/s")

        def hook(c, r):
            if r.cmd == FLUSH and srv.accepted == 1:
                threading.Thread(target=lambda: (srv.kill(), srv.start())).start()
                return True
            return False

        srv.hook = hook
        with srv, Shell(srv.uri()) as sh:
            sh.ok("write", 0, 1 << 20, "ab")
            sh.ok("flush")
            srv.kill()
            equal(bytes(srv.stable[:1 << 20]), b"\xab" * (1 << 20), "what the flush covered")
            srv.start()


def without_a_copy_the_next_flush_fails():
    with folder() as d, Fake(d + "/s") as srv, Shell(srv.uri("replay=0")) as sh:
        sh.ok("write", 0, 4096, "11")
        sh.ok("flush")
        srv.kill()
        srv.start()
        sh.ok("flush")                  # nothing was volatile
        sh.ok("write", 0, 4096, "22", "fua")
        srv.kill()
        srv.start()
        sh.ok("flush")
        sh.ok("write", 0, 4096, "33")
        srv.kill()
        srv.start()
        sh.error(5, "flush")
        sh.error(5, "flush")
        sh.error(5, "write", 0, 4096, "44")
        sh.ok("read", 0, 4096)


def a_copy_that_cannot_be_sent_again_fails_the_disk():
    with folder() as d, Fake(d + "/s") as srv, Shell(srv.uri()) as sh:
        sh.ok("write", 0, 4096, "11")
        srv.kill()
        srv.hook = lambda c, r: r.cmd == WRITE and (c.reply(r, 28) or True)
        srv.start()
        sh.error(5, "flush")
        srv.hook = None
        sh.error(5, "flush")
        sh.error(5, "write", 0, 4096, "11")
        sh.ok("read", 0, 4096)


def an_export_that_changed_ends_the_disk():
    def grow(srv):
        srv.size *= 2

    def freeze(srv):
        srv.flags |= RO

    def forget(srv):
        srv.flags &= ~F_FLUSH

    def coarser(srv):
        srv.block = (4096, 4096, 1 << 25)

    for change, words in ((grow, "another size"), (freeze, "read-only"), (forget, "less than before"), (coarser, "block sizes")):
        with folder() as d, Fake(d + "/s") as srv, Shell(srv.uri()) as sh:
            sh.ok("write", 0, 4096, "11")
            srv.kill()
            change(srv)
            srv.start()
            sh.error(5, "flush")
            sh.error(5, "read", 0, 512)
            check(words in sh.stderr(), "the log has %r: %s" % (words, sh.stderr()))


def a_server_that_shuts_down_is_left_and_met_again():
    leaving = [True]
    with folder() as d, Fake(d + "/s", hook=lambda c, r: leaving[0] and (c.reply(r, 108) or True)) as srv, Shell(srv.uri()) as sh:
        tags = [sh.send("write", i * 4096, 4096, "%02x" % (i + 1)) for i in range(32)]
        time.sleep(0.3)
        leaving[0] = False
        for tag in tags:
            equal(sh.wait(tag), "ok", "a write")
        equal(sh.ok("read", 31 * 4096, 4096), "all 20", "the last one")


def reconnect_off_and_a_limit_are_kept():
    for option, least, back in (("reconnect=off", 0, False), ("reconnect=off", 0, True), ("reconnect=1s", 1, False)):
        with folder() as d, Fake(d + "/s") as srv, Shell(srv.uri(option)) as sh:
            sh.ok("write", 0, 4096, "11")
            began = time.monotonic()
            srv.kill()
            if back:    # who waited for anything at all would find it
                srv.start()
            sh.error(108, "read", 0, 4096)
            check(time.monotonic() - began >= least, "%s: %.1f s" % (option, time.monotonic() - began))
            sh.error(108, "flush")
            sh.error(108, "write", 0, 512, "00")
            # For good.
            if not back:
                srv.start()
            sh.error(108, "read", 0, 4096)
            equal(srv.accepted, 1, "connections, with " + option)


def a_hanging_server_is_waited_for_until_cancelled():
    with folder() as d, Fake(d + "/s", hook=lambda c, r: True) as srv, Shell(srv.uri()) as sh:
        tags = [sh.send(*w) for w in (("read", 0, 1 << 20), ("write", 0, 4 << 20, "01"), ("flush",), ("extent", 0, 4096), ("zero", 0, 4096))]
        time.sleep(0.5)
        check(not any(sh.done(t) for t in tags), "all wait")
        start = time.monotonic()
        sh.ok("cancel")
        for tag in tags:
            check(sh.wait(tag, 5).startswith("-108"), "it is cancelled")
        check(time.monotonic() - start < 2, "at once")
        sh.error(108, "read", 0, 512)


def a_server_that_takes_no_bytes_can_be_cancelled():
    stop = threading.Event()
    with folder() as d, Fake(d + "/s", size=64 << 20, hook=lambda c, r: stop.wait(20) or True) as srv, Shell(srv.uri()) as sh:
        tags = [sh.send("write", i << 21, 1 << 21, "01") for i in range(16)]
        time.sleep(0.3)
        sh.ok("cancel")
        for tag in tags:
            check(sh.wait(tag, 5).startswith("-108"), "it is cancelled")
        stop.set()


def an_absent_server_can_be_cancelled():
    with folder() as d, Fake(d + "/s") as srv, Shell(srv.uri()) as sh:
        sh.ok("write", 0, 4096, "01")
        srv.kill()
        tags = [sh.send("flush"), sh.send("read", 0, 512)]
        time.sleep(0.5)
        check(not any(sh.done(t) for t in tags), "both wait")
        sh.ok("cancel")
        for tag in tags:
            check(sh.wait(tag, 5).startswith("-108"), "it is cancelled")


def closing_does_not_wait_for_an_absent_server():
    with folder() as d, Fake(d + "/s") as srv:
        with Shell(srv.uri()) as sh:
            sh.ok("write", 0, 4096, "01")
            srv.kill()
            time.sleep(0.2)
            start = time.monotonic()
        check(time.monotonic() - start < 3, "closed at once")


def a_timeout_fails_the_request_and_spares_the_rest():
    hang = [True]
    with folder() as d, Fake(d + "/s", hook=lambda c, r: r.off == 8192 and hang[0]) as srv, Shell(srv.uri("timeout=700ms")) as sh:
        sh.ok("write", 0, 4096, "01")
        sh.error(110, "read", 8192, 512)
        hang[0] = False
        equal(sh.ok("read", 0, 4096), "all 01", "a read after the timeout")
        sh.ok("write", 0, 4096, "02")
        sh.ok("flush")
        # A change without an answer may still happen later: no other may follow it.
        hang[0] = True
        sh.error(110, "write", 8192, 512, "03")
        hang[0] = False
        sh.error(5, "write", 0, 512, "04")
        sh.error(5, "flush")
        equal(sh.ok("read", 0, 4096), "all 02", "reads go on")


def a_timeout_holds_while_nobody_is_there():
    with folder() as d, Fake(d + "/s") as srv, Shell(srv.uri("timeout=500ms")) as sh:
        srv.kill()
        start = time.monotonic()
        sh.error(110, "read", 0, 512)
        check(time.monotonic() - start < 5, "in time")
        srv.start()
        sh.ok("read", 0, 512)
        sh.ok("write", 0, 512, "05")
        sh.ok("flush")


def a_server_that_drops_every_connection_is_not_run_down():
    with folder() as d, Fake(d + "/s") as srv, Shell(srv.uri()) as sh:
        sh.ok("write", 0, 4096, "01")

        def hook(c, r):
            raise Gone()
        srv.hook = hook
        srv.cut()
        tag = sh.send("flush")
        time.sleep(3)
        check(2 <= srv.accepted <= 25, "%d attempts in 3 s" % srv.accepted)
        srv.hook = None
        equal(sh.wait(tag), "ok", "the flush, in the end; " + sh.stderr())


def the_first_connection_can_be_waited_for():
    with folder() as d:
        made = []
        t = threading.Timer(0.7, lambda: made.append(Fake(d + "/s")))
        t.start()
        with Shell("nbd+unix:///x?socket=%s/s,open-timeout=20s" % d) as sh:
            sh.ok("write", 0, 4096, "01")
        made[0].stop()
        sh = Shell("nbd+unix:///x?socket=%s/none" % d, fails=True)
        check("there is no socket" in sh.opened, sh.opened)
        sh.proc.stdin.close()
        sh.proc.wait(TIMEOUT)


def real_kills(args, prepare, options=""):
    """SIGKILL and restart of a real server under load; everything acknowledged is read back each time."""
    if not shutil.which(args[0]):
        skip(args[0] + " is not installed")
    print("  WEIR_SEED=%d" % SEED)
    rng = random.Random(SEED)
    with folder() as d:
        prepare(d)
        args = [a.replace("DIR", d) for a in args]

        def start():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(d + "/s")
            return subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        proc = start()
        try:
            with Shell("nbd+unix:///?socket=%s/s,open-timeout=20s%s" % (d, options)) as sh:
                load = Load(sh, rng)
                for _ in range(8 * SCALE):
                    load.run(rng.randrange(200))
                    proc.kill()
                    proc.wait()
                    proc = start()
                    load.run(rng.randrange(100))
                    load.settle()
                    load.verify_seen()
                sh.ok("flush")
                load.reap(block=True)
                proc.kill()
                proc.wait()
                proc = start()
                load.verify_seen()
        finally:
            proc.kill()
            proc.wait()


def image(command):
    return lambda d: subprocess.run(command.replace("DIR", d).split(), check=True, stdout=subprocess.DEVNULL)


def nbdkit_may_be_killed():
    real_kills(["nbdkit", "-f", "-U", "DIR/s", "file", "DIR/image"], image("truncate -s %d DIR/image" % SIZE))


def nbdkit_may_be_killed_with_four_connections():
    real_kills(["nbdkit", "-f", "-U", "DIR/s", "file", "DIR/image"], image("truncate -s %d DIR/image" % SIZE), ",connections=4")


def nbdkit_memory_loses_all_and_is_believed_only_what_was_flushed():
    """A server whose stable media are gone: what was flushed is lost by it, and no client can help. What was not is there again."""
    with folder() as d:
        args = ["nbdkit", "-f", "-U", d + "/s", "memory", "1M"]
        proc = subprocess.Popen(args)
        try:
            with Shell("nbd+unix:///?socket=%s/s,open-timeout=20s" % d) as sh:
                sh.ok("write", 0, 4096, "01")
                sh.ok("flush")
                sh.ok("write", 4096, 4096, "02")
                proc.kill()
                proc.wait()
                os.unlink(d + "/s")
                proc = subprocess.Popen(args)
                equal(sh.ok("read", 0, 8192)[:3], "crc", "both")
                equal(sh.ok("read", 4096, 4096), "all 02", "what was not flushed")
                equal(sh.ok("read", 0, 4096), "all 00", "what the server had promised to keep")
        finally:
            proc.kill()
            proc.wait()


def qemu_nbd_with_qcow2_may_be_killed():
    """qemu keeps new qcow2 tables in memory until a flush: a kill really loses writes."""
    real_kills(["qemu-nbd", "-t", "-e", "9", "-f", "qcow2", "-k", "DIR/s", "DIR/image"], image("qemu-img create -q -f qcow2 DIR/image %d" % SIZE))


def weir_itself_may_be_killed():
    real_kills([WEIR, "serve", "DIR/image", "--nbd", "unix:DIR/s"], image("truncate -s %d DIR/image" % SIZE), ",connections=2")


if __name__ == "__main__":
    sys.exit(run_tests([acknowledged_changes_survive_a_server_that_forgets, they_survive_over_several_connections, they_survive_with_a_small_copy,
               they_survive_with_extended_headers, they_survive_a_cut_that_the_server_survives, they_survive_without_fua,
               the_copy_comes_before_any_read, only_the_newest_version_is_sent_again, a_flush_that_was_in_flight_covers_what_came_before,
               without_a_copy_the_next_flush_fails, a_copy_that_cannot_be_sent_again_fails_the_disk, an_export_that_changed_ends_the_disk,
               a_server_that_shuts_down_is_left_and_met_again, reconnect_off_and_a_limit_are_kept,
               a_hanging_server_is_waited_for_until_cancelled, a_server_that_takes_no_bytes_can_be_cancelled,
               an_absent_server_can_be_cancelled, closing_does_not_wait_for_an_absent_server, a_timeout_fails_the_request_and_spares_the_rest,
               a_timeout_holds_while_nobody_is_there, a_server_that_drops_every_connection_is_not_run_down,
               the_first_connection_can_be_waited_for, nbdkit_may_be_killed, nbdkit_may_be_killed_with_four_connections,
               nbdkit_memory_loses_all_and_is_believed_only_what_was_flushed, qemu_nbd_with_qcow2_may_be_killed,
               weir_itself_may_be_killed]))
