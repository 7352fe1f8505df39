#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Who may connect, to what, how often and for how long; and that ten thousand who come and go leave nothing behind."""
import grp
import json
import pwd

from nbd_lib import *

need("nbdinfo")


def started(*args):
    """Exit status and what is said by a weir that should not start."""
    with folder() as d:
        args = [a.replace("DIR", d) for a in args]
        p = subprocess.run([WEIR, "serve", "mem:1M", *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT)
        return p.returncode, p.stderr


def refuses(status, words, *args):
    rc, text = started(*args)
    check(rc == status and words in text and len([x for x in text.splitlines() if x.startswith("weir serve:")]) == 1,
          "%s: exit %d: %s" % (args, rc, text))


def as_nobody(fn):
    """What fn() returns in a child without any rights."""
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os._exit(1 if fn() else 0)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def can_connect(path):
    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.connect(path)
            return True
        except PermissionError:
            return False


def a_socket_has_the_mode_owner_and_group_that_it_is_given():
    with folder() as d:
        a, b = os.path.join(d, "a"), os.path.join(d, "b")
        os.chmod(d, 0o755)
        with Server(nbd="unix:%s,mode=0660" % a) as s:
            equal(os.stat(a).st_mode & 0o777, 0o660, "the mode")
        if os.geteuid():
            return
        user = pwd.getpwuid(65534).pw_name
        with Server("mem:1M", "--nbd", "unix:%s,mode=600,owner=%s,group=%s" % (b, user, grp.getgrgid(65534).gr_name), "--vhost-user", a + ",mode=660,group=65534",
                    nbd="unix:%s,mode=600" % os.path.join(d, "c")) as s:
            for path, want in ((a, (0o660, 0, 65534)), (b, (0o600, 65534, 65534)), (os.path.join(d, "c"), (0o600, 0, 0))):
                st = os.stat(path)
                equal((st.st_mode & 0o777, st.st_uid, st.st_gid), want, path)
            equal([as_nobody(lambda: can_connect(os.path.join(d, x))) for x in "abc"], [True, True, False], "what nobody can connect to")


def what_is_no_mode_owner_group_or_export_is_refused():
    for option, words in (("mode=999", "mode is octal"), ("mode=0", "mode is octal"), ("owner=no-such-user", "no user 'no-such-user'"),
                          ("group=no-such-group", "no group 'no-such-group'"), ("colour=red", "colour"), ("mode", "mode is octal")):
        refuses(2, words, "--nbd", "unix:DIR/s," + option)
    refuses(2, "mode", "--nbd", "localhost:0,mode=0660")
    refuses(1, "no volume 'x'", "--nbd", "unix:DIR/s,export=x")
    refuses(1, "no volume 'x'", "--nbd", "unix:DIR/s", "--allow-export", "x")


def beyond_the_loopback_only_with_tls_or_on_purpose():
    for address in ("*:0", "0.0.0.0:0", "[::]:0"):
        refuses(1, "--insecure", "--nbd", address)
    for address, more in (("0", ()), ("127.0.0.1:0", ()), ("localhost:0", ()), ("*:0", ("--insecure",))):
        with Server("mem:1M", *more, nbd=address):
            pass


def an_address_may_be_for_one_export_only():
    with folder() as d:
        mine = os.path.join(d, "mine")
        with Server("mem:1M", "mem:2M", "--name", "a", "--name", "b", "--nbd", "unix:%s,export=b" % mine) as s:
            with Raw(s) as c:
                equal(len(c.ask(LIST)), 3, "all exports, and the end")
            s.sock = mine
            with Raw(s) as c:
                replies = c.ask(LIST)
                equal([r[1][4:] for r in replies[:-1]], [b"b"], "what is listed")
                for opt in (INFO, GO):
                    equal(c.ask(opt, go_data(b"a"))[-1][0], UNKNOWN, "the other one")
                equal(c.ask(STRUCTURED)[-1][0], ACK, "structured replies")
                equal(c.ask(SET_META, meta_data(b"a", b"base:allocation"))[-1][0], UNKNOWN, "the other one's contexts")
                equal(c.negotiate().size, 2 << 20, "the default export")
            with Raw(s) as c:
                c.option(EXPORT_NAME, b"a")
                check(c.closed(), "the other one by EXPORT_NAME")


def an_export_that_is_not_allowed_is_not_there():
    with Server("mem:1M", "mem:2M", "--name", "a", "--name", "b", "--allow-export", "b") as s, Raw(s) as c:
        equal([r[1][4:] for r in c.ask(LIST)[:-1]], [b"b"], "what is listed")
        equal(c.ask(GO, go_data(b"a"))[-1][0], UNKNOWN, "the other one")
        equal(c.negotiate().size, 2 << 20, "the default export")


def a_client_has_so_many_connections():
    with Server("mem:1M", "--client-connections", "2") as s:
        a, b = Raw(s).negotiate(), Raw(s).negotiate()
        with Raw(s, hello=False) as c:
            check(c.closed(), "the third one is refused")
        a.s.close()
        end = time.monotonic() + TIMEOUT
        while True:
            try:
                with Raw(s) as c:
                    equal(c.negotiate().do(FLUSH), 0, "a flush on a new one")
                break
            except Closed:
                check(time.monotonic() < end, "there is room for a new one")
        equal(b.do(FLUSH), 0, "a flush on an old one")


def more_requests_than_a_client_may_have_in_flight_wait():
    with Server("mem:1M", "--client-requests", "2") as s, Raw(s) as c:
        c.negotiate()
        for i in range(60):
            c.request(FLUSH, cookie=i)
        equal(sorted(c.chunk()[2] for _ in range(60)), list(range(60)), "replies")
    with folder() as d, Server("delay:read=1h:mem:1M", "--client-requests", "2", "--control", d + "/c") as s, Raw(s) as c:
        c.negotiate()
        for cmd in (READ, READ, FLUSH):
            c.request(cmd, 0, 512 if cmd == READ else 0)
        end = time.monotonic() + TIMEOUT
        while connections(d + "/c")[0]["in_flight"] < 2:
            check(time.monotonic() < end, "two are in flight")
            time.sleep(0.005)
        # Each of these takes the server more turns than the third request would.
        for _ in range(20):
            equal(connections(d + "/c")[0]["in_flight"], 2, "requests in flight")
        with Raw(s) as other:
            equal(other.negotiate().do(FLUSH), 0, "a flush of another client")
        c.s.setblocking(False)
        try:
            raise AssertionError("the third request is answered: %r" % c.s.recv(100))
        except BlockingIOError:
            pass
        s.kill()


def connections(control):
    with socket.socket(socket.AF_UNIX) as c:
        c.connect(control)
        c.sendall(b'{"command": "status"}\n')
        return json.loads(c.makefile().readline())["result"]["nbd"]["connections"]


def who_is_idle_for_too_long_is_cut_off():
    with Server("mem:1M", "--client-idle", "500ms") as s, Raw(s) as idle, Raw(s) as busy:
        idle.negotiate()
        busy.negotiate()
        idle.s.setblocking(False)
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            equal(busy.do(FLUSH), 0, "a flush of the busy one")
            try:
                if not idle.s.recv(1):
                    break
            except BlockingIOError:
                pass
            time.sleep(0.02)
        check(time.monotonic() < end, "the idle one is cut off")
        equal(busy.do(FLUSH), 0, "a flush afterwards")
        check("--client-idle" in s.text(), s.text())


GREET = struct.pack(">I", 3)
ASK = struct.pack(">QII", OPT_MAGIC, GO, 6) + go_data()
REQUEST = struct.pack(">IHHQQI", REQUEST_MAGIC, 0, READ, 1, 0, 512)
DISC_REQUEST = struct.pack(">IHHQQI", REQUEST_MAGIC, 0, DISC, 1, 0, 0)


def come_and_go(path, port, i):
    """One of ten ways."""
    kind = i % 10
    if kind < 7:
        s = socket.socket(socket.AF_UNIX)
        s.connect(path)
    else:
        s = socket.create_connection(("127.0.0.1", port))
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))    # a reset
    with s:
        if kind in (2, 7):
            s.send(GREET[:2])
        elif kind in (3, 8):
            s.send(GREET + ASK[:20])
        elif kind == 4:
            s.send(GREET + ASK + REQUEST)
        elif kind in (5, 9):
            s.send(GREET + ASK + REQUEST * 20 + REQUEST[:9])
            s.recv(18)
        elif kind == 6:
            s.send(GREET + ASK + DISC_REQUEST)
            while s.recv(4096):
                pass


def ten_thousand_come_and_go_without_a_trace():
    with Server("mem:1M", "--nbd", "0") as s:
        port = int(re.search(r"NBD on 127\.0\.0\.1:(\d+)", s.text()).group(1))
        fds = s.fds()
        for i in range(2000):
            come_and_go(s.sock, port, i)
        s.left_none(fds)
        rss = s.rss()
        for i in range(8000):
            come_and_go(s.sock, port, i)
        s.left_none(fds)
        check(s.rss() < rss + (1 << 20), "memory grows by less than 1 MiB: from %d to %d" % (rss, s.rss()))
        with Raw(s) as c:
            equal(c.negotiate().do(FLUSH), 0, "a flush")


def a_file_is_opened_and_closed_ten_thousand_times_without_a_trace():
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        print("only root can mount here, where there is FUSE: not tried")
        return
    with folder() as d:
        path = os.path.join(d, "f")
        with Server("mem:1M", "--fuse", path) as s:
            def many(n):
                for i in range(n):
                    fd = os.open(path, os.O_RDWR)
                    if i % 10 == 0:
                        os.pwrite(fd, b"x" * 4096, i % 256 * 4096)
                    os.close(fd)

            many(500)
            fds, rss = s.fds(), s.rss()
            many(10000)
            equal(s.fds(), fds, "descriptors")
            check(s.rss() < rss + (1 << 20), "memory grows by less than 1 MiB: from %d to %d" % (rss, s.rss()))


if __name__ == "__main__":
    import re
    sys.exit(run_tests(tests_of(globals())))
