/* Tiles by Arm's bfmmla: an instruction multiplies two rows of four bfloat16 with two columns of four, and adds the four products
 * to float32 sums. A linear's inputs are packed first. Included by tiles.h, which describes the functions.
 */
enum { PASS_KEYS = 256, K_MULTIPLE = 4, LINEAR_BYTES = CACHE_BYTES, PREPARED_GAP = 0, STREAM_BYTES = 4 << 20 };

/* a[0..3] += the products of two rows of four inputs with the pairs of columns in w[0..3]. The rows are at x and at x + ld; with
 * `packed` behind each other, with `single` the same one. In assembly, because GCC loads the inputs of many rows in advance, and
 * then keeps accumulators in memory. */
INLINE void multiply_add4(float32x4_t a[4], const bfloat16x8_t w[4], int packed, int single, const bf16 *x, ptrdiff_t ld) {
    bfloat16x8_t t;
#define FOUR_PRODUCTS(load, ...)                                                                                  \
    __asm__(load "\n\tbfmmla %0.4s, %4.8h, %5.8h\n\tbfmmla %1.4s, %4.8h, %6.8h\n\tbfmmla %2.4s, %4.8h, %7.8h\n\t" \
                 "bfmmla %3.4s, %4.8h, %8.8h"                                                                     \
            : "+w"(a[0]), "+w"(a[1]), "+w"(a[2]), "+w"(a[3]), "=&w"(t)                                            \
            : "w"(w[0]), "w"(w[1]), "w"(w[2]), "w"(w[3]), __VA_ARGS__)
    if (single) FOUR_PRODUCTS("ld1r {%4.2d}, %9", "Q"(*(const bf16(*)[4])x));
    else if (packed) FOUR_PRODUCTS("ldr %q4, %9", "m"(*(const bf16(*)[8])x));
    else FOUR_PRODUCTS("ldr %d4, %9\n\tld1 {%4.d}[1], %10", "m"(*(const bf16(*)[4])x), "Q"(*(const bf16(*)[4])(x + ld)));
}

/* Rows r and r + 1 of four columns: first[0] and first[1] hold the sums of the first two columns in row r, first[2] and first[3]
 * in row r + 1; `last` those of the last two columns. */
INLINE void load_two_rows(float *p, ptrdiff_t ld, float32x4_t *first, float32x4_t *last) {
    uint64x2_t row = (uint64x2_t)vld1q_f32(p), next = (uint64x2_t)vld1q_f32(p + ld);
    *first = (float32x4_t)vtrn1q_u64(row, next), *last = (float32x4_t)vtrn2q_u64(row, next);
}
INLINE void store_two_rows(float *p, ptrdiff_t ld, float32x4_t first, float32x4_t last) {
    uint64x2_t low = (uint64x2_t)first, high = (uint64x2_t)last;
    vst1q_f32(p, (float32x4_t)vtrn1q_u64(low, high));
    if (ld) vst1q_f32(p + ld, (float32x4_t)vtrn2q_u64(low, high));
}

/* One part of a tile, of `cols` vectors of columns; w is where they begin in the panel. */
INLINE void tile_rows(int rows, int cols, int packed, ptrdiff_t k, input_rows x, const bf16 *w, output_rows acc, int add) {
    float32x4_t a[MAX_ROWS / 2][2 * STREAM_COLS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r += 2)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) {
            float32x4_t *sums = &a[r / 2][2 * c];
            sums[0] = sums[1] = vdupq_n_f32(0);
            if (add) load_two_rows(acc.p + r * acc.ld + c * VL, r + 1 < rows ? acc.ld : 0, &sums[0], &sums[1]);
        }
    for (ptrdiff_t i = 0; i < k; i += 4, w += 4 * PANEL) {
        if (cols == STREAM_COLS)
            for (int line = 0; line < 4; line++) __builtin_prefetch(w + (8 + line / 2) * 2 * PANEL + line % 2 * PANEL);
#pragma GCC unroll 4
        for (int c = 0; c < cols; c += 2) {
            bfloat16x8_t columns[4];
            for (int j = 0; j < 2; j++) {
                const bf16 *pairs = w + (c + j) * 2 * VL;
                vu first = *(const vu *)pairs, second = *(const vu *)(pairs + 2 * PANEL);
                columns[2 * j] = (bfloat16x8_t)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second);
                columns[2 * j + 1] = (bfloat16x8_t)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second);
            }
#pragma GCC unroll 6
            for (int r = 0; r < rows; r += 2)
                multiply_add4(&a[r / 2][2 * c], columns, packed, r + 1 == rows,
                              packed ? x.p + i * rows + 4 * r : x.p + r * x.ld + i, x.ld);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r += 2)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            store_two_rows(acc.p + r * acc.ld + c * VL, r + 1 < rows ? acc.ld : 0, a[r / 2][2 * c], a[r / 2][2 * c + 1]);
}

/* Inputs i to i + k of a tile: their weights stay in the first-level cache while all parts are computed. */
INLINE void tile_step(int rows, int packed, ptrdiff_t k, ptrdiff_t i, input_rows x, const bf16 *w, output_rows acc, int add) {
#define TILE_PART(R, cols, c)                                                                              \
    tile_rows(R, cols, packed, k, (input_rows){x.p + at * x.ld + (packed ? i * R : i), x.ld}, w + 2 * (c), \
              outputs_from(acc, at, c), add)
    FOR_ROWS(rows, TILE_PART)
}

INLINE void tile_steps(int rows, int packed, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
    for (ptrdiff_t i = 0, at = 0, step; i < k; i += step, at = at + step < w.piece_k ? at + step : (w.pieces++, 0)) {
        step = k - i < K_STEP ? k - i : K_STEP;
        if (w.piece_k - at < step) step = w.piece_k - at;
        tile_step(rows, packed, step, i, x, *w.pieces + at * PANEL, acc, add || i);
    }
}

static void tile(int rows, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
    tile_steps(rows, 0, k, x, w, acc, add);
}

/* Copy x into `buffer`, cut into tiles of `step` rows, and these into their parts, each packed as [k/4][rows][4]. So a step of a
 * part reads one or two cache lines, however far apart the rows of x are. */
INLINE input_rows prepare_inputs(const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, operand *buffer) {
#define PACK_PART(R, cols, c)                      \
    for (ptrdiff_t i = 0; c == 0 && i < k; i += 4) \
        for (int j = 0; j < R; j++) memcpy(buffer + (r + at) * k + i * R + 4 * j, x + (r + at + j) * ldx + i, 8);
    for (ptrdiff_t r = 0; r < rows; r += step) FOR_ROWS((int)(rows - r < step ? rows - r : step), PACK_PART)
    return (input_rows){buffer, k};
}

static void linear_tile(int rows, ptrdiff_t k, input_rows x, const bf16 *w, int prefetch, float *acc) {
    tile_steps(rows, 1, k, x, (panel_pieces){&w, &w, k}, (output_rows){acc, PANEL}, 0);
}

static void tile_streams(const operand *x, const bf16 *w, ptrdiff_t k, float *acc) {
    tile_rows(1, STREAM_COLS, 1, k, (input_rows){x, 0}, w, (output_rows){acc, 0}, 0);
}

INLINE void linear_panel(linear_inputs in, const bf16 *w, linear_outputs out, float *acc) { panel_by_tiles(in, w, out, acc); }
