#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The disk contract over the NBD client, in front of the servers that are about: nbdkit with what its filters can do, qemu-nbd,
qemu-storage-daemon, weir itself, and a fake one with extended headers.

usage: nbd_client_conforms.py DISK_SHELL DISK_CONFORM WEIR
"""
from nbd_fake import *

CONFORM, WEIR = sys.argv[2:4]
del sys.argv[2:4]
SIZE = 3 << 20


class Program:
    """A server process that is there once its socket takes connections."""

    def __init__(self, address, *args):
        if not shutil.which(args[0]):
            skip(args[0] + " is not installed")
        self.log = tempfile.TemporaryFile("w+")
        self.proc = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        end = time.monotonic() + TIMEOUT
        while True:
            with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as s:
                try:
                    s.connect(address)
                    break
                except OSError:
                    self.log.seek(0)
                    check(self.proc.poll() is None and time.monotonic() < end, "the server starts: " + self.log.read())
                    time.sleep(0.01)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.proc.kill()
        self.proc.wait()


def conform(uri, *flags):
    out = subprocess.run([CONFORM, uri, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    check(out.returncode == 0, "%s conforms: %s" % (uri, out.stdout))


def nbdkit(*args, options="", flags=("short",)):
    with folder() as d:
        sock = d + "/s"
        with Program(sock, "nbdkit", "-f", "-U", sock, *[a.replace("DIR", d) for a in args]):
            uri = "nbd+unix:///?socket=%s%s" % (sock, options)
            with Shell(uri) as sh:
                limits = sh.limits()
            conform(uri, *flags)
            return limits


def image(d, size=SIZE):
    with open(d + "/image", "wb") as f:
        f.truncate(size)
    return d + "/image"


def over_nbdkit_memory():
    limits = nbdkit("memory", str(SIZE), flags=())
    equal((limits["fua"], limits["volatile_cache"]), (1, 1), "FUA and flush")


def over_nbdkit_without_structured_replies():
    nbdkit("--no-sr", "memory", str(SIZE))


def over_an_odd_size():
    equal(nbdkit("memory", str(SIZE + 1))["size"], SIZE + 1, "the size")


def over_blocks_of_4096_that_are_insisted_on():
    limits = nbdkit("--filter=blocksize-policy", "memory", str(SIZE), "blocksize-minimum=4096", "blocksize-preferred=65536",
                    "blocksize-maximum=1M", "blocksize-error-policy=error")
    equal((limits["align"], limits["opt_io"], limits["max_io"]), (4096, 65536, 1 << 20), "alignment, preferred and largest request")


def over_a_server_that_emulates_fua():
    equal(nbdkit("--filter=fua", "memory", str(SIZE), "fuamode=emulate")["fua"], 1, "FUA")


def over_a_server_that_lacks_zeroes_extents_and_cache():
    equal(nbdkit("--filter=nozero", "--filter=nocache", "--filter=noextents", "memory", str(SIZE))["fast_zero"], 0, "fast zeroes")


def over_four_connections():
    limits = nbdkit("--filter=delay", "memory", str(SIZE), "rdelay=1ms", "wdelay=1ms", options=",connections=4", flags=("slow",))
    equal(limits["multi_conn"], 1, "multi-conn")


def over_a_small_copy_that_flushes_by_itself():
    nbdkit("memory", str(SIZE), options=",replay=1M")


def over_no_copy():
    nbdkit("memory", str(SIZE), options=",replay=0")


def over_qemu_nbd():
    with folder() as d, Program(d + "/s", "qemu-nbd", "-f", "raw", "-k", d + "/s", "-x", "d", "--discard=unmap", "-t", "-e", "9", image(d)):
        conform("nbd+unix:///d?socket=%s/s" % d, "slow")


def over_qemu_storage_daemon_with_direct_io():
    with folder() as d, Program(d + "/s", "qemu-storage-daemon",
                                "--blockdev", "driver=file,node-name=f,filename=%s,cache.direct=on,aio=threads,discard=unmap" % image(d),
                                "--nbd-server", "addr.type=unix,addr.path=%s/s,max-connections=9" % d,
                                "--export", "type=nbd,id=e,node-name=f,name=d,writable=on"):
        conform("nbd+unix:///d?socket=%s/s,connections=2" % d, "slow")


def over_weir_itself():
    for disk in ("mem:%d" % SIZE, "mem:%d,align=4096" % (SIZE + 1)):
        with folder() as d, Program(d + "/s", WEIR, "serve", disk, "--nbd", "unix:%s/s" % d):
            uri = "nbd+unix:///?socket=%s/s,connections=2" % d
            with Shell(uri) as sh:
                check('"extended_headers":true' in sh.ok("status"), "extended headers are in use")
                for limit in ("fua", "volatile_cache", "fast_zero", "multi_conn"):
                    equal(sh.limits()[limit], 1, limit)
            conform(uri, "short")


def over_tcp():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with Program(("127.0.0.1", port), "nbdkit", "-f", "-i", "127.0.0.1", "-p", str(port), "memory", str(SIZE)):
        conform("nbd://127.0.0.1:%d/" % port, "short")
        try:
            socket.getaddrinfo("localhost", port)
        except OSError:
            print("this machine does not know the name localhost: names are not tested")
            return
        conform("nbd://localhost:%d/" % port, "slow")


def over_extended_headers():
    with folder() as d, Fake(d + "/s", size=SIZE, extended=True) as srv:
        conform(srv.uri(), "slow")
        with Shell(srv.uri()) as sh:
            check('"extended_headers":true' in sh.ok("status"), "extended headers are in use")


def over_plain_replies_and_no_block_sizes():
    with folder() as d, Fake(d + "/s", size=SIZE, structured=False, meta=False, block=None, flags=HAS | F_FLUSH) as srv:
        conform(srv.uri(), "slow")


if __name__ == "__main__":
    sys.exit(run_tests([over_nbdkit_memory, over_nbdkit_without_structured_replies, over_an_odd_size, over_blocks_of_4096_that_are_insisted_on,
               over_a_server_that_emulates_fua, over_a_server_that_lacks_zeroes_extents_and_cache, over_four_connections,
               over_a_small_copy_that_flushes_by_itself, over_no_copy, over_qemu_nbd, over_qemu_storage_daemon_with_direct_io, over_weir_itself, over_tcp,
               over_extended_headers, over_plain_replies_and_no_block_sizes]))
