/* The CPU kernels, called through nv_run(): bfloat16 in and out, float32 inside. One source serves AVX-512, AVX2 and any other
 * processor.
 *
 * A packed weight [N, K] is [ceil(N/32)][K/2][32][2]: panels of 32 outputs, in which pairs of inputs lie side by side. In
 * bfloat16, zeros fill K up to a multiple of 32. No kernel combines rows of its input, so that the result for a row does not
 * depend on the batch, bit for bit.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "threads.h"

typedef uint16_t bf16;
enum { PANEL = 32 };

/* Return memory for free(), at a multiple of 64. If the system refuses it, stop the task and return NULL: then FOR_ITEMS computes
 * no item, and nv_run() returns `bytes`. So only code outside of FOR_ITEMS needs to look at the result. */
static inline void *scratch(size_t bytes) {
    void *memory = bytes < SIZE_MAX / 2 ? aligned_alloc(64, bytes / 64 * 64 + 64) : NULL;
    if (!memory) stop_task(bytes);
    return memory;
}

/* A kernel is a function nv_...(team *, ...). calls.py reads the types of its arguments where it is defined, and writes
 * run_call(). nv_run() can replace an argument of one of these types. */
typedef ptrdiff_t token_count, row_count;

/* A call is the number of a kernel and its arguments, each in a word. */
typedef union {
    void *p;
    ptrdiff_t n;
    double f;
} word;

enum { CALL_WORDS = 26 }; /* of the longest call, and so of every call */

/* Run a call. Unless they are -1, `tokens` and `rows` replace its arguments of these types. */
void run_call(team *t, const word *call, ptrdiff_t tokens, ptrdiff_t rows);
