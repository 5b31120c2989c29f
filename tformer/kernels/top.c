/* The largest numbers of each row, for the candidates of beam search: one pass that rarely stops. */

#include <omp.h>

#include "common.h"

enum { CHUNK = 64 };

/* Integers in the order of the numbers: -0 equals 0, NaN is above all. */
static inline int32_t ordered(float x) {
    int32_t bits = (int32_t)bits_of(x + 0.0f);
    int32_t key = bits < 0 ? bits ^ 0x7fffffff : bits;
    return x != x ? INT32_MAX : key;
}

/* The k largest of x [size], largest first and equal ones by index: their indices, and their keys in `keys` [k]. */
static void top_of_row(const float *x, long size, long k, int32_t *keys, int64_t *indices) {
    long found = 0;
    for (long start = 0; start < size; start += CHUNK) {
        long end = least(size, start + CHUNK);
        if (found == k) {
            int32_t highest = INT32_MIN;
#pragma omp simd reduction(max : highest)
            for (long i = start; i < end; i++) {
                int32_t key = ordered(x[i]);
                highest = key > highest ? key : highest;
            }
            if (highest <= keys[k - 1]) continue;
        }
        for (long i = start; i < end; i++) {
            int32_t key = ordered(x[i]);
            if (found == k && key <= keys[k - 1]) continue;
            long at = found < k ? found++ : k - 1;
            for (; at > 0 && keys[at - 1] < key; at--) {
                keys[at] = keys[at - 1];
                indices[at] = indices[at - 1];
            }
            keys[at] = key;
            indices[at] = i;
        }
    }
}

/* x fp32 [rows, size] with `stride` between rows -> values fp32 and indices [rows, k]. Returns 1 when memory is short. */
int top(const float *x, long rows, long size, long stride, long k, float *values, int64_t *indices, int threads) {
    int32_t *keys = malloc((size_t)(k * threads) * sizeof(int32_t));
    if (!keys) return 1;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long r = 0; r < rows; r++) {
        top_of_row(x + r * stride, size, k, keys + omp_get_thread_num() * k, indices + r * k);
        for (long i = 0; i < k; i++) values[r * k + i] = x[r * stride + indices[r * k + i]];
    }
    free(keys);
    return 0;
}
