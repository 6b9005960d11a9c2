/* Linear layers with weights of 8 or 4 bits: rounding, packing, multiplying by them, and reading rows of them.
 * Layouts: see int_weights.h.
 */
#include "int_weights.h"

/* Pack q[n][k] int8 with scales [n][k/source] and `more`, minimums or zeros of the same shape, or NULL. Each stands for the
 * groups of `group` inputs in its group of `source`. Zeros fill the last panel. */
void nv_pack_int(team *t, const int8_t *q, const uint16_t *scales, const uint16_t *more, uint8_t *packed, uint16_t *packed_scales,
                 ptrdiff_t n, ptrdiff_t k, ptrdiff_t source, ptrdiff_t group, ptrdiff_t bits, ptrdiff_t kind) {
    ptrdiff_t groups = k / group, rows_of_group = more ? 2 : 1;
    FOR_ITEMS(p, t, (n + PANEL - 1) / PANEL) {
        uint8_t *out = packed + p * PANEL * k * bits / 8;
        uint16_t *out_scales = packed_scales + p * PANEL * groups * rows_of_group;
        memset(out, 0, PANEL * k * bits / 8);
        memset(out_scales, 0, PANEL * groups * rows_of_group * sizeof *out_scales);
        for (ptrdiff_t c = 0, row = p * PANEL; c < PANEL && row < n; c++, row++) {
            for (ptrdiff_t g = 0; g < groups; g++) {
                ptrdiff_t from = row * (k / source) + g * group / source;
                out_scales[g * rows_of_group * PANEL + c] = scales[from];
                if (more) out_scales[(2 * g + 1) * PANEL + c] = more[from];
            }
            for (ptrdiff_t i = 0; i < k; i++) {
                if (bits == 8) out[offset8(i, c, kind)] = (uint8_t)q[row * k + i] ^ stored_flip(kind);
                else out[offset4(i, c)] |= (q[row * k + i] + 8) << shift4(i);
            }
        }
    }
}

/* Rounds bfloat16 weights to 8 or 4 bits while they are loaded. The numbers are those of quantize() in
 * features/quantization/integer.py, bit for bit. It divides by the scale; here its inverse multiplies, and the product is first
 * rounded to a multiple of 2^-13. That changes nothing: weights have 8 bits and scales 11, so a quotient within the range either
 * lies halfway between two integers or is at least 2^-12 from there, and the product is off by less than 2^-15.
 */
enum { INFINITE = 0x7f80 }; /* in bfloat16; NaN is larger */
#define SNAP 1536.0f        /* 1.5 * 2^10: the sum of this and a number below 2^9 is a multiple of 2^-13 */

/* The largest |number| of a group as bits of bfloat16, in each lane, and whether only a positive number has it. */
typedef struct {
    vi bits, positive;
} group_top;

/* From the largest bits of the even and the odd inputs, compared as int16 in `high` and as uint16 in `low`. */
INLINE group_top top_of(const int16_t *high, const uint16_t *low) {
    vi h = *(const vi *)high, l = *(const vi *)low;
    vi most = larger_int(h & 0xffff, h >> 16), least = larger_int(l & 0xffff, (l >> 16) & 0xffff);
    least = (least & 0x7fff) | (least < 0x8000); /* -1 if no number is negative */
    return (group_top){larger_int(most, least), most > least};
}

/* The integer nearest to v * inverse, within the range of `bits`; for 4 bits plus 8. Its last `bits` alone. */
INLINE vu rounded(vf v, vf inverse, int bits) {
    const float half = bits == 8 ? 128 : 8;
    vf q = fma_(v, inverse, broadcast(SNAP));
    q = smaller(larger(q, broadcast(SNAP - half)), broadcast(SNAP + half - 1));
    return (vu)(q + (ROUND_TO_INT - SNAP + (bits == 8 ? 0 : half))) & (bits == 8 ? 0xff : 15);
}

/* The integers of two inputs as bytes in the low half of each lane; 0 where nothing is `usable`. */
INLINE vu rounded_pairs(const bf16 *w, vi usable, vf inverse, int bits) {
    vi pairs = *(const vi *)w & usable;
    return rounded((vf)(pairs << 16), inverse, bits) | rounded((vf)(pairs & ~0xffff), inverse, bits) << 8;
}

/* Round w[group/2][32][2] into a panel, from `out` and `scales` on. */
INLINE void round_group(const bf16 *w, ptrdiff_t group, int bits, int kind, uint8_t *out, uint16_t *scales) {
    int16_t high[2 * PANEL] __attribute__((aligned(64))) = {0};
    uint16_t low[2 * PANEL] __attribute__((aligned(64))) = {0};
    for (ptrdiff_t i = 0; i < group / 2; i++)
        for (int c = 0; c < 2 * PANEL; c++) {
            uint16_t number = w[i * 2 * PANEL + c];
            high[c] = (int16_t)number > high[c] ? (int16_t)number : high[c];
            low[c] = number > low[c] ? number : low[c];
        }
    for (ptrdiff_t c = 0; c < PANEL; c += VL) {
        group_top top = top_of(high + 2 * c, low + 2 * c);
        vf size = (vf)(top.bits << 16), scale = bits == 8 ? size / 127.0f : size / 8.0f;
        vi finite = top.bits < INFINITE;
        scale = blend(finite, smaller(scale, broadcast(65504.0f)), scale);
        if (bits == 4) scale = (vf)((vi)scale | (top.positive & INT32_MIN)); /* -8 stands for the largest */
        half_vu half = to_f16(scale);
        *(half_vu *)(scales + c) = half;
        scale = from_f16(half);
        vi usable = finite & (scale != 0.0f); /* otherwise all integers are 0 */
        vf inverse = blend(usable, 1.0f / scale, (vf){0});
#define PAIRS(i) rounded_pairs(w + (i) * PANEL + c * 2, usable, inverse, bits)
        if (bits == 4)
            for (ptrdiff_t i = 0; i < group; i += 8)
                *(vu *)(out + offset4(i, c)) = PAIRS(i) | PAIRS(i + 2) << 16 | (PAIRS(i + 4) | PAIRS(i + 6) << 16) << 4;
        else if (in_fours(kind))
            for (ptrdiff_t i = 0; i < group; i += 4)
                *(vu *)(out + offset8(i, c, kind)) = (PAIRS(i) | PAIRS(i + 2) << 16) ^ stored_flip(kind) * 0x01010101u;
        else
            for (ptrdiff_t i = 0; i < group; i += 2)
                *(half_vu *)(out + offset8(i, c, kind)) = __builtin_convertvector(PAIRS(i), half_vu);
    }
}

/* Round w[n][k] to `bits`, and pack it; `kind` is PLAIN or W8A8. Zeros fill the last panel. */
void nv_pack_rounded(team *t, const bf16 *w, uint8_t *packed, uint16_t *packed_scales, ptrdiff_t n, ptrdiff_t k, ptrdiff_t group,
                     ptrdiff_t bits, ptrdiff_t kind) {
    bf16 turned[K_STEP * PANEL] __attribute__((aligned(64)));
    FOR_ITEMS(p, t, (n + PANEL - 1) / PANEL) {
        ptrdiff_t first = p * PANEL, count = n - first < PANEL ? n - first : PANEL;
        for (ptrdiff_t i = 0; i < k; i += group) {
            uint8_t *out = packed + (first * k + i * PANEL) * bits / 8;
            uint16_t *scales = packed_scales + (first * k + i * PANEL) / group;
            turn_panel(w + first * k + i, k, count, group, turned);
            if (bits == 4) round_group(turned, group, 4, PLAIN, out, scales);
            else if (kind == W8A8) round_group(turned, group, 8, W8A8, out, scales);
            else round_group(turned, group, 8, PLAIN, out, scales);
        }
    }
}

/* y[m][n] = x[m][k] . w * factors[n] + bias[n], rounded to nearest even; rows of x are ldx apart. If `inputs` is not NULL,
 * inputs[i] of x belongs to input i of w. `factors`, for whole panels, and bias may be NULL, too. `kind`: see int_weights.h.
 * `buffer` has quantized_bytes() for each row, and with `inputs` the row itself behind these. All threads share what they
 * quantise, except a single row, which takes less time than waiting for another thread. An item is the product of a block of x
 * with a panel, or of a single row with STREAMS of them. */
void nv_linear_int(team *t, const bf16 *x, ptrdiff_t ldx, const uint8_t *packed, const uint16_t *scales, const float *factors,
                   const int32_t *inputs, const bf16 *bias, char *buffer, bf16 *y, token_count m, ptrdiff_t n, ptrdiff_t k,
                   ptrdiff_t group, ptrdiff_t bits, ptrdiff_t kind) {
    ptrdiff_t panels = (n + PANEL - 1) / PANEL, bytes = input_bytes(bits, kind);
    ptrdiff_t block = rows_that_fit(m, k * bytes, CACHE_BYTES);
    ptrdiff_t streams = m == 1 ? STREAMS : 1, items_per_block = (panels + streams - 1) / streams;
    ptrdiff_t panel_bytes = PANEL * k * bits / 8, panel_scales = PANEL * (k / group) * rows_of_scales(kind);
    ptrdiff_t x_group = input_group(bits, group), row_bytes = quantized_bytes(k, x_group, bytes),
              blocks = (m + block - 1) / block;
    ptrdiff_t parts = quantize_items(block, (int)bits);
    float *acc = scratch((block > STREAMS ? block : STREAMS) * PANEL * sizeof *acc);
    char *own = m == 1 ? scratch(row_bytes + k * sizeof *x) : NULL;
    if (own) buffer = own;
    bf16 *ordered = (bf16 *)(buffer + m * row_bytes);
    quantized_rows all = quantized_at(buffer, m, k, x_group, bytes);
    if (own) {
        for (ptrdiff_t j = 0; inputs && j < k; j++) ordered[j] = x[inputs[j]];
        quantize_rows(inputs ? ordered : x, k, 1, all, x_group, (int)bits, (int)kind, 0);
    } else {
        if (inputs)
            FOR_ITEMS(r, t, m)
                for (ptrdiff_t j = 0; j < k; j++) ordered[r * k + j] = x[r * ldx + inputs[j]];
        FOR_ITEMS(item, t, blocks * parts) {
            ptrdiff_t i = item / parts * block, rows = m - i < block ? m - i : block;
            const bf16 *from = inputs ? ordered + i * k : x + i * ldx;
            if (item % parts < quantize_items(rows, (int)bits))
                quantize_rows(from, inputs ? k : ldx, rows, part_from(all, bytes, i), x_group, (int)bits, (int)kind,
                              item % parts);
        }
    }
    FOR_ITEMS(item, t, blocks * items_per_block) {
        ptrdiff_t i = item / items_per_block * block, first = item % items_per_block * streams;
        ptrdiff_t rows = m - i < block ? m - i : block;
        quantized_rows q = part_from(all, bytes, i);
        if (m == 1 && first + STREAMS <= panels) {
            int_panel panel = {packed + first * panel_bytes, scales + first * panel_scales, (int)kind};
            int_streams((int)bits, k, group, q, panel, acc);
            if (factors) multiply_columns(acc, 1, STREAMS * PANEL, factors + first * PANEL);
            store_row(acc, bias_from(bias, first * PANEL), y + first * PANEL, STREAMS * PANEL, n - first * PANEL);
            continue;
        }
        for (ptrdiff_t p = first; p < first + streams && p < panels; p++) {
            int_panel panel = {packed + p * panel_bytes, scales + p * panel_scales, (int)kind};
            int_tile((int)bits, (int)rows, k, group, q, panel, acc);
            if (factors) multiply_columns(acc, rows, PANEL, factors + p * PANEL);
            store_tile(acc, bias_from(bias, p * PANEL), y + i * n + p * PANEL, n, (int)rows, n - p * PANEL);
        }
    }
    end_tiles();
    free(acc);
    free(own);
}

/* y[t] = row ids[t] of the unpacked weight, [k]; `factors` and `inputs` as above. */
void nv_gather_int(team *t, const int64_t *ids, const uint8_t *packed, const uint16_t *scales, const float *factors,
                   const int32_t *inputs, bf16 *y, token_count tokens, ptrdiff_t k, ptrdiff_t group, ptrdiff_t bits,
                   ptrdiff_t kind) {
    ptrdiff_t groups = k / group, rows_of_group = rows_of_scales(kind);
    FOR_ITEMS(token, t, tokens) {
        ptrdiff_t p = ids[token] / PANEL, c = ids[token] % PANEL;
        const uint8_t *w = packed + p * PANEL * k * bits / 8;
        for (ptrdiff_t i = 0; i < k; i++) {
            const uint16_t *scale = scales + (p * groups + i / group) * rows_of_group * PANEL + c;
            int value = bits == 8 ? (int8_t)(w[offset8(i, c, kind)] ^ stored_flip(kind)) : w[offset4(i, c)] >> shift4(i) & 15;
            if (kind == FP4) value = fp4_table[value] - FP4_OFFSET;
            else if (kind == ZEROS) value += (int16_t)scale[PANEL];
            else if (bits == 4 && kind == PLAIN) value -= 8;
            vf minimum = kind == MINIMUMS ? from_f16((half_vu){scale[PANEL]}) : (vf){0};
            vf short_scale = kind == FP4 ? from_bf16((half_vu){*scale}) : from_f16((half_vu){*scale});
            vf weight = fma_(short_scale, broadcast(value), minimum);
            if (factors) weight *= factors[ids[token]];
            store_bf16(y + token * k + (inputs ? inputs[i] : i), 1, weight);
        }
    }
}
