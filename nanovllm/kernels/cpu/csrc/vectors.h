/* Vectors of VL floats: loads and stores, conversions of bfloat16 and float16, reductions, transposition, exp.
 * GCC's vector types, with intrinsics where an instruction has no operator. Knows nothing about what the numbers mean.
 */
#pragma once
#include <math.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

#ifndef VL /* floats of a vector */
#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif
#endif

/* Aligned like their elements: loads and stores may be unaligned. */
typedef float vf __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint16_t half_vu __attribute__((vector_size(2 * VL), aligned(2), may_alias));
typedef int16_t vs __attribute__((vector_size(4 * VL), aligned(2), may_alias)); /* of 2 VL int16 */
typedef int16_t half_vs __attribute__((vector_size(2 * VL), aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(2 * VL), aligned(1), may_alias)); /* of 2 VL int8 */
typedef int8_t quarter_vb __attribute__((vector_size(VL), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define X4(x) x, x, x, x
#if VL == 16
#define BROADCAST(x) {X4(x), X4(x), X4(x), X4(x)}
#elif VL == 8
#define BROADCAST(x) {X4(x), X4(x)}
#else
#define BROADCAST(x) {X4(x)}
#endif

INLINE vf broadcast(float x) { return (vf)BROADCAST(x); }
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE vf load_halves(const uint16_t *p) { return (vf) * (const vs *)p; } /* VL pairs of bfloat16 */
INLINE void store(float *p, vf v) { *(vf *)p = v; }
INLINE vf blend(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

#if VL == 16 && defined(__AVX512F__)
#define MAX_MIN(op, sign, a, b) (vf) _mm512_##op##_ps((__m512)a, (__m512)b)
#elif VL == 8 && defined(__AVX2__)
#define MAX_MIN(op, sign, a, b) (vf) _mm256_##op##_ps((__m256)a, (__m256)b)
#else
#define MAX_MIN(op, sign, a, b) blend(a sign b, a, b)
#endif
/* The larger and the smaller of each lane; b if a or b is NaN. */
INLINE vf larger(vf a, vf b) { return MAX_MIN(max, >, a, b); }
INLINE vf smaller(vf a, vf b) { return MAX_MIN(min, <, a, b); }
INLINE vi larger_int(vi a, vi b) {
#if VL == 16 && defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif VL == 8 && defined(__AVX2__)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    vi first = a > b;
    return (a & first) | (b & ~first);
#endif
}

#if (VL == 16 && defined(__AVX512F__)) || (VL == 8 && defined(__FMA__)) || (VL == 4 && defined(__aarch64__))
#define HAVE_FMA 1 /* fma_() rounds once */
#endif
INLINE vf fma_(vf a, vf b, vf c) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif VL == 4 && defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vi lanes(void) {
#if VL == 16
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif VL == 8
    return (vi){0, 1, 2, 3, 4, 5, 6, 7};
#else
    return (vi){0, 1, 2, 3};
#endif
}

/* Return v[from[i]] in lane i; shuffle2() counts the lanes of b after those of a. */
#ifdef __clang__
INLINE vf shuffle2(vf a, vf b, vi from) {
    vf v = {0};
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) v[i] = from[i] < VL ? a[from[i]] : b[from[i] - VL];
    return v;
}
INLINE vf shuffle(vf v, vi from) { return shuffle2(v, v, from); }
#else
INLINE vf shuffle2(vf a, vf b, vi from) { return __builtin_shuffle(a, b, from); }
INLINE vf shuffle(vf v, vi from) { return __builtin_shuffle(v, from); }
#endif

/* Reductions add or compare halves, then halves of these: the same order on every processor with the same VL. */
INLINE vf shuffle_xor(vf v, int n) { return shuffle(v, lanes() ^ n); }
INLINE float sum_of(vf v) {
#pragma GCC unroll 4
    for (int n = VL / 2; n; n /= 2) v += shuffle_xor(v, n);
    return v[0];
}
INLINE float largest_of(vf v) {
#pragma GCC unroll 4
    for (int n = VL / 2; n; n /= 2) v = larger(v, shuffle_xor(v, n));
    return v[0];
}

/* Swap rows[i][j] and rows[j][i]: first in blocks of half the size, then inside each block. */
INLINE void transpose(vf rows[VL]) {
#pragma GCC unroll 4
    for (int n = VL / 2; n; n /= 2) {
        vi back = (lanes() & n) != 0, first = lanes() + ((VL - n) & back), second = lanes() + n + ((VL - n) & back);
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) {
            if (i & n) continue;
            vf a = rows[i], b = rows[i + n];
            rows[i] = shuffle2(a, b, first), rows[i + n] = shuffle2(a, b, second);
        }
    }
}

/* to[16][32][2] = the square from[16][32][2] of a panel, turned: of 32 outputs and pairs of inputs it makes 32 inputs and pairs
 * of outputs. Only `pairs` pairs of inputs are read; the others are zeros. */
INLINE void turn_square(const uint16_t *from, ptrdiff_t pairs, uint16_t *to) {
    vi low = (lanes() >> 1) + (lanes() & 1) * VL, high = low + VL / 2;
    for (int output = 0; output < 32; output += VL)
        for (int pair = 0; pair < 16; pair += VL) {
            vf rows[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) rows[i] = pair + i < pairs ? load_halves(from + (pair + i) * 64 + output * 2) : (vf){0};
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < VL; i += 2) {
                vu a = (vu)rows[i], b = (vu)rows[i + 1];
                vf even = (vf)((a & 0xffff) | b << 16), odd = (vf)(a >> 16 | (b & 0xffff0000));
                float *turned = (float *)(to + (output + i) * 32 + pair * 4);
                store(turned, shuffle2(even, odd, low)), store(turned + VL, shuffle2(even, odd, high));
            }
        }
}

INLINE vf from_bf16(half_vu h) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)((vu)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
INLINE vf from_f16(half_vu h) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif VL == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#elif VL == 4 && defined(__aarch64__)
    return (vf)vcvt_f32_f16((float16x4_t)h);
#else
    /* The bits of h in their places are the number times 2^-112. Infinity and NaN keep an exponent of all ones. */
    vu u = __builtin_convertvector(h, vu), special = (vu)((u & 0x7c00) == 0x7c00) & 0x7f800000;
    return (vf)((vu)((vf)((u & 0x7fff) << 13) * 0x1p112f) | special | (u & 0x8000) << 16);
#endif
}
/* Round to nearest, ties to even. The result for NaN is NaN; other numbers are infinite or within float16's range. */
INLINE half_vu to_f16(vf v) {
    vu sign = ((vu)v >> 16) & 0x8000, size = (vu)v & 0x7fffffff;
    vu normal = ((size + 0xfff + ((size >> 13) & 1)) >> 13) - (112 << 10);
    vu subnormal = (vu)((vf)size + 0.5f) - 0x3f000000; /* 0.5 has float16's last place */
    vi small = (vi)size < 0x38800000, special = (vi)size >= 0x7f800000, nan = (vi)size > 0x7f800000;
    vu bits = (vu)blend(small, (vf)subnormal, (vf)normal);
    bits = (vu)blend(special, (vf)(0x7c00 | ((vu)nan & 0x200)), (vf)bits);
    return __builtin_convertvector(sign | bits, half_vu);
}
/* Round to nearest, ties to even. */
INLINE half_vu to_bf16(vf v) {
#if VL == 16 && defined(__AVX512BF16__)
    return (half_vu)_mm512_cvtneps_pbh((__m512)v);
#elif VL == 4 && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (half_vu)vcvt_bf16_f32((float32x4_t)v);
#else
    vu u = (vu)v;
    u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu nan = (vu)(v != v);
    return __builtin_convertvector((u & ~nan) | (nan & 0x7fc0), half_vu);
#endif
}
INLINE float float_of(bf16 x) { return from_bf16((half_vu){x})[0]; }
INLINE vf round_to_bf16(vf v) { return from_bf16(to_bf16(v)); }

/* Load or store the next VL numbers, or VL pairs, of a row that has `left` numbers more. Missing numbers are read as 0. */
INLINE half_vu load_bits16(const bf16 *p, ptrdiff_t left) {
    if (left >= VL) return *(const half_vu *)p;
    half_vu h = {0};
    memcpy(&h, p, left * sizeof *p);
    return h;
}
INLINE vf load_bf16(const bf16 *p, ptrdiff_t left) { return from_bf16(load_bits16(p, left)); }
INLINE void store_bf16(bf16 *p, ptrdiff_t left, vf v) {
    half_vu h = to_bf16(v);
    if (left >= VL) *(half_vu *)p = h;
    else memcpy(p, &h, left * sizeof *p);
}
INLINE vu load_pairs(const bf16 *p, ptrdiff_t left) {
    if (left >= 2 * VL) return (vu) * (const vs *)p;
    vu pairs = {0};
    memcpy(&pairs, p, left * sizeof *p);
    return pairs;
}

/* to[k/2][32][2] = `count` rows of from[..][k], ld apart, turned in squares of VL rows and VL pairs. Zeros fill the rows up to 32
 * and k up to a multiple of 32. */
INLINE void turn_panel(const bf16 *from, ptrdiff_t ld, ptrdiff_t count, ptrdiff_t k, bf16 *to) {
    for (ptrdiff_t i = 0; i < (k + PANEL - 1) / PANEL * PANEL; i += 2 * VL)
        for (ptrdiff_t first = 0; first < PANEL; first += VL) {
            vf pairs[VL];
            for (ptrdiff_t r = 0; r < VL; r++)
                pairs[r] = first + r < count && i < k ? (vf)load_pairs(from + (first + r) * ld + i, k - i) : (vf){0};
            transpose(pairs);
            for (ptrdiff_t j = 0; j < VL; j++) store((float *)(to + (i + 2 * j) * PANEL + first * 2), pairs[j]);
        }
}
INLINE float sum_of_squares(const bf16 *x, ptrdiff_t n) {
    vf sum = {0};
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = load_bf16(x + i, n - i);
        sum = fma_(v, v, sum);
    }
    return sum_of(sum);
}
INLINE vf load_f32(const float *p, ptrdiff_t left) {
    if (left >= VL) return load(p);
    vf v = {0};
    memcpy(&v, p, left * sizeof *p);
    return v;
}
INLINE void store_f32(float *p, ptrdiff_t left, vf v) {
    if (left >= VL) store(p, v);
    else memcpy(p, &v, left * sizeof *p);
}

/* 1.5 * 2^23: the sum of this and a small number is rounded to an integer, which stands in the sum's last bits. */
#define ROUND_TO_INT 12582912.0f

/* The nearest integers of v; |v| < 2^22. */
INLINE vi nearest(vf v) { return (vi)(v + ROUND_TO_INT) - (vi)broadcast(ROUND_TO_INT); }
/* The nearest integers of v * factor, whose sizes are below 2^22. */
INLINE vi nearest_product(vf v, vf factor) { return (vi)fma_(v, factor, broadcast(ROUND_TO_INT)) - (vi)broadcast(ROUND_TO_INT); }

/* Multiply each `size` of the n numbers of x by the orthogonal Hadamard matrix of that size, a power of two from VL on: its own
 * inverse. No number stands out afterwards, so that rounding them with one scale loses less (QuaRot, arXiv:2404.00456). */
INLINE void hadamard(float *x, ptrdiff_t n, ptrdiff_t size) {
    vf factor = broadcast(1 / sqrtf((float)size));
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = load(x + i) * factor;
#pragma GCC unroll 4
        for (int far = 1; far < VL; far *= 2) v = shuffle_xor(v, far) + (vf)((vi)v ^ (((lanes() & far) != 0) & INT32_MIN));
        store(x + i, v);
    }
    for (ptrdiff_t far = VL; far < size; far *= 2)
        for (ptrdiff_t i = 0; i < n; i += 2 * far)
            for (ptrdiff_t j = i; j < i + far; j += VL) {
                vf a = load(x + j), b = load(x + j + far);
                store(x + j, a + b), store(x + j + far, a - b);
            }
}

/* 2^r for |r| <= 1/2, by the polynomial that fits it best by relative error. */
INLINE vf exp2_small(vf r) {
    vf p = broadcast(1.535336182e-4f);
    p = fma_(p, r, broadcast(1.339887445e-3f));
    p = fma_(p, r, broadcast(9.618437358e-3f));
    p = fma_(p, r, broadcast(5.550332471e-2f));
    p = fma_(p, r, broadcast(2.402264791e-1f));
    p = fma_(p, r, broadcast(6.931472029e-1f));
    return fma_(p, r, broadcast(1.0f));
}
/* 2^r * 2^n for |r| <= 1/2 and an integer n >= -126, given as `shifted` = n + ROUND_TO_INT. */
INLINE vf exp2_split(vf r, vf shifted) { return (vf)((vi)exp2_small(r) + ((vi)shifted << 23)); }
/* exp within 1.5 ulp, 0 below -87. The result for NaN is NaN, so that an error in a row shows. */
INLINE vf exp_(vf x) {
    const float log2e = 1.44269504f;
    vi underflow = x < -87.0f;
    x = smaller(broadcast(88.0f), larger(broadcast(-87.0f), x));
    vf shifted = fma_(x, broadcast(log2e), broadcast(ROUND_TO_INT)), n = shifted - ROUND_TO_INT;
    /* r = x - n log 2, where log 2 has two parts so that the first product is exact even without fused operations. */
    vf r = fma_(n, broadcast(2.12194440e-4f), fma_(n, broadcast(-0.693359375f), x));
    return (vf)((vi)exp2_split(r * log2e, shifted) & ~underflow);
}
/* 2^x within 1.2 ulp for x <= 0, 0 below -126. AVX-512 has instructions for the steps, with the same results. */
INLINE vf exp2_(vf x) {
#if VL == 16 && defined(__AVX512DQ__) && !defined(EMULATED)
    __m512 n = _mm512_roundscale_ps((__m512)x, 0), r = _mm512_reduce_ps((__m512)x, 0);
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(normal, (__m512)exp2_small((vf)r), n);
#else
    vi underflow = x < -126.0f;
    x = larger(broadcast(-126.0f), x);
    vf shifted = x + ROUND_TO_INT;
    return (vf)((vi)exp2_split(x - (shifted - ROUND_TO_INT), shifted) & ~underflow);
#endif
}
/* log(1 + x) for 0 <= x < 2^126 within 2 ulp, by the polynomial of Cephes. The result for NaN is NaN. */
INLINE vf log1p_(vf x) {
    vf u = x + 1.0f, lost = (x - (u - 1.0f)) / u; /* the rest that the sum rounds off, in the logarithm */
    vi exponent = ((vi)u - 0x3f3504f3) >> 23;     /* u = m 2^exponent, where m is at least sqrt(1 / 2) */
    vf m = (vf)((vi)u - (exponent << 23)) - 1.0f, square = m * m, e = __builtin_convertvector(exponent, vf);
    vf p = broadcast(7.0376836292e-2f);
    p = fma_(p, m, broadcast(-1.1514610310e-1f));
    p = fma_(p, m, broadcast(1.1676998740e-1f));
    p = fma_(p, m, broadcast(-1.2420140846e-1f));
    p = fma_(p, m, broadcast(1.4249322787e-1f));
    p = fma_(p, m, broadcast(-1.6668057665e-1f));
    p = fma_(p, m, broadcast(2.0000714765e-1f));
    p = fma_(p, m, broadcast(-2.4999993993e-1f));
    p = fma_(p, m, broadcast(3.3333331174e-1f));
    p = fma_(e, broadcast(-2.12194440e-4f), p * m * square) + lost;
    return fma_(e, broadcast(0.693359375f), fma_(square, broadcast(-0.5f), p) + m);
}
/* log(1 + exp(x)), which is x above 20. The result for NaN is NaN. */
INLINE vf softplus_(vf x) { return blend(x > 20.0f, x, log1p_(exp_(x))); }
/* tanh within 2 ulp: of small numbers by the minimax polynomial of Cephes, else by exp. The result for NaN is NaN. */
INLINE vf tanh_(vf x) {
    vf size = larger(x, -x), square = x * x, e = exp_(size * -2.0f), p = broadcast(-5.70498872745e-3f);
    p = fma_(p, square, broadcast(2.06390887954e-2f));
    p = fma_(p, square, broadcast(-5.37397155531e-2f));
    p = fma_(p, square, broadcast(1.33314422036e-1f));
    p = fma_(p, square, broadcast(-3.33332819422e-1f));
    vf outer = (1.0f - e) / (1.0f + e);
    vf signed_outer = (vf)((vi)outer | ((vi)x & (int32_t)0x80000000));
    return blend(size < 0.625f, fma_(p * square, x, x), signed_outer);
}
/* x times sigmoid(x). */
INLINE vf silu_(vf x) { return x / (exp_(-x) + 1.0f); }
