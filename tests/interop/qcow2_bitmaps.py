#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Persistent bitmaps: listed, kept where the contents stay as they are and where the disk gets another size, and never believed after a write that did not note itself in them.

usage: qcow2_bitmaps.py WEIR
"""
from qcow2_lib import *  # noqa: F403
import resource
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


def dirty(image, name):
    """What the bitmap says, by qemu-nbd: (from, length) of what is marked."""
    h = nbd.NBD()
    h.add_meta_context("qemu:dirty-bitmap:" + name)
    h.connect_systemd_socket_activation(["qemu-nbd", "-r", "-f", "qcow2", "-B", name, image])
    found, at = [], 0

    def extent(context, offset, entries, error):
        nonlocal at
        for length, flags in zip(entries[::2], entries[1::2]):
            if flags & 1 and found and sum(found[-1]) == at:
                found[-1][1] += length
            elif flags & 1:
                found.append([at, length])
            at += length

    while at < h.get_size():
        h.block_status(min(h.get_size() - at, 1 << 30), at, extent)
    h.shutdown()
    return found


def resized_as_qemu_does_it():
    """Step by step, on two copies: the same bitmaps, of the same contents."""
    make()
    qemu_img("bitmap", "-f", "qcow2", "--add", "-g", "512", "b.qcow2", "fine")
    # Enough for a whole cluster of a bitmap, which is then not there as such.
    qemu_io("b.qcow2", *["write -q -z -u %dM 1M" % i for i in range(8)])
    shutil.copy("b.qcow2", "q.qcow2")
    before = dirty("b.qcow2", "fine")
    check("all is marked", before == [[0, 8 << 20]], before)
    for size in ("300M", "8193K", "512", "40M"):
        weir("resize", "-q", "--shrink", "b.qcow2", size)
        qemu_img("resize", "-q", "--shrink", "q.qcow2", size)
        clean("clean for QEMU at " + size, "b.qcow2")
        status, w = weir_check("b.qcow2")
        check("clean for weir at " + size, status == 0, w)
        check("all are kept at " + size, names("weir") == ["fine", "one", "two"] and not any("in-use" in b["flags"] for b in bitmaps("weir")), bitmaps("weir"))
        for name in ("one", "fine"):
            mine, theirs = dirty("b.qcow2", name), dirty("q.qcow2", name)
            check("%s at %s marks what QEMU's marks" % (name, size), mine == theirs, "%s %s" % (mine, theirs))


def resize_refuses_what_qemu_refuses():
    make()
    t = Tables("b.qcow2")
    at = open("b.qcow2", "rb").read(4096).find(bytes.fromhex("23852875"))
    directory = t.get(at + 24)
    flags = t.get(directory + 12, 4)
    t.put(directory + 12, flags | 1, 4)
    before = open("b.qcow2", "rb").read()
    shutil.copy("b.qcow2", "q.qcow2")
    p = run(WEIR, "image", "resize", "b.qcow2", "16M")
    check("an inconsistent one", p.returncode == 1 and "inconsistent" in p.stderr and len(p.stderr.splitlines()) == 1, p.stderr)
    check("QEMU does, too", run("qemu-img", "resize", "-q", "q.qcow2", "16M").returncode != 0)
    t.put(directory + 12, flags, 4)
    t.set_refcount(t.l1, 0)
    p = run(WEIR, "image", "resize", "b.qcow2", "16M")
    check("damage", p.returncode == 1 and "damaged" in p.stderr and len(p.stderr.splitlines()) == 1, p.stderr)
    t.set_refcount(t.l1, 1)
    t.put(directory + 12, flags | 1, 4)
    check("and changes nothing", open("b.qcow2", "rb").read() == before)


def a_resize_that_fails_keeps_them():
    make()
    h = dirty("b.qcow2", "one")
    before = bitmaps("weir")
    os.truncate("b.qcow2", (os.path.getsize("b.qcow2") + 4095) & ~4095)
    same = open("b.qcow2", "rb").read()
    p = run(WEIR, "image", "resize", "b.qcow2", "9T")
    check("too large", p.returncode == 1 and len(p.stderr.splitlines()) == 1, p.stderr)
    check("refused before anything is written", open("b.qcow2", "rb").read() == same)
    # The larger L1 table does not fit on the file system.
    limit = os.path.getsize("b.qcow2") + (64 << 10)
    p = subprocess.run([WEIR, "image", "resize", "b.qcow2", "300G"], stderr=subprocess.PIPE, text=True, restore_signals=False,
                       preexec_fn=lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))))
    check("no room", p.returncode == 1 and len(p.stderr.splitlines()) == 1 and "lost" not in p.stderr, p.stderr)
    clean("clean for QEMU", "b.qcow2")
    check("they are there, and no one is inconsistent", bitmaps("weir") == before, bitmaps("weir"))
    check("and mark the same", dirty("b.qcow2", "one") == h)


def damage():
    make()
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
    need("qemu-img", "qemu-io", "qemu-nbd")
    sys.exit(run_tests([they_are_listed_as_qemu_lists_them, who_does_not_write_keeps_them, who_writes_makes_them_inconsistent,
                       snapshots_keep_them_while_they_are_true, resized_as_qemu_does_it, resize_refuses_what_qemu_refuses,
                       a_resize_that_fails_keeps_them, damage], folders=True))
