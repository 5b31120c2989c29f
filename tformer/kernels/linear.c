/* y = x W^T + b for few rows of x. W [columns, inner] lies as it is stored, one row for each column of y. Reading it
   once, in a single stream, is nearly all the work: every row of x meets a row of W while that is in the cache. */

#include "linear.h"

enum { BLOCK = 8, AHEAD = 16384 }; /* rows of x whose sums stay in registers; bytes of W that are asked for ahead */

static inline void put(const struct linear *l, void *y, long row, long column, float value) {
    value += l->bias ? l->bias[column] : 0;
    if (l->wide)
        ((float *)y)[row * l->columns + column] = value;
    else
        ((bf16 *)y)[row * l->columns + column] = narrow(value);
}

/* Below, `rows` is a constant wherever these are inlined. */

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
INLINE void dots_bf16(const bf16 *x, const bf16 *w, long inner, int rows, float *sums) {
    __m512 total[BLOCK];
    UNROLL for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
    for (long k = 0; k < inner; k += 32) {
        __mmask32 in = inner - k >= 32 ? 0xffffffffu : (1u << (inner - k)) - 1u;
        _mm_prefetch((const char *)(w + k) + AHEAD, _MM_HINT_T0);
        __m512bh part = (__m512bh)_mm512_maskz_loadu_epi16(in, w + k);
        UNROLL for (int r = 0; r < rows; r++)
            total[r] = _mm512_dpbf16_ps(total[r], (__m512bh)_mm512_maskz_loadu_epi16(in, x + r * inner + k), part);
    }
    UNROLL for (int r = 0; r < rows; r++) sums[r] = _mm512_reduce_add_ps(total[r]);
}
#else
INLINE void dots_bf16(const bf16 *x, const bf16 *w, long inner, int rows, float *sums) {
    for (int r = 0; r < rows; r++) {
        float total = 0;
#pragma omp simd reduction(+ : total)
        for (long k = 0; k < inner; k++) total += widen(x[r * inner + k]) * widen(w[k]);
        sums[r] = total;
    }
}
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
INLINE void dots_int8(const uint8_t *x, const int8_t *w, long inner, int rows, int32_t *sums) {
    __m512i total[BLOCK];
    UNROLL for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_si512();
    for (long k = 0; k < inner; k += 64) {
        __mmask64 in = inner - k >= 64 ? ~0ull : (1ull << (inner - k)) - 1ull;
        _mm_prefetch((const char *)(w + k) + AHEAD, _MM_HINT_T0);
        __m512i part = _mm512_maskz_loadu_epi8(in, w + k);
        UNROLL for (int r = 0; r < rows; r++)
            total[r] = _mm512_dpbusd_epi32(total[r], _mm512_maskz_loadu_epi8(in, x + r * inner + k), part);
    }
    UNROLL for (int r = 0; r < rows; r++) sums[r] = _mm512_reduce_add_epi32(total[r]);
}
#else
INLINE void dots_int8(const uint8_t *x, const int8_t *w, long inner, int rows, int32_t *sums) {
    for (int r = 0; r < rows; r++) {
        int32_t total = 0;
#pragma omp simd reduction(+ : total)
        for (long k = 0; k < inner; k++) total += (int32_t)x[r * inner + k] * (int32_t)w[k];
        sums[r] = total;
    }
}
#endif

INLINE void column_bf16(const struct linear *l, const bf16 *x, void *y, long first, long c, int rows) {
    float sums[BLOCK];
    dots_bf16(x + first * l->inner, (const bf16 *)l->weight + c * l->inner, l->inner, rows, sums);
    for (int r = 0; r < rows; r++) put(l, y, first + r, c, sums[r]);
}

INLINE void column_int8(const struct linear *l, const uint8_t *x, const float *scales, void *y, long first, long c,
                        int rows) {
    int32_t sums[BLOCK];
    dots_int8(x + first * l->inner, (const int8_t *)l->weight + c * l->inner, l->inner, rows, sums);
    for (int r = 0; r < rows; r++) {
        float product = (float)(sums[r] - ZERO_POINT * l->totals[c]) * l->scales[c];
        put(l, y, first + r, c, product * scales[first + r]);
    }
}

/* COLUMN(n) with the constant n = rows. */
#define WITH_CONSTANT(rows, COLUMN)                                                                                    \
    switch (rows) {                                                                                                    \
    case 1: COLUMN(1); break;                                                                                          \
    case 2: COLUMN(2); break;                                                                                          \
    case 3: COLUMN(3); break;                                                                                          \
    case 4: COLUMN(4); break;                                                                                          \
    case 5: COLUMN(5); break;                                                                                          \
    case 6: COLUMN(6); break;                                                                                          \
    case 7: COLUMN(7); break;                                                                                          \
    default: COLUMN(BLOCK);                                                                                            \
    }

/* x bf16 [rows, inner], weight bf16 -> y [rows, columns]. */
void linear_bf16(const struct linear *l, const bf16 *x, void *y, long rows, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long c = 0; c < l->columns; c++)
        for (long first = 0; first < rows; first += BLOCK) {
#define COLUMN(n) column_bf16(l, x, y, first, c, n)
            WITH_CONSTANT(rows - first, COLUMN)
#undef COLUMN
        }
}

/* x bf16, or fp32 where `x_wide` [rows, inner], weight int8 -> y [rows, columns]. Returns 1 when memory is short. */
int linear_int8(const struct linear *l, const void *x, int x_wide, void *y, long rows, int threads) {
    uint8_t *rounded = malloc((size_t)(rows * l->inner) + 1);
    float *scales = malloc((size_t)(rows + 1) * sizeof(float));
    int failed = !rounded || !scales;
    if (!failed) {
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (long r = 0; r < rows; r++)
                scales[r] = round_row(x, x_wide, r * l->inner, l->inner, rounded + r * l->inner);
#pragma omp for schedule(static)
            for (long c = 0; c < l->columns; c++)
                for (long first = 0; first < rows; first += BLOCK) {
#define COLUMN(n) column_int8(l, rounded, scales, y, first, c, n)
                    WITH_CONSTANT(rows - first, COLUMN)
#undef COLUMN
                }
        }
    }
    free(rounded);
    free(scales);
    return failed;
}
