/* Tiles: products of up to 32 rows of inputs with 32 columns of bfloat16 weights, the loop that linears and attention share.
 * tiles_amx.h, tiles_avx512.h, tiles_neon.h and tiles_float.h implement the functions declared below; one of them is included.
 * A panel of weights is [k/2][32][2], see kernels.h. Each output is summed in the order of k, whatever the number of rows is.
 */
#pragma once
#include <stdlib.h>

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__linux__)
#define HAVE_AMX 1
#elif defined(__AVX512BF16__) && VL == 16 && !defined(SLOW_DPBF16)
#define HAVE_DPBF16 1
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && VL == 4
#define HAVE_BFMMLA 1
#endif

enum { TILE_ROWS = 32 };

/* `operand` is the type of a tile's inputs: bfloat16 where an instruction multiplies bfloat16, else float32. */
#if defined(HAVE_AMX) || defined(HAVE_DPBF16) || defined(HAVE_BFMMLA)
typedef bf16 operand;
INLINE void store_operand(operand *p, vf v) { *(half_vu *)p = to_bf16(v); }
#else
typedef float operand;
INLINE void store_operand(operand *p, vf v) { store(p, v); }
#endif

/* Inputs of a tile: rows of k, ld apart. */
typedef struct {
    const operand *p;
    ptrdiff_t ld;
} input_rows;

/* Outputs of a tile: rows of 32, ld apart. */
typedef struct {
    float *p;
    ptrdiff_t ld;
} output_rows;

/* Weights of a tile: a panel in pieces of piece_k inputs, a multiple of 32; the last piece may be shorter. A tile of more than
 * K_STEP inputs has a single piece. Tiles may prefetch the piece of `prefetch` that stands in the same place, and is as large,
 * while they multiply a piece. */
typedef struct {
    const bf16 *const *pieces, *const *prefetch;
    ptrdiff_t piece_k;
} panel_pieces;

INLINE input_rows inputs_from(input_rows x, ptrdiff_t row) { return (input_rows){x.p + row * x.ld, x.ld}; }
INLINE output_rows outputs_from(output_rows acc, ptrdiff_t row, ptrdiff_t c) {
    return (output_rows){acc.p + row * acc.ld + c, acc.ld};
}

/* A kernel calls this after its last tile, on each thread. */
static void end_tiles(void);

/* acc[rows][32] = x[rows][k] . w, or with `add` acc += x . w; rows <= 32, and k is a multiple of K_MULTIPLE. */
static void tile(int rows, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add);

/* tile() for the first of `panels` panels, or for more of them if reading them side by side is faster. Panels are w.piece_k *
 * PANEL weights apart, and their outputs are adjacent: acc[rows][panels * 32]. Return how many panels were multiplied. */
INLINE int tile_side_by_side(int rows, ptrdiff_t panels, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add);

/* acc[STREAMS][32] = x[k] . w for STREAMS panels, one behind the other in memory: the tile of a linear with a single row. */
static void tile_streams(const operand *x, const bf16 *w, ptrdiff_t k, float *acc);

/* nv_linear prepares a block of x once for all panels, cut into tiles of `step` rows. `buffer` has rows * (k + 16) operands and
 * 64 bytes more. */
INLINE input_rows prepare_inputs(const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, operand *buffer);

/* A block of prepared inputs, and where its outputs in a panel begin in y, [..][ld], with the panel's bias or NULL. y has
 * `columns` columns from there on, and `size` bytes in all. */
typedef struct {
    input_rows x;
    ptrdiff_t rows, step, k;
} linear_inputs;
typedef struct {
    bf16 *y;
    ptrdiff_t ld, columns, size;
    const bf16 *bias;
} linear_outputs;

/* y = x . w + bias for a panel w. acc is [max(rows, 32)][32]. It may prefetch the weights behind w. If y is NULL, the sums stay
 * in acc[rows][32], without the bias. */
INLINE void linear_panel(linear_inputs in, const bf16 *w, linear_outputs out, float *acc);

/* Each implementation also defines the constants
 *   K_MULTIPLE: see tile();
 *   PASS_KEYS: at least so many keys make a pass of attention;
 *   LINEAR_BYTES: the part of a thread's second-level cache for a linear's inputs;
 *   PREPARED_GAP: rows of prepared inputs are k + PREPARED_GAP operands apart;
 *   STREAM_BYTES: larger outputs are written past the caches. */

/* A tile is computed in parts whose accumulators fit the registers: up to WIDE_ROWS rows with WIDE_COLS vectors of columns, or up
 * to MAX_ROWS rows with two. */
#if VL == 16
enum { MAX_ROWS = 12, WIDE_COLS = 2, WIDE_ROWS = 12 };
#elif defined(HAVE_BFMMLA) /* two registers for a vector of columns and two rows */
enum { MAX_ROWS = 12, WIDE_COLS = 4, WIDE_ROWS = 6 };
#elif defined(__aarch64__)
enum { MAX_ROWS = 6, WIDE_COLS = 4, WIDE_ROWS = 6 };
#else
enum { MAX_ROWS = 6, WIDE_COLS = 4, WIDE_ROWS = 3 };
#endif

enum { K_STEP = 256 }; /* so many inputs' weights of a panel fit the first-level cache together with the inputs */

/* A product with one row takes as long as reading its weights. Reading STREAMS panels side by side is faster than one after the
 * other (1.2 times for two on a Zen 3), and their accumulators fit the registers. Then the vectors of columns count up to
 * STREAM_COLS, and panels are k * PANEL weights apart. */
enum { STREAMS = VL / 4, PANEL_VECTORS = PANEL / VL, STREAM_COLS = STREAMS * PANEL_VECTORS };

/* Prefetch 1 KB ahead in weights that are read only once: 1.05 to 1.2 times as fast as without. With 64-byte vectors prefetch
 * into the second-level cache, because the first level can wait for few misses at a time. */
INLINE void prefetch_stream(int cols, const void *w) {
    if (cols == STREAM_COLS || (VL == 8 && cols == PANEL_VECTORS))
        __builtin_prefetch((const char *)w + 1024, 0, VL == 16 ? 2 : 3);
}

/* Cut `rows` into the fewest parts of up to MAX_ROWS, as equal as possible. Call part(R, cols, c) with constants for each part's
 * R rows, from row `at` on, and for each `cols` vectors of columns, from column c on. */
#define PARTS(rows) (((rows) + MAX_ROWS - 1) / MAX_ROWS)
#define FOR_ROWS(rows, part)                                                                                                \
    for (int parts = PARTS(rows), at = 0, n; parts; parts--, at += n) {                                                     \
        n = ((rows) - at + parts - 1) / parts;                                                                              \
        switch (n) { CASE(1, part) CASE(2, part) CASE(3, part) CASE(4, part) CASE(5, part) CASE(6, part) WIDE_CASES(part) } \
    }
#define CASE(R, part)                                                                                                        \
    case R:                                                                                                                  \
        for (int c = 0; c < PANEL; c += (R <= WIDE_ROWS ? WIDE_COLS : 2) * VL) part(R, (R <= WIDE_ROWS ? WIDE_COLS : 2), c); \
        break;
#if VL == 16 || defined(HAVE_BFMMLA)
#define WIDE_CASES(part) CASE(7, part) CASE(8, part) CASE(9, part) CASE(10, part) CASE(11, part) CASE(12, part)
#else
#define WIDE_CASES(part)
#endif

enum { CACHE_BYTES = 1 << 18 }; /* the part of a thread's second-level cache that a loop may fill */

/* Cut m rows evenly into blocks of at most max_rows. Return the rows of a block, at least 1. */
INLINE ptrdiff_t even_block(ptrdiff_t m, ptrdiff_t max_rows) {
    ptrdiff_t blocks = (m + max_rows - 1) / max_rows;
    return m > 0 ? (m + blocks - 1) / blocks : 1;
}

/* Return the rows of a block of x: as many rows of row_bytes as fit into `bytes`, but at least a few tiles. */
static ptrdiff_t rows_that_fit(ptrdiff_t m, ptrdiff_t row_bytes, ptrdiff_t bytes) {
    ptrdiff_t max_rows = bytes / row_bytes;
    return even_block(m, max_rows < 4 * MAX_ROWS ? 4 * MAX_ROWS : max_rows);
}

/* Return the bias of the outputs from c on. A linear's bias may be NULL. */
INLINE const bf16 *bias_from(const bf16 *bias, ptrdiff_t c) { return bias ? bias + c : NULL; }

/* Add the bias, and store the first `count` sums as bfloat16, but no more than the `columns` that y has left. */
INLINE void store_row(const float *acc, const bf16 *bias, bf16 *y, ptrdiff_t count, ptrdiff_t columns) {
    for (ptrdiff_t c = 0; c < count && c < columns; c += VL) {
        vf sum = load(acc + c);
        if (bias) sum += load_bf16(bias + c, columns - c);
        store_bf16(y + c, columns - c, sum);
    }
}
INLINE void store_tile(const float *acc, const bf16 *bias, bf16 *y, ptrdiff_t ldy, int rows, ptrdiff_t columns) {
    for (int r = 0; r < rows; r++) store_row(acc + r * PANEL, bias, y + r * ldy, PANEL, columns);
}

/* Whether outputs go past the caches, which then need not read the old contents. True for outputs that no cache holds, if a
 * panel's row is a cache line. With AVX-512 only. */
INLINE int can_stream(linear_outputs out);

/* Store `rows` rows of sums as the outputs from row r on. */
INLINE void store_outputs(const float *acc, linear_outputs out, ptrdiff_t r, int rows, int stream) {
    bf16 *y = out.y + r * out.ld;
#if VL == 16 && defined(__AVX2__)
    for (int i = 0; stream && i < rows; i++, acc += PANEL, y += out.ld)
        for (int c = 0; c < PANEL; c += VL) {
            vf sum = load(acc + c);
            if (out.bias) sum += load_bf16(out.bias + c, VL);
            _mm256_stream_si256((__m256i *)(y + c), (__m256i)to_bf16(sum));
        }
#endif
    if (!stream) store_tile(acc, out.bias, y, out.ld, rows, out.columns);
}

/* Call this after the last output, before another thread may read y. */
INLINE void end_stream(int stream) {
#if VL == 16 && defined(__AVX2__)
    if (stream) _mm_sfence();
#else
    (void)stream;
#endif
}

#ifndef HAVE_AMX
/* acc[rows][32] = x . w for a tile of prepared inputs and a panel w. With `prefetch` it may prefetch the weights behind w. */
static void linear_tile(int rows, ptrdiff_t k, input_rows x, const bf16 *w, int prefetch, float *acc);

/* linear_panel() tile by tile, each of them over all inputs. */
INLINE void panel_by_tiles(linear_inputs in, const bf16 *w, linear_outputs out, float *acc) {
    int stream = can_stream(out);
    for (ptrdiff_t r = 0; r < in.rows; r += in.step) {
        int rows = in.rows - r < in.step ? (int)(in.rows - r) : (int)in.step;
        linear_tile(rows, in.k, inputs_from(in.x, r), w, r == 0, out.y ? acc : acc + r * PANEL);
        if (out.y) store_outputs(acc, out, r, rows, stream);
    }
    end_stream(stream);
}
#endif

#if defined(HAVE_AMX)
#include "tiles_amx.h"
#elif VL == 16
#include "tiles_avx512.h"
#elif defined(HAVE_BFMMLA)
#include "tiles_neon.h"
#else
#include "tiles_float.h"
#endif

INLINE int can_stream(linear_outputs out) {
#if VL == 16 && defined(__AVX2__)
    return out.y && out.size > STREAM_BYTES && out.columns >= PANEL && ((uintptr_t)out.y | out.ld * 2) % (2 * PANEL) == 0;
#else
    (void)out;
    return 0;
#endif
}

#ifndef HAVE_AMX
static void end_tiles(void) {}
#endif

#if VL < 16 || defined(HAVE_AMX)
INLINE int tile_side_by_side(int rows, ptrdiff_t panels, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
    (void)panels;
    tile(rows, k, x, w, acc, add);
    return 1;
}
#endif
