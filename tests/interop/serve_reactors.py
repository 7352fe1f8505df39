#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""A server whose volumes are spread over reactors: what one reactor promises holds for several, and under load.

usage: serve_reactors.py WEIR VHOST_BENCH [TEST...]
"""
import json
import random
import threading

from nbd_lib import *

try:
    import nbd
except ImportError:
    skip("python3-libnbd is not installed")

BENCH = sys.argv[2]
BLOCK, PLACES = 4096, 64
SIZE = 4 << 20


class Control:
    def __init__(self, path):
        self.s = socket.socket(socket.AF_UNIX)
        self.s.settimeout(TIMEOUT)
        self.s.connect(path)
        self.f = self.s.makefile("rw")

    def ask(self, command, **args):
        self.f.write(json.dumps(dict(args, command=command, id=7)) + "\n")
        self.f.flush()
        answer = json.loads(self.f.readline())
        equal(answer.pop("id"), 7, "the id of the answer")
        return answer

    def result(self, command, **args):
        answer = self.ask(command, **args)
        check(answer["ok"], "%s: %s" % (command, answer))
        return answer["result"]


@contextlib.contextmanager
def server(*disks, reactors=2, more=()):
    with folder() as d:
        with Server("--reactors", str(reactors), "--control", d + "/c", *more, *disks) as s:
            s.control = Control(d + "/c")
            yield s
            ends(s)


def ends(s):
    """The end has a second of the clock, which a slow machine or a sanitizer may use up: then it says so."""
    rc = s.stop()
    if rc and "stopping takes too long" in s.text() and "Sanitizer" not in s.text():
        print("the end took too long")
        s.killed = True
    else:
        equal(rc, 0, "the server's exit status: " + s.text())


def connect(s, name):
    h = nbd.NBD()
    h.connect_uri(s.uri(name))
    return h


class Load(threading.Thread):
    """Writes, reads back and flushes one volume over connections that come and go."""

    def __init__(self, s, name, seed):
        super().__init__(daemon=True)
        self.s, self.name_, self.rng = s, name, random.Random(seed)
        self.rounds, self.stop, self.error = 0, False, None

    def run(self):
        try:
            while not self.stop:
                h = connect(self.s, self.name_)
                for _ in range(8):
                    place = self.rng.randrange(PLACES)
                    data = bytes([self.rng.randrange(256)]) * BLOCK
                    h.pwrite(data, place * BLOCK)
                    if h.pread(BLOCK, place * BLOCK) != data:
                        raise ValueError("%s: what was written is not what is read" % self.name_)
                h.flush()
                self.rounds += 1
                h.shutdown()
        except nbd.Error as e:
            if not self.stop:
                self.error = e
        except Exception as e:  # noqa: a thread's error must not get lost
            self.error = e


def a_small_cache_is_enough_for_all():
    names = [a for n in "abcd" for a in ("--name", n)]
    with server(*names, *4 * ["null:8M"], reactors=4, more=("--cache-size", "5M")) as s:
        equal(sorted(s.control.result("status")["cache"]["volumes"]), list("abcd"), "each has its part")
        s.control.result("cache-size", size="4M")
        # Below what it was started with nothing is too small for a part, above it is told.
        check(not s.control.ask("cache-size", size="64M")["ok"], "more than it can have")


def cache_sizes(s, limit):
    """Of each reactor. They answer one after the other, and memory may move in between: never together more than there is, when nothing does."""
    for _ in range(5):
        sizes = [r["cache_size"] for r in s.control.result("stats")["reactors"]]
        if sum(sizes) <= limit:
            return sizes
    raise AssertionError("the caches have %s of %d" % (sizes, limit))


def read_until_it_hits(s, name, size, limit):
    """Reads it in a loop: in memory at last, or not. The sizes of the caches then."""
    h, end = connect(s, name), time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        before = s.control.result("status")["cache"]["volumes"][name]["data"]
        for off in range(0, size, 1 << 20):
            h.pread(1 << 20, off)
        now = s.control.result("status")["cache"]["volumes"][name]["data"]
        sizes = cache_sizes(s, limit)
        # What is read ahead hits as well, and comes from below.
        if now["evicted"] == before["evicted"] and now["misses"] == before["misses"]:
            h.shutdown()
            return sizes
        time.sleep(0.4)
    raise AssertionError("%s: %d bytes never are in memory: %s, %s" % (name, size, now, sizes))


def an_idle_reactor_lends_its_cache_and_gets_it_back():
    limit = 16 << 20
    with server("--name", "a", "--name", "b", "mem:16M", "mem:16M", more=("--cache-size", str(limit))) as s:
        piece = os.urandom(1 << 20)
        for name in "ab":
            h = connect(s, name)
            for off in range(0, 9 << 20, 1 << 20):
                h.pwrite(piece, off)
            h.shutdown()
        equal(cache_sizes(s, limit), [limit // 2] * 2, "each has its part")
        sizes = read_until_it_hits(s, "a", 9 << 20, limit)
        check(sizes[0] > 9 << 20 and sizes[1] < limit // 2, "lent: %s" % sizes)
        sizes = read_until_it_hits(s, "b", 5 << 20, limit)
        check(sizes[1] > 5 << 20, "given back: %s" % sizes)
        s.control.result("cache-size", size="12M")
        cache_sizes(s, 12 << 20)
        check(not s.control.ask("cache-size", size="17M")["ok"], "more than it was started with")
        s.control.result("cache-size", size=limit)
        cache_sizes(s, limit)


def it_ends_while_it_is_told_sizes():
    for delay in (0, 0.05):
        with server("--name", "a", "--name", "b", "mem:8M", "mem:8M", more=("--cache-size", "32M")) as s:
            connect(s, "b").pwrite(b"x" * (4 << 20), 0)
            for i in range(40):
                for line in ({"command": "cache-size", "size": "8M" if i & 1 else "32M"}, {"command": "cache-set", "volume": "b", "primarycache": "metadata" if i & 1 else "all"},
                             {"command": "resize", "volume": "b", "size": (9 + i) << 20}):
                    s.control.f.write(json.dumps(line) + "\n")
            s.control.f.flush()
            time.sleep(delay)


def everything_is_asked_and_changed_under_load_and_the_end_loses_nothing():
    with server("--name", "a", "--name", "b", "--name", "c", "--name", "d", "mem:8M", "mem:8M", "null:8M", "mem:8M", more=("--cache-size", "32M")) as s:
        loads = [Load(s, name, i) for i, name in enumerate("abd")]
        for t in loads:
            t.start()
        c, end = s.control, time.monotonic() + 1
        size = 8 << 20
        while time.monotonic() < end or any(t.rounds < 3 and t.is_alive() for t in loads):
            st = c.result("status")
            equal([(v["name"], v["reactor"]) for v in st["volumes"]], [("a", 0), ("b", 1), ("c", 0), ("d", 1)], "where the volumes are")
            check(set("abcd") <= set(st["cache"]["volumes"]), "each has its share of the cache: %s" % list(st["cache"]["volumes"]))
            check(st["cache"]["memory"] <= 32 << 20, "the cache's memory")
            stats = c.result("stats")
            equal(stats["names"], list("abcd"), "the order of the figures")
            equal(len(stats["reactors"]), 2, "reactors")
            equal(sum(r["turns"] for r in stats["reactors"]), stats["runtime"]["turns"], "the sum of turns")
            check(len(c.result("tasks")["tasks"]) >= 2, "tasks")
            size += 1 << 20
            for name in "bc":
                equal(c.result("resize", volume=name, size=size), {"size": size}, "a resize")
            c.result("cache-size", size="16M" if size >> 20 & 1 else "32M")
            c.result("cache-set", volume="d", primarycache="metadata" if size >> 20 & 1 else "all")
            c.result("cache-curve", volume="b")
            check(not c.ask("resize", volume="x", size=size)["ok"], "a volume that is not there")
            check(not c.ask("resize", volume="b", size=4096)["ok"], "a volume that would lose its end")
            check(not c.ask("drain")["ok"], "there is no log")
            for t in loads:
                check(t.is_alive(), "%s: %s" % (t.name_, t.error))
        st = c.result("status")
        equal(next(v for v in st["volumes"] if v["name"] == "b")["size"], size, "the size at the end")
        for name in "bc":
            h = connect(s, name)
            equal(h.get_size(), size, "the size that a client sees")
            h.shutdown()
        for t in loads:
            t.stop = True
        s.proc.send_signal(signal.SIGTERM)
        ends(s)
        for t in loads:
            t.join(TIMEOUT)
            check(not t.error, t.error)
        check("ThreadSanitizer" not in s.text(), s.text())


def wait_for_connections(s, n):
    """No more than n are left: who has just closed one counts until the server has seen it."""
    end = time.monotonic() + TIMEOUT
    while len(s.control.result("status")["nbd"]["connections"]) > n and time.monotonic() < end:
        time.sleep(0.01)


def one_address_leads_to_all_and_limits_count_for_all():
    with server("--name", "a", "--name", "b", "mem:4M", "mem:6M", more=("--max-connections", "3")) as s:
        with Raw(s) as c:
            replies = c.ask(LIST)
            equal([d[4:] for k, d in replies if k == SERVER], [b"a", b"b"], "the list")
            equal(c.ask(INFO, go_data(b"x"))[-1][0], UNKNOWN, "an export that is not there")
            replies = dict((d[:2], d) for k, d in c.ask(INFO, go_data(b"b", (1, 3))) if k == REP_INFO)
            equal(struct.unpack(">Q", replies[b"\0\0"][2:10])[0], 6 << 20, "the size of a volume elsewhere")
            equal(replies[b"\0\1"][2:], b"b", "its name")
            # What comes right behind the handshake moves along.
            c.send(struct.pack(">QII", OPT_MAGIC, STRUCTURED, 0) + struct.pack(">QII", OPT_MAGIC, GO, 7) + go_data(b"b")
                   + struct.pack(">IHHQQI", REQUEST_MAGIC, 0, WRITE, 1, BLOCK, 512) + b"w" * 512 + struct.pack(">IHHQQI", REQUEST_MAGIC, 0, READ, 2, BLOCK, 512))
            equal(c.reply(STRUCTURED)[0], ACK, "structured replies")
            while c.reply(GO)[0] != ACK:
                pass
            c.structured = True
            equal(c.result(1), 0, "the write")
            equal(c.chunk()[3][8:], b"w" * 512, "what is read")
        wait_for_connections(s, 0)
        h = [connect(s, name) for name in ("", "b", "b")]
        equal(h[0].get_size(), 4 << 20, "the default export")
        conns = s.control.result("status")["nbd"]["connections"]
        equal(sorted(x["export"] for x in conns), ["a", "b", "b"], "connections")
        try:
            connect(s, "a")
            raise AssertionError("a fourth client got in")
        except nbd.Error:
            pass
        h[2].shutdown()
        wait_for_connections(s, 2)
        connect(s, "b").shutdown()
        # A client that vanishes, and one that stays to the end.
        h[1] = None
    with server("mem:4M", "null:4M", more=("--allow-export", "null")) as s:
        with Raw(s) as c:
            equal([d[4:] for k, d in c.ask(LIST) if k == SERVER], [b"null"], "what is allowed")
    p = run(WEIR, "serve", "--reactors", "2", "--nbd", "unix:/nowhere/s", "mem:4M", "mem:4M")
    check(p.returncode == 1 and "two volumes are called 'mem'" in p.stderr, p.stderr)
    p = run(WEIR, "serve", "--reactors", "2", "--nbd", "unix:/nowhere/s", "mem:4M", "file:/nowhere/x")
    check(p.returncode == 1 and "/nowhere/x" in p.stderr, p.stderr)
    p = run(WEIR, "serve", "--reactors", "2", "--allow-export", "z", "--nbd", "unix:/nowhere/s", "mem:4M", "null:4M")
    check(p.returncode == 1 and "no volume 'z'" in p.stderr, p.stderr)


def an_encrypted_connection_moves_with_its_session():
    with folder() as d:
        with open(d + "/keys.psk", "w") as f:
            f.write("alice:" + "5a" * 32 + "\n")
        if not nbd.NBD().supports_tls() or "without GnuTLS" in run(WEIR, "serve", "null:1M", "--nbd", "unix:/nowhere/s", "--tls-creds", d).stderr:
            print("no TLS here")
            return
        with server("--name", "a", "--name", "b", "mem:4M", "mem:4M", more=("--tls", "require", "--tls-creds", d)) as s:
            data = random.Random(1).randbytes(1 << 20)
            for _ in range(2):
                handles = []
                for name in ("b", "a", "b"):
                    h = nbd.NBD()
                    h.set_tls(nbd.TLS_REQUIRE)
                    h.set_tls_username("alice")
                    h.set_tls_psk_file(d + "/keys.psk")
                    h.set_export_name(name)
                    h.connect_unix(s.sock)
                    h.pwrite(data, 4096)
                    require(h.pread(len(data), 4096) == data, "what was written is what is read")
                    handles.append(h)
                conns = s.control.result("status")["nbd"]["connections"]
                equal(sorted((x["export"], x["identity"]) for x in conns), [("a", "alice"), ("b", "alice"), ("b", "alice")], "connections")
                check(s.control.ask("tls-reload")["ok"], "new credentials while sessions hold the old")
                for h in handles:
                    h.flush()
                    h.shutdown()
                while s.control.result("status")["nbd"]["connections"]:
                    time.sleep(0.01)


def virtual_machines_of_both_reactors_are_served_at_once():
    with folder() as d:
        with server("--name", "a", "--name", "b", "mem:4M", "mem:4M", "--vhost-user", d + "/1", "--vhost-user", d + "/2", "--vhost-user",
                    d + "/3,volume=b") as s:
            load = [subprocess.Popen([BENCH, "%s/%d" % (d, i), "randwrite", "qd=4", "seconds=1"], stdout=subprocess.PIPE, text=True) for i in (1, 2, 3)]
            for p in load:
                out = p.communicate(timeout=TIMEOUT)[0]
                equal(p.returncode, 0, "the client's exit status")
                check(json.loads(out)["iops"] > 0, out)
            st = s.control.result("status")
            equal([(x["path"][-1], x["volume"]) for x in st["vhost_user"]], [("1", "a"), ("2", "b"), ("3", "b")], "devices")
            check(all(x["requests"] > 0 for x in st["vhost_user"]), "each has served")


def every_thread_is_confined_and_takes_no_signal_of_the_process():
    user = () if os.geteuid() else ("--user", "nobody")
    with server("mem:4M", "null:4M", more=user) as s:
        for task in os.listdir("/proc/%d/task" % s.proc.pid):
            with open("/proc/%d/task/%s/status" % (s.proc.pid, task)) as f:
                st = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
            if st["Name"].startswith("iou-"):
                continue
            check(st["Seccomp"] == "2" and st["NoNewPrivs"] == "1", st)
            if int(task) != s.proc.pid and st["Name"] == "weir":
                continue            # a sanitizer's own
            check(not user or st["CapBnd"] == "0" * 16, "capabilities of %s" % st["Name"])
            check(not user or set(st["Uid"].split()) == {"65534"}, "the user of %s" % st["Name"])
            if st["Name"] == "weir-1":
                check(int(st["SigBlk"], 16) >> (signal.SIGTERM - 1) & 1, "SIGTERM is blocked")
        for name in ("mem", "null"):
            connect(s, name).shutdown()
        check(not s.control.ask("fuse-add", volume="null", path="/tmp/x")["ok"], "no file can be mounted any more")


def volumes_that_share_a_log_share_a_reactor():
    with folder() as d:
        run(WEIR, "log", "create", "--size", "32M", d + "/log")
        for name in "ab":
            with open(d + "/" + name, "wb") as f:
                f.truncate(SIZE)
        with server(d + "/a", d + "/b", more=("--log", d + "/log")) as s:
            check("all on one; the volumes share a write log" in s.text(), s.text())
            equal([v["reactor"] for v in s.control.result("status")["volumes"]], [0, 0], "where they are")
            connect(s, "b").shutdown()


def volumes_that_stand_on_the_same_file_share_a_reactor():
    with folder() as d:
        with open(d + "/raw", "wb") as f:
            f.truncate(SIZE)
        for name, below, fmt in (("base", "raw", "raw"), ("x", "base.qcow2", "qcow2"), ("y", "base.qcow2", "qcow2"), ("z", None, None)):
            p = run(WEIR, "image", "create", *(("-b", below, "-F", fmt) if below else ()), "%s/%s.qcow2" % (d, name), "4M")
            equal(p.returncode, 0, p.stderr)
        with server("--name", "x", "--name", "z", "--name", "w", "--name", "y", *("%s/%s" % (d, n) for n in ("x.qcow2", "z.qcow2")), "mem:1M",
                    d + "/y.qcow2", reactors=3) as s:
            equal([(v["name"], v["reactor"]) for v in s.control.result("status")["volumes"]], [("x", 0), ("z", 1), ("w", 2), ("y", 0)],
                  "where they are")
            connect(s, "y").shutdown()


class Places:
    """What a volume without a log holds after a kill: each place the last write that a flush covers, or a later one."""

    def __init__(self, name, seed):
        self.name, self.rng, self.n = name, random.Random(seed), 0
        self.may, self.last = [{bytes(BLOCK)} for _ in range(PLACES)], [bytes(BLOCK)] * PLACES
        self.total, self.error = 0, None

    def load(self, s, started):
        try:
            h = connect(s, self.name)
            while True:
                place, self.n = self.rng.randrange(PLACES), self.n + 1
                data = struct.pack("<I", self.n) * (BLOCK // 4)
                self.may[place].add(data)
                h.pwrite(data, place * BLOCK * 5)
                self.last[place] = data
                self.total += 1
                if self.rng.random() < 0.2:
                    h.flush()
                    self.may = [{x} for x in self.last]
                started.set()
        except nbd.Error:
            pass
        except Exception as e:  # noqa
            self.error = e
        finally:
            started.set()

    def verify(self, s):
        h = connect(s, self.name)
        for place in range(PLACES):
            data = bytes(h.pread(BLOCK, place * BLOCK * 5))
            check(data in self.may[place], "%s, place %d is not what was written" % (self.name, place))
            self.may[place], self.last[place] = {data}, data
        h.shutdown()


def a_kill_leaves_what_was_acknowledged_on_each_reactor():
    rng = random.Random(seed())
    with folder() as d:
        for name in "abc":
            p = run(WEIR, "image", "create", "%s/%s.qcow2" % (d, name), "8M")
            equal(p.returncode, 0, p.stderr)
        volumes = [Places(name + ".qcow2", rng.random()) for name in "abc"]
        for i in range(max(2, int(3 * scale()))):
            with server(*("%s/%s" % (d, v.name) for v in volumes), reactors=3 if i % 2 else 2) as s:
                started = [threading.Event() for _ in volumes]
                threads = [threading.Thread(target=v.load, args=(s, e), daemon=True) for v, e in zip(volumes, started)]
                for v in volumes:
                    v.verify(s)
                for t in threads:
                    t.start()
                for e in started:
                    e.wait(TIMEOUT)
                time.sleep(rng.uniform(0, 0.2))
                s.kill()
                for t, v in zip(threads, volumes):
                    t.join(TIMEOUT)
                    check(not t.is_alive() and not v.error, v.error)
            for v in volumes:
                wait_unlocked("%s/%s" % (d, v.name))
                p = run("qemu-img", "check", "%s/%s" % (d, v.name)) if shutil.which("qemu-img") else None
                check(not p or p.returncode in (0, 3), "%s: %s" % (v.name, p and p.stdout + p.stderr))
        with server(*("%s/%s" % (d, v.name) for v in volumes)) as s:
            for v in volumes:
                v.verify(s)
                check(v.total, "%s took no write" % v.name)


if __name__ == "__main__":
    sys.exit(run_tests(tests_of(globals()), chosen=sys.argv[3:]))
