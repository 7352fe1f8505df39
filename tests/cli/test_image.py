#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""`weir image` copies what is there and nothing else, and bad input gets one precise line and changes nothing.

usage: test_image.py WEIR
"""
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time

from harness import *

WEIR = os.path.abspath(sys.argv[1])


def image(*args):
    return run(WEIR, "image", *args, timeout=60)


def works(*args):
    p = image(*args)
    check("weir image %s works" % " ".join(args), p.returncode == 0, p.stderr + p.stdout)
    return p.stdout


def content(path):
    with open(path, "rb") as f:
        return f.read()


def refused(words, *args, status=1):
    """One line on standard error with the words; no file changes, comes or goes."""
    before = {n: content(n) for n in os.listdir(".") if os.path.isfile(n)}
    p = image(*args)
    what = "weir image %s" % " ".join(args)
    check(what + " is refused", p.returncode == status, "exit %d %s%s" % (p.returncode, p.stdout, p.stderr))
    lines = [x for x in p.stderr.splitlines() if not x.startswith("weir: ")]
    check(what + " says so in one line", len(lines) == 1, p.stderr)
    for word in words:
        check(what + " says " + repr(word), word in p.stderr, p.stderr)
    check(what + " changes nothing", {n: content(n) for n in os.listdir(".") if os.path.isfile(n)} == before)


def make_source(path, size, seed):
    """Data, zeroes that are written, and holes, in random order."""
    rng = random.Random(seed)
    with open(path, "wb") as f:
        f.truncate(size)
        at = 0
        while at < size:
            n = min(rng.choice([512, 4096, 10000, 65536, 3 * MIB]), size - at)
            kind = rng.randrange(3)
            f.seek(at)
            if kind < 2:
                f.write(rng.randbytes(n) if kind else bytes(n))
            at += n


def used(path):
    return os.stat(path).st_blocks * 512


def copies_are_equal_and_sparse():
    for seed, size in enumerate((0, 1, 511, 4097, 1 * MIB, 13 * MIB + 777)):
        make_source("s.raw", size, seed)
        for options in ((), ("-m", "1"), ("-S", "64K"), ("-S", "0"), ("-t", "writeback", "-T", "none")):
            works("convert", *options, "s.raw", "t.raw")
            check("a copy of %d bytes with %s is equal" % (size, options), content("s.raw") == content("t.raw"))
            os.unlink("t.raw")
    with open("z.raw", "wb") as f:
        f.write(bytes(8 * MIB))
    works("convert", "z.raw", "t.raw")
    check("zeroes become a hole", used("t.raw") == 0, used("t.raw"))
    works("convert", "-S", "0", "--force", "z.raw", "t.raw")
    check("-S 0 writes them", used("t.raw") >= 8 * MIB, used("t.raw"))
    for kind in ("falloc", "full"):
        works("convert", "--force", "-o", "preallocation=" + kind, "z.raw", "t.raw")
        check("preallocation=%s takes the space" % kind, used("t.raw") >= 8 * MIB, used("t.raw"))
    check("nothing is left beside the copy", sorted(os.listdir(".")) == ["s.raw", "t.raw", "z.raw"], os.listdir("."))


def a_target_in_place_is_overwritten_where_the_source_is_zero():
    make_source("s.raw", 9 * MIB, 7)
    for options in ((), ("-S", "0")):
        with open("t.raw", "wb") as f:
            f.write(os.urandom(10 * MIB))
        old = content("t.raw")
        works("convert", "-n", *options, "s.raw", "t.raw")
        check("-n copies", content("t.raw")[:9 * MIB] == content("s.raw"))
        check("-n leaves what lies beyond", content("t.raw")[9 * MIB:] == old[9 * MIB:])


def a_replaced_file_keeps_its_mode_and_its_links():
    make_source("s.raw", MIB, 3)
    with open("real.raw", "wb") as f:
        f.write(b"old")
    os.chmod("real.raw", 0o640)
    os.symlink("real.raw", "link.raw")
    works("convert", "--force", "s.raw", "link.raw")
    check("the link is still one", os.path.islink("link.raw"))
    check("the file behind it is new", content("real.raw") == content("s.raw"))
    check("it has its mode", stat.S_IMODE(os.stat("real.raw").st_mode) == 0o640)


def disks_with_other_drivers_are_copied():
    make_source("s.raw", 5 * MIB, 9)
    server = subprocess.Popen([WEIR, "serve", "s.raw", "--name", "vm", "--nbd", "unix:sock"], stdin=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if line.strip().endswith("ready"):
            break
    uri = "nbd+unix:///vm?socket=sock"
    works("convert", uri, "t.raw")
    check("a copy from a server is equal", content("s.raw") == content("t.raw"))
    make_source("t.raw", 5 * MIB, 10)
    works("convert", "t.raw", uri)
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    server.stderr.close()
    check("a copy to a server is equal", content("s.raw") == content("t.raw"))
    for name in ("mem:1M", "null:1M"):
        works("convert", "--force", name, "m.raw")
        check("%s is copied" % name, content("m.raw") == bytes(MIB))
    for name in ("mem:5M", "null:5M"):
        works("convert", "s.raw", name)
    works("convert", "-O", "qcow2", "delay:read=1ms:s.raw", "w.qcow2")
    works("convert", "delay:read=1ms:w.qcow2", "fault:op=flush,nth=9:delay:write=1ms:t.raw")
    check("wrapped disks are copied from and to, images in them too", content("s.raw") == content("t.raw"))
    works("snapshot", "-q", "-c", "one", "w.qcow2")
    works("convert", "--force", "w.qcow2,snapshot=one", "t.raw")
    check("a snapshot is copied by its name", content("s.raw") == content("t.raw"))
    works("convert", "m.raw", "a,,b.raw")
    check("a comma may be in a name", os.path.exists("a,b.raw"))


def an_image_may_be_made_on_a_server():
    with open("s.raw", "wb") as f:
        f.truncate(8 * MIB)
    make_source("t.raw", 5 * MIB, 20)
    server = subprocess.Popen([WEIR, "serve", "s.raw", "--name", "vm", "--nbd", "unix:sock"], stdin=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if line.strip().endswith("ready"):
            break
    uri = "nbd+unix:///vm?socket=sock"
    works("create", "-f", "qcow2", "-o", "cluster_size=4k", uri, "5M")
    works("check", "-f", "qcow2", uri)
    works("convert", "-n", "-O", "qcow2", "t.raw", uri)
    works("convert", "-f", "qcow2", uri, "u.raw")
    check("what is copied into it is there", content("t.raw") == content("u.raw"))
    works("snapshot", "-f", "qcow2", "-c", "one", uri)
    works("check", "-f", "qcow2", uri)
    p = image("create", "-f", "qcow2", uri, "1M")
    check("it is not made over something", p.returncode == 1 and "holds something" in p.stderr, p.stderr)
    works("create", "-f", "qcow2", "--force", uri, "1M")
    p = image("create", "-f", "qcow2", "--force", "-o", "preallocation=metadata", uri, "100M")
    check("what does not fit is refused", p.returncode == 1 and "larger" in p.stderr, p.stderr)
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    server.stderr.close()


def an_error_leaves_no_half_copy():
    make_source("s.raw", 8 * MIB, 11)
    for nth in (1, 2, 3):
        refused(["s.raw", "cannot be read at offset"], "convert", "fault:op=read,nth=%d:s.raw" % nth, "t.raw")
    with open("t.raw", "wb") as f:
        f.write(b"precious")
    refused(["cannot be read"], "convert", "--force", "fault:op=read,nth=2:s.raw", "t.raw")
    refused(["s.raw", "extents"], "convert", "fault:op=extent,nth=1:s.raw", "u.raw")
    with open("t.raw", "wb") as f:
        f.truncate(8 * MIB)
    p = image("convert", "s.raw", "fault:op=write,nth=3,error=ENOSPC:t.raw")
    check("a failed write is an error", p.returncode == 1 and "IS INCOMPLETE" in p.stderr and "no space left" in p.stderr, p.stderr)
    check("half of a copy does not look whole", content("t.raw")[:MIB] == bytes(MIB))
    p = image("convert", "s.raw", "fault:op=flush,nth=2:t.raw")
    check("a failed flush is an error", p.returncode == 1 and "flushed" in p.stderr, p.stderr)


def a_signal_leaves_no_half_copy():
    make_source("s.raw", 8 * MIB, 12)
    for sig, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        p = subprocess.Popen([WEIR, "image", "convert", "-m", "1", "delay:read=300ms:s.raw", "t.raw"], stdin=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True)
        while not any("partial" in n for n in os.listdir(".")):
            time.sleep(0.01)
        check("the copy has another name while it is made", not os.path.exists("t.raw"))
        time.sleep(0.1)
        p.send_signal(sig)
        err = p.communicate(timeout=30)[1]
        check("signal %d ends it" % sig, p.returncode == status and "interrupted" in err, "%s %s" % (p.returncode, err))
        check("signal %d leaves nothing" % sig, sorted(os.listdir(".")) == ["s.raw"], os.listdir("."))
    # A server that does not answer.
    p = subprocess.Popen([WEIR, "image", "convert", "fault:op=read,stall=1h:s.raw", "t.raw"], stdin=subprocess.DEVNULL,
                         stderr=subprocess.PIPE, text=True)
    while not any("partial" in n for n in os.listdir(".")):
        time.sleep(0.01)
    p.kill()
    p.communicate()
    check("a kill leaves a name that says what it is", not os.path.exists("t.raw"))


def an_image_in_use_is_refused():
    works("create", "-q", "v.qcow2", "4M")
    make_source("s.raw", MIB, 30)
    server = subprocess.Popen([WEIR, "serve", "v.qcow2", "--nbd", "unix:sock"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if line.strip().endswith("ready"):
            break
    for args in (("info",), ("check",), ("check", "--repair=all"), ("map",), ("snapshot", "-c", "x"), ("snapshot",)):
        refused(["v.qcow2", "is held by", str(server.pid)], *args, "v.qcow2")
    refused(["v.qcow2", "is held by"], "resize", "v.qcow2", "5M")
    refused(["v.qcow2", "is held by"], "convert", "v.qcow2", "w.raw")
    refused(["v.qcow2", "is held by"], "convert", "--force", "s.raw", "v.qcow2")
    refused(["v.qcow2", "is held by"], "convert", "-n", "s.raw", "v.qcow2")
    refused(["v.qcow2", "is held by"], "create", "--force", "v.qcow2", "1M")
    for args in (("info",), ("check",), ("map",), ("snapshot",)):
        works(*args, "-U", "v.qcow2")
    works("convert", "-U", "v.qcow2", "w.raw")
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    server.stderr.close()


def bad_input_is_refused():
    make_source("s.raw", MIB, 13)
    make_source("t.raw", MIB, 14)
    os.mkdir("folder")
    refused(["t.raw", "exists already", "--force"], "convert", "s.raw", "t.raw")
    refused(["s.raw", "is the source and the target"], "convert", "--force", "s.raw", "s.raw")
    refused(["s.raw", "is the source and the target"], "convert", "-n", "s.raw", "./s.raw")
    refused(["no.raw", "no such file"], "convert", "no.raw", "u.raw")
    refused(["folder", "directory"], "convert", "folder", "u.raw")
    refused(["folder", "neither a file nor a block device"], "convert", "--force", "s.raw", "folder")
    refused(["no/u.raw", "cannot be created"], "convert", "s.raw", "no/u.raw")
    refused(["u.raw", "does not exist"], "convert", "-n", "s.raw", "u.raw")
    refused(["mem:512K", "512 KiB", "1 MiB", "larger"], "convert", "s.raw", "mem:512K")
    refused(["vmdk", "not known", "qcow2"], "convert", "-O", "vmdk", "s.raw", "u.raw")
    refused(["leave one away"], "convert", "-f", "raw", "s.raw,format=qcow2", "u.raw")
    refused(["preallocation", "off", "full"], "convert", "-o", "preallocation=some", "s.raw", "u.raw")
    refused(["only a new qcow2 image"], "convert", "-c", "s.raw", "u.raw")
    refused(["only a new qcow2 image"], "convert", "-c", "-n", "s.raw", "t.raw")
    refused(["no data file"], "convert", "-c", "-o", "data_file=d.raw", "s.raw", "u.qcow2")
    refused(["size of its source"], "convert", "-o", "size=5M", "s.raw", "u.qcow2")
    refused(["cluster_size"], "convert", "-o", "cluster_size=7", "s.raw", "u.qcow2")
    refused(["no qcow2 image"], "convert", "-f", "qcow2", "s.raw", "u.raw")
    refused(["no qcow2 image"], "check", "-f", "qcow2", "s.raw")
    refused(["raw"], "check", "s.raw")
    refused(["no snapshots"], "snapshot", "s.raw")
    refused(["--shrink"], "resize", "s.raw", "512K")
    refused(["cannot be taken"], "resize", "s.raw", "-2M")
    refused(["must be a size"], "resize", "s.raw", "large", status=2)
    refused(["SIZE is missing"], "resize", "s.raw", status=2)
    refused(["in use cannot be repaired"], "check", "-U", "--repair=all", "s.raw", status=2)
    refused(["mem:1M", "-o"], "convert", "-o", "preallocation=full", "s.raw", "mem:1M")
    refused(["unknown option", "chartreuse"], "convert", "s.raw,chartreuse=1", "u.raw")
    refused(["--parallel", "16"], "convert", "-m", "17", "s.raw", "u.raw", status=2)
    refused(["power of two"], "convert", "-S", "5000", "s.raw", "u.raw", status=2)
    refused(["TARGET is missing"], "convert", "s.raw", status=2)
    refused(["no.raw"], "info", "no.raw")
    refused(["no.raw"], "map", "no.raw")
    refused(["vhdx", "not known"], "info", "-f", "vhdx", "s.raw")


def what_is_printed_can_be_read():
    make_source("s.raw", 3 * MIB, 15)
    i = json.loads(works("info", "--json", "s.raw"))
    check("info has the size", i["virtual-size"] == 3 * MIB and i["format"] == "raw" and i["actual-size"] == used("s.raw"), i)
    rows = json.loads(works("map", "--json", "s.raw"))
    at = 0
    for r in rows:
        check("the map has no gap", r["start"] == at and r["length"] > 0, r)
        at += r["length"]
    check("the map is whole", at == 3 * MIB)
    part = json.loads(works("map", "--json", "-s", "1M", "-l", "4096", "s.raw"))
    check("a part of the map", part[0]["start"] == MIB and sum(r["length"] for r in part) == 4096, part)
    check("a map beyond the end is empty", json.loads(works("map", "--json", "-s", "1G", "s.raw")) == [])
    c = json.loads(works("convert", "--json", "s.raw", "t.raw"))
    check("convert tells what it did", c["data-bytes"] + c["zero-bytes"] == 3 * MIB, c)
    p = image("convert", "-p", "s.raw", "u.raw")
    check("the progress ends with 100", p.stderr.rstrip().endswith("100.0 %"), p.stderr)
    made = json.loads(works("create", "--json", "-o", "cluster_size=512,preallocation=metadata", "x.qcow2", "1M"))
    check("create tells what it made", made == {"filename": "x.qcow2", "format": "qcow2", "virtual-size": MIB}, made)
    sized = json.loads(works("resize", "--json", "x.qcow2", "2M"))
    check("resize tells both sizes", (sized["virtual-size"], sized["former-size"]) == (2 * MIB, MIB), sized)
    for repair in ("none", "leaks"):
        shown = [float(x.split()[-2]) for x in image("check", "-p", "--repair=" + repair, "x.qcow2").stderr.split("\r") if "%" in x]
        check("the progress of a check with --repair=%s grows, and ends with 100" % repair, shown == sorted(shown) and shown[-1:] == [100], shown)
    for verb in ("info", "check", "snapshot"):
        works(verb, "x.qcow2,backing=allow")
    p = image("convert", "-q", "s.raw", "v.raw")
    check("-q is quiet", p.stdout + p.stderr == "", p.stdout + p.stderr)


sys.exit(run_tests([copies_are_equal_and_sparse, a_target_in_place_is_overwritten_where_the_source_is_zero,
                 a_replaced_file_keeps_its_mode_and_its_links, disks_with_other_drivers_are_copied,
                 an_image_may_be_made_on_a_server, an_error_leaves_no_half_copy,
                 a_signal_leaves_no_half_copy, an_image_in_use_is_refused, bad_input_is_refused, what_is_printed_can_be_read], folders=True))
