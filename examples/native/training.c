/* Train a network on a device: a gradient is exported as any other program.
 *
 *     def loss(weights, x, y):
 *         w, b, v = weights
 *         return hf.mean((hf.tanh(x[:, None] * w + b) @ v - y) ** 2)
 *
 *     def training(weights, x, y, rate):
 *         error, slopes = hf.value_and_grad(loss)(weights, x, y)
 *         new = [p - rate * s for p, s in zip(weights, slopes)]
 *         return new, error
 *
 *     hf.export(training, ((w, b, v), x, y, 0.1)).to_native("build")
 *
 * The memory is static: nothing is allocated.
 */

#include <math.h>
#include <stdio.h>

#include "training.h"

enum { UNITS = 8, POINTS = 32, STEPS = 1000 };

typedef struct {
    double w[UNITS], b[UNITS], v[UNITS];
} Weights;

static Weights weights[2];
static char workspace[1 << 16];

int main(void) {
    double x[POINTS], y[POINTS], error = 0;
    for (int i = 0; i < POINTS; i++) {
        x[i] = i / 16.0 - 1;
        y[i] = x[i] * x[i];
    }
    for (int i = 0; i < UNITS; i++) {
        weights[0].w[i] = i / 4.0 - 1;
        weights[0].b[i] = 0.5 - i / 8.0;
        weights[0].v[i] = 0.125;
    }
    if (training_workspace(0.1) > (int64_t)sizeof workspace) {
        fprintf(stderr, "the workspace is too small\n");
        return 1;
    }
    for (int step = 0; step < STEPS; step++) {
        Weights *old = &weights[step % 2], *new = &weights[(step + 1) % 2];
        int status = training(
            old->w, old->b, old->v, x, y, 0.1, new->w, new->b, new->v, &error,
            workspace, sizeof workspace, NULL);
        if (status != TRAINING_OK) {
            fprintf(stderr, "%s\n", training_error_text(status));
            return 1;
        }
        if (step % 250 == 249) printf("%a\n", error);
    }
    return 0;
}
