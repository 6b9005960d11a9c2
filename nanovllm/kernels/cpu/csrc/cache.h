/* The layout of a layer's KV cache: for each KV head and each block, at the distances that the caller gives, the keys of `block`
 * tokens, then their values. The heads' parts of a block are adjacent in a model's pool, and so are the layers' parts, so that
 * the first token of a block writes to few new pages.
 * For a tile both are panels of weights: keys [block/32][width/2][32][2], values [width/32][block/2][32][2]. width is dim rounded
 * up to a multiple of 32; the padding of keys is zero. block is a multiple of 32. Where the last numbers of keys are the values,
 * there are keys alone.
 * With 16 bits numbers are bfloat16. With 8 and 4 bits a row of width numbers is rotated by hadamard(), and then rounded. Panels
 * are those of int_weights.h. Scales, in float16, follow: of keys [block/32][groups][32], with 4 bits [block/32][groups][2][32]
 * with minimums, and of values [block]. That keys have finer ones with 4 bits decides: their error moves what a query attends to.
 */
#pragma once
#include "int_weights.h"

typedef struct {
    ptrdiff_t dim, width, block, bits;
    ptrdiff_t half_bytes;   /* of a block's keys */
    ptrdiff_t scale_offset; /* 8 and 4 bits: bytes from the first key, or value, to the scales */
    ptrdiff_t turn;         /* 8 and 4 bits: so many numbers are rotated together */
    ptrdiff_t group;        /* 8 and 4 bits: so many numbers of a key share a scale, as those of a value all do */
} cache_layout;

/* The largest power of two up to K_STEP that divides n. */
INLINE ptrdiff_t power_in(ptrdiff_t n) { return n % K_STEP ? n & -n : K_STEP; }

INLINE cache_layout layout_of(ptrdiff_t dim, ptrdiff_t block, ptrdiff_t bits) {
    ptrdiff_t width = (dim + PANEL - 1) / PANEL * PANEL, turn = power_in(width);
    ptrdiff_t group = bits == 4 ? PANEL : width <= K_STEP ? width : turn;
    ptrdiff_t scales = bits == 16 ? 0 : width / group * (bits == 4 ? 2 : 1); /* of a key */
    return (cache_layout){dim,  width, block, bits, block * (width * bits / 8 + 2 * scales), block * width * bits / 8,
                          turn, group};
}

/* Bytes of n numbers. */
INLINE ptrdiff_t bytes_of(const cache_layout *c, ptrdiff_t n) { return n * c->bits / 8; }

/* With 16 bits: where in a block the numbers of a token's key, or value, begin. A key's pairs are then 2 * 32 apart; see
 * store_token(). */
INLINE ptrdiff_t key_offset(const cache_layout *c, ptrdiff_t token) {
    return token / PANEL * PANEL * c->width + token % PANEL * 2;
}
INLINE ptrdiff_t value_offset(ptrdiff_t token) { return token / 2 * 2 * PANEL + token % 2; }
