#include "native.h"

enum { DIGIT = 11, DIGITS = 1 << DIGIT };

/* Where each digit of a key begins in the order, for all passes at once. */
static void count_digits(const u64 *restrict keys, i64 n, int passes,
                         i64 (*restrict starts)[DIGITS]) {
    memset(starts, 0, passes * sizeof *starts);
    for (i64 i = 0; i < n; i++)
        for (int pass = 0; pass < passes; pass++)
            starts[pass][keys[i] >> pass * DIGIT & (DIGITS - 1)]++;
    for (int pass = 0; pass < passes; pass++)
        for (i64 digit = 0, sum = 0; digit < DIGITS; digit++) {
            const i64 count = starts[pass][digit];
            starts[pass][digit] = sum;
            sum += count;
        }
}

/* Sorts keys by their lowest `passes` digits; those with equal ones keep their order.
   The result may lie in either of the two arrays. */
static u64 *radix_sorted(u64 *keys, u64 *other, i64 n, int passes) {
    static i64 starts[6][DIGITS];
    count_digits(keys, n, passes, starts);
    for (int pass = 0; pass < passes; pass++) {
        const u64 *restrict from = keys;
        u64 *restrict to = other;
        for (i64 i = 0; i < n; i++)
            to[starts[pass][from[i] >> pass * DIGIT & (DIGITS - 1)]++] = from[i];
        other = keys;
        keys = to;
    }
    return keys;
}

/* The bits of floats as integers of the same order, and back. */
static inline u64 ordered_bits(u64 bits) {
    return bits ^ ((u64)((i64)bits >> 63) | (u64)1 << 63);
}

static inline u64 float_bits(u64 ordered) {
    return ordered ^ (((ordered >> 63) - 1) | (u64)1 << 63);
}

static void sort_floats(const f64 *x, i64 n, f64 *out) {
    u64 *keys = malloc(n * sizeof *keys), *other = malloc(n * sizeof *other);
    memcpy(keys, x, n * sizeof *keys);
    for (i64 i = 0; i < n; i++)
        keys[i] = ordered_bits(keys[i]);
    u64 *sorted = radix_sorted(keys, other, n, 6);
    for (i64 i = 0; i < n; i++)
        sorted[i] = float_bits(sorted[i]);
    memcpy(out, sorted, n * sizeof *out);
    free(keys);
    free(other);
}

void row_sort(const f64 *x, i64 n, f64 *out) { sort_floats(x, n, out); }

/* A key is a position above the 33 bits that are sorted, in three passes. */
void row_argsort(const f32 *x, i64 n, i64 *out) {
    u64 *keys = malloc(n * sizeof *keys), *other = malloc(n * sizeof *other);
    for (i64 i = 0; i < n; i++) {
        u32 bits;
        memcpy(&bits, x + i, sizeof bits);
        bits ^= (u32)((i32)bits >> 31) | (u32)1 << 31;
        keys[i] = (u64)i << 33 | bits;
    }
    u64 *sorted = radix_sorted(keys, other, n, 3);
    for (i64 i = 0; i < n; i++)
        out[i] = sorted[i] >> 33;
    free(keys);
    free(other);
}

void row_top_k(const f32 *x, i64 n, i64 m, f32 *out) {
    enum { K = 10 };
    const i64 kept = MIN(K, m);
#pragma omp parallel for schedule(static)
    for (i64 i = 0; i < n; i++) {
        f32 best[K];
        for (int k = 0; k < K; k++)
            best[k] = -INFINITY;
        for (i64 j = 0; j < m; j++) {
            const f32 new = x[i * m + j];
            if (new <= best[K - 1])
                continue;
            int k = K - 1;
            for (; k && best[k - 1] < new; k--)
                best[k] = best[k - 1];
            best[k] = new;
        }
        memcpy(out + i * kept, best, kept * sizeof *out);
    }
}

static inline f32 median_of_three(f32 a, f32 b, f32 c) {
    const f32 low = MIN(a, b), high = MAX(a, b), rest = MIN(high, c);
    return MAX(low, rest);
}

static inline f32 median_of_five(f32 a, f32 b, f32 c, f32 d, f32 e) {
    const f32 low_1 = MIN(a, b), low_2 = MIN(c, d), high_1 = MAX(a, b);
    const f32 high_2 = MAX(c, d);
    return median_of_three(MAX(low_1, low_2), MIN(high_1, high_2), e);
}

static f32 median_near_an_end(const f32 *x, i64 n, i64 at) {
    f32 near[5];
    for (int k = 0; k < 5; k++)
        near[k] = x[MIN(MAX(at + k - 2, 0), n - 1)];
    return median_of_five(near[0], near[1], near[2], near[3], near[4]);
}

void row_median_filter(const f32 *restrict x, i64 n, f32 *restrict out) {
#pragma omp parallel for simd schedule(static)
    for (i64 i = 2; i < n - 2; i++)
        out[i] = median_of_five(x[i - 2], x[i - 1], x[i], x[i + 1], x[i + 2]);
    for (i64 i = 0; i < MIN(2, n); i++)
        out[i] = median_near_an_end(x, n, i);
    for (i64 i = MAX(2, n - 2); i < n; i++)
        out[i] = median_near_an_end(x, n, i);
}

enum { BINS = 256, TABLES = 4 };

void row_histogram(const f64 *x, i64 n, i32 *restrict out) {
    memset(out, 0, BINS * sizeof *out);
#pragma omp parallel
    {
        /* Of several tables, so that equal neighbours do not wait for each other. */
        i32 counts[TABLES][BINS] = {{0}};
#pragma omp for schedule(static)
        for (i64 i = 0; i < n; i++) {
            const f64 above = MAX((x[i] + 4.0) * 32.0, 0.0);
            counts[i % TABLES][(i32)MIN(above, 255.0)]++;
        }
#pragma omp critical
        for (int k = 0; k < TABLES; k++)
            for (int bin = 0; bin < BINS; bin++)
                out[bin] += counts[k][bin];
    }
}

void row_quantiles(const f64 *restrict x, i64 n, i32 *restrict out) {
    f64 *sorted = malloc(n * sizeof *sorted);
    f64 edges[9];
    sort_floats(x, n, sorted);
    for (int k = 1; k < 10; k++)
        edges[k - 1] = sorted[n * k / 10];
    free(sorted);
#pragma omp parallel for simd schedule(static)
    for (i64 i = 0; i < n; i++) {
        i32 count = 0;
        for (int k = 0; k < 9; k++)
            count += edges[k] < x[i];
        out[i] = count;
    }
}

void row_nearest(const f64 *queries, i64 n, i64 three, const f64 *points, i64 m,
                 i64 three_too, i64 *out) {
    f64 *columns = malloc(3 * m * sizeof *columns);
    for (i64 j = 0; j < m; j++)
        for (int k = 0; k < 3; k++)
            columns[k * m + j] = points[3 * j + k];
#pragma omp parallel
    {
        f64 *restrict apart = malloc(m * sizeof *apart);
#pragma omp for schedule(static)
        for (i64 i = 0; i < n; i++) {
            const f64 *q = queries + 3 * i;
            f64 least = INFINITY;
#pragma omp simd reduction(min : least)
            for (i64 j = 0; j < m; j++) {
                const f64 x = q[0] - columns[j], y = q[1] - columns[m + j];
                const f64 z = q[2] - columns[2 * m + j];
                apart[j] = x * x + y * y + z * z;
                least = MIN(least, apart[j]);
            }
            i64 at = 0;
            while (apart[at] != least)
                at++;
            out[i] = at;
        }
        free(apart);
    }
    free(columns);
}

void row_running_max(const f64 *changes, i64 n, f64 *out) {
    f64 total = 0.0, most = 0.0, fall = 0.0;
    for (i64 i = 0; i < n; i++) {
        total += changes[i];
        most = MAX(most, total);
        fall = MAX(fall, most - total);
    }
    *out = fall;
}
