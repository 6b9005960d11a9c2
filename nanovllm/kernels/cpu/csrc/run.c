/* Runs calls of kernels on several threads: one call, or the recorded calls of a forward pass. calls.py writes them. */
#include "kernels.h"

typedef struct {
    const word (*calls)[CALL_WORDS];
    ptrdiff_t count, tokens, rows;
} call_list;

static void run_calls(team *t, const void *argument) {
    const call_list *list = argument;
    for (ptrdiff_t i = 0; i < list->count && !task_stopped(); i++) run_call(t, list->calls[i], list->tokens, list->rows);
}

/* Run `count` calls on `threads` threads: for `tokens` tokens in `rows` rows, or, where these are -1, as the calls say.
 * Return 0, or the bytes of memory that the system refused; the outputs are then undefined. */
size_t nv_run(const void *calls, ptrdiff_t count, ptrdiff_t tokens, ptrdiff_t rows, ptrdiff_t threads) {
    return run_threads(threads, run_calls, &(call_list){calls, count, tokens, rows});
}
