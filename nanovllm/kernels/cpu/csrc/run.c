/* Runs calls of kernels on several threads: one call, or the recorded calls of a forward pass. calls.py writes them.
 */
#include "kernels.h"

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

static void run_call(team *t, const word *call, ptrdiff_t tokens, ptrdiff_t rows) {
    const word *a = call + 1;
#define TOKENS(argument) (tokens < 0 ? a[argument].n : tokens)
#define ROWS(argument) (rows < 0 ? a[argument].n : rows)
    switch (call->n) {
    case 0: nv_pack(t, a[0].p, a[1].p, a[2].n, a[3].n); break;
    case 1: nv_linear(t, a[0].p, a[1].n, a[2].p, a[3].p, a[4].p, TOKENS(5), a[6].n, a[7].n); break;
    case 2: nv_gather(t, a[0].p, a[1].p, a[2].p, TOKENS(3), a[4].n); break;
    case 3: nv_pack_int(t, a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].n, a[6].n, a[7].n, a[8].n, a[9].n); break;
    case 4:
        nv_linear_int(t, a[0].p, a[1].n, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, TOKENS(8), a[9].n, a[10].n, a[11].n,
                      a[12].n, a[13].n);
        break;
    case 5:
        nv_gather_int(t, a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, TOKENS(6), a[7].n, a[8].n, a[9].n, a[10].n);
        break;
    case 6: nv_add_rms_norm(t, a[0].p, a[1].p, a[2].p, a[3].p, TOKENS(4), a[5].n, (float)a[6].f, a[7].n, (float)a[8].f); break;
    case 7: nv_mul_act(t, a[0].p, a[1].n, a[2].n, a[3].p, a[4].n, a[5].p, a[6].n, TOKENS(7), a[8].n, a[9].n); break;
    case 8:
        nv_store(t, a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].p, a[9].n, a[10].n, TOKENS(11), a[12].n,
                 a[13].n, a[14].n, a[15].n, a[16].n, a[17].n, a[18].n, (float)a[19].f, a[20].n, a[21].n, a[22].n, a[23].n);
        break;
    case 9:
        nv_attention(t, a[0].p, a[1].p, a[2].p, a[3].n, a[4].n, a[5].p, a[6].n, a[7].p, a[8].p, a[9].p, ROWS(10),
                     a[11].n, a[12].n, a[13].n, a[14].n, a[15].n, a[16].n, (float)a[17].f, (float)a[18].f);
        break;
    case 10:
        nv_sample(t, a[0].p, a[1].n, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].p, a[9].p, a[10].p, a[11].p, a[12].n,
                  a[13].n, (float)a[14].f);
        break;
    case 11: nv_to_float(t, a[0].p, a[1].p, a[2].n); break;
    case 12: nv_forbid(t, a[0].p, a[1].p, a[2].p, a[3].n, a[4].n, a[5].n); break;
    case 13:
        nv_batch(t, a[0].p, a[1].n, a[2].n, a[3].p, a[4].n, a[5].n, a[6].p, a[7].p, a[8].p, a[9].p, a[10].p, a[11].p, a[12].n,
                 a[13].n, a[14].n, a[15].n, a[16].n, a[17].n, a[18].p, a[19].p);
        break;
    case 14: nv_ngram(t, a[0].p, a[1].n, a[2].p, a[3].n, a[4].n, a[5].n, a[6].p); break;
    case 15: nv_copy_rows(t, a[0].p, a[1].n, a[2].p, a[3].p, a[4].n, a[5].p, TOKENS(6), a[7].n); break;
    case 16:
        nv_route(t, a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, TOKENS(5), a[6].n, a[7].n, a[8].n, (float)a[9].f, a[10].n);
        break;
    case 17:
        nv_expert_gate_up(t, a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, TOKENS(7), a[8].n, a[9].n, a[10].n, a[11].n,
                          a[12].n, a[13].n, a[14].n, a[15].n, a[16].n);
        break;
    case 18:
        nv_expert_down(t, a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].p, TOKENS(9), a[10].n, a[11].n,
                       a[12].n, a[13].n, a[14].n, a[15].n, a[16].n);
        break;
    case 19: nv_rms_norm(t, a[0].p, a[1].n, a[2].p, a[3].p, a[4].n, TOKENS(5), a[6].n, (float)a[7].f, a[8].n); break;
    case 20: nv_scale(t, a[0].p, a[1].p, TOKENS(2), a[3].n, (float)a[4].f); break;
    case 21:
        nv_causal_conv(t, a[0].p, a[1].n, a[2].p, a[3].p, a[4].p, a[5].p, a[6].n, a[7].p, a[8].p, a[9].n, a[10].p, a[11].p,
                       ROWS(12), a[13].n, a[14].n, a[15].n);
        break;
    case 22:
        nv_gated_delta(t, a[0].p, a[1].p, a[2].n, a[3].p, a[4].n, a[5].p, a[6].p, a[7].p, a[8].p, a[9].n, a[10].p, a[11].p,
                       a[12].n, a[13].p, a[14].p, ROWS(15), a[16].n, a[17].n, a[18].n, a[19].n);
        break;
    case 23:
        nv_gated_rms_norm(t, a[0].p, a[1].n, a[2].p, a[3].n, a[4].p, a[5].p, TOKENS(6), a[7].n, a[8].n, (float)a[9].f);
        break;
    case 24:
        nv_add_lora(t, a[0].p, a[1].n, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].p, a[9].p, a[10].p, TOKENS(11),
                    a[12].n, a[13].n, a[14].n, a[15].n);
        break;
    }
}

static void run_calls(team *t, const void *argument) {
    const call_list *list = argument;
    for (ptrdiff_t i = 0; i < list->count; i++) run_call(t, list->calls[i], list->tokens, list->rows);
}

void nv_run(const void *calls, ptrdiff_t count, ptrdiff_t tokens, ptrdiff_t rows, ptrdiff_t threads) {
    run_threads(threads, run_calls, &(call_list){calls, count, tokens, rows});
}
