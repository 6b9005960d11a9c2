/* The operations of a layer between its linears and attention: RMSNorm, the MLP's activation, copies of rows, and storing keys
 * and values, with QK-Norm (or none) and rotation. Layout of the cache: see cache.h.
 */
#include "cache.h"

static void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, ptrdiff_t n, float eps) {
    vf sum = {0};
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = load_bf16(x + i, n - i);
        sum = fma_(v, v, sum);
    }
    float scale = 1.0f / sqrtf(sum_of(sum) / n + eps);
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = round_to_bf16(load_bf16(x + i, n - i) * scale);
        store_bf16(out + i, n - i, v * load_bf16(weight + i, n - i));
    }
}

/* residual += x, unless x is NULL; out = rmsnorm(residual). Rows have n numbers. */
void nv_add_rms_norm(team *t, const bf16 *x, bf16 *residual, const bf16 *weight, bf16 *out, ptrdiff_t rows, ptrdiff_t n,
                     float eps) {
    FOR_ITEMS(r, t, rows) {
        bf16 *sum = residual + r * n;
        if (x)
            for (ptrdiff_t i = 0; i < n; i += VL)
                store_bf16(sum + i, n - i, load_bf16(sum + i, n - i) + load_bf16(x + r * n + i, n - i));
        norm_row(sum, weight, out + r * n, n, eps);
    }
}

enum { SILU_CHUNK = 512 };

/* x[:, :n] = silu(x[:, :n]) * x[:, n:] in x[rows][2 n]. The silu is rounded to bfloat16 before the product, as torch does. */
void nv_silu_and_mul(team *t, bf16 *x, ptrdiff_t rows, ptrdiff_t n) {
    ptrdiff_t chunks = (n + SILU_CHUNK - 1) / SILU_CHUNK;
    FOR_ITEMS(item, t, rows * chunks) {
        ptrdiff_t r = item / chunks, first = item % chunks * SILU_CHUNK;
        for (ptrdiff_t i = first; i < n && i < first + SILU_CHUNK; i += VL) {
            vf gate = load_bf16(x + r * 2 * n + i, n - i), up = load_bf16(x + r * 2 * n + n + i, n - i);
            store_bf16(x + r * 2 * n + i, n - i, round_to_bf16(gate / (exp_(-gate) + 1.0f)) * up);
        }
    }
}

/* y[y_rows[r]] = x[x_rows[r]], rows of n numbers that are ldx and ldy apart. If x_rows or y_rows is NULL, the row is r. */
void nv_copy_rows(team *t, const bf16 *x, ptrdiff_t ldx, const int64_t *x_rows, bf16 *y, ptrdiff_t ldy,
                  const int64_t *y_rows, ptrdiff_t rows, ptrdiff_t n) {
    FOR_ITEMS(r, t, rows)
        memcpy(y + (y_rows ? y_rows[r] : r) * ldy, x + (x_rows ? x_rows[r] : r) * ldx, n * sizeof *x);
}

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

/* out = x[dim] after RMSNorm, unless weight is NULL, and rotation; angles are [2][dim/2]: cos, then sin. */
INLINE void norm_and_rotate(const bf16 *x, const bf16 *weight, const float *angles, bf16 *out, ptrdiff_t dim, float eps) {
    ptrdiff_t half = dim / 2;
    bf16 normed[dim];
    if (weight) {
        norm_row(x, weight, normed, dim, eps);
        x = normed;
    }
    for (ptrdiff_t i = 0; i < half; i += VL) {
        vf c = load_f32(angles + i, half - i), s = load_f32(angles + half + i, half - i);
        vf first = load_bf16(x + i, half - i), second = load_bf16(x + half + i, half - i);
        store_bf16(out + i, half - i, fma_(first, c, -(second * s)));
        store_bf16(out + half + i, half - i, fma_(second, c, first * s));
    }
}

/* Prefetch the cache lines of a token into the second-level cache. The first level cannot wait for so many at once. */
INLINE void prefetch_token(const cache_layout *c, const uint8_t *keys, ptrdiff_t token) {
    ptrdiff_t bytes = c->bits / 8;
    const uint8_t *k = keys + key_offset(c, token) * bytes, *v = keys + c->half_bytes + value_offset(token) * bytes;
    for (ptrdiff_t i = 0; i < c->width; i += 2) __builtin_prefetch(k + i * PANEL * bytes, 0, 2);
    for (ptrdiff_t i = 0; i < c->width; i += PANEL)
        for (int line = 0; line < 2 * bytes; line += 2) __builtin_prefetch(v + i * c->block * bytes + line * PANEL, 0, 2);
}

/* Store key[dim] and value[dim] as `token` of the block whose keys begin at `keys`. */
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
        for (ptrdiff_t i = 0; i < dim; i += 2) memcpy(k + i * PANEL * 2, key + i, 4);
        for (ptrdiff_t i = 0; i < dim; i++) ((bf16 *)v)[i / PANEL * PANEL * block + i % PANEL * 2] = value[i];
    }
}

/* Store VL tokens from `token` on, a multiple of VL, in a 16-bit cache: whole vectors instead of pairs. Rows of key[VL][width] end
 * in zeros, and rows of value are ld apart. */
INLINE void store_vl_tokens(const cache_layout *c, const bf16 *key, const bf16 *value, ptrdiff_t ld, uint8_t *keys,
                            ptrdiff_t token) {
    bf16 *k = (bf16 *)keys + key_offset(c, token), *v = (bf16 *)(keys + c->half_bytes) + value_offset(token);
    for (ptrdiff_t i = 0; i < c->width; i += 2 * VL) {
        vf pairs[VL];
        for (int j = 0; j < VL; j++) pairs[j] = load((const float *)(key + j * c->width + i));
        transpose(pairs);
        for (int j = 0; j < VL; j++) store((float *)(k + (i + 2 * j) * PANEL), pairs[j]);
    }
    for (ptrdiff_t j = 0; j < VL; j += 2, value += 2 * ld)
        for (ptrdiff_t i = 0; i < c->dim; i += VL) {
            vu even = __builtin_convertvector(load_bits16(value + i, c->dim - i), vu);
            vu odd = __builtin_convertvector(load_bits16(value + ld + i, c->dim - i), vu);
            *(vu *)(v + i / PANEL * PANEL * c->block + j * PANEL + i % PANEL * 2) = even | odd << 16;
        }
}

/* Normalise q and k, unless the weights are NULL, rotate them, and store k and v. A row of qkv has the q heads, the k heads, then
 * the v heads. Work is divided into chunks of a KV head's tokens; VL tokens in adjacent cells of a block are stored together. */
void nv_store(team *team, const bf16 *qkv, const bf16 *q_weight, const bf16 *k_weight, const float *cos_sin,
              const int64_t *positions, const int64_t *slot_mapping, bf16 *q_out, uint8_t *cache, ptrdiff_t head_bytes,
              ptrdiff_t block_bytes, ptrdiff_t tokens, ptrdiff_t heads, ptrdiff_t kv_heads, ptrdiff_t dim, ptrdiff_t block,
              ptrdiff_t bits, float eps) {
    const cache_layout c = layout_of(dim, block, bits);
    ptrdiff_t ld = (heads + 2 * kv_heads) * dim, group = heads / kv_heads;
    ptrdiff_t even = tokens * kv_heads / team->threads, chunk = even < 1 ? 1 : even < 64 ? even : 64;
    ptrdiff_t chunks = (tokens + chunk - 1) / chunk;
    FOR_ITEMS(item, team, chunks * kv_heads) {
        ptrdiff_t head = item % kv_heads, t = item / kv_heads * chunk, end = t + chunk < tokens ? t + chunk : tokens, n;
        uint8_t *head_cache = cache + head * head_bytes;
        bf16 key[VL * c.width];
        memset(key, 0, sizeof key);
        for (; t < end; t += n) {
            uint8_t *keys = head_cache + slot_mapping[t] / block * block_bytes;
            for (n = 1; n < VL && t + n < end && slot_mapping[t + n] == slot_mapping[t] + n; n++) {}
            if (n < VL || slot_mapping[t] % VL || bits == 8) n = 1;
            if (n == 1 && t + 1 < end)
                prefetch_token(&c, head_cache + slot_mapping[t + 1] / block * block_bytes, slot_mapping[t + 1] % block);
            const bf16 *row = qkv + t * ld, *value = row + (heads + kv_heads + head) * dim;
            for (ptrdiff_t j = 0; j < n; j++, row += ld) {
                const float *angles = cos_sin + positions[t + j] * dim;
                for (ptrdiff_t h = head * group; h < (head + 1) * group; h++)
                    norm_and_rotate(row + h * dim, q_weight, angles, q_out + ((t + j) * heads + h) * dim, dim, eps);
                norm_and_rotate(row + (heads + head) * dim, k_weight, angles, key + j * c.width, dim, eps);
            }
            if (n == 1) store_token(&c, key, value, keys, slot_mapping[t] % block);
            else store_vl_tokens(&c, key, value, ld, keys, slot_mapping[t] % block);
        }
    }
}
