#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""`weir image check` finds each kind of damage that QEMU finds, says where, and repairs it so that QEMU has nothing to add.

usage: qcow2_check.py WEIR
"""
from qcow2_lib import *  # noqa: F403
from serve_lib import Serve

made = tempfile.TemporaryDirectory(prefix="weir-qcow2-")


def make(name="d.qcow2", options="cluster_size=4k", snapshot=False):
    """64 KiB of data here and there, a compressed cluster, zeroes. Returns its tables; their `raw` is the name of a raw copy."""
    save = os.path.join(made.name, "%s-%d" % (options.replace(",", "-"), snapshot))
    if "data_file" in options or not os.path.exists(save):
        make_anew(name, options, snapshot)
        shutil.copy(name, save)
        shutil.move(name + ".raw", save + ".raw")
    shutil.copy(save, name)
    t = Tables(name)
    t.raw = save + ".raw"
    return t


def make_anew(name, options, snapshot):
    qemu_img("create", "-q", "-f", "qcow2", "-o", options, name, "24M")
    qemu_io(name, *["write -q -P %d %dk 64k" % (i + 1, i * 2048 + 64) for i in range(8)], "write -q -z 1M 64k")
    if "data_file" not in options:
        qemu_io(name, "write -q -c -P 9 20M %s" % ("2M" if "2M" in options else "64k"))
    if snapshot:
        qemu_img("snapshot", "-c", "one", name)
        qemu_io(name, "write -q -P 77 2112k 16k")
    qemu_img("convert", "-O", "raw", name, name + ".raw")


def kinds(found):
    return sorted({f["kind"] for f in found["findings"]})


def damaged(what, t, want, kind=None, data_lost=(), repaired=True):
    """weir and QEMU agree on damage and leaks; a repair leaves what both call clean, and no byte changes but those in data_lost."""
    before = open(t.path, "rb").read()
    q = qemu_check(t.path)
    status, w = weir_check(t.path)
    check(what + ": a check changes nothing", open(t.path, "rb").read() == before)
    check(what + ": weir's exit status", status == want, "%s %s" % (status, w))
    if isinstance(w, str):
        return
    check(what + ": QEMU sees it, too", q and (q[0] > 0) == (w["corruptions"] > 0), "%s %s" % (q, w))
    if not w["corruptions"]:
        check(what + ": as many leaks", q[1] == w["leaks"], "%s %s" % (q, w))
    if kind:
        check(what + ": it is a " + kind, kind in kinds(w), w["findings"])
    check(what + ": a finding has its offset", all(f["offset"] < os.path.getsize(t.path) + (1 << 22) and "0x" in f["text"] for f in w["findings"]),
          w["findings"])
    if w["corruptions"] and w["leaks"]:
        shutil.copy(t.path, "leaks.qcow2")
        weir_check("leaks.qcow2", "--repair=leaks")
        check(what + ": --repair=leaks leaves damage alone", open("leaks.qcow2", "rb").read() == before)
    status, after = weir_check(t.path, "--repair=all")
    if not repaired:
        return
    check(what + ": repaired", status == 0, "%s %s" % (status, after))
    check(what + ": QEMU calls it clean", qemu_check(t.path) == (0, 0, 0), t.path)
    if not data_lost:
        equal(t.raw, t.path, "-f", "raw", "-F", "qcow2")
        return
    qemu_img("convert", "-O", "raw", t.path, "after.raw")
    old, new = bytearray(open(t.raw, "rb").read()), bytearray(open("after.raw", "rb").read())
    for a, b in data_lost:
        old[a:b] = new[a:b] = bytes(b - a)
    check(what + ": the data is as before", old == new)


def clean_images():
    for options in ("cluster_size=512", "cluster_size=4k,refcount_bits=1", "cluster_size=2M,refcount_bits=64", "compat=0.10",
                    "extended_l2=on,cluster_size=16k", "data_file=x.data", "data_file=x.data,data_file_raw=on", "lazy_refcounts=on"):
        for snapshot in (False, True):
            if snapshot and ("data_file" in options or "refcount_bits=1" in options):
                continue
            for n in ("d.qcow2", "x.data"):
                if os.path.exists(n):
                    os.unlink(n)
            t = make(options=options, snapshot=snapshot)
            status, w = weir_check(t.path)
            check("%s is clean" % options, status == 0 and not w["findings"], w)
            q = json.loads(qemu_img("check", "--output=json", t.path))
            for key in ("image-end-offset", "total-clusters", "allocated-clusters", "compressed-clusters", "fragmented-clusters"):
                check("%s: %s is QEMU's" % (options, key), q.get(key, 0) == w[key] or "data_file" in options, (q, w))
    status, w = weir_check("d.qcow2", "-f", "raw")
    check("raw cannot be checked", status == 1 and "raw" in w, w)


def leaks():
    for snapshot in (False, True):
        t = make(snapshot=snapshot)
        end = -(-os.path.getsize(t.path) // t.cluster) * t.cluster
        with open(t.path, "r+b") as f:
            f.truncate(end + 3 * t.cluster)
        for i in range(3):
            t.set_refcount(end + i * t.cluster, 1)
        damaged("leaked clusters", t, 3, "leak")
        t = make("e.qcow2", snapshot=snapshot)
        at, entry = t.l2_entry(64 << 10)
        t.set_refcount(entry & OFFSET, 5)
        shutil.copy(t.path, "f.qcow2")
        status, w = weir_check(t.path)
        check("a refcount that is too large is a leak, or with its flag damage", status in (3, 4), w)
        status, _ = weir_check("f.qcow2", "--repair=all")
        check("it is repaired", status == 0)
        clean("it is repaired", "f.qcow2")


def refcounts():
    for snapshot in (True,):
        t = make(snapshot=snapshot)
        t.set_refcount(t.l2_entry(64 << 10)[1] & OFFSET, 0)
        damaged("a data cluster with refcount 0", t, 4, "refcount")
        t = make(snapshot=snapshot)
        t.set_refcount(t.l2(64 << 10)[1], 0)
        damaged("an L2 table with refcount 0", t, 4, "refcount")
    t = make(snapshot=True)
    t.set_refcount(t.l2_entry(64 << 10)[1] & OFFSET, 1)
    damaged("a shared cluster with refcount 1", t, 4, "refcount")
    for what, off in (("L1 table", "l1"), ("refcount table", "rt"), ("snapshot table", "snapshot_table")):
        t = make(snapshot=True)
        t.set_refcount(getattr(t, off), 0)
        damaged("a %s with refcount 0" % what, t, 4, "refcount")
    t = make()
    t.set_refcount(0, 0)
    damaged("a header with refcount 0", t, 4, "refcount")


def flags():
    for snapshot in (False,):
        t = make(snapshot=snapshot)
        at, e = t.l2_entry(64 << 10)
        t.put(at, e ^ COPIED)
        damaged("a wrong COPIED flag in an L2 entry", t, 4, "flag")
        t = make(snapshot=snapshot)
        at, _ = t.l2(64 << 10)
        t.put(at, t.get(at) ^ COPIED)
        damaged("a wrong COPIED flag in an L1 entry", t, 4, "flag")
    t = make(options="extended_l2=on,cluster_size=16k")
    at, e = t.l2_entry(64 << 10)
    t.put(at, e ^ COPIED)
    damaged("a wrong COPIED flag in an extended entry", t, 4, "flag")


def entries():
    k = 1 << 10
    t = make()
    at, e = t.l2_entry(64 * k)
    t.put(at, e + 512)
    damaged("an unaligned data cluster", t, 4, "entry", data_lost=[(64 * k, 68 * k)])
    t = make()
    at, e = t.l2_entry(64 * k)
    t.put(at, e | 1 << 58)
    damaged("reserved bits in an L2 entry", t, 4, "entry", data_lost=[(64 * k, 68 * k)])
    t = make()
    at, e = t.l2_entry(64 * k)
    t.put(at, COPIED | 1 << 40)
    damaged("a data cluster beyond the end", t, 4, "entry", data_lost=[(64 * k, 68 * k)])
    t = make(snapshot=True)
    at, e = t.l2(0)
    t.put(at, COPIED | 1 << 40)
    damaged("an L2 table beyond the end", t, 4, "entry", data_lost=[(0, 2048 * k)])
    t = make()
    at, e = t.l2(0)
    t.put(at, t.get(at) + 512)
    damaged("an unaligned L2 table", t, 4, "entry", data_lost=[(0, 2048 * k)])
    t = make()
    at, e = t.l2_entry(20 << 20)
    t.put(at, COMPRESSED | 1 << 40)
    damaged("a compressed cluster beyond the end", t, 4, "entry", data_lost=[(20 << 20, (20 << 20) + 4 * k)])
    t = make(options="extended_l2=on,cluster_size=16k")
    at, e = t.l2_entry(64 * k)
    t.put(at + 8, 0xffffffffffffffff)
    damaged("subclusters that are data and zero", t, 4, "entry", data_lost=[(64 * k, 80 * k)])


def overlaps():
    k = 1 << 10
    t = make()
    at, e = t.l2_entry(64 * k)
    t.put(at, COPIED | t.l1)
    damaged("data on the L1 table", t, 4, "overlap", data_lost=[(64 * k, 68 * k)])
    t = make()
    at, e = t.l2_entry(64 * k)
    t.put(at, COPIED | t.l2(64 * k)[1])
    damaged("data on its L2 table", t, 4, "overlap", data_lost=[(64 * k, 68 * k)])
    t = make()
    at, e = t.l2_entry(64 * k)
    t.put(at, COPIED | t.get(t.rt))
    damaged("data on a refcount block", t, 4, "overlap", data_lost=[(64 * k, 68 * k)])
    t = make()
    at, e = t.l2_entry(64 * k)
    t.put(at, t.l2_entry(68 * k)[1])
    damaged("two guest clusters in one", t, 4, "refcount", data_lost=[(64 * k, 68 * k)])
    t = make()
    t.put(t.l2(4 << 20)[0], t.l1 | COPIED)
    damaged("an L2 table on the L1 table", t, 4, "overlap", data_lost=[(4 << 20, 6 << 20)])


def refcount_structures():
    for snapshot in (True,):
        t = make(snapshot=snapshot)
        t.put(t.rt, 0)
        damaged("no refcount block", t, 4, "refcount")
        t = make(snapshot=snapshot)
        t.put(t.rt, t.get(t.rt) + 512)
        damaged("an unaligned refcount block", t, 4, "refcount-block")
        t = make(snapshot=snapshot)
        t.put(t.rt, 1 << 45)
        damaged("a refcount block beyond the end", t, 4, "refcount-block")
        t = make(snapshot=snapshot)
        t.put(t.rt, t.l2_entry(64 << 10)[1] & OFFSET)
        damaged("a refcount block on guest data", t, 4)
        t = make(snapshot=snapshot)
        t.put(t.rt, t.l1)
        damaged("a refcount block on the L1 table", t, 4, "overlap")
        t = make(snapshot=snapshot)
        t.put(t.rt + 8, t.get(t.rt))
        damaged("two refcount blocks in one", t, 4, "overlap")


def snapshot_tables():
    t = make(snapshot=True)
    shutil.copy(t.path, "save.qcow2")
    for what, off, value, n in (("its L1 table beyond the end", 0, 1 << 45, 8), ("an unaligned L1 table", 0, 513, 8), ("extra data too long", 36, 5000, 4),
                                ("an L1 table that is too large", 8, 0xffffffff, 4), ("a name beyond the file", 14, 65535, 2)):
        shutil.copy("save.qcow2", t.path)
        t.put(t.snapshot_table + off, value, n)
        status, w = weir_check(t.path)
        check("a snapshot with %s is found" % what, status == 4, w)
        if what != "an L1 table that is too large":
            check("QEMU finds it, too: " + what, run("qemu-img", "check", t.path).returncode != 0)
        before = open(t.path, "rb").read()
        status, w = weir_check(t.path, "--repair=leaks")
        check("and frees nothing that may be the snapshot's", open(t.path, "rb").read() == before)
        p = run(WEIR, "image", "snapshot", "-c", "two", t.path)
        check("no snapshot is made of it", p.returncode == 1 and len(p.stderr.splitlines()) == 1 and open(t.path, "rb").read() == before, p.stderr)
    for what, off, value, n in (("a table beyond the end", 64, 1 << 45, 8), ("too many snapshots", 60, 65000, 4)):
        shutil.copy("save.qcow2", t.path)
        t.put(off, value, n)
        status, w = weir_check(t.path)
        check("%s is found" % what, status == 4, w)
        p = run(WEIR, "serve", "--nbd", "unix:snap.nbd", t.path)
        check("%s: it is not served for writing" % what, p.returncode == 1 and "--read-only" in p.stderr and "weir image check" in p.stderr, p.stderr)
        with Serve("--read-only", "--name", "v", t.path) as w:
            check("%s: but for reading" % what, run("qemu-io", "-r", "-f", "raw", "-c", "read -P 1 64k 64k", w.uri()).returncode == 0)


def bits_of_the_header():
    t = make()
    t.put(72, 2)
    status, _ = weir_check(t.path)
    check("the corrupt bit alone is no damage to be counted", status == 0)
    weir_check(t.path, "--repair=all")
    check("a repair clears the corrupt bit", Tables(t.path).incompat == 0)
    t = make("e.qcow2", options="lazy_refcounts=on,cluster_size=4k")
    t.put(72, 1)
    t.set_refcount(t.l2_entry(64 << 10)[1] & OFFSET, 0)
    status, w = weir_check(t.path)
    check("a writer that was killed leaves the dirty bit and wrong refcounts", status == 4, w)
    status, w = weir_check(t.path, "--repair=all")
    check("which a repair clears, with the refcounts right", status == 0 and Tables(t.path).incompat == 0 and qemu_check(t.path) == (0, 0, 0), w)


def set_entry(value):
    """Damages the L2 entry of what lies at 64 KiB."""
    def damage(t):
        at, e = t.l2_entry(64 << 10)
        t.put(at, value(t, e))
    return damage


def put_l1(value):
    def damage(t):
        at = t.l2(64 << 10)[0]
        t.put(at, value(t, t.get(at)))
    return damage


EXT = "extended_l2=on,cluster_size=16k"
# What is wrong, in an image of which options, with a snapshot or not, and how it comes about.
HOSTILE = (
    ("an L2 table at an odd place", "", False, put_l1(lambda t, e: e + 512)),
    ("an L2 table on the L1 table", "", False, put_l1(lambda t, e: t.l1 | COPIED)),
    ("an L2 table on a refcount block", "", False, put_l1(lambda t, e: t.get(t.rt) | COPIED)),
    ("an L2 table that is another one's", "", False, put_l1(lambda t, e: t.get(t.l2(4 << 20)[0]))),
    ("an L2 table behind the end", "", False, put_l1(lambda t, e: COPIED | 1 << 40)),
    ("data at an odd place", "", False, set_entry(lambda t, e: e + 512)),
    ("zeroes at an odd place", "", False, set_entry(lambda t, e: e + 512 | 1)),
    ("data on its L2 table", "", False, set_entry(lambda t, e: COPIED | t.l2(64 << 10)[1])),
    ("data on the L1 table", "", False, set_entry(lambda t, e: COPIED | t.l1)),
    ("data on the refcount table", "", False, set_entry(lambda t, e: COPIED | t.rt)),
    ("data on a refcount block", "", False, set_entry(lambda t, e: COPIED | t.get(t.rt))),
    ("data on the snapshot table", "", True, set_entry(lambda t, e: COPIED | t.snapshot_table)),
    ("data on the L1 table of a snapshot", "", True, set_entry(lambda t, e: COPIED | t.get(t.snapshot_table))),
    ("subclusters that are data and zero", EXT, False, lambda t: t.put(t.l2_entry(64 << 10)[0] + 8, (1 << 64) - 1)),
    ("subclusters at an odd place", EXT, False, set_entry(lambda t, e: e + 512)),
    ("a refcount block at an odd place", "", False, lambda t: t.put(t.rt, t.get(t.rt) + 512)),
    ("refcount 0 for the header", "", False, lambda t: t.set_refcount(0, 0)),
    ("refcount 0 for the L1 table", "", False, lambda t: t.set_refcount(t.l1, 0)),
    ("refcount 0 for an L2 table", "", False, lambda t: t.set_refcount(t.l2(64 << 10)[1], 0)),
    ("refcount 0 for the refcount table", "", False, lambda t: t.set_refcount(t.rt, 0)),
    ("compressed data behind the end", "", False, set_entry(lambda t, e: COMPRESSED | 1 << 40)),
)


def the_corrupt_bit_is_set_where_qemu_sets_it():
    """By a read and by a write of what is damaged, and where refcounts are, by a write that needs new clusters."""
    places = {"read": "read 64k 4k", "write": "write 64k 4k", "new": "write 18M 64k"}
    todo, opened = [], []
    for i, (what, options, snapshot, damage) in enumerate(HOSTILE):
        t = make(options=options or "cluster_size=4k", snapshot=snapshot)
        damage(t)
        for op in ("new",) if "refcount" in what.split(" on ")[0] else ("read", "write"):
            todo.append((what, op, "%d-%s" % (i, op)))
            for who in ("qemu", "weir"):
                shutil.copy(t.path, "%s-%s.qcow2" % (who, todo[-1][2]))
            # What cannot even be opened to be written to is marked then.
            if op != "new" or run(WEIR, "image", "resize", "-q", "weir-%s.qcow2" % todo[-1][2], "24M").returncode == 0:
                opened.append(todo[-1])
    run("qemu-io", *(x for _, op, n in todo for c in ("open -o driver=qcow2 qemu-%s.qcow2" % n, places[op], "close") for x in ("-c", c)))
    for at in range(0, len(opened), 16):
        some = opened[at:at + 16]
        with Serve(*(x for _, _, n in some for x in ("--name", n)), *("weir-%s.qcow2" % n for _, _, n in some)) as w:
            run("qemu-io", *(x for _, op, n in some for c in ("open -o driver=raw " + w.uri(n), places[op], "close") for x in ("-c", c)))
            check("the server lives", w.proc.poll() is None, w.text())
    seen = 0
    for what, op, n in todo:
        bit = {who: Tables("%s-%s.qcow2" % (who, n)).incompat & 2 for who in ("qemu", "weir")}
        seen += bit["qemu"] > 0
        check("%s, %s: the corrupt bit" % (what, op), bit["weir"] >= bit["qemu"], bit)
        grown = os.path.getsize("weir-%s.qcow2" % n)
        check("%s, %s: the image is no larger than it needs to be" % (what, op), grown < 24 * MIB, grown)
    check("QEMU has set some", seen > 15, seen)


def what_only_looks_opens_nothing_else():
    """Whatever an image names: info, check and snapshot open the image alone; --backing-chain follows plain paths below its folder."""
    os.mkdir("in")
    qemu_img("create", "-q", "-f", "raw", "in/base.raw", "1M")
    names = (("in/secret.raw", "raw"), ("/etc/hostname", "raw"), ("../up.raw", "raw"), ("nbd://127.0.0.1:1/elsewhere", "raw"), ("json:{\"driver\":\"raw\"}", "raw"),
             ("base.raw", None), ("\x1b]0;title", "raw"))
    for name, fmt in names:
        qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", fmt or "raw", "in/i.qcow2", "1M")
        if not fmt:
            # An older image, which does not say the format.
            data = bytearray(open("in/i.qcow2", "rb").read())
            at = data.find(bytes.fromhex("e2792aca"))
            data[at:at + 4] = b"none"
            open("in/i.qcow2", "wb").write(data)
        if shutil.which("strace"):
            p = run("strace", "-f", "-e", "trace=open,openat,openat2,connect,stat,newfstatat,statx", "-o", "trace", "sh", "-ec",
                    'for verb in info check snapshot; do "$0" image $verb in/i.qcow2; done', WEIR)
            used = [x for x in open("trace", errors="replace") if name.split("/")[-1] in x or "connect(" in x]
            check("info, check and snapshot do not touch %r" % name, not used and p.returncode == 0, "%s %s" % (used, p.stderr))
        p = run(WEIR, "image", "info", "in/i.qcow2")
        check("info prints no control characters", all(c >= " " or c == "\n" for c in p.stdout), repr(p.stdout))
        check("info names it", "backing file: " in p.stdout, p.stdout)
        p = run(WEIR, "image", "info", "--json", "--backing-chain", "in/i.qcow2")
        check("the chain over %r is refused in one line" % name, p.returncode == 1 and len(p.stderr.splitlines()) == 1, "%d %s" % (p.returncode, p.stderr))
    weir("create", "-q", "-b", "base.raw", "-F", "raw", "in/a.qcow2")
    weir("create", "-q", "-b", "a.qcow2", "-F", "qcow2", "in/b.qcow2")
    chain = json.loads(weir("info", "--json", "--backing-chain", "in/b.qcow2"))
    check("a chain is shown", [os.path.basename(i["filename"]) for i in chain] == ["b.qcow2", "a.qcow2", "base.raw"], chain)
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", "loop.qcow2", "-F", "qcow2", "in/loop.qcow2", "1M")
    p = run(WEIR, "image", "info", "--json", "--backing-chain", "in/loop.qcow2")
    check("a loop ends", p.returncode == 1 and "below itself" in p.stderr, p.stderr)


def hostile_images_cost_little():
    """Tables of the largest size that all lead to one place, and files that are huge and empty: bounded memory, and an end."""
    def limited(*args, ends=(1, 3, 4), lines=2):
        p = subprocess.run(["bash", "-c", "ulimit -v 700000; exec \"$@\"", "x", WEIR, "image", *args], stdin=subprocess.DEVNULL, capture_output=True,
                           text=True, timeout=100)
        check("%s ends, and says what is wrong" % (args,), p.returncode in ends and len(p.stderr.splitlines()) <= lines, "%d %s" % (p.returncode, p.stderr[-500:]))
        return p

    qemu_img("create", "-q", "-f", "qcow2", "-o", "cluster_size=2M", "s.qcow2", "8M")
    qemu_io("s.qcow2", "write -q 0 64k")
    t = Tables("s.qcow2")
    at, entry = t.l2(0)
    end = os.path.getsize("s.qcow2")
    end = -(-end // t.cluster) * t.cluster
    with open("s.qcow2", "r+b") as f:
        f.seek(end)
        f.write((entry | COPIED).to_bytes(8, "big") * (1 << 20))
    t.put(36, 1 << 20, 4)
    t.put(40, end)
    with open("s.qcow2", "r+b") as f:
        f.truncate(1 << 43)
    limited("check", "-q", "s.qcow2")
    # The driver, too, for reading and for writing.
    limited("map", "--json", "s.qcow2", ends=(0,))
    p = limited("resize", "-q", "s.qcow2", "16M", ends=(1,), lines=3)
    check("and writes nothing where two tables lie in one place", "two of its tables" in p.stderr and Tables("s.qcow2").incompat & 2, p.stderr)
    qemu_img("create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "h.qcow2", "1M")
    qemu_io("h.qcow2", "write -q 0 64k")
    t = Tables("h.qcow2")
    t.put(t.l2(0)[1], COPIED | 1 << 42)
    with open("h.qcow2", "r+b") as f:
        f.truncate(1 << 43)
    p = limited("check", "h.qcow2")
    check("what no refcount can count is not followed, nor gone over again for", "beyond what refcounts can count" in p.stdout, p.stdout[-500:])
    limited("check", "-q", "--repair=all", "h.qcow2", ends=(0,))
    # As many snapshots as there can be, with one L1 table for all of them.
    t = make("n.qcow2", snapshot=True)
    one = open("n.qcow2", "rb").read()[t.snapshot_table:t.snapshot_table + 72]
    with open("n.qcow2", "r+b") as f:
        f.seek(1 << 30)
        f.write(one * 65536)
    t.put(60, 65536, 4)
    t.put(64, 1 << 30)
    limited("check", "-q", "n.qcow2")
    for n in ("s.qcow2", "h.qcow2"):
        p = run(WEIR, "image", "info", "--json", n)
        check("info of %s ends" % n, p.returncode in (0, 1) and len(p.stderr.splitlines()) <= 1, p.stderr[-300:])


def random_damage():
    """Any bytes of any table: QEMU and weir agree whether there is damage, and what weir repairs QEMU calls clean."""
    rounds = int(8 * scale())
    r = random.Random(seed())
    t = make(snapshot=True)
    shutil.copy(t.path, "save.qcow2")
    places = [("l1", t.l1, 128), ("rt", t.rt, 64), ("block", t.get(t.rt), 512), ("l2", t.l2(0)[1], 4096), ("l2b", t.l2(2 << 20)[1], 4096)]
    for n in range(rounds):
        shutil.copy("save.qcow2", t.path)
        done = []
        for _ in range(r.randint(1, 3)):
            name, at, size = r.choice(places)
            off = at + r.randrange(size)
            value = r.choice([0, 255, r.randrange(256), t.get(off, 1) ^ 1 << r.randrange(8)])
            done.append((name, hex(off), value))
            t.put(off, value, 1)
        q, (status, w) = qemu_check(t.path), weir_check(t.path)
        if q is None or isinstance(w, str):
            continue
        if q[:2] == (0, 0) and status == 0:
            continue
        check("round %d %s: damage" % (n, done), (q[0] > 0) == (w["corruptions"] > 0), "%s %s" % (q, w))
        status, w = weir_check(t.path, "--repair=all")
        check("round %d %s: repaired" % (n, done), status == 0, w)
        clean("round %d %s: clean for QEMU" % (n, done), t.path)


if __name__ == "__main__":
    need("qemu-img", "qemu-io")
    sys.exit(run_tests([clean_images, leaks, refcounts, flags, entries, overlaps, refcount_structures, snapshot_tables, bits_of_the_header, the_corrupt_bit_is_set_where_qemu_sets_it,
                       what_only_looks_opens_nothing_else, hostile_images_cost_little, random_damage], folders=True))
