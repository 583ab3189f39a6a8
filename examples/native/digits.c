/* Recognize the digits in a file of images, without Python.
 *
 * The network is that of examples/adaptive_computation.py, which looks at each image for
 * as many steps as it needs. This exports it, and a check of what it is given:
 *
 *     def digits(images):
 *         hf.check((images >= 0) & (images <= 1), "a pixel is not from 0 to 1")
 *         thought = think_all(layers, images)
 *         return hf.argmax(thought.answer, axis=1), thought.steps
 *
 *     rows = hf.Dim("rows", min=1)
 *     program = hf.export(digits, (images,), dynamic_shapes=[{0: rows}])
 *     program.to_native("build")
 *
 * and this builds and runs it:
 *
 *     cc digits.c build/digits.o -Ibuild -lm -o recognize
 *     ./recognize images.f32
 */

#include <stdio.h>
#include <stdlib.h>

#include "digits.h"

enum { PIXELS = 64, MOST = 1000 };

int main(int count, char **arguments) {
    static float images[MOST * PIXELS];
    static int64_t digits_found[MOST], steps[MOST];
    FILE *file = count == 2 ? fopen(arguments[1], "rb") : NULL;
    if (!file) {
        fprintf(stderr, "usage: recognize FILE\n");
        return 2;
    }
    int64_t rows = fread(images, sizeof(float) * PIXELS, MOST, file);
    fclose(file);

    int64_t bytes = digits_workspace(rows);
    if (bytes < 0) {
        fprintf(stderr, "%s\n", digits_error_text((int)-bytes));
        return 1;
    }
    void *workspace = malloc(bytes);
    int status = digits(rows, images, digits_found, steps, workspace, bytes, NULL);
    free(workspace);
    if (status != DIGITS_OK) {
        fprintf(stderr, "%s\n", digits_error_text(status));
        return 1;
    }
    for (int64_t i = 0; i < rows; i++)
        printf("%d in %d steps\n", (int)digits_found[i], (int)steps[i]);
    return 0;
}
