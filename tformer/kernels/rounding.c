/* Rows of numbers in 8 bits, each with a scale of its own, and back: the rule of `nn/products.py`, in one pass each where
   PyTorch's operators take eight. */

#include <math.h>

#include "linear.h"

static const float LARGEST = 126.0f, TINY = 1e-20f;

/* `inner` numbers from x[at] on, as 1 ... 255 with 128 for zero; returns the scale, NaN or inf if one of them is. */
float round_row(const void *x, int wide, long at, long inner, uint8_t *out) {
    const float *wide_x = (const float *)x + at;
    const bf16 *narrow_x = (const bf16 *)x + at;
    uint32_t highest = 0; /* bits of the largest magnitude: their order is that of the numbers, NaN above all */
    if (wide) {
#pragma omp simd reduction(max : highest)
        for (long k = 0; k < inner; k++) {
            uint32_t bits = bits_of(wide_x[k]) & 0x7fffffffu;
            highest = bits > highest ? bits : highest;
        }
    } else {
#pragma omp simd reduction(max : highest)
        for (long k = 0; k < inner; k++) {
            uint32_t bits = ((uint32_t)narrow_x[k] << 16) & 0x7fffffffu;
            highest = bits > highest ? bits : highest;
        }
    }
    float scale = widen(narrow(widen(narrow(float_of(highest))) * (1 / LARGEST)));
    scale = scale < TINY ? widen(narrow(TINY)) : scale;
    if (!isfinite(scale)) {
        memset(out, ZERO_POINT, (size_t)inner);
        return NAN;
    }
#pragma omp simd
    for (long k = 0; k < inner; k++) {
        float number = wide ? wide_x[k] : widen(narrow_x[k]);
        out[k] = (uint8_t)((int32_t)rintf(number / scale) + ZERO_POINT);
    }
    return scale;
}

/* x bf16 or fp32 [rows, inner] -> out [rows, inner] and the scale of each row. */
void round_rows(const void *x, int wide, long rows, long inner, uint8_t *out, float *scales, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long r = 0; r < rows; r++) scales[r] = round_row(x, wide, r * inner, inner, out + r * inner);
}

/* y bf16 or fp32 [rows, columns], a product of rounded rows: each times its row's scale, plus the bias or NULL. */
void rescale_rows(void *y, int wide, long rows, long columns, const float *scales, const float *bias, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long r = 0; r < rows; r++) {
        float scale = scales[r];
        float *wide_y = (float *)y + r * columns;
        bf16 *narrow_y = (bf16 *)y + r * columns;
        if (wide) {
#pragma omp simd
            for (long c = 0; c < columns; c++) wide_y[c] = wide_y[c] * scale + (bias ? bias[c] : 0);
        } else {
#pragma omp simd
            for (long c = 0; c < columns; c++) narrow_y[c] = narrow(widen(narrow_y[c]) * scale + (bias ? bias[c] : 0));
        }
    }
}
