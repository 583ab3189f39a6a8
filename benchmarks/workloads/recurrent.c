#include "native.h"

enum { HIDDEN = 128, GATES = 4 * HIDDEN, ROWS = 4 };

typedef f32 Vector __attribute__((vector_size(16 * sizeof(f32))));

/* The products of so many inputs, plus the bias: weights are read once for all of them.
   The inputs are so many numbers `apart`; 0: they are all the same. */
static void inputs_product(const f32 *restrict xs, i64 apart, const f32 *restrict w,
                           const f32 *restrict bias, f32 (*restrict z)[GATES]) {
    enum { BLOCK = 4, WIDTH = BLOCK * 16 };
    for (int j = 0; j < GATES; j += WIDTH) {
        Vector sums[ROWS][BLOCK], columns[BLOCK];
        for (int r = 0; r < ROWS; r++)
            memcpy(sums[r], bias + j, sizeof sums[r]);
        for (int k = 0; k < HIDDEN; k++) {
#pragma GCC unroll 4
            for (int c = 0; c < BLOCK; c++)
                memcpy(&columns[c], w + k * GATES + j + c * 16, sizeof columns[c]);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                for (int c = 0; c < BLOCK; c++)
                    sums[r][c] += xs[r * apart + k] * columns[c];
        }
        for (int r = 0; r < ROWS; r++)
            memcpy(z[r] + j, sums[r], sizeof sums[r]);
    }
}

/* z += x @ w, in blocks of columns whose sums stay in registers. */
static void add_product(const f32 *restrict x, const f32 *restrict w, f32 *restrict z) {
    enum { BLOCK = 8, WIDTH = BLOCK * 16 };
    for (int j = 0; j < GATES; j += WIDTH) {
        Vector sums[BLOCK];
        memcpy(sums, z + j, sizeof sums);
        for (int k = 0; k < HIDDEN; k++)
#pragma GCC unroll 8
            for (int c = 0; c < BLOCK; c++) {
                Vector column;
                memcpy(&column, w + k * GATES + j + c * 16, sizeof column);
                sums[c] += x[k] * column;
            }
        memcpy(z + j, sums, sizeof sums);
    }
}

void row_lstm_1(const f32 *xs, i64 n, i64 batch, i64 hidden, const f32 *w,
                i64 hidden_too, i64 gates, const f32 *u, i64 hidden_three,
                i64 gates_too, const f32 *b, i64 gates_three, f32 *out) {
    ALIGNED f32 h[HIDDEN] = {0}, c[HIDDEN] = {0};
    f32(*zs)[GATES] = malloc((n + ROWS) * sizeof *zs);
    for (i64 t = 0, rows; t < n; t += rows) {
        rows = t + ROWS <= n ? ROWS : 1; /* the last few one at a time */
        inputs_product(xs + t * HIDDEN, rows == 1 ? 0 : HIDDEN, w, b, zs + t);
    }
    for (i64 t = 0; t < n; t++) {
        f32 *restrict z = zs[t];
        add_product(h, u, z);
#pragma omp simd
        for (int j = 0; j < HIDDEN; j++) {
            const f32 in = sigmoid(z[j]), keep = sigmoid(z[HIDDEN + j]);
            c[j] = keep * c[j] + in * tanhf(z[2 * HIDDEN + j]);
            h[j] = sigmoid(z[3 * HIDDEN + j]) * tanhf(c[j]);
        }
        memcpy(out + t * HIDDEN, h, sizeof h);
    }
    free(zs);
}
