/* A layer's cache: [kv_heads][blocks] of keys, then values, so that a head reads one stretch of memory where its blocks follow
 * each other. `block` keys of `width` numbers are [block/32][width/2][32][2], values [width/32][block/2][32][2]: both products
 * read them as a tile reads weights. width is dim filled up to a multiple of 32; what fills it stays zero. block % 32 == 0.
 * 16 bits: bfloat16. 8 bits: integers, and behind the keys, and the values, [block] bfloat16 scales, one for each token.
 */
#pragma once
#include "vectors.h"

INLINE ptrdiff_t width_of(ptrdiff_t dim) { return (dim + PANEL - 1) / PANEL * PANEL; }
/* Bytes of a block's keys, or values, of one head. */
INLINE ptrdiff_t half_bytes(ptrdiff_t width, ptrdiff_t block, ptrdiff_t bits) { return block * (bits == 8 ? width + 2 : width * 2); }

/* Numbers of a block's keys, and values, before a token's first. */
INLINE ptrdiff_t key_at(ptrdiff_t token, ptrdiff_t width) { return token / PANEL * PANEL * width + token % PANEL * 2; }
INLINE ptrdiff_t value_at(ptrdiff_t token) { return token / 2 * 2 * PANEL + token % 2; }
