#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""What the crash tests leave after power cuts, at any I/O, is an image without damage for QEMU's checker, too; leaks aside.

usage: qcow2_cuts.py WEIR CRASH_QCOW2 CRASH_QCOW2_TOOLS CRASH [TEST ...]
"""
from qcow2_lib import *  # noqa: F403

DRIVER, TOOLS, CRASH = (os.path.abspath(p) for p in sys.argv[2:5])
MOST = 12


def look(program, *args, seeds):
    """A part of the images of each seed, from the first to the last."""
    for s in seeds:
        # What is named as a backing file has to be there.
        os.makedirs("cuts", exist_ok=True)
        with open("cuts/base", "wb") as f:
            f.truncate(MIB)
        p = subprocess.run([program, *args], env=dict(os.environ, WEIR_SEED=str(s), WEIR_KEEP_IMAGES="cuts"), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                           timeout=120)
        check("%s of seed %d" % (args, s), p.returncode == 0, p.stdout + p.stderr)
        images = sorted(n for n in os.listdir("cuts") if n != "base")
        check("%s of seed %d leaves images" % (args, s), images)
        for n in images[::max(1, int(len(images) / MOST / scale()))]:
            found = qemu_check("cuts/" + n)
            check("%s of seed %d, image %s: no damage" % (args, s, n), found and found[0] == 0 and found[2] == 0, found)
        shutil.rmtree("cuts")


def of_the_driver():
    first = seed()
    look(DRIVER, "cut", "1", seeds=range(first, first + 2))


def of_snapshots_new_images_and_other_sizes():
    first = seed()
    for mode in ("snapshot", "make", "bitmaps"):
        look(TOOLS, mode, "1", seeds=[first])


def below_a_log():
    look(CRASH, "--variant", "qcow2", "--seeds", "1", seeds=[seed()])


if __name__ == "__main__":
    need("qemu-img")
    sys.exit(run_tests([of_the_driver, of_snapshots_new_images_and_other_sizes, below_a_log], folders=True, chosen=sys.argv[5:]))
