#include "native.h"

enum { STATE = 4 };

/* out = a @ b, or a @ b.T. */
static inline void times(const f64 (*a)[STATE], const f64 (*b)[STATE],
                         f64 (*out)[STATE]) {
    for (int i = 0; i < STATE; i++)
        for (int j = 0; j < STATE; j++) {
            f64 sum = 0.0;
            for (int k = 0; k < STATE; k++)
                sum += a[i][k] * b[k][j];
            out[i][j] = sum;
        }
}

static inline void times_transposed(const f64 (*a)[STATE], const f64 (*b)[STATE],
                                    f64 (*out)[STATE]) {
    for (int i = 0; i < STATE; i++)
        for (int j = 0; j < STATE; j++) {
            f64 sum = 0.0;
            for (int k = 0; k < STATE; k++)
                sum += a[i][k] * b[j][k];
            out[i][j] = sum;
        }
}

/* What is seen are the first two of four numbers: the place. */
void row_kalman(const f64 *seen, i64 n, i64 two, f64 *restrict out) {
    static const f64 move[STATE][STATE] = {
        {1, 0, 0.1, 0}, {0, 1, 0, 0.1}, {0, 0, 1, 0}, {0, 0, 0, 1}};
    f64 x[STATE] = {0}, p[STATE][STATE] = {{0}};
    for (int i = 0; i < STATE; i++)
        p[i][i] = 1.0;
    for (i64 t = 0; t < n; t++) {
        f64 moved[STATE], half[STATE][STATE];
        for (int i = 0; i < STATE; i++) {
            moved[i] = 0.0;
            for (int k = 0; k < STATE; k++)
                moved[i] += move[i][k] * x[k];
        }
        times(move, p, half);
        times_transposed(half, move, p);
        for (int i = 0; i < STATE; i++)
            p[i][i] += 0.01;
        const f64 a = p[0][0] + 0.5, b = p[0][1], c = p[1][0], d = p[1][1] + 0.5;
        const f64 scale = 1.0 / (a * d - b * c);
        const f64 off_x = seen[2 * t] - moved[0], off_y = seen[2 * t + 1] - moved[1];
        f64 gain[STATE][2], above[2][STATE];
        for (int i = 0; i < STATE; i++) {
            gain[i][0] = (d * p[0][i] - b * p[1][i]) * scale;
            gain[i][1] = (a * p[1][i] - c * p[0][i]) * scale;
            x[i] = moved[i] + gain[i][0] * off_x + gain[i][1] * off_y;
        }
        memcpy(above, p, sizeof above);
        for (int i = 0; i < STATE; i++)
            for (int j = 0; j < STATE; j++)
                p[i][j] -= gain[i][0] * above[0][j] + gain[i][1] * above[1][j];
        memcpy(out + STATE * t, x, sizeof x);
    }
}

void row_biquad(const f32 *restrict x, i64 n, f32 *restrict out) {
    f32 a = 0.0f, b = 0.0f;
    for (i64 i = 0; i < n; i++) {
        const f32 y = 0.2f * x[i] + a;
        a = 0.4f * x[i] + 0.3f * y + b;
        b = 0.2f * x[i] - 0.1f * y;
        out[i] = y;
    }
}

enum { PARTICLES = 1000 };

void row_particles(const f32 *track, i64 n, f32 *out) {
    static ALIGNED f32 x[PARTICLES], moved[PARTICLES], weights[PARTICLES];
    const Key key = key_of(2);
    memset(x, 0, sizeof x);
    for (i64 t = 0; t < n; t++) {
        const Key step = hashed(key, t);
#pragma omp simd
        for (int i = 0; i < PARTICLES; i++) {
            moved[i] = x[i] + normal(step, i);
            const f32 off = moved[i] - track[t];
            weights[i] = expf(-0.5f * off * off) + 1e-6f;
        }
        for (int i = 1; i < PARTICLES; i++)
            weights[i] += weights[i - 1];
        const f32 tick = weights[PARTICLES - 1] / PARTICLES;
        ALIGNED int below[PARTICLES] = {0}; /* so many weights are known to be less */
        for (int half = 512; half; half /= 2)
#pragma omp simd
            for (int i = 0; i < PARTICLES; i++) {
                const int next = MIN(below[i] + half, PARTICLES);
                below[i] = weights[next - 1] < (i + 0.5f) * tick ? next : below[i];
            }
        f32 sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < PARTICLES; i++) {
            x[i] = moved[MIN(below[i], PARTICLES - 1)];
            sum += x[i];
        }
        out[t] = sum / PARTICLES;
    }
}

void row_conjugate_gradients(const f64 *a, i64 n, i64 n_too, const f64 *restrict b,
                             i64 n_three, f64 *restrict x) {
    enum { ROWS = 16 }; /* of which a thread takes at least so many */
    f64 *restrict r = malloc(n * sizeof *r), *restrict p = malloc(n * sizeof *p);
    f64 *restrict image = malloc(n * sizeof *image);
    for (i64 i = 0; i < n; i++) {
        x[i] = 0.0;
        r[i] = p[i] = b[i];
    }
    f64 square = dot(b, b, n);
    for (int k = 0; square > 1e-12 && k < 200; k++) {
#pragma omp parallel for schedule(static)
        for (i64 i = 0; i < n; i += ROWS)
            dots(a + i * n, MIN(ROWS, n - i), n, p, n, image + i);
        const f64 length = square / dot(p, image, n);
        for (i64 i = 0; i < n; i++) {
            x[i] += length * p[i];
            r[i] -= length * image[i];
        }
        const f64 new = dot(r, r, n), ratio = new / square;
        for (i64 i = 0; i < n; i++)
            p[i] = r[i] + ratio * p[i];
        square = new;
    }
    free(r);
    free(p);
    free(image);
}

enum { WEIGHTS = 20 };

/* The derivative of log(1 + exp(-|z|)) + max(z, 0): at 0 that of |z| is 1, and that of
   the maximum a half, as in hopflow and JAX. */
static inline f32 loss_slope(f32 z) {
    const f32 e = expf(-fabsf(z)), share = e / (1.0f + e);
    const f32 other = z > 0.0f ? 1.0f : 0.5f;
    return z < 0.0f ? share : other - share;
}

void row_adam(const f32 *restrict inputs, i64 n, i64 width, const f32 *restrict labels,
              i64 n_too, const f32 *start, i64 width_too, f32 *out, i64 steps) {
    enum { BLOCK = 256 };
    f32 w[WEIGHTS], m[WEIGHTS] = {0}, v[WEIGHTS] = {0};
    f32 *restrict columns = malloc(WEIGHTS * n * sizeof *columns);
    for (i64 i = 0; i < n; i++)
        for (int k = 0; k < WEIGHTS; k++)
            columns[k * n + i] = inputs[i * WEIGHTS + k];
    memcpy(w, start, sizeof w);
    for (i64 t = 1; t <= steps; t++) {
        f32 g[WEIGHTS] = {0};
        for (i64 from = 0; from < n; from += BLOCK) {
            const i64 count = MIN(BLOCK, n - from);
            ALIGNED f32 off[BLOCK] = {0};
            for (int k = 0; k < WEIGHTS; k++)
                for (i64 i = 0; i < count; i++)
                    off[i] += columns[k * n + from + i] * w[k];
#pragma omp simd
            for (i64 i = 0; i < count; i++)
                off[i] = loss_slope(off[i]) - labels[from + i];
            for (int k = 0; k < WEIGHTS; k++) {
                f32 sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (i64 i = 0; i < count; i++)
                    sum += columns[k * n + from + i] * off[i];
                g[k] += sum;
            }
        }
        const f32 power = powf(0.9f, t), power_too = powf(0.999f, t);
        const f32 rate = 0.01f * sqrtf(1.0f - power_too) / (1.0f - power);
        for (int k = 0; k < WEIGHTS; k++) {
            const f32 slope = g[k] / n + 2e-3f * w[k];
            m[k] = 0.9f * m[k] + 0.1f * slope;
            v[k] = 0.999f * v[k] + 0.001f * slope * slope;
            w[k] -= rate * m[k] / (sqrtf(v[k]) + 1e-8f);
        }
    }
    memcpy(out, w, sizeof w);
    free(columns);
}

/* Solves a @ x = b for a positive a, by Cholesky's factor; x takes the place of b. */
static void solve_positive(f64 (*a)[WEIGHTS], f64 *b) {
    for (int j = 0; j < WEIGHTS; j++) {
        for (int k = 0; k < j; k++)
            for (int i = j; i < WEIGHTS; i++)
                a[i][j] -= a[i][k] * a[j][k];
        const f64 scale = 1.0 / sqrt(a[j][j]);
        for (int i = j; i < WEIGHTS; i++)
            a[i][j] *= scale;
    }
    for (int i = 0; i < WEIGHTS; i++) {
        for (int k = 0; k < i; k++)
            b[i] -= a[i][k] * b[k];
        b[i] /= a[i][i];
    }
    for (int i = WEIGHTS - 1; i >= 0; i--) {
        for (int k = i + 1; k < WEIGHTS; k++)
            b[i] -= a[k][i] * b[k];
        b[i] /= a[i][i];
    }
}

void row_newton_logistic(const f64 *restrict inputs, i64 n, i64 width,
                         const f64 *restrict labels, i64 n_too, const f64 *start,
                         i64 width_too, f64 *restrict w, i64 steps) {
    enum { BLOCK = 128 };
    f64 *restrict columns = malloc(WEIGHTS * n * sizeof *columns);
    for (i64 i = 0; i < n; i++)
        for (int k = 0; k < WEIGHTS; k++)
            columns[k * n + i] = inputs[i * WEIGHTS + k];
    memcpy(w, start, WEIGHTS * sizeof *w);
    for (i64 t = 0; t < steps; t++) {
        f64 gradient[WEIGHTS], curvature[WEIGHTS][WEIGHTS] = {{0}}, sums[WEIGHTS];
        for (int k = 0; k < WEIGHTS; k++) {
            gradient[k] = 0.1 * w[k];
            curvature[k][k] = 0.1;
        }
        for (i64 from = 0; from < n; from += BLOCK) {
            const i64 count = MIN(BLOCK, n - from);
            ALIGNED f64 p[BLOCK] = {0}, scaled[BLOCK];
            for (int k = 0; k < WEIGHTS; k++)
                for (i64 i = 0; i < count; i++)
                    p[i] += columns[k * n + from + i] * w[k];
#pragma omp simd
            for (i64 i = 0; i < count; i++) {
                p[i] = 1.0 / (1.0 + exp(-p[i]));
                scaled[i] = p[i] - labels[from + i];
            }
            dots(columns + from, WEIGHTS, n, scaled, count, sums);
            for (int k = 0; k < WEIGHTS; k++)
                gradient[k] += sums[k];
            for (int k = 0; k < WEIGHTS; k++) {
                for (i64 i = 0; i < count; i++)
                    scaled[i] = columns[k * n + from + i] * (p[i] * (1.0 - p[i]));
                dots(columns + from, WEIGHTS, n, scaled, count, sums);
                for (int j = 0; j < WEIGHTS; j++)
                    curvature[k][j] += sums[j];
            }
        }
        solve_positive(curvature, gradient);
        for (int k = 0; k < WEIGHTS; k++)
            w[k] -= gradient[k];
    }
    free(columns);
}
