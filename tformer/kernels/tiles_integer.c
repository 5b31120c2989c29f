/* Tiles of products with weights in 8 and 4 bits: rows of x in 8 bits times a few rows of the weight. Integer sums are
   exact, for 4 bits those of each group, and so the same on every processor. */

#include "tiles.h"
#include "vectors.h"

#if defined(__AVX2__)

/* `add_8`: sums plus the products of w with x, which is 1 ... 255 with 128 for zero; too large by OFFSET for each 1 of w.
   `add_4`: sums plus the products of w from 0 to 15 with x, which has a sign. Each sum is of four neighbours. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
enum { AT_ONCE = 64, OFFSET = ZERO_POINT };
typedef __m512i integers;
typedef __m512 rates;
INLINE integers add_8(integers total, integers x, integers w) { return _mm512_dpbusd_epi32(total, x, w); }
INLINE integers add_4(integers total, integers x, integers w) { return _mm512_dpbusd_epi32(total, w, x); }
INLINE integers first_halves(integers w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
INLINE integers second_halves(integers w) { return first_halves(_mm512_srli_epi16(w, 4)); }
INLINE rates scaled(rates total, integers sums, rates scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), scale, total);
}
INLINE int32_t integer_total(integers x) { return _mm512_reduce_add_epi32(x); }
INLINE float rate_total(rates x) { return _mm512_reduce_add_ps(x); }
/* The scales of a unit, two for each 32 bytes of it. */
INLINE integers pair_of_scales(const int32_t *pairs) {
    return _mm512_mask_set1_epi32(_mm512_set1_epi32(pairs[0]), 0xff00, pairs[1]);
}
INLINE rates first_scale(integers pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
INLINE rates second_scale(integers pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}
#else
enum { AT_ONCE = 32, OFFSET = 0 };
typedef __m256i integers;
typedef __m256 rates;
/* Pairs of products of at most 127 x 127 or 15 x 127 fit into 16 bits: nothing saturates. */
INLINE integers add_products(integers total, integers positive, integers other) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(total, positive, other);
#else
    integers pairs = _mm256_maddubs_epi16(positive, other);
    return _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
INLINE integers add_8(integers total, integers x, integers w) {
    integers number = _mm256_xor_si256(x, _mm256_set1_epi8((char)ZERO_POINT));
    return add_products(total, _mm256_abs_epi8(number), _mm256_sign_epi8(w, number));
}
INLINE integers add_4(integers total, integers x, integers w) { return add_products(total, w, x); }
INLINE integers first_halves(integers w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
INLINE integers second_halves(integers w) { return first_halves(_mm256_srli_epi16(w, 4)); }
INLINE rates scaled(rates total, integers sums, rates scale) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), scale, total);
}
INLINE int32_t integer_total(integers x) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 1)));
}
INLINE float rate_total(rates x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
INLINE integers pair_of_scales(const int32_t *pairs) { return _mm256_set1_epi32(pairs[0]); }
INLINE rates first_scale(integers pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
INLINE rates second_scale(integers pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
}
#endif

enum { PAIRS_AT_ONCE = AT_ONCE / GROUP }; /* pairs of groups in 4 bits */

INLINE integers load(const void *x) {
    integers out;
    memcpy(&out, x, sizeof out);
    return out;
}

/* Below, `rows` and `columns` are constants wherever these are inlined. */

INLINE void step_int8(integers total[TILE_ROWS][COLUMNS], const uint8_t *x, long stride, const int8_t *w,
                      long w_row, int rows, int columns) {
    integers part[COLUMNS];
    UNROLL for (int c = 0; c < columns; c++) part[c] = load(w + c * w_row);
    UNROLL for (int r = 0; r < rows; r++) {
        integers each = load(x + r * stride);
        UNROLL for (int c = 0; c < columns; c++) total[r][c] = add_8(total[r][c], each, part[c]);
    }
}

INLINE void sums_int8(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
                      int32_t *sums) {
    const uint8_t *numbers = (const uint8_t *)x->numbers + row * x->stride;
    const int8_t *w = (const int8_t *)l->weight + column * l->inner;
    integers total[TILE_ROWS][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) total[r][c] = (integers){0};
    long k = 0;
    for (; k + AT_ONCE <= l->inner; k += AT_ONCE) {
        if (row == 0) UNROLL for (int c = 0; c < columns; c++) ask_ahead(w + c * l->inner + k);
        step_int8(total, numbers + k, x->stride, w + k, l->inner, rows, columns);
    }
    if (k < l->inner) { /* what is left of the weight's rows, beside zeros */
        int8_t rest[COLUMNS * AT_ONCE] = {0};
        for (int c = 0; c < columns; c++) memcpy(rest + c * AT_ONCE, w + c * l->inner + k, (size_t)(l->inner - k));
        step_int8(total, numbers + k, x->stride, rest, AT_ONCE, rows, columns);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++)
            sums[r * columns + c] = integer_total(total[r][c]) - OFFSET * l->totals[column + c];
}

INLINE void sums_int4(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
                      float *sums) {
    const int8_t *numbers = (const int8_t *)x->numbers + row * x->stride;
    const int32_t *offsets = x->offsets + row * x->stride / 4;
    const uint8_t *w = (const uint8_t *)l->weight + column * x->stride / 2;
    const int32_t *pairs = (const int32_t *)l->scales + column * x->stride / (2 * GROUP);
    long bytes = x->stride / 2, scales = x->stride / (2 * GROUP);
    rates total[TILE_ROWS][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) total[r][c] = (rates){0};
    for (long i = 0; i < scales; i += PAIRS_AT_ONCE)
        UNROLL for (int c = 0; c < columns; c++) {
            if (row == 0) ask_ahead(w + c * bytes + i * GROUP);
            integers both = load(w + c * bytes + i * GROUP), first = first_halves(both), second = second_halves(both);
            integers pair = pair_of_scales(pairs + c * scales + i);
            rates first_rate = first_scale(pair), second_rate = second_scale(pair);
            UNROLL for (int r = 0; r < rows; r++) {
                const int8_t *at = numbers + r * x->stride + 2 * i * GROUP;
                const int32_t *offset = offsets + (r * x->stride + 2 * i * GROUP) / 4;
                integers sum = add_4(load(offset), load(at), first);
                total[r][c] = scaled(total[r][c], sum, first_rate);
                sum = add_4(load(offset + AT_ONCE / 4), load(at + AT_ONCE), second);
                total[r][c] = scaled(total[r][c], sum, second_rate);
            }
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sums[r * columns + c] = rate_total(total[r][c]);
}

#else

enum { PAIRS_AT_ONCE = 1 };

INLINE void sums_int8(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
                      int32_t *sums) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            const uint8_t *numbers = (const uint8_t *)x->numbers + (row + r) * x->stride;
            const int8_t *w = (const int8_t *)l->weight + (column + c) * l->inner;
            int32_t total = 0;
#pragma omp simd reduction(+ : total)
            for (long k = 0; k < l->inner; k++) total += ((int32_t)numbers[k] - ZERO_POINT) * (int32_t)w[k];
            sums[r * columns + c] = total;
        }
}

INLINE void sums_int4(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
                      float *sums) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            const int8_t *numbers = (const int8_t *)x->numbers + (row + r) * x->stride;
            const uint8_t *w = (const uint8_t *)l->weight + (column + c) * x->stride / 2;
            const bf16 *scales = (const bf16 *)l->scales + (column + c) * x->stride / GROUP;
            float total = 0;
            for (long i = 0; i < x->stride / GROUP; i += 2) {
                int32_t first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
                for (long k = 0; k < GROUP; k++) {
                    int32_t both = w[i / 2 * GROUP + k];
                    first += ((both & 15) - 8) * numbers[i * GROUP + k];
                    second += ((both >> 4) - 8) * numbers[(i + 1) * GROUP + k];
                }
                total += (float)first * widen(scales[i]) + (float)second * widen(scales[i + 1]);
            }
            sums[r * columns + c] = total;
        }
}

#endif

static void tile_int8(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
               float *sums) {
    int32_t exact[TILE_ROWS * COLUMNS];
#define CALL(r, c) sums_int8(l, x, row, column, r, c, exact)
    WITH_CONSTANTS(rows, columns, COLUMNS, CALL)
#undef CALL
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float product = (float)exact[r * columns + c] * ((const float *)l->scales)[column + c];
            sums[r * columns + c] = product * x->scales[row + r];
        }
}

static void tile_int4(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
               float *sums) {
#define CALL(r, c) sums_int4(l, x, row, column, r, c, sums)
    WITH_CONSTANTS(rows, columns, COLUMNS, CALL)
#undef CALL
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sums[r * columns + c] *= x->scales[row + r];
}

/* The row in 8 bits, 1 ... 255 with 128 for zero. */
static void place_int8(const struct rows *x, long row, long inner, float *wide, uint8_t *spare) {
    (void)spare;
    uint8_t *to = (uint8_t *)x->numbers + row * x->stride;
    x->scales[row] = round_row(wide, 1, 0, inner, to);
    memset(to + inner, ZERO_POINT, (size_t)(x->stride - inner));
}

/* The row in 8 bits with signs, its groups in the order in which tiles read them (see tiles.h), zeros beyond; and -8
   times the sum of each four numbers. */
static void place_int4(const struct rows *x, long row, long inner, float *wide, uint8_t *spare) {
    int8_t *numbers = (int8_t *)x->numbers + row * x->stride;
    int32_t *offsets = x->offsets + row * x->stride / 4;
    x->scales[row] = round_row(wide, 1, 0, inner, spare);
    for (long group = 0; group < x->stride / GROUP; group++) {
        long unit = group / (2 * PAIRS_AT_ONCE), i = group % (2 * PAIRS_AT_ONCE);
        long from = (unit * 2 * PAIRS_AT_ONCE + i % PAIRS_AT_ONCE * 2 + i / PAIRS_AT_ONCE) * GROUP;
        for (long k = 0; k < GROUP; k++)
            numbers[group * GROUP + k] = (int8_t)(from + k < inner ? spare[from + k] - ZERO_POINT : 0);
    }
    for (long i = 0; i < x->stride / 4; i++)
        offsets[i] = -8 * (numbers[4 * i] + numbers[4 * i + 1] + numbers[4 * i + 2] + numbers[4 * i + 3]);
}

struct method method_of_integers(const struct linear *l) {
    if (l->format == INT8) return (struct method){LINE, 1, l->inner, place_int8, tile_int8, 0, 0};
    return (struct method){UNIT, 1, l->inner / 2, place_int4, tile_int4, 0, 0};
}
