/* Weights of 8 or 4 bits, and the inputs that they are multiplied by. A weight is scale * integer, where `group` inputs of an
 * output share a scale of 16 bits. Inputs are quantised too, with a float32 scale for each row and input_group(). So a group's
 * products are integers, and their sum is exact.
 *
 * k is a multiple of group, and group is a power of two that divides K_STEP, except that a single step (k <= K_STEP) of 8 bits
 * may have any multiple of 32.
 * - 8 bits: inputs have 16 bits; packed weights are [ceil(n/32)][k/2][32][2] int8.
 * - 4 bits: inputs have 8 bits; packed weights are [ceil(n/32)][k/8][32][4] bytes. Of eight inputs, byte b holds weight b in its
 *   low half and weight b + 4 in its high half, and 8 is added to each. (llama.cpp's Q4_0 rounds in the same way.)
 * - With minimums a weight is scale * (integer + 8) + minimum, as in llama.cpp's Q4_1.
 * - FP4 weights are scale * twice the number of E2M1 that the 4 bits stand for; their scales are bfloat16.
 * - With minimums and with FP4, group is at most 32.
 * - With zeros a weight is scale * (integer - zero). Zeros are int16: -zero, with 4 bits -(zero + 8).
 * - Scales of weights: [ceil(n/32)][k/group][32]; with minimums or zeros [ceil(n/32)][k/group][2][32], scales first.
 */
#pragma once
#include "tiles.h"

enum { PLAIN, MINIMUMS, FP4, ZEROS }; /* the kinds of weights; with 8 bits PLAIN or ZEROS */

/* Rows of 32 scales for each panel and group. */
INLINE ptrdiff_t rows_of_scales(ptrdiff_t kind) { return kind == MINIMUMS || kind == ZEROS ? 2 : 1; }

/* Inputs that share a scale, for weights of `bits` whose groups are `group`. */
enum { INT4_INPUTS = 32 };
INLINE ptrdiff_t input_group(ptrdiff_t bits, ptrdiff_t group) { return bits == 8 || group < INT4_INPUTS ? group : INT4_INPUTS; }

/* Twice the numbers of E2M1, plus 12 so that none is negative. */
#define FP4_TABLE 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
enum { FP4_OFFSET = 12 };
static const uint8_t fp4_table[64] __attribute__((aligned(64))) = {X4(FP4_TABLE)};

/* Bytes of a quantised input, for weights of `bits`. */
INLINE ptrdiff_t input_bytes(int bits) { return bits == 8 ? 2 : 1; }

/* Where in its panel the weight of input i and column c is: the byte, and with 4 bits the shift in it. */
INLINE ptrdiff_t offset8(ptrdiff_t i, ptrdiff_t c) { return (i / 2 * PANEL + c) * 2 + i % 2; }
INLINE ptrdiff_t offset4(ptrdiff_t i, ptrdiff_t c) { return (i / 8 * PANEL + c) * 4 + i % 4; }
INLINE int shift4(ptrdiff_t i) { return i % 8 < 4 ? 0 : 4; }

/* Two multiples of the sum of a row's group: by sum_multiple(), to correct the products of weights to which 8 was added, or which
 * have zeros; and by the row's scale, for the weights' minimums. */
typedef struct {
    int32_t multiple;
    float scaled;
} group_sum;
INLINE int sum_multiple(int bits, int kind) { return bits == 8 || kind == ZEROS ? 1 : 8; }

/* Quantised inputs: rows of int16 or int8, ld apart, and a scale and a sum for each row and group. */
typedef struct {
    void *ints;
    float *scales;
    group_sum *sums;
    ptrdiff_t ld, groups;
} quantized_rows;

/* Return the part of x from `row` on, or from input i on, where group g begins. `bits` are those of the weights. */
INLINE quantized_rows rows_from(quantized_rows x, int bits, ptrdiff_t row) {
    ptrdiff_t g = row * x.groups;
    return (quantized_rows){(char *)x.ints + row * x.ld * input_bytes(bits), x.scales + g, x.sums + g, x.ld, x.groups};
}
INLINE quantized_rows columns_from(quantized_rows x, int bits, ptrdiff_t i, ptrdiff_t g) {
    return (quantized_rows){(char *)x.ints + i * input_bytes(bits), x.scales + g, x.sums + g, x.ld, x.groups};
}

/* The bytes and the scales of a panel, from some column on, and the kind of its weights. */
typedef struct {
    const uint8_t *w;
    const uint16_t *scales;
    int kind;
} int_panel;

/* acc[rows][32] = x[rows][k] . w, or with `add` acc += x . w; in int_tiles.c. Scales are float16, those of FP4 bfloat16. */
__attribute__((visibility("hidden"))) void int_tile(int bits, int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x,
                                                    int_panel panel, output_rows acc, int add);

/* acc[STREAMS][32] = x[k] . w for STREAMS panels, one behind the other in memory; see tile_streams(). */
__attribute__((visibility("hidden"))) void int_streams(int bits, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel,
                                                       float *acc);

/* acc[rows][columns] *= factors[columns]. */
INLINE void multiply_columns(float *acc, ptrdiff_t rows, ptrdiff_t columns, const float *factors) {
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t c = 0; c < columns; c += VL) store(acc + r * columns + c, load(acc + r * columns + c) * load(factors + c));
}

/* Load VL numbers of x from i on: bfloat16 if `bytes` is 2, float32 if it is 4. */
INLINE vf load_any(const void *x, int bytes, ptrdiff_t i) {
    return bytes == 4 ? load((const float *)x + i) : load_bf16((const bf16 *)x + i, VL);
}

/* Quantise a row of x, whose numbers have `bytes`, into `row` of q, for weights of `bits` and `kind`: x = scale * integer, with a
 * scale for each `group` inputs. */
INLINE void quantize_row(const void *x, int bytes, const quantized_rows *q, ptrdiff_t row, ptrdiff_t group, int bits, int kind) {
    const float limit = bits == 8 ? 32767.0f : 127.0f;
    for (ptrdiff_t g = 0; g < q->groups; g++) {
        vf top = {0};
        for (ptrdiff_t i = 0; i < group; i += VL) {
            vf v = load_any(x, bytes, g * group + i);
            top = larger(top, larger(v, -v));
        }
        float largest = largest_of(top), inverse = largest > 0 ? limit / largest : 0;
        q->scales[row * q->groups + g] = largest / limit;
        vi sum = {0};
        for (ptrdiff_t i = 0; i < group; i += VL) {
            vi v = nearest(load_any(x, bytes, g * group + i) * inverse);
            sum += v;
            if (bits == 8) *(half_vs *)((int16_t *)q->ints + row * q->ld + g * group + i) = __builtin_convertvector(v, half_vs);
            else *(quarter_vb *)((int8_t *)q->ints + row * q->ld + g * group + i) = __builtin_convertvector(v, quarter_vb);
        }
        int32_t total = 0;
        for (int i = 0; i < VL; i++) total += sum[i];
        q->sums[row * q->groups + g] = (group_sum){sum_multiple(bits, kind) * total, total * q->scales[row * q->groups + g]};
    }
}
