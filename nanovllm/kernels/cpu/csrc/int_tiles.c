/* The tiles of each kind of weights with 8 or 4 bits, compiled once for linears and experts.
 */
#include "int_tiles.h"

/* Not inlined: inside a parallel region GCC 12 keeps the accumulators in memory. */
#define DEFINE(name, bits, kind, inputs)                                                                              \
    static __attribute__((noinline)) void name(int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel p, \
                                               float *acc) {                                                          \
        int_tile_of(bits, kind, inputs, rows, k, group, x, p, NULL, (output_rows){acc, PANEL}, 0);                    \
    }                                                                                                                 \
    static __attribute__((noinline)) void name##_streams(ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel p, \
                                                         float *acc) {                                                \
        memset(acc, 0, STREAM_COLS * VL * sizeof *acc);                                                               \
        int_row_of(bits, kind, inputs, STREAM_COLS, k, group, x, p, (prefetch_plan){NULL, 0, 1, 0}, acc);             \
    }
DEFINE(int8, 8, PLAIN, 0)
DEFINE(int8_zeros, 8, ZEROS, 0)
#ifdef HAVE_DPBUSD
DEFINE(w8a8, 8, W8A8, 0)
#else
#define w8a8 int8
#define w8a8_streams int8_streams
#endif
DEFINE(int4, 4, PLAIN, INT4_INPUTS)
DEFINE(int4_minimums, 4, MINIMUMS, INT4_INPUTS)
DEFINE(int4_zeros, 4, ZEROS, INT4_INPUTS)
DEFINE(fp4, 4, FP4, INT4_INPUTS)
DEFINE(fp4_of_16, 4, FP4, INT4_INPUTS / 2)

/* CALL the functions for the weights of `panel`. */
#define CHOOSE(CALL)                                                               \
    if (panel.kind == W8A8) CALL(w8a8);                                            \
    else if (bits == 8) panel.kind == ZEROS ? CALL(int8_zeros) : CALL(int8);       \
    else if (panel.kind == MINIMUMS) CALL(int4_minimums);                          \
    else if (panel.kind == ZEROS) CALL(int4_zeros);                                \
    else if (panel.kind == FP4) group < INT4_INPUTS ? CALL(fp4_of_16) : CALL(fp4); \
    else CALL(int4)

void int_tile(int bits, int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel, float *acc) {
#define TILE(name) name(rows, k, group, x, panel, acc)
    CHOOSE(TILE);
}

void int_streams(int bits, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel, float *acc) {
#define STREAM(name) name##_streams(k, group, x, panel, acc)
    CHOOSE(STREAM);
}

#define DEFINE_CACHE(name, bits, kind)                                                                                      \
    void name(int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel p, const uint8_t *ahead, output_rows acc, \
              int add) {                                                                                                    \
        int_tile_of(bits, kind, INT4_INPUTS, rows, k, group, x, p, ahead, acc, add);                                        \
    }
DEFINE_CACHE(cache_tile8, 8, CACHE8)
DEFINE_CACHE(key_tile4, 4, MINIMUMS)
DEFINE_CACHE(value_tile4, 4, PLAIN)

/* Packing inputs. */
#ifdef HAVE_AMX
ptrdiff_t quantize_items(ptrdiff_t rows, int bits) { return (void)bits, rows; }

/* An item is a row. */
void quantize_rows(const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, quantized_rows q, ptrdiff_t group, int bits, int kind,
                   ptrdiff_t item) {
    const ptrdiff_t bytes = input_bytes(bits, kind), most = TILE_ROWS / bytes, first = item / most * most,
                    unit = tile_unit(group);
    const ptrdiff_t part = rows - first < most ? rows - first : most, r = item - first;
    int8_t ints[2 * K_STEP] __attribute__((aligned(64)));
    float scale;
    group_sum sum;
    const quantized_rows one = {ints, &scale, &sum, group, 1};
    if (rows == 1) {
        quantize_row(x, &q, 0, group, bits, kind);
        return;
    }
    q = part_from(q, bytes, first), x += item * ldx;
    for (ptrdiff_t g = 0; g < q.groups; g++) {
        quantize_row(x + g * group, &one, 0, group, bits, kind);
        q.scales[g * part + r] = scale, q.sums[g * part + r] = sum;
        for (ptrdiff_t i = 0; i < group; i += unit) {
            int8_t *to = (int8_t *)q.ints + (g * group + i) * part * bytes + r * unit;
            if (bytes == 1) memcpy(to, ints + i, unit);
            for (ptrdiff_t j = 0; j < unit && bytes == 2; j += VL) {
                half_vs v = *(const half_vs *)(ints + 2 * (i + j));
                *(quarter_vb *)(to + j) = __builtin_convertvector(v >> 8, quarter_vb);
                *(quarter_vb *)(to + part * unit + j) = __builtin_convertvector(v, quarter_vb);
            }
        }
    }
}
#else
/* Many rows are turned first, so that each has a lane: VL = 16 has lanes for two parts of a tile with weights of
 * 4 bits. */
enum { LANES = (MAX_ROWS + VL - 1) / VL, CHUNK = 2 * VL }; /* vectors of so many rows; inputs that a square holds */

/* pairs[inputs/2][LANES] = x[rows][inputs], a row in each lane; zeros fill them. x has `left` inputs. */
static void turn_rows(const bf16 *x, ptrdiff_t ldx, int rows, ptrdiff_t inputs, ptrdiff_t left, vu (*pairs)[LANES]) {
    for (ptrdiff_t i = 0; i < inputs; i += CHUNK)
        for (int v = 0; v < LANES; v++) {
            vf square[VL];
#pragma GCC unroll 16
            for (int r = 0; r < VL; r++) {
                ptrdiff_t row = v * VL + r;
                square[r] = row < rows ? (vf)load_pairs(x + row * ldx + i, left - i) : (vf){0};
            }
            transpose(square);
            for (int r = 0; r < VL; r++) pairs[i / 2 + r][v] = (vu)square[r];
        }
}

/* Rows [0, first) and [first, rows) of some inputs are those of two parts; the second may have none. */
typedef struct {
    int rows, first;
} lanes_of_parts;

/* Write a number of 4 bytes of each row, the lanes from v * VL on, at place i of [..][rows] of the parts that begin at `out` and
 * have `places`. A store overwrites what is behind the rows; the next ones correct it, and none passes the end of a part. */
INLINE void put_lanes(vi lane, int v, lanes_of_parts of, ptrdiff_t i, ptrdiff_t places, int32_t *out) {
    for (int part = 0; part < (VL == 16 ? 2 : 1); part++) {
        int rows = part ? of.rows - of.first : of.first, count = rows - v * VL;
        int32_t *to = out + i * rows + v * VL;
        if (count <= 0) return;
        if ((places - i) * rows - v * VL >= VL) *(vi *)to = lane;
        else memcpy(to, &lane, (count < VL ? count : VL) * sizeof *to);
        out += places * rows;
        lane = (vi)shuffle((vf)lane, (lanes() + of.first) & (VL - 1));
    }
}

/* The two numbers of each pair times `factor`, as integers in the last bits of the two results. */
INLINE void nearest_pair(vu pair, vf factor, vu *even, vu *odd) {
    *even = (vu)fma_((vf)(pair << 16), factor, broadcast(ROUND_TO_INT));
    *odd = (vu)fma_((vf)(pair & 0xffff0000), factor, broadcast(ROUND_TO_INT));
}

/* Quantise group g of parts from its pairs; see quantize_rows(). */
INLINE void quantize_group(vu (*pairs)[LANES], lanes_of_parts of, ptrdiff_t g, ptrdiff_t group, quantized_rows q, int bytes,
                           int bits, int kind) {
    const ptrdiff_t unit = 4 / bytes, places = q.ld / unit;
    const float limit = limit_of(bits, kind);
    vf inverse[LANES];
    vu total[LANES]; /* modulo 2^32: it begins and ends near 0 */
    for (int v = 0; v < LANES && v * VL < of.rows; v++) {
        vi top = {0};
        for (ptrdiff_t i = 0; i < group / 2; i++)
            top = larger_int(top, larger_int((vi)(pairs[i][v] << 16) & 0x7fffffff, (vi)(pairs[i][v] & 0x7fff0000)));
        inverse[v] = blend((vf)top > 0.0f, limit / (vf)top, (vf){0});
        total[v] = (vu)broadcast(ROUND_TO_INT) * (uint32_t)-group;
        put_lanes((vi)((vf)top / limit), v, of, g, q.groups, (int32_t *)q.scales);
    }
    for (ptrdiff_t i = 0; i < group; i += unit)
        for (int v = 0; v < LANES && v * VL < of.rows; v++) {
            vu even, odd, third, fourth, ints;
            nearest_pair(pairs[i / 2][v], inverse[v], &even, &odd);
            total[v] += even + odd;
            if (bytes == 2) ints = (even & 0xffff) | odd << 16;
            else {
                nearest_pair(pairs[i / 2 + 1][v], inverse[v], &third, &fourth);
                total[v] += third + fourth;
                ints = (even & 255) | (odd & 255) << 8 | (third & 255) << 16 | fourth << 24;
            }
            put_lanes((vi)ints, v, of, (g * group + i) / unit, places, q.ints);
        }
    for (int v = 0; v < LANES && v * VL < of.rows; v++)
        put_lanes(group_sums((vi)total[v], bits, kind), v, of, g, q.groups, q.sums);
}

INLINE void quantize_lanes(const bf16 *x, ptrdiff_t ldx, lanes_of_parts of, quantized_rows q, ptrdiff_t group, int bytes,
                           int bits, int kind) {
    vu pairs[K_STEP / 2][LANES];
    ptrdiff_t chunk = group > CHUNK ? group : CHUNK;
    for (ptrdiff_t i = 0; i < q.ld; i += chunk) {
        turn_rows(x + i, ldx, of.rows, chunk, q.ld - i, pairs);
        for (ptrdiff_t j = 0; j < chunk && i + j < q.ld; j += group)
            quantize_group(pairs + j / 2, of, (i + j) / group, group, q, bytes, bits, kind);
    }
}

/* The same for a part of few rows, one after the other. */
static void quantize_few(const bf16 *x, ptrdiff_t ldx, int rows, quantized_rows q, ptrdiff_t group, int bits, int kind) {
    int32_t ints[K_STEP];
    float scale;
    group_sum sum;
    const ptrdiff_t places = group * input_bytes(bits, kind) / 4;
    const quantized_rows one = {ints, &scale, &sum, group, 1};
    for (int r = 0; r < rows; r++)
        for (ptrdiff_t g = 0; g < q.groups; g++) {
            quantize_row(x + r * ldx + g * group, &one, 0, group, bits, kind);
            for (ptrdiff_t i = 0; i < places; i++) ((int32_t *)q.ints)[(g * places + i) * rows + r] = ints[i];
            q.scales[g * rows + r] = scale, q.sums[g * rows + r] = sum;
        }
}

enum { PARTS_AT_ONCE = VL == 16 ? 2 : 1, FEWEST_LANES = 4 };

ptrdiff_t quantize_items(ptrdiff_t rows, int bits) {
    return bits == 8 ? PARTS(rows) : (FEW_PARTS(rows) + PARTS_AT_ONCE - 1) / PARTS_AT_ONCE;
}

void quantize_rows(const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, quantized_rows q, ptrdiff_t group, int bits, int kind,
                   ptrdiff_t item) {
    ptrdiff_t parts = bits == 8 ? PARTS(rows) : FEW_PARTS(rows), part = bits == 8 ? item : item * PARTS_AT_ONCE;
    ptrdiff_t size = rows / parts, larger = rows % parts; /* parts have `size` rows, the first ones one more */
    ptrdiff_t at = part * size + (part < larger ? part : larger);
    int first = (int)(size + (part < larger)), second = 0;
    if (bits == 4 && PARTS_AT_ONCE == 2 && part + 1 < parts) second = (int)(size + (part + 1 < larger));
    x += at * ldx;
    ptrdiff_t bytes = input_bytes(bits, kind);
    q = part_from(q, bytes, at);
    if (rows == 1) quantize_row(x, &q, 0, group, bits, kind);
    else if (first + second <= FEWEST_LANES) quantize_few(x, ldx, first, q, group, bits, kind);
    else if (bytes == 2) quantize_lanes(x, ldx, (lanes_of_parts){first, first}, q, group, 2, bits, kind);
    else quantize_lanes(x, ldx, (lanes_of_parts){first + second, first}, q, group, 1, bits, kind);
}
#endif
