#include "native.h"

/* In divergent.c, where the same loops are rows too. */
void row_gang_collatz(const i64 *numbers, i64 n, i64 *out);
void row_gang_escape_f64(const f64 *cx, i64 n, const f64 *cy, i64 n_too, i64 *out);

void row_vmap_collatz(const i64 *numbers, i64 n, i64 *out) {
    row_gang_collatz(numbers, n, out);
}

void row_vmap_mandelbrot(const f64 *cx, i64 n, const f64 *cy, i64 n_too, i64 *out) {
    row_gang_escape_f64(cx, n, cy, n_too, out);
}

/* In few lanes: each of the long loops has others wait for it. */
void row_vmap_heavy_tail(const i64 *counts, i64 n, f64 *out) {
    enum { FEW = 8 };
#pragma omp parallel for schedule(dynamic, 4)
    for (i64 from = 0; from < n; from += FEW) {
        const i64 count = MIN(FEW, n - from);
        ALIGNED i64 trips[FEW] = {0};
        ALIGNED f64 x[FEW] = {0};
        i64 most = 0;
        memcpy(trips, counts + from, count * sizeof *trips);
        for (int l = 0; l < FEW; l++)
            most = MAX(most, trips[l]);
        for (i64 k = 0; k < most; k++)
#pragma omp simd
            for (int l = 0; l < FEW; l++)
                x[l] = k < trips[l] ? x[l] * 0.999 + 1.0 : x[l];
        memcpy(out + from, x, count * sizeof *out);
    }
}
