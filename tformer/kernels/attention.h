#ifndef TFORMER_ATTENTION_H
#define TFORMER_ATTENTION_H

#include "common.h"

/* One call, in bf16 or fp32. Strides count numbers, in the order of the dimensions named; the last dimension of q, k, v
   lies together. */
struct attention {
    const void *q;          /* [rows, heads, num_queries, head_dim] */
    const void *k, *v;      /* [rows, kv_heads, num_keys, head_dim or value_dim] */
    const uint8_t *mask;    /* [rows, heads, num_queries, num_keys], 1: visible; NULL: all */
    const float *bias;      /* [rows, heads, num_queries, num_keys], added to the scaled scores; NULL: none */
    const void *new_k, *new_v; /* [rows, kv_heads, head_dim or value_dim], heads together: first written as the last key
                                  and value of each row; NULL: none */
    const int32_t *origins; /* [rows, num_keys]: the row of k and v that holds a row's key and value; NULL: its own */
    const int32_t *lengths; /* [rows]: the keys that a row has, at most num_keys; NULL: all */
    void *out;              /* [rows, num_queries, heads, value_dim], together */
    long new_stride, origin_stride; /* from row to row of new_k and new_v, and of origins */
    long rows, heads, kv_heads, num_queries, num_keys, head_dim, value_dim;
    long q_strides[3], k_strides[3], v_strides[3], mask_strides[4], bias_strides[4];
    float scale;
    int wide; /* q, k, v and out in fp32, else in bf16 */
};

#endif
