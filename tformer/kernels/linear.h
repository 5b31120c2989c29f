#ifndef TFORMER_LINEAR_H
#define TFORMER_LINEAR_H

#include "common.h"

enum { ZERO_POINT = 128 };

/* The product of a weight. As `functions.py` fills it in. */
struct linear {
    const void *weight;    /* bf16 or int8 [columns, inner] */
    const float *bias;     /* [columns] or NULL */
    const float *scales;   /* int8: what 1 stands for in each row of the weight */
    const int32_t *totals; /* int8: the sum of each row of the weight */
    long inner, columns;
    int wide; /* y in fp32, else in bf16 */
};

float round_row(const void *x, int wide, long at, long inner, uint8_t *out);

#endif
