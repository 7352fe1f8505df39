/* SPDX-License-Identifier: MIT */
/* xoshiro256** seeded by splitmix64. */
#include "util/rng.h"

#include <string.h>

static uint64_t rotl(uint64_t v, int k)
{
	return v << k | v >> (64 - k);
}

void rng_seed(struct rng *r, uint64_t seed)
{
	for (int i = 0; i < 4; i++) {
		uint64_t z = seed += 0x9e3779b97f4a7c15;

		z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
		z = (z ^ z >> 27) * 0x94d049bb133111eb;
		r->s[i] = z ^ z >> 31;
	}
}

uint64_t rng_u64(struct rng *r)
{
	uint64_t *s = r->s, result = rotl(s[1] * 5, 7) * 9, t = s[1] << 17;

	s[2] ^= s[0];
	s[3] ^= s[1];
	s[1] ^= s[2];
	s[0] ^= s[3];
	s[2] ^= t;
	s[3] = rotl(s[3], 45);
	return result;
}

uint64_t rng_below(struct rng *r, uint64_t n)
{
	/* The first 2^64 mod n values are drawn again, so that each remainder is as likely as the others. */
	uint64_t skip = -n % n, v;

	do
		v = rng_u64(r);
	while (v < skip);
	return v % n;
}

void rng_fill(struct rng *r, void *buf, uint64_t len)
{
	for (char *p = buf; len;) {
		uint64_t v = rng_u64(r), n = len < sizeof(v) ? len : sizeof(v);

		memcpy(p, &v, n);
		p += n;
		len -= n;
	}
}
