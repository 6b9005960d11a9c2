/* Weights of 8 or 4 bits, and the inputs that they are multiplied by. A weight is scale * integer, where `group` inputs of an
 * output share a scale of 16 bits. Inputs are quantised too, with a float32 scale for each row and input_group(). So a group's
 * products are integers, and their sum is exact.
 *
 * k is a multiple of group, and group is a power of two that divides K_STEP, except that a single step (k <= K_STEP) of 8 bits
 * may have any multiple of 32.
 * - 8 bits: inputs have 16 bits; packed weights are [ceil(n/32)][k/2][32][2] int8.
 * - 4 bits: inputs have 8 bits; packed weights are [ceil(n/32)][k/8][32][4] bytes. Of eight inputs, byte b holds weight b in its
 *   low half and weight b + 4 in its high half, and 8 is added to each. (llama.cpp's Q4_0 rounds in the same way.)
 * - W8A8 are 8 bits whose inputs have 8 bits, too. Where the processor multiplies bytes, packed weights are
 *   [ceil(n/32)][k/4][32][4] bytes to which 128 is added. Elsewhere they are as other weights of 8 bits, and so are the inputs,
 *   but for their range.
 * - With AMX all weights of 8 bits are [ceil(n/32)][k/4][32][4] int8.
 * - With minimums a weight is scale * (integer + 8) + minimum, as in llama.cpp's Q4_1.
 * - FP4 weights are scale * twice the number of E2M1 that the 4 bits stand for; their scales are bfloat16.
 * - With minimums and with FP4, group is at most 32.
 * - With zeros a weight is scale * (integer - zero). Zeros are int16: -zero, with 4 bits -(zero + 8).
 * - Scales of weights: [ceil(n/32)][k/group][32]; with minimums or zeros [ceil(n/32)][k/group][2][32], scales first.
 *
 * For a tile, inputs are packed in its parts (see FOR_ROWS; with AMX see int_tiles_amx.h): a part of R rows is [k/2][R][2] int16
 * or [k/4][R][4] int8, with [k/group][R] scales and sums. So a step of a part reads one or two cache lines, however far apart the
 * rows of x are.
 */
#pragma once
#include "tiles.h"

enum { PLAIN, MINIMUMS, FP4, ZEROS, W8A8 }; /* the kinds of weights; with 8 bits PLAIN, ZEROS or W8A8 */

/* Rows of 32 scales for each panel and group. */
INLINE ptrdiff_t rows_of_scales(ptrdiff_t kind) { return kind == MINIMUMS || kind == ZEROS ? 2 : 1; }

/* Inputs that share a scale, for weights of `bits` whose groups are `group`. */
enum { INT4_INPUTS = 32 };
INLINE ptrdiff_t input_group(ptrdiff_t bits, ptrdiff_t group) { return bits == 8 || group < INT4_INPUTS ? group : INT4_INPUTS; }

/* Twice the numbers of E2M1, plus 12 so that none is negative. */
#define FP4_TABLE 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
enum { FP4_OFFSET = 12 };
static const uint8_t fp4_table[64] __attribute__((aligned(64))) = {X4(FP4_TABLE)};

#if (VL == 16 && defined(__AVX512VNNI__)) || (VL == 8 && defined(__AVXVNNI__))
#define HAVE_DPBUSD 1
enum { BYTE_INPUTS = 1 }; /* for W8A8 */
#else
enum { BYTE_INPUTS = 0 };
#if (VL == 16 && defined(__AVX512BW__)) || (VL == 8 && defined(__AVX2__))
#define INT16_PAIRS 1 /* products of 8 bits are summed in pairs of int16 */
#endif
#endif

/* Bytes of a quantised input, for weights of `bits` and `kind`. */
INLINE ptrdiff_t input_bytes(ptrdiff_t bits, ptrdiff_t kind) { return bits == 4 || (kind == W8A8 && BYTE_INPUTS) ? 1 : 2; }

/* Whether weights of 8 bits are [k/4][32][4], and what is xored with them: 128 flips the sign, which adds 128. */
#ifdef HAVE_AMX
INLINE int in_fours(ptrdiff_t kind) { return (void)kind, 1; }
INLINE uint8_t stored_flip(ptrdiff_t kind) { return (void)kind, 0; }
#else
INLINE int in_fours(ptrdiff_t kind) { return input_bytes(8, kind) == 1; }
INLINE uint8_t stored_flip(ptrdiff_t kind) { return in_fours(kind) ? 128 : 0; }
#endif

/* Where in its panel the weight of input i and column c is: the byte, and with 4 bits the shift in it. */
INLINE ptrdiff_t offset8(ptrdiff_t i, ptrdiff_t c, ptrdiff_t kind) {
    return in_fours(kind) ? (i / 4 * PANEL + c) * 4 + i % 4 : (i / 2 * PANEL + c) * 2 + i % 2;
}
INLINE ptrdiff_t offset4(ptrdiff_t i, ptrdiff_t c) { return (i / 8 * PANEL + c) * 4 + i % 4; }
INLINE int shift4(ptrdiff_t i) { return i % 8 < 4 ? 0 : 4; }

/* What the product of a group needs of the sum of its inputs, `total`: with zeros the sum, with minimums its bits as a float. Of
 * other weights with 4 bits it is where the integer sum of a group begins, so that it ends as the bits of ROUND_TO_INT plus the
 * sum of products with the weights themselves, not with those to which 8 or 128 was added. As a float this needs no conversion.
 */
typedef int32_t group_sum;
INLINE vi group_sums(vi total, int bits, int kind) {
    if (input_bytes(bits, kind) == 2 || kind == ZEROS) return total;
    if (kind == MINIMUMS) return (vi) __builtin_convertvector(total, vf);
#ifdef INT16_PAIRS
    if (kind == FP4) return (vi)broadcast(ROUND_TO_INT); /* see fp4_start() */
#endif
    return (vi)broadcast(ROUND_TO_INT) - total * (kind == FP4 ? FP4_OFFSET : kind == W8A8 ? 128 : 8);
}

/* Quantised inputs: rows of int16 or int8, ld apart, and `groups` scales and sums of each row. */
typedef struct {
    void *ints;
    float *scales;
    group_sum *sums;
    ptrdiff_t ld, groups;
} quantized_rows;

/* Return the part of x from input i on, where group g begins, or from `row` on, for inputs of `bytes`. In packed inputs these are
 * a part's `rows` times as far, and only whole parts are such rows. */
INLINE quantized_rows inputs_at(quantized_rows x, ptrdiff_t bytes, ptrdiff_t i, ptrdiff_t g) {
    return (quantized_rows){(char *)x.ints + i * bytes, x.scales + g, x.sums + g, x.ld, x.groups};
}
INLINE quantized_rows part_from(quantized_rows x, ptrdiff_t bytes, ptrdiff_t row) {
    return inputs_at(x, bytes, row * x.ld, row * x.groups);
}

/* Rows of k inputs of `bytes` in groups of `group` that begin at `buffer`, and the bytes of each. */
INLINE ptrdiff_t quantized_bytes(ptrdiff_t k, ptrdiff_t group, ptrdiff_t bytes) {
    return k * bytes + k / group * (ptrdiff_t)(sizeof(float) + sizeof(group_sum));
}
INLINE quantized_rows quantized_at(char *buffer, ptrdiff_t rows, ptrdiff_t k, ptrdiff_t group, ptrdiff_t bytes) {
    float *scales = (float *)(buffer + rows * k * bytes);
    return (quantized_rows){buffer, scales, (group_sum *)(scales + rows * (k / group)), k, k / group};
}

/* The bytes and the scales of a panel, from some column on, and the kind of its weights. */
typedef struct {
    const uint8_t *w;
    const uint16_t *scales;
    int kind;
} int_panel;

/* acc[rows][32] = x[rows][k] . w for packed inputs of any number of rows; in int_tiles.c. Scales are float16, those of FP4
 * bfloat16. */
__attribute__((visibility("hidden"))) void int_tile(int bits, int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x,
                                                    int_panel panel, float *acc);

/* acc[rows][32] = x[rows][k] . w, or with `add` acc += x . w, for keys and values of 8 bits, keys of 4, and values of 4; see
 * int_tile_of(). `ahead` is not NULL. */
enum { CACHE8 = BYTE_INPUTS ? W8A8 : PLAIN }; /* the kind of 8 bits: inputs have 16 where that is as fast */
typedef void cache_tile(int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel, const uint8_t *ahead,
                        output_rows acc, int add);
__attribute__((visibility("hidden"))) cache_tile cache_tile8, key_tile4, value_tile4;

/* acc[STREAMS][32] = x[k] . w for STREAMS panels, one behind the other in memory; see tile_streams(). */
__attribute__((visibility("hidden"))) void int_streams(int bits, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel,
                                                       float *acc);

/* Pack rows of bfloat16 x, ldx apart, for int_tile(): x = scale * integer, with a scale for each row and `group` inputs; q.ld is
 * the number of inputs. All quantize_items() do it, each for some of the rows. */
__attribute__((visibility("hidden"))) ptrdiff_t quantize_items(ptrdiff_t rows, int bits);
__attribute__((visibility("hidden"))) void quantize_rows(const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, quantized_rows q,
                                                         ptrdiff_t group, int bits, int kind, ptrdiff_t item);

/* acc[rows][columns] *= factors[columns]. */
INLINE void multiply_columns(float *acc, ptrdiff_t rows, ptrdiff_t columns, const float *factors) {
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t c = 0; c < columns; c += VL) store(acc + r * columns + c, load(acc + r * columns + c) * load(factors + c));
}

INLINE float limit_of(int bits, int kind) { return bits == 4 || kind == W8A8 ? 127.0f : 32767.0f; }

/* Quantise a row of x into `row` of q, for weights of `bits` and `kind`: x = scale * integer, with a scale for each `group`
 * inputs. The largest size is found among the bits, as integers, so that no NaN is lost. */
INLINE void quantize_row(const bf16 *x, const quantized_rows *q, ptrdiff_t row, ptrdiff_t group, int bits, int kind) {
    const float limit = limit_of(bits, kind);
    for (ptrdiff_t g = 0; g < q->groups; g++, x += group) {
        vi top = {0}, total = {0};
        for (ptrdiff_t i = 0; i < group; i += VL) top = larger_int(top, (vi)load_bf16(x + i, VL) & 0x7fffffff);
        for (int n = VL / 2; n; n /= 2) top = larger_int(top, (vi)shuffle_xor((vf)top, n));
        float largest = ((vf)top)[0], inverse = largest > 0.0f ? limit / largest : 0.0f; /* a division of vectors takes longer */
        for (ptrdiff_t i = 0; i < group; i += VL) {
            vi v = nearest_product(load_bf16(x + i, VL), broadcast(inverse));
            total += v;
            if (input_bytes(bits, kind) == 2)
                *(half_vs *)((int16_t *)q->ints + row * q->ld + g * group + i) = __builtin_convertvector(v, half_vs);
            else *(quarter_vb *)((int8_t *)q->ints + row * q->ld + g * group + i) = __builtin_convertvector(v, quarter_vb);
        }
        for (int n = VL / 2; n; n /= 2) total += (vi)shuffle_xor((vf)total, n);
        q->scales[row * q->groups + g] = largest / limit;
        q->sums[row * q->groups + g] = group_sums(total, bits, kind)[0];
    }
}
