#include "native.h"

void row_virtual_machine(const i64 *code, i64 length, const f64 *start, i64 four,
                         f64 *out, i64 steps) {
    f64 r[4];
    memcpy(r, start, sizeof r);
    i64 at = 0;
    for (i64 t = 0; t < steps; t++) {
        switch (code[at]) {
        case 0:
            r[0] += 1.0;
            break;
        case 1:
            r[1] = r[0] * 0.5;
            break;
        case 2:
            r[2] = sin(r[1]);
            break;
        case 3:
            r[3] = r[2] + 0.9 * r[3];
            break;
        default: {
            const f64 rest = fmod(r[0], 7.0);
            r[0] = rest < 0.0 ? rest + 7.0 : rest;
        }
        }
        at = at + 1 == length ? 0 : at + 1;
    }
    memcpy(out, r, sizeof r);
}

void row_decision_tree(const f32 *features, i64 n, i64 width, const i64 *columns,
                       i64 nodes, const f32 *limits, i64 nodes_too, i64 *restrict out,
                       i64 depth) {
    enum { WIDTH = LANES(i64) };
#pragma omp parallel for schedule(static)
    for (i64 from = 0; from < n; from += WIDTH) {
        const i64 count = MIN(WIDTH, n - from);
        ALIGNED i64 node[WIDTH] = {0};
        for (i64 t = 0; t < depth; t++)
#pragma omp simd
            for (int k = 0; k < WIDTH; k++) {
                const i64 row = from + MIN(k, count - 1);
                const f32 x = features[row * width + columns[node[k]]];
                node[k] = 2 * node[k] + 1 + (x > limits[node[k]]);
            }
        memcpy(out + from, node, count * sizeof *out);
    }
}

void row_automaton(const uint8_t *restrict text, i64 n, const i32 *restrict table,
                   i64 states, i64 letters, i32 *restrict out) {
    i32 state = 0;
    for (i64 i = 0; i < n; i++)
        out[i] = state = table[state * 256 + text[i]];
}

enum { HIDDEN = 64, GATES = 3 * HIDDEN };

/* A gated recurrent cell with one matrix. */
static void cell(const f32 *restrict weights, const f32 *restrict x, f32 *restrict h) {
    ALIGNED f32 z[GATES] = {0};
    for (int k = 0; k < HIDDEN; k++) {
        const f32 sum = x[k] + h[k];
        for (int j = 0; j < GATES; j++)
            z[j] += sum * weights[k * GATES + j];
    }
#pragma omp simd
    for (int j = 0; j < HIDDEN; j++) {
        const f32 gate = sigmoid(z[j]), reset = sigmoid(z[HIDDEN + j]);
        h[j] = gate * h[j] + (1.0f - gate) * tanhf(z[2 * HIDDEN + j] * reset);
    }
}

void row_greedy_decode(const f32 *weights, i64 hidden, i64 gates,
                       const f32 *restrict words, i64 count, i64 hidden_too, i64 *out,
                       i64 steps) {
    ALIGNED f32 h[HIDDEN] = {0};
    f32 *restrict scores = malloc(count * sizeof *scores);
    f32 *restrict columns = malloc(HIDDEN * count * sizeof *columns);
    for (i64 i = 0; i < count; i++)
        for (int k = 0; k < HIDDEN; k++)
            columns[k * count + i] = words[i * HIDDEN + k];
    i64 word = 0;
    for (i64 i = 1; i < count; i++)
        word = words[i * HIDDEN] > words[word * HIDDEN] ? i : word;
    for (i64 t = 0; t < steps; t++) {
        cell(weights, words + word * HIDDEN, h);
        memset(scores, 0, count * sizeof *scores);
        for (int k = 0; k < HIDDEN; k++)
            for (i64 i = 0; i < count; i++)
                scores[i] += columns[k * count + i] * h[k];
        f32 most = -INFINITY;
#pragma omp simd reduction(max : most)
        for (i64 i = 0; i < count; i++)
            most = MAX(most, scores[i]);
        for (word = 0; scores[word] != most;)
            word++;
        out[t] = word;
    }
    free(columns);
    free(scores);
}
