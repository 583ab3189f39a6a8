#include "native.h"

void row_edit_distance_scan(const i64 *a, i64 n, const i64 *b, i64 m, i64 *out) {
    i64 *row = malloc((m + 1) * sizeof *row);
    for (i64 j = 0; j <= m; j++)
        row[j] = j;
    for (i64 i = 0; i < n; i++) {
        const i64 letter = a[i];
        i64 corner = row[0], left = ++row[0];
        for (i64 j = 0; j < m; j++) {
            const i64 up = row[j + 1], other = MIN(up + 1, corner + (letter != b[j]));
            row[j + 1] = left = MIN(left + 1, other);
            corner = up;
        }
    }
    *out = row[m];
    free(row);
}

void row_lcs_at(const i64 *a, i64 n, const i64 *b, i64 m, i32 *out) {
    i32 *table = calloc((n + 1) * (m + 1), sizeof *table);
    for (i64 i = 0; i < n; i++) {
        const i32 *restrict above = table + i * (m + 1);
        i32 *restrict row = table + (i + 1) * (m + 1);
        i32 left = 0;
        for (i64 j = 0; j < m; j++) {
            const i32 other = MAX(above[j + 1], left);
            row[j + 1] = left = a[i] == b[j] ? above[j] + 1 : other;
        }
    }
    *out = table[n * (m + 1) + m];
    free(table);
}

void row_knapsack(const i64 *weights, i64 items, const f64 *values, i64 items_too,
                  const f64 *capacity, i64 n, f64 *out) {
    f64 *best = malloc(n * sizeof *best), *new = malloc(n * sizeof *new);
    memcpy(best, capacity, n * sizeof *best);
    for (i64 k = 0; k < items; k++) {
        const i64 weight = MIN(weights[k], n);
        const f64 value = values[k];
        const f64 *restrict from = best;
        f64 *restrict to = new;
        memcpy(to, from, weight * sizeof *to);
        for (i64 j = weight; j < n; j++) {
            const f64 with = from[j - weight] + value;
            to[j] = MAX(from[j], with);
        }
        new = best;
        best = to;
    }
    memcpy(out, best, n * sizeof *out);
    free(best);
    free(new);
}

/* In place: through k no way from k or to k becomes shorter. */
void row_floyd_warshall(const f64 *start, i64 n, i64 n_too, f64 *d) {
    memcpy(d, start, n * n * sizeof *d);
#pragma omp parallel
    for (i64 k = 0; k < n; k++) {
        const f64 *restrict from = d + k * n;
#pragma omp for schedule(static)
        for (i64 i = 0; i < n; i++) {
            if (i == k)
                continue;
            f64 *restrict row = d + i * n;
            const f64 first = row[k];
            for (i64 j = 0; j < n; j++) {
                const f64 through = first + from[j];
                row[j] = MIN(row[j], through);
            }
        }
    }
}

enum { STATES = 32 };

void row_viterbi(const f32 *scores, i64 n, i64 states, const f32 *restrict moves,
                 i64 states_too, i64 states_three, i64 *out) {
    i32(*restrict pointers)[STATES] = malloc(n * sizeof *pointers);
    f32 best[STATES];
    memcpy(best, scores, sizeof best);
    for (i64 t = 1; t < n; t++) {
        f32 most[STATES];
        i32 from[STATES];
        for (int j = 0; j < STATES; j++) {
            most[j] = best[0] + moves[j];
            from[j] = 0;
        }
        for (int i = 1; i < STATES; i++)
            for (int j = 0; j < STATES; j++) {
                const f32 total = best[i] + moves[i * STATES + j];
                from[j] = total > most[j] ? i : from[j];
                most[j] = MAX(most[j], total);
            }
        for (int j = 0; j < STATES; j++)
            best[j] = most[j] + scores[t * STATES + j];
        memcpy(pointers[t - 1], from, sizeof from);
    }
    i64 state = 0;
    for (int j = 1; j < STATES; j++)
        state = best[j] > best[state] ? j : state;
    for (i64 t = n - 2; t >= 0; t--) {
        out[t] = state;
        state = pointers[t][state];
    }
    free(pointers);
}
