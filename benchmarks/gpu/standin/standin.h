/* What the files of the stand-in share. They define CUDA's functions; NVIDIA's headers check the signatures. */
#pragma once

#include <stddef.h>
#include <cuda_runtime_api.h>
#include <cuda.h>

#define GPU_BYTES 85520809984ull          /* an H100 has 79.65 GiB */
#define GPU_BYTES_OF_CUDA 600000000ull    /* of these, what CUDA itself takes */
#define SHARED_BYTES_OF_A_BLOCK 232448    /* at most, with opt-in */

/* report.c: what is counted, and what is forbidden */
enum counter {
    COUNT_GRAPHS,
    COUNT_CAPTURED_KERNELS,
    COUNT_CAPTURED_COPIES,
    COUNT_REPLAYS,
    COUNT_KERNELS,
    COUNT_PAGEABLE_COPIES,
    COUNT_POOL_ALLOCATIONS,
    COUNTERS
};
void standin_count(enum counter counter);
void standin_violation(const char *kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
int standin_skip(int *noted, const char *name);

/* memory.c */
int standin_is_known(const void *address);

/* streams.c */
int standin_add_node(cudaStream_t stream);
void standin_synchronises(const char *name);
void standin_allocates(const char *name);

