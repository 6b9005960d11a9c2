/* Linear layers with bfloat16 weights: packing them, multiplying by them, and reading rows of them.
 * Layout of a packed weight: see kernels.h.
 */
#include <omp.h>

#include "tiles.h"
#ifdef HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>

/* Linux lets a process use AMX only after this request (ARCH_REQ_XCOMP_PERM for XFEATURE_XTILE_DATA). Return whether it agreed. */
int nv_enable(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#else
int nv_enable(void) { return 1; }
#endif

/* packed[ceil(n/32)][k/2][32][2] = w[n][k]. Zeros fill the last panel. */
void nv_pack(const bf16 *w, bf16 *packed, ptrdiff_t n, ptrdiff_t k) {
    ptrdiff_t panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
    for (ptrdiff_t p = 0; p < panels; p++)
        for (ptrdiff_t c = 0; c < PANEL; c++) {
            ptrdiff_t row = p * PANEL + c;
            bf16 *out = packed + p * PANEL * k + c * 2;
            for (ptrdiff_t i = 0; i < k; i += 2, out += 2 * PANEL) {
                out[0] = row < n ? w[row * k + i] : 0;
                out[1] = row < n ? w[row * k + i + 1] : 0;
            }
        }
}

/* y[m][n] = x[m][k] . w, rounded to nearest even; rows of x are ldx apart. Each thread prepares x block by block, so that a block
 * fits its cache. For each block, the threads take panels as they get ready. Where x is read in place, panels come in groups, and
 * a thread gets the same panels of a group for every block; they fit its cache. So w is read once, and x once per group. */
void nv_linear(const bf16 *x, ptrdiff_t ldx, const bf16 *packed, bf16 *y, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k) {
    ptrdiff_t panels = (n + PANEL - 1) / PANEL, block = X_IN_PLACE ? TILE_ROWS : rows_that_fit(m, k * sizeof(operand));
    ptrdiff_t thread_panels = 3 * CACHE_BYTES / (PANEL * k * 2), streams = m == 1 ? STREAMS : 1;
    ptrdiff_t group = X_IN_PLACE && m > block ? omp_get_max_threads() * (thread_panels ? thread_panels : 1) : panels;
#pragma omp parallel
    {
        float acc[TILE_ROWS * PANEL] __attribute__((aligned(64)));
        operand *buffer = X_IN_PLACE ? NULL : aligned_alloc(64, (block * (k + 16) * sizeof(operand) + 127) / 64 * 64);
        begin_tiles();
        for (ptrdiff_t g = 0; g < panels; g += group)
            for (ptrdiff_t i = 0; i < m; i += block) {
                ptrdiff_t count = m - i < block ? m - i : block, step = even_block(count, TILE_ROWS);
                ptrdiff_t end = panels - g < group ? panels : g + group;
                input_rows inputs = prepare_inputs(x + i * ldx, ldx, count, step, k, buffer);
#pragma omp for schedule(SCHEDULE) nowait
                for (ptrdiff_t first = g; first < end; first += streams) {
                    if (first + STREAMS <= end && m == 1) {
                        tile_streams(inputs.p, packed + first * PANEL * k, k, acc);
                        store_row(acc, y + first * PANEL, STREAMS * PANEL, n - first * PANEL);
                        continue;
                    }
                    for (ptrdiff_t p = first; p < first + streams && p < end; p++)
                        for (ptrdiff_t r = 0; r < count; r += step) {
                            int rows = count - r < step ? (int)(count - r) : (int)step;
                            linear_tile(rows, k, inputs_from(inputs, r), packed + p * PANEL * k, r == 0, acc);
                            store_tile(acc, y + (i + r) * n + p * PANEL, n, rows, n - p * PANEL);
                        }
                }
            }
        end_tiles();
        free(buffer);
    }
}

/* y[t] = row ids[t] of the unpacked weight, [k]. */
void nv_gather(const int64_t *ids, const bf16 *packed, bf16 *y, ptrdiff_t tokens, ptrdiff_t k) {
#pragma omp parallel for schedule(static) if (tokens > 8)
    for (ptrdiff_t t = 0; t < tokens; t++) {
        const bf16 *w = packed + ids[t] / PANEL * PANEL * k + ids[t] % PANEL * 2;
        for (ptrdiff_t i = 0; i < k; i += 2) memcpy(y + t * k + i, w + i * PANEL, 4);
    }
}
