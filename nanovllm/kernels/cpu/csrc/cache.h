/* A layer's cache: [kv_heads][blocks] of keys, then values, so that a head reads one stretch of memory where its blocks follow
 * each other. `block` keys of `width` numbers are [block/32][width/2][32][2], values [width/32][block/2][32][2]: both products
 * read them as a tile reads weights. width is dim filled up to a multiple of 32; what fills it stays zero. block % 32 == 0.
 * 16 bits: bfloat16. 8 bits: integers, and behind the keys, and the values, [block] bfloat16 scales, one for each token.
 */
#pragma once
#include "vectors.h"

typedef struct {
    ptrdiff_t dim, width, block, bits;
    ptrdiff_t half_bytes;   /* of a block's keys, or of its values; the block takes twice as much */
    ptrdiff_t scale_offset; /* in bytes, of the scales from the keys, or from the values; 8 bits */
} cache_layout;

INLINE cache_layout layout_of(ptrdiff_t dim, ptrdiff_t block, ptrdiff_t bits) {
    ptrdiff_t width = (dim + PANEL - 1) / PANEL * PANEL;
    return (cache_layout){dim, width, block, bits, block * (bits == 8 ? width + 2 : width * 2), block * width};
}

/* Numbers of a block's keys, and values, before a token's first. */
INLINE ptrdiff_t key_offset(const cache_layout *c, ptrdiff_t token) { return token / PANEL * PANEL * c->width + token % PANEL * 2; }
INLINE ptrdiff_t value_offset(ptrdiff_t token) { return token / 2 * 2 * PANEL + token % 2; }
