#ifndef TFORMER_TILES_H
#define TFORMER_TILES_H

/* Products of a few rows of x with a few rows of a weight, as `linear.c` uses them. Each file of tiles says how it wants
   the rows of x, and writes them so:

   tiles_float.c     in fp32, or in bf16 where the processor multiplies pairs. For a weight in bf16 that is widened by a
                     shift, every step of 2 FLOATS numbers has the even ones first. Here FLOATS is 4:

                         a word of the weight     0 1       2 3       4 5       6 7       two neighbours in 32 bits
                         shifted up               0         2         4         6
                         masked                     1         3         5         7
                         a row of x               0 2 4 6 | 1 3 5 7

   tiles_integer.c   in 8 bits, rounded. For a weight in 4 bits, groups of 32 numbers lie as the halves of bytes are
                     read. Here a vector is two groups long, 64 bytes:

                         bytes of the weight      0|1   2|3     two groups side by side, in the low and the high halves
                         first halves             0     2
                         second halves            1     3
                         a row of x               0 2 | 1 3

   panels.c          rounded to 8 bits, held in 16. */

#include "linear.h"

/* Rows of x as a tile reads them; `stride` numbers from one row to the next, zeros beyond `inner`. */
struct rows {
    char *numbers;
    long stride;
    float *scales;    /* of rounded rows: what 1 stands for */
    int32_t *offsets; /* for INT4: -8 times the sum of each four numbers [rows, stride / 4] */
};

enum { MOST_COLUMNS = 32 }; /* of a block */
enum { TILE_ROWS = 4, COLUMNS = 2, LINE = 64 }; /* LINE: bytes of a line of the cache */

/* sums[row][column] = the products of 1 ... TILE_ROWS rows of x with 1 row of the weight, or as many as a tile takes. */
typedef void tile(const struct linear *l, const struct rows *x, long row, long column, int rows, int columns,
                  float *sums);

/* Write row `row` of x, which is in `wide`, as tiles read it. wide and spare have room for `stride` numbers. */
typedef void place(const struct rows *x, long row, long inner, float *wide, uint8_t *spare);

/* CALL(rows, columns) with constants, so that the compiler keeps a tile's sums in registers. */
#define WITH_CONSTANTS(rows, columns, MOST, CALL)                                                                      \
    switch (columns == 1 ? rows : rows + TILE_ROWS) {                                                                  \
    case 1: CALL(1, 1); break;                                                                                         \
    case 2: CALL(2, 1); break;                                                                                         \
    case 3: CALL(3, 1); break;                                                                                         \
    case 4: CALL(4, 1); break;                                                                                         \
    case 5: CALL(1, MOST); break;                                                                                      \
    case 6: CALL(2, MOST); break;                                                                                      \
    case 7: CALL(3, MOST); break;                                                                                      \
    default: CALL(4, MOST);                                                                                            \
    }

/* Where AVX2 has no products of four neighbours: many rows in 8 bits by panels. Rows of x are then in 16 bits. */
enum { PANEL_ROWS = 6, PANEL_COLUMNS = 16, MANY_ROWS = 16 };
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#define PANELS
#endif
typedef void fill(const struct linear *l, long column, long columns, long stride, int16_t *panels);
typedef void panel(const struct linear *l, const struct rows *x, long row, int rows, long column, long columns,
                   const int16_t *panels, float *sums);

/* How weights of one format are multiplied. */
struct method {
    long unit, number_size; /* numbers that a row of x is filled up to a multiple of; bytes of one */
    long column_bytes;      /* of a row of the weight */
    place *place;
    tile *tile;
    fill *fill; /* panels in place of tiles, or NULL */
    panel *panel;
};
struct method method_of_floats(const struct linear *l, const struct call *c);
struct method method_of_integers(const struct linear *l);
struct method method_of_panels(const struct linear *l);

#endif
