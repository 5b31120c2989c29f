/* Products in 8 bits of many rows where no instruction adds four products at once: 16 columns of the weight as a panel of
   16-bit pairs, which all rows of x pass. Integer sums are exact, the same as those of tiles. */

#include "tiles.h"

#if defined(PANELS)

/* Columns of a vector of sums; numbers of a column that are moved at once; numbers of a row that are multiplied at once. */
enum { HALF = PANEL_COLUMNS / 2, STEP = 16, AT_ONCE = 8 };

INLINE __m256i add_pairs(__m256i total, __m256i x, __m256i w) {
#if defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(total, x, w);
#else
    return _mm256_add_epi32(total, _mm256_madd_epi16(x, w));
#endif
}

INLINE __m128i bytes_at(const int8_t *x) { return _mm_loadu_si128((const __m128i *)x); }

INLINE void put_widened(int16_t *to, __m128i bytes) {
    _mm256_storeu_si256((__m256i *)to, _mm256_cvtepi8_epi16(bytes));
}

/* STEP numbers of HALF columns, `w_row` apart, become STEP / 2 rows of pairs: columns beside each other. */
static void turn(const int8_t *w, long w_row, int16_t *panel) {
    __m128i two[HALF], four[HALF], eight[HALF];
    UNROLL for (int i = 0; i < HALF; i += 2) {
        __m128i first = bytes_at(w + i * w_row), second = bytes_at(w + (i + 1) * w_row);
        two[i] = _mm_unpacklo_epi16(first, second);
        two[i + 1] = _mm_unpackhi_epi16(first, second);
    }
    UNROLL for (int i = 0; i < HALF; i += 4)
        for (int j = 0; j < 2; j++) {
            four[i + 2 * j] = _mm_unpacklo_epi32(two[i + j], two[i + j + 2]);
            four[i + 2 * j + 1] = _mm_unpackhi_epi32(two[i + j], two[i + j + 2]);
        }
    UNROLL for (int i = 0; i < 4; i++) {
        eight[2 * i] = _mm_unpacklo_epi64(four[i], four[i + 4]);
        eight[2 * i + 1] = _mm_unpackhi_epi64(four[i], four[i + 4]);
    }
    UNROLL for (int i = 0; i < HALF; i++) put_widened(panel + 2 * i * PANEL_COLUMNS, eight[i]);
}

/* 1 ... MOST_COLUMNS columns from `column` on as panels of `stride` numbers each; zeros beyond what there is. */
static void fill_panels(const struct linear *l, long column, long columns, long stride, int16_t *panels) {
    long inner = l->inner;
    for (long c = 0; c < in_lanes(columns); c += HALF) {
        int16_t *panel = panels + c / PANEL_COLUMNS * PANEL_COLUMNS * stride + c % PANEL_COLUMNS * 2;
        const int8_t *w = (const int8_t *)l->weight + (column + c) * inner;
        long whole = c + HALF <= columns ? inner / STEP * STEP : 0;
        for (long k = 0; k < whole; k += STEP) turn(w + k, inner, panel + k * PANEL_COLUMNS);
        for (long k = whole; k < stride; k += STEP) {
            int8_t rest[HALF * STEP] = {0};
            for (long i = 0; i < least(HALF, columns - c); i++)
                memcpy(rest + i * STEP, w + i * inner + k, (size_t)least(STEP, inner - k));
            turn(rest, STEP, panel + k * PANEL_COLUMNS);
        }
    }
}

/* Below, `rows` is a constant wherever this is inlined. */
INLINE void sums_of(const int16_t *x, long stride, const int16_t *panel, int rows, const float *rates,
                    const float *scales, float out[PANEL_ROWS][PANEL_COLUMNS]) {
    __m256i total[PANEL_ROWS][2];
    UNROLL for (int r = 0; r < rows; r++) total[r][0] = total[r][1] = _mm256_setzero_si256();
    for (long at = 0; at < stride; at += AT_ONCE)
        UNROLL for (long k = at; k < at + AT_ONCE; k += 2) {
            __m256i first = _mm256_loadu_si256((const __m256i *)(panel + k * PANEL_COLUMNS));
            __m256i second = _mm256_loadu_si256((const __m256i *)(panel + (k + 1) * PANEL_COLUMNS));
            UNROLL for (int r = 0; r < rows; r++) {
                /* A pair in every place; the form for floats is loaded twice as fast. */
                __m256i each = _mm256_castps_si256(_mm256_broadcast_ss((const float *)(x + r * stride + k)));
                total[r][0] = add_pairs(total[r][0], each, first);
                total[r][1] = add_pairs(total[r][1], each, second);
                /* One row after another: GCC would otherwise begin all of them, and keep sums in memory. */
                __asm__("" : "+x"(total[r][0]), "+x"(total[r][1]));
            }
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < 2; i++) {
            __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(total[r][i]), _mm256_loadu_ps(scales + i * HALF));
            _mm256_storeu_ps(out[r] + i * HALF, _mm256_mul_ps(product, _mm256_set1_ps(rates[r])));
        }
}

/* sums[row][column] of 1 ... PANEL_ROWS rows of x and the columns that `fill_panels` was called for. */
static void panel_sums(const struct linear *l, const struct rows *x, long row, int rows, long column, long columns,
                const int16_t *panels, float *sums) {
    const int16_t *numbers = (const int16_t *)x->numbers + row * x->stride;
    for (long c = 0; c < columns; c += PANEL_COLUMNS) {
        long count = least(PANEL_COLUMNS, columns - c);
        const int16_t *panel = panels + c * x->stride;
        float scales[PANEL_COLUMNS] = {0}, out[PANEL_ROWS][PANEL_COLUMNS];
        memcpy(scales, (const float *)l->scales + column + c, (size_t)count * sizeof(float));
#define CALL(n) sums_of(numbers, x->stride, panel, n, x->scales + row, scales, out)
        switch (rows) {
        case 1: CALL(1); break;
        case 2: CALL(2); break;
        case 3: CALL(3); break;
        case 4: CALL(4); break;
        case 5: CALL(5); break;
        default: CALL(PANEL_ROWS);
        }
#undef CALL
        for (int r = 0; r < rows; r++) memcpy(sums + r * columns + c, out[r], (size_t)count * sizeof(float));
    }
}

static void place_words(const struct rows *x, long row, long inner, float *wide, uint8_t *spare) {
    int16_t *to = (int16_t *)x->numbers + row * x->stride;
    x->scales[row] = round_row(wide, 1, 0, inner, spare);
    memset(spare + inner, ZERO_POINT, (size_t)(x->stride - inner));
#pragma omp simd
    for (long k = 0; k < x->stride; k++) to[k] = (int16_t)(spare[k] - ZERO_POINT);
}

struct method method_of_panels(const struct linear *l) {
    return (struct method){LANES, sizeof(int16_t), l->inner, place_words, 0, fill_panels, panel_sums};
}

#endif
