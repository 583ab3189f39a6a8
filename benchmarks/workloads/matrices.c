#include "native.h"

void row_cholesky_loop(const f64 *a, i64 n, i64 n_too, f64 *low) {
    f64 *sums = malloc(n * sizeof *sums);
    memset(low, 0, n * n * sizeof *low);
    for (i64 j = 0; j < n; j++) {
        const f64 *row = low + j * n;
        const f64 corner = sqrt(a[j * n + j] - dot(row, row, j));
        dots(low + (j + 1) * n, n - j - 1, n, row, j, sums);
        for (i64 i = j + 1; i < n; i++)
            low[i * n + j] = (a[i * n + j] - sums[i - j - 1]) / corner;
        low[j * n + j] = corner;
    }
    free(sums);
}

void row_power_iteration(const f64 *a, i64 n, i64 n_too, f64 *out, i64 steps) {
    f64 *v = malloc(n * sizeof *v), *image = malloc(n * sizeof *image);
    memcpy(v, a, n * sizeof *v);
    for (i64 t = 0; t <= steps; t++) {
        dots(a, n, n, v, n, image);
        if (t == steps)
            break;
        const f64 length = sqrt(dot(image, image, n));
        for (i64 i = 0; i < n; i++)
            v[i] = image[i] / length;
    }
    *out = dot(v, image, n);
    free(v);
    free(image);
}

void row_tridiagonal(const f64 *restrict lower, i64 n, const f64 *restrict upper,
                     i64 n_too, const f64 *restrict right, i64 n_three,
                     f64 *restrict out) {
    f64 *restrict c = malloc(n * sizeof *c), before = 0.0, d = 0.0, x = 0.0;
    for (i64 i = 0; i < n; i++) {
        const f64 scale = 1.0 / (1.0 - lower[i] * before);
        out[i] = d = (right[i] - lower[i] * d) * scale;
        c[i] = before = upper[i] * scale;
    }
    for (i64 i = n - 1; i >= 0; i--)
        out[i] = x = out[i] - c[i] * x;
    free(c);
}

void row_givens(const f64 *a, i64 n, i64 n_too, f64 *r) {
    memcpy(r, a, n * n * sizeof *r);
    for (i64 i = 1; i < n; i++)
        for (i64 j = 0; j < i; j++) {
            f64 *restrict upper = r + j * n, *restrict lower = r + i * n;
            const f64 x = upper[j], y = lower[j];
            const f64 length = sqrt(x * x + y * y) + 1e-30;
            const f64 c = x / length, s = y / length;
            for (i64 k = 0; k < n; k++) {
                const f64 new = c * upper[k] + s * lower[k];
                lower[k] = c * lower[k] - s * upper[k];
                upper[k] = new;
            }
        }
}

void row_sobel(const f32 *restrict image, i64 n, i64 m, f32 *restrict out) {
#pragma omp parallel for schedule(static)
    for (i64 i = 0; i < n - 2; i++) {
        const f32 *restrict a = image + i * m, *restrict b = a + m, *restrict c = b + m;
        f32 *restrict to = out + i * (m - 2);
        for (i64 j = 0; j < m - 2; j++) {
            const f32 right = a[j + 2] + 2.0f * b[j + 2] + c[j + 2];
            const f32 gx = right - (a[j] + 2.0f * b[j] + c[j]);
            const f32 below = c[j] + 2.0f * c[j + 1] + c[j + 2];
            const f32 gy = below - (a[j] + 2.0f * a[j + 1] + a[j + 2]);
            to[j] = sqrtf(gx * gx + gy * gy);
        }
    }
}

/* By sums of all that is above and left, with a row and a column of zeros before. */
void row_box_blur(const f32 *image, i64 n, i64 m, f32 *out) {
    const i64 wide = m + 1;
    f32 *sums = calloc((n + 1) * wide, sizeof *sums);
    for (i64 i = 0; i < n; i++) {
        const f32 *restrict from = image + i * m, *restrict above = sums + i * wide + 1;
        f32 *restrict to = sums + (i + 1) * wide + 1;
        for (i64 j = 0; j < m; j++)
            to[j] = above[j] + from[j];
    }
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (i64 i = 1; i <= n; i++)
            for (i64 j = 2; j <= m; j++)
                sums[i * wide + j] += sums[i * wide + j - 1];
#pragma omp for schedule(static)
        for (i64 i = 0; i < n - 4; i++) {
            const f32 *restrict a = sums + i * wide, *restrict b = a + 5 * wide;
            f32 *restrict to = out + i * (m - 4);
            for (i64 j = 0; j < m - 4; j++)
                to[j] = (b[j + 5] - a[j + 5] - b[j] + a[j]) / 25.0f;
        }
    }
    free(sums);
}

static inline f32 clipped(f32 x, f32 most) { return MIN(MAX(x, 0.0f), most); }

void row_rotate_image(const f32 *restrict image, i64 n, i64 m, f32 *restrict out) {
    const f32 cos30 = cos(M_PI / 6), sin30 = sin(M_PI / 6);
    const f32 half_n = n / 2.0f, half_m = m / 2.0f;
#pragma omp parallel for schedule(static)
    for (i32 row = 0; row < (i32)n; row++)
#pragma omp simd
        for (i32 column = 0; column < (i32)m; column++) {
            const f32 i = row - half_n, j = column - half_m;
            const f32 u = clipped(cos30 * i - sin30 * j + half_n, n - 1.001f);
            const f32 v = clipped(sin30 * i + cos30 * j + half_m, m - 1.001f);
            const i32 top = u, left = v, at = top * (i32)m + left;
            const f32 a = u - top, b = v - left;
            const f32 above = image[at] * (1 - b) + image[at + 1] * b;
            const f32 below = image[at + m] * (1 - b) + image[at + m + 1] * b;
            out[(i64)row * m + column] = above * (1 - a) + below * a;
        }
}

void row_softmax_rows(const f32 *restrict x, i64 n, i64 m, f32 *restrict out) {
#pragma omp parallel for schedule(static)
    for (i64 i = 0; i < n; i++) {
        const f32 *restrict from = x + i * m;
        f32 *restrict to = out + i * m, most = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : most)
        for (i64 j = 0; j < m; j++)
            most = MAX(most, from[j]);
#pragma omp simd reduction(+ : sum)
        for (i64 j = 0; j < m; j++) {
            to[j] = expf(from[j] - most);
            sum += to[j];
        }
        for (i64 j = 0; j < m; j++)
            to[j] /= sum;
    }
}
