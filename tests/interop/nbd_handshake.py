#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The handshake, byte by byte: what each option answers, and what ends the connection."""
import struct

from nbd_lib import *


def an_unknown_client_flag_ends_the_connection():
    for flags in (4, 0x80000000, 7):
        with Raw(srv, flags) as c:
            check(c.closed(), "flags %#x" % flags)


def a_wrong_option_magic_ends_the_connection():
    with Raw(srv) as c:
        c.send(struct.pack(">QII", OPT_MAGIC ^ 1, GO, 0))
        check(c.closed(), "wrong magic")


def without_fixed_newstyle_only_export_name_is_answered():
    with Raw(srv, 0) as c:
        c.option(LIST)
        check(c.closed(), "LIST without the fixed flag")
    with Raw(srv, 0) as c:
        c.option(EXPORT_NAME)
        size, flags, pad = struct.unpack(">QH124s", c.recv(134))
        equal((size, pad), (SIZE, bytes(124)), "size and padding")


def no_zeroes_leaves_the_padding_out():
    with Raw(srv, 3) as c:
        c.option(EXPORT_NAME, b"a")
        size, flags = struct.unpack(">QH", c.recv(10))
        equal(size, SIZE, "size")
        c.request(READ, 0, 512)
        equal(struct.unpack(">IIQ", c.recv(16)), (SIMPLE_MAGIC, 0, 1), "a simple reply")
        equal(c.recv(512), bytes(512), "data")


def export_name_of_nothing_ends_the_connection():
    for name in (b"nope", b"a\0", b"x" * 5000, b"x" * 70000):
        with Raw(srv) as c:
            c.option(EXPORT_NAME, name)
            check(c.closed(), "name of %d bytes" % len(name))


def export_name_after_extended_headers_ends_the_connection():
    with Raw(srv) as c:
        c.ask(EXTENDED)
        c.option(EXPORT_NAME)
        check(c.closed(), "EXPORT_NAME with extended headers")


def an_unknown_option_is_unsupported_and_skipped():
    with Raw(srv) as c:
        for opt in (0, 4, 12, 99, 0x7FFFFFFF):
            equal(c.ask(opt, b"x" * 1000)[0][0], UNSUP, "option %d" % opt)
        equal(c.ask(GO, go_data())[-1][0], ACK, "GO afterwards")


def starttls_is_refused_by_policy():
    with Raw(srv) as c:
        equal(c.ask(STARTTLS)[0][0], POLICY, "STARTTLS")
        equal(c.ask(STARTTLS, b"x")[0][0], INVALID, "STARTTLS with data")
        equal(c.ask(GO, go_data())[-1][0], ACK, "GO afterwards")


def abort_is_acknowledged():
    with Raw(srv) as c:
        equal(c.ask(ABORT)[0][0], ACK, "ABORT")
        check(c.closed(), "after ABORT")
    with Raw(srv) as c:
        equal(c.ask(ABORT, b"data is ignored")[0][0], ACK, "ABORT with data")


def list_names_every_export():
    with Raw(srv) as c:
        replies = c.ask(LIST)
        names = [d[4:4 + struct.unpack(">I", d[:4])[0]] for k, d in replies if k == SERVER]
        equal(names, [b"a", b"b"], "names")
        equal(replies[-1], (ACK, b""), "the last reply")
        equal(c.ask(LIST, b"x")[0][0], INVALID, "LIST with data")


def go_and_info_with_wrong_lengths_are_invalid():
    bad = [b"", b"\0\0\0\0", b"\0\0\0\0\0", struct.pack(">I", 1) + b"\0\0", struct.pack(">I", 0xFFFFFFFF) + b"\0\0",
           go_data(b"a") + b"x", go_data(b"a", (1, 2))[:-1], go_data() + b"\0\0", struct.pack(">IH", 0, 0xFFFF)]
    with Raw(srv) as c:
        for opt in (INFO, GO):
            for data in bad:
                equal(c.ask(opt, data)[-1][0], INVALID, "%d %r" % (opt, data))
        equal(c.ask(GO, go_data(b"n" * 5000))[-1][0], TOO_BIG, "a name of 5000 bytes")
        equal(c.ask(GO, go_data(b"nope"))[-1][0], UNKNOWN, "an unknown name")
        equal(c.ask(GO, go_data(b"b"))[-1][0], ACK, "GO afterwards")


def info_tells_size_blocks_and_name():
    with Raw(srv) as c:
        replies = c.ask(INFO, go_data(b"", (0, 1, 2, 3, 77)))
        info = {struct.unpack(">H", d[:2])[0]: d[2:] for k, d in replies if k == REP_INFO}
        equal(struct.unpack(">Q", info[0][:8])[0], SIZE, "size")
        equal(info[1], b"a", "canonical name of the default export")
        low, preferred, most = struct.unpack(">III", info[3])
        equal((low, most), (1, 32 << 20), "block sizes")
        check(preferred >= 4096 and preferred & (preferred - 1) == 0, "preferred block %d" % preferred)
        again = c.ask(GO, go_data(b"", (0, 1, 2, 3, 77)))
        equal(again, [(k, d) for k, d in replies], "GO after INFO")


def an_option_that_is_too_long_is_skipped_or_ends_the_connection():
    with Raw(srv) as c:
        equal(c.ask(SET_META, b"x" * 100000)[0][0], TOO_BIG, "100000 bytes")
        equal(c.ask(GO, go_data())[-1][0], ACK, "GO afterwards")
    with Raw(srv) as c:
        c.option(GO, b"", length=0xFFFFFFFF)
        check(c.closed(), "4 GiB")


def meta_contexts_need_structured_replies():
    with Raw(srv) as c:
        equal(c.ask(SET_META, meta_data(b"", b"base:allocation"))[0][0], INVALID, "SET before STRUCTURED_REPLY")
        equal(c.ask(LIST_META, meta_data())[0][0], INVALID, "LIST before STRUCTURED_REPLY")
        c.ask(STRUCTURED)
        equal(c.ask(LIST_META, meta_data())[0], (META, b"\0\0\0\0base:allocation"), "LIST without a query")
        equal(c.ask(LIST_META, meta_data(b"b", b"base:"))[0][0], META, "LIST of a name space")
        equal(c.ask(LIST_META, meta_data(b"", b"qemu:dirty"))[0][0], ACK, "LIST of another name space")
        equal(c.ask(SET_META, meta_data(b"", b"base:"))[0][0], ACK, "SET ignores a wildcard")
        equal(c.ask(SET_META, meta_data(b"", b"x-a:b", b"base:allocation", b"base:nope"))[0][0], META, "SET")
        equal(c.ask(SET_META, meta_data(b"nope", b"base:allocation"))[0][0], UNKNOWN, "SET of an unknown export")


def malformed_meta_queries_are_invalid():
    good = meta_data(b"a", b"base:allocation")
    with Raw(srv) as c:
        c.ask(STRUCTURED)
        for data in (b"", good[:-1], good + b"x", struct.pack(">I", 999) + good[4:], b"\0\0\0\0\xff\xff\xff\xff",
                     struct.pack(">III", 0, 1, 0xFFFFFFFF), struct.pack(">II", 0xFFFFFFFC, 0)):
            equal(c.ask(SET_META, data)[-1][0], INVALID, repr(data))


def a_failed_or_foreign_meta_context_is_not_selected():
    for last in ([meta_data(b"", b"base:allocation"), b""], [meta_data(b"b", b"base:allocation")],
                 [meta_data(b"", b"base:allocation"), meta_data()]):
        with Raw(srv) as c:
            c.ask(STRUCTURED)
            for data in last:
                c.ask(SET_META, data)
            c.structured = True
            equal(c.ask(GO, go_data(b"a"))[-1][0], ACK, "GO")
            equal(c.do(STATUS, 0, 4096), EINVAL, "block status after %r" % last)


def structured_and_extended_take_no_data_and_are_ordered():
    with Raw(srv) as c:
        equal(c.ask(STRUCTURED, b"x")[0][0], INVALID, "STRUCTURED_REPLY with data")
        equal(c.ask(EXTENDED, b"x")[0][0], INVALID, "EXTENDED_HEADERS with data")
        equal(c.ask(STRUCTURED)[0][0], ACK, "STRUCTURED_REPLY")
        equal(c.ask(STRUCTURED)[0][0], ACK, "STRUCTURED_REPLY again")
        equal(c.ask(EXTENDED)[0][0], ACK, "EXTENDED_HEADERS")
        equal(c.ask(STRUCTURED)[0][0], EXT_REQD, "STRUCTURED_REPLY after EXTENDED_HEADERS")


def many_options_are_answered_and_then_end_the_connection():
    with Raw(srv) as c:
        try:
            for i in range(2000):
                c.ask(99)
        except Closed:
            check(i > 100, "100 options are allowed")
            return
        check(False, "2000 options end the connection")


def options_in_one_piece_are_answered_one_by_one():
    with Raw(srv) as c:
        piece = struct.pack(">QII", OPT_MAGIC, LIST, 0) * 3 + struct.pack(">QII", OPT_MAGIC, GO, 6) + go_data()
        c.send(piece + struct.pack(">IHHQQI", REQUEST_MAGIC, 0, READ, 7, 0, 4))
        for _ in range(3):
            while c.reply(LIST)[0] != ACK:
                pass
        while c.reply(GO)[0] != ACK:
            pass
        equal(c.recv(20), struct.pack(">IIQ", SIMPLE_MAGIC, 0, 7) + bytes(4), "a read that was sent with GO")


SIZE = 16 << 20
with Server("mem:16M", "mem:8M", "--name", "a", "--name", "b") as srv:
    sys.exit(run_tests(tests_of(globals())))
