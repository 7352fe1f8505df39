#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Transmission with a client that is mistaken, hostile or gone: each gets the protocol's error or a disconnect, and the server stays."""
import struct
import threading
import time

from nbd_lib import *


def a_wrong_request_magic_ends_the_connection():
    for magic in (1, 0x12560953, EXT_REQUEST_MAGIC):
        with Raw(srv).__enter__().negotiate() as c:
            c.request(READ, 0, 512, magic=magic)
            check(c.closed(), "magic %#x" % magic)
    with Raw(srv).negotiate(extended=True) as c:
        c.request(READ, 0, 512, magic=REQUEST_MAGIC)
        check(c.closed(), "a compact magic with extended headers")


def unknown_commands_and_flags_are_invalid():
    for kw in ({}, {"structured": True}, {"extended": True, "meta": True}):
        with Raw(srv).negotiate(**kw) as c:
            for cmd in (8, 9, 100, 0xFFFF):
                equal(c.do(cmd, 0, 512), EINVAL, "command %d" % cmd)
            for cmd, flags in ((READ, NO_HOLE), (READ, 0x8000), (FLUSH, DF), (TRIM, NO_HOLE), (CACHE, REQ_ONE), (STATUS, DF),
                               (ZERO, REQ_ONE), (READ, REQ_ONE), (TRIM, PAYLOAD if not c.extended else FAST)):
                equal(c.do(cmd, 0, 0 if cmd == FLUSH else 512, flags), EINVAL, "command %d with flags %#x" % (cmd, flags))
            wflags = PAYLOAD if c.extended else 0
            equal(c.do(WRITE, 0, 512, wflags | DF, bytes(512)), EINVAL, "a write with DF")
            equal(c.do(WRITE, 0, 512, wflags, b"x" * 512), 0, "a write afterwards: the stream is in step")


def df_without_structured_replies_is_invalid():
    with Raw(srv).negotiate() as c:
        equal(c.do(READ, 0, 512, DF), EINVAL, "DF with simple replies")


def out_of_range_has_the_errors_of_the_protocol():
    for kw in ({}, {"structured": True}, {"extended": True}):
        with Raw(srv).negotiate(**kw) as c:
            wflags = PAYLOAD if c.extended else 0
            for off, n in ((c.size, 512), (c.size - 256, 512), (2**64 - 1, 512), (2**64 - 512, 512), (1 << 63, 1)):
                equal(c.do(READ, off, n), EINVAL, "a read at %#x" % off)
                equal(c.do(TRIM, off, n), EINVAL, "a trim at %#x" % off)
                equal(c.do(CACHE, off, n), EINVAL, "a cache at %#x" % off)
                equal(c.do(ZERO, off, n), ENOSPC, "zeroes at %#x" % off)
                equal(c.do(WRITE, off, n, wflags, bytes(n)), ENOSPC, "a write at %#x" % off)
            equal(c.do(ZERO, 0, 0xFFFFFFFF), ENOSPC, "4 GiB of zeroes")
            if c.extended:
                equal(c.do(ZERO, 0, 2**64 - 1), ENOSPC, "2^64 zeroes")
                equal(c.do(TRIM, 1, 2**64 - 1), EINVAL, "a trim that wraps")
                equal(c.do(READ, 0, 2**63), EINVAL, "a read of 2^63")


def zero_lengths_are_harmless():
    for kw in ({}, {"structured": True}, {"extended": True, "meta": True}):
        with Raw(srv).negotiate(**kw) as c:
            for cmd in (READ, TRIM, CACHE, ZERO):
                equal(c.do(cmd, 512, 0), 0, "command %d of 0 bytes" % cmd)
                equal(c.do(cmd, c.size, 0), 0, "command %d of 0 bytes at the end" % cmd)
            if not c.extended:
                equal(c.do(WRITE, 512, 0), 0, "a write of 0 bytes")
            equal(c.do(STATUS, 512, 0), EINVAL, "a status of 0 bytes")


def a_flush_with_offset_or_length_is_invalid():
    with Raw(srv).negotiate() as c:
        equal(c.do(FLUSH, 1, 0), EINVAL, "offset")
        equal(c.do(FLUSH, 0, 1), EINVAL, "length")
        equal(c.do(FLUSH), 0, "none")


def a_read_over_32_mib_is_refused():
    with Raw(srv).negotiate() as c:
        equal(c.do(READ, 0, (32 << 20) + 1), EINVAL, "simple")
    for kw in ({"structured": True}, {"extended": True}):
        with Raw(srv).negotiate(**kw) as c:
            equal(c.do(READ, 0, (32 << 20) + 1), EOVERFLOW, "structured")
            equal(c.do(READ, 0, 0), 0, "afterwards")


def a_write_over_32_mib_is_refused_in_step_or_ends_the_connection():
    with Raw(srv).negotiate() as c:
        n = (32 << 20) + 1
        equal(c.do(WRITE, 0, n, data=bytes(n)), EINVAL, "32 MiB + 1")
        equal(c.do(FLUSH), 0, "afterwards")
        c.request(WRITE, 0, 0xFFFFFFFF)
        check(c.closed(), "4 GiB")
    with Raw(srv).negotiate(extended=True) as c:
        c.request(WRITE, 0, 2**40, PAYLOAD)
        check(c.closed(), "1 TiB")


def requests_of_32_mib_work():
    for kw in ({}, {"structured": True}, {"extended": True}):
        with Raw(srv).negotiate(**kw) as c:
            n = 32 << 20
            data = os.urandom(1 << 20) * 32
            equal(c.do(WRITE, 1, n, PAYLOAD if c.extended else 0, data), 0, "write")
            c.request(READ, 1, n)
            if c.structured or c.extended:
                flags, kind, cookie, got = c.chunk()
                got = got[8:]
            else:
                c.chunk()
                got = c.recv(n)
            check(got == data, "the same data")


def payloads_with_extended_headers_are_consumed():
    with Raw(srv).negotiate(extended=True, meta=True) as c:
        equal(c.do(WRITE, 0, 512), EINVAL, "a write without a payload")
        for cmd in (READ, FLUSH, TRIM, CACHE, ZERO, 77):
            equal(c.do(cmd, 0, 100, PAYLOAD, b"p" * 100), EINVAL, "command %d with a payload" % cmd)
        for data in (b"", b"1" * 8, struct.pack(">QI", 4096, 99), struct.pack(">QII", 4096, 1, 1), b"x" * 11, b"y" * 100000):
            if data:
                equal(c.do(STATUS, 0, len(data), PAYLOAD, data), EINVAL, "status payload of %d bytes" % len(data))
        c.request(STATUS, 0, 12, PAYLOAD, struct.pack(">QI", 4096, 1))
        equal(c.chunk()[1], 6, "a good status payload")
        equal(c.do(FLUSH), 0, "afterwards")
    with Raw(srv).negotiate(extended=True) as c:
        equal(c.do(STATUS, 0, 12, PAYLOAD, struct.pack(">QI", 4096, 1)), EINVAL, "a status payload without a context")
        equal(c.do(FLUSH), 0, "afterwards")


def extended_replies_repeat_the_offset():
    with Raw(srv).negotiate(extended=True) as c:
        c.request(TRIM, 12345, 1)
        c.result()
        equal(c.off, 12345, "the reply's offset")


def a_truncated_request_or_payload_is_dropped():
    for kw in ({}, {"extended": True}):
        for cut in (1, 4, 27, 31, 40, 1000):
            with Raw(srv).negotiate(**kw) as c:
                flags = PAYLOAD if c.extended else 0
                head = struct.pack(">IHHQQ" + ("Q" if c.extended else "I"),
                                   EXT_REQUEST_MAGIC if c.extended else REQUEST_MAGIC, flags, WRITE, 1, 0, 4096)
                c.send((head + b"t" * 4096)[:cut])
    with Raw(srv).negotiate() as c:
        c.request(READ, 0, 4096)
        c.chunk()
        check(b"t" * 64 not in c.recv(4096), "nothing of a cut write was written")


def replies_come_after_the_client_has_closed_its_side():
    with Raw(srv).negotiate() as c:
        for i in range(50):
            c.request(READ, 0, 65536, cookie=i)
        c.s.shutdown(socket.SHUT_WR)
        seen = set()
        for i in range(50):
            error, kind, cookie, _ = c.chunk()
            seen.add(cookie)
            c.recv(65536)
        equal(len(seen), 50, "replies")
        check(c.closed(), "the end")


def disconnect_lets_requests_in_flight_end():
    with Raw(srv).negotiate() as c:
        for i in range(10):
            c.request(READ, 0, 1 << 20, cookie=i)
        c.request(DISC)
        for i in range(10):
            equal(c.chunk()[0], 0, "error")
            c.recv(1 << 20)
        check(c.closed(), "the end")


def a_client_that_takes_nothing_does_not_stop_others():
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(Raw(srv).negotiate()) for _ in range(8)]
        for c in slow:
            c.s.setblocking(False)
            try:
                for i in range(500):
                    c.s.send(struct.pack(">IHHQQI", REQUEST_MAGIC, 0, READ, i, 0, 1 << 20))
            except BlockingIOError:
                pass
            c.s.settimeout(TIMEOUT)
        time.sleep(2)  # so long that those who wait have lost their patience
        with Raw(srv).negotiate() as c:
            for i in range(100):
                equal(c.do(FLUSH), 0, "a flush")
            c.request(READ, 0, 4096)
            c.chunk()
            c.recv(4096)
        check(srv.rss() < 400 << 20, "resident memory is %d MiB" % (srv.rss() >> 20))
        check("cut off" not in srv.text(), "nobody had to be cut off to make room")


def large_replies_do_not_interleave():
    n, size = 64, 1 << 19
    with Raw(srv).negotiate() as c:
        for i in range(n):
            equal(c.do(WRITE, i * size, size, data=bytes([i + 1]) * size), 0, "a write")
        for i in range(n):
            c.request(READ, i * size, size, cookie=i)
        time.sleep(0.2)     # the socket is full, and all replies wait behind the first
        seen = set()
        for i in range(n):
            error, kind, cookie, _ = c.chunk()
            equal(error, 0, "error")
            check(c.recv(size) == bytes([cookie + 1]) * size, "the data of reply %d" % cookie)
            seen.add(cookie)
        equal(len(seen), n, "replies")


def thousand_connections_leave_no_descriptor():
    with Raw(srv).negotiate():
        pass
    before = srv.fds()
    for i in range(1000):
        if i % 4 == 0:
            Raw(srv, hello=False).s.close()
        elif i % 4 == 1:
            Raw(srv).s.close()
        elif i % 4 == 2:
            c = Raw(srv).negotiate()
            c.s.close()
        else:
            with Raw(srv).negotiate() as c:
                c.request(READ, 0, 1 << 20)
    srv.left_none(before)


def more_connections_than_allowed_push_out_silent_ones():
    silent = [Raw(srv, hello=False) for _ in range(400)]
    with Raw(srv).negotiate() as c:
        equal(c.do(FLUSH), 0, "a client that speaks")
    for s in silent:
        s.s.close()


def connections_in_transmission_are_kept_when_all_are_taken():
    kept = []
    try:
        for _ in range(300):
            kept.append(Raw(srv).negotiate())
    except Closed:
        pass
    check(200 <= len(kept) <= 290, "%d connections" % len(kept))
    for c in kept:
        equal(c.do(FLUSH), 0, "each works")
    for c in kept:
        c.s.close()
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        try:
            with Raw(srv).negotiate() as c:
                return
        except Closed:
            time.sleep(0.01)
    check(False, "a place is free again")


def hundreds_of_requests_are_in_flight():
    with Raw(srv).negotiate() as c:
        n = 5000

        def feed():
            for i in range(n):
                c.request(READ, 4096 * (i % 100), 4096, cookie=i)

        t = threading.Thread(target=feed)
        t.start()
        seen = set()
        for _ in range(n):
            seen.add(c.chunk()[2])
            c.recv(4096)
        t.join()
        equal(len(seen), n, "replies")


def who_trickles_a_request_is_cut_off_and_who_is_silent_is_not():
    with Server("mem:64M", "--client-timeout", "1s") as s:
        with Raw(s).negotiate() as idle, Raw(s).negotiate() as busy:
            head = struct.pack(">IHHQQI", REQUEST_MAGIC, 0, WRITE, 7, 0, 4096)
            for begun, rest in ((b"", head), (head, bytes(4096)), (head[:-1], b""), (struct.pack(">IHHQQI", REQUEST_MAGIC, PAYLOAD, WRITE, 7, 0, 4096), bytes(4096))):
                with Raw(s).negotiate() as c:
                    c.send(begun)
                    began = time.monotonic()
                    try:
                        for i in range(100):
                            if i < len(rest):
                                c.send(rest[i:i + 1])
                            time.sleep(0.1)
                            equal(busy.do(READ, 0, 4096), 0, "another client meanwhile")
                            busy.recv(4096)
                            c.s.setblocking(False)
                            try:
                                if not c.s.recv(1):
                                    break
                            except BlockingIOError:
                                pass
                            c.s.setblocking(True)
                    except OSError:
                        pass
                    check(time.monotonic() - began < 9, "cut off after %d bytes and then byte by byte" % len(begun))
            equal(idle.do(READ, 0, 512), 0, "a client that was silent all the while")
        check("cut off" in s.text(), s.text())


def who_trickles_the_handshake_is_cut_off():
    with Server("mem:64M", "--client-timeout", "500ms") as s:
        # Byte by byte, and a whole option now and then.
        for step in (b"I", struct.pack(">QII", 0x49484156454F5054, 99, 0)):
            with Raw(s) as c:
                began = time.monotonic()
                try:
                    while time.monotonic() - began < 20:
                        c.send(step)
                        time.sleep(0.2)
                except (Closed, OSError):
                    pass
                check(time.monotonic() - began < 15, "step %r" % step)


def random_bytes_do_no_harm():
    import random
    rng = random.Random(1)
    for i in range(200):
        with Raw(srv) as c:
            try:
                if i % 2:
                    c.negotiate(structured=bool(i & 2), extended=bool(i & 4), meta=bool(i & 6))
                c.send(rng.randbytes(rng.randrange(1, 3000)))
                c.s.shutdown(socket.SHUT_WR)
                while c.s.recv(65536):
                    pass
            except (Closed, OSError):
                pass
    srv.alive()


with Server("mem:64M") as srv:
    sys.exit(run_tests(tests_of(globals())))
