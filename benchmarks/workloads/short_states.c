#include "native.h"

/* As many examples as lanes take all steps together, with their states in registers. */
enum { ROWS = 32 };

void row_lorenz_paths(const f32 *states, i64 n, i64 width, f32 *out, i64 steps) {
#pragma omp parallel for
    for (i64 from = 0; from < n; from += ROWS) {
        const i64 count = MIN(ROWS, n - from);
        ALIGNED f32 x[ROWS] = {0}, y[ROWS] = {0}, z[ROWS] = {0};
        for (i64 r = 0; r < count; r++) {
            x[r] = states[(from + r) * 3];
            y[r] = states[(from + r) * 3 + 1];
            z[r] = states[(from + r) * 3 + 2];
        }
        for (i64 t = 0; t < steps; t++) {
            for (i64 r = 0; r < count; r++) {
                f32 *at = out + ((from + r) * steps + t) * 3;
                at[0] = x[r];
                at[1] = y[r];
                at[2] = z[r];
            }
#pragma omp simd
            for (i64 r = 0; r < ROWS; r++) {
                const f32 dx = 10 * (y[r] - x[r]);
                const f32 dy = x[r] * (28 - z[r]) - y[r];
                const f32 dz = x[r] * y[r] - 2.5f * z[r];
                x[r] += 0.01f * dx;
                y[r] += 0.01f * dy;
                z[r] += 0.01f * dz;
            }
        }
    }
}

void row_adaptive_filters(const f32 *taps, i64 n, i64 width, const f32 *signals,
                          i64 n_too, i64 length, i64 width_too, f32 *out, f32 *rest,
                          i64 steps) {
    enum { TAPS = 8 };
#pragma omp parallel for
    for (i64 from = 0; from < n; from += ROWS) {
        const i64 count = MIN(ROWS, n - from);
        ALIGNED f32 w[TAPS][ROWS] = {0}, x[TAPS][ROWS] = {0}, left[ROWS];
        for (i64 r = 0; r < count; r++)
            for (int k = 0; k < TAPS; k++)
                w[k][r] = taps[(from + r) * TAPS + k];
        for (i64 t = 0; t < steps; t++) {
            for (i64 r = 0; r < count; r++)
                for (int k = 0; k < TAPS; k++)
                    x[k][r] = signals[((from + r) * steps + t) * TAPS + k];
#pragma omp simd
            for (i64 r = 0; r < ROWS; r++) {
                f32 sum = 0;
                for (int k = 0; k < TAPS; k++)
                    sum += w[k][r] * x[k][r];
                left[r] = x[0][r] - sum;
                for (int k = 0; k < TAPS; k++)
                    w[k][r] += 0.01f * left[r] * x[k][r];
            }
            for (i64 r = 0; r < count; r++)
                rest[(from + r) * steps + t] = left[r];
        }
        for (i64 r = 0; r < count; r++)
            for (int k = 0; k < TAPS; k++)
                out[(from + r) * TAPS + k] = w[k][r];
    }
}

void row_shift_registers(const u32 *words, i64 n, i64 width, u32 *out, i64 steps) {
    enum { WIDTH = 16 };
#pragma omp parallel for
    for (i64 from = 0; from < n; from += ROWS) {
        const i64 count = MIN(ROWS, n - from);
        ALIGNED u32 w[WIDTH][ROWS] = {0};
        for (i64 r = 0; r < count; r++)
            for (int k = 0; k < WIDTH; k++)
                w[k][r] = words[(from + r) * WIDTH + k];
        for (i64 t = 0; t < steps; t++) /* a ring, of which the first word moves */
#pragma omp simd
            for (i64 r = 0; r < ROWS; r++)
                w[t % WIDTH][r] ^= w[(t + 9) % WIDTH][r] + w[(t + 14) % WIDTH][r];
        for (i64 r = 0; r < count; r++)
            for (int k = 0; k < WIDTH; k++)
                out[(from + r) * WIDTH + k] = w[(steps + k) % WIDTH][r];
    }
}

static void rates(const f64 *a, const f64 *y, f64 *out) {
    for (int i = 0; i < 6; i++) {
        f64 sum = 0;
        for (int k = 0; k < 6; k++)
            sum += a[i * 6 + k] * y[k];
        out[i] = sum;
    }
}

void row_linear_ode(const f64 *a, i64 n, i64 m, const f64 *y, i64 size, f64 *out,
                    i64 steps) {
    f64 k[4][6], at[6];
    for (int i = 0; i < 6; i++)
        out[i] = y[i];
    for (i64 t = 0; t < steps; t++) {
        rates(a, out, k[0]);
        for (int i = 0; i < 6; i++)
            at[i] = out[i] + 0.005 * k[0][i];
        rates(a, at, k[1]);
        for (int i = 0; i < 6; i++)
            at[i] = out[i] + 0.005 * k[1][i];
        rates(a, at, k[2]);
        for (int i = 0; i < 6; i++)
            at[i] = out[i] + 0.01 * k[2][i];
        rates(a, at, k[3]);
        for (int i = 0; i < 6; i++)
            out[i] += 0.01 / 6 * (k[0][i] + 2 * k[1][i] + 2 * k[2][i] + k[3][i]);
    }
}

void row_running_covariances(const f64 *samples, i64 n, i64 m, f64 *mean, f64 *spread) {
    enum { SIZE = 10 };
    f64 apart[SIZE], left[SIZE];
    for (int i = 0; i < SIZE; i++)
        mean[i] = 0;
    for (int i = 0; i < SIZE * SIZE; i++)
        spread[i] = 0;
    for (i64 t = 0; t < n; t++) {
        const f64 *x = samples + t * SIZE;
        for (int i = 0; i < SIZE; i++) {
            apart[i] = x[i] - mean[i];
            mean[i] += apart[i] / (t + 1);
            left[i] = x[i] - mean[i];
        }
        for (int i = 0; i < SIZE; i++)
            for (int k = 0; k < SIZE; k++)
                spread[i * SIZE + k] += apart[i] * left[k];
    }
    for (int i = 0; i < SIZE * SIZE; i++)
        spread[i] /= n - 1;
}
