/* Linear layers with bfloat16 weights: packing them, multiplying by them, and reading rows of them.
 * Layout of a packed weight: see kernels.h.
 */
#include "tiles.h"
#ifdef HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>

/* Linux lets a process use AMX only after this request (ARCH_REQ_XCOMP_PERM for XFEATURE_XTILE_DATA). Return whether it agreed.
 */
int nv_enable(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#else
int nv_enable(void) { return 1; }
#endif

/* Write rows [0, count) of w, k apart, to a panel; zeros fill it. Squares of VL rows and VL pairs of inputs are transposed. */
static void pack_panel(const bf16 *w, ptrdiff_t count, ptrdiff_t k, bf16 *panel) {
    for (ptrdiff_t i = 0; i < k; i += 2 * VL)
        for (ptrdiff_t first = 0; first < PANEL; first += VL) {
            vf pairs[VL];
            for (ptrdiff_t r = 0; r < VL; r++)
                pairs[r] = first + r < count ? load((const float *)(w + (first + r) * k + i)) : (vf){0};
            transpose(pairs);
            for (ptrdiff_t j = 0; j < VL; j++) store((float *)(panel + (i + 2 * j) * PANEL + first * 2), pairs[j]);
        }
}

/* packed[ceil(n/32)][k/2][32][2] = w[n][k]. */
void nv_pack(team *t, const bf16 *w, bf16 *packed, ptrdiff_t n, ptrdiff_t k) {
    FOR_ITEMS(p, t, (n + PANEL - 1) / PANEL) {
        ptrdiff_t first = p * PANEL;
        pack_panel(w + first * k, n - first < PANEL ? n - first : PANEL, k, packed + first * k);
    }
}

/* y[m][n] = x[m][k] . w + bias[n], rounded to nearest even; rows of x are ldx apart. An item is the product of a block of x with
 * a panel, or of a single row with STREAMS panels. Each thread prepares the blocks that it multiplies, so that a block fits its
 * cache. */
void nv_linear(team *t, const bf16 *x, ptrdiff_t ldx, const bf16 *packed, const bf16 *bias, bf16 *y, token_count m, ptrdiff_t n,
               ptrdiff_t k) {
    ptrdiff_t panels = (n + PANEL - 1) / PANEL, block = rows_that_fit(m, k * sizeof(operand), LINEAR_BYTES), prepared = -1;
    ptrdiff_t group = m == 1 ? STREAMS : 1, groups = (panels + group - 1) / group;
    ptrdiff_t acc_rows = block > TILE_ROWS ? block : TILE_ROWS;
    operand *buffer = scratch(block * (k + 16) * sizeof(operand) + 64);
    float *acc = scratch(acc_rows * PANEL * sizeof(float));
    input_rows inputs = {0};
    begin_tiles();
    FOR_ITEMS(item, t, (m + block - 1) / block * groups) {
        ptrdiff_t first = item % groups * group, last = first + group < panels ? first + group : panels;
        ptrdiff_t i = item / groups * block, rows = m - i < block ? m - i : block, step = even_block(rows, TILE_ROWS);
        if (i != prepared) inputs = prepare_inputs(x + i * ldx, ldx, rows, step, k, buffer);
        prepared = i;
        if (m == 1 && last - first == STREAMS) {
            tile_streams(inputs.p, packed + first * PANEL * k, k, acc);
            store_row(acc, bias_from(bias, first * PANEL), y + first * PANEL, STREAMS * PANEL, n - first * PANEL);
            continue;
        }
        for (ptrdiff_t p = first; p < last; p++) {
            linear_outputs out = {y + i * n + p * PANEL, n, n - p * PANEL, m * n * 2, bias_from(bias, p * PANEL)};
            linear_panel((linear_inputs){inputs, rows, step, k}, packed + p * PANEL * k, out, acc);
        }
    }
    end_tiles();
    free(buffer);
    free(acc);
}

/* y[t] = row ids[t] of the unpacked weight, [k]. */
void nv_gather(team *t, const int64_t *ids, const bf16 *packed, bf16 *y, token_count tokens, ptrdiff_t k) {
    FOR_ITEMS(token, t, tokens) {
        const bf16 *w = packed + ids[token] / PANEL * PANEL * k + ids[token] % PANEL * 2;
        for (ptrdiff_t i = 0; i < k; i += 2) memcpy(y + token * k + i, w + i * PANEL, 4);
    }
}
