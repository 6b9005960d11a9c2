/* Tiles with weights of 8 or 4 bits: see int_weights.h. */
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

/* a += v . x and b += w . x, where each lane holds a pair of int16, and all lanes multiply the pair at x. In assembly for AVX2
 * and Arm, because GCC keeps accumulators in memory, as in tiles_float.h. */
INLINE void multiply_add_pairs(vi *a, vi *b, vs v, vs w, const int16_t *x) {
    int32_t pair;
    memcpy(&pair, x, 4);
#if VL == 16 && defined(__AVX512VNNI__)
    __m512i both = _mm512_set1_epi32(pair);
    *a = (vi)_mm512_dpwssd_epi32((__m512i)*a, (__m512i)v, both), *b = (vi)_mm512_dpwssd_epi32((__m512i)*b, (__m512i)w, both);
#elif VL == 16 && defined(__AVX512BW__)
    __m512i both = _mm512_set1_epi32(pair);
    *a += (vi)_mm512_madd_epi16((__m512i)v, both), *b += (vi)_mm512_madd_epi16((__m512i)w, both);
#elif VL == 4 && defined(__aarch64__)
    int16x8_t even = vuzp1q_s16((int16x8_t)v, (int16x8_t)w), odd = vuzp2q_s16((int16x8_t)v, (int16x8_t)w);
    int16x8_t t; /* in a register whose parts smlal takes */
    __asm__("ldr %s2, %5\n\tsmlal %0.4s, %3.4h, %2.h[0]\n\tsmlal2 %1.4s, %3.8h, %2.h[0]\n\t"
            "smlal %0.4s, %4.4h, %2.h[1]\n\tsmlal2 %1.4s, %4.8h, %2.h[1]"
            : "+w"(*a), "+w"(*b), "=&x"(t)
            : "w"(even), "w"(odd), "m"(*(const int16_t (*)[2])x));
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
    return kind == FP4 ? from_bf16(h) : from_f16(h);
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

/* Let a loop load sums from memory in each of its steps. GCC would keep some of them on the stack, and store them twice. */
#define FORGET_MEMORY() __asm__ volatile("" ::: "memory")

/* What a part of a tile prefetches into the second-level cache: of the lines of 64 bytes from `ahead` on every one whose number
 * is `first` more than a multiple of `parts`. With few rows, or short vectors, only if it is `read_once`. */
typedef struct {
    const uint8_t *ahead;
    int first, parts, read_once;
} prefetch_plan;
INLINE void prefetch_ahead(prefetch_plan *f, int rows, int bytes) {
    if (!f->read_once && (VL < 16 || rows <= 4)) return;
    for (int line = f->first; line < bytes / 64; line += f->parts) __builtin_prefetch(f->ahead + 64 * line, 0, 2);
    f->ahead += bytes;
}

/* A step of a panel as parts of a tile multiply it: widened to int16 or to a byte each, [step/2][32][2] or [step/4][32][4]. With
 * 4 bits, two floats for each scale: the scale, and its product with -ROUND_TO_INT. The first part of a tile writes this while it
 * computes, in the time in which its products let the stores pass; the others read it. */
typedef struct {
    uint8_t w[K_STEP * PANEL * 2];
    float scales[K_STEP / 16 * 2 * PANEL];
} wide_step __attribute__((aligned(64)));

/* READ weights as they are stored, READ and WRITE a wide_step meanwhile, or read only that. */
enum { FROM_PANEL, TO_WIDE, FROM_WIDE };

/* One part of a tile with weights of 8 bits: acc += x . w for packed x. `kind` and `from` are constants where this is inlined. */
INLINE void int8_rows(int kind, int from, int rows, int cols, ptrdiff_t k, ptrdiff_t group, quantized_rows q, int_panel p,
                      uint8_t *wide, prefetch_plan f, output_rows acc) {
    const int16_t *x = q.ints;
    const ptrdiff_t scale_rows = rows_of_scales(kind), groups = scale_rows * (k / group);
    for (ptrdiff_t g = 0, i = 0; g < k / group; g++, q.scales += rows, q.sums += rows) {
        vi a[MAX_ROWS][STREAM_COLS];
        FORGET_MEMORY();
        zero_sums(rows, cols, a);
        for (ptrdiff_t end = i + group; i < end; i += 8) {
            prefetch_ahead(&f, rows, 8 * PANEL);
#pragma GCC unroll 4
            for (int j = 0; j < 8; j += 2)
#pragma GCC unroll 4
                for (int c = 0; c < cols; c += 2) {
                    ptrdiff_t at = (i + j) * PANEL + c % PANEL_VECTORS * 2 * VL;
                    const uint8_t *narrow = p.w + c / PANEL_VECTORS * (k * PANEL) + at;
                    vs *both = (vs *)(wide + 2 * at), w0, w1;
                    if (c % 4 == 0) prefetch_stream(cols, narrow);
                    if (from == FROM_WIDE) w0 = both[0], w1 = both[1];
                    else w0 = widen_int8(narrow), w1 = widen_int8(narrow + 2 * VL);
                    if (from == TO_WIDE) both[0] = w0, both[1] = w1;
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++) multiply_add_pairs(&a[r][c], &a[r][c + 1], w0, w1, x + (i + j) * rows + 2 * r);
                }
        }
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) {
            vf scale = load_scales(p.scales, groups, scale_rows * g, c, kind);
            vi zeros = {0};
            if (kind == ZEROS) zeros = load_zeros(p.scales, groups, 2 * g + 1, c) << 16 >> 16;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                vi sum = a[r][c];
                float *out = acc.p + r * acc.ld + c * VL;
                if (kind == ZEROS) sum += zeros * q.sums[r];
                vf scaled = __builtin_convertvector(sum, vf) * q.scales[r];
                store(out, fma_(scaled, scale, load(out)));
            }
        }
    }
}

INLINE void int8_part(int kind, int from, int rows, int cols, ptrdiff_t k, ptrdiff_t group, quantized_rows q, int_panel p,
                      uint8_t *wide, prefetch_plan f, output_rows acc) {
#define INT8_ROWS(from) int8_rows(kind, from, rows, cols, k, group, q, p, wide, f, acc)
    if (rows <= 2) INT8_ROWS(FROM_PANEL);
    else if (from == FROM_WIDE) INT8_ROWS(FROM_WIDE);
    else INT8_ROWS(TO_WIDE);
}

/* a += v . x and b += w . x, where each lane holds four bytes, and without VNNI bytes from 0 to 24, and all lanes multiply the
 * four signed bytes at x. Without VNNI a lane of a and b is a pair of int16, which can hold the sum of a group of bytes up to 15:
 * 8 * 2 * 15 * 127 < 2^15. */
INLINE void multiply_add_fours(vi *a, vi *b, vi v, vi w, const int8_t *x) {
#if VL == 16 && defined(HAVE_DPBUSD)
    __m512i four = _mm512_set1_epi32(*(const int32_t *)x);
    *a = (vi)_mm512_dpbusd_epi32((__m512i)*a, (__m512i)v, four), *b = (vi)_mm512_dpbusd_epi32((__m512i)*b, (__m512i)w, four);
#elif VL == 16 && defined(__AVX512BW__)
    __m512i four = _mm512_set1_epi32(*(const int32_t *)x);
    *a = (vi)_mm512_add_epi16((__m512i)*a, _mm512_maddubs_epi16((__m512i)v, four));
    *b = (vi)_mm512_add_epi16((__m512i)*b, _mm512_maddubs_epi16((__m512i)w, four));
#elif VL == 8 && defined(HAVE_DPBUSD)
    vi t;
    __asm__("vpbroadcastd %5, %2\n\t%{vex%} vpdpbusd %2, %3, %0\n\t%{vex%} vpdpbusd %2, %4, %1"
            : "+x"(*a), "+x"(*b), "=&x"(t)
            : "x"(v), "x"(w), "m"(*(const int32_t *)x));
#elif VL == 4 && defined(__ARM_FEATURE_DOTPROD)
    vi t;
    __asm__("ldr %s2, %5\n\tsdot %0.4s, %3.16b, %2.4b[0]\n\tsdot %1.4s, %4.16b, %2.4b[0]"
            : "+w"(*a), "+w"(*b), "=&w"(t)
            : "w"(v), "w"(w), "m"(*(const int8_t (*)[4])x));
#elif VL == 8 && defined(__AVX2__)
    vi t, u;
    __asm__("vpbroadcastd %6, %2\n\tvpmaddubsw %2, %4, %3\n\tvpmaddubsw %2, %5, %2\n\tvpaddw %3, %0, %0\n\tvpaddw %2, %1, %1"
            : "+x"(*a), "+x"(*b), "=&x"(t), "=&x"(u)
            : "x"(v), "x"(w), "m"(*(const int32_t *)x));
#else
    for (int i = 0; i < 4; i++) *a += (v >> (8 * i) & 31) * x[i], *b += (w >> (8 * i) & 31) * x[i];
#endif
}

#ifdef INT16_PAIRS
/* Add the int16 pair in each lane of a. */
INLINE vi pairs_to_int32(vi a) {
#if VL == 16
    return (vi)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1));
#else
    return (vi)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1));
#endif
}
#endif

/* The bytes of fp4_table for four numbers from 0 to 15 in each lane. */
INLINE vi fp4_lookup(vi from) {
#if VL == 16 && defined(__AVX512BW__)
    return (vi)_mm512_shuffle_epi8(_mm512_loadu_si512(fp4_table), (__m512i)from);
#elif VL == 8 && defined(__AVX2__)
    return (vi)_mm256_shuffle_epi8(_mm256_load_si256((const __m256i *)fp4_table), (__m256i)from);
#elif VL == 4 && defined(__aarch64__)
    return (vi)vqtbl1q_u8(vld1q_u8(fp4_table), (uint8x16_t)from);
#else
    uint8_t bytes[4 * VL];
    memcpy(bytes, &from, sizeof bytes);
    for (int i = 0; i < 4 * VL; i++) bytes[i] = fp4_table[bytes[i]];
    memcpy(&from, bytes, sizeof bytes);
    return from;
#endif
}

#ifdef INT16_PAIRS
/* Where the pairs of int16 of FP4 products begin: at -12 times the sum of a group of x. So pairs, which wrap around meanwhile,
 * end as the sum of products with -12 to 12: 8 * 2 * 12 * 127 < 2^15. x is the first input of a row in a part of `rows`. */
INLINE vi fp4_start(const int8_t *x, int rows, int inputs) {
    vi twelve = (vi)BROADCAST(0x0c0c0c0c), sums = {0}, unused = {0};
    for (int i = 0; i < inputs; i += 4) multiply_add_fours(&sums, &unused, twelve, twelve, x + i * rows);
    return (vi) - (vs)sums;
}
#endif

/* With 4 bits, the number of a group of x, of `inputs`, shifted by this to the right is that of the weights' group: a division
 * takes as long as a tenth of a step. */
INLINE int group_shift(ptrdiff_t group, int inputs) { return __builtin_ctzl(group / inputs); }

/* Where the integer sum of a group begins: see group_sums(). */
INLINE vi sum_begin(int kind, group_sum sum) {
    return kind == PLAIN || kind == FP4 ? (vi)BROADCAST(sum) : (vi)broadcast(ROUND_TO_INT);
}

/* The product of an integer sum, given as the bits of ROUND_TO_INT plus it, with a scale of 16 bits. It is rounded once, with and
 * without a fused multiply-add: `less`, the scale times -ROUND_TO_INT, has few digits. With AMX an infinite scale gives what it
 * gives in tiles. */
INLINE vf scaled_sum(vi sum, vf scale, vf less) {
#if defined(HAVE_FMA) && !defined(HAVE_AMX)
    return fma_((vf)sum, scale, less);
#else
    (void)less;
    return ((vf)sum - ROUND_TO_INT) * scale;
#endif
}

/* With 4 bits, parts have up to FEW_ROWS rows: with AVX-512 a part's sums, in integers and in floats, then fit the registers. */
enum { FEW_ROWS = 6 };

/* One part of a tile with weights of 4 bits: acc += x . w for packed x. `kind`, `inputs`, those of a group of x, and `from`
 * are constants where this is inlined. */
INLINE void int4_rows(int kind, int inputs, int from, int rows, int cols, ptrdiff_t k, ptrdiff_t group, quantized_rows q,
                      int_panel p, uint8_t *bytes, float *floats, prefetch_plan f, output_rows acc) {
    const int in_registers = VL == 16, shift = group_shift(group, inputs);
    const ptrdiff_t scale_rows = rows_of_scales(kind), groups = scale_rows * (k / inputs >> shift);
    const int8_t *x = q.ints;
    const uint8_t *w = p.w;
    vf sums[FEW_ROWS][STREAM_COLS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols && in_registers; c++) sums[r][c] = load(acc.p + r * acc.ld + c * VL);
    for (ptrdiff_t g = 0; g < k / inputs; g++, q.scales += rows, q.sums += rows) {
        vi a[FEW_ROWS][STREAM_COLS];
        if (!in_registers) FORGET_MEMORY();
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
#ifdef INT16_PAIRS
            vi start = kind == FP4 ? fp4_start(x + 4 * r, rows, inputs) : (vi){0};
#else
            vi start = sum_begin(kind, q.sums[r]);
#endif
#pragma GCC unroll 8
            for (int c = 0; c < cols; c++) a[r][c] = start;
        }
        prefetch_ahead(&f, rows, inputs * PANEL / 2);
        for (int i = 0; i < inputs; i += 8, x += 8 * rows, w += 4 * PANEL, bytes += 8 * PANEL) {
#pragma GCC unroll 4
            for (int c = 0; c < cols; c += 2) {
                const vu *both = (const vu *)(w + c / PANEL_VECTORS * (k * PANEL / 2)) + c % PANEL_VECTORS;
                vi *wide_at = (vi *)bytes + c;
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++, wide_at += PANEL_VECTORS) {
                    vi w0, w1;
                    if (from == FROM_WIDE) w0 = wide_at[0], w1 = wide_at[1];
                    else {
                        if (!half) prefetch_stream(cols, both);
                        w0 = (vi)(both[0] >> 4 * half & 0x0f0f0f0f), w1 = (vi)(both[1] >> 4 * half & 0x0f0f0f0f);
                        if (kind == FP4) w0 = fp4_lookup(w0), w1 = fp4_lookup(w1);
                        if (from == TO_WIDE) wide_at[0] = w0, wide_at[1] = w1;
                    }
#pragma GCC unroll 6
                    for (int r = 0; r < rows; r++) multiply_add_fours(&a[r][c], &a[r][c + 1], w0, w1, x + 4 * (half * rows + r));
                }
            }
        }
        float *wide_scales = floats + g * 2 * PANEL;
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) {
            ptrdiff_t at = scale_rows * (g >> shift);
            vf scale, less, minimum = {0};
            vi zeros = {0};
            if (from == FROM_WIDE) scale = load(wide_scales + c * VL), less = load(wide_scales + PANEL + c * VL);
            else scale = load_scales(p.scales, groups, at, c, kind), less = scale * -ROUND_TO_INT;
            if (from == TO_WIDE) store(wide_scales + c * VL, scale), store(wide_scales + PANEL + c * VL, less);
            if (kind == MINIMUMS) minimum = load_scales(p.scales, groups, at + 1, c, kind);
            if (kind == ZEROS) zeros = load_zeros(p.scales, groups, at + 1, c);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                float *out = acc.p + r * acc.ld + c * VL;
                vi sum = a[r][c];
#ifdef INT16_PAIRS
                sum = pairs_to_int32(sum) + sum_begin(kind, q.sums[r]);
#endif
                if (kind == ZEROS) sum = add_zeros(sum, zeros, q.sums[r]);
                vf product = scaled_sum(sum, scale, less);
                if (kind == MINIMUMS) product = fma_(minimum, broadcast(((const float *)q.sums)[r]), product);
                if (in_registers) sums[r][c] = fma_(product, broadcast(q.scales[r]), sums[r][c]);
                else store(out, fma_(product, broadcast(q.scales[r]), load(out)));
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols && in_registers; c++) store(acc.p + r * acc.ld + c * VL, sums[r][c]);
}

INLINE void int4_part(int kind, int inputs, int from, int rows, int cols, ptrdiff_t k, ptrdiff_t group, quantized_rows q,
                      int_panel p, uint8_t *bytes, float *floats, prefetch_plan f, output_rows acc) {
#define INT4_ROWS(from) int4_rows(kind, inputs, from, rows, cols, k, group, q, p, bytes, floats, f, acc)
    if (rows <= 2) INT4_ROWS(FROM_PANEL);
    else if (from == FROM_WIDE) INT4_ROWS(FROM_WIDE);
    else INT4_ROWS(TO_WIDE);
}

#ifdef HAVE_AMX
/* A single row with weights of 8 bits in fours: acc += x . w. A lane multiplies half of a four, so two lanes have a sum. */
INLINE void int8_row(int kind, int cols, ptrdiff_t k, ptrdiff_t group, quantized_rows q, int_panel p, float *acc) {
    typedef int64_t fours __attribute__((vector_size(4 * VL)));
    const int16_t *x = q.ints;
    const ptrdiff_t scale_rows = rows_of_scales(kind), groups = scale_rows * (k / group);
    for (ptrdiff_t g = 0, i = 0; g < k / group; g++) {
        vi a[STREAM_COLS][2] = {0};
        for (ptrdiff_t end = i + group; i < end; i += 4) {
            int64_t four;
            memcpy(&four, x + i, sizeof four);
            __m512i both = (__m512i)((fours){0} + four);
#pragma GCC unroll 8
            for (int c = 0; c < cols; c++) {
                const uint8_t *w = p.w + c / PANEL_VECTORS * (k * PANEL) + i * PANEL + c % PANEL_VECTORS * 4 * VL;
                prefetch_stream(cols, w);
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
                    a[c][half] = (vi)_mm512_dpwssd_epi32((__m512i)a[c][half], (__m512i)widen_int8(w + half * 2 * VL), both);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) {
            vf scale = load_scales(p.scales, groups, scale_rows * g, c, kind);
            vi even = (vi)shuffle2((vf)a[c][0], (vf)a[c][1], 2 * lanes());
            vi sum = even + (vi)shuffle2((vf)a[c][0], (vf)a[c][1], 2 * lanes() + 1);
            if (kind == ZEROS) sum += (load_zeros(p.scales, groups, 2 * g + 1, c) << 16 >> 16) * q.sums[g];
            store(acc + c * VL, fma_(__builtin_convertvector(sum, vf) * q.scales[g], scale, load(acc + c * VL)));
        }
    }
}
#endif

#ifdef HAVE_DPBUSD
/* One part of a tile with W8A8: acc += x . w for packed x. */
INLINE void w8a8_rows(int rows, int cols, ptrdiff_t k, ptrdiff_t group, quantized_rows q, int_panel p, prefetch_plan f,
                      output_rows acc) {
    const int8_t *x = q.ints;
    const vi flip = (vi)(vu)BROADCAST((128 ^ stored_flip(W8A8)) * 0x01010101u); /* 128 is added to what is multiplied */
    for (ptrdiff_t g = 0, i = 0; g < k / group; g++, q.scales += rows, q.sums += rows) {
        vi a[MAX_ROWS][STREAM_COLS];
        FORGET_MEMORY();
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < cols; c++) a[r][c] = (vi)BROADCAST(q.sums[r]);
        for (ptrdiff_t end = i + group; i < end; i += 16) {
            prefetch_ahead(&f, rows, 16 * PANEL);
#pragma GCC unroll 4
            for (int j = 0; j < 16; j += 4, x += 4 * rows)
#pragma GCC unroll 4
                for (int c = 0; c < cols; c += 2) {
                    const vi *w = (const vi *)(p.w + c / PANEL_VECTORS * (k * PANEL) + (i + j) * PANEL) + c % PANEL_VECTORS;
                    prefetch_stream(cols, w), prefetch_stream(cols, w + 1);
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++)
                        multiply_add_fours(&a[r][c], &a[r][c + 1], w[0] ^ flip, w[1] ^ flip, x + 4 * r);
                }
        }
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) {
            vf scale = load_scales(p.scales, k / group, g, c, W8A8), less = scale * -ROUND_TO_INT;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                float *out = acc.p + r * acc.ld + c * VL;
                store(out, fma_(scaled_sum(a[r][c], scale, less), broadcast(q.scales[r]), load(out)));
            }
        }
    }
}
#endif

/* As FOR_ROWS, in parts of up to FEW_ROWS. */
#define FEW_PARTS(rows) (((rows) + FEW_ROWS - 1) / FEW_ROWS)
#define FOR_FEW_ROWS(rows, part)                                                                           \
    for (int parts = FEW_PARTS(rows), at = 0, n; parts; parts--, at += n) {                                \
        n = ((rows) - at + parts - 1) / parts;                                                             \
        switch (n) { CASE(1, part) CASE(2, part) CASE(3, part) CASE(4, part) CASE(5, part) CASE(6, part) } \
    }

/* acc[cols * VL] += x[k] . w for a single row: `cols` vectors of columns, STREAM_COLS or those of a panel; constants as above. */
INLINE void int_row_of(int bits, int kind, int inputs, int cols, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel,
                       prefetch_plan ahead, float *acc) {
    output_rows out = {acc, 0};
    if (bits == 4) int4_rows(kind, inputs, FROM_PANEL, 1, cols, k, group, x, panel, NULL, NULL, ahead, out);
#ifdef HAVE_DPBUSD
    else if (kind == W8A8) w8a8_rows(1, cols, k, group, x, panel, ahead, out);
#endif
#ifdef HAVE_AMX
    else int8_row(kind, cols, k, group, x, panel, acc);
#else
    else int8_rows(kind, FROM_PANEL, 1, cols, k, group, x, panel, NULL, ahead, out);
#endif
}

INLINE void clear_outputs(int rows, output_rows acc) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < PANEL; c += VL) store(acc.p + r * acc.ld + c, (vf){0});
}

#ifdef HAVE_AMX
#include "int_tiles_amx.h"
#else
/* acc[rows][32] = x[rows][k] . w, or with `add` acc += x . w, for packed x. `bits`, `kind`, with 4 bits `inputs`, those of a
 * group of x, and whether `ahead` is NULL are constants where this is inlined. It is what to prefetch meanwhile in place of the
 * panel behind this one. */
INLINE void int_tile_of(int bits, int kind, int inputs, int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel,
                        const uint8_t *ahead, output_rows acc, int add) {
    const ptrdiff_t bytes = input_bytes(bits, kind);
    wide_step widened;
    if (!add) clear_outputs(rows, acc);
    for (ptrdiff_t i = 0; i < k; i += K_STEP) {
        ptrdiff_t step = k - i < K_STEP ? k - i : K_STEP, x_group = bits == 8 ? i / group : i / inputs;
        ptrdiff_t g = bits == 8 ? x_group : x_group >> group_shift(group, inputs);
        const uint8_t *w = panel.w + i * PANEL * bits / 8;
        const uint8_t *next = ahead ? ahead + i * PANEL * bits / 8 : w + k * PANEL * bits / 8;
        const uint16_t *scales = panel.scales + g * PANEL * rows_of_scales(kind);
/* Together the parts of a tile prefetch the panel behind this one. */
#define FROM(R) (at ? FROM_WIDE : TO_WIDE)
#define ROWS(R) inputs_at(part_from(x, bytes, at), bytes, i *R, x_group *R)
#define PART8(R, cols, c)                                                                                                      \
    int8_part(kind, FROM(R), R, cols, step, group, ROWS(R), (int_panel){w + 2 * (c), scales + (c), kind}, widened.w + 4 * (c), \
              (prefetch_plan){next, PARTS(rows) - parts, PARTS(rows), ahead != NULL}, outputs_from(acc, at, c))
#define PART4(R, cols, c)                                                                                         \
    int4_part(kind, inputs, FROM(R), R, cols, step, group, ROWS(R), (int_panel){w + 4 * (c), scales + (c), kind}, \
              widened.w + 4 * (c), widened.scales + (c),                                                          \
              (prefetch_plan){next, FEW_PARTS(rows) - parts, FEW_PARTS(rows), ahead != NULL}, outputs_from(acc, at, c))
#define PART_W8A8(R, cols, c)                                                              \
    w8a8_rows(R, cols, step, group, ROWS(R), (int_panel){w + 4 * (c), scales + (c), kind}, \
              (prefetch_plan){next, PARTS(rows) - parts, PARTS(rows), ahead != NULL}, outputs_from(acc, at, c))
        if (bits == 4) FOR_FEW_ROWS(rows, PART4)
#ifdef HAVE_DPBUSD
        else if (kind == W8A8) FOR_ROWS(rows, PART_W8A8)
#endif
        else FOR_ROWS(rows, PART8)
    }
}
#endif
