#include "native.h"

void row_spmv(const i64 *restrict heads, i64 edges, const i64 *restrict tails,
              i64 edges_too, const f64 *restrict values, i64 edges_three,
              const f64 *restrict x, i64 n, f64 *restrict out) {
    memset(out, 0, n * sizeof *out);
    for (i64 e = 0; e < edges; e++)
        out[heads[e]] += values[e] * x[tails[e]];
}

void row_pagerank(const i64 *restrict heads, i64 edges, const i64 *restrict tails,
                  i64 edges_too, const f64 *restrict degrees, i64 n, f64 *restrict rank,
                  i64 steps) {
    f64 *restrict shares = malloc(n * sizeof *shares);
    f64 *restrict flow = malloc(n * sizeof *flow);
    for (i64 i = 0; i < n; i++)
        rank[i] = 1.0 / n;
    for (i64 t = 0; t < steps; t++) {
        for (i64 i = 0; i < n; i++)
            shares[i] = rank[i] / degrees[i];
        memset(flow, 0, n * sizeof *flow);
        for (i64 e = 0; e < edges; e++)
            flow[heads[e]] += shares[tails[e]];
        for (i64 i = 0; i < n; i++)
            rank[i] = 0.15 / n + 0.85 * flow[i];
    }
    free(shares);
    free(flow);
}

enum { FEATURES = 16 };

void row_message_passing(const i64 *heads, i64 edges, const i64 *tails, i64 edges_too,
                         const f32 *features, i64 nodes, i64 width,
                         const f32 *restrict weight, i64 width_too, i64 width_three,
                         f32 *out) {
    typedef f32 Vector __attribute__((vector_size(FEATURES * sizeof(f32))));
    f32(*restrict sums)[FEATURES] = (void *)out;
    memset(out, 0, nodes * sizeof *sums);
    for (i64 e = 0; e < edges; e++) {
        const f32 *restrict from = features + tails[e] * FEATURES;
        f32 *restrict to = sums[heads[e]];
#pragma omp simd
        for (int k = 0; k < FEATURES; k++)
            to[k] += from[k];
    }
#pragma omp parallel for schedule(static)
    for (i64 i = 0; i < nodes; i++) {
        Vector total = {0}, row;
        for (int k = 0; k < FEATURES; k++) {
            memcpy(&row, weight + k * FEATURES, sizeof row);
            total += sums[i][k] * row;
        }
#pragma omp simd
        for (int j = 0; j < FEATURES; j++)
            sums[i][j] = tanhf(total[j]);
    }
}

void row_components(const i64 *heads, i64 edges, const i64 *tails, i64 edges_too,
                    const i64 *own, i64 n, i64 *label) {
    i64 *old = malloc(n * sizeof *old);
    memcpy(label, own, n * sizeof *label);
    for (int k = 0, changes = 1; changes && k < 50; k++) {
        memcpy(old, label, n * sizeof *old);
        for (i64 e = 0; e < edges; e++)
            label[heads[e]] = MIN(label[heads[e]], old[tails[e]]);
        for (i64 e = 0; e < edges; e++)
            label[tails[e]] = MIN(label[tails[e]], old[heads[e]]);
        changes = memcmp(old, label, n * sizeof *old) != 0;
    }
    free(old);
}
