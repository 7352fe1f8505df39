#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A disk as a file: what programs, file systems and other clients see of `weir serve --fuse`.

usage: fuse_file.py WEIR [TEST ...]
"""
import mmap
import os
import shutil
import sys
import threading
import time

from fuse_lib import KEEP, MIB, PUNCH, WEIR, ZERO, Server, clear, error_of, fallocate, mounts, need_fuse, opened
from harness import check, equal, need, require, run, run_tests, skip, tests_of


def image(size=4 * MIB, name="a.img"):
    with open(name, "wb") as f:
        f.truncate(size)
    return name


def the_file_is_the_disk_for_other_clients_too():
    import nbd
    image()
    with Server("--fuse", "f", "--nbd", "unix:n", "a.img") as s, opened("f") as fd:
        h = nbd.NBD()
        h.connect_uri("nbd+unix:///?socket=n")
        data = os.urandom(300000)
        equal(os.pwrite(fd, data, 12345), len(data), "a write")
        equal(h.pread(len(data), 12345), data, "what an NBD client reads of it")
        private = mmap.mmap(fd, 65536, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        for i in range(20):
            block = bytes([i + 1]) * 65536
            h.pwrite(block, i * 65536)
            equal(os.pread(fd, 65536, i * 65536), block, "what an NBD client wrote")
            h.pwrite(block[:5], 99)
            equal(os.pread(fd, 7, 98)[1:6], block[:5], "what it wrote over that")
        again = mmap.mmap(fd, 65536, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        equal(again[99:104], block[:5], "what a new private mapping shows")
        private.close()
        again.close()
        h.shutdown()
        with opened("f", os.O_RDONLY | os.O_DIRECT) as direct:
            buf = mmap.mmap(-1, 1 * MIB)
            equal(os.preadv(direct, [buf], 0), 1 * MIB, "a direct read")
            equal(buf[:], os.pread(fd, 1 * MIB, 0), "what it reads")
        equal(s.file()["open"], 1, "open files")
    with open("a.img", "rb") as a:
        equal(a.read(65536)[99:104], block[:5], "what is in the image")


def sizes_and_attributes_are_those_of_a_disk():
    image(MIB + 512)
    with Server("--fuse", "f,mode=0640,owner=1,group=2", "a.img") as s, opened("f") as fd:
        st = os.fstat(fd)
        equal((st.st_size, oct(st.st_mode), st.st_uid, st.st_gid, st.st_nlink), (MIB + 512, "0o100640", 1, 2, 1), "stat")
        os.chmod("f", 0o600)
        os.chown("f", 0, 0)
        equal((os.stat("f").st_mode & 0o7777, os.stat("f").st_uid), (0o600, 0), "after chmod and chown")
        equal(error_of(os.chmod, "f", 0o4755), "EPERM", "setuid")
        equal(os.statvfs("f").f_blocks, 257, "blocks of the file system")
        for size in (0, MIB, 2 * MIB):
            equal(error_of(os.ftruncate, fd, size), "EPERM", "truncate to %d" % size)
        equal(error_of(os.ftruncate, fd, MIB + 512), None, "truncate to what it is")
        equal(error_of(os.open, "f", os.O_RDWR | os.O_TRUNC), "EPERM", "O_TRUNC")
        equal(os.pwrite(fd, b"x" * 4096, MIB), 512, "a write across the end")
        equal(error_of(os.pwrite, fd, b"x", MIB + 512), "ENOSPC", "a write behind it")
        with opened("f", os.O_RDWR | os.O_APPEND) as append:
            equal(error_of(os.write, append, b"x"), "ENOSPC", "appending")
        equal(os.pread(fd, 4096, MIB), b"x" * 512, "a read across the end")
        equal(os.pread(fd, 4096, MIB + 512), b"", "a read behind it")
        equal(error_of(mmap.mmap, fd, 4096), "ENODEV", "a shared mapping")
        equal(os.listxattr("f") if error_of(os.listxattr, "f") is None else [], [], "extended attributes")
        equal(s.ask("resize", volume="a.img", size=3 * MIB), {"size": 3 * MIB}, "resize")
        equal(os.fstat(fd).st_size, 3 * MIB, "the new size")
        equal(os.pwrite(fd, b"end", 3 * MIB - 3), 3, "a write at the new end")
        equal(os.lseek(fd, 0, os.SEEK_END), 3 * MIB, "the end")


def holes_are_punched_zeroed_and_found():
    image()
    with Server("--fuse", "f", "a.img"), opened("f") as fd:
        equal(error_of(os.lseek, fd, 0, os.SEEK_DATA), "ENXIO", "data in an empty disk")
        equal(os.lseek(fd, 0, os.SEEK_HOLE), 0, "a hole in it")
        os.pwrite(fd, b"d" * 2 * MIB, MIB)
        equal((os.lseek(fd, 0, os.SEEK_DATA), os.lseek(fd, MIB, os.SEEK_HOLE)), (MIB, 3 * MIB), "data and the hole behind it")
        fallocate(fd, PUNCH | KEEP, 2 * MIB - 100, 65536 + 200)
        equal(os.pread(fd, 65536 + 202, 2 * MIB - 101), b"d" + bytes(65536 + 200) + b"d", "a punched hole and its edges")
        equal(os.lseek(fd, MIB, os.SEEK_HOLE), 2 * MIB, "where it is found")
        fallocate(fd, ZERO, MIB, 4096)
        fallocate(fd, ZERO | KEEP, MIB + 4096, 4096)
        equal(os.pread(fd, 8193, MIB), bytes(8192) + b"d", "zeroed ranges")
        fallocate(fd, PUNCH | KEEP, 4 * MIB - 4096, 1 << 30)
        fallocate(fd, PUNCH | KEEP, 5 * MIB, 4096)
        equal(error_of(fallocate, fd, ZERO, 4 * MIB - 4096, 8192), "ENOSPC", "zeroes behind the end")
        for mode in (0, KEEP, 8, 32, 64 | KEEP):
            equal(error_of(fallocate, fd, mode, 0, 4096), "ENOTSUP", "fallocate with mode %d" % mode)
        equal(error_of(os.lseek, fd, 4 * MIB, os.SEEK_HOLE), "ENXIO", "a hole behind the end")
    equal(os.stat("a.img").st_blocks * 512 < 2 * MIB, True, "space was freed")


def an_fsync_is_one_flush_and_a_durable_write_none_too_few():
    image()
    require(run(WEIR, "log", "create", image(64 * MIB, "l.img")).returncode == 0, "log create")
    with Server("--fuse", "f", "--log", "l.img", "a.img") as s:
        with opened("f") as fd:
            before = s.flushes()
            for i in range(20):
                os.pwrite(fd, b"x" * 8000, i * 8000)
                os.fsync(fd) if i % 2 else os.fdatasync(fd)
            equal((s.flushes() - before, s.file()["flushes"]), (20, 20), "flushes for 20 fsyncs")
        equal(s.flushes() - before, 20, "flushes after close")
        before = s.file()["durable_writes"]
        for flag in (os.O_DSYNC, os.O_SYNC):
            with opened("f", os.O_WRONLY | flag) as fd:
                os.pwrite(fd, b"y" * 512, 0)
        with opened("f") as fd:
            os.pwritev(fd, [b"y" * 512], 0, os.RWF_DSYNC)
            os.pwritev(fd, [b"y" * 512], 0, os.RWF_SYNC)
            os.pwrite(fd, b"y", 0)
        equal(s.file()["durable_writes"] - before, 4, "durable writes")


def what_was_synced_is_there_after_a_kill():
    image()
    require(run(WEIR, "log", "create", image(64 * MIB, "l.img")).returncode == 0, "log create")
    want = bytearray(4 * MIB)
    for turn in range(5):
        with Server("--fuse", "f", "--log", "l.img", "a.img") as s:
            require(turn == 0 or "took away the mount of a server that was killed" in s.log(), "the dead mount is cleared: " + s.log())
            with opened("f") as fd:
                equal(os.pread(fd, 4 * MIB, 0), bytes(want), "what was synced before kill %d" % turn)
                for i in range(30):
                    data, off = os.urandom(3000), (turn * 30 + i) * 8192 + i
                    os.pwrite(fd, data, off)
                    want[off:off + 3000] = data
                if turn % 2:
                    os.fsync(fd)
                else:
                    data = os.urandom(100)
                    with opened("f", os.O_WRONLY | os.O_DSYNC) as durable:
                        os.pwrite(durable, data, 4 * MIB - 100)
                    want[-100:] = data
                    os.fdatasync(fd)
                s.kill()
                check("an open file of a killed server is dead", error_of(os.pread, fd, 1, 0) in ("ENOTCONN", "ECONNABORTED"))
        check("its file is dead", error_of(os.stat, "f") == "ENOTCONN")
        check("there is one dead mount, not a pile", len(mounts()) == 1)
    clear()


def the_end_comes_soon_though_the_file_is_open():
    image()
    with open("kept", "w") as f:
        f.write("content")
    with Server("--fuse", "f", "--fuse", "kept,volume=a.img", "a.img") as s:
        with opened("f") as fd, opened("kept", os.O_RDONLY):
            os.pwrite(fd, b"x", 0)
            # Within a second: else an alarm of its own ends it, with another status.
            s.stop()
            check("the open file is dead", error_of(os.pread, fd, 1, 0) in ("ENOTCONN", "ECONNABORTED", "EIO"))
    equal(mounts(), [], "mounts")
    equal(os.path.exists("f"), False, "a file that was made for it")
    with open("kept") as f:
        equal(f.read(), "content", "a file that was there")
    with Server("--fuse", "f", "--exit-unmounted", "a.img") as s:
        run("umount", "f")
        equal(s.proc.wait(20), 0, "the end when it is unmounted")
    with Server("--fuse", "f", "--nbd", "unix:n", "a.img") as s:
        run("umount", "f")
        end = time.monotonic() + 20
        while "was unmounted" not in s.log() and time.monotonic() < end:
            time.sleep(0.01)
        equal((s.file()["mounted"], s.proc.poll()), (False, None), "mounted, ended")


def the_end_comes_soon_though_the_image_hangs():
    with Server("--fuse", "f", "delay:read=100s,write=100s:mem:4M") as s:
        errors = []

        def use(fd, fn, *args):
            errors.append(error_of(fn, fd, *args))

        with opened("f") as fd:
            threads = [threading.Thread(target=use, args=(fd, *how)) for how in ((os.pread, 4096, 0), (os.pwrite, b"x" * 512, 0))]
            for t in threads:
                t.start()
            end = time.monotonic() + 20
            while s.file()["in_flight"] < 2 and time.monotonic() < end:
                time.sleep(0.005)
            s.proc.terminate()
            equal(s.proc.wait(20), 1, "the exit status")
            # By its clock, or by the alarm that comes before the second is over.
            check("its own clock has ended it", "hangs; exiting without it" in s.log() or "stopping takes too long" in s.log(), s.log())
            for t in threads:
                t.join()
        equal([e in ("ENOTCONN", "ECONNABORTED") for e in errors], [True, True], "requests that hung fail: %s" % errors)
    equal((mounts(), os.path.exists("f")), ([], False), "what is left")


def an_image_can_be_mounted_over_itself():
    data = os.urandom(MIB)
    with open("a.img", "wb") as f:
        f.write(data)
    for turn in range(3):
        with Server("--fuse", "a.img", "a.img") as s, opened("a.img") as fd:
            equal(os.pread(fd, MIB, 0) == data, True, "what is seen in turn %d" % turn)
            os.pwrite(fd, b"new", turn * 10)
            os.fsync(fd)
            data = os.pread(fd, MIB, 0)
            s.kill() if turn == 1 else s.stop()
    with open("a.img", "rb") as f:
        equal(f.read() == data, True, "what is in the image")


def what_cannot_be_is_refused_with_a_reason():
    image()
    os.mkdir("folder")

    def refused(status, text, *args):
        p = run(WEIR, "serve", *args, timeout=20)
        check("%s is refused" % (args,), p.returncode == status and text in p.stderr and p.stderr.count("\n") == 1, p.stderr)

    refused(2, "begins with no path", "--fuse", ",mode=0600", "a.img")
    refused(2, "octal", "--fuse", "f,mode=999", "a.img")
    refused(2, "octal", "--fuse", "f,mode=04755", "a.img")
    refused(2, "no user 'nosuch'", "--fuse", "f,owner=nosuch", "a.img")
    refused(2, "no group 'nosuch'", "--fuse", "f,group=nosuch", "a.img")
    refused(2, "color", "--fuse", "f,color=red", "a.img")
    refused(2, "needs --fuse", "--exit-unmounted", "--nbd", "unix:n", "a.img")
    refused(1, "no volume 'x'", "--fuse", "f,volume=x", "a.img")
    refused(1, "more files than disks", "--fuse", "f", "--fuse", "g", "mem:1M")
    refused(1, "no regular file", "--fuse", "folder", "a.img")
    refused(1, "No such file", "--fuse", "nowhere/f", "a.img")
    equal((os.path.exists("f"), mounts()), (False, []), "what is left")
    with Server("--fuse", "f", "a.img"):
        refused(1, "another process serves a disk there", "--fuse", "f", "mem:1M")


def a_disk_that_is_read_only_stays_as_it_is():
    image()
    with Server("--fuse", "f", "--read-only", "a.img"):
        equal(os.stat("f").st_mode & 0o777, 0o400, "mode")
        equal(error_of(os.open, "f", os.O_RDWR), "EROFS", "open for writing")
        with opened("f", os.O_RDONLY) as fd:
            equal(os.pread(fd, 4096, 0), bytes(4096), "a read")


def others_are_let_in_only_on_request():
    image()

    def as_nobody(path):
        return run("setpriv", "--reuid=65534", "--clear-groups", "head", "-c1", path).returncode == 0

    os.chmod(".", 0o755)
    with Server("--fuse", "f,mode=0666", "--fuse", "g,allow-other,mode=0644,volume=a.img", "--fuse", "h,allow-other,volume=a.img", "a.img"):
        equal([as_nobody(p) for p in "fgh"], [False, True, False], "another user reads f, g, h")


def a_user_without_privileges_mounts_through_fusermount():
    need("fusermount3", "setpriv")
    os.chmod(".", 0o777)
    shutil.copy(WEIR, "weir")
    # /dev/fuse may be root's alone: another node takes its place, for this script only
    script = """
        set -e
        mknod fuse c 10 229; chmod 666 fuse; mount --bind fuse /dev/fuse
        # Copies of what other tests have mounted would outlast its end.
        awk '$5 ~ "^/tmp/" && $5 != ENVIRON["PWD"] {print $5}' /proc/self/mountinfo | while read -r m; do umount -l "$m" 2>/dev/null || true; done
        nobody="setpriv --reuid=65534 --regid=65534 --clear-groups"
        $nobody ./weir serve --fuse f,,f --name 'a,b c' mem:4M 2>log & server=$!
        for i in $(seq 500); do grep -q ready log && break; sleep 0.01; done
        grep 'fuse.weir weir:a,b.040c' /proc/self/mountinfo
        echo hello | $nobody dd of=f,f conv=notrunc,fsync status=none
        $nobody head -c 5 f,f
        ! head -c 1 f,f 2>/dev/null
        kill $server; wait $server
        ! grep "$PWD/f,f" /proc/self/mountinfo
        ! test -e f,f
    """
    p = run("unshare", "-m", "sh", "-c", script)
    check("it works", p.returncode == 0 and p.stdout.endswith("hello"), p.stdout + p.stderr)
    p = run("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "./weir", "serve", "--fuse", "g,allow-other", "mem:1M", timeout=20)
    check("what is refused says so", p.returncode == 1 and "fusermount3 refuses to mount" in p.stderr, p.stderr)


def fio_verifies_what_it_wrote():
    image(16 * MIB)
    with Server("--fuse", "f", "a.img") as s:
        for engine in (["--ioengine=io_uring", "--direct=1", "--iodepth=16"], ["--ioengine=psync", "--fsync=16"]):
            p = run("fio", "--name=v", "--filename=f", "--size=16M", "--io_size=8M", "--bsrange=512-64k", "--rw=randwrite", "--verify=crc32c",
                    "--verify_fatal=1", "--allow_file_create=0", *engine)
            require(p.returncode == 0, "fio %s: %s%s" % (engine[0], p.stdout, p.stderr))
        equal(s.file()["errors"], 0, "errors")


def a_loop_device_on_it_holds_a_file_system():
    if not os.path.exists("/dev/loop-control"):
        skip("this kernel has no loop devices")
    image(32 * MIB)
    os.mkdir("m")
    with Server("--fuse", "f", "a.img") as s:
        loop = run("losetup", "--find", "--show", "--direct-io=on", "f").stdout.strip()
        require(loop, "losetup")
        try:
            with open("/sys/block/%s/loop/dio" % os.path.basename(loop)) as f:
                equal(f.read().strip(), "1", "direct I/O of the loop device")
            equal(run("mkfs.ext4", "-q", loop).returncode, 0, "mkfs")
            equal(run("mount", "-o", "discard", loop, "m").returncode, 0, "mount")
            data = os.urandom(3 * MIB)
            with open("m/file", "wb") as f:
                f.write(data)
                f.flush()
                before = s.flushes()
                os.fsync(f.fileno())
                check("fsync in the file system arrives", s.flushes() > before)
            check("it trims", run("fstrim", "m").returncode == 0)
            run("umount", "m")
            equal(run("e2fsck", "-fn", loop).returncode, 0, "fsck")
        finally:
            run("umount", "m")
            run("losetup", "-d", loop)
    equal(run("e2fsck", "-fn", "a.img").returncode, 0, "fsck of the image")
    equal(run("debugfs", "-R", "dump /file out", "a.img").returncode, 0, "debugfs")
    with open("out", "rb") as f:
        equal(f.read() == data, True, "the file in the image")


if __name__ == "__main__":
    need_fuse()
    code = run_tests(tests_of(globals()), folders=True)
    sys.exit(code)
