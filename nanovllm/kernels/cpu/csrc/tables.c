/* What is computed from the worker's tables: the batch of a small step, and draft tokens. */
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

/* Drafts by prompt lookup: the tokens that followed the last earlier occurrence of the longest n-gram that ends a row.
 *
 * An index is int32: the number of positions indexed, heads [sizes][capacity], links [sizes][capacity]; capacity is a power of
 * two. An n-gram is known by the position of its last token. Chains as in deflate: heads has the last n-gram of a bucket, links
 * the one before each n-gram in its bucket; both as position + 1, and 0 where there is none. So an n-gram is added in constant
 * time.
 */
typedef struct {
    int32_t *tokens, *indexed, *heads, *links;
    ptrdiff_t capacity, smallest, largest; /* sizes of n-grams */
} row_index;

/* Return the hash of an n-gram that begins one token earlier. The hash of no token is 0. */
static uint64_t extend(uint64_t hash, int32_t token) { return (hash ^ (uint32_t)token) * 0x9E3779B97F4A7C15u; }

/* Return where the chain of the n-grams of a size and a hash begins. */
static int32_t *head(const row_index *row, ptrdiff_t size, uint64_t hash) {
    return row->heads + (size - row->smallest) * row->capacity + (ptrdiff_t)(hash >> 32 & (uint64_t)(row->capacity - 1));
}

/* Add the n-grams that end before position `last` and are not in the index yet. */
static void add_before(row_index *row, ptrdiff_t last) {
    for (ptrdiff_t end = *row->indexed; end < last; end++) {
        uint64_t hash = 0;
        for (ptrdiff_t size = 1; size <= row->largest && size <= end + 1; size++) {
            hash = extend(hash, row->tokens[end - size + 1]);
            if (size < row->smallest) continue;
            int32_t *first = head(row, size, hash);
            row->links[(size - row->smallest) * row->capacity + end] = *first;
            *first = (int32_t)end + 1;
        }
    }
    *row->indexed = (int32_t)last;
}

/* Return whether the same `size` tokens end at positions i and j. */
static int same(const int32_t *tokens, ptrdiff_t i, ptrdiff_t j, ptrdiff_t size) {
    while (size && tokens[i] == tokens[j]) i--, j--, size--;
    return !size;
}

/* Return the end of the last earlier occurrence of the longest n-gram that ends at `last`, or -1. Where the n-gram of a size does
 * not occur, no longer one does. */
static ptrdiff_t find(const row_index *row, ptrdiff_t last) {
    ptrdiff_t found = -1;
    uint64_t hash = 0;
    for (ptrdiff_t size = 1; size <= row->largest && size <= last; size++) {
        hash = extend(hash, row->tokens[last - size + 1]);
        if (size < row->smallest) continue;
        const int32_t *links = row->links + (size - row->smallest) * row->capacity;
        ptrdiff_t end = *head(row, size, hash) - 1;
        while (end >= 0 && !same(row->tokens, end, last, size)) end = links[end] - 1;
        if (end < 0) break;
        found = end;
    }
    return found;
}

/* Write drafts behind the known tokens of rows of the table [table rows][stride]. rows is [5][num_rows]: table_indices, numbers
 * of known tokens, limits, addresses of indices, and their capacities, at least the known tokens. A row gets as many drafts as
 * its limit says, or none: counts is [num_rows]. Where the known tokens end, the drafts themselves are repeated. */
void nv_ngram(team *t, int32_t *table, ptrdiff_t stride, const int64_t *rows, ptrdiff_t num_rows, ptrdiff_t smallest,
              ptrdiff_t largest, int64_t *counts) {
    FOR_ITEMS(r, t, num_rows) {
        int32_t *index = (int32_t *)(intptr_t)rows[3 * num_rows + r];
        ptrdiff_t known = rows[num_rows + r], limit = rows[2 * num_rows + r], capacity = rows[4 * num_rows + r];
        row_index row = {.capacity = capacity, .smallest = smallest, .largest = largest};
        row.tokens = table + rows[r] * stride;
        row.indexed = index;
        row.heads = index + 1;
        row.links = row.heads + (largest - smallest + 1) * capacity;
        add_before(&row, known - 1);
        ptrdiff_t found = find(&row, known - 1);
        counts[r] = found < 0 ? 0 : limit;
        for (ptrdiff_t i = 0; i < counts[r]; i++) row.tokens[known + i] = row.tokens[found + 1 + i];
    }
}
