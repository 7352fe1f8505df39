/* SPDX-License-Identifier: MIT */
/*
 * Fuzz target: what comes from /dev/fuse.
 *
 * The input is a list of messages: a byte of flags, two of length, the bytes. Flag 1 gives the message a header that fits (the opcode is its first byte), flag 2 lets the
 * server answer first. Every message with a header that fits and a number is answered, none other is, and the server ends with the socket.
 */
#include <linux/fuse.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "export_fuzz.h"
#include "export/fuse/server.h"
#include "util/bytes.h"

struct input {
	struct fuzz_input in;
	int fd;
};

static void drain(struct input *f)
{
	static uint8_t answer[2 << 20];
	struct fuse_out_header h;
	ssize_t got;

	while ((got = recv(f->fd, answer, sizeof(answer), MSG_DONTWAIT)) > 0) {
		must(got >= (ssize_t)sizeof(h));
		memcpy(&h, answer, sizeof(h));
		must(h.len == (uint32_t)got && h.error <= 0 && h.unique && (!h.error || h.len == sizeof(h)));
	}
}

static void message(struct input *f, uint8_t flags)
{
	static uint8_t buf[65536 + sizeof(struct fuse_in_header)];
	size_t want = next8(&f->in), at = 0;

	want |= (size_t)next8(&f->in) << 8;
	if (flags & 1) {
		struct fuse_in_header h = { .opcode = next8(&f->in), .unique = f->in.pos, .nodeid = 1, .len = (uint32_t)(sizeof(h) + want) };

		memcpy(buf, &h, sizeof(h));
		at = sizeof(h);
	}
	for (size_t i = 0; i < want; i++)
		buf[at++] = next8(&f->in);
	if (at)
		(void)!send(f->fd, buf, at, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static co_fn void co_kernel(void *arg)
{
	struct input *f = arg;

	for (unsigned n = 0; f->in.pos < f->in.len && n < 200; n++) {
		uint8_t flags = next8(&f->in);

		message(f, flags);
		if (flags & 2)
			for (int i = 0; i < 4; i++)
				co_yield();
		drain(f);
	}
	co_yield();
	drain(f);
	close(f->fd);
}

static co_fn void co_fuzz_main(void *arg)
{
	struct input *f = arg;
	struct fuse_export_config c = { .path = "fuzz", .max_in_flight = 8 };
	struct fuse_server *s;
	struct err err = ERR_INIT;
	int pair[2];

	c.volume = co_fuzz_volume();
	must(!fuse_server_create(&s, &err) && !socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
	f->fd = pair[0];
	must(!co_spawn("kernel", co_kernel, f));
	must(!co_fuse_server_serve(s, &c, pair[1], &err));
	fuse_server_destroy(s);
	co_volume_destroy(c.volume);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input f = { .in = { data, size, 0 } };

	fuzz_run(co_fuzz_main, &f);
	return 0;
}
