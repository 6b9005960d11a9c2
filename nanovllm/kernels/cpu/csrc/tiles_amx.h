/* Tiles by AMX: the processor's tile registers hold 16 rows of 64 bytes, and one instruction multiplies two of them.
 * Included by tiles.h, which describes the functions.
 */
enum { PASS_KEYS = 256, K_MULTIPLE = 32, LINEAR_BYTES = 3 << 18, PREPARED_GAP = 0, STREAM_BYTES = 1 << 20 };

/* What the tiles hold: 0 and 1 the outputs of the first rows, whose inputs are in tile 4, 2 and 3 those of the second rows, whose
 * inputs are in tile 5; 6 and 7 have 16 columns of weights each, for `unit` bytes of a row. */
typedef struct {
    int first, second, unit;
} tile_shape;

/* The shape for which this thread has configured its tiles; all 0: none. */
extern __attribute__((visibility("hidden"))) _Thread_local tile_shape configured;

static void end_tiles(void) {
    _tile_release();
    configured = (tile_shape){0, 0, 0};
}

/* Call this before tiles are loaded: GCC does not know that they are loaded from memory, so what was stored before might come
 * later. */
#define SETTLE_MEMORY() __asm__ volatile("" ::: "memory")

static void configure(tile_shape s) {
    if (configured.first == s.first && configured.second == s.second && configured.unit == s.unit) return;
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t colsb[16];
        uint8_t rows[16];
    } c = {.palette = 1};
    for (int t = 0; t < 8; t++) c.colsb[t] = t == 4 || t == 5 ? s.unit : 64, c.rows[t] = 16;
    c.rows[0] = c.rows[1] = c.rows[4] = s.first;
    if (s.second) c.rows[2] = c.rows[3] = c.rows[5] = s.second;
    c.rows[6] = c.rows[7] = s.unit / 4;
    __asm__ volatile("" : "+m"(c)); /* GCC 12 believes that only 8 bytes are loaded (PR 114098) */
    _tile_loadconfig(&c);
    configured = s;
}

/* A step multiplies 32 inputs, which lie `advance` after those of the step before, and prefetches `share` bytes of `ahead`. */
INLINE void tile_steps(int rows, ptrdiff_t k, input_rows x, ptrdiff_t advance, panel_pieces w, const bf16 *ahead, ptrdiff_t share,
                       output_rows acc, int add) {
    const operand *x0 = x.p, *x1 = x.p + 16 * x.ld;
    const char *next = (const char *)ahead;
    float *acc1 = acc.p + 16 * acc.ld;
    SETTLE_MEMORY();
    configure((tile_shape){rows > 16 ? 16 : rows, rows > 16 ? rows - 16 : 0, 64});
    if (add) {
        _tile_loadd(0, acc.p, acc.ld * 4);
        _tile_loadd(1, acc.p + 16, acc.ld * 4);
        if (rows > 16) {
            _tile_loadd(2, acc1, acc.ld * 4);
            _tile_loadd(3, acc1 + 16, acc.ld * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (rows > 16) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (ptrdiff_t i = 0; i < k;) {
        const bf16 *piece = *w.pieces++;
        for (ptrdiff_t end = k - i < w.piece_k ? k : i + w.piece_k; i < end; i += 32, piece += 32 * PANEL) {
            for (ptrdiff_t l = 0; l < share; l += 64) __builtin_prefetch(next + l, 0, 2);
            next += share;
            _tile_loadd(6, piece, PANEL * 4);
            _tile_loadd(7, piece + 32, PANEL * 4);
            _tile_loadd(4, x0, x.ld * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            x0 += advance;
            if (rows > 16) {
                _tile_loadd(5, x1, x.ld * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
                x1 += advance;
            }
        }
    }
    _tile_stored(0, acc.p, acc.ld * 4);
    _tile_stored(1, acc.p + 16, acc.ld * 4);
    if (rows > 16) {
        _tile_stored(2, acc1, acc.ld * 4);
        _tile_stored(3, acc1 + 16, acc.ld * 4);
    }
}

static void tile(int rows, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
    tile_steps(rows, k, x, 32, w, NULL, 0, acc, add);
}

/* Vectors instead of tiles: reading panels side by side takes 0.85 of the time. Each output is summed as the tile instruction
 * does it: even and odd inputs of a step apart, then their sum is added; numbers below the normal ones are 0. */
static void tile_streams(const operand *x, const bf16 *w, ptrdiff_t k, float *acc) {
    vf sums[STREAM_COLS] = {0};
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    for (ptrdiff_t i = 0; i < k; i += 32) {
        vf even[STREAM_COLS] = {0}, odd[STREAM_COLS] = {0};
        for (ptrdiff_t j = i; j < i + 32; j += 2) {
            vf x0 = broadcast(from_bf16((half_vu){x[j]})[0]), x1 = broadcast(from_bf16((half_vu){x[j + 1]})[0]);
#pragma GCC unroll 8
            for (int c = 0; c < STREAM_COLS; c++) {
                const bf16 *pairs = w + (c / PANEL_VECTORS * k + j) * PANEL + c % PANEL_VECTORS * 2 * VL;
                vu v = *(const vu *)pairs;
                prefetch_stream(STREAM_COLS, pairs);
                even[c] = fma_((vf)(v << 16), x0, even[c]), odd[c] = fma_((vf)(v & 0xffff0000), x1, odd[c]);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < STREAM_COLS; c++) sums[c] += even[c] + odd[c];
    }
    _mm_setcsr(mode);
#pragma GCC unroll 8
    for (int c = 0; c < STREAM_COLS; c++) store(acc + c * VL, sums[c]);
}

/* Copy x into `buffer`, cut into tiles of `step` rows, each packed as [k/32][rows][32]. So a step's inputs are adjacent: rows at
 * equal places of several pages share a cache set. */
INLINE input_rows prepare_inputs(const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, operand *buffer) {
    for (ptrdiff_t first = 0; first < rows; first += step)
        for (ptrdiff_t i = 0; i < k; i += 32)
            for (ptrdiff_t r = first; r < first + step && r < rows; r++, buffer += 32) memcpy(buffer, x + r * ldx + i, 64);
    return (input_rows){buffer - rows * k, k};
}

/* Where a block has many tiles, they go through the panel in pieces of K that fit the first-level cache together with a tile's
 * inputs. The sums wait in acc meanwhile: 1.1 to 1.2 times as fast from 256 rows on, slower at 128. All tiles together prefetch
 * the next panel. */
INLINE void linear_panel(linear_inputs in, const bf16 *w, linear_outputs out, float *acc) {
    enum { PIECE = 256, FEW_TILES = 4, STEP_BYTES = 2 * 32 * PANEL };
    ptrdiff_t tiles = (in.rows + in.step - 1) / in.step, piece = tiles > FEW_TILES ? PIECE : in.k;
    ptrdiff_t share = (STEP_BYTES / tiles + 63) / 64 * 64;
    int stream = can_stream(out);
    for (ptrdiff_t i = 0; i < in.k; i += piece, w += piece * PANEL)
        for (ptrdiff_t r = 0, prefetched = 0; r < in.rows; r += in.step, prefetched += share) {
            int rows = in.rows - r < in.step ? (int)(in.rows - r) : (int)in.step, last = i + piece >= in.k;
            ptrdiff_t k = last ? in.k - i : piece;
            const bf16 *next = w + in.k * PANEL + prefetched * k / 64;
            tile_steps(rows, k, (input_rows){in.x.p + r * in.k + i * rows, 32}, 32 * rows, (panel_pieces){&w, NULL, k}, next,
                       prefetched < STEP_BYTES ? share : 0, (output_rows){acc + r * PANEL, PANEL}, i > 0);
            if (!last || !out.y) continue;
            store_outputs(acc + r * PANEL, out, r, rows, stream);
        }
    end_stream(stream);
}
