/* SPDX-License-Identifier: MIT */
/* qcow2: the header and its extensions. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/qcow2/format.h"
#include "util/err.h"

/* --- Extensions --- */

int qcow2_header_add_ext(struct qcow2_header *h, uint32_t type, const void *data, uint32_t len)
{
	struct qcow2_ext *v;
	uint8_t *copy;

	if (h->next >= QCOW2_MAX_EXTENSIONS)
		return -E2BIG;
	v = realloc(h->ext, (h->next + 1) * sizeof(*v));
	if (!v)
		return -ENOMEM;
	h->ext = v;
	copy = malloc((size_t)len + 1);
	if (!copy)
		return -ENOMEM;
	if (len)
		memcpy(copy, data, len);
	copy[len] = 0;
	h->ext[h->next++] = (struct qcow2_ext){ type, len, copy };
	return 0;
}

static const struct {
	uint8_t type, bit;
	const char *name;
} features[] = {
	{ 0, 0, "dirty bit" }, { 0, 1, "corrupt bit" }, { 0, 2, "external data file" }, { 0, 3, "compression type" },
	{ 0, 4, "extended L2 entries" }, { 1, 0, "lazy refcounts" }, { 2, 0, "bitmaps" }, { 2, 1, "raw external data" },
};

int qcow2_header_add_feature_names(struct qcow2_header *h)
{
	struct qcow2_raw_feature_name raw[ARRAY_SIZE(features)];

	memset(raw, 0, sizeof(raw));
	for (size_t i = 0; i < ARRAY_SIZE(features); i++) {
		raw[i].type[0] = features[i].type;
		raw[i].bit[0] = features[i].bit;
		memcpy(raw[i].name, features[i].name, strlen(features[i].name));
	}
	return qcow2_header_add_ext(h, QCOW2_EXT_FEATURE_NAMES, raw, sizeof(raw));
}

const char *qcow2_feature_name(const struct qcow2_header *h, unsigned type, unsigned bit, char *buf, size_t size)
{
	for (unsigned i = 0; i < h->next; i++) {
		const struct qcow2_ext *e = &h->ext[i];
		const struct qcow2_raw_feature_name *raw = (const void *)e->data;

		if (e->type != QCOW2_EXT_FEATURE_NAMES)
			continue;
		for (uint32_t n = e->len / sizeof(*raw); n; n--, raw++) {
			size_t len = strnlen((const char *)raw->name, sizeof(raw->name));

			if (raw->type[0] != type || raw->bit[0] != bit || !len || len >= size)
				continue;
			memcpy(buf, raw->name, len);
			buf[len] = '\0';
			/* It goes to a terminal. */
			for (char *p = buf; *p; p++)
				if ((unsigned char)*p < ' ' || (unsigned char)*p > '~')
					*p = '?';
			return buf;
		}
	}
	for (size_t i = 0; i < ARRAY_SIZE(features); i++)
		if (features[i].type == type && features[i].bit == bit)
			return features[i].name;
	return NULL;
}

static int take_text(char **to, const uint8_t *data, uint32_t len, const char *name, const char *what, struct err *err)
{
	if (*to)
		return err_set(err, -EINVAL, "%s: its header has two %s extensions", name, what);
	if (len > QCOW2_MAX_BACKING_NAME || memchr(data, 0, len))
		return err_set(err, -EINVAL, "%s: the %s in its header is no text of at most %d bytes", name, what, QCOW2_MAX_BACKING_NAME);
	*to = strndup((const char *)data, len);
	return *to ? 0 : err_errno(err, -ENOMEM, "%s", name);
}

static int take_bitmaps(struct qcow2_header *h, const uint8_t *data, uint32_t len, const char *name, struct err *err)
{
	const struct qcow2_raw_bitmaps *raw = (const void *)data;

	if (h->bitmaps.count)
		return err_set(err, -EINVAL, "%s: its header has two bitmaps extensions", name);
	if (len != sizeof(*raw))
		return err_set(err, -EINVAL, "%s: its bitmaps extension has %u bytes, not %zu", name, len, sizeof(*raw));
	h->bitmaps.count = get_be32(raw->nb_bitmaps);
	h->bitmaps.dir_size = get_be64(raw->dir_size);
	h->bitmaps.dir_off = get_be64(raw->dir_off);
	if (!h->bitmaps.count || h->bitmaps.count > QCOW2_MAX_BITMAPS)
		return err_set(err, -EINVAL, "%s: its bitmaps extension tells of %u bitmaps; there can be 1 to %d", name, h->bitmaps.count,
			       QCOW2_MAX_BITMAPS);
	if (!h->bitmaps.dir_size || h->bitmaps.dir_size > QCOW2_MAX_BITMAP_DIR || !is_aligned(h->bitmaps.dir_off, h->geo.cluster_size))
		return err_set(err, -EINVAL, "%s: its bitmap directory (%llu bytes at %llu) is too large or not at a cluster", name,
			       (unsigned long long)h->bitmaps.dir_size, (unsigned long long)h->bitmaps.dir_off);
	return 0;
}

static int take_ext(struct qcow2_header *h, uint32_t type, const uint8_t *data, uint32_t len, const char *name, unsigned flags,
		    struct err *err)
{
	int ret;

	switch (type) {
	case QCOW2_EXT_BACKING_FORMAT:
		return take_text(&h->backing_format, data, len, name, "backing format", err);
	case QCOW2_EXT_DATA_FILE:
		return take_text(&h->data_file, data, len, name, "data file", err);
	case QCOW2_EXT_BITMAPS:
		/* Without the autoclear bit its contents mean nothing, whatever they are. */
		if (h->autoclear & QCOW2_AUTOCLEAR_BITMAPS || (flags & QCOW2_PARSE_LAX))
			return take_bitmaps(h, data, len, name, err);
		break;
	}
	ret = qcow2_header_add_ext(h, type, data, len);
	return ret ? err_errno(err, ret, "%s: its header has too many extensions", name) : 0;
}

/* Extensions lie between the header and the backing file's name, or the end of the cluster. */
static int parse_exts(struct qcow2_header *h, const uint8_t *buf, size_t end, const char *name, unsigned flags, struct err *err)
{
	size_t at = h->header_len;

	while (end - at >= 8) {
		uint32_t type = get_be32(buf + at), len = get_be32(buf + at + 4);
		int ret;

		at += 8;
		if (type == QCOW2_EXT_END)
			return 0;
		if (len > end - at)
			return err_set(err, -EINVAL, "%s: header extension %08x at byte %zu claims %u bytes, and %zu are left; the image is damaged",
				       name, type, at - 8, len, end - at);
		ret = take_ext(h, type, buf + at, len, name, flags, err);
		if (ret)
			return ret;
		at += min(align_up(len, 8), end - at);
	}
	return 0;
}

/* --- Parse --- */

int qcow2_header_probe(const void *buf, size_t len, const char *name, uint32_t *ret_need, struct err *err)
{
	const struct qcow2_raw_header *raw = buf;
	uint32_t bits;

	if (len < QCOW2_V2_HEADER_LEN || get_be32(raw->magic) != QCOW2_MAGIC)
		return err_set(err, -EINVAL, "%s: is no qcow2 image (it does not begin with QFI\\xfb); if its bytes are the disk, say format=raw", name);
	if (get_be32(raw->version) < 2 || get_be32(raw->version) > 3)
		return err_set(err, -ENOTSUP, "%s: is a qcow2 image of version %u; versions 2 and 3 can be opened", name, get_be32(raw->version));
	bits = get_be32(raw->cluster_bits);
	if (bits < QCOW2_MIN_CLUSTER_BITS || bits > QCOW2_MAX_CLUSTER_BITS)
		return err_set(err, -EINVAL, "%s: its clusters have 2^%u bytes; 512 to 2M are possible", name, bits);
	*ret_need = 1u << bits;
	return 0;
}

static int check_features(const struct qcow2_header *h, const char *name, struct err *err)
{
	uint64_t unknown = h->incompat & ~(uint64_t)QCOW2_INCOMPAT_KNOWN;
	char buf[64];

	if (unknown) {
		unsigned bit = __builtin_ctzll(unknown);
		const char *what = qcow2_feature_name(h, 0, bit, buf, sizeof(buf));

		return err_set(err, -ENOTSUP, "%s: uses incompatible feature %u (%s), which this build does not know; convert it with the program that made it",
			       name, bit, what ? what : "of unknown name");
	}
	if (h->crypt_method)
		return err_set(err, -ENOTSUP, "%s: is encrypted (%s), which is not supported; decrypt it with \"qemu-img convert\"", name,
			       h->crypt_method == 1 ? "AES" : h->crypt_method == 2 ? "LUKS" : "unknown method");
	return 0;
}

static int parse_v3(struct qcow2_header *h, const uint8_t *buf, size_t len, const char *name, struct err *err)
{
	const struct qcow2_raw_header *raw = (const void *)buf;
	uint32_t order;

	if (len < QCOW2_V3_HEADER_LEN)
		return err_set(err, -EINVAL, "%s: ends within its header", name);
	h->incompat = get_be64(raw->incompat);
	h->compat = get_be64(raw->compat);
	h->autoclear = get_be64(raw->autoclear);
	h->header_len = get_be32(raw->header_len);
	order = get_be32(raw->refcount_order);
	if (order > QCOW2_MAX_REFCOUNT_ORDER)
		return err_set(err, -EINVAL, "%s: its refcounts have 2^%u bits; 1 to 64 are possible", name, order);
	if (h->header_len < QCOW2_V3_HEADER_LEN || h->header_len > len || h->header_len % 8)
		return err_set(err, -EINVAL, "%s: its header claims a length of %u bytes; at least %d, a multiple of 8, within the first cluster are possible",
			       name, h->header_len, QCOW2_V3_HEADER_LEN);
	h->geo.refcount_order = order;
	if (h->header_len > QCOW2_V3_HEADER_LEN)
		h->compression_type = raw->compression_type[0];
	if (!!h->compression_type != !!(h->incompat & QCOW2_INCOMPAT_COMPRESSION))
		return err_set(err, -EINVAL, "%s: its compression type is %u, which its incompatible features contradict", name, h->compression_type);
	if (h->compression_type > QCOW2_ZSTD)
		return err_set(err, -ENOTSUP, "%s: is compressed by method %u; zlib (0) and zstd (1) are known", name, h->compression_type);
	if (h->header_len > QCOW2_FULL_HEADER_LEN) {
		h->tail = malloc(h->header_len - QCOW2_FULL_HEADER_LEN);
		if (!h->tail)
			return err_errno(err, -ENOMEM, "%s", name);
		memcpy(h->tail, buf + QCOW2_FULL_HEADER_LEN, h->header_len - QCOW2_FULL_HEADER_LEN);
	}
	return 0;
}

/* Positions and sizes of tables. */
static int check_tables(const struct qcow2_header *h, const char *name, struct err *err)
{
	uint32_t cs = h->geo.cluster_size;
	uint64_t need = qcow2_l1_entries(&h->geo, h->size);

	if (need * 8 > QCOW2_MAX_L1_BYTES || h->size > INT64_MAX)
		return err_set(err, -EFBIG, "%s: claims a size of %llu bytes, which is beyond the limit for clusters of %u bytes", name,
			       (unsigned long long)h->size, cs);
	if ((uint64_t)h->l1_size * 8 > QCOW2_MAX_L1_BYTES)
		return err_set(err, -EFBIG, "%s: its L1 table has %u entries; at most 4194304 are possible", name, h->l1_size);
	if (h->l1_size < need)
		return err_set(err, -EINVAL, "%s: its L1 table has %u entries, and its size needs %llu; the image is damaged", name, h->l1_size,
			       (unsigned long long)need);
	if (!is_aligned(h->l1_off, cs) || (h->l1_size && !h->l1_off) || h->l1_off > INT64_MAX - QCOW2_MAX_L1_BYTES)
		return err_set(err, -EINVAL, "%s: its L1 table at %llu is not at a cluster", name, (unsigned long long)h->l1_off);
	if ((uint64_t)h->rt_clusters * cs > max(QCOW2_MAX_RT_BYTES, cs))
		return err_set(err, -EFBIG, "%s: its refcount table has %u clusters; at most 8M are possible", name, h->rt_clusters);
	if (!h->rt_clusters || !h->rt_off || !is_aligned(h->rt_off, cs) || h->rt_off > INT64_MAX - QCOW2_MAX_RT_BYTES)
		return err_set(err, -EINVAL, "%s: its refcount table (%u clusters at %llu) is empty or not at a cluster", name, h->rt_clusters,
			       (unsigned long long)h->rt_off);
	if (h->nb_snapshots > QCOW2_MAX_SNAPSHOTS)
		return err_set(err, -EFBIG, "%s: claims %u snapshots; at most %d are possible", name, h->nb_snapshots, QCOW2_MAX_SNAPSHOTS);
	if (h->nb_snapshots && (!h->snapshots_off || !is_aligned(h->snapshots_off, cs) || h->snapshots_off > INT64_MAX / 2))
		return err_set(err, -EINVAL, "%s: its snapshot table at %llu is not at a cluster", name, (unsigned long long)h->snapshots_off);
	return 0;
}

static int check_combination(const struct qcow2_header *h, const char *name, struct err *err)
{
	bool data_file = h->incompat & QCOW2_INCOMPAT_DATA_FILE;

	if ((h->autoclear & QCOW2_AUTOCLEAR_BITMAPS) && !h->bitmaps.count)
		return err_set(err, -EINVAL, "%s: its header says that it has bitmaps, and has no bitmaps extension", name);
	if ((h->autoclear & QCOW2_AUTOCLEAR_DATA_FILE_RAW) && data_file && h->backing_file)
		return err_set(err, -EINVAL, "%s: has a raw data file and a backing file; only one of them is possible", name);
	if (data_file && h->nb_snapshots)
		return err_set(err, -EINVAL, "%s: has a data file and snapshots; only one of them is possible", name);
	return 0;
}

static int parse_backing(struct qcow2_header *h, const uint8_t *buf, size_t len, const char *name, size_t *ret_end, struct err *err)
{
	const struct qcow2_raw_header *raw = (const void *)buf;
	uint64_t off = get_be64(raw->backing_off);
	uint32_t n = get_be32(raw->backing_len);

	*ret_end = len;
	if (!off)
		return 0;
	if (n > QCOW2_MAX_BACKING_NAME || off < h->header_len || off > len || n > len - off)
		return err_set(err, -EINVAL, "%s: the name of its backing file (%u bytes at %llu) is too long or outside the first cluster", name, n,
			       (unsigned long long)off);
	*ret_end = off;
	return n ? take_text(&h->backing_file, buf + off, n, name, "backing file", err) : 0;
}

static int parse(const uint8_t *buf, size_t len, const char *name, unsigned flags, struct qcow2_header *h, struct err *err)
{
	const struct qcow2_raw_header *raw = (const void *)buf;
	size_t end;
	int ret;

	h->version = get_be32(raw->version);
	h->size = get_be64(raw->size);
	h->crypt_method = get_be32(raw->crypt_method);
	h->l1_size = get_be32(raw->l1_size);
	h->l1_off = get_be64(raw->l1_off);
	h->rt_off = get_be64(raw->rt_off);
	h->rt_clusters = get_be32(raw->rt_clusters);
	h->nb_snapshots = get_be32(raw->nb_snapshots);
	h->snapshots_off = get_be64(raw->snapshots_off);
	h->header_len = QCOW2_V2_HEADER_LEN;
	h->geo.refcount_order = 4;
	ret = h->version >= 3 ? parse_v3(h, buf, len, name, err) : 0;
	if (ret)
		return ret;
	qcow2_geo_init(&h->geo, get_be32(raw->cluster_bits), h->incompat & QCOW2_INCOMPAT_EXTL2, h->geo.refcount_order);
	if (h->geo.ext && h->geo.cluster_bits < QCOW2_MIN_EXT_CLUSTER_BITS)
		return err_set(err, -EINVAL, "%s: has extended L2 entries and clusters of %u bytes; they need 16K at least", name, h->geo.cluster_size);
	ret = parse_backing(h, buf, len, name, &end, err);
	if (!ret)
		ret = parse_exts(h, buf, end, name, flags, err);
	if (ret || (flags & QCOW2_PARSE_LAX))
		return ret;
	ret = check_features(h, name, err);
	if (!ret)
		ret = check_tables(h, name, err);
	return ret ? ret : check_combination(h, name, err);
}

int qcow2_header_parse(const void *buf, size_t len, const char *name, unsigned flags, struct qcow2_header *ret, struct err *err)
{
	struct qcow2_header h = { 0 };
	uint32_t need;
	int r = qcow2_header_probe(buf, len, name, &need, err);

	if (!r)
		r = parse(buf, min(len, (size_t)need), name, flags, &h, err);
	if (r) {
		qcow2_header_fini(&h);
		return r;
	}
	*ret = h;
	return 0;
}

void qcow2_header_fini(struct qcow2_header *h)
{
	for (unsigned i = 0; i < h->next; i++)
		free(h->ext[i].data);
	free(h->ext);
	free(h->tail);
	free(h->backing_file);
	free(h->backing_format);
	free(h->data_file);
	memset(h, 0, sizeof(*h));
}

/* --- Serialise --- */

struct writer {
	uint8_t *buf;
	size_t at, size;
	bool full;
};

static void put(struct writer *w, const void *data, size_t len, size_t padded)
{
	if (padded > w->size - w->at) {
		w->full = true;
		return;
	}
	if (len)
		memcpy(w->buf + w->at, data, len);
	w->at += padded;
}

static void put_ext(struct writer *w, uint32_t type, const void *data, uint32_t len)
{
	uint8_t head[8];

	put_be32(head, type);
	put_be32(head + 4, len);
	put(w, head, 8, 8);
	put(w, data, len, align_up(len, 8));
}

static void put_exts(struct writer *w, const struct qcow2_header *h)
{
	if (h->backing_format)
		put_ext(w, QCOW2_EXT_BACKING_FORMAT, h->backing_format, strlen(h->backing_format));
	if (h->data_file)
		put_ext(w, QCOW2_EXT_DATA_FILE, h->data_file, strlen(h->data_file));
	if (h->bitmaps.count) {
		struct qcow2_raw_bitmaps raw = { 0 };

		put_be32(raw.nb_bitmaps, h->bitmaps.count);
		put_be64(raw.dir_size, h->bitmaps.dir_size);
		put_be64(raw.dir_off, h->bitmaps.dir_off);
		put_ext(w, QCOW2_EXT_BITMAPS, &raw, sizeof(raw));
	}
	for (unsigned i = 0; i < h->next; i++)
		put_ext(w, h->ext[i].type, h->ext[i].data, h->ext[i].len);
	put_ext(w, QCOW2_EXT_END, NULL, 0);
}

void qcow2_header_update(const struct qcow2_header *h, void *sector)
{
	struct qcow2_raw_header *raw = sector;

	put_be64(raw->size, h->size);
	put_be32(raw->l1_size, h->l1_size);
	put_be64(raw->l1_off, h->l1_off);
	put_be64(raw->rt_off, h->rt_off);
	put_be32(raw->rt_clusters, h->rt_clusters);
	put_be32(raw->nb_snapshots, h->nb_snapshots);
	put_be64(raw->snapshots_off, h->snapshots_off);
	if (h->version < 3)
		return;
	put_be64(raw->incompat, h->incompat);
	/* Whoever changes an image and does not know what a bit means has to clear it. */
	put_be64(raw->autoclear, h->autoclear & QCOW2_AUTOCLEAR_KNOWN);
}

static void fill_header(const struct qcow2_header *h, struct qcow2_raw_header *raw)
{
	put_be32(raw->magic, QCOW2_MAGIC);
	put_be32(raw->version, h->version);
	put_be32(raw->cluster_bits, h->geo.cluster_bits);
	put_be32(raw->crypt_method, h->crypt_method);
	qcow2_header_update(h, raw);
	if (h->version < 3)
		return;
	put_be64(raw->autoclear, h->autoclear);
	put_be64(raw->compat, h->compat);
	put_be32(raw->refcount_order, h->geo.refcount_order);
	put_be32(raw->header_len, h->header_len);
	raw->compression_type[0] = h->compression_type;
}

int qcow2_header_serialise(const struct qcow2_header *h, void *cluster, const char *name, struct err *err)
{
	struct qcow2_raw_header raw = { 0 };
	struct writer w = { cluster, 0, h->geo.cluster_size, false };

	memset(cluster, 0, h->geo.cluster_size);
	fill_header(h, &raw);
	put(&w, &raw, min((size_t)h->header_len, sizeof(raw)), min((size_t)h->header_len, sizeof(raw)));
	if (h->tail)
		put(&w, h->tail, h->header_len - QCOW2_FULL_HEADER_LEN, h->header_len - QCOW2_FULL_HEADER_LEN);
	put_exts(&w, h);
	if (h->backing_file) {
		size_t at = w.at, len = strlen(h->backing_file);

		put(&w, h->backing_file, len, len);
		put_be64(raw.backing_off, at);
		put_be32(raw.backing_len, len);
	}
	if (w.full)
		return err_set(err, -ENOSPC, "%s: its header, with all extensions and the name of the backing file, does not fit into a cluster of %u bytes",
			       name, h->geo.cluster_size);
	memcpy(cluster, &raw, min((size_t)h->header_len, sizeof(raw)));
	return 0;
}
