/* Launches of kernels, and products of cuBLAS. They compute nothing; what they are launched with is checked. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define MOST_BLOCKS_X 2147483647u
#define MOST_BLOCKS_YZ 65535
#define MOST_THREADS 1024
#define MOST_THREADS_Z 64

static int is_right(dim3 grid, dim3 block, size_t shared_bytes) {
    if (!grid.x || grid.x > MOST_BLOCKS_X) return 0;
    if (!grid.y || grid.y > MOST_BLOCKS_YZ || !grid.z || grid.z > MOST_BLOCKS_YZ) return 0;
    if (!block.x || !block.y || !block.z || block.z > MOST_THREADS_Z) return 0;
    if ((uint64_t)block.x * block.y * block.z > MOST_THREADS) return 0;
    return shared_bytes <= SHARED_BYTES_OF_A_BLOCK;
}

static void add_kernel(cudaStream_t stream) {
    standin_count(standin_add_node(stream) ? COUNT_CAPTURED_KERNELS : COUNT_KERNELS);
}

static cudaError_t launch(const char *name, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
    if (!is_right(grid, block, shared_bytes)) {
        standin_violation(
            "launch beyond CUDA's limits", "%s: grid %u x %u x %u, block %u x %u x %u, %zu bytes", name,
            grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes
        );
        return cudaErrorInvalidConfiguration;
    }
    add_kernel(stream);
    return cudaSuccess;
}

/* --- kernels that nvcc compiled */

#define OF_TORCH "a kernel of torch"

/* Libraries announce their kernels when they are loaded; a kernel is the function that launches it. */
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *function) {}
void __cudaRegisterVar(void **handle, char *variable) {}

static __thread struct {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
} configuration; /* of the launch that this thread prepares */

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared_bytes = shared_bytes;
    configuration.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared_bytes = configuration.shared_bytes;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function) {
    *out = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream
) {
    return launch(OF_TORCH, grid, block, shared_bytes, stream);
}

cudaError_t cudaLaunchKernel(
    const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream
) {
    return launch(OF_TORCH, grid, block, shared_bytes, stream);
}

cudaError_t cudaLaunchCooperativeKernel(
    const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream
) {
    return launch(OF_TORCH, grid, block, shared_bytes, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *with, const void *function, void **arguments) {
    return launch(OF_TORCH, with->gridDim, with->blockDim, with->dynamicSmemBytes, with->stream);
}

/* --- kernels of Triton: a module is anything, and a function is its name */

CUresult cuModuleLoadData(CUmodule *out, const void *image) {
    *out = (CUmodule)malloc(1);
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    *out = (CUfunction)strdup(name);
    return CUDA_SUCCESS;
}

static CUresult launch_function(
    CUfunction function, dim3 grid, dim3 block, unsigned shared_bytes, CUstream stream
) {
    cudaError_t error = launch((const char *)function, grid, block, shared_bytes, (cudaStream_t)stream);
    return error ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *with, CUfunction function, void **arguments, void **extra) {
    dim3 grid = {with->gridDimX, with->gridDimY, with->gridDimZ};
    dim3 block = {with->blockDimX, with->blockDimY, with->blockDimZ};
    return launch_function(function, grid, block, with->sharedMemBytes, with->hStream);
}

CUresult cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
    unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **arguments, void **extra
) {
    dim3 grid = {grid_x, grid_y, grid_z};
    dim3 block = {block_x, block_y, block_z};
    return launch_function(function, grid, block, shared_bytes, stream);
}

/* --- products. Of their arguments only the handle, which knows the stream, and cuBLASLt's stream matter. */

struct handle {
    cudaStream_t stream;
};

int cublasCreate_v2(struct handle **out) {
    *out = calloc(1, sizeof **out);
    return 0;
}

int cublasDestroy_v2(struct handle *handle) {
    free(handle);
    return 0;
}

int cublasSetStream_v2(struct handle *handle, cudaStream_t stream) {
    handle->stream = stream;
    return 0;
}

int cublasGetMathMode(struct handle *handle, int *out) { return *out = 0; }
int cublasGetPointerMode_v2(struct handle *handle, int *out) { return *out = 0; }

static int multiply(struct handle *handle) {
    add_kernel(handle->stream);
    return 0;
}

int cublasGemmEx(struct handle *handle) { return multiply(handle); }
int cublasGemmStridedBatchedEx(struct handle *handle) { return multiply(handle); }
int cublasSgemm_v2(struct handle *handle) { return multiply(handle); }
int cublasSgemmStridedBatched(struct handle *handle) { return multiply(handle); }
int cublasDgemm_v2(struct handle *handle) { return multiply(handle); }
int cublasDgemmStridedBatched(struct handle *handle) { return multiply(handle); }

static int make(void **out) {
    *out = calloc(1, 64);
    return 0;
}

int cublasLtCreate(void **out) { return make(out); }
int cublasLtMatmulDescCreate(void **out) { return make(out); }
int cublasLtMatrixLayoutCreate(void **out) { return make(out); }
int cublasLtMatmulPreferenceCreate(void **out) { return make(out); }

int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int wanted,
    void *results, int *num_results
) {
    *num_results = 1;
    return 0;
}

int cublasLtMatmul(
    void *handle, void *product, void *alpha, void *a, void *a_layout, void *b, void *b_layout, void *beta,
    void *c, void *c_layout, void *d, void *d_layout, void *algorithm, void *workspace,
    size_t workspace_bytes, cudaStream_t stream
) {
    add_kernel(stream);
    return 0;
}
