/* Layers whose rows have a state that each token changes: the causal convolution, the gated delta rule, and the norm behind it.
 * A row's tokens pass one after another, in a prompt and in a decode step by the same operations, so that the result does not
 * depend on how a sequence is cut into steps, bit for bit.
 */
#include "norm.h"
#include "state.h"

enum { CHANNELS = 256 /* of an item; a multiple of VL */, TOKENS = 4 /* convolved together */ };

/* Set the n numbers of each token of a batch: row r has the tokens [cu_seqlens[r], cu_seqlens[r + 1]) of out. Those of a token
 * come from row sources[token] of x, or, if that is negative, from row -1 - sources[token] of the log. Unless kept[token] is -1,
 * row kept[token] of the log takes them. A row's tokens come one after another, and share no row of the log with other rows. */
void nv_extend(team *team, const bf16 *x, ptrdiff_t ldx, bf16 *log, ptrdiff_t ldl, bf16 *out, const int64_t *sources,
               const int64_t *kept, const int32_t *cu_seqlens, row_count rows, ptrdiff_t n) {
    ptrdiff_t blocks = (n + CHANNELS - 1) / CHANNELS;
    FOR_ITEMS(item, team, rows * blocks) {
        ptrdiff_t row = item / blocks, c = item % blocks * CHANNELS;
        size_t bytes = (n - c < CHANNELS ? n - c : CHANNELS) * sizeof *x;
        for (ptrdiff_t t = cu_seqlens[row]; t < cu_seqlens[row + 1]; t++) {
            int64_t source = sources[t];
            const bf16 *from = (source < 0 ? log + (-1 - source) * ldl : x + source * ldx) + c;
            memcpy(out + t * n + c, from, bytes);
            if (kept[t] >= 0) memcpy(log + kept[t] * ldl + c, from, bytes);
        }
    }
}

/* A convolution of some channels. */
typedef struct {
    ptrdiff_t taps, channels;
    const float *weights; /* [taps][CHANNELS] */
    const bf16 *bias;
    ptrdiff_t silu;
} convolution;

/* weights[j][i] = weight[i][j], and 0 behind the channels. */
static void load_taps(const bf16 *weight, ptrdiff_t taps, ptrdiff_t channels, float *weights) {
    ptrdiff_t c = 0;
    for (; taps == 4 && c + VL <= channels; c += VL) {
        vf begin = load_halves(weight + 4 * c), end = load_halves(weight + 4 * c + 2 * VL);
        vu first = (vu)shuffle2(begin, end, lanes() * 2), second = (vu)shuffle2(begin, end, lanes() * 2 + 1);
        store(weights + c, (vf)(first << 16));
        store(weights + CHANNELS + c, (vf)(first & 0xffff0000));
        store(weights + 2 * CHANNELS + c, (vf)(second << 16));
        store(weights + 3 * CHANNELS + c, (vf)(second & 0xffff0000));
    }
    for (; c % VL || c < channels; c++)
        for (ptrdiff_t j = 0; j < taps; j++) weights[j * CHANNELS + c] = c < channels ? float_of(weight[c * taps + j]) : 0.0f;
}

INLINE void convolve_with(ptrdiff_t taps, ptrdiff_t tokens, const convolution *conv, const bf16 *const *inputs, bf16 *out,
                          ptrdiff_t ldo) {
    for (ptrdiff_t c = 0; c < conv->channels; c += VL) {
        ptrdiff_t left = conv->channels - c;
        vf sums[TOKENS];
#pragma GCC unroll 4
        for (ptrdiff_t t = 0; t < tokens; t++) sums[t] = load_bf16(inputs[t] + c, left) * load(conv->weights + c);
        for (ptrdiff_t j = 1; j < taps; j++)
#pragma GCC unroll 4
            for (ptrdiff_t t = 0; t < tokens; t++)
                sums[t] = fma_(load_bf16(inputs[t + j] + c, left), load(conv->weights + j * CHANNELS + c), sums[t]);
#pragma GCC unroll 4
        for (ptrdiff_t t = 0; t < tokens; t++) {
            if (conv->bias) sums[t] += load_bf16(conv->bias + c, left);
            store_bf16(out + t * ldo + c, left, conv->silu ? silu_(sums[t]) : sums[t]);
        }
    }
}

/* Convolve `tokens` tokens, TOKENS or 1: out = the sum of the products of taps and inputs, plus the bias, then SiLU. inputs[t +
 * j] are those of token t and tap j. The result is rounded once. */
static void convolve(const convolution *conv, ptrdiff_t tokens, const bf16 *const *inputs, bf16 *out, ptrdiff_t ldo) {
    if (conv->taps == 4 && tokens == TOKENS) convolve_with(4, TOKENS, conv, inputs, out, ldo); /* unrolled */
    else if (conv->taps == 4) convolve_with(4, 1, conv, inputs, out, ldo);
    else if (tokens == TOKENS) convolve_with(conv->taps, TOKENS, conv, inputs, out, ldo);
    else convolve_with(conv->taps, 1, conv, inputs, out, ldo);
}

/* Convolve each channel of x, rows of n numbers that are ldx apart, with the taps of weight[n][taps], oldest first. Part 0 of a
 * state is [taps - 1][n]: the inputs before the row's first token. bias may be NULL. */
void nv_causal_conv(team *team, const bf16 *x, ptrdiff_t ldx, const bf16 *weight, const bf16 *bias, bf16 *out, uint8_t *pool,
                    ptrdiff_t page_bytes, const int64_t *places, const int32_t *pages, ptrdiff_t num_pages,
                    const int32_t *cu_seqlens, const int32_t *write_lens, row_count rows, ptrdiff_t n, ptrdiff_t taps,
                    ptrdiff_t silu) {
    const state_pages states = {pool, page_bytes, places, pages, num_pages};
    ptrdiff_t blocks = (n + CHANNELS - 1) / CHANNELS, kept = taps - 1;
    FOR_ITEMS(item, team, rows * blocks) {
        ptrdiff_t row = item / blocks, c = item % blocks * CHANNELS, first = cu_seqlens[row];
        ptrdiff_t tokens = cu_seqlens[row + 1] - first, channels = n - c < CHANNELS ? n - c : CHANNELS;
        bf16 *state = (bf16 *)state_part(&states, row, 0) + c;
        const bf16 *inputs = x + first * ldx + c, *window[taps + TOKENS];
        float weights[taps * CHANNELS];
        const convolution conv = {taps, channels, weights, bias ? bias + c : NULL, silu};
        load_taps(weight + c * taps, taps, channels, weights);
#define INPUT(i) ((i) < 0 ? state + (kept + (i)) * n : inputs + (i) * ldx)
        for (ptrdiff_t t = 0, count; t < tokens; t += count) {
            count = tokens - t < TOKENS ? 1 : TOKENS;
            for (ptrdiff_t j = 0; j < kept + count; j++) window[j] = INPUT(t - kept + j);
            convolve(&conv, count, window, out + (first + t) * n + c, n);
        }
        for (ptrdiff_t j = 0; write_lens[row] && j < kept; j++) { /* an input that stays is read before its row is written */
            memcpy(state + j * n, INPUT(write_lens[row] - kept + j), channels * sizeof *state);
        }
#undef INPUT
    }
}

enum { SILU_AFTER, SIGMOID_AFTER, SILU_BEFORE };

/* out = round(weight * round(x / rms(x))) * silu(gate), for each head of n numbers; SIGMOID_AFTER: weight * x / rms(x) *
 * sigmoid(gate), rounded once; SILU_BEFORE: weight * round(y / rms(y)), y = x * silu(gate). Tokens are ldx and ldg apart. The
 * weights of heads are ldw apart: 0, if all have the same. */
void nv_gated_rms_norm(team *t, const bf16 *x, ptrdiff_t ldx, const bf16 *gate, ptrdiff_t ldg, const bf16 *weight, ptrdiff_t ldw,
                       bf16 *out, token_count tokens, ptrdiff_t heads, ptrdiff_t n, float eps, ptrdiff_t kind) {
    FOR_ITEMS(item, t, tokens * heads) {
        const bf16 *head = x + item / heads * ldx + item % heads * n, *g = gate + item / heads * ldg + item % heads * n;
        const bf16 *w = weight + item % heads * ldw;
        vf sum = {0};
        for (ptrdiff_t i = 0; i < n; i += VL) {
            vf y = load_bf16(head + i, n - i);
            if (kind == SILU_BEFORE) y *= silu_(load_bf16(g + i, n - i));
            sum = fma_(y, y, sum);
        }
        float scale = 1.0f / sqrtf(sum_of(sum) / n + eps);
        for (ptrdiff_t i = 0; i < n; i += VL) {
            vf y = load_bf16(head + i, n - i), gates = load_bf16(g + i, n - i), weights = load_bf16(w + i, n - i);
            if (kind == SILU_BEFORE) y *= silu_(gates);
            y = kind == SIGMOID_AFTER ? y * scale * weights / (exp_(-gates) + 1.0f) : round_to_bf16(y * scale) * weights;
            if (kind == SILU_AFTER) y = round_to_bf16(y) * silu_(gates);
            store_bf16(out + item * n + i, n - i, y);
        }
    }
}
