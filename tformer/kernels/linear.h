#ifndef TFORMER_LINEAR_H
#define TFORMER_LINEAR_H

#include "common.h"

enum { ZERO_POINT = 128, GROUP = 32, UNIT = 4 * GROUP };

/* How the numbers of a weight [columns, inner] lie: as functions.py numbers them.

   INT4: each row in units of four groups of 32 numbers, the last one filled with zeros. 32 bytes are two groups, the
   first in the low halves and the second in the high halves, 0 ... 15 with 8 for zero. */
enum format { BF16, FP32, INT8, INT4 };

/* The product of a weight. As `functions.py` fills it in. */
struct linear {
    const void *weight;
    const float *bias;     /* [columns] or NULL */
    const void *scales;    /* INT8: fp32 [columns], INT4: bf16 [columns, groups]: what 1 stands for */
    const int32_t *totals; /* INT8: the sum of each row of the weight */
    long inner, columns;
    int format; /* enum format */
};

enum norm { NO_NORM, LAYER_NORM, RMS_NORM };
enum activation { NO_ACTIVATION, RELU, GELU, GELU_TANH, SILU, RELU2 };

/* y = [residual +] activation(norm(x) W^T + bias), of rows that lie together. As `functions.py` fills it in. */
struct call {
    const void *x, *residual; /* bf16 or fp32 [rows, inner] and [rows, columns of y]; residual may be NULL */
    void *y;                  /* [rows, columns], with a gate half as many */
    const float *gain, *shift; /* of the norm [inner], or NULL */
    long rows;
    float epsilon;
    int x_wide, y_wide; /* in fp32, else in bf16; the residual as y */
    int norm, activation;
    int gated; /* y = activation of the first half of the columns, times the second half */
};

/* Rows of x as a tile reads them; `stride` numbers from one row to the next, zeros beyond `inner`. */
struct rows {
    const void *numbers;
    long stride;
    const float *scales; /* of rounded rows: what 1 stands for */
    const int32_t *offsets; /* for INT4: -8 times the sum of each four numbers [rows, stride / 4] */
};

enum { MOST_COLUMNS = 32 }; /* of a block */
enum { TILE_ROWS = 4, COLUMNS = 2 };

/* sums[row][column] = the products of 1 ... TILE_ROWS rows of x with 1 row of the weight, or as many as a tile takes. */
typedef void tile(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
                  float *sums);
tile tile_bf16, tile_bf16_pairs, tile_fp32, tile_int8, tile_int4;

/* CALL(rows, columns) with constants, so that the compiler keeps a tile's sums in registers. */
#define WITH_CONSTANTS(rows, columns, MOST, CALL)                                                                      \
    switch (columns == 1 ? rows : rows + TILE_ROWS) {                                                                  \
    case 1: CALL(1, 1); break;                                                                                         \
    case 2: CALL(2, 1); break;                                                                                         \
    case 3: CALL(3, 1); break;                                                                                         \
    case 4: CALL(4, 1); break;                                                                                         \
    case 5: CALL(1, MOST); break;                                                                                      \
    case 6: CALL(2, MOST); break;                                                                                      \
    case 7: CALL(3, MOST); break;                                                                                      \
    default: CALL(4, MOST);                                                                                            \
    }

/* Where AVX2 has no products of four neighbours: many rows in 8 bits by panels. Rows of x are then in 16 bits. */
enum { PANEL_ROWS = 6, PANEL_COLUMNS = 16, MANY_ROWS = 16 };
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#define PANELS
#endif
typedef void fill(const struct linear *l, long column, long columns, long stride, int16_t *panels);
typedef void panel(const struct linear *l, const struct rows *x, long row, int rows, long column, long columns,
                   const int16_t *panels, float *sums);
fill fill_panels;
panel panel_sums;

float round_row(const void *x, int wide, long at, long inner, uint8_t *out);
void order_row(const uint8_t *rounded, long inner, long stride, int8_t *numbers, int32_t *offsets);

void read_row(const struct call *c, long row, long inner, float *out);
void finish(const struct linear *l, const struct call *c, long row, long column, long columns, float *sums,
            const float *second);

#endif
