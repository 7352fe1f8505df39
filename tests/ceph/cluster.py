# SPDX-License-Identifier: MIT
"""A Ceph cluster for one test: a monitor and an OSD on loopback, in a temporary folder, as whoever runs it.

weir is the user "vm", who may do what the documentation says that weir needs, and no more; "reader" may only read.

    with Cluster("bluestore") as c:
        disk = c.create("img", "16M")
        with c.image("img") as i:
            i.create_snap("s")
        c.osd.kill(); c.osd.start()

What is asked of the cluster goes through Ceph's Python modules in this process: a call of `rbd` or `ceph` costs a third of a second of processor time.
Daemons are children of the test: they are ended by their process id, and the kernel ends them when the test dies (PR_SET_PDEATHSIG). What makes
it quick: no manager, and the waits of the monitor, of bluestore's device and of a client that meets a missing OSD made short.
"""
import base64
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid

try:
    import rados
    import rbd
except ImportError:
    rados = rbd = None
NEEDED = ("ceph-mon", "ceph-osd", "rbd", "monmaptool")
TIMEOUT = 60
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1

CONF = """\
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{port},v1:127.0.0.1:{port1}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
mon_data = {d}/mon
osd_data = {d}/osd
run_dir = {d}
crash_dir = {d}/crash
keyring = {d}/keyring
log_file = {d}/$type.log
mon_cluster_log_file = {d}/cluster.log
admin_socket =
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_allow_pool_delete = true
mon_data_avail_crit = 1
paxos_propose_interval = 0.02
paxos_min_wait = 0.01
osd_objectstore = {store}
memstore_device_bytes = 1073741824
bluestore_block_size = 4294967296
bdev_aio_poll_ms = 10
osd_memory_target = 939524096
# A client that was killed is dead after 3 s instead of 30, and one that met a missing OSD looks again soon.
osd_client_watch_timeout = 3
objecter_tick_interval = 0.2
objecter_timeout = 1
osd_heartbeat_interval = 1      # how soon it knows that it is full
[client]
log_file =
"""


VM = {"mon": "profile rbd", "osd": "profile rbd pool=rbd"}
READER = {"mon": "profile rbd-read-only", "osd": "profile rbd-read-only pool=rbd"}
USERS = {
    "mon.": {"mon": "allow *"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *"},
    "client.vm": VM,
    "client.reader": READER,
}


def new_key():
    """As ceph-authtool makes them: its type, when it was made, and what is secret."""
    return base64.b64encode(struct.pack("<HIIH", 1, int(time.time()), 0, 16) + os.urandom(16)).decode()


def keyring(users):
    return "".join("[%s]\n\tkey = %s\n%s" % (name, new_key(), "".join('\tcaps %s = "%s"\n' % c for c in caps.items())) for name, caps in users.items())


def why_not():
    """What is missing, or None."""
    missing = [p for p in NEEDED if not shutil.which(p)]
    missing += [] if rbd else ["python3-rbd"]
    return "%s not installed (ceph-mon, ceph-osd, ceph-common, python3-rbd)" % ", ".join(missing) if missing else None


def skip_without(weir):
    """Ends the test as skipped where there is no Ceph."""
    reason = why_not()
    if not reason:
        out = subprocess.run([weir, "image", "info", "rbd:pool/image,conf=/nonexistent"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if "without Ceph" in out.stderr or "librbd1" in out.stderr:
            reason = out.stderr.strip()
    if reason:
        print("skipped: " + reason)
        sys.exit(77)
    # A test that is ended for taking too long tidies up, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def dies_with_us():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Daemon:
    def __init__(self, cluster, kind, ident):
        self.cluster, self.kind, self.ident, self.proc, self.spent = cluster, kind, ident, None, 0

    def start(self):
        with open("%s/%s.out" % (self.cluster.dir, self.kind), "ab") as out:
            self.proc = subprocess.Popen(["ceph-" + self.kind, "-f", "-i", self.ident, "-c", self.cluster.conf], stdin=subprocess.DEVNULL,
                                         stdout=out, stderr=out, preexec_fn=dies_with_us)

    def stop(self):
        """Returns when it does stand still: on a busy machine its threads may go on for a while."""
        self.proc.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.proc.pid, os.WSTOPPED)

    def go_on(self):
        if self.proc and self.proc.poll() is None:
            self.proc.send_signal(signal.SIGCONT)

    def kill(self):
        if not self.proc or self.proc.returncode is not None:
            return
        self.proc.kill()
        try:
            usage = os.wait4(self.proc.pid, 0)[2]
            self.spent += usage.ru_utime + usage.ru_stime
        except ChildProcessError:
            pass    # whoever tidied up behind a test that failed was here
        self.proc.returncode = -signal.SIGKILL


class Cluster:
    def __init__(self, store, pool="rbd"):
        self.store, self.pool = store, pool
        self.dir = self.conf = self.env = self.rados = self.io = None
        self.mon, self.osd = Daemon(self, "mon", "a"), Daemon(self, "osd", "0")

    def run(self, *args, timeout=TIMEOUT, check=True, **kw):
        p = subprocess.run(args, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=self.env, timeout=timeout, **kw)
        if check and p.returncode:
            raise RuntimeError("%s: exit status %d: %s" % (" ".join(args), p.returncode, p.stderr.strip()))
        return p

    def rbd(self, *args, **kw):
        return self.run("rbd", *args, **kw).stdout

    def rbd_json(self, *args):
        return json.loads(self.rbd(*args, "--format", "json"))

    def command(self, prefix, **args):
        """Of the monitor: what `ceph` would ask for."""
        ret, _, text = self.rados.mon_command(json.dumps(dict(args, prefix=prefix)), b"")
        if ret:
            raise RuntimeError("%s: %s" % (prefix, text))

    def create(self, name, size="16M", features=None, ns=""):
        number = int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]]
        self.io.set_namespace(ns)
        rbd.RBD().create(self.io, name, number, old_format=False, features=features)
        self.io.set_namespace("")
        return self.disk(name)

    @contextlib.contextmanager
    def image(self, name, **kw):
        """As a client of librbd has it, in this process."""
        i = rbd.Image(self.io, name, **kw)
        try:
            yield i
        finally:
            i.close()

    def export(self, name, ns=""):
        """What is in the image, for any client."""
        self.io.set_namespace(ns)
        with self.image(name, read_only=True) as i:
            data = i.read(0, i.size())
        self.io.set_namespace("")
        return data

    def disk(self, name, options="", user="vm"):
        return "rbd:%s/%s,conf=%s,id=%s%s" % (self.pool, name, self.conf, user, options)

    def allow(self, user, caps):
        self.command("auth caps", entity="client." + user, caps=[word for c in caps.items() for word in c])

    def __enter__(self):
        began = time.monotonic()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        print("cluster: %s, up in %.1f s" % (self.store, time.monotonic() - began), flush=True)
        return self

    def _start(self):
        self.dir = tempfile.mkdtemp(prefix="weir-ceph-")
        self.conf = self.dir + "/ceph.conf"
        self.env = dict(os.environ, CEPH_CONF=self.conf)
        self.env.pop("CEPH_ARGS", None)
        for name in ("mon", "osd", "crash"):
            os.mkdir("%s/%s" % (self.dir, name))
        fsid, port = str(uuid.uuid4()), free_ports()
        with open(self.conf, "w") as f:
            f.write(CONF.format(d=self.dir, fsid=fsid, port=port, port1=port + 1, store=self.store))
        with open(self.dir + "/keyring", "w") as f:
            f.write(keyring(USERS))
        self.run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", "[v2:127.0.0.1:%d,v1:127.0.0.1:%d]" % (port, port + 1),
                 self.dir + "/monmap")
        self.run("ceph-mon", "-c", self.conf, "--mkfs", "-i", "a", "--monmap", self.dir + "/monmap")
        self.mon.start()
        osd_uuid = str(uuid.uuid4())
        mkfs = subprocess.Popen(["ceph-osd", "-c", self.conf, "--mkfs", "-i", "0", "--osd-uuid", osd_uuid], stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self.env)
        # A call that the cluster never answers would keep even a signal from the test.
        limits = {"rados_osd_op_timeout": str(TIMEOUT), "rados_mon_op_timeout": str(TIMEOUT)}
        self.rados = rados.Rados(conffile=self.conf, conf=limits)
        self.rados.connect(timeout=TIMEOUT)
        self.command("osd new", uuid=osd_uuid)
        if mkfs.wait(TIMEOUT):
            raise RuntimeError("`ceph-osd --mkfs` failed")
        self.osd.start()
        self.command("osd pool create", pool=self.pool, pg_num=8, pgp_num=8, pool_type="replicated")
        self.io = self.rados.open_ioctx(self.pool)
        rbd.RBD().pool_init(self.io, True)      # returns when the pool takes writes

    def fill(self, full=True):
        """The OSD takes itself for full, and clients let their writes wait; or it does so no more."""
        for name, ratio in (("nearfull", 0.85), ("backfillfull", 0.90), ("full", 0.95)):
            self.command("osd set-%s-ratio" % name, ratio=1e-6 if full else ratio)

    def spent(self):
        return ", ".join("%.1f s of the %s" % (d.spent, d.kind) for d in (self.mon, self.osd))

    def recover(self):
        """Whatever a test did."""
        for d in (self.osd, self.mon):
            d.go_on()
            if d.proc.poll() is not None:
                d.start()
        self.fill(False)

    def __exit__(self, *_):
        if self.io:
            self.io.close()
        if self.rados:
            self.rados.shutdown()
        self.osd.kill()
        self.mon.kill()
        if os.environ.get("WEIR_KEEP"):
            print("kept: " + self.dir)
        else:
            shutil.rmtree(self.dir, ignore_errors=True)


def free_ports():
    """Two neighbours below what the kernel gives out by itself."""
    for _ in range(100):
        port = random.randrange(10240, 32000, 2)
        with socket.socket() as a, socket.socket() as b:
            try:
                a.bind(("127.0.0.1", port))
                b.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                continue
    raise RuntimeError("no free ports")


the = Cluster("bluestore")      # that all parts of a test share


def main():
    """For trying things out: a cluster until end of file; the environment's CEPH_CONF is printed."""
    with Cluster(sys.argv[1] if len(sys.argv) > 1 else "memstore") as c:
        print("CEPH_CONF=" + c.conf, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
