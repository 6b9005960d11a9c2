/* The tiles of each kind of weights with 8 or 4 bits, compiled once for linears and experts.
 */
#define FROM_SCALES from_f16
#include "int_tiles.h"

/* Not inlined: inside a parallel region GCC 12 keeps the accumulators in memory. */
#define DEFINE(name, bits, kind, inputs, wide)                                                                        \
    static __attribute__((noinline)) void name(int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel p, \
                                               output_rows acc, int add) {                                            \
        int_tile_of(bits, kind, inputs, wide, rows, k, group, x, p, acc, add);                                        \
    }                                                                                                                 \
    static __attribute__((noinline)) void name##_streams(ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel p, \
                                                         float *acc) {                                                \
        int_streams_of(bits, kind, inputs, wide, k, group, x, p, acc);                                                \
    }
DEFINE(int8, 8, PLAIN, 0, 0)
DEFINE(int8_zeros, 8, ZEROS, 0, 0)
DEFINE(int4, 4, PLAIN, INT4_INPUTS, 0)
DEFINE(int4_wide, 4, PLAIN, INT4_INPUTS, 1)
DEFINE(int4_minimums, 4, MINIMUMS, INT4_INPUTS, 0)
DEFINE(int4_zeros, 4, ZEROS, INT4_INPUTS, 1)
DEFINE(fp4, 4, FP4, INT4_INPUTS, 0)
DEFINE(fp4_of_16, 4, FP4, INT4_INPUTS / 2, 0)

void int_tile(int bits, int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel, output_rows acc, int add) {
#define TILE(name) name(rows, k, group, x, panel, acc, add)
    if (bits == 8) panel.kind == ZEROS ? TILE(int8_zeros) : TILE(int8);
    else if (panel.kind == MINIMUMS) TILE(int4_minimums);
    else if (panel.kind == ZEROS) TILE(int4_zeros);
    else if (panel.kind == FP4) group < INT4_INPUTS ? TILE(fp4_of_16) : TILE(fp4);
    else group > INT4_INPUTS ? TILE(int4_wide) : TILE(int4);
}

void int_streams(int bits, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel, float *acc) {
#define STREAM(name) name##_streams(k, group, x, panel, acc)
    if (bits == 8) panel.kind == ZEROS ? STREAM(int8_zeros) : STREAM(int8);
    else if (panel.kind == MINIMUMS) STREAM(int4_minimums);
    else if (panel.kind == ZEROS) STREAM(int4_zeros);
    else if (panel.kind == FP4) group < INT4_INPUTS ? STREAM(fp4_of_16) : STREAM(fp4);
    else group > INT4_INPUTS ? STREAM(int4_wide) : STREAM(int4);
}
