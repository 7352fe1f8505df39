#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""nbds://: the NBD client over TLS, with nbdkit, qemu-nbd and weir as servers. Which servers it takes for the right one, what it says of those that it does not,
and that a connection that comes back is as safe as the first.

usage: nbds_client.py WEIR DISK_SHELL
"""
import re
import threading

import nbd_fake
from tls_lib import *

SHELL = nbd_fake.SHELL = sys.argv.pop(2)
Shell = nbd_fake.Shell
need("nbdkit", "qemu-nbd")
TMP = tempfile.mkdtemp(prefix="weir-nbds-")
pki = Pki(os.path.join(TMP, "pki"))
SERVER, CLIENT = pki.file("server"), pki.file("client")
KEY, OTHER_KEY = "00112233445566778899aabbccddeeff" * 2, "ff" * 32
NOBODY = pki.folder("nobody", "client", "")
SIZE = 2 << 20


class Program:
    """A server on the Unix socket `sock`, there once it takes connections; it may be killed and started again."""

    def __init__(self, *args):
        self.dir = tempfile.mkdtemp(dir=TMP)
        self.sock = self.dir + "/s"
        self.args = [a.replace("SOCK", self.sock).replace("DIR", self.dir) for a in args]
        self.start()

    def start(self):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.sock)
        self.log = open(self.dir + "/log", "w+")
        self.proc = subprocess.Popen(self.args, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        end = time.monotonic() + TIMEOUT
        while True:
            with socket.socket(socket.AF_UNIX) as s:
                with contextlib.suppress(OSError):
                    s.connect(self.sock)
                    return
            check(self.proc.poll() is None and time.monotonic() < end, "the server starts: " + open(self.log.name).read())
            time.sleep(0.005)

    def uri(self, *params, options="", name=""):
        return "nbds+unix:///%s?%s%s" % (name, "&".join(["socket=" + self.sock, *params]), options)

    def kill(self):
        self.proc.kill()
        self.proc.wait()
        self.log.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.kill()


def certs(path, *more):
    return ("tls-certificates=" + path, "tls-hostname=localhost", *more)


def nbdkit(folder_=SERVER, *more):
    return Program("nbdkit", "-f", "-U", "SOCK", "--tls=require", "--tls-certificates=" + folder_, "--tls-verify-peer", *more, "memory", str(SIZE))


def qemu_nbd(creds):
    image = os.path.join(TMP, "image")
    with open(image, "wb") as f:
        f.truncate(SIZE)
    return Program("qemu-nbd", "-f", "raw", "-k", "SOCK", "-t", "-e", "9", "--discard=unmap", "--tls-creds=t", "--object", creds, image)


def weir(*more, disk="mem:%d" % SIZE, creds=SERVER):
    return Program(WEIR, "serve", disk, "--nbd", "unix:SOCK", "--tls-creds", creds, *more)


def use(uri):
    """Requests of all sizes get through, several at once."""
    with Shell(uri) as sh:
        tags = [sh.send("write", i * 65536, 65536 - 512 * i, "%02x" % (i + 1)) for i in range(16)]
        for t in tags:
            equal(sh.wait(t), "ok", "a write")
        sh.ok("write", 1 << 20, 1 << 20, "aa", "fua")
        sh.ok("zero", 1 << 20, 4096)
        sh.ok("flush")
        for i in range(16):
            equal(sh.ok("read", i * 65536, 65536 - 512 * i), "all %02x" % (i + 1), "a read")
        equal(sh.ok("read", (1 << 20) + 4096, (1 << 20) - 4096), "all aa", "a long read")
        check('"tls":"(TLS1.3' in sh.ok("status"), "TLS is in use: " + sh.ok("status"))


def copied_to_and_from(uri):
    """By weir image convert."""
    src, back = os.path.join(TMP, "src.raw"), os.path.join(TMP, "back.raw")
    with open(src, "wb") as f:
        f.write(b"".join(bytes([i]) * 65536 for i in range(SIZE >> 16)))
    for pair in ((src, uri), (uri, back)):
        p = run(WEIR, "image", "convert", "-q", *pair)
        check(p.returncode == 0, "weir image convert %s %s: %s" % (*pair, p.stderr))
    with open(src, "rb") as a, open(back, "rb") as b:
        check(a.read() == b.read(), "what was copied to a server over TLS comes back")


def refused(uri, *reasons):
    sh = Shell(uri, fails=True)
    sh.proc.stdin.close()
    sh.proc.wait(TIMEOUT)
    for reason in reasons:
        check(re.search(reason, sh.opened), "'%s' in: %s" % (reason, sh.opened))
    return sh.opened


def certificates_work_with_nbdkit_qemu_nbd_and_weir():
    with nbdkit() as s:
        use(s.uri(*certs(CLIENT)))
    with qemu_nbd("tls-creds-x509,id=t,endpoint=server,verify-peer=on,dir=" + SERVER) as s:
        use(s.uri(*certs(CLIENT)))
    with weir() as s:
        use(s.uri(*certs(CLIENT), options=",connections=3"))
        copied_to_and_from(s.uri(*certs(CLIENT)))
        # As options of the disk, too.
        use(s.uri(options=",tls-certificates=%s,tls-hostname=localhost" % CLIENT))


def pre_shared_keys_work_with_nbdkit_qemu_nbd_and_weir():
    keys = pki.psk("psk", alice=KEY, bob=OTHER_KEY)
    psk = "tls-psk-file=%s/keys.psk" % keys
    with Program("nbdkit", "-f", "-U", "SOCK", "--tls=require", "--tls-psk=%s/keys.psk" % keys, "memory", str(SIZE)) as s:
        use(s.uri(psk, "tls-username=alice"))
    with qemu_nbd("tls-creds-psk,id=t,endpoint=server,dir=" + keys) as s:
        use(s.uri(psk, "tls-username=bob"))
    with weir(creds=keys) as s:
        use(s.uri(psk, options=",tls-username=alice"))
        use(s.uri(psk).replace("unix://", "unix://bob@"))
        wrong = "tls-psk-file=%s/keys.psk" % pki.psk("wrong", alice=OTHER_KEY, eve=KEY)
        for user in "alice", "eve":
            refused(s.uri(wrong, "tls-username=" + user), "TLS: the other side refuses", "certificate or key that the server wants")
        refused(s.uri(wrong, "tls-username=carol"), "has no key for 'carol'")
        refused(s.uri("tls-psk-file=%s/none" % keys, "tls-username=alice"), "none: there is no such file")
        refused(s.uri(*certs(CLIENT)), "TLS: ")


def over_tcp_the_hosts_name_counts():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with Program(WEIR, "serve", "mem:%d" % SIZE, "--nbd", "unix:SOCK", "--nbd", "127.0.0.1:%d" % port, "--tls-creds", SERVER):
        use("nbds://127.0.0.1:%d/?tls-certificates=%s" % (port, CLIENT))
        refused("nbds://127.0.0.1:%d/?tls-certificates=%s&tls-hostname=other.example" % (port, CLIENT), "not the server that is wanted", "name")


def only_the_right_server_is_taken():
    """Each line says what is wrong with the certificate."""
    names = ["dns_name = localhost", "ip_address = 127.0.0.1"]
    pki.leaf("foreign", "server", "other", names)
    pki.leaf("selfmade", "server", None, names)
    pki.leaf("expired", "server", "ca", names + ["activation_date = 2020-01-01 00:00:00", "expiration_date = 2020-02-01 00:00:00"])
    pki.leaf("early", "server", "ca", names + ["activation_date = 2090-01-01 00:00:00", "expiration_date = 2099-02-01 00:00:00"])
    pki.leaf("client-as-server", "client", "ca", names)
    pki.leaf("elsewhere", "server", "ca", ["dns_name = elsewhere.example"])
    for name, reason in (("foreign", "issuer is unknown"), ("selfmade", "issuer is unknown"), ("expired", "expired"), ("early", "not yet valid"),
                         ("client-as-server", "purpose"), ("elsewhere", "name in the certificate does not match")):
        with weir(creds=pki.folder("with-" + name, "server", name)) as s:
            refused(s.uri(*certs(CLIENT)), "this is not the server that is wanted", reason, "tls-certificates=DIR")
            if name == "elsewhere":
                # A Unix socket has no name of its own.
                use(s.uri("tls-certificates=" + CLIENT))
    with weir() as s:
        refused(s.uri(*certs(pki.folder("distrust", "client", "client", "other"))), "not the server that is wanted", "issuer is unknown")
        refused(s.uri("tls-certificates=%s/none" % TMP), "none: No such file")
        # Without a directory the system's CAs count, and none of them knows this server.
        refused(s.uri(), "not the server|no CA to check")
        use(s.uri("tls-certificates=" + CLIENT, "tls-verify-peer=off"))


def a_client_that_the_server_does_not_want_is_told_so():
    pki.leaf("stranger", "client", "other")
    pki.leaf("expired", "client", "ca", ["activation_date = 2020-01-01 00:00:00", "expiration_date = 2020-02-01 00:00:00"])
    for server in weir, nbdkit:
        with server() as s:
            for folder_ in pki.folder("as-stranger", "client", "stranger"), pki.folder("as-expired", "client", "expired"), NOBODY:
                text = refused(s.uri(*certs(folder_)), "the other side refuses|closed the connection")
                check(server is nbdkit or "has it the certificate" in text, text)


def it_is_never_done_without():
    with Program(WEIR, "serve", "mem:1M", "--nbd", "unix:SOCK") as s:
        refused(s.uri(*certs(CLIENT)), "does not offer TLS")
    with Program("nbdkit", "-f", "-U", "SOCK", "memory", "1M") as s:
        refused(s.uri(*certs(CLIENT)), "does not offer TLS")
    with Program("nbdkit", "-f", "-U", "SOCK", "--mask-handshake=0", "memory", "1M") as s:
        refused(s.uri(*certs(CLIENT)), "does not offer TLS")
    with weir() as s:
        refused("nbd+unix:///?socket=" + s.sock, "insists on TLS", "nbds://")


class Liar:
    """Answers STARTTLS, and then with `words`."""

    def __init__(self, early, words):
        self.sock = os.path.join(tempfile.mkdtemp(dir=TMP), "s")
        self.s = socket.socket(socket.AF_UNIX)
        self.s.bind(self.sock)
        self.s.listen()
        self.early, self.words = early, words
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        with self.s.accept()[0] as c, contextlib.suppress(OSError):
            c.sendall(b"NBDMAGIC" + struct.pack(">QH", OPT_MAGIC, 3))
            c.recv(4 + 16, socket.MSG_WAITALL)
            c.sendall(struct.pack(">QIII", REP_MAGIC, STARTTLS, ACK, 0) + self.early)
            c.recv(1)
            c.sendall(self.words)


def what_a_liar_says_in_place_of_tls_is_refused():
    alert = b"\x15\x03\x03\0\x02\x02\x28"
    for early, words, reason in ((b"", b"", "closed the connection"), (b"", b"x" * 70000, "TLS: An unexpected TLS packet"), (b"", alert, "refuses: Handshake failed"),
                                 (b"\x16", b"", "sends something in the plain"), (struct.pack(">QIII", REP_MAGIC, GO, ACK, 0), b"", "in the plain"),
                                 (b"", b"\x16\x03\x03\x40\x01" + b"\x02\0\0\xff" * 5000, "TLS: ")):
        liar = Liar(early, words)
        refused("nbds+unix:///?socket=%s&tls-certificates=%s" % (liar.sock, CLIENT), reason)
        liar.thread.join()


def a_lost_connection_comes_back_and_loses_nothing():
    """SIGKILL of the server: what was acknowledged and not flushed is sent again, over TLS."""
    image = os.path.join(TMP, "lost")
    with open(image, "wb") as f:
        f.truncate(SIZE)
    with weir(disk=image) as s, Shell(s.uri(*certs(CLIENT), options=",connections=2")) as sh:
        for round_ in range(3):
            tags = [sh.send("write", i * 4096, 4096, "%02x" % (i + round_)) for i in range(64)]
            s.kill()
            os.truncate(image, 0)       # the server's host has forgotten all
            os.truncate(image, SIZE)
            s.start()
            for t in tags:
                equal(sh.wait(t), "ok", "a write")
            for i in range(64):
                equal(sh.ok("read", i * 4096, 4096), "all %02x" % (i + round_), "what was acknowledged")
        check('"reconnects":3' in sh.ok("status"), sh.ok("status"))


def renewed_certificates_are_taken_at_the_next_connection():
    server, client = pki.folder("renew-server", "server", "server"), pki.folder("renew-client", "client", "client")
    pki.leaf("new-server", "server", "other", ["dns_name = localhost"])
    pki.leaf("new-client", "client", "other")
    with weir(creds=server) as s, Shell(s.uri(*certs(client), options=",reconnect=20s")) as sh:
        sh.ok("write", 0, 4096, "01")
        s.kill()
        # First only the server's: the disk waits, and says for what.
        pki.folder("renew-server", "server", "new-server", "other")
        s.start()
        tag = sh.send("flush")
        nbd_fake.until(lambda: "not the server that is wanted" in sh.stderr(), "the reason is told: " + sh.stderr())
        check(not sh.done(tag), "the flush waits")
        # A half written file leaves what there was.
        with open(client + "/client-key.pem", "w") as f:
            f.write("no key\n")
        nbd_fake.until(lambda: "stay in use" in sh.stderr(), "that is told: " + sh.stderr())
        # So does a renewal that has removed and not yet written.
        pki.folder("renew-client", "client", "client")
        os.unlink(client + "/ca-cert.pem")
        nbd_fake.until(lambda: "ca-cert.pem: was there" in sh.stderr(), "that is told: " + sh.stderr())
        pki.folder("renew-client", "client", "new-client", "other")
        equal(sh.wait(tag), "ok", "the flush: " + sh.stderr())
        equal(sh.ok("read", 0, 4096), "all 01", "what was written before")


def reconnecting_again_and_again_keeps_nothing():
    def held(pid):
        with open("/proc/%d/status" % pid) as f:
            anon = int(re.search(r"RssAnon:\s+(\d+)", f.read()).group(1))
        return len(os.listdir("/proc/%d/fd" % pid)), anon

    with weir() as s, Shell(s.uri(*certs(CLIENT), options=",reconnect=60s")) as sh:
        for turn in range(24):
            if turn == 8:
                before = held(sh.proc.pid)
            s.kill()
            s.start()
            equal(sh.ok("read", 0, 4096), "all 00", "turn %d" % turn)
        after = held(sh.proc.pid)
        equal(after[0], before[0], "descriptors")
        # A session that stays has more than 200 KiB of buffers, and GnuTLS's own.
        check(after[1] - before[1] < 1024, "KiB of memory: %d, then %d" % (before[1], after[1]))


def a_serving_process_reads_them_from_inside_its_sandbox():
    server, client = pki.folder("box-server", "server", "server"), pki.folder("box-client", "client", "client")
    with weir(creds=server) as back:
        disk = back.uri(*certs(client))
        with Program(WEIR, "serve", disk, "--nbd", "unix:SOCK") as front, Shell("nbd+unix:///?socket=" + front.sock) as sh:
            sh.ok("write", 0, 4096, "5a", "fua")
            back.kill()
            pki.folder("box-server", "server", "new-server", "other")
            pki.folder("box-client", "client", "new-client", "other")
            back.start()
            equal(sh.ok("read", 0, 4096), "all 00", "a new memory disk")
            text = open(front.log.name).read()
            check("stay in use" not in text and "sandbox" not in text, text)


def a_log_may_lie_behind_it():
    image, log = os.path.join(TMP, "logged"), os.path.join(TMP, "log")
    with open(image, "wb") as f:
        f.truncate(1 << 20)
    with open(log, "wb") as f:
        f.truncate(32 << 20)
    with weir(disk=log) as back:
        device = back.uri(*certs(CLIENT))
        p = subprocess.run([WEIR, "log", "create", device], capture_output=True, text=True, timeout=60)
        equal(p.returncode, 0, "weir log create: " + p.stderr)
        front = Program(WEIR, "serve", image, "--log", device, "--nbd", "unix:SOCK")
        with front, Shell("nbd+unix:///?socket=%s,reconnect=off" % front.sock) as sh:
            sh.ok("write", 4096, 8192, "77")
            sh.ok("flush")
            sh.proc.stdin.close()
            sh.proc.wait(TIMEOUT)
        p = subprocess.run([WEIR, "log", "drain", device], capture_output=True, text=True, timeout=60)
        equal(p.returncode, 0, "weir log drain: " + p.stderr)
    with open(image, "rb") as f:
        equal(f.read(16384), bytes(4096) + b"\x77" * 8192 + bytes(4096), "the image")


if __name__ == "__main__":
    try:
        status = run_tests([certificates_work_with_nbdkit_qemu_nbd_and_weir, pre_shared_keys_work_with_nbdkit_qemu_nbd_and_weir,
                            over_tcp_the_hosts_name_counts, only_the_right_server_is_taken, a_client_that_the_server_does_not_want_is_told_so,
                            it_is_never_done_without, what_a_liar_says_in_place_of_tls_is_refused, a_lost_connection_comes_back_and_loses_nothing,
                            renewed_certificates_are_taken_at_the_next_connection,
                            reconnecting_again_and_again_keeps_nothing, a_serving_process_reads_them_from_inside_its_sandbox,
                            a_log_may_lie_behind_it])
    finally:
        shutil.rmtree(TMP, ignore_errors=True)
    sys.exit(status)
