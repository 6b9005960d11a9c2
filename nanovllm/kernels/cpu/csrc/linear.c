/* Linear layers with bfloat16 weights: packing them, multiplying by them, and reading rows of them.
 * Layout of a packed weight: see kernels.h.
 */
#include "tiles.h"
#ifdef HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>

_Thread_local tile_shape configured;

/* Linux lets a process use AMX only after this request (ARCH_REQ_XCOMP_PERM for XFEATURE_XTILE_DATA). Return whether it agreed.
 */
int nv_enable(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#else
int nv_enable(void) { return 1; }
#endif

/* Return the instructions that multiply bfloat16 here: other ones may round otherwise. */
const char *nv_instructions(void) {
#if defined(HAVE_AMX)
    return "AMX-BF16";
#elif defined(HAVE_DPBF16)
    return "AVX512-BF16";
#elif defined(HAVE_BFMMLA)
    return "NEON-BF16";
#elif VL == 16
    return "AVX-512";
#elif VL == 8
    return "AVX2";
#else
    return "128 bits";
#endif
}

/* The inputs of a packed weight with k inputs: zeros are added up to a multiple of 32. */
INLINE ptrdiff_t packed_inputs(ptrdiff_t k) { return (k + PANEL - 1) / PANEL * PANEL; }

/* packed[ceil(n/32)][packed_inputs(k)/2][32][2] = w[n][k]. */
void nv_pack(team *t, const bf16 *w, bf16 *packed, ptrdiff_t n, ptrdiff_t k) {
    FOR_ITEMS(p, t, (n + PANEL - 1) / PANEL) {
        ptrdiff_t first = p * PANEL;
        turn_panel(w + first * k, k, n - first < PANEL ? n - first : PANEL, k, packed + first * packed_inputs(k));
    }
}

/* padded[rows][packed_inputs(k)] = x[rows][k], and zeros. */
static void pad_rows(const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, ptrdiff_t k, bf16 *padded) {
    for (ptrdiff_t r = 0; r < rows; r++, padded += packed_inputs(k)) {
        memcpy(padded, x + r * ldx, k * sizeof *x);
        memset(padded + k, 0, (packed_inputs(k) - k) * sizeof *x);
    }
}

/* A packed weight of `outputs` rows for each head. With `turned` the rows' numbers are the outputs, and there are `inputs` rows,
 * a multiple of 32. */
typedef struct {
    const bf16 *packed;
    ptrdiff_t outputs, inputs, turned;
} head_weights;

/* Return panel p of a head's weight, of packed_inputs(w.inputs) inputs. A turned one is made in `panel`. */
INLINE const bf16 *panel_of(head_weights w, ptrdiff_t head, ptrdiff_t p, bf16 *panel) {
    if (!w.turned) return w.packed + (head * ((w.outputs + PANEL - 1) / PANEL) + p) * PANEL * packed_inputs(w.inputs);
    ptrdiff_t width = packed_inputs(w.outputs);
    const bf16 *first = w.packed + head * w.inputs * width + p * PANEL * PANEL;
    for (ptrdiff_t i = 0; i < w.inputs; i += PANEL) turn_square(first + i * width, PANEL / 2, panel + i * PANEL);
    return panel;
}

/* y[m][heads][kept + n] = x[m][heads][kept + num_inputs], whose first `kept` numbers are copied; the others are multiplied by w,
 * plus bias[n] or NULL, and rounded to nearest even. Rows and heads of x and y lie apart as ldx, x_head, ldy and y_head say. See
 * head_weights. An item is the product of a block of a head's x with a panel, or of a single row with STREAMS panels, if there
 * are more. Each thread prepares the blocks that it multiplies, so that a block fits its cache. */
void nv_linear(team *t, const bf16 *x, ptrdiff_t ldx, ptrdiff_t x_head, const bf16 *packed, const bf16 *bias, bf16 *y,
               ptrdiff_t ldy, ptrdiff_t y_head, token_count m, ptrdiff_t heads, ptrdiff_t n, ptrdiff_t num_inputs, ptrdiff_t kept,
               ptrdiff_t turned) {
    const head_weights w = {packed, n, num_inputs, turned};
    ptrdiff_t k = packed_inputs(num_inputs), panels = (n + PANEL - 1) / PANEL;
    ptrdiff_t block = rows_that_fit(m, k * sizeof(operand), LINEAR_BYTES), prepared = -1;
    int streams = m == 1 && !turned && heads * panels > STREAMS; /* otherwise one thread would read all */
    ptrdiff_t group = streams ? STREAMS : 1, groups = (panels + group - 1) / group;
    ptrdiff_t acc_rows = block > TILE_ROWS ? block : TILE_ROWS;
    operand *buffer = scratch(block * (k + 16) * sizeof(operand) + 64);
    float *acc = scratch(acc_rows * PANEL * sizeof(float));
    bf16 *padded = k > num_inputs ? scratch(block * k * sizeof *padded) : NULL;
    bf16 *panel = turned ? scratch(k * PANEL * sizeof *panel) : NULL;
    input_rows inputs = {0};
    FOR_ITEMS(item, t, heads * ((m + block - 1) / block) * groups) {
        ptrdiff_t first = item % groups * group, last = first + group < panels ? first + group : panels;
        ptrdiff_t part = item / groups, head = part % heads, i = part / heads * block;
        ptrdiff_t rows = m - i < block ? m - i : block, step = even_block(rows, TILE_ROWS);
        const bf16 *from = x + i * ldx + head * x_head + kept;
        bf16 *to = y + i * ldy + head * y_head + kept;
        for (ptrdiff_t r = 0; kept && !first && r < rows; r++)
            memcpy(to + r * ldy - kept, from + r * ldx - kept, kept * sizeof *to);
        if (part != prepared && padded) pad_rows(from, ldx, rows, num_inputs, padded);
        if (part != prepared) inputs = prepare_inputs(padded ? padded : from, padded ? k : ldx, rows, step, k, buffer);
        prepared = part;
        if (streams && last - first == STREAMS) {
            tile_streams(inputs.p, panel_of(w, head, first, panel), k, acc);
            store_row(acc, bias_from(bias, first * PANEL), to + first * PANEL, STREAMS * PANEL, n - first * PANEL);
            continue;
        }
        for (ptrdiff_t p = first; p < last; p++) {
            linear_outputs out = {to + p * PANEL, ldy, n - p * PANEL, m * heads * n * 2, bias_from(bias, p * PANEL)};
            linear_panel((linear_inputs){inputs, rows, step, k}, panel_of(w, head, p, panel), out, acc);
        }
    }
    end_tiles();
    free(buffer);
    free(acc);
    free(padded);
    free(panel);
}

/* y[rows][ldy] = x . w for `rows` (1 or WIDE_TOKENS) rows of x and `outputs` rows of w, both k long. Each sum has one vector of
 * its own, whatever the other rows are. */
enum { WIDE_TOKENS = 4, WIDE_BLOCK = 32, WIDE_OUTPUTS = 8, WIDE_STEP = VL == 16 ? 4 : 2 };
INLINE void wide_tile(int rows, const bf16 *x, ptrdiff_t ldx, const float *w, ptrdiff_t outputs, ptrdiff_t k, float *y,
                      ptrdiff_t ldy) {
    for (ptrdiff_t first = 0; first < outputs; first += WIDE_STEP) {
        ptrdiff_t last = outputs - first - 1;
        vf sums[WIDE_TOKENS][WIDE_STEP] = {{{0}}};
        for (ptrdiff_t i = 0; i < k; i += VL) {
            vf weights[WIDE_STEP];
#pragma GCC unroll 4
            for (int j = 0; j < WIDE_STEP; j++) weights[j] = load_f32(w + (first + (j < last ? j : last)) * k + i, k - i);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vf v = load_bf16(x + r * ldx + i, k - i);
#pragma GCC unroll 4
                for (int j = 0; j < WIDE_STEP; j++) sums[r][j] = fma_(v, weights[j], sums[r][j]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < WIDE_STEP && j <= last; j++) y[r * ldy + first + j] = sum_of(sums[r][j]);
    }
}

/* y[m][n] = x[m][k] . w[n][k] in float32; rows of x are ldx apart. An item is a block of x and some outputs. */
void nv_linear_wide(team *t, const bf16 *x, ptrdiff_t ldx, const float *w, float *y, token_count m, ptrdiff_t n, ptrdiff_t k) {
    ptrdiff_t groups = (n + WIDE_OUTPUTS - 1) / WIDE_OUTPUTS;
    FOR_ITEMS(item, t, (m + WIDE_BLOCK - 1) / WIDE_BLOCK * groups) {
        ptrdiff_t row = item / groups * WIDE_BLOCK, end = m - row < WIDE_BLOCK ? m : row + WIDE_BLOCK;
        ptrdiff_t first = item % groups * WIDE_OUTPUTS, outputs = n - first < WIDE_OUTPUTS ? n - first : WIDE_OUTPUTS;
        for (; end - row >= WIDE_TOKENS; row += WIDE_TOKENS)
            wide_tile(WIDE_TOKENS, x + row * ldx, ldx, w + first * k, outputs, k, y + row * n + first, n);
        for (; row < end; row++) wide_tile(1, x + row * ldx, ldx, w + first * k, outputs, k, y + row * n + first, n);
    }
}

/* y[t] = row ids[t] of the unpacked weight, [k]. */
void nv_gather(team *t, const int64_t *ids, const bf16 *packed, bf16 *y, token_count tokens, ptrdiff_t k) {
    FOR_ITEMS(token, t, tokens) {
        const bf16 *w = packed + ids[token] / PANEL * PANEL * packed_inputs(k) + ids[token] % PANEL * 2;
        for (ptrdiff_t i = 0; i < k - 1; i += 2) memcpy(y + token * k + i, w + i * PANEL, 4);
        if (k % 2) y[token * k + k - 1] = w[(k - 1) * PANEL];
    }
}
