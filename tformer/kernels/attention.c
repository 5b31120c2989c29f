/* softmax(q K^T scale + bias) V for few queries of each row, a step of decoding. A query head is one pass over its keys
   and one over its values; scores, weights and sums are fp32. */

#include <omp.h>

#include "attention.h"
#include "vectors.h"

/* Bytes of a cache line; keys asked for ahead; numbers of a value that are summed at a time, in registers. */
enum { LINE = 64, MOST_ASKED = 64, MOST_SUMS = 64 };

/* Below, `wide` is a constant wherever these are inlined: fp32, else bf16. */

INLINE const char *at(const void *numbers, long index, int wide) {
    return (const char *)numbers + index * (long)(wide ? sizeof(float) : sizeof(bf16));
}

INLINE float number(const char *x, long i, int wide) { return wide ? ((const float *)x)[i] : widen(((const bf16 *)x)[i]); }

INLINE void put(char *out, long i, float x, int wide) {
    if (wide)
        ((float *)out)[i] = x;
    else
        ((bf16 *)out)[i] = narrow(x);
}

INLINE floats floats_at(const char *x, long i, int wide) {
    return wide ? load_floats((const float *)x + i) : widen_floats((const bf16 *)x + i);
}

INLINE float dot(const char *x, const char *y, long size, int wide) {
    float total = 0;
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    if (!wide) {
        __m512 sum = _mm512_setzero_ps();
        for (long i = 0; i < size; i += 32) {
            __mmask32 in = size - i >= 32 ? 0xffffffffu : (1u << (size - i)) - 1u;
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(in, (const bf16 *)x + i),
                                   (__m512bh)_mm512_maskz_loadu_epi16(in, (const bf16 *)y + i));
        }
        return _mm512_reduce_add_ps(sum);
    }
#endif
#pragma omp simd reduction(+ : total)
    for (long i = 0; i < size; i++) total += number(x, i, wide) * number(y, i, wide);
    return total;
}

/* scores -> weights in place, `count` of them, a multiple of LANES; returns their sum. All masked: zeros, and 1. */
static float weigh(float *scores, long count) {
    float highest = -INFINITY, total = 0;
#pragma omp simd reduction(max : highest)
    for (long s = 0; s < count; s++) highest = scores[s] > highest ? scores[s] : highest;
    if (highest == -INFINITY) highest = 0; /* all masked: their weights are 0 below; or all NaN: NaN below */
#pragma omp simd reduction(+ : total)
    for (long s = 0; s < count; s++) {
        float weight = scores[s] == -INFINITY ? 0.0f : exponential(scores[s] - highest);
        scores[s] = weight;
        total += weight;
    }
    return total == 0 ? 1 : total;
}

INLINE long keys_of(const struct attention *a, long b) { return a->lengths ? a->lengths[b] : a->num_keys; }

/* Where the key or value of slot s of row b and a head begins; `strides` are those of k or v. */
INLINE const char *slot(const struct attention *a, const void *numbers, const long *strides, long b, long head, long s,
                        int wide) {
    long row = a->origins ? a->origins[b * a->origin_stride + s] : b;
    return at(numbers, row * strides[0] + head * strides[1] + s * strides[2], wide);
}

/* out = rate times the sum of values by weight, of `size` numbers, a constant: whole vectors, at most MOST_SUMS. */
INLINE void mix(const struct attention *a, long b, long head, long from, const float *weights, float rate, int size,
                char *out, int wide) {
    floats sum[MOST_SUMS / FLOATS];
    float numbers[MOST_SUMS];
    UNROLL for (int i = 0; i < size / FLOATS; i++) sum[i] = (floats){0};
    for (long s = 0, count = keys_of(a, b); s < count; s++) {
        if (weights[s] == 0) continue; /* a slot that no query sees may hold anything */
        const char *value = at(slot(a, a->v, a->v_strides, b, head, s, wide), from, wide);
        UNROLL for (int i = 0; i < size / FLOATS; i++) sum[i] += weights[s] * floats_at(value, i * FLOATS, wide);
    }
    UNROLL for (int i = 0; i < size / FLOATS; i++) {
        sum[i] *= rate;
        memcpy(numbers + i * FLOATS, &sum[i], sizeof sum[i]);
    }
    for (int i = 0; i < size; i++) put(out, i, numbers[i], wide);
}

/* The same for fewer numbers than a vector has. */
INLINE void mix_rest(const struct attention *a, long b, long head, long from, const float *weights, float rate,
                     long size, char *out, int wide) {
    float sum[LANES] = {0};
    for (long s = 0, count = keys_of(a, b); s < count; s++) {
        if (weights[s] == 0) continue;
        const char *value = at(slot(a, a->v, a->v_strides, b, head, s, wide), from, wide);
        for (long i = 0; i < size; i++) sum[i] += weights[s] * number(value, i, wide);
    }
    for (long i = 0; i < size; i++) put(out, i, sum[i] * rate, wide);
}

/* Prefetch what query head h of row b will read: its keys and values lie apart from those of the previous head. */
INLINE void ask_for(const struct attention *a, long b, long h, int wide) {
    long head = h / (a->heads / a->kv_heads), size = wide ? sizeof(float) : sizeof(bf16);
    for (long s = 0, count = least(keys_of(a, b), MOST_ASKED); s < count; s++) {
        const char *key = slot(a, a->k, a->k_strides, b, head, s, wide);
        const char *value = slot(a, a->v, a->v_strides, b, head, s, wide);
        for (long i = 0; i < a->head_dim * size; i += LINE) __builtin_prefetch(key + i);
        for (long i = 0; i < a->value_dim * size; i += LINE) __builtin_prefetch(value + i);
    }
}

/* One query head of one row; `scores` has room for the keys in whole vectors. */
INLINE void one(const struct attention *a, long b, long h, long t, float *scores, int wide) {
    long head = h / (a->heads / a->kv_heads), count = keys_of(a, b);
    const char *q = at(a->q, b * a->q_strides[0] + h * a->q_strides[1] + t * a->q_strides[2], wide);
    const long *m = a->mask_strides, *n = a->bias_strides;
    const uint8_t *mask = a->mask ? a->mask + b * m[0] + h * m[1] + t * m[2] : 0;
    const float *bias = a->bias ? a->bias + b * n[0] + h * n[1] + t * n[2] : 0;
    for (long s = 0; s < count; s++) {
        const char *key = slot(a, a->k, a->k_strides, b, head, s, wide);
        int seen = !mask || mask[s * m[3]];
        scores[s] = seen ? dot(q, key, a->head_dim, wide) * a->scale + (bias ? bias[s * n[3]] : 0) : -INFINITY;
    }
    long whole = in_lanes(count);
    for (long s = count; s < whole; s++) scores[s] = -INFINITY;
    float rate = 1 / weigh(scores, whole);
    char *out = (char *)at(a->out, ((b * a->num_queries + t) * a->heads + h) * a->value_dim, wide);
    long i = 0;
    for (; i + MOST_SUMS <= a->value_dim; i += MOST_SUMS)
        mix(a, b, head, i, scores, rate, MOST_SUMS, (char *)at(out, i, wide), wide);
    for (; i + LANES <= a->value_dim; i += LANES)
        mix(a, b, head, i, scores, rate, LANES, (char *)at(out, i, wide), wide);
    if (i < a->value_dim)
        mix_rest(a, b, head, i, scores, rate, a->value_dim - i, (char *)at(out, i, wide), wide);
}

INLINE void head_of(const struct attention *a, long i, float *scores, int wide) {
    if (i + 1 < a->rows * a->heads) ask_for(a, (i + 1) / a->heads, (i + 1) % a->heads, wide);
    for (long t = 0; t < a->num_queries; t++) one(a, i / a->heads, i % a->heads, t, scores, wide);
}

/* The new keys and values of row b. */
INLINE void append(const struct attention *a, long b, int wide) {
    long size = wide ? sizeof(float) : sizeof(bf16), last = keys_of(a, b) - 1;
    for (long head = 0; head < a->kv_heads; head++) {
        const char *key = at(a->k, b * a->k_strides[0] + head * a->k_strides[1] + last * a->k_strides[2], wide);
        const char *value = at(a->v, b * a->v_strides[0] + head * a->v_strides[1] + last * a->v_strides[2], wide);
        memcpy((char *)key, at(a->new_k, b * a->new_stride + head * a->head_dim, wide), (size_t)(a->head_dim * size));
        memcpy((char *)value, at(a->new_v, b * a->new_stride + head * a->value_dim, wide),
               (size_t)(a->value_dim * size));
    }
}

/* Every query head of every row. Returns 1 when memory is short. */
int attend(const struct attention *a, int threads) {
    long each = in_lanes(a->num_keys);
    float *room = malloc((size_t)(each * threads + 1) * sizeof(float));
    if (!room) return 1;
#pragma omp parallel num_threads(threads)
    {
        if (a->new_k) {
#pragma omp for schedule(static)
            for (long b = 0; b < a->rows; b++) append(a, b, a->wide);
        }
        float *scores = room + omp_get_thread_num() * each;
#pragma omp for schedule(static) nowait
        for (long i = 0; i < a->rows * a->heads; i++)
            if (a->wide)
                head_of(a, i, scores, 1);
            else
                head_of(a, i, scores, 0);
    }
    free(room);
    return 0;
}
