/* SPDX-License-Identifier: MIT */
/* A double of librbd and librados: see fake_rbd.h. All state is under one lock. */
#include "lib/fake_rbd.h"

#include <errno.h>
#include <pthread.h>

#include "backend/rbd_api.h"
#include "lib/test.h"
#include "util/bytes.h"
#include "util/err.h"
#include "util/rng.h"

#define MAX_SIZE (16u << 20)
#define UNIT 4096u
#define THREADS 16
#define OPENS 4
#define WATCH_BASE 4000
#define OTHERS_WATCH 7

struct open_image;

struct comp {
	struct comp *next;
	struct open_image *img;
	void *arg;
	enum fake_verb verb;
	uint64_t off, len;
	const struct iovec *iov;	/* of a read; who waits for it keeps it */
	int niov;
	uint8_t *copy;			/* of a write */
	bool unmap;
	ssize_t result;
};

struct open_image {
	bool used, rdwr, locked;
	char client[64];
	int efd;
	struct comp *done;
};

static struct {
	pthread_mutex_t lock;
	pthread_cond_t more, calls;
	pthread_t thread[THREADS];
	unsigned threads, opens;
	bool stop, hold, hang, short_reads, removed, blocklisted, blocklisted_other, other_watches, other_answers;
	int fail[FAKE_VERBS], refuse[FAKE_VERBS];
	int fail_nth, fail_error, named_error;
	const char *named;
	unsigned ncalls;
	char failed[64];
	struct open_image open[OPENS];
	struct comp *queue;
	unsigned in_flight;
	struct rng rng;
	uint8_t *data, alloc[MAX_SIZE / UNIT];
	uint64_t size, version, last_version, stripe;
	char owner[64], mark[1025], witness[512];
	bool has_mark, has_witness, cache;
	int live;	/* what was given out and not given back */
} f;

/* --- What the test says --- */

#define LOCKED(...) \
	do { \
		pthread_mutex_lock(&f.lock); \
		__VA_ARGS__; \
		pthread_mutex_unlock(&f.lock); \
	} while (0)

void fake_rbd_fail(enum fake_verb verb, int error) { LOCKED(f.fail[verb] = error); }
void fake_rbd_refuse(enum fake_verb verb, int error) { LOCKED(f.refuse[verb] = error); }
void fake_rbd_short_reads(bool on) { LOCKED(f.short_reads = on); }
void fake_rbd_hold(bool on) { LOCKED(f.hold = on; pthread_cond_broadcast(&f.more)); }
void fake_rbd_hang(bool on) { LOCKED(f.hang = on; pthread_cond_broadcast(&f.calls)); }
void fake_rbd_fail_call(int n, int error) { LOCKED(f.fail_nth = n; f.fail_error = error; f.ncalls = 0; f.failed[0] = '\0'); }
void fake_rbd_resize(uint64_t size) { LOCKED(f.size = size); }
void fake_rbd_stripe(uint64_t unit) { LOCKED(f.stripe = unit); }
void fake_rbd_remove(void) { LOCKED(f.removed = true); }
void fake_rbd_blocklist(void) { LOCKED(f.blocklisted = true); }
void fake_rbd_write(uint64_t off, uint8_t byte) { LOCKED(f.data[off] = byte; f.alloc[off / UNIT] = 1); }
void fake_rbd_expire(void) { LOCKED(f.other_watches = false); }
const char *fake_rbd_failed(void) { return f.failed; }
const char *fake_rbd_mark(void) { return f.has_mark ? f.mark : ""; }
const char *fake_rbd_witness(void) { return f.has_witness ? f.witness : ""; }
const char *fake_rbd_owner(void) { return f.owner; }
uint8_t *fake_rbd_data(void) { return f.data; }

unsigned fake_rbd_in_flight(void)
{
	unsigned n;

	LOCKED(n = f.in_flight);
	return n;
}

void fake_rbd_fail_named(const char *name, int error)
{
	LOCKED(f.named = name; f.named_error = error);
}

void fake_rbd_own(const char *client, bool watches, bool answers)
{
	LOCKED(snprintf(f.owner, sizeof(f.owner), "%s", client); f.other_watches = watches; f.other_answers = answers; f.version++);
}

void fake_rbd_steal(void)
{
	LOCKED(for (unsigned i = 0; i < OPENS; i++)
		       f.open[i].locked = false;
	       strcpy(f.owner, FAKE_OTHER); f.version++);
}

bool fake_rbd_blocklisted(const char *client)
{
	return !strcmp(client, FAKE_OTHER) && f.blocklisted_other;
}

void fake_rbd_set_witness(const char *text)
{
	LOCKED(snprintf(f.witness, sizeof(f.witness), "%s", text); f.has_witness = true);
}

/* --- Calls that block --- */

/* Enters a call that can fail; the lock is held behind it unless it does. */
static int enter(const char *name)
{
	int ret = 0;

	pthread_mutex_lock(&f.lock);
	while (f.hang && !f.stop && strcmp(name, "rbd_aio_create_completion"))
		pthread_cond_wait(&f.calls, &f.lock);
	if ((int)f.ncalls++ == f.fail_nth) {
		ret = f.fail_error;
		snprintf(f.failed, sizeof(f.failed), "%s", name);
	}
	if (f.named && !strcmp(name, f.named))
		ret = f.named_error;
	if (ret)
		pthread_mutex_unlock(&f.lock);
	return ret;
}

#define ENTER() \
	do { \
		int enter_ = enter(__func__); \
		if (enter_) \
			return enter_; \
	} while (0)

static int leave(int ret)
{
	pthread_mutex_unlock(&f.lock);
	return ret;
}

static int header_there(void)
{
	return f.blocklisted ? -ESHUTDOWN : f.removed ? -ENOENT : 0;
}

int rados_create(rados_t *cluster, const char *const id)
{
	ENTER();
	f.live++;
	*cluster = &f;
	return leave(0);
}

int rados_conf_read_file(rados_t cluster, const char *path)
{
	ENTER();
	return leave(0);
}

int rados_conf_parse_env(rados_t cluster, const char *var)
{
	ENTER();
	return leave(0);
}

int rados_conf_set(rados_t cluster, const char *option, const char *value)
{
	ENTER();
	if (!strcmp(option, "rbd_cache"))
		f.cache = !strcmp(value, "true");
	return leave(0);
}

int rados_conf_get(rados_t cluster, const char *option, char *buf, size_t len)
{
	return strncmp(option, "rbd_", 4) ? -ENOENT : 0;
}

int rados_connect(rados_t cluster)
{
	ENTER();
	return leave(0);
}

void rados_shutdown(rados_t cluster)
{
	LOCKED(f.live--);
}

int rados_ioctx_create(rados_t cluster, const char *pool, rados_ioctx_t *io)
{
	ENTER();
	if (strcmp(pool, "rbd"))
		return leave(-ENOENT);
	f.live++;
	*io = &f;
	return leave(0);
}

void rados_ioctx_set_namespace(rados_ioctx_t io, const char *ns)
{
}

void rados_ioctx_destroy(rados_ioctx_t io)
{
	LOCKED(f.live--);
}

/* The answers: who watches the image and lives. */
int rados_notify2(rados_ioctx_t io, const char *o, const char *buf, int buf_len, uint64_t timeout_ms, char **reply, size_t *len)
{
	uint64_t *ids;
	size_t n = 0;

	ENTER();
	ids = calloc(OPENS + 1, sizeof(*ids));
	for (unsigned i = 0; i < OPENS; i++)
		if (f.open[i].used)
			ids[n++] = WATCH_BASE + i;
	if (f.other_watches && f.other_answers)
		ids[n++] = OTHERS_WATCH;
	*reply = (char *)ids;
	*len = n * sizeof(*ids);
	f.live++;
	return leave(f.other_watches && !f.other_answers ? -ETIMEDOUT : 0);
}

int rados_decode_notify_response(char *reply, size_t len, struct notify_ack_t **acks, size_t *nacks, struct notify_timeout_t **late, size_t *nlate)
{
	ENTER();
	*nacks = len / sizeof(uint64_t);
	*acks = calloc(*nacks + 1, sizeof(**acks));
	for (size_t i = 0; i < *nacks; i++)
		memcpy(&(*acks)[i].notifier_id, reply + i * sizeof(uint64_t), sizeof(uint64_t));
	*late = NULL;
	*nlate = 0;
	f.live++;
	return leave(0);
}

void rados_free_notify_response(struct notify_ack_t *acks, size_t n, struct notify_timeout_t *late)
{
	LOCKED(f.live--);
	free(acks);
}

void rados_buffer_free(char *buf)
{
	LOCKED(f.live--);
	free(buf);
}

int rados_stat(rados_ioctx_t io, const char *o, uint64_t *bytes, time_t *when)
{
	ENTER();
	*bytes = 0;
	*when = 0;
	f.last_version = f.version;
	return leave(strcmp(o, "rbd_header.fake") ? -ENOENT : header_there());
}

uint64_t rados_get_last_version(rados_ioctx_t io)
{
	return f.last_version;
}

int rados_read(rados_ioctx_t io, const char *o, char *buf, size_t len, uint64_t off)
{
	size_t n;

	ENTER();
	if (!f.has_witness)
		return leave(-ENOENT);
	n = min(strlen(f.witness), len);
	memcpy(buf, f.witness, n);
	return leave((int)n);
}

int rados_write_full(rados_ioctx_t io, const char *o, const char *buf, size_t len)
{
	ENTER();
	CHECK(len < sizeof(f.witness) && !strcmp(o, "weir_writer.fake"));
	memcpy(f.witness, buf, len);
	f.witness[len] = '\0';
	f.has_witness = true;
	return leave(0);
}

int rados_remove(rados_ioctx_t io, const char *o)
{
	int ret;

	ENTER();
	ret = f.has_witness ? 0 : -ENOENT;
	f.has_witness = false;
	return leave(ret);
}

static int open_image(rados_ioctx_t io, const char *name, rbd_image_t *image, bool rdwr)
{
	unsigned i = 0;

	if (strcmp(name, "img") || f.removed)
		return -ENOENT;
	while (i < OPENS && f.open[i].used)
		i++;
	CHECK(i < OPENS);
	f.open[i] = (struct open_image){ .used = true, .rdwr = rdwr, .efd = -1 };
	snprintf(f.open[i].client, sizeof(f.open[i].client), "127.0.0.1:0/%u", ++f.opens);
	*image = &f.open[i];
	return 0;
}

int rbd_open(rados_ioctx_t io, const char *name, rbd_image_t *image, const char *snap)
{
	ENTER();
	return leave(open_image(io, name, image, true));
}

int rbd_open_read_only(rados_ioctx_t io, const char *name, rbd_image_t *image, const char *snap)
{
	ENTER();
	return leave(open_image(io, name, image, false));
}

static int release(struct open_image *img)
{
	if (!img->locked)
		return -EINVAL;
	img->locked = false;
	f.owner[0] = '\0';
	f.version++;
	return 0;
}

int rbd_close(rbd_image_t image)
{
	struct open_image *img = image;

	pthread_mutex_lock(&f.lock);
	CHECK(!img->done);
	if (img->locked)
		release(img);
	img->used = false;
	return leave(0);
}

int rbd_get_id(rbd_image_t image, char *id, size_t len)
{
	ENTER();
	snprintf(id, len, "fake");
	return leave(0);
}

int rbd_get_features(rbd_image_t image, uint64_t *features)
{
	ENTER();
	*features = RBD_FEATURE_LAYERING | RBD_FEATURE_EXCLUSIVE_LOCK;
	return leave(0);
}

int rbd_get_size(rbd_image_t image, uint64_t *size)
{
	ENTER();
	*size = f.size;
	return leave(f.blocklisted ? -ESHUTDOWN : 0);
}

int rbd_stat(rbd_image_t image, rbd_image_info_t *info, size_t len)
{
	ENTER();
	*info = (rbd_image_info_t){ .size = f.size, .obj_size = FAKE_OBJECT };
	return leave(0);
}

int rbd_get_stripe_unit(rbd_image_t image, uint64_t *unit)
{
	ENTER();
	*unit = f.stripe ? f.stripe : FAKE_OBJECT;
	return leave(0);
}

int rbd_get_stripe_count(rbd_image_t image, uint64_t *count)
{
	ENTER();
	*count = f.stripe ? 4 : 1;
	return leave(0);
}

int rbd_resize(rbd_image_t image, uint64_t size)
{
	ENTER();
	if (size > MAX_SIZE)
		return leave(-EFBIG);
	if (size < f.size) {
		memset(f.data + size, 0, f.size - size);
		memset(f.alloc + align_up(size, (uint64_t)UNIT) / UNIT, 0, (MAX_SIZE - align_up(size, (uint64_t)UNIT)) / UNIT);
	}
	f.size = size;
	return leave(0);
}

int rbd_config_image_list(rbd_image_t image, rbd_config_option_t *options, int *max)
{
	ENTER();
	CHECK(*max >= 2);
	options[0] = (rbd_config_option_t){ strdup("rbd_cache"), strdup(f.cache ? "true" : "false"), RBD_CONFIG_SOURCE_CONFIG };
	options[1] = (rbd_config_option_t){ strdup("rbd_discard_granularity_bytes"), strdup("65536"), RBD_CONFIG_SOURCE_CONFIG };
	*max = 2;
	return leave(0);
}

void rbd_config_image_list_cleanup(rbd_config_option_t *options, int n)
{
	for (int i = 0; i < n; i++) {
		free(options[i].name);
		free(options[i].value);
	}
}

int rbd_set_image_notification(rbd_image_t image, int fd, int type)
{
	struct open_image *img = image;

	ENTER();
	img->efd = fd;
	return leave(type == EVENT_TYPE_EVENTFD ? 0 : -EINVAL);
}

int rbd_lock_acquire(rbd_image_t image, rbd_lock_mode_t mode)
{
	struct open_image *img = image;

	ENTER();
	if (*f.owner && strcmp(f.owner, img->client) && f.other_watches)
		return leave(-EROFS);
	for (unsigned i = 0; i < OPENS; i++)
		if (f.open[i].locked)
			return leave(-EROFS);
	f.blocklisted_other |= !strcmp(f.owner, FAKE_OTHER);
	strcpy(f.owner, img->client);
	img->locked = true;
	f.version++;
	return leave(0);
}

int rbd_lock_release(rbd_image_t image)
{
	ENTER();
	return leave(release(image));
}

int rbd_lock_break(rbd_image_t image, rbd_lock_mode_t mode, const char *owner)
{
	ENTER();
	if (!*f.owner)
		return leave(-ENOENT);
	if (strcmp(f.owner, owner))
		return leave(-EBUSY);
	f.blocklisted_other |= !strcmp(f.owner, FAKE_OTHER);
	f.owner[0] = '\0';
	f.other_watches = false;
	f.version++;
	return leave(0);
}

int rbd_lock_get_owners(rbd_image_t image, rbd_lock_mode_t *mode, char **owners, size_t *n)
{
	ENTER();
	if (!*f.owner)
		return leave(-ENOENT);
	*mode = RBD_LOCK_MODE_EXCLUSIVE;
	owners[0] = strdup(f.owner);
	*n = 1;
	f.live++;
	return leave(0);
}

void rbd_lock_get_owners_cleanup(char **owners, size_t n)
{
	LOCKED(f.live--);
	for (size_t i = 0; i < n; i++)
		free(owners[i]);
}

int rbd_is_exclusive_lock_owner(rbd_image_t image, int *is_owner)
{
	ENTER();
	*is_owner = ((struct open_image *)image)->locked && !f.removed;
	return leave(f.blocklisted ? -ESHUTDOWN : 0);
}

int rbd_watchers_list(rbd_image_t image, rbd_image_watcher_t *w, size_t *n)
{
	size_t found = 0;

	ENTER();
	for (unsigned i = 0; i < OPENS; i++)
		if (f.open[i].used)
			w[found++] = (rbd_image_watcher_t){ strdup(f.open[i].client), WATCH_BASE + i, 1 };
	if (f.other_watches)
		w[found++] = (rbd_image_watcher_t){ strdup(f.owner), OTHERS_WATCH, 1 };
	*n = found;
	f.live++;
	return leave(0);
}

void rbd_watchers_list_cleanup(rbd_image_watcher_t *w, size_t n)
{
	LOCKED(f.live--);
	for (size_t i = 0; i < n; i++)
		free(w[i].addr);
}

int rbd_diff_iterate2(rbd_image_t image, const char *from, uint64_t off, uint64_t len, uint8_t parent, uint8_t whole,
		      int (*cb)(uint64_t, size_t, int, void *), void *arg)
{
	uint64_t end;
	int ret = 0;

	ENTER();
	end = min(off + len, f.size);
	for (uint64_t at = off; at < end && !ret; at = align_down(at, UNIT) + UNIT)
		if (f.alloc[at / UNIT])
			ret = cb(at, min(align_down(at, UNIT) + UNIT, end) - at, 1, arg);
	return leave(ret);
}

int rbd_metadata_get(rbd_image_t image, const char *key, char *value, size_t *len)
{
	ENTER();
	if (!f.has_mark)
		return leave(-ENOENT);
	if (strlen(f.mark) >= *len)
		return leave(-ERANGE);
	strcpy(value, f.mark);
	*len = strlen(f.mark) + 1;
	return leave(0);
}

int rbd_metadata_set(rbd_image_t image, const char *key, const char *value)
{
	ENTER();
	snprintf(f.mark, sizeof(f.mark), "%s", value);
	f.has_mark = true;
	f.version++;
	return leave(f.blocklisted ? -ESHUTDOWN : 0);
}

int rbd_metadata_remove(rbd_image_t image, const char *key)
{
	int ret;

	ENTER();
	ret = f.has_mark ? 0 : -ENOENT;
	f.has_mark = false;
	f.version++;
	return leave(ret);
}

/* --- Requests --- */

int rbd_aio_create_completion(void *arg, rbd_callback_t cb, rbd_completion_t *c)
{
	struct comp *comp;

	ENTER();
	CHECK(!cb);
	comp = calloc(1, sizeof(*comp));
	comp->arg = arg;
	f.live++;
	*c = comp;
	return leave(0);
}

ssize_t rbd_aio_get_return_value(rbd_completion_t c)
{
	return ((struct comp *)c)->result;
}

void *rbd_aio_get_arg(rbd_completion_t c)
{
	return ((struct comp *)c)->arg;
}

void rbd_aio_release(rbd_completion_t c)
{
	struct comp *comp = c;

	LOCKED(f.live--);
	free(comp->copy);
	free(comp);
}

static int take(rbd_image_t image, rbd_completion_t completion, enum fake_verb verb, uint64_t off, uint64_t len)
{
	struct comp *c = completion;
	int ret;

	pthread_mutex_lock(&f.lock);
	ret = f.refuse[verb];
	if (!ret) {
		c->img = image;
		c->verb = verb;
		c->off = off;
		c->len = len;
		c->next = f.queue;
		f.queue = c;
		f.in_flight++;
		pthread_cond_signal(&f.more);
	}
	return leave(ret);
}

static uint64_t length(const struct iovec *iov, int n)
{
	uint64_t len = 0;

	for (int i = 0; i < n; i++)
		len += iov[i].iov_len;
	return len;
}

int rbd_aio_readv(rbd_image_t image, const struct iovec *iov, int n, uint64_t off, rbd_completion_t c)
{
	struct comp *comp = c;

	comp->iov = iov;
	comp->niov = n;
	return take(image, c, FAKE_READ, off, length(iov, n));
}

int rbd_aio_writev(rbd_image_t image, const struct iovec *iov, int n, uint64_t off, rbd_completion_t c)
{
	struct comp *comp = c;
	uint64_t len = length(iov, n);
	uint8_t *to = malloc(len + 1);

	comp->copy = to;
	for (int i = 0; i < n; to += iov[i++].iov_len)
		memcpy(to, iov[i].iov_base, iov[i].iov_len);
	return take(image, c, FAKE_WRITE, off, len);
}

int rbd_aio_flush(rbd_image_t image, rbd_completion_t c)
{
	return take(image, c, FAKE_FLUSH, 0, 0);
}

int rbd_aio_discard(rbd_image_t image, uint64_t off, uint64_t len, rbd_completion_t c)
{
	return take(image, c, FAKE_DISCARD, off, len);
}

int rbd_aio_write_zeroes(rbd_image_t image, uint64_t off, size_t len, rbd_completion_t c, int zero_flags, int op_flags)
{
	((struct comp *)c)->unmap = !(zero_flags & RBD_WRITE_ZEROES_FLAG_THICK_PROVISION);
	return take(image, c, FAKE_ZERO, off, len);
}

/* Frees the whole units of [off, end). */
static void deallocate(uint64_t off, uint64_t end, uint64_t unit)
{
	for (uint64_t at = align_up(off, unit); at + unit <= end; at += unit) {
		memset(f.data + at, 0, unit);
		memset(f.alloc + at / UNIT, 0, unit / UNIT);
	}
}

static ssize_t change(struct comp *c, uint64_t end)
{
	switch (c->verb) {
	case FAKE_DISCARD:
		deallocate(c->off, end, FAKE_OBJECT);
		return 0;
	case FAKE_WRITE:
		memcpy(f.data + c->off, c->copy, end - c->off);
		break;
	default:
		memset(f.data + c->off, 0, end - c->off);
		if (!c->unmap)
			break;
		deallocate(c->off, end, UNIT);
		return 0;
	}
	for (uint64_t at = align_down(c->off, UNIT); at < end; at += UNIT)
		f.alloc[at / UNIT] = 1;
	return 0;
}

static ssize_t run(struct comp *c)
{
	uint64_t end = min(c->off + c->len, f.size), at = c->off;

	if (f.fail[c->verb])
		return f.fail[c->verb];
	if (c->verb != FAKE_READ && f.blocklisted)
		return -ESHUTDOWN;
	if (c->verb == FAKE_FLUSH)
		return 0;
	if (c->verb != FAKE_READ && !c->img->locked)
		return -EROFS;
	if (c->off >= f.size)
		return -EINVAL;
	if (c->verb != FAKE_READ)
		return change(c, end);
	end -= f.short_reads;
	for (int i = 0; i < c->niov && at < end; i++) {
		size_t n = min(c->iov[i].iov_len, end - at);

		memcpy(c->iov[i].iov_base, f.data + at, n);
		at += n;
	}
	return (ssize_t)(end - c->off);
}

static struct comp *pick(void)
{
	struct comp **p = &f.queue, *c;

	for (uint64_t n = rng_below(&f.rng, 4); n && (*p)->next; n--)
		p = &(*p)->next;
	c = *p;
	*p = c->next;
	return c;
}

static void *completer(void *arg)
{
	uint64_t one = 1;

	pthread_mutex_lock(&f.lock);
	while (!f.stop) {
		struct comp *c;

		if (f.hold || !f.queue) {
			pthread_cond_wait(&f.more, &f.lock);
			continue;
		}
		c = pick();
		c->result = run(c);
		c->next = c->img->done;
		c->img->done = c;
		f.in_flight--;
		CHECK_EQ(write(c->img->efd, &one, sizeof(one)), sizeof(one));
	}
	pthread_mutex_unlock(&f.lock);
	return NULL;
}

int rbd_poll_io_events(rbd_image_t image, rbd_completion_t *comps, int max)
{
	struct open_image *img = image;
	int n = 0;

	pthread_mutex_lock(&f.lock);
	while (img->done && n < max) {
		comps[n++] = img->done;
		img->done = img->done->next;
	}
	return leave(n);
}

/* --- Life --- */

void fake_rbd_start(uint64_t size, unsigned threads)
{
	uint64_t seed = test_env_u64("WEIR_SEED", 20260101);

	CHECK(size <= MAX_SIZE && threads <= THREADS);
	memset(&f, 0, sizeof(f));
	pthread_mutex_init(&f.lock, NULL);
	pthread_cond_init(&f.more, NULL);
	pthread_cond_init(&f.calls, NULL);
	rng_seed(&f.rng, seed);
	f.data = calloc(1, MAX_SIZE);
	f.size = size;
	f.version = 10;
	f.fail_nth = -1;
	f.threads = threads;
	for (unsigned i = 0; i < threads; i++)
		CHECK_EQ(pthread_create(&f.thread[i], NULL, completer, NULL), 0);
}

void fake_rbd_stop(void)
{
	LOCKED(f.stop = true; f.hang = false; pthread_cond_broadcast(&f.more); pthread_cond_broadcast(&f.calls));
	for (unsigned i = 0; i < f.threads; i++)
		pthread_join(f.thread[i], NULL);
	/* All that was opened, made or given out has been given back. */
	CHECK_EQ(f.live, 0);
	CHECK(!f.queue);
	free(f.data);
}

int rbd_api_load(const struct rbd_api **ret, struct err *err)
{
	static const struct rbd_api api = {
#define X(name) .name = name,
		RBD_FUNCTIONS(X)
#undef X
	};

	*ret = &api;
	return 0;
}
