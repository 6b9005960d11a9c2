/* The gated delta rule: a state S [dk][dv] for each value head, which each token first reads with its key and then changes.
 *
 *     S *= decay;  delta = beta (v - k S);  S += k^T delta;  o = q S
 *
 * Of the sums k S and q S before the change, o is decay (q S) + (q . k) delta. So one pass over S changes it by a token and reads
 * it for the next one. Columns do not depend on each other: a tile of them stays in the first-level cache while tokens pass.
 * The order of a column's sums does not depend on the tile, nor on which tokens are computed together.
 *
 * Decay is applied late. The matrix in memory times a number, its scale, is S; a token multiplies the scale instead of the
 * matrix, and adds k^T delta / scale to it. When the scale gets small, the matrix is multiplied by it, and it is 1 again. Scales
 * are a part of the state: what a token computes depends on the state before it, and on nothing else. A scale of 0, of new
 * states, means 1.
 *
 * Kimi Delta Attention has a decay for each row of S, which no scale can stand for. There a token reads with k and q times the
 * decays, and its change multiplies the rows by them.
 */
#include "state.h"

/* Vectors of a tile: NARROW ones stay in the first-level cache, WIDE ones are read from memory in longer pieces. */
enum { NARROW = 2, WIDE = 8, BLOCK_TOKENS = 64 /* a multiple of VL */ };
#define LEAST_SCALE 0x1p-32f

/* A block of a row's tokens, for one value head. */
typedef struct {
    ptrdiff_t tokens, dk, width, padded; /* width and padded: dk and dv rounded up to whole vectors */
    float *k, *q;                        /* [tokens][width], what a token reads with: of unit length, q scaled; times decay */
    float *changing;                     /* k without the decay */
    float *decay;                        /* [tokens][width], of the rows; unused if a head has one decay */
    float *sums;                         /* [2][padded]: k S and q S of the first token, without the scale */
    const bf16 *v;                       /* [dv], tokens ldv apart */
    bf16 *out;                           /* [dv], tokens ldo apart */
    ptrdiff_t ldv, ldo;
    float beta[BLOCK_TOKENS], q_dot_k[BLOCK_TOKENS];
    float scale[BLOCK_TOKENS];  /* of the matrix that a token reads, its decay included */
    float fade[BLOCK_TOKENS];   /* what it multiplies the matrix by: 1, or the scale if that is small */
    float change[BLOCK_TOKENS]; /* and delta: 1 / scale, or 1 */
} head_block;

/* out[width] = factor * x / |x| */
static void unit_row(const bf16 *x, ptrdiff_t n, float factor, float *out) {
    factor /= sqrtf(sum_of_squares(x, n) + 1e-6f);
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

enum { READ = 1, CHANGE = 2, FADE = 4, DECAY = 8 };

/* Pass over n vectors of columns, of which the last has `left` columns. CHANGE: store from + k^T delta, of token t - 1, in `to`;
 * with FADE, fade * from + k^T delta; with DECAY, the rows of `from` times their decays + k^T delta. READ: return the sums of
 * token t. */
INLINE tile_sums pass(int n, ptrdiff_t left, int work, const head_block *h, ptrdiff_t t, columns from, columns to,
                      const vf *delta) {
    tile_sums sums = {0};
    const float *k = h->k + t * h->width, *q = h->q + t * h->width;
    const float *changing = h->changing + (t - 1) * h->width, *decay = h->decay + (t - 1) * h->width;
    vf fade = {0};
    if (work & FADE) fade = broadcast(h->fade[t - 1]);
    for (ptrdiff_t i = 0, dk = h->dk; i < dk; i++) {
        vf k_before = {0}, k_i = {0}, q_i = {0}, decay_i = {0}; /* loaded before a store, so once */
        if (work & CHANGE) k_before = broadcast(changing[i]);
        if (work & DECAY) decay_i = broadcast(decay[i]);
        if (work & READ) k_i = broadcast(k[i]), q_i = broadcast(q[i]);
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) {
            vf s = load_f32(from.rows + i * from.ld + j * VL, left);
            if (work & FADE) s *= fade;
            if (work & CHANGE) {
                s = work & DECAY ? fma_(s, decay_i, k_before * delta[j]) : fma_(k_before, delta[j], s);
                store_f32(to.rows + i * to.ld + j * VL, left, s);
            }
            if (work & READ) {
                sums.k[j] = fma_(k_i, s, sums.k[j]);
                sums.q[j] = fma_(q_i, s, sums.q[j]);
            }
        }
    }
    return sums;
}

/* Let token t - 1 change n vectors of columns. READ: return the sums of token t. by_rows: each row has its decay. */
INLINE tile_sums change(int n, ptrdiff_t left, int by_rows, int read, const head_block *h, ptrdiff_t t, columns from, columns to,
                        const vf *delta) {
    if (by_rows) return pass(n, left, read | CHANGE | DECAY, h, t, from, to, delta);
    if (h->fade[t - 1] == 1.0f) return pass(n, left, read | CHANGE, h, t, from, to, delta);
    return pass(n, left, read | CHANGE | FADE, h, t, from, to, delta);
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
INLINE void pass_columns(int n, ptrdiff_t left, int by_rows, const head_block *h, ptrdiff_t column, columns from, columns to,
                         float *room) {
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
        vf scale = broadcast(h->scale[t]);
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) {
            delta[j] = fma_(sums.k[j], -scale, load_bf16(v + j * VL, left)) * h->beta[t];
            store_bf16(out + j * VL, left, fma_(delta[j], broadcast(h->q_dot_k[t]), sums.q[j] * scale));
            delta[j] *= h->change[t];
        }
        if (t + 1 == h->tokens) break;
        if (t) sums = change(n, VL, by_rows, READ, h, t + 1, cache, cache, delta);
        else sums = change(n, left, by_rows, READ, h, 1, from, cache, delta);
    }
    if (!to.rows) return;
    to.rows += column;
    if (h->tokens == 1) change(n, left, by_rows, 0, h, 1, from, to, delta);
    else change(n, left, by_rows, 0, h, h->tokens, cache, to, delta);
}

/* Not inlined, so that each has the registers for itself. */
#define ALONE static __attribute__((noinline)) void
#define BEGIN(name, n, left_in_last)                                                          \
    ALONE begin_##name(const head_block *h, ptrdiff_t column, ptrdiff_t left, columns from) { \
        (void)left, begin_columns(n, left_in_last, h, column, from);                          \
    }
BEGIN(wide, WIDE, VL)
BEGIN(narrow, NARROW, VL)
BEGIN(last, 1, left < VL ? left : VL)
#define PASS(name, n, left_in_last, by_rows)                                                                          \
    ALONE pass_##name(const head_block *h, ptrdiff_t column, ptrdiff_t left, columns from, columns to, float *room) { \
        (void)left, pass_columns(n, left_in_last, by_rows, h, column, from, to, room);                                \
    }
PASS(wide, WIDE, VL, 0)
PASS(narrow, NARROW, VL, 0)
PASS(last, 1, left < VL ? left : VL, 0)
PASS(wide_by_rows, WIDE, VL, 1)
PASS(narrow_by_rows, NARROW, VL, 1)
PASS(last_by_rows, 1, left < VL ? left : VL, 1)

typedef void pass_tile(const head_block *h, ptrdiff_t column, ptrdiff_t left, columns from, columns to, float *room);

/* Let a block's tokens pass a state of dv columns. */
static void pass_head(int by_rows, const head_block *h, ptrdiff_t dv, columns from, columns to, float *room) {
    pass_tile *wide = by_rows ? pass_wide_by_rows : pass_wide, *narrow = by_rows ? pass_narrow_by_rows : pass_narrow;
    pass_tile *last = by_rows ? pass_last_by_rows : pass_last;
    for (ptrdiff_t c = 0, left = dv, n; left > 0; c += n * VL, left -= n * VL) {
        n = left >= WIDE * VL ? WIDE : left >= NARROW * VL ? NARROW : 1;
        (n == WIDE ? begin_wide : n == NARROW ? begin_narrow : begin_last)(h, c, left, from);
    }
    for (ptrdiff_t c = 0, left = dv, n; left > 0; c += n * VL, left -= n * VL) {
        n = h->tokens == 1 && left >= WIDE * VL ? WIDE : left >= NARROW * VL ? NARROW : 1;
        (n == WIDE ? wide : n == NARROW ? narrow : last)(h, c, left, from, to, room);
    }
}

/* What a head's gates and heads are made of. */
typedef struct {
    const bf16 *q, *k, *a, *b; /* of the block's first token */
    ptrdiff_t ld, lda, ldb;    /* from token to token */
    ptrdiff_t by_rows;         /* whether a row of the matrix has its own a and dt_bias */
    const float *dt_bias;
    float rate, bound; /* rate: -exp(a_log); bound: of the logarithm of a decay, or 0: it has none */
} head_inputs;

/* The decays of a + dt_bias. */
INLINE vf decay_of(const head_inputs *in, vf x) {
    if (in->bound) return exp_(in->bound / (exp_(x * in->rate) + 1.0f));
    return exp_(softplus_(x) * in->rate);
}

/* Set beta, and scale to the decays of heads, or decay to those of rows. */
static void find_gates(const head_inputs *in, head_block *h) {
    float a[BLOCK_TOKENS] = {0}, b[BLOCK_TOKENS] = {0};
    for (ptrdiff_t t = 0; t < h->tokens; t++) a[t] = float_of(in->a[t * in->lda]), b[t] = float_of(in->b[t * in->ldb]);
    for (ptrdiff_t t = 0; t < h->tokens; t += VL) {
        store(h->scale + t, in->by_rows ? broadcast(1.0f) : decay_of(in, load(a + t) + in->dt_bias[0]));
        store(h->beta + t, 1.0f / (exp_(-load(b + t)) + 1.0f));
    }
    for (ptrdiff_t t = 0; in->by_rows && t < h->tokens; t++)
        for (ptrdiff_t i = 0, left = h->dk; left > 0; i += VL, left -= VL)
            store(h->decay + t * h->width + i,
                  decay_of(in, load_bf16(in->a + t * in->lda + i, left) + load_f32(in->dt_bias + i, left)));
}

/* Let token t read with k and q times its decays. */
static void read_decayed(head_block *h, ptrdiff_t t) {
    for (ptrdiff_t i = t * h->width; i < (t + 1) * h->width; i += VL) {
        vf decay = load(h->decay + i), k = load(h->k + i);
        store(h->changing + i, k);
        store(h->k + i, k * decay);
        store(h->q + i, load(h->q + i) * decay);
    }
}

/* Set what the tokens need. Return the scale behind them, if it is `scale` before. */
static float prepare(const head_inputs *in, head_block *h, float scale) {
    float factor = 1.0f / sqrtf((float)h->dk);
    find_gates(in, h);
    for (ptrdiff_t t = 0; t < h->tokens; t++) {
        float *k = h->k + t * h->width, *q = h->q + t * h->width;
        unit_row(in->k + t * in->ld, h->dk, 1.0f, k);
        unit_row(in->q + t * in->ld, h->dk, factor, q);
        h->q_dot_k[t] = dot(q, k, h->width);
        if (in->by_rows) read_decayed(h, t);
        h->scale[t] *= scale;
        int large = h->scale[t] >= LEAST_SCALE; /* not if it is NaN: then the matrix gets it */
        scale = large ? h->scale[t] : 1.0f;
        h->fade[t] = large ? 1.0f : h->scale[t];
        h->change[t] = 1.0f / scale;
    }
    return scale;
}

/* The sizes of a layer. */
typedef struct {
    ptrdiff_t key_heads, value_heads, dk, dv, ld; /* ld: of a token's q, k and v heads */
} delta_sizes;

/* Let the `tokens` tokens of a row pass the state of a value head; it is stored after write_len of them, unless that is 0. */
static void run_head(const delta_sizes *s, head_inputs in, const bf16 *v, bf16 *out, float *state, float *stored_scale,
                     ptrdiff_t tokens, ptrdiff_t write_len) {
    ptrdiff_t width = (s->dk + VL - 1) / VL * VL, padded = (s->dv + VL - 1) / VL * VL;
    ptrdiff_t most = tokens < BLOCK_TOKENS ? tokens : BLOCK_TOKENS, ldo = s->value_heads * s->dv;
    ptrdiff_t decays = in.by_rows ? most * width : 1;
    float k[most * width], q[most * width], changing[decays], decay[decays], sums[2 * padded];
    float scale = in.by_rows || !*stored_scale ? 1.0f : *stored_scale;
    float room[s->dk * NARROW * VL] __attribute__((aligned(64))), behind[write_len < tokens ? s->dk * s->dv : 1];
    columns stored = {state, s->dv}, kept = {behind, s->dv}, none = {NULL, 0};
    head_block h;
    h.dk = s->dk, h.width = width, h.padded = padded, h.k = k, h.q = q, h.changing = in.by_rows ? changing : k, h.decay = decay,
    h.sums = sums;
    h.ldv = s->ld, h.ldo = ldo;
    for (ptrdiff_t t = 0; t < tokens; t += h.tokens) {
        ptrdiff_t end = t < write_len ? write_len : tokens; /* the state is stored when write_len tokens have passed */
        h.tokens = end - t < BLOCK_TOKENS ? end - t : BLOCK_TOKENS, h.v = v + t * s->ld, h.out = out + t * ldo;
        scale = prepare(&in, &h, scale);
        columns to = t < write_len ? stored : t + h.tokens < tokens ? kept : none;
        pass_head(in.by_rows, &h, s->dv, t <= write_len ? stored : kept, to, room);
        if (t < write_len && !in.by_rows) *stored_scale = scale;
        in.q += h.tokens * s->ld, in.k += h.tokens * s->ld, in.a += h.tokens * in.lda, in.b += h.tokens * in.ldb;
    }
}

/* Compute the gated delta rule of a batch. Row r has the tokens [cu_seqlens[r], cu_seqlens[r + 1]). A token of qkv has key_heads
 * q heads and k heads [dk], then value_heads v heads [dv]; value head h goes with key head h * key_heads / value_heads. Part 1 +
 * h of a state is the matrix of head h. decay = exp(-exp(a_log) softplus(a + dt_bias)), or exp(bound sigmoid(exp(a_log) (a +
 * dt_bias))) unless bound is 0; beta = sigmoid(b). by_rows: a and dt_bias have dk numbers for each head. Else the last part has
 * the scales of all. */
void nv_gated_delta(team *team, const bf16 *qkv, const bf16 *a, ptrdiff_t lda, const bf16 *b, ptrdiff_t ldb, const float *a_log,
                    const float *dt_bias, bf16 *out, uint8_t *pool, ptrdiff_t page_bytes, const int64_t *places,
                    const int32_t *pages, ptrdiff_t num_pages, const int32_t *cu_seqlens, const int32_t *write_lens,
                    row_count rows, ptrdiff_t key_heads, ptrdiff_t value_heads, ptrdiff_t dk, ptrdiff_t dv, ptrdiff_t by_rows,
                    float bound) {
    const state_pages states = {pool, page_bytes, places, pages, num_pages};
    const delta_sizes sizes = {key_heads, value_heads, dk, dv, 2 * key_heads * dk + value_heads * dv};
    ptrdiff_t gates = by_rows ? dk : 1;
    FOR_ITEMS(item, team, rows * value_heads) {
        ptrdiff_t row = item / value_heads, h = item % value_heads, first = cu_seqlens[row];
        if (cu_seqlens[row + 1] == first) continue;
        const bf16 *q = qkv + first * sizes.ld + h * key_heads / value_heads * dk;
        const bf16 *v = qkv + first * sizes.ld + 2 * key_heads * dk;
        head_inputs in = {
            .q = q,
            .k = q + key_heads * dk,
            .a = a + first * lda + h * gates,
            .b = b + first * ldb + h,
            .ld = sizes.ld,
            .lda = lda,
            .ldb = ldb,
            .by_rows = by_rows,
            .dt_bias = dt_bias + h * gates,
            .rate = -expf(a_log[h]),
            .bound = bound,
        };
        float *scale = by_rows ? NULL : (float *)state_part(&states, row, 1 + value_heads) + h;
        run_head(&sizes, in, v + h * dv, out + (first * value_heads + h) * dv, state_part(&states, row, 1 + h), scale,
                 cu_seqlens[row + 1] - first, write_lens[row]);
    }
}
