/* softmax(q K^T scale + bias) V for few queries of each row, a step of decoding. A query head is one pass over its keys
   and one over its values; scores, weights and sums are fp32. */

#include <math.h>
#include <omp.h>

#include "attention.h"

enum { LINE = 64, MOST_ASKED = 64, VECTORS = 4 }; /* bytes of a cache line; keys asked for ahead; of sums at a time */

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

static inline float dot(const bf16 *x, const bf16 *y, long size) {
    float total = 0;
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < size; i += 32) {
        __mmask32 in = size - i >= 32 ? 0xffffffffu : (1u << (size - i)) - 1u;
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(in, x + i),
                               (__m512bh)_mm512_maskz_loadu_epi16(in, y + i));
    }
    total = _mm512_reduce_add_ps(sum);
#else
#pragma omp simd reduction(+ : total)
    for (long i = 0; i < size; i++) total += widen(x[i]) * widen(y[i]);
#endif
    return total;
}

/* scores -> weights in place, `count` of them, a multiple of LANES; returns their sum. None seen: zeros, and 1. */
static float weigh(float *scores, long count) {
    float highest = -INFINITY, total = 0;
#pragma omp simd reduction(max : highest)
    for (long s = 0; s < count; s++) highest = scores[s] > highest ? scores[s] : highest;
    if (highest == -INFINITY) highest = 0; /* all masked: their weights are 0 below; or none a number: NaN below */
#pragma omp simd reduction(+ : total)
    for (long s = 0; s < count; s++) {
        float weight = scores[s] == -INFINITY ? 0.0f : exponential(scores[s] - highest);
        scores[s] = weight;
        total += weight;
    }
    return total == 0 ? 1 : total;
}

/* out = rate times the sum of values by weight, `size` <= VECTORS * LANES numbers from the first one on. */
INLINE void mix(const struct attention *a, const bf16 *values, const float *weights, float rate, int vectors,
                bf16 *out) {
    lanes sum[VECTORS];
    UNROLL for (int i = 0; i < vectors; i++) sum[i] = (lanes){0};
    for (long s = 0; s < a->num_keys; s++) {
        if (weights[s] == 0) continue; /* a slot that nobody sees may hold anything */
        const bf16 *value = values + s * a->v_strides[2];
        UNROLL for (int i = 0; i < vectors; i++) sum[i] += weights[s] * widen_lanes(value + i * LANES);
    }
    UNROLL for (int i = 0; i < vectors; i++)
        for (int j = 0; j < LANES; j++) out[i * LANES + j] = narrow(sum[i][j] * rate);
}

/* The same for numbers that fill no vector. */
static void mix_rest(const struct attention *a, const bf16 *values, const float *weights, float rate, long size,
                     bf16 *out) {
    float sum[LANES] = {0};
    for (long s = 0; s < a->num_keys; s++) {
        if (weights[s] == 0) continue;
        const bf16 *value = values + s * a->v_strides[2];
        for (long i = 0; i < size; i++) sum[i] += weights[s] * widen(value[i]);
    }
    for (long i = 0; i < size; i++) out[i] = narrow(sum[i] * rate);
}

/* Ask for what query head h of row b will read: its keys and values lie apart from those of the head before. */
static void ask_for(const struct attention *a, long b, long h) {
    long head = h / (a->heads / a->kv_heads);
    for (long s = 0; s < least(a->num_keys, MOST_ASKED); s++) {
        const char *key = (const char *)(a->k + b * a->k_strides[0] + head * a->k_strides[1] + s * a->k_strides[2]);
        const char *value = (const char *)(a->v + b * a->v_strides[0] + head * a->v_strides[1] + s * a->v_strides[2]);
        for (long i = 0; i < a->head_dim * (long)sizeof(bf16); i += LINE) __builtin_prefetch(key + i);
        for (long i = 0; i < a->value_dim * (long)sizeof(bf16); i += LINE) __builtin_prefetch(value + i);
    }
}

/* One query head of one row; `scores` has room for the keys in whole vectors. */
static void one(const struct attention *a, long b, long h, long t, float *scores) {
    long head = h / (a->heads / a->kv_heads);
    const bf16 *q = a->q + b * a->q_strides[0] + h * a->q_strides[1] + t * a->q_strides[2];
    const long *m = a->mask_strides, *n = a->bias_strides;
    const uint8_t *mask = a->mask ? a->mask + b * m[0] + h * m[1] + t * m[2] : 0;
    const float *bias = a->bias ? a->bias + b * n[0] + h * n[1] + t * n[2] : 0;
    const bf16 *keys = a->k + b * a->k_strides[0] + head * a->k_strides[1];
    const bf16 *values = a->v + b * a->v_strides[0] + head * a->v_strides[1];
    for (long s = 0; s < a->num_keys; s++) {
        const bf16 *key = keys + s * a->k_strides[2];
        int seen = !mask || mask[s * m[3]];
        scores[s] = seen ? dot(q, key, a->head_dim) * a->scale + (bias ? bias[s * n[3]] : 0) : -INFINITY;
    }
    long whole = in_lanes(a->num_keys);
    for (long s = a->num_keys; s < whole; s++) scores[s] = -INFINITY;
    float rate = 1 / weigh(scores, whole);
    bf16 *out = a->out + ((b * a->num_queries + t) * a->heads + h) * a->value_dim;
    long i = 0;
    for (; i + VECTORS * LANES <= a->value_dim; i += VECTORS * LANES)
        mix(a, values + i, scores, rate, VECTORS, out + i);
    for (; i + LANES <= a->value_dim; i += LANES) mix(a, values + i, scores, rate, 1, out + i);
    if (i < a->value_dim) mix_rest(a, values + i, scores, rate, a->value_dim - i, out + i);
}

/* Every query head of every row. Returns 1 when memory is short. */
int attend(const struct attention *a, int threads) {
    long each = in_lanes(a->num_keys), heads = a->rows * a->heads;
    float *room = malloc((size_t)(each * threads + 1) * sizeof(float));
    if (!room) return 1;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long i = 0; i < heads; i++) {
        if (i + 1 < heads) ask_for(a, (i + 1) / a->heads, (i + 1) % a->heads);
        for (long t = 0; t < a->num_queries; t++)
            one(a, i / a->heads, i % a->heads, t, room + omp_get_thread_num() * each);
    }
    free(room);
    return 0;
}
