#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The read cache of `weir serve`: its figures agree with what was read, and the control socket changes it at run time.

usage: test_serve_cache.py WEIR
"""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

from harness import *
from harness import require as check

WEIR = sys.argv[1]


class Serve:
    def __init__(self, *args, disk=None):
        self.dir = tempfile.mkdtemp(prefix="weir-cache-")
        self.nbd, self.control, self.image = (os.path.join(self.dir, n) for n in ("nbd", "control", "a.raw"))
        with open(self.image, "wb") as f:
            f.write(os.urandom(8 * MIB) + bytes(8 * MIB))
        self.p = subprocess.Popen([WEIR, "serve", "--nbd", "unix:" + self.nbd, "--control", self.control, *args, self.image, *(disk(self.dir) if disk else [])],
                                  stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        line = self.p.stderr.readline()
        while line and "ready" not in line:
            line = self.p.stderr.readline()
        check(line, "the server starts")

    def read_all(self):
        """What a client reads of the volume, from beginning to end."""
        out = os.path.join(self.dir, "out")
        subprocess.run(["nbdcopy", "--connections=1", "--requests=1", "--request-size=65536", "--no-extents",
                        f"nbd+unix:///a.raw?socket={self.nbd}", out], check=True)
        with open(out, "rb") as f, open(self.image, "rb") as g:
            check(f.read() == g.read(), "the client reads what the image holds")

    def ask(self, command, **args):
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(self.control)
            s.settimeout(30)
            s.sendall(json.dumps({"command": command, **args}).encode() + b"\n")
            return json.loads(s.makefile().readline())

    def stats(self):
        return self.ask("stats")["result"]["cache"]

    def end(self):
        self.p.send_signal(signal.SIGTERM)
        rc = self.p.wait(20)
        check(rc == 0, f"it ends well: {rc}: {self.p.stderr.read()}")
        self.p.stderr.close()
        shutil.rmtree(self.dir)


def figures_and_settings():
    s = Serve("--cache-size", "20M")
    s.read_all()
    first = s.stats()
    v = first["volumes"]["a.raw"]
    blocks = 16 * MIB // 4096
    check(v["data"]["reads"] >= blocks, "each block that was read is counted")
    check(v["data"]["hits"] + v["data"]["joined"] + v["data"]["misses"] == v["data"]["reads"], "a read is a hit, joined or a miss")
    check(first["memory"] <= 20 * MIB and first["size"] == 20 * MIB, "the budget is kept")
    check(v["bytes"] == 8 * MIB, f"the half that is zeroes takes no memory: {v['bytes']}")
    s.read_all()
    second = s.stats()["volumes"]["a.raw"]["data"]
    check(second["misses"] == v["data"]["misses"], "the second time nothing is missing")
    check(second["hits"] - v["data"]["hits"] >= blocks, "and all of it hits")

    curve = s.ask("cache-curve", volume="a.raw")["result"]
    check(curve["points"][-1][1] < 0.6 and curve["points"][0][1] > 0.9, f"half of the reads would hit if all of it fitted: {curve}")

    r = s.ask("cache-size", size="10M")
    check(r["ok"] and r["result"]["memory"] <= 10 * MIB, f"it gets smaller: {r}")
    s.read_all()
    check(s.stats()["memory"] <= 10 * MIB, "and stays so")
    check("most it can have" in s.ask("cache-size", size="21M")["error"], "it does not grow beyond its start")
    check(not s.ask("cache-size", size=0)["ok"] and not s.ask("cache-size", size="x")["ok"], "no size, no change")

    r = s.ask("cache-set", volume="a.raw", primarycache="none")
    check(r["ok"] and s.stats()["volumes"]["a.raw"]["bytes"] == 0, f"none frees at once: {r}")
    before = s.stats()["volumes"]["a.raw"]["data"]
    s.read_all()
    check(s.stats()["volumes"]["a.raw"]["data"] == before, "and caches nothing")
    check(s.ask("cache-set", volume="a.raw", primarycache="all", limit="1M")["ok"], "all again, with a limit")
    s.read_all()
    check(0 < s.stats()["volumes"]["a.raw"]["bytes"] <= MIB, "the limit is kept")
    for args in ({"volume": "b"}, {"volume": "a.raw", "primarycache": "some"}, {"volume": "a.raw", "limit": "x"},
                 {"volume": "a.raw", "share": "100G"}, {}):
        check(not s.ask("cache-set", **args)["ok"], f"{args} is refused")
    s.end()


def stat_and_advise():
    def run(*args):
        return subprocess.run([WEIR, *args], capture_output=True, text=True, timeout=30, check=False)

    s = Serve("--cache-size", "20M")
    p = run("advise", s.control)
    check(p.returncode == 0 and p.stdout == "a.raw: too few reads to tell\n", p.stdout + p.stderr)
    s.read_all()
    p = run("advise", s.control)
    check("a.raw: re-reads next to nothing" in p.stdout, p.stdout + p.stderr)
    s.read_all()
    s.read_all()
    p = run("advise", s.control)
    check(p.returncode == 0 and "(all it reads)" in p.stdout and "more would change little" in p.stdout, p.stdout + p.stderr)
    check(list(json.loads(run("advise", "--json", s.control).stdout)) == ["a.raw"], "the curves as JSON")

    st = subprocess.Popen([WEIR, "stat", "-i", "1s", "-n", "2", s.control], stdout=subprocess.PIPE, text=True)
    lines = [st.stdout.readline() for _ in range(2)]
    s.read_all()
    lines += st.stdout.readlines()
    check(st.wait(20) == 0 and len(lines) == 3 and lines[0].split()[:2] == ["time", "reads/s"], f"a header and two lines: {lines}")
    check(lines[1].split()[1:3] == ["0", "-"] or lines[2].split()[2] == "100.0", f"rest, then hits: {lines}")
    p = run("stat", "--json", "-n", "1", s.control)
    check(json.loads(p.stdout)["size"] == 20 * MIB, p.stdout)
    s.end()
    for verb in ("stat", "advise"):
        p = run(verb, "/nonexistent")
        check(p.returncode == 1 and p.stderr.count("\n") == 1 and "--control" in p.stderr, p.stderr)
    s = Serve("--cache-size", "0")
    check("--cache-size" in run("stat", s.control).stderr and "--cache-size" in run("advise", s.control).stderr, "no cache")
    s.end()


def metrics(text):
    """Each line of the text format as {(name, labels): value}; every family has its HELP and TYPE, once, before its samples."""
    values, types = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            check(name not in types and kind in ("counter", "gauge"), line)
            check((kind == "counter") == name.endswith("_total"), line)
            types[name] = kind
        elif not line.startswith("# HELP "):
            m = re.fullmatch(r"([a-z0-9_]+)(?:\{(.*)\})? (\S+)", line)
            check(m and m[1] in types, f"a sample of a family that was announced: {line}")
            check((m[1], m[2]) not in values, line)
            values[m[1], m[2]] = float(m[3])
    return values


def prometheus_says_what_was_read():
    s = Serve("--cache-size", "20M")
    s.read_all()
    s.read_all()
    p = subprocess.run([WEIR, "stat", "--prometheus", s.control], capture_output=True, text=True, timeout=30, check=True)
    m = metrics(p.stdout)
    data = 'volume="a.raw",class="data"'
    v = s.stats()["volumes"]["a.raw"]["data"]
    for name in ("reads", "hits", "joined", "misses", "evicted"):
        check(m[f"weir_cache_{name}_total", data] == v[name], f"{name}: the same figure")
    check(m["weir_cache_reads_total", data] == 2 * 16 * MIB // 4096, "as many blocks as the client has read")
    check(m["weir_volume_bytes_total", 'volume="a.raw",op="read"'] >= 2 * 16 * MIB, "as many bytes")
    check(m["weir_cache_hits_total", data] + m["weir_cache_joined_total", data] + m["weir_cache_misses_total", data] == m["weir_cache_reads_total", data],
          "each block hits, is joined or misses")
    check(m["weir_cache_size_bytes", None] == 20 * MIB, "its size")
    s.end()


def curves_are_drawn():
    s = Serve("--cache-size", "20M")
    s.read_all()
    s.read_all()
    picture = os.path.join(s.dir, "curves.svg")
    p = subprocess.run([WEIR, "advise", "--plot", picture, s.control], capture_output=True, text=True, timeout=30, check=True)
    check("primarycache=metadata instead of all would lose" in p.stdout, p.stdout)
    root = xml.etree.ElementTree.parse(picture).getroot()
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    check(root.tag.endswith("svg") and len(lines) == 1 and len(lines[0].get("points").split()) > 20, "a picture with a line for the volume")
    right = max(float(line.get("x2")) for line in root.findall("{http://www.w3.org/2000/svg}line") if line.get("stroke") == "#ddd")
    check(float(lines[0].get("points").split()[-1].split(",")[0]) == right, "which goes on to the right edge")
    p = subprocess.run([WEIR, "advise", "--plot", "/nonexistent/x", s.control], capture_output=True, text=True, timeout=30, check=False)
    check(p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr)
    s.end()
    s = Serve("--cache-size", "20M", "--cache", "writeback")
    p = subprocess.run([WEIR, "advise", s.control], capture_output=True, text=True, timeout=30, check=True)
    check("host's page cache" in p.stdout, "data that is cached twice is named: " + p.stdout)
    s.end()


def it_gives_way_to_memory_pressure():
    with tempfile.NamedTemporaryFile("w+") as f:
        def say(total):
            f.seek(0)
            f.write(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\n")
            f.flush()

        say(1000000)
        os.environ["WEIR_PRESSURE_FILE"] = f.name
        s = Serve("--cache-size", "20M")
        del os.environ["WEIR_PRESSURE_FILE"]
        s.read_all()
        before = s.stats()
        total, steps = 1000000, 0
        while s.stats()["size"] > 16 * MIB and steps < 300:
            total, steps = total + 200000, steps + 1
            say(total)
            time.sleep(0.1)
        after = s.stats()
        check(before["size"] == 20 * MIB and after["size"] == 15 * MIB and after["memory"] <= 15 * MIB, f"smaller: {after['size']} {after['memory']}")
        s.read_all()
        s.end()


def tables_of_a_format_are_metadata():
    def disk(folder):
        image = os.path.join(folder, "b.qcow2")
        subprocess.run([WEIR, "image", "create", "-f", "qcow2", image, "64M"], check=True, stdout=subprocess.DEVNULL)
        return [image]

    def copy(*args):
        subprocess.run(["nbdcopy", *args], check=True)

    def fill(s):
        copy(s.image, f"nbd+unix:///b.qcow2?socket={s.nbd}")

    s = Serve("--cache-size", "20M", disk=disk)
    fill(s)
    out = os.path.join(s.dir, "out")
    copy("--no-extents", f"nbd+unix:///b.qcow2?socket={s.nbd}", out)
    with open(out, "rb") as f, open(s.image, "rb") as g:
        check(f.read(16 * MIB) == g.read(), "what was written to the qcow2 image is read back")
    v = s.stats()["volumes"]
    tables, top = v["b.qcow2: tables 0"], v["b.qcow2"]
    check(tables["metadata"]["reads"] > 0 and tables["data"]["reads"] == 0, f"its tables are read through the cache: {tables}")
    check(top["data"]["reads"] > 0 and top["metadata"]["reads"] == 0, f"its data through another layer: {top}")
    check(s.ask("cache-set", volume="b.qcow2", primarycache="metadata")["ok"], "only metadata")
    v = s.stats()["volumes"]
    check(v["b.qcow2"]["data_blocks"] == 0 and v["b.qcow2: tables 0"]["metadata_blocks"] > 0, f"the tables stay: {v}")
    check(s.ask("cache-set", volume="b.qcow2", primarycache="none")["ok"], "nothing")
    v = s.stats()["volumes"]
    check(v["b.qcow2: tables 0"]["metadata_blocks"] == 0, f"and they go: {v}")
    s.end()


def with_metadata_alone_tables_hit_while_data_misses():
    # In clusters of 4 KiB a block of a table covers 2 MiB, and the image itself keeps 32 blocks, and those that are a few runs: so there are many here.
    size, steps = 256 * MIB, 128

    def disk(folder):
        image = os.path.join(folder, "b.qcow2")
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-o", "cluster_size=4096", image, str(size)], check=True)
        writes = [arg for i in range(steps) for k in range(10) for arg in ("-c", f"write {i * size // steps + k * 8192} 4k")]
        subprocess.run(["qemu-io", "-t", "unsafe", "-f", "qcow2", *writes, image], check=True, stdout=subprocess.DEVNULL)
        return [image + ",l2-cache-size=128K"]

    def read(s):
        reads = [arg for i in range(steps) for arg in ("-c", f"read {i * size // steps} 4k")]
        subprocess.run(["qemu-io", "-r", "-f", "raw", *reads, f"nbd+unix:///b.qcow2?socket={s.nbd}"], check=True, stdout=subprocess.DEVNULL)

    s = Serve("--cache-size", "20M", "--primarycache", "metadata", disk=disk)
    read(s)
    first = s.stats()["volumes"]["b.qcow2: tables 0"]["metadata"]
    check(first["misses"] >= steps, f"each table is read: {first}")
    read(s)
    v = s.stats()["volumes"]
    tables, top = v["b.qcow2: tables 0"], v["b.qcow2"]
    check(tables["metadata"]["misses"] == first["misses"], f"and the second time comes from memory: {tables}")
    check(tables["metadata"]["hits"] - first["hits"] >= steps - 32, f"as a hit of the metadata class: {tables}")
    check(tables["data_blocks"] == top["data_blocks"] == top["data"]["hits"] == 0, f"while no data is kept: {top}")
    s.end()


def without():
    s = Serve("--cache-size", "0")
    s.read_all()
    check(s.stats() is None, "no cache, no figures")
    check("--cache-size" in s.ask("cache-size", size="1M")["error"], "the answer says where a cache comes from")
    s.end()
    p = subprocess.run([WEIR, "serve", "--nbd", "unix:/tmp/none", "--cache-size", "100K", "null:1M"], capture_output=True, text=True, check=False)
    check(p.returncode == 1 and "too small" in p.stderr and p.stderr.count("\n") == 1, p.stderr)


need("nbdcopy", "qemu-img", "qemu-io")
sys.exit(run_tests([figures_and_settings, stat_and_advise, prometheus_says_what_was_read, curves_are_drawn, it_gives_way_to_memory_pressure,
                    tables_of_a_format_are_metadata, with_metadata_alone_tables_hit_while_data_misses, without]))
