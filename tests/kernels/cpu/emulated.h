/* The AVX-512 and AMX instructions in plain C. So processors without them can test the kernels that use them.
 *
 * Included before each source (gcc -include). EMULATE_BF16 adds AVX512_BF16 and VNNI, EMULATE_AMX adds these and the tiles.
 * Where a real instruction would fault (tiles whose shapes do not match), the process aborts.
 */
#define _GNU_SOURCE /* as threads.c, which is too late behind these includes */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define VL 16
#define __AVX512F__ 1
#define __AVX512BW__ 1

#define EMULATED(type, name, parameters, body) \
    static inline type emulated##name parameters { type out; body return out; }
typedef union { __m512i v; int8_t b[64]; uint8_t u[64]; int16_t h[32]; int32_t w[16]; } emulated_ints;
typedef union { __m512 v; float f[16]; } emulated_floats;

static inline int16_t emulated_saturated(int x) { return x > 32767 ? 32767 : x < -32768 ? -32768 : x; }
static inline float emulated_from_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

EMULATED(__m512, _fmadd_ps, (__m512 a, __m512 b, __m512 c), out = c; for (int i = 0; i < 16; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);)
EMULATED(__m512, _loadu_ps, (const float *p), memcpy(&out, p, 64);)
EMULATED(__m512i, _loadu_si512, (const void *p), memcpy(&out, p, 64);)
EMULATED(__m512, _max_ps, (__m512 a, __m512 b), for (int i = 0; i < 16; i++) out[i] = a[i] > b[i] ? a[i] : b[i];)
EMULATED(__m512, _min_ps, (__m512 a, __m512 b), for (int i = 0; i < 16; i++) out[i] = a[i] < b[i] ? a[i] : b[i];)
EMULATED(__m512i, _max_epi32, (__m512i a, __m512i b), emulated_ints x = {a}; emulated_ints y = {b}; emulated_ints o;
         for (int i = 0; i < 16; i++) o.w[i] = x.w[i] > y.w[i] ? x.w[i] : y.w[i]; out = o.v;)
EMULATED(__m512i, _cvtepu16_epi32, (__m256i a), uint16_t h[16]; memcpy(h, &a, 32); emulated_ints o;
         for (int i = 0; i < 16; i++) o.w[i] = h[i]; out = o.v;)
EMULATED(__m512, _cvtph_ps, (__m256i a), for (int i = 0; i < 16; i++) out[i] = _cvtsh_ss(((__v16hi)a)[i]);)
static inline void emulated_storeu_ps(float *p, __m512 v) { memcpy(p, &v, 64); }
EMULATED(__m512i, _set1_epi32, (int x), emulated_ints o; for (int i = 0; i < 16; i++) o.w[i] = x; out = o.v;)
EMULATED(__m512i, _set1_epi16, (short x), emulated_ints o; for (int i = 0; i < 32; i++) o.h[i] = x; out = o.v;)
EMULATED(__m512i, _add_epi16, (__m512i a, __m512i b), emulated_ints x = {a}; emulated_ints y = {b};
         for (int i = 0; i < 32; i++) x.h[i] = (int16_t)(x.h[i] + y.h[i]); out = x.v;)
EMULATED(__m512i, _madd_epi16, (__m512i a, __m512i b), emulated_ints x = {a}; emulated_ints y = {b}; emulated_ints o;
         for (int i = 0; i < 16; i++) o.w[i] = x.h[2 * i] * y.h[2 * i] + x.h[2 * i + 1] * y.h[2 * i + 1]; out = o.v;)
EMULATED(__m512i, _maddubs_epi16, (__m512i a, __m512i b), emulated_ints x = {a}; emulated_ints y = {b}; emulated_ints o;
         for (int i = 0; i < 32; i++) o.h[i] = emulated_saturated(x.u[2 * i] * y.b[2 * i] + x.u[2 * i + 1] * y.b[2 * i + 1]); out = o.v;)
EMULATED(__m512i, _shuffle_epi8, (__m512i a, __m512i from), emulated_ints x = {a}; emulated_ints y = {from}; emulated_ints o;
         for (int i = 0; i < 64; i++) o.u[i] = y.u[i] & 128 ? 0 : x.u[i / 16 * 16 + y.u[i] % 16]; out = o.v;)
EMULATED(__m512i, _cvtepi8_epi16, (__m256i a), int8_t b[32]; memcpy(b, &a, 32); emulated_ints o;
         for (int i = 0; i < 32; i++) o.h[i] = b[i]; out = o.v;)
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_max_ps emulated_max_ps
#define _mm512_min_ps emulated_min_ps
#define _mm512_max_epi32 emulated_max_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_loadu_ps emulated_loadu_ps
#define _mm512_loadu_si512 emulated_loadu_si512
#define _mm512_storeu_ps emulated_storeu_ps
#define _mm512_set1_epi32 emulated_set1_epi32
#define _mm512_set1_epi16 emulated_set1_epi16
#define _mm512_add_epi16 emulated_add_epi16
#define _mm512_madd_epi16 emulated_madd_epi16
#define _mm512_maddubs_epi16 emulated_maddubs_epi16
#define _mm512_shuffle_epi8 emulated_shuffle_epi8
#define _mm512_cvtepi8_epi16 emulated_cvtepi8_epi16

#if defined(EMULATE_BF16) || defined(EMULATE_AMX)
#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1
EMULATED(__m512i, _dpwssd_epi32, (__m512i s, __m512i a, __m512i b), emulated_ints x = {a}; emulated_ints y = {b}; emulated_ints o = {s};
         for (int i = 0; i < 16; i++) o.w[i] += x.h[2 * i] * y.h[2 * i] + x.h[2 * i + 1] * y.h[2 * i + 1]; out = o.v;)
EMULATED(__m512i, _dpbusd_epi32, (__m512i s, __m512i a, __m512i b), emulated_ints x = {a}; emulated_ints y = {b}; emulated_ints o = {s};
         for (int i = 0; i < 64; i++) o.w[i / 4] += x.u[i] * y.b[i]; out = o.v;)
EMULATED(__m512, _dpbf16_ps, (__m512 s, __m512bh a, __m512bh b), uint16_t x[32]; uint16_t y[32]; memcpy(x, &a, 64); memcpy(y, &b, 64);
         emulated_floats o = {s}; for (int j = 1; j >= 0; j--) for (int i = 0; i < 16; i++)
             o.f[i] += emulated_from_bf16(x[2 * i + j]) * emulated_from_bf16(y[2 * i + j]); out = o.v;)
EMULATED(__m256i, _cvtneps_pbh, (__m512 a), uint32_t x[16]; uint16_t h[16]; memcpy(x, &a, 64); for (int i = 0; i < 16; i++)
         h[i] = (x[i] & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (x[i] + 0x7fff + (x[i] >> 16 & 1)) >> 16; memcpy(&out, h, 32);)
#define _mm512_dpwssd_epi32 emulated_dpwssd_epi32
#define _mm512_dpbusd_epi32 emulated_dpbusd_epi32
#define _mm512_dpbf16_ps emulated_dpbf16_ps
#define _mm512_cvtneps_pbh emulated_cvtneps_pbh
#endif

#ifdef EMULATE_AMX
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define syscall(...) 0 /* the system allows the tiles */
static _Thread_local struct { uint8_t palette, start_row, reserved[14]; uint16_t colsb[16]; uint8_t rows[16]; } emulated_config;
static _Thread_local uint8_t emulated_tiles[8][16][64];

static inline void emulated_loadconfig(const void *p) { memcpy(&emulated_config, p, 64); }
static inline void emulated_release(void) { memset(&emulated_config, 0, 64); }
static inline void emulated_check(int ok) {
    if (!ok || emulated_config.palette != 1) abort();
}
static inline void emulated_zero(int t) { emulated_check(emulated_config.rows[t] > 0), memset(emulated_tiles[t], 0, 1024); }
static inline void emulated_loadd(int t, const void *p, long stride) {
    emulated_check(emulated_config.rows[t] > 0);
    for (int r = 0; r < emulated_config.rows[t]; r++) memcpy(emulated_tiles[t][r], (const char *)p + r * stride, emulated_config.colsb[t]);
}
static inline void emulated_stored(int t, void *p, long stride) {
    emulated_check(emulated_config.rows[t] > 0);
    for (int r = 0; r < emulated_config.rows[t]; r++) memcpy((char *)p + r * stride, emulated_tiles[t][r], emulated_config.colsb[t]);
}
static inline void emulated_dpbf16(int d, int a, int b) {
    const uint8_t *rows = emulated_config.rows;
    const uint16_t *colsb = emulated_config.colsb;
    emulated_check(rows[d] == rows[a] && colsb[d] == colsb[b] && colsb[a] == 4 * rows[b]);
    for (int m = 0; m < rows[d]; m++) {
        float sums[32] = {0}, out[16];
        uint16_t x[32], y[32];
        memcpy(x, emulated_tiles[a][m], 64);
        for (int k = 0; k < rows[b]; k++) {
            memcpy(y, emulated_tiles[b][k], 64);
            for (int i = 0; i < 32; i++) sums[i] += emulated_from_bf16(x[2 * k + i % 2]) * emulated_from_bf16(y[i]);
        }
        memcpy(out, emulated_tiles[d][m], 64);
        for (int n = 0; n < colsb[d] / 4; n++) out[n] += sums[2 * n] + sums[2 * n + 1];
        memcpy(emulated_tiles[d][m], out, 64);
    }
}
static inline void emulated_dpbytes(int d, int a, int b, int is_signed) {
    const uint8_t *rows = emulated_config.rows;
    const uint16_t *colsb = emulated_config.colsb;
    emulated_check(rows[d] == rows[a] && colsb[d] == colsb[b] && colsb[a] == 4 * rows[b]);
    for (int m = 0; m < rows[d]; m++) {
        uint32_t sums[16];
        memcpy(sums, emulated_tiles[d][m], 64);
        for (int k = 0; k < colsb[a]; k++)
            for (int n = 0; n < colsb[d] / 4; n++) {
                uint8_t x = emulated_tiles[a][m][k];
                sums[n] += (is_signed ? (int8_t)x : x) * (int8_t)emulated_tiles[b][k / 4][4 * n + k % 4];
            }
        memcpy(emulated_tiles[d][m], sums, 64);
    }
}
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16
#define _tile_dpbssd(d, a, b) emulated_dpbytes(d, a, b, 1)
#define _tile_dpbusd(d, a, b) emulated_dpbytes(d, a, b, 0)
#endif
