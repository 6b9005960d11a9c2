/* Tiles with weights of 8 or 4 bits by AMX: one instruction multiplies 16 rows of 64 bytes by 64 bytes of each of 16 columns.
 * Included by int_tiles.h, in place of the tiles of vectors, which multiply a single row here.
 *
 * Inputs of 16 bits are two tiles, of the high bytes and of the low ones. So a part has up to 32 rows, or 16 of 16 bits. A step
 * multiplies `unit` inputs, which divide a group: packed inputs of a part of R rows are [k/unit][R][unit] int8, or
 * [k/unit][2][R][unit] bytes, high ones first.
 *
 * Integer sums are exact and a group's product is rounded as with vectors, so a row's bits are those that vectors compute.
 */
enum { SUM_GROUPS = 4 }; /* groups whose integer sums wait for their scales: their 16 KB stay in the first-level cache */

/* K_STEP inputs of a panel: with 4 bits the weights, a byte each, and with all the scales as floats, each row of which is
 * followed by that of the minimums, or of the zeros as int32. */
typedef struct {
    int8_t w[K_STEP * PANEL];
    float scales[K_STEP / 16][2][PANEL];
    int32_t sums[SUM_GROUPS][TILE_ROWS][PANEL];
} amx_step __attribute__((aligned(64)));

INLINE int tile_unit(ptrdiff_t group) { return group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : 16; }

/* out[step/4][32][4] = the weights of 4 bits themselves, but with minimums or zeros those to which 8 is added. */
INLINE void widen_int4(int kind, const uint8_t *w, ptrdiff_t step, int8_t *out) {
    typedef int8_t bytes __attribute__((vector_size(4 * VL), aligned(1), may_alias));
    const int8_t added = kind == PLAIN ? 8 : kind == FP4 ? FP4_OFFSET : 0;
    for (ptrdiff_t i = 0; i < step; i += 8, w += 4 * PANEL, out += 8 * PANEL)
        for (int c = 0; c < PANEL_VECTORS; c++)
            for (int half = 0; half < 2; half++) {
                vi four = (vi)(((const vu *)w)[c] >> 4 * half & 0x0f0f0f0f);
                if (kind == FP4) four = fp4_lookup(four);
                ((bytes *)out)[half * PANEL_VECTORS + c] = (bytes)four - added;
            }
}

/* The scales of `groups` groups of inputs, from a group of weights on. */
INLINE void widen_scales(int kind, const uint16_t *scales, ptrdiff_t groups, int shift, float (*out)[2][PANEL]) {
    for (ptrdiff_t g = 0; g < groups; g++)
        for (int c = 0; c < PANEL_VECTORS; c++) {
            ptrdiff_t at = (g >> shift) * rows_of_scales(kind);
            store(out[g][0] + c * VL, load_scales(scales, 0, at, c, kind));
            if (kind == MINIMUMS) store(out[g][1] + c * VL, load_scales(scales, 0, at + 1, c, kind));
            if (kind == ZEROS) *(vi *)(out[g][1] + c * VL) = load_zeros(scales, 0, at + 1, c) << 16 >> 16;
        }
}

/* sums[shape.first + shape.second][32] = x . w for a group of inputs. With inputs of two `bytes` the second tile has their low
 * bytes, which are unsigned. */
INLINE void multiply_tiles(int bytes, tile_shape shape, ptrdiff_t group, const int8_t *x, const int8_t *w,
                           int32_t (*sums)[PANEL]) {
    SETTLE_MEMORY();
    _tile_zero(0);
    _tile_zero(1);
    if (shape.second) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (ptrdiff_t i = 0; i < group; i += shape.unit, w += shape.unit * PANEL) {
        _tile_loadd(6, w, PANEL * 4);
        _tile_loadd(7, w + 64, PANEL * 4);
        _tile_loadd(4, x, shape.unit);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        x += shape.first * shape.unit;
        if (shape.second) {
            _tile_loadd(5, x, shape.unit);
            if (bytes == 2) {
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            } else {
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
            x += shape.second * shape.unit;
        }
    }
    _tile_stored(0, sums[0], PANEL * 4);
    _tile_stored(1, sums[0] + 16, PANEL * 4);
    if (shape.second) {
        _tile_stored(2, sums[shape.first], PANEL * 4);
        _tile_stored(3, sums[shape.first] + 16, PANEL * 4);
    }
}

/* acc += the products of `groups` groups, from their integer sums on, for `rows` rows (a constant) of a part of `part`
 * rows. x has the scales and sums of the first of them in the first group. */
INLINE void add_products(int bytes, int kind, int rows, int part, ptrdiff_t groups, const int32_t (*sums)[TILE_ROWS][PANEL],
                         const float (*scales)[2][PANEL], quantized_rows x, output_rows acc) {
    vf a[4][PANEL_VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < PANEL_VECTORS; c++) a[r][c] = load(acc.p + r * acc.ld + c * VL);
    for (ptrdiff_t g = 0; g < groups; g++, sums++, scales++, x.scales += part, x.sums += part) {
#pragma GCC unroll 2
        for (int c = 0; c < PANEL_VECTORS; c++) {
            vf scale = load(scales[0][0] + c * VL), more = load(scales[0][1] + c * VL);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vi sum = *(const vi *)(sums[0][r] + c * VL);
                if (bytes == 2) sum = (sum << 8) + *(const vi *)(sums[0][part + r] + c * VL);
                if (kind == ZEROS) sum += (vi)more * x.sums[r];
                vf number = __builtin_convertvector(sum, vf);
                if (bytes == 2) {
                    a[r][c] = fma_(number * x.scales[r], scale, a[r][c]);
                    continue;
                }
                vf product = number * scale;
                if (kind == MINIMUMS) product = fma_(more, broadcast(((const float *)x.sums)[r]), product);
                a[r][c] = fma_(product, broadcast(x.scales[r]), a[r][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < PANEL_VECTORS; c++) store(acc.p + r * acc.ld + c * VL, a[r][c]);
}

/* acc += x . w for a part's rows and `groups` groups of K_STEP inputs, whose scales are in s. x and w begin at these
 * inputs, of which `group` share a scale, and are weights of a byte each. */
INLINE void multiply_part(int bits, int kind, tile_shape shape, int rows, ptrdiff_t groups, ptrdiff_t group, quantized_rows x,
                          const int8_t *w, amx_step *s, prefetch_plan ahead, output_rows acc) {
    const int bytes = (int)input_bytes(bits, kind);
    for (ptrdiff_t g = 0, n; g < groups; g += n) {
        n = groups - g < SUM_GROUPS ? groups - g : SUM_GROUPS;
        for (ptrdiff_t j = g; j < g + n; j++) {
            prefetch_ahead(&ahead, rows, (int)(group * PANEL * bits / 8));
            multiply_tiles(bytes, shape, group, (const int8_t *)x.ints + j * group * rows * bytes, w + j * group * PANEL,
                           s->sums[j - g]);
        }
#define ADD_PRODUCTS(count)                                                                                                     \
    add_products(bytes, kind, count, rows, n, (const void *)s->sums[0][r], s->scales + g, inputs_at(x, bytes, 0, g * rows + r), \
                 outputs_from(acc, r, 0))
        int r = 0;
        for (; rows - r >= 4; r += 4) ADD_PRODUCTS(4);
        for (; r < rows; r++) ADD_PRODUCTS(1);
    }
}

/* As without AMX. */
INLINE void int_tile_of(int bits, int kind, int inputs, int rows, ptrdiff_t k, ptrdiff_t group, quantized_rows x, int_panel panel,
                        const uint8_t *ahead, output_rows acc, int add) {
    if (!add) clear_outputs(rows, acc);
    if (rows == 1) {
        prefetch_plan plan = {ahead, 0, 1, ahead != NULL};
        int_row_of(bits, kind, inputs, PANEL_VECTORS, k, group, x, panel, plan, acc.p);
        return;
    }
    const int bytes = (int)input_bytes(bits, kind), most = TILE_ROWS / bytes;
    const int shift = bits == 8 ? 0 : group_shift(group, inputs), no_line = K_STEP;
    const ptrdiff_t x_group = bits == 8 ? group : inputs;
    amx_step s;
    /* First all whole parts go through the panel, then what is left: configuring tiles takes as long as a dozen products. */
    for (int at = 0, R, parts; at < rows; at += parts * R) {
        R = rows - at < most ? rows - at : most, parts = (rows - at) / R;
        tile_shape shape = {bytes == 2 || R < 16 ? R : 16, bytes == 2 ? R : R > 16 ? R - 16 : 0, tile_unit(x_group)};
        configure(shape);
        for (ptrdiff_t i = 0; i < k; i += K_STEP) {
            ptrdiff_t groups = (k - i < K_STEP ? k - i : K_STEP) / x_group, g = i / x_group;
            const uint8_t *stored = panel.w + i * PANEL * bits / 8;
            const uint8_t *next = ahead ? ahead + i * PANEL * bits / 8 : stored + k * PANEL * bits / 8;
            if (bits == 4) widen_int4(kind, stored, groups * x_group, s.w);
            widen_scales(kind, panel.scales + (g >> shift) * rows_of_scales(kind) * PANEL, groups, shift, s.scales);
            for (int part = 0; part < parts; part++) {
                int first = at + part * R;
                quantized_rows q = inputs_at(part_from(x, bytes, first), bytes, i * R, g * R);
                multiply_part(bits, kind, shape, R, groups, x_group, q, bits == 4 ? s.w : (const int8_t *)stored, &s,
                              (prefetch_plan){next, at ? no_line : part, parts, ahead != NULL}, outputs_from(acc, first, 0));
            }
        }
    }
}
