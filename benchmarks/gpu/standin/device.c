/* What the GPU and CUDA are: an H100 with CUDA 13. Other functions of CUDA are in rest.c, which `build` writes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "standin.h"

#define VERSION 13000
#define PROCESSORS 132

static const struct {
    int attribute, value;
} attributes[] = {
    {cudaDevAttrMaxGridDimX, 2147483647},
    {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535},
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, SHARED_BYTES_OF_A_BLOCK},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
    {cudaDevAttrMaxRegistersPerBlock, 65536},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMultiProcessorCount, PROCESSORS},
    {cudaDevAttrComputeCapabilityMajor, 9},
    {cudaDevAttrComputeCapabilityMinor, 0},
};

/* --- the runtime */

cudaError_t cudaGetDeviceCount(int *out) {
    *out = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *out) {
    *out = 0;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *out) {
    *out = VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *out) { return cudaDriverGetVersion(out); }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    *out = (struct cudaDeviceProp){
        .name = "stand-in for an H100",
        .totalGlobalMem = GPU_BYTES,
        .major = 9,
        .multiProcessorCount = PROCESSORS,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .sharedMemPerBlock = 49152,
        .sharedMemPerBlockOptin = SHARED_BYTES_OF_A_BLOCK,
        .sharedMemPerMultiprocessor = 233472,
        .reservedSharedMemPerBlock = 1024,
        .l2CacheSize = 50 << 20,
        .memoryBusWidth = 5120,
        .totalConstMem = 65536,
        .textureAlignment = 512,
        .unifiedAddressing = 1,
        .concurrentKernels = 1,
        .asyncEngineCount = 3,
    };
    return cudaSuccess;
}

/* An attribute that is not in the table is 1: most of them say whether the GPU has something. */
cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device) {
    *out = 1;
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (attributes[i].attribute == (int)attribute) *out = attributes[i].value;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device) {
    snprintf(out, size, "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *out, int device, int peer) {
    *out = 0;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *out, const void *function, int block, size_t shared_bytes, unsigned flags
) {
    *out = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *out, const void *function, int block, size_t shared_bytes
) {
    *out = 2;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    *out = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 64, .binaryVersion = 90, .ptxVersion = 90
    };
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) { return "refused by the stand-in for CUDA"; }
const char *cudaGetErrorName(cudaError_t error) { return "standinError"; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }

/* All variables of kernels share one place, which nothing reads. */
cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
    static void *place;
    if (!place) cudaMalloc(&place, 1 << 16);
    *out = place;
    return cudaSuccess;
}

/* --- the driver */

static int nothing(void) { return 0; }

static void *function_named(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    return found ? found : (void *)nothing;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **out, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result
) {
    *out = function_named(name);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

CUresult cuGetProcAddress(
    const char *name, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *result
) {
    *out = function_named(name);
    if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}

static int context; /* its address is the only context */

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *out) { return (CUresult)cudaDriverGetVersion(out); }
CUresult cuDeviceGetCount(int *out) { return (CUresult)cudaGetDeviceCount(out); }
CUresult cuDeviceGet(CUdevice *out, int number) { return (CUresult)cudaGetDevice(out); }

CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(out, (enum cudaDeviceAttr)attribute, device);
}

CUresult cuCtxGetCurrent(CUcontext *out) {
    *out = (CUcontext)&context;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) { return cuCtxGetCurrent(out); }
CUresult cuCtxSetCurrent(CUcontext new_context) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *out, CUlimit limit) {
    *out = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuFuncGetAttribute(int *out, CUfunction_attribute attribute, CUfunction function) {
    *out = 0;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) *out = 1024;
    if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS) *out = 64;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return 0; }

CUresult cuOccupancyMaxActiveClusters(int *out, CUfunction function, const CUlaunchConfig *config) {
    *out = 8;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **out) {
    *out = "refused by the stand-in for CUDA";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **out) {
    *out = "standinError";
    return CUDA_SUCCESS;
}
