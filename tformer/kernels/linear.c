/* y = x W^T + b for a weight that lies as it is stored, one row for each column of y, and what comes before and after it.
   For few rows of x, reading W once, in a single stream, is nearly all the work: every row of x meets a row of W while
   that is in the cache. For many, a block of W stays in the first cache while all rows of x pass. */

#include <omp.h>

#include "tiles.h"

enum { BLOCK_BYTES = 16384, LEAST_COLUMNS = 16, SERIAL_NUMBERS = 8192 };

static struct method method_of(const struct linear *l, const struct call *c) {
#if defined(PANELS)
    if (l->format == INT8 && c->rows >= MANY_ROWS) return method_of_panels(l);
#endif
    return l->format == BF16 || l->format == FP32 ? method_of_floats(l, c) : method_of_integers(l);
}

/* The rows of x, and room for each thread, in one piece of memory. */
struct prepared {
    struct rows rows;
    float *wide;     /* one row for each thread */
    uint8_t *spare;  /* the same */
    int16_t *panels; /* of MOST_COLUMNS columns for each thread, twice that for a gate */
};

static void prepare_row(const struct linear *l, const struct call *c, const struct method *a, const struct prepared *p,
                        long row, int thread) {
    float *wide = p->wide + thread * p->rows.stride;
    read_row(c, row, l->inner, wide);
    a->place(&p->rows, row, l->inner, wide, p->spare + thread * p->rows.stride);
}

/* Sums of `rows` rows of x and `count` columns, by tiles. */
static void tiles(const struct linear *l, const struct method *a, const struct rows *x, long row, int rows, long column,
                  long count, float *out) {
    float sums[TILE_ROWS * COLUMNS];
    for (long c = 0; c < count;) {
        int columns = c + COLUMNS <= count ? COLUMNS : 1;
        a->tile(l, x, row, column + c, rows, columns, sums);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < columns; i++) out[r * count + c + i] = sums[r * columns + i];
        c += columns;
    }
}

/* Columns from `first` to `end`, for all rows. */
static void block(const struct linear *l, const struct call *c, const struct method *a, const struct prepared *p,
                  long first, long end) {
    long half = l->columns / 2, count = end - first, stride = p->rows.stride, most = a->fill ? PANEL_ROWS : TILE_ROWS;
    long panel = a->fill ? MOST_COLUMNS * stride : 0;
    int16_t *mine = p->panels + omp_get_thread_num() * (1 + c->gated) * panel, *panels[] = {mine, mine + panel};
    float out[2][PANEL_ROWS * MOST_COLUMNS];
    for (int i = 0; a->fill && i <= c->gated; i++) a->fill(l, first + i * half, count, stride, panels[i]);
    for (long row = 0; row < c->rows; row += most) {
        int rows = (int)least(most, c->rows - row);
        for (int i = 0; i <= c->gated; i++)
            if (a->fill)
                a->panel(l, &p->rows, row, rows, first + i * half, count, panels[i], out[i]);
            else
                tiles(l, a, &p->rows, row, rows, first + i * half, count, out[i]);
        for (int r = 0; r < rows; r++) finish(l, c, row + r, first, count, out[0] + r * count, out[1] + r * count);
    }
}

/* Whole cache lines: a vector that lies in two is read at half the rate. */
static size_t lines(long bytes) { return (size_t)((bytes + LINE - 1) / LINE * LINE); }

/* Returns 1 when memory is short. */
int linear(const struct linear *l, const struct call *c, int threads) {
    struct method a = method_of(l, c);
    long stride = (l->inner + a.unit - 1) / a.unit * a.unit, all = c->rows * stride;
    size_t numbers = lines(all * a.number_size), wide = lines(threads * stride * (long)sizeof(float));
    size_t scales = lines(c->rows * (long)sizeof(float)), offsets = l->format == INT4 ? lines(all) : 0;
    size_t spare = lines(threads * stride), panel = (size_t)(MOST_COLUMNS * stride) * sizeof(int16_t);
    size_t panels = a.fill ? (size_t)(threads * (1 + c->gated)) * panel : 0;
    char *memory = aligned_alloc(LINE, numbers + wide + scales + offsets + spare + panels);
    if (!memory) return 1;
    struct prepared p;
    p.wide = (float *)(memory + numbers);
    float *rates = (float *)((char *)p.wide + wide);
    int32_t *sums = (int32_t *)((char *)rates + scales);
    p.spare = (uint8_t *)sums + offsets;
    p.panels = (int16_t *)(p.spare + spare);
    p.rows = (struct rows){memory, stride, rates, sums};

    long columns = c->gated ? l->columns / 2 : l->columns;
    /* Whole vectors for `finish`; a block that is read again lies in the first cache, or nearly. */
    int again = c->rows > TILE_ROWS && !a.fill && MOST_COLUMNS * a.column_bytes > BLOCK_BYTES;
    long size = again ? LEAST_COLUMNS : MOST_COLUMNS;
    long blocks = (columns + size - 1) / size;
    int few = all <= SERIAL_NUMBERS;
    if (few)
        for (long row = 0; row < c->rows; row++) prepare_row(l, c, &a, &p, row, 0);
#pragma omp parallel num_threads(threads)
    {
        if (!few) {
#pragma omp for schedule(static)
            for (long row = 0; row < c->rows; row++) prepare_row(l, c, &a, &p, row, omp_get_thread_num());
        }
#pragma omp for schedule(static) nowait
        for (long i = 0; i < blocks; i++) block(l, c, &a, &p, i * size, least(columns, (i + 1) * size));
    }
    free(memory);
    return 0;
}
