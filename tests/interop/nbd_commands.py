#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Each command and flag through libnbd, against what is really in the disk."""
import errno
import os
import random

from nbd_lib import *

try:
    import nbd
except ImportError:
    skip("python3-libnbd is not installed")


@contextlib.contextmanager
def client(server, name="", meta=True, structured=True):
    h = nbd.NBD()
    h.set_strict_mode(0)    # the server is tested, not the library's own checks
    h.set_request_structured_replies(structured)
    if meta:
        h.add_meta_context("base:allocation")
    h.connect_uri(server.uri(name))
    try:
        yield h
    finally:
        try:
            h.shutdown()
        except nbd.Error:
            check(server.killed, "a clean end")


def fails(what, number, fn, *args):
    try:
        fn(*args)
    except nbd.Error as e:
        equal(e.errnum, number, "the error of " + what)
        return
    check(False, what + " fails")


def extents(h, n, off, flags=0):
    out = []

    def collect(name, at, entries, err):
        equal((name, at), ("base:allocation", off), "context and offset")
        out.extend(zip(entries[::2], entries[1::2]))
        return 0

    h.block_status(n, off, collect, flags)
    return out


def what_is_advertised_is_what_works():
    with client(srv) as h:
        for name in ("can_flush", "can_fua", "can_trim", "can_zero", "can_fast_zero", "can_cache", "can_df", "can_multi_conn"):
            check(getattr(h, name)(), name)
        check(not h.is_read_only(), "not read-only")
        equal(h.get_size(), 64 << 20, "size")
        equal(h.get_block_size(nbd.SIZE_MINIMUM), 1, "minimum block")
        equal(h.get_block_size(nbd.SIZE_MAXIMUM), 32 << 20, "maximum payload")
        check(h.can_meta_context("base:allocation"), "base:allocation")
        check(h.get_structured_replies_negotiated(), "structured replies")


def a_write_is_read_back_at_any_offset_and_length():
    rng = random.Random(7)
    model = bytearray(1 << 20)
    for structured in (True, False):
        with client(srv, structured=structured, meta=structured) as h:
            h.pwrite(bytes(model), 0)
            for i in range(300):
                off = rng.randrange(len(model))
                n = min(rng.choice((1, 3, 511, 512, 513, 4096, 5000, 65536, 100001)), len(model) - off)
                data = rng.randbytes(n)
                h.pwrite(data, off, nbd.CMD_FLAG_FUA if i % 5 == 0 else 0)
                model[off:off + n] = data
                off = rng.randrange(len(model))
                n = min(rng.randrange(1, 70000), len(model) - off)
                check(h.pread(n, off) == model[off:off + n], "%d bytes at %d" % (n, off))
            check(h.pread(len(model), 0) == model, "all of it")


def many_requests_in_flight_do_not_mix_up():
    with client(srv) as h:
        n, todo, bufs = 2000, [], []
        for i in range(n):
            data = nbd.Buffer.from_bytearray(bytearray((i & 0xffffffff).to_bytes(8, "big") * 512))
            todo.append(h.aio_pwrite(data, 4096 * i, flags=nbd.CMD_FLAG_FUA if i % 7 == 0 else 0))
            bufs.append(data)
            while h.aio_in_flight() > 300:
                h.poll(-1)
        while h.aio_in_flight():
            h.poll(-1)
        check(all(h.aio_command_completed(c) for c in todo), "all writes completed")
        for i in range(n):
            check(h.pread(8, 4096 * i + 8 * (i % 512)) == i.to_bytes(8, "big"), "block %d" % i)


def a_read_of_zeroes_may_be_a_hole_chunk():
    seen = []

    def chunk(buf, off, status, err):
        seen.append((off, len(buf), status))
        check(bytes(buf) == bytes(len(buf)), "zeroes")
        return 0

    with client(srv) as h:
        h.pwrite(bytes(1 << 20), 0)
        for flags in (0, nbd.CMD_FLAG_DF):
            seen.clear()
            h.pread_structured(1 << 20, 0, chunk, flags)
            equal(sum(n for _, n, _ in seen), 1 << 20, "all bytes are covered")
            check(flags == 0 or len(seen) == 1, "DF: one chunk")


def df_gives_one_data_chunk():
    seen = []

    def chunk(buf, off, status, err):
        seen.append((off, len(buf), status))
        return 0

    with client(srv) as h:
        h.pwrite(b"d" * 4096 + bytes(60 * 1024), 0)
        h.pread_structured(65536, 0, chunk, nbd.CMD_FLAG_DF)
        equal(seen, [(0, 65536, nbd.READ_DATA)], "chunks")


def write_zeroes_reads_as_zeroes_with_every_flag():
    with client(srv) as h:
        for flags in (0, nbd.CMD_FLAG_NO_HOLE, nbd.CMD_FLAG_FUA, nbd.CMD_FLAG_FUA | nbd.CMD_FLAG_NO_HOLE):
            h.pwrite(b"z" * 100000, 1000)
            h.zero(50000, 1234, flags)
            check(h.pread(50000, 1234) == bytes(50000), "zeroes with flags %d" % flags)
            check(h.pread(234, 1000) == b"z" * 234 and h.pread(100, 51234) == b"z" * 100, "what is around")


def no_hole_leaves_no_hole():
    with client(srv) as h:
        h.pwrite(b"n" * 65536, 0)
        h.zero(65536, 0, nbd.CMD_FLAG_NO_HOLE)
        check(all(not flags & 1 for _, flags in extents(h, 65536, 0)), "nothing of it is a hole")


def fast_zero_is_fast_or_not_supported():
    with client(srv) as h:
        h.pwrite(b"f" * 65536, 0)
        try:
            h.zero(65536, 0, nbd.CMD_FLAG_FAST_ZERO)
            check(h.pread(65536, 0) == bytes(65536), "zeroes")
        except nbd.Error as e:
            equal(e.errnum, errno.ENOTSUP, "the error")
            check(h.pread(65536, 0) == b"f" * 65536, "unchanged")


def a_trimmed_range_is_a_hole_or_as_before():
    with client(srv) as h:
        for flags in (0, nbd.CMD_FLAG_FUA):
            h.pwrite(b"t" * (1 << 20), 0)
            h.trim(1 << 20, 0, flags)
            check(h.pread(1 << 20, 0) in (bytes(1 << 20), b"t" * (1 << 20)), "all or nothing of it")
        h.trim(1, 3)
        h.trim(64 << 20, 0)


def flush_and_cache_succeed():
    with client(srv) as h:
        h.pwrite(b"x", 5)
        h.flush()
        h.cache(1 << 20, 0)


def fua_is_accepted_on_every_command():
    with Raw(srv).negotiate(structured=True, meta=True) as c:
        for cmd in (TRIM, CACHE, ZERO):
            equal(c.do(cmd, 0, 4096, FUA), 0, "command %d" % cmd)
        equal(c.do(FLUSH, 0, 0, FUA), 0, "flush")
        equal(c.do(WRITE, 0, 4096, FUA, b"u" * 4096), 0, "write")
        c.request(READ, 0, 4096, FUA)
        equal(c.chunk()[3][8:], b"u" * 4096, "read")
        c.request(STATUS, 0, 4096, FUA)
        equal(c.chunk()[1], 5, "status")


def block_status_tells_holes_zeroes_and_data():
    with client(srv) as h:
        h.trim(64 << 20, 0)
        h.pwrite(b"d" * 65536, 1 << 20)
        got = extents(h, 4 << 20, 0)
        equal(sum(n for n, _ in got), 4 << 20, "the whole range")
        at = 0
        for n, flags in got:
            data = h.pread(min(n, 32 << 20), at)
            check(not flags & 2 or data == bytes(len(data)), "what is said to be zero is zero")
            at += n
        check(all(a[1] != b[1] for a, b in zip(got, got[1:])), "neighbours differ")
        covering = [f for (n, f), start in zip(got, [sum(x for x, _ in got[:i]) for i in range(len(got))])
                    if start <= (1 << 20) < start + n]
        equal(covering, [0], "data is data")


def req_one_gives_one_extent_within_the_request():
    with client(srv) as h:
        h.pwrite(b"d" * 65536, 0)
        for n in (1, 4096, 65536, 32 << 20):
            got = extents(h, n, 0, nbd.CMD_FLAG_REQ_ONE)
            equal(len(got), 1, "extents")
            check(0 < got[0][0] <= n, "its length")


def block_status_with_extended_headers_covers_64_bits():
    with Server("null:1T") as big, Raw(big).negotiate(extended=True, meta=True) as c:
        check(c.flags & (1 << 12), "BLOCK_STATUS_PAYLOAD is advertised")
        c.request(STATUS, 0, 1 << 40)
        flags, kind, cookie, payload = c.chunk()
        equal((flags, kind), (1, 6), "chunk")
        context, count = struct.unpack(">II", payload[:8])
        ext = struct.unpack(">%dQ" % (2 * count), payload[8:])
        equal(context, 1, "context")
        equal(sum(ext[::2]), 1 << 40, "the whole range")
        equal(c.do(ZERO, 0, 1 << 40, NO_HOLE), 0, "zeroes of a TiB")
        equal(c.do(TRIM, 0, 1 << 40), 0, "trim of a TiB")
        equal(c.do(CACHE, 0, 1 << 40), 0, "cache of a TiB")


def a_read_only_export_refuses_writes():
    with Server("mem:8M", "--read-only") as ro:
        with client(ro) as h:
            check(h.is_read_only(), "is_read_only")
            fails("write", errno.EPERM, h.pwrite, b"x" * 512, 0)
            fails("zero", errno.EPERM, h.zero, 512, 0)
            fails("trim", errno.EPERM, h.trim, 512, 0)
            h.flush()
            h.cache(512, 0)
            equal(h.pread(512, 0), bytearray(512), "a read")


def a_flush_on_one_connection_covers_writes_of_another():
    with folder() as d:
        path = os.path.join(d, "disk.raw")
        with open(path, "wb") as f:
            f.truncate(8 << 20)
        with Server(path) as s, client(s) as a, client(s) as b:
            check(a.can_multi_conn(), "multi-conn")
            for i in range(16):
                a.pwrite(b"%4d" % i * 1024, 4096 * i)
                check(b.pread(4096, 4096 * i) == b"%4d" % i * 1024, "the other connection sees it")
            b.flush()
            s.kill()
            with open(path, "rb") as f:
                for i in range(16):
                    equal(f.read(4096), b"%4d" % i * 1024, "block %d after SIGKILL" % i)


def fua_and_flush_reach_the_disk():
    with Server("delay:flush=300ms,fua=300ms:mem:8M") as slow, client(slow) as h:
        for what, wait, fn in (("a write", False, lambda: h.pwrite(b"x" * 4096, 0)),
                               ("a write with FUA", True, lambda: h.pwrite(b"x" * 4096, 0, nbd.CMD_FLAG_FUA)),
                               ("zeroes with FUA", True, lambda: h.zero(4096, 0, nbd.CMD_FLAG_FUA)),
                               ("a flush", True, h.flush)):
            start = time.monotonic()
            fn()
            check(not wait or time.monotonic() - start >= 0.29, what + " waits for stable media")


def errors_of_the_disk_reach_the_client():
    for name, number in (("EIO", errno.EIO), ("ENOSPC", errno.ENOSPC), ("EROFS", errno.EPERM)):
        for op in ("write", "read"):
            with Server("fault:op=%s,error=%s:mem:8M" % (op, name)) as s, client(s) as h:
                fails(op, number, *((h.pwrite, b"x" * 512, 0) if op == "write" else (h.pread, 512, 0)))


def errors_carry_a_text():
    with Raw(srv).negotiate(structured=True) as c:
        c.request(READ, 1 << 50, 512)
        flags, kind, cookie, payload = c.chunk()
        error, n = struct.unpack(">IH", payload[:6])
        equal((kind, error), (0x8001, EINVAL), "chunk")
        check(b"end of the export" in payload[6:], repr(payload[6:]))


with Server("mem:64M") as srv:
    sys.exit(run_tests(tests_of(globals())))
