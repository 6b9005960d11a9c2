/* Linear layers with weights of 8 or 4 bits: packing them, multiplying by them, and reading rows of them.
 * Layouts: see int_tiles.h.
 */
#define FROM_SCALES from_f16
#include "int_tiles.h"

/* Pack q[n][k] int8 with scales and minimums [n][k/group]; minimums may be NULL. Zeros fill the last panel. */
void nv_pack_int(team *t, const int8_t *q, const f16 *scales, const f16 *minimums, uint8_t *packed, f16 *packed_scales,
                 ptrdiff_t n, ptrdiff_t k, ptrdiff_t group, ptrdiff_t bits) {
    ptrdiff_t groups = k / group, rows_of_group = minimums ? 2 : 1;
    FOR_ITEMS(p, t, (n + PANEL - 1) / PANEL) {
        uint8_t *out = packed + p * PANEL * k * bits / 8;
        f16 *out_scales = packed_scales + p * PANEL * groups * rows_of_group;
        memset(out, 0, PANEL * k * bits / 8);
        memset(out_scales, 0, PANEL * groups * rows_of_group * sizeof *out_scales);
        for (ptrdiff_t c = 0, row = p * PANEL; c < PANEL && row < n; c++, row++) {
            for (ptrdiff_t g = 0; g < groups; g++) {
                out_scales[g * rows_of_group * PANEL + c] = scales[row * groups + g];
                if (minimums) out_scales[(2 * g + 1) * PANEL + c] = minimums[row * groups + g];
            }
            for (ptrdiff_t i = 0; i < k; i++) {
                if (bits == 8) out[offset8(i, c)] = (uint8_t)q[row * k + i];
                else out[offset4(i, c)] |= (q[row * k + i] + 8) << shift4(i);
            }
        }
    }
}

/* y[m][n] = x[m][k] . w + bias[n], rounded to nearest even; rows of x are ldx apart. `kind`: PLAIN,
 * MINIMUMS or FP4. An item is the product of a block of x with a panel, or of a single row with STREAMS of them. Each thread quantises the
 * blocks that it multiplies. */
void nv_linear_int(team *t, const bf16 *x, ptrdiff_t ldx, const uint8_t *packed, const f16 *scales, const bf16 *bias, bf16 *y,
                   ptrdiff_t m, ptrdiff_t n, ptrdiff_t k, ptrdiff_t group, ptrdiff_t bits, ptrdiff_t kind) {
    ptrdiff_t panels = (n + PANEL - 1) / PANEL, groups = k / group, block = rows_that_fit(m, k * 2, CACHE_BYTES), ld = k + 64;
    ptrdiff_t streams = m == 1 ? STREAMS : 1, items_per_block = (panels + streams - 1) / streams, prepared = -1;
    ptrdiff_t panel_bytes = PANEL * k * bits / 8, panel_scales = PANEL * groups * rows_of_scales(kind);
    float acc[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    quantized_rows q = {malloc(block * ld * 2), malloc(block * groups * 4), malloc(block * groups * sizeof(group_sum)), ld, groups};
    FOR_ITEMS(item, t, (m + block - 1) / block * items_per_block) {
        ptrdiff_t i = item / items_per_block * block, first = item % items_per_block * streams;
        ptrdiff_t count = m - i < block ? m - i : block, step = even_block(count, TILE_ROWS);
        if (i != prepared)
            for (ptrdiff_t r = 0; r < count; r++) quantize_row(x + (i + r) * ldx, 2, &q, r, group, bits);
        prepared = i;
        if (m == 1 && first + STREAMS <= panels) {
            int_panel panel = {packed + first * panel_bytes, scales + first * panel_scales, (int)kind};
            int_streams(bits, k, group, q, panel, acc);
            store_row(acc, bias_from(bias, first * PANEL), y + first * PANEL, STREAMS * PANEL, n - first * PANEL);
            continue;
        }
        for (ptrdiff_t p = first; p < first + streams && p < panels; p++) {
            int_panel panel = {packed + p * panel_bytes, scales + p * panel_scales, (int)kind};
            for (ptrdiff_t r = 0; r < count; r += step) {
                int rows = count - r < step ? (int)(count - r) : (int)step;
                int_tile(bits, rows, k, group, rows_from(q, bits, r), panel, (output_rows){acc, PANEL}, 0);
                store_tile(acc, bias_from(bias, p * PANEL), y + (i + r) * n + p * PANEL, n, rows, n - p * PANEL);
            }
        }
    }
    free(q.ints), free(q.scales), free(q.sums);
}

/* y[t] = row ids[t] of the unpacked weight, [k]. */
void nv_gather_int(team *t, const int64_t *ids, const uint8_t *packed, const f16 *scales, bf16 *y, ptrdiff_t tokens, ptrdiff_t k,
                   ptrdiff_t group, ptrdiff_t bits, ptrdiff_t kind) {
    ptrdiff_t groups = k / group, rows_of_group = rows_of_scales(kind);
    FOR_ITEMS(token, t, tokens) {
        ptrdiff_t p = ids[token] / PANEL, c = ids[token] % PANEL;
        const uint8_t *w = packed + p * PANEL * k * bits / 8;
        for (ptrdiff_t i = 0; i < k; i++) {
            const f16 *scale = scales + (p * groups + i / group) * rows_of_group * PANEL + c;
            int value = bits == 8 ? (int8_t)w[offset8(i, c)] : w[offset4(i, c)] >> shift4(i) & 15;
            if (kind == FP4) value = fp4_table[value] - FP4_OFFSET;
            else if (bits == 4 && kind == PLAIN) value -= 8;
            vf minimum = kind == MINIMUMS ? from_f16((half_vu){scale[PANEL]}) : (vf){0};
            vf factor = kind == FP4 ? from_bf16((half_vu){*scale}) : from_f16((half_vu){*scale});
            store_bf16(y + token * k + i, 1, fma_(factor, broadcast(value), minimum));
        }
    }
}
