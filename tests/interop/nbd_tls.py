#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""NBD over TLS: who gets in, who does not, and what a stream can do to the server."""
import atexit
import contextlib
import hashlib
import json
import re
import tempfile
import threading

from tls_lib import *

need("nbdinfo", "nbdcopy", "qemu-img", "gnutls-cli")

PKI_DIR = tempfile.mkdtemp(prefix="weir-pki-")
atexit.register(shutil.rmtree, PKI_DIR, True)
if "without GnuTLS" in subprocess.run([WEIR, "serve", "null:1M", "--nbd", "unix:%s/s" % PKI_DIR, "--tls-creds", PKI_DIR],
                                      stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT).stderr:
    skip("this weir was built without GnuTLS")
pki = Pki(PKI_DIR)
SERVER, CLIENT = pki.file("server"), pki.file("client")
KEY, OTHER_KEY = "00112233445566778899aabbccddeeff" * 2, "ff" * 32


def run(*args, ok=True, text=None):
    p = subprocess.run(args, input=text, stdin=None if text else subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60)
    check(ok is None or (p.returncode == 0) == ok, "%s: exit %d: %s%s" % (" ".join(args), p.returncode, p.stdout, p.stderr))
    return p.stdout + p.stderr


def log_says(server, reason, after=0):
    end = time.monotonic() + TIMEOUT
    while not re.search(reason, server.text()[after:]):
        check(time.monotonic() < end, "the log says '%s': %s" % (reason, server.text()[after:]))
        time.sleep(0.005)


def refused(server, uri, reason):
    """nbdinfo does not get in, and the server says why."""
    run("nbdinfo", uri, ok=False)
    log_says(server, reason)
    server.alive()


def stock_clients_read_back_what_they_wrote():
    with folder() as d, TlsServer(SERVER) as s:
        a, b = os.path.join(d, "a"), os.path.join(d, "b")
        with open(a, "wb") as f:
            f.write(os.urandom(3 << 20) + bytes(1 << 20))
        info = json.loads(run("nbdinfo", "--json", s.tls_uri(CLIENT)))
        equal((info["TLS"], info["exports"][0]["export-size"]), (True, 64 << 20), "nbdinfo")
        run("nbdcopy", "--connections=4", "--flush", a, s.tls_uri(CLIENT))
        creds = ["--object", "tls-creds-x509,id=t,dir=%s,endpoint=client" % CLIENT, "--image-opts"]
        image = "driver=nbd,server.type=unix,server.path=%s,tls-creds=t,tls-hostname=localhost" % s.sock
        run("qemu-img", "dd", *creds, "bs=1M", "count=4", "if=" + image, "of=" + b)
        run("cmp", a, b)


def only_the_right_certificate_gets_in():
    pki.leaf("stranger", "client", "other")
    pki.leaf("selfmade", "client", None)
    pki.leaf("expired", "client", "ca", ["activation_date = 2020-01-01 00:00:00", "expiration_date = 2020-02-01 00:00:00"])
    pki.leaf("early", "client", "ca", ["activation_date = 2090-01-01 00:00:00", "expiration_date = 2099-02-01 00:00:00"])
    pki.leaf("revoked", "client", "ca", serial=99)
    with TlsServer(pki.revoke("revoked", "with-crl")) as s:
        for name, reason in (("stranger", "issuer is unknown"), ("selfmade", "issuer is unknown"), ("expired", "expired"),
                             ("early", "not yet valid"), ("revoked", "revoked"), ("server", "purpose"), (None, "equired|No certificate")):
            # The two versions check in different places of the handshake.
            for version in ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3:
                before = len(s.text())
                check(not gets_in(s, name, version), "%s gets in" % name)
                log_says(s, reason, before)
            if name:
                run("nbdinfo", s.tls_uri(pki.folder("as-" + name, "client", name)), ok=False)
        refused(s, s.tls_uri(pki.folder("none", "client", "")), "ertificate is required")
        check(gets_in(s, "client", ssl.TLSVersion.TLSv1_2), "the right one, TLS 1.2")
        run("nbdinfo", s.tls_uri(CLIENT))
    # Another one: of twenty refusals it tells no more for a while.
    with TlsServer(SERVER) as s:
        for name, reason in (("stranger", "issuer is unknown"), ("expired", "expired"), (None, "equired")):
            stock_programs_are_refused(s, name, reason)


def stock_programs_are_refused(s, name, reason):
    """With the certificate of that name, or with none. Some do not even send one that the server's CA has not signed."""
    creds = pki.folder("as-%s" % name, "client", name or "")
    ours = ["--x509certfile", pki.file("%s-cert.pem" % name), "--x509keyfile", pki.file("key.pem")] if name else []
    with folder() as d, Relay(s) as port:
        for args in (["nbdcopy", s.tls_uri(creds), d + "/copy"],
                     # It would find out by itself.
                     ["qemu-img", "info", "--object", "tls-creds-x509,id=t,dir=%s,endpoint=client,sanity-check=off" % creds, "--image-opts",
                      "driver=nbd,server.type=unix,server.path=%s,tls-creds=t,tls-hostname=localhost" % s.sock],
                     # In TLS 1.3 a client is done before the server has looked at its certificate.
                     ["gnutls-cli", "-p", str(port), "--x509cafile", pki.file("ca-cert.pem"), *ours, "--priority", "NORMAL:-VERS-ALL:+VERS-TLS1.2", "localhost"]):
            before = len(s.text())
            out = run(*args, ok=False)
            check("Handshake was completed" not in out, out)
            log_says(s, reason + "|equired|No certificate", before)


def gets_in(server, name, version):
    with TlsRaw(server) as c:
        try:
            c.starttls(context(pki, name, version=version)).negotiate()
            return True
        except (ssl.SSLError, OSError, Closed):
            return False


def without_verify_peer_anybody_gets_in_and_is_still_encrypted():
    with TlsServer(SERVER, "--tls-verify-peer", "off") as s:
        run("nbdinfo", s.tls_uri(pki.folder("none", "client", "")))
        run("nbdinfo", s.uri(), ok=False)


def a_client_that_does_not_trust_the_server_goes_away():
    with TlsServer(SERVER) as s:
        run("qemu-img", "info", "--object", "tls-creds-x509,id=t,dir=%s,endpoint=client" % pki.folder("distrust", "client", "client", "other"), "--image-opts",
            "driver=nbd,server.type=unix,server.path=%s,tls-creds=t,tls-hostname=localhost" % s.sock, ok=False)
        run("nbdinfo", s.tls_uri(CLIENT))


def a_pre_shared_key_is_enough_if_it_is_the_right_one():
    keys, wrong = pki.psk("psk", alice=KEY, bob=OTHER_KEY), pki.psk("wrong", alice=OTHER_KEY, eve=KEY)
    with TlsServer(keys) as s:
        run("nbdinfo", s.tls_uri(psk=keys, user="alice"))
        run("nbdinfo", s.tls_uri(psk=keys, user="bob"))
        refused(s, s.tls_uri(psk=wrong, user="alice"), "TLS: ")
        refused(s, s.tls_uri(psk=wrong, user="eve"), "TLS: ")
        qemu = ["qemu-img", "info", "--image-opts", "driver=nbd,server.type=unix,server.path=%s,tls-creds=t" % s.sock, "--object"]
        run(*qemu, "tls-creds-psk,id=t,dir=%s,username=bob,endpoint=client" % keys)
        run(*qemu, "tls-creds-psk,id=t,dir=%s,username=alice,endpoint=client" % wrong, ok=False)
        run("nbdinfo", s.tls_uri(CLIENT), ok=False)


def both_kinds_at_once():
    both = pki.folder("both", "server", "server")
    pki.psk("both", alice=KEY)
    pki.psk("wrong", alice=OTHER_KEY)
    with TlsServer(both) as s:
        run("nbdinfo", s.tls_uri(psk=both, user="alice"))
        run("nbdinfo", s.tls_uri(CLIENT))
        refused(s, s.tls_uri(pki.folder("none", "client", "")), "[Nn]o certificate|[Cc]ertificate is required")
        # A key is no way around the certificate, in TLS 1.2 as in 1.3.
        for version in "1.2", "1.3":
            for folder_, good in (("both", True), ("wrong", False)):
                run("qemu-img", "info", "--image-opts", "driver=nbd,server.type=unix,server.path=%s,tls-creds=t" % s.sock, "--object",
                    "tls-creds-psk,id=t,username=alice,endpoint=client,dir=%s,priority=NORMAL:-VERS-ALL:+VERS-TLS%s" % (pki.file(folder_), version), ok=good)


def required_means_that_nothing_is_said_before():
    with TlsServer(SERVER) as s:
        with Raw(s) as c:
            for opt, data in ((LIST, b""), (INFO, go_data()), (GO, go_data()), (STRUCTURED, b""), (EXTENDED, b""), (SET_META, meta_data()),
                              (LIST_META, meta_data()), (77, b""), (LIST, bytes(100000))):
                equal(c.ask(opt, data)[-1][0], ERR + 5, "the reply to option %d" % opt)
            equal(c.ask(STARTTLS, b"x")[-1][0], INVALID, "STARTTLS with data")
            equal(c.ask(ABORT)[-1][0], ACK, "the reply to ABORT")
        for flags in (3, 0):
            with Raw(s, flags=flags) as c:
                c.option(EXPORT_NAME)
                check(c.closed(), "EXPORT_NAME ends the connection")
        run("qemu-img", "info", s.uri(), ok=False)
        log_says(s, "does not use TLS")


def allowed_means_either_way():
    with TlsServer(SERVER, "--tls", "allow") as s:
        run("nbdinfo", s.uri())
        run("nbdinfo", s.tls_uri(CLIENT))
        with Raw(s) as c:
            equal(c.negotiate().do(WRITE, 0, 512, data=bytes(512)), 0, "a plain write")


def a_server_without_tls_says_so():
    with Server() as s, Raw(s) as c:
        equal(c.ask(STARTTLS)[-1][0], POLICY, "the reply to STARTTLS")
        equal(c.negotiate().do(FLUSH), 0, "a flush")
        run("nbdinfo", "nbds" + s.uri()[3:] + "&tls-certificates=" + CLIENT, ok=False)


def what_was_negotiated_in_the_plain_is_forgotten():
    with TlsServer(SERVER, "--tls", "allow") as s:
        with TlsRaw(s) as c:
            equal(c.ask(STRUCTURED)[-1][0], ACK, "STRUCTURED_REPLY")
            equal(len(c.ask(SET_META, meta_data(b"", b"base:allocation"))), 2, "SET_META_CONTEXT")
            c.starttls(context(pki))
            equal(c.ask(SET_META, meta_data(b"", b"base:allocation"))[-1][0], INVALID, "contexts without structured replies")
            equal(c.ask(STARTTLS)[-1][0], INVALID, "a second STARTTLS")
            c.negotiate()
            c.request(READ, 0, 16)
            equal(c.chunk(), (0, None, 1, None), "a simple reply")
            equal(c.recv(16), bytes(16), "the data")
            equal(c.do(STATUS, 0, 512), EINVAL, "block status")
        with TlsRaw(s) as c:
            equal(c.ask(EXTENDED)[-1][0], ACK, "EXTENDED_HEADERS")
            c.starttls(context(pki))
            equal(c.negotiate(structured=True).do(FLUSH), 0, "a flush with structured replies")


def bytes_slipped_in_behind_starttls_end_the_connection():
    with TlsServer(SERVER, "--tls", "allow") as s:
        starttls = struct.pack(">QII", OPT_MAGIC, STARTTLS, 0)
        with Raw(s) as c:
            c.send(starttls + struct.pack(">QII", OPT_MAGIC, STRUCTURED, 0))
            check(c.closed(), "an option in the same segment")
        with Raw(s) as c:
            c.send(starttls + b"\x16")
            check(c.closed(), "a byte in the same segment")
        log_says(s, "before STARTTLS was answered")
        with Raw(s) as c:
            equal(c.ask(STARTTLS)[-1][0], ACK, "the reply to STARTTLS")
            c.option(LIST)
            # A TLS alert perhaps, but no reply of NBD.
            answer = b""
            try:
                while part := c.s.recv(4096):
                    answer += part
            except ConnectionResetError:
                pass
            check(struct.pack(">Q", REP_MAGIC) not in answer, "no reply to a plain option: %r" % answer)
        run("nbdinfo", s.tls_uri(CLIENT))


def client_hello(version=None):
    out = ssl.MemoryBIO()
    obj = context(pki, version=version).wrap_bio(ssl.MemoryBIO(), out)
    try:
        obj.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return out.read()


def a_handshake_that_trickles_is_cut_off_and_holds_up_nobody():
    with TlsServer(SERVER, "--client-timeout", "1s") as s:
        slow = [Raw(s) for _ in range(8)]
        hello = client_hello()
        for c in slow:
            equal(c.ask(STARTTLS)[-1][0], ACK, "the reply to STARTTLS")
        closed, at, end = 0, 0, time.monotonic() + TIMEOUT
        while slow and time.monotonic() < end:
            run("nbdinfo", "--size", s.tls_uri(CLIENT))
            for c in list(slow):
                try:
                    c.s.send(hello[at:at + 1])
                except (BrokenPipeError, ConnectionResetError):
                    slow.remove(c)
            at += 1
            time.sleep(0.1)
        equal(len(slow), 0, "clients that still trickle")
        log_says(s, "not finished in time")


def a_client_may_hang_up_at_any_byte_of_the_handshake():
    hello = client_hello()
    with TlsServer(SERVER) as s:
        run("nbdinfo", s.tls_uri(CLIENT))
        fds = s.fds()
        for cut in list(range(0, len(hello), 13)) + [len(hello)]:
            for wait in (False, True):
                with Raw(s) as c:
                    equal(c.ask(STARTTLS)[-1][0], ACK, "the reply to STARTTLS")
                    c.send(hello[:cut])
                    if wait and cut == len(hello):
                        c.s.recv(100)
        s.left_none(fds)
        run("nbdinfo", s.tls_uri(CLIENT))


def records_that_are_none_end_the_connection():
    big = b"\x17\x03\x03\xff\xff" + bytes(65535)
    for what in (b"\x17\x03\x03\x41\x01" + bytes(16641), big, b"\x17\x03\x03\x00\x00" * 50, b"\x17\x03\x03\x00\x20" + bytes(32),
                 b"\x15\x03\x03\x00\x02\x01\x00", b"\x16\x03\x03\x00\x05\x01\xff\xff\xff\x00", b"\x18\x03\x03\x00\x03\x01\xff\xff", b"GET / HTTP/1.1\r\n\r\n",
                 struct.pack(">IHHQQI", REQUEST_MAGIC, 0, READ, 1, 0, 512), bytes(100000)):
        for early in (True, False):
            with TlsRaw(ONE) as c:
                if early:
                    equal(c.ask(STARTTLS)[-1][0], ACK, "the reply to STARTTLS")
                    raw = c.s
                else:
                    c.starttls(context(pki)).negotiate()
                    raw = socket.socket(fileno=os.dup(c.s.fileno()))
                with raw:
                    raw.settimeout(TIMEOUT)
                    try:
                        raw.sendall(what)
                        raw.shutdown(socket.SHUT_WR)
                        while raw.recv(65536):
                            pass
                    except (ConnectionResetError, BrokenPipeError):
                        pass
    ONE.alive()
    run("nbdinfo", ONE.tls_uri(CLIENT))


def a_record_that_is_cut_short_is_the_end_and_not_a_request():
    with TlsRaw(ONE) as c:
        c.starttls(context(pki)).negotiate()
        equal(c.do(WRITE, 0, 512, data=b"\1" * 512), 0, "a write")
        # The header of a record of 1000 bytes, and 999 of them.
        with socket.socket(fileno=os.dup(c.s.fileno())) as raw:
            raw.sendall(b"\x17\x03\x03\x03\xe8" + bytes(999))
            raw.shutdown(socket.SHUT_WR)
            raw.settimeout(TIMEOUT)
            try:
                while raw.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    with TlsRaw(ONE) as c:
        c.starttls(context(pki)).negotiate()
        c.request(READ, 0, 512)
        c.chunk()
        equal(c.recv(512), b"\1" * 512, "the data")


class Relay:
    """A TCP port behind which STARTTLS is done already: for clients that speak TLS and not NBD."""

    def __init__(self, server):
        self.server = server

    def __enter__(self):
        self.listen = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.accept, daemon=True).start()
        return self.listen.getsockname()[1]

    def accept(self):
        while True:
            try:
                a, _ = self.listen.accept()
            except OSError:
                return
            b = Raw(self.server)
            b.ask(STARTTLS)
            b.s.settimeout(None)
            for x, y in ((a, b.s), (b.s, a)):
                threading.Thread(target=self.pump, args=(x, y), daemon=True).start()

    @staticmethod
    def pump(x, y):
        try:
            while part := x.recv(65536):
                y.sendall(part)
        except OSError:
            pass
        for s in (x, y):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def __exit__(self, *exc):
        self.listen.close()


def gnutls_cli_gets_tls_1_2_and_1_3_and_no_renegotiation():
    with TlsServer(SERVER) as s, Relay(s) as port:
        args = ["gnutls-cli", "-p", str(port), "--x509cafile", pki.file("ca-cert.pem"), "--x509certfile", pki.file("client-cert.pem"),
                "--x509keyfile", pki.file("key.pem")]
        for version, good in (("1.1", False), ("1.2", True), ("1.3", True)):
            out = run(*args, "--priority", "NORMAL:-VERS-ALL:+VERS-TLS" + version, "localhost", ok=None)
            equal("Handshake was completed" in out, good, "TLS " + version)
        out = run(*args, "--priority", "NORMAL:-VERS-ALL:+VERS-TLS1.2", "--rehandshake", "localhost", ok=None)
        check("ReHandshake was completed" not in out, out)
        log_says(s, "renegotiate")
        run("nbdinfo", s.tls_uri(CLIENT))


def large_requests_and_hundreds_in_flight_are_right():
    try:
        import nbd
    except ImportError:
        skip("python3-libnbd is not installed")
    h = nbd.NBD()
    h.set_uri_allow_local_file(True)
    h.connect_uri(ONE.tls_uri(CLIENT))
    check(h.get_tls_negotiated(), "TLS")
    big = os.urandom(1 << 20) * 8 + b"end!"
    h.pwrite(big, 5)
    check(hashlib.sha256(h.pread(len(big), 5)).digest() == hashlib.sha256(big).digest(), "8 MiB and a bit, there and back")
    blocks = [os.urandom(64) * 64 for _ in range(300)]
    done = []
    for i, b in enumerate(blocks):
        done.append(h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(b)), 16 << 20 | i << 12))
    wait_for(h, done)
    buffers = [nbd.Buffer(4096) for _ in blocks]
    wait_for(h, [h.aio_pread(b, 16 << 20 | i << 12) for i, b in enumerate(buffers)])
    check(all(bytes(b.to_bytearray()) == want for b, want in zip(buffers, blocks)), "300 reads in flight")
    h.shutdown()


def wait_for(h, cookies):
    for cookie in cookies:
        while not h.aio_command_completed(cookie):
            h.poll(-1)


def requests_of_any_size_and_cut():
    """Records end where they like: inside headers, inside payloads; and several requests lie in one."""
    with TlsRaw(ONE) as c:
        c.starttls(context(pki)).negotiate()
        data = os.urandom(70000)
        stream = b"".join(struct.pack(">IHHQQI", REQUEST_MAGIC, 0, WRITE, i, 40 << 20 | i * 70000, len(data)) + data for i in range(3))
        at, size = 0, 1
        while at < len(stream):
            c.send(stream[at:at + size])
            at += size
            size = size * 7 % 20011 + 1
        equal(sorted(c.result_cookie() for _ in range(3)), [(0, 0), (1, 0), (2, 0)], "the replies")
        for i in range(3):
            c.request(READ, 40 << 20 | i * 70000, len(data))
            c.chunk()
            equal(hashlib.sha256(c.recv(len(data))).digest(), hashlib.sha256(data).digest(), "the data")


def result_cookie(self):
    flags, kind, cookie, _ = self.chunk()
    return cookie, flags


TlsRaw.result_cookie = result_cookie


def status_tells_who_is_there():
    with folder() as d:
        control = os.path.join(d, "c")
        with TlsServer(SERVER, "--control", control) as s, TlsRaw(s) as c:
            c.starttls(context(pki)).negotiate()
            nbd = json.loads(ask(control))["result"]["nbd"]
            equal(nbd["tls"], "require", "the mode")
            conn = nbd["connections"][0]
            check(conn["tls"].startswith("(TLS1.3)") and conn["identity"] == "CN=the client", conn)


def ask(control):
    with socket.socket(socket.AF_UNIX) as c:
        c.connect(control)
        c.sendall(b'{"command": "status"}\n')
        return c.makefile().readline()


def what_is_wrong_with_the_files_is_said_in_one_line():
    pki.key("key2.pem")
    bad = pki.folder("mismatch", "server", "server")
    shutil.copy(pki.file("key2.pem"), os.path.join(bad, "server-key.pem"))
    no_ca = pki.folder("no-ca", "server", "server")
    os.unlink(os.path.join(no_ca, "ca-cert.pem"))
    no_key = pki.folder("no-key", "server", "server")
    os.unlink(os.path.join(no_key, "server-key.pem"))
    garbage = pki.folder("garbage", "server", "server")
    with open(os.path.join(garbage, "ca-cert.pem"), "w") as f:
        f.write("-----BEGIN CERTIFICATE-----\nnone\n")
    for args, reason in ((["--tls-creds", PKI_DIR + "/nowhere"], "has neither server-cert.pem"), (["--tls-creds", bad], "does not belong to|cannot be used"),
                         (["--tls-creds", no_ca], "no ca-cert.pem"), (["--tls-creds", no_key], "server-key.pem: there is no such file"),
                         (["--tls-creds", garbage], "ca-cert.pem: "), (["--tls-creds", pki.psk("odd", alice="123")], "line 3: a key is"),
                         (["--tls-creds", pki.psk("nohex", alice="x" * 32)], "line 3: the key has"), (["--tls-creds", pki.psk("empty")], "has no key"),
                         (["--tls", "require"], "give --tls-creds DIR"), (["--tls", "maybe"], "--tls maybe")):
        out = run(WEIR, "serve", "--nbd", "unix:" + PKI_DIR + "/s", *args, "null:1M", ok=False)
        lines = [line for line in out.splitlines() if "only its owner" not in line]
        check(len(lines) == 1 and re.search(reason, lines[0]), "%s: %r" % (args, out))


def order(path, command):
    with socket.socket(socket.AF_UNIX) as c:
        c.connect(path)
        c.sendall(json.dumps({"command": command}).encode() + b"\n")
        return json.loads(c.makefile().readline())


def can_read(server, ca, cert):
    """A client that trusts `ca` and has this certificate gets in."""
    try:
        with TlsRaw(server) as c:
            return c.starttls(context(pki, cert, ca)).negotiate().do(FLUSH) == 0
    except (ssl.SSLError, OSError, Closed):
        return False


def certificates_are_renewed_while_clients_go_on():
    pki.leaf("new-server", "server", "other", ["dns_name = localhost"])
    pki.leaf("new-client", "client", "other")
    d = pki.folder("renewed", "server", "server")
    control = os.path.join(PKI_DIR, "control")
    with TlsServer(d, "--control", control) as s, TlsRaw(s) as old:
        old.starttls(context(pki)).negotiate()
        for by in "signal", "control":
            pki.folder("renewed", "server", "new-server", "other")
            before = len(s.text())
            if by == "signal":
                s.proc.send_signal(signal.SIGHUP)
            else:
                equal(order(control, "tls-reload")["ok"], True, "the answer")
            log_says(s, "was read again", before)
            equal((can_read(s, "other", "new-client"), can_read(s, "ca", "client")), (True, False), "who gets in, by " + by)
            equal(old.do(WRITE, 0, 512, data=bytes(512)), 0, "a write of a client from before")
            pki.folder("renewed", "server", "server")
            equal(order(control, "tls-reload")["ok"], True, "back again")
            equal((can_read(s, "other", "new-client"), can_read(s, "ca", "client")), (False, True), "who gets in afterwards")
        check("sandbox" not in s.text(), "the sandbox lets it: " + s.text())


def links_into_another_folder_lead_there_also_when_they_are_read_again():
    pki.leaf("linked-server", "server", "other", ["dns_name = localhost"])
    pki.leaf("linked-client", "client", "other")
    control, live = os.path.join(PKI_DIR, "control3"), os.path.join(PKI_DIR, "live")
    os.mkdir(live)

    def link(archive):
        for name in os.listdir(archive):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(live, name))
            os.symlink(os.path.join(archive, name), os.path.join(live, name))

    archive = pki.folder("archive", "server", "server")
    link(archive)
    with TlsServer(live, "--control", control) as s:
        check(can_read(s, "ca", "client"), "who gets in at first")
        os.chmod(archive, 0o755)
        for name in os.listdir(archive):
            os.rename(os.path.join(archive, name), os.path.join(archive, "1-" + name))
        pki.folder("archive", "server", "linked-server", "other")
        answer = order(control, "tls-reload")
        check(answer["ok"], answer)
        check(can_read(s, "other", "linked-client"), "who gets in afterwards")


def bad_files_change_nothing_and_are_named():
    d = pki.revoke("revoked", "spoilt")
    control = os.path.join(PKI_DIR, "control2")
    path = {name: os.path.join(d, name) for name in ("server-cert.pem", "server-key.pem", "ca-cert.pem", "ca-crl.pem", "keys.psk")}

    def write(name, text):
        with open(path[name], "w") as f:
            f.write(text)
        os.chmod(path[name], 0o600)

    cases = [(lambda: write("server-key.pem", "no key"), "server-key.pem"), (lambda: os.unlink(path["server-key.pem"]), "server-key.pem: there is no such file"),
             (lambda: shutil.copy(pki.file("other-key.pem"), path["server-key.pem"]), "server-key.pem: does not belong to the certificate"),
             (lambda: write("ca-cert.pem", ""), "ca-cert.pem"), (lambda: os.unlink(path["ca-cert.pem"]), "no ca-cert.pem to check clients with"),
             (lambda: write("keys.psk", "alice:12\n"), "keys.psk, line 1"),
             (lambda: os.unlink(path["ca-crl.pem"]), "ca-crl.pem: was there")]
    with TlsServer(d, "--control", control) as s:
        for spoil, words in cases:
            spoil()
            answer = order(control, "tls-reload")
            check(not answer["ok"] and words in answer["error"], "%s: %s" % (words, answer))
            check(can_read(s, "ca", "client"), "the client still gets in: " + words)
            if words.startswith("keys"):
                s.proc.send_signal(signal.SIGHUP)
                log_says(s, re.escape(words) + ".*stays in use")
                os.unlink(path["keys.psk"])
            pki.revoke("revoked", "spoilt")
        check(order(control, "tls-reload")["ok"], "in the end all is well")
        # Keys that were added are in use as well, and stay so when they are gone.
        keys = pki.psk("renewed", alice=KEY)
        shutil.copy(keys + "/keys.psk", path["keys.psk"])
        check(order(control, "tls-reload")["ok"], "keys that come later")
        os.unlink(path["keys.psk"])
        answer = order(control, "tls-reload")
        check(not answer["ok"] and "keys.psk: was there" in answer["error"], "keys that are gone: %s" % answer)
        run("nbdinfo", s.tls_uri(psk=keys, user="alice"))
    with Server("mem:1M", "--control", control) as s:
        check("--tls-creds" in order(control, "tls-reload")["error"], "without TLS")


def handshakes_that_are_given_up_leave_nothing_behind():
    """Cut at each place, with whole ones in between. A whole one costs milliseconds, so these are fewer than the ten thousand of nbd_access.py."""
    hello = client_hello()
    greeting = struct.pack(">I", 3)
    starttls = greeting + struct.pack(">QII", OPT_MAGIC, STARTTLS, 0)

    def one(s, i):
        with socket.socket(socket.AF_UNIX) as c:
            c.connect(s.sock)
            if i % 5:
                c.sendall(starttls)
                c.recv(18 + 20, socket.MSG_WAITALL)
            c.sendall((starttls[:9], b"", hello[:60], b"GET / HTTP/1.0\r\n\r\n", hello)[i % 5])
            if i % 10 == 9:
                c.recv(1)

    def many(s, n):
        for i in range(n):
            if i % 40:
                one(s, i)
            else:
                check(can_read(s, "ca", "client"), "a whole one")
                check(not can_read(s, "ca", "stranger"), "one that is refused")
        s.left_none(fds)

    pki.leaf("stranger", "client", "other")
    with TlsServer(SERVER) as s:
        fds = s.fds()
        many(s, 200)
        rss = s.rss()
        many(s, 800)
        check(s.rss() < rss + (1 << 20), "memory grows by less than 1 MiB: from %d to %d" % (rss, s.rss()))


with TlsServer(SERVER) as ONE:
    sys.exit(run_tests(tests_of(globals())))
