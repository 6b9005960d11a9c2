/* The gated delta rule: a state S [dk][dv] for each value head, which each token first reads with its key and then changes.
 *
 *     S *= decay;  delta = beta (v - k S);  S += k^T delta;  o = q S
 *
 * Of the sums k S and q S before the change, o is decay (q S) + (q . k) delta. So one pass over S changes it by a token and reads
 * it for the next one. Columns do not depend on each other: a tile of them stays in the first-level cache while tokens pass.
 * The order of a column's sums does not depend on the tile, nor on which tokens are computed together.
 */
#include "state.h"

/* Vectors of a tile: NARROW ones stay in the first-level cache, WIDE ones are read from memory in longer pieces. */
enum { NARROW = 2, WIDE = 8, BLOCK_TOKENS = 64 };

/* A block of a row's tokens, for one value head. */
typedef struct {
    ptrdiff_t tokens, dk, width, padded; /* width and padded: dk and dv rounded up to whole vectors */
    float *k, *q;                        /* [tokens][width], of unit length; q is scaled */
    float *decay, *beta, *q_dot_k;       /* [tokens] */
    float *sums;                         /* [2][padded]: k S and q S of the first token */
    const bf16 *v;                       /* [dv], tokens ldv apart */
    bf16 *out;                           /* [dv], tokens ldo apart */
    ptrdiff_t ldv, ldo;
} head_block;

/* Rows of a state's columns, ld apart. */
typedef struct {
    float *rows;
    ptrdiff_t ld;
} columns;

/* out[width] = factor * x / |x| */
static void unit_row(const bf16 *x, ptrdiff_t n, float factor, float *out) {
    vf sum = {0};
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = load_bf16(x + i, n - i);
        sum = fma_(v, v, sum);
    }
    factor /= sqrtf(sum_of(sum) + 1e-6f);
    for (ptrdiff_t i = 0; i < n; i += VL) store(out + i, load_bf16(x + i, n - i) * factor);
}

static float dot(const float *x, const float *y, ptrdiff_t n) {
    vf sum = {0};
    for (ptrdiff_t i = 0; i < n; i += VL) sum = fma_(load(x + i), load(y + i), sum);
    return sum_of(sum);
}

/* The sums k S and q S of a tile. */
typedef struct {
    vf k[WIDE], q[WIDE];
} tile_sums;

enum { READ = 1, CHANGE = 2 };

/* Pass over n vectors of columns, of which the last has `left` columns. CHANGE: store decay * from + k^T delta, of token t - 1, in
 * `to`. READ: return the sums of token t. */
INLINE tile_sums pass(int n, ptrdiff_t left, int work, const head_block *h, ptrdiff_t t, columns from, columns to,
                      const vf *delta) {
    tile_sums sums = {0};
    const float *k = h->k + t * h->width, *q = h->q + t * h->width, *changing = k - h->width;
    vf decay = {0};
    if (work & CHANGE) decay = broadcast(h->decay[t - 1]);
    for (ptrdiff_t i = 0; i < h->dk; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) {
            vf s = load_f32(from.rows + i * from.ld + j * VL, left);
            if (work & CHANGE) {
                s = fma_(broadcast(changing[i]), delta[j], s * decay);
                store_f32(to.rows + i * to.ld + j * VL, left, s);
            }
            if (work & READ) {
                sums.k[j] = fma_(broadcast(k[i]), s, sums.k[j]);
                sums.q[j] = fma_(broadcast(q[i]), s, sums.q[j]);
            }
        }
    }
    return sums;
}

/* Store the sums of a block's first token. */
INLINE void begin_columns(int n, ptrdiff_t left, const head_block *h, ptrdiff_t column, columns from) {
    from.rows += column;
    tile_sums found = pass(n, left, READ, h, 0, from, from, NULL);
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) {
        store(h->sums + column + j * VL, found.k[j]);
        store(h->sums + h->padded + column + j * VL, found.q[j]);
    }
}

/* Let a block's tokens pass n vectors of columns, from `column` on: `left` columns in the last of them. Their state before is in
 * `from`; unless to.rows is NULL, store the state after in `to`. `room` is for the tile; a single token does not use it. */
INLINE void pass_columns(int n, ptrdiff_t left, const head_block *h, ptrdiff_t column, columns from, columns to, float *room) {
    columns cache = {room, n * VL};
    vf delta[WIDE] = {0};
    tile_sums sums;
    from.rows += column;
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) {
        sums.k[j] = load(h->sums + column + j * VL);
        sums.q[j] = load(h->sums + h->padded + column + j * VL);
    }
    for (ptrdiff_t t = 0; t < h->tokens; t++) {
        const bf16 *v = h->v + t * h->ldv + column;
        bf16 *out = h->out + t * h->ldo + column;
        vf decay = broadcast(h->decay[t]);
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) {
            delta[j] = fma_(sums.k[j], -decay, load_bf16(v + j * VL, left)) * h->beta[t];
            store_bf16(out + j * VL, left, fma_(delta[j], broadcast(h->q_dot_k[t]), sums.q[j] * decay));
        }
        if (t + 1 == h->tokens) break;
        if (t) sums = pass(n, VL, READ | CHANGE, h, t + 1, cache, cache, delta);
        else sums = pass(n, left, READ | CHANGE, h, 1, from, cache, delta);
    }
    if (!to.rows) return;
    to.rows += column;
    if (h->tokens == 1) pass(n, left, CHANGE, h, 1, from, to, delta);
    else pass(n, left, CHANGE, h, h->tokens, cache, to, delta);
}

/* Not inlined, so that each has the registers for itself. */
#define ALONE static __attribute__((noinline)) void
#define TILE(name, n, left_in_last)                                                                              \
    ALONE begin_##name(const head_block *h, ptrdiff_t column, ptrdiff_t left, columns from) {                    \
        (void)left, begin_columns(n, left_in_last, h, column, from);                                             \
    }                                                                                                            \
    ALONE pass_##name(const head_block *h, ptrdiff_t column, ptrdiff_t left, columns from, columns to, float *room) { \
        (void)left, pass_columns(n, left_in_last, h, column, from, to, room);                                    \
    }
TILE(wide, WIDE, VL)
TILE(narrow, NARROW, VL)
TILE(last, 1, left < VL ? left : VL)

/* Let a block's tokens pass a state of dv columns. */
static void pass_head(const head_block *h, ptrdiff_t dv, columns from, columns to, float *room) {
    for (ptrdiff_t c = 0, left = dv, n; left > 0; c += n * VL, left -= n * VL) {
        n = left >= WIDE * VL ? WIDE : left >= NARROW * VL ? NARROW : 1;
        (n == WIDE ? begin_wide : n == NARROW ? begin_narrow : begin_last)(h, c, left, from);
    }
    for (ptrdiff_t c = 0, left = dv, n; left > 0; c += n * VL, left -= n * VL) {
        n = h->tokens == 1 && left >= WIDE * VL ? WIDE : left >= NARROW * VL ? NARROW : 1;
        (n == WIDE ? pass_wide : n == NARROW ? pass_narrow : pass_last)(h, c, left, from, to, room);
    }
}

/* What a head's gates and heads are made of. */
typedef struct {
    const bf16 *q, *k, *a, *b; /* of the block's first token */
    ptrdiff_t ld, lda, ldb;    /* from token to token */
    float rate, dt_bias;       /* rate: -exp(a_log) */
} head_inputs;

static void prepare(const head_inputs *in, head_block *h) {
    float scale = 1.0f / sqrtf((float)h->dk);
    for (ptrdiff_t t = 0; t < h->tokens; t++) {
        float *k = h->k + t * h->width, *q = h->q + t * h->width, x = float_of(in->a[t * in->lda]) + in->dt_bias;
        unit_row(in->k + t * in->ld, h->dk, 1.0f, k);
        unit_row(in->q + t * in->ld, h->dk, scale, q);
        h->q_dot_k[t] = dot(q, k, h->width);
        h->decay[t] = expf(in->rate * (x > 20.0f ? x : log1pf(expf(x))));
        h->beta[t] = 1.0f / (1.0f + expf(-float_of(in->b[t * in->ldb])));
    }
}

/* The sizes of a layer. */
typedef struct {
    ptrdiff_t key_heads, value_heads, dk, dv, ld; /* ld: of a token's q, k and v heads */
} delta_sizes;

/* Let the `tokens` tokens of a row pass the state of a value head; it is stored after write_len of them, unless that is 0. */
static void run_head(const delta_sizes *s, head_inputs in, const bf16 *v, bf16 *out, float *state, ptrdiff_t tokens,
                     ptrdiff_t write_len) {
    ptrdiff_t width = (s->dk + VL - 1) / VL * VL, padded = (s->dv + VL - 1) / VL * VL;
    ptrdiff_t most = tokens < BLOCK_TOKENS ? tokens : BLOCK_TOKENS, ldo = s->value_heads * s->dv;
    float k[most * width], q[most * width], decay[most], beta[most], q_dot_k[most], sums[2 * padded];
    float room[s->dk * NARROW * VL] __attribute__((aligned(64))), behind[write_len < tokens ? s->dk * s->dv : 1];
    columns stored = {state, s->dv}, kept = {behind, s->dv}, none = {NULL, 0};
    for (ptrdiff_t t = 0, count; t < tokens; t += count) {
        ptrdiff_t end = t < write_len ? write_len : tokens; /* the state is stored when write_len tokens have passed */
        count = end - t < BLOCK_TOKENS ? end - t : BLOCK_TOKENS;
        head_block h = {count, s->dk, width, padded, k, q, decay, beta, q_dot_k, sums, v + t * s->ld, out + t * ldo, s->ld, ldo};
        prepare(&in, &h);
        columns to = t < write_len ? stored : t + count < tokens ? kept : none;
        pass_head(&h, s->dv, t <= write_len ? stored : kept, to, room);
        in.q += count * s->ld, in.k += count * s->ld, in.a += count * in.lda, in.b += count * in.ldb;
    }
}

/* Compute the gated delta rule of a batch. Row r has the tokens [cu_seqlens[r], cu_seqlens[r + 1]). A token of qkv has key_heads q
 * heads and k heads [dk], then value_heads v heads [dv]; value head h goes with key head h * key_heads / value_heads. Part 1 + h of
 * a state is head h's. decay = exp(-exp(a_log) softplus(a + dt_bias)), beta = sigmoid(b). */
void nv_gated_delta(team *team, const bf16 *qkv, const bf16 *a, ptrdiff_t lda, const bf16 *b, ptrdiff_t ldb, const float *a_log,
                    const float *dt_bias, bf16 *out, uint8_t *pool, ptrdiff_t page_bytes, const int64_t *places,
                    const int32_t *pages, ptrdiff_t num_pages, const int32_t *cu_seqlens, const int32_t *write_lens,
                    ptrdiff_t rows, ptrdiff_t key_heads, ptrdiff_t value_heads, ptrdiff_t dk, ptrdiff_t dv) {
    const state_pages states = {pool, page_bytes, places, pages, num_pages};
    const delta_sizes sizes = {key_heads, value_heads, dk, dv, 2 * key_heads * dk + value_heads * dv};
    FOR_ITEMS(item, team, rows * value_heads) {
        ptrdiff_t row = item / value_heads, h = item % value_heads, first = cu_seqlens[row];
        if (cu_seqlens[row + 1] == first) continue;
        const bf16 *q = qkv + first * sizes.ld + h * key_heads / value_heads * dk, *v = qkv + first * sizes.ld + 2 * key_heads * dk;
        head_inputs in = {q, q + key_heads * dk, a + first * lda + h, b + first * ldb + h, sizes.ld, lda, ldb, -expf(a_log[h]),
                          dt_bias[h]};
        run_head(&sizes, in, v + h * dv, out + (first * value_heads + h) * dv, state_part(&states, row, 1 + h),
                 cu_seqlens[row + 1] - first, write_lens[row]);
    }
}
