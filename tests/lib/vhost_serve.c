/* SPDX-License-Identifier: MIT */
/* A vhost-user-blk server in a child process, for tests. */
#include "lib/vhost_serve.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <malloc.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "blk/spec.h"
#include "blk/volume.h"
#include "export/vhost/server.h"
#include "lib/test.h"
#include "rt/buf.h"
#include "rt/io.h"
#include "util/err.h"
#include "util/log.h"

#define SECOND 1000000000ull

struct command {
	char verb;		/* q: end, r: resize, s: status, f: figures */
	uint64_t arg;
};

/* --- The child --- */

static int trace(void *arg, struct disk *d, enum disk_op op, uint64_t off, uint64_t len, unsigned flags)
{
	struct vs_shared *sh = arg;

	__atomic_add_fetch(&sh->ops[op], 1, __ATOMIC_RELAXED);
	sh->last_off = off;
	sh->last_len = len;
	if (op == DISK_OP_WRITE)
		sh->order[sh->writes++ % 1024] = off;
	if ((op == DISK_OP_WRITE || op == DISK_OP_DISCARD || op == DISK_OP_ZERO) && (flags & DISK_FUA))
		__atomic_add_fetch(&sh->fua, 1, __ATOMIC_RELAXED);
	return sh->fail[op];
}

static void figures(struct vs_figures *f)
{
	struct rt_stats st;

	rt_get_stats(rt_self(), &st);
	*f = (struct vs_figures){ .heap = TEST_SANITIZED ? 0 : mallinfo2().uordblks + mallinfo2().hblkhd, .enters = st.ring_enters };
}

static co_fn void co_commands(struct vs *s, struct vhost_server *server, struct volume *v)
{
	struct command c;
	struct vs_figures f;
	struct err err = ERR_INIT;
	char *text;

	while (!co_io_recv_all(s->control, &c, sizeof(c)) && c.verb != 'q') {
		if (c.verb == 'r') {
			int64_t ret = co_volume_resize(v, c.arg, &err);

			co_io_send_all(s->control, &ret, sizeof(ret));
		} else if (c.verb == 'f') {
			figures(&f);
			co_io_send_all(s->control, &f, sizeof(f));
		} else {
			json_t *status = vhost_server_status(server);
			uint64_t len;

			text = json_dumps(status, 0);
			json_decref(status);
			len = strlen(text) + 1;
			co_io_send_all(s->control, &len, sizeof(len));
			co_io_send_all(s->control, text, len);
			free(text);
		}
	}
}

static co_fn void co_child(void *arg)
{
	struct vs *s = arg;
	struct err err = ERR_INIT;
	struct vhost_device_config c = { .path = s->path };
	struct vhost_server *server;
	struct volume *v;
	struct disk *d;

	if (co_disk_open(s->disk, s->read_only ? 0 : DISK_OPEN_RDWR, &d, &err) < 0)
		test_fail("%s", err.msg);
	d->trace = trace;
	d->trace_arg = s->shared;
	CHECK_EQ(volume_create("test", d, &v, &err), 0);
	c.volume = v;
	CHECK_EQ(vhost_server_create(&server, &err), 0);
	if (co_vhost_server_add(server, &c, &err) < 0)
		test_fail("%s", err.msg);
	CHECK_EQ(co_io_send_all(s->control, "r", 1), 0);
	co_commands(s, server, v);
	CHECK_EQ(co_vhost_server_stop(server, rt_now_exact_ns() + 20 * SECOND), 0);
	CHECK_EQ(vhost_server_connections(server), 0);
	vhost_server_destroy(server);
	co_volume_destroy(v);
}

static void child(struct vs *s)
{
	struct rt_config rc = { .coroutines = 256, .spin_ns = s->poll_ns };
	struct rt_bufpool *pool;
	struct err err = ERR_INIT;
	struct rt *rt;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	log_set_level(test_env_u64("WEIR_LOUD", 0) ? LOG_DEBUG : LOG_NONE);
	backends_register();
	if (rt_create(&rc, &rt, &err) < 0)
		test_fail("%s", err.msg);
	CHECK_EQ(rt_bufpool_create(rt, RT_BUF_MAX, &pool, &err), 0);
	rt_set_bufs(rt, pool);
	CHECK_EQ(rt_run(rt, co_child, s), 0);
	rt_bufpool_destroy(pool);
	rt_destroy(rt);
	close(s->control);
	exit(0);
}

/* --- The parent --- */

void vs_restart(struct vs *s)
{
	int pair[2];
	char ready;

	CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
	fflush(stdout);
	s->pid = fork();
	CHECK(s->pid >= 0);
	if (!s->pid) {
		close(pair[0]);
		s->control = pair[1];
		child(s);
	}
	close(pair[1]);
	s->control = pair[0];
	if (recv(s->control, &ready, 1, 0) != 1)
		test_fail("the server on %s did not start", s->disk);
}

static void start(struct vs *s)
{
	const char *tmp = getenv("TMPDIR");

	snprintf(s->dir, sizeof(s->dir), "%s/weir-vhost-XXXXXX", tmp && *tmp && strlen(tmp) < 40 ? tmp : "/tmp");
	CHECK(mkdtemp(s->dir));
	snprintf(s->path, sizeof(s->path), "%s/s", s->dir);
	s->shared = mmap(NULL, sizeof(*s->shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(s->shared != MAP_FAILED);
	vs_restart(s);
}

void vs_start(struct vs *s, const char *disk, bool read_only)
{
	*s = (struct vs){ .disk = disk, .read_only = read_only };
	start(s);
}

void vs_start_polling(struct vs *s, const char *disk, uint64_t poll_ns)
{
	*s = (struct vs){ .disk = disk, .poll_ns = poll_ns };
	start(s);
}

static void ask(struct vs *s, char verb, uint64_t arg)
{
	struct command c;

	memset(&c, 0, sizeof(c));
	c.verb = verb;
	c.arg = arg;
	CHECK_EQ(send(s->control, &c, sizeof(c), MSG_NOSIGNAL), (ssize_t)sizeof(c));
}

int vs_resize(struct vs *s, uint64_t size)
{
	int64_t ret;

	ask(s, 'r', size);
	CHECK_EQ(recv(s->control, &ret, sizeof(ret), MSG_WAITALL), (ssize_t)sizeof(ret));
	return (int)ret;
}

void vs_get_figures(struct vs *s, struct vs_figures *ret)
{
	ask(s, 'f', 0);
	CHECK_EQ(recv(s->control, ret, sizeof(*ret), MSG_WAITALL), (ssize_t)sizeof(*ret));
}

char *vs_status(struct vs *s)
{
	uint64_t len;
	char *text;

	ask(s, 's', 0);
	CHECK_EQ(recv(s->control, &len, sizeof(len), MSG_WAITALL), (ssize_t)sizeof(len));
	text = malloc(len);
	CHECK_EQ(recv(s->control, text, len, MSG_WAITALL), (ssize_t)len);
	return text;
}

unsigned vs_descriptors(struct vs *s)
{
	char path[64];
	unsigned n = 0;
	DIR *d;

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)s->pid);
	d = opendir(path);
	CHECK(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

unsigned vs_mappings(struct vs *s)
{
	char path[64];
	unsigned n = 0;
	FILE *f;
	int c;

	snprintf(path, sizeof(path), "/proc/%d/maps", (int)s->pid);
	f = fopen(path, "re");
	CHECK(f);
	while ((c = getc(f)) != EOF)
		n += c == '\n';
	fclose(f);
	return n;
}

bool vs_is_alive(struct vs *s)
{
	return waitpid(s->pid, NULL, WNOHANG) == 0;
}

void vs_stop(struct vs *s)
{
	int status;

	ask(s, 'q', 0);
	CHECK_EQ(waitpid(s->pid, &status, 0), s->pid);
	close(s->control);
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		test_fail("the server ended with status 0x%x", status);
}

void vs_kill(struct vs *s)
{
	int status;

	kill(s->pid, SIGKILL);
	CHECK_EQ(waitpid(s->pid, &status, 0), s->pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	close(s->control);
}

void vs_fini(struct vs *s)
{
	unlink(s->path);
	rmdir(s->dir);
	munmap(s->shared, sizeof(*s->shared));
}
