#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Persistent bitmaps: listed, kept where the contents stay as they are, and never believed after a write that did not note itself in them.

usage: qcow2_bitmaps.py WEIR
"""
from qcow2_lib import *  # noqa: F403
import signal

try:
    import nbd
except ImportError:
    skip("python3-libnbd is missing")


def make(options="cluster_size=4k"):
    qemu_img("create", "-q", "-f", "qcow2", "-o", options, "b.qcow2", "8M")
    qemu_io("b.qcow2", "write -q -P 1 1M 256k")
    qemu_img("bitmap", "-f", "qcow2", "--add", "-g", "4k", "b.qcow2", "one")
    qemu_img("bitmap", "-f", "qcow2", "--add", "--disable", "b.qcow2", "two")
    # QEMU notes its own writes in the first.
    qemu_io("b.qcow2", "write -q -P 2 3M 256k")


def bitmaps(tool):
    out = weir("info", "--json", "b.qcow2") if tool == "weir" else qemu_img("info", "--output=json", "b.qcow2")
    return json.loads(out)["format-specific"]["data"].get("bitmaps", [])


def serve(*options, write=False):
    p = subprocess.Popen([WEIR, "serve", "b.qcow2", "--name", "b", "--nbd", "unix:sock", *options], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in p.stderr:
        if line.strip().endswith("ready"):
            break
    h = nbd.NBD()
    h.connect_uri("nbd+unix:///b?socket=sock")
    h.pread(65536, 1 << 20)
    if write:
        h.pwrite(b"x" * 4096, 5 << 20)
        h.flush()
    h.shutdown()
    p.send_signal(signal.SIGTERM)
    p.wait(30)
    p.stderr.close()


def names(tool):
    return sorted(b["name"] for b in bitmaps(tool))


def they_are_listed_as_qemu_lists_them():
    make()
    mine, theirs = bitmaps("weir"), bitmaps("qemu")
    key = lambda b: b["name"]
    check("the lists are equal", sorted(mine, key=key) == sorted(theirs, key=key), "%s %s" % (mine, theirs))
    check("the text names them", "one" in weir("info", "b.qcow2") and "two" in weir("info", "b.qcow2"))
    status, w = weir_check("b.qcow2")
    check("they are no leaks", status == 0 and qemu_check("b.qcow2") == (0, 0, 0), w)


def who_does_not_write_keeps_them():
    make()
    before = open("b.qcow2", "rb").read()
    serve("--read-only")
    check("reading changes nothing", open("b.qcow2", "rb").read() == before)
    serve()
    check("serving without a write keeps them", names("qemu") == ["one", "two"], bitmaps("qemu"))


def who_writes_makes_them_inconsistent():
    make()
    serve(write=True)
    valid = [b for b in bitmaps("qemu") if "in-use" not in b["flags"]]
    check("none is believed by QEMU", not valid, valid)
    check("none is called valid by weir", not [b for b in bitmaps("weir") if "in-use" not in b["flags"]], bitmaps("weir"))
    q, (status, w) = qemu_check("b.qcow2"), weir_check("b.qcow2")
    check("no damage", q[0] == 0 and w["corruptions"] == 0, "%s %s" % (q, w))
    check("both call what they took leaked, or not", q[1] == w["leaks"], "%s %s" % (q, w))
    weir("check", "-q", "--repair=leaks", "b.qcow2")
    clean("and free it", "b.qcow2")
    qemu_io("b.qcow2", "read -P 2 3M 256k", "read -P 120 5M 4k")


def snapshots_keep_them_while_they_are_true():
    make()
    weir("snapshot", "-c", "s", "b.qcow2")
    check("a snapshot that is made keeps them", names("qemu") == ["one", "two"] and qemu_check("b.qcow2") == (0, 0, 0), bitmaps("qemu"))
    weir("snapshot", "-c", "t", "b.qcow2")
    weir("snapshot", "-d", "t", "b.qcow2")
    check("one that is deleted, too", names("qemu") == ["one", "two"] and qemu_check("b.qcow2") == (0, 0, 0), bitmaps("qemu"))
    weir("snapshot", "-a", "s", "b.qcow2")
    check("one that is applied drops them, and leaks nothing", not bitmaps("qemu") and qemu_check("b.qcow2") == (0, 0, 0),
          "%s %s" % (bitmaps("qemu"), qemu_check("b.qcow2")))


def damage_and_resize():
    make()
    p = run(WEIR, "image", "resize", "b.qcow2", "16M")
    check("a resize is refused", p.returncode == 1 and "bitmap" in p.stderr and len(p.stderr.splitlines()) == 1, p.stderr)
    head = open("b.qcow2", "rb").read(4096)
    at = head.find(bytes.fromhex("23852875"))
    t = Tables("b.qcow2")
    directory = t.get(at + 24)
    t.put(directory, 12345)
    status, w = weir_check("b.qcow2")
    check("a bitmap table at an odd place is found", status == 4, w)
    make()
    t.put(at + 16, 16)
    status, w = weir_check("b.qcow2")
    check("a directory that is too small is found", status == 4 and any(f["kind"] == "bitmaps" for f in w["findings"]), w)
    check("and no clusters are freed", weir_check("b.qcow2", "--repair=leaks")[1]["leaks-fixed"] == 0)


if __name__ == "__main__":
    need("qemu-img", "qemu-io")
    sys.exit(run_tests([they_are_listed_as_qemu_lists_them, who_does_not_write_keeps_them, who_writes_makes_them_inconsistent,
                       snapshots_keep_them_while_they_are_true, damage_and_resize], folders=True))
