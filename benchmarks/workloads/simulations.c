#include "native.h"

void row_ode_adaptive(const f64 *start, i64 two, f64 *out) {
    f64 t = 0.0, x = start[0], v = start[1], h = 1e-3;
    for (int k = 0; t < 20.0 && k < 100000; k++) {
        const f64 a = v, b = 5.0 * (1.0 - x * x) * v - x;
        const f64 p = x + h * a, q = v + h * b;
        const f64 c = q, d = 5.0 * (1.0 - p * p) * q - p;
        const f64 error_x = fabs(h * (c - a) * 0.5), error_v = fabs(h * (d - b) * 0.5);
        const f64 error = MAX(error_x, error_v) * 1e4 + 1e-8;
        const f64 factor = MIN(MAX(0.9 / sqrt(error), 0.2), 5.0);
        if (error < 1.0) {
            x += h * (a + c) * 0.5;
            v += h * (b + d) * 0.5;
            t += h;
        }
        h = MIN(h * factor, 20.0 - t + 1e-9);
    }
    out[0] = x;
    out[1] = v;
}

void row_pendulum(const f64 *start, i64 two, f64 *restrict out, i64 steps) {
    f64 place = start[0], speed = start[1];
    for (i64 t = 0; t < steps; t++) {
        const f64 half = speed - 0.005 * sin(place);
        place += 0.01 * half;
        speed = half - 0.005 * sin(place);
        out[2 * t] = place;
        out[2 * t + 1] = speed;
    }
}

void row_n_body(const f64 *places, i64 n, i64 three, const f64 *speeds, i64 n_too,
                i64 three_too, const f64 *restrict masses, i64 n_three, f64 *out,
                i64 steps) {
    const size_t bytes = 3 * n * sizeof(f64);
    f64 *restrict x = malloc(bytes), *restrict v = malloc(bytes);
    for (i64 i = 0; i < n; i++)
        for (int k = 0; k < 3; k++) {
            x[k * n + i] = places[3 * i + k];
            v[k * n + i] = speeds[3 * i + k];
        }
#pragma omp parallel
    for (i64 t = 0; t < steps; t++) {
#pragma omp for schedule(static)
        for (i64 i = 0; i < n; i++) {
            f64 to_x = 0.0, to_y = 0.0, to_z = 0.0;
#pragma omp simd reduction(+ : to_x, to_y, to_z)
            for (i64 j = 0; j < n; j++) {
                const f64 a = x[j] - x[i], b = x[n + j] - x[n + i];
                const f64 c = x[2 * n + j] - x[2 * n + i];
                const f64 square = a * a + b * b + c * c + 0.01;
                const f64 pull = masses[j] / (square * sqrt(square));
                to_x += a * pull;
                to_y += b * pull;
                to_z += c * pull;
            }
            v[i] += 0.001 * to_x;
            v[n + i] += 0.001 * to_y;
            v[2 * n + i] += 0.001 * to_z;
        }
#pragma omp for schedule(static)
        for (i64 i = 0; i < 3 * n; i++)
            x[i] += 0.001 * v[i];
    }
    for (i64 i = 0; i < n; i++)
        for (int k = 0; k < 3; k++)
            out[3 * i + k] = x[k * n + i];
    free(x);
    free(v);
}

void row_pi(const i64 *seed, f32 *out, i64 count) {
    const Key key = key_of(*seed);
    i64 inside = 0;
#pragma omp parallel for simd schedule(static) reduction(+ : inside)
    for (u32 i = 0; i < (u32)count; i++) {
        const f32 x = uniform(key, i), y = uniform(key, i + (u32)count);
        inside += x * x + y * y < 1.0f;
    }
    *out = 4.0f * ((f32)inside / (f32)count);
}

/* The logarithm of the density of a mixture of two Gaussians. */
static inline f32 density(f32 x) {
    const f32 a = -0.5f * (x - 2.0f) * (x - 2.0f), b = -0.5f * (x + 2.0f) * (x + 2.0f);
    return MAX(a, b) + log1pf(expf(-fabsf(a - b)));
}

void row_metropolis(const f32 *start, i64 n, f32 *restrict x, i64 steps) {
    enum { BLOCK = 1024 };
    const Key key = key_of(1);
    memcpy(x, start, n * sizeof *x);
#pragma omp parallel for schedule(static)
    for (i64 from = 0; from < n; from += BLOCK)
        for (i64 t = 0; t < steps; t++) {
            const Key step = hashed(key, t), a = hashed(step, 0), b = hashed(step, 1);
            const i64 end = MIN(from + BLOCK, n);
#pragma omp simd
            for (i64 i = from; i < end; i++) {
                const f32 new = x[i] + normal(a, i);
                const f32 chance = expf(density(new) - density(x[i]));
                x[i] = uniform(b, i) < chance ? new : x[i];
            }
        }
}

void row_option_paths(const f32 *restrict start, i64 n, f32 *out, i64 steps) {
    enum { BLOCK = 1024 };
    const Key key = key_of(3);
    f32 sum = 0.0f;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (i64 from = 0; from < n; from += BLOCK) {
        const i64 count = MIN(BLOCK, n - from);
        ALIGNED f32 height[BLOCK], total[BLOCK] = {0};
        for (i64 i = 0; i < count; i++)
            height[i] = start[from + i] * 0.1f;
        for (i64 t = 0; t < steps; t++) {
            const Key step = hashed(key, t);
#pragma omp simd
            for (i64 i = 0; i < count; i++) {
                height[i] += 0.01f * normal(step, from + i);
                total[i] += expf(height[i]);
            }
        }
#pragma omp simd reduction(+ : sum)
        for (i64 i = 0; i < count; i++)
            sum += MAX(total[i] / 100.0f - 1.0f, 0.0f);
    }
    *out = sum / n;
}

/* The squares of one colour flip, those around being of the other one. */
static void half_sweep(f32 *spins, i64 n, i64 m, Key key, int colour) {
    for (i64 i = 0; i < n; i++) {
        const f32 *up = spins + (i + n - 1) % n * m, *down = spins + (i + 1) % n * m;
        f32 *row = spins + i * m, left[m], right[m];
        memcpy(left + 1, row, (m - 1) * sizeof *row);
        memcpy(right, row + 1, (m - 1) * sizeof *row);
        left[0] = row[m - 1];
        right[m - 1] = row[0];
#pragma omp simd
        for (i64 j = 0; j < m; j++) {
            const f32 around = up[j] + down[j] + left[j] + right[j], spin = row[j];
            const int flips = uniform(key, i * m + j) < sigmoid(-1.2f * spin * around);
            row[j] = flips & ((i + j) % 2 == colour) ? -spin : spin;
        }
    }
}

void row_ising(const f32 *start, i64 n, i64 m, f32 *out, i64 sweeps) {
    const Key key = key_of(5);
    f32 *spins = malloc(n * m * sizeof *spins);
    memcpy(spins, start, n * m * sizeof *spins);
    for (i64 t = 0; t < sweeps; t++) {
        const Key sweep = hashed(key, t);
        half_sweep(spins, n, m, hashed(sweep, 0), 0);
        half_sweep(spins, n, m, hashed(sweep, 1), 1);
        f32 sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (i64 i = 0; i < n * m; i++)
            sum += spins[i];
        out[t] = sum / (n * m);
    }
    free(spins);
}
