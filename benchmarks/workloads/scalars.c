#include "native.h"

void row_while(const i64 *n, i64 *trips, f32 *out) {
    f32 a = 0.0f;
    i64 i = 0;
    for (; i < *n; i++)
        a = a * 0.999f + 1.0f;
    *trips = i;
    *out = a;
}

void row_fori_cond(const i64 *n, f32 *out) {
    f32 x = 1.0f;
    for (i64 i = 0; i < *n; i++)
        x = i % 3 == 0 ? x * 1.0001f : x + 0.5f;
    *out = x;
}

static void slope(const f64 *s, f64 *out) {
    out[0] = 10.0 * (s[1] - s[0]);
    out[1] = s[0] * (28.0 - s[2]) - s[1];
    out[2] = s[0] * s[1] - 8.0 / 3.0 * s[2];
}

void row_lorenz(const f64 *start, i64 n, f64 *restrict out, i64 steps) {
    const f64 h = 0.01;
    f64 s[3], at[3], k1[3], k2[3], k3[3], k4[3];
    memcpy(s, start, sizeof s);
    for (i64 t = 0; t < steps; t++) {
        slope(s, k1);
        for (int i = 0; i < 3; i++)
            at[i] = s[i] + h / 2 * k1[i];
        slope(at, k2);
        for (int i = 0; i < 3; i++)
            at[i] = s[i] + h / 2 * k2[i];
        slope(at, k3);
        for (int i = 0; i < 3; i++)
            at[i] = s[i] + h * k3[i];
        slope(at, k4);
        for (int i = 0; i < 3; i++)
            s[i] += h / 6 * (k1[i] + 2 * k2[i] + 2 * k3[i] + k4[i]);
        memcpy(out + 3 * t, s, sizeof s);
    }
}

/* In divergent.c, where the same loops are rows too. */
void row_gang_collatz(const i64 *numbers, i64 n, i64 *out);
void row_gang_escape_f64(const f64 *cx, i64 n, const f64 *cy, i64 n_too, i64 *out);

void row_collatz(const i64 *numbers, i64 n, i64 *out) {
    row_gang_collatz(numbers, n, out);
}

void row_mandelbrot(const f64 *cx, i64 n, const f64 *cy, i64 n_too, i64 *out) {
    row_gang_escape_f64(cx, n, cy, n_too, out);
}
