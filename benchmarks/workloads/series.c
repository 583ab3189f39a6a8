#include "native.h"

void row_trade_walks(const f32 *prices, i64 n, i64 steps, const f32 *moods, i64 n_too,
                     i64 steps_too, f32 *out) {
    enum { ROWS = 32, STRETCH = 16 };
#pragma omp parallel for
    for (i64 from = 0; from < n; from += ROWS) {
        const i64 count = MIN(ROWS, n - from);
        ALIGNED f32 held[ROWS] = {0}, cash[ROWS] = {0};
        ALIGNED f32 p[STRETCH][ROWS] = {0}, m[STRETCH][ROWS] = {0}, own[STRETCH][ROWS];
        for (i64 first = 0; first < steps; first += STRETCH) {
            const i64 length = MIN(STRETCH, steps - first);
            for (i64 r = 0; r < count; r++)
                for (i64 t = 0; t < length; t++) {
                    p[t][r] = prices[(from + r) * steps + first + t];
                    m[t][r] = moods[(from + r) * steps + first + t];
                }
            for (i64 t = 0; t < length; t++) {
#pragma omp simd
                for (i64 r = 0; r < ROWS; r++) {
                    const int buys = m[t][r] > 0.7f;
                    const int sells = !buys & (m[t][r] < 0.3f) & (held[r] > 0);
                    held[r] += buys ? 1.0f : sells ? -1.0f : 0.0f;
                    cash[r] = buys    ? cash[r] - p[t][r]
                              : sells ? cash[r] + p[t][r]
                                      : cash[r] * 0.999f;
                    own[t][r] = cash[r] + held[r] * p[t][r];
                }
            }
            for (i64 r = 0; r < count; r++)
                for (i64 t = 0; t < length; t++)
                    out[(from + r) * steps + first + t] = own[t][r];
        }
    }
}

void row_histograms_of_rows(const int32_t *numbers, i64 n, i64 length, int32_t *out) {
    enum { BINS = 64 };
#pragma omp parallel for
    for (i64 i = 0; i < n; i++) {
        int32_t counts[BINS] = {0};
        for (i64 t = 0; t < length; t++)
            counts[numbers[i * length + t]]++;
        for (int k = 0; k < BINS; k++)
            out[i * BINS + k] = counts[k];
    }
}

void row_chain_likelihoods(const f32 *table, i64 k, i64 k_too, const i32 *states, i64 n,
                           i64 length, f32 *out) {
    (void)k_too;
#pragma omp parallel for
    for (i64 i = 0; i < n; i++) {
        const i32 *s = states + i * length;
        f32 total = 0;
        for (i64 t = 1; t < length; t++)
            total += table[s[t - 1] * k + s[t]];
        out[i] = total;
    }
}

void row_filled_rows(const f32 *x, i64 n, i64 steps, f32 *out) {
    enum { ROWS = 32, STRETCH = 16 };
#pragma omp parallel for
    for (i64 from = 0; from < n; from += ROWS) {
        const i64 count = MIN(ROWS, n - from);
        ALIGNED f32 last[ROWS] = {0}, own[STRETCH][ROWS] = {0};
        for (i64 first = 0; first < steps; first += STRETCH) {
            const i64 length = MIN(STRETCH, steps - first);
            for (i64 r = 0; r < count; r++)
                for (i64 t = 0; t < length; t++)
                    own[t][r] = first + t ? x[(from + r) * steps + first + t] : 0;
            for (i64 t = 0; t < length; t++) {
#pragma omp simd
                for (i64 r = 0; r < ROWS; r++)
                    own[t][r] = last[r] = 0.9f * last[r] + own[t][r];
            }
            for (i64 r = 0; r < count; r++)
                for (i64 t = 0; t < length; t++)
                    out[(from + r) * steps + first + t] = own[t][r];
        }
    }
}
