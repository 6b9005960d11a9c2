/* Where the states of a step's rows lie. A state has parts, each in one of the row's pages. */
#pragma once
#include "vectors.h"

typedef struct {
    uint8_t *pool;
    ptrdiff_t page_bytes;
    const int64_t *places; /* [parts][2]: which of the row's pages, and how many bytes behind its begin */
    const int32_t *pages;  /* [rows][num_pages] */
    ptrdiff_t num_pages;
} state_pages;

/* Rows of a state's columns, ld apart. */
typedef struct {
    float *rows;
    ptrdiff_t ld;
} columns;

INLINE void *state_part(const state_pages *s, ptrdiff_t row, ptrdiff_t part) {
    const int64_t *place = s->places + 2 * part;
    return s->pool + s->pages[row * s->num_pages + place[0]] * s->page_bytes + place[1];
}
