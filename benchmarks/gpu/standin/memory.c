/* Memory, copies and fills. The GPU's memory is the host's: pages that nobody writes take no room. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "standin.h"

#define PAGE 4096
#define MOST_SPANS 65536
#define LARGEST_COPY (256ull << 20) /* Larger ones within the GPU are not made: kernels compute nothing. */

enum kind { DEVICE, PINNED, REGISTERED };

struct span {
    char *start;
    size_t size;
    enum kind kind;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct span spans[MOST_SPANS]; /* sorted by address; `lock` guards all three */
static int num_spans;
static size_t device_bytes;

/* How many spans begin at or before `address`. */
static int spans_until(const void *address) {
    int low = 0, high = num_spans;
    while (low < high) {
        int middle = (low + high) / 2;
        if (spans[middle].start <= (const char *)address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The span with `address` in it, or NULL. */
static struct span *span_of(const void *address) {
    int until = spans_until(address);
    struct span *span = until ? &spans[until - 1] : NULL;
    return span && (const char *)address < span->start + span->size ? span : NULL;
}

static int add_span(char *start, size_t size, enum kind kind) {
    pthread_mutex_lock(&lock);
    int fits = num_spans < MOST_SPANS;
    if (kind == DEVICE && device_bytes + size > GPU_BYTES - GPU_BYTES_OF_CUDA) fits = 0;
    if (fits) {
        int at = spans_until(start);
        memmove(spans + at + 1, spans + at, (num_spans - at) * sizeof *spans);
        spans[at] = (struct span){start, size, kind};
        num_spans++;
        if (kind == DEVICE) device_bytes += size;
    }
    pthread_mutex_unlock(&lock);
    return fits;
}

static void remove_span(void *start) {
    pthread_mutex_lock(&lock);
    struct span *span = span_of(start);
    if (span) {
        if (span->kind == DEVICE) device_bytes -= span->size;
        if (span->kind != REGISTERED) munmap(span->start, span->size);
        memmove(span, span + 1, (spans + num_spans - span - 1) * sizeof *spans);
        num_spans--;
    }
    pthread_mutex_unlock(&lock);
}

static int has_kind(const void *address, enum kind kind) {
    pthread_mutex_lock(&lock);
    struct span *span = span_of(address);
    int found = span && span->kind == kind;
    pthread_mutex_unlock(&lock);
    return found;
}

int standin_is_known(const void *address) {
    pthread_mutex_lock(&lock);
    int found = span_of(address) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

static cudaError_t allocate(void **out, size_t size, enum kind kind) {
    size = size ? (size + PAGE - 1) / PAGE * PAGE : PAGE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (start == MAP_FAILED) return cudaErrorMemoryAllocation;
    if (!add_span(start, size, kind)) {
        munmap(start, size);
        return cudaErrorMemoryAllocation;
    }
    *out = start;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t size) {
    standin_allocates("cudaMalloc");
    return allocate(out, size, DEVICE);
}

cudaError_t cudaFree(void *start) {
    if (start) standin_allocates("cudaFree");
    remove_span(start);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream) {
    if (standin_add_node(stream)) standin_count(COUNT_POOL_ALLOCATIONS);
    return allocate(out, size, DEVICE);
}

cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) {
    remove_span(start);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) {
    standin_allocates("cudaHostAlloc");
    return allocate(out, size, PINNED);
}

cudaError_t cudaFreeHost(void *start) {
    standin_allocates("cudaFreeHost");
    remove_span(start);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
    standin_allocates("cudaHostRegister");
    return add_span(start, size, REGISTERED) ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaHostUnregister(void *start) {
    standin_allocates("cudaHostUnregister");
    remove_span(start);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = GPU_BYTES;
    *free = GPU_BYTES - GPU_BYTES_OF_CUDA - device_bytes;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
    memset(out, 0, sizeof *out);
    out->type = cudaMemoryTypeUnregistered;
    if (!standin_is_known(address)) return cudaSuccess;
    int on_device = has_kind(address, DEVICE);
    out->type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    out->devicePointer = (void *)address;
    if (!on_device) out->hostPointer = (void *)address;
    return cudaSuccess;
}

/* A kernel may read an address of the GPU or of pinned memory; Triton asks before it launches. */
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
    if (address && !standin_is_known((void *)address)) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)out = address;
    else
        *(int *)out = 0;
    return CUDA_SUCCESS;
}

static void copy(void *to, const void *from, size_t size) {
    if (size > LARGEST_COPY && has_kind(to, DEVICE) && has_kind(from, DEVICE)) return;
    memmove(to, from, size);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    standin_synchronises("cudaMemcpy");
    copy(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream
) {
    int pageable = !standin_is_known(to) || !standin_is_known(from);
    if (standin_add_node(stream)) {
        standin_count(COUNT_CAPTURED_COPIES);
        if (pageable) standin_violation("pageable copy in a capture", "%zu bytes", size);
        return cudaSuccess;
    }
    if (pageable) standin_count(COUNT_PAGEABLE_COPIES);
    copy(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream
) {
    for (size_t row = 0; row < height; row++)
        cudaMemcpyAsync((char *)to + row * to_pitch, (char *)from + row * from_pitch, width, kind, stream);
    return cudaSuccess;
}

/* Zeros take no room: whole pages of the GPU's memory are given back, and read as zero. */
static void fill(char *start, int value, size_t size) {
    char *first = (char *)(((uintptr_t)start + PAGE - 1) / PAGE * PAGE);
    char *last = (char *)((uintptr_t)(start + size) / PAGE * PAGE);
    if (value || first >= last || !has_kind(start, DEVICE)) {
        memset(start, value, size);
        return;
    }
    memset(start, 0, first - start);
    madvise(first, last - first, MADV_DONTNEED);
    memset(last, 0, start + size - last);
}

cudaError_t cudaMemset(void *start, int value, size_t size) {
    fill(start, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) {
    if (standin_add_node(stream))
        standin_count(COUNT_CAPTURED_COPIES);
    else
        fill(start, value, size);
    return cudaSuccess;
}
