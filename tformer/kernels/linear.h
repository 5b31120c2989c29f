#ifndef TFORMER_LINEAR_H
#define TFORMER_LINEAR_H

/* What a product is: its weight, and what comes before and after it. */

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

/* Before and after a product, in rounding.c and around.c. */
float round_row(const void *x, int wide, long at, long inner, uint8_t *out);
void read_row(const struct call *c, long row, long inner, float *out);
void finish(const struct linear *l, const struct call *c, long row, long column, long columns, float *sums,
            const float *second);

#endif
