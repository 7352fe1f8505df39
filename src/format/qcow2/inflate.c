/* SPDX-License-Identifier: MIT */
/*
 * qcow2: compressed clusters.
 *
 * A few slots, each with room for a compressed and a decompressed cluster and the decompressor's state, made when the first compressed cluster is
 * read. Decompression runs on a worker thread. A slot keeps its cluster, since small reads of one cluster follow each other. Entries of a compressed cluster never
 * change what they mean while anything refers to them, so the entry is the key.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <zlib.h>
#include <zstd.h>

#include "format/qcow2/internal.h"
#include "util/iov.h"

#define SLOTS 4

struct slot {
	uint64_t entry;		/* what `out` holds; 0: nothing */
	uint64_t used;
	unsigned readers;
	bool busy;		/* being filled */
	bool zlib_ready;
	uint8_t *in, *out;
	uint32_t in_len, out_len;
	uint8_t type;
	z_stream z;
	ZSTD_DCtx *zstd;
};

struct q2_inflater {
	struct slot slot[SLOTS];
	uint8_t *mem;
	uint64_t mem_len, clock;
	struct co_queue wait;
};

static int inflater_create(struct qcow2 *q)
{
	struct q2_inflater *f = calloc(1, sizeof(*f));
	uint64_t each = 3ull * q->g.cluster_size + 4096;

	if (!f)
		return -ENOMEM;
	each = align_up(each, 4096);
	f->mem_len = each * SLOTS;
	f->mem = mmap(NULL, f->mem_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (f->mem == MAP_FAILED) {
		free(f);
		return -ENOMEM;
	}
	for (int i = 0; i < SLOTS; i++) {
		f->slot[i].out = f->mem + i * each;
		f->slot[i].in = f->slot[i].out + q->g.cluster_size;
		f->slot[i].out_len = q->g.cluster_size;
		f->slot[i].type = q->h.compression_type;
	}
	co_queue_init(&f->wait);
	q->inflater = f;
	return 0;
}

void q2_inflater_destroy(struct qcow2 *q)
{
	struct q2_inflater *f = q->inflater;

	if (!f)
		return;
	for (int i = 0; i < SLOTS; i++) {
		if (f->slot[i].zlib_ready)
			inflateEnd(&f->slot[i].z);
		ZSTD_freeDCtx(f->slot[i].zstd);
	}
	munmap(f->mem, f->mem_len);
	free(f);
	q->inflater = NULL;
}

/* Raw deflate. The window may be smaller than this, never larger. */
static int inflate_zlib(struct slot *s)
{
	int ret;

	if (!s->zlib_ready && inflateInit2(&s->z, -15) != Z_OK)
		return -ENOMEM;
	if (s->zlib_ready && inflateReset(&s->z) != Z_OK)
		return -EIO;
	s->zlib_ready = true;
	s->z.next_in = s->in;
	s->z.avail_in = s->in_len;
	s->z.next_out = s->out;
	s->z.avail_out = s->out_len;
	ret = inflate(&s->z, Z_FINISH);
	/* The input may go on behind the end, and the end mark may be missing. */
	return (ret == Z_STREAM_END || ret == Z_BUF_ERROR || ret == Z_OK) && !s->z.avail_out ? 0 : -EBADMSG;
}

static int inflate_zstd(struct slot *s)
{
	ZSTD_inBuffer in = { s->in, s->in_len, 0 };
	ZSTD_outBuffer out = { s->out, s->out_len, 0 };

	if (!s->zstd && !(s->zstd = ZSTD_createDCtx()))
		return -ENOMEM;
	ZSTD_DCtx_reset(s->zstd, ZSTD_reset_session_only);
	while (out.pos < out.size) {
		size_t before_in = in.pos, before_out = out.pos, ret = ZSTD_decompressStream(s->zstd, &out, &in);

		if (ZSTD_isError(ret) || (in.pos == before_in && out.pos == before_out))
			return -EBADMSG;
	}
	return 0;
}

static int inflate_blocking(void *arg)
{
	struct slot *s = arg;

	return s->type == QCOW2_ZSTD ? inflate_zstd(s) : inflate_zlib(s);
}

static struct slot *find(struct q2_inflater *f, uint64_t entry)
{
	for (int i = 0; i < SLOTS; i++)
		if (f->slot[i].entry == entry)
			return &f->slot[i];
	return NULL;
}

static struct slot *oldest_idle(struct q2_inflater *f)
{
	struct slot *best = NULL;

	for (int i = 0; i < SLOTS; i++) {
		struct slot *s = &f->slot[i];

		if (!s->busy && !s->readers && (!best || s->used < best->used))
			best = s;
	}
	return best;
}

static co_fn int co_load(struct qcow2 *q, struct slot *s, uint64_t entry)
{
	uint64_t off;
	int ret;

	qcow2_l2_compressed(&q->g, entry, &off, &s->in_len);
	if (off >= q->disk.file->size)
		return co_q2_corrupt(q, "a compressed cluster lies at %llu, beyond the end of the image", (unsigned long long)off);
	/* The length is rounded up, and the image may end before that. */
	s->in_len = min((uint64_t)s->in_len, 2ull * q->g.cluster_size);
	ret = co_q2_read_image(q, off, s->in, s->in_len);
	if (!ret)
		ret = co_offload(inflate_blocking, s);
	return ret == -EBADMSG ? -EIO : ret;
}

co_fn int co_q2_inflate(struct qcow2 *q, uint64_t entry, uint32_t skip, const struct iovec *iov, int niov, uint64_t at, uint32_t len)
{
	struct slot *s;
	int ret = q->inflater ? 0 : inflater_create(q);

	if (ret)
		return ret;
	for (;;) {
		struct q2_inflater *f = q->inflater;

		s = find(f, entry);
		if (s && !s->busy)
			break;
		if (!s && (s = oldest_idle(f))) {
			s->entry = entry;
			s->busy = true;
			ret = co_load(q, s, entry);
			s->busy = false;
			if (ret)
				s->entry = 0;
			co_queue_wake_all(&f->wait);
			if (ret)
				return ret;
			break;
		}
		co_queue_wait(&f->wait, "qcow2: a cluster to be decompressed");
	}
	s->used = ++q->inflater->clock;
	iov_copy_in(iov, niov, at, s->out + skip, len);
	return 0;
}
