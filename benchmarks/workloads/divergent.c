#include "native.h"

#include <float.h>
#include <tgmath.h>

void row_gang_collatz(const i64 *numbers, i64 n, i64 *out) {
    enum { WIDTH = 16 }; /* less than LANES: few of the loops are long */
#pragma omp parallel for schedule(dynamic, 16)
    for (i64 from = 0; from < n; from += WIDTH) {
        const i64 count = MIN(WIDTH, n - from);
        ALIGNED i64 x[WIDTH], k[WIDTH] = {0};
        i64 any = 1;
        for (int l = 0; l < WIDTH; l++)
            x[l] = numbers[from + MIN(l, count - 1)];
        while (any) {
            any = 0;
#pragma omp simd reduction(| : any)
            for (int l = 0; l < WIDTH; l++) {
                const i64 on = x[l] != 1, new = x[l] & 1 ? 3 * x[l] + 1 : x[l] >> 1;
                x[l] = on ? new : x[l];
                k[l] += on;
                any |= on;
            }
        }
        memcpy(out + from, k, count * sizeof *out);
    }
}

#define REAL f64
#define COUNT i64
#define EPSILON DBL_EPSILON
#define FUNCTION(name) row_gang_##name##_f64
#include "divergent.h"
#undef REAL
#undef COUNT
#undef EPSILON
#undef FUNCTION

#define REAL f32
#define COUNT i32
#define EPSILON FLT_EPSILON
#define FUNCTION(name) row_gang_##name##_f32
#include "divergent.h"
