/* Small steps: nv_batch() lays out the batch from the worker's tables, nv_run() runs the recorded calls of a forward pass.
 * recording.py writes the calls.
 */
#include <string.h>

#include "kernels.h"

/* Lay out a batch. table is [table rows][stride]: a table row has a sequence's tokens, then, from `columns` on, its block table.
 * rows is [3][num_rows]: table_indices, query_lens and seq_lens. Row r of the batch has the last query_lens[r] of the first
 * seq_lens[r] tokens of table row table_indices[r]. */
void nv_batch(const int32_t *table, ptrdiff_t stride, ptrdiff_t columns, const int64_t *rows, ptrdiff_t num_rows, ptrdiff_t block,
              int64_t *input_ids, int64_t *positions, int64_t *slot_mapping, int32_t *cu_seqlens, int32_t *seq_lens,
              int32_t *block_tables, ptrdiff_t width) {
    const int64_t *table_indices = rows, *query_lens = rows + num_rows, *ends = rows + 2 * num_rows;
    ptrdiff_t t = cu_seqlens[0] = 0;
    for (ptrdiff_t r = 0; r < num_rows; r++) {
        const int32_t *tokens = table + table_indices[r] * stride, *blocks = tokens + columns;
        int64_t end = ends[r];
        for (int64_t i = end - query_lens[r]; i < end; i++, t++) {
            input_ids[t] = tokens[i];
            positions[t] = i;
            slot_mapping[t] = blocks[i / block] * (int64_t)block + i % block;
        }
        memcpy(block_tables + r * width, blocks, (end + block - 1) / block * sizeof *blocks);
        seq_lens[r] = (int32_t)end;
        cu_seqlens[r + 1] = (int32_t)t;
    }
}

/* A recorded call is the number of a kernel and its arguments, each in a word. */
typedef union {
    void *p;
    ptrdiff_t n;
    double f;
} word;

enum { CALL_WORDS = 17 }; /* of the longest call, and so of every call; recording.py has the same constant */

/* Run recorded calls for `tokens` tokens in `rows` rows, whatever numbers they were recorded with. */
void nv_run(const word (*calls)[CALL_WORDS], ptrdiff_t count, ptrdiff_t tokens, ptrdiff_t rows) {
    for (ptrdiff_t i = 0; i < count; i++) {
        const word *a = calls[i] + 1;
        switch (calls[i]->n) {
        case 0: nv_linear(a[0].p, a[1].n, a[2].p, a[3].p, tokens, a[5].n, a[6].n); break;
        case 1: nv_linear_int(a[0].p, a[1].n, a[2].p, a[3].p, a[4].p, tokens, a[6].n, a[7].n, a[8].n, a[9].n); break;
        case 2: nv_gather(a[0].p, a[1].p, a[2].p, tokens, a[4].n); break;
        case 3: nv_gather_int(a[0].p, a[1].p, a[2].p, a[3].p, tokens, a[5].n, a[6].n, a[7].n); break;
        case 4: nv_add_rms_norm(a[0].p, a[1].p, a[2].p, a[3].p, tokens, a[5].n, a[6].f); break;
        case 5: nv_silu_and_mul(a[0].p, tokens, a[2].n); break;
        case 6:
            nv_store(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].n, tokens, a[10].n, a[11].n, a[12].n,
                     a[13].n, a[14].n, a[15].f);
            break;
        case 7:
            nv_attention(a[0].p, a[1].p, a[2].p, a[3].n, a[4].p, a[5].n, a[6].p, a[7].p, rows, a[9].n, a[10].n, a[11].n, a[12].n,
                         a[13].n, a[14].f);
            break;
        }
    }
}
