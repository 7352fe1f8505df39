# SPDX-License-Identifier: MIT
"""What all scripts here share: memory that is kept, programs that are found once, checks, and the exit status of a test.

Exit status: 0 passed, 1 failed, 77 skipped with the reason as the last line. check() counts a failure and goes on; require() ends the test
function that called it. A script finds this file by the link in its own folder.
"""
import ctypes
import fcntl
import functools
import inspect
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
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
perturb = os.environ.pop("MALLOC_PERTURB_", None)


class Popen(subprocess.Popen):
    def __init__(self, args, *rest, **kw):
        if perturb and not isinstance(args, str) and os.path.basename(str(args[0])) in OURS:
            kw["env"] = dict(kw.get("env") or os.environ, MALLOC_PERTURB_=perturb)
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


def run(*args, timeout=120, **kw):
    """The finished process, with its output as text."""
    if "input" not in kw:
        kw["stdin"] = subprocess.DEVNULL
    return subprocess.run([program(str(args[0])), *map(str, args[1:])], capture_output=True, text=True, errors="replace", timeout=timeout, **kw)


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
    return status()


def failures():
    return _failures


def status():
    return 1 if _failures else 0
