/* Prepares queries, keys and values for attention, by norm and rotation, and stores keys and values in the paged cache.
 * Layout of the cache: see cache.h.
 */
#include "cache.h"
#include "norm.h"

/* Round x[n] to scale * ints[n], where the largest number becomes 127. Return the scale. */
static bf16 quantize_token(const bf16 *x, int8_t *ints, ptrdiff_t n) {
    vf top = {0};
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = load_bf16(x + i, n - i);
        top = larger(top, larger(v, -v));
    }
    half_vu scale = to_bf16(broadcast(largest_of(top) / 127));
    /* A scale below 1e-30, such as 0, has no usable inverse: the integers become 0. */
    float inverse = from_bf16(scale)[0] > 1e-30f ? 1 / from_bf16(scale)[0] : 0;
    for (ptrdiff_t i = 0; i < n; i += VL) {
        quarter_vb v = __builtin_convertvector(nearest(load_bf16(x + i, n - i) * inverse), quarter_vb);
        memcpy(ints + i, &v, n - i < VL ? n - i : VL);
    }
    return scale[0];
}

/* How heads are prepared; each step's result is rounded. Of a head's dim numbers the first `rotary` are rotated, in pairs that
 * are rotary/2 apart; with `interleaved` the pairs of the input are adjacent instead. */
typedef struct {
    ptrdiff_t dim, rotary, interleaved, norm, after_rotation;
    float eps;
} preparation;

/* out = x[dim] after rotation; angles are [2][rotary/2]: cos, then sin. */
INLINE void rotate(const bf16 *x, const float *angles, bf16 *out, const preparation *p) {
    ptrdiff_t half = p->rotary / 2;
    for (ptrdiff_t i = 0; i < half; i += VL) {
        ptrdiff_t left = half - i;
        vf c = load_f32(angles + i, left), s = load_f32(angles + half + i, left), first, second;
        if (p->interleaved) {
            vu pairs = load_pairs(x + 2 * i, 2 * left);
            first = (vf)(pairs << 16), second = (vf)(pairs & 0xffff0000);
        } else first = load_bf16(x + i, left), second = load_bf16(x + half + i, left);
        store_bf16(out + i, left, fma_(first, c, -(second * s)));
        store_bf16(out + half + i, left, fma_(second, c, first * s));
    }
    if (p->rotary < p->dim) memcpy(out + p->rotary, x + p->rotary, (p->dim - p->rotary) * sizeof *x);
}

/* out = x[dim] after RMSNorm, unless weight is NULL, and rotation. */
INLINE void norm_and_rotate(const bf16 *x, const bf16 *weight, const float *angles, bf16 *out, const preparation *p) {
    bf16 normed[p->dim];
    if (weight && !p->after_rotation) {
        norm_row(x, weight, normed, p->dim, p->eps, p->norm);
        x = normed;
    }
    rotate(x, angles, out, p);
    if (weight && p->after_rotation) norm_row(out, weight, out, p->dim, p->eps, p->norm);
}

/* Prefetch the cache lines of a token into the second-level cache. The first level cannot wait for so many at once. */
INLINE void prefetch_token(const cache_layout *c, const uint8_t *keys, ptrdiff_t token, ptrdiff_t halves) {
    ptrdiff_t bytes = c->bits / 8;
    const uint8_t *k = keys + key_offset(c, token) * bytes, *v = keys + c->half_bytes + value_offset(token) * bytes;
    for (ptrdiff_t i = 0; i < c->width; i += 2) __builtin_prefetch(k + i * PANEL * bytes, 0, 2);
    for (ptrdiff_t i = 0; halves == 2 && i < c->width; i += PANEL)
        for (int line = 0; line < 2 * bytes; line += 2) __builtin_prefetch(v + i * c->block * bytes + line * PANEL, 0, 2);
}

/* Store key[width] and, unless it is NULL, value[dim] as `token` of the block whose keys begin at `keys`. The key ends in zeros,
 * which must be in the cache, too: another owner of the page may have left NaN there. */
INLINE void store_token(const cache_layout *c, const bf16 *key, const bf16 *value, uint8_t *keys, ptrdiff_t token) {
    ptrdiff_t dim = c->dim, block = c->block, bytes = c->bits / 8;
    uint8_t *values = keys + c->half_bytes;
    uint8_t *k = keys + key_offset(c, token) * bytes, *v = values + value_offset(token) * bytes;
    if (c->bits == 8) {
        int8_t ints[dim];
        ((bf16 *)(keys + c->scale_offset))[token] = quantize_token(key, ints, dim);
        for (ptrdiff_t i = 0; i < dim; i += 2) memcpy(k + i * PANEL, ints + i, 2);
        ((bf16 *)(values + c->scale_offset))[token] = quantize_token(value, ints, dim);
        for (ptrdiff_t i = 0; i < dim; i++) v[i / PANEL * PANEL * block + i % PANEL * 2] = ints[i];
    } else {
        for (ptrdiff_t i = 0; i < c->width; i += 2) memcpy(k + i * PANEL * 2, key + i, 4);
        for (ptrdiff_t i = 0; value && i < dim; i++) ((bf16 *)v)[i / PANEL * PANEL * block + i % PANEL * 2] = value[i];
    }
}

/* Store VL tokens from `token` on, a multiple of VL, in a 16-bit cache: whole vectors instead of pairs. Rows of key[VL][width]
 * end in zeros, and rows of value, unless it is NULL, are ld apart. */
INLINE void store_vl_tokens(const cache_layout *c, const bf16 *key, const bf16 *value, ptrdiff_t ld, uint8_t *keys,
                            ptrdiff_t token) {
    bf16 *k = (bf16 *)keys + key_offset(c, token), *v = (bf16 *)(keys + c->half_bytes) + value_offset(token);
    for (ptrdiff_t i = 0; i < c->width; i += 2 * VL) {
        vf pairs[VL];
        for (int j = 0; j < VL; j++) pairs[j] = load_halves(key + j * c->width + i);
        transpose(pairs);
        for (int j = 0; j < VL; j++) store((float *)(k + (i + 2 * j) * PANEL), pairs[j]);
    }
    for (ptrdiff_t j = 0; value && j < VL; j += 2, value += 2 * ld)
        for (ptrdiff_t i = 0; i < c->dim; i += VL) {
            vu even = __builtin_convertvector(load_bits16(value + i, c->dim - i), vu);
            vu odd = __builtin_convertvector(load_bits16(value + ld + i, c->dim - i), vu);
            *(vu *)(v + i / PANEL * PANEL * c->block + j * PANEL + i % PANEL * 2) = even | odd << 16;
        }
}

/* Prepare q, k and v, and store k and v. A row of qkv has the q heads, then kv_parts times kv_heads heads. 2: the k heads and the
 * v heads. 1: the k heads; as they are in qkv, they are also the v heads. 0: none, and nothing is stored. q_weight and k_weight
 * may be NULL: no norm. If the cache has 1 of two halves, of 16 bits, only keys are stored. With v_norm, values have a norm
 * without weight. Unless q_scale is NULL, q_scale[position] multiplies a query last. Work is divided into chunks of a KV head's
 * tokens; VL tokens in adjacent cells of a block are stored together. */
void nv_store(team *team, const bf16 *qkv, const bf16 *q_weight, const bf16 *k_weight, const float *cos_sin, const float *q_scale,
              const int64_t *positions, const int64_t *slot_mapping, bf16 *q_out, uint8_t *cache, ptrdiff_t head_bytes,
              ptrdiff_t block_bytes, token_count tokens, ptrdiff_t heads, ptrdiff_t kv_heads, ptrdiff_t kv_parts, ptrdiff_t dim,
              ptrdiff_t rotary, ptrdiff_t block, ptrdiff_t halves, ptrdiff_t bits, float eps, ptrdiff_t norm,
              ptrdiff_t after_rotation, ptrdiff_t interleaved, ptrdiff_t v_norm) {
    const cache_layout c = layout_of(dim, block, bits);
    const preparation p = {dim, rotary, interleaved, norm, after_rotation, eps};
    ptrdiff_t ld = (heads + kv_parts * kv_heads) * dim, group = heads / kv_heads;
    ptrdiff_t even = tokens * kv_heads / team->threads, chunk = even < 1 ? 1 : even < 64 ? even : 64;
    ptrdiff_t chunks = (tokens + chunk - 1) / chunk;
    FOR_ITEMS(item, team, chunks * kv_heads) {
        ptrdiff_t head = item % kv_heads, t = item / kv_heads * chunk, end = t + chunk < tokens ? t + chunk : tokens, n;
        uint8_t *head_cache = cache + head * head_bytes;
        bf16 key[VL * c.width], normed_values[v_norm ? VL * dim : 1];
        memset(key, 0, sizeof key);
        for (; t < end; t += n) {
            uint8_t *keys = head_cache + slot_mapping[t] / block * block_bytes;
            for (n = 1; n < VL && t + n < end && slot_mapping[t + n] == slot_mapping[t] + n; n++) {}
            if (n < VL || slot_mapping[t] % VL || bits == 8) n = 1;
            if (n == 1 && t + 1 < end && kv_parts)
                prefetch_token(&c, head_cache + slot_mapping[t + 1] / block * block_bytes, slot_mapping[t + 1] % block, halves);
            const bf16 *row = qkv + t * ld, *value = row + (heads + (kv_parts - 1) * kv_heads + head) * dim;
            ptrdiff_t ld_value = v_norm ? dim : ld;
            for (ptrdiff_t j = 0; j < n; j++, row += ld) {
                int64_t position = positions[t + j];
                const float *angles = cos_sin + position * rotary;
                for (ptrdiff_t h = head * group; h < (head + 1) * group; h++) {
                    bf16 *query = q_out + ((t + j) * heads + h) * dim;
                    norm_and_rotate(row + h * dim, q_weight, angles, query, &p);
                    if (q_scale) multiply_row(query, dim, q_scale[position]);
                }
                if (!kv_parts) continue;
                norm_and_rotate(row + (heads + head) * dim, k_weight, angles, key + j * c.width, &p);
                if (v_norm) norm_row(value + j * ld, NULL, normed_values + j * dim, dim, eps, NORM_WIDE);
            }
            if (!kv_parts) continue;
            if (v_norm) value = normed_values;
            if (halves == 1) value = NULL;
            if (n == 1) store_token(&c, key, value, keys, slot_mapping[t] % block);
            else store_vl_tokens(&c, key, value, ld_value, keys, slot_mapping[t] % block);
        }
    }
}
