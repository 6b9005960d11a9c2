/* Counts what happens and notes what a GPU would refuse, in the file that the variable STANDIN_LOG names.
   Each line has a first word, and tabs between its fields. Violations are written at once, so that a
   process that is killed has reported them; counts are written when a process ends. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "standin.h"

#define MOST_VIOLATIONS 50 /* that a process writes down */

static const char *const names[COUNTERS] = {
    [COUNT_GRAPHS] = "graphs",
    [COUNT_CAPTURED_KERNELS] = "kernels in graphs",
    [COUNT_CAPTURED_COPIES] = "copies and fills in graphs",
    [COUNT_REPLAYS] = "replays",
    [COUNT_KERNELS] = "kernels without a graph",
    [COUNT_PAGEABLE_COPIES] = "pageable copies outside captures",
    [COUNT_POOL_ALLOCATIONS] = "allocations for the pools of graphs",
};
static atomic_long counts[COUNTERS];
static atomic_long violations;

/* One write each: lines of several processes do not mix. */
static void write_line(const char *line) {
    const char *path = getenv("STANDIN_LOG");
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666) : dup(2);
    if (file < 0) return;
    if (write(file, line, strlen(line)) < 0) perror("STANDIN_LOG");
    close(file);
}

/* The command line of this process, with spaces between its words. */
static void command_line(char *out, size_t size) {
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, out, size - 1);
    if (file >= 0) close(file);
    if (length < 0) length = 0;
    for (ssize_t i = 0; i < length; i++)
        if (out[i] < ' ') out[i] = ' ';
    out[length] = 0;
}

void standin_count(enum counter counter) { atomic_fetch_add(&counts[counter], 1); }

void standin_violation(const char *kind, const char *format, ...) {
    if (atomic_fetch_add(&violations, 1) >= MOST_VIOLATIONS) return;
    char text[256], command[256], line[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    command_line(command, sizeof command);
    snprintf(line, sizeof line, "violation\t%s\t%s\t%s\n", kind, text, command);
    write_line(line);
}

/* Answers success for a function of CUDA that does nothing here; a process notes each once. */
int standin_skip(int *noted, const char *name) {
    char line[256];
    if (*noted) return 0;
    *noted = 1;
    snprintf(line, sizeof line, "skipped\t%s\n", name);
    write_line(line);
    return 0;
}

__attribute__((destructor)) static void at_exit(void) {
    char line[128];
    for (int i = 0; i < COUNTERS; i++) {
        if (!counts[i]) continue;
        snprintf(line, sizeof line, "count\t%s\t%ld\n", names[i], counts[i]);
        write_line(line);
    }
}
