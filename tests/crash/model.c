/* SPDX-License-Identifier: MIT */
/*
 * The history of a volume's requests, and the words that writes leave.
 *
 * A word is 8 bytes at an aligned offset: (request, volume, word number) mixed so that every byte depends on all three
 * and it can be turned back. No two requests agree in any word.
 */
#include "model.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "model_impl.h"
#include "util/bytes.h"

#define WORD_ODD 0x9e3779b97f4a7c15ull
#define WORD_ODD_INVERSE 0xf1de83e19937733dull	/* of WORD_ODD, modulo 2^64 */
#define WORD_KEY 0x5bd1e995a5c0ffeeull
#define BASE_ID 1u

static_assert((uint64_t)(WORD_ODD * WORD_ODD_INVERSE) == 1, "the inverse is wrong");

uint64_t model_word(uint32_t id, unsigned vol, uint64_t word)
{
	uint64_t v = ((uint64_t)id << 40 | (uint64_t)vol << 36 | word) * WORD_ODD;

	return ((v ^ v >> 32) * WORD_ODD) ^ WORD_KEY;
}

static uint64_t unmix(uint64_t value)
{
	uint64_t v = (value ^ WORD_KEY) * WORD_ODD_INVERSE;

	return (v ^ v >> 32) * WORD_ODD_INVERSE;
}

bool model_word_is_any(uint64_t value)
{
	uint64_t v = unmix(value);

	return v >> 40 < 1 << 20 && (v & ((1ull << 36) - 1)) < 1 << 20;
}

uint32_t model_word_id(uint64_t value, unsigned vol, uint64_t word)
{
	uint64_t v = unmix(value);

	if ((v & ((1ull << 36) - 1)) != word || ((v >> 36) & 15) != vol)
		return 0;
	return v >> 40;
}

static void fill(uint32_t id, unsigned vol, uint64_t off, uint8_t *p, uint64_t len)
{
	uint8_t tmp[8];

	while (len) {
		uint64_t in = off & 7, n = min(8 - in, len);

		put_le64(tmp, model_word(id, vol, off >> 3));
		memcpy(p, tmp + in, n);
		off += n;
		p += n;
		len -= n;
	}
}

bool model_is_from(uint32_t id, unsigned vol, uint64_t off, const uint8_t *p, uint64_t len, uint64_t *ret_off)
{
	uint8_t tmp[8];

	for (uint64_t done = 0; done < len;) {
		uint64_t in = (off + done) & 7, n = min(8 - in, len - done);

		put_le64(tmp, model_word(id, vol, (off + done) >> 3));
		if (memcmp(p + done, tmp + in, n)) {
			*ret_off = off + done;
			return false;
		}
		done += n;
	}
	return true;
}

struct model *model_create(unsigned vol, uint64_t size, uint64_t *clock)
{
	struct model *m = calloc(1, sizeof(*m));

	if (!m || !(m->base = calloc(1, size)))
		abort();
	assert(vol < 16 && size < 1ull << 39);
	m->vol = vol;
	m->size = size;
	m->clock = clock;
	m->first_id = BASE_ID + 1;
	return m;
}

void model_destroy(struct model *m)
{
	if (!m)
		return;
	free(m->base);
	free(m->ops);
	free(m);
}

void model_fill_base(struct model *m)
{
	fill(BASE_ID, m->vol, 0, m->base, m->size);
}

void model_rebase(struct model *m, const uint8_t *content)
{
	memcpy(m->base, content, m->size);
	for (unsigned i = 0; i < m->nops; i++)
		m->flushed |= m->ops[i].kind == MODEL_FLUSH;
	m->first_id += m->nops;
	m->nops = 0;
}

unsigned model_issue(struct model *m, enum model_kind kind, uint64_t off, uint64_t len, bool fua)
{
	struct model_op *o;

	assert(off <= m->size && len <= m->size - off && (len || kind == MODEL_FLUSH));
	if (m->nops == m->max_ops) {
		m->max_ops = m->max_ops ? m->max_ops * 2 : 256;
		m->ops = realloc(m->ops, m->max_ops * sizeof(*m->ops));
		if (!m->ops)
			abort();
	}
	o = &m->ops[m->nops];
	*o = (struct model_op){ .id = m->first_id + m->nops, .kind = kind, .fua = fua, .off = off, .len = len,
				.issued = ++*m->clock, .completed = MODEL_NEVER };
	assert(o->id < 1u << 24);
	return m->nops++;
}

void model_data(const struct model *m, unsigned op, uint64_t off, void *buf, uint64_t len)
{
	fill(m->ops[op].id, m->vol, off, buf, len);
}

void model_complete(struct model *m, unsigned op, int error)
{
	uint64_t now = ++*m->clock;

	if (error)
		m->ops[op].error = error;
	else
		m->ops[op].completed = now;
}
