/* RMSNorm of a row, by the kinds of torch_math.py, and LayerNorm of a row. */
#pragma once
#include "vectors.h"

/* NORM_ROUNDED: round, then multiply by the weight. NORM_WIDE: multiply by the weight, then round. NORM_CENTRED: by weight + 1.
 */
enum { NORM_ROUNDED, NORM_WIDE, NORM_CENTRED };

INLINE void multiply_row(bf16 *x, ptrdiff_t n, float factor) {
    for (ptrdiff_t i = 0; i < n; i += VL) store_bf16(x + i, n - i, load_bf16(x + i, n - i) * factor);
}

/* out = rmsnorm(x), rows of n numbers. weight may be NULL, and out may be x. */
static void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, ptrdiff_t n, float eps, ptrdiff_t kind) {
    float scale = 1.0f / sqrtf(sum_of_squares(x, n) / n + eps);
    vf offset = broadcast(kind == NORM_CENTRED ? 1.0f : 0.0f);
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = load_bf16(x + i, n - i) * scale;
        if (weight && kind == NORM_ROUNDED) v = round_to_bf16(v) * load_bf16(weight + i, n - i);
        else if (weight) v *= load_bf16(weight + i, n - i) + offset;
        store_bf16(out + i, n - i, v);
    }
}

/* out = layernorm(x), rows of n numbers: the mean, then the mean square of the differences from it. bias may be NULL. */
static void layer_norm_row(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *out, ptrdiff_t n, float eps) {
    vf sum = {0}, squares = {0};
    for (ptrdiff_t i = 0; i < n; i += VL) sum += load_bf16(x + i, n - i);
    float mean = sum_of(sum) / n;
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = blend(lanes() < (int32_t)(n - i < VL ? n - i : VL), load_bf16(x + i, n - i) - mean, (vf){0});
        squares = fma_(v, v, squares);
    }
    float scale = 1.0f / sqrtf(sum_of(squares) / n + eps);
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = (load_bf16(x + i, n - i) - mean) * scale * load_bf16(weight + i, n - i);
        if (bias) v += load_bf16(bias + i, n - i);
        store_bf16(out + i, n - i, v);
    }
}
