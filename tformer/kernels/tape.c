/* The kernel calls that `tape.py` recorded, one after another. */

#include "common.h"

struct linear;
struct call;
struct attention;
int linear(const struct linear *l, const struct call *c, int threads);
int attend(const struct attention *a, int threads);

/* A product and its call, or an attention and NULL. */
struct piece {
    const void *first, *second;
};

/* Returns 1 when memory is short. */
int play(const struct piece *pieces, long count, int threads) {
    int failed = 0;
    for (long i = 0; i < count && !failed; i++)
        failed = pieces[i].second ? linear(pieces[i].first, pieces[i].second, threads) : attend(pieces[i].first, threads);
    return failed;
}
