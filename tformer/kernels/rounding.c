/* Rows of numbers in 8 bits, each with its own scale, and back: the rule of `nn/products.py`, in one pass each where
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

/* The squared error of a group of numbers in 4 bits, 0 ... 15 with 8 for zero, and the best scale for these. */
static float round_group(const float *x, float scale, uint8_t *out, float *best) {
    float error = 0, products = 0, squares = 0, rate = scale == 0 ? 0 : 1 / scale;
#pragma omp simd reduction(+ : error, products, squares)
    for (long k = 0; k < GROUP; k++) {
        float number = rintf(x[k] * rate);
        number = number < -8 ? -8 : number > 7 ? 7 : number;
        float rest = x[k] - number * scale;
        error += rest * rest;
        products += x[k] * number;
        squares += number * number;
        out[k] = (uint8_t)((int32_t)number + 8);
    }
    *best = squares > 0 ? products / squares : 0;
    return error;
}

/* A scale of small squared error: the best of some around the one that makes the largest magnitude -8, then the best for
   the numbers that it gives. NaN if a number is NaN. */
static bf16 search_scale(float *x, uint8_t *out) {
    float most = 0, best_error = INFINITY, refit = 0, unused, zero = 0;
    for (long k = 0; k < GROUP; k++) {
        most = fabsf(x[k]) > fabsf(most) ? x[k] : most;
        zero += x[k] * 0;
    }
    if (zero != 0) {
        memset(out, 8, GROUP);
        return narrow(NAN);
    }
    int exponent; /* squares of numbers near 1 neither overflow nor vanish */
    most = frexpf(most, &exponent);
    for (long k = 0; k < GROUP; k++) x[k] = ldexpf(x[k], -exponent);
    bf16 best = narrow(0);
    for (int i = 0; i < 9; i++) {
        float best_for_these;
        bf16 scale = narrow(most / (-8.25f + 0.25f * (float)i));
        float error = round_group(x, widen(scale), out, &best_for_these);
        if (error < best_error) {
            best_error = error;
            best = scale;
            refit = best_for_these;
        }
    }
    bf16 again = narrow(refit);
    best = round_group(x, widen(again), out, &unused) < best_error ? again : best;
    round_group(x, widen(best), out, &unused);
    return narrow(ldexpf(widen(best), exponent));
}

/* w bf16 or fp32 [columns, inner] in the form INT4: out and scales, whose rows have whole units. */
void round_groups(const void *w, int wide, long columns, long inner, uint8_t *out, bf16 *scales, int threads) {
    long groups = (inner + UNIT - 1) / UNIT * UNIT / GROUP;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long c = 0; c < columns; c++)
        for (long g = 0; g < groups; g++) {
            float numbers[GROUP];
            uint8_t rounded[GROUP], *to = out + (c * groups + g) / 2 * GROUP;
            for (long k = 0; k < GROUP; k++) {
                long at = g * GROUP + k;
                numbers[k] = at >= inner ? 0 : wide ? ((const float *)w)[c * inner + at]
                                                    : widen(((const bf16 *)w)[c * inner + at]);
            }
            scales[c * groups + g] = search_scale(numbers, rounded);
            for (long k = 0; k < GROUP; k++) to[k] = g % 2 ? (uint8_t)(to[k] | rounded[k] << 4) : rounded[k];
        }
}
