/* An allocator that refuses a chosen call. Included before each source (gcc -include) by the tests of scarce memory. */
#define _GNU_SOURCE /* as threads.c, which is too late after these includes */
#include <stdatomic.h>
#include <stdlib.h>

/* How many allocations succeed before one is refused; the later ones succeed again. One variable for all sources. */
__attribute__((weak)) _Atomic int allocations_before_refusal = -1;

static inline void *refusing_alloc(size_t alignment, size_t bytes) {
    return atomic_fetch_sub(&allocations_before_refusal, 1) == 0 ? NULL : aligned_alloc(alignment, bytes);
}
#define aligned_alloc refusing_alloc
