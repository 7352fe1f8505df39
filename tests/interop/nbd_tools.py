#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Stock tools: nbdinfo, nbdcopy, qemu-io, qemu-img, fio."""
import json
import os

import harness
from nbd_lib import *

need("nbdinfo", "nbdcopy", "qemu-io", "qemu-img", "fio")


def run(*args, ok=True):
    p = harness.run(*args)
    check(not ok or p.returncode == 0, "%s: %s%s" % (" ".join(args), p.stdout, p.stderr))
    return p.stdout


def make_image(path, size):
    """Data, zeroes and holes."""
    with open(path, "wb") as f:
        f.write(os.urandom(3 << 20) + bytes(1 << 20))
        f.seek(size // 2)
        f.write(os.urandom(1234567))
        f.truncate(size)


def nbdinfo_shows_every_export():
    with Server("mem:16M", "mem:8M", "--name", "first", "--name", "second disk") as s:
        info = json.loads(run("nbdinfo", "--list", "--json", s.uri()))
        equal([(e["export-name"], e["export-size"]) for e in info["exports"]], [("first", 16 << 20), ("second disk", 8 << 20)], "exports")
        equal(run("nbdinfo", "--size", s.uri("second%20disk")).strip(), str(8 << 20), "size")
        for what in ("write", "flush", "fua", "trim", "zero", "fast-zero", "cache", "df", "multi-conn"):
            run("nbdinfo", "--can", what, s.uri())
        equal(json.loads(run("nbdinfo", "--no-content", "--json", s.uri()))["exports"][0]["contexts"], ["base:allocation"], "contexts")


def nbdinfo_map_adds_up():
    with Server("mem:16M") as s:
        run("qemu-io", "-f", "raw", "-c", "write 1M 64k", s.uri())
        entries = json.loads(run("nbdinfo", "--map", "--json", s.uri()))
        equal(sum(e["length"] for e in entries), 16 << 20, "the map's length")
        check(any(e["offset"] <= 1 << 20 < e["offset"] + e["length"] and e["type"] == 0 for e in entries), "data at 1 MiB")


def nbdcopy_there_and_back_is_the_same():
    with folder() as d, Server("mem:64M") as s:
        a, b = os.path.join(d, "a"), os.path.join(d, "b")
        make_image(a, 64 << 20)
        for conns in ("1", "4"):
            run("nbdcopy", "--connections=" + conns, "--flush", a, s.uri())
            run("nbdcopy", "--connections=" + conns, s.uri(), b)
            run("cmp", a, b)
        run("nbdcopy", "--request-size=33554432", s.uri(), b)
        run("cmp", a, b)


def nbdcopy_from_server_to_server():
    with folder() as d, Server("mem:32M") as s, Server("mem:32M") as t:
        a = os.path.join(d, "a")
        make_image(a, 32 << 20)
        run("nbdcopy", a, s.uri())
        run("nbdcopy", s.uri(), t.uri())
        run("qemu-img", "compare", "-f", "raw", "-F", "raw", s.uri(), t.uri())


def qemu_io_commands_work():
    with Server("mem:64M") as s:
        out = run("qemu-io", "-f", "raw",
                  "-c", "write -P 1 0 64k", "-c", "write -f -P 2 4k 4k", "-c", "read -P 2 4k 4k", "-c", "read -P 1 8k 56k",
                  "-c", "write -z 16k 16k", "-c", "read -P 0 16k 16k", "-c", "write -z -u 32k 4k", "-c", "read -P 0 32k 4k",
                  "-c", "write -P 3 1 511", "-c", "read -P 3 1 511", "-c", "discard 0 1M", "-c", "flush",
                  "-c", "aio_write -P 4 1M 1M", "-c", "aio_write -P 5 2M 1M", "-c", "aio_flush",
                  "-c", "read -P 4 1M 1M", "-c", "read -P 5 2M 1M", "-c", "length", s.uri())
        check("failed" not in out and "64 MiB" in out, out)


def qemu_img_convert_compare_and_map():
    with folder() as d, Server("mem:64M") as s:
        a, q = os.path.join(d, "a"), os.path.join(d, "q.qcow2")
        make_image(a, 64 << 20)
        run("qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", a, s.uri())
        run("qemu-img", "compare", "-f", "raw", "-F", "raw", a, s.uri())
        run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", s.uri(), q)
        run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", a, q)
        entries = json.loads(run("qemu-img", "map", "-f", "raw", "--output=json", s.uri()))
        equal(sum(e["length"] for e in entries), 64 << 20, "the map's length")


def fio_verifies_what_it_wrote():
    with Server("mem:64M") as s:
        out = run("fio", "--name=v", "--ioengine=nbd", "--uri=" + s.uri(), "--rw=randrw", "--bsrange=512-64k", "--iodepth=32",
                  "--size=32m", "--verify=crc32c", "--fsync=16", "--randseed=3")
        check("err= 0" in out, out)


def tcp_listens_on_loopback_with_a_free_port():
    with Server("mem:8M", nbd="127.0.0.1:0") as s:
        addr = s.text().split("NBD on ")[1].split()[0]
        equal(run("nbdinfo", "--size", "nbd://%s/" % addr).strip(), str(8 << 20), "size over TCP")
        with open("/proc/net/tcp") as f:
            port = "%04X" % int(addr.split(":")[1])
            check(any(line.split()[1] == "0100007F:" + port for line in f), "bound to loopback")


def ipv6_works_where_there_is_ipv6():
    if not os.path.exists("/proc/net/if_inet6"):
        return
    with Server("mem:8M", nbd="[::1]:0") as s:
        addr = s.text().split("NBD on ")[1].split()[0]
        equal(run("nbdinfo", "--size", "nbd://%s/" % addr).strip(), str(8 << 20), "size over IPv6")


sys.exit(run_tests(tests_of(globals())))
