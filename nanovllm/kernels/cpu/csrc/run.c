/* Runs calls of kernels on several threads: one call, or the recorded calls of a forward pass. calls.py writes them, and the macros
 * DECLARATIONS and CASES: the kernels, and how each is called.
 */
#include "kernels.h"

DECLARATIONS

/* A call is the number of a kernel and its arguments, each in a word. */
typedef union {
    void *p;
    ptrdiff_t n;
    double f;
} word;

enum { CALL_WORDS = 26 }; /* of the longest call, and so of every call */

typedef struct {
    const word (*calls)[CALL_WORDS];
    ptrdiff_t count, tokens, rows;
} call_list;

/* The argument in word i of a call, by its kind. */
#define P(i) a[i].p
#define N(i) a[i].n
#define F(i) (float)a[i].f
#define T(i) (tokens < 0 ? a[i].n : tokens)
#define R(i) (rows < 0 ? a[i].n : rows)

static void run_call(team *t, const word *call, ptrdiff_t tokens, ptrdiff_t rows) {
    const word *a = call + 1;
    switch (call->n) { CASES }
}

static void run_calls(team *t, const void *argument) {
    const call_list *list = argument;
    for (ptrdiff_t i = 0; i < list->count && !task_stopped(); i++) run_call(t, list->calls[i], list->tokens, list->rows);
}

/* Run `count` calls on `threads` threads: for `tokens` tokens in `rows` rows, or, where these are -1, as the calls say.
 * Return 0, or the bytes of memory that the system refused; the outputs are then undefined. */
size_t nv_run(const void *calls, ptrdiff_t count, ptrdiff_t tokens, ptrdiff_t rows, ptrdiff_t threads) {
    return run_threads(threads, run_calls, &(call_list){calls, count, tokens, rows});
}
