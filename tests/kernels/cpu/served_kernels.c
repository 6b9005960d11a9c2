/* Serves the kernels of another processor's program, run by an emulator, to a test: served.py compiles and starts it. It reads
 * calls of nv_run() from standard input, and runs them on copies of the test's memory. A page is copied when a kernel first
 * touches it: its absence is a fault, whose handler asks for it on standard output. After nv_run() it returns the pages that
 * have changed. Fails by ending.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

size_t nv_run(const void *calls, ptrdiff_t count, ptrdiff_t tokens, ptrdiff_t rows, ptrdiff_t threads);

enum { PAGE = 4096, MAX_PAGES = 1 << 16, RETURN = 1, END = 2 }; /* RETURN and END: in place of a page's address */

static struct {
    uint64_t addresses[MAX_PAGES];
    char (*copies)[PAGE]; /* as they were received */
    int count;
    atomic_flag lock;
} pages;

static void receive(void *to, size_t bytes) {
    for (ssize_t n; bytes; to = (char *)to + n, bytes -= n)
        if ((n = read(0, to, bytes)) <= 0) _exit(1);
}
static void send(const void *from, size_t bytes) {
    for (ssize_t n; bytes; from = (const char *)from + n, bytes -= n)
        if ((n = write(1, from, bytes)) <= 0) _exit(1);
}

static void fetch_page(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    uint64_t address = (uint64_t)info->si_addr & -(uint64_t)PAGE;
    while (atomic_flag_test_and_set(&pages.lock)) {}
    int i = pages.count;
    while (i && pages.addresses[i - 1] != address) i--;
    if (!i) { /* else another thread has just fetched it */
        if (pages.count == MAX_PAGES) _exit(1);
        send(&address, sizeof address);
        char *copy = pages.copies[pages.count];
        receive(copy, PAGE);
        void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memcpy(page, copy, PAGE);
        /* Whole at once, because other threads may read it. */
        if (mremap(page, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)address) == MAP_FAILED) _exit(1);
        pages.addresses[pages.count++] = address;
    }
    atomic_flag_clear(&pages.lock);
}

static void return_pages(void) {
    for (int i = 0; i < pages.count; i++) {
        char *page = (char *)pages.addresses[i];
        if (memcmp(page, pages.copies[i], PAGE)) {
            uint64_t head[2] = {RETURN, pages.addresses[i]};
            send(head, sizeof head), send(pages.copies[i], PAGE), send(page, PAGE);
        }
        munmap(page, PAGE);
    }
    pages.count = 0;
}

int main(void) {
    pages.copies = mmap(NULL, (size_t)MAX_PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    sigaction(SIGSEGV, &(struct sigaction){.sa_sigaction = fetch_page, .sa_flags = SA_SIGINFO}, NULL);
    for (;;) {
        int64_t head[5]; /* the bytes of the calls, and the other arguments of nv_run() */
        receive(head, sizeof head);
        void *calls = malloc(head[0]);
        receive(calls, head[0]);
        size_t refused = nv_run(calls, head[1], head[2], head[3], head[4]);
        free(calls);
        return_pages();
        uint64_t end[2] = {END, refused};
        send(end, sizeof end);
    }
}
