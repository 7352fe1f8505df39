/* SPDX-License-Identifier: MIT */
/*
 * File backend: the kernel's AIO (aio=native), by its system calls.
 *
 * One context per disk. Requests that become ready in one turn of the loop are submitted together by one coroutine, the
 * submitter (io_submit may block there where the file system must read its tables first: that is what this interface is like); completions raise an eventfd that a second coroutine, the reaper, reads on the ring.
 *
 * Invariants
 *  (1) in_flight is what the kernel holds, and never exceeds NATIVE_EVENTS, so that no completion is lost.
 *  (2) a request is on `queue`, or in the kernel, or done; its coroutine waits until it is done.
 *  (3) both coroutines end when `stopping` is set; destroy waits for them. Nothing is in flight then.
 */
#include <errno.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/file.h"
#include "rt/io.h"
#include "util/bytes.h"
#include "util/err.h"

#define NATIVE_EVENTS 256
#define NATIVE_BATCH 32

struct file_native {
	aio_context_t ctx;
	int event_fd;
	unsigned in_flight, running;
	bool stopping;
	struct list queue;
	struct co_queue submit_q, end_q;
};

struct native_req {
	struct iocb cb;
	struct list node;
	struct co *co;
	ssize_t result;
	bool done;
};

static void complete(struct native_req *r, ssize_t result)
{
	r->result = result;
	r->done = true;
	co_wake(r->co);
}

/* Hands the head of the queue to the kernel. False if it takes no more for now. */
static bool submit_some(struct file_native *n)
{
	struct iocb *batch[NATIVE_BATCH];
	unsigned count = 0, room = min((unsigned)NATIVE_BATCH, NATIVE_EVENTS - n->in_flight);
	long done;

	list_for_each(&n->queue, node) {
		if (count == room)
			break;
		batch[count++] = &container_of(node, struct native_req, node)->cb;
	}
	if (!count)
		return false;
	done = syscall(SYS_io_submit, n->ctx, (long)count, batch);
	if (done < 0 && errno == EAGAIN && n->in_flight)
		return false;	/* the reaper kicks us */
	if (done <= 0) {
		struct native_req *r = list_first(&n->queue, struct native_req, node);

		list_del(&r->node);
		complete(r, done < 0 ? -errno : -EIO);
		return true;
	}
	n->in_flight += (unsigned)done;
	while (done-- > 0)
		list_del(n->queue.next);
	return true;
}

static co_fn void co_submitter(void *arg)
{
	struct file_native *n = arg;

	while (!n->stopping) {
		if (!submit_some(n))
			co_queue_wait(&n->submit_q, "file: aio submit");
	}
	n->running--;
	co_queue_wake_all(&n->end_q);
}

static void reap(struct file_native *n)
{
	struct io_event events[NATIVE_BATCH];
	struct timespec now = { 0, 0 };
	long count;

	do {
		count = syscall(SYS_io_getevents, n->ctx, 0L, (long)NATIVE_BATCH, events, &now);
		for (long i = 0; i < count; i++) {
			n->in_flight--;
			complete((struct native_req *)(uintptr_t)events[i].data, (ssize_t)events[i].res);
		}
	} while (count == NATIVE_BATCH || (count < 0 && errno == EINTR));
}

static co_fn void co_reaper(void *arg)
{
	struct file_native *n = arg;
	uint64_t count;

	while (!n->stopping) {
		if (co_io_read(n->event_fd, &count, sizeof(count), 0) < 0)
			co_io_poll(n->event_fd, POLLIN, 0);
		reap(n);
		if (!list_empty(&n->queue))
			co_queue_wake_one(&n->submit_q);
	}
	n->running--;
	co_queue_wake_all(&n->end_q);
}

co_fn void co_file_native_destroy(struct file_native *n)
{
	uint64_t one = 1;

	if (!n)
		return;
	n->stopping = true;
	co_queue_wake_all(&n->submit_q);
	if (write(n->event_fd, &one, sizeof(one)) < 0)
		abort();
	while (n->running)
		co_queue_wait(&n->end_q, "file: aio end");
	syscall(SYS_io_destroy, n->ctx);
	close(n->event_fd);
	free(n);
}

static int start(struct file_native *n, const char *name, co_entry *fn)
{
	int rc = co_spawn(name, fn, n);

	if (!rc)
		n->running++;
	return rc;
}

co_fn int co_file_native_create(struct file_native **ret, struct err *err)
{
	struct file_native *n = calloc(1, sizeof(*n));
	int rc;

	if (!n)
		return err_set(err, -ENOMEM, "out of memory");
	list_init(&n->queue);
	co_queue_init(&n->submit_q);
	co_queue_init(&n->end_q);
	n->event_fd = eventfd(0, EFD_CLOEXEC);
	if (n->event_fd < 0) {
		rc = err_errno(err, -errno, "aio=native: eventfd");
		free(n);
		return rc;
	}
	if (syscall(SYS_io_setup, NATIVE_EVENTS, &n->ctx)) {
		rc = -errno;
		err_errno(err, rc, "aio=native cannot be set up%s; use aio=io_uring",
			  rc == -EAGAIN ? " (sysctl fs.aio-max-nr is used up)" : "");
		close(n->event_fd);
		free(n);
		return rc;
	}
	rc = start(n, "file: aio submitter", co_submitter);
	if (!rc)
		rc = start(n, "file: aio reaper", co_reaper);
	if (rc) {
		co_file_native_destroy(n);
		return err_errno(err, rc, "aio=native: no coroutine is free");
	}
	*ret = n;
	return 0;
}

co_fn ssize_t co_file_native_rw(struct file_native *n, bool write, int fd, const struct iovec *iov, int niov,
				uint64_t off, int rwf)
{
	struct native_req r = {
		.cb = {
			.aio_lio_opcode = write ? IOCB_CMD_PWRITEV : IOCB_CMD_PREADV,
			.aio_fildes = (uint32_t)fd,
			.aio_buf = (uintptr_t)iov,
			.aio_nbytes = (uint64_t)niov,
			.aio_offset = (int64_t)off,
			.aio_rw_flags = rwf,
			.aio_flags = IOCB_FLAG_RESFD,
			.aio_resfd = (uint32_t)n->event_fd,
		},
		.co = co_self(),
	};

	r.cb.aio_data = (uintptr_t)&r;
	list_add_tail(&n->queue, &r.node);
	co_queue_wake_one(&n->submit_q);
	while (!r.done)
		co_park("file: aio");
	return r.result;
}
