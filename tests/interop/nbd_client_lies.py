#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The NBD client against a server that breaks the protocol: each lie ends the disk with one clear line, and nothing worse."""
from nbd_fake import *


def lie_to(cmd, hook, command, words, **kw):
    """The hook answers the first request of this kind; the request fails, the disk is dead, and the log has `words`."""
    told = []

    def once(conn, r):
        if r.cmd != cmd or told:
            return False
        told.append(1)
        hook(conn, r)
        return True

    with folder() as d, Fake(d + "/s", hook=once, **kw) as srv, Shell(srv.uri()) as sh:
        sh.ok("write", 0, 8192, "5a")
        sh.error(5, *command.split())
        sh.error(5, "read", 0, 512)
        sh.error(5, "write", 0, 512, "00")
        sh.error(5, "flush")
        check(words in sh.stderr(), "the log says %r: %s" % (words, sh.stderr()))
        equal(srv.accepted, 1, "the connections made")


READ_CMD = "read 0 8192"


def replies_to_nobody_end_the_disk():
    lie_to(READ, lambda c, r: c.data(Request(0, READ, r.cookie + 1, 0, 0, None), 0, bytes(8192)), READ_CMD, "to no request")
    lie_to(READ, lambda c, r: c.data(Request(0, READ, r.cookie | 0xffff, 0, 0, None), 0, bytes(8192)), READ_CMD, "to no request")
    lie_to(FLUSH, lambda c, r: c.simple(r, cookie=0), "flush", "to no request")
    lie_to(FLUSH, lambda c, r: (c.simple(r, error=0, cookie=r.cookie ^ 1 << 40)), "flush", "to no request")


def a_second_reply_ends_the_disk():
    with folder() as d, Fake(d + "/s", hook=lambda c, r: r.cmd == FLUSH and (c.simple(r) or c.simple(r) or True)) as srv, Shell(srv.uri()) as sh:
        sh.call("flush")        # ok, or the end of the disk came first
        until(lambda: "to no request" in sh.stderr(), "the log says so")
        sh.error(5, "read", 0, 512)


def wrong_magic_ends_the_disk():
    lie_to(READ, lambda c, r: c.chunk(r, 0, magic=0x12345678), READ_CMD, "magic")
    lie_to(FLUSH, lambda c, r: c.send(bytes(64)), "flush", "magic")


def replies_of_another_style_end_the_disk():
    lie_to(READ, lambda c, r: c.simple(r, 0, bytes(8192)), READ_CMD, "simple reply to a read")
    lie_to(READ, lambda c, r: c.chunk(r, 0), READ_CMD, "not negotiated", structured=False)
    lie_to(READ, lambda c, r: c.chunk(r, 0, magic=0x6E8A278C), READ_CMD, "not negotiated")
    lie_to(FLUSH, lambda c, r: c.simple(r), "flush", "simple reply", extended=True)


def data_beyond_the_request_ends_the_disk():
    lie_to(READ, lambda c, r: c.data(r, 0, bytes(8193)), READ_CMD, "outside")
    lie_to(READ, lambda c, r: c.data(r, 8192, bytes(512)), READ_CMD, "outside")
    lie_to(READ, lambda c, r: c.data(r, 2 ** 64 - 512, bytes(1024)), READ_CMD, "outside")
    lie_to(READ, lambda c, r: c.chunk(r, 1, bytes(8), length=0xffffffff), READ_CMD, "outside")
    lie_to(READ, lambda c, r: c.chunk(r, 2, struct.pack(">QI", 4096, 8192)), READ_CMD, "outside")
    lie_to(READ, lambda c, r: c.chunk(r, 1, bytes(8), length=2 ** 63), READ_CMD, "outside", extended=True)


def chunks_of_a_wrong_length_end_the_disk():
    lie_to(READ, lambda c, r: c.chunk(r, 1, bytes(8)), READ_CMD, "without data")
    lie_to(READ, lambda c, r: c.chunk(r, 2, bytes(13)), READ_CMD, "wrong length")
    lie_to(READ, lambda c, r: c.chunk(r, 2, bytes(12)), READ_CMD, "empty hole")
    lie_to(READ, lambda c, r: c.chunk(r, 0, b"x"), READ_CMD, "empty chunk")
    lie_to(READ, lambda c, r: c.chunk(r, 0, done=False), READ_CMD, "empty chunk")
    lie_to(READ, lambda c, r: c.chunk(r, 0x8001, bytes(5)), READ_CMD, "wrong length")
    lie_to(READ, lambda c, r: c.chunk(r, 0x8001, b"\0" * 6), READ_CMD, "without an error")
    lie_to(READ, lambda c, r: c.chunk(r, 0x8001, struct.pack(">IH", 5, 100) + b"short"), READ_CMD, "longer than its chunk")
    lie_to(READ, lambda c, r: c.chunk(r, 0x8001, b"\1" * 6, length=1 << 30), READ_CMD, "wrong length")
    lie_to(READ, lambda c, r: c.chunk(r, 77), READ_CMD, "unknown type")


def data_that_comes_twice_or_is_missing_ends_the_disk():
    lie_to(READ, lambda c, r: c.data(r, 0, bytes(4096), False) or c.data(r, 2048, bytes(4096)), READ_CMD, "twice")
    lie_to(READ, lambda c, r: c.data(r, 0, bytes(4096), False) or c.chunk(r, 2, struct.pack(">QI", 4095, 4097)), READ_CMD, "twice")
    lie_to(READ, lambda c, r: c.data(r, 0, bytes(4096)), READ_CMD, "without all")
    lie_to(READ, lambda c, r: c.data(r, 0, bytes(4096), False) or c.data(r, 4608, bytes(3584)), READ_CMD, "without all")
    lie_to(READ, lambda c, r: c.chunk(r, 0), READ_CMD, "without all")
    lie_to(FLUSH, lambda c, r: c.data(r, 0, bytes(512)), "flush", "something else than a read")


def wrong_block_status_ends_the_disk():
    def status(*payload):
        return lambda c, r: [c.chunk(r, p[0], p[1], i == len(payload) - 1) for i, p in enumerate(payload)]

    cmd = "extent 0 65536"
    lie_to(STATUS, status((5, struct.pack(">III", 8, 4096, 0))), cmd, "unknown context")
    lie_to(STATUS, status((5, struct.pack(">III", 7, 0, 0))), cmd, "empty extent")
    lie_to(STATUS, status((5, struct.pack(">I", 7))), cmd, "wrong length")
    lie_to(STATUS, status((5, bytes(13))), cmd, "wrong length")
    lie_to(STATUS, status((0, b"")), cmd, "without an extent")
    lie_to(STATUS, status((5, struct.pack(">III", 7, 4096, 0)), (5, struct.pack(">III", 7, 4096, 0))), cmd, "two block states")
    lie_to(STATUS, lambda c, r: c.simple(r), cmd, "without an extent")
    lie_to(STATUS, status((6, struct.pack(">IIQQ", 7, 1, 4096, 0))), cmd, "nobody asked for")
    lie_to(STATUS, status((6, struct.pack(">IIQQ", 7, 2, 4096, 0))), cmd, "count and length", extended=True)
    lie_to(STATUS, status((5, struct.pack(">III", 7, 4096, 0))), cmd, "nobody asked for", extended=True)
    lie_to(READ, status((5, struct.pack(">III", 7, 4096, 0))), READ_CMD, "nobody asked for")


def an_extended_chunk_with_another_offset_ends_the_disk():
    lie_to(READ, lambda c, r: c.chunk(r, 1, struct.pack(">Q", 0) + bytes(8192), off=512), READ_CMD, "offset is not its request", extended=True)


def a_reply_before_the_payload_is_taken_waits_for_it():
    """The server answers a large write without having read it: the write's memory is not given back before it is sent."""
    first, payload = [], []

    class Early(Conn):
        def request(self):
            if not first:
                head = self.recv(28)
                if struct.unpack(">H", head[6:8])[0] == WRITE:
                    first.append(1)
                    cookie = struct.unpack(">Q", head[8:16])[0]
                    self.simple(Request(0, WRITE, cookie, 0, 0, None), 28)
                    time.sleep(0.3)
                    payload.append(self.recv(struct.unpack(">I", head[24:28])[0]))
                    return Conn.request(self)
            return Conn.request(self)

    import nbd_fake
    plain, nbd_fake.Conn = nbd_fake.Conn, Early
    try:
        with folder() as d, Fake(d + "/s", size=16 << 20) as srv, Shell(srv.uri()) as sh:
            sh.error(28, "write", 0, 8 << 20, "77")
            until(lambda: payload, "the server has the payload")
            check(payload[0] == b"\x77" * (8 << 20), "all of the payload was sent before the write ended")
            equal(srv.accepted, 1, "connections")
            equal(sh.ok("read", 0, 4096), "all 00", "what is read after the refused write")
            sh.ok("write", 0, 4096, "78")
            equal(sh.ok("read", 0, 4096), "all 78", "what is read")
    finally:
        nbd_fake.Conn = plain


def honest_but_odd_replies_are_taken():
    def odd(c, r):
        if r.cmd != READ or r.length != 8192:
            return False
        view = bytes(c.srv.view[r.off:r.off + r.length])
        pieces = list(range(0, 8192, 512))
        random.Random(3).shuffle(pieces)
        for p in pieces:
            c.data(r, r.off + p, view[p:p + 512], False)
        c.chunk(r, 0)
        return True

    for extended in (False, True):
        with folder() as d, Fake(d + "/s", hook=odd, extended=extended) as srv, Shell(srv.uri()) as sh:
            for i in range(16):
                sh.ok("write", i * 512, 512, "%02x" % i)
            want = sh.ok("read", 0, 8192)
            for i in range(16):
                equal(sh.ok("read", i * 512, 512), "all %02x" % i, "a sector")
            srv.hook = None
            equal(sh.ok("read", 0, 8192), want, "the same read in one piece")


def holes_and_error_chunks_are_taken():
    def hook(c, r):
        if r.cmd == READ and r.off == 0:
            c.chunk(r, 2, struct.pack(">QI", 4096, 4096), False)
            c.data(r, 0, b"\x33" * 4096)
            return True
        if r.cmd == READ and r.off == 8192:
            c.data(r, 8192, bytes(4096), False)
            c.chunk(r, 0x8002, struct.pack(">IH", 5, 3) + b"bad" + struct.pack(">Q", 12288), False)
            c.chunk(r, 0)
            return True
        if r.cmd == READ and r.off == 16384:
            c.chunk(r, 0x8fff, struct.pack(">IH", 5, 0) + b"future", True)
            return True
        return False

    with folder() as d, Fake(d + "/s", hook=hook) as srv, Shell(srv.uri()) as sh:
        check(sh.ok("read", 0, 8192).startswith("crc"), "a hole and data")
        sh.error(5, "read", 8192, 8192)
        sh.error(5, "read", 16384, 512)
        equal(sh.ok("read", 32768, 512), "all 00", "reads afterwards")


def a_read_in_too_many_pieces_fails_alone():
    def hook(c, r):
        if r.cmd != READ or r.length != 65536:
            return False
        for p in list(range(0, 65536, 1024)) + list(range(512, 65536, 1024)):
            c.data(r, r.off + p, bytes(512), False)
        c.chunk(r, 0)
        return True

    with folder() as d, Fake(d + "/s", hook=hook) as srv, Shell(srv.uri()) as sh:
        sh.error(5, "read", 0, 65536)
        equal(sh.ok("read", 0, 512), "all 00", "reads afterwards")


def server_errors_become_errno():
    number = [0]
    with folder() as d, Fake(d + "/s", hook=lambda c, r: bool(number[0]) and (c.reply(r, number[0]) or True)) as srv, Shell(srv.uri()) as sh:
        for nbd, want in ((28, 28), (12, 12), (1, 30), (22, 22), (9999, 5), (75, 5), (95, 5)):
            number[0] = nbd
            sh.error(want, "write", 0, 512, "01")
        for nbd, want in ((5, 5), (1, 5), (22, 22), (75, 5)):
            number[0] = nbd
            sh.error(want, "read", 0, 512)
        number[0] = 95
        sh.error(95, "zero", 0, 4096, "fast")
        number[0] = 0
        sh.ok("write", 0, 512, "01")
        sh.ok("flush")
        number[0] = 5
        sh.error(5, "flush")
        number[0] = 0
        sh.error(5, "flush")        # sticky
        sh.error(5, "write", 0, 512, "01")
        equal(sh.ok("read", 0, 512), "all 01", "reads go on")


def a_trim_that_is_too_long_is_cut():
    def hook(c, r):
        if r.cmd in (TRIM, ZERO) and r.length > 1 << 20:
            c.reply(r, 75)
            return True
        return False

    with folder() as d, Fake(d + "/s", hook=hook, size=8 << 20, block=(512, 4096, 1 << 20)) as srv, Shell(srv.uri()) as sh:
        sh.ok("write", 0, 8 << 20, "99")
        sh.ok("zero", 0, 8 << 20)
        equal(sh.ok("read", 0, 8 << 20), "all 00", "what was zeroed")
        sh.ok("discard", 0, 8 << 20)
        equal(srv.count["trim"], 8, "trims")


def refused(words, mode="", **kw):
    with folder() as d, Fake(d + "/s", **kw) as srv:
        sh = Shell(srv.uri(), mode, fails=True)
        sh.proc.stdin.close()
        sh.proc.wait(TIMEOUT)
        check(words in sh.opened, "the message has %r: %r" % (words, sh.opened))


def a_bad_greeting_or_export_is_refused_with_the_reason():
    def hello(data):
        def greet(conn):
            conn.send(data)
            raise Gone()
        return greet

    refused("not an NBD server", greet=hello(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"))
    refused("oldstyle", greet=hello(struct.pack(">QQQI", 0x4E42444D41474943, 0x00420281861253, 1 << 20, 1) + bytes(124)))
    refused("closed the connection", greet=hello(b"NBDM"))
    refused("closed the connection", greet=hello(struct.pack(">QQH", 0x4E42444D41474943, 0x49484156454F5054, 3)))
    refused("flags are not flags", flags=0)
    refused("beyond all bounds", flags=ALL, size=0, greet=size_of(2 ** 64 - 1))
    refused("minimum block size", block=(3, 4096, 1 << 25))
    refused("minimum block size", block=(1 << 17, 1 << 17, 1 << 25))
    refused("preferred block size", block=(512, 256, 1 << 25))
    refused("preferred block size", block=(512, 0, 1 << 25))
    refused("maximum payload", block=(512, 4096, 1024))
    refused("read-only", flags=ALL | RO)
    refused("neither flush nor FUA", mode="log", flags=HAS)


def size_of(n):
    def greet(conn):
        conn.srv.size = n
    return greet


def options_answered_wrongly_are_refused():
    def rogue(answer, for_option):
        class Rogue(Conn):
            def opt(self, option, kind, data=b""):
                if option == for_option:
                    self.send(answer(option, kind, data))
                    raise Gone() if option == 7 else None or Gone()
                Conn.opt(self, option, kind, data)
        return Rogue

    import nbd_fake
    plain = nbd_fake.Conn
    magic = 0x3E889045565A9
    pack = lambda m, o, k, d, n=None: struct.pack(">QIII", m, o, k, len(d) if n is None else n) + d
    cases = [
        (7, lambda o, k, d: pack(magic + 1, o, k, d), "wrong magic"),
        (7, lambda o, k, d: pack(magic, 6, k, d), "another option"),
        (7, lambda o, k, d: pack(magic, o, 1, b""), "without having told"),
        (7, lambda o, k, d: pack(magic, o, 3, b"\0\0" + bytes(9)), "wrong length"),
        (7, lambda o, k, d: pack(magic, o, 3, b"\0"), "too short"),
        (7, lambda o, k, d: pack(magic, o, 3, b"\0\3" + bytes(11)), "wrong length"),
        (7, lambda o, k, d: pack(magic, o, 3, b"", 1 << 31), "too long"),
        (7, lambda o, k, d: pack(magic, o, 2, b""), "another kind"),
        (7, lambda o, k, d: pack(magic, o, 3, b"\0\7x") * 1000, "too many"),
        (7, lambda o, k, d: pack(magic, o, ERR + 6, b"no \x1b[31m such"), "no export named"),
        (7, lambda o, k, d: pack(magic, o, ERR + 5, b""), "TLS"),
        (7, lambda o, k, d: pack(magic, o, ERR + 2, b""), "does not let"),
        (8, lambda o, k, d: pack(magic, o, 3, b""), "another kind"),
        (10, lambda o, k, d: pack(magic, o, 4, bytes(19)) * 1000, "too many"),
    ]
    try:
        for option, answer, words in cases:
            nbd_fake.Conn = rogue(answer, option)
            refused(words)
    finally:
        nbd_fake.Conn = plain


def a_server_that_says_nothing_is_given_up():
    """The handshake's bound is 10 s; it is cut short here by ending the process, which must not hang."""
    with folder() as d, Fake(d + "/s", greet=lambda c: time.sleep(20)) as srv:
        start = time.monotonic()
        sh = Shell(srv.uri(), fails=True)
        check(9 < time.monotonic() - start < 15, "the handshake is bounded")
        check("did not finish the handshake" in sh.opened, "the message: " + sh.opened)
        sh.proc.stdin.close()
        sh.proc.wait(TIMEOUT)


if __name__ == "__main__":
    sys.exit(run_tests([replies_to_nobody_end_the_disk, a_second_reply_ends_the_disk, wrong_magic_ends_the_disk, replies_of_another_style_end_the_disk,
               data_beyond_the_request_ends_the_disk, chunks_of_a_wrong_length_end_the_disk, data_that_comes_twice_or_is_missing_ends_the_disk,
               wrong_block_status_ends_the_disk, an_extended_chunk_with_another_offset_ends_the_disk,
               a_reply_before_the_payload_is_taken_waits_for_it, honest_but_odd_replies_are_taken, holes_and_error_chunks_are_taken,
               a_read_in_too_many_pieces_fails_alone, server_errors_become_errno, a_trim_that_is_too_long_is_cut,
               a_bad_greeting_or_export_is_refused_with_the_reason, options_answered_wrongly_are_refused, a_server_that_says_nothing_is_given_up]))
