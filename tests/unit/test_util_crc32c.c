/* SPDX-License-Identifier: MIT */
/* CRC-32C against the vectors of RFC 3720, appendix B.4, and against the bit-by-bit form. */
#include "lib/test.h"
#include "util/crc32c.h"
#include "util/rng.h"

static void both_forms_match_the_vectors_of_rfc_3720(void)
{
	uint8_t zeroes[32] = { 0 }, ones[32], up[32], down[32];
	const struct {
		const void *data;
		size_t len;
		uint32_t crc;
	} vectors[] = {
		{ zeroes, 32, 0x8a9136aa }, { ones, 32, 0x62a8ab43 }, { up, 32, 0x46dd794e }, { down, 32, 0x113fdb5c },
		{ "123456789", 9, 0xe3069283 }, { "", 0, 0 },
	};

	for (int i = 0; i < 32; i++) {
		ones[i] = 0xff;
		up[i] = i;
		down[i] = 31 - i;
	}
	for (size_t i = 0; i < sizeof(vectors) / sizeof(vectors[0]); i++) {
		CHECK_EQ(crc32c(0, vectors[i].data, vectors[i].len), vectors[i].crc);
		CHECK_EQ(crc32c_scalar(0, vectors[i].data, vectors[i].len), vectors[i].crc);
	}
}

static void both_forms_agree_at_every_length_and_alignment(void)
{
	static uint8_t data[4200];
	struct rng rng;

	rng_seed(&rng, test_seed());
	rng_fill(&rng, data, sizeof(data));
	for (size_t len = 0; len < 600; len++)
		for (size_t start = 0; start < 8; start++)
			CHECK_EQ(crc32c(len, data + start, len), crc32c_scalar(len, data + start, len));
	CHECK_EQ(crc32c(1, data, sizeof(data)), crc32c_scalar(1, data, sizeof(data)));
}

static void a_checksum_can_be_taken_in_pieces(void)
{
	uint8_t data[300];
	struct rng rng;

	rng_seed(&rng, 1);
	rng_fill(&rng, data, sizeof(data));
	for (size_t cut = 0; cut <= sizeof(data); cut++)
		CHECK_EQ(crc32c(crc32c(0, data, cut), data + cut, sizeof(data) - cut), crc32c(0, data, sizeof(data)));
}

int main(void)
{
	RUN(both_forms_match_the_vectors_of_rfc_3720);
	RUN(both_forms_agree_at_every_length_and_alignment);
	RUN(a_checksum_can_be_taken_in_pieces);
	return 0;
}
