#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""`weir log` does what its page says, and bad input gets one precise line, a status that is not 0, and changes nothing.

usage: test_log.py WEIR
"""
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

from harness import *

try:
    import nbd
except ImportError:
    skip("python3-libnbd is missing")

WEIR = os.path.abspath(sys.argv[1])


def log(*args):
    return run(WEIR, "log", *args, timeout=60)


def digest(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def works(*args):
    p = log(*args)
    check("weir log %s works" % " ".join(args), p.returncode == 0, p.stderr + p.stdout)
    return p.stdout


def refused(words, *args, status=1, same=()):
    """One line on standard error that has the words; the files in `same` are as they were."""
    before = [digest(f) for f in same]
    names = sorted(os.listdir("."))
    p = log(*args)
    what = "weir log %s" % " ".join(args)
    lines = [x for x in p.stderr.splitlines() if not x.startswith("weir: ")]
    check(what + " is refused", p.returncode == status, "exit %d %s" % (p.returncode, p.stdout))
    check(what + " says so in one line", len(lines) == 1, p.stderr)
    for word in words:
        check(what + " says " + repr(word), word in p.stderr, p.stderr)
    check(what + " changes nothing", [digest(f) for f in same] == before and sorted(os.listdir(".")) == names)


class Server:
    def __init__(self, *args):
        self.p = subprocess.Popen([WEIR, "serve", *args, "--nbd", "unix:sock"], stdin=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, text=True)
        for line in self.p.stderr:
            if line.strip().endswith("ready"):
                return
        raise RuntimeError("weir serve did not start")

    def write(self, name, data, off=0):
        h = nbd.NBD()
        h.set_export_name(name)
        h.connect_unix("sock")
        for at in range(0, len(data), 65536):
            h.pwrite(data[at:at + 65536], off + at)
            h.flush()
        h.shutdown()

    def end(self, sig):
        self.p.send_signal(sig)
        self.p.wait(30)
        self.p.stderr.close()
        if os.path.exists("sock"):
            os.unlink("sock")


def make_dirty(log_file, image, *more, size=MIB):
    """Serves, writes, kills. Returns what was written at the image's start."""
    data = os.urandom(size)
    s = Server(image + ",aio=threads", "--name", "vm", "--log", log_file, *more)
    s.write("vm", data)
    s.end(signal.SIGKILL)
    return data


def make_files():
    for name, size in (("vm.raw", 8), ("other.raw", 8), ("short.raw", 4)):
        with open(name, "wb") as f:
            f.truncate(size * MIB)
    with open("foreign", "wb") as f:
        f.write(b"a letter to somebody")
        f.truncate(64 * MIB)
    with open("empty", "wb"):
        pass
    os.mkdir("folder")


def test_create():
    refused(["missing", "does not exist", "--size"], "create", "missing")
    refused(["empty", "--size"], "create", "empty")
    refused(["folder", "directory"], "create", "--size", "64M", "folder")
    refused(["foreign", "not a write log", "--force"], "create", "foreign", same=["foreign"])
    refused(["32 MiB"], "create", "--size", "1M", "tiny", status=2)
    refused(["power of two"], "create", "--size", "64M", "--segment-size", "3M", "tiny", status=2)
    refused(["nowhere", "No such file"], "create", "--size", "64M", "nowhere/a.log")
    refused(["space", "free"], "create", "--size", "1024T", "huge.log")
    refused(["one device too many"], "create", "a", "b", "c", status=2)
    works("create", "--size", "64M", "a.log")
    st = os.stat("a.log")
    check("a log is written in full when it is created", st.st_size == 64 * MIB and st.st_blocks * 512 >= 64 * MIB)
    check("nobody else may read it", st.st_mode & 0o777 == 0o600)
    works("create", "--force", "foreign")
    works("create", "--size", "64M", "empty")
    works("create", "a.log")
    refused(["64 MiB", "--force"], "create", "--size", "32M", "a.log", same=["a.log"])
    works("create", "--size", "64M", "m0.log", "m1.log")


def test_reading():
    s = json.loads(works("status", "--json", "a.log"))
    check("status has stable keys", s["size"] == 64 * MIB and s["volumes"] == [], s)
    check("a new log has no damage", json.loads(works("check", "-j", "a.log"))["ok"] is True)
    for verb in ("status", "check", "dump", "drain", "discard"):
        refused(["missing"], verb, "missing")
        refused(["vm.raw", "log"], verb, "vm.raw", same=["vm.raw"])
        refused(["folder", "directory"], verb, "folder")
        refused(["DEVICE"], verb, status=2)
    check("two sides are checked together", "no damage" in works("check", "m0.log", "m1.log"))
    refused(["a.log", "not a mirror"], "status", "a.log", "m0.log", same=["a.log", "m0.log"])


def test_truncated():
    works("create", "--size", "64M", "cut.log")
    os.truncate("cut.log", 40 * MIB)
    for verb in ("status", "drain", "discard"):
        refused(["cut.log", str(40 * MIB), str(64 * MIB)], verb, "cut.log", same=["cut.log"])


def test_in_use():
    s = Server("vm.raw", "--name", "vm", "--log", "a.log")
    for verb in ("create", "status", "check", "drain", "discard"):
        refused(["a.log", "held by weir"], verb, "a.log")
    s.end(signal.SIGTERM)


def test_dirty():
    data = make_dirty("a.log", "vm.raw")
    v = json.loads(works("status", "--json", "a.log"))["volumes"][0]
    check("status tells how much is dirty and since when", v["name"] == "vm" and v["dirty_bytes"] >= MIB and
          abs(v["dirty_since_ns"] / 1e9 - time.time()) < 60, v)
    check("status shows it to people, too", "1 MiB dirty since" in works("status", "a.log"))
    check("dump shows the records", len(works("dump", "a.log").splitlines()) > 16)
    refused(["a.log", "dirty", "--force"], "create", "a.log", same=["a.log"])
    refused(["nothing was dropped", "--force"], "discard", "a.log", same=["a.log"])
    refused(["no volume \"other\""], "drain", "--volume", "other", "a.log")
    refused(["vm", "other.raw", "mark"], "drain", "--image", "vm=other.raw", "a.log", same=["other.raw"])
    refused(["vm", "short.raw", str(4 * MIB)], "drain", "--image", "vm=short.raw", "a.log", same=["short.raw"])
    os.rename("vm.raw", "moved.raw")
    refused(["vm.raw", "no such file"], "drain", "a.log")
    works("drain", "--image", "vm=moved.raw", "a.log")
    os.rename("moved.raw", "vm.raw")
    with open("vm.raw", "rb") as f:
        check("a drained image holds what was written", f.read(MIB) == data)
    check("nothing is dirty after a drain", "nothing is dirty" in works("drain", "a.log"))


def test_dirty_zeroes():
    """Zeroes take no room in the log, and are as dirty as data."""
    with open("vm.raw", "r+b") as f:
        f.write(b"x" * MIB)
    s = Server("vm.raw", "--name", "vm", "--log", "a.log")
    h = nbd.NBD()
    h.set_export_name("vm")
    h.connect_unix("sock")
    h.zero(65536, 4096)
    h.flush()
    s.end(signal.SIGKILL)
    check("status shows that zeroes are dirty", "zeroes dirty since" in works("status", "a.log"))
    refused(["nothing was dropped", "--force"], "discard", "a.log", same=["a.log"])
    shutil.copyfile("vm.raw", "copy.raw")
    refused(["copy.raw: carries no mark", "holds zeroes not in the image"], "drain", "--image", "vm=copy.raw", "a.log", same=["copy.raw"])
    works("drain", "a.log")
    with open("vm.raw", "rb") as f:
        check("a drained image holds the zeroes", f.read(MIB) == b"x" * 4096 + bytes(65536) + b"x" * (MIB - 65536 - 4096))
    check("nothing is dirty after the zeroes were drained", "nothing is dirty" in works("drain", "a.log"))


def test_discard():
    make_dirty("a.log", "vm.raw")
    listed = log("discard", "a.log")
    check("discard lists what would be lost", "vm: 1 MiB dirty since" in listed.stdout, listed.stdout)
    works("discard", "--force", "a.log")
    check("nothing is dirty after a discard", "nothing is dirty" in works("drain", "a.log"))
    s = Server("vm.raw", "--name", "vm")
    s.end(signal.SIGTERM)


def first_batch(name):
    with open(name, "rb") as f:
        at = f.read().find(b"WLWB")
    check("a batch is found by its magic", at >= 256 << 10, at)
    return at


def overwrite(name, off, data):
    with open(name, "r+b") as f:
        f.seek(off)
        f.write(data)


def test_damaged_data():
    works("create", "--size", "64M", "a.log")
    data = make_dirty("a.log", "vm.raw")
    overwrite("a.log", first_batch("a.log") + 2000, b"\xff" * 16)
    refused(["damaged"], "check", "a.log", same=["a.log"])
    check("check in JSON says so", json.loads(log("check", "--json", "a.log").stdout)["ok"] is False)
    p = log("drain", "a.log")
    check("a damaged record is not drained", p.returncode == 1 and "damaged" in p.stderr and "--ignore-damage" in p.stderr, p.stderr)
    before = open("vm.raw", "rb").read(MIB)
    out = works("drain", "--ignore-damage", "a.log")
    lost = [tuple(map(int, m)) for m in re.findall(r"^vm: LOST: bytes (\d+)\+(\d+) ", out, re.M)]
    check("what is lost is named", len(lost) == 1 and 0 < lost[0][1] < MIB, out)
    want = bytearray(data)
    want[lost[0][0]:sum(lost[0])] = before[lost[0][0]:sum(lost[0])]
    with open("vm.raw", "rb") as f:
        check("all but what is lost is in the image", f.read(MIB) == want)
    check("nothing is dirty any more", "nothing is dirty" in works("drain", "a.log"))


def test_damaged_header():
    """The batches behind it prove that it had been durable."""
    works("create", "--size", "64M", "a.log")
    make_dirty("a.log", "vm.raw", size=MIB // 4)
    overwrite("a.log", first_batch("a.log"), b"\0" * 128)
    refused(["damaged"], "check", "a.log", same=["a.log"])
    refused(["damaged", "--ignore-damage"], "drain", "a.log", same=["a.log", "vm.raw"])
    works("drain", "--ignore-damage", "a.log")


def test_rebuild():
    data = make_dirty("m0.log", "other.raw", "--log", "m1.log")
    os.unlink("m1.log")
    with open("m1.log", "wb") as f:
        f.truncate(64 * MIB)
    refused(["foreign2", "--force"], "rebuild", "m0.log", "foreign2", same=["foreign2"])
    works("rebuild", "m0.log", "m1.log")
    os.unlink("m0.log")
    works("drain", "m1.log")
    with open("other.raw", "rb") as f:
        check("a rebuilt side alone has everything", f.read(MIB) == data)


with tempfile.TemporaryDirectory(prefix="weir-log-") as top:
    os.chdir(top)
    make_files()
    with open("foreign2", "wb") as f:
        f.write(b"another letter")
        f.truncate(64 * MIB)
    run_tests([test_create, test_reading, test_truncated, test_in_use, test_dirty, test_dirty_zeroes, test_discard, test_damaged_data,
                 test_damaged_header, test_rebuild])
    os.chdir("/")
sys.exit(status())
