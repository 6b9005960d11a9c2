/* Tiles by AVX512-BF16: an instruction multiplies 16 pairs of bfloat16 and adds each pair's products to a float32 sum.
 * A linear's inputs are packed first. Included by tiles.h, which describes the functions.
 */
enum { PASS_KEYS = 256, K_MULTIPLE = 2, LINEAR_BYTES = CACHE_BYTES, STREAM_BYTES = 4 << 20 };

/* a += v . x and b += w . x, where each lane holds a pair of numbers, and all lanes multiply the pair at x. In assembly, because
 * GCC loads the pairs of many rows in advance, and then keeps accumulators in memory. */
INLINE void multiply_add2(__m512 *a, __m512 *b, __m512i v, __m512i w, const bf16 *x) {
#ifdef EMULATED
    __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int32_t *)x);
    *a = _mm512_dpbf16_ps(*a, (__m512bh)v, pair), *b = _mm512_dpbf16_ps(*b, (__m512bh)w, pair);
#else
    __m512i t;
    __asm__("vpbroadcastd %5, %2\n\tvdpbf16ps %2, %3, %0\n\tvdpbf16ps %2, %4, %1"
            : "+v"(*a), "+v"(*b), "=&v"(t)
            : "v"(v), "v"(w), "m"(*(const int32_t *)x));
#endif
}

/* One part of a tile. x is rows ld apart, or packed: [k/2][rows][2]. Each step of two inputs prefetches `share` bytes of
 * w.prefetch into the second-level cache, from byte `skip` on. Measured: a linear of up to 4 rows is fastest without this (1.2
 * times on a Zen 4), attention with a second prefetch, 4 KB ahead in w. */
INLINE void tile_rows(int rows, int cols, int packed, ptrdiff_t k, input_rows x, panel_pieces w, ptrdiff_t skip, ptrdiff_t share,
                      output_rows acc, int add) {
    __m512 a[MAX_ROWS][STREAM_COLS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) a[r][c] = add ? _mm512_loadu_ps(acc.p + r * acc.ld + c * VL) : (__m512)(vf){0};
    for (ptrdiff_t i = 0; i < k;) {
        const bf16 *piece = *w.pieces++;
        const char *ahead = (const char *)*w.prefetch++ + skip;
        for (ptrdiff_t end = k - i < w.piece_k ? k : i + w.piece_k; i < end; i += 2, piece += 2 * PANEL, ahead += share) {
            if (!packed || rows > 4) __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + share / 2, 0, 2);
            if (!packed && rows <= 4) __builtin_prefetch(piece + 2048, 0, 2), __builtin_prefetch(piece + 2048 + PANEL, 0, 2);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c += 2) {
                const bf16 *at = piece + c / PANEL_VECTORS * (k * PANEL);
                __m512i v0 = _mm512_loadu_si512(at), v1 = _mm512_loadu_si512(at + 2 * VL);
                prefetch_stream(cols, at), prefetch_stream(cols, at + 2 * VL);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++)
                    multiply_add2(&a[r][c], &a[r][c + 1], v0, v1, packed ? &x.p[i * rows + 2 * r] : &x.p[r * x.ld + i]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) _mm512_storeu_ps(acc.p + r * acc.ld + c * VL, a[r][c]);
}

/* `skip` and `share` for the part at `at` of a tile: together the parts prefetch a panel of k inputs. */
#define PREFETCH(k, rows) (k) * at * 2 * PANEL / (rows), 4 * PANEL / PARTS(rows)
static void tile(int rows, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
#define PLAIN_PART(R, cols, c) \
    tile_rows(R, cols, 0, k, inputs_from(x, at), w, PREFETCH(w.piece_k, rows), outputs_from(acc, at, 0), add)
    FOR_ROWS(rows, PLAIN_PART)
}

/* out[k/2][rows][2] = x[rows][k]. Each store writes VL pairs; the next one overwrites those beyond `rows`. */
INLINE void pack_rows(int rows, const bf16 *x, ptrdiff_t ldx, ptrdiff_t k, bf16 *out) {
    for (ptrdiff_t i = 0; i < k; i += 2 * VL) {
        vf pairs[VL];
#pragma GCC unroll 16
        for (int r = 0; r < VL; r++) pairs[r] = r < rows ? load((const float *)(x + r * ldx + i)) : (vf){0};
        transpose(pairs);
#pragma GCC unroll 16
        for (int j = 0; j < VL; j++, out += 2 * rows) store((float *)out, pairs[j]);
    }
}

/* Copy x into `buffer`, cut into tiles of `step` rows, and these into their parts, each packed as [k/2][rows][2]. So a step of a
 * part reads one or two cache lines, however far apart the rows of x are. The last store writes up to 64 bytes too many. */
INLINE input_rows prepare_inputs(const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, operand *buffer) {
#define PACK_PART(R, cols, c) pack_rows(R, x + (r + at) * ldx, ldx, k, buffer + (r + at) * k)
    for (ptrdiff_t r = 0; r < rows; r += step) FOR_ROWS((int)(rows - r < step ? rows - r : step), PACK_PART)
    return (input_rows){buffer, k};
}

enum { NEAR_BYTES = 8192 }; /* how far a tile of one part prefetches: at 5 to 12 rows 1.08 times as fast as the next panel */

/* Not inlined: inside a parallel region GCC 12 keeps the accumulators in memory. */
static __attribute__((noinline)) void linear_tile(int rows, ptrdiff_t k, input_rows x, const bf16 *w, int prefetch, float *acc) {
    const bf16 *next = !prefetch ? w : rows <= MAX_ROWS ? w + NEAR_BYTES / sizeof *w : w + k * PANEL;
#define PACKED_PART(R, cols, c)                                                                              \
    tile_rows(R, cols, 1, k, (input_rows){x.p + at * k, 0}, (panel_pieces){&w, &next, k}, PREFETCH(k, rows), \
              (output_rows){acc + at * PANEL, PANEL}, 0)
    FOR_ROWS(rows, PACKED_PART)
}

static void tile_streams(const operand *x, const bf16 *w, ptrdiff_t k, float *acc) {
    tile_rows(1, STREAM_COLS, 1, k, (input_rows){x, 0}, (panel_pieces){&w, &w, k}, 0, 0, (output_rows){acc, 0}, 0);
}
