#include "native.h"

/* Two fields that take turns: a step reads one and writes the other. The last step
   writes to `last`. */
typedef struct {
    void *fields[2];
} Turns;

static Turns turns(void *last, void *other, i64 steps) {
    return steps % 2 ? (Turns){{other, last}} : (Turns){{last, other}};
}

static inline f64 warmed(f64 u, f64 around) { return u + 0.1 * (around - 4.0 * u); }

void row_heat_slices(const f64 *start, i64 n, i64 m, f64 *out, i64 steps) {
    const size_t bytes = n * m * sizeof *out;
    f64 *other = malloc(bytes);
    memcpy(out, start, bytes); /* the edges stay as they are in both */
    memcpy(other, start, bytes);
    Turns t = turns(out, other, steps);
#pragma omp parallel
    for (i64 step = 0; step < steps; step++) {
        const f64 *restrict u = t.fields[step % 2];
        f64 *restrict new = t.fields[(step + 1) % 2];
#pragma omp for schedule(static)
        for (i64 i = 1; i < n - 1; i++)
            for (i64 j = i * m + 1; j < i * m + m - 1; j++)
                new[j] = warmed(u[j], u[j - m] + u[j + m] + u[j - 1] + u[j + 1]);
    }
    free(other);
}

void row_heat_roll(const f64 *start, i64 n, i64 m, f64 *out, i64 steps) {
    f64 *other = malloc(n * m * sizeof *out);
    Turns t = turns(out, other, steps);
    memcpy(t.fields[0], start, n * m * sizeof *out);
#pragma omp parallel
    for (i64 step = 0; step < steps; step++) {
        const f64 *u = t.fields[step % 2];
        f64 *new = t.fields[(step + 1) % 2];
#pragma omp for schedule(static)
        for (i64 i = 0; i < n; i++) {
            const f64 *restrict up = u + (i + n - 1) % n * m, *restrict at = u + i * m;
            const f64 *restrict down = u + (i + 1) % n * m;
            f64 *restrict to = new + i * m;
            to[0] = warmed(at[0], up[0] + down[0] + at[m - 1] + at[1 % m]);
            for (i64 j = 1; j < m - 1; j++)
                to[j] = warmed(at[j], up[j] + down[j] + at[j - 1] + at[j + 1]);
            to[m - 1] = warmed(at[m - 1], up[m - 1] + down[m - 1] + at[m - 2] + at[0]);
        }
    }
    free(other);
}

/* All around is a frame of zeros. */
void row_heat_pad(const f64 *start, i64 n, i64 m, f64 *out, i64 steps) {
    const i64 wide = m + 2;
    f64 *fields[2];
    for (int k = 0; k < 2; k++)
        fields[k] = calloc((n + 2) * wide, sizeof *out);
    for (i64 i = 0; i < n; i++)
        memcpy(fields[0] + (i + 1) * wide + 1, start + i * m, m * sizeof *out);
#pragma omp parallel
    for (i64 step = 0; step < steps; step++) {
        const f64 *restrict u = fields[step % 2];
        f64 *restrict new = fields[(step + 1) % 2];
#pragma omp for schedule(static)
        for (i64 i = 1; i <= n; i++)
            for (i64 j = i * wide + 1; j <= i * wide + m; j++)
                new[j] = warmed(u[j], u[j - wide] + u[j + wide] + u[j - 1] + u[j + 1]);
    }
    for (i64 i = 0; i < n; i++)
        memcpy(out + i * m, fields[steps % 2] + (i + 1) * wide + 1, m * sizeof *out);
    free(fields[0]);
    free(fields[1]);
}

static inline f32 spread(f32 left, f32 u, f32 right) {
    return u + 0.25f * (left - 2.0f * u + right);
}

static void heat_in_a_rod(const f32 *start, i64 n, f32 *out, i64 steps) {
    f32 *other = malloc(n * sizeof *out);
    Turns t = turns(out, other, steps);
    memcpy(t.fields[0], start, n * sizeof *out);
#pragma omp parallel
    for (i64 step = 0; step < steps; step++) {
        const f32 *restrict u = t.fields[step % 2];
        f32 *restrict new = t.fields[(step + 1) % 2];
#pragma omp for schedule(static)
        for (i64 i = 1; i < n - 1; i++)
            new[i] = spread(u[i - 1], u[i], u[i + 1]);
#pragma omp single
        {
            new[0] = spread(u[0], u[0], u[1]);
            new[n - 1] = spread(u[n - 2], u[n - 1], u[n - 1]);
        }
    }
    free(other);
}

void row_heat_concat(const f32 *start, i64 n, f32 *out, i64 steps) {
    heat_in_a_rod(start, n, out, steps);
}

void row_heat_gather(const f32 *start, i64 n, f32 *out, i64 steps) {
    heat_in_a_rod(start, n, out, steps);
}

static inline f64 waved(f64 u, f64 old, f64 around) {
    return 2.0 * u - old + 0.2 * (around - 4.0 * u);
}

/* A new field takes the memory of the one before the last. */
void row_waves(const f64 *old, i64 n, i64 m, const f64 *start, i64 n_too, i64 m_too,
               f64 *out, i64 steps) {
    f64 *other = malloc(n * m * sizeof *out);
    Turns t = turns(out, other, steps);
    memcpy(t.fields[0], start, n * m * sizeof *out);
    memcpy(t.fields[1], old, n * m * sizeof *out);
#pragma omp parallel
    for (i64 step = 0; step < steps; step++) {
        const f64 *u = t.fields[step % 2];
        f64 *new = t.fields[(step + 1) % 2];
#pragma omp for schedule(static)
        for (i64 i = 0; i < n; i++) {
            const f64 *restrict up = u + (i + n - 1) % n * m, *restrict at = u + i * m;
            const f64 *restrict down = u + (i + 1) % n * m;
            f64 *restrict to = new + i * m;
            const i64 e = m - 1;
            to[0] = waved(at[0], to[0], up[0] + down[0] + at[e] + at[1 % m]);
            for (i64 j = 1; j < e; j++)
                to[j] = waved(at[j], to[j], up[j] + down[j] + at[j - 1] + at[j + 1]);
            to[e] = waved(at[e], to[e], up[e] + down[e] + at[e - 1] + at[0]);
        }
    }
    free(other);
}

static inline int8_t lives(int8_t cell, int8_t count) {
    return (count == 3) | ((cell == 1) & (count == 4));
}

void row_life(const int8_t *start, i64 n, i64 m, int8_t *out, i64 steps) {
    int8_t *other = malloc(n * m);
    Turns t = turns(out, other, steps);
    memcpy(t.fields[0], start, n * m);
#pragma omp parallel
    {
        int8_t *restrict sums = malloc(m + 2); /* of columns; the ends once more */
        for (i64 step = 0; step < steps; step++) {
            const int8_t *u = t.fields[step % 2];
            int8_t *new = t.fields[(step + 1) % 2];
#pragma omp for schedule(static)
            for (i64 i = 0; i < n; i++) {
                const int8_t *restrict up = u + (i + n - 1) % n * m;
                const int8_t *restrict at = u + i * m, *restrict down;
                int8_t *restrict to = new + i * m;
                down = u + (i + 1) % n * m;
                for (i64 j = 0; j < m; j++)
                    sums[j + 1] = up[j] + at[j] + down[j];
                sums[0] = sums[m];
                sums[m + 1] = sums[1];
                for (i64 j = 0; j < m; j++)
                    to[j] = lives(at[j], sums[j] + sums[j + 1] + sums[j + 2]);
            }
        }
        free(sums);
    }
    free(other);
}
