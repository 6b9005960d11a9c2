/* Tiles in float32: weights are widened as they are multiplied, and a linear's inputs once beforehand.
 * For AVX2 and any other processor without AVX-512. Included by tiles.h, which describes the functions.
 */
enum { PASS_KEYS = 128, K_MULTIPLE = 2, LINEAR_BYTES = CACHE_BYTES, PREPARED_GAP = 16, STREAM_BYTES = 4 << 20 };

enum { NEAR_INPUTS = 1024 / PANEL }; /* how far ahead a linear with few rows prefetches its panel: the others K_STEP inputs */

/* a += x * v and b += x * w. In assembly, because GCC keeps one accumulator of the largest tile in memory, and then each step
 * waits for a store. */
INLINE void multiply_add2(vf *a, vf *b, vf v, vf w, const float *x) {
#if VL == 8 && defined(__FMA__)
    vf t;
    __asm__("vbroadcastss %5, %2\n\tvfmadd231ps %3, %2, %0\n\tvfmadd231ps %4, %2, %1"
            : "+x"(*a), "+x"(*b), "=&x"(t)
            : "x"(v), "x"(w), "m"(*x));
#elif VL == 4 && defined(__aarch64__)
    vf t;
    __asm__("ldr %s2, %5\n\tfmla %0.4s, %3.4s, %2.s[0]\n\tfmla %1.4s, %4.4s, %2.s[0]"
            : "+w"(*a), "+w"(*b), "=&w"(t)
            : "w"(v), "w"(w), "m"(*x));
#else
    *a = fma_(v, broadcast(*x), *a), *b = fma_(w, broadcast(*x), *b);
#endif
}

/* One part of a tile, from `column` of a panel on. A lane of a panel holds a pair: the weight of an even input in its low half,
 * of the odd one in its high half. Each step of two inputs prefetches `share` bytes of w.prefetch, from byte `skip` on. */
INLINE void tile_rows(int rows, int cols, ptrdiff_t k, input_rows x, panel_pieces w, ptrdiff_t column, ptrdiff_t skip,
                      ptrdiff_t share, output_rows acc, int add) {
    vf a[MAX_ROWS][STREAM_COLS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) a[r][c] = add ? load(acc.p + r * acc.ld + column + c * VL) : (vf){0};
    /* Every third row's inputs, as in tiles_avx512.h. */
    const float *bases[(MAX_ROWS + 2) / 3];
#pragma GCC unroll 2
    for (int j = 0; j < (rows + 2) / 3; j++) bases[j] = x.p + j * 3 * x.ld;
    for (ptrdiff_t i = 0; i < k;) {
        const bf16 *piece = *w.pieces++ + 2 * column;
        const char *ahead = (const char *)*w.prefetch++ + skip;
        for (ptrdiff_t end = k - i < w.piece_k ? k : i + w.piece_k; i < end; i += 2, piece += 2 * PANEL, ahead += share) {
            if (column == 0 && cols <= PANEL_VECTORS) __builtin_prefetch(ahead), __builtin_prefetch(ahead + share / 2);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c += 2) {
                const vu *v = (const vu *)(piece + c / PANEL_VECTORS * (k * PANEL)) + c % PANEL_VECTORS;
                if (cols == STREAM_COLS) prefetch_stream(cols, v);
                vf even0 = (vf)(v[0] << 16), even1 = (vf)(v[1] << 16);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) multiply_add2(&a[r][c], &a[r][c + 1], even0, even1, bases[r / 3] + r % 3 * x.ld);
                vf odd0 = (vf)(v[0] & 0xffff0000), odd1 = (vf)(v[1] & 0xffff0000);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) multiply_add2(&a[r][c], &a[r][c + 1], odd0, odd1, bases[r / 3] + r % 3 * x.ld + 1);
            }
#pragma GCC unroll 2
            for (int j = 0; j < (rows + 2) / 3; j++) {
                bases[j] += 2;
                __asm__("" : "+r"(bases[j])); /* GCC would compute them from each other */
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) store(acc.p + r * acc.ld + column + c * VL, a[r][c]);
}

static void tile_step(int rows, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
#define TILE_PART(R, cols, c)                                                                                   \
    tile_rows(R, cols, k, inputs_from(x, at), w, c, w.piece_k * at * 2 * PANEL / rows, 4 * PANEL / PARTS(rows), \
              outputs_from(acc, at, 0), add)
    FOR_ROWS(rows, TILE_PART)
}

static void tile(int rows, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
    if (k <= K_STEP) tile_step(rows, k, x, w, acc, add);
    else
        for (ptrdiff_t i = 0; i < k; i += K_STEP) {
            const bf16 *piece = *w.pieces + i * PANEL, *next = *w.prefetch + i * PANEL;
            ptrdiff_t step = k - i < K_STEP ? k - i : K_STEP;
            tile_step(rows, step, (input_rows){x.p + i, x.ld}, (panel_pieces){&piece, &next, step}, acc, add || i);
        }
}

/* Convert x to float32 in `buffer`. Rows lie 64 bytes further apart than k, so that they do not share a cache set. */
INLINE input_rows prepare_inputs(const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, operand *buffer) {
    ptrdiff_t ld = k + PREPARED_GAP;
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t i = 0; i < k; i += VL) store(buffer + r * ld + i, from_bf16(*(const half_vu *)(x + r * ldx + i)));
    return (input_rows){buffer, ld};
}

static void linear_tile(int rows, ptrdiff_t k, input_rows x, const bf16 *w, int prefetch, float *acc) {
    const bf16 *next = w + (rows <= WIDE_ROWS ? NEAR_INPUTS : K_STEP) * PANEL;
    tile(rows, k, x, (panel_pieces){&w, &next, k}, (output_rows){acc, PANEL}, 0);
}

static void tile_streams(const operand *x, const bf16 *w, ptrdiff_t k, float *acc) {
    tile_rows(1, STREAM_COLS, k, (input_rows){x, 0}, (panel_pieces){&w, &w, k}, 0, 0, 0, (output_rows){acc, 0}, 0);
}

INLINE void linear_panel(linear_inputs in, const bf16 *w, linear_outputs out, float *acc) { panel_by_tiles(in, w, out, acc); }
