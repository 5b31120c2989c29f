/* y = x W^T + b for a weight that lies as it is stored, one row for each column of y, and what comes before and after it.
   For few rows of x, reading W once, in a single stream, is nearly all the work: every row of x meets a row of W while
   that is in the cache. For many, a block of W stays in the first cache while all rows of x pass. */

#include <omp.h>

#include "linear.h"
#include "vectors.h"

enum { BLOCK_BYTES = 16384, LEAST_COLUMNS = 16, SERIAL_NUMBERS = 8192, LINE = 64 };

/* What the formats need of x. */
struct layout {
    tile *tile;
    long unit, number_size; /* numbers that a row of x is filled up to a multiple of; bytes of one */
    long column_bytes;      /* of a row of the weight */
    fill *fill;             /* panels in place of tiles, or NULL */
    panel *panel;
};

static struct layout layout_of(const struct linear *l, const struct call *c) {
    switch (l->format) {
    case BF16:
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
        if (!c->x_wide) return (struct layout){tile_bf16_pairs, 2 * FLOATS, 2, 2 * l->inner, 0, 0};
#endif
        (void)c;
        return (struct layout){tile_bf16, 2 * FLOATS, 4, 2 * l->inner, 0, 0};
    case FP32: return (struct layout){tile_fp32, FLOATS, 4, 4 * l->inner, 0, 0};
    case INT8:
#if defined(PANELS)
        if (c->rows >= MANY_ROWS) return (struct layout){0, LANES, 2, l->inner, fill_panels, panel_sums};
#endif
        return (struct layout){tile_int8, LINE, 1, l->inner, 0, 0};
    default: return (struct layout){tile_int4, UNIT, 1, l->inner / 2, 0, 0};
    }
}

/* The rows of x as tiles read them, in one piece of memory. */
struct prepared {
    struct rows rows;
    char *numbers;
    float *scales;
    int32_t *offsets;
    float *wide;      /* one row for each thread */
    uint8_t *rounded; /* the same */
    int16_t *panels;  /* of MOST_COLUMNS columns for each thread, twice that for a gate */
};

static void prepare_row(const struct linear *l, const struct call *c, const struct layout *a, struct prepared *p,
                        long row, int thread) {
    long inner = l->inner, stride = p->rows.stride;
    float *wide = p->wide + thread * stride;
    char *to = p->numbers + row * stride * a->number_size;
    read_row(c, row, inner, wide);
    if (l->format == FP32) {
        memcpy(to, wide, (size_t)inner * sizeof(float));
        memset(to + inner * (long)sizeof(float), 0, (size_t)(stride - inner) * sizeof(float));
    } else if (l->format == BF16 && a->number_size == sizeof(bf16)) {
        bf16 *numbers = (bf16 *)to;
#pragma omp simd
        for (long k = 0; k < inner; k++) numbers[k] = narrow(wide[k]);
        memset(numbers + inner, 0, (size_t)(stride - inner) * sizeof(bf16));
    } else if (l->format == BF16) { /* of each step the even numbers, then the odd ones */
        memset(wide + inner, 0, (size_t)(stride - inner) * sizeof(float));
        for (long k = 0; k < stride; k += 2 * FLOATS)
            for (long i = 0; i < FLOATS; i++) {
                ((float *)to)[k + i] = wide[k + 2 * i];
                ((float *)to)[k + FLOATS + i] = wide[k + 2 * i + 1];
            }
    } else {
        uint8_t *rounded = a->number_size == 1 && l->format == INT8 ? (uint8_t *)to : p->rounded + thread * stride;
        p->scales[row] = round_row(wide, 1, 0, inner, rounded);
        memset(rounded + inner, ZERO_POINT, (size_t)(stride - inner));
        if (l->format == INT4)
            order_row(rounded, inner, stride, (int8_t *)to, p->offsets + row * stride / 4);
        else if (a->number_size == sizeof(int16_t)) {
#pragma omp simd
            for (long k = 0; k < stride; k++) ((int16_t *)to)[k] = (int16_t)(rounded[k] - ZERO_POINT);
        }
    }
}

/* Sums of `rows` rows of x and `count` columns, by tiles. */
static void tiles(const struct linear *l, const struct layout *a, const struct rows *x, long row, int rows, long column,
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
static void block(const struct linear *l, const struct call *c, const struct layout *a, const struct prepared *p,
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
    struct layout a = layout_of(l, c);
    long stride = (l->inner + a.unit - 1) / a.unit * a.unit, all = c->rows * stride;
    size_t numbers = lines(all * a.number_size), wide = lines(threads * stride * (long)sizeof(float));
    size_t scales = lines(c->rows * (long)sizeof(float)), offsets = l->format == INT4 ? lines(all) : 0;
    size_t rounded = lines(threads * stride), panel = (size_t)(MOST_COLUMNS * stride) * sizeof(int16_t);
    size_t panels = a.fill ? (size_t)(threads * (1 + c->gated)) * panel : 0;
    char *memory = aligned_alloc(LINE, numbers + wide + scales + offsets + rounded + panels);
    if (!memory) return 1;
    struct prepared p;
    p.numbers = memory;
    p.wide = (float *)(p.numbers + numbers);
    p.scales = (float *)((char *)p.wide + wide);
    p.offsets = (int32_t *)((char *)p.scales + scales);
    p.rounded = (uint8_t *)p.offsets + offsets;
    p.panels = (int16_t *)(p.rounded + rounded);
    p.rows = (struct rows){p.numbers, stride, p.scales, p.offsets};

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
