/* What a thread can do at most: read memory, and multiply numbers in registers. rates.py compiles and calls this.
 *
 * A loop of registers has as many sums as an instruction's latency needs, and loads nothing: no product is faster.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef int64_t line __attribute__((vector_size(64), aligned(1), may_alias));
enum { STREAMS = 4, AHEAD = 1024 };

/* Read arrays, each in four streams side by side and with prefetches, as a product of one row reads its panels. */
int64_t read_arrays(const char *const *arrays, const size_t *sizes, ptrdiff_t count) {
    line sums[STREAMS] = {{0}};
    for (ptrdiff_t n = 0; n < count; n++) {
        const char *p = arrays[n];
        size_t part = sizes[n] / STREAMS / sizeof(line) * sizeof(line);
        for (size_t i = 0; i < part; i += sizeof(line))
#pragma GCC unroll 4
            for (int s = 0; s < STREAMS; s++) {
                __builtin_prefetch(p + s * part + i + AHEAD, 0, 2);
                sums[s] ^= *(const line *)(p + s * part + i);
            }
    }
    line all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    return all[0] ^ all[1] ^ all[2] ^ all[3] ^ all[4] ^ all[5] ^ all[6] ^ all[7];
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

#if defined(__AVX512F__)
#define REGISTER "v"
enum { BYTES = 64, SUMS = 16 };
#elif defined(__x86_64__)
#define REGISTER "x"
#ifdef __AVX2__
enum { BYTES = 32, SUMS = 12 };
#else
enum { BYTES = 16, SUMS = 12 };
#endif
#else
#define REGISTER "w"
enum { BYTES = 16, SUMS = 16 };
#endif
typedef float floats __attribute__((vector_size(BYTES)));
typedef int32_t ints __attribute__((vector_size(BYTES)));

/* Define `name`, which returns operations a second in a loop of `duration` seconds. STEP adds products of a and b to `sum`. The
 * compiler must not see that a and the sums stay, or it would take work out of the loop. */
#define LOOP(name, type, start, operations, STEP)                                                    \
    double name(double duration) {                                                                   \
        type sums[SUMS] = {{0}}, a, b;                                                               \
        const int32_t bits = start;                                                                  \
        for (size_t i = 0; i < BYTES / 4; i++) memcpy((char *)&a + 4 * i, &bits, 4);                 \
        b = a;                                                                                       \
        double begin = now(), passed, rounds = 0;                                                    \
        do {                                                                                         \
            for (int i = 0; i < 4096; i++) _Pragma("GCC unroll 16") for (int s = 0; s < SUMS; s++) { \
                    type sum = sums[s];                                                              \
                    __asm__ volatile("" : "+" REGISTER(a), "+" REGISTER(b));                         \
                    STEP;                                                                            \
                    __asm__ volatile("" : "+" REGISTER(sum));                                        \
                    sums[s] = sum;                                                                   \
                }                                                                                    \
            rounds += 4096;                                                                          \
        } while ((passed = now() - begin) < duration);                                               \
        return rounds * SUMS * (operations) / passed;                                                \
    }
#define ONE 0x3f800000
#define TWO_ONES 0x3f803f80

LOOP(float32, floats, ONE, 2 * BYTES / 4, sum += a * b)
#if defined(__AVX512BF16__)
LOOP(bfloat16, floats, TWO_ONES, 2 * BYTES / 2, sum = (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b))
#endif
#if defined(__AVX512VNNI__)
LOOP(int16, ints, 0x10001, 2 * BYTES / 2, sum = (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b))
LOOP(int8, ints, 0x1010101, 2 * BYTES, sum = (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b))
#elif defined(__AVX512BW__)
LOOP(int16, ints, 0x10001, 2 * BYTES / 2, sum += (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b))
LOOP(int8, ints, 0x1010101, 2 * BYTES, sum = (ints)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)a, (__m512i)b)))
#elif defined(__AVX2__)
LOOP(int16, ints, 0x10001, 2 * BYTES / 2, sum += (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b))
LOOP(int8, ints, 0x1010101, 2 * BYTES, sum = (ints)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)a, (__m256i)b)))
#endif

#ifdef __AMX_TILE__
/* Four tiles of sums, 16 by 16; an instruction multiplies 16 rows of 64 bytes by 64 bytes of 16 columns. */
#define TILES(name, operations, MULTIPLY)                                                              \
    double name(double duration) {                                                                     \
        struct {                                                                                       \
            uint8_t palette, start, reserved[14];                                                      \
            uint16_t bytes[16];                                                                        \
            uint8_t rows[16];                                                                          \
        } config = {.palette = 1};                                                                     \
        if (syscall(SYS_arch_prctl, 0x1023, 18)) return 0; /* the system refuses tiles to a process */ \
        for (int t = 0; t < 8; t++) config.bytes[t] = 64, config.rows[t] = 16;                         \
        __asm__ volatile("" : "+m"(config)); /* GCC 12 believes that only 8 bytes are loaded */        \
        _tile_loadconfig(&config);                                                                     \
        _tile_zero(0);                                                                                 \
        _tile_zero(1);                                                                                 \
        _tile_zero(2);                                                                                 \
        _tile_zero(3);                                                                                 \
        _tile_zero(4);                                                                                 \
        _tile_zero(5);                                                                                 \
        _tile_zero(6);                                                                                 \
        _tile_zero(7);                                                                                 \
        double begin = now(), passed, rounds = 0;                                                      \
        do {                                                                                           \
            for (int i = 0; i < 1024; i++) {                                                           \
                MULTIPLY(0, 4, 6);                                                                     \
                MULTIPLY(1, 4, 7);                                                                     \
                MULTIPLY(2, 5, 6);                                                                     \
                MULTIPLY(3, 5, 7);                                                                     \
            }                                                                                          \
            rounds += 1024;                                                                            \
        } while ((passed = now() - begin) < duration);                                                 \
        _tile_release();                                                                               \
        return rounds * 4 * (operations) / passed;                                                     \
    }
#ifdef __AMX_BF16__
TILES(bfloat16_tiles, 2 * 16 * 16 * 32, _tile_dpbf16ps)
#endif
#ifdef __AMX_INT8__
TILES(int8_tiles, 2 * 16 * 16 * 64, _tile_dpbssd)
#endif
#endif
