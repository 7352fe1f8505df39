#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""A standby host takes over a log that is mirrored to it over NBD; the image is a file that both can reach.

usage: takeover.py WEIR [TEST ...]
"""
import os
import sys

from harness import MIB, require, run_tests, skip, tests_of

try:
    import nbd      # noqa: the tests need it
except ImportError:
    skip("python3-libnbd is not installed")
from serve_lib import BLOCK, content
from standby import a_standby_takes_over, a_standby_that_was_away_is_refused


def all_that_was_flushed_is_there_and_a_side_that_was_left_behind_is_refused():
    with open("image", "wb") as f:
        f.truncate(8 * MIB)
    have = a_standby_takes_over("image")
    with open("image", "rb") as f:
        data = f.read()
    require(all(data[off:off + BLOCK] == content(n) for off, n in have.items()), "the image is complete")


def mark():
    try:
        return os.getxattr("image", "user.weir.mark")
    except OSError:     # a file system without
        with open("image.weir-mark", "rb") as f:
            return f.read()


def a_side_that_the_first_host_went_on_without_is_refused():
    with open("image", "wb") as f:
        f.truncate(8 * MIB)
    a_standby_that_was_away_is_refused("image", mark)


sys.exit(run_tests([t for t in tests_of(globals()) if t is not mark], folders=True))
