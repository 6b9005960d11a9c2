/* Attention over the paged cache, as flash attention: a tile of up to 32 query rows goes once through the keys and values of its
 * sequence, in passes. For each row it keeps the largest score and the sums of what it has passed, and rescales the sums
 * where a pass has a larger score. A row is one query head of one token; the query heads of a KV head share a tile.
 */
#include "cache.h"
#include "int_tiles.h"

/* What all tiles of a call share. */
typedef struct {
    ptrdiff_t heads, dim, width, block, bits;
    ptrdiff_t half; /* bytes of a block's keys, or values, of one head */
    int group;      /* query heads of a KV head */
    float scale;    /* of a score, times log2 e: a weight is exp2(scale * (score - largest)) */
} attention_shape;

/* One KV head's part of a sequence. `table` begins with the blocks of the current pass. */
typedef struct {
    const uint8_t *cache; /* the head's blocks */
    const int32_t *table;
    ptrdiff_t num_keys;
} kv_sequence;

/* Query rows and what the passes have made of them: row r is head r % group of the group, token r / group of `tokens`. */
typedef struct {
    int rows, tokens;
    ptrdiff_t pass_keys, pass_blocks;
    act *query;                      /* [rows][width] */
    float *scores;                   /* [rows][pass_keys]; a row's weights replace its scores, from the row's start on */
    float *sums;                     /* [rows][width] of weight * value */
    float *largest, *denominator;    /* [rows] of score and of sum of weights */
    float *rescale, *pass_sum;       /* [rows]: the factor for earlier sums, and this pass's sum of weights */
    const rounded_rows *queries;     /* 8 bits: `query` with its scales */
    rounded_rows *weights;           /* 8 bits: the weights at `scores` with their scales */
    const bf16 **values, **prefetch; /* [pass_blocks]: a block's values, and what to prefetch while they are read */
} query_tile;

/* Keys of a pass. */
typedef struct {
    ptrdiff_t left;     /* keys from the pass's first to the sequence's last */
    ptrdiff_t keys;     /* in the pass, rounded up to a multiple of PANEL */
    ptrdiff_t weighted; /* in the pass, rounded up to a multiple of TERMS */
} key_range;

INLINE ptrdiff_t row_offset(const attention_shape *s, ptrdiff_t head, int r) {
    return ((r / s->group) * s->heads + head * s->group + r % s->group) * s->dim;
}

INLINE void load_queries(const attention_shape *s, const query_tile *t, const bf16 *q, ptrdiff_t head) {
    for (int r = 0; r < t->rows; r++) {
        const bf16 *from = q + row_offset(s, head, r);
        if (s->bits == 16) {
            act *row = t->query + r * s->width;
            for (ptrdiff_t d = 0; d < s->width; d += VL) store_act(row + d, d < s->dim ? load16(from + d, s->dim - d) : (vf){0});
        } else {
            bf16 padded[s->width];
            memset(padded, 0, sizeof padded);
            memcpy(padded, from, s->dim * sizeof *from);
            round_row(padded, 2, t->queries, r, s->width, 8);
        }
    }
}

/* Scores of a pass's keys, and where its values lie. Prefetched meanwhile: a key panel's values, later, with the values, the
 * keys of the next pass, or of `following`. */
INLINE void score_keys(const attention_shape *s, const query_tile *t, kv_sequence kv, kv_sequence following, key_range pass) {
    for (ptrdiff_t j = 0; j < pass.keys; j += PANEL) {
        ptrdiff_t b = j / s->block, in_block = j % s->block;
        const uint8_t *keys = kv.cache + kv.table[b] * 2 * s->half;
        t->values[b] = t->prefetch[b] = (const bf16 *)(keys + s->half);
        if (t->pass_keys + j < pass.left) t->prefetch[b] = (const bf16 *)(kv.cache + kv.table[t->pass_blocks + b] * 2 * s->half);
        else if (t->pass_keys >= pass.left && j < following.num_keys)
            t->prefetch[b] = (const bf16 *)(following.cache + following.table[b] * 2 * s->half);
        if (s->bits == 16) {
            const bf16 *panel = (const bf16 *)keys + in_block * s->width, *panel_values = panel + s->half / 2;
            tile(t->query, s->width, &panel, &panel_values, s->width, s->width, t->rows, t->scores + j, t->pass_keys, 0);
        } else {
            const bf16 *scales = (const bf16 *)(keys + s->block * s->width) + in_block;
            int_tile(8, t->queries, 0, keys + in_block * s->width, scales, s->width, s->width, t->rows, t->scores + j, t->pass_keys, 0);
        }
    }
}

/* Scores of a row that sees only the first `visible` of `keys`: the others become -inf. */
INLINE void mask_row(float *scores, ptrdiff_t visible, ptrdiff_t keys) {
    for (ptrdiff_t j = visible < 0 ? 0 : visible / VL * VL; j < keys; j += VL)
        store(scores + j, choose(lanes() < (int)(visible - j), load(scores + j), each(-INFINITY)));
}

/* Row r's weights of a pass in place of its scores. With 8 bits a value's scale becomes part of its weight, and the weights are
 * rounded to 16 bits, by panels. */
INLINE void softmax_row(const attention_shape *s, const query_tile *t, key_range pass, int r) {
    float *scores = t->scores + r * t->pass_keys;
    mask_row(scores, pass.left - t->tokens + r / s->group + 1, pass.keys);
    vf top = each(t->largest[r]), sum = {0};
    for (ptrdiff_t j = 0; j < pass.keys; j += VL) top = larger(top, load(scores + j));
    float largest = largest_of(top);
    vf shift = each(-largest * s->scale);
    for (ptrdiff_t j = 0; j < pass.keys; j += VL) {
        vf weight = exp2_(fma_(load(scores + j), each(s->scale), shift));
        sum += weight;
        if (s->bits == 16) store_act((act *)scores + j, weight);
        else {
            const bf16 *value_scales = (const bf16 *)((const uint8_t *)t->values[j / s->block] + s->block * s->width);
            store(scores + j, weight * load16(value_scales + j % s->block, VL));
        }
    }
    t->rescale[r] = t->largest[r] - largest, t->largest[r] = largest, t->pass_sum[r] = sum_of(sum);
    t->weights->groups = pass.keys / PANEL;
    if (s->bits == 8) round_row(scores, 4, t->weights, r, PANEL, 8);
}

/* Bring the sums of earlier passes to the new largest scores, and the denominators up to date. */
INLINE void rescale_sums(const attention_shape *s, const query_tile *t) {
    for (int r = 0; r < t->rows; r += VL) {
        store(t->rescale + r, exp2_(load(t->rescale + r) * s->scale));
        store(t->denominator + r, fma_(load(t->denominator + r), load(t->rescale + r), load(t->pass_sum + r)));
    }
    for (int r = 0; r < t->rows; r++) {
        float *sums = t->sums + r * s->width;
        for (ptrdiff_t d = 0; d < s->width && t->rescale[r] != 1.0f; d += VL) store(sums + d, load(sums + d) * t->rescale[r]);
    }
}

/* sums += weights . values of a pass. */
INLINE void add_values(const attention_shape *s, const query_tile *t, key_range pass, const bf16 *ones) {
    ptrdiff_t ldw = t->pass_keys * (ptrdiff_t)(sizeof *t->scores / sizeof(act));
    for (ptrdiff_t d = 0; d < s->width; d += PANEL) {
        float *sums = t->sums + d;
        if (s->bits == 16) {
            tile((const act *)t->scores, ldw, t->values, t->prefetch, s->block, pass.weighted, t->rows, sums, s->width, 1);
            for (ptrdiff_t b = 0; b * s->block < pass.keys; b++) t->values[b] += s->block * PANEL, t->prefetch[b] += s->block * PANEL;
        } else {
            for (ptrdiff_t j = 0, b = 0; j < pass.keys; j += s->block, b++) {
                const rounded_rows *w = t->weights;
                rounded_rows part = {(int16_t *)w->numbers + j, w->scales + j / PANEL, w->eights, w->ld, w->groups};
                const uint8_t *values = (const uint8_t *)t->values[b] + d * s->block;
                ptrdiff_t keys = pass.keys - j < s->block ? pass.keys - j : s->block;
                int_tile(8, &part, 0, values, ones, keys, PANEL, t->rows, sums, s->width, 1);
            }
        }
    }
}

INLINE void store_output(const attention_shape *s, const query_tile *t, bf16 *out, ptrdiff_t head) {
    for (int r = 0; r < t->rows; r++) {
        bf16 *row = out + row_offset(s, head, r);
        float inverse = 1.0f / t->denominator[r];
        for (ptrdiff_t d = 0; d < s->dim; d += VL) store16(row + d, s->dim - d, load(t->sums + r * s->width + d) * inverse);
    }
}

/* One KV head's part of up to 32 query rows: the last `tokens` of the tokens that `kv` has, times the heads of the group. With a
 * cache of 8 bits queries and weights are rounded to 16, as the inputs of a linear are; a value's scale is part of its weight. A
 * pass goes through KEYS keys, at least a block. In long passes a block's values are read long after its keys, which takes 1.2
 * to 1.5 times as long for a single token unless they are fetched meanwhile, as by AVX512-BF16's tiles; these fetch the first
 * keys of `following` too, the next item's (decoding is 1.1 to 1.2 times as fast). */
static __attribute__((noinline)) void attend(attention_shape s, const bf16 *q, bf16 *out, kv_sequence kv, kv_sequence following,
                                             int tokens, ptrdiff_t head) {
    int rows = tokens * s.group;
    ptrdiff_t pass_blocks = s.block < KEYS ? KEYS / s.block : 1, pass_keys = pass_blocks * s.block, pass_panels = pass_keys / PANEL;
    act query[TILE_ROWS * s.width] __attribute__((aligned(64)));
    float scores[TILE_ROWS * pass_keys] __attribute__((aligned(64))), sums[TILE_ROWS * s.width] __attribute__((aligned(64)));
    float query_scales[TILE_ROWS], weight_scales[TILE_ROWS * pass_panels], largest[TILE_ROWS];
    float denominator[TILE_ROWS] = {0}, rescale[TILE_ROWS] = {0}, pass_sum[TILE_ROWS] = {0};
    int32_t eights[TILE_ROWS * pass_panels];
    rounded_rows queries = {query, query_scales, eights, s.width, 1};
    rounded_rows weights = {scores, weight_scales, eights, pass_keys * 2, pass_panels};
    const bf16 *values[pass_blocks], *prefetch[pass_blocks];
    bf16 ones[s.block];
    query_tile t = {rows, tokens, pass_keys, pass_blocks, query, scores, sums, largest, denominator, rescale, pass_sum,
                    &queries, &weights, values, prefetch};

    for (ptrdiff_t j = 0; s.bits == 8 && j < s.block; j++) ones[j] = 0x3f80;
    for (int r = 0; r < rows; r++) largest[r] = -INFINITY;
    memset(sums, 0, rows * s.width * sizeof(float));
    load_queries(&s, &t, q, head);
    for (ptrdiff_t start = 0; start < kv.num_keys; start += pass_keys, kv.table += pass_blocks) {
        ptrdiff_t left = kv.num_keys - start;
        key_range pass = {left, pass_keys, pass_keys};
        if (left < pass_keys) {
            pass.keys = (left + PANEL - 1) / PANEL * PANEL;
            pass.weighted = (left + TERMS - 1) / TERMS * TERMS;
        }
        score_keys(&s, &t, kv, following, pass);
        for (int r = 0; r < rows; r++) softmax_row(&s, &t, pass, r);
        rescale_sums(&s, &t);
        add_values(&s, &t, pass, ones);
    }
    store_output(&s, &t, out, head);
}

/* Up to TILE_ROWS / group tokens of a sequence. */
typedef struct {
    int32_t row, first, count, keys; /* tokens [first, first + count) of the batch, and what the last of them sees */
} token_tile;

/* Cut row r's tokens into tiles, the one that sees most first; returns their number. */
static ptrdiff_t cut_row(const int32_t *cu_seqlens, const int32_t *seq_lens, int32_t r, int most, token_tile *tiles) {
    ptrdiff_t n = 0;
    for (int32_t rest = cu_seqlens[r + 1] - cu_seqlens[r], behind = 0, count; rest > 0; rest -= count, behind += count) {
        count = (rest - 1) % most + 1;
        tiles[n++] = (token_tile){r, cu_seqlens[r] + rest - count, count, seq_lens[r] - behind};
    }
    return n;
}

/* Causal attention of a batch: row r has tokens [cu_seqlens[r], cu_seqlens[r + 1]), the last ones of seq_lens[r]. */
void nv_attention(const bf16 *q, bf16 *out, const uint8_t *cache, ptrdiff_t blocks, const int32_t *tables,
                  ptrdiff_t table_width, const int32_t *cu_seqlens, const int32_t *seq_lens, ptrdiff_t num_rows, ptrdiff_t heads,
                  ptrdiff_t kv_heads, ptrdiff_t dim, ptrdiff_t block, ptrdiff_t bits, float scale) {
    int group = heads / kv_heads, most = TILE_ROWS / group;
    ptrdiff_t width = width_of(dim), half = half_bytes(width, block, bits), head_bytes = blocks * 2 * half, num_tiles = 0, n = 0;
    attention_shape shape = {heads, dim, width, block, bits, half, group, scale * 1.44269504f};
    for (ptrdiff_t r = 0; r < num_rows; r++) num_tiles += (cu_seqlens[r + 1] - cu_seqlens[r] + most - 1) / most;
    token_tile *tiles = malloc(num_tiles * sizeof *tiles);
    for (ptrdiff_t r = 0; r < num_rows; r++) n += cut_row(cu_seqlens, seq_lens, r, most, tiles + n);
#pragma omp parallel
    {
        begin_tiles();
#pragma omp for schedule(guided) /* a head's tiles read the same keys; a thread's follow each other */
        for (ptrdiff_t item = 0; item < num_tiles * kv_heads; item++) {
            ptrdiff_t head = item / num_tiles, next_head = (item + 1) / num_tiles % kv_heads;
            token_tile t = tiles[item % num_tiles], next = tiles[(item + 1) % num_tiles];
            kv_sequence kv = {cache + head * head_bytes, tables + t.row * table_width, t.keys};
            kv_sequence following = {cache + next_head * head_bytes, tables + next.row * table_width, next.keys};
            ptrdiff_t offset = t.first * heads * dim;
            attend(shape, q + offset, out + offset, kv, following, t.count, head);
        }
        end_tiles();
    }
    free(tiles);
}
