#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""A serving process has given up what it does not need, and what it needs still works."""
import json

from nbd_lib import *

need("nbdinfo")


def status_of(pid):
    with open("/proc/%d/status" % pid) as f:
        return dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)


def ask(socket_path, **request):
    with socket.socket(socket.AF_UNIX) as c:
        c.connect(socket_path)
        c.sendall(json.dumps(request).encode() + b"\n")
        for line in c.makefile():
            answer = json.loads(line)
            if "progress" not in answer:
                return answer


def create_log(path):
    run(WEIR, "log", "create", "--size", "64M", path)


def every_thread_is_confined_unless_it_shall_not_be():
    with Server("mem:16M") as s:
        run("nbdinfo", s.uri())
        for task in os.listdir("/proc/%d/task" % s.proc.pid):
            with open("/proc/%d/task/%s/status" % (s.proc.pid, task)) as f:
                text = f.read()
            check("Seccomp:\t2" in text and "NoNewPrivs:\t1" in text, text)
        check("refused" not in s.text(), s.text())
    with Server("mem:16M", "--no-sandbox") as s:
        equal(status_of(s.proc.pid)["Seccomp"], "0", "seccomp")


def another_user_has_neither_root_nor_its_groups_and_serves_what_root_opened():
    if os.geteuid():
        skip("only root can become another user")
    with folder() as d:
        os.chmod(d, 0o700)
        image, log, control = (os.path.join(d, x) for x in ("disk.raw", "log", "control"))
        with open(image, "wb") as f:
            f.truncate(4 << 20)
        os.chmod(image, 0o600)
        create_log(log)
        with Server(image, "--log", log, "--control", control, "--user", "nobody") as s:
            st = status_of(s.proc.pid)
            equal(set(st["Uid"].split()), {"65534"}, "the user")
            check("0" not in st["Groups"].split() + st["Gid"].split(), st["Groups"])
            equal([st[c] for c in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")], ["0" * 16] * 5, "capabilities")
            with Raw(s) as c:
                c.negotiate()
                equal(c.do(WRITE, 0, 4096, FUA, b"x" * 4096), 0, "a durable write")
            equal(ask(control, command="status")["result"]["confined"]["uid"], 65534, "what status says")
            equal(ask(control, command="resize", volume="disk.raw", size=8 << 20)["ok"], True, "a resize")
            check(ask(control, command="drain")["ok"], "a drain")
        with open(image, "rb") as f:
            equal(f.read(4096), b"x" * 4096, "what is in the image")
        equal(os.path.getsize(image), 8 << 20, "its size")
        p = subprocess.run([WEIR, "serve", image, "--log", log, "--nbd", "unix:" + d + "/n", "--user", "no-such-user"], capture_output=True, text=True, timeout=TIMEOUT)
        check(p.returncode == 1 and "no user 'no-such-user'" in p.stderr, p.stderr)


def a_new_side_of_the_log_may_come_from_where_the_log_is_or_is_allowed_only():
    with folder() as d, folder() as e, folder() as g:
        control, log = os.path.join(d, "control"), os.path.join(d, "log")
        create_log(log)
        for where in (d, e, g):
            with open(os.path.join(where, "new"), "wb") as f:
                f.truncate(64 << 20)
        with Server("mem:4M", "--log", log, "--control", control, "--allow-path", g) as s:
            confined = ask(control, command="status")["result"]["confined"]
            answer = ask(control, command="log-rebuild", device=os.path.join(e, "new"))
            if confined["landlock"]:
                check(not answer["ok"] and "--allow-path" in answer["error"], answer)
            for where in (g, ):
                answer = ask(control, command="log-rebuild", device=os.path.join(where, "new"))
                check(answer["ok"], answer)
        with Server("mem:4M", "--log", log, "--log", os.path.join(g, "new"), "--control", control) as s:
            pass


def children(pid):
    with open("/proc/%d/task/%d/children" % (pid, pid)) as f:
        return [int(x) for x in f.read().split()]


def a_server_of_files_is_confined_and_takes_them_away_at_the_end():
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        skip("only root can mount here, where there is FUSE")
    with folder() as d:
        os.chmod(d, 0o755)
        files = [os.path.join(d, x) for x in ("made", "given")]
        with open(files[1], "w"):
            pass
        for user in (), ("--user", "nobody"):
            with Server("mem:1M", "mem:2M", "--name", "a", "--name", "b", "--fuse", files[0], "--fuse", files[1], *user) as s:
                equal(status_of(s.proc.pid)["Seccomp"], "2", "seccomp")
                equal(status_of(s.proc.pid)["Uid"].split()[0], "65534" if user else "0", "the user")
                fd = os.open(files[0], os.O_RDWR)
                os.pwrite(fd, b"x" * 4096, 4096)
                os.fsync(fd)
                equal(os.pread(fd, 8192, 0), bytes(4096) + b"x" * 4096, "what is in the file")
                os.close(fd)
                equal(os.path.getsize(files[1]), 2 << 20, "the other one's size")
                helper, = children(s.proc.pid)
                # As systemd does: all of the service's processes get it.
                os.kill(helper, signal.SIGTERM)
                os.kill(helper, signal.SIGINT)
                s.proc.send_signal(signal.SIGTERM)
                equal(s.proc.wait(TIMEOUT), 0, "the exit status: " + s.text())
                check("cannot be unmounted" not in s.text() and "sandbox" not in s.text(), s.text())
            check(not os.path.exists(files[0]), "the file that was made is gone")
            equal(os.path.getsize(files[1]), 0, "the file that was there")
        with Server("mem:1M", "--fuse", files[0]) as s:
            helper, = children(s.proc.pid)
            s.kill()
            end = time.monotonic() + TIMEOUT
            while os.path.exists("/proc/%d/exe" % helper) and time.monotonic() < end:
                time.sleep(0.01)
            check(time.monotonic() < end, "the second process ends with the first")
        with Server("mem:1M", "--fuse", files[0]) as s:
            equal(os.path.getsize(files[0]), 1 << 20, "the next one takes the dead mount away")


def who_unmounts_and_does_not_answer_holds_up_no_end():
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        skip("only root can mount here, where there is FUSE")
    with folder() as d:
        files = [os.path.join(d, x) for x in ("one", "two")]
        with Server("mem:1M", "mem:1M", "--name", "a", "--name", "b", "--fuse", files[0], "--fuse", files[1]) as s:
            helper, = children(s.proc.pid)
            os.kill(helper, signal.SIGSTOP)
            s.proc.send_signal(signal.SIGTERM)
            status = s.proc.wait(TIMEOUT)
            os.kill(helper, signal.SIGKILL)
            with open("/proc/self/mountinfo") as f:
                mounted = f.read().count(os.path.realpath(d) + "/")
            equal(status, 0, "the exit status: " + s.text())
            equal((mounted, s.text().count("cannot be unmounted")), (2, 2), s.text())
        with Server("mem:1M", "mem:1M", "--name", "a", "--name", "b", "--fuse", files[0], "--fuse", files[1]) as s:
            equal(os.path.getsize(files[0]), 1 << 20, "the next one takes the dead mounts away")


def a_folder_that_is_moved_takes_its_mount_along_and_no_other_file_is_touched():
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        skip("only root can mount here, where there is FUSE")
    with folder() as d:
        os.chmod(d, 0o755)
        old, new = os.path.join(d, "old"), os.path.join(d, "new")
        os.mkdir(old)
        with Server("mem:1M", "--fuse", os.path.join(old, "file"), "--user", "nobody") as s:
            os.rename(old, new)
            os.mkdir(old)
            with open(os.path.join(old, "file"), "w"):
                pass
            s.proc.send_signal(signal.SIGTERM)
            equal(s.proc.wait(TIMEOUT), 0, "the exit status: " + s.text())
        with open("/proc/self/mountinfo") as f:
            check(d not in f.read(), "nothing is mounted any more")
        equal((os.listdir(new), os.listdir(old)), ([], ["file"]), "what is left")


def who_has_given_up_root_mounts_nothing_more():
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        skip("only root can mount here, where there is FUSE")
    with folder() as d:
        os.chmod(d, 0o777)
        control, more = os.path.join(d, "control"), os.path.join(d, "more")
        with Server("mem:1M", "--name", "a", "--fuse", os.path.join(d, "file"), "--control", control, "--user", "nobody", "--no-sandbox") as s:
            answer = ask(control, command="fuse-add", volume="a", path=more)
            check("can mount no file any more" in answer["error"], answer)
            check(not os.path.exists(more), "no file was made")


sys.exit(run_tests(tests_of(globals())))
