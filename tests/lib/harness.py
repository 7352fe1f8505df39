# SPDX-License-Identifier: MIT
"""What all scripts here share: memory that is kept, programs that are found once, checks, and the exit status of a test.

Exit status: 0 passed, 1 failed, 77 skipped with the reason as the last line. check() counts a failure and goes on; require() ends the test
function that called it. A script finds this file by the link in its own folder.
"""
import atexit
import ctypes
import fcntl
import functools
import inspect
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

MIB = 1 << 20
F_OFD_GETLK = 36
_failures = 0


def keep_memory():
    """Images are read into buffers of many megabytes. Given back to the kernel each time, their page faults cost more than all else here.
    By mallopt() and not by the environment, which the programs under test would inherit."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mallopt(m_mmap_threshold, 1 << 30)
    mallopt(m_trim_threshold, 1 << 30)


keep_memory()

OURS = {"weir", "disk_shell", "disk_conform", "vhost_bench"}
# meson has malloc() fill what it gives. That finds faults in our programs; QEMU's, which are started a thousand times, it only makes half as slow again.
# What a server that is killed leaves for the next one, which need not come, goes with the test.
if "WEIR_SHM_DIR" not in os.environ:
    os.environ["WEIR_SHM_DIR"] = tempfile.mkdtemp(prefix="weir-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    atexit.register(shutil.rmtree, os.environ["WEIR_SHM_DIR"], True)
perturb = os.environ.pop("MALLOC_PERTURB_", None)
# These have buffers of some megabytes: of huge pages, those have a few page faults and not a thousand.
QEMU_TOOLS = {"qemu-img", "qemu-io"}
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1000000000:glibc.malloc.top_pad=6291456"}


def more_environment(args):
    """What a program gets beside the environment of all."""
    name = "" if isinstance(args, (str, bytes)) else os.path.basename(str(args[0]))
    if name in QEMU_TOOLS:
        return HUGE
    return {"MALLOC_PERTURB_": perturb} if perturb and name in OURS else {}


class Popen(subprocess.Popen):
    def __init__(self, args, *rest, **kw):
        more = more_environment(args)
        if more:
            kw["env"] = dict(kw.get("env") or os.environ, **more)
        super().__init__(args, *rest, **kw)


subprocess.Popen = Popen  # also for subprocess.run()
# So that servers and guests end with a test that is ended.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def skip(reason):
    print("skipped: " + reason, flush=True)
    sys.exit(status() or 77)


@functools.lru_cache(maxsize=None)
def program(name):
    """Its path; the name itself if there is none."""
    return shutil.which(name) or name


def need(*programs):
    for p in programs:
        if not shutil.which(p):
            skip(p + " is not installed")


def check(what, cond, detail=""):
    global _failures
    if not cond:
        _failures += 1
        print("FAILED: %s%s" % (what, ": " + str(detail)[:2000] if detail != "" else ""), flush=True)
    return cond


def require(cond, what):
    if not cond:
        raise AssertionError(what)


def equal(got, want, what):
    require(got == want, "%s is %.300r, wanted %.300r" % (what, got, want))


class Starter:
    """Runs a program many times: quick_start.c, preloaded into one process of it, forks behind what the dynamic linker has to do."""

    PRELOADED = os.path.join(os.path.dirname(os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "/")), "../../tests/lib/libquick_start.so")
    started, lock = {}, threading.Lock()

    def __init__(self, path):
        self.environ = dict(os.environ)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen([path], stdin=theirs, env=dict(os.environ, LD_PRELOAD=os.path.abspath(self.PRELOADED)))
        atexit.register(self.end)

    @classmethod
    def of(cls, path, kw):
        """One for that program, or None where it has to be started the ordinary way."""
        if os.path.basename(path) not in QEMU_TOOLS or set(kw) - {"input"} or not os.path.exists(cls.PRELOADED):
            return None
        if path not in cls.started:
            cls.started[path] = cls(path)
        return cls.started[path] if cls.started[path].environ == os.environ else None

    def number(self):
        data = self.socket.recv(4)
        require(len(data) == 4, "quick_start answers")
        return int.from_bytes(data, sys.byteorder)

    def run(self, args, timeout, text=""):
        """As subprocess.run() does."""
        files = [open(os.memfd_create(name), "w+", errors="replace") for name in ("in", "out", "err")]
        files[0].write(text)
        files[0].seek(0)
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            self.socket.settimeout(timeout)
            socket.send_fds(self.socket, [b"".join(os.fsencode(a) + b"\0" for a in args)], [folder, *(f.fileno() for f in files)])
            pid = self.number()
            try:
                status = self.number()
            except BaseException as e:
                os.kill(pid, signal.SIGKILL)
                self.number()
                raise subprocess.TimeoutExpired(args, timeout) if isinstance(e, socket.timeout) else e
            for f in files[1:]:
                f.seek(0)
            return subprocess.CompletedProcess(args, os.waitstatus_to_exitcode(status), *(f.read() for f in files[1:]))
        finally:
            os.close(folder)
            for f in files:
                f.close()

    def end(self):
        self.socket.close()
        self.process.wait()


def run(*args, timeout=120, **kw):
    """The finished process, with its output as text."""
    words = [program(str(args[0])), *map(str, args[1:])]
    # One at a time; what runs beside it in another thread is started as ever.
    if Starter.lock.acquire(blocking=False):
        try:
            starter = Starter.of(words[0], kw)
            if starter:
                return starter.run(words, timeout, kw.get("input", ""))
        finally:
            Starter.lock.release()
    if "input" not in kw:
        kw["stdin"] = subprocess.DEVNULL
    return subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=timeout, **kw)


def wait_unlocked(*paths):
    """For programs that do not wait, as QEMU's: the kernel takes the io_uring of a process that was killed apart behind its back, and its locks on
    files live until then."""
    end = time.monotonic() + 60
    for path in paths:
        with open(path, "rb") as f:
            # A write lock on the bytes that image locks use, see src/backend/file_lock.c.
            want = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 100, 104, 0)
            while struct.unpack("hhqqi4x", fcntl.fcntl(f, F_OFD_GETLK, want))[0] != fcntl.F_UNLCK:
                require(time.monotonic() < end, "the locks of a process that was killed are gone from " + path)
                time.sleep(0.005)


def seed():
    """WEIR_SEED, or the same one each time; printed."""
    s = int(os.environ.get("WEIR_SEED") or "20260101", 0)
    print("WEIR_SEED=%d" % s, flush=True)
    return s


def scale():
    return float(os.environ.get("WEIR_SCALE") or 1)


def tests_of(names):
    """The functions of a script that take no argument: their names say what is promised."""
    return [f for f in names.values() if inspect.isfunction(f) and f.__module__ == "__main__" and not inspect.signature(f).parameters]


def run_tests(tests, folders=False, chosen=None):
    """Runs each, or those that the command line names, if wanted in a folder of its own. The exit status."""
    global _failures
    chosen = sys.argv[2:] if chosen is None else chosen
    if set(chosen) - {t.__name__ for t in tests}:
        sys.exit("there is no test " + " ".join(sorted(set(chosen) - {t.__name__ for t in tests})))
    for t in tests:
        if chosen and t.__name__ not in chosen:
            continue
        print(t.__name__, flush=True)
        began = os.times()
        folder = tempfile.TemporaryDirectory(prefix="weir-test-") if folders else None
        try:
            if folder:
                os.chdir(folder.name)
            t()
        except Exception as e:
            _failures += 1
            traceback.print_exc(file=sys.stdout)
            print("FAILED: %s: %s" % (t.__name__, e), flush=True)
        finally:
            if folder:
                os.chdir("/")
                folder.cleanup()
        now = os.times()
        print("%s: %.1f s of processor time in %.1f s" % (t.__name__, sum(now[:4]) - sum(began[:4]), now[4] - began[4]), flush=True)
    if _failures:
        end_children()
    return status()


def end_children():
    """What a test that failed has left running holds our output open, and whoever reads that would wait until a time-out."""
    for task in os.listdir("/proc/self/task"):
        try:
            with open("/proc/self/task/%s/children" % task, encoding="ascii") as f:
                for pid in f.read().split():
                    os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass    # it has just ended, or a kernel without this file


def failures():
    return _failures


def status():
    return 1 if _failures else 0
