/* Tiles with weights of 8 or 4 bits: see int_weights.h. The including file says which type scales have: it defines FROM_SCALES as
 * from_f16 or from_bf16.
 */
#pragma once
#include "int_weights.h"

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
            : "+x"(*a), "+x"(*b), "=&x"(t), "=&x"(u)
            : "x"(v), "x"(w), "m"(*(const int32_t *)x));
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

/* Load the scales, or what else is in row g, for vector c of columns; a panel has `groups` rows of 32. */
INLINE half_vu load_row(const uint16_t *scales, ptrdiff_t groups, ptrdiff_t g, int c) {
    return *(const half_vu *)(scales + (c / PANEL_VECTORS * groups + g) * PANEL + c % PANEL_VECTORS * VL);
}
INLINE vf load_scales(const uint16_t *scales, ptrdiff_t groups, ptrdiff_t g, int c, int kind) {
    half_vu h = load_row(scales, groups, g, c);
    return kind == FP4 ? from_bf16(h) : FROM_SCALES(h);
}

/* Load the zeros in row g, each in the low half of a lane, to be multiplied as a pair with 0. */
INLINE vi load_zeros(const uint16_t *scales, ptrdiff_t groups, ptrdiff_t g, int c) {
    return (vi)((vu)from_bf16(load_row(scales, groups, g, c)) >> 16);
}

/* a + zeros * x, for zeros as above and |x| < 2^15. */
INLINE vi add_zeros(vi a, vi zeros, int32_t x) {
#if VL == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)a, (__m512i)zeros, _mm512_set1_epi32(x));
#elif VL == 16 && defined(__AVX512BW__)
    return a + (vi)_mm512_madd_epi16((__m512i)zeros, _mm512_set1_epi32(x));
#elif VL == 8 && defined(__AVX2__)
    return a + (vi)_mm256_madd_epi16((__m256i)zeros, _mm256_set1_epi32(x));
#else
    return a + (zeros << 16 >> 16) * x;
#endif
}

/* out += sum * x_scale * w_scale, for the integer sum of a group. */
INLINE void add_scaled(float *out, vi sum, float x_scale, vf w_scale) {
    store(out, fma_(__builtin_convertvector(sum, vf) * x_scale, w_scale, load(out)));
}

/* With AVX-512 and 5 rows or more, prefetch `share` bytes from `ahead` on for each 64 bytes of w. */
typedef struct {
    const uint8_t *ahead;
    ptrdiff_t share;
} prefetch_plan;

/* One part of a tile with weights of 8 bits: acc += x . w. `kind` is a constant where this is inlined. */
INLINE void int8_rows(int kind, int rows, int cols, ptrdiff_t k, ptrdiff_t group, quantized_rows q, int_panel p, prefetch_plan f,
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
            ptrdiff_t scale_rows = rows_of_scales(kind), groups = scale_rows * (k / group);
            vf scale = load_scales(p.scales, groups, scale_rows * g, c, kind);
            vi zeros = {0};
            if (kind == ZEROS) zeros = load_zeros(p.scales, groups, 2 * g + 1, c) << 16 >> 16;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                vi sum = a[r][c];
                if (kind == ZEROS) sum += zeros * q.sums[r * q.groups + g].multiple;
                add_scaled(acc.p + r * acc.ld + c * VL, sum, q.scales[r * q.groups + g], scale);
            }
        }
    }
}

/* a += v . x and b += w . x, where each lane holds four bytes from 0 to 24, and all lanes multiply the four signed bytes at x.
 * Without VNNI a lane of a and b is a pair of int16, which can hold the sum of a group of bytes up to 15: 8 * 2 * 15 * 127 <
 * 2^15. */
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
            : "+x"(*a), "+x"(*b), "=&x"(t), "=&x"(u)
            : "x"(v), "x"(w), "m"(*(const int32_t *)x));
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
INLINE vi fp4_start(const int8_t *x, int inputs, int32_t eightfold) {
#if (VL == 16 && defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || (VL == 8 && defined(__AVX2__))
    vi twelve = (vi)BROADCAST(0x0c0c0c0c), sums = {0}, unused = {0};
    (void)eightfold;
    for (int i = 0; i < inputs; i += 4) multiply_add_fours(&sums, &unused, twelve, twelve, x + i);
    return (vi) - (vs)sums;
#else
    (void)x, (void)inputs;
    return (vi)BROADCAST(-(eightfold / 8 * FP4_OFFSET));
#endif
}

/* With 4 bits, the number of a group of x, of `inputs`, shifted by this to the right is that of the weights' group: a division
 * takes as long as a tenth of a step. Weights that are not `wide` have groups of `inputs`. */
INLINE int group_shift(int wide, ptrdiff_t group, int inputs) { return wide ? __builtin_ctzl(group / inputs) : 0; }

/* One part of a tile with weights of 4 bits: acc += x . w. `kind`, `inputs`, those of a group of x, and `wide` are
 * constants where this is inlined. */
INLINE void int4_rows(int kind, int inputs, int wide, int rows, int cols, ptrdiff_t k, ptrdiff_t group, quantized_rows q,
                      int_panel p, prefetch_plan f, output_rows acc) {
    const int8_t *x = q.ints;
    const uint8_t *w = p.w, *ahead = f.ahead;
    const int shift = group_shift(wide, group, inputs);
    const ptrdiff_t scale_rows = rows_of_scales(kind), groups = scale_rows * (k / inputs >> shift);
    for (ptrdiff_t g = 0; g < k / inputs; g++) {
        vi a[MAX_ROWS][STREAM_COLS];
        zero_sums(rows, cols, a);
        if (kind == FP4)
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                vi start = fp4_start(x + r * q.ld, inputs, q.sums[r * q.groups + g].multiple);
#pragma GCC unroll 8
                for (int c = 0; c < cols; c++) a[r][c] = start;
            }
        for (int i = 0; VL == 16 && rows > 4 && i < inputs; i += 4, ahead += f.share) __builtin_prefetch(ahead, 0, 2);
        for (int i = 0; i < inputs; i += 8, x += 8, w += 4 * PANEL) {
#pragma GCC unroll 4
            for (int c = 0; c < cols; c += 2) {
                const vu *both = (const vu *)(w + c / PANEL_VECTORS * (k * PANEL / 2)) + c % PANEL_VECTORS;
                prefetch_stream(cols, both);
                vi w0 = (vi)(both[0] & 0x0f0f0f0f), w1 = (vi)(both[1] & 0x0f0f0f0f);
                if (kind == FP4) w0 = fp4_lookup(w0), w1 = fp4_lookup(w1);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) multiply_add_fours(&a[r][c], &a[r][c + 1], w0, w1, x + r * q.ld);
                w0 = (vi)(both[0] >> 4 & 0x0f0f0f0f), w1 = (vi)(both[1] >> 4 & 0x0f0f0f0f);
                if (kind == FP4) w0 = fp4_lookup(w0), w1 = fp4_lookup(w1);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) multiply_add_fours(&a[r][c], &a[r][c + 1], w0, w1, x + r * q.ld + 4);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) {
            ptrdiff_t at = scale_rows * (g >> shift);
            vf scale = load_scales(p.scales, groups, at, c, kind), minimum = {0};
            vi zeros = {0};
            if (kind == MINIMUMS) minimum = load_scales(p.scales, groups, at + 1, c, kind);
            if (kind == ZEROS) zeros = load_zeros(p.scales, groups, at + 1, c);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                float *out = acc.p + r * acc.ld + c * VL, x_scale = q.scales[r * q.groups + g];
                group_sum x_sum = q.sums[r * q.groups + g];
                vi sum = pairs_to_int32(a[r][c]);
                if (kind == PLAIN) sum -= x_sum.multiple;
                if (kind == ZEROS) sum = add_zeros(sum, zeros, x_sum.multiple);
                add_scaled(out, sum, x_scale, scale);
                if (kind == MINIMUMS) store(out, fma_(minimum, broadcast(x_sum.scaled), load(out)));
            }
        }
    }
}

/* acc[rows][32] = x[rows][k] . w, or with `add` acc += x . w. `bits`, `kind`, and with 4 bits `inputs`, those of a group of x,
 * and `wide` are constants where this is inlined. */
INLINE void int_tile_of(int bits, int kind, int inputs, int wide, int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x,
                        int_panel panel, output_rows acc, int add) {
    for (int r = 0; r < rows && !add; r++) memset(acc.p + r * acc.ld, 0, PANEL * sizeof *acc.p);
    for (ptrdiff_t i = 0; i < k; i += K_STEP) {
        ptrdiff_t step = k - i < K_STEP ? k - i : K_STEP, x_group = bits == 8 ? i / group : i / inputs;
        ptrdiff_t g = bits == 8 ? x_group : x_group >> group_shift(wide, group, inputs);
        quantized_rows xi = columns_from(x, bits, i, x_group);
        const uint8_t *w = panel.w + i * PANEL * bits / 8, *next = w + k * PANEL * bits / 8;
        const uint16_t *scales = panel.scales + g * PANEL * rows_of_scales(kind);
/* Together the parts of the tile prefetch the panel behind this one. */
#define PREFETCH_INT (prefetch_plan){next + at * step * PANEL * bits / 8 / rows, 2 * PANEL / PARTS(rows)}
#define PART8(R, cols, c)                                                                                                   \
    int8_rows(kind, R, cols, step, group, rows_from(xi, 8, at), (int_panel){w + 2 * (c), scales + (c), kind}, PREFETCH_INT, \
              outputs_from(acc, at, c))
#define PART4(R, cols, c)                                                                                                   \
    int4_rows(kind, inputs, wide, R, cols, step, group, rows_from(xi, 4, at), (int_panel){w + 4 * (c), scales + (c), kind}, \
              PREFETCH_INT, outputs_from(acc, at, c))
        if (bits == 8) FOR_ROWS(rows, PART8)
        else FOR_ROWS(rows, PART4)
    }
}

/* acc[STREAMS][32] = x[k] . w for STREAMS panels; constants as above. */
INLINE void int_streams_of(int bits, int kind, int inputs, int wide, ptrdiff_t k, ptrdiff_t group, quantized_rows x,
                           int_panel panel, float *acc) {
    const prefetch_plan none = {NULL, 0};
    output_rows out = {acc, 0};
    memset(acc, 0, STREAMS * PANEL * sizeof *acc);
    if (bits == 8) int8_rows(kind, 1, STREAM_COLS, k, group, x, panel, none, out);
    else int4_rows(kind, inputs, wide, 1, STREAM_COLS, k, group, x, panel, none, out);
}
