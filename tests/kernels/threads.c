/* Threads that call the kernels on the same weights, keys and values; each compares its results with the first ones. */

#include "attention.h"
#include "linear.h"
#include <pthread.h>
#include <stdio.h>

int linear(const struct linear *l, const struct call *c, int threads);
int attend(const struct attention *a, int threads);
void round_groups(const void *w, int wide, long columns, long inner, uint8_t *out, bf16 *scales, int threads);
int top(const float *x, long rows, long size, long stride, long k, float *values, int64_t *indices, int threads);

enum { THREADS = 4, CALLS = 50, ROWS = 5, INPUTS = 128, OUTPUTS = 48 };

static float weight[OUTPUTS * INPUTS], x[ROWS * INPUTS], scales[OUTPUTS], bias[OUTPUTS], gain[INPUTS];
static bf16 narrow_weight[OUTPUTS * INPUTS], group_scales[OUTPUTS * INPUTS / GROUP];
static int8_t rounded[OUTPUTS * INPUTS];
static int32_t totals[OUTPUTS];
static uint8_t groups[OUTPUTS * INPUTS / 2];

struct results {
    float products[4][ROWS * OUTPUTS], attention[2 * 3 * 8], values[ROWS * 3];
    int64_t indices[ROWS * 3];
};

static void compute(struct results *out) {
    memset(out, 0, sizeof *out);
    const void *weights[] = {narrow_weight, weight, rounded, groups}, *all_scales[] = {0, 0, scales, group_scales};
    for (int format = BF16; format <= INT4; format++) {
        struct linear l = {weights[format], bias, all_scales[format], totals, INPUTS, OUTPUTS, format};
        struct call c = {.x = x, .y = out->products[format], .gain = gain, .rows = ROWS, .epsilon = 1e-5f, .x_wide = 1,
                         .y_wide = 1, .norm = LAYER_NORM, .activation = GELU};
        linear(&l, &c, 1);
    }
    struct attention a = {.q = x, .k = weight, .v = weight, .out = out->attention, .rows = 1, .heads = 2, .kv_heads = 2,
                          .num_queries = 3, .num_keys = 9, .head_dim = 8, .value_dim = 8, .q_strides = {48, 24, 8},
                          .k_strides = {144, 72, 8}, .v_strides = {144, 72, 8}, .scale = 0.3f, .wide = 1};
    attend(&a, 1);
    top(weight, ROWS, OUTPUTS, OUTPUTS, 3, out->values, out->indices, 1);
}

static struct results expected;

static void *work(void *differences) {
    struct results found;
    for (int i = 0; i < CALLS; i++) {
        compute(&found);
        *(int *)differences += memcmp(&found, &expected, sizeof found) != 0;
    }
    return 0;
}

int main(void) {
    for (int i = 0; i < OUTPUTS * INPUTS; i++) {
        weight[i] = (float)((i * 37) % 101 - 50) / 100;
        narrow_weight[i] = narrow(weight[i]);
        rounded[i] = (int8_t)((i * 37) % 101 - 50);
        totals[i / INPUTS] += rounded[i];
    }
    for (int i = 0; i < ROWS * INPUTS; i++) x[i] = (float)((i * 53) % 97 - 48) / 50;
    for (int i = 0; i < OUTPUTS; i++) scales[i] = 0.01f, bias[i] = 0.1f;
    for (int i = 0; i < INPUTS; i++) gain[i] = 1;
    round_groups(weight, 1, OUTPUTS, INPUTS, groups, group_scales, 1);
    compute(&expected);
    pthread_t threads[THREADS];
    int differences[THREADS] = {0}, sum = 0;
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], 0, work, &differences[i]);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], 0), sum += differences[i];
    printf("%d differences\n", sum);
    return sum != 0;
}
