/* Prepares queries, keys and values for attention, by norm and rotation, and stores keys and values in the paged cache.
 * Layout of the cache: see cache.h.
 */
#include "cache.h"
#include "norm.h"

/* Round x to float16, at most to its largest number. NaN stays. */
INLINE uint16_t bounded_f16(float x) {
    return to_f16(smaller(broadcast(65504.0f), larger(broadcast(-65504.0f), broadcast(x))))[0];
}
INLINE float of_f16(uint16_t h) { return from_f16((half_vu){h})[0]; }

/* Round x[n] to scale * (ints[n] - zero) + lowest, where ints are from 0 to `most`. */
INLINE void round_numbers(const float *x, int32_t *ints, ptrdiff_t n, float lowest, float scale, float zero, float most) {
    float inverse = scale != 0 ? 1 / scale : 0;
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = (load(x + i) - lowest) * inverse + zero;
        *(vi *)(ints + i) = nearest(smaller(larger(v, (vf){0}), broadcast(most)));
    }
}

INLINE float largest_number(const float *x, ptrdiff_t n, float sign) {
    vf top = broadcast(-INFINITY);
    for (ptrdiff_t i = 0; i < n; i += VL) top = larger(top, load(x + i) * sign);
    return largest_of(top);
}

/* Write ints[width] as column `column` of a panel of keys, whose rows of inputs have 32 words. */
INLINE void put_key(const cache_layout *c, const int32_t *ints, uint8_t *panel, ptrdiff_t column) {
    if (c->bits == 4)
        for (ptrdiff_t i = 0; i < c->width; i += 8, ints += 8, panel += 4 * PANEL) {
            uint32_t word = 0;
            for (int b = 0; b < 4; b++) word |= (uint32_t)(ints[b] | ints[b + 4] << 4) << 8 * b;
            memcpy(panel + 4 * column, &word, 4);
        }
    else
        for (ptrdiff_t i = 0; i < c->width; i++)
            panel[offset8(i, column, CACHE8)] = (uint8_t)(ints[i] - 128) ^ stored_flip(CACHE8);
}

/* Write ints[width] as input `token` of the panels of values. With 4 bits a byte's other half is another token's, and stays. */
INLINE void put_value(const cache_layout *c, const int32_t *ints, uint8_t *values, ptrdiff_t token) {
    const int shift = shift4(token);
    for (ptrdiff_t d = 0; d < c->width; d += PANEL, values += bytes_of(c, PANEL * c->block)) {
        uint8_t *fours = values + offset4(token, 0);
        for (ptrdiff_t i = 0; i < PANEL; i++, ints++)
            if (c->bits == 4) fours[4 * i] = (uint8_t)((fours[4 * i] & 0xf0 >> shift) | *ints << shift);
            else values[offset8(token, i, CACHE8)] = (uint8_t)(*ints - 128) ^ stored_flip(CACHE8);
    }
}

/* store_token() for a cache of 8 or 4 bits. Integers count from 0. */
static void store_rounded(const cache_layout *c, const bf16 *key, const bf16 *value, uint8_t *keys, ptrdiff_t token) {
    float x[c->width];
    int32_t ints[c->width];
    const ptrdiff_t column = token % PANEL, rows = c->width / c->group * (c->bits == 4 ? 2 : 1);
    uint16_t *scales = (uint16_t *)(keys + c->scale_offset) + (token - column) * rows + column;
    uint8_t *values = keys + c->half_bytes;
    for (int half = 0; half < 2; half++) {
        const bf16 *from = half ? value : key;
        for (ptrdiff_t i = 0; i < c->width; i += VL) store(x + i, i < c->dim ? load_bf16(from + i, c->dim - i) : (vf){0});
        hadamard(x, c->width, c->turn);
        uint16_t *scale = half ? (uint16_t *)(values + c->scale_offset) + token : scales;
        for (ptrdiff_t i = 0, n = half ? c->width : c->group; i < c->width; i += n) {
            float top = largest_number(x + i, n, 1), low = -largest_number(x + i, n, -1), lowest = 0, zero = 0;
            if (c->bits == 8) zero = 128, *scale = bounded_f16((top > -low ? top : -low) / 127);
            else if (half) zero = 8, *scale = bounded_f16((top > -low ? top : low) / -8); /* as in llama.cpp's Q4_0 */
            else {
                scale[PANEL] = bounded_f16(low), lowest = of_f16(scale[PANEL]);
                *scale = bounded_f16((top - lowest) / 15);
            }
            round_numbers(x + i, ints + i, n, lowest, of_f16(*scale), zero, c->bits == 8 ? 255 : 15);
            scale += PANEL * (c->bits == 8 ? 1 : 2);
        }
        if (half) put_value(c, ints, values, token);
        else put_key(c, ints, keys + bytes_of(c, (token - column) * c->width), column);
    }
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
    ptrdiff_t in_panel = token % PANEL, each = c->bits == 8 && !in_fours(CACHE8) ? 2 : 4; /* bytes of a column's row in a panel */
    ptrdiff_t inputs = each * 8 / c->bits;                                                /* of such a row */
    const uint8_t *k = keys + bytes_of(c, (token - in_panel) * c->width) + in_panel * each;
    const uint8_t *v = keys + c->half_bytes + token / inputs * PANEL * each;
    for (ptrdiff_t i = 0; i < c->width; i += inputs) __builtin_prefetch(k + i / inputs * PANEL * each, 0, 2);
    for (ptrdiff_t i = 0; halves == 2 && i < c->width; i += PANEL)
        for (ptrdiff_t line = 0; line < PANEL * each; line += 64) __builtin_prefetch(v + bytes_of(c, i * c->block) + line, 0, 2);
}

/* Store key[width] and, unless it is NULL, value[dim] as `token` of the block whose keys begin at `keys`. The key ends in zeros,
 * which must be in the cache, too: another owner of the page may have left NaN there. */
INLINE void store_token(const cache_layout *c, const bf16 *key, const bf16 *value, uint8_t *keys, ptrdiff_t token) {
    bf16 *k = (bf16 *)keys + key_offset(c, token), *v = (bf16 *)(keys + c->half_bytes) + value_offset(token);
    if (c->bits < 16) {
        store_rounded(c, key, value, keys, token);
        return;
    }
    for (ptrdiff_t i = 0; i < c->width; i += 2) memcpy(k + i * PANEL, key + i, 4);
    for (ptrdiff_t i = 0; value && i < c->dim; i++) v[i / PANEL * PANEL * c->block + i % PANEL * 2] = value[i];
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

/* Return the first token from t on whose values of 4 bits share no byte with those of the token before it: two threads may not
 * write to one. */
INLINE ptrdiff_t first_of_byte(const int64_t *slot_mapping, ptrdiff_t t, ptrdiff_t tokens) {
    while (t > 0 && t < tokens && slot_mapping[t] / 8 == slot_mapping[t - 1] / 8) t++;
    return t;
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
        if (bits == 4) t = first_of_byte(slot_mapping, t, tokens), end = first_of_byte(slot_mapping, end, tokens);
        uint8_t *head_cache = cache + head * head_bytes;
        bf16 key[VL * c.width], normed_values[v_norm ? VL * dim : 1];
        memset(key, 0, sizeof key);
        for (; t < end; t += n) {
            uint8_t *keys = head_cache + slot_mapping[t] / block * block_bytes;
            for (n = 1; n < VL && t + n < end && slot_mapping[t + n] == slot_mapping[t] + n; n++) {}
            if (n < VL || slot_mapping[t] % VL || bits < 16) n = 1;
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
