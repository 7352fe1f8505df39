#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Bad input of `weir serve`: each case gets one line that names the thing and the reason, exit 1 (2 for a wrong command line), and nothing
is overwritten or left behind.

usage: test_serve_errors.py WEIR
"""
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile

from harness import *

WEIR = os.path.abspath(sys.argv[1])


def digest(folder):
    """What is in the folder: names, kinds, sizes, beginnings."""
    out = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        st = os.lstat(path)
        data = b""
        if stat.S_ISREG(st.st_mode):
            with open(path, "rb") as f:
                data = f.read(65536)
        out[name] = (st.st_mode, st.st_size, st.st_ino, data)
    return out


def case(status, words, *args, **kw):
    before = digest(".")
    p = subprocess.run([WEIR, "serve", *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, **kw)
    lines = [x for x in p.stderr.splitlines() if not x.startswith("weir: ")]
    problems = []
    if p.returncode != status:
        problems.append("exit status %d, wanted %d" % (p.returncode, status))
    if len(lines) != 1 or p.stdout:
        problems.append("not one line")
    for word in words:
        if word not in p.stderr:
            problems.append("no %r" % word)
    if digest(".") != before:
        problems.append("the folder has changed")
    check("weir serve %s" % " ".join(args), not problems, "%s\n  %s" % (", ".join(problems), p.stderr.strip()))


def names(folder):
    return sorted((n, stat.S_IFMT(os.lstat(os.path.join(folder, n)).st_mode)) for n in os.listdir(folder))


def start(limit, value, *args):
    """Exit status and messages of a server that may have no more of something. If it is ready it is ended."""
    p = subprocess.Popen(["sh", "-c", 'ulimit %s %d && exec "$@"' % (limit, value), "sh", WEIR, "serve", *args], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                         text=True)
    lines = []
    with p:
        for line in p.stderr:
            lines.append(line.rstrip("\n"))
            if line == "weir: ready\n":
                p.terminate()
    return p.returncode, lines


def too_little(what, limit, values, *args):
    """Starts with more and more of something until all is there: one line each time, and nothing is left behind. The lines."""
    said, shm = [], os.environ["WEIR_SHM_DIR"]
    for value in values:
        before = names("."), names(shm)
        rc, lines = start(limit, value, *args)
        if "weir: ready" in lines:
            return said
        if rc == 127 and "loading shared libraries" in lines[0]:
            continue    # not even that
        last = [x for x in lines if not x.startswith("weir: ")]
        problems = [] if rc == 1 else ["exit status %d" % rc]
        problems += [] if len(last) == 1 and last[0].startswith("weir serve: ") else ["not one line"]
        # An empty file of the server before may have gone.
        problems += [] if names(".") == before[0] and set(names(shm)) <= set(before[1]) else ["something is left: %s %s" % (names("."), names(shm))]
        check("weir serve %s with %s %d" % (" ".join(args), what, value), not problems, "%s\n  %s" % (", ".join(problems), "\n  ".join(lines)))
        said += last
    check("with %s there is enough at last" % what, False, said[-3:])
    return said


NBD = ("--nbd", "unix:sock")
with tempfile.TemporaryDirectory(prefix="weir-errors-") as top:
    os.chdir(top)
    with open("disk.raw", "wb") as f:
        f.write(os.urandom(1 << 20))
    with open("random.log", "wb") as f:
        f.write(os.urandom(1 << 20))
        f.truncate(64 << 20)
    with open("zeroes.log", "wb") as f:
        f.truncate(64 << 20)
    with open("small.log", "wb") as f:
        f.truncate(4096)
    with open("empty", "wb"):
        pass
    os.mkdir("folder")

    # The command line.
    case(2, ["DISK"], *NBD)
    case(2, ["--nbd"], "disk.raw")
    case(2, ["unix:PATH"], "disk.raw", "--nbd", "unix:")
    case(2, ["'foo'"], "disk.raw", "--nbd", "foo")
    case(2, ["'host:'"], "disk.raw", "--nbd", "host:")
    case(2, ["99999"], "disk.raw", "--nbd", "localhost:99999")
    case(2, ["[::1"], "disk.raw", "--nbd", "[::1:5")
    case(2, ["1:2:3"], "disk.raw", "--nbd", "1:2:3")
    case(2, ["no-such"], "disk.raw", *NBD, "--no-such")
    case(2, ["--aio", "threads"], "disk.raw", *NBD, "--aio", "fast")
    case(2, ["--cache", "directsync"], "disk.raw", *NBD, "--cache", "all")
    case(2, ["--sync", "always"], "disk.raw", *NBD, "--sync", "on")
    case(2, ["--quota"], "disk.raw", *NBD, "--log", "x", "--quota", "1Q")
    case(2, ["--memory"], "disk.raw", *NBD, "--log", "x", "--memory", "-1")
    case(2, ["--poll-us"], "disk.raw", *NBD, "--poll-us", "often")
    case(2, ["--log"], "disk.raw", *NBD, "--drain")
    case(2, ["--log"], "disk.raw", *NBD, "--force-replay")

    # Disks.
    case(1, ["missing.raw", "no such file"], "missing.raw", *NBD)
    case(1, ["folder", "directory"], "folder", *NBD)
    case(1, ["nope:disk"], "nope:disk", *NBD)
    case(1, ["mem:", "size"], "mem:12Q", *NBD)
    case(1, ["mem:", "size"], "mem:", *NBD)
    case(1, ["no-such", "disk.raw"], "disk.raw,no-such=1", *NBD)
    case(1, ["aio", "io_uring"], "disk.raw,aio=fast", *NBD)
    case(1, ["format"], "disk.raw,format=vmdk", *NBD)
    case(1, ["delay"], "delay:read=fast:disk.raw", *NBD)
    case(1, ["nbd"], "nbd+unix:///?socket=nobody", *NBD)
    case(1, ["--name"], "disk.raw", "folder/../disk.raw", *NBD)
    case(1, ["'a'", "--name"], "mem:1M", "mem:1M", *NBD, "--name", "a", "--name", "a")
    case(1, ["--name"], "mem:1M", *NBD, "--name", "a", "--name", "b")
    case(1, ["--name"], "mem:1M", *NBD, "--name", "")
    case(1, ["--name"], "mem:1M", *NBD, "--name", "n" * 64)
    case(1, ["--name"], "mem:1M", *NBD, "--name", "line\nbreak")
    case(1, ["64"], *["null:1M"] * 65, *NBD)

    # Logs.
    case(1, ["missing.log", "no such file", "weir log create"], "disk.raw", *NBD, "--log", "missing.log")
    case(1, ["random.log"], "disk.raw", *NBD, "--log", "random.log")
    case(1, ["zeroes.log"], "disk.raw", *NBD, "--log", "zeroes.log")
    case(1, ["small.log", "32 MiB", "weir log create"], "disk.raw", *NBD, "--log", "small.log")
    case(1, ["empty", "32 MiB"], "disk.raw", *NBD, "--log", "empty")
    case(1, ["folder"], "disk.raw", *NBD, "--log", "folder")
    case(1, ["disk.raw"], "disk.raw", *NBD, "--log", "disk.raw")
    case(1, ["mirror"], "disk.raw", *NBD, "--log", "a", "--log", "b", "--log", "c")

    # Sockets.
    case(1, ["disk.raw", "not a socket"], "mem:1M", "--nbd", "unix:disk.raw")
    case(1, ["folder", "not a socket"], "mem:1M", "--nbd", "unix:folder")
    case(1, ["no/such/folder", "No such file"], "mem:1M", "--nbd", "unix:no/such/folder")
    case(1, ["107"], "mem:1M", "--nbd", "unix:" + "p" * 108)
    case(1, ["disk.raw", "not a socket"], "mem:1M", *NBD, "--control", "disk.raw")
    case(1, ["no/such"], "mem:1M", *NBD, "--control", "no/such/control")
    case(1, ["listens there"], "mem:1M", *NBD, "--control", "sock")
    case(1, ["8.8.8.8", "assign"], "mem:1M", "--insecure", "--nbd", "8.8.8.8:0")
    case(1, ["host.invalid"], "mem:1M", "--nbd", "host.invalid:1")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        case(1, ["in use", "127.0.0.1:%d" % s.getsockname()[1]], "mem:1M", "--nbd", "127.0.0.1:%d" % s.getsockname()[1])
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("live")
        s.listen()
        case(1, ["live", "listens there"], "mem:1M", "--nbd", "unix:live")

    # Too few descriptors, too little memory: for a reactor, the second one, an image, a log, a socket, a thread.
    subprocess.run([WEIR, "log", "create", "--size", "32M", "log"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    everything = ("--control", "control", "--pid-file", "pid", *NBD, "--vhost-user", "vhost")
    for args in (("--reactors", "2", "disk.raw", "mem:1M"), ("--log", "log", "disk.raw")):
        said = too_little("descriptors", "-n", range(4, 100), *everything, *args)
        rings = [i for i, x in enumerate(said) if "io_uring" in x]
        check("a start fails at each step", len(set(said)) >= 5 and rings, "\n".join(said))
        if "2" in args:
            check("and at the second reactor", rings[-1] - rings[0] >= 2, "\n".join(said))
            said = too_little("KiB of memory", "-v", range(32 << 10, 4 << 20, 96 << 10), *everything, *args)
            check("there was too little", any(re.search("memory|thread", x) for x in said), "\n".join(said))

    # Somebody who may not.
    os.chmod(".", 0o755)
    os.chmod("disk.raw", 0o444)
    if os.getuid() == 0 and subprocess.run([WEIR, "--version"], user=65534, capture_output=True).returncode == 0:
        case(1, ["disk.raw", "ermission denied"], "disk.raw", "--nbd", "unix:/tmp/weir-nobody-%d" % os.getpid(), user=65534)
        os.chmod("disk.raw", 0)
        case(1, ["disk.raw", "ermission denied"], "disk.raw", "--read-only", "--nbd", "1", user=65534)
sys.exit(status())
