/* What comes before and after the product of a weight: the norm of a row of x; bias, activation, gate and residual. */

#include "linear.h"

/* y's dtype is that of PyTorch's operators after each of them: numbers are rounded to it in between. */
INLINE float rounded_to(float x, int wide) { return wide ? x : widen(narrow(x)); }

/* Row `row` of x in fp32, after the norm. */
void read_row(const struct call *c, long row, long inner, float *out) {
    const float *wide = (const float *)c->x + row * inner;
    const bf16 *narrow_x = (const bf16 *)c->x + row * inner;
    if (c->x_wide)
        memcpy(out, wide, (size_t)inner * sizeof(float));
    else {
#pragma omp simd
        for (long k = 0; k < inner; k++) out[k] = widen(narrow_x[k]);
    }
    if (c->norm == NO_NORM) return;
    float mean = 0, squares = 0;
    if (c->norm == LAYER_NORM) {
#pragma omp simd reduction(+ : mean)
        for (long k = 0; k < inner; k++) mean += out[k];
        mean /= (float)inner;
    }
#pragma omp simd reduction(+ : squares)
    for (long k = 0; k < inner; k++) squares += (out[k] - mean) * (out[k] - mean);
    float rate = 1 / sqrtf(squares / (float)inner + c->epsilon);
    const float *gain = c->gain, *shift = c->shift;
    int x_wide = c->x_wide;
#pragma omp simd
    for (long k = 0; k < inner; k++)
        out[k] = rounded_to((out[k] - mean) * rate * (gain ? gain[k] : 1) + (shift ? shift[k] : 0), x_wide);
}

/* 1 / (1 + e^-x) */
INLINE float sigmoid(float x) {
    float e = exponential(-fabsf(x));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

/* The normal distribution below x: half of erfc(-x / sqrt 2), by Abramowitz and Stegun's 7.1.26. */
INLINE float normal(float x) {
    float z = fabsf(x) * 0.70710678f, t = 1 / (1 + 0.3275911f * z);
    float p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    float tail = 0.5f * p * exponential(-z * z);
    return x < 0 ? tail : 1 - tail;
}

/* `kind` is a constant wherever this is inlined. */
INLINE float activated(float x, int kind) {
    switch (kind) {
    case RELU: return x < 0 ? 0 : x; /* keeps NaN */
    case GELU: return x * normal(x);
    case GELU_TANH: return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    case SILU: return x * sigmoid(x);
    case RELU2: return x < 0 ? 0 : x * x;
    default: return x;
    }
}

INLINE void activate(float *x, long count, int kind, int wide) {
#pragma omp simd
    for (long i = 0; i < count; i++) x[i] = rounded_to(activated(x[i], kind), wide);
}

/* Turns the sums of one row, from `column` on, into numbers of y; `second`: the sums of the second half with a gate. */
void finish(const struct linear *l, const struct call *c, long row, long column, long columns, float *sums,
            const float *second) {
    int wide = c->y_wide;
    const float *bias = l->bias ? l->bias + column : 0;
    if (bias) {
#pragma omp simd
        for (long i = 0; i < columns; i++) sums[i] += bias[i];
    }
    if (c->activation != NO_ACTIVATION) {
#pragma omp simd
        for (long i = 0; i < columns; i++) sums[i] = rounded_to(sums[i], wide);
        switch (c->activation) {
        case RELU: activate(sums, columns, RELU, wide); break;
        case GELU: activate(sums, columns, GELU, wide); break;
        case GELU_TANH: activate(sums, columns, GELU_TANH, wide); break;
        case SILU: activate(sums, columns, SILU, wide); break;
        default: activate(sums, columns, RELU2, wide);
        }
    }
    if (c->gated) {
        bias = bias ? bias + l->columns / 2 : 0;
#pragma omp simd
        for (long i = 0; i < columns; i++) sums[i] *= rounded_to(second[i] + (bias ? bias[i] : 0), wide);
    }
    long at = row * (c->gated ? l->columns / 2 : l->columns) + column;
    float *wide_y = (float *)c->y + at;
    bf16 *narrow_y = (bf16 *)c->y + at;
    const float *wide_residual = (const float *)c->residual + at;
    const bf16 *narrow_residual = (const bf16 *)c->residual + at;
    if (!c->residual && wide)
        memcpy(wide_y, sums, (size_t)columns * sizeof(float));
    else if (wide) {
#pragma omp simd
        for (long i = 0; i < columns; i++) wide_y[i] = wide_residual[i] + sums[i];
    } else if (!c->residual) {
#pragma omp simd
        for (long i = 0; i < columns; i++) narrow_y[i] = narrow(sums[i]);
    } else {
#pragma omp simd
        for (long i = 0; i < columns; i++)
            narrow_y[i] = narrow(widen(narrow_residual[i]) + widen(narrow(sums[i])));
    }
}
