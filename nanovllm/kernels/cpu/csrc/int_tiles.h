/* Tiles with weights of 8 or 4 bits. A weight is scale * integer, where `group` inputs of an output share a scale of 16 bits, whose
 * type the including file gives: it defines FROM_SCALES as from_f16 or from_bf16. Inputs are quantised too, with a float32 scale
 * for each row and group. So a group's products are integers, and their sum is exact.
 *
 * k is a multiple of group, and group divides K_STEP, except that a single step (k <= K_STEP) may have any multiple of 32.
 * 8 bits: inputs have 16 bits; packed weights are [ceil(n/32)][k/2][32][2] int8.
 * 4 bits: inputs have 8 bits, group is 32; packed weights are [ceil(n/32)][k/8][32][4] bytes. Of eight inputs, byte b holds weight
 *         b in its low half and weight b + 4 in its high half, and 8 is added to each. (llama.cpp's Q4_0 rounds in the same way.)
 *         With minimums a weight is scale * (integer + 8) + minimum, as in llama.cpp's Q4_1.
 *         FP4 weights are scale * twice the number of E2M1 that the 4 bits stand for; their scales are powers of two in bfloat16.
 * Scales of weights: [ceil(n/32)][k/group][32]; with minimums [ceil(n/32)][k/group][2][32], scales first.
 */
#pragma once
#include "tiles.h"

enum { INT4_GROUP = 32 };
enum { PLAIN, MINIMUMS, FP4 }; /* the kinds of weights with 4 bits; weights with 8 bits are PLAIN */

/* Rows of 32 scales for each panel and group. */
INLINE ptrdiff_t rows_of_scales(ptrdiff_t kind) { return kind == MINIMUMS ? 2 : 1; }

/* Twice the numbers of E2M1, plus 12 so that none is negative. */
#define FP4_TABLE 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
enum { FP4_OFFSET = 12 };
static const uint8_t fp4_table[64] __attribute__((aligned(64))) = {X4(FP4_TABLE)};

/* Bytes of a quantised input, for weights of `bits`. */
INLINE ptrdiff_t input_bytes(int bits) { return bits == 8 ? 2 : 1; }

/* Where in its panel the weight of input i and column c is: the byte, and with 4 bits the shift in it. */
INLINE ptrdiff_t offset8(ptrdiff_t i, ptrdiff_t c) { return (i / 2 * PANEL + c) * 2 + i % 2; }
INLINE ptrdiff_t offset4(ptrdiff_t i, ptrdiff_t c) { return (i / 8 * PANEL + c) * 4 + i % 4; }
INLINE int shift4(ptrdiff_t i) { return i % 8 < 4 ? 0 : 4; }

/* Load 2 VL int8 as int16. */
INLINE vs widen_int8(const uint8_t *w) {
#if VL == 8 && defined(__AVX2__)
    return (vs)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
#elif VL == 16 && defined(__AVX512BW__)
    return (vs)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w));
#else
    return __builtin_convertvector(*(const vb *)w, vs);
#endif
}

/* a += v . x and b += w . x, where each lane holds a pair of int16, and all lanes multiply the pair at x. In assembly for AVX2,
 * because GCC keeps accumulators in memory, as in tiles_float.h. */
INLINE void multiply_add_pairs(vi *a, vi *b, vs v, vs w, const int16_t *x) {
    int32_t pair;
    memcpy(&pair, x, 4);
#if VL == 16 && defined(__AVX512VNNI__)
    __m512i both = _mm512_set1_epi32(pair);
    *a = (vi)_mm512_dpwssd_epi32((__m512i)*a, (__m512i)v, both), *b = (vi)_mm512_dpwssd_epi32((__m512i)*b, (__m512i)w, both);
#elif VL == 16 && defined(__AVX512BW__)
    __m512i both = _mm512_set1_epi32(pair);
    *a += (vi)_mm512_madd_epi16((__m512i)v, both), *b += (vi)_mm512_madd_epi16((__m512i)w, both);
#elif VL == 8 && defined(__AVX2__)
    vi t, u;
    __asm__("vpbroadcastd %6, %2\n\tvpmaddwd %4, %2, %3\n\tvpmaddwd %5, %2, %2\n\tvpaddd %3, %0, %0\n\tvpaddd %2, %1, %1"
            : "+x"(*a), "+x"(*b), "=&x"(t), "=&x"(u) : "x"(v), "x"(w), "m"(*(const int32_t *)x));
#else
    int32_t even = x[0], odd = x[1];
    *a += ((vi)v << 16 >> 16) * even + ((vi)v >> 16) * odd;
    *b += ((vi)w << 16 >> 16) * even + ((vi)w >> 16) * odd;
#endif
}

INLINE void zero_sums(int rows, int cols, vi a[MAX_ROWS][STREAM_COLS]) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) a[r][c] = (vi){0};
}

/* Load the scales of row g for vector c of columns; a panel has `groups` rows of 32. */
INLINE vf load_scales(const uint16_t *scales, ptrdiff_t groups, ptrdiff_t g, int c, int kind) {
    half_vu h = *(const half_vu *)(scales + (c / PANEL_VECTORS * groups + g) * PANEL + c % PANEL_VECTORS * VL);
    return kind == FP4 ? from_bf16(h) : FROM_SCALES(h);
}

/* out += sum * x_scale * w_scale, for the integer sum of a group. */
INLINE void add_scaled(float *out, vi sum, float x_scale, vf w_scale) {
    store(out, fma_(__builtin_convertvector(sum, vf) * x_scale, w_scale, load(out)));
}

/* Two multiples of the sum of a row's group, for weights of 4 bits: by 8, because 8 is added to each of those weights; and by the
 * row's scale, for the weights' minimums. */
typedef struct {
    int32_t eightfold;
    float scaled;
} group_sum;

/* Quantised inputs: rows of int16 or int8, ld apart, and a scale and a sum for each row and group. */
typedef struct {
    void *ints;
    float *scales;
    group_sum *sums;
    ptrdiff_t ld, groups;
} quantized_rows;

/* Return the part of x from `row` on, or from input i on, where group g begins. `bits` are those of the weights. */
INLINE quantized_rows rows_from(quantized_rows x, int bits, ptrdiff_t row) {
    ptrdiff_t g = row * x.groups;
    return (quantized_rows){(char *)x.ints + row * x.ld * input_bytes(bits), x.scales + g, x.sums + g, x.ld, x.groups};
}
INLINE quantized_rows columns_from(quantized_rows x, int bits, ptrdiff_t i, ptrdiff_t g) {
    return (quantized_rows){(char *)x.ints + i * input_bytes(bits), x.scales + g, x.sums + g, x.ld, x.groups};
}

/* The bytes and the scales of a panel, from some column on, and the kind of its weights. */
typedef struct {
    const uint8_t *w;
    const uint16_t *scales;
    int kind;
} int_panel;

/* With AVX-512 and 5 rows or more, prefetch `share` bytes from `ahead` on for each 64 bytes of w. */
typedef struct {
    const uint8_t *ahead;
    ptrdiff_t share;
} prefetch_plan;

/* One part of a tile with weights of 8 bits: acc += x . w. */
INLINE void int8_rows(int rows, int cols, ptrdiff_t k, ptrdiff_t group, quantized_rows q, int_panel p, prefetch_plan f,
                      output_rows acc) {
    const int16_t *x = q.ints;
    const uint8_t *w = p.w, *ahead = f.ahead;
    for (ptrdiff_t g = 0, i = 0; g < k / group; g++) {
        vi a[MAX_ROWS][STREAM_COLS];
        zero_sums(rows, cols, a);
        for (ptrdiff_t end = i + group; i < end; i += 8, w += 8 * PANEL, ahead += 4 * f.share)
#pragma GCC unroll 4
            for (int j = 0; j < 8; j += 2) {
                if (VL == 16 && rows > 4) __builtin_prefetch(ahead + j / 2 * f.share, 0, 2);
#pragma GCC unroll 4
                for (int c = 0; c < cols; c += 2) {
                    const uint8_t *at = w + c / PANEL_VECTORS * (k * PANEL) + j * PANEL + c % PANEL_VECTORS * 2 * VL;
                    if (c % 4 == 0) prefetch_stream(cols, at);
                    vs w0 = widen_int8(at), w1 = widen_int8(at + 2 * VL);
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++) multiply_add_pairs(&a[r][c], &a[r][c + 1], w0, w1, x + r * q.ld + i + j);
                }
            }
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) {
            vf scale = load_scales(p.scales, k / group, g, c, PLAIN);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) add_scaled(acc.p + r * acc.ld + c * VL, a[r][c], q.scales[r * q.groups + g], scale);
        }
    }
}

/* a += v . x and b += w . x, where each lane holds four bytes from 0 to 24, and all lanes multiply the four signed bytes at x.
 * Without VNNI a lane of a and b is a pair of int16, which can hold the sum of a group of bytes up to 15: 8 * 2 * 15 * 127 < 2^15. */
INLINE void multiply_add_fours(vi *a, vi *b, vi v, vi w, const int8_t *x) {
#if VL == 16 && defined(__AVX512VNNI__)
    __m512i four = _mm512_set1_epi32(*(const int32_t *)x);
    *a = (vi)_mm512_dpbusd_epi32((__m512i)*a, (__m512i)v, four), *b = (vi)_mm512_dpbusd_epi32((__m512i)*b, (__m512i)w, four);
#elif VL == 16 && defined(__AVX512BW__)
    __m512i four = _mm512_set1_epi32(*(const int32_t *)x);
    *a = (vi)_mm512_add_epi16((__m512i)*a, _mm512_maddubs_epi16((__m512i)v, four));
    *b = (vi)_mm512_add_epi16((__m512i)*b, _mm512_maddubs_epi16((__m512i)w, four));
#elif VL == 8 && defined(__AVX2__)
    vi t, u;
    __asm__("vpbroadcastd %6, %2\n\tvpmaddubsw %2, %4, %3\n\tvpmaddubsw %2, %5, %2\n\tvpaddw %3, %0, %0\n\tvpaddw %2, %1, %1"
            : "+x"(*a), "+x"(*b), "=&x"(t), "=&x"(u) : "x"(v), "x"(w), "m"(*(const int32_t *)x));
#else
    for (int i = 0; i < 4; i++) *a += (v >> (8 * i) & 31) * x[i], *b += (w >> (8 * i) & 31) * x[i];
#endif
}

/* Without VNNI, add the int16 pair in each lane of a. */
INLINE vi pairs_to_int32(vi a) {
#if VL == 16 && defined(__AVX512BW__) && !defined(__AVX512VNNI__)
    return (vi)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1));
#elif VL == 8 && defined(__AVX2__)
    return (vi)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1));
#else
    return a;
#endif
}

/* The bytes of fp4_table for four numbers from 0 to 15 in each lane. */
INLINE vi fp4_lookup(vi from) {
#if VL == 16 && defined(__AVX512BW__)
    return (vi)_mm512_shuffle_epi8(_mm512_loadu_si512(fp4_table), (__m512i)from);
#elif VL == 8 && defined(__AVX2__)
    return (vi)_mm256_shuffle_epi8(_mm256_load_si256((const __m256i *)fp4_table), (__m256i)from);
#else
    uint8_t bytes[4 * VL];
    memcpy(bytes, &from, sizeof bytes);
    for (int i = 0; i < 4 * VL; i++) bytes[i] = fp4_table[bytes[i]];
    memcpy(&from, bytes, sizeof bytes);
    return from;
#endif
}

/* -12 times the sum of a group of x, where the sum of FP4 products begins. So pairs of int16, which wrap around meanwhile, end as
 * the sum of products with -12 to 12: 8 * 2 * 12 * 127 < 2^15. */
INLINE vi fp4_start(const int8_t *x, int32_t eightfold) {
#if (VL == 16 && defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || (VL == 8 && defined(__AVX2__))
    vi twelve = (vi)BROADCAST(0x0c0c0c0c), sums = {0}, unused = {0};
    (void)eightfold;
    for (int i = 0; i < INT4_GROUP; i += 4) multiply_add_fours(&sums, &unused, twelve, twelve, x + i);
    return (vi)-(vs)sums;
#else
    (void)x;
    return (vi)BROADCAST(-(eightfold / 8 * FP4_OFFSET));
#endif
}

/* One part of a tile with weights of 4 bits: acc += x . w. p.kind is a constant where this is inlined. */
INLINE void int4_rows(int rows, int cols, ptrdiff_t k, quantized_rows q, int_panel p, prefetch_plan f, output_rows acc) {
    const int8_t *x = q.ints;
    const uint8_t *w = p.w, *ahead = f.ahead;
    for (ptrdiff_t g = 0; g < k / INT4_GROUP; g++) {
        vi a[MAX_ROWS][STREAM_COLS];
        zero_sums(rows, cols, a);
        if (p.kind == FP4)
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                vi start = fp4_start(x + r * q.ld, q.sums[r * q.groups + g].eightfold);
#pragma GCC unroll 8
                for (int c = 0; c < cols; c++) a[r][c] = start;
            }
        for (int i = 0; i < INT4_GROUP; i += 8, x += 8, w += 4 * PANEL, ahead += 2 * f.share) {
            if (VL == 16 && rows > 4) __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + f.share, 0, 2);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c += 2) {
                const vu *both = (const vu *)(w + c / PANEL_VECTORS * (k * PANEL / 2)) + c % PANEL_VECTORS;
                prefetch_stream(cols, both);
                vi w0 = (vi)(both[0] & 0x0f0f0f0f), w1 = (vi)(both[1] & 0x0f0f0f0f);
                if (p.kind == FP4) w0 = fp4_lookup(w0), w1 = fp4_lookup(w1);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) multiply_add_fours(&a[r][c], &a[r][c + 1], w0, w1, x + r * q.ld);
                w0 = (vi)(both[0] >> 4 & 0x0f0f0f0f), w1 = (vi)(both[1] >> 4 & 0x0f0f0f0f);
                if (p.kind == FP4) w0 = fp4_lookup(w0), w1 = fp4_lookup(w1);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) multiply_add_fours(&a[r][c], &a[r][c + 1], w0, w1, x + r * q.ld + 4);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) {
            ptrdiff_t scale_rows = rows_of_scales(p.kind), groups = scale_rows * (k / INT4_GROUP);
            vf scale = load_scales(p.scales, groups, scale_rows * g, c, p.kind), minimum = {0};
            if (p.kind == MINIMUMS) minimum = load_scales(p.scales, groups, 2 * g + 1, c, p.kind);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                float *out = acc.p + r * acc.ld + c * VL, x_scale = q.scales[r * q.groups + g];
                group_sum x_sum = q.sums[r * q.groups + g];
                vi sum = pairs_to_int32(a[r][c]);
                add_scaled(out, p.kind == PLAIN ? (vi)(sum - x_sum.eightfold) : sum, x_scale, scale);
                if (p.kind == MINIMUMS) store(out, fma_(minimum, broadcast(x_sum.scaled), load(out)));
            }
        }
    }
}

/* acc[rows][32] = x[rows][k] . w, or with `add` acc += x . w. Not inlined: inside a parallel region GCC 12 keeps the accumulators
 * in memory. */
static __attribute__((noinline)) void int_tile(int bits, int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel,
                                               output_rows acc, int add) {
    for (int r = 0; r < rows && !add; r++) memset(acc.p + r * acc.ld, 0, PANEL * sizeof *acc.p);
    for (ptrdiff_t i = 0; i < k; i += K_STEP) {
        ptrdiff_t step = k - i < K_STEP ? k - i : K_STEP, g = i / group;
        quantized_rows xi = columns_from(x, bits, i, g);
        const uint8_t *w = panel.w + i * PANEL * bits / 8, *next = w + k * PANEL * bits / 8;
        const uint16_t *scales = panel.scales + g * PANEL * rows_of_scales(panel.kind);
/* Together the parts of the tile prefetch the panel behind this one. */
#define PREFETCH_INT (prefetch_plan){next + at * step * PANEL * bits / 8 / rows, 2 * PANEL / PARTS(rows)}
#define PART8(R, cols, c)                                                                                       \
    int8_rows(R, cols, step, group, rows_from(xi, 8, at), (int_panel){w + 2 * (c), scales + (c), 0}, PREFETCH_INT, \
              outputs_from(acc, at, c))
#define PART4_WITH(kind, R, cols, c)                                                                           \
    int4_rows(R, cols, step, rows_from(xi, 4, at), (int_panel){w + 4 * (c), scales + (c), kind}, PREFETCH_INT, \
              outputs_from(acc, at, c))
#define PART4(R, cols, c) PART4_WITH(PLAIN, R, cols, c)
#define PART4_MINIMUMS(R, cols, c) PART4_WITH(MINIMUMS, R, cols, c)
#define PART4_FP4(R, cols, c) PART4_WITH(FP4, R, cols, c)
        if (bits == 8) FOR_ROWS(rows, PART8)
        else if (panel.kind == MINIMUMS) FOR_ROWS(rows, PART4_MINIMUMS)
        else if (panel.kind == FP4) FOR_ROWS(rows, PART4_FP4)
        else FOR_ROWS(rows, PART4)
    }
}

/* acc[STREAMS][32] = x[k] . w for STREAMS panels, one behind the other in memory; see tile_streams(). */
static __attribute__((noinline)) void int_streams(int bits, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel,
                                                  float *acc) {
    const prefetch_plan none = {NULL, 0};
    output_rows out = {acc, 0};
    memset(acc, 0, STREAMS * PANEL * sizeof *acc);
    if (bits == 8) int8_rows(1, STREAM_COLS, k, group, x, panel, none, out);
    else if (panel.kind == MINIMUMS) int4_rows(1, STREAM_COLS, k, x, (int_panel){panel.w, panel.scales, MINIMUMS}, none, out);
    else if (panel.kind == FP4) int4_rows(1, STREAM_COLS, k, x, (int_panel){panel.w, panel.scales, FP4}, none, out);
    else int4_rows(1, STREAM_COLS, k, x, (int_panel){panel.w, panel.scales, PLAIN}, none, out);
}

/* Load VL numbers of x from i on: bfloat16 if `bytes` is 2, float32 if it is 4. */
INLINE vf load_any(const void *x, int bytes, ptrdiff_t i) {
    return bytes == 4 ? load((const float *)x + i) : load_bf16((const bf16 *)x + i, VL);
}

/* Quantise a row of x, whose numbers have `bytes`, into `row` of q, for weights of `bits`: x = scale * integer. */
INLINE void quantize_row(const void *x, int bytes, const quantized_rows *q, ptrdiff_t row, ptrdiff_t group, int bits) {
    const float limit = bits == 8 ? 32767.0f : 127.0f;
    for (ptrdiff_t g = 0; g < q->groups; g++) {
        vf top = {0};
        for (ptrdiff_t i = 0; i < group; i += VL) {
            vf v = load_any(x, bytes, g * group + i);
            top = larger(top, larger(v, -v));
        }
        float largest = largest_of(top), inverse = largest > 0 ? limit / largest : 0;
        q->scales[row * q->groups + g] = largest / limit;
        vi sum = {0};
        for (ptrdiff_t i = 0; i < group; i += VL) {
            vi v = nearest(load_any(x, bytes, g * group + i) * inverse);
            sum += v;
            if (bits == 8) *(half_vs *)((int16_t *)q->ints + row * q->ld + g * group + i) = __builtin_convertvector(v, half_vs);
            else *(quarter_vb *)((int8_t *)q->ints + row * q->ld + g * group + i) = __builtin_convertvector(v, quarter_vb);
        }
        int32_t total = 0;
        for (int i = 0; i < VL; i++) total += sum[i];
        q->sums[row * q->groups + g] = (group_sum){8 * total, total * q->scales[row * q->groups + g]};
    }
}
