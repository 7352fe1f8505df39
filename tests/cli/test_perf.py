#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""weir perf: its rows and keys, its verdict, and that it leaves nothing behind.

usage: test_perf.py WEIR
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from harness import *

weir = os.path.abspath(sys.argv[1])
QUICK = ("--seconds", "100ms")

KEYS = {
    "target": str, "kind": str, "wrote": bool, "part_ns": int, "bogomips": float, "regex_per_second": float, "dns_ns": None,
    "size": int, "read_from": str, "read_bytes_per_second": float, "seek_ns": int, "fsyncs_per_second": float, "etcd": dict,
    "write_4k": dict, "write_4k_fua": dict, "write_4k_flush": dict, "path": dict, "guest": dict, "doubts": list,
}
LATENCY_KEYS = {"count", "p50_ns", "p99_ns", "p999_ns", "max_ns"}
ETCD_KEYS = {"bytes", "limit_ns", "per_second", "latency", "verdict"}
PATH_KEYS = {"driver", "file_system", "source", "device", "journal", "cache", "aio", "write_cache", "fua", "rotational", "o_direct",
             "barriers", "flush_ignored", "in_memory", "logical_block", "physical_block"}
GUEST_KEYS = {"write_cache", "fua", "discard", "sector"}


def perf(*args):
    return run(weir, "perf", *args)


def perf_json(*args, warning=""):
    p = perf(*QUICK, "--json", *args)
    check("weir perf --json %s exits with 0 and says nothing else" % " ".join(args),
          p.returncode == 0 and (warning in p.stderr if warning else not p.stderr), p.stderr)
    return json.loads(p.stdout)


def check_keys(what, r):
    check("%s: the keys are the documented ones" % what, set(r) == set(KEYS), set(r) ^ set(KEYS))
    for key, kind in KEYS.items():
        if kind and r[key] is not None:
            check("%s: %s is %s" % (what, key, kind.__name__), isinstance(r[key], kind), repr(r[key]))
    for key in ("write_4k", "write_4k_fua", "write_4k_flush"):
        check("%s: %s has quantiles" % (what, key), r[key] is None or set(r[key]) == LATENCY_KEYS, r[key])
    check("%s: etcd's keys" % what, set(r["etcd"]) == ETCD_KEYS, r["etcd"])
    check("%s: the path's keys" % what, set(r["path"]) == PATH_KEYS, set(r["path"]) ^ PATH_KEYS)
    check("%s: the guest's keys" % what, set(r["guest"]) == GUEST_KEYS, r["guest"])


def a_directory_is_measured_and_left_as_it_was(folder):
    p = perf(*QUICK, folder)
    rows = [line.split(":")[0] for line in p.stdout.splitlines() if not line.startswith(" ")]
    want = ["CPU BOGOMIPS", "REGEX/SECOND", "HD SIZE", "BUFFERED READS", "AVERAGE SEEK TIME", "FSYNCS/SECOND", "ETCD FDATASYNC",
            "ETCD VERDICT", "FILE SYSTEM", "DEVICE", "ACCESS", "4K WRITE", "4K WRITE, FUA", "4K WRITE, FLUSH", "A GUEST SEES", "DOUBTS"]
    check("the rows are pveperf's, etcd's, and the path's", p.returncode == 0 and rows in (want, [w for w in want if w != "DEVICE"]),
          "%s %s" % (rows, p.stderr))
    check("nothing is left", os.listdir(folder) == [], os.listdir(folder))
    r = perf_json(folder)
    check_keys("a directory", r)
    check("it is a directory, and was written to", r["kind"] == "directory" and r["wrote"])
    check("fsyncs were counted", r["fsyncs_per_second"] > 0 and r["etcd"]["latency"]["count"] > 0)
    check("quantiles are in order", 0 < r["etcd"]["latency"]["p50_ns"] <= r["etcd"]["latency"]["p99_ns"] <=
          r["etcd"]["latency"]["p999_ns"] <= r["etcd"]["latency"]["max_ns"], r["etcd"])
    check("the file system is named", r["path"]["file_system"] != "", r["path"])
    check("nothing is left after JSON", os.listdir(folder) == [], os.listdir(folder))


def an_interrupt_leaves_nothing(folder):
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        p = subprocess.Popen([weir, "perf", "--seconds", "60", folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not os.listdir(folder) and time.monotonic() < deadline:
            time.sleep(0.01)
        found = os.listdir(folder)
        check("it works in a folder of its own", len(found) == 1 and found[0].startswith("weir-perf-"), found)
        p.send_signal(number)
        out, err = p.communicate(timeout=60)
        check("signal %d ends it with %d" % (number, status), p.returncode == status, p.returncode)
        check("it says so in one line", out == "" and err == "weir perf: interrupted\n", out + err)
        check("nothing is left after signal %d" % number, os.listdir(folder) == [], os.listdir(folder))


def the_verdict_is_about_ten_milliseconds():
    r = perf_json("--write", "delay:flush=20ms:mem:64M")
    check("20 ms for a flush is too slow", r["etcd"]["verdict"] == "too slow" and r["etcd"]["latency"]["p99_ns"] >= 20000000, r["etcd"])
    text = perf(*QUICK, "--write", "delay:flush=20ms:mem:64M").stdout
    check("the text says so too", "TOO SLOW" in text, text)
    r = perf_json("--write", "delay:write=20ms:mem:64M")
    check("20 ms for a write is too slow, whatever the flush takes", r["etcd"]["verdict"] == "too slow", r["etcd"])
    r = perf_json("--write", "mem:64M")
    check("memory is fast enough", r["etcd"]["verdict"] == "ok" and r["etcd"]["limit_ns"] == 10000000, r["etcd"])
    check_keys("memory", r)
    check("but nothing in memory survives, and it says so", any("memory" in d for d in r["doubts"]), r["doubts"])


def a_disk_is_only_read_without_write(folder):
    image = os.path.join(folder, "image.raw")
    data = os.urandom(1 << 20) * 8
    with open(image, "wb") as f:
        f.write(data)
    r = perf_json(image)
    check_keys("a disk", r)
    check("it is a disk, and was not written to", r["kind"] == "disk" and not r["wrote"])
    check("there is no verdict", r["etcd"]["verdict"] == "not measured" and r["fsyncs_per_second"] is None and r["write_4k"] is None)
    with open(image, "rb") as f:
        check("its bytes are what they were", f.read() == data)
    text = perf(*QUICK, image).stdout
    check("the text says what would write", "--write" in text, text)
    r = perf_json("--write", image)
    check("with --write it was written to", r["wrote"] and r["etcd"]["verdict"] != "not measured")
    check("and has its size", os.path.getsize(image) == len(data))
    r = perf_json("--write", image + ",cache=unsafe", warning="flushes are ignored")
    check("ignored flushes are doubtful", r["path"]["flush_ignored"] and any("ignores flushes" in d for d in r["doubts"]), r["doubts"])
    os.unlink(image)


def what_cannot_be_measured_is_one_line(folder):
    small = os.path.join(folder, "small.raw")
    with open(small, "wb") as f:
        f.truncate(4096)
    for args, part in ((("/nonexistent/x",), "there is no such file"), (("--write", small), "No space"), (("/proc",), "/proc")):
        p = perf(*QUICK, *args)
        check("weir perf %s fails with one line" % " ".join(args),
              p.returncode == 1 and p.stderr.count("\n") == 1 and part in p.stderr and p.stdout == "", p.stderr)
    os.unlink(small)
    check("nothing is left after a failure", os.listdir(folder) == [], os.listdir(folder))


with tempfile.TemporaryDirectory(prefix="test-perf-", dir=".") as top:
    a_directory_is_measured_and_left_as_it_was(top)
    an_interrupt_leaves_nothing(top)
    the_verdict_is_about_ten_milliseconds()
    a_disk_is_only_read_without_write(top)
    what_cannot_be_measured_is_one_line(top)
sys.exit(status())
