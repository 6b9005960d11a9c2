/* Linear layers with weights of 8 or 4 bits: packing them, multiplying by them, and reading rows of them.
 * Layouts: see int_tiles.h.
 */
#include <omp.h>

#include "int_tiles.h"

/* Pack q[n][k] int8 and scales[n][k/group]. Zeros fill the last panel. */
void nv_pack_int(const int8_t *q, const bf16 *scales, uint8_t *packed, bf16 *packed_scales, ptrdiff_t n, ptrdiff_t k,
                 ptrdiff_t group, ptrdiff_t bits) {
    ptrdiff_t panels = (n + PANEL - 1) / PANEL, groups = k / group;
#pragma omp parallel for schedule(static)
    for (ptrdiff_t p = 0; p < panels; p++) {
        uint8_t *out = packed + p * PANEL * k * bits / 8;
        memset(out, 0, PANEL * k * bits / 8);
        for (ptrdiff_t c = 0; c < PANEL; c++) {
            ptrdiff_t row = p * PANEL + c;
            for (ptrdiff_t g = 0; g < groups; g++)
                packed_scales[(p * groups + g) * PANEL + c] = row < n ? scales[row * groups + g] : 0;
            if (row >= n) continue;
            for (ptrdiff_t i = 0; i < k; i++) {
                if (bits == 8) out[offset8(i, c)] = (uint8_t)q[row * k + i];
                else out[offset4(i, c)] |= (q[row * k + i] + 8) << shift4(i);
            }
        }
    }
}

/* y[m][n] = x[m][k] . (scales * packed), rounded to nearest even; rows of x are ldx apart. Each thread multiplies its own panels,
 * always the same, and quantises each block of x for itself. */
void nv_linear_int(const bf16 *x, ptrdiff_t ldx, const uint8_t *packed, const bf16 *scales, bf16 *y, ptrdiff_t m, ptrdiff_t n,
                   ptrdiff_t k, ptrdiff_t group, ptrdiff_t bits) {
    ptrdiff_t panels = (n + PANEL - 1) / PANEL, groups = k / group, block = rows_that_fit(m, k * 2), ld = k + 64;
#pragma omp parallel
    {
        ptrdiff_t threads = omp_get_num_threads(), t = omp_get_thread_num();
        ptrdiff_t first = panels * t / threads, last = panels * (t + 1) / threads;
        float acc[TILE_ROWS * PANEL] __attribute__((aligned(64)));
        quantized_rows q = {malloc(block * ld * 2), malloc(block * groups * 4), malloc(block * groups * 4), ld, groups};
        for (ptrdiff_t i = 0; i < m; i += block) {
            ptrdiff_t count = m - i < block ? m - i : block, step = even_block(count, TILE_ROWS);
            for (ptrdiff_t r = 0; r < count; r++) quantize_row(x + (i + r) * ldx, 2, &q, r, group, bits);
            ptrdiff_t p = first;
            for (; m == 1 && p + STREAMS <= last; p += STREAMS) {
                int_streams(bits, k, group, q, (int_panel){packed + p * PANEL * k * bits / 8, scales + p * PANEL * groups}, acc);
                store_row(acc, y + p * PANEL, STREAMS * PANEL, n - p * PANEL);
            }
            for (; p < last; p++) {
                int_panel panel = {packed + p * PANEL * k * bits / 8, scales + p * PANEL * groups};
                for (ptrdiff_t r = 0; r < count; r += step) {
                    int rows = count - r < step ? (int)(count - r) : (int)step;
                    int_tile(bits, rows, k, group, rows_from(q, bits, r), panel, (output_rows){acc, PANEL}, 0);
                    store_tile(acc, y + (i + r) * n + p * PANEL, n, rows, n - p * PANEL);
                }
            }
        }
        free(q.ints), free(q.scales), free(q.corrections);
    }
}

/* y[t] = row ids[t] of the unpacked weight, [k]. */
void nv_gather_int(const int64_t *ids, const uint8_t *packed, const bf16 *scales, bf16 *y, ptrdiff_t tokens, ptrdiff_t k,
                   ptrdiff_t group, ptrdiff_t bits) {
#pragma omp parallel for schedule(static) if (tokens > 8)
    for (ptrdiff_t t = 0; t < tokens; t++) {
        ptrdiff_t p = ids[t] / PANEL, c = ids[t] % PANEL;
        const uint8_t *w = packed + p * PANEL * k * bits / 8;
        for (ptrdiff_t i = 0; i < k; i++) {
            int value = bits == 8 ? (int8_t)w[offset8(i, c)] : (w[offset4(i, c)] >> shift4(i) & 15) - 8;
            vf scale = from_bf16((half_vu){scales[(p * (k / group) + i / group) * PANEL + c]});
            store_bf16(y + t * k + i, 1, scale * (float)value);
        }
    }
}
