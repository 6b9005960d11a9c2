/* Attention over the paged cache. */
#include "cache.h"
#include "int_tiles.h"

/* The keys that a sequence has of a KV head: where the head's cache begins, and the blocks of the sequence. */
typedef struct {
    const uint8_t *cache;
    const int32_t *table;
    ptrdiff_t keys;
} kv_head;

/* One KV head's part of up to 32 query rows: the last `count` of the tokens that `kv` has, times the heads of the group. With a
 * cache of 8 bits queries and weights are rounded to 16, as the inputs of a linear are; a value's scale is part of its weight. A
 * pass goes through KEYS keys, at least a block. In long passes a block's values are read long after its keys, which takes 1.2
 * to 1.5 times as long for a single token unless they are fetched meanwhile, as by AVX512-BF16's tiles; these fetch the first
 * keys of `following` too, the next item's (decoding is 1.1 to 1.2 times as fast). */
static void attend(const bf16 *q, bf16 *out, kv_head kv, kv_head following, int count, int group, ptrdiff_t heads, ptrdiff_t head,
                   ptrdiff_t dim, ptrdiff_t block, ptrdiff_t bits, float scale) {
    int rows = count * group;
    ptrdiff_t width = width_of(dim), size = half_bytes(width, block, bits);
    ptrdiff_t together = block < KEYS ? KEYS / block : 1, keys = together * block; /* blocks, and keys, of a pass */
    act query[TILE_ROWS * width] __attribute__((aligned(64)));
    float scores[TILE_ROWS * keys] __attribute__((aligned(64))), sums[TILE_ROWS * width] __attribute__((aligned(64)));
    float query_scales[TILE_ROWS], weight_scales[TILE_ROWS * (keys / PANEL)], largest[TILE_ROWS];
    float total[TILE_ROWS] = {0}, kept[TILE_ROWS] = {0}, added[TILE_ROWS] = {0}; /* weights' sums, what a pass leaves of them, and adds */
    int32_t eights[TILE_ROWS * (keys / PANEL)];
    ptrdiff_t ldw = keys * (ptrdiff_t)(sizeof *scores / sizeof(act)); /* a row's weights lie where its scores did */
    rounded_rows queries = {query, query_scales, eights, width, 1};
    rounded_rows parts = {scores, weight_scales, eights, keys * 2, keys / PANEL};
    const bf16 *values[together], *next[together];
    bf16 ones[block];
    for (ptrdiff_t j = 0; bits == 8 && j < block; j++) ones[j] = 0x3f80;
    for (int r = 0; r < rows; r++) {
        const bf16 *from = q + ((r / group) * heads + head * group + r % group) * dim;
        if (bits == 16) {
            for (ptrdiff_t d = 0; d < width; d += VL) store_act(query + r * width + d, d < dim ? load16(from + d, dim - d) : (vf){0});
        } else {
            bf16 filled[width];
            memset(filled, 0, sizeof filled);
            memcpy(filled, from, dim * sizeof *from);
            round_row(filled, 2, &queries, r, width, 8);
        }
        largest[r] = -INFINITY;
    }
    memset(sums, 0, rows * width * sizeof(float));
    scale *= 1.44269504f; /* weights are powers of 2 */
    for (ptrdiff_t start = 0; start < kv.keys; start += keys, kv.table += together) {
        ptrdiff_t left = kv.keys - start, used = left < keys ? (left + PANEL - 1) / PANEL * PANEL : keys;
        ptrdiff_t weighed = left < keys ? (left + TERMS - 1) / TERMS * TERMS : keys;
        for (ptrdiff_t j = 0; j < used; j += PANEL) {
            ptrdiff_t b = j / block;
            const uint8_t *k = kv.cache + kv.table[b] * 2 * size;
            const bf16 *panel = (const bf16 *)k + j % block * width, *its_values = panel + size / 2;
            values[b] = (const bf16 *)(k + size);
            next[b] = values[b];
            if (keys + j < left) next[b] = (const bf16 *)(kv.cache + kv.table[together + b] * 2 * size);
            else if (keys >= left && j < following.keys) next[b] = (const bf16 *)(following.cache + following.table[b] * 2 * size);
            if (bits == 16) tile(query, width, &panel, &its_values, width, width, rows, scores + j, keys, 0);
            else {
                const bf16 *scales = (const bf16 *)(k + block * width) + j % block;
                int_tile(8, &queries, 0, k + j % block * width, scales, width, width, rows, scores + j, keys, 0);
            }
        }
        for (int r = 0; r < rows; r++) {
            ptrdiff_t seen = left - count + r / group + 1; /* keys of this pass that row r sees */
            float *s = scores + r * keys;
            for (ptrdiff_t j = seen < 0 ? 0 : seen / VL * VL; j < used; j += VL)
                store(s + j, choose(lanes() < (int)(seen - j), load(s + j), each(-INFINITY)));
            vf top = each(largest[r]), sum = {0};
            for (ptrdiff_t j = 0; j < used; j += VL) top = larger(top, load(s + j));
            float now = largest_of(top);
            vf shift = each(-now * scale);
            for (ptrdiff_t j = 0; j < used; j += VL) {
                vf e = exp2_(fma_(load(s + j), each(scale), shift));
                sum += e;
                if (bits == 16) store_act((act *)s + j, e);
                else store(s + j, e * load16((const bf16 *)((const uint8_t *)values[j / block] + block * width) + j % block, VL));
            }
            kept[r] = largest[r] - now, largest[r] = now, added[r] = sum_of(sum);
            parts.groups = used / PANEL;
            if (bits == 8) round_row(s, 4, &parts, r, PANEL, 8);
        }
        for (int r = 0; r < rows; r += VL) {
            store(kept + r, exp2_(load(kept + r) * scale));
            store(total + r, fma_(load(total + r), load(kept + r), load(added + r)));
        }
        for (int r = 0; r < rows; r++)
            for (ptrdiff_t d = 0; d < width && kept[r] != 1.0f; d += VL)
                store(sums + r * width + d, load(sums + r * width + d) * kept[r]);
        for (ptrdiff_t d = 0; d < width; d += PANEL) {
            if (bits == 16) tile((const act *)scores, ldw, values, next, block, weighed, rows, sums + d, width, 1);
            for (ptrdiff_t j = 0, b = 0; j < used; j += block, b++) {
                rounded_rows part = {(int16_t *)scores + j, weight_scales + j / PANEL, eights, keys * 2, used / PANEL};
                const uint8_t *v = (const uint8_t *)values[b] + d * block;
                ptrdiff_t its_keys = used - j < block ? used - j : block;
                if (bits == 8) int_tile(8, &part, 0, v, ones, its_keys, PANEL, rows, sums + d, width, 1);
                else values[b] += block * PANEL, next[b] += block * PANEL;
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        bf16 *o = out + ((r / group) * heads + head * group + r % group) * dim;
        float inverse = 1.0f / total[r];
        for (ptrdiff_t d = 0; d < dim; d += VL) store16(o + d, dim - d, load(sums + r * width + d) * inverse);
    }
}

/* Causal attention of a batch: row r has tokens [cu_seqlens[r], cu_seqlens[r + 1]), the last ones of seq_lens[r]. */
void nv_attention(const bf16 *q, bf16 *out, const uint8_t *cache, ptrdiff_t blocks, const int32_t *tables,
                  ptrdiff_t table_width, const int32_t *cu_seqlens, const int32_t *seq_lens, ptrdiff_t num_rows, ptrdiff_t heads,
                  ptrdiff_t kv_heads, ptrdiff_t dim, ptrdiff_t block, ptrdiff_t bits, float scale) {
    int group = heads / kv_heads, tokens = TILE_ROWS / group;
    ptrdiff_t num_tiles = 0, n = 0, head_bytes = blocks * 2 * half_bytes(width_of(dim), block, bits);
    for (ptrdiff_t r = 0; r < num_rows; r++) num_tiles += (cu_seqlens[r + 1] - cu_seqlens[r] + tokens - 1) / tokens;
    struct {
        int32_t row, first, count, keys; /* tokens [first, first + count) of the batch, and what the last of them sees */
    } *tiles = malloc(num_tiles * sizeof *tiles);
    for (ptrdiff_t r = 0; r < num_rows; r++)
        for (int32_t rest = cu_seqlens[r + 1] - cu_seqlens[r], behind = 0, count; rest > 0; rest -= count, behind += count, n++) {
            count = (rest - 1) % tokens + 1; /* the longest first */
            tiles[n].row = r, tiles[n].first = cu_seqlens[r] + rest - count, tiles[n].count = count;
            tiles[n].keys = seq_lens[r] - behind;
        }
#pragma omp parallel
    {
        begin_tiles();
#pragma omp for schedule(guided) /* a head's tiles read the same keys; a thread's follow each other */
        for (ptrdiff_t item = 0; item < num_tiles * kv_heads; item++) {
            ptrdiff_t head = item / num_tiles, i = item % num_tiles, next = (i + 1) % num_tiles;
            kv_head kv = {cache + head * head_bytes, tables + tiles[i].row * table_width, tiles[i].keys};
            kv_head following = {cache + (item + 1) / num_tiles % kv_heads * head_bytes, tables + tiles[next].row * table_width, tiles[next].keys};
            ptrdiff_t offset = tiles[i].first * heads * dim;
            attend(q + offset, out + offset, kv, following, tiles[i].count, group, heads, head, dim, block, bits, scale);
        }
        end_tiles();
    }
    free(tiles);
}
