/* Tiles by AVX-512. Where the processor multiplies bfloat16 fast, one instruction multiplies 16 pairs and adds each pair's
 * products to a float32 sum. Elsewhere both weights of a pair are widened and multiplied in float32, one after the other. A
 * linear's inputs are packed first. Included by tiles.h, which describes the functions.
 */
enum { PASS_KEYS = 256, K_MULTIPLE = 2, PREPARED_GAP = 0, STREAM_BYTES = 4 << 20 };

#ifdef HAVE_DPBF16
enum { HALVES = 1, LINEAR_BYTES = CACHE_BYTES }; /* HALVES: in how many products a pair goes */
#define MULTIPLY_ADD2 "vpbroadcastd %5, %2\n\tvdpbf16ps %2, %3, %0\n\tvdpbf16ps %2, %4, %1"
INLINE __m512 part_of(__m512i pairs, int half) { return (void)half, (__m512)pairs; }
INLINE __m512 multiply_add(__m512 a, __m512 w, const operand *x) {
    return _mm512_dpbf16_ps(a, (__m512bh)w, (__m512bh)_mm512_set1_epi32(*(const int32_t *)x));
}
#else
enum { HALVES = 2, LINEAR_BYTES = 3 << 18 };
#define MULTIPLY_ADD2 "vbroadcastss %5, %2\n\tvfmadd231ps %2, %3, %0\n\tvfmadd231ps %2, %4, %1"
INLINE __m512 part_of(__m512i pairs, int half) { return half ? (__m512)((vu)pairs & 0xffff0000) : (__m512)((vu)pairs << 16); }
INLINE __m512 multiply_add(__m512 a, __m512 w, const operand *x) { return (__m512)fma_((vf)w, broadcast(*x), (vf)a); }
#endif

/* a += v . x and b += w . x, where all lanes multiply the same input: with bfloat16 the pair at x. In assembly, because GCC loads
 * the inputs of many rows in advance, and then keeps accumulators in memory. */
INLINE void multiply_add2(__m512 *a, __m512 *b, __m512 v, __m512 w, const operand *x) {
#ifdef EMULATED
    *a = multiply_add(*a, v, x), *b = multiply_add(*b, w, x);
#else
    __m512 t;
    typedef int32_t input __attribute__((may_alias));
    __asm__(MULTIPLY_ADD2 : "+v"(*a), "+v"(*b), "=&v"(t) : "v"(v), "v"(w), "m"(*(const input *)x));
#endif
}

/* One part of a tile, or of several panels side by side, w.piece_k * PANEL weights apart. x is rows ld apart, or packed:
 * [k/2][rows][2], or [k][rows] in float32. Each step of two inputs prefetches `share` bytes of w.prefetch into the second-level
 * cache, from byte `skip` on; those of each panel if x is not packed. Measured: a linear of up to 4 rows is fastest without this
 * (1.2 times on a Zen 4), the keys of attention with a second prefetch, 4 KB ahead in w, if their panels are read one by one; its
 * values without. */
INLINE void tile_rows(int rows, int cols, int packed, ptrdiff_t k, input_rows x, panel_pieces w, ptrdiff_t skip, ptrdiff_t share,
                      output_rows acc, int add) {
    __m512 a[MAX_ROWS][STREAM_COLS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) a[r][c] = add ? _mm512_loadu_ps(acc.p + r * acc.ld + c * VL) : (__m512)(vf){0};
    /* Every third row's inputs. The addresses of the two rows after it take one more register for all, so none is in memory: 1.07
     * times as fast. */
    const operand *bases[(MAX_ROWS + 2) / 3];
#pragma GCC unroll 4
    for (int j = 0; j < (rows + 2) / 3; j++) bases[j] = x.p + j * 3 * x.ld;
    for (ptrdiff_t i = 0; i < k;) {
        const bf16 *piece = *w.pieces++;
        const char *ahead = (const char *)*w.prefetch++ + skip;
        for (ptrdiff_t end = k - i < w.piece_k ? k : i + w.piece_k; i < end; i += 2, piece += 2 * PANEL, ahead += share) {
            const operand *inputs = x.p + i * rows;
            for (ptrdiff_t column = 0; column < (packed ? PANEL : cols * VL) && (!packed || rows > 4); column += PANEL) {
                const char *line = ahead + column * w.piece_k * 2;
                __builtin_prefetch(line, 0, 2), __builtin_prefetch(line + share / 2, 0, 2);
            }
            if (!packed && rows <= 4 && cols == PANEL_VECTORS && !add)
                __builtin_prefetch(piece + 2048, 0, 2), __builtin_prefetch(piece + 2048 + PANEL, 0, 2);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c += 2) {
                const bf16 *at = piece + c / PANEL_VECTORS * (w.piece_k * PANEL);
                __m512i v = _mm512_loadu_si512(at), w = _mm512_loadu_si512(at + 2 * VL);
                if (packed) prefetch_stream(cols, at), prefetch_stream(cols, at + 2 * VL);
#pragma GCC unroll 2
                for (int half = 0; half < HALVES; half++) {
                    __m512 first = part_of(v, half), second = part_of(w, half);
#pragma GCC unroll 16
                    for (int r = 0; r < rows; r++)
                        multiply_add2(&a[r][c], &a[r][c + 1], first, second,
                                      packed ? inputs + half * rows + r * (2 / HALVES) : bases[r / 3] + r % 3 * x.ld + half);
                }
            }
#pragma GCC unroll 4
            for (int j = 0; j < (rows + 2) / 3 && !packed; j++) {
                bases[j] += 2;
                __asm__("" : "+r"(bases[j])); /* GCC would compute them from each other */
            }
        }
    }
#pragma GCC unroll 16
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

/* A few rows wait for memory. Measured on a Zen 4: attention of one sequence with 4 panels side by side takes 0.96 of the time
 * for 1 and 2 rows, 0.98 for 3. For 4 rows there are registers for 2 panels, which takes 1.04 of the time. */
INLINE int tile_side_by_side(int rows, ptrdiff_t panels, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
    int n = rows > 3 || panels < 2 ? 1 : panels < STREAMS ? 2 : STREAMS;
#define SIDE_CASE(R, N) \
    case (R) * TILE_ROWS + (N): tile_rows(R, (N) * PANEL_VECTORS, 0, k, x, w, 0, 4 * PANEL, acc, add); break
    switch (rows * TILE_ROWS + n) {
        SIDE_CASE(1, 2);
        SIDE_CASE(2, 2);
        SIDE_CASE(3, 2);
        SIDE_CASE(1, STREAMS);
        SIDE_CASE(2, STREAMS);
        SIDE_CASE(3, STREAMS);
    default: tile(rows, k, x, w, acc, add);
    }
    return n;
}

/* out[k/2][rows][2] = x[rows][k], or [k][rows] in float32. Each store writes a vector; the next one overwrites what is beyond
 * `rows`. */
INLINE void pack_rows(int rows, const bf16 *x, ptrdiff_t ldx, ptrdiff_t k, operand *out) {
    for (ptrdiff_t i = 0; i < k; i += 2 * VL) {
        vf pairs[VL];
#pragma GCC unroll 16
        for (int r = 0; r < VL; r++) pairs[r] = r < rows ? load_halves(x + r * ldx + i) : (vf){0};
        transpose(pairs);
#pragma GCC unroll 16
        for (int j = 0; j < VL; j++)
#pragma GCC unroll 2
            for (int half = 0; half < HALVES; half++, out += rows * 2 / HALVES)
                _mm512_storeu_ps((float *)out, part_of((__m512i)pairs[j], half));
    }
}

/* Copy x into `buffer`, cut into tiles of `step` rows, and these into their parts, each packed by pack_rows(). So a step of a
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

#ifdef HAVE_DPBF16
INLINE void linear_panel(linear_inputs in, const bf16 *w, linear_outputs out, float *acc) { panel_by_tiles(in, w, out, acc); }
#else
enum { PIECE = 128 }; /* inputs whose widened weights leave room in the first-level cache: 256 are 0.96 to 0.98 of the speed */

/* out[k][32] = a panel's weights for k inputs. */
INLINE void widen(ptrdiff_t k, const bf16 *w, float *out) {
    for (ptrdiff_t i = 0; i < k; i += 2)
        for (int half = 0; half < 2; half++)
            for (int c = 0; c < PANEL; c += VL, out += VL)
                _mm512_storeu_ps(out, part_of(_mm512_loadu_si512(w + i * PANEL + c * 2), half));
}

/* One part of a tile with packed inputs and widened weights. Each input prefetches `share` bytes. */
INLINE void widened_rows(int rows, ptrdiff_t k, const float *x, const float *w, const char *ahead, ptrdiff_t share, float *acc,
                         int add) {
    __m512 a[MAX_ROWS][PANEL_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < PANEL_VECTORS; c++) a[r][c] = add ? _mm512_loadu_ps(acc + r * PANEL + c * VL) : (__m512)(vf){0};
    for (ptrdiff_t i = 0; i < k; i++, w += PANEL, x += rows, ahead += share) {
        __m512 first = _mm512_loadu_ps(w), second = _mm512_loadu_ps(w + VL);
        __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) multiply_add2(&a[r][0], &a[r][1], first, second, x + r);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < PANEL_VECTORS; c++) _mm512_storeu_ps(acc + r * PANEL + c * VL, a[r][c]);
}

/* acc[rows][32] += x . w, or with i = 0 acc = x . w, for the inputs from i on of a packed tile that has ldx. */
static __attribute__((noinline)) void widened_tile(int rows, ptrdiff_t k, const float *x, ptrdiff_t ldx, ptrdiff_t i,
                                                   const float *w, const char *ahead, float *acc) {
#define WIDENED_PART(R, cols, c)                                                                                              \
    widened_rows(R, k, x + at * ldx + i * R, w, ahead + at * k * 2 * PANEL / rows, 2 * PANEL / PARTS(rows), acc + at * PANEL, \
                 i > 0)
    FOR_ROWS(rows, WIDENED_PART)
}

/* A block of several tiles goes through a panel in pieces, each widened once for all tiles: 1.03 to 1.06 times as fast as when
 * each part widens it again. The sums wait in acc meanwhile. The first tile prefetches the next panel, the others what is there.
 */
INLINE void linear_panel(linear_inputs in, const bf16 *w, linear_outputs out, float *acc) {
    if (in.rows <= TILE_ROWS) {
        panel_by_tiles(in, w, out, acc);
        return;
    }
    float widened[PIECE * PANEL] __attribute__((aligned(64)));
    int stream = can_stream(out);
    for (ptrdiff_t i = 0, k; i < in.k; i += k) {
        k = in.k - i < PIECE ? in.k - i : PIECE;
        widen(k, w + i * PANEL, widened);
        for (ptrdiff_t r = 0; r < in.rows; r += in.step) {
            int rows = in.rows - r < in.step ? (int)(in.rows - r) : (int)in.step;
            const char *ahead = r ? (const char *)widened : (const char *)(w + (in.k + i) * PANEL);
            widened_tile(rows, k, in.x.p + r * in.k, in.k, i, widened, ahead, acc + r * PANEL);
            if (out.y && i + k == in.k) store_outputs(acc + r * PANEL, out, r, rows, stream);
        }
    }
    end_stream(stream);
}
#endif
