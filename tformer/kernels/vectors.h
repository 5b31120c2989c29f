/* The widest vectors of floats of this processor: plain C of GCC and Clang, and named instructions only where these are
   much faster, always beside a loop that means the same. */

#ifndef TFORMER_VECTORS_H
#define TFORMER_VECTORS_H

#include "common.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
enum { BYTES = 64 };
#elif defined(__AVX2__)
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif
enum { FLOATS = BYTES / sizeof(float), AHEAD = 16384 }; /* AHEAD: bytes of a weight that are prefetched */

typedef float floats __attribute__((vector_size(BYTES)));
typedef uint32_t words __attribute__((vector_size(BYTES)));
typedef bf16 halves __attribute__((vector_size(BYTES / 2)));

INLINE floats load_floats(const float *x) {
    floats out;
    memcpy(&out, x, sizeof out);
    return out;
}

INLINE words load_words(const void *x) {
    words out;
    memcpy(&out, x, sizeof out);
    return out;
}

INLINE floats widen_floats(const bf16 *x) {
    halves bits;
    memcpy(&bits, x, sizeof bits);
    return (floats)(__builtin_convertvector(bits, words) << 16);
}

INLINE void ask_ahead(const void *weight) { __builtin_prefetch((const char *)weight + AHEAD); }

/* The sum of a vector's numbers. */
INLINE float total_of(floats x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX2__)
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

#endif
