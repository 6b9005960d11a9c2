/* The batch of a small step, laid out from the worker's tables. */
#include <string.h>

#include "kernels.h"

/* Lay out a batch. table is [table rows][stride]: a table row has a sequence's tokens, then, from `columns` on, num_tables block
 * tables of `width` numbers each. rows is [3][num_rows]: table_indices, query_lens and seq_lens. Row r of the batch has the last
 * query_lens[r] of the first seq_lens[r] tokens of table row table_indices[r]. Each table gets a slot_mapping, the next one
 * slots_apart behind it, and block_tables [rows][width], the next ones blocks_apart behind them. Unless num_pages is 0, pages
 * gets the num_pages numbers of a row from `first_page` on, and write_lens its number of tokens. The number of a row at `offset`
 * is added to its positions to give rope_positions. */
void nv_batch(team *team, const int32_t *table, ptrdiff_t stride, ptrdiff_t columns, const int64_t *rows, ptrdiff_t num_rows,
              ptrdiff_t block, int64_t *input_ids, int64_t *positions, int64_t *slot_mapping, int32_t *cu_seqlens,
              int32_t *seq_lens, int32_t *block_tables, ptrdiff_t width, ptrdiff_t num_tables, ptrdiff_t slots_apart,
              ptrdiff_t blocks_apart, ptrdiff_t offset, int64_t *rope_positions, ptrdiff_t first_page, ptrdiff_t num_pages,
              int32_t *pages, int32_t *write_lens) {
    const int64_t *table_indices = rows, *query_lens = rows + num_rows, *ends = rows + 2 * num_rows;
    FOR_ITEMS(all_rows, team, 1)
        for (ptrdiff_t r = 0, t = cu_seqlens[0] = 0; r < num_rows; r++) {
            const int32_t *tokens = table + table_indices[r] * stride;
            int64_t end = ends[r], start = end - query_lens[r];
            for (ptrdiff_t k = 0; k < num_tables; k++) {
                const int32_t *blocks = tokens + columns + k * width;
                int64_t *slots = slot_mapping + k * slots_apart + t;
                for (int64_t i = start; i < end; i++) slots[i - start] = blocks[i / block] * (int64_t)block + i % block;
                memcpy(block_tables + k * blocks_apart + r * width, blocks, (end + block - 1) / block * sizeof *blocks);
            }
            for (int64_t i = start; i < end; i++, t++) {
                input_ids[t] = tokens[i];
                positions[t] = i;
                rope_positions[t] = i + tokens[offset];
            }
            if (num_pages) {
                memcpy(pages + r * num_pages, tokens + first_page, num_pages * sizeof *pages);
                write_lens[r] = (int32_t)query_lens[r];
            }
            seq_lens[r] = (int32_t)end;
            cu_seqlens[r + 1] = (int32_t)t;
        }
}
