#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Random operations on random kinds of qcow2 image, and on every combination of what an image can be, with QEMU as the oracle.

Written through `weir serve`: after each session qemu-img check is clean and qemu-img compare agrees with a raw copy that got the same operations. Written by
QEMU: weir reads, converts, maps and checks it as QEMU does. The seed of each round is printed; WEIR_SEED repeats from there, WEIR_SCALE
multiplies the rounds; without it, any two choices meet in one of the combinations, and from 200 on all 5050 of them have their turn.

usage: qcow2_oracle.py WEIR [TEST ...]
"""
from qcow2_lib import *  # noqa: F403
import signal
import time

try:
    import nbd
except ImportError:
    skip("python3-libnbd is missing")

ROUNDS = 5
TOGETHER = 4    # images of one server: it has less than a second to close them
# Seeds that have found something: copy-on-write into the end of a data file.
KNOWN = [5020]


class Kind:
    """What an image is: a random combination."""

    def __init__(self, r):
        self.r = r
        self.v2 = r.random() < 0.15
        self.ext = not self.v2 and r.random() < 0.35
        bits = r.choice([14, 15, 16, 16, 17, 21] if self.ext else [9, 10, 12, 12, 14, 16, 16, 21])
        self.cluster = 1 << bits
        self.refcount_bits = 16 if self.v2 else r.choice([1, 2, 4, 8, 16, 16, 16, 32, 64])
        self.data = not self.v2 and r.random() < 0.2
        self.data_raw = self.data and r.random() < 0.5
        self.backing = None if self.data_raw or r.random() < 0.5 else r.choice(["raw", "qcow2"])
        self.compression = "zstd" if not self.v2 and r.random() < 0.4 else "zlib"
        self.lazy = not self.v2 and r.random() < 0.15
        self.prealloc = not self.backing and r.random() < 0.15
        # Bigger clusters, a bigger disk; odd sizes now and then. What is small and many needs many tables.
        most = min(24 * MIB, max(2 * MIB, self.cluster * 40))
        self.size = r.choice([most, most // 2 + 512 * r.randrange(100), most - self.cluster])
        # Snapshots count references.
        self.snapshots = not self.data and self.refcount_bits >= 4

    def choose(self, row):
        """What AXES below has choices for."""
        self.v2, self.ext = row["mode"] == "v2", row["mode"] == "ext"
        self.cluster = 1 << row["bits"]
        self.refcount_bits, self.compression, self.backing = row["refcount"], row["compression"], row["backing"]
        self.data, self.data_raw = row["data"] is not None, row["data"] == "raw"
        self.lazy, self.prealloc = row["more"] == "lazy", row["more"] == "prealloc"
        # As little as shows whole clusters, and a part of one at the end.
        self.size = max(3 * self.cluster, 300 << 10) + 512 * self.r.randrange(1, min(self.cluster >> 9, 64) + 1)
        self.snapshots = not self.data and self.refcount_bits >= 4
        return self

    def options(self):
        o = ["cluster_size=%d" % self.cluster, "refcount_bits=%d" % self.refcount_bits]
        o += ["compat=0.10"] if self.v2 else []
        o += ["extended_l2=on"] if self.ext else []
        o += ["data_file=d.data"] if self.data else []
        o += ["data_file_raw=on"] if self.data_raw else []
        o += ["compression_type=zstd"] if self.compression == "zstd" else []
        o += ["lazy_refcounts=on"] if self.lazy else []
        o += ["preallocation=metadata"] if self.prealloc else []
        return ",".join(o)

    def __str__(self):
        return self.options() + (",backing=" + self.backing if self.backing else "") + " size %d" % self.size


def random_raw(r, path, size):
    with open(path, "wb") as f:
        f.truncate(size)
        for _ in range(30):
            n = min(r.choice([512, 4096, 65536, 200000]), size)
            f.seek(r.randrange(size - n + 1) // 512 * 512)
            f.write(r.randbytes(n))


def make_backing(r, kind):
    """Its contents; it may be shorter or longer than the image."""
    size = max(512, (kind.size + r.choice([0, 0, -kind.size // 3, kind.size // 3])) // 512 * 512)
    random_raw(r, "back.raw", size)
    if kind.backing == "qcow2":
        qemu_img("convert", "-O", "qcow2", *r.choice([(), ("-c",), ("-o", "extended_l2=on")]), "back.raw", "back.qcow2")
    return ["-b", "back." + kind.backing, "-F", kind.backing], open("back.raw", "rb").read()


def make_image(r, kind, by_weir):
    """Makes d.qcow2; the contents it begins with."""
    for n in ("d.qcow2", "d.data", "back.raw", "back.qcow2"):
        if os.path.exists(n):
            os.unlink(n)
    args, data = ([], b"") if not kind.backing else make_backing(r, kind)
    if by_weir:
        weir("create", "-q", "-o", kind.options(), *args, "d.qcow2", str(kind.size))
    else:
        qemu_img("create", "-q", "-f", "qcow2", "-o", kind.options(), *args, "d.qcow2", str(kind.size))
    size = -(-kind.size // 512) * 512
    return bytearray(data[:size] + bytes(max(0, size - len(data))))


def place(r, kind, size):
    """A range: whole clusters, whole subclusters, or anything."""
    unit = r.choice([kind.cluster, max(kind.cluster // 32, 512), 4096, 512, 1])
    n = r.choice([1, 1, 2, 3, 8]) * unit if unit > 1 else r.randrange(1, 3 * kind.cluster)
    n = min(n, size, 1 << 20)
    at = r.randrange((size - n) // unit + 1) * unit
    return min(at, size - n), n


# --- Written through weir serve ---

class Server:
    """Of one disk, to which it is connected, with the name d; or of several, with the names of their folders."""

    def __init__(self, *disks):
        self.log = open("serve.log", "w+")
        if os.path.exists("sock"):
            os.unlink("sock")
        names = [os.path.dirname(d) or "d" for d in disks]
        self.p = subprocess.Popen([WEIR, "serve", "--nbd", "unix:sock", *(x for n in names for x in ("--name", n)), *disks], stdin=subprocess.DEVNULL,
                                  stdout=self.log, stderr=self.log)
        end = time.monotonic() + 60
        while "ready" not in self.text():
            if self.p.poll() is not None or time.monotonic() > end:
                raise AssertionError("weir serve: " + self.text())
            time.sleep(0.005)
        if len(disks) == 1:
            self.connect(*names)

    def connect(self, name):
        self.h = nbd.NBD()
        self.h.add_meta_context("base:allocation")
        self.h.connect_uri("nbd+unix:///%s?socket=sock" % name)

    def text(self):
        with open("serve.log") as f:
            return f.read()

    def at_once(self, calls):
        """Issues them together and waits for all."""
        cookies = [c() for c in calls]
        while cookies:
            cookies = [c for c in cookies if not self.h.aio_command_completed(c)]
            if cookies:
                self.h.poll(-1)

    def end(self, sig=signal.SIGTERM, connected=True):
        if sig == signal.SIGTERM and connected:
            self.h.shutdown()
        self.p.send_signal(sig)
        rc = self.p.wait(60)
        self.log.close()
        if sig == signal.SIGKILL:
            wait_unlocked("d.qcow2")
        return rc


def one_batch(r, kind, server, data, history):
    """Some operations in flight together, on ranges of their own; then `data` is what the disk has to hold."""
    h, calls, taken, after = server.h, [], [], []
    for _ in range(r.choice([1, 1, 2, 4, 6])):
        at, n = place(r, kind, len(data))
        if any(at < b + m and b < at + n for b, m in taken):
            continue
        taken.append((at, n))
        what = r.choice(["write"] * 5 + ["zero", "zero-hole", "trim", "write-zeroes"])
        history.append("%s %d+%d" % (what, at, n))
        if what == "write":
            buf = r.randbytes(n)
            calls.append(lambda at=at, buf=nbd.Buffer.from_bytearray(bytearray(buf)): h.aio_pwrite(buf, at))
        elif what == "write-zeroes":
            buf = bytes(n)
            calls.append(lambda at=at, buf=nbd.Buffer.from_bytearray(bytearray(buf)): h.aio_pwrite(buf, at))
        elif what == "trim":
            calls.append(lambda at=at, n=n: h.aio_trim(n, at))
            after.append((at, n))
            continue
        else:
            buf = bytes(n)
            flags = nbd.CMD_FLAG_NO_HOLE if what == "zero" else 0
            calls.append(lambda at=at, n=n, flags=flags: h.aio_zero(n, at, flags=flags))
        data[at:at + n] = buf
    server.at_once(calls)
    # What was discarded reads as zeroes or as before, each byte.
    for at, n in after:
        got = bytes(h.pread(n, at))
        for k in range(0, n, 512):
            piece = got[k:k + 512]
            ok = all(a in (0, b) for a, b in zip(piece, data[at + k:at + k + 512]))
            if not ok:
                check("what was discarded reads as zeroes or as before: %s at %d" % (kind, at + k), False, history[-12:])
                break
        data[at:at + n] = got
    if r.random() < 0.25:
        h.flush()
        history.append("flush")
    if r.random() < 0.4:
        at, n = place(r, kind, len(data))
        check("read %d+%d of %s" % (at, n, kind), bytes(h.pread(n, at)) == data[at:at + n], history[-12:])


def between_sessions(r, kind, data, snapshots, history):
    """What is done to a closed image, by either program."""
    what = r.choice(["nothing", "resize", "snapshot", "apply", "delete"])
    by_weir = r.random() < 0.7
    if what == "resize" and not (kind.v2 and snapshots):
        size = max(kind.cluster, len(data) + r.choice([-1, 1, 1]) * r.randrange(len(data) // 2)) // 512 * 512
        size = max(size, 4096)
        history.append("resize %d" % size)
        if by_weir:
            weir("resize", "-q", "--shrink", "d.qcow2", str(size))
        else:
            qemu_img("resize", "-q", "--shrink", "-f", "qcow2", "d.qcow2", str(size))
        data[:] = data[:size] + bytes(max(0, size - len(data)))
    if not kind.snapshots or kind.data or what not in ("snapshot", "apply", "delete"):
        return
    tool = (lambda *a: weir("snapshot", "-q", *a)) if by_weir else (lambda *a: qemu_img("snapshot", *a))
    if what == "snapshot" and len(snapshots) < 3:
        name = "s%d" % len(history)
        tool("-c", name, "d.qcow2")
        snapshots[name] = bytes(data)
    elif snapshots and what == "apply":
        name = r.choice(sorted(snapshots))
        tool("-a", name, "d.qcow2")
        data[:] = snapshots[name]
    elif snapshots and what == "delete":
        name = r.choice(sorted(snapshots))
        tool("-d", name, "d.qcow2")
        del snapshots[name]
    history.append("%s by %s" % (what, "weir" if by_weir else "qemu"))


def verify(kind, data, snapshots, history, leaks=0, by_weir=True):
    what = "%s" % kind
    q = qemu_check("d.qcow2")
    ok = check("qemu-img check: " + what, q is not None and q[0] == 0 and q[2] == 0 and (leaks or q[1] == 0), "%s %s" % (q, history))
    if by_weir:
        status, w = weir_check("d.qcow2")
        ok &= check("weir image check: " + what, status == 0 or (leaks and status == 3), "%s %s" % (w, history))
    with open("model.raw", "wb") as f:
        f.write(data)
    p = run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", "d.qcow2", "model.raw")
    ok &= check("qemu-img compare: " + what, p.returncode == 0, "%s %s" % (p.stdout + p.stderr, history))
    for name, old in snapshots.items():
        qemu_img("convert", "-f", "qcow2", "-O", "raw", "-l", "snapshot.name=" + name, "d.qcow2", "snap.raw")
        # QEMU shows a snapshot in the size that the disk has now.
        got = open("snap.raw", "rb").read()
        n = min(len(got), len(old))
        ok &= check("snapshot %s: %s" % (name, what), got[:n] == old[:n], history)
    if kind.data_raw:
        with open("d.data", "rb") as f:
            ok &= check("the data file is the disk: " + what, f.read(len(data)) == data, history)
    return ok


def one_round_of_weir(s, kill):
    r = random.Random(s)
    kind = Kind(r)
    data, snapshots, history = make_image(r, kind, r.random() < 0.5), {}, []
    disk = "d.qcow2,discard=unmap" if r.random() < 0.5 else "d.qcow2"
    for session in range(r.choice([1, 2, 3])):
        server = Server(disk)
        for _ in range(r.randrange(4, 14)):
            one_batch(r, kind, server, data, history)
        if kill:
            server.h.flush()
            server.end(signal.SIGKILL)
            history.append("kill")
        else:
            rc = server.end()
            check("weir serve ends well: %s" % kind, rc == 0, server.text() if rc else "")
        ok = verify(kind, data, snapshots, history, leaks=kill)
        if ok and kill and kind.lazy:
            weir("check", "-q", "--repair=all", "d.qcow2")
        if not ok:
            keep(s)
            return
        between_sessions(r, kind, data, snapshots, history)
    if not verify(kind, data, snapshots, history, leaks=kill):
        keep(s)


def keep(s):
    """The image of a failed round, where WEIR_KEEP says."""
    print("the round's seed: WEIR_SEED=%d" % s, flush=True)
    folder = os.environ.get("WEIR_KEEP")
    if folder:
        shutil.copytree(".", os.path.join(folder, str(s)), dirs_exist_ok=True, ignore=shutil.ignore_patterns("sock"))


def rounds(one, n, *args):
    first = seed()
    for s in range(first, first + max(1, int(n * scale()))):
        try:
            one(s, *args)
        except Exception as e:
            check("round of seed %d" % s, False, "%s: %s" % (type(e).__name__, e))
            keep(s)


def written_by_weir():
    for s in KNOWN:
        one_round_of_weir(s, False)
    rounds(one_round_of_weir, ROUNDS, False)


def written_by_weir_and_killed():
    rounds(one_round_of_weir, ROUNDS // 2, True)


# --- Every combination ---

AXES = {"mode": ["v3", "ext", "v2"], "bits": list(range(9, 22)), "refcount": [16, 1, 2, 4, 8, 32, 64], "compression": ["zlib", "zstd"],
        "backing": [None, "raw", "qcow2"], "data": [None, "file", "raw"], "more": [None, "lazy", "prealloc"]}
# Sizes of clusters that are one choice for the short run.
ALIKE = {16: (16, 17, 18), 9: (9, 10, 11), 12: (12, 13), 14: (14, 15), 21: (19, 20, 21)}


def can_be(row):
    """Whether QEMU has such images, of a row that may lack choices."""
    get = row.get
    if get("mode") == "v2" and (get("refcount", 16) != 16 or get("data") or get("compression", "zlib") != "zlib" or get("more") == "lazy"):
        return False
    return not (get("mode") == "ext" and get("bits", 14) < 14) and not (get("backing") and (get("data") == "raw" or get("more") == "prealloc"))


def all_rows():
    rows = [{}]
    for name, values in AXES.items():
        rows = [dict(row, **{name: v}) for row in rows for v in values]
        rows = [row for row in rows if can_be(row)]
    return rows


def pairs_of(row):
    names = [n for n in AXES if n in row]
    return [(a, row[a], b, row[b]) for i, a in enumerate(names) for b in names[i + 1:]]


def rows_with_each_pair(r):
    """Few rows; any two choices are together in one of them, if they can be. But not each width of refcounts with each of the others."""
    axes = dict(AXES, bits=list(ALIKE))
    left = dict.fromkeys((a, x, b, y) for i, (a, xs) in enumerate(axes.items()) for b, ys in list(axes.items())[i + 1:] for x in xs for y in ys
                         if can_be({a: x, b: y}) and ("refcount" not in (a, b) or x in ("v3", "ext")))
    rows = []
    while left:
        a, x, b, y = next(iter(left))
        best, most = None, -1
        for _ in range(12):
            row = {n: r.choice(v) for n, v in axes.items()}
            row.update({a: x, b: y})
            for n, v in axes.items():
                # What does not go with the others is left at its first, ordinary choice.
                if n not in (a, b) and not can_be(row):
                    row[n] = v[0]
            new = sum(p in left for p in pairs_of(row)) if can_be(row) else -1
            if new > most:
                best, most = row, new
        rows.append(best)
        for p in pairs_of(best):
            left.pop(p, None)
    return rows


class Combination:
    """One image, in a folder of its own. Made by QEMU or weir, perhaps written to by QEMU; read and written by weir; checked by QEMU, and often
    by weir."""

    def __init__(self, s, row):
        self.seed, self.r, self.history = s, random.Random(s), []
        self.kind = Kind(self.r).choose(row)
        self.folder, self.snapshots = str(s), {}

    def make(self):
        by_qemu = self.r.random() < 0.5
        self.data = make_image(self.r, self.kind, not by_qemu)
        if by_qemu:
            self.history += qemu_operations(self.r, self.kind, self.kind.size)
            qemu_img("convert", "-f", "qcow2", "-O", "raw", "d.qcow2", "model.raw")
            with open("model.raw", "rb") as f:
                self.data = bytearray(f.read())

    def use(self, server, handle):
        self.h, self.at_once = handle, server.at_once
        got = b"".join(bytes(handle.pread(min(4 * MIB, len(self.data) - at), at)) for at in range(0, len(self.data), 4 * MIB))
        check("what was there before is read: %s" % self.kind, got == self.data, self.history)
        for _ in range(3):
            one_batch(self.r, self.kind, self, self.data, self.history)

    def look(self, cut_short):
        between_sessions(self.r, self.kind, self.data, self.snapshots, self.history)
        if not verify(self.kind, self.data, self.snapshots, self.history, leaks=cut_short, by_weir=scale() > 1 or self.r.random() < 0.3):
            print("the combination's seed: WEIR_SEED=%d" % self.seed, flush=True)


def in_folders(combinations, what):
    for c in combinations:
        os.makedirs(c.folder, exist_ok=True)
        os.chdir(c.folder)
        try:
            what(c)
        except Exception as e:
            check("%s (seed %d)" % (c.kind, c.seed), False, "%s: %s; %s" % (type(e).__name__, e, c.history))
        os.chdir("..")


def every_combination():
    first = seed()
    r = random.Random(first)
    rows = [dict(row, bits=r.choice(ALIKE[row["bits"]])) for row in rows_with_each_pair(r)]
    if scale() > 1:
        every = all_rows()
        rows = r.sample(every, min(len(every), int(len(rows) * scale())))
    todo = [Combination(first + i, row) for i, row in enumerate(rows)]
    print("%d combinations" % len(todo), flush=True)
    for at in range(0, len(todo), TOGETHER):
        some = todo[at:at + TOGETHER]
        in_folders(some, Combination.make)
        server = Server(*(c.folder + "/d.qcow2,discard=unmap" for c in some))
        for c in some:
            server.connect(c.folder)
            try:
                c.use(server, server.h)
            except Exception as e:
                check("%s (seed %d)" % (c.kind, c.seed), False, "%s: %s; %s" % (type(e).__name__, e, c.history))
            server.h.shutdown()
        # On a busy machine closing all of them may take longer than a second, and is cut short then.
        rc = server.end(connected=False)
        cut_short = rc == 1 and "stopping takes too long" in server.text()
        check("weir serve ends well", rc == 0 or cut_short, server.text())
        in_folders(some, lambda c: c.look(cut_short))
        for c in some:
            shutil.rmtree(c.folder)


# --- Written by QEMU ---

def qemu_operations(r, kind, size):
    commands = []
    for _ in range(r.randrange(5, 25)):
        at, n = place(r, kind, size)
        at, n = at // 512 * 512, -(-n // 512) * 512
        if at + n > size:
            continue
        what = r.choice(["write -P %d" % r.randrange(256)] * 4 + ["write -z", "write -z -u", "discard", "flush", "write -c -P %d" % r.randrange(256)])
        if what == "flush":
            commands.append(what)
            continue
        if "-c" in what:
            if kind.data or kind.refcount_bits < 16:
                continue
            at = at // kind.cluster * kind.cluster
            n = kind.cluster
            if at + n > size:
                continue
        commands.append("%s %d %d" % (what, at, n))
    # QEMU refuses to compress over what is there: each on its own.
    for c in commands:
        if " -c " in c:
            run("qemu-io", "-f", "qcow2", "-c", c, "d.qcow2")
    rest = [c for c in commands if " -c " not in c]
    if rest:
        qemu_io("d.qcow2", *rest)
    return commands


def joined(rows, kind):
    """The map with neighbours of the same facts joined."""
    out = []
    for x in rows:
        # Of preallocated clusters QEMU asks the file whether they are holes.
        facts = (x["depth"], x["present"], x["zero"] and not (kind.prealloc and x["data"]), x["data"])
        offset = x.get("offset")
        if out and out[-1][2] == facts and (offset is None) == (out[-1][3] is None) and (offset is None or out[-1][3] + out[-1][1] == offset):
            out[-1][1] += x["length"]
        else:
            out.append([x["start"], x["length"], facts, offset])
    return out


def one_round_of_qemu(s):
    r = random.Random(s)
    kind = Kind(r)
    make_image(r, kind, False)
    history = qemu_operations(r, kind, kind.size)
    if kind.snapshots and kind.refcount_bits >= 16 and r.random() < 0.5:
        qemu_img("snapshot", "-c", "one", "d.qcow2")
        history.append("snapshot")
        history += qemu_operations(r, kind, kind.size)
    qemu_img("convert", "-f", "qcow2", "-O", "raw", "d.qcow2", "model.raw")
    weir("convert", "-q", "--force", "d.qcow2", "weir.raw")
    ok = check("weir reads what QEMU wrote: %s" % kind, open("model.raw", "rb").read() == open("weir.raw", "rb").read(), history)
    status, w = weir_check("d.qcow2")
    ok &= check("weir calls it clean: %s" % kind, status == 0, w)
    q = json.loads(qemu_img("check", "--output=json", "d.qcow2"))
    if not kind.data:
        ok &= check("the same figures: %s" % kind, all(q.get(k, 0) == w[k] for k in ("image-end-offset", "allocated-clusters", "compressed-clusters",
                                                                               "fragmented-clusters")), "%s %s" % (q, w))
    theirs = joined(json.loads(qemu_img("map", "-f", "qcow2", "--output=json", "d.qcow2")), kind)
    mine = joined(json.loads(weir("map", "--json", "d.qcow2")), kind)
    ok &= check("the same map: %s" % kind, theirs == mine, "\n%s\n%s\n%s" % (theirs, mine, history))
    target = Kind(r)
    target.size, target.backing, target.data, target.data_raw = len(open("model.raw", "rb").read()), None, False, False
    compress = ["-c"] if not target.prealloc and r.random() < 0.6 else []
    p = run(WEIR, "image", "convert", "-q", "--force", *compress, "-o", target.options(), "d.qcow2", "copy.qcow2")
    if "cluster_size" in p.stderr and p.returncode:
        return
    ok &= check("weir converts it %s: %s" % (compress, target), p.returncode == 0, p.stderr)
    ok &= clean("clean: %s" % target, "copy.qcow2")
    ok &= equal("copy.qcow2", "model.raw")
    if not ok:
        keep(s)


def written_by_qemu():
    rounds(one_round_of_qemu, ROUNDS)


if __name__ == "__main__":
    need("qemu-img", "qemu-io")
    sys.exit(run_tests([written_by_weir, written_by_weir_and_killed, written_by_qemu, every_combination], folders=True))
