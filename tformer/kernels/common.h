/* Numbers of 16 bits, and what every kernel here shares. Plain C, vectorized by the compiler; instructions by name only
   where it would not find them, always beside a loop that means the same. */

#ifndef TFORMER_COMMON_H
#define TFORMER_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
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

/* To the nearest, ties to even; NaN stays NaN. */
static inline bf16 narrow(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bf16)rounded;
}

/* e^x for x <= 0, to within two units in the last place: 2^(n + f) with a polynomial for 2^f (Cephes' expf). */
static inline float exponential(float x) {
    x = x < -104.0f ? -104.0f : x; /* 0 to any fp32 sum that has a 1 in it */
    float n = rintf(x * 1.44269504f);
    float f = fmaf(n, -0.693359375f, x);
    f = fmaf(n, 2.12194440e-4f, f);
    float p = 1.9875691500e-4f;
    p = fmaf(p, f, 1.3981999507e-3f);
    p = fmaf(p, f, 8.3334519073e-3f);
    p = fmaf(p, f, 4.1665795894e-2f);
    p = fmaf(p, f, 1.6666665459e-1f);
    p = fmaf(p, f, 5.0000001201e-1f);
    p = fmaf(p, f * f, f) + 1.0f;
    int32_t exponent = (int32_t)(n < -126.0f ? -127.0f : n);
    return p * float_of((uint32_t)(exponent + 127) << 23);
}

/* Scores, and columns of a product, are in steps of sixteen on any processor. */
enum { LANES = 16 };
static inline long in_lanes(long count) { return (count + LANES - 1) / LANES * LANES; }

static inline long least(long a, long b) { return a < b ? a : b; }

#endif
