# SPDX-License-Identifier: MIT
"""What the tests with real guests share: a server, and a Linux guest that runs a script.

A guest says AT(name) by printing "AT name"; the test's function of that name then runs on the host, while the guest goes on; KILL in its place
ends the guest as a power cut would. What the guest waits for it must see by itself (the size of its disk, for example).
"""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from harness import *

HERE = os.path.dirname(os.path.abspath(__file__))


KILL = "kill"


class Failure(Exception):
    pass


def check(cond, what):
    if not cond:
        raise Failure(what)


class Weir:
    """`weir serve` with one vhost-user socket for each disk, and a control socket."""

    running = []

    def __init__(self, weir, folder, disks, args=(), name="disk"):
        self.folder, self.sockets = folder, [os.path.join(folder, f"vhost{i}") for i in range(len(disks))]
        self.control_path = os.path.join(folder, "control")
        self.argv = [weir, "serve", "--control", self.control_path]
        for i, s in enumerate(self.sockets):
            self.argv += ["--vhost-user", s, "--name", f"{name}{i}"]
        self.argv += [*args, *disks]
        self.p = None
        self.log = os.path.join(folder, "weir.log")
        open(self.log, "w").close()
        Weir.running.append(self)
        self.start()

    def start(self):
        at = os.path.getsize(self.log)
        with open(self.log, "a") as f:
            self.p = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, stdout=f, stderr=f)
        end = time.monotonic() + 20
        while "weir: ready\n" not in self.text()[at:]:
            check(self.p.poll() is None and time.monotonic() < end, "the server starts: " + self.text())
            time.sleep(0.005)

    def text(self):
        with open(self.log) as f:
            return f.read()

    def kill(self):
        if self.p:
            self.p.kill()
            self.p.wait()

    def stop(self):
        if self.p.poll() is None:
            self.p.send_signal(signal.SIGTERM)
            check(self.p.wait(10) == 0, "the server ends well: " + self.text())

    def control(self, **request):
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(20)
            s.connect(self.control_path)
            s.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(s.makefile().readline())
        check(answer["ok"], f"{request}: {answer}")
        return answer["result"]

    def device(self, i=0):
        return self.control(command="status")["vhost_user"][i]


def parts(**scripts):
    """A script that runs each of these, whatever becomes of the others; Guest.part_ok() says whether one ended well."""
    return "".join(f"(\n{script}\n)\necho {name}=$?\n" for name, script in scripts.items())


def libraries(path):
    return [line.split()[2] for line in run("ldd", path).stdout.splitlines() if "=> /" in line]


def fio_at(root):
    """A shell's function fio() that runs the one under `root`: its libraries are more than a guest's initrd should have to unpack. To read the clock is slow in both
    kinds of guests."""
    folders = ":".join(root + f for f in sorted({os.path.dirname(x) for x in libraries(program("fio"))}))
    fio = root + os.path.realpath(program("fio"))
    return f"fio() {{\n\tLD_LIBRARY_PATH={folders} {fio} --thread --eta=never --gtod_reduce=1 --clocksource=cpu \"$@\"\n}}\n"


def weir_at(root):
    """The same for weir, which runs often: from the host's file system each run would take three times as long."""
    path = os.path.abspath(sys.argv[1])
    files = " ".join(root + x for x in [path, *libraries(path)])
    return f"mkdir /weir && cp -L {files} /weir/ || exit 90\nweir() {{\n\tLD_LIBRARY_PATH=/weir /weir/weir \"$@\"\n}}\n"


def programs(kind, script):
    """What makes fio() and, in user-mode-linux, weir(), if the script uses them."""
    if kind == "uml":
        root, mount = "/host", "mount -r -t hostfs -o / none"
        text = (fio_at(root) if "fio " in script else "") + (weir_at(root) if "weir " in script else "")
    else:
        root, mount = "/tools", "mount -r -t ext4 /dev/$(grep -lx tools /sys/block/vd*/serial | cut -d/ -f4)"
        text = fio_at(root) if "fio " in script else ""
    return text and f"mkdir {root}\n{mount} {root} || exit 90\n" + text


class Guest:
    """Runs `script` in a guest whose disks are the sockets; `at` are the functions it calls by AT."""

    def __init__(self, kind, cache, sockets, script, at=None, memory="512M", queues=1, cpus=1, reconnect=0, timeout=300):
        self.lines, self.at, self.status = [], at or {}, None
        fio = "fio " in script
        script = programs(kind, script) + script
        r = subprocess.run([os.path.join(HERE, "build"), cache, kind], stdout=subprocess.PIPE, stderr=sys.stderr, text=True, check=False)
        if r.returncode == 77:
            skip(r.stdout.strip().splitlines()[-1].removeprefix("skipped: "))
        check(r.returncode == 0, "the guest's image: " + r.stdout)
        self.tmp = tempfile.mkdtemp(prefix="weir-guest-")
        try:
            initrd = self.make_initrd(os.path.join(cache, kind + ".cpio"), script)
            if kind == "uml":
                argv = ["/usr/bin/linux.uml", f"mem={memory}", f"initrd={initrd}", "con0=fd:0,fd:1", "con=null", "quiet", "init_on_alloc=0",
                        "selinux=0", "apparmor=0"]
                argv += [f"virtio_uml.device={s}:2" for s in sockets]
            else:
                argv = self.qemu(cache, initrd, sockets, memory, queues, cpus, reconnect, fio)
            self.run(argv, timeout)
        finally:
            shutil.rmtree(self.tmp)

    def make_initrd(self, base, script):
        path = os.path.join(self.tmp, "test.sh")
        with open(path, "w") as f:
            f.write(script)
        own = subprocess.run(["cpio", "--quiet", "-o", "-H", "newc"], cwd=self.tmp, input=b"test.sh\n", stdout=subprocess.PIPE, check=True).stdout
        initrd = os.path.join(self.tmp, "initrd")
        shutil.copyfile(base, initrd)
        with open(initrd, "ab") as f:
            f.write(own)
        return initrd

    @staticmethod
    def qemu(cache, initrd, sockets, memory, queues, cpus, reconnect, fio):
        argv = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio", "-monitor", "none",
                "-accel", "tcg", "-cpu", "qemu64,+ssse3,+sse4.1,+sse4.2", "-smp", str(cpus), "-m", memory, "-machine", "q35,memory-backend=mem",
                "-object", f"memory-backend-memfd,id=mem,size={memory},share=on", "-kernel", os.path.join(cache, "vmlinuz"), "-initrd", initrd,
                "-append", "console=ttyS0 quiet panic=-1 mitigations=off init_on_alloc=0"]
        for i, s in enumerate(sockets):
            argv += ["-chardev", f"socket,id=c{i},path={s}" + (f",reconnect={reconnect}" if reconnect else ""),
                     "-device", f"vhost-user-blk-pci,chardev=c{i},num-queues={queues}"]
        if fio:
            argv += ["-blockdev", f"driver=file,node-name=tools,read-only=on,filename={os.path.join(cache, 'fio.img')}",
                     "-device", "virtio-blk-pci,drive=tools,serial=tools"]
        return argv

    def run(self, argv, timeout):
        self.p = p = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                             start_new_session=True, env=dict(os.environ, TMPDIR="/dev/shm"))
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        try:
            for line in p.stdout:
                self.line(line.rstrip())
        finally:
            timer.cancel()
            self.kill()
            p.wait()

    def kill(self):
        # user-mode-linux has a process for each of its own, all in this session
        try:
            os.killpg(self.p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def line(self, line):
        self.lines.append(line)
        if os.environ.get("WEIR_LOUD"):
            print("|", line, flush=True)
        if line.startswith("AT "):
            action = self.at[line[3:].strip()]
            if action == KILL:
                self.kill()
            else:
                action()
        elif line.startswith("GUEST-EXIT "):
            self.status = int(line.split()[1])

    def value(self, name):
        """What the guest printed as "name=value"."""
        for line in self.lines:
            if line.startswith(name + "="):
                return line[len(name) + 1:]
        raise Failure(f"the guest said nothing of {name}:\n" + "\n".join(self.lines[-40:]))

    def part_ok(self, name):
        check(self.value(name) == "0", f"{name} ended with {self.value(name)}:\n" + "\n".join(self.lines[-40:]))

    def ok(self):
        check(self.status == 0, f"the guest ended with {self.status}:\n" + "\n".join(self.lines[-40:]))


def main(tests):
    """Runs the tests that argv[3:] name, or all. argv[1:3] are weir and the folder for guests' images."""
    failed = 0
    for test in tests:
        if len(sys.argv) > 3 and test.__name__ not in sys.argv[3:]:
            continue
        began = os.times()
        folder = tempfile.mkdtemp(prefix="weir-guest-")
        try:
            test(sys.argv[1], os.path.abspath(sys.argv[2]), folder)
            now = os.times()
            print(f"{test.__name__}: ok, {sum(now[:4]) - sum(began[:4]):.1f} s of processor time in {now[4] - began[4]:.1f} s", flush=True)
        except Failure as e:
            failed = 1
            print(f"{test.__name__}: FAILED: {e}", flush=True)
            for w in Weir.running:
                print(w.text(), flush=True)
        finally:
            for w in Weir.running:
                w.kill()
            Weir.running.clear()
            shutil.rmtree(folder)
    sys.exit(failed)
