/* Runs tasks of several phases from several callers, and checks that each phase computes each item once, after all items of the
 * phase before, unless the task is stopped, and finds in the team's memory what that phase wrote. Exits with 1 and a line of text
 * if not. Compiled with the thread sanitizer by test_threads.py.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "threads.h"

enum { CALLERS = 3, TASKS = 60, PHASES = 12, MAX_ITEMS = 97 };

/* values[i] is only written by the thread that takes item i: a data race if two threads take it. */
typedef struct {
    int values[PHASES][MAX_ITEMS];
    int seed;
} work;

static ptrdiff_t count_of(const work *w, int phase) { return (w->seed * 31 + phase * 17) % (MAX_ITEMS + 1); }

/* One task in five is stopped: by each thread that computes the first item of a phase. Return that phase, or PHASES. */
static int stopped_phase(const work *w) { return w->seed % 5 == 2 ? w->seed % PHASES : PHASES; }

static void body(team *t, const void *argument) {
    work *w = (work *)argument;
    int *memory = NULL; /* grows from task to task and phase to phase; an odd phase reads what the one before wrote */
    for (int phase = 0; phase < PHASES && !task_stopped(); phase++) {
        if (phase % 2 == 0) memory = team_memory((MAX_ITEMS + (w->seed + phase) * 16) * sizeof *memory);
        FOR_ITEMS(i, t, count_of(w, phase)) {
            if (i == 0 && phase == stopped_phase(w)) stop_task(phase + 1);
            int sum = 1;
            if (phase)
                for (ptrdiff_t j = 0; j < count_of(w, phase - 1); j++)
                    sum += w->values[phase - 1][j] == phase && (phase % 2 == 0 || memory[j] == w->seed + phase);
            w->values[phase][i] += phase && sum != count_of(w, phase - 1) + 1 ? -1000 : phase + 1;
            if (phase % 2 == 0) memory[i] = w->seed + phase + 1;
        }
    }
}

static void check(const work *w, size_t reason) {
    int stopped = stopped_phase(w);
    size_t expected = stopped < PHASES && count_of(w, stopped) ? stopped + 1 : 0;
    if (reason != expected) {
        printf("a task ended for reason %zu, not %zu\n", reason, expected);
        exit(1);
    }
    if (reason) return;
    for (int phase = 0; phase < PHASES; phase++)
        for (ptrdiff_t i = 0; i < MAX_ITEMS; i++)
            if (w->values[phase][i] != (i < count_of(w, phase) ? phase + 1 : 0)) {
                printf("phase %d item %td: %d\n", phase, i, w->values[phase][i]);
                exit(1);
            }
}

static void *caller(void *number) {
    for (int n = 0; n < TASKS; n++) {
        work *w = calloc(1, sizeof *w);
        w->seed = n * CALLERS + (int)(ptrdiff_t)number;
        check(w, run_threads(1 + (n + (ptrdiff_t)number) % 4, body, w));
        free(w);
        if (n % 16 == 0) usleep(1000); /* the workers fall asleep */
    }
    return NULL;
}

int main(void) {
    pthread_t threads[CALLERS];
    for (ptrdiff_t i = 0; i < CALLERS; i++) pthread_create(&threads[i], NULL, caller, (void *)i);
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
    pid_t child = fork();
    if (child == 0) {
        caller(0); /* with workers of its own */
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status) printf("the child of a fork ended with %d\n", status);
    return status != 0;
}
