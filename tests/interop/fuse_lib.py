# SPDX-License-Identifier: MIT
"""What the FUSE tests share: a server with files, and what it says of itself.

Every test is called as `fuse_X.py WEIR [TEST ...]`.
"""
import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time

from harness import require, skip

WEIR = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else "weir"
MIB = 1 << 20
PUNCH, ZERO, KEEP = 2, 16, 1
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def need_fuse():
    if os.geteuid():
        skip("only root may mount")
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as e:
        skip("/dev/fuse: " + e.strerror)
    probe = subprocess.run(["unshare", "-m", "true"], check=False, stderr=subprocess.DEVNULL)
    if probe.returncode:
        skip("this container may not mount")


def control(path, **request):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        s.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(s.makefile().readline())
        return answer["result"] if answer["ok"] else answer["error"]


class Server:
    """`weir serve` in this folder; its messages are in the file `log`."""

    def __init__(self, *args):
        self.ctl = os.path.abspath("ctl")
        with open("log", "w") as log:
            self.proc = subprocess.Popen([WEIR, "serve", "--control", "ctl", *args], stderr=log)
        end = time.monotonic() + 30
        while "weir: ready" not in self.log():
            if self.proc.poll() is not None or time.monotonic() > end:
                self.proc.kill()
                clear()
                require(False, "the server starts: " + self.log())
            time.sleep(0.005)

    def log(self):
        with open("log") as f:
            return f.read()

    def ask(self, command, **args):
        return control(self.ctl, command=command, **args)

    def file(self, i=0):
        return self.ask("status")["fuse"][i]

    def flushes(self):
        return self.ask("stats")["volumes"][0]["flush"]["ops"]

    def kill(self):
        self.proc.kill()
        self.proc.wait()

    def stop(self, timeout=20):
        self.proc.send_signal(signal.SIGTERM)
        require(self.proc.wait(timeout) == 0, "it ends well: " + self.log())

    def __enter__(self):
        return self

    def __exit__(self, failed, *_):
        if self.proc.poll() is None:
            self.proc.terminate()
            self.proc.wait(20)
        if failed:
            clear()


def mounts():
    """The files of weir that are mounted below this folder."""
    with open("/proc/self/mountinfo") as f:
        return [line.split()[4] for line in f if " fuse.weir " in line and line.split()[4].startswith(os.getcwd() + "/")]


@contextlib.contextmanager
def opened(path, flags=os.O_RDWR):
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        with contextlib.suppress(OSError):  # the server may have been killed
            os.close(fd)


def fallocate(fd, mode, off, length):
    if libc.fallocate(fd, mode, off, length):
        raise OSError(ctypes.get_errno(), "fallocate")


def error_of(fn, *args):
    """The name of the error, None if there was none."""
    try:
        fn(*args)
    except OSError as e:
        return errno.errorcode[e.errno]
    return None


def clear():
    """No dead mount stays behind, whatever failed."""
    for path in mounts():
        subprocess.run(["umount", "-l", path], check=False)
