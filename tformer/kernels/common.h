/* Numbers of 16 bits, and what every kernel here shares. Plain C, vectorised by the compiler; instructions by name only
   where it would not find them, always beside a loop that means the same. */

#ifndef TFORMER_COMMON_H
#define TFORMER_COMMON_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef uint16_t bf16;

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float widen(bf16 x) { return float_of((uint32_t)x << 16); }

/* To the nearest, ties to even; what is not a number stays none. */
static inline bf16 narrow(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bf16)rounded;
}

/* Sixteen at a time, on any processor. */
enum { LANES = 16 };
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t wide_bits __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef bf16 narrow_bits __attribute__((vector_size(LANES * sizeof(bf16))));

INLINE lanes widen_lanes(const bf16 *x) {
    narrow_bits bits;
    memcpy(&bits, x, sizeof bits);
    return (lanes)(__builtin_convertvector(bits, wide_bits) << 16);
}

static inline long in_lanes(long count) { return (count + LANES - 1) / LANES * LANES; }

static inline long least(long a, long b) { return a < b ? a : b; }

#endif
