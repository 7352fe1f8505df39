/* SPDX-License-Identifier: MIT */
/*
 * I/O on this reactor's ring. Each suspends until the kernel has completed it, and returns what the system
 * call would: a count >= 0 or -errno. -EINTR is retried inside; -EAGAIN of sockets is waited for. Short
 * transfers are returned as they are. On a simulated reactor all return -ENOSYS. Sending never raises SIGPIPE. Receiving
 * with MSG_DONTWAIT waits all the same, but co_io_recv() tries recv(2) first: for data that is likely to be there already.
 * Buffers and iovecs stay untouched by the caller until return.
 */
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "rt/rt.h"

/* `rwf` takes RWF_DSYNC and the like. */
co_fn ssize_t co_io_readv(int fd, const struct iovec *iov, int n, uint64_t off, int rwf);
co_fn ssize_t co_io_writev(int fd, const struct iovec *iov, int n, uint64_t off, int rwf);
co_fn ssize_t co_io_read(int fd, void *buf, size_t len, uint64_t off);
co_fn ssize_t co_io_write(int fd, const void *buf, size_t len, uint64_t off, int rwf);
co_fn int co_io_fsync(int fd, bool data_only);
co_fn int co_io_fallocate(int fd, int mode, uint64_t off, uint64_t len);
co_fn ssize_t co_io_recv(int fd, void *buf, size_t len, int flags);
co_fn ssize_t co_io_send(int fd, const void *buf, size_t len, int flags);
co_fn ssize_t co_io_recvmsg(int fd, struct msghdr *msg, int flags);
co_fn ssize_t co_io_sendmsg(int fd, const struct msghdr *msg, int flags);
/* Whole-length forms: 0, -errno, or -ECONNRESET at end of file before `len` bytes. */
co_fn int co_io_recv_all(int fd, void *buf, size_t len);
co_fn int co_io_send_all(int fd, const void *buf, size_t len);
co_fn int co_io_sendv_all(int fd, struct iovec *iov, int n);	/* consumes iov */
/* The new socket (close-on-exec) or -errno. */
co_fn int co_io_accept(int fd, struct sockaddr *addr, socklen_t *addrlen);
co_fn int co_io_connect(int fd, const struct sockaddr *addr, socklen_t addrlen);
/* poll(2) events, or -ETIMEDOUT; timeout_ns 0 is none. */
co_fn int co_io_poll(int fd, unsigned events, uint64_t timeout_ns);
co_fn int co_io_close(int fd);
/*
 * Wakes every coroutine that waits on the socket `fd` (they see end of file or an error): shutdown(2), and
 * IORING_OP_ASYNC_CANCEL for a listening socket's accept. Plain function. Close only after they are gone.
 */
void rt_io_shutdown(int fd);
