/* The operations of a layer between its linears: norms, activations, factors, and copies of rows. */
#include "norm.h"

/* sum += multiplier * x, rows of n numbers, unless x is NULL. Unless the multiplier is 1, the product is rounded before the sum.
 */
static void add_row(const bf16 *x, bf16 *sum, ptrdiff_t n, float multiplier) {
    if (!x) return;
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = load_bf16(x + i, n - i);
        if (multiplier != 1.0f) v = round_to_bf16(v * multiplier);
        store_bf16(sum + i, n - i, load_bf16(sum + i, n - i) + v);
    }
}

/* residual += multiplier * x, unless x is NULL; out = rmsnorm(residual), unless out is NULL. Rows have n numbers. */
void nv_add_rms_norm(team *t, const bf16 *x, bf16 *residual, const bf16 *weight, bf16 *out, token_count rows, ptrdiff_t n,
                     float eps, ptrdiff_t kind, float multiplier) {
    FOR_ITEMS(r, t, rows) {
        add_row(x ? x + r * n : NULL, residual + r * n, n, multiplier);
        if (out) norm_row(residual + r * n, weight, out + r * n, n, eps, kind);
    }
}

/* residual += x, unless x is NULL; out = layernorm(residual). Rows have n numbers; bias may be NULL. */
void nv_add_layer_norm(team *t, const bf16 *x, bf16 *residual, const bf16 *weight, const bf16 *bias, bf16 *out, token_count rows,
                       ptrdiff_t n, float eps) {
    FOR_ITEMS(r, t, rows) {
        add_row(x ? x + r * n : NULL, residual + r * n, n, 1.0f);
        layer_norm_row(residual + r * n, weight, bias, out + r * n, n, eps);
    }
}

/* out = rmsnorm(x), rows of n numbers that are ldo and ldx apart. out may be x. */
void nv_rms_norm(team *t, const bf16 *x, ptrdiff_t ldx, const bf16 *weight, bf16 *out, ptrdiff_t ldo, token_count rows,
                 ptrdiff_t n, float eps, ptrdiff_t kind) {
    FOR_ITEMS(r, t, rows) norm_row(x + r * ldx, weight, out + r * ldo, n, eps, kind);
}

enum { SILU, GELU_TANH, SIGMOID, SWIGLU_OAI, IDENTITY, GELU, RELU, RELU2, SOFTPLUS, CHUNK = 512 };

/* x times the normal distribution Phi(x), with a relative error below 1e-5. Phi(-size) is erfc(z) / 2, z = size /
 * sqrt(2), and erfc(z) is t exp(p(t) - z^2), t = 1 / (1 + z / 2). The polynomial p is a Chebyshev fit for z from 0 to 14. */
INLINE vf gelu_(vf x) {
    vf size = larger(-x, x), t = 1.0f / fma_(size, broadcast(0.353553391f), broadcast(1.0f)), p = broadcast(-0.19184048f);
    p = fma_(p, t, broadcast(0.76851281f));
    p = fma_(p, t, broadcast(-1.03015518f));
    p = fma_(p, t, broadcast(0.37635739f));
    p = fma_(p, t, broadcast(-0.05336222f));
    p = fma_(p, t, broadcast(0.39794404f));
    p = fma_(p, t, broadcast(0.99798345f));
    p = fma_(p, t, broadcast(-1.26544062f));
    vf tail = exp_(fma_(size * size, broadcast(-0.5f), p)) * t * 0.5f;
    return x * blend(x > 0.0f, 1.0f - tail, tail);
}

/* Return activation(x). GELU by tanh is x / 2 (1 + tanh(u)), which is x / (1 + exp(-2 u)). */
INLINE vf activate(int activation, vf x) {
    switch (activation) {
    case SILU: return silu_(x);
    case GELU_TANH: return x / (exp_(x * fma_(x * x, broadcast(-0.0713548163f), broadcast(-1.59576912f))) + 1.0f);
    case SIGMOID: return 1.0f / (exp_(-x) + 1.0f);
    case GELU: return gelu_(x);
    case RELU: return larger(broadcast(0.0f), x);
    case RELU2: x = larger(broadcast(0.0f), x); return x * x;
    case SOFTPLUS: return softplus_(x);
    default: return x;
    }
}

/* Return activation(gate) * x. The activated gate is rounded to bfloat16 before the product, as torch does. SwiGLU of gpt-oss
 * clamps both, adds 1 to x, and rounds only the product. */
INLINE vf gated(int activation, vf gate, vf x) {
    if (activation != SWIGLU_OAI) return round_to_bf16(activate(activation, gate)) * x;
    vf bounded = smaller(broadcast(7.0f), gate), up = smaller(broadcast(7.0f), larger(broadcast(-7.0f), x));
    return bounded / (exp_(bounded * -1.702f) + 1.0f) * (up + 1.0f);
}

/* Numbers `first` to `end` of a row. */
INLINE void gated_row(int activation, const bf16 *gate, ptrdiff_t group, const bf16 *x, bf16 *out, ptrdiff_t first,
                      ptrdiff_t end) {
    for (ptrdiff_t i = first, next; i < end; i = next) {
        next = group == 1 || end < i / group * group + group ? end : i / group * group + group;
        vf one = broadcast(from_bf16((half_vu){gate[i / group]})[0]);
        for (ptrdiff_t j = i; j < next; j += VL) {
            vf g = group == 1 ? load_bf16(gate + j, next - j) : one, v = x ? load_bf16(x + j, next - j) : broadcast(1.0f);
            store_bf16(out + j, next - j, gated(activation, g, v));
        }
    }
}

/* out = activation(gate) * x, rows of n numbers that are ldo, ldg and ldx apart. out may be gate or x. A number of gate is for
 * `group` numbers of x. Without x, NULL, out = activation(gate). */
void nv_mul_act(team *t, const bf16 *gate, ptrdiff_t ldg, ptrdiff_t group, const bf16 *x, ptrdiff_t ldx, bf16 *out, ptrdiff_t ldo,
                token_count rows, ptrdiff_t n, ptrdiff_t activation) {
    ptrdiff_t chunks = (n + CHUNK - 1) / CHUNK;
    FOR_ITEMS(item, t, rows * chunks) {
        ptrdiff_t r = item / chunks, i = item % chunks * CHUNK, end = n - i < CHUNK ? n : i + CHUNK;
#define GATED(a) \
    case a: gated_row(a, gate + r * ldg, group, x ? x + r * ldx : NULL, out + r * ldo, i, end); break;
        switch (activation) {
            GATED(SILU)
            GATED(GELU_TANH) GATED(SIGMOID) GATED(SWIGLU_OAI) GATED(IDENTITY) GATED(GELU) GATED(RELU) GATED(RELU2) GATED(SOFTPLUS)
        }
    }
}

/* x *= factor, or, unless `number` is NULL, x *= *number. Rows of n numbers are ldx apart. */
void nv_scale(team *t, bf16 *x, ptrdiff_t ldx, const bf16 *number, token_count rows, ptrdiff_t n, float factor) {
    if (number) factor = from_bf16((half_vu){*number})[0];
    FOR_ITEMS(r, t, rows)
        for (ptrdiff_t i = 0; i < n; i += VL) store_bf16(x + r * ldx + i, n - i, load_bf16(x + r * ldx + i, n - i) * factor);
}

/* y[y_rows[r]] = x[x_rows[r]], rows of n numbers that are ldx and ldy apart. If x_rows or y_rows is NULL, the row is r. */
void nv_copy_rows(team *t, const bf16 *x, ptrdiff_t ldx, const int64_t *x_rows, bf16 *y, ptrdiff_t ldy, const int64_t *y_rows,
                  token_count rows, ptrdiff_t n) {
    FOR_ITEMS(r, t, rows) memcpy(y + (y_rows ? y_rows[r] : r) * ldy, x + (x_rows ? x_rows[r] : r) * ldx, n * sizeof *x);
}
