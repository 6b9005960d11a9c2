/* The threads of threads.h: the caller of run_threads() and workers, which are started when first needed. A thread that waits
 * spins for some microseconds and then sleeps, so that it does not take a core from other work. Between tasks all workers sleep.
 */
#ifdef __linux__
#define _GNU_SOURCE /* sched_getcpu() and CPU_SET() */
#include <sched.h>
#endif
#include "threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_THREADS = 1024, PARTS = 128, SPIN_NANOSECONDS = 50000, PAUSES = 32 };

/* Threads that wait for the same kind of event. */
typedef struct {
    _Alignas(128) _Atomic uint32_t sleepers;
    pthread_cond_t event;
} queue;

/* How many items of a thread's share have been taken, in the lower half, and in which phase, in the upper half. */
typedef struct {
    _Alignas(128) _Atomic uint64_t taken;
} ticket;

/* `entry` is the number of the last task in the upper half, and below it the workers inside and whether it is CLOSED to others.
 */
#define TASK ((uint64_t)1 << 32)
#define CLOSED ((uint64_t)1 << 31)

/* The atomics lie in cache lines of their own, because all threads write to them. */
static struct {
    pthread_mutex_t callers; /* held by the caller of the current task */
    ptrdiff_t workers;
    ptrdiff_t threads; /* of the current task; body(team, argument) is its work */
    void (*body)(team *, const void *);
    const void *argument;
    _Atomic size_t stopped; /* why the current task is, or 0 */
    _Alignas(128) _Atomic uint64_t entry;
    ticket tickets[MAX_THREADS];             /* of each thread's share */
    _Atomic int cores[MAX_THREADS];          /* where each thread was last seen */
    _Alignas(128) _Atomic uint32_t computed; /* items of the current task */
    pthread_mutex_t sleep;
    queue for_task, for_items, for_leave;
    pthread_mutex_t growth; /* of team_memory() */
    void *memory;
    size_t memory_bytes;
} pool;

int task_stopped(void) { return atomic_load(&pool.stopped) != 0; }

static int task_open(uint64_t last) {
    uint64_t entry = atomic_load(&pool.entry);
    return !(entry & CLOSED) && entry / TASK != last;
}
static int items_computed(uint64_t count) {
    return (int32_t)(atomic_load(&pool.computed) - (uint32_t)count) >= 0 || task_stopped();
}
static int all_left(uint64_t task) { return atomic_load(&pool.entry) == (task * TASK | CLOSED); }

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Return when ready(value). The thread that makes it so must call wake(q) afterwards. */
static void wait_until(int (*ready)(uint64_t), uint64_t value, queue *q) {
    for (int64_t now = 0, end = 0; now <= end; now = nanoseconds(), end = end ? end : now + SPIN_NANOSECONDS)
        for (int i = 0; i < PAUSES; i++, pause_core())
            if (ready(value)) return;
    pthread_mutex_lock(&pool.sleep);
    atomic_fetch_add(&q->sleepers, 1); /* before ready(): either wake() sees a sleeper, or ready() sees the change */
    while (!ready(value)) pthread_cond_wait(&q->event, &pool.sleep);
    atomic_fetch_sub(&q->sleepers, 1);
    pthread_mutex_unlock(&pool.sleep);
}

static void wake(queue *q) {
    if (!atomic_load(&q->sleepers)) return;
    pthread_mutex_lock(&pool.sleep);
    pthread_cond_broadcast(&q->event);
    pthread_mutex_unlock(&pool.sleep);
}

void stop_task(size_t reason) {
    atomic_store(&pool.stopped, reason);
    wake(&pool.for_items);
}

/* A thread that has left all earlier phases may replace the memory: nobody computes an item with it, and a thread that is late
 * asks for no more than there is. After a task is stopped neither holds. */
void *team_memory(size_t bytes) {
    if (task_stopped()) return NULL;
    pthread_mutex_lock(&pool.growth);
    if (pool.memory_bytes < bytes) {
        free(pool.memory);
        pool.memory = bytes < SIZE_MAX / 2 ? aligned_alloc(64, bytes / 64 * 64 + 64) : NULL;
        pool.memory_bytes = pool.memory ? bytes : 0;
    }
    void *memory = pool.memory;
    pthread_mutex_unlock(&pool.growth);
    if (!memory) stop_task(bytes);
    return memory;
}

/* Move this thread to another core if an earlier thread of the team is on its core. Linux divides the cores evenly between
 * sessions: beside a busy process of another session it would leave two threads of this one on one core. */
static void spread(const team *t) {
#ifdef __linux__
    int core = sched_getcpu(), number = (int)t->number, i = 0;
    if (pool.cores[number] != core) pool.cores[number] = core;
    while (i < number && pool.cores[i] != core) i++;
    cpu_set_t allowed, unused;
    if (i == number || sched_getaffinity(0, sizeof allowed, &allowed)) return;
    unused = allowed;
    for (i = 0; i < t->threads; i++) CPU_CLR(pool.cores[i], &unused);
    if (CPU_COUNT(&unused) == 0 || sched_setaffinity(0, sizeof unused, &unused)) return;
    pool.cores[number] = sched_getcpu();
    sched_setaffinity(0, sizeof allowed, &allowed);
#else
    (void)t;
#endif
}

items share(team *t, ptrdiff_t count) {
    spread(t);
    t->phase++;
    return (items){.team = t, .count = count};
}

/* Take the next part of the share of thread `owner`. Return 0 if nothing is left of it, or the phase is over. */
static int take_from(items *i, ptrdiff_t owner) {
    ptrdiff_t threads = i->team->threads, first = i->count * owner / threads, last = i->count * (owner + 1) / threads;
    ptrdiff_t part = (last - first) / PARTS > 1 ? (last - first) / PARTS : 1;
    uint64_t phase = i->team->phase, before = atomic_load(&pool.tickets[owner].taken);
    while (before / TASK <= phase) {
        ptrdiff_t next = before / TASK == phase ? first + (ptrdiff_t)(before % TASK) : first;
        if (next == last) return 0;
        i->first = next, i->last = last - next < part ? last : next + part;
        if (atomic_compare_exchange_weak(&pool.tickets[owner].taken, &before, phase * TASK + (uint64_t)(i->last - first)))
            return 1;
    }
    return 0;
}

/* Each thread has a share of adjacent items. It takes part after part of its share, and then of the shares of the others. Parts
 * are small, because a thread that loses its core keeps the others waiting for the part that it holds. It counts the items of its
 * own share as computed when nothing is left of it: an earlier count would change a cache line of all threads for each part. */
int take(items *i) {
    team *t = i->team;
    if (task_stopped()) return 0;
    uint32_t end = t->items_before + (uint32_t)i->count;
    i->computed += (uint32_t)(i->last - i->first);
    i->first = i->last = 0;
    if (i->shares == 0 && take_from(i, t->number)) return 1;
    if (i->computed && atomic_fetch_add(&pool.computed, i->computed) + i->computed == end) wake(&pool.for_items);
    i->computed = 0;
    for (i->shares += i->shares == 0; i->shares < t->threads; i->shares++)
        if (take_from(i, (t->number + i->shares) % t->threads)) return 1;
    wait_until(items_computed, end, &pool.for_items);
    t->items_before = end;
    return 0;
}

static void *work(void *number) {
    for (uint64_t last = 0;;) {
        wait_until(task_open, last, &pool.for_task);
        uint64_t entry = atomic_load(&pool.entry);
        while (!(entry & CLOSED) && !atomic_compare_exchange_weak(&pool.entry, &entry, entry + 1)) {}
        if (entry & CLOSED) continue; /* the task ended first */
        last = entry / TASK;
        if ((ptrdiff_t)number < pool.threads) pool.body(&(team){pool.threads, (ptrdiff_t)number, 0, 0}, pool.argument);
        if (atomic_fetch_sub(&pool.entry, 1) == (last * TASK | CLOSED) + 1) wake(&pool.for_leave);
    }
    return NULL;
}

/* Start workers until there are `count`, or as many as the system allows. Signals stay with the threads of the program, but for
 * those of a fault in the thread itself: qemu, for one, handles its own. */
static void start_workers(ptrdiff_t count) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    sigset_t others, before;
    sigfillset(&others);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&others, faults[i]);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    for (pthread_t thread; pool.workers < count; pool.workers++) {
        if (pthread_create(&thread, NULL, work, (void *)(pool.workers + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

size_t run_threads(ptrdiff_t threads, void (*body)(team *, const void *), const void *argument) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    pthread_mutex_lock(&pool.callers);
    start_workers(threads - 1);
    pool.threads = threads, pool.body = body, pool.argument = argument;
    for (ptrdiff_t i = 0; i < threads; i++) atomic_store(&pool.tickets[i].taken, 0);
    atomic_store(&pool.computed, 0);
    atomic_store(&pool.stopped, 0);
    uint64_t task = (uint32_t)(atomic_load(&pool.entry) / TASK + 1);
    if (threads > 1) {
        atomic_store(&pool.entry, task * TASK);
        wake(&pool.for_task);
    }
    body(&(team){threads, 0, 0, 0}, argument);
    if (threads > 1) {
        atomic_fetch_or(&pool.entry, CLOSED);
        wait_until(all_left, task, &pool.for_leave);
    }
    size_t reason = atomic_load(&pool.stopped);
    pthread_mutex_unlock(&pool.callers);
    return reason;
}

static void reset_queue(queue *q) {
    pthread_cond_init(&q->event, NULL);
    atomic_store(&q->sleepers, 0);
}

/* The child of a fork has none of the workers, and its copies of the locks may be held by threads that it does not have. */
static void reset_pool(void) {
    pthread_mutex_init(&pool.callers, NULL);
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_mutex_init(&pool.growth, NULL);
    reset_queue(&pool.for_task), reset_queue(&pool.for_items), reset_queue(&pool.for_leave);
    atomic_store(&pool.entry, CLOSED);
    pool.workers = 0;
}

__attribute__((constructor)) static void prepare_pool(void) {
    reset_pool();
    pthread_atfork(NULL, NULL, reset_pool);
}
