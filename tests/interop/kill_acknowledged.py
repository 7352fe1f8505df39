#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""What was acknowledged and not flushed outlives SIGKILL of the server: with a log, whoever lives on finds all of it at the next start.

usage: kill_acknowledged.py WEIR
"""
import contextlib
import random
import resource
import stat

from harness import *
from serve_lib import *

if not nbd:
    skip("python3-libnbd is not installed")

SIZE, LOG = 4 * MIB, 64 * MIB
SEED = seed()
rng = random.Random(SEED)
SHM = os.environ["WEIR_SHM_DIR"]
UNIT = 512


class Volume:
    """A disk and what it has to hold."""

    def __init__(self, name):
        self.name, self.want, self.h = name, bytearray(SIZE), None

    def connect(self, w):
        self.h = nbd.NBD()
        self.h.connect_uri(w.uri(self.name))

    def change(self):
        """One acknowledged request, of one of all kinds and sizes: from a sector to a group of several batches."""
        kind = rng.choice("wwwwwzd")
        n = UNIT * (rng.randrange(1, 64) if rng.random() < 0.9 else rng.randrange(600, 5000))
        off = rng.randrange(SIZE // UNIT) * UNIT
        n = min(n, SIZE - off)
        if kind == "w":
            data = rng.randbytes(n)
            self.h.pwrite(data, off)
            self.want[off:off + n] = data
            return
        if kind == "z":
            self.h.zero(n, off, rng.choice((0, nbd.CMD_FLAG_NO_HOLE)))
        else:
            off, n = off // 4096 * 4096, max(n // 4096, 1) * 4096
            self.h.trim(n, off)
        self.want[off:off + n] = bytes(n)

    def flush(self):
        self.h.flush()

    def holds(self, what):
        got = self.h.pread(SIZE, 0)
        if got != self.want:
            at = next(i for i in range(0, SIZE, UNIT) if got[i:i + UNIT] != self.want[i:i + UNIT])
            raise AssertionError("%s: %s: sector %d is not what was acknowledged (seed %d)" % (what, self.name, at // UNIT, SEED))


def serve(volumes, logs, *more, **kw):
    args = [a for v in volumes for a in ("--name", v.name)]
    w = Serve(*args, *[a for log in logs for a in ("--log", log)], *more, *[v.name + ".img" for v in volumes], **kw)
    for v in volumes:
        v.connect(w)
    return w


def make(names, logs):
    for n in names:
        with open(n + ".img", "wb") as f:
            f.truncate(SIZE)
    run(WEIR, "log", "create", "--force", *["%s" % log for log in logs], "--size", str(LOG))
    return [Volume(n) for n in names]


def first_flush(volumes):
    """From the first flush on, writes are acknowledged from memory."""
    for v in volumes:
        v.flush()


def what_was_acknowledged_is_there():
    vols = make("ab", ["l"])
    for i in range(4):
        with serve(vols, ["l"]) as w:
            for v in vols:
                v.holds("round %d" % i)
            first_flush(vols)
            for _ in range(rng.randrange(1, 120)):
                rng.choice(vols).change()
            require(w.status()["log"]["survives_kill"], "survives_kill")
            w.kill()
    # Only one of them is served; the other one has lost nothing by that.
    with serve(vols[:1], ["l"]) as w:
        vols[0].holds("served alone")
        w.kill()
    with serve(vols, ["l"]) as w:
        for v in vols:
            v.holds("after the other one was served alone")
        w.end()
    with serve(vols, ["l"]) as w:
        for v in vols:
            v.holds("after a stop in order")


def a_volume_that_is_not_served_loses_nothing():
    vols = make("ab", ["l"])
    with serve(vols, ["l"]) as w:
        first_flush(vols)
        for _ in range(40):
            rng.choice(vols).change()
        w.kill()
    with serve(vols[:1], ["l"]) as w:
        vols[0].holds("served alone")
        w.kill()
    p = run(WEIR, "log", "drain", "l")
    require(p.returncode == 0, p.stderr)
    with serve(vols, ["l"]) as w:
        for v in vols:
            v.holds("both again")


def of_a_mirror_one_side_is_enough():
    vols = make("a", ["l", "m"])
    for logs in (["l", "m"], ["m"], ["m"]):
        with serve(vols, logs) as w:
            vols[0].holds("sides " + " ".join(logs))
            first_flush(vols)
            for _ in range(30):
                vols[0].change()
            w.kill()
    with serve(vols, ["l", "m"]) as w:
        vols[0].holds("the side that was left behind is back")
        w.end()


def a_start_that_is_killed_is_like_the_first():
    """Wherever it was: what it had not finished is finished by the next one."""
    vols = make("a", ["l"])
    for i in range(5):
        with serve(vols, ["l"]) as w:
            vols[0].holds("round %d" % i)
            first_flush(vols)
            for _ in range(60):
                vols[0].change()
            w.kill()
        for _ in range(2):
            p = subprocess.Popen([WEIR, "serve", "--nbd", "unix:x.nbd", "--log", "l", "--name", "a", "a.img"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(rng.random() * 0.02)
            p.kill()
            p.wait()


def kept(w):
    return "%s/weir-log-%s" % (SHM, w.status()["log"]["uuid"])


def what_is_not_ours_is_left_alone():
    """It is ours alone; what is not is left alone, and told; memory goes back."""
    vols = make("a", ["l"])
    with serve(vols, ["l"]) as w:
        path = kept(w)
        st = os.stat(path)
        equal(stat.S_IMODE(st.st_mode), 0o600, "mode")
        require(st.st_blocks * 512 < 8 * MIB, "little memory is taken before it is used")
        w.end()
    require(not os.path.exists(path) or os.stat(path).st_size == 0, "nothing is left by a stop in order")
    for how, says in (("link", "is a symbolic link"), ("mode", "has mode 0644"), ("owner", "belongs to user 12345"), ("names", "has 2 names"), ("fifo", "is not a file"),
                      ("folder", "there is no such folder")):
        if os.path.lexists(path):
            os.remove(path)
        with open("other", "wb") as f:
            f.write(b"x" * 100000)
        if how == "link":
            os.symlink(os.path.abspath("other"), path)
        elif how == "fifo":
            os.mkfifo(path, 0o600)
        elif how != "folder":
            shutil.copy("other", path)
            os.chmod(path, 0o644 if how == "mode" else 0o600)
        if how == "owner":
            if os.geteuid():
                continue
            os.chown(path, 12345, 12345)
        if how == "names":
            os.link(path, path + ".2")
        before = os.lstat(path) if os.path.lexists(path) else None
        env = {"WEIR_SHM_DIR": os.path.abspath("nowhere")} if how == "folder" else None
        with serve(vols, ["l"], env=env) as w:
            require(says in w.text() and "what was acknowledged and not flushed is lost" in w.text(), "%s: it is told: %s" % (how, w.text()))
            require(not w.status()["log"]["survives_kill"], "and reported")
            require("weir_log_survives_kill 0\n" in shows(w, "--prometheus"), "in all forms")
            w.end()
        with open("other", "rb") as f:
            require(f.read() == b"x" * 100000, "what is not ours is left alone")
        if before:
            after = os.lstat(path)
            equal((after.st_ino, after.st_mode, after.st_size, after.st_mtime_ns), (before.st_ino, before.st_mode, before.st_size, before.st_mtime_ns), how + ": left alone")
        if how == "names":
            os.remove(path + ".2")
    os.path.lexists(path) and os.remove(path)


def shows(w, *args):
    p = run(WEIR, "stat", *args, w.name + ".control")
    require(p.returncode == 0, p.stderr)
    return p.stdout


def is_shown():
    vols = make("a", ["l"])
    with serve(vols, ["l"], "--cache-size", "16M") as w:
        require("weir_log_survives_kill 1\n" in shows(w, "--prometheus"), "for Prometheus")
        head, line = shows(w, "-n", "1", "-i", "10ms").splitlines()
        equal((head.split()[-1], line.split()[-1]), ("kill", "safe"), "in a line")
        path = kept(w)
        first_flush(vols)
        vols[0].change()
        w.kill()
    p = run(WEIR, "log", "status", "l")
    require(p.returncode == 0 and path in p.stdout, "who looks at the log before the next start: %s" % p.stdout)
    with serve(vols, ["l"]) as w:
        w.end()
    require("/weir-log-" not in run(WEIR, "log", "status", "l").stdout, "and behind it")


@contextlib.contextmanager
def small_tmpfs(mib):
    if run("mount", "-t", "tmpfs", "-o", "size=%dM" % mib, "tmpfs", "small").returncode:
        skip("no tmpfs can be mounted here")
    try:
        yield {"WEIR_SHM_DIR": os.path.abspath("small")}
    finally:
        run("umount", "-l", "small")


def with_little_memory_it_does_what_it_can():
    """Too little for anything, or for less than the whole ring: then less is kept there, and is there after a kill."""
    if os.geteuid():
        skip("only root can mount a small tmpfs")
    os.mkdir("small")
    vols = make("a", ["l"])
    for size, enough in ((5, False), (7, True)):
        with small_tmpfs(size) as env:
            with serve(vols, ["l"], env=env) as w:
                equal(w.status()["log"]["survives_kill"], enough, "with %d MiB it survives" % size)
                vols[0].holds("before")
                first_flush(vols)
                for _ in range(5):
                    data = rng.randbytes(SIZE // 4)
                    for off in range(0, SIZE, SIZE // 4):
                        vols[0].h.pwrite(data, off)
                        vols[0].want[off:off + SIZE // 4] = data
                require("there is memory for 5" in w.text() if enough else "there is no memory for it" in w.text(), w.text())
                equal(w.status()["log"]["survives_kill"], enough, "and still")
                equal(len(os.listdir("small")), enough, "what cannot be used is not left there")
                vols[0].holds("still served")
                vols[0].change()
                if not enough:
                    w.end()
                else:
                    w.kill()
            if enough:
                with serve(vols, ["l"], env=env) as w:
                    vols[0].holds("after a kill")
                    w.end()


def a_copy_of_the_log_gets_nothing():
    """A copy that was made under a server that was killed later has the UUID and the generation of the log."""
    vols = make("a", ["l"])
    with serve(vols, ["l"]) as w:
        vols[0].h.pwrite(b"1" * UNIT, 0)
        first_flush(vols)
        run("cp", "--sparse=always", "l", "copy")
        vols[0].h.pwrite(b"2" * UNIT, UNIT)
        vols[0].want[:2 * UNIT] = b"1" * UNIT + b"2" * UNIT
        first_flush(vols)
        for _ in range(20):
            vols[0].change()
        w.kill()
    p = run(WEIR, "serve", "--nbd", "unix:x.nbd", "--log", "copy", "--name", "a", "a.img")
    require(p.returncode == 1 and "it is a copy" in p.stderr + p.stdout, p.stderr)
    with serve(vols, ["l"]) as w:
        vols[0].holds("the log itself")
        w.end()


@contextlib.contextmanager
def limit_on_files(size):
    """For the programs that are started here. What Python ignores, they get with its default action."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def a_limit_on_files_ends_no_server():
    """The signal that comes with it (SIGXFSZ) would end the process."""
    vols = make("a", ["l"])
    with limit_on_files(60 * MIB), serve(vols, ["l"]) as w:
        require("may make a file" in w.text() and not w.status()["log"]["survives_kill"], "it is told: " + w.text())
        first_flush(vols)
        vols[0].change()
        vols[0].holds("the memory is its own")
        w.end()
    os.truncate("a.img", SIZE)
    with limit_on_files(SIZE // 2), Serve("--discard-log", "--name", "a", "a.img") as w:
        vols[0].connect(w)
        for off in (SIZE - UNIT, SIZE // 2 - UNIT // 2):
            try:
                vols[0].h.pwrite(b"x" * UNIT, off)
                require(False, "a write beyond the limit fails")
            except nbd.Error as e:
                equal(e.errno, "ENOSPC", "and says why")
        vols[0].h.pwrite(b"y" * UNIT, 0)
        vols[0].h.flush()
        equal(bytes(vols[0].h.pread(UNIT, 0)), b"y" * UNIT, "the rest is as ever")
        w.end()
    with limit_on_files(MIB), Serve("--discard-log", "--name", "a", "--log", "l", "a.img") as w:
        vols[0].connect(w)
        try:
            for off in range(0, SIZE, SIZE // 8):
                vols[0].h.pwrite(rng.randbytes(SIZE // 8), off)
                vols[0].h.flush()
            require(False, "a log that cannot be written fails")
        except nbd.Error:
            w.wait_for("writes fail from now on")
        w.status()
    with limit_on_files(MIB):
        for args in (("log", "create", "--force", "m", "--size", "64M"), ("image", "create", "q.qcow2", "8M", "-o", "preallocation=full"), ("image", "convert", "a.img", "b.img")):
            p = subprocess.run([WEIR, *args], capture_output=True, text=True, timeout=TIMEOUT)
            require(p.returncode == 1 and ("oo large" in p.stderr or "No space left" in p.stderr), "%s: %d %s" % (args, p.returncode, p.stderr))


def damage_is_refused():
    vols = make("a", ["l"])
    with serve(vols, ["l"]) as w:
        first_flush(vols)
        for _ in range(20):
            vols[0].h.pwrite(rng.randbytes(8192), rng.randrange(400) * 8192)
        path = kept(w)
        w.kill()
    with open(path, "r+b") as f:
        f.truncate(MIB)
    p = subprocess.run([WEIR, "serve", "--nbd", "unix:x.nbd", "--log", "l", "--name", "a", "a.img"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT)
    require(p.returncode == 1 and b"is damaged" in p.stdout and path.encode() in p.stdout, p.stdout)
    run(WEIR, "log", "check", "l")
    os.remove(path)
    with serve(vols, ["l"]) as w:
        w.end()


tests = (what_was_acknowledged_is_there, a_volume_that_is_not_served_loses_nothing, of_a_mirror_one_side_is_enough,
         a_start_that_is_killed_is_like_the_first, what_is_not_ours_is_left_alone, is_shown, damage_is_refused, a_copy_of_the_log_gets_nothing,
         a_limit_on_files_ends_no_server, with_little_memory_it_does_what_it_can)
sys.exit(run_tests(tests, folders=True))
