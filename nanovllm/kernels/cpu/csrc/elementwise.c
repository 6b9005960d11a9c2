/* The operations of a layer between its linears: norms, activations, factors, and copies of rows. */
#include "activations.h"
#include "norm.h"

enum { CHUNK = 512 };

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

/* residual += multiplier * x, unless x is NULL; out = rmsnorm(residual), unless out is NULL. Rows have n numbers; those of
 * residual and of out are ldr and ldo apart. out may be residual. */
void nv_add_rms_norm(team *t, const bf16 *x, bf16 *residual, ptrdiff_t ldr, const bf16 *weight, bf16 *out, ptrdiff_t ldo,
                     token_count rows, ptrdiff_t n, float eps, ptrdiff_t kind, float multiplier) {
    FOR_ITEMS(r, t, rows) {
        add_row(x ? x + r * n : NULL, residual + r * ldr, n, multiplier);
        if (out) norm_row(residual + r * ldr, weight, out + r * ldo, n, eps, kind);
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

/* Return activation(gate) * x. The activated gate is rounded to bfloat16 before the product, as torch does, but not that of
 * SwiGLU. */
INLINE vf round_and_gate(int activation, vf gate, vf x) {
    if (activation == SWIGLU_OAI) return swiglu_oai_(gate, x);
    return round_to_bf16(activate(activation, gate)) * x;
}

/* Numbers `first` to `end` of a row. */
INLINE void gated_row(int activation, const bf16 *gate, ptrdiff_t group, const bf16 *x, bf16 *out, ptrdiff_t first,
                      ptrdiff_t end) {
    for (ptrdiff_t i = first, next; i < end; i = next) {
        next = group == 1 || end < i / group * group + group ? end : i / group * group + group;
        vf one = broadcast(float_of(gate[i / group]));
        for (ptrdiff_t j = i; j < next; j += VL) {
            vf g = group == 1 ? load_bf16(gate + j, next - j) : one, v = x ? load_bf16(x + j, next - j) : broadcast(1.0f);
            store_bf16(out + j, next - j, round_and_gate(activation, g, v));
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
    if (number) factor = float_of(*number);
    FOR_ITEMS(r, t, rows) multiply_row(x + r * ldx, n, factor);
}

/* y[y_rows[r]] = x[x_rows[r]], rows of n numbers that are ldx and ldy apart. If x_rows or y_rows is NULL, the row is r. */
void nv_copy_rows(team *t, const bf16 *x, ptrdiff_t ldx, const int64_t *x_rows, bf16 *y, ptrdiff_t ldy, const int64_t *y_rows,
                  token_count rows, ptrdiff_t n) {
    FOR_ITEMS(r, t, rows) memcpy(y + (y_rows ? y_rows[r] : r) * ldy, x + (x_rows ? x_rows[r] : r) * ldx, n * sizeof *x);
}
