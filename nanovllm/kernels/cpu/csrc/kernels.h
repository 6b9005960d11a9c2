/* The CPU kernels, called through nv_run(): bfloat16 in and out, float32 inside. One source serves AVX-512, AVX2 and any other
 * processor.
 *
 * A packed weight [N, K] is [ceil(N/32)][K/2][32][2]: panels of 32 outputs, in which pairs of inputs lie side by side. No kernel
 * combines rows of its input, so that the result for a row does not depend on the batch, bit for bit.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "threads.h"

typedef uint16_t bf16;
enum { PANEL = 32 };

/* calls.py reads the declarations of the kernels. nv_run() can replace a number of one of these types. */
typedef ptrdiff_t token_count, row_count;

/* linear.c */
int nv_enable(void);
void nv_pack(team *t, const bf16 *w, bf16 *packed, ptrdiff_t n, ptrdiff_t k);
void nv_linear(team *t, const bf16 *x, ptrdiff_t ldx, const bf16 *packed, const bf16 *bias, bf16 *y, token_count m, ptrdiff_t n,
               ptrdiff_t k);
void nv_gather(team *t, const int64_t *ids, const bf16 *packed, bf16 *y, token_count tokens, ptrdiff_t k);

/* linear_int.c */
void nv_pack_int(team *t, const int8_t *q, const uint16_t *scales, const uint16_t *more, uint8_t *packed, uint16_t *packed_scales,
                 ptrdiff_t n, ptrdiff_t k, ptrdiff_t source, ptrdiff_t group, ptrdiff_t bits);
void nv_linear_int(team *t, const bf16 *x, ptrdiff_t ldx, const uint8_t *packed, const uint16_t *scales, const float *factors,
                   const int32_t *inputs, const bf16 *bias, bf16 *y, token_count m, ptrdiff_t n, ptrdiff_t k, ptrdiff_t group,
                   ptrdiff_t bits, ptrdiff_t kind);
void nv_gather_int(team *t, const int64_t *ids, const uint8_t *packed, const uint16_t *scales, const float *factors,
                   const int32_t *inputs, bf16 *y, token_count tokens, ptrdiff_t k, ptrdiff_t group, ptrdiff_t bits, ptrdiff_t kind);

/* experts.c */
void nv_route(team *t, const bf16 *logits, const bf16 *scales, const float *bias, int32_t *ids, float *weights, token_count tokens,
              ptrdiff_t experts, ptrdiff_t top, ptrdiff_t renormalize, float factor, ptrdiff_t sigmoid);
void nv_expert_gate_up(team *t, const bf16 *x, const int32_t *ids, const void *packed, const uint16_t *scales,
                       const float *factors, const bf16 *bias, bf16 *hidden, token_count tokens, ptrdiff_t experts, ptrdiff_t top,
                       ptrdiff_t n, ptrdiff_t k, ptrdiff_t group, ptrdiff_t bits, ptrdiff_t kind, ptrdiff_t activation,
                       ptrdiff_t interleaved);
void nv_expert_down(team *t, const bf16 *hidden, const int32_t *ids, const float *weights, const void *packed, const uint16_t *scales,
                    const float *factors, const bf16 *bias, char *buffer, bf16 *y, token_count tokens, ptrdiff_t experts,
                    ptrdiff_t top, ptrdiff_t n, ptrdiff_t k, ptrdiff_t group, ptrdiff_t bits, ptrdiff_t kind);

/* lora.c */
void nv_add_lora(team *t, const bf16 *x, ptrdiff_t ldx, bf16 *y, const bf16 *a, const bf16 *b, const int32_t *ranks,
                 const float *scales, const int32_t *ends, const int32_t *groups, const int32_t *order, float *scratch,
                 token_count tokens, ptrdiff_t n, ptrdiff_t k, ptrdiff_t slices, ptrdiff_t max_rank);

/* elementwise.c */
void nv_add_rms_norm(team *t, const bf16 *x, bf16 *residual, const bf16 *weight, bf16 *out, token_count rows, ptrdiff_t n, float eps,
                     ptrdiff_t kind, float multiplier);
void nv_rms_norm(team *t, const bf16 *x, ptrdiff_t ldx, const bf16 *weight, bf16 *out, ptrdiff_t ldo, token_count rows, ptrdiff_t n,
                 float eps, ptrdiff_t kind);
void nv_mul_act(team *t, const bf16 *gate, ptrdiff_t ldg, ptrdiff_t step, const bf16 *x, ptrdiff_t ldx, bf16 *out, ptrdiff_t ldo,
                token_count rows, ptrdiff_t n, ptrdiff_t activation);
void nv_scale(team *t, bf16 *x, const bf16 *number, token_count rows, ptrdiff_t n, float factor);
void nv_copy_rows(team *t, const bf16 *x, ptrdiff_t ldx, const int64_t *x_rows, bf16 *y, ptrdiff_t ldy,
                  const int64_t *y_rows, token_count rows, ptrdiff_t n);

/* store.c */
void nv_store(team *team, const bf16 *qkv, const bf16 *q_weight, const bf16 *k_weight, const float *cos_sin, const float *q_scale,
              const int64_t *positions, const int64_t *slot_mapping, bf16 *q_out, uint8_t *cache, ptrdiff_t head_bytes,
              ptrdiff_t block_bytes, token_count tokens, ptrdiff_t heads, ptrdiff_t kv_heads, ptrdiff_t kv_parts, ptrdiff_t dim,
              ptrdiff_t rotary, ptrdiff_t block, ptrdiff_t bits, float eps, ptrdiff_t norm, ptrdiff_t after_rotation,
              ptrdiff_t interleaved, ptrdiff_t v_norm);

/* attention.c */
void nv_attention(team *t, const bf16 *q, bf16 *out, const uint8_t *cache, ptrdiff_t head_bytes, ptrdiff_t block_bytes,
                  const int32_t *block_tables, ptrdiff_t table_width, const int32_t *cu_seqlens, const int32_t *seq_lens,
                  const float *sinks, row_count num_rows, ptrdiff_t heads, ptrdiff_t kv_heads, ptrdiff_t dim, ptrdiff_t block,
                  ptrdiff_t bits, ptrdiff_t window, float scale, float softcap);

/* state.c */
void nv_causal_conv(team *t, const bf16 *x, ptrdiff_t ldx, const bf16 *weight, const bf16 *bias, bf16 *out, uint8_t *pool,
                    ptrdiff_t page_bytes, const int64_t *places, const int32_t *pages, ptrdiff_t num_pages,
                    const int32_t *cu_seqlens, const int32_t *write_lens, row_count rows, ptrdiff_t n, ptrdiff_t taps,
                    ptrdiff_t silu);
void nv_gated_rms_norm(team *t, const bf16 *x, ptrdiff_t ldx, const bf16 *gate, ptrdiff_t ldg, const bf16 *weight, bf16 *out,
                       token_count tokens, ptrdiff_t heads, ptrdiff_t n, float eps);

/* gated_delta.c */
void nv_gated_delta(team *t, const bf16 *qkv, const bf16 *a, ptrdiff_t lda, const bf16 *b, ptrdiff_t ldb, const float *a_log,
                    const float *dt_bias, bf16 *out, uint8_t *pool, ptrdiff_t page_bytes, const int64_t *places,
                    const int32_t *pages, ptrdiff_t num_pages, const int32_t *cu_seqlens, const int32_t *write_lens,
                    row_count rows, ptrdiff_t key_heads, ptrdiff_t value_heads, ptrdiff_t dk, ptrdiff_t dv);

/* sampling.c */
void nv_sample(team *t, const void *logits, ptrdiff_t bits, const float *temperatures, const int64_t *seeds,
               const int64_t *positions, const int64_t *top_ks, const float *top_ps, const float *min_ps, float *maxima,
               float *sums, float *scratch, int64_t *out, ptrdiff_t rows, ptrdiff_t n, float coldest);
void nv_to_float(team *t, const bf16 *x, float *y, ptrdiff_t n);
void nv_forbid(team *t, float *logits, const int64_t *rows, const uint8_t *masks, ptrdiff_t num_masks, ptrdiff_t mask_bytes,
               ptrdiff_t n);

/* batch.c */
void nv_batch(team *t, const int32_t *table, ptrdiff_t stride, ptrdiff_t columns, const int64_t *rows, ptrdiff_t num_rows,
              ptrdiff_t block, int64_t *input_ids, int64_t *positions, int64_t *slot_mapping, int32_t *cu_seqlens,
              int32_t *seq_lens, int32_t *block_tables, ptrdiff_t width, ptrdiff_t num_tables, ptrdiff_t slots_apart,
              ptrdiff_t blocks_apart, ptrdiff_t first_page, ptrdiff_t num_pages, int32_t *pages, int32_t *write_lens);

/* ngram.c */
void nv_ngram(team *t, int32_t *table, ptrdiff_t stride, const int64_t *rows, ptrdiff_t num_rows, ptrdiff_t smallest,
              ptrdiff_t largest, int64_t *counts);

/* run.c */

/* Run `count` calls on `threads` threads: for `tokens` tokens in `rows` rows, or, where these are -1, as the calls say. */
void nv_run(const void *calls, ptrdiff_t count, ptrdiff_t tokens, ptrdiff_t rows, ptrdiff_t threads);
