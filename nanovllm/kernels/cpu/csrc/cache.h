/* The layout of a layer's KV cache: for each KV head and each block, at the distances that the caller gives, the keys of `block`
 * tokens, then their values. The heads' parts of a block are adjacent in a model's pool, and so are the layers' parts, so that
 * the first token of a block writes to few new pages.
 * Keys are [block/32][width/2][32][2], values [width/32][block/2][32][2]: for a tile both are panels of weights.
 * width is dim rounded up to a multiple of 32; the padding of keys is zero, if they have 16 bits. block is a multiple of 32.
 * Where the last numbers of keys are the values, there are keys alone.
 * 16 bits: bfloat16. 8 bits: int8, and after the keys, and after the values, [block] bfloat16 scales, one for each token.
 */
#pragma once
#include "vectors.h"

typedef struct {
    ptrdiff_t dim, width, block, bits;
    ptrdiff_t half_bytes;   /* of a block's keys, or of its values */
    ptrdiff_t scale_offset; /* 8 bits: bytes from the first key, or value, to the scales */
} cache_layout;

INLINE cache_layout layout_of(ptrdiff_t dim, ptrdiff_t block, ptrdiff_t bits) {
    ptrdiff_t width = (dim + PANEL - 1) / PANEL * PANEL;
    return (cache_layout){dim, width, block, bits, block * (bits == 8 ? width + 2 : width * 2), block * width};
}

/* Where in a block the numbers of a token's key, or value, begin. A key's pairs are then 2 * 32 apart; see store_token(). */
INLINE ptrdiff_t key_offset(const cache_layout *c, ptrdiff_t token) {
    return token / PANEL * PANEL * c->width + token % PANEL * 2;
}
INLINE ptrdiff_t value_offset(ptrdiff_t token) { return token / 2 * 2 * PANEL + token % 2; }
