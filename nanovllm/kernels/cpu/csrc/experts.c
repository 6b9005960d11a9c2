/* Mixture of experts: the choice of each token's experts, and the two linears of each expert with the activation between them.
 *
 * A weight of E experts [E * n, k] is a packed weight (see linear.c and linear_int.c) in which each expert has whole panels: n is
 * a multiple of 32, and so is k. Tokens are sorted by expert. The rows of an expert, cut into blocks that fit the second-level
 * cache, are multiplied together. Only weights of experts that a token has chosen are read.
 */
#include "activations.h"
#include "int_weights.h"

/* chosen = the places of the `top` largest of row[experts], by size; of equal ones the first comes first. */
static void choose(const float *row, ptrdiff_t experts, ptrdiff_t top, int32_t *chosen) {
    for (ptrdiff_t e = 0, count = 0; e < experts; e++) {
        if (count == top && !(row[e] > row[chosen[top - 1]])) continue;
        ptrdiff_t at = count < top ? count++ : top - 1;
        for (; at && row[e] > row[chosen[at - 1]]; at--) chosen[at] = chosen[at - 1];
        chosen[at] = (int32_t)e;
    }
}

/* row = exp(factor * (logits - the largest)), and the sum of all. */
static float exponentials(float *row, ptrdiff_t experts, float largest, float factor) {
    vf total = {0};
    for (ptrdiff_t i = 0; i < experts; i += VL) {
        vf p = exp_((load(row + i) - broadcast(largest)) * factor);
        if (experts - i < VL) p = blend(lanes() < (int32_t)(experts - i), p, (vf){0});
        store(row + i, p);
        total += p;
    }
    return sum_of(total);
}

/* row = the sigmoids. */
static void sigmoids(float *row, ptrdiff_t experts) {
    for (ptrdiff_t i = 0; i < experts; i += VL) store(row + i, 1.0f / (exp_(-load(row + i)) + 1.0f));
}

/* scores[experts] = -inf outside of the `kept` groups whose `best` (1 or 2) highest scores have the largest sum. `buffer` is
 * [2 * groups]. */
static void close_groups(float *scores, ptrdiff_t experts, ptrdiff_t groups, ptrdiff_t kept, ptrdiff_t best, float *buffer) {
    ptrdiff_t size = experts / groups;
    int32_t *chosen = (int32_t *)(buffer + groups);
    for (ptrdiff_t g = 0; g < groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (ptrdiff_t e = g * size; e < (g + 1) * size; e++)
            if (scores[e] > first) second = first, first = scores[e];
            else if (scores[e] > second) second = scores[e];
        buffer[g] = best == 2 ? first + second : first;
    }
    choose(buffer, groups, kept, chosen);
    for (ptrdiff_t g = 0; g < groups; g++) buffer[g] = 0;
    for (ptrdiff_t i = 0; i < kept; i++) buffer[chosen[i]] = 1;
    for (ptrdiff_t e = 0; e < experts; e++)
        if (!buffer[e / size]) scores[e] = -INFINITY;
}

/* ids[token][top] = the largest of logits[token][experts], which are bfloat16, or float32 if `wide`. Their weights are
 * a softmax of logit_factor * logits, or if `sigmoid` the sigmoid of each, divided by the sum of those chosen plus epsilon if
 * `renormalize`, times factor and, unless scales is NULL, scales[id]. If bias is not NULL, or if groups > 1, those with the
 * largest weight plus bias[id] are chosen, in `kept` groups of experts: see close_groups(). If a logit is NaN, so are the
 * weights. */
void nv_route(team *t, const void *logits, const bf16 *scales, const float *bias, int32_t *ids, float *weights,
              token_count tokens, ptrdiff_t experts, ptrdiff_t top, ptrdiff_t wide, ptrdiff_t sigmoid, ptrdiff_t renormalize,
              float logit_factor, float factor, float epsilon, ptrdiff_t groups, ptrdiff_t kept, ptrdiff_t best) {
    ptrdiff_t padded = (experts + 31) / 16 * 16, by_logits = !sigmoid && !bias && groups == 1;
    float *row = scratch(4 * padded * sizeof(float));
    float *scores = row ? row + padded : NULL;
    FOR_ITEMS(token, t, tokens) {
        int32_t *chosen = ids + token * top;
        float *weight = weights + token * top, nan = 0, all = 1.0f, largest = -INFINITY;
        const char *from = (const char *)logits + token * experts * (wide ? 4 : 2);
        for (ptrdiff_t i = 0; i < experts; i += VL)
            store(row + i,
                  wide ? load_f32((const float *)from + i, experts - i) : load_bf16((const bf16 *)from + i, experts - i));
        for (ptrdiff_t e = 0; e < experts; e++) {
            if (row[e] != row[e]) nan = row[e];
            if (row[e] > largest) largest = row[e];
        }
        if (by_logits) choose(row, experts, top, chosen);
        if (sigmoid) sigmoids(row, experts);
        else all = exponentials(row, experts, largest, logit_factor);
        if (!by_logits) {
            for (ptrdiff_t e = 0; e < experts; e++) scores[e] = row[e] / all + (bias ? bias[e] : 0.0f);
            if (groups > 1) close_groups(scores, experts, groups, kept, best, scores + padded);
            choose(scores, experts, top, chosen);
        }
        float sum = epsilon * all;
        for (ptrdiff_t j = 0; j < top; j++) sum += row[chosen[j]];
        for (ptrdiff_t j = 0; j < top; j++) {
            weight[j] = (row[chosen[j]] / (renormalize ? sum : all) + nan) * factor;
            if (scales) weight[j] *= from_bf16((half_vu){scales[chosen[j]]})[0];
        }
    }
    free(row);
}

/* Rows of an expert that are multiplied together: [first, first + rows) of the sorted pairs. */
typedef struct {
    ptrdiff_t expert, first, rows;
} block;

/* The pairs of a token and one of its experts, sorted by expert, then by token. pairs[i] is token * top + rank. */
typedef struct {
    int32_t *pairs;
    block *blocks;
    ptrdiff_t count;
} grouping;

static void free_grouping(grouping g) {
    free(g.pairs);
    free(g.blocks);
}

/* Return a number of blocks that no `pairs` pairs exceed: the same in all threads, whatever the experts are. */
static ptrdiff_t most_blocks(ptrdiff_t pairs, ptrdiff_t experts, ptrdiff_t max_rows) {
    ptrdiff_t blocks = (pairs < experts ? pairs : experts) + pairs / max_rows;
    return blocks < pairs ? blocks : pairs;
}

/* Group the pairs, unless *found has them already. Without memory for it, *found stays empty. Every thread groups on its own,
 * which takes less time than to wait for one that does it for all. Only to be called from an item: a thread that is late may find
 * other numbers in the memory of `ids`. */
static void group_pairs(grouping *found, const int32_t *ids, ptrdiff_t pairs, ptrdiff_t experts, ptrdiff_t max_rows) {
    if (found->pairs) return;
    int32_t *first = scratch((experts + 1) * sizeof *first);
    grouping g = {scratch((pairs + 1) * sizeof *g.pairs), scratch((pairs + 1) * sizeof *g.blocks), 0};
    if (!first || !g.pairs || !g.blocks) {
        free(first);
        free_grouping(g);
        return;
    }
    memset(first, 0, (experts + 1) * sizeof *first);
    for (ptrdiff_t i = 0; i < pairs; i++) first[ids[i] + 1]++;
    for (ptrdiff_t e = 0; e < experts; e++) {
        ptrdiff_t rows = first[e + 1], step = even_block(rows, max_rows);
        for (ptrdiff_t r = 0; r < rows; r += step)
            g.blocks[g.count++] = (block){e, first[e] + r, rows - r < step ? rows - r : step};
        first[e + 1] += first[e];
    }
    for (ptrdiff_t i = 0; i < pairs; i++) g.pairs[first[ids[i]]++] = (int32_t)i;
    free(first);
    *found = g;
}

/* A weight of E experts with 16, 8 or 4 bits. With 8 and 4 bits it has scales of groups of inputs, and a kind: see int_weights.h.
 * `factors` and `bias` are [E * n] or NULL. */
typedef struct {
    const void *packed;
    const uint16_t *scales;
    const float *factors;
    const bf16 *bias;
    ptrdiff_t n, k, group, bits, kind;
} expert_weight;

/* Inputs of a block, prepared for bfloat16 tiles of `step` rows, or quantised. */
typedef struct {
    input_rows x;
    quantized_rows q;
    ptrdiff_t rows, step;
} prepared;

/* Bytes of a prepared row. For bfloat16, a block has room for what prepare_inputs() writes behind its rows. */
static ptrdiff_t prepared_bytes(const expert_weight *w) {
    return w->bits == 16 ? (w->k + 64) * (ptrdiff_t)sizeof(operand)
                         : quantized_bytes(w->k, input_group(w->bits, w->group), input_bytes(w->bits, w->kind));
}

/* Say where the inputs of a block of `rows` rows are in `buffer`. */
static prepared place(const expert_weight *w, ptrdiff_t rows, char *buffer) {
    ptrdiff_t step = even_block(rows, TILE_ROWS);
    if (w->bits != 16)
        return (prepared){
            {0}, quantized_at(buffer, rows, w->k, input_group(w->bits, w->group), input_bytes(w->bits, w->kind)), rows, step};
    return (prepared){{(operand *)buffer, w->k + PREPARED_GAP}, {0}, rows, step};
}

/* Prepare a block of rows x, ldx apart, in `buffer`. */
static void prepare(const expert_weight *w, const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, char *buffer) {
    prepared p = place(w, rows, buffer);
    if (w->bits == 16) {
        prepare_inputs(x, ldx, rows, p.step, w->k, (operand *)buffer);
        return;
    }
    for (ptrdiff_t item = 0; item < quantize_items(rows, (int)w->bits); item++)
        quantize_rows(x, ldx, rows, p.q, input_group(w->bits, w->group), (int)w->bits, (int)w->kind, item);
}

static int_panel int_panel_of(const expert_weight *w, ptrdiff_t panel) {
    ptrdiff_t scales = PANEL * (w->k / w->group) * rows_of_scales(w->kind);
    return (int_panel){(const uint8_t *)w->packed + panel * PANEL * w->k * w->bits / 8, w->scales + panel * scales, (int)w->kind};
}

/* acc[rows][32] = x . panel. */
static void panel_sums(const expert_weight *w, prepared in, ptrdiff_t panel, float *acc) {
    if (w->bits == 16) {
        const bf16 *weights = (const bf16 *)w->packed + panel * PANEL * w->k;
        linear_panel((linear_inputs){in.x, in.rows, in.step, w->k}, weights, (linear_outputs){0}, acc);
        return;
    }
    int_tile((int)w->bits, (int)in.rows, w->k, w->group, in.q, int_panel_of(w, panel), acc);
}

/* Panels that a block multiplies side by side, out of `count`: a single row STREAMS, if there are so many. */
static ptrdiff_t side_by_side(block b, ptrdiff_t count) { return b.rows == 1 && count == STREAMS ? STREAMS : 1; }

/* acc[count][rows][32] = x . panels, for side_by_side() panels from `panel` on. */
static void sums_of(const expert_weight *w, prepared in, ptrdiff_t panel, ptrdiff_t count, float *acc) {
    ptrdiff_t width = in.rows > 1 || count < STREAMS ? 1 : STREAMS;
    if (in.rows > 1 || count < STREAMS) panel_sums(w, in, panel, acc);
    else if (w->bits == 16) tile_streams(in.x.p, (const bf16 *)w->packed + panel * PANEL * w->k, w->k, acc);
    else int_streams((int)w->bits, w->k, w->group, in.q, int_panel_of(w, panel), acc);
    if (w->factors) multiply_columns(acc, width == 1 ? in.rows : 1, width * PANEL, w->factors + panel * PANEL);
}

/* y[32] = the activation of a row's 32 gates and ups: two panels, or with `interleaved` two halves of 32, gate and up in turn.
 * If second is NULL, there are no gates. */
static void activate_row(const float *first, const float *second, const bf16 *first_bias, const bf16 *second_bias, bf16 *y,
                         ptrdiff_t activation, ptrdiff_t interleaved) {
    float sums[2 * PANEL];
    for (ptrdiff_t c = 0; c < PANEL; c += VL) {
        store(sums + c, load(first + c) + (first_bias ? load_bf16(first_bias + c, VL) : (vf){0}));
        if (second) store(sums + PANEL + c, load(second + c) + (first_bias ? load_bf16(second_bias + c, VL) : (vf){0}));
    }
    for (ptrdiff_t c = 0; c < PANEL; c += VL) {
        vf gate = load(sums + c);
        if (!second) {
            store_bf16(y + c, VL, activate(activation, gate));
            continue;
        }
        vf up = load(sums + PANEL + c);
        if (interleaved) {
            vf low = load(sums + 2 * c), high = load(sums + 2 * c + VL);
            gate = shuffle2(low, high, 2 * lanes()), up = shuffle2(low, high, 2 * lanes() + 1);
        }
        if (activation == SWIGLU_OAI) store_bf16(y + c, VL, swiglu_oai_(gate, up));
        else store_bf16(y + c, VL, activate(activation, gate) * up);
    }
}

/* Outputs of an item: STREAMS panels, so that a single row reads them side by side. */
static ptrdiff_t groups_of(ptrdiff_t panels) { return (panels + STREAMS - 1) / STREAMS; }

/* hidden[pair][n] = activation(gate, up) of the sorted pairs, for x[tokens][k] and a weight with 2n outputs of each expert; or
 * activation(up), with n outputs of each, if not `gated`. An item is a block and STREAMS panels of hidden. */
void nv_expert_gate_up(team *t, const bf16 *x, const int32_t *ids, const void *packed, const uint16_t *scales,
                       const float *factors, const bf16 *bias, bf16 *hidden, token_count tokens, ptrdiff_t experts, ptrdiff_t top,
                       ptrdiff_t n, ptrdiff_t k, ptrdiff_t group, ptrdiff_t bits, ptrdiff_t kind, ptrdiff_t activation,
                       ptrdiff_t interleaved, ptrdiff_t gated) {
    const expert_weight w = {packed, scales, factors, bias, (gated ? 2 : 1) * n, k, group, bits, kind};
    ptrdiff_t panels = n / PANEL, groups = groups_of(panels), max_rows = rows_that_fit(tokens, k * sizeof(operand), LINEAR_BYTES);
    ptrdiff_t pairs = tokens * top;
    grouping g = {0};
    bf16 *rows = scratch(max_rows * k * sizeof *rows);
    char *buffer = scratch(max_rows * prepared_bytes(&w));
    float *acc = scratch(2 * STREAMS * (max_rows > TILE_ROWS ? max_rows : TILE_ROWS) * PANEL * sizeof *acc);
    ptrdiff_t ready = -1;
    FOR_ITEMS(item, t, most_blocks(pairs, experts, max_rows) * groups) {
        group_pairs(&g, ids, pairs, experts, max_rows);
        if (item / groups >= g.count) continue;
        block b = g.blocks[item / groups];
        ptrdiff_t first = item % groups * STREAMS, count = panels - first < STREAMS ? panels - first : STREAMS;
        if (ready != item / groups) {
            for (ptrdiff_t r = 0; r < b.rows; r++) memcpy(rows + r * k, x + g.pairs[b.first + r] / top * k, k * sizeof *x);
            prepare(&w, rows, k, b.rows, buffer);
        }
        ready = item / groups;
        prepared in = place(&w, b.rows, buffer);
        ptrdiff_t width = side_by_side(b, count), base = b.expert * w.n / PANEL, size = b.rows * PANEL;
        for (ptrdiff_t p = first; p < first + count; p += width) {
            sums_of(&w, in, base + (interleaved ? 2 * p : p), width, acc);
            if (gated) sums_of(&w, in, base + (interleaved ? 2 * p + width : panels + p), width, acc + width * size);
            for (ptrdiff_t i = 0; i < width; i++) {
                ptrdiff_t gate = interleaved ? 2 * (p + i) : p + i, up = interleaved ? gate + 1 : panels + gate;
                const float *gates = acc + (interleaved ? 2 * i : i) * size, *ups = gates + (interleaved ? 1 : width) * size;
                for (ptrdiff_t r = 0; r < b.rows; r++)
                    activate_row(gates + r * PANEL, gated ? ups + r * PANEL : NULL, bias_from(bias, (base + gate) * PANEL),
                                 bias_from(bias, (base + up) * PANEL), hidden + (b.first + r) * n + (p + i) * PANEL, activation,
                                 interleaved);
            }
        }
    }
    end_tiles();
    free_grouping(g);
    free(rows);
    free(buffer);
    free(acc);
}

/* sums[token][ld] += weight * (acc[rows][32] + bias), for the tokens of a block. */
static void add_weighted(grouping g, block b, ptrdiff_t top, const float *weights, const float *acc, const bf16 *bias,
                         float *sums, ptrdiff_t ld) {
    for (ptrdiff_t r = 0; r < b.rows; r++) {
        ptrdiff_t pair = g.pairs[b.first + r];
        float *sum = sums + pair / top * ld;
        for (ptrdiff_t c = 0; c < PANEL; c += VL) {
            vf v = load(acc + r * PANEL + c);
            if (bias) v += load_bf16(bias + c, VL);
            store(sum + c, fma_(broadcast(weights[pair]), v, load(sum + c)));
        }
    }
}

/* y[tokens][n] = the sum over a token's experts, by their numbers, of weight * (hidden . w + bias), rounded once. `buffer` has
 * prepared_bytes(), at most 4k + 256, for each pair: all threads share the prepared rows of hidden[pair][k]. An item is some
 * panels of y, which it sums for all tokens: threads write no sum in common, and whichever is ready takes the next item. */
void nv_expert_down(team *t, const bf16 *hidden, const int32_t *ids, const float *weights, const void *packed,
                    const uint16_t *scales, const float *factors, const bf16 *bias, char *buffer, bf16 *y, token_count tokens,
                    ptrdiff_t experts, ptrdiff_t top, ptrdiff_t n, ptrdiff_t k, ptrdiff_t group, ptrdiff_t bits, ptrdiff_t kind) {
    const expert_weight w = {packed, scales, factors, bias, n, k, group, bits, kind};
    ptrdiff_t panels = n / PANEL, width = groups_of(panels) < t->threads ? 1 : STREAMS, bytes = prepared_bytes(&w);
    ptrdiff_t max_rows = rows_that_fit(tokens, k * sizeof(operand), LINEAR_BYTES), ld = width * PANEL;
    ptrdiff_t pairs = tokens * top;
    grouping g = {0};
    float *acc = scratch(STREAMS * (max_rows > TILE_ROWS ? max_rows : TILE_ROWS) * PANEL * sizeof *acc);
    float *sums = scratch(tokens * ld * sizeof *sums);
    FOR_ITEMS(i, t, most_blocks(pairs, experts, max_rows)) {
        group_pairs(&g, ids, pairs, experts, max_rows);
        if (i >= g.count) continue;
        block b = g.blocks[i];
        prepare(&w, hidden + b.first * k, k, b.rows, buffer + b.first * bytes);
    }
    FOR_ITEMS(item, t, (panels + width - 1) / width) {
        group_pairs(&g, ids, pairs, experts, max_rows);
        ptrdiff_t first = item * width, count = panels - first < width ? panels - first : width;
        memset(sums, 0, tokens * ld * sizeof *sums);
        for (ptrdiff_t i = 0; i < g.count; i++) {
            block b = g.blocks[i];
            ptrdiff_t panel = b.expert * panels + first;
            prepared in = place(&w, b.rows, buffer + b.first * bytes);
            for (ptrdiff_t p = 0, width = side_by_side(b, count); p < count; p += width) {
                sums_of(&w, in, panel + p, width, acc);
                for (ptrdiff_t j = p; j < p + width; j++)
                    add_weighted(g, b, top, weights, acc + (j - p) * b.rows * PANEL, bias_from(bias, (panel + j) * PANEL),
                                 sums + j * PANEL, ld);
            }
        }
        for (ptrdiff_t token = 0; token < tokens; token++)
            store_row(sums + token * ld, NULL, y + token * n + first * PANEL, count * PANEL, count * PANEL);
    }
    end_tiles();
    free_grouping(g);
    free(acc);
    free(sums);
}
