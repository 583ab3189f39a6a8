#include "native.h"

void row_in_place(const f32 *x, i64 n, f32 *restrict out, i64 steps) {
    memcpy(out, x, n * sizeof *out);
    for (i64 i = 0; i < steps; i++)
        out[i % 1000] = out[(i + 1) % 1000] * 0.5f + 1.0f;
}

void row_tanh_scan(const f32 *restrict x, i64 n, f32 *restrict out) {
    enum { BLOCK = 4096 }; /* stays in the first cache through all steps */
#pragma omp parallel for schedule(static)
    for (i64 start = 0; start < n; start += BLOCK) {
        const i64 count = MIN(BLOCK, n - start);
        memcpy(out + start, x + start, count * sizeof *out);
        for (int t = 0; t < 100; t++)
#pragma omp simd
            for (i64 i = start; i < start + count; i++)
                out[i] = tanhf(out[i]);
    }
}

void row_recurrence_scan(const f32 *restrict decay, i64 n, const f32 *restrict drive,
                         i64 n_too, f32 *restrict out) {
    f32 h = 0.0f;
    for (i64 i = 0; i < n; i++)
        out[i] = h = decay[i] * h + drive[i];
}

/* out = a @ b, of square matrices. */
static void product(const f64 *restrict a, const f64 *restrict b, f64 *restrict out) {
    enum { N = 64, ROWS = 8, COLUMNS = 16, WIDTH = COLUMNS / 2 };
    typedef f64 Vector __attribute__((vector_size(WIDTH * sizeof(f64))));
    for (int i = 0; i < N; i += ROWS)
        for (int j = 0; j < N; j += COLUMNS) {
            Vector sums[ROWS][2] = {{{0}}}, x, y; /* all in registers */
            for (int k = 0; k < N; k++) {
                memcpy(&x, b + k * N + j, sizeof x);
                memcpy(&y, b + k * N + j + WIDTH, sizeof y);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    sums[r][0] += a[(i + r) * N + k] * x;
                    sums[r][1] += a[(i + r) * N + k] * y;
                }
            }
            for (int r = 0; r < ROWS; r++)
                memcpy(out + (i + r) * N + j, sums[r], sizeof sums[r]);
        }
}

void row_newton_schulz(const f64 *restrict a, i64 n, i64 n_too, f64 *restrict x,
                       i64 steps) {
    static ALIGNED f64 rest[64 * 64], next[64 * 64];
    for (i64 i = 0; i < n; i++)
        for (i64 j = 0; j < n; j++)
            x[i * n + j] = a[j * n + i] * 0.1;
    for (i64 t = 0; t < steps; t++) {
        product(a, x, rest);
        for (i64 i = 0; i < n * n; i++)
            rest[i] = -rest[i];
        for (i64 i = 0; i < n; i++)
            rest[i * n + i] += 2.0;
        product(x, rest, next);
        memcpy(x, next, sizeof next);
    }
}
