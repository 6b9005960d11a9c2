/* The sampler's passes over the vocabulary: the largest logit, and maxima and sums of chunks of 128 logits.
 * Logits are bfloat16, sums float32. NaN counts as +inf, so the largest logit tells whether the logits are a distribution: it is
 * finite.
 */
#include "vectors.h"

enum { SEGMENT = 8192 };

/* smaller() returns its second argument if the first is NaN. */
INLINE vf nan_to_inf(vf v) { return smaller(v, broadcast(INFINITY)); }

/* Return the largest of x[n]. */
static float largest_in(const bf16 *x, ptrdiff_t n) {
    vf top = broadcast(-INFINITY);
    ptrdiff_t whole = n / VL * VL, i = 0;
    for (; i < whole; i += VL) top = larger(nan_to_inf(load_bf16(x + i, VL)), top);
    float best = largest_of(top);
    for (; i < n; i++) {
        float v = nan_to_inf(from_bf16((half_vu){x[i]}))[0];
        best = v > best ? v : best;
    }
    return best;
}

/* out[row] = the index of the first of the largest logits, -1 if they are not finite; logits are [rows][n]. largest is
 * [rows][ceil(n / SEGMENT)]: each segment's largest logit. */
void nv_greedy(team *t, const bf16 *logits, float *largest, int64_t *out, ptrdiff_t rows, ptrdiff_t n) {
    ptrdiff_t segments = (n + SEGMENT - 1) / SEGMENT;
    FOR_ITEMS(i, t, rows * segments) {
        ptrdiff_t first = i % segments * SEGMENT;
        largest[i] = largest_in(logits + i / segments * n + first, n - first < SEGMENT ? n - first : SEGMENT);
    }
    FOR_ITEMS(r, t, rows) {
        const float *in = largest + r * segments;
        ptrdiff_t best = 0;
        for (ptrdiff_t i = 1; i < segments; i++) best = in[i] > in[best] ? i : best;
        ptrdiff_t i = best * SEGMENT;
        while (isfinite(in[best]) && from_bf16((half_vu){logits[r * n + i]})[0] != in[best]) i++;
        out[r] = isfinite(in[best]) ? i : -1;
    }
}

/* Below, logits are [rows][chunks][128]. */
enum { CHUNK = 128 };

/* out[chunk] = its largest logit, for the chunks of all rows. */
void nv_chunk_maxima(team *t, const bf16 *logits, float *out, ptrdiff_t chunks) {
    FOR_ITEMS(c, t, chunks) {
        vf top = broadcast(-INFINITY);
        for (int i = 0; i < CHUNK; i += VL) top = larger(top, nan_to_inf(load_bf16(logits + c * CHUNK + i, VL)));
        out[c] = largest_of(top);
    }
}

/* out[row][chunk] = sum of exp((logit - largest[row]) / temperature[row]), without terms below min_p[row]. */
void nv_chunk_sums(team *t, const bf16 *logits, const float *largest, const float *temperatures, const float *min_ps, float *out,
                   ptrdiff_t rows, ptrdiff_t chunks) {
    FOR_ITEMS(c, t, rows * chunks) {
        vf shift = broadcast(largest[c / chunks]), scale = broadcast(temperatures[c / chunks]), sum = {0};
        float min_p = min_ps[c / chunks];
        for (int i = 0; i < CHUNK; i += VL) {
            vf w = exp_((load_bf16(logits + c * CHUNK + i, VL) - shift) / scale);
            sum += blend(w >= min_p, w, (vf){0});
        }
        out[c] = sum_of(sum);
    }
}
