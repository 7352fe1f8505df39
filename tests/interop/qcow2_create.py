#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Images that `weir image create` makes are what QEMU would have made of the same options.

usage: qcow2_create.py WEIR
"""
import json
import os
import sys

from harness import *

WEIR = os.path.abspath(sys.argv[1])


def qemu(*args):
    p = run("qemu-img", *args)
    check("qemu-img " + " ".join(args), p.returncode == 0, p.stdout + p.stderr)
    return p.stdout


FACTS = ("virtual-size", "cluster-size", "format", "backing-filename", "backing-filename-format", "format-specific")


def facts(image):
    i = json.loads(qemu("info", "--output=json", image))
    return {k: i.get(k) for k in FACTS}


def same(options, size, backing=False):
    """Made by both with these options: the same facts, a clean check, the same contents."""
    for name in ("weir.qcow2", "qemu.qcow2", "w.data", "q.data"):
        if os.path.exists(name):
            os.unlink(name)
    both = ",".join(o.replace("DATA", "%s") for o in options)
    w, q = (both % (("w.data",) if "%s" in both else ()), both % (("q.data",) if "%s" in both else ()))
    back = ["-b", "back.raw", "-F", "raw"] if backing else []
    p = run(WEIR, "image", "create", "-q", *(["-o", w] if w else []), *back, "weir.qcow2", *([size] if size else []))
    what = "create -o %s %s %s" % (w, size, "with a backing file" if backing else "")
    check("weir image " + what, p.returncode == 0, p.stderr)
    qemu("create", "-q", "-f", "qcow2", *(["-o", q] if q else []), *back, "qemu.qcow2", *([size] if size else []))
    if p.returncode:
        return
    found = json.loads(qemu("check", "--output=json", "weir.qcow2"))
    check(what + ": clean", not any(found.get(k) for k in ("corruptions", "leaks", "check-errors")), found)
    mine, theirs = facts("weir.qcow2"), facts("qemu.qcow2")
    if "%s" in both:
        theirs["format-specific"]["data"]["data-file"] = mine["format-specific"]["data"]["data-file"]
    check(what + ": the facts are QEMU's", mine == theirs, "%s %s" % (mine, theirs))
    qemu("compare", "-q", "weir.qcow2", "qemu.qcow2")
    if not any("preallocation" in o for o in options):
        return
    allocated = [found.get("allocated-clusters"), json.loads(qemu("check", "--output=json", "qemu.qcow2")).get("allocated-clusters")]
    check(what + ": as much is allocated", allocated[0] == allocated[1], allocated)
    if "preallocation=falloc" in options or "preallocation=full" in options:
        used = [sum(os.stat(n).st_blocks * 512 for n in names if os.path.exists(n))
                for names in (("weir.qcow2", "w.data"), ("qemu.qcow2", "q.data"))]
        check(what + ": as much space is taken", used[0] >= used[1] * 0.98, used)


def combinations_of_options():
    for cluster, bits in ((512, 1), (512, 64), (4096, 8), (65536, 64), (2 << 20, 2)):
        size = "5M" if cluster == 2 << 20 else "1537K"
        same(["cluster_size=%d" % cluster, "refcount_bits=%d" % bits], size)
        same(["cluster_size=%d" % cluster, "refcount_bits=%d" % bits, "preallocation=metadata"], size)
    for size in ("0", "1000", "2T"):
        same([], size)
    same(["cluster_size=512"], "100M")
    same(["cluster_size=512", "preallocation=metadata"], "5M")
    same(["cluster_size=2M"], "8P")
    for prealloc in ("metadata", "falloc", "full"):
        same(["preallocation=" + prealloc], "1537K")
        same(["extended_l2=on", "cluster_size=16k", "preallocation=" + prealloc], "1537K")
    same(["data_file=DATA", "preallocation=falloc"], "1537K")
    for o in (["compat=0.10"], ["compat=v2", "cluster_size=4k"], ["compat=1.1", "lazy_refcounts=on"], ["compression_type=zstd"],
              ["extended_l2=on"], ["extended_l2=on", "cluster_size=2M"], ["data_file=DATA"], ["data_file=DATA", "data_file_raw=on"]):
        same(o, "5M")


def backing_files():
    with open("back.raw", "wb") as f:
        f.write(os.urandom(3 << 20))
    for size in ("", "1M", "8M"):
        same([], size, backing=True)
        same(["extended_l2=on", "preallocation=metadata"], size, backing=True)
        same(["data_file=DATA"], size, backing=True)
    os.mkdir("sub")
    p = run(WEIR, "image", "create", "-q", "-b", "../back.raw", "-F", "raw", "sub/o.qcow2")
    check("a backing file is relative to the image", p.returncode == 0, p.stderr)
    check("it is found by QEMU", json.loads(qemu("info", "--output=json", "sub/o.qcow2"))["virtual-size"] == 3 << 20)
    run(WEIR, "image", "create", "-q", "-b", "o.qcow2", "-F", "qcow2", "sub/p.qcow2")
    qemu("compare", "-q", "-F", "raw", "sub/p.qcow2", "back.raw")
    p = run(WEIR, "image", "create", "-u", "-b", "not/there", "-F", "raw", "sub/q.qcow2", "1M")
    check("-u does not look", p.returncode == 0, p.stderr)


def refused(words, *args):
    before = sorted(os.listdir("."))
    p = run(WEIR, "image", "create", *args)
    what = "create " + " ".join(args)
    check(what + " is refused in one line", p.returncode == 1 and len(p.stderr.splitlines()) == 1, "%d %s" % (p.returncode, p.stderr))
    for w in words:
        check(what + " says " + repr(w), w in p.stderr, p.stderr)
    check(what + " leaves nothing", sorted(os.listdir(".")) == before, os.listdir("."))


def what_cannot_be_is_refused():
    o = lambda text, *words: refused(words, "-o", text, "n.qcow2", "1M")
    with open("back.raw", "wb") as f:
        f.truncate(1 << 20)
    refused(["size is missing"], "n.qcow2")
    o("cluster_size=1000", "power of two", "512", "2M")
    o("cluster_size=4M", "power of two")
    o("refcount_bits=3", "1, 2, 4, 8")
    o("refcount_bits=0", "refcount_bits")
    o("compat=0.10,refcount_bits=8", "version 3")
    o("compat=0.10,extended_l2=on", "extended_l2", "version 3")
    o("compat=0.10,lazy_refcounts=on", "lazy_refcounts")
    o("compat=0.10,compression_type=zstd", "zstd")
    o("compat=2", "compat", "0.10")
    o("extended_l2=on,cluster_size=4k", "16K")
    o("data_file_raw=on", "data_file=NAME")
    o("data_file=back.raw", "exists already")
    o("data_file=d.raw,data_file_raw=on,backing_file=back.raw,backing_fmt=raw", "raw data file")
    o("backing_file=back.raw", "backing_fmt")
    o("backing_fmt=raw", "backing_file")
    o("backing_file=gone.raw,backing_fmt=raw", "gone.raw", "no such file")
    o("backing_file=back.raw,backing_fmt=qcow2", "back.raw", "no qcow2 image")
    o("backing_file=back.raw,backing_fmt=vmdk", "raw or qcow2")
    o("backing_file=nbd://host/x,backing_fmt=raw", "protocol")
    o("backing_file=json:{},backing_fmt=raw", "protocol")
    o("backing_file=back.raw,backing_fmt=raw,preallocation=metadata", "extended_l2")
    o("encryption=on", "not supported")
    o("encrypt.format=luks", "not supported")
    o("preallocation=some", "metadata", "falloc")
    o("colour=blue", "colour", "cluster_size")
    refused(["at most", "cluster_size"], "-o", "cluster_size=512", "n.qcow2", "1T")
    refused(["-b", "leave one away"], "-b", "back.raw", "-o", "backing_file=other", "n.qcow2")


if __name__ == "__main__":
    need("qemu-img", "qemu-io")
    sys.exit(run_tests([combinations_of_options, backing_files, what_cannot_be_is_refused], folders=True))
