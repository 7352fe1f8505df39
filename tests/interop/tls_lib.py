# SPDX-License-Identifier: MIT
"""Certificates, keys and clients for the TLS tests. All is made anew in a folder, which takes a tenth of a second."""
import ssl

from nbd_lib import *

need("certtool")
KINDS = {"server": "tls_www_server", "client": "tls_www_client"}


def certtool(*args):
    p = subprocess.run(["certtool", *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    check(p.returncode == 0, "certtool %s: %s" % (" ".join(args), p.stderr))


class Pki:
    """Folders as QEMU and nbdkit want them: `server` (with keys.psk in `psk`), and a client's for each kind of client."""

    def __init__(self, path):
        self.path = path
        os.makedirs(path, exist_ok=True)
        self.key("key.pem")     # one key for all: what is tested is who signed what
        self.ca("ca")
        self.ca("other")
        self.leaf("server", "server", "ca", ["dns_name = localhost", "ip_address = 127.0.0.1"])
        self.leaf("client", "client", "ca", serial=17)
        self.folder("server", "server")
        self.folder("client", "client")

    def file(self, name):
        return os.path.join(self.path, name)

    def key(self, name):
        certtool("--generate-privkey", "--key-type=ecdsa", "--curve=secp256r1", "--outfile", self.file(name))
        os.chmod(self.file(name), 0o600)

    def template(self, lines):
        with open(self.file("template"), "w") as f:
            f.write("\n".join(lines) + "\n")
        return self.file("template")

    def ca(self, name):
        self.key(name + "-key.pem")
        certtool("--generate-self-signed", "--load-privkey", self.file(name + "-key.pem"), "--outfile", self.file(name + "-cert.pem"),
                 "--template", self.template(["cn = " + name, "ca", "cert_signing_key", "crl_signing_key"]))

    def leaf(self, name, kind, ca, more=(), serial=None):
        """A certificate `name`-cert.pem; ca=None: self-signed."""
        lines = ["cn = the " + name, "signing_key", *([KINDS[kind]] if kind else []), *more] + (["serial = %d" % serial] if serial else [])
        args = ["--load-privkey", self.file("key.pem"), "--outfile", self.file(name + "-cert.pem"), "--template", self.template(lines)]
        if ca:
            certtool("--generate-certificate", "--load-ca-certificate", self.file(ca + "-cert.pem"), "--load-ca-privkey",
                     self.file(ca + "-key.pem"), *args)
        else:
            certtool("--generate-self-signed", *args)

    def folder(self, name, kind, cert=None, ca="ca"):
        d = self.file(name)
        os.makedirs(d, exist_ok=True)
        shutil.copy(self.file(ca + "-cert.pem"), os.path.join(d, "ca-cert.pem"))
        if cert != "":
            shutil.copy(self.file((cert or name) + "-cert.pem"), os.path.join(d, kind + "-cert.pem"))
            shutil.copy(self.file("key.pem"), os.path.join(d, kind + "-key.pem"))
        return d

    def revoke(self, name, folder):
        """A copy of the server's folder that knows of a revoked certificate."""
        d = self.folder(folder, "server", "server")
        certtool("--generate-crl", "--load-ca-privkey", self.file("ca-key.pem"), "--load-ca-certificate", self.file("ca-cert.pem"),
                 "--load-certificate", self.file(name + "-cert.pem"), "--outfile", os.path.join(d, "ca-crl.pem"),
                 "--template", self.template(["crl_next_update = 100", "crl_number = 1"]))
        return d

    def psk(self, name, **keys):
        """A folder with keys.psk."""
        d = self.file(name)
        os.makedirs(d, exist_ok=True)
        with open(os.path.join(d, "keys.psk"), "w") as f:
            os.fchmod(f.fileno(), 0o600)
            f.write("# keys\n\n" + "".join("%s:%s\n" % item for item in keys.items()))
        return d


class TlsServer(Server):
    def __init__(self, creds, *more):
        super().__init__("mem:64M", "--tls-creds", creds, *more)

    def tls_uri(self, client=None, psk=None, user="", name="", more=""):
        uri = "nbds+unix://%s/%s?socket=%s" % (user + "@" if user else "", name, self.sock)
        return uri + ("&tls-certificates=" + client if client else "") + ("&tls-psk-file=%s/keys.psk" % psk if psk else "") + more


def context(pki, client="client", ca="ca", version=None):
    """Of Python's ssl module, which is OpenSSL: another implementation than the server's."""
    c = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    c.check_hostname = False
    c.load_verify_locations(pki.file(ca + "-cert.pem"))
    if client:
        c.load_cert_chain(pki.file(client + "-cert.pem"), pki.file("key.pem"))
    if version:
        c.minimum_version = c.maximum_version = version
    return c


class TlsRaw(Raw):
    """A Raw client that has gone through STARTTLS."""

    def starttls(self, ctx):
        equal(self.ask(STARTTLS)[-1][0], ACK, "the reply to STARTTLS")
        self.s = ctx.wrap_socket(self.s)
        return self

    def recv(self, n):
        try:
            return super().recv(n)
        except (ssl.SSLError, OSError):
            raise Closed()

    def send(self, data):
        try:
            super().send(data)
        except (ssl.SSLError, OSError):
            raise Closed()
