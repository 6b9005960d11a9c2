/* Rounds bfloat16 weights to 8 or 4 bits and packs them, while they are loaded. Layouts: see int_weights.h.
 *
 * The numbers are those of quantize() in features/quantization/integer.py, bit for bit. It divides by the scale; here its inverse
 * multiplies, and the product is first rounded to a multiple of 2^-13. That changes nothing: weights have 8 bits and scales 11,
 * so a quotient within the range either lies halfway between two integers or is at least 2^-12 from there, and the product is off
 * by less than 2^-15.
 */
#include "int_weights.h"

enum { INFINITE = 0x7f80 }; /* in bfloat16; NaN is larger */
#define SNAP 1536.0f        /* 1.5 * 2^10: the sum of this and a number below 2^9 is a multiple of 2^-13 */

/* The largest |number| of a group as bits of bfloat16, in each lane, and whether only a positive number has it. */
typedef struct {
    vi bits, positive;
} group_top;

/* From the largest bits of the even and the odd inputs, compared as int16 in `high` and as uint16 in `low`. */
INLINE group_top top_of(const int16_t *high, const uint16_t *low) {
    vi h = *(const vi *)high, l = *(const vi *)low;
    vi most = larger_int(h & 0xffff, h >> 16), least = larger_int(l & 0xffff, (l >> 16) & 0xffff);
    least = (least & 0x7fff) | (least < 0x8000); /* -1 if no number is negative */
    return (group_top){larger_int(most, least), most > least};
}

/* The integer nearest to v * inverse, within the range of `bits`; for 4 bits plus 8. Its last `bits` alone. */
INLINE vu rounded(vf v, vf inverse, int bits) {
    const float half = bits == 8 ? 128 : 8;
    vf q = fma_(v, inverse, broadcast(SNAP));
    q = smaller(larger(q, broadcast(SNAP - half)), broadcast(SNAP + half - 1));
    return (vu)(q + (ROUND_TO_INT - SNAP + (bits == 8 ? 0 : half))) & (bits == 8 ? 0xff : 15);
}

/* The integers of two inputs as bytes in the low half of each lane; 0 where nothing is `usable`. */
INLINE vu rounded_pairs(const bf16 *w, vi usable, vf inverse, int bits) {
    vi pairs = *(const vi *)w & usable;
    return rounded((vf)(pairs << 16), inverse, bits) | rounded((vf)(pairs & ~0xffff), inverse, bits) << 8;
}

/* Round w[group/2][32][2] into a panel, from `out` and `scales` on. */
INLINE void round_group(const bf16 *w, ptrdiff_t group, int bits, int kind, uint8_t *out, uint16_t *scales) {
    int16_t high[2 * PANEL] __attribute__((aligned(64))) = {0};
    uint16_t low[2 * PANEL] __attribute__((aligned(64))) = {0};
    for (ptrdiff_t i = 0; i < group / 2; i++)
        for (int c = 0; c < 2 * PANEL; c++) {
            uint16_t number = w[i * 2 * PANEL + c];
            high[c] = (int16_t)number > high[c] ? (int16_t)number : high[c];
            low[c] = number > low[c] ? number : low[c];
        }
    for (ptrdiff_t c = 0; c < PANEL; c += VL) {
        group_top top = top_of(high + 2 * c, low + 2 * c);
        vf size = (vf)(top.bits << 16), scale = bits == 8 ? size / 127.0f : size / 8.0f;
        vi finite = top.bits < INFINITE;
        scale = blend(finite, smaller(scale, broadcast(65504.0f)), scale);
        if (bits == 4) scale = (vf)((vi)scale | (top.positive & INT32_MIN)); /* -8 stands for the largest */
        half_vu half = to_f16(scale);
        *(half_vu *)(scales + c) = half;
        scale = from_f16(half);
        vi usable = finite & (scale != 0.0f); /* otherwise all integers are 0 */
        vf inverse = blend(usable, 1.0f / scale, (vf){0});
#define PAIRS(i) rounded_pairs(w + (i) * PANEL + c * 2, usable, inverse, bits)
        if (bits == 4)
            for (ptrdiff_t i = 0; i < group; i += 8)
                *(vu *)(out + offset4(i, c)) = PAIRS(i) | PAIRS(i + 2) << 16 | (PAIRS(i + 4) | PAIRS(i + 6) << 16) << 4;
        else if (in_fours(kind))
            for (ptrdiff_t i = 0; i < group; i += 4)
                *(vu *)(out + offset8(i, c, kind)) = (PAIRS(i) | PAIRS(i + 2) << 16) ^ stored_flip(kind) * 0x01010101u;
        else
            for (ptrdiff_t i = 0; i < group; i += 2)
                *(half_vu *)(out + offset8(i, c, kind)) = __builtin_convertvector(PAIRS(i), half_vu);
    }
}

/* Round w[n][k] to `bits`, and pack it; `kind` is PLAIN or W8A8. Zeros fill the last panel. */
void nv_pack_rounded(team *t, const bf16 *w, uint8_t *packed, uint16_t *packed_scales, ptrdiff_t n, ptrdiff_t k, ptrdiff_t group,
                     ptrdiff_t bits, ptrdiff_t kind) {
    bf16 turned[K_STEP * PANEL] __attribute__((aligned(64)));
    FOR_ITEMS(p, t, (n + PANEL - 1) / PANEL) {
        ptrdiff_t first = p * PANEL, count = n - first < PANEL ? n - first : PANEL;
        for (ptrdiff_t i = 0; i < k; i += group) {
            uint8_t *out = packed + (first * k + i * PANEL) * bits / 8;
            uint16_t *scales = packed_scales + (first * k + i * PANEL) / group;
            turn_panel(w + first * k + i, k, count, group, turned);
            if (bits == 4) round_group(turned, group, 4, PLAIN, out, scales);
            else if (kind == W8A8) round_group(turned, group, 8, W8A8, out, scales);
            else round_group(turned, group, 8, PLAIN, out, scales);
        }
    }
}
