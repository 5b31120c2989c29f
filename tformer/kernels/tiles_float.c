/* Tiles of products with weights in bf16 and fp32: a few rows of x times a few rows of the weight, in fp32 sums.
   The order of a sum is the same in every tile, so that a row's result does not depend on the rows beside it. */

#include "tiles.h"
#include "vectors.h"

/* How a tile multiplies: bf16 widened by a shift beside x in fp32 (the even numbers of a step before the odd ones), pairs
   of bf16 by the processor, or fp32. */
enum way { WIDENED, PAIRED, PLAIN };

/* Below, everything but pointers and inner sizes is a constant wherever these are inlined. */

INLINE long numbers_of(enum way way) { return way == PLAIN ? FLOATS : 2 * FLOATS; } /* in one step */

INLINE long size_of(enum way way) { return way == PLAIN ? sizeof(float) : sizeof(bf16); } /* of a weight's number */

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
INLINE floats add_pairs(floats total, words x, words w) {
    return (floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)w);
}
#else
INLINE floats add_pairs(floats total, words x, words w) {
    total += (floats)(x << 16) * (floats)(w << 16);
    return total + (floats)(x & 0xffff0000u) * (floats)(w & 0xffff0000u);
}
#endif

/* One step of a tile; x and w lie `x_row` and `w_row` bytes apart from row to row. */
INLINE void step(floats total[TILE_ROWS][COLUMNS], const char *x, long x_row, const char *w, long w_row, int rows,
                 int columns, enum way way) {
    words part[COLUMNS], odd[COLUMNS];
    UNROLL for (int c = 0; c < columns; c++) {
        part[c] = load_words(w + c * w_row);
        if (way == WIDENED) {
            odd[c] = part[c] & 0xffff0000u;
            part[c] <<= 16;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        words each = load_words(x + r * x_row);
        UNROLL for (int c = 0; c < columns; c++)
            if (way == PAIRED)
                total[r][c] = add_pairs(total[r][c], each, part[c]);
            else
                total[r][c] += (floats)each * (floats)part[c];
        if (way == WIDENED) {
            floats x_odd = load_floats((const float *)(x + r * x_row) + FLOATS);
            UNROLL for (int c = 0; c < columns; c++) total[r][c] += x_odd * (floats)odd[c];
        }
    }
}

INLINE void tile_of(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
                    enum way way, float *sums) {
    long x_size = way == PAIRED ? sizeof(bf16) : sizeof(float), x_row = x->stride * x_size;
    long w_row = l->inner * size_of(way), count = numbers_of(way);
    const char *numbers = (const char *)x->numbers + row * x_row, *w = (const char *)l->weight + column * w_row;
    floats total[TILE_ROWS][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) total[r][c] = (floats){0};
    long k = 0;
    for (; k + count <= l->inner; k += count) {
        if (row == 0) UNROLL for (int c = 0; c < columns; c++) ask_ahead(w + c * w_row + k * size_of(way));
        step(total, numbers + k * x_size, x_row, w + k * size_of(way), w_row, rows, columns, way);
    }
    if (k < l->inner) { /* what is left of the weight's rows, beside zeros */
        char rest[COLUMNS * BYTES] = {0};
        for (int c = 0; c < columns; c++)
            memcpy(rest + c * BYTES, w + c * w_row + k * size_of(way), (size_t)((l->inner - k) * size_of(way)));
        step(total, numbers + k * x_size, x_row, rest, BYTES, rows, columns, way);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sums[r * columns + c] = total_of(total[r][c]);
}

static void tile_bf16(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
               float *sums) {
#define CALL(r, c) tile_of(l, x, row, column, r, c, WIDENED, sums)
    WITH_CONSTANTS(rows, columns, COLUMNS, CALL)
#undef CALL
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
static void tile_bf16_pairs(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
                     float *sums) {
#define CALL(r, c) tile_of(l, x, row, column, r, c, PAIRED, sums)
    WITH_CONSTANTS(rows, columns, COLUMNS, CALL)
#undef CALL
}

static void place_bf16(const struct rows *x, long row, long inner, float *wide, uint8_t *spare) {
    (void)spare;
    bf16 *to = (bf16 *)x->numbers + row * x->stride;
#pragma omp simd
    for (long k = 0; k < inner; k++) to[k] = narrow(wide[k]);
    memset(to + inner, 0, (size_t)(x->stride - inner) * sizeof(bf16));
}
#endif

static void tile_fp32(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
               float *sums) {
#define CALL(r, c) tile_of(l, x, row, column, r, c, PLAIN, sums)
    WITH_CONSTANTS(rows, columns, COLUMNS, CALL)
#undef CALL
}

static void place_fp32(const struct rows *x, long row, long inner, float *wide, uint8_t *spare) {
    (void)spare;
    float *to = (float *)x->numbers + row * x->stride;
    memcpy(to, wide, (size_t)inner * sizeof(float));
    memset(to + inner, 0, (size_t)(x->stride - inner) * sizeof(float));
}

/* Of each step the even numbers, then the odd ones. */
static void place_evens_first(const struct rows *x, long row, long inner, float *wide, uint8_t *spare) {
    (void)spare;
    float *to = (float *)x->numbers + row * x->stride;
    memset(wide + inner, 0, (size_t)(x->stride - inner) * sizeof(float));
    for (long k = 0; k < x->stride; k += 2 * FLOATS)
        for (long i = 0; i < FLOATS; i++) {
            to[k + i] = wide[k + 2 * i];
            to[k + FLOATS + i] = wide[k + 2 * i + 1];
        }
}

struct method method_of_floats(const struct linear *l, const struct call *c) {
    (void)c;
    if (l->format == FP32) return (struct method){FLOATS, sizeof(float), 4 * l->inner, place_fp32, tile_fp32, 0, 0};
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    if (!c->x_wide) return (struct method){2 * FLOATS, sizeof(bf16), 2 * l->inner, place_bf16, tile_bf16_pairs, 0, 0};
#endif
    return (struct method){2 * FLOATS, sizeof(float), 2 * l->inner, place_evens_first, tile_bf16, 0, 0};
}
