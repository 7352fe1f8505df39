# SPDX-License-Identifier: MIT
"""A disk held by disk_shell, for scripts that do one thing after the other."""
import os
import subprocess
import sys

from harness import *

shell = os.path.abspath(sys.argv[1])


class Disk:
    """Opens `disk`; `error` is the message if that fails. Closes it at the end of the block."""

    def __init__(self, disk, mode="", under=()):
        self.p = subprocess.Popen([*under, shell, disk, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, text=True)
        word = self.p.stdout.readline().rstrip("\n").split(" ", 2)
        self.pid = self.p.pid
        self.error = "" if word[:2] == ["open", "ok"] else word[2]
        self.size = int(word[2]) if not self.error else 0

    def do(self, command):
        """The words behind "ok", or the error's number as an int."""
        self.p.stdin.write("t %s\n" % command)
        self.p.stdin.flush()
        word = self.p.stdout.readline().split()
        return word[2:] if word[1] == "ok" else int(word[1])

    def at_once(self, *commands):
        """The answers of commands that are in flight together, in the order of the commands."""
        self.p.stdin.write("".join("%d %s\n" % (i, c) for i, c in enumerate(commands)))
        self.p.stdin.flush()
        words = dict(self.p.stdout.readline().split(" ", 1) for _ in commands)
        return [words[str(i)].split() for i in range(len(commands))]

    def all(self, *commands):
        for command in commands:
            answer = self.do(command)
            assert isinstance(answer, list), "%s: %s" % (command, answer)

    def map(self):
        """[(offset, length, "zero" or "data")], neighbours of one kind joined."""
        rows, off = [], 0
        while off < self.size:
            word = self.do("extent %d %d" % (off, self.size - off))
            kind = "zero" if "zero" in word else "data"
            if rows and rows[-1][2] == kind:
                rows[-1] = (rows[-1][0], rows[-1][1] + int(word[0]), kind)
            else:
                rows.append((off, int(word[0]), kind))
            off += int(word[0])
        return rows

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.p.stdin.close()
        self.p.wait(timeout=60)
        self.p.stdout.close()


def open_error(disk, mode=""):
    """The message with which it is refused, "" if it opens."""
    with Disk(disk, mode) as d:
        return d.error
