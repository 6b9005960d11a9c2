/* A tile of products: tile(rows, k, x, w, acc, add) computes acc[rows][32] (+)= x[rows][k] . w
 *
 * With `add` the products are added to what acc holds. rows <= 32; k is a multiple of TERMS. Each output is summed in the order
 * of k, whatever `rows` is. x is of type `act`: bfloat16 where an instruction multiplies it, else float32.
 */
#pragma once
#include <stdlib.h>

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#define HAVE_AMX 1
#endif

enum { TILE_ROWS = 32 };

#if defined(HAVE_AMX) || (defined(__AVX512BF16__) && VL == 16)
typedef bf16 operand;
INLINE void store_operand(operand *p, vf v) { *(half_vu *)p = to_bf16(v); }
#else
typedef float operand;
INLINE void store_operand(operand *p, vf v) { store(p, v); }
#endif

/* A tile's inputs; rows lie ld apart. */
typedef struct {
    const operand *p;
    ptrdiff_t ld;
} input_rows;
/* A tile's outputs; rows of 32 lie ld apart. */
typedef struct {
    float *p;
    ptrdiff_t ld;
} output_rows;
/* A tile's weights: a panel [k/2][32][2], in pieces of piece_k inputs, a multiple of 32; the last may have fewer. While a piece
 * is multiplied, the one in `prefetch`, of the same size, is prefetched. */
typedef struct {
    const bf16 *const *pieces, *const *prefetch;
    ptrdiff_t piece_k;
} panel_pieces;

INLINE input_rows inputs_from(input_rows x, ptrdiff_t row) { return (input_rows){x.p + row * x.ld, x.ld}; }
INLINE output_rows outputs_from(output_rows acc, ptrdiff_t row, ptrdiff_t c) {
    return (output_rows){acc.p + row * acc.ld + c, acc.ld};
}

/* How many rows of accumulators fit the registers: with two vectors of columns, and with all that WIDE takes. */
enum { K_STEP = 256 }; /* inputs whose weights of a panel fit the first-level cache beside those of x */
enum { MAX_ROWS = VL == 16 ? 12 : 6, WIDE_COLS = VL == 16 ? 2 : 4, WIDE_ROWS = VL == 16 ? 12 : 3 };

/* A product with one row takes as long as its weights take to read. STREAMS panels that are read side by side come from
 * memory faster than one after the other (by 1.2 for two on a Zen 3); their accumulators fit the registers. A vector of
 * columns is then one of ALL_COLS. */
enum { STREAMS = VL / 4, PANEL_VECTORS = PANEL / VL, STREAM_COLS = STREAMS * PANEL_VECTORS };

/* Fetch what lies a KB behind the weights at hand, where they are read once: 1.05 to 1.2 times as fast as without. With
 * vectors of 64 bytes into the second level, else the first level's few pending misses are all taken. */
INLINE void prefetch_stream(int cols, const void *w) {
    if (cols == STREAM_COLS || (VL == 8 && cols == PANEL_VECTORS)) __builtin_prefetch((const char *)w + 1024, 0, VL == 16 ? 2 : 3);
}

/* What a tile of one part fetches, bytes ahead: at 5 to 12 rows 1.08 times as fast as the next panel. */
enum { NEAR_BYTES = 8192 };

/* Cut `rows` into as many parts as MAX_ROWS asks for, of equal size, and call part(R, cols, c) with constants for
 * the R rows from `at` on and the columns from c on. */
#define PARTS(rows) (((rows) + MAX_ROWS - 1) / MAX_ROWS)
#define FOR_ROWS(rows, part)                                                                              \
    for (int parts = PARTS(rows), at = 0, n; parts; parts--, at += n) {             \
        n = ((rows) - at + parts - 1) / parts;                                                            \
        switch (n) {                                                                                      \
            CASE(1, part) CASE(2, part) CASE(3, part) CASE(4, part) CASE(5, part) CASE(6, part) WIDE_CASES(part) \
        }                                                                                                 \
    }
#define CASE(R, part)                                                  \
    case R:                                                            \
        for (int c = 0; c < PANEL; c += (R <= WIDE_ROWS ? WIDE_COLS : 2) * VL) part(R, (R <= WIDE_ROWS ? WIDE_COLS : 2), c); \
        break;
#if VL == 16
#define WIDE_CASES(part) CASE(7, part) CASE(8, part) CASE(9, part) CASE(10, part) CASE(11, part) CASE(12, part)
#else
#define WIDE_CASES(part)
#endif

#ifdef HAVE_AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} tile_config;

static _Thread_local int configured_rows;

static void begin_tiles(void) { configured_rows = -1; }
static void end_tiles(void) { _tile_release(); }

/* Tiles 0 1 / 2 3: outputs of rows 0-15 / 16-31; 4 / 5: their inputs; 6 7: weights. */
static void tile(int rows, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
    int rows1 = rows > 16 ? rows - 16 : 0;
    if (configured_rows != rows) {
        tile_config c;
        memset(&c, 0, sizeof c);
        c.palette = 1;
        for (int t = 0; t < 8; t++) c.colsb[t] = 64, c.rows[t] = 16;
        c.rows[0] = c.rows[1] = c.rows[4] = rows > 16 ? 16 : rows;
        if (rows1) c.rows[2] = c.rows[3] = c.rows[5] = rows1;
        __asm__ volatile("" : "+m"(c)); /* GCC 12 takes what is loaded for 8 bytes (its PR 114098) */
        _tile_loadconfig(&c);
        configured_rows = rows;
    }
    float *acc1 = acc.p + 16 * acc.ld;
    const operand *x1 = x.p + 16 * x.ld;
    if (add) {
        _tile_loadd(0, acc.p, acc.ld * 4);
        _tile_loadd(1, acc.p + 16, acc.ld * 4);
        if (rows1) {
            _tile_loadd(2, acc1, acc.ld * 4);
            _tile_loadd(3, acc1 + 16, acc.ld * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (rows1) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (ptrdiff_t i = 0; i < k;) {
        const bf16 *piece = *w.pieces++;
        for (ptrdiff_t end = k - i < w.piece_k ? k : i + w.piece_k; i < end; i += 32, piece += 32 * PANEL) {
            _tile_loadd(6, piece, PANEL * 4);
            _tile_loadd(7, piece + 32, PANEL * 4);
            _tile_loadd(4, x.p + i, x.ld * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (rows1) {
                _tile_loadd(5, x1 + i, x.ld * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    _tile_stored(0, acc.p, acc.ld * 4);
    _tile_stored(1, acc.p + 16, acc.ld * 4);
    if (rows1) {
        _tile_stored(2, acc1, acc.ld * 4);
        _tile_stored(3, acc1 + 16, acc.ld * 4);
    }
}
static void tile_streams(const operand *x, const bf16 *w, ptrdiff_t k, float *acc) {
    for (int p = 0; p < STREAMS; p++, w += k * PANEL)
        tile(1, k, (input_rows){x, 0}, (panel_pieces){&w, &w, k}, (output_rows){acc + p * PANEL, PANEL}, 0);
}

#define SCHEDULE static
enum { X_IN_PLACE = 1, PASS_KEYS = PANEL, K_MULTIPLE = 32 };
INLINE const operand *prepare_inputs(const bf16 *x, ptrdiff_t *ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, operand *buffer) { return x; }
INLINE void linear_tile(int rows, ptrdiff_t k, input_rows x, const bf16 *w, int prefetch, float *acc) {
    tile(rows, k, x, (panel_pieces){&w, &w, k}, (output_rows){acc, PANEL}, 0);
}

#else
static void begin_tiles(void) {}
static void end_tiles(void) {}

#if defined(__AVX512BF16__) && VL == 16
/* a += pairs of v times the pair at x, b likewise of w. In assembly because GCC otherwise fetches many rows' pairs
 * beforehand, and keeps accumulators in memory for them. */
INLINE void multiply_add2(__m512 *a, __m512 *b, __m512i v, __m512i w, const bf16 *x) {
#ifdef EMULATED
    __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int32_t *)x);
    *a = _mm512_dpbf16_ps(*a, (__m512bh)v, pair), *b = _mm512_dpbf16_ps(*b, (__m512bh)w, pair);
#else
    __m512i t;
    __asm__("vpbroadcastd %5, %2\n\tvdpbf16ps %2, %3, %0\n\tvdpbf16ps %2, %4, %1"
            : "+v"(*a), "+v"(*b), "=&v"(t) : "v"(v), "v"(w), "m"(*(const int32_t *)x));
#endif
}

/* x is either rows ld apart, or packed: [k/2][rows][2]. A piece of w.prefetch comes into the second-level cache from byte `skip`
 * on, `share` bytes a step. A linear of up to 4 rows is read fastest without (1.2 times on a Zen 4), attention if what lies 4 KB
 * behind is fetched too. */
INLINE void tile_rows(int rows, int cols, int packed, ptrdiff_t k, input_rows x, panel_pieces w, ptrdiff_t skip,
                      ptrdiff_t share, output_rows acc, int add) {
    __m512 a[MAX_ROWS][STREAM_COLS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) a[r][c] = add ? _mm512_loadu_ps(acc.p + r * acc.ld + c * VL) : (__m512)(vf){0};
    for (ptrdiff_t i = 0; i < k;) {
        const bf16 *piece = *w.pieces++;
        const char *ahead = (const char *)*w.prefetch++ + skip;
        for (ptrdiff_t end = k - i < w.piece_k ? k : i + w.piece_k; i < end; i += 2, piece += 2 * PANEL, ahead += share) {
            if (!packed || rows > 4) __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + share / 2, 0, 2);
            if (!packed && rows <= 4) __builtin_prefetch(piece + 2048, 0, 2), __builtin_prefetch(piece + 2048 + PANEL, 0, 2);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c += 2) {
                const bf16 *at = piece + c / PANEL_VECTORS * (k * PANEL);
                __m512i v0 = _mm512_loadu_si512(at), v1 = _mm512_loadu_si512(at + 2 * VL);
                prefetch_stream(cols, at), prefetch_stream(cols, at + 2 * VL);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++)
                    multiply_add2(&a[r][c], &a[r][c + 1], v0, v1, packed ? &x.p[i * rows + 2 * r] : &x.p[r * x.ld + i]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) _mm512_storeu_ps(acc.p + r * acc.ld + c * VL, a[r][c]);
}

/* `skip` and `share` of each part of a tile of `rows`: they fetch k inputs' panel between them. */
#define PREFETCH(k, rows) at * (k) * 2 * PANEL / (rows), 4 * PANEL / PARTS(rows)
static void tile(int rows, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
#define PLAIN_PART(R, cols, c) \
    tile_rows(R, cols, 0, k, inputs_from(x, at), w, PREFETCH(w.piece_k, rows), outputs_from(acc, at, 0), add)
    FOR_ROWS(rows, PLAIN_PART)
}

#define SCHEDULE guided
enum { X_IN_PLACE = 0, PASS_KEYS = 256, K_MULTIPLE = 2 };
/* out[k/2][rows][2] = x[rows][k]; what a vector of pairs has beyond `rows` the next one overwrites. */
INLINE void pack_rows(int rows, const bf16 *x, ptrdiff_t ldx, ptrdiff_t k, bf16 *out) {
    for (ptrdiff_t i = 0; i < k; i += 2 * VL) {
        vf pairs[VL];
#pragma GCC unroll 16
        for (int r = 0; r < VL; r++) pairs[r] = r < rows ? load((const float *)(x + r * ldx + i)) : (vf){0};
        transpose(pairs);
#pragma GCC unroll 16
        for (int j = 0; j < VL; j++, out += 2 * rows) store((float *)out, pairs[j]);
    }
}
/* x in `room`, cut into tiles of `step` rows and these into their parts, each part [k/2][rows][2]: what a step of the
 * products reads lies in one line or two, however far rows are apart. room has 64 bytes more. */
INLINE const operand *prepare_inputs(const bf16 *x, ptrdiff_t *ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, operand *buffer) {
#define PACK_PART(R, cols, c) pack_rows(R, x + (r + at) * *ldx, *ldx, k, buffer + (r + at) * k)
    for (ptrdiff_t r = 0; r < rows; r += step) FOR_ROWS((int)(rows - r < step ? rows - r : step), PACK_PART)
    *ldx = k;
    return buffer;
}
static __attribute__((noinline)) void linear_tile(int rows, ptrdiff_t k, input_rows x, const bf16 *w, int prefetch, float *acc) {
    const bf16 *next = !prefetch ? w : rows <= MAX_ROWS ? w + NEAR_BYTES / sizeof *w : w + k * PANEL;
#define PACKED_PART(R, cols, c)                                                                             \
    tile_rows(R, cols, 1, k, (input_rows){x.p + at * k, 0}, (panel_pieces){&w, &next, k}, PREFETCH(k, rows), \
              (output_rows){acc + at * PANEL, PANEL}, 0)
    FOR_ROWS(rows, PACKED_PART)
}

/* acc[STREAMS][32] = x[k] . w, of panels that lie one behind the other. */
static void tile_streams(const operand *x, const bf16 *w, ptrdiff_t k, float *acc) {
    tile_rows(1, STREAM_COLS, 1, k, (input_rows){x, 0}, (panel_pieces){&w, &w, k}, 0, 0, (output_rows){acc, 0}, 0);
}
#else
/* a += x v, b += x w. In assembly because GCC otherwise keeps one accumulator of the largest tile in memory,
 * which makes each step wait for a store. */
INLINE void multiply_add2(vf *a, vf *b, vf v, vf w, const float *x) {
#if VL == 8 && defined(__FMA__)
    vf t;
    __asm__("vbroadcastss %5, %2\n\tvfmadd231ps %3, %2, %0\n\tvfmadd231ps %4, %2, %1"
            : "+x"(*a), "+x"(*b), "=&x"(t) : "x"(v), "x"(w), "m"(*x));
#else
    *a = fma_(v, broadcast(*x), *a), *b = fma_(w, broadcast(*x), *b);
#endif
}

/* The even inputs' weights are the low halves of the pairs, the odd ones' the high halves. */
INLINE void tile_rows(int rows, int cols, ptrdiff_t k, input_rows x, const bf16 *w, int prefetch, output_rows acc, int add) {
    vf a[MAX_ROWS][STREAM_COLS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) a[r][c] = add ? load(acc.p + r * acc.ld + c * VL) : (vf){0};
    for (ptrdiff_t i = 0; i < k; i += 2, w += 2 * PANEL) {
        if (prefetch && cols < PANEL_VECTORS) { /* the other columns and the next step's weights, while these are multiplied */
            __builtin_prefetch(w + K_STEP * PANEL);
            __builtin_prefetch(w + K_STEP * PANEL + PANEL);
        }
#pragma GCC unroll 4
        for (int c = 0; c < cols; c += 2) {
            const vu *v = (const vu *)(w + c / PANEL_VECTORS * (k * PANEL)) + c % PANEL_VECTORS;
            prefetch_stream(cols, v);
            vf even0 = (vf)(v[0] << 16), even1 = (vf)(v[1] << 16);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) multiply_add2(&a[r][c], &a[r][c + 1], even0, even1, &x.p[r * x.ld + i]);
            vf odd0 = (vf)(v[0] & 0xffff0000), odd1 = (vf)(v[1] & 0xffff0000);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) multiply_add2(&a[r][c], &a[r][c + 1], odd0, odd1, &x.p[r * x.ld + i + 1]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) store(acc.p + r * acc.ld + c * VL, a[r][c]);
}

static void tile_step(int rows, ptrdiff_t k, input_rows x, const bf16 *w, output_rows acc, int add) {
#define TILE_PART(R, cols, c) \
    tile_rows(R, cols, k, inputs_from(x, at), w + 2 * (c), at + (c) == 0, outputs_from(acc, at, c), add)
    FOR_ROWS(rows, TILE_PART)
}
static void tile(int rows, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
    for (ptrdiff_t i = 0, at = 0, step; i < k; i += step, at = at + step < w.piece_k ? at + step : (w.pieces++, 0)) {
        step = k - i < K_STEP ? k - i : K_STEP;
        if (w.piece_k - at < step) step = w.piece_k - at;
        tile_step(rows, step, (input_rows){x.p + i, x.ld}, *w.pieces + at * PANEL, acc, add || i);
    }
}

#define SCHEDULE guided
enum { X_IN_PLACE = 0, PASS_KEYS = PANEL, K_MULTIPLE = 2 };
/* x as float32 in `room`, rows 64 bytes further apart than k so that they do not share a cache set. */
INLINE const operand *prepare_inputs(const bf16 *x, ptrdiff_t *ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, operand *buffer) {
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t i = 0; i < k; i += VL) store(buffer + r * (k + 16) + i, from_bf16(*(const half_vu *)(x + r * *ldx + i)));
    *ldx = k + 16;
    return buffer;
}
INLINE void linear_tile(int rows, ptrdiff_t k, input_rows x, const bf16 *w, int prefetch, float *acc) {
    tile(rows, k, x, (panel_pieces){&w, &w, k}, (output_rows){acc, PANEL}, 0);
}

/* acc[STREAMS][32] = x[k] . w, of panels that lie one behind the other. */
static void tile_streams(const operand *x, const bf16 *w, ptrdiff_t k, float *acc) {
    tile_rows(1, STREAM_COLS, k, (input_rows){x, 0}, w, 0, (output_rows){acc, 0}, 0);
}
#endif
#endif

enum { CACHE_BYTES = 1 << 18 }; /* of a thread's second-level cache, for a loop to count on */

/* Cut m rows evenly into blocks of at most `most`; returns a block's rows, at least 1. */
INLINE ptrdiff_t even_block(ptrdiff_t m, ptrdiff_t max_rows) {
    ptrdiff_t blocks = (m + max_rows - 1) / max_rows;
    return m > 0 ? (m + blocks - 1) / blocks : 1;
}

/* Rows of a block of x whose `row_bytes` fit the cache, several tiles of them. */
static ptrdiff_t rows_that_fit(ptrdiff_t m, ptrdiff_t row_bytes) {
    ptrdiff_t max_rows = CACHE_BYTES / row_bytes;
    return even_block(m, max_rows < 4 * MAX_ROWS ? 4 * MAX_ROWS : max_rows);
}

INLINE void store_row(const float *acc, bf16 *y, ptrdiff_t count, ptrdiff_t columns) {
    for (ptrdiff_t c = 0; c < count && c < columns; c += VL) store_bf16(y + c, columns - c, load(acc + c));
}
INLINE void store_tile(const float *acc, bf16 *y, ptrdiff_t ldy, int rows, ptrdiff_t columns) {
    for (int r = 0; r < rows; r++) store_row(acc + r * PANEL, y + r * ldy, PANEL, columns);
}
