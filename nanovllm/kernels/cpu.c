/* Native CPU kernels of nanovllm, bfloat16 in and out, float32 inside. Called through ctypes.
 *
 * Vectors are GCC's: one source for AVX-512, AVX2 and any other processor, with intrinsics only where an
 * instruction has no operator (bfloat16 and int16 dot products, AMX tiles, fused multiply-add).
 *
 * A packed weight [N, K] is [ceil(N/32)][K/2][32][2]: panels of 32 outputs, pairs of inputs side by
 * side. Rows of the input never meet, so that a row's result does not depend on the batch it is in.
 */
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_AMX 1
#endif

#ifndef VL /* floats in a vector */
#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif
#endif

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint16_t half_vu __attribute__((vector_size(2 * VL), aligned(2), may_alias));
typedef int16_t vs __attribute__((vector_size(4 * VL), aligned(2), may_alias)); /* 2 VL numbers */
typedef int16_t half_vs __attribute__((vector_size(2 * VL), aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(2 * VL), aligned(1), may_alias)); /* 2 VL numbers */
typedef int8_t quarter_vb __attribute__((vector_size(VL), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define X4(x) x, x, x, x
#if VL == 16
#define EACH(x) {X4(x), X4(x), X4(x), X4(x)}
#elif VL == 8
#define EACH(x) {X4(x), X4(x)}
#else
#define EACH(x) {X4(x)}
#endif

INLINE vf each(float x) { return (vf)EACH(x); }
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf v) { *(vf *)p = v; }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

#if VL == 16 && defined(__AVX512F__)
#define EITHER(op, sign, a, b) (vf) _mm512_##op##_ps((__m512)a, (__m512)b)
#elif VL == 8 && defined(__AVX2__)
#define EITHER(op, sign, a, b) (vf) _mm256_##op##_ps((__m256)a, (__m256)b)
#else
#define EITHER(op, sign, a, b) choose(a sign b, a, b)
#endif
/* b where one is not a number. */
INLINE vf larger(vf a, vf b) { return EITHER(max, >, a, b); }
INLINE vf smaller(vf a, vf b) { return EITHER(min, <, a, b); }

INLINE vf fma_(vf a, vf b, vf c) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vi lanes(void) {
#if VL == 16
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif VL == 8
    return (vi){0, 1, 2, 3, 4, 5, 6, 7};
#else
    return (vi){0, 1, 2, 3};
#endif
}

/* Lanes meet by halves, in the same order on every processor of a width. */
INLINE vf other_half(vf v, int n) { return __builtin_shuffle(v, lanes() ^ n); }
INLINE float sum_of(vf v) {
#pragma GCC unroll 4
    for (int n = VL / 2; n; n /= 2) v += other_half(v, n);
    return v[0];
}
INLINE float largest_of(vf v) {
#pragma GCC unroll 4
    for (int n = VL / 2; n; n /= 2) v = larger(v, other_half(v, n));
    return v[0];
}

/* rows[i][j] and rows[j][i] change places: by halves, then each half's halves. */
INLINE void transpose(vf rows[VL]) {
#pragma GCC unroll 4
    for (int n = VL / 2; n; n /= 2) {
        vi back = (lanes() & n) != 0, first = lanes() + ((VL - n) & back), second = lanes() + n + ((VL - n) & back);
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) {
            if (i & n) continue;
            vf a = rows[i], b = rows[i + n];
            rows[i] = __builtin_shuffle(a, b, first), rows[i + n] = __builtin_shuffle(a, b, second);
        }
    }
}

INLINE vf from_bf16(half_vu h) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)((vu)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
INLINE half_vu to_bf16(vf v) { /* to nearest, ties to even */
#if VL == 16 && defined(__AVX512BF16__)
    return (half_vu)_mm512_cvtneps_pbh((__m512)v);
#else
    vu u = (vu)v;
    u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu nan = (vu)(v != v);
    return __builtin_convertvector((u & ~nan) | (nan & 0x7fc0), half_vu);
#endif
}
INLINE vf rounded(vf v) { return from_bf16(to_bf16(v)); }

/* Up to VL numbers of a row that ends; what is missing reads as 0. */
INLINE half_vu bits16(const bf16 *p, ptrdiff_t left) {
    if (left >= VL) return *(const half_vu *)p;
    half_vu h = {0};
    memcpy(&h, p, left * sizeof *p);
    return h;
}
INLINE vf load16(const bf16 *p, ptrdiff_t left) { return from_bf16(bits16(p, left)); }
INLINE void store16(bf16 *p, ptrdiff_t left, vf v) {
    half_vu h = to_bf16(v);
    if (left >= VL) *(half_vu *)p = h;
    else memcpy(p, &h, left * sizeof *p);
}
INLINE vf load32(const float *p, ptrdiff_t left) {
    if (left >= VL) return load(p);
    vf v = {0};
    memcpy(&v, p, left * sizeof *p);
    return v;
}

/* 2^r, of r within +-1/2, times 2^n, of n >= -126; n is what ROUND's last bits count in `shifted` = n + ROUND. The polynomial
 * is a relative minimax fit. */
#define ROUND 12582912.0f /* 1.5 * 2^23 */
INLINE vf power(vf r, vf shifted) {
    vf p = each(1.326472690e-3f);
    p = fma_(p, r, each(9.671512661e-3f));
    p = fma_(p, r, each(5.550733744e-2f));
    p = fma_(p, r, each(2.402224208e-1f));
    p = fma_(p, r, each(6.931469776e-1f));
    p = fma_(p, r, each(1.0f));
    return (vf)((vi)p + ((vi)shifted << 23));
}
/* exp within 2 units in the last place, 0 below -87. NaN stays: a row that has one is lost, and says so. */
INLINE vf exp_(vf x) {
    const float log2e = 1.44269502f, rest = 1.92596299e-8f;
    vi tiny = x < -87.0f;
    x = smaller(each(88.0f), larger(each(-87.0f), x));
    vf shifted = fma_(x, each(log2e), each(ROUND)), n = shifted - ROUND;
    vf r = fma_(x, each(rest), fma_(x, each(log2e), -n));
    return (vf)((vi)power(r, shifted) & ~tiny);
}
/* 2^x of x <= 0, 0 below -126. */
INLINE vf exp2_(vf x) {
    vi tiny = x < -126.0f;
    x = larger(each(-126.0f), x);
    vf shifted = x + ROUND;
    return (vf)((vi)power(x - (shifted - ROUND), shifted) & ~tiny);
}

/* ---- a tile of products: acc[rows][32] (+)= x[rows][k] . w ----
 *
 * w is a panel [k/2][32][2], or pieces of one, of `each` inputs but for the last. rows <= 32; each is a multiple of 32, k of TERMS.
 * x's rows lie ldx apart, acc's, float32, ldacc. With `add` the products are added to what acc holds. Each output is summed
 * in the order of k, whatever `rows` is. x is `act`: bfloat16 where an instruction multiplies it, else widened to float32
 * once. `next` are pieces that will be wanted next.
 */
enum { PANEL = 32, TILE_ROWS = 32 };

#if defined(HAVE_AMX) || (defined(__AVX512BF16__) && VL == 16)
typedef bf16 act;
INLINE void store_act(act *p, vf v) { *(half_vu *)p = to_bf16(v); }
#else
typedef float act;
INLINE void store_act(act *p, vf v) { store(p, v); }
#endif

/* How many rows of accumulators fit the registers: with two vectors of columns, and with all that WIDE takes. */
enum { STEP = 256 }; /* inputs whose weights of a panel fit the first-level cache beside those of x */
enum { MAX_ROWS = VL == 16 ? 12 : 6, WIDE = VL == 16 ? 2 : 4, WIDE_ROWS = VL == 16 ? 12 : 3 };

/* A product with one row takes as long as its weights take to read. STREAMS panels that are read side by side come from
 * memory faster than one after the other (by 1.2 for two on a Zen 3); their accumulators fit the registers. A vector of
 * columns is then one of ALL_COLS, and its panel `gap` elements behind the one before. */
enum { STREAMS = VL / 4, IN_PANEL = PANEL / VL, ALL_COLS = STREAMS * IN_PANEL };

/* Fetch what lies a KB behind the weights at hand, where they are read once: 1.05 to 1.2 times as fast as without. With
 * vectors of 64 bytes into the second level, else the first level's few pending misses are all taken. */
INLINE void fetch_ahead(int cols, const void *w) {
    if (cols == ALL_COLS || (VL == 8 && cols == IN_PANEL)) __builtin_prefetch((const char *)w + 1024, 0, VL == 16 ? 2 : 3);
}

/* What a tile of one part fetches, bytes ahead: at 5 to 12 rows 1.08 times as fast as the next panel. */
enum { NEAR = 8192 };

/* Cut `rows` into as many parts as MAX_ROWS asks for, of equal size, and call part(R, cols, c) with constants for
 * the R rows from `at` on and the columns from c on. */
#define PARTS(rows) (((rows) + MAX_ROWS - 1) / MAX_ROWS)
#define FOR_ROWS(rows, part)                                                                              \
    for (int parts = PARTS(rows), at = 0, n; parts; parts--, at += n) {             \
        n = ((rows) - at + parts - 1) / parts;                                                            \
        switch (n) {                                                                                      \
            CASE(1, part) CASE(2, part) CASE(3, part) CASE(4, part) CASE(5, part) CASE(6, part) WIDE_CASES(part) \
        }                                                                                                 \
    }
#define CASE(R, part)                                                  \
    case R:                                                            \
        for (int c = 0; c < PANEL; c += (R <= WIDE_ROWS ? WIDE : 2) * VL) part(R, (R <= WIDE_ROWS ? WIDE : 2), c); \
        break;
#if VL == 16
#define WIDE_CASES(part) CASE(7, part) CASE(8, part) CASE(9, part) CASE(10, part) CASE(11, part) CASE(12, part)
#else
#define WIDE_CASES(part)
#endif

#ifdef HAVE_AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} tile_config;

static _Thread_local int configured_rows;

static void begin_tiles(void) { configured_rows = -1; }
static void end_tiles(void) { _tile_release(); }

/* Tiles 0 1 / 2 3: outputs of rows 0-15 / 16-31; 4 / 5: their inputs; 6 7: weights. */
static void tile(const act *x, ptrdiff_t ldx, const bf16 *const *pieces, const bf16 *const *next, ptrdiff_t each, ptrdiff_t k,
                 int rows, float *acc, ptrdiff_t ldacc, int add) {
    int rows1 = rows > 16 ? rows - 16 : 0;
    if (configured_rows != rows) {
        tile_config c;
        memset(&c, 0, sizeof c);
        c.palette = 1;
        for (int t = 0; t < 8; t++) c.colsb[t] = 64, c.rows[t] = 16;
        c.rows[0] = c.rows[1] = c.rows[4] = rows > 16 ? 16 : rows;
        if (rows1) c.rows[2] = c.rows[3] = c.rows[5] = rows1;
        __asm__ volatile("" : "+m"(c)); /* GCC 12 takes what is loaded for 8 bytes (its PR 114098) */
        _tile_loadconfig(&c);
        configured_rows = rows;
    }
    float *acc1 = acc + 16 * ldacc;
    const act *x1 = x + 16 * ldx;
    if (add) {
        _tile_loadd(0, acc, ldacc * 4);
        _tile_loadd(1, acc + 16, ldacc * 4);
        if (rows1) {
            _tile_loadd(2, acc1, ldacc * 4);
            _tile_loadd(3, acc1 + 16, ldacc * 4);
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
        const bf16 *w = *pieces++;
        for (ptrdiff_t end = k - i < each ? k : i + each; i < end; i += 32, w += 32 * PANEL) {
            _tile_loadd(6, w, PANEL * 4);
            _tile_loadd(7, w + 32, PANEL * 4);
            _tile_loadd(4, x + i, ldx * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (rows1) {
                _tile_loadd(5, x1 + i, ldx * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    _tile_stored(0, acc, ldacc * 4);
    _tile_stored(1, acc + 16, ldacc * 4);
    if (rows1) {
        _tile_stored(2, acc1, ldacc * 4);
        _tile_stored(3, acc1 + 16, ldacc * 4);
    }
}
static void tile_streams(const act *x, const bf16 *w, ptrdiff_t k, float *acc) {
    for (int p = 0; p < STREAMS; p++, w += k * PANEL) tile(x, 0, &w, &w, k, k, 1, acc + p * PANEL, PANEL, 0);
}

#define SCHEDULE static
enum { IN_PLACE = 1, KEYS = PANEL, TERMS = 32 };
INLINE const act *activations(const bf16 *x, ptrdiff_t *ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, act *room) { return x; }
INLINE void linear_tile(const act *x, ptrdiff_t ldx, const bf16 *w, int first, ptrdiff_t k, int rows, float *acc) {
    tile(x, ldx, &w, &w, k, k, rows, acc, PANEL, 0);
}

/* Linux lends the tiles to a process that asks for them, once. */
int nv_enable(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#else
static void begin_tiles(void) {}
static void end_tiles(void) {}
int nv_enable(void) { return 1; }

#if defined(__AVX512BF16__) && VL == 16
/* a += pairs of v times the pair at x, b likewise of w. In assembly because GCC otherwise fetches many rows' pairs
 * beforehand, and keeps accumulators in memory for them. */
INLINE void multiply_add2(__m512 *a, __m512 *b, __m512i v, __m512i w, const bf16 *x) {
#ifdef EMULATED
    __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int32_t *)x);
    *a = _mm512_dpbf16_ps(*a, (__m512bh)v, pair), *b = _mm512_dpbf16_ps(*b, (__m512bh)w, pair);
#else
    __m512i t;
    __asm__("vpbroadcastd %5, %2\n\tvdpbf16ps %2, %3, %0\n\tvdpbf16ps %2, %4, %1"
            : "+v"(*a), "+v"(*b), "=&v"(t) : "v"(v), "v"(w), "m"(*(const int32_t *)x));
#endif
}

/* x's rows lie ldx apart, or are packed: [k/2][rows][2]. While a piece is multiplied, `next`, of the same size, comes into the
 * second-level cache: from `skip` on, `share` bytes a step. A linear of up to 4 rows is read fastest without (1.2 times on a
 * Zen 4), attention if what lies 4 KB behind is fetched too. */
INLINE void tile_rows(int rows, int cols, int packed, const bf16 *x, ptrdiff_t ldx, const bf16 *const *pieces,
                      const bf16 *const *next, ptrdiff_t each, ptrdiff_t gap, ptrdiff_t k, ptrdiff_t skip, ptrdiff_t share,
                      float *acc, ptrdiff_t ldacc, int add) {
    __m512 a[MAX_ROWS][ALL_COLS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) a[r][c] = add ? _mm512_loadu_ps(acc + r * ldacc + c * VL) : (__m512)(vf){0};
    for (ptrdiff_t i = 0; i < k;) {
        const bf16 *w = *pieces++;
        const char *ahead = (const char *)*next++ + skip;
        for (ptrdiff_t end = k - i < each ? k : i + each; i < end; i += 2, w += 2 * PANEL, ahead += share) {
            if (!packed || rows > 4) __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + share / 2, 0, 2);
            if (!packed && rows <= 4) __builtin_prefetch(w + 2048, 0, 2), __builtin_prefetch(w + 2048 + PANEL, 0, 2);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c += 2) {
                const bf16 *at = w + c / IN_PANEL * gap;
                __m512i v0 = _mm512_loadu_si512(at), v1 = _mm512_loadu_si512(at + 2 * VL);
                fetch_ahead(cols, at), fetch_ahead(cols, at + 2 * VL);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++)
                    multiply_add2(&a[r][c], &a[r][c + 1], v0, v1, packed ? &x[i * rows + 2 * r] : &x[r * ldx + i]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) _mm512_storeu_ps(acc + r * ldacc + c * VL, a[r][c]);
}

/* `skip` and `share` of each part of a tile of `rows`: they fetch k inputs' panel between them. */
#define FETCHED(k, rows) at * (k) * 2 * PANEL / (rows), 4 * PANEL / PARTS(rows)
static void tile(const act *x, ptrdiff_t ldx, const bf16 *const *pieces, const bf16 *const *next, ptrdiff_t each, ptrdiff_t k,
                 int rows, float *acc, ptrdiff_t ldacc, int add) {
#define PLAIN_PART(R, cols, c)                                                                               \
    tile_rows(R, cols, 0, x + at * ldx, ldx, pieces, next, each, 0, k, FETCHED(each, rows), acc + at * ldacc, ldacc, add)
    FOR_ROWS(rows, PLAIN_PART)
}

#define SCHEDULE guided
enum { IN_PLACE = 0, KEYS = 256, TERMS = 2 };
/* x in `room`, cut into tiles of `step` rows and these into their parts, each part [k/2][rows][2]: what a step of the
 * products reads lies in one line or two, however far rows are apart. */
INLINE const act *activations(const bf16 *x, ptrdiff_t *ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, act *room) {
#define PACK_PART(R, cols, c)                                                     \
    for (ptrdiff_t i = 0; i < k; i += 2)                                          \
        for (int j = 0; j < R; j++) memcpy(room + (r + at) * k + i * R + 2 * j, x + (r + at + j) * *ldx + i, 4)
    for (ptrdiff_t r = 0; r < rows; r += step) FOR_ROWS((int)(rows - r < step ? rows - r : step), PACK_PART)
    *ldx = k;
    return room;
}
static __attribute__((noinline)) void linear_tile(const act *x, ptrdiff_t ldx, const bf16 *w, int first, ptrdiff_t k, int rows,
                                                  float *acc) {
    const bf16 *next = !first ? w : rows <= MAX_ROWS ? w + NEAR / sizeof *w : w + k * PANEL;
#define PACKED_PART(R, cols, c)                                                                                     \
    tile_rows(R, cols, 1, x + at * k, 0, &w, &next, k, 0, k, FETCHED(k, rows), acc + at * PANEL, PANEL, 0)
    FOR_ROWS(rows, PACKED_PART)
}

/* acc[STREAMS][32] = x[k] . w, of panels that lie one behind the other. */
static void tile_streams(const act *x, const bf16 *w, ptrdiff_t k, float *acc) {
    tile_rows(1, ALL_COLS, 1, x, 0, &w, &w, k, k * PANEL, k, 0, 0, acc, 0, 0);
}
#else
/* a += x v, b += x w. In assembly because GCC otherwise keeps one accumulator of the largest tile in memory,
 * which makes each step wait for a store. */
INLINE void multiply_add2(vf *a, vf *b, vf v, vf w, const float *x) {
#if VL == 8 && defined(__FMA__)
    vf t;
    __asm__("vbroadcastss %5, %2\n\tvfmadd231ps %3, %2, %0\n\tvfmadd231ps %4, %2, %1" : "+x"(*a), "+x"(*b), "=&x"(t) : "x"(v), "x"(w), "m"(*x));
#else
    *a = fma_(v, each(*x), *a), *b = fma_(w, each(*x), *b);
#endif
}

/* The even inputs' weights are the low halves of the pairs, the odd ones' the high halves. */
INLINE void tile_rows(int rows, int cols, const float *x, ptrdiff_t ldx, const bf16 *w, ptrdiff_t gap, ptrdiff_t k, int first,
                      float *acc, ptrdiff_t ldacc, int add) {
    vf a[MAX_ROWS][ALL_COLS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) a[r][c] = add ? load(acc + r * ldacc + c * VL) : (vf){0};
    for (ptrdiff_t i = 0; i < k; i += 2, w += 2 * PANEL) {
        if (first && cols < IN_PANEL) { /* the other columns and the next step's weights, while these are multiplied */
            __builtin_prefetch(w + STEP * PANEL);
            __builtin_prefetch(w + STEP * PANEL + PANEL);
        }
#pragma GCC unroll 4
        for (int c = 0; c < cols; c += 2) {
            const vu *v = (const vu *)(w + c / IN_PANEL * gap) + c % IN_PANEL;
            fetch_ahead(cols, v);
            vf even0 = (vf)(v[0] << 16), even1 = (vf)(v[1] << 16);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) multiply_add2(&a[r][c], &a[r][c + 1], even0, even1, &x[r * ldx + i]);
            vf odd0 = (vf)(v[0] & 0xffff0000), odd1 = (vf)(v[1] & 0xffff0000);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) multiply_add2(&a[r][c], &a[r][c + 1], odd0, odd1, &x[r * ldx + i + 1]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) store(acc + r * ldacc + c * VL, a[r][c]);
}

static void tile_step(const act *x, ptrdiff_t ldx, const bf16 *w, ptrdiff_t k, int rows, float *acc, ptrdiff_t ldacc, int add) {
#define TILE_PART(R, cols, c) \
    tile_rows(R, cols, x + at * ldx, ldx, w + 2 * (c), 0, k, at + (c) == 0, acc + at * ldacc + (c), ldacc, add)
    FOR_ROWS(rows, TILE_PART)
}
static void tile(const act *x, ptrdiff_t ldx, const bf16 *const *pieces, const bf16 *const *next, ptrdiff_t each, ptrdiff_t k,
                 int rows, float *acc, ptrdiff_t ldacc, int add) {
    for (ptrdiff_t i = 0, piece = 0, step; i < k; i += step, piece = piece + step < each ? piece + step : (pieces++, 0)) {
        step = k - i < STEP ? k - i : STEP;
        if (each - piece < step) step = each - piece;
        tile_step(x + i, ldx, *pieces + piece * PANEL, step, rows, acc, ldacc, add || i);
    }
}

#define SCHEDULE guided
enum { IN_PLACE = 0, KEYS = PANEL, TERMS = 2 };
/* x as float32 in `room`, rows 64 bytes further apart than k so that they do not share a cache set. */
INLINE const act *activations(const bf16 *x, ptrdiff_t *ldx, ptrdiff_t rows, ptrdiff_t step, ptrdiff_t k, act *room) {
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t i = 0; i < k; i += VL) store(room + r * (k + 16) + i, from_bf16(*(const half_vu *)(x + r * *ldx + i)));
    *ldx = k + 16;
    return room;
}
INLINE void linear_tile(const act *x, ptrdiff_t ldx, const bf16 *w, int first, ptrdiff_t k, int rows, float *acc) {
    tile(x, ldx, &w, &w, k, k, rows, acc, PANEL, 0);
}

/* acc[STREAMS][32] = x[k] . w, of panels that lie one behind the other. */
static void tile_streams(const act *x, const bf16 *w, ptrdiff_t k, float *acc) {
    tile_rows(1, ALL_COLS, x, 0, w, k * PANEL, k, 0, acc, 0, 0);
}
#endif
#endif

/* ---- linear ---- */

/* packed[ceil(n/32)][k/2][32][2] = w[n][k], the last panel filled up with zeros. */
void nv_pack(const bf16 *w, bf16 *packed, ptrdiff_t n, ptrdiff_t k) {
    ptrdiff_t panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
    for (ptrdiff_t p = 0; p < panels; p++)
        for (ptrdiff_t c = 0; c < PANEL; c++) {
            ptrdiff_t row = p * PANEL + c;
            bf16 *out = packed + p * PANEL * k + c * 2;
            for (ptrdiff_t i = 0; i < k; i += 2, out += 2 * PANEL) {
                out[0] = row < n ? w[row * k + i] : 0;
                out[1] = row < n ? w[row * k + i + 1] : 0;
            }
        }
}

enum { CACHE_BYTES = 1 << 18 }; /* of a thread's second-level cache, for a loop to count on */

/* Cut m rows evenly into blocks of at most `most`; returns a block's rows, at least 1. */
INLINE ptrdiff_t even_block(ptrdiff_t m, ptrdiff_t most) {
    ptrdiff_t blocks = (m + most - 1) / most;
    return m > 0 ? (m + blocks - 1) / blocks : 1;
}

/* Rows of a block of x whose `row_bytes` fit the cache, several tiles of them. */
static ptrdiff_t rows_that_fit(ptrdiff_t m, ptrdiff_t row_bytes) {
    ptrdiff_t most = CACHE_BYTES / row_bytes;
    return even_block(m, most < 4 * MAX_ROWS ? 4 * MAX_ROWS : most);
}

INLINE void store_row(const float *acc, bf16 *y, ptrdiff_t count, ptrdiff_t columns) {
    for (ptrdiff_t c = 0; c < count && c < columns; c += VL) store16(y + c, columns - c, load(acc + c));
}
INLINE void store_tile(const float *acc, bf16 *y, ptrdiff_t ldy, int rows, ptrdiff_t columns) {
    for (int r = 0; r < rows; r++) store_row(acc + r * PANEL, y + r * ldy, PANEL, columns);
}

/* y[m][n] = x[m][k] . w, rounded to nearest even; x's rows lie ldx apart. The threads go through x in blocks that fit the
 * cache, and through all panels for each, whoever is ready taking the next. Where x is read in place: through panels in groups
 * of which a thread's own, the same for each block, fit the cache, so w is read once and x once a group. */
void nv_linear(const bf16 *x, ptrdiff_t ldx, const bf16 *packed, bf16 *y, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k) {
    ptrdiff_t panels = (n + PANEL - 1) / PANEL, block = IN_PLACE ? TILE_ROWS : rows_that_fit(m, k * sizeof(act));
    ptrdiff_t group = IN_PLACE ? omp_get_max_threads() * (3 * CACHE_BYTES / (PANEL * k * 2) + 1) : panels;
    ptrdiff_t streams = m == 1 ? STREAMS : 1;
#pragma omp parallel
    {
        float acc[TILE_ROWS * PANEL] __attribute__((aligned(64)));
        act *room = IN_PLACE ? NULL : aligned_alloc(64, (block * (k + 16) * sizeof(act) + 63) / 64 * 64);
        begin_tiles();
        for (ptrdiff_t g = 0; g < panels; g += group)
            for (ptrdiff_t i = 0; i < m; i += block) {
                ptrdiff_t count = m - i < block ? m - i : block, step = even_block(count, TILE_ROWS), lda = ldx;
                ptrdiff_t end = panels - g < group ? panels : g + group;
                const act *a = activations(x + i * ldx, &lda, count, step, k, room);
#pragma omp for schedule(SCHEDULE) nowait
                for (ptrdiff_t first = g; first < end; first += streams) {
                    if (first + STREAMS <= end && m == 1) {
                        tile_streams(a, packed + first * PANEL * k, k, acc);
                        store_row(acc, y + first * PANEL, STREAMS * PANEL, n - first * PANEL);
                        continue;
                    }
                    for (ptrdiff_t p = first; p < first + streams && p < end; p++)
                        for (ptrdiff_t r = 0; r < count; r += step) {
                            int rows = count - r < step ? (int)(count - r) : (int)step;
                            linear_tile(a + r * lda, lda, packed + p * PANEL * k, r == 0, k, rows, acc);
                            store_tile(acc, y + (i + r) * n + p * PANEL, n, rows, n - p * PANEL);
                        }
                }
            }
        end_tiles();
        free(room);
    }
}

/* y[t][k] = row ids[t] of a packed weight. */
void nv_gather(const int64_t *ids, const bf16 *packed, bf16 *y, ptrdiff_t tokens, ptrdiff_t k) {
#pragma omp parallel for schedule(static) if (tokens > 8)
    for (ptrdiff_t t = 0; t < tokens; t++) {
        const bf16 *w = packed + ids[t] / PANEL * PANEL * k + ids[t] % PANEL * 2;
        for (ptrdiff_t i = 0; i < k; i += 2) memcpy(y + t * k + i, w + i * PANEL, 4);
    }
}

/* ---- linear with weights of 8 or 4 bits ----
 *
 * A weight is scale * integer, one bfloat16 scale for `group` inputs of an output; k % group == 0. Inputs are rounded, with a
 * scale for each row and group, so that products are integer dot products, exact in int32.
 * 8 bits: inputs in 16, group a multiple of 32 up to 256; packed [ceil(n/32)][k/2][32][2] int8.
 * 4 bits: inputs in 8, group 32; packed [ceil(n/32)][k/8][32][4] bytes: of eight inputs, byte b has number b in its
 * low half and number b + 4 in its high half, 8 added to each. (llama.cpp's Q4_0 rounds both sides alike.)
 * Scales: [ceil(n/32)][k/group][32].
 */
enum { GROUP4 = 32 };

INLINE ptrdiff_t byte8(ptrdiff_t i, ptrdiff_t c) { return (i / 2 * PANEL + c) * 2 + i % 2; }
INLINE ptrdiff_t byte4(ptrdiff_t i, ptrdiff_t c) { return (i / 8 * PANEL + c) * 4 + i % 4; }
INLINE int shift4(ptrdiff_t i) { return i % 8 < 4 ? 0 : 4; }

/* q[n][k] int8, scales[n][k/group] to their packed forms, what fills up the last panel being 0. */
void nv_pack_int(const int8_t *q, const bf16 *scales, uint8_t *packed, bf16 *packed_scales, ptrdiff_t n, ptrdiff_t k,
                 ptrdiff_t group, ptrdiff_t bits) {
    ptrdiff_t panels = (n + PANEL - 1) / PANEL, groups = k / group;
#pragma omp parallel for schedule(static)
    for (ptrdiff_t p = 0; p < panels; p++) {
        uint8_t *out = packed + p * PANEL * k * bits / 8;
        memset(out, 0, PANEL * k * bits / 8);
        for (ptrdiff_t c = 0; c < PANEL; c++) {
            ptrdiff_t row = p * PANEL + c;
            for (ptrdiff_t g = 0; g < groups; g++) packed_scales[(p * groups + g) * PANEL + c] = row < n ? scales[row * groups + g] : 0;
            if (row >= n) continue;
            for (ptrdiff_t i = 0; i < k; i++) {
                if (bits == 8) out[byte8(i, c)] = (uint8_t)q[row * k + i];
                else out[byte4(i, c)] |= (q[row * k + i] + 8) << shift4(i);
            }
        }
    }
}

/* 2 VL numbers of 8 bits as int16. */
INLINE vs widened(const uint8_t *w) {
#if VL == 8 && defined(__AVX2__)
    return (vs)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
#elif VL == 16 && defined(__AVX512BW__)
    return (vs)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w));
#else
    return __builtin_convertvector(*(const vb *)w, vs);
#endif
}

/* a += pairs of v times the pair at x, b likewise of w; in assembly for the reason above. */
INLINE void multiply_add_pairs(vi *a, vi *b, vs v, vs w, const int16_t *x) {
    int32_t pair;
    memcpy(&pair, x, 4);
#if VL == 16 && defined(__AVX512VNNI__)
    __m512i both = _mm512_set1_epi32(pair);
    *a = (vi)_mm512_dpwssd_epi32((__m512i)*a, (__m512i)v, both), *b = (vi)_mm512_dpwssd_epi32((__m512i)*b, (__m512i)w, both);
#elif VL == 16 && defined(__AVX512BW__)
    __m512i both = _mm512_set1_epi32(pair);
    *a += (vi)_mm512_madd_epi16((__m512i)v, both), *b += (vi)_mm512_madd_epi16((__m512i)w, both);
#elif VL == 8 && defined(__AVX2__)
    vi t, u;
    __asm__("vpbroadcastd %6, %2\n\tvpmaddwd %4, %2, %3\n\tvpmaddwd %5, %2, %2\n\tvpaddd %3, %0, %0\n\tvpaddd %2, %1, %1"
            : "+x"(*a), "+x"(*b), "=&x"(t), "=&x"(u) : "x"(v), "x"(w), "m"(*(const int32_t *)x));
#else
    int32_t even = x[0], odd = x[1];
    *a += ((vi)v << 16 >> 16) * even + ((vi)v >> 16) * odd;
    *b += ((vi)w << 16 >> 16) * even + ((vi)w >> 16) * odd;
#endif
}

/* out += sum * x_scale * w_scale: a group's integers become part of the result. */
INLINE void add_scaled(float *out, vi sum, float x_scale, vf w_scale) {
    store(out, fma_(__builtin_convertvector(sum, vf) * x_scale, w_scale, load(out)));
}

/* From 5 rows on with AVX-512 a line's share is fetched from `ahead` for each line of w. */
INLINE void int8_rows(int rows, int cols, const int16_t *x, ptrdiff_t ldx, const float *xs, ptrdiff_t ldxs, const uint8_t *w,
                      const bf16 *ws, ptrdiff_t gap, ptrdiff_t ws_gap, ptrdiff_t k, ptrdiff_t group, const uint8_t *ahead,
                      ptrdiff_t share, float *acc, ptrdiff_t ldacc) {
    for (ptrdiff_t g = 0; g < k / group; g++) {
        vi a[MAX_ROWS][ALL_COLS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < cols; c++) a[r][c] = (vi){0};
        for (ptrdiff_t i = 0; i < group; i += 8, x += 8, w += 8 * PANEL, ahead += 4 * share)
#pragma GCC unroll 4
            for (int j = 0; j < 8; j += 2) {
                if (VL == 16 && rows > 4) __builtin_prefetch(ahead + j / 2 * share, 0, 2);
#pragma GCC unroll 4
                for (int c = 0; c < cols; c += 2) {
                    const uint8_t *at = w + c / IN_PANEL * gap + j * PANEL + c % IN_PANEL * 2 * VL;
                    if (c % 4 == 0) fetch_ahead(cols, at);
                    vs w0 = widened(at), w1 = widened(at + 2 * VL);
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++) multiply_add_pairs(&a[r][c], &a[r][c + 1], w0, w1, x + r * ldx + j);
                }
            }
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) {
            vf scale = from_bf16(*(const half_vu *)(ws + c / IN_PANEL * ws_gap + g * PANEL + c % IN_PANEL * VL));
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) add_scaled(acc + r * ldacc + c * VL, a[r][c], xs[r * ldxs + g], scale);
        }
    }
}

/* a += fours of v (unsigned bytes up to 15) times the four signed bytes at x, b likewise of w. Without
 * VNNI they count in pairs of int16, which hold a group: 8 times 2 * 15 * 127. */
INLINE void multiply_add_fours(vi *a, vi *b, vi v, vi w, const int8_t *x) {
#if VL == 16 && defined(__AVX512VNNI__)
    __m512i four = _mm512_set1_epi32(*(const int32_t *)x);
    *a = (vi)_mm512_dpbusd_epi32((__m512i)*a, (__m512i)v, four), *b = (vi)_mm512_dpbusd_epi32((__m512i)*b, (__m512i)w, four);
#elif VL == 16 && defined(__AVX512BW__)
    __m512i four = _mm512_set1_epi32(*(const int32_t *)x);
    *a = (vi)_mm512_add_epi16((__m512i)*a, _mm512_maddubs_epi16((__m512i)v, four));
    *b = (vi)_mm512_add_epi16((__m512i)*b, _mm512_maddubs_epi16((__m512i)w, four));
#elif VL == 8 && defined(__AVX2__)
    vi t, u;
    __asm__("vpbroadcastd %6, %2\n\tvpmaddubsw %2, %4, %3\n\tvpmaddubsw %2, %5, %2\n\tvpaddw %3, %0, %0\n\tvpaddw %2, %1, %1"
            : "+x"(*a), "+x"(*b), "=&x"(t), "=&x"(u) : "x"(v), "x"(w), "m"(*(const int32_t *)x));
#else
    for (int i = 0; i < 4; i++) *a += (v >> (8 * i) & 15) * x[i], *b += (w >> (8 * i) & 15) * x[i];
#endif
}
INLINE vi in_int32(vi a) {
#if VL == 16 && defined(__AVX512BW__) && !defined(__AVX512VNNI__)
    return (vi)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1));
#elif VL == 8 && defined(__AVX2__)
    return (vi)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1));
#else
    return a;
#endif
}

/* eights[g] is eight times the sum of x's group g: what was added to the weights, times x. */
INLINE void int4_rows(int rows, int cols, const int8_t *x, ptrdiff_t ldx, const float *xs, const int32_t *eights, ptrdiff_t ldxs,
                      const uint8_t *w, const bf16 *ws, ptrdiff_t gap, ptrdiff_t ws_gap, ptrdiff_t k, const uint8_t *ahead,
                      ptrdiff_t share, float *acc, ptrdiff_t ldacc) {
    for (ptrdiff_t g = 0; g < k / GROUP4; g++) {
        vi a[MAX_ROWS][ALL_COLS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < cols; c++) a[r][c] = (vi){0};
        for (int i = 0; i < GROUP4; i += 8, x += 8, w += 4 * PANEL, ahead += 2 * share) {
            if (VL == 16 && rows > 4) __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + share, 0, 2);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c += 2) {
                const vu *both = (const vu *)(w + c / IN_PANEL * gap) + c % IN_PANEL;
                fetch_ahead(cols, both);
                vi w0 = (vi)(both[0] & 0x0f0f0f0f), w1 = (vi)(both[1] & 0x0f0f0f0f);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) multiply_add_fours(&a[r][c], &a[r][c + 1], w0, w1, x + r * ldx);
                w0 = (vi)(both[0] >> 4 & 0x0f0f0f0f), w1 = (vi)(both[1] >> 4 & 0x0f0f0f0f);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) multiply_add_fours(&a[r][c], &a[r][c + 1], w0, w1, x + r * ldx + 4);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++) {
            vf scale = from_bf16(*(const half_vu *)(ws + c / IN_PANEL * ws_gap + g * PANEL + c % IN_PANEL * VL));
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
                add_scaled(acc + r * ldacc + c * VL, in_int32(a[r][c]) - eights[r * ldxs + g], xs[r * ldxs + g], scale);
        }
    }
}

/* Rounded rows of x: numbers of 16 or 8 bits, and by group their scales and eights. */
typedef struct {
    void *numbers;
    float *scales;
    int32_t *eights;
    ptrdiff_t ld, groups;
} rounded_rows;

/* Not inlined: inside a parallel region GCC 12 keeps the accumulators in memory. */
static __attribute__((noinline)) void int_tile(int bits, const rounded_rows *q, ptrdiff_t row, const uint8_t *w, const bf16 *ws,
                                               ptrdiff_t k, ptrdiff_t group, int rows, float *acc, ptrdiff_t ldacc, int add) {
    const int16_t *x16 = (int16_t *)q->numbers + row * q->ld;
    const int8_t *x8 = (int8_t *)q->numbers + row * q->ld;
    ptrdiff_t ldx = q->ld, ldxs = q->groups;
    for (int r = 0; r < rows && !add; r++) memset(acc + r * ldacc, 0, PANEL * sizeof *acc);
    for (ptrdiff_t i = 0; i < k; i += STEP) {
        ptrdiff_t step = k - i < STEP ? k - i : STEP;
        const float *xs = q->scales + row * ldxs + i / group;
        const int32_t *eights = q->eights + row * ldxs + i / group;
        const uint8_t *wi = w + i * PANEL * bits / 8;
        const bf16 *wsi = ws + i / group * PANEL;
/* `ahead` and `share`: each part of the tile fetches its share of the panel behind this one. */
#define FETCHED_INT wi + k * PANEL * bits / 8 + at * step * PANEL * bits / 8 / rows, 2 * PANEL / PARTS(rows)
#define PART8(R, cols, c)                                                                                                   \
    int8_rows(R, cols, x16 + at * ldx + i, ldx, xs + at * ldxs, ldxs, wi + 2 * (c), wsi + (c), 0, 0, step, group, FETCHED_INT, \
              acc + at * ldacc + (c), ldacc)
#define PART4(R, cols, c)                                                                                                   \
    int4_rows(R, cols, x8 + at * ldx + i, ldx, xs + at * ldxs, eights + at * ldxs, ldxs, wi + 4 * (c), wsi + (c), 0, 0, step, \
              FETCHED_INT, acc + at * ldacc + (c), ldacc)
        if (bits == 8) FOR_ROWS(rows, PART8) else FOR_ROWS(rows, PART4)
    }
}

/* acc[STREAMS][32]; see `tile_streams`. */
static __attribute__((noinline)) void int_streams(int bits, const rounded_rows *q, const uint8_t *w, const bf16 *ws, ptrdiff_t k,
                                                  ptrdiff_t group, float *acc) {
    ptrdiff_t gap = k * PANEL * bits / 8, ws_gap = q->groups * PANEL;
    memset(acc, 0, STREAMS * PANEL * sizeof *acc);
    if (bits == 8) int8_rows(1, ALL_COLS, q->numbers, 0, q->scales, 0, w, ws, gap, ws_gap, k, group, NULL, 0, acc, 0);
    else int4_rows(1, ALL_COLS, q->numbers, 0, q->scales, q->eights, 0, w, ws, gap, ws_gap, k, NULL, 0, acc, 0);
}

/* VL numbers of x from i on: bfloat16, or float32 if they take 4 bytes. */
INLINE vf load_wide(const void *x, int bytes, ptrdiff_t i) {
    return bytes == 4 ? load((const float *)x + i) : load16((const bf16 *)x + i, VL);
}

/* v's nearest integers, below 2^22. */
INLINE vi nearest(vf v) {
    const float round = 12582912.0f; /* 1.5 * 2^23: its last bits count in ones */
    return (vi)(v + round) - (vi)each(round);
}

/* Round a row of x, numbers of `bytes`, to `row` of q: x = scale * number. */
INLINE void round_row(const void *x, int bytes, const rounded_rows *q, ptrdiff_t row, ptrdiff_t group, int bits) {
    const float limit = bits == 8 ? 32767.0f : 127.0f;
    for (ptrdiff_t g = 0; g < q->groups; g++) {
        vf top = {0};
        for (ptrdiff_t i = 0; i < group; i += VL) {
            vf v = load_wide(x, bytes, g * group + i);
            top = larger(top, larger(v, -v));
        }
        float largest = largest_of(top), inverse = largest > 0 ? limit / largest : 0;
        q->scales[row * q->groups + g] = largest / limit;
        vi sum = {0};
        for (ptrdiff_t i = 0; i < group; i += VL) {
            vi v = nearest(load_wide(x, bytes, g * group + i) * inverse);
            sum += v;
            if (bits == 8) *(half_vs *)((int16_t *)q->numbers + row * q->ld + g * group + i) = __builtin_convertvector(v, half_vs);
            else *(quarter_vb *)((int8_t *)q->numbers + row * q->ld + g * group + i) = __builtin_convertvector(v, quarter_vb);
        }
        int32_t total = 0;
        for (int i = 0; i < VL; i++) total += sum[i];
        q->eights[row * q->groups + g] = 8 * total;
    }
}

/* y[m][n] = x[m][k] . (scales * packed), as nv_linear goes about widened inputs. */
void nv_linear_int(const bf16 *x, ptrdiff_t ldx, const uint8_t *packed, const bf16 *scales, bf16 *y, ptrdiff_t m, ptrdiff_t n,
                   ptrdiff_t k, ptrdiff_t group, ptrdiff_t bits) {
    ptrdiff_t panels = (n + PANEL - 1) / PANEL, groups = k / group, block = rows_that_fit(m, k * 2), ld = k + 64;
#pragma omp parallel
    {
        ptrdiff_t threads = omp_get_num_threads(), t = omp_get_thread_num();
        ptrdiff_t first = panels * t / threads, last = panels * (t + 1) / threads;
        float acc[TILE_ROWS * PANEL] __attribute__((aligned(64)));
        rounded_rows q = {malloc(block * ld * 2), malloc(block * groups * 4), malloc(block * groups * 4), ld, groups};
        for (ptrdiff_t i = 0; i < m; i += block) {
            ptrdiff_t count = m - i < block ? m - i : block, step = even_block(count, TILE_ROWS);
            for (ptrdiff_t r = 0; r < count; r++) round_row(x + (i + r) * ldx, 2, &q, r, group, bits);
            ptrdiff_t p = first;
            for (; m == 1 && p + STREAMS <= last; p += STREAMS) {
                int_streams(bits, &q, packed + p * PANEL * k * bits / 8, scales + p * PANEL * groups, k, group, acc);
                store_row(acc, y + p * PANEL, STREAMS * PANEL, n - p * PANEL);
            }
            for (; p < last; p++)
                for (ptrdiff_t r = 0; r < count; r += step) {
                    int rows = count - r < step ? (int)(count - r) : (int)step;
                    int_tile(bits, &q, r, packed + p * PANEL * k * bits / 8, scales + p * PANEL * groups, k, group, rows, acc, PANEL, 0);
                    store_tile(acc, y + (i + r) * n + p * PANEL, n, rows, n - p * PANEL);
                }
        }
        free(q.numbers), free(q.scales), free(q.eights);
    }
}

/* y[t][k] = row ids[t] of a packed weight. */
void nv_gather_int(const int64_t *ids, const uint8_t *packed, const bf16 *scales, bf16 *y, ptrdiff_t tokens, ptrdiff_t k,
                   ptrdiff_t group, ptrdiff_t bits) {
#pragma omp parallel for schedule(static) if (tokens > 8)
    for (ptrdiff_t t = 0; t < tokens; t++) {
        ptrdiff_t p = ids[t] / PANEL, c = ids[t] % PANEL;
        const uint8_t *w = packed + p * PANEL * k * bits / 8;
        for (ptrdiff_t i = 0; i < k; i++) {
            int value = bits == 8 ? (int8_t)w[byte8(i, c)] : (w[byte4(i, c)] >> shift4(i) & 15) - 8;
            vf scale = from_bf16((half_vu){scales[(p * (k / group) + i / group) * PANEL + c]});
            store16(y + t * k + i, 1, scale * (float)value);
        }
    }
}

/* ---- elementwise ---- */

static void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, ptrdiff_t n, float eps) {
    vf sum = {0};
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = load16(x + i, n - i);
        sum = fma_(v, v, sum);
    }
    float scale = 1.0f / sqrtf(sum_of(sum) / n + eps);
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = rounded(load16(x + i, n - i) * scale);
        store16(out + i, n - i, v * load16(weight + i, n - i));
    }
}

/* residual += x (unless x is null), out = rmsnorm(residual); rows of n. */
void nv_add_rms_norm(const bf16 *x, bf16 *residual, const bf16 *weight, bf16 *out, ptrdiff_t rows, ptrdiff_t n, float eps) {
#pragma omp parallel for schedule(static) if (rows > 8)
    for (ptrdiff_t r = 0; r < rows; r++) {
        bf16 *sum = residual + r * n;
        if (x)
            for (ptrdiff_t i = 0; i < n; i += VL) store16(sum + i, n - i, load16(sum + i, n - i) + load16(x + r * n + i, n - i));
        norm_row(sum, weight, out + r * n, n, eps);
    }
}

enum { PIECE = 512 };

/* x[:, :n] = silu(x[:, :n]) * x[:, n:], of x[rows][2 n]; the silu is rounded to bfloat16 as torch rounds it. */
void nv_silu_and_mul(bf16 *x, ptrdiff_t rows, ptrdiff_t n) {
    ptrdiff_t pieces = (n + PIECE - 1) / PIECE;
#pragma omp parallel for schedule(static)
    for (ptrdiff_t item = 0; item < rows * pieces; item++) {
        ptrdiff_t r = item / pieces, first = item % pieces * PIECE;
        for (ptrdiff_t i = first; i < n && i < first + PIECE; i += VL) {
            vf gate = load16(x + r * 2 * n + i, n - i), up = load16(x + r * 2 * n + n + i, n - i);
            store16(x + r * 2 * n + i, n - i, rounded(gate / (exp_(-gate) + 1.0f)) * up);
        }
    }
}

/* ---- a batch of what the tables hold ----
 *
 * table: [slots][stride], of a slot its tokens, then, from `columns` on, its blocks. A row is slots[r]'s last lens[r] tokens of
 * the first ends[r]; rows holds slots, lens and ends [3][num_rows].
 */
void nv_batch(const int32_t *table, ptrdiff_t stride, ptrdiff_t columns, const int64_t *rows, ptrdiff_t num_rows, ptrdiff_t block,
              int64_t *input_ids, int64_t *positions, int64_t *slot_mapping, int32_t *cu_seqlens, int32_t *seq_lens,
              int32_t *tables, ptrdiff_t width) {
    ptrdiff_t t = cu_seqlens[0] = 0;
    for (ptrdiff_t r = 0; r < num_rows; r++) {
        const int32_t *tokens = table + rows[r] * stride, *blocks = tokens + columns;
        int64_t end = rows[2 * num_rows + r];
        for (int64_t i = end - rows[num_rows + r]; i < end; i++, t++) {
            input_ids[t] = tokens[i];
            positions[t] = i;
            slot_mapping[t] = blocks[i / block] * (int64_t)block + i % block;
        }
        memcpy(tables + r * width, blocks, (end + block - 1) / block * sizeof *blocks);
        seq_lens[r] = (int32_t)end;
        cu_seqlens[r + 1] = (int32_t)t;
    }
}

/* ---- sampling ---- */

enum { SEGMENT = 8192 };

/* The largest of x's n numbers, NaN never being it. */
static float largest_in(const bf16 *x, ptrdiff_t n) {
    vf top = each(-INFINITY);
    ptrdiff_t whole = n / VL * VL, i = 0;
    for (; i < whole; i += VL) top = larger(load16(x + i, VL), top);
    float best = largest_of(top);
    for (; i < n; i++) {
        float v = from_bf16((half_vu){x[i]})[0];
        best = v > best ? v : best;
    }
    return best;
}

/* out[row] = the first of the largest of logits [rows][n]. */
void nv_greedy(const bf16 *logits, int64_t *out, ptrdiff_t rows, ptrdiff_t n) {
    ptrdiff_t segments = (n + SEGMENT - 1) / SEGMENT;
    float *largest = malloc(rows * segments * sizeof *largest);
#pragma omp parallel for schedule(static)
    for (ptrdiff_t i = 0; i < rows * segments; i++) {
        ptrdiff_t first = i % segments * SEGMENT;
        largest[i] = largest_in(logits + i / segments * n + first, n - first < SEGMENT ? n - first : SEGMENT);
    }
    for (ptrdiff_t r = 0; r < rows; r++) {
        const float *in = largest + r * segments;
        ptrdiff_t best = 0;
        for (ptrdiff_t i = 1; i < segments; i++) best = in[i] > in[best] ? i : best;
        ptrdiff_t i = best * SEGMENT;
        while (i < n && from_bf16((half_vu){logits[r * n + i]})[0] != in[best]) i++;
        out[r] = i < n ? i : 0;
    }
    free(largest);
}

/* Below, logits are [rows][chunks][128]. */

enum { CHUNK = 128 };

void nv_chunk_maxima(const bf16 *logits, float *out, ptrdiff_t chunks) {
#pragma omp parallel for schedule(static)
    for (ptrdiff_t c = 0; c < chunks; c++) {
        vf top = load16(logits + c * CHUNK, VL);
        for (int i = VL; i < CHUNK; i += VL) top = larger(top, load16(logits + c * CHUNK + i, VL));
        out[c] = largest_of(top);
    }
}

/* out[row][chunk] = sum of exp((logit - largest[row]) / temperature[row]), without what is below min_p[row]. */
void nv_chunk_sums(const bf16 *logits, const float *largest, const float *temperatures, const float *min_ps, float *out,
                   ptrdiff_t rows, ptrdiff_t chunks) {
#pragma omp parallel for schedule(static)
    for (ptrdiff_t c = 0; c < rows * chunks; c++) {
        vf shift = each(largest[c / chunks]), scale = each(temperatures[c / chunks]), sum = {0};
        float least = min_ps[c / chunks];
        for (int i = 0; i < CHUNK; i += VL) {
            vf w = exp_((load16(logits + c * CHUNK + i, VL) - shift) / scale);
            sum += choose(w >= least, w, (vf){0});
        }
        out[c] = sum_of(sum);
    }
}

/* ---- attention ----
 *
 * A layer's cache: [kv_heads][blocks] of keys, then values, so that a head reads one stretch of memory where its blocks follow
 * each other. `block` keys of `width` numbers are [block/32][width/2][32][2], values [width/32][block/2][32][2]: both products
 * read them as a tile reads weights. width is dim filled up to a multiple of 32; what fills it stays zero. block % 32 == 0.
 * 16 bits: bfloat16. 8 bits: integers, and behind the keys, and the values, [block] bfloat16 scales, one for each token.
 */

INLINE ptrdiff_t width_of(ptrdiff_t dim) { return (dim + PANEL - 1) / PANEL * PANEL; }
/* Bytes of a block's keys, or values, of one head. */
INLINE ptrdiff_t half_bytes(ptrdiff_t width, ptrdiff_t block, ptrdiff_t bits) { return block * (bits == 8 ? width + 2 : width * 2); }

/* x[n] = scale * numbers; returns the scale, which takes the largest to 127. */
static bf16 round_token(const bf16 *x, int8_t *numbers, ptrdiff_t n) {
    vf top = {0};
    for (ptrdiff_t i = 0; i < n; i += VL) {
        vf v = load16(x + i, n - i);
        top = larger(top, larger(v, -v));
    }
    half_vu scale = to_bf16(each(largest_of(top) / 127));
    float inverse = from_bf16(scale)[0] > 1e-30f ? 1 / from_bf16(scale)[0] : 0; /* a tiny scale is too coarse itself */
    for (ptrdiff_t i = 0; i < n; i += VL) {
        quarter_vb v = __builtin_convertvector(nearest(load16(x + i, n - i) * inverse), quarter_vb);
        memcpy(numbers + i, &v, n - i < VL ? n - i : VL);
    }
    return scale[0];
}

/* out = x[dim] normalised and rotated. */
INLINE void turn(const bf16 *x, const bf16 *weight, const float *angles, bf16 *out, ptrdiff_t dim, float eps) {
    ptrdiff_t half = dim / 2;
    bf16 normed[dim];
    norm_row(x, weight, normed, dim, eps);
    for (ptrdiff_t i = 0; i < half; i += VL) {
        vf c = load32(angles + i, half - i), s = load32(angles + half + i, half - i);
        vf x = load16(normed + i, half - i), y = load16(normed + half + i, half - i);
        store16(out + i, half - i, fma_(x, c, -(y * s)));
        store16(out + half + i, half - i, fma_(y, c, x * s));
    }
}

/* Numbers of a block's keys, and values, before a token's first. */
INLINE ptrdiff_t key_at(ptrdiff_t token, ptrdiff_t width) { return token / PANEL * PANEL * width + token % PANEL * 2; }
INLINE ptrdiff_t value_at(ptrdiff_t token) { return token / 2 * 2 * PANEL + token % 2; }

/* Have a token's lines of a block in the second-level cache; in the first they would be too many to wait for at once. */
INLINE void fetch_token(const uint8_t *keys, ptrdiff_t token, ptrdiff_t width, ptrdiff_t block, ptrdiff_t bytes) {
    const uint8_t *k = keys + key_at(token, width) * bytes;
    const uint8_t *v = keys + half_bytes(width, block, 8 * bytes) + value_at(token) * bytes;
    for (ptrdiff_t i = 0; i < width; i += 2) __builtin_prefetch(k + i * PANEL * bytes, 0, 2);
    for (ptrdiff_t i = 0; i < width; i += PANEL)
        for (int line = 0; line < 2 * bytes; line += 2) __builtin_prefetch(v + i * block * bytes + line * PANEL, 0, 2);
}

/* Normalise q and k, rotate them, and store k and v. qkv rows: q heads, k heads, v heads. A head's tokens are stored one after the
 * other, and VL of them that follow each other in a block at once, whole vectors instead of pairs. */
void nv_store(const bf16 *qkv, const bf16 *q_weight, const bf16 *k_weight, const float *cos_sin, const int64_t *positions,
              const int64_t *slots, bf16 *q_out, uint8_t *cache, ptrdiff_t blocks, ptrdiff_t tokens, ptrdiff_t heads,
              ptrdiff_t kv_heads, ptrdiff_t dim, ptrdiff_t block, ptrdiff_t bits, float eps) {
    ptrdiff_t width = width_of(dim), bytes = bits / 8, size = half_bytes(width, block, bits);
    ptrdiff_t ld = (heads + 2 * kv_heads) * dim, group = heads / kv_heads;
    ptrdiff_t share = tokens * kv_heads / omp_get_max_threads(), piece = share < 1 ? 1 : share < 64 ? share : 64;
    ptrdiff_t pieces = (tokens + piece - 1) / piece;
#pragma omp parallel for schedule(dynamic)
    for (ptrdiff_t item = 0; item < pieces * kv_heads; item++) {
        ptrdiff_t head = item % kv_heads, t = item / kv_heads * piece, end = t + piece < tokens ? t + piece : tokens, n;
        uint8_t *its_cache = cache + head * blocks * 2 * size;
        bf16 turned[VL][width];
        memset(turned, 0, sizeof turned);
        for (; t < end; t += n) {
            ptrdiff_t at = slots[t] % block;
            uint8_t *keys = its_cache + slots[t] / block * 2 * size, *values = keys + size;
            uint8_t *k = keys + key_at(at, width) * bytes, *v = values + value_at(at) * bytes;
            for (n = 1; n < VL && t + n < end && slots[t + n] == slots[t] + n; n++) {}
            if (n < VL || at % VL || bits == 8) n = 1;
            if (n == 1 && t + 1 < end) fetch_token(its_cache + slots[t + 1] / block * 2 * size, slots[t + 1] % block, width, block, bytes);
            const bf16 *row = qkv + t * ld, *value = row + (heads + kv_heads + head) * dim;
            for (ptrdiff_t j = 0; j < n; j++, row += ld) {
                const float *angles = cos_sin + positions[t + j] * dim;
                for (ptrdiff_t h = head * group; h < (head + 1) * group; h++)
                    turn(row + h * dim, q_weight, angles, q_out + ((t + j) * heads + h) * dim, dim, eps);
                turn(row + (heads + head) * dim, k_weight, angles, turned[j], dim, eps);
            }
            if (bits == 8) {
                int8_t numbers[dim];
                ((bf16 *)(keys + block * width))[at] = round_token(turned[0], numbers, dim);
                for (ptrdiff_t i = 0; i < dim; i += 2) memcpy(k + i * PANEL, numbers + i, 2);
                ((bf16 *)(values + block * width))[at] = round_token(value, numbers, dim);
                for (ptrdiff_t i = 0; i < dim; i++) v[i / PANEL * PANEL * block + i % PANEL * 2] = numbers[i];
            } else if (n == 1) {
                for (ptrdiff_t i = 0; i < dim; i += 2) memcpy(k + i * PANEL * 2, turned[0] + i, 4);
                for (ptrdiff_t i = 0; i < dim; i++) ((bf16 *)v)[i / PANEL * PANEL * block + i % PANEL * 2] = value[i];
            } else {
                for (ptrdiff_t i = 0; i < width; i += 2 * VL) {
                    vf pairs[VL];
                    for (int j = 0; j < VL; j++) pairs[j] = load((const float *)(turned[j] + i));
                    transpose(pairs);
                    for (int j = 0; j < VL; j++) store((float *)k + (i / 2 + j) * PANEL, pairs[j]);
                }
                for (ptrdiff_t j = 0; j < VL; j += 2, value += 2 * ld)
                    for (ptrdiff_t i = 0; i < dim; i += VL) {
                        vu even = __builtin_convertvector(bits16(value + i, dim - i), vu);
                        vu odd = __builtin_convertvector(bits16(value + ld + i, dim - i), vu);
                        *(vu *)((bf16 *)v + i / PANEL * PANEL * block + j * PANEL + i % PANEL * 2) = even | odd << 16;
                    }
            }
        }
    }
}

/* The keys that a sequence has of a KV head: where the head's cache begins, and the blocks of the sequence. */
typedef struct {
    const uint8_t *cache;
    const int32_t *table;
    ptrdiff_t keys;
} kv_head;

/* One KV head's part of up to 32 query rows: the last `count` of the tokens that `kv` has, times the heads of the group. With a
 * cache of 8 bits queries and weights are rounded to 16, as the inputs of a linear are; a value's scale is part of its weight. A
 * pass goes through KEYS keys, at least a block. In long passes a block's values are read long after its keys, which takes 1.2
 * to 1.5 times as long for a single token unless they are fetched meanwhile, as by AVX512-BF16's tiles; these fetch the first
 * keys of `next` too (decoding is 1.1 to 1.2 times as fast). */
static void attend(const bf16 *q, bf16 *out, kv_head kv, kv_head following, int count, int group, ptrdiff_t heads, ptrdiff_t head,
                   ptrdiff_t dim, ptrdiff_t block, ptrdiff_t bits, float scale) {
    int rows = count * group;
    ptrdiff_t width = width_of(dim), size = half_bytes(width, block, bits);
    ptrdiff_t together = block < KEYS ? KEYS / block : 1, keys = together * block; /* blocks, and keys, of a pass */
    act query[TILE_ROWS * width] __attribute__((aligned(64)));
    float scores[TILE_ROWS * keys] __attribute__((aligned(64))), sums[TILE_ROWS * width] __attribute__((aligned(64)));
    float query_scales[TILE_ROWS], weight_scales[TILE_ROWS * (keys / PANEL)], largest[TILE_ROWS];
    float total[TILE_ROWS] = {0}, kept[TILE_ROWS] = {0}, added[TILE_ROWS] = {0}; /* weights' sums, what a pass leaves of them, and adds */
    int32_t eights[TILE_ROWS * (keys / PANEL)];
    ptrdiff_t ldw = keys * (ptrdiff_t)(sizeof *scores / sizeof(act)); /* a row's weights lie where its scores did */
    rounded_rows queries = {query, query_scales, eights, width, 1};
    rounded_rows parts = {scores, weight_scales, eights, keys * 2, keys / PANEL};
    const bf16 *values[together], *next[together];
    bf16 ones[block];
    for (ptrdiff_t j = 0; bits == 8 && j < block; j++) ones[j] = 0x3f80;
    for (int r = 0; r < rows; r++) {
        const bf16 *from = q + ((r / group) * heads + head * group + r % group) * dim;
        if (bits == 16) {
            for (ptrdiff_t d = 0; d < width; d += VL) store_act(query + r * width + d, d < dim ? load16(from + d, dim - d) : (vf){0});
        } else {
            bf16 filled[width];
            memset(filled, 0, sizeof filled);
            memcpy(filled, from, dim * sizeof *from);
            round_row(filled, 2, &queries, r, width, 8);
        }
        largest[r] = -INFINITY;
    }
    memset(sums, 0, rows * width * sizeof(float));
    scale *= 1.44269504f; /* weights are powers of 2 */
    for (ptrdiff_t start = 0; start < kv.keys; start += keys, kv.table += together) {
        ptrdiff_t left = kv.keys - start, used = left < keys ? (left + PANEL - 1) / PANEL * PANEL : keys;
        ptrdiff_t weighed = left < keys ? (left + TERMS - 1) / TERMS * TERMS : keys;
        for (ptrdiff_t j = 0; j < used; j += PANEL) {
            ptrdiff_t b = j / block;
            const uint8_t *k = kv.cache + kv.table[b] * 2 * size;
            const bf16 *panel = (const bf16 *)k + j % block * width, *its_values = panel + size / 2;
            values[b] = (const bf16 *)(k + size);
            next[b] = values[b];
            if (keys + j < left) next[b] = (const bf16 *)(kv.cache + kv.table[together + b] * 2 * size);
            else if (keys >= left && j < following.keys) next[b] = (const bf16 *)(following.cache + following.table[b] * 2 * size);
            if (bits == 16) tile(query, width, &panel, &its_values, width, width, rows, scores + j, keys, 0);
            else {
                const bf16 *scales = (const bf16 *)(k + block * width) + j % block;
                int_tile(8, &queries, 0, k + j % block * width, scales, width, width, rows, scores + j, keys, 0);
            }
        }
        for (int r = 0; r < rows; r++) {
            ptrdiff_t seen = left - count + r / group + 1; /* keys of this pass that row r sees */
            float *s = scores + r * keys;
            for (ptrdiff_t j = seen < 0 ? 0 : seen / VL * VL; j < used; j += VL)
                store(s + j, choose(lanes() < (int)(seen - j), load(s + j), each(-INFINITY)));
            vf top = each(largest[r]), sum = {0};
            for (ptrdiff_t j = 0; j < used; j += VL) top = larger(top, load(s + j));
            float now = largest_of(top);
            vf shift = each(-now * scale);
            for (ptrdiff_t j = 0; j < used; j += VL) {
                vf e = exp2_(fma_(load(s + j), each(scale), shift));
                sum += e;
                if (bits == 16) store_act((act *)s + j, e);
                else store(s + j, e * load16((const bf16 *)((const uint8_t *)values[j / block] + block * width) + j % block, VL));
            }
            kept[r] = largest[r] - now, largest[r] = now, added[r] = sum_of(sum);
            parts.groups = used / PANEL;
            if (bits == 8) round_row(s, 4, &parts, r, PANEL, 8);
        }
        for (int r = 0; r < rows; r += VL) {
            store(kept + r, exp2_(load(kept + r) * scale));
            store(total + r, fma_(load(total + r), load(kept + r), load(added + r)));
        }
        for (int r = 0; r < rows; r++)
            for (ptrdiff_t d = 0; d < width && kept[r] != 1.0f; d += VL)
                store(sums + r * width + d, load(sums + r * width + d) * kept[r]);
        for (ptrdiff_t d = 0; d < width; d += PANEL) {
            if (bits == 16) tile((const act *)scores, ldw, values, next, block, weighed, rows, sums + d, width, 1);
            for (ptrdiff_t j = 0, b = 0; j < used; j += block, b++) {
                rounded_rows part = {(int16_t *)scores + j, weight_scales + j / PANEL, eights, keys * 2, used / PANEL};
                const uint8_t *v = (const uint8_t *)values[b] + d * block;
                ptrdiff_t its_keys = used - j < block ? used - j : block;
                if (bits == 8) int_tile(8, &part, 0, v, ones, its_keys, PANEL, rows, sums + d, width, 1);
                else values[b] += block * PANEL, next[b] += block * PANEL;
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        bf16 *o = out + ((r / group) * heads + head * group + r % group) * dim;
        float inverse = 1.0f / total[r];
        for (ptrdiff_t d = 0; d < dim; d += VL) store16(o + d, dim - d, load(sums + r * width + d) * inverse);
    }
}

/* Causal attention of a batch: row r has tokens [cu_seqlens[r], cu_seqlens[r + 1]), the last ones of seq_lens[r]. */
void nv_attention(const bf16 *q, bf16 *out, const uint8_t *cache, ptrdiff_t blocks, const int32_t *tables,
                  ptrdiff_t table_width, const int32_t *cu_seqlens, const int32_t *seq_lens, ptrdiff_t num_rows, ptrdiff_t heads,
                  ptrdiff_t kv_heads, ptrdiff_t dim, ptrdiff_t block, ptrdiff_t bits, float scale) {
    int group = heads / kv_heads, tokens = TILE_ROWS / group;
    ptrdiff_t num_tiles = 0, n = 0, head_bytes = blocks * 2 * half_bytes(width_of(dim), block, bits);
    for (ptrdiff_t r = 0; r < num_rows; r++) num_tiles += (cu_seqlens[r + 1] - cu_seqlens[r] + tokens - 1) / tokens;
    struct {
        int32_t row, first, count, keys; /* tokens [first, first + count) of the batch, and what the last of them sees */
    } *tiles = malloc(num_tiles * sizeof *tiles);
    for (ptrdiff_t r = 0; r < num_rows; r++)
        for (int32_t rest = cu_seqlens[r + 1] - cu_seqlens[r], behind = 0, count; rest > 0; rest -= count, behind += count, n++) {
            count = (rest - 1) % tokens + 1; /* the longest first */
            tiles[n].row = r, tiles[n].first = cu_seqlens[r] + rest - count, tiles[n].count = count;
            tiles[n].keys = seq_lens[r] - behind;
        }
#pragma omp parallel
    {
        begin_tiles();
#pragma omp for schedule(guided) /* a head's tiles read the same keys; a thread's follow each other */
        for (ptrdiff_t item = 0; item < num_tiles * kv_heads; item++) {
            ptrdiff_t head = item / num_tiles, i = item % num_tiles, next = (i + 1) % num_tiles;
            kv_head kv = {cache + head * head_bytes, tables + tiles[i].row * table_width, tiles[i].keys};
            kv_head following = {cache + (item + 1) / num_tiles % kv_heads * head_bytes, tables + tiles[next].row * table_width, tiles[next].keys};
            ptrdiff_t offset = tiles[i].first * heads * dim;
            attend(q + offset, out + offset, kv, following, tiles[i].count, group, heads, head, dim, block, bits, scale);
        }
        end_tiles();
    }
    free(tiles);
}

/* ---- recorded calls ----
 *
 * A call is a kernel's number and its arguments, a word each. `tokens` and `rows` take the place of the numbers of
 * tokens and of rows of a batch with which they were recorded.
 */
typedef union {
    void *p;
    ptrdiff_t n;
    double f;
} word;

enum { CALL = 17 }; /* words of the longest */

void nv_run(const word (*calls)[CALL], ptrdiff_t count, ptrdiff_t tokens, ptrdiff_t rows) {
    for (ptrdiff_t i = 0; i < count; i++) {
        const word *a = calls[i] + 1;
        switch (calls[i]->n) {
        case 0: nv_linear(a[0].p, a[1].n, a[2].p, a[3].p, tokens, a[5].n, a[6].n); break;
        case 1: nv_linear_int(a[0].p, a[1].n, a[2].p, a[3].p, a[4].p, tokens, a[6].n, a[7].n, a[8].n, a[9].n); break;
        case 2: nv_gather(a[0].p, a[1].p, a[2].p, tokens, a[4].n); break;
        case 3: nv_gather_int(a[0].p, a[1].p, a[2].p, a[3].p, tokens, a[5].n, a[6].n, a[7].n); break;
        case 4: nv_add_rms_norm(a[0].p, a[1].p, a[2].p, a[3].p, tokens, a[5].n, a[6].f); break;
        case 5: nv_silu_and_mul(a[0].p, tokens, a[2].n); break;
        case 6:
            nv_store(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].n, tokens, a[10].n, a[11].n, a[12].n,
                     a[13].n, a[14].n, a[15].f);
            break;
        case 7:
            nv_attention(a[0].p, a[1].p, a[2].p, a[3].n, a[4].p, a[5].n, a[6].p, a[7].p, rows, a[9].n, a[10].n, a[11].n, a[12].n,
                         a[13].n, a[14].f);
            break;
        }
    }
}
