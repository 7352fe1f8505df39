#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The command line says what the manual says, and a usage error is one line and exit 2.

usage: test_help.py WEIR MKHELP PAGE...
"""
import importlib.machinery
import importlib.util
import subprocess
import sys

import harness
from harness import check, status

weir, mkhelp_path, pages = sys.argv[1], sys.argv[2], sys.argv[3:]
loader = importlib.machinery.SourceFileLoader("mkhelp", mkhelp_path)
mkhelp = importlib.util.module_from_spec(importlib.util.spec_from_loader("mkhelp", loader))
loader.exec_module(mkhelp)


def run(*args):
    return harness.run(weir, *args, timeout=20)


def check_usage_error(*args):
    p = run(*args)
    what = "weir " + " ".join(args)
    check(what + " exits with 2", p.returncode == 2, "exit %d" % p.returncode)
    check(what + " prints nothing on standard output", p.stdout == "", p.stdout)
    check(what + " prints one line", p.stderr.count("\n") == 1 and p.stderr.startswith("weir"), repr(p.stderr))
    return p.stderr


def normal(option):
    """"-f, --force" and "-f --force" are the same."""
    return option.replace(",", "")


def check_verb(entry):
    verb = entry.verb.split()
    for args in (verb + ["-h"], verb + ["--help"], ["help"] + verb):
        p = run(*args)
        check("weir %s prints the help" % " ".join(args),
              p.returncode == 0 and p.stderr == "" and p.stdout.startswith("usage: weir"), p.stderr)
    if entry.commands:
        check_usage_error(*verb)
        check_usage_error(*verb, "no-such-command")
        return
    accepted = run(*verb, "--list-options").stdout.splitlines()
    documented = [normal(left) for left, _ in entry.options]
    for option in accepted:
        check("%s(1) has the option of weir %s" % (verb[0], entry.verb), option in documented, option)
    for option in documented:
        check("weir %s accepts what its page has" % entry.verb, option in accepted, option)
    check_usage_error(*verb, "--no-such-option")
    for option in accepted:
        words = option.split()
        name = next(w for w in words if w.startswith("--"))
        check_usage_error(*verb, name if words[-1] != name else name + "=x")
        if "|" in words[-1]:
            message = check_usage_error(*verb, name, "no-such-choice")
            check("the message names the choices", words[-1] in message, message)


entries = mkhelp.read_pages(pages)
known = check_usage_error("no-such-verb")
check_usage_error()
p = run("--version")
check("--version", p.returncode == 0 and p.stdout.startswith("weir "))
p = subprocess.run("%s -h >/dev/full" % weir, shell=True, capture_output=True)
check("a full output is a failure", p.returncode == 1)

built = known.split("known are: ")[1].split(";")[0].split(", ")
for entry in entries[1:]:
    if entry.verb.split()[0] in built:
        check_verb(entry)
        print("checked weir %s" % entry.verb)
documented = [e.verb for e in entries]
for verb in built:
    check("each verb has a page", verb == "help" or verb in documented, verb)
sys.exit(status())
