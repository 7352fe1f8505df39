# SPDX-License-Identifier: MIT
"""A host whose log is mirrored to another one over NBD is lost, and the other one takes over: for any image that both can reach."""
import os
import shutil

from harness import equal, require, run
from serve_lib import MIB, WEIR, Serve, Writer, until


def a_standby_takes_over(disk):
    with open("standby.log", "wb") as f:
        f.truncate(32 * MIB)
    remote = "nbd+unix:///log?socket=side.nbd"
    with Serve("--name", "log", "standby.log", name="side") as side:
        p = run(WEIR, "log", "create", "--size", "32M", "a.log", remote)
        require(p.returncode == 0, p.stderr)
        with Serve("--log", "a.log", "--log", remote, "--name", "v", disk, name="a") as a:
            writer = Writer(a)
            for n in range(1, 200):
                writer.write(n)
            a.kill()
        side.end()
    # The host is gone with its log; the standby has the other side, and nothing else.
    os.rename("a.log", "stale.log")
    with Serve("--log", "standby.log", "--name", "v", disk, name="standby") as w:
        now = Writer(w, writer.have)
        now.verify()
        for n in range(100, 300):
            now.write(n)
        now.verify()
        now.write_many(range(1000, 1010))   # dirty at the end
        w.end()
    # It comes back with a side that was left behind: alone that is refused, and beside the other one it is left out until it is rebuilt.
    p = run(WEIR, "serve", "--nbd", "unix:refused.nbd", "--log", "stale.log", "--name", "v", disk)
    require(p.returncode and "newer" in p.stderr, "a log that was left behind is refused: " + p.stderr)
    with Serve("--log", "stale.log", "--log", "standby.log", "--name", "v", disk, name="both") as w:
        sides = w.status()["log"]["devices"]
        equal([d["state"] for d in sides], ["out", "in sync"], "the sides: %s" % sides)
        Writer(w, now.have).verify()
        p = run(WEIR, "log", "rebuild", "--control", "both.control")
        require(p.returncode == 0, p.stderr)
        until("it is a mirror again", lambda: [d["state"] for d in w.status()["log"]["devices"]] == ["in sync"] * 2)
        w.end()
    shutil.copy("stale.log", "a.log")       # it may be used alone now
    with Serve("--log", "a.log", "--name", "v", disk, name="a") as w:
        Writer(w, now.have).verify()
        until("the image is complete", lambda: w.dirty() == 0)
        w.end()
    return now.have


def a_standby_that_was_away_is_refused(disk, mark):
    """The first host went on without its mirror: what was flushed then is not on the standby, which must not serve what it has as if that were all.

    mark() is what the image carries: it is changed before anything is acknowledged that the standby does not have."""
    with open("away.log", "wb") as f:
        f.truncate(32 * MIB)
    remote = "nbd+unix:///log?socket=side.nbd"
    with Serve("--name", "log", "away.log", name="side") as side:
        p = run(WEIR, "log", "create", "--size", "32M", "b.log", remote)
        require(p.returncode == 0, p.stderr)
        with Serve("--log", "b.log", "--log", remote, "--log-timeout", "300ms", "--name", "v", disk, name="a") as a:
            writer = Writer(a)
            writer.write(1)
            before = mark()
            side.end()
            writer.write(2)
            require(a.status()["log"]["degraded"], "the log goes on without its mirror")
            require(mark() != before, "the image knows it when a flush has returned")
            a.kill()
    p = run(WEIR, "serve", "--nbd", "unix:refused.nbd", "--log", "away.log", "--name", "v", disk)
    require(p.returncode and "newer" in p.stderr, "a side that was left behind is refused: " + p.stderr)
    with Serve("--log", "b.log", "--name", "v", disk, name="a") as w:
        Writer(w, writer.have).verify()
        w.end()
