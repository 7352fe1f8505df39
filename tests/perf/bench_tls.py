#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""
bench.py's rows for NBD over TLS: weir and qemu-storage-daemon with the same certificate, in turns, and weir without TLS next to them. The client is fio's nbd
engine, and its own decryption is part of every row. Nobody asks for client certificates, since fio cannot name any.
"""
import os
import shutil
import subprocess

from bench_lib import Server

PLAN = [] if not shutil.which("certtool") else [
    ("tls sync", ["weir tls", "weir tls + log", "qsd tls", "weir tls off"]),
    *((f"tls {rw} qd{qd}", ["weir tls", "qsd tls", "weir tls off"]) for rw in ("randread", "randwrite") for qd in (1, 32)),
    # Zeroes are read as holes, so what is read comes from the file.
    ("tls randread qd4 256k", ["weir tls", "qsd tls", "weir tls off"]),
    ("tls randwrite qd4 256k", ["weir tls null", "qsd tls null-co", "weir tls off null"]),
]


class Tls:
    """The rows' servers. `b` is the bench."""

    def __init__(self, b):
        self.b = b
        self.creds = os.path.join(b.d, "tls")

    def make_creds(self):
        os.mkdir(self.creds)

        def certtool(name, *args, template):
            with open(os.path.join(self.creds, "template"), "w") as f:
                f.write("\n".join(template) + "\n")
            subprocess.run(["certtool", "--outfile", os.path.join(self.creds, name), *args, "--template", f.name], check=True, stderr=subprocess.DEVNULL)

        for who in "ca", "server":
            certtool(who + "-key.pem", "--generate-privkey", "--key-type=ecdsa", "--curve=secp256r1", template=[])
        ca, ca_key, key = (os.path.join(self.creds, n) for n in ("ca-cert.pem", "ca-key.pem", "server-key.pem"))
        certtool("ca-cert.pem", "--generate-self-signed", "--load-privkey", ca_key, template=["cn = bench", "ca", "cert_signing_key"])
        certtool("server-cert.pem", "--generate-certificate", "--load-privkey", key, "--load-ca-certificate", ca, "--load-ca-privkey", ca_key,
                 template=["cn = localhost", "dns_name = localhost", "signing_key", "tls_www_server"])

    def server(self, who):
        b = self.b
        if not os.path.isdir(self.creds):
            self.make_creds()
        null = who.endswith("null") or who.endswith("null-co")
        uri = f"nbd{'' if ' off' in who else 's'}+unix:///v0?socket={b.sock}"
        if who.startswith("weir"):
            argv = [b.a.weir, "serve", "--nbd", "unix:" + b.sock, "--name", "v0", "--cache-size", "0", "--discard-log"]
            argv += [] if " off" in who else ["--tls-creds", self.creds, "--tls-verify-peer", "off"]
            argv += (["--log", b.log] if who.endswith("+ log") else []) + ["null:1T" if null else b.file]
        else:
            node = "driver=null-co,node-name=f0,size=1099511627776" if null else f"driver=file,node-name=f0,filename={b.file},cache.direct=on,aio=io_uring"
            argv = ["qemu-storage-daemon", "--object", f"tls-creds-x509,id=t,dir={self.creds},endpoint=server,verify-peer=off", "--blockdev", node,
                    "--nbd-server", f"addr.type=unix,addr.path={b.sock},max-connections=32,tls-creds=t", "--export",
                    "type=nbd,id=e0,node-name=f0,name=v0,writable=on"]
        return Server(b.d, argv, [uri], [b.sock])

    def jobs(self, workload, server, who):
        words = workload.split()
        if len(words) < 4:
            return self.b.nbd_jobs(" ".join(words[1:]), server.uris, who)
        return [["--ioengine=nbd", "--uri=" + server.uris[0], "--rw=" + words[1], "--bs=" + words[3], "--iodepth=" + words[2][2:], "--size=1000m"]]
