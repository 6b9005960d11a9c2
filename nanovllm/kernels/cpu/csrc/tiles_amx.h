/* Tiles by AMX: the processor's tile registers hold 16 rows of 64 bytes, and one instruction multiplies two of them.
 * Inputs are read where they lie. Included by tiles.h, which describes the functions.
 */
enum { X_IN_PLACE = 1, PASS_KEYS = PANEL, K_MULTIPLE = 32 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} tile_config;

static _Thread_local int configured_rows;

static void begin_tiles(void) { configured_rows = -1; }
static void end_tiles(void) { _tile_release(); }

/* Tiles 0 and 1 hold the outputs of rows 0-15, tile 4 their inputs; 2, 3 and 5 the same for rows 16-31; 6 and 7 the weights. */
static void tile(int rows, ptrdiff_t k, input_rows x, panel_pieces w, output_rows acc, int add) {
    int rows1 = rows > 16 ? rows - 16 : 0;
    if (configured_rows != rows) {
        tile_config c;
        memset(&c, 0, sizeof c);
        c.palette = 1;
        for (int t = 0; t < 8; t++) c.colsb[t] = 64, c.rows[t] = 16;
        c.rows[0] = c.rows[1] = c.rows[4] = rows > 16 ? 16 : rows;
        if (rows1) c.rows[2] = c.rows[3] = c.rows[5] = rows1;
        __asm__ volatile("" : "+m"(c)); /* GCC 12 believes that only 8 bytes are loaded (PR 114098) */
        _tile_loadconfig(&c);
        configured_rows = rows;
    }
    float *acc1 = acc.p + 16 * acc.ld;
    const operand *x1 = x.p + 16 * x.ld;
    if (add) {
        _tile_loadd(0, acc.p, acc.ld * 4);
        _tile_loadd(1, acc.p + 16, acc.ld * 4);
        if (rows1) {
            _tile_loadd(2, acc1, acc.ld * 4);
            _tile_loadd(3, acc1 + 16, acc.ld * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (rows1) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (ptrdiff_t i = 0; i < k;) {
        const bf16 *piece = *w.pieces++;
        for (ptrdiff_t end = k - i < w.piece_k ? k : i + w.piece_k; i < end; i += 32, piece += 32 * PANEL) {
            _tile_loadd(6, piece, PANEL * 4);
            _tile_loadd(7, piece + 32, PANEL * 4);
            _tile_loadd(4, x.p + i, x.ld * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (rows1) {
                _tile_loadd(5, x1 + i, x.ld * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    _tile_stored(0, acc.p, acc.ld * 4);
    _tile_stored(1, acc.p + 16, acc.ld * 4);
    if (rows1) {
        _tile_stored(2, acc1, acc.ld * 4);
        _tile_stored(3, acc1 + 16, acc.ld * 4);
    }
}

static void tile_streams(const operand *x, const bf16 *w, ptrdiff_t k, float *acc) {
    for (int p = 0; p < STREAMS; p++, w += k * PANEL)
        tile(1, k, (input_rows){x, 0}, (panel_pieces){&w, &w, k}, (output_rows){acc + p * PANEL, PANEL}, 0);
}

INLINE input_rows prepare_inputs(const bf16 *x, ptrdiff_t ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, operand *buffer) {
    return (input_rows){x, ldx};
}

INLINE void linear_tile(int rows, ptrdiff_t k, input_rows x, const bf16 *w, int prefetch, float *acc) {
    tile(rows, k, x, (panel_pieces){&w, &w, k}, (output_rows){acc, PANEL}, 0);
}
