/* Turns logits into token ids, each row with its own parameters; and what the rules on logits need: copies in float32, masks.
 * A row's logits are read in chunks. NaN counts as +inf, so the largest logit tells whether the logits are a distribution: it is
 * finite. No row depends on another.
 */
#include "vectors.h"

enum { CHUNK = 128, GROUP = 64 /* chunks of an item */, FEW = 256 /* chunks in which top_p is first looked for */ };

/* A row of logits and how to sample it. */
typedef struct {
    const char *logits; /* [n] bfloat16 or float32 */
    ptrdiff_t bits, n, chunks;
    float largest, temperature, min_p;
    float *maxima, *sums; /* [chunks]: of each chunk the largest logit and the sum of the weights */
} row;

/* Load a chunk of the row: -inf behind the end. */
INLINE void load_chunk(const row *r, ptrdiff_t chunk, ptrdiff_t bits, float x[CHUNK]) {
    const char *from = r->logits + chunk * CHUNK * bits / 8;
    ptrdiff_t count = r->n - chunk * CHUNK;
    for (int i = 0; i < CHUNK; i += VL) {
        ptrdiff_t left = count - i < 0 ? 0 : count - i;
        vf v = bits == 32 ? load_f32((const float *)from + i, left) : load_bf16((const bf16 *)from + i, left);
        if (left < VL) v = blend(lanes() < (int32_t)left, v, broadcast(-INFINITY));
        store(x + i, smaller(v, broadcast(INFINITY))); /* +inf if v is NaN */
    }
}

/* exp((x - largest) / temperature), 0 below min_p. */
INLINE vf weight_of(const row *r, vf x) {
    vf w = exp_((x - broadcast(r->largest)) / broadcast(r->temperature));
    return blend(w >= r->min_p, w, (vf){0});
}

INLINE float max_of_chunk(const row *r, ptrdiff_t chunk, ptrdiff_t bits) {
    float x[CHUNK];
    load_chunk(r, chunk, bits, x);
    vf top = broadcast(-INFINITY);
    for (int i = 0; i < CHUNK; i += VL) top = larger(top, load(x + i));
    return largest_of(top);
}

/* Load a chunk and write its weights: 0 below the threshold. Return their sum. */
INLINE float weigh_chunk(const row *r, ptrdiff_t chunk, ptrdiff_t bits, float threshold, float weights[CHUNK]) {
    vf sum = {0};
    load_chunk(r, chunk, bits, weights);
    for (int i = 0; i < CHUNK; i += VL) {
        vf x = load(weights + i), w = blend(x >= threshold, weight_of(r, x), (vf){0});
        store(weights + i, w);
        sum += w;
    }
    return sum_of(sum);
}

static float largest_in(const float *x, ptrdiff_t n) {
    float best = -INFINITY;
    for (ptrdiff_t i = 0; i < n; i++) best = x[i] > best ? x[i] : best;
    return best;
}

/* Copy the logits that are at least `least`; return their number. */
static ptrdiff_t collect(const row *r, float least, float *out) {
    ptrdiff_t count = 0;
    float x[CHUNK];
    for (ptrdiff_t c = 0; c < r->chunks; c++) {
        if (r->maxima[c] < least) continue;
        load_chunk(r, c, r->bits, x);
        ptrdiff_t left = r->n - c * CHUNK;
        for (ptrdiff_t i = 0; i < CHUNK && i < left; i++) {
            out[count] = x[i];
            count += x[i] >= least;
        }
    }
    return count;
}

/* The number of x, or the sum of their weights if `r` is given. */
static double measure(const float *x, ptrdiff_t n, const row *r) {
    double sum = 0;
    if (!r) return (double)n;
    for (ptrdiff_t i = 0; i < n; i += VL)
        sum += sum_of(blend(lanes() < (int32_t)(n - i < VL ? n - i : VL), weight_of(r, load_f32(x + i, n - i)), (vf){0}));
    return sum;
}

static void swap(float *a, float *b) {
    float x = *a;
    *a = *b, *b = x;
}

/* Return the largest of x[n] such that it and those above measure `share` or more; the smallest if all measure less. Reorders x.
 * Quickselect (Hoare, 1961) with three parts, because many logits are equal. */
static float select_from(float *x, ptrdiff_t n, double share, const row *r) {
    for (;;) {
        float a = x[0], b = x[n / 2], c = x[n - 1];
        float pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
        ptrdiff_t above = 0, i = 0, below = n;
        while (i < below) {
            if (x[i] > pivot) swap(&x[above++], &x[i++]);
            else if (x[i] < pivot) swap(&x[i], &x[--below]);
            else i++;
        }
        double larger_ones = measure(x, above, r), up_to_pivot = larger_ones + measure(x + above, below - above, r);
        if (above && larger_ones >= share) {
            n = above;
        } else if (below == n || up_to_pivot >= share) {
            return pivot;
        } else {
            share -= up_to_pivot;
            x += below, n -= below;
        }
    }
}

/* Return the smallest logit that top_k and top_p keep; equal ones are kept too. For a row that keeps all by top_k, `sums` are
 * there. The `wanted` largest logits are at least the wanted-th of the chunks' largest, so that few need be looked at. */
static float threshold_of(const row *r, int64_t top_k, float top_p, float *scratch) {
    double whole = 0;
    int by_count = top_k < r->n;
    if (!by_count)
        for (ptrdiff_t c = 0; c < r->chunks; c++) whole += r->sums[c];
    for (ptrdiff_t wanted = by_count ? top_k : FEW;; wanted = r->chunks) {
        float least = -INFINITY;
        if (wanted < r->chunks) {
            memcpy(scratch, r->maxima, r->chunks * sizeof *scratch);
            least = select_from(scratch, r->chunks, wanted, NULL);
        }
        ptrdiff_t count = collect(r, least, scratch);
        if (by_count) {
            least = select_from(scratch, count, top_k, NULL);
            if (top_p >= 1) return least;
            count = collect(r, least, scratch);
            whole = measure(scratch, count, r);
        } else if (wanted < r->chunks && measure(scratch, count, r) < top_p * whole) {
            continue;
        }
        return select_from(scratch, count, top_p * whole, r);
    }
}

/* Return the first i at which the sum of w[0..i] exceeds `target`, the last with a weight if none does. *before: the sum of those
 * before i. */
static ptrdiff_t invert(const float *w, ptrdiff_t n, double target, double *before) {
    double sum = 0;
    ptrdiff_t found = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        if (!(w[i] > 0)) continue;
        *before = sum, found = i;
        sum += w[i];
        if (sum > target) break;
    }
    return found;
}

/* SplitMix64 (Steele, Lea and Flood, 2014). */
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}
/* A number in [0, 1) for a seed and a position. */
static double uniform(int64_t seed, int64_t position) {
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    return (mix(mix((uint64_t)seed + golden) + ((uint64_t)position + 1) * golden) >> 11) * 0x1p-53;
}

/* Return the token at which the cumulative sum of the weights exceeds the share `number` of it all. Only logits from `threshold`
 * on have a weight, if the row is filtered; else `sums` are there. */
static int64_t draw(const row *r, int filtered, float threshold, double number) {
    float weights[CHUNK];
    double total = 0, before = 0;
    if (filtered)
        for (ptrdiff_t c = 0; c < r->chunks; c++)
            r->sums[c] = r->maxima[c] < threshold ? 0 : weigh_chunk(r, c, r->bits, threshold, weights);
    for (ptrdiff_t c = 0; c < r->chunks; c++) total += r->sums[c];
    ptrdiff_t chunk = invert(r->sums, r->chunks, number * total, &before);
    double share = (number * total - before) / r->sums[chunk], inner = 0;
    weigh_chunk(r, chunk, r->bits, threshold, weights);
    for (int i = 0; i < CHUNK; i++) inner += weights[i];
    return chunk * CHUNK + invert(weights, CHUNK, (share > 0 ? share : 0) * inner, &before);
}

static int64_t first_largest(const row *r) {
    float x[CHUNK];
    ptrdiff_t chunk = 0, i = 0;
    while (r->maxima[chunk] != r->largest) chunk++;
    load_chunk(r, chunk, r->bits, x);
    while (x[i] != r->largest) i++;
    return chunk * CHUNK + i;
}

/* out[row] = the row's next token, -1 if its logits are no distribution. logits: [rows][n], of `bits` bits. Without temperatures
 * all rows are greedy, as are those with a temperature below `coldest`. maxima, sums: [rows][ceil(n / CHUNK)]. scratch:
 * [rows][n], if a row may have top_k or top_p. */
void nv_sample(team *t, const void *logits, ptrdiff_t bits, const float *temperatures, const int64_t *seeds,
               const int64_t *positions, const int64_t *top_ks, const float *top_ps, const float *min_ps, float *maxima,
               float *sums, float *scratch, int64_t *out, ptrdiff_t rows, ptrdiff_t n, float coldest) {
    ptrdiff_t chunks = (n + CHUNK - 1) / CHUNK, groups = (chunks + GROUP - 1) / GROUP;
#define ROW(i)                                                                                                \
    ((row){(const char *)logits + (i) * n * bits / 8, bits, n, chunks, 0, temperatures ? temperatures[i] : 0, \
           min_ps ? min_ps[i] : 0, maxima + (i) * chunks, sums + (i) * chunks})
    FOR_ITEMS(item, t, rows * groups) {
        row r = ROW(item / groups);
        ptrdiff_t first = item % groups * GROUP, last = first + GROUP < chunks ? first + GROUP : chunks;
        for (ptrdiff_t c = first; c < last; c++) r.maxima[c] = bits == 32 ? max_of_chunk(&r, c, 32) : max_of_chunk(&r, c, 16);
    }
    FOR_ITEMS(item, t, temperatures ? rows * groups : 0) {
        row r = ROW(item / groups);
        if (r.temperature < coldest || top_ks[item / groups] < n) continue;
        float weights[CHUNK];
        ptrdiff_t first = item % groups * GROUP, last = first + GROUP < chunks ? first + GROUP : chunks;
        r.largest = largest_in(r.maxima, chunks);
        for (ptrdiff_t c = first; c < last; c++)
            r.sums[c] = bits == 32 ? weigh_chunk(&r, c, 32, -INFINITY, weights) : weigh_chunk(&r, c, 16, -INFINITY, weights);
    }
    FOR_ITEMS(i, t, rows) {
        row r = ROW(i);
        r.largest = largest_in(r.maxima, chunks);
        if (!isfinite(r.largest)) {
            out[i] = -1;
        } else if (!temperatures || r.temperature < coldest) {
            out[i] = first_largest(&r);
        } else {
            int filtered = top_ks[i] < n || top_ps[i] < 1;
            float threshold = filtered ? threshold_of(&r, top_ks[i], top_ps[i], scratch + i * n) : -INFINITY;
            out[i] = draw(&r, filtered, threshold, uniform(seeds[i], positions[i]));
        }
    }
#undef ROW
}

/* Copy bfloat16 to float32. */
void nv_to_float(team *t, const bf16 *x, float *y, ptrdiff_t n) {
    enum { PART = 8192 };
    FOR_ITEMS(item, t, (n + PART - 1) / PART) {
        ptrdiff_t last = (item + 1) * PART < n ? (item + 1) * PART : n;
        for (ptrdiff_t i = item * PART; i < last; i += VL) store_f32(y + i, last - i, load_bf16(x + i, last - i));
    }
}

/* Set logits to -inf where a mask has a 0. Mask i is of row rows[i] of logits [][n]: a bit for each token, the lowest first. */
void nv_forbid(team *t, float *logits, const int64_t *rows, const uint8_t *masks, ptrdiff_t num_masks, ptrdiff_t mask_bytes,
               ptrdiff_t n) {
    enum { PART = 8192 };
    ptrdiff_t parts = (n + PART - 1) / PART;
    FOR_ITEMS(item, t, num_masks * parts) {
        const uint8_t *mask = masks + item / parts * mask_bytes;
        float *x = logits + rows[item / parts] * n;
        ptrdiff_t first = item % parts * PART, last = first + PART < n ? first + PART : n;
        ptrdiff_t i = first;
        for (; i + VL <= last; i += VL) {
            int32_t bits = VL == 16 ? mask[i / 8] | mask[i / 8 + 1] << 8 : mask[i / 8] >> i % 8;
            vi allowed = ((((vi){0} + bits) >> lanes()) & 1) != 0;
            store(x + i, blend(allowed, load(x + i), broadcast(-INFINITY)));
        }
        for (; i < last; i++) x[i] = mask[i / 8] >> i % 8 & 1 ? x[i] : -INFINITY;
    }
}
