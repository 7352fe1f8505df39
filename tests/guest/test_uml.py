#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Real guests under user-mode-linux: Linux' own virtio_blk driver and file system on weir's disks.

To boot one takes five seconds of processor time, so the scenarios that need no guest of their own share one, each with a disk of its own.

usage: test_uml.py WEIR CACHE [TEST ...]
"""
import json
import os
import subprocess

from guest import KILL, Guest, Weir, check, main, parts, scale

MIB = 1 << 20


def sparse(path, size):
    with open(path, "wb") as f:
        f.truncate(size)
    return path


# The disk of a scenario, by the name that its server gave it.
DISKS = r"""
disk() {
	grep -lx "$1" /sys/block/vd*/serial | cut -d/ -f4
}
for i in disk0 disk1 disk2 disk3 logged0 logged1 killed0; do
	[ -b "/dev/$(disk $i)" ] || { echo "no disk $i"; exit 91; }
done
"""

FILE_SYSTEM = r"""
d=$(disk disk0)
q=/sys/block/$d/queue
echo size=$(cat /sys/block/$d/size)
echo serial=$(cat /sys/block/$d/serial)
echo cache=$(cat /sys/block/$d/cache_type)
echo discard=$(cat $q/discard_max_bytes)
echo zeroes=$(cat $q/write_zeroes_max_bytes)
echo block=$(cat $q/logical_block_size)
mkfs.ext4 -q -F /dev/$d || exit 1
mount -t ext4 -o discard /dev/$d /mnt || exit 2
# To start fio takes as long as half of what it does here, so it writes to the two disks with a log as well.
fio --output=/tmp/fio --rw=randwrite --ioengine=libaio --direct=1 --verify=crc32c --do_verify=1 \
	--name=files --directory=/mnt --bs=4k --size=4m --iodepth=16 --fsync=64 \
	--name=logged0 --filename=/dev/$(disk logged0) --bs=8k --size=8m --iodepth=8 \
	--name=logged1 --filename=/dev/$(disk logged1) --bs=8k --size=8m --iodepth=8 || { cat /tmp/fio; exit 3; }
dd if=/dev/urandom of=/mnt/a bs=64k count=16 conv=fsync 2>/dev/null || exit 4
s=$(md5sum </mnt/a)
umount /mnt
e2fsck -fn /dev/$d >/dev/null 2>&1 || exit 5
mount -t ext4 /dev/$d /mnt || exit 6
[ "$s" = "$(md5sum </mnt/a)" ] || exit 7
umount /mnt
exit 0
"""

FSYNCS = r"""
d=$(disk disk1)
probe fsyncs /dev/$d 20 || exit 1
echo AT on
sleep 0.5
echo "write through" >/sys/block/$d/cache_type || exit 2
probe fsyncs /dev/$d 20 || exit 3
echo AT off
sleep 0.5
echo "write back" >/sys/block/$d/cache_type || exit 4
probe fsyncs /dev/$d 20 || exit 5
exit 0
"""

DISCARDS = r"""
d=$(disk disk2)
dd if=/dev/urandom of=/dev/$d bs=1M count=16 oflag=direct 2>/dev/null || exit 1
sync
echo AT full
sleep 0.5
/usr/bin/blkdiscard -o 0 -l 8388608 /dev/$d || exit 2
/usr/bin/blkdiscard -z -o 8388608 -l 4194304 /dev/$d || exit 3
probe zero /dev/$d 8 12 || exit 4
probe zero /dev/$d 12 16
[ $? = 1 ] || exit 5
exit 0
"""

RESIZE = r"""
d=$(disk disk3)
dd if=/dev/zero of=/dev/$d bs=4k seek=16383 count=1 oflag=direct 2>/dev/null || exit 1
echo AT grow
i=0
while [ "$(cat /sys/block/$d/size)" != 262144 ]; do
	i=$((i + 1))
	[ $i -lt 100 ] || exit 2
	sleep 0.1
done
dd if=/dev/zero of=/dev/$d bs=4k seek=32767 count=1 oflag=direct 2>/dev/null || exit 3
exit 0
"""

KILLED = r"""
mkfs.ext4 -q -F /dev/vda || exit 1
mount -t ext4 /dev/vda /mnt || exit 2
(while :; do dd if=/dev/zero of=/mnt/noise bs=64k count=40 2>/dev/null; done) &
for i in 1 2 3 4 5 6 7 8; do
	echo "file $i" | dd of=/mnt/$i conv=fsync 2>/dev/null || exit 3
done
echo AT kill
sleep 10
exit 4
"""

RECOVERED = r"""
d=$(disk killed0)
mount -t ext4 /dev/$d /mnt || exit 1
for i in 1 2 3 4 5 6 7 8; do
	read line </mnt/$i
	[ "$line" = "file $i" ] || exit 2
done
umount /mnt
e2fsck -fn /dev/$d >/dev/null 2>&1 || exit 3
exit 0
"""


# weir runs in the guest, whose kernel has an NBD client. What that says of a server that is gone is right, and not shown.
# Neither subshells nor pipes: each process costs as much as a step.
MAPPED = r"""
modprobe nbd || exit 28
mkdir /in && mount -t tmpfs in /in && mkdir /in/e && cd /in || exit 29
echo 1 >/proc/sys/kernel/printk
map() {
	weir map --fuse-dir /in/d "$@" >device 2>messages || return 1
	read dev <device
}
said() {
	read -r line <messages
	case $line in
	*"$1"*) ;;
	*) echo "not said: $1: $line"; return 1 ;;
	esac
}
# What there is in a folder.
none() {
	set -- "$1"/*
	[ ! -e "$1" ]
}
truncate -s 32M img || exit 1
weir log create --size 32M log 2>/dev/null || exit 2
map --wait 1h --log log img || exit 3
said "by the kernel's NBD client" || exit 4
q=/sys/block/${dev#/dev/}
read size <$q/size && read cache <$q/queue/write_cache && read fua <$q/queue/fua && read block <$q/queue/logical_block_size && read ro <$q/ro
read discard <$q/queue/discard_max_bytes
echo device=$dev $size $cache $fua $block $ro discard $((discard > 0))
probe fsyncs $dev 20 && /usr/bin/blkdiscard $dev || exit 5
echo -n counted=
probe ask d/img.sock '{"command":"stats"}' || exit 30
mkfs.ext4 -q -F $dev && mount -t ext4 $dev /mnt || exit 6
probe fill /mnt/one 256 || exit 7
weir unmap $dev 2>messages && exit 8
said "is in use" || exit 9

# The server ends by itself, as for an update, in the middle of requests: what it has not answered, and what is written meanwhile, waits for the next. It has a second
# for that, which a busy machine may not give it. It is stopped until the kernel has sent something.
busy() {
	until read reads writes <$q/inflight && [ $writes -gt 0 ]; do
		usleep 10000
	done
}
probe fill /mnt/two 256 || exit 25
# What was sent and not answered is sent again then; else it takes half a minute.
echo 500 >$q/queue/io_timeout
while :; do
	read old <d/img.pid
	kill -STOP $old
	(
		status=0
		until [ -e enough ] || [ $status != 0 ]; do
			probe fill /mnt/two 256 || status=1
		done
		echo $status >waited
	) &
	busy
	kill -TERM $old
	kill -CONT $old
	probe gone $old
	[ -e d/img.pid ] || break
	weir unmap --force $dev
	wait
	umount /mnt
	map --wait 1h --log log img && mount -t ext4 $dev /mnt || exit 26
done
# Another disk of this name is not what it goes on with, though it is as large.
truncate -s 32M e/img
map --wait 1h e/img && exit 27
said "$dev: waits for file:/in/img (inode" && said "cannot go on with file:/in/e/img (inode" || exit 31
before=$dev
map --wait 1h --log log img || exit 10
read pid <d/img.pid
[ "$before" = "$dev" ] && [ "$pid" != "$old" ] || exit 11
>enough
wait
read status <waited
[ "$status" = 0 ] && probe verify /mnt/two 256 || exit 12

# It grows under the file system.
probe told d/img.sock '{"command":"resize","volume":"img","size":"64M"}' || exit 13
read size <$q/size
echo grown=$size

# It is killed in the middle of requests: the device does not go on with another, which would not have what was acknowledged and not flushed.
kill -STOP $pid
(probe fill /mnt/two 256; echo $? >failed) &
busy
kill -9 $pid
probe gone $pid
map --log log img && exit 32
said "its server was killed, and $dev still sits on it; weir unmap $dev first" || exit 33
weir unmap $dev 2>messages && exit 14
said "--force takes it away" || exit 14
weir unmap --force $dev 2>/dev/null || exit 15
wait
read status <failed
[ "$status" != 0 ] || exit 34
umount /mnt
[ ! -e $q/backend ] && none d || exit 16

# What was synced is there. To a server that is there already another device is connected.
map --log log img || exit 17
mount -t ext4 $dev /mnt && probe verify /mnt/one 256 && probe verify /mnt/two 256 || exit 18
umount /mnt
e2fsck -fn $dev >/dev/null 2>&1 || exit 19
own=$dev
map --read-only --block-size 4096 d/img.sock || exit 20
o=/sys/block/${dev#/dev/}
read backend <$o/backend && read block <$o/queue/logical_block_size && read ro <$o/ro
echo used=$backend $block $ro
weir unmap $dev && [ -e $q/backend ] && [ -e d/img.sock ] || exit 21
# Ten at a time, with too few descriptors to leave one open each time; nor does the server keep any.
read pid <d/img.pid
ten="d/img.sock d/img.sock d/img.sock d/img.sock d/img.sock d/img.sock d/img.sock d/img.sock d/img.sock d/img.sock"
round=0
while [ $round -lt $rounds ]; do
	round=$((round + 1))
	(ulimit -n 10 && weir map $ten) >devices 2>messages || exit 35
	set --
	while read -r device; do
		set -- "$@" $device
	done <devices
	[ $# = 10 ] || exit 36
	(ulimit -n 10 && weir unmap "$@") || exit 37
	set -- /proc/$pid/fd/*
	[ $round != 1 ] || first=$#
	until [ $# -le $first ]; do
		usleep 10000
		set -- /proc/$pid/fd/*
	done
done
set -- /sys/block/nbd*/backend
[ "$*" = $q/backend ] || exit 38
weir map --list >list
while read -r device volume size unit access pid number rest; do
	[ "$device $volume $size $unit $access $pid" = "$own img 64 MiB rw pid" ] && listed=1
done <list
[ "$listed" ] || exit 22
weir unmap --all || exit 23
[ ! -e $q/backend ] && none d || exit 24
exit 0
"""

def log_of(weir, folder):
    log = os.path.join(folder, "log")
    subprocess.run([weir, "log", "create", "--size", "128M", log], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return log


def a_file_system_with_verified_data(g, w):
    g.part_ok("file_system")
    check(g.value("size") == str(128 * MIB // 512), "size")
    check(g.value("serial") == "disk0", "serial")
    check(g.value("cache") == "write back", "the cache is on")
    check(int(g.value("discard")) > 0 and int(g.value("zeroes")) > 0 and g.value("block") == "512", "queue limits")
    d = w.device(0)
    check(d["errors"] == 0 and d["flushes"] > 0 and d["durable_writes"] == 0 and not d["error"], f"{d}")


def fsyncs_are_counted_on_the_server(g, w, on, off):
    """20 writes, each with an fsync: with the cache on a flush each, with it off durable writes and no flush."""
    g.part_ok("fsyncs")
    end = w.device(1)
    check(on["flushes"] >= 20 and on["durable_writes"] == 0, f"cache on: {on}")
    check(off["durable_writes"] == 20 and off["flushes"] - on["flushes"] <= 1, f"cache off: {off}")
    check(end["flushes"] - off["flushes"] >= 20 and end["durable_writes"] == 20, f"cache on again: {end}")


def discards_and_zeroes_reach_the_image(g, disk, full):
    g.part_ok("discards")
    check(full * 512 >= 16 * MIB, "all is allocated")
    check(os.stat(disk).st_blocks * 512 <= 9 * MIB, f"what was discarded is free: {os.stat(disk).st_blocks}")


def two_disks_with_one_write_log(g, logged):
    check(all(logged.device(i)["errors"] == 0 and logged.device(i)["requests"] > 0 for i in range(2)), "both are used")


def the_kernels_nbd_client_maps_a_disk(g):
    """weir in the guest: a device that flushes and discards, goes on with the next server, grows, and goes away when its server was killed."""
    g.part_ok("mapped")
    check(g.value("device") == "/dev/nbd0 65536 write back 1 512 0 discard 1", g.value("device"))
    volume, = json.loads(g.value("counted"))["result"]["volumes"]
    flushes, discards = (volume[kind]["ops"] for kind in ("flush", "discard"))
    check(flushes == 20 and discards > 0, f"{flushes} flushes, {discards} discards")
    check(g.value("grown") == "131072", g.value("grown"))
    check(g.value("used") == "weir:use:img@/in/d/img.sock 4096 1", g.value("used"))


class Folders:
    """Servers with a folder of their own each."""

    def __init__(self, weir, folder):
        self.weir, self.folder = weir, folder

    def serve(self, name, sizes, log=False):
        sub = os.path.join(self.folder, name)
        os.mkdir(sub)
        self.disks = [sparse(os.path.join(sub, f"image{i}"), size * MIB) for i, size in enumerate(sizes)]
        return Weir(self.weir, sub, self.disks, ["--log", log_of(self.weir, sub)] if log else [], name=name)


def guests_with_file_systems_logs_and_a_kill(weir, cache, folder):
    """A guest dies while it writes, then its server as well. The next guest has that disk (what was synced is there), four without a log (a file
    system, fsyncs, discards, a resize) and two with one."""
    servers = Folders(weir, folder)
    killed = servers.serve("killed", [64], log=True)
    g = Guest("uml", cache, killed.sockets, KILLED, at={"kill": KILL})
    check(g.status is None, f"the guest was to be killed and ended with {g.status}")
    killed.kill()
    killed.start()
    logged = servers.serve("logged", [32, 32], log=True)
    w = servers.serve("disk", [128, 16, 16, 64])
    disks, seen = servers.disks, {}
    g = Guest("uml", cache, w.sockets + logged.sockets + killed.sockets,
              f"rounds={round(2 * scale())}\n" + DISKS + parts(file_system=FILE_SYSTEM, fsyncs=FSYNCS, discards=DISCARDS, resize=RESIZE, recovered=RECOVERED, mapped=MAPPED) + "exit 0\n",
              at={"on": lambda: seen.update(on=w.device(1)), "off": lambda: seen.update(off=w.device(1)),
                  "full": lambda: seen.update(full=os.stat(disks[2]).st_blocks), "grow": lambda: w.control(command="resize", volume="disk3", size="128M")})
    g.ok()
    g.part_ok("recovered")
    a_file_system_with_verified_data(g, w)
    two_disks_with_one_write_log(g, logged)
    fsyncs_are_counted_on_the_server(g, w, seen["on"], seen["off"])
    discards_and_zeroes_reach_the_image(g, disks[2], seen["full"])
    g.part_ok("resize")
    the_kernels_nbd_client_maps_a_disk(g)
    for server in (w, logged, killed):
        server.stop()


main([guests_with_file_systems_logs_and_a_kill])
