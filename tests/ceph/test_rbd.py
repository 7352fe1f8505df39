#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""RBD images in a real cluster, one for all tests: rbd_disk.py while it is well, rbd_faults.py while it is not.

usage: test_rbd.py WEIR DISK_SHELL DISK_CONFORM [TEST ...]
"""
import functools
import inspect
import os
import sys

import cluster
from harness import run_tests, skip

WEIR, SHELL = (os.path.abspath(p) for p in sys.argv[1:3])
cluster.skip_without(WEIR)
try:
    import nbd      # noqa: the tests need it
except ImportError:
    skip("python3-libnbd is not installed")
# Each takes its program from the command line's first word.
sys.argv[1] = SHELL
import file_lib     # noqa
sys.argv[1] = WEIR
import serve_lib    # noqa
import rbd_disk     # noqa
import rbd_faults   # noqa


def steady(test):
    """Leaves the cluster as it was, however the test ends."""
    @functools.wraps(test)
    def wrapped():
        try:
            test()
        finally:
            cluster.the.recover()
    return wrapped


def tests_of(module):
    return [steady(f) for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__ and not inspect.signature(f).parameters]


with cluster.the:
    status = run_tests(tests_of(rbd_disk) + tests_of(rbd_faults), folders=True, chosen=sys.argv[4:])
t = os.times()
print("processor time: %.1f s here, %.1f s of all else; %s" % (t.user + t.system, t.children_user + t.children_system, cluster.the.spent()))
sys.exit(status)
