/* Mamba-2's recurrence: a state S [n][p] for each head, which each token changes and then reads.
 *
 *     S = decay S + B^T (step x);  y = C S + d x
 *
 * Nothing that a token adds to S depends on S. So some tokens together pass a row of the state while it is in registers. Columns
 * do not depend on each other: a tile of them stays in the first-level cache while all tokens of a row pass. Each number of the
 * state and each sum is computed by the same operations in the same order, whichever tokens and columns are computed together.
 */
#include "state.h"

/* Tokens that pass a tile together, and its vectors; a single token has a wide tile, which is read in longer pieces. */
enum { TOGETHER = 4, COLUMNS = VL == 16 ? 4 : 2, WIDE = 64 / VL, BLOCK_TOKENS = 64 /* a multiple of VL */ };

/* A block of a row's tokens, for one head. */
typedef struct {
    ptrdiff_t n, width, padded; /* width and padded: n and p rounded up to whole vectors */
    float *b, *c;               /* [tokens][width] */
    float *added, *y;           /* [tokens][padded]: step x, and d x, to which C S is added */
    float step[BLOCK_TOKENS], decay[BLOCK_TOKENS];
} head_block;

/* Let `tokens` tokens, from token t on, pass `vectors` vectors of columns, of which the last has `left` columns: from the state
 * in `from`, to that in `to`. `column` is their first one. */
INLINE void pass(int vectors, int tokens, ptrdiff_t left, const head_block *h, ptrdiff_t t, ptrdiff_t column, columns from,
                 columns to) {
    const float *b = h->b + t * h->width, *c = h->c + t * h->width, *added = h->added + t * h->padded + column;
    float *y = h->y + t * h->padded + column;
    vf sums[TOGETHER][WIDE] = {0};
    from.rows += column, to.rows += column;
    for (ptrdiff_t i = 0; i < h->n; i++) {
        vf s[WIDE];
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j++) s[j] = load_f32(from.rows + i * from.ld + j * VL, left);
#pragma GCC unroll 4
        for (int k = 0; k < tokens; k++) {
            vf decay = broadcast(h->decay[t + k]), b_i = broadcast(b[k * h->width + i]), c_i = broadcast(c[k * h->width + i]);
#pragma GCC unroll 16
            for (int j = 0; j < vectors; j++) {
                s[j] = fma_(s[j], decay, b_i * load(added + k * h->padded + j * VL));
                sums[k][j] = fma_(c_i, s[j], sums[k][j]);
            }
        }
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j++) store_f32(to.rows + i * to.ld + j * VL, left, s[j]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < tokens; k++)
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j++) {
            float *place = y + k * h->padded + j * VL;
            store(place, load(place) + sums[k][j]);
        }
}

/* Not inlined, so that each has the registers for itself. */
#define PASS(name, vectors, tokens, left_in_last)                                                                         \
    static __attribute__((noinline)) void pass_##name(const head_block *h, ptrdiff_t t, ptrdiff_t column, ptrdiff_t left, \
                                                      columns from, columns to) {                                         \
        (void)left, pass(vectors, tokens, left_in_last, h, t, column, from, to);                                          \
    }
PASS(wide, WIDE, 1, VL)
PASS(last, 1, 1, left < VL ? left : VL)
PASS(wide_tokens, COLUMNS, TOGETHER, VL)
PASS(last_tokens, 1, TOGETHER, left < VL ? left : VL)

/* Let a block's tokens pass a state of p columns: from the state in `from`, to that in `to`, which may be the same. */
static void pass_head(const head_block *h, ptrdiff_t tokens, ptrdiff_t p, columns from, columns to) {
    ptrdiff_t t = 0, together = tokens - tokens % TOGETHER;
    for (ptrdiff_t c = 0, n; c < p && together; c += n * VL) {
        n = p - c >= COLUMNS * VL ? COLUMNS : 1;
        for (t = 0; t < together; t += TOGETHER) {
            columns before = t ? to : from;
            (n == 1 ? pass_last_tokens : pass_wide_tokens)(h, t, c, p - c, before, to);
        }
    }
    for (t = together; t < tokens; t++)
        for (ptrdiff_t c = 0, n; c < p; c += n * VL) {
            n = p - c >= WIDE * VL ? WIDE : 1;
            (n == 1 ? pass_last : pass_wide)(h, t, c, p - c, t ? to : from, to);
        }
}

/* What a head's tokens are made of. */
typedef struct {
    const bf16 *x, *b, *c, *dt; /* of the block's first token */
    ptrdiff_t ld, ldt;          /* from token to token */
    float rate, d, dt_bias;     /* rate: -exp(a_log) */
    float low, high;            /* the limits of a step */
} head_inputs;

static void prepare(const head_inputs *in, ptrdiff_t tokens, ptrdiff_t p, head_block *h) {
    float dt[BLOCK_TOKENS] = {0};
    for (ptrdiff_t t = 0; t < tokens; t++) dt[t] = float_of(in->dt[t * in->ldt]);
    for (ptrdiff_t t = 0; t < tokens; t += VL) {
        vf step = softplus_(load(dt + t) + in->dt_bias);
        step = smaller(broadcast(in->high), larger(broadcast(in->low), step));
        store(h->step + t, step);
        store(h->decay + t, exp_(step * in->rate));
    }
    for (ptrdiff_t t = 0; t < tokens; t++) {
        for (ptrdiff_t i = 0; i < h->n; i += VL) {
            store(h->b + t * h->width + i, load_bf16(in->b + t * in->ld + i, h->n - i));
            store(h->c + t * h->width + i, load_bf16(in->c + t * in->ld + i, h->n - i));
        }
        for (ptrdiff_t i = 0; i < p; i += VL) {
            vf x = load_bf16(in->x + t * in->ld + i, p - i);
            store(h->added + t * h->padded + i, x * h->step[t]);
            store(h->y + t * h->padded + i, x * in->d);
        }
    }
}

/* Let the `tokens` tokens of a row pass the state [n][p] of a head; it is stored after write_len of them, unless that is 0.
 * Outputs are ldo apart. */
static void run_head(head_inputs in, bf16 *out, ptrdiff_t ldo, float *state, ptrdiff_t n, ptrdiff_t p, ptrdiff_t tokens,
                     ptrdiff_t write_len) {
    ptrdiff_t width = (n + VL - 1) / VL * VL, padded = (p + VL - 1) / VL * VL;
    ptrdiff_t most = tokens < BLOCK_TOKENS ? tokens : BLOCK_TOKENS;
    float b[most * width], c[most * width], added[most * padded], y[most * padded], behind[write_len < tokens ? n * p : 1];
    columns stored = {state, p}, kept = {behind, p};
    head_block h = {.n = n, .width = width, .padded = padded, .b = b, .c = c, .added = added, .y = y};
    for (ptrdiff_t t = 0, count; t < tokens; t += count) {
        ptrdiff_t end = t < write_len ? write_len : tokens; /* the state is stored when write_len tokens have passed */
        count = end - t < BLOCK_TOKENS ? end - t : BLOCK_TOKENS;
        prepare(&in, count, p, &h);
        pass_head(&h, count, p, t <= write_len ? stored : kept, t < write_len ? stored : kept);
        for (ptrdiff_t k = 0; k < count; k++)
            for (ptrdiff_t i = 0; i < p; i += VL) store_bf16(out + (t + k) * ldo + i, p - i, load(y + k * padded + i));
        in.x += count * in.ld, in.b += count * in.ld, in.c += count * in.ld, in.dt += count * in.ldt;
    }
}

/* Compute the recurrence of a batch. Row r has the tokens [cu_seqlens[r], cu_seqlens[r + 1]). A token of xbc has the x [p] of
 * each head, then the B [n] and then the C of each group; head h reads those of group h * groups / heads. Part 1 + h of a state
 * is the matrix of head h. step = softplus(dt + dt_bias), from low to high; decay = exp(-exp(a_log) step). */
void nv_mamba2(team *team, const bf16 *xbc, const bf16 *dt, ptrdiff_t ldt, const float *a_log, const float *d,
               const float *dt_bias, bf16 *out, uint8_t *pool, ptrdiff_t page_bytes, const int64_t *places, const int32_t *pages,
               ptrdiff_t num_pages, const int32_t *cu_seqlens, const int32_t *write_lens, row_count rows, ptrdiff_t heads,
               ptrdiff_t groups, ptrdiff_t n, ptrdiff_t p, float low, float high) {
    const state_pages states = {pool, page_bytes, places, pages, num_pages};
    ptrdiff_t ld = heads * p + 2 * groups * n;
    FOR_ITEMS(item, team, rows * heads) {
        ptrdiff_t row = item / heads, h = item % heads, first = cu_seqlens[row];
        if (cu_seqlens[row + 1] == first) continue;
        const bf16 *x = xbc + first * ld, *b = x + heads * p + h * groups / heads * n;
        head_inputs in = {
            .x = x + h * p,
            .b = b,
            .c = b + groups * n,
            .dt = dt + first * ldt + h,
            .ld = ld,
            .ldt = ldt,
            .rate = -expf(a_log[h]),
            .d = d[h],
            .dt_bias = dt_bias[h],
            .low = low,
            .high = high,
        };
        run_head(in, out + (first * heads + h) * p, heads * p, state_part(&states, row, 1 + h), n, p, cu_seqlens[row + 1] - first,
                 write_lens[row]);
    }
}
