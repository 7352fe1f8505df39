# SPDX-License-Identifier: MIT
"""RBD images whose cluster, lock or server fails: what was acknowledged to a flush is there, and nobody writes who must not."""
import os
import random
import time

import nbd
from cluster import READER, VM, the as c
from harness import MIB, equal, require, run, seed
from serve_lib import BLOCK, SPAN, TIMEOUT, WEIR, Serve, Writer, content, log, refused, until
from standby import a_standby_takes_over


def image_holds(image, have):
    data = c.export(image)
    for off, n in have.items():
        require(data[off:off + BLOCK] == content(n), "block %d is in the image at %d" % (n, off))


def own_address(image):
    with c.image(image, read_only=True) as i:
        return next(iter(i.watchers_list()))["addr"]


def a_server_that_was_killed_goes_on_where_it_was():
    disk, have = c.create("kill", "8M"), {}
    options = (*log(), "--name", "v", disk)
    with Serve(*options) as w:
        writer = Writer(w, have)
        for n in range(1, 200):
            writer.write(n)
        writer.write_many(range(180, 240))  # acknowledged from memory
        w.kill()
    with Serve(*options) as w:
        require("which is dead; it is broken" in w.text(), "nobody waits for the cluster to give the dead one up: " + w.text())
        writer = Writer(w, have)
        writer.verify()
        for n in range(150, 250):
            writer.write(n)
        w.end()
    p = run(WEIR, "log", "drain", "log")
    require(p.returncode == 0, p.stderr + p.stdout)
    image_holds("kill", have)


def a_server_without_a_log_that_was_killed_is_given_up_in_time():
    disk = c.create("bare", "8M")
    with Serve("--name", "v", disk) as w:
        Writer(w).write(1)
        w.kill()
    with Serve("--name", "v", disk) as w:
        require("waiting until the cluster takes it for dead" in w.text(), w.text())
        w.end()


def an_osd_that_dies_and_returns_under_load_loses_nothing():
    """With a log nobody waits; without one what was in flight does, and is there."""
    logged, bare = c.create("osd", "8M"), c.create("osd-bare", "8M")
    with Serve(*log(), "--name", "v", logged) as w, Serve("--name", "v", bare, name="bare") as b:
        writer, waiter = Writer(w), Writer(b)
        for n in range(1, 100):
            writer.write(n)
        flying = []
        for n in range(1, 200):
            flying.append(waiter.h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(content(n))), n * BLOCK))
            waiter.have[n * BLOCK] = n
            if n == 100:
                waiter.h.poll(20)
                c.osd.kill()
        slowest = max(writer.write(n) for n in range(100, 400))
        require(slowest < 5, "a write and flush while the OSD is dead took %.1f s" % slowest)
        w.status(timeout=5)
        waiter.h.poll(0)
        require([k for k in flying if not waiter.h.aio_command_completed(k)], "without a log writes wait")
        c.osd.start()
        for n in range(400, 500):
            writer.write(n)
        until("they are done when it is back", lambda: waiter.h.poll(100) >= 0 and not waiter.h.aio_in_flight())
        waiter.h.flush()
        waiter.verify()
        until("the log is empty again", lambda: w.dirty() == 0)
        writer.verify()
        w.end()
        b.end()
    image_holds("osd", writer.have)
    image_holds("osd-bare", waiter.have)


def a_full_cluster_lets_writes_wait_and_loses_nothing():
    """The log goes on; without one the guest waits, and is told why. Both go on by themselves."""
    logged, bare = c.create("full", "8M"), c.create("fuller", "8M")
    with Serve(*log(), "--name", "v", logged) as w, Serve("--name", "v", bare, name="bare") as b:
        writer, waiter = Writer(w), Writer(b)
        writer.write(1)
        waiter.write(1)
        until("the log is empty", lambda: w.dirty() == 0)
        c.fill()
        h, n, done = waiter.h, 1, True
        while done:                         # until it is full
            n += 1
            require(n < SPAN // BLOCK, "writes wait when the OSD is full")
            cookie = h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(content(n))), n * BLOCK)
            waiter.have[n * BLOCK] = n
            done, end = False, time.monotonic() + TIMEOUT
            while not done and "(see `ceph -s`: monitors, OSDs, a full cluster or pool)" not in b.text():
                require(time.monotonic() < end, "one that waits is told: " + b.text())
                h.poll(20)
                done = h.aio_command_completed(cookie)
            time.sleep(0.01)
        for k in range(2, 200):
            writer.write(k)
        require(b.disk()["waiting_ns"] > 0 and w.dirty() > 0, "both tell of it")
        equal(waiter.h.pread(BLOCK, BLOCK), content(1), "what can be read")
        c.fill(False)
        until("the write ends when there is space", lambda: h.poll(100) >= 0 and not h.aio_in_flight())
        b.wait_for("the cluster answers again")
        until("the log is empty again", lambda: w.dirty() == 0)
        waiter.verify()
        w.end()
        b.end()
    image_holds("full", writer.have)
    image_holds("fuller", waiter.have)


def between_flushes(have, rounds):
    """The flushes behind which the image may be: it is what the guest had then, and of what it wrote before the next flush any part."""
    now, found = {}, []
    for k, following in enumerate(rounds + [[]]):
        part = {}
        for off, n in following:
            part.setdefault(off, set()).add(n)
        if all(have.get(off) == now.get(off) or have.get(off) in part.get(off, ()) for off in {*have, *now}):
            found.append(k)
        now.update(dict(following))
    return found


def a_log_that_is_lost_leaves_what_the_destage_mode_promises():
    """Ordered: what the guest had at one of its flushes, and perhaps some of what it wrote before the next. Merged: a mixture, of blocks that are whole."""
    rng, span = random.Random(seed()), 64
    for mode in ("ordered", "merged"):
        disk, rounds, n = c.create("lost-" + mode, "1M"), [], 0
        options = (*log(mode), "--destage", mode, "--name", "v", disk)
        with Serve(*options) as w:
            h = Writer(w).h
            end = time.monotonic() + 2.5    # destage has begun by then, and goes on
            while time.monotonic() < end or len(rounds) < 50:
                rounds.append([])
                for _ in range(3):
                    n += 1
                    off = rng.randrange(span) * BLOCK
                    h.pwrite(content(n), off)
                    rounds[-1].append((off, n))
                h.flush()
                time.sleep(0.005)
            w.kill()
        os.unlink(mode)
        require("its newest data may be in write log" in refused("--name", "v", disk), "it is missed")
        with Serve("--discard-log", "--name", "v", disk) as w:
            h = Writer(w).h
            have = {i * BLOCK: h.pread(BLOCK, i * BLOCK) for i in range(span)}
            w.end()
        require(all(b == content(int.from_bytes(b[:8], "little")) for b in have.values()), "no block is torn")
        have = {off: int.from_bytes(b[:8], "little") for off, b in have.items() if b != bytes(BLOCK)}
        at = between_flushes(have, rounds)
        print("%s: %d flushes, %s" % (mode, len(rounds), "the image is that behind flush %s" % at if at else "the image is a mixture"))
        if mode == "ordered":
            require(at and at[-1] > 0, "the image is what it was at a flush")
        written = {pair for blocks in rounds for pair in blocks}
        require(have and all(pair in written for pair in have.items()), "each block was written there")


def ordered_epochs_within_an_object_reach_the_cluster_together():
    """Which is what makes a journal or a database's log drain faster than one write after the other; what does not touch goes one by one."""
    joined = []
    for step in (1, 2):
        name = "step%d" % step
        options = (*log(name), "--destage", "ordered", "--name", "v", c.create(name, "8M"))
        with Serve(*options) as w:
            writer = Writer(w)
            c.osd.stop()
            for n in range(60):
                writer.write(n * step)
            c.osd.go_on()
            until("the log is empty", lambda: w.dirty() == 0)
            joined.append((w.status()["volumes"][0]["disk"]["epochs_joined"], w.disk()["counters"]["write"]["ops"]))
            w.end()
        image_holds(name, writer.have)
    print("60 epochs: (joined, writes) %s" % joined)
    # Destage may have begun with the first of them.
    require(joined[0][0] >= 57 and joined[0][1] <= 3, "neighbours go together: %s" % joined)
    equal(joined[1], (0, 60), "others do not")


def a_snapshot_of_an_image_whose_log_is_dirty_counts_as_a_writer():
    disk = c.create("snapped", "8M")
    options = (*log(), "--name", "v", disk)
    with Serve(*options) as w:
        writer = Writer(w)
        writer.write_many(range(1, 50))
        w.end()
    with c.image("snapped") as i:
        i.create_snap("s")
    p = refused(*options)
    require("was changed by something else" in p and "--force-replay" in p, p)
    with Serve(*options, "--force-replay") as w:
        Writer(w, writer.have).verify()
        w.end()


def a_standby_host_takes_over_with_its_side_of_the_log():
    image_holds("standby", a_standby_takes_over(c.create("standby", "8M")))


def a_monitor_that_dies_and_returns_is_not_missed():
    with Serve("--name", "v", c.create("mon", "8M")) as w:
        writer = Writer(w)
        writer.write(1)
        c.mon.kill()
        for n in range(2, 50):
            writer.write(n)
        c.mon.start()
        for n in range(50, 100):
            writer.write(n)
        writer.verify()
        w.end()


def a_cluster_that_is_gone_for_longer_than_the_log_lasts_loses_nothing():
    disk = c.create("long", "64M")
    data = bytes(range(256)) * 4096
    with Serve(*log(), "--name", "v", disk) as w:
        h = Writer(w).h
        c.osd.stop()
        flying, done = [], 0
        for i in range(40):                 # more than the log of 32M holds
            buf = nbd.Buffer.from_bytearray(bytearray(data))
            flying.append(h.aio_pwrite(buf, i * MIB))
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            h.poll(50)
        waiting = [k for k in flying if not h.aio_command_completed(k)]
        require(waiting, "the log is full, and writers wait")
        require(len(waiting) < 40, "but it took what it could")
        w.status(timeout=5)
        c.osd.go_on()
        until("all are written when the cluster is back",
              lambda: h.poll(100) >= 0 and not h.aio_in_flight())
        h.flush()
        for i in range(40):
            require(h.pread(MIB, i * MIB) == data, "MiB %d" % i)
        w.end()


def without_a_log_a_cluster_that_hangs_pauses_or_fails():
    with Serve("--name", "v", c.create("pause", "8M")) as w:
        writer = Writer(w)
        writer.write(1)
        writer.h.pread(BLOCK, BLOCK)        # the cache has it from now on
        c.osd.stop()
        cookie = writer.h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(content(2))), 2 * BLOCK)
        time.sleep(0.5)
        writer.h.poll(0)
        require(not writer.h.aio_command_completed(cookie), "a write waits")
        until("the status tells how long", lambda: w.disk()["waiting_ns"] > 0, 5)
        equal(writer.h.pread(BLOCK, BLOCK), content(1), "what the cache has, while the cluster hangs")
        c.osd.go_on()
        until("it ends when the cluster is back", lambda: writer.h.poll(100) >= 0 and writer.h.aio_command_completed(cookie))
        equal(writer.h.pread(BLOCK, 2 * BLOCK), content(2), "what was written")
        w.end()
    with Serve("--name", "v", c.disk("pause", ",error-after=300ms")) as w:
        writer = Writer(w)
        c.osd.stop()
        began = time.monotonic()
        require(writer.fails(), "a write fails")
        require(time.monotonic() - began < 5, "soon")
        try:
            writer.h.pread(BLOCK, 0)
            require(False, "a read fails")
        except nbd.Error:
            pass
        c.osd.go_on()
        until("it works again when the cluster is back", lambda: not writer.fails())
        equal(writer.h.pread(BLOCK, 2 * BLOCK), content(2), "what was written before")
        w.end()


def a_pool_that_may_only_be_read_keeps_the_log_until_it_may_be_written_again():
    disk = c.create("caps", "8M")
    options = (*log(), "--name", "v", disk)
    with Serve(*options) as w:
        writer = Writer(w)
        writer.write_many(range(1, 100))
        w.end()
    c.allow("vm", READER)
    try:
        for more in ((), ("--discard-log",)):
            require("osd 'profile rbd pool=...'" in refused(*options, *more), "it says what is missing")
    finally:
        c.allow("vm", VM)
    with Serve(*options) as w:
        Writer(w, writer.have).verify()
        until("the log is empty", lambda: w.dirty() == 0)
        w.end()
    image_holds("caps", writer.have)


def a_server_ends_in_time_though_the_cluster_hangs():
    disk = c.create("term", "8M")
    options = (*log(), "--name", "v", disk)
    with Serve(*options) as w:
        writer = Writer(w)
        c.osd.stop()
        for n in range(1, 300):
            writer.write(n)
        time.sleep(1.2)                     # destage has begun, and hangs
        writer.verify()                     # out of the log
        print("ending while the cluster hangs took %.2f s" % w.end())
        c.osd.go_on()
        require("safe in the log" in w.text(), w.text())
    with Serve(*options) as w:
        Writer(w, writer.have).verify()
        w.end()


def a_client_that_is_shut_out_in_the_middle_of_a_destage_writes_nothing_more_and_keeps_its_log():
    disk = c.create("fence", "8M")
    options = (*log(), "--name", "v", disk)
    with Serve(*options) as w:
        writer, address = Writer(w), own_address("fence")
        c.osd.stop()
        for n in range(1, 100):
            writer.write(n)
        until("destage has writes in flight", lambda: w.disk()["in_flight"] > 0)
        c.rados.blocklist_add(address)
        c.osd.go_on()
        at = writer.write_until_it_fails(range(100, 200), 0.05)     # some are in the log before it is known
        w.wait_for("the cluster has blocklisted this client")
        require(writer.fails(), "the guest's writes fail")
        require(w.disk()["fenced"], "the status tells it")
        w.end()
    with Serve(*options) as w:
        for off in (0, at):                 # what fails() and the last one wrote may be there or not
            writer.have.pop(off, None)
        Writer(w, writer.have).verify()
        w.end()


def an_image_that_is_removed_underneath_is_noticed():
    """With a log, too: what is in it can be read there, and a stop goes well."""
    for options in ((), log()):
        name = "gone%d" % len(options)
        with Serve(*options, "--name", "v", c.create(name, "8M")) as w:
            writer = Writer(w)
            writer.write(1)
            c.io.remove_object("rbd_header." + w.disk()["image_id"])
            w.wait_for("the image has been removed")
            require(writer.fails(), "writes fail")
            writer.have.pop(0, None)
            writer.verify()
            w.end()


def what_lies_behind_the_end_of_an_image_that_was_shrunk_stays_in_the_log():
    last = SPAN // BLOCK - 1
    with Serve(*log(), "--name", "v", c.create("shrunk", "8M")) as w:
        writer = Writer(w)
        with c.image("shrunk") as i:
            i.resize(4 * MIB)
        w.wait_for("has been shrunk to 4 MiB")
        writer.write(1)
        writer.write(last)
        w.wait_for("cannot destage volume v")
        writer.verify()
        with c.image("shrunk") as i:
            i.resize(8 * MIB)
        until("the log is empty", lambda: w.dirty() == 0)
        writer.verify()
        w.end()
    image_holds("shrunk", writer.have)


def the_image_names_its_log_and_one_that_is_elsewhere_is_refused():
    disk = c.create("mark", "8M")
    mine, other = (*log("log"), "--name", "v", disk), (*log("other"), "--name", "v", disk)
    def meta():
        with c.image("mark", read_only=True) as i:
            return str(list(i.metadata_list()))

    with Serve(*mine) as w:
        writer = Writer(w)
        before = meta()
        for n in range(1, 100):
            writer.write(n)
        equal(meta(), before, "the metadata while the log turns dirty")
        require("weir-log-1" in before, before)
        writer.write_many(range(100, 200))
        print("closing with a dirty log took %.2f s" % w.end())
    host = os.uname().nodename
    for options in (other, ("--name", "v", disk), ("--read-only", "--name", "v", disk)):
        p = refused(*options)
        require("on host " + host in p and "KiB not in the image" in p and "closed" in p, p)
    with Serve(*mine) as w:                 # nobody was there meanwhile
        Writer(w, writer.have).verify()
        until("the log is empty", lambda: w.dirty() == 0)
        w.end()
    require("weir-log-1" not in meta(), "a clean detach removes it")
    image_holds("mark", writer.have)


def a_log_is_not_replayed_over_what_somebody_else_wrote():
    for image, kill in (("between", False), ("crashed", True)):
        disk = c.create(image, "8M")
        options = (*log(image), "--name", "v", disk)
        with Serve(*options) as w:
            writer = Writer(w)
            writer.write_many(range(1, 50), flush=kill)
            if kill:
                w.kill()
            else:
                w.end()
        c.export(image)                     # a reader changes nothing
        if not kill:
            with Serve(*options) as w:
                writer = Writer(w, writer.have)
                writer.write_many(range(50, 60))
                w.end()
        with c.image(image) as i:
            i.write(bytes(BLOCK), 0)
        p = refused(*options)
        require("was changed by something else" in p and "--force-replay" in p, p)
        p = refused("--name", "v", disk)
        require("its newest data may be in write log" in p, p)
        with Serve(*options, "--force-replay") as w:
            Writer(w, writer.have).verify()
            w.end()
