/* Attention over the paged cache, as flash attention computes it: a tile of up to 32 query rows goes once through the keys and
 * values of its sequence, in passes. Each row keeps its largest score so far, the sum of its weights, and the sum of its weighted
 * values; when a pass finds a larger score, both sums are rescaled. A row is one query head of one token; the query heads of a KV
 * head share a tile. Tiles whose sequences begin with the same blocks go through these passes as one tile.
 * Sums begin anew every SEGMENT_KEYS keys, and those of a row's segments are added in order. So threads can share a long
 * sequence, and a row's result does not depend on whether they do.
 */
#include "cache.h"

enum { SEGMENT_KEYS = 4096 };

/* What all tiles of a call share. */
typedef struct {
    ptrdiff_t heads;    /* query heads of a token */
    int group;          /* query heads that share a tile */
    ptrdiff_t values;   /* numbers of a value: c.dim, or less where the values are the last numbers of the keys */
    ptrdiff_t skipped;  /* numbers of a key before those that are its value */
    ptrdiff_t window;   /* keys that a token sees, its own and those before it, at most */
    float scale;        /* of scores, times log2(e): a weight is exp2(scale * (score - row_max)) */
    float squash;       /* a score becomes tanh(squash * score); 0: it stays */
    ptrdiff_t turn;     /* with 8 and 4 bits results are rotated by hadamard() of this size, with 16 it is 0 */
    const float *sinks; /* [heads]: a sink is a score more of each row, whose value is 0; NULL: there are none */
} query_shape;

/* Tokens [first, first + count) of a sequence in the batch. The first sees the keys up to `seen`, those before its window aside,
 * and each sees one more than the last, or as many: num_keys at most. The window of the first ends with its `own` key. */
typedef struct {
    const int32_t *block_table;
    int32_t first, count, own, seen, num_keys;
    int32_t shareable; /* so many blocks, whole passes that all tokens see in full, may be read together with another tile's */
} token_tile;

/* Adjacent tiles, which go through their first `passes` passes as one tile. */
typedef struct {
    const token_tile *tiles;
    ptrdiff_t count, passes;
    ptrdiff_t first, last; /* the segments from the first to before the last have all keys that the tiles see */
    ptrdiff_t rows;
    ptrdiff_t split; /* 0, or if threads share the group: where its segments' sums end in the team's memory */
} tile_group;

/* Segments of a group, from the first to before the last, that one thread goes through: all, or one of a group that is split. */
typedef struct {
    const tile_group *group;
    ptrdiff_t first, last;
    ptrdiff_t run, end; /* the pieces from run to before end are of the same row of the batch */
} piece;

/* A KV head of all sequences. */
typedef struct {
    const uint8_t *cache;  /* its part of block 0 */
    ptrdiff_t block_bytes; /* from a block to the next */
} kv_head;

/* Keys and values of a sequence in one KV head that a tile goes through, from a pass's first key on. */
typedef struct {
    kv_head head;
    const int32_t *block_table;
    ptrdiff_t num_keys; /* 0 or less: none */
    ptrdiff_t first;    /* the blocks before this key are outside the window of all rows: they and their ids are not read */
    ptrdiff_t own;      /* keys up to the tile's first token's own */
    ptrdiff_t seen;     /* keys up to the last that the tile's first token sees */
} kv_sequence;

/* A tile of query rows and its state between the passes. Row r is head r % group of the group, in token r / group of the tile. */
typedef struct {
    query_shape shape;
    int rows;
    ptrdiff_t pass_keys, pass_blocks;
    operand *query;            /* 16 bits: [rows][width] */
    float *scores;             /* [rows][pass_keys]; a row's weights overwrite its scores, from the row's start on: operands,
                                * or with 8 and 4 bits bfloat16 */
    float *acc;                /* [rows][value_width]: the sum of weighted values */
    ptrdiff_t value_width;     /* of the values, rounded up to whole panels */
    bf16 *turned;              /* [pass_keys/2][32][2]: a panel of values, made of keys; NULL: the cache has values */
    float *row_max, *row_sum;  /* [rows]: the largest score, and the sum of weights */
    float *rescale, *pass_sum; /* [rows]: the factor for earlier sums, and the pass's sum of weights */
    bf16 *rotated;             /* 8 and 4 bits: queries, [rows][width] */
    quantized_rows queries, weights; /* 8 and 4 bits: the packed inputs of all keys' products, and of a block's values */
    const uint16_t *ones;            /* 8 and 4 bits: scales of values, which the weights have been multiplied by */
    const bf16 **values, **prefetch; /* by block: the values, and what to prefetch while they are read. Of keys that are also
                                      * values, the block itself, and what to prefetch while its keys are read */
} query_tile;

typedef struct {
    ptrdiff_t first; /* the keys before this one are not read; a block's first key */
    ptrdiff_t left;  /* keys from the pass's first to the last of the kv_sequence */
    ptrdiff_t own;   /* keys from the pass's first to the tile's first token's own */
    ptrdiff_t seen;  /* keys from the pass's first to the last that the tile's first token sees */
    ptrdiff_t keys;  /* keys of the pass, rounded up to whole panels */
    ptrdiff_t k;     /* keys of the pass, rounded up to K_MULTIPLE: where the product with the values ends */
} key_pass;

/* Blocks of a pass, which has PASS_KEYS keys, but at least a block. */
INLINE ptrdiff_t blocks_of_pass(const cache_layout *c) { return c->block < PASS_KEYS ? PASS_KEYS / c->block : 1; }
INLINE ptrdiff_t keys_of_pass(const cache_layout *c) { return blocks_of_pass(c) * c->block; }

/* Passes of a segment, which has SEGMENT_KEYS keys or some more. */
INLINE ptrdiff_t passes_of_segment(const cache_layout *c) { return (SEGMENT_KEYS - 1) / keys_of_pass(c) + 1; }

/* A row's sums over segments: its weighted values, rounded up to whole panels, the largest score, and the sum of weights, which
 * is 0 while the row has seen no key. The rest of its cache line is unused. */
INLINE ptrdiff_t row_floats(ptrdiff_t value_width) { return value_width + 16; }
INLINE ptrdiff_t width_of_values(const query_shape *s) { return (s->values + PANEL - 1) / PANEL * PANEL; }

INLINE const uint8_t *block_at(kv_sequence kv, ptrdiff_t b) { return kv.head.cache + kv.block_table[b] * kv.head.block_bytes; }

/* Return which of the heads of the batch's tokens row r is, counted from the tile's first row. */
INLINE ptrdiff_t head_of_row(const query_shape *s, int r) { return r / s->group * s->heads + r % s->group; }

INLINE void load_queries(const cache_layout *c, const query_tile *t, const bf16 *q) {
    for (int r = 0; r < t->rows; r++) {
        const bf16 *from = q + head_of_row(&t->shape, r) * c->dim;
        if (c->bits == 16) {
            operand *row = t->query + r * c->width;
            for (ptrdiff_t d = 0; d < c->width; d += VL)
                store_operand(row + d, d < c->dim ? load_bf16(from + d, c->dim - d) : (vf){0});
        } else {
            float row[c->width];
            for (ptrdiff_t d = 0; d < c->width; d += VL) store(row + d, d < c->dim ? load_bf16(from + d, c->dim - d) : (vf){0});
            hadamard(row, c->width, c->turn);
            for (ptrdiff_t d = 0; d < c->width; d += VL) store_bf16(t->rotated + r * c->width + d, VL, load(row + d));
        }
    }
}

/* Round rows of x, ldx apart, to the packed inputs of products with 8 or 4 bits. */
INLINE void pack_inputs(const cache_layout *c, const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, quantized_rows q, ptrdiff_t group,
                        int kind) {
    for (ptrdiff_t item = 0; item < quantize_items(rows, (int)c->bits); item++)
        quantize_rows(x, ldx, rows, q, group, (int)c->bits, kind, item);
}

/* Compute the scores of a pass's keys, and note where its values lie. While a panel of keys is read, what stands in its place in
 * the block's values is prefetched, in one stretch, which is faster in long sequences. While values are read, keys in the same
 * place of the next pass, or of the next tile's first, are prefetched. So are the scales of both, which lie behind the numbers.
 */
INLINE void score_keys(const cache_layout *c, const query_tile *t, kv_sequence kv, kv_sequence next_kv, key_pass pass) {
    ptrdiff_t inputs = (c->dim + K_MULTIPLE - 1) / K_MULTIPLE * K_MULTIPLE; /* of a key, without most of its padding */
    ptrdiff_t groups = c->width / c->group * (c->bits == 4 ? 2 : 1);
    for (ptrdiff_t j = pass.first, n = 1; j < pass.keys; j += n * PANEL) {
        ptrdiff_t b = j / c->block, in_block = j % c->block;
        const uint8_t *keys = block_at(kv, b), *values = t->turned ? keys : keys + c->half_bytes, *next = values;
        if (t->pass_keys + j < pass.left) next = block_at(kv, t->pass_blocks + b);
        else if (t->pass_keys >= pass.left && j >= next_kv.first && j < next_kv.num_keys) next = block_at(next_kv, b);
        output_rows found = {t->scores + j, t->pass_keys};
        t->values[b] = (const bf16 *)values, t->prefetch[b] = (const bf16 *)next;
        if (c->bits == 16) {
            const bf16 *panel = (const bf16 *)keys + in_block * c->width;
            const bf16 *ahead = t->turned ? (const bf16 *)next + in_block * c->width : panel + c->half_bytes / 2;
            panel_pieces pieces = {&panel, &ahead, c->width};
            ptrdiff_t left = pass.keys - j < c->block - in_block ? pass.keys - j : c->block - in_block;
            n = tile_side_by_side(t->rows, left / PANEL, inputs, (input_rows){t->query, c->width}, pieces, found, 0);
        } else {
            const uint16_t *scales = (const uint16_t *)(keys + c->scale_offset) + in_block * groups;
            ptrdiff_t at = bytes_of(c, in_block * c->width), next_scales = c->scale_offset + in_block * groups * 2;
            __builtin_prefetch(values + c->scale_offset + in_block * 2, 0, 2);
            for (ptrdiff_t line = 0; next != values && line < groups * PANEL * 2; line += 64)
                __builtin_prefetch(next + next_scales + line, 0, 2);
            (c->bits == 8 ? cache_tile8 : key_tile4)(t->rows, c->width, c->group, t->queries, (int_panel){keys + at, scales, 0},
                                                     values + at, found, 0);
        }
    }
}

/* Squash a row's scores of a pass, if there is a softcap, and set those that its token does not see to -inf. */
INLINE void mask_row(const query_tile *t, key_pass pass, int r, float *scores) {
    int token = r / t->shape.group;
    ptrdiff_t visible = pass.seen + token, hidden = pass.own + token - t->shape.window;
    if (visible > pass.left) visible = pass.left; /* all tokens see as many */
    if (t->shape.squash != 0.0f)
        for (ptrdiff_t j = pass.first; j < pass.keys; j += VL) store(scores + j, tanh_(load(scores + j) * t->shape.squash));
    for (ptrdiff_t j = visible < 0 ? 0 : visible / VL * VL; j < pass.keys; j += VL)
        store(scores + j, blend(lanes() < (int)(visible - j), load(scores + j), broadcast(-INFINITY)));
    for (ptrdiff_t j = pass.first; j < hidden && j < pass.keys; j += VL)
        store(scores + j, blend(lanes() < (int)(hidden - j), broadcast(-INFINITY), load(scores + j)));
}

/* Find row r's largest score so far, and the logarithm of the factor for its earlier sums. */
INLINE void find_max(const query_tile *t, key_pass pass, int r) {
    float *scores = t->scores + r * t->pass_keys;
    mask_row(t, pass, r, scores);
    vf top = broadcast(t->row_max[r]);
    for (ptrdiff_t j = pass.first; j < pass.keys; j += VL) top = larger(top, load(scores + j));
    float row_max = largest_of(top);
    t->rescale[r] = t->row_max[r] - (row_max == -INFINITY ? 0.0f : row_max), t->row_max[r] = row_max;
}

/* Replace row r's scores of a pass by weights. With 8 and 4 bits a weight is multiplied by its value's scale. A pass whose keys
 * the row does not see leaves the row's sums as they are, bit for bit. */
INLINE void softmax_row(const cache_layout *c, const query_tile *t, key_pass pass, int r) {
    float *scores = t->scores + r * t->pass_keys, row_max = t->row_max[r] == -INFINITY ? 0.0f : t->row_max[r];
    vf scale = broadcast(t->shape.scale), shift = broadcast(-row_max * t->shape.scale), sum = {0};
    for (ptrdiff_t j = pass.first; j < pass.keys && c->bits == 16; j += VL) {
        vf weight = exp2_(fma_(load(scores + j), scale, shift));
        sum += weight;
        store_operand((operand *)scores + j, weight);
    }
    for (ptrdiff_t b = pass.first / c->block, j = pass.first; j < pass.keys && c->bits != 16; b++) {
        const uint16_t *scales = (const uint16_t *)((const uint8_t *)t->values[b] + c->scale_offset);
        for (ptrdiff_t end = j + c->block; j < end && j < pass.keys; j += VL, scales += VL) {
            vf weight = exp2_(fma_(load(scores + j), scale, shift));
            sum += weight;
            store_bf16((bf16 *)scores + j, VL, weight * from_f16(*(const half_vu *)scales));
        }
    }
    t->pass_sum[r] = sum_of(sum);
}

/* Rescale the sums of earlier passes to the new row_max, and add the pass's weights to row_sum. */
INLINE void rescale_sums(const cache_layout *c, const query_tile *t) {
    for (int r = 0; r < t->rows; r += VL) {
        store(t->rescale + r, exp2_(load(t->rescale + r) * t->shape.scale));
        store(t->row_sum + r, fma_(load(t->row_sum + r), load(t->rescale + r), load(t->pass_sum + r)));
    }
    for (int r = 0; r < t->rows; r++) {
        float *acc = t->acc + r * t->value_width;
        for (ptrdiff_t d = 0; d < t->value_width && t->rescale[r] != 1.0f; d += VL) store(acc + d, load(acc + d) * t->rescale[r]);
    }
}

/* Make the panel of a pass's values from d on of keys, which have them from shape.skipped + d on. */
INLINE void turn_keys(const cache_layout *c, const query_tile *t, key_pass pass, ptrdiff_t d) {
    ptrdiff_t from = t->shape.skipped + d;
    for (ptrdiff_t j = pass.first; j < pass.keys; j += PANEL)
        turn_square(t->values[j / c->block] + j % c->block * c->width + from * PANEL, (c->width - from) / 2,
                    t->turned + j * PANEL);
}

/* Keys whose weights share a scale in each row. With inputs of 16 bits all of a block may. */
INLINE ptrdiff_t weight_group(const cache_layout *c, ptrdiff_t keys) {
    return c->bits == 8 && !BYTE_INPUTS && c->block <= K_STEP ? keys : PANEL;
}

/* add_values() with 8 or 4 bits, where a block's weights at a time are rounded. */
INLINE void add_rounded(const cache_layout *c, const query_tile *t, key_pass pass) {
    for (ptrdiff_t b = pass.first / c->block; b * c->block < pass.keys; b++) {
        ptrdiff_t left = pass.keys - b * c->block, keys = left < c->block ? left : c->block, group = weight_group(c, keys);
        quantized_rows weights = t->weights;
        weights.ld = keys, weights.groups = keys / group;
        pack_inputs(c, (const bf16 *)t->scores + b * c->block, 2 * t->pass_keys, t->rows, weights, group,
                    c->bits == 8 ? CACHE8 : PLAIN);
        for (ptrdiff_t d = 0; d < t->value_width; d += PANEL) {
            ptrdiff_t at = bytes_of(c, d * c->block);
            int_panel panel = {(const uint8_t *)t->values[b] + at, t->ones, 0};
            (c->bits == 8 ? cache_tile8 : value_tile4)(t->rows, keys, group, weights, panel, (const uint8_t *)t->prefetch[b] + at,
                                                       (output_rows){t->acc + d, t->value_width}, 1);
        }
    }
}

/* acc += weights . values of a pass. */
INLINE void add_values(const cache_layout *c, const query_tile *t, key_pass pass) {
    ptrdiff_t ld = t->pass_keys * (ptrdiff_t)(sizeof *t->scores / sizeof(operand));
    input_rows weights = {(const operand *)t->scores + pass.first, ld};
    ptrdiff_t first = pass.first / c->block;
    if (c->bits < 16) {
        add_rounded(c, t, pass);
        return;
    }
    for (ptrdiff_t d = 0, n = 1; d < t->value_width; d += n * PANEL) {
        output_rows acc = {t->acc + d, t->value_width};
        if (t->turned) {
            const bf16 *panel = t->turned + pass.first * PANEL;
            turn_keys(c, t, pass, d);
            tile(t->rows, pass.k - pass.first, weights, (panel_pieces){&panel, &panel, t->pass_keys}, acc, 1);
            continue;
        }
        panel_pieces values = {t->values + first, t->prefetch + first, c->block};
        n = tile_side_by_side(t->rows, (t->value_width - d) / PANEL, pass.k - pass.first, weights, values, acc, 1);
        for (ptrdiff_t b = first; b * c->block < pass.keys; b++) /* on to the next panels of values */
            t->values[b] += n * c->block * PANEL, t->prefetch[b] += n * c->block * PANEL;
    }
}

/* Add to a row's sums over earlier segments those of the next, with factors as if both had been computed with the larger of
 * their largest scores. */
INLINE void add_segment(const query_shape *s, float *sums, const float *acc, float row_max, float row_sum) {
    ptrdiff_t value_width = width_of_values(s);
    float *stats = sums + value_width, top = stats[0] > row_max ? stats[0] : row_max;
    if (row_sum == 0.0f) return;
    if (stats[1] == 0.0f) {
        memcpy(sums, acc, value_width * sizeof *sums);
        stats[0] = row_max, stats[1] = row_sum;
        return;
    }
    vf earlier = exp2_(broadcast((stats[0] - top) * s->scale)), factor = exp2_(broadcast((row_max - top) * s->scale));
    for (ptrdiff_t d = 0; d < value_width; d += VL) store(sums + d, fma_(load(sums + d), earlier, load(acc + d) * factor));
    stats[0] = top, stats[1] = fma_(broadcast(stats[1]), earlier, row_sum * factor)[0];
}

/* Store the result of row r of a tile. A sink is a score more, whose value is 0. out points at the batch's first token. */
INLINE void store_result(const query_shape *s, const token_tile *tile, int r, const float *acc, float row_max, float row_sum,
                         bf16 *out) {
    vf factor = broadcast(1.0f), sum = broadcast(row_sum);
    if (s->sinks) {
        float score = row_max * s->scale, sink = s->sinks[r % s->group] * 1.44269504f, top = score > sink ? score : sink;
        factor = exp2_(broadcast(score - top)), sum = fma_(sum, factor, exp2_(broadcast(sink - top)));
    }
    factor /= sum;
    out += (tile->first * s->heads + head_of_row(s, r)) * s->values;
    if (s->turn) {
        ptrdiff_t width = width_of_values(s);
        float row[width];
        for (ptrdiff_t d = 0; d < width; d += VL) store(row + d, load(acc + d) * factor);
        hadamard(row, width, s->turn);
        for (ptrdiff_t d = 0, n = s->values; d < n; d += VL) store_bf16(out + d, n - d, load(row + d));
        return;
    }
    for (ptrdiff_t d = 0, n = s->values; d < n; d += VL) store_bf16(out + d, n - d, load(acc + d) * factor);
}

/* Begin the sums of a segment. */
INLINE void begin_segment(const query_tile *t) {
    for (int r = 0; r < t->rows; r++) t->row_max[r] = -INFINITY, t->row_sum[r] = 0.0f;
    memset(t->acc, 0, t->rows * t->value_width * sizeof *t->acc);
}

/* Go with a tile through the passes of kv. In long passes a block's values are read long after its keys. The tiles of AVX-512
 * prefetch them; without this, a single token takes 1.2 to 1.5 times as long. They also prefetch the first keys of next_kv, which
 * come next: decoding is 1.1 to 1.2 times as fast. With AMX neither makes a difference. Not inlined: inside a parallel region GCC
 * 12 keeps the constants of its loops in memory. */
static __attribute__((noinline)) void attend_passes(const cache_layout *c, const query_tile *t, kv_sequence kv,
                                                    kv_sequence next_kv) {
    if (c->bits < 16 && kv.num_keys > 0)
        pack_inputs(c, t->rotated, c->width, t->rows, t->queries, c->group, c->bits == 8 ? CACHE8 : MINIMUMS);
    for (key_pass pass = {kv.first, kv.num_keys, kv.own, kv.seen, t->pass_keys, t->pass_keys}; pass.left > 0;) {
        if (pass.left < t->pass_keys) {
            pass.keys = (pass.left + PANEL - 1) / PANEL * PANEL;
            pass.k = (pass.left + K_MULTIPLE - 1) / K_MULTIPLE * K_MULTIPLE;
        }
        score_keys(c, t, kv, next_kv, pass);
        for (int r = 0; r < t->rows; r++) find_max(t, pass, r);
        for (int r = 0; r < t->rows; r++) softmax_row(c, t, pass, r);
        rescale_sums(c, t);
        add_values(c, t, pass);
        pass.first = 0, pass.left -= t->pass_keys, pass.own -= t->pass_keys, pass.seen -= t->pass_keys;
        kv.block_table += t->pass_blocks;
    }
}

/* Return the first block that a tile sees. */
INLINE ptrdiff_t first_block(const cache_layout *c, token_tile t, ptrdiff_t window) {
    ptrdiff_t start = t.own - window;
    return start > 0 ? start / c->block : 0;
}

/* Return what a tile sees of its sequence in the passes from `first` to before `last`. Passes begin at multiples of their size,
 * wherever the window begins, so that a row's result does not depend on the other tokens of its tile. */
INLINE kv_sequence visible_keys(const cache_layout *c, kv_head head, token_tile t, ptrdiff_t window, ptrdiff_t first,
                                ptrdiff_t last) {
    ptrdiff_t pass_blocks = blocks_of_pass(c), block = first_block(c, t, window);
    if (block > first * pass_blocks) first = block / pass_blocks;
    else block = first * pass_blocks;
    ptrdiff_t skipped = first * pass_blocks, left = t.num_keys - skipped * c->block, most = (last - first) * keys_of_pass(c);
    return (kv_sequence){head,
                         t.block_table + skipped,
                         left < most ? left : most,
                         (block - skipped) * c->block,
                         t.own - skipped * c->block,
                         t.seen - skipped * c->block};
}

/* Return a part of a tile: `rows` rows from `first` on. */
INLINE query_tile part_of_tile(const cache_layout *c, query_tile t, int first, int rows) {
    t.rows = rows;
    t.query += first * c->width, t.rotated += first * c->width;
    t.acc += first * t.value_width, t.row_max += first, t.row_sum += first;
    return t;
}

/* Go with a group's tiles through a segment. Add its sums of each row to sums[rows][row_floats()], or if that is NULL, store the
 * results in `out`. next_kv is what comes after the segment. */
INLINE void attend_segment(const cache_layout *c, const query_tile *t, const tile_group *g, kv_head head, ptrdiff_t segment,
                           kv_sequence next_kv, float *sums, bf16 *out) {
    ptrdiff_t first = segment * passes_of_segment(c), last = first + passes_of_segment(c), window = t->shape.window;
    ptrdiff_t fork = g->passes < first ? first : g->passes < last ? g->passes : last;
    const token_tile *tile = g->tiles + g->count - 1;
    kv_sequence kv = visible_keys(c, head, *tile, window, fork, last), next;
    begin_segment(t);
    if (fork > first) attend_passes(c, t, visible_keys(c, head, *tile, window, first, fork), fork < last ? kv : next_kv);
    /* From the last tile on, because rescale_sums() changes the sums of up to VL - 1 rows behind a part. */
    for (int rows = t->rows, n; rows > 0; tile--, kv = next) {
        rows -= n = tile->count * t->shape.group;
        next = rows ? visible_keys(c, head, tile[-1], window, fork, last) : next_kv;
        query_tile part = part_of_tile(c, *t, rows, n);
        attend_passes(c, &part, kv, next);
        for (int r = 0; r < n; r++) {
            const float *acc = part.acc + r * t->value_width;
            if (sums)
                add_segment(&t->shape, sums + (rows + r) * row_floats(t->value_width), acc, part.row_max[r], part.row_sum[r]);
            else store_result(&t->shape, tile, r, acc, part.row_max[r], part.row_sum[r], out);
        }
    }
}

INLINE void clear_sums(float *sums, ptrdiff_t rows, ptrdiff_t value_width) {
    for (ptrdiff_t r = 0; r < rows; r++) sums[r * row_floats(value_width) + value_width + 1] = 0.0f;
}

/* Store the result of row r of a group from its sums over all segments. */
INLINE void store_sums(const query_shape *s, const tile_group *g, int r, const float *sums, bf16 *out) {
    const float *stats = sums + width_of_values(s);
    const token_tile *tile = g->tiles;
    for (; r >= tile->count * s->group; tile++) r -= tile->count * s->group;
    store_result(s, tile, r, sums, stats[0], stats[1], out);
}

/* Return the keys of a piece from a segment on that come first. */
INLINE kv_sequence first_keys(const cache_layout *c, kv_head head, const tile_group *g, ptrdiff_t window, ptrdiff_t segment) {
    ptrdiff_t first = segment * passes_of_segment(c);
    return visible_keys(c, head, g->tiles[g->count - 1], window, first, first + passes_of_segment(c));
}

/* Compute the attention of a piece, at most 32 rows, in the query heads of a KV head. q and out point at these heads of the
 * batch's first token. If the group is split, the sums of each row go to shared[rows][row_floats()] instead. next_kv is what
 * comes after the piece. */
static __attribute__((noinline)) void attend(cache_layout c, query_shape shape, const bf16 *q, bf16 *out, kv_head head, piece p,
                                             float *shared, kv_sequence next_kv) {
    const tile_group *g = p.group;
    if (g->passes) shape.window = INT32_MAX; /* all its tokens see key 0 */
    ptrdiff_t pass_blocks = blocks_of_pass(&c), pass_keys = keys_of_pass(&c);
    ptrdiff_t value_width = width_of_values(&shape);
    int turns = shape.values < c.dim; /* the values are a part of the keys */
    int several = !g->split && p.last - p.first > 1;
    operand query[TILE_ROWS * c.width] __attribute__((aligned(64)));
    float scores[TILE_ROWS * pass_keys] __attribute__((aligned(64)));
    float acc[TILE_ROWS * value_width] __attribute__((aligned(64)));
    float own_sums[several ? g->rows * row_floats(value_width) : 1] __attribute__((aligned(64)));
    bf16 turned[turns ? pass_keys * PANEL : 1] __attribute__((aligned(64)));
    /* 8 and 4 bits; inputs have two bytes at most. */
    ptrdiff_t ints = c.bits < 16 ? TILE_ROWS : 0, value_groups = c.block / PANEL;
    bf16 rotated[ints * c.width + 1] __attribute__((aligned(64)));
    char queries[ints * quantized_bytes(c.width, c.group, 2) + 64] __attribute__((aligned(64)));
    char weights[ints * quantized_bytes(c.block, PANEL, 2) + 64] __attribute__((aligned(64)));
    uint16_t ones[value_groups * PANEL] __attribute__((aligned(64)));
    for (ptrdiff_t i = 0; i < value_groups * PANEL; i++) ones[i] = 0x3c00; /* 1 in float16 */
    float row_max[TILE_ROWS], row_sum[TILE_ROWS + VL] = {0}, rescale[TILE_ROWS] = {0}, pass_sum[TILE_ROWS] = {0};
    const bf16 *values[pass_keys / PANEL], *prefetch[pass_keys / PANEL];
    query_tile t = {
        .shape = shape,
        .rows = (int)g->rows,
        .pass_keys = pass_keys,
        .pass_blocks = pass_blocks,
        .query = query,
        .scores = scores,
        .acc = acc,
        .value_width = value_width,
        .turned = turns ? turned : NULL,
        .row_max = row_max,
        .row_sum = row_sum,
        .rescale = rescale,
        .pass_sum = pass_sum,
        .rotated = rotated,
        .queries = quantized_at(queries, TILE_ROWS, c.width, c.group, 2),
        .weights = quantized_at(weights, TILE_ROWS, c.block, PANEL, 2),
        .ones = ones,
        .values = values,
        .prefetch = prefetch,
    };

    for (int i = 0, first = 0, n; i < g->count; i++, first += n) {
        n = g->tiles[i].count * shape.group;
        query_tile part = part_of_tile(&c, t, first, n);
        load_queries(&c, &part, q + g->tiles[i].first * shape.heads * c.dim);
    }
    float *sums = g->split ? shared : several ? own_sums : NULL;
    if (sums) clear_sums(sums, g->rows, value_width);
    for (ptrdiff_t s = p.first; s < p.last; s++)
        attend_segment(&c, &t, g, head, s, s + 1 < p.last ? first_keys(&c, head, g, shape.window, s + 1) : next_kv, sums, out);
    for (int r = 0; several && r < g->rows; r++) store_sums(&shape, g, r, sums + r * row_floats(value_width), out);
}

/* What decides how the rows of a batch are cut into tiles: parts of `group` query heads, max_tokens to a tile. */
typedef struct {
    int group, max_tokens;
    ptrdiff_t window;
    int causal;
} tiling;

/* Cut a row of `tokens` of the batch, the first of which is token `first`, the last is key num_keys - 1. Token i sees the keys up
 * to ends[i]; if that is NULL, those up to its own, or all if attention is not causal. A tile's tokens all see as many keys, or
 * each one more than the last. The tile of the last tokens comes first. Return the number of tiles; if `tiles` is NULL, do only
 * that. */
static ptrdiff_t cut_row(const cache_layout *c, tiling by, const int32_t *block_table, int32_t first, int32_t tokens,
                         int32_t num_keys, const int32_t *ends, token_tile *tiles) {
    ptrdiff_t n = 0;
    int32_t start = ends ? tokens : 0, step = by.causal; /* of the run that has token rest - 1 */
    for (int32_t rest = tokens, count; rest > 0; rest -= count) {
        if (rest == start) {
            step = --start == 0 || ends[start - 1] != ends[start];
            while (start > 0 && ends[start - 1] == ends[start] - step) start--;
        }
        count = (rest - start - 1) % by.max_tokens + 1;
        int32_t own = num_keys - tokens + rest, last = ends ? ends[rest - 1] : by.causal ? own : num_keys;
        int32_t seen = last - step * (count - 1);
        ptrdiff_t passes = count < by.max_tokens && last <= by.window ? seen / keys_of_pass(c) : 0;
        int32_t shareable = (int32_t)(passes * blocks_of_pass(c));
        if (tiles) tiles[n] = (token_tile){block_table, first + rest - count, count, own - count + 1, seen, last, shareable};
        n++;
    }
    return n;
}

/* Order tiles by the blocks that they may share, those of a row as they were cut. */
static int compare_tiles(const void *x, const void *y) {
    const token_tile *a = x, *b = y;
    int32_t common = a->shareable < b->shareable ? a->shareable : b->shareable;
    int order = memcmp(a->block_table, b->block_table, common * sizeof *a->block_table);
    if (!order) order = (a->shareable > b->shareable) - (a->shareable < b->shareable);
    return order ? order : (a->first < b->first) - (a->first > b->first);
}

/* Return the passes that two adjacent tiles can share. */
static ptrdiff_t common_passes(const cache_layout *c, const token_tile *tiles) {
    const token_tile *a = tiles, *b = tiles + 1;
    int32_t same = 0;
    while (same < a->shareable && same < b->shareable && a->block_table[same] == b->block_table[same]) same++;
    return same / blocks_of_pass(c);
}

/* Make groups of up to max_rows rows of adjacent tiles. A tile joins the neighbour with which it shares most passes, so all of a
 * group share as many. Return the number of groups. */
static ptrdiff_t group_tiles(const cache_layout *c, tiling by, const token_tile *tiles, ptrdiff_t num_tiles, int max_rows,
                             tile_group *groups) {
    ptrdiff_t n = 0;
    /* What tile i - 1 shares with the one before it, tile i with tile i - 1, and tile i with the next. */
    for (ptrdiff_t i = 0, earlier = 0, passes = 0, later; i < num_tiles; i++, earlier = passes, passes = later) {
        later = i + 1 < num_tiles ? common_passes(c, tiles + i) : 0;
        int more = tiles[i].count * by.group;
        if (!passes || passes < earlier || passes < later || groups[n - 1].rows + more > max_rows)
            groups[n++] = (tile_group){.tiles = tiles + i, .first = PTRDIFF_MAX};
        else groups[n - 1].passes = passes;
        tile_group *g = groups + n - 1;
        ptrdiff_t begin = first_block(c, tiles[i], by.window) / blocks_of_pass(c) / passes_of_segment(c);
        ptrdiff_t end = (tiles[i].num_keys - 1) / keys_of_pass(c) / passes_of_segment(c) + 1;
        g->count++, g->rows += more, g->first = begin < g->first ? begin : g->first, g->last = end > g->last ? end : g->last;
    }
    return n;
}

/* Return the passes of a group's tiles, those that they share counted once. */
static ptrdiff_t passes_of_group(const cache_layout *c, tiling by, const tile_group *g) {
    ptrdiff_t passes = g->passes;
    for (const token_tile *t = g->tiles; t < g->tiles + g->count; t++)
        passes += (t->num_keys - 1) / keys_of_pass(c) + 1 - first_block(c, *t, by.window) / blocks_of_pass(c) - g->passes;
    return passes;
}

/* Find the groups to split: those of several segments that are more than half of a thread's part of the work, in `heads` parts of
 * query heads. Add up the pieces of all groups and of these in num_pieces, and return how many floats their sums take. */
static ptrdiff_t split_groups(const cache_layout *c, tiling by, tile_group *groups, ptrdiff_t num_groups, ptrdiff_t heads,
                              ptrdiff_t threads, ptrdiff_t floats, ptrdiff_t num_pieces[2]) {
    ptrdiff_t work = 0, end = 0;
    for (tile_group *g = groups; g < groups + num_groups; g++) work += passes_of_group(c, by, g);
    for (tile_group *g = groups; g < groups + num_groups; g++) {
        ptrdiff_t segments = g->last - g->first;
        if (threads > 1 && segments > 1 && passes_of_group(c, by, g) * 2 * threads > work * heads) {
            g->split = end += segments * heads * g->rows * floats;
            num_pieces[0] += segments, num_pieces[1] += segments;
        } else num_pieces[0]++;
    }
    return end;
}

/* Cut groups into pieces, those that are split first. */
static void cut_groups(const tile_group *groups, ptrdiff_t num_groups, piece *pieces) {
    ptrdiff_t n = 0;
    for (int split = 1; split >= 0; split--)
        for (const tile_group *g = groups; g < groups + num_groups; g++)
            for (ptrdiff_t s = g->first; !g->split == !split && s < g->last; s++) {
                pieces[n++] = (piece){g, s, split ? s + 1 : g->last, 0, 0};
                if (!split) break;
            }
    for (ptrdiff_t i = n; i--;) {
        int same = i + 1 < n && pieces[i].group->tiles->block_table == pieces[i + 1].group->tiles->block_table;
        pieces[i].end = same ? pieces[i + 1].end : i + 1;
    }
    for (ptrdiff_t i = 0; i < n; i++) pieces[i].run = i && pieces[i - 1].end == pieces[i].end ? pieces[i - 1].run : i;
}

/* Return the piece of an item, and its part of the query heads. A row's pieces in a part share keys and meet in a thread's cache.
 * The row's next part comes next: its keys are adjacent to those of the last in each block, and as many. */
INLINE piece piece_at(const piece *pieces, ptrdiff_t heads, ptrdiff_t item, ptrdiff_t *part) {
    piece p = pieces[item / heads];
    ptrdiff_t in_run = item - p.run * heads, size = p.end - p.run;
    *part = in_run / size;
    return pieces[p.run + in_run % size];
}

/* Return the sums of a segment of a split group in part `head` of `heads` parts of query heads: [rows][floats]. */
INLINE float *sums_of_segment(float *memory, const tile_group *g, ptrdiff_t segment, ptrdiff_t heads, ptrdiff_t head,
                              ptrdiff_t floats) {
    return memory + g->split - ((g->last - segment) * heads - head) * g->rows * floats;
}

/* Return into how many parts to cut the query heads of a KV head, so that a part fits a tile, and tiles are few. Heads that fill
 * more than half of a tile leave no room for another token: parts of them share a tile with those of other tokens. */
static int parts_of_group(int group, ptrdiff_t tokens, ptrdiff_t rows) {
    ptrdiff_t mean = rows ? (tokens + rows - 1) / rows : 1, fewest = PTRDIFF_MAX;
    int best = 1;
    if (2 * group <= TILE_ROWS) return 1;
    for (int parts = 1; parts <= group; parts++) {
        if (group % parts || group / parts > TILE_ROWS) continue;
        ptrdiff_t max_tokens = TILE_ROWS / (group / parts), tiles = (mean + max_tokens - 1) / max_tokens * parts;
        if (tiles < fewest) fewest = tiles, best = parts;
    }
    return best;
}

/* Compute attention of a batch. Row r has the tokens [cu_seqlens[r], cu_seqlens[r + 1]), the last of its seq_lens[r]. A token at
 * position p sees the keys in (p - window, p]; if the window is 0, all up to p; if it is -1, all of its row. Unless `ends` is
 * NULL, token t of the batch sees the keys before ends[t] in place of those up to p, from the same one on. A score
 * s = scale * q . k becomes softcap * tanh(s / softcap), unless softcap is 0. Unless sinks[heads] is NULL, exp(sink) is added to
 * the sum of a softmax. If `values` is less than dim, the cache has only keys, of 16 bits, and the last `values` numbers of a key
 * are its value. out is [tokens][heads][values]. */
void nv_attention(team *team, const bf16 *q, bf16 *out, const uint8_t *cache, ptrdiff_t head_bytes, ptrdiff_t block_bytes,
                  const int32_t *block_tables, ptrdiff_t table_width, const int32_t *cu_seqlens, const int32_t *seq_lens,
                  const int32_t *ends, const float *sinks, row_count num_rows, ptrdiff_t heads, ptrdiff_t kv_heads, ptrdiff_t dim,
                  ptrdiff_t values, ptrdiff_t block, ptrdiff_t bits, ptrdiff_t window, float scale, float softcap) {
    int parts = parts_of_group(heads / kv_heads, cu_seqlens[num_rows], num_rows), group = heads / kv_heads / parts;
    cache_layout layout = layout_of(dim, block, bits);
    query_shape shape = {
        heads, group, values, dim - values, window > 0 ? window : INT32_MAX, scale * 1.44269504f, 0, bits < 16 ? layout.turn : 0,
        NULL};
    if (softcap != 0.0f) shape.squash = scale / softcap, shape.scale = softcap * 1.44269504f;
    tiling by = {group, TILE_ROWS / group, shape.window, window >= 0};
    ptrdiff_t num_tiles = 0, n = 0, num_groups = 0, floats = row_floats(width_of_values(&shape)), num_pieces[2] = {0};
#define CUT_ROW(r, tiles)                                                                                               \
    cut_row(&layout, by, block_tables + r * table_width, cu_seqlens[r], cu_seqlens[r + 1] - cu_seqlens[r], seq_lens[r], \
            ends ? ends + cu_seqlens[r] : NULL, tiles)
    for (ptrdiff_t r = 0; r < num_rows; r++) num_tiles += CUT_ROW(r, NULL);
    tile_group *groups = scratch(num_tiles * (sizeof *groups + sizeof(token_tile)));
    float *memory = NULL;
    heads = kv_heads * parts;
    if (groups) {
        token_tile *tiles = (token_tile *)(groups + num_tiles);
        for (ptrdiff_t r = 0; r < num_rows; r++) n += CUT_ROW(r, tiles + n);
        /* Groups are smaller where there would be few of them for each thread. */
        int max_rows = TILE_ROWS;
        ptrdiff_t rows = cu_seqlens[num_rows] * group, enough = 2 * team->threads;
        while (max_rows > group && rows / max_rows * heads < enough) max_rows /= 2;
        qsort(tiles, num_tiles, sizeof *tiles, compare_tiles);
        num_groups = group_tiles(&layout, by, tiles, num_tiles, max_rows, groups);
        ptrdiff_t end = split_groups(&layout, by, groups, num_groups, heads, team->threads, floats, num_pieces);
        if (end) memory = team_memory(end * sizeof *memory);
    }
    piece *pieces = scratch(num_pieces[0] * sizeof *pieces);
    if (pieces) cut_groups(groups, num_groups, pieces);
    ptrdiff_t num_items = num_pieces[0] * heads;
    FOR_ITEMS(item, team, num_items) {
        ptrdiff_t part, next_part;
        piece p = piece_at(pieces, heads, item, &part), next = piece_at(pieces, heads, (item + 1) % num_items, &next_part);
        kv_head head = {cache + part / parts * head_bytes, block_bytes},
                next_head = {cache + next_part / parts * head_bytes, block_bytes};
        float *shared = p.group->split ? sums_of_segment(memory, p.group, p.first, heads, part, floats) : NULL;
        if (sinks) shape.sinks = sinks + part * group;
        attend(layout, shape, q + part * group * dim, out + part * group * values, head, p, shared,
               first_keys(&layout, next_head, next.group, shape.window, next.first));
    }
    end_tiles();
    /* The pieces of a split group share its rows. */
    FOR_ITEMS(item, team, num_pieces[1] * heads) {
        ptrdiff_t part = item / num_pieces[1];
        piece p = pieces[item % num_pieces[1]];
        const tile_group *g = p.group;
        if (sinks) shape.sinks = sinks + part * group;
        for (ptrdiff_t r = p.first - g->first; r < g->rows; r += g->last - g->first) {
            float *sums = sums_of_segment(memory, g, g->first, heads, part, floats) + r * floats;
            for (ptrdiff_t s = g->first + 1; s < g->last; s++) {
                float *more = sums_of_segment(memory, g, s, heads, part, floats) + r * floats, *stats = more + floats - 16;
                add_segment(&shape, sums, more, stats[0], stats[1]);
            }
            store_sums(&shape, g, r, sums, out + part * group * values);
        }
    }
    free(pieces);
    free(groups);
}
