/* What LoRA adapters add to the outputs of a linear: y += scale * (x . A) . B, for each token with its own adapter's A and B.
 * A step's tokens come grouped by adapter, so that A and B are read once for a group. kernels/adapters.py describes the tables.
 *
 * A row's sums do not depend on the other rows, bit for bit: x . A is summed in VL lanes, each in the order of k, and then as
 * sum_of() does; the product with B in the order of the ranks.
 */
#include "vectors.h"

/* Rows and ranks, or rows and vectors of columns, whose sums fit the registers. A thread takes at most BLOCK rows of a group, and
 * COLUMNS outputs, at once. */
enum { SHRINK_ROWS = VL == 16 ? 4 : 2, RANKS = 4, EXPAND_ROWS = VL == 16 ? 8 : 4, BLOCK = 32, COLUMNS = 256, MAX_RANK = 512 };

/* One adapter and some of its tokens: `order` has their places in the batch, t their rows of sums x . A, each of `width`. */
typedef struct {
    ptrdiff_t slot, rows, width;
    const int32_t *order;
    float *t;
} token_block;

/* The part of a slice's columns that an item computes. */
typedef struct {
    ptrdiff_t slice, first, end;
} column_chunk;

/* acc += x * a of 2 VL pairs of bfloat16: of even places, then of odd ones, unless an instruction adds both at once. */
INLINE vf add_products(vf acc, vu x, vu a) {
#if VL == 16 && defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)a);
#else
    acc = fma_((vf)(x << 16), (vf)(a << 16), acc);
    return fma_((vf)(x & 0xffff0000), (vf)(a & 0xffff0000), acc);
#endif
}

/* t[r][j] = x[r] . a[j] for `rows` rows of x and `ranks` rows of a, which are constants. */
INLINE void shrink_tile(int rows, int ranks, const bf16 *const *x, const bf16 *a, ptrdiff_t k, float *t, ptrdiff_t width) {
    vf acc[SHRINK_ROWS][RANKS] = {0};
    for (ptrdiff_t i = 0; i < k; i += 2 * VL) {
        vu inputs[SHRINK_ROWS];
        for (int r = 0; r < rows; r++) inputs[r] = load_pairs(x[r] + i, k - i);
        for (int j = 0; j < ranks; j++) {
            vu factors = load_pairs(a + j * k + i, k - i);
            for (int r = 0; r < rows; r++) acc[r][j] = add_products(acc[r][j], inputs[r], factors);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < ranks; j++) t[r * width + j] = sum_of(acc[r][j]);
}

/* t = x . a for the block's tokens and `ranks` rows of a. */
static void shrink(const token_block *block, const bf16 *x, ptrdiff_t ldx, const bf16 *a, ptrdiff_t ranks, ptrdiff_t k,
                   float *t) {
    for (ptrdiff_t r = 0; r < block->rows; r += SHRINK_ROWS) {
        const bf16 *inputs[SHRINK_ROWS];
        ptrdiff_t rows = block->rows - r < SHRINK_ROWS ? block->rows - r : SHRINK_ROWS;
        for (ptrdiff_t i = 0; i < rows; i++) inputs[i] = x + block->order[r + i] * ldx;
        for (ptrdiff_t j = 0; j < ranks;) {
            int wide = ranks - j >= RANKS;
            float *out = t + r * block->width + j;
#define SHRINK(R)                                                                 \
    case R:                                                                       \
        if (wide) shrink_tile(R, RANKS, inputs, a + j * k, k, out, block->width); \
        else shrink_tile(R, 1, inputs, a + j * k, k, out, block->width);          \
        break;
            switch (rows) {
                SHRINK(1)
                SHRINK(2)
#if VL == 16
                SHRINK(3)
                SHRINK(4)
#endif
            }
            j += wide ? RANKS : 1;
        }
    }
}

/* y[order[r]] += scale * t[r] . b for `rows` rows, a constant, and two vectors of columns, of which y has `left`.
 *
 * All rows of y are loaded before one is stored: they are often a multiple of 4 KiB apart, and a load behind a store waits for it
 * if the low 12 bits of their addresses are equal. */
INLINE void expand_tile(int rows, const float *t, ptrdiff_t width, const vf (*b)[2], ptrdiff_t ranks, float scale,
                        const int32_t *order, bf16 *y, ptrdiff_t n, ptrdiff_t left) {
    vf acc[EXPAND_ROWS][2] = {0};
    for (ptrdiff_t j = 0; j < ranks; j++)
        for (int r = 0; r < rows; r++) {
            vf factor = broadcast(t[r * width + j]);
            acc[r][0] = fma_(b[j][0], factor, acc[r][0]), acc[r][1] = fma_(b[j][1], factor, acc[r][1]);
        }
    for (int r = 0; r < rows; r++) {
        const bf16 *before = y + order[r] * n;
        acc[r][0] = load_bf16(before, left) + acc[r][0] * scale;
        if (left > VL) acc[r][1] = load_bf16(before + VL, left - VL) + acc[r][1] * scale;
    }
    for (int r = 0; r < rows; r++) {
        bf16 *out = y + order[r] * n;
        store_bf16(out, left, acc[r][0]);
        if (left > VL) store_bf16(out + VL, left - VL, acc[r][1]);
    }
}

/* y += scale * t . b for the block's tokens and the chunk's columns. */
static void expand(const token_block *block, const column_chunk *chunk, const float *t, const bf16 *b, ptrdiff_t ranks,
                   float scale, bf16 *y, ptrdiff_t n) {
    ptrdiff_t parts = (block->rows + EXPAND_ROWS - 1) / EXPAND_ROWS;
    for (ptrdiff_t r = 0; r < block->rows; r++)
        for (ptrdiff_t c = chunk->first; c < chunk->end; c += 32) __builtin_prefetch(y + block->order[r] * n + c, 1, 2);
    /* Two vectors of columns, side by side: in b the ranks are n apart. */
    vf own[MAX_RANK][2];
    for (ptrdiff_t c = chunk->first; c < chunk->end; c += 2 * VL) {
        ptrdiff_t left = chunk->end - c;
        for (ptrdiff_t j = 0; j < ranks; j++) {
            const bf16 *p = b + j * n + c;
            own[j][0] = load_bf16(p, left), own[j][1] = left > VL ? load_bf16(p + VL, left - VL) : (vf){0};
        }
        for (ptrdiff_t part = 0; part < parts; part++) {
            ptrdiff_t r = block->rows * part / parts, rows = block->rows * (part + 1) / parts - r;
#define EXPAND(R) \
    case R: expand_tile(R, t + r * block->width, block->width, own, ranks, scale, block->order + r, y + c, n, left); break;
            switch (rows) {
                EXPAND(1)
                EXPAND(2)
                EXPAND(3)
                EXPAND(4)
#if VL == 16
                EXPAND(5)
                EXPAND(6)
                EXPAND(7)
                EXPAND(8)
#endif
            }
        }
    }
}

static ptrdiff_t blocks_of(const int32_t *groups) {
    ptrdiff_t blocks = 0;
    for (int32_t g = 0; g < groups[0]; g++) blocks += (groups[3 + 3 * g] + BLOCK - 1) / BLOCK;
    return blocks;
}

/* Return block number `index` of all groups. */
static token_block find_block(const int32_t *groups, const int32_t *order, float *scratch, ptrdiff_t width, ptrdiff_t index) {
    const int32_t *group = groups + 1;
    for (ptrdiff_t blocks; index >= (blocks = (group[2] + BLOCK - 1) / BLOCK); group += 3) index -= blocks;
    ptrdiff_t first = index * BLOCK, rows = group[2] - first < BLOCK ? group[2] - first : BLOCK;
    return (token_block){group[0], rows, width, order + group[1] + first, scratch + (group[1] + first) * width};
}

static ptrdiff_t chunks_of(const int32_t *ends, ptrdiff_t slices) {
    ptrdiff_t chunks = 0;
    for (ptrdiff_t s = 0; s < slices; s++) chunks += (ends[s] - (s ? ends[s - 1] : 0) + COLUMNS - 1) / COLUMNS;
    return chunks;
}

static column_chunk find_chunk(const int32_t *ends, ptrdiff_t index) {
    ptrdiff_t s = 0, start = 0;
    for (ptrdiff_t chunks; index >= (chunks = (ends[s] - start + COLUMNS - 1) / COLUMNS); start = ends[s++]) index -= chunks;
    ptrdiff_t first = start + index * COLUMNS;
    return (column_chunk){s, first, ends[s] - first < COLUMNS ? ends[s] : first + COLUMNS};
}

/* y[tokens][n] += the adapters' part for x[tokens][k], whose rows are ldx apart. See kernels/adapters.py for the other arguments:
 * a[slots][slices * max_rank][k], b[slots][max_rank][n]. */
void nv_add_lora(team *t, const bf16 *x, ptrdiff_t ldx, bf16 *y, const bf16 *a, const bf16 *b, const int32_t *ranks,
                 const float *scales, const int32_t *ends, const int32_t *groups, const int32_t *order, float *scratch,
                 token_count tokens, ptrdiff_t n, ptrdiff_t k, ptrdiff_t slices, ptrdiff_t max_rank) {
    (void)tokens; /* the groups have as many at most */
    if (!groups[0]) return;
    ptrdiff_t blocks = blocks_of(groups), chunks = chunks_of(ends, slices), width = slices * max_rank;
    FOR_ITEMS(item, t, blocks * slices) {
        token_block block = find_block(groups, order, scratch, width, item / slices);
        ptrdiff_t s = item % slices;
        shrink(&block, x, ldx, a + (block.slot * slices + s) * max_rank * k, ranks[block.slot * slices + s], k,
               block.t + s * max_rank);
    }
    FOR_ITEMS(item, t, blocks * chunks) {
        token_block block = find_block(groups, order, scratch, width, item / chunks);
        column_chunk chunk = find_chunk(ends, item % chunks);
        ptrdiff_t s = block.slot * slices + chunk.slice;
        if (ranks[s])
            expand(&block, &chunk, block.t + chunk.slice * max_rank, b + block.slot * max_rank * n, ranks[s], scales[s], y, n);
    }
}
