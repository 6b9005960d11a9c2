/* Threads that share the items of a kernel. Each thread of a team runs the same kernels with the same arguments. A kernel divides
 * its work into phases, and a phase into items that do not depend on each other:
 *
 *     FOR_ITEMS(item, team, count) ...
 *
 * A thread takes items while there are any, then waits for those that other threads have taken. So a phase is over when its items
 * are computed. A thread that has lost its core delays the others only by the items that it holds, and skips the phases that end
 * without it. All threads must compute the same `count`. So it must not depend on what another kernel of the same task writes: a
 * thread that is late may find the numbers of a later kernel there.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* A thread's place in a team: its number from 0 on, the phase that it is in, and the number of items in the phases before. */
typedef struct {
    ptrdiff_t threads, number;
    uint32_t phase, items_before;
} team;

/* A phase of `count` items, and this thread's part in it: it has taken [first, last), computed `computed` items that it has not
 * told the others about, and seen that nothing is left of `shares` threads' shares. */
typedef struct {
    team *team;
    ptrdiff_t count, first, last, shares;
    uint32_t computed;
} items;

/* Begin the next phase. count < 2**31; a task has fewer than 2**31 items and phases. */
items share(team *t, ptrdiff_t count);

/* Take items. Return 0 if all items of the phase are computed, or the task is stopped. */
int take(items *i);

/* Compute a phase of `count` items, or only some of them if the task is stopped. Not to be left by break or return. */
#define FOR_ITEMS(item, team, count)                        \
    for (items shared = share(team, count); take(&shared);) \
        for (ptrdiff_t item = shared.first; item < shared.last; item++)

/* Stop the current task, for a `reason` other than 0: each of its threads takes no more items. Called by a thread of the task. */
void stop_task(size_t reason);

/* Return whether the current task has been stopped. */
int task_stopped(void);

/* Return memory of `bytes` that all threads of the team share, at a multiple of 64. It is kept: the next call in this task or a
 * later one may return the same. If the system refuses it, or the task has been stopped, stop the task and return NULL. */
void *team_memory(size_t bytes);

/* Call body(team, argument) in this thread and up to threads - 1 others. Return when all of them have returned: 0, or the reason
 * why the task was stopped. */
size_t run_threads(ptrdiff_t threads, void (*body)(team *, const void *), const void *argument);
