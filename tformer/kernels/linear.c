/* y = x W^T + b for a weight that lies as it is stored, one row for each column of y, and what comes before and after it.
   For few rows of x, reading W once, in a single stream, is nearly all the work: every row of x meets a row of W while
   that is in the cache. For many, a block of W stays in the first cache while all rows of x pass. */

#include <omp.h>

#include "linear.h"
#include "vectors.h"

enum { BLOCK_BYTES = 16384, MOST_COLUMNS = 32, LEAST_COLUMNS = 16, SERIAL_NUMBERS = 8192, LINE = 64 };

/* What the formats need of x. */
struct layout {
    tile *tile;
    long unit, number_size; /* numbers that a row of x is filled up to a multiple of; bytes of one */
    long column_bytes;                    /* of a row of the weight */
};

static struct layout layout_of(const struct linear *l, const struct call *c) {
    switch (l->format) {
    case BF16:
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
        if (!c->x_wide) return (struct layout){tile_bf16_pairs, 2 * FLOATS, 2, 2 * l->inner};
#endif
        (void)c;
        return (struct layout){tile_bf16, 2 * FLOATS, 4, 2 * l->inner};
    case FP32: return (struct layout){tile_fp32, FLOATS, 4, 4 * l->inner};
    case INT8: return (struct layout){tile_int8, LINE, 1, l->inner};
    default: return (struct layout){tile_int4, UNIT, 1, l->inner / 2};
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
        uint8_t *rounded = l->format == INT8 ? (uint8_t *)to : p->rounded + thread * stride;
        p->scales[row] = round_row(wide, 1, 0, inner, rounded);
        if (l->format == INT8)
            memset(rounded + inner, ZERO_POINT, (size_t)(stride - inner));
        else
            order_row(rounded, inner, stride, (int8_t *)to, p->offsets + row * stride / 4);
    }
}

/* Columns from `first` to `end`, for all rows. */
static void block(const struct linear *l, const struct call *c, const struct layout *a, const struct rows *x,
                  long first, long end) {
    long half = l->columns / 2, count = end - first;
    float sums[TILE_ROWS * COLUMNS], out[2][TILE_ROWS * MOST_COLUMNS];
    for (long row = 0; row < c->rows; row += TILE_ROWS) {
        int rows = (int)least(TILE_ROWS, c->rows - row);
        for (int second = 0; second <= c->gated; second++)
            for (long column = 0; column < count;) {
                int columns = column + COLUMNS <= count ? COLUMNS : 1;
                a->tile(l, x, row, first + column + second * half, rows, columns, sums);
                for (int r = 0; r < rows; r++)
                    for (int i = 0; i < columns; i++) out[second][r * count + column + i] = sums[r * columns + i];
                column += columns;
            }
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
    char *memory = aligned_alloc(LINE, numbers + wide + scales + offsets + lines(threads * stride));
    if (!memory) return 1;
    struct prepared p;
    p.numbers = memory;
    p.wide = (float *)(p.numbers + numbers);
    p.scales = (float *)((char *)p.wide + wide);
    p.offsets = (int32_t *)((char *)p.scales + scales);
    p.rounded = (uint8_t *)p.offsets + offsets;
    p.rows = (struct rows){p.numbers, stride, p.scales, p.offsets};

    long columns = c->gated ? l->columns / 2 : l->columns;
    /* Whole vectors for `finish`; a block that is read again lies in the first cache, or nearly. */
    int again = c->rows > TILE_ROWS && MOST_COLUMNS * a.column_bytes > BLOCK_BYTES;
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
        for (long i = 0; i < blocks; i++) block(l, c, &a, &p.rows, i * size, least(columns, (i + 1) * size));
    }
    free(memory);
    return 0;
}
