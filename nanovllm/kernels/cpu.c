/* Native CPU kernels of nanovllm, bfloat16 in and out, float32 inside. Called through ctypes.
 *
 * A packed weight [N, K] is [ceil(N/32)][K/2][32][2]: panels of 32 outputs, pairs of inputs side by
 * side, as both vdpbf16ps and the AMX tiles read them. Rows of the input never meet, so that a row's
 * result does not depend on the batch it is in.
 */
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_AMX 1
#endif

typedef uint16_t bf16;
enum { PANEL = 32, TILE_ROWS = 32 };


/* ---- a tile of products: acc[rows][32] = x[rows][k] . w ----
 *
 * w is [k/2][stride/2][2], of which 32 columns are read; stride in elements. rows <= 32, k % 32 == 0.
 * acc is dense [32][32] float32. Each output is summed in the order of k, whatever `rows` is.
 */

static inline __m512i to_bf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

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
static void tile(const bf16 *x, ptrdiff_t ldx, const bf16 *w, ptrdiff_t stride, ptrdiff_t k, int rows, float *acc) {
    int rows1 = rows > 16 ? rows - 16 : 0;
    if (configured_rows != rows) {
        tile_config c;
        memset(&c, 0, sizeof c);
        c.palette = 1;
        for (int t = 0; t < 8; t++) c.colsb[t] = 64, c.rows[t] = 16;
        c.rows[0] = c.rows[1] = c.rows[4] = rows > 16 ? 16 : rows;
        if (rows1) c.rows[2] = c.rows[3] = c.rows[5] = rows1;
        _tile_loadconfig(&c);
        configured_rows = rows;
    }
    ptrdiff_t step = 16 * stride;
    _tile_zero(0);
    _tile_zero(1);
    if (rows1) {
        const bf16 *x1 = x + 16 * ldx;
        _tile_zero(2);
        _tile_zero(3);
        for (ptrdiff_t i = 0; i < k; i += 32, w += step) {
            _tile_loadd(6, w, stride * 2);
            _tile_loadd(7, w + 32, stride * 2);
            _tile_loadd(4, x + i, ldx * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x1 + i, ldx * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, acc + 16 * 32, 128);
        _tile_stored(3, acc + 16 * 32 + 16, 128);
    } else {
        for (ptrdiff_t i = 0; i < k; i += 32, w += step) {
            _tile_loadd(6, w, stride * 2);
            _tile_loadd(7, w + 32, stride * 2);
            _tile_loadd(4, x + i, ldx * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, acc, 128);
    _tile_stored(1, acc + 16, 128);
}

/* Linux lends the tiles to a process that asks for them, once. */
int nv_enable(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#else
static void begin_tiles(void) {}
static void end_tiles(void) {}
int nv_enable(void) { return 1; }

enum { DP_ROWS = 12 };

static inline __attribute__((always_inline)) void dp_rows(int rows, const bf16 *x, ptrdiff_t ldx, const bf16 *w,
                                                          ptrdiff_t stride, ptrdiff_t k, float *acc) {
    __m512 a[DP_ROWS], b[DP_ROWS];
    for (int r = 0; r < rows; r++) a[r] = b[r] = _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < k; i += 2, w += stride) {
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 32);
        _mm_prefetch(w + 64 * stride, _MM_HINT_T0);
        _mm_prefetch(w + 64 * stride + 32, _MM_HINT_T0);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int pair;
            memcpy(&pair, x + r * ldx + i, 4);
            __m512bh v = (__m512bh)_mm512_set1_epi32(pair);
            a[r] = _mm512_dpbf16_ps(a[r], w0, v);
            b[r] = _mm512_dpbf16_ps(b[r], w1, v);
        }
    }
    for (int r = 0; r < rows; r++) {
        _mm512_storeu_ps(acc + r * 32, a[r]);
        _mm512_storeu_ps(acc + r * 32 + 16, b[r]);
    }
}

static void tile(const bf16 *x, ptrdiff_t ldx, const bf16 *w, ptrdiff_t stride, ptrdiff_t k, int rows, float *acc) {
    while (rows > 0) {
        int n = rows >= DP_ROWS ? DP_ROWS : rows;
        switch (n) {
#define CASE(R) case R: dp_rows(R, x, ldx, w, stride, k, acc); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
        x += n * ldx, acc += n * 32, rows -= n;
    }
}
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

/* y[m][n] = x[m][k] . w, rounded to nearest even; x's rows lie ldx apart.
 * Each thread goes through its panels in groups that fit the second-level cache: w is read once, x once a group. */
void nv_linear(const bf16 *x, ptrdiff_t ldx, const bf16 *packed, bf16 *y, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k) {
    enum { GROUP_BYTES = 3 << 18 };
    ptrdiff_t panels = (n + PANEL - 1) / PANEL, group = GROUP_BYTES / (PANEL * k * 2);
    if (group < 1) group = 1;
#pragma omp parallel
    {
        ptrdiff_t threads = omp_get_num_threads(), t = omp_get_thread_num();
        ptrdiff_t first = panels * t / threads, last = panels * (t + 1) / threads;
        float acc[TILE_ROWS * PANEL] __attribute__((aligned(64)));
        begin_tiles();
        for (ptrdiff_t g = first; g < last; g += group)
            for (ptrdiff_t i = 0; i < m; i += TILE_ROWS) {
                int rows = m - i < TILE_ROWS ? (int)(m - i) : TILE_ROWS;
                for (ptrdiff_t p = g; p < last && p < g + group; p++) {
                    ptrdiff_t columns = n - p * PANEL;
                    __mmask32 mask = columns >= PANEL ? ~(__mmask32)0 : ((__mmask32)1 << columns) - 1;
                    tile(x + i * ldx, ldx, packed + p * PANEL * k, 2 * PANEL, k, rows, acc);
                    for (int r = 0; r < rows; r++)
                        _mm512_mask_storeu_epi16(y + (i + r) * n + p * PANEL, mask,
                                                 to_bf16(_mm512_loadu_ps(acc + r * 32), _mm512_loadu_ps(acc + r * 32 + 16)));
                }
            }
        end_tiles();
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

/* ---- elementwise ---- */

static inline __m512 load16(const bf16 *p, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}
static inline void store16(bf16 *p, __mmask16 mask, __m512 v) {
    _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(v));
}
static inline __m512 rounded(__m512 v) { /* to bfloat16 and back */
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16));
}
static inline __mmask16 mask_of(ptrdiff_t left) { return left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1); }

/* exp: 2^n times a polynomial (Cephes' expf), within 2 units in the last place; 0 below -87. */
static inline __m512 exp16(__m512 x) {
    __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    x = _mm512_min_ps(x, _mm512_set1_ps(88.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), tiny, _mm512_setzero_ps());
}

static void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, ptrdiff_t n, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < n; i += 16) {
        __m512 v = load16(x + i, mask_of(n - i));
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(sum) / n + eps));
    for (ptrdiff_t i = 0; i < n; i += 16) {
        __mmask16 mask = mask_of(n - i);
        __m512 v = rounded(_mm512_mul_ps(load16(x + i, mask), scale));
        store16(out + i, mask, _mm512_mul_ps(v, load16(weight + i, mask)));
    }
}

/* residual += x (unless x is null), out = rmsnorm(residual); rows of n. */
void nv_add_rms_norm(const bf16 *x, bf16 *residual, const bf16 *weight, bf16 *out, ptrdiff_t rows, ptrdiff_t n, float eps) {
#pragma omp parallel for schedule(static) if (rows > 8)
    for (ptrdiff_t r = 0; r < rows; r++) {
        bf16 *sum = residual + r * n;
        if (x)
            for (ptrdiff_t i = 0; i < n; i += 16) {
                __mmask16 mask = mask_of(n - i);
                store16(sum + i, mask, _mm512_add_ps(load16(sum + i, mask), load16(x + r * n + i, mask)));
            }
        norm_row(sum, weight, out + r * n, n, eps);
    }
}

/* out[rows][n] = silu(x[:, :n]) * x[:, n:]; the silu is rounded to bfloat16 as torch rounds it. */
void nv_silu_and_mul(const bf16 *x, bf16 *out, ptrdiff_t rows, ptrdiff_t n) {
#pragma omp parallel for schedule(static) if (rows > 4)
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t i = 0; i < n; i += 16) {
            __mmask16 mask = mask_of(n - i);
            __m512 gate = load16(x + r * 2 * n + i, mask), up = load16(x + r * 2 * n + n + i, mask);
            __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate));
            __m512 silu = rounded(_mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), e)));
            store16(out + r * n + i, mask, _mm512_mul_ps(silu, up));
        }
}

/* ---- sampling: logits [rows][chunks][128] ---- */

enum { CHUNK = 128 };

void nv_chunk_maxima(const bf16 *logits, float *out, ptrdiff_t chunks) {
#pragma omp parallel for schedule(static)
    for (ptrdiff_t c = 0; c < chunks; c++) {
        __m512 top = load16(logits + c * CHUNK, 0xffff);
        for (int i = 16; i < CHUNK; i += 16) top = _mm512_max_ps(top, load16(logits + c * CHUNK + i, 0xffff));
        out[c] = _mm512_reduce_max_ps(top);
    }
}

/* out[row][chunk] = sum of exp((logit - largest[row]) / temperature[row]), without what is below min_p[row]. */
void nv_chunk_sums(const bf16 *logits, const float *largest, const float *temperatures, const float *min_ps, float *out,
                   ptrdiff_t rows, ptrdiff_t chunks) {
#pragma omp parallel for schedule(static)
    for (ptrdiff_t c = 0; c < rows * chunks; c++) {
        __m512 shift = _mm512_set1_ps(largest[c / chunks]), scale = _mm512_set1_ps(temperatures[c / chunks]);
        __m512 least = _mm512_set1_ps(min_ps[c / chunks]), sum = _mm512_setzero_ps();
        for (int i = 0; i < CHUNK; i += 16) {
            __m512 w = exp16(_mm512_div_ps(_mm512_sub_ps(load16(logits + c * CHUNK + i, 0xffff), shift), scale));
            sum = _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(w, least, _CMP_GE_OQ), sum, w);
        }
        out[c] = _mm512_reduce_add_ps(sum);
    }
}

/* ---- attention ----
 *
 * A layer's cache: keys [blocks][kv_heads][dim/2][block][2], then values [blocks][kv_heads][block/2][dim][2], so that
 * both products read them as `tile` reads weights. block % 32 == 0, dim % 32 == 0.
 */

/* Normalise q and k, rotate them, and store k and v. qkv rows: q heads, k heads, v heads. */
void nv_store(const bf16 *qkv, const bf16 *q_weight, const bf16 *k_weight, const float *cos_sin, const int64_t *positions,
              const int64_t *slots, bf16 *q_out, bf16 *keys, bf16 *values, ptrdiff_t tokens, ptrdiff_t heads,
              ptrdiff_t kv_heads, ptrdiff_t dim, ptrdiff_t block, float eps) {
    ptrdiff_t half = dim / 2;
#pragma omp parallel for schedule(static) if (tokens > 4)
    for (ptrdiff_t t = 0; t < tokens; t++) {
        const bf16 *row = qkv + t * (heads + 2 * kv_heads) * dim;
        const float *angles = cos_sin + positions[t] * dim;
        ptrdiff_t b = slots[t] / block, at = slots[t] % block;
        bf16 normed[dim], turned[dim];
        for (ptrdiff_t h = 0; h < heads + kv_heads; h++) {
            int is_q = h < heads;
            norm_row(row + h * dim, is_q ? q_weight : k_weight, normed, dim, eps);
            bf16 *out = is_q ? q_out + (t * heads + h) * dim : turned;
            for (ptrdiff_t i = 0; i < half; i += 16) {
                __mmask16 mask = mask_of(half - i);
                __m512 c = _mm512_maskz_loadu_ps(mask, angles + i), s = _mm512_maskz_loadu_ps(mask, angles + half + i);
                __m512 x = load16(normed + i, mask), y = load16(normed + half + i, mask);
                store16(out + i, mask, _mm512_fmsub_ps(x, c, _mm512_mul_ps(y, s)));
                store16(out + half + i, mask, _mm512_fmadd_ps(y, c, _mm512_mul_ps(x, s)));
            }
            if (!is_q) {
                bf16 *k = keys + ((b * kv_heads + h - heads) * block) * dim + at * 2;
                for (ptrdiff_t i = 0; i < dim; i += 2) memcpy(k + i * block, turned + i, 4);
            }
        }
        for (ptrdiff_t h = 0; h < kv_heads; h++) {
            bf16 *v = values + (b * kv_heads + h) * block * dim + at / 2 * 2 * dim + at % 2;
            const bf16 *from = row + (heads + kv_heads + h) * dim;
            for (ptrdiff_t i = 0; i < dim; i++) v[2 * i] = from[i];
        }
    }
}

/* One KV head's part of up to 32 query rows: tokens [first, first + count) times the heads of the group. */
static void attend(const bf16 *q, bf16 *out, const bf16 *keys, const bf16 *values, const int32_t *table, ptrdiff_t position,
                   int count, int group, ptrdiff_t heads, ptrdiff_t kv_heads, ptrdiff_t head, ptrdiff_t dim, ptrdiff_t block,
                   float scale) {
    int rows = count * group;
    bf16 query[TILE_ROWS * dim] __attribute__((aligned(64))), weights[TILE_ROWS * block] __attribute__((aligned(64)));
    float scores[TILE_ROWS * block] __attribute__((aligned(64))), sums[TILE_ROWS * dim] __attribute__((aligned(64)));
    float acc[TILE_ROWS * 32] __attribute__((aligned(64))), largest[TILE_ROWS], total[TILE_ROWS];
    for (int r = 0; r < rows; r++) {
        memcpy(query + r * dim, q + ((r / group) * heads + head * group + r % group) * dim, dim * 2);
        largest[r] = -INFINITY, total[r] = 0;
    }
    memset(sums, 0, rows * dim * sizeof(float));
    ptrdiff_t num_keys = position + count; /* seen by the last token */
    for (ptrdiff_t start = 0, b = 0; start < num_keys; start += block, b++) {
        const bf16 *k = keys + (table[b] * kv_heads + head) * block * dim;
        const bf16 *v = values + (table[b] * kv_heads + head) * block * dim;
        for (ptrdiff_t j = 0; j < block; j += 32) {
            tile(query, dim, k + j * 2, block * 2, dim, rows, acc);
            for (int r = 0; r < rows; r++) memcpy(scores + r * block + j, acc + r * 32, 32 * sizeof(float));
        }
        for (int r = 0; r < rows; r++) {
            ptrdiff_t seen = position + r / group + 1 - start; /* keys of this block that row r sees */
            float *s = scores + r * block, before = largest[r], now = before;
            __m512 top = _mm512_set1_ps(before);
            for (ptrdiff_t j = 0; j < block; j += 16) {
                __mmask16 mask = seen <= j ? 0 : mask_of(seen - j);
                __m512 x = _mm512_mul_ps(_mm512_loadu_ps(s + j), _mm512_set1_ps(scale));
                x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), mask, x);
                _mm512_storeu_ps(s + j, x);
                top = _mm512_max_ps(top, x);
            }
            now = _mm512_reduce_max_ps(top);
            largest[r] = now;
            __m512 sum = _mm512_setzero_ps(), shift = _mm512_set1_ps(now);
            for (ptrdiff_t j = 0; j < block; j += 32) {
                __m512 e0 = exp16(_mm512_sub_ps(_mm512_loadu_ps(s + j), shift));
                __m512 e1 = exp16(_mm512_sub_ps(_mm512_loadu_ps(s + j + 16), shift));
                sum = _mm512_add_ps(sum, _mm512_add_ps(e0, e1));
                _mm512_storeu_si512(weights + r * block + j, to_bf16(e0, e1));
            }
            float alpha = before == -INFINITY ? 0.0f : expf(before - now);
            total[r] = total[r] * alpha + _mm512_reduce_add_ps(sum);
            if (alpha != 1.0f)
                for (ptrdiff_t d = 0; d < dim; d += 16)
                    _mm512_storeu_ps(sums + r * dim + d, _mm512_mul_ps(_mm512_loadu_ps(sums + r * dim + d), _mm512_set1_ps(alpha)));
        }
        for (ptrdiff_t d = 0; d < dim; d += 32) {
            tile(weights, block, v + d * 2, dim * 2, block, rows, acc);
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < 32; c += 16) {
                    float *s = sums + r * dim + d + c;
                    _mm512_storeu_ps(s, _mm512_add_ps(_mm512_loadu_ps(s), _mm512_loadu_ps(acc + r * 32 + c)));
                }
        }
    }
    for (int r = 0; r < rows; r++) {
        bf16 *o = out + ((r / group) * heads + head * group + r % group) * dim;
        __m512 inverse = _mm512_set1_ps(1.0f / total[r]);
        for (ptrdiff_t d = 0; d < dim; d += 16) store16(o + d, 0xffff, _mm512_mul_ps(_mm512_loadu_ps(sums + r * dim + d), inverse));
    }
}

/* Causal attention of a batch: row r has tokens [cu_seqlens[r], cu_seqlens[r + 1]), the last ones of seq_lens[r]. */
void nv_attention(const bf16 *q, bf16 *out, const bf16 *keys, const bf16 *values, const int32_t *tables, ptrdiff_t table_width,
                  const int32_t *cu_seqlens, const int32_t *seq_lens, ptrdiff_t num_rows, ptrdiff_t heads, ptrdiff_t kv_heads,
                  ptrdiff_t dim, ptrdiff_t block, float scale) {
    int group = heads / kv_heads, tokens = TILE_ROWS / group;
    ptrdiff_t num_tiles = 0;
    for (ptrdiff_t r = 0; r < num_rows; r++) num_tiles += (cu_seqlens[r + 1] - cu_seqlens[r] + tokens - 1) / tokens;
    int32_t (*tiles)[2] = malloc(num_tiles * sizeof *tiles); /* (row, first token) */
    ptrdiff_t n = 0;
    for (ptrdiff_t r = 0; r < num_rows; r++)
        for (int32_t t = cu_seqlens[r + 1] - cu_seqlens[r]; t > 0; t -= tokens) { /* the longest first */
            tiles[n][0] = r;
            tiles[n++][1] = (t - 1) / tokens * tokens;
        }
#pragma omp parallel
    {
        begin_tiles();
#pragma omp for schedule(dynamic)
        for (ptrdiff_t item = 0; item < num_tiles * kv_heads; item++) {
            int32_t r = tiles[item / kv_heads][0], first = tiles[item / kv_heads][1];
            int32_t length = cu_seqlens[r + 1] - cu_seqlens[r], left = length - first;
            ptrdiff_t offset = (cu_seqlens[r] + first) * heads * dim;
            attend(q + offset, out + offset, keys, values, tables + r * table_width, seq_lens[r] - length + first,
                   left < tokens ? left : tokens, group, heads, kv_heads, item % kv_heads, dim, block, scale);
        }
        end_tiles();
    }
    free(tiles);
}
