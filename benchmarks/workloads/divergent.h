/* The loops of divergent.c over numbers of type REAL, which count in COUNT: an integer
   of the same width, so that their masks fit each other. FUNCTION(name) is the name of
   a row's function. Lanes that have ended keep their values until all of them have. */

void FUNCTION(escape)(const REAL *cx, i64 n, const REAL *cy, i64 n_too, i64 *out) {
    enum { WIDTH = LANES(REAL) };
#pragma omp parallel for schedule(dynamic, 16)
    for (i64 from = 0; from < n; from += WIDTH) {
        const i64 count = MIN(WIDTH, n - from);
        ALIGNED REAL a[WIDTH] = {0}, b[WIDTH] = {0}, x[WIDTH] = {0}, y[WIDTH] = {0};
        ALIGNED COUNT k[WIDTH] = {0};
        COUNT any = 1;
        memcpy(a, cx + from, count * sizeof *a);
        memcpy(b, cy + from, count * sizeof *b);
        while (any) {
            any = 0;
#pragma omp simd reduction(| : any)
            for (int l = 0; l < WIDTH; l++) {
                const COUNT on = (x[l] * x[l] + y[l] * y[l] < 4) & (k[l] < 256);
                const REAL new_x = x[l] * x[l] - y[l] * y[l] + a[l];
                const REAL new_y = 2 * x[l] * y[l] + b[l];
                x[l] = on ? new_x : x[l];
                y[l] = on ? new_y : y[l];
                k[l] += on;
                any |= on;
            }
        }
        for (i64 l = 0; l < count; l++)
            out[from + l] = k[l];
    }
}

void FUNCTION(root)(const REAL *numbers, i64 n, REAL *out) {
    enum { WIDTH = LANES(REAL) };
    const REAL eps = 4 * EPSILON;
#pragma omp parallel for schedule(static)
    for (i64 from = 0; from < n; from += WIDTH) {
        const i64 count = MIN(WIDTH, n - from);
        ALIGNED REAL a[WIDTH], x[WIDTH], old[WIDTH] = {0};
        ALIGNED COUNT k[WIDTH] = {0};
        COUNT any = 1;
        for (int l = 0; l < WIDTH; l++)
            a[l] = x[l] = numbers[from + MIN(l, count - 1)];
        while (any) {
            any = 0;
#pragma omp simd reduction(| : any)
            for (int l = 0; l < WIDTH; l++) {
                const COUNT on = (fabs(x[l] - old[l]) > eps * x[l]) & (k[l] < 100);
                const REAL new = (2 * x[l] + a[l] / (x[l] * x[l])) / 3;
                old[l] = on ? x[l] : old[l];
                x[l] = on ? new : x[l];
                k[l] += on;
                any |= on;
            }
        }
        memcpy(out + from, x, count * sizeof *out);
    }
}

/* With the tangent of each number, which begins as 1. */
void FUNCTION(grad_root)(const REAL *numbers, i64 n, REAL *out) {
    enum { WIDTH = LANES(REAL) };
    const REAL eps = 4 * EPSILON;
#pragma omp parallel for schedule(static)
    for (i64 from = 0; from < n; from += WIDTH) {
        const i64 count = MIN(WIDTH, n - from);
        ALIGNED REAL a[WIDTH], x[WIDTH], dx[WIDTH], old[WIDTH] = {0};
        ALIGNED COUNT k[WIDTH] = {0};
        COUNT any = 1;
        for (int l = 0; l < WIDTH; l++) {
            a[l] = x[l] = numbers[from + MIN(l, count - 1)];
            dx[l] = 1;
        }
        while (any) {
            any = 0;
#pragma omp simd reduction(| : any)
            for (int l = 0; l < WIDTH; l++) {
                const COUNT on = (fabs(x[l] - old[l]) > eps * x[l]) & (k[l] < 100);
                const REAL part = 1 / (x[l] * x[l]), ratio = a[l] * part;
                const REAL new = (2 * x[l] + ratio) / 3;
                const REAL change = (2 * dx[l] + part - 2 * ratio / x[l] * dx[l]) / 3;
                old[l] = on ? x[l] : old[l];
                x[l] = on ? new : x[l];
                dx[l] = on ? change : dx[l];
                k[l] += on;
                any |= on;
            }
        }
        memcpy(out + from, dx, count * sizeof *out);
    }
}

typedef struct {
    REAL x, v;
} FUNCTION(State);

static inline FUNCTION(State) FUNCTION(slope)(REAL x, REAL v) {
    return (FUNCTION(State)){v, 2 * (1 - x * x) * v - x};
}

void FUNCTION(orbit)(const REAL *places, i64 n, const REAL *speeds, i64 n_too,
                     REAL *out) {
    enum { WIDTH = LANES(REAL) };
    const REAL least = 1e-6, bias = 1e-8, first = 0.01, low = 0.2, safety = 0.9;
    const REAL part = (REAL)-5 / 72, half = 0.5, three_quarters = 0.75;
#pragma omp parallel for schedule(dynamic, 4)
    for (i64 from = 0; from < n; from += WIDTH) {
        const i64 count = MIN(WIDTH, n - from);
        ALIGNED REAL t[WIDTH] = {0}, x[WIDTH], v[WIDTH], h[WIDTH];
        ALIGNED COUNT k[WIDTH] = {0};
        COUNT any = 1;
        for (int l = 0; l < WIDTH; l++) {
            x[l] = places[from + MIN(l, count - 1)];
            v[l] = speeds[from + MIN(l, count - 1)];
            h[l] = first;
        }
        while (any) {
            any = 0;
#pragma omp simd reduction(| : any)
            for (int l = 0; l < WIDTH; l++) {
                const COUNT on = (t[l] < 5) & (k[l] < 1000);
                const REAL X = x[l], V = v[l], H = h[l];
                const FUNCTION(State) a = FUNCTION(slope)(X, V);
                const FUNCTION(State) b =
                    FUNCTION(slope)(X + H * a.x * half, V + H * a.v * half);
                const FUNCTION(State) c = FUNCTION(slope)(
                    X + H * b.x * three_quarters, V + H * b.v * three_quarters);
                const REAL new_x = X + H * (2 * a.x + 3 * b.x + 4 * c.x) / 9;
                const REAL new_v = V + H * (2 * a.v + 3 * b.v + 4 * c.v) / 9;
                const FUNCTION(State) d = FUNCTION(slope)(new_x, new_v);
                const REAL off_x = H * (a.x * part + b.x / 12 + c.x / 9 - d.x / 8);
                const REAL off_v = H * (a.v * part + b.v / 12 + c.v / 9 - d.v / 8);
                const REAL error = sqrt(off_x * off_x + off_v * off_v) * 10000 + bias;
                const COUNT holds = (error < 1) & on;
                const REAL factor = safety * exp(log(error) / -3);
                const REAL longer = H * MIN(MAX(factor, low), 5);
                t[l] = holds ? t[l] + H : t[l];
                const REAL rest = 5 - t[l], most = MAX(rest, least);
                x[l] = holds ? new_x : X;
                v[l] = holds ? new_v : V;
                h[l] = on ? MIN(longer, most) : H;
                k[l] += on;
                any |= on;
            }
        }
        memcpy(out + from, x, count * sizeof *out);
    }
}

void FUNCTION(search)(const REAL *wanted, i64 n, const REAL *restrict table, i64 m,
                      i64 *out) {
    enum { WIDTH = LANES(REAL) };
#pragma omp parallel for schedule(static)
    for (i64 from = 0; from < n; from += WIDTH) {
        const i64 count = MIN(WIDTH, n - from);
        ALIGNED REAL w[WIDTH] = {0};
        ALIGNED COUNT low[WIDTH] = {0}, high[WIDTH];
        COUNT any = 1;
        memcpy(w, wanted + from, count * sizeof *w);
        for (int l = 0; l < WIDTH; l++)
            high[l] = m;
        while (any) {
            any = 0;
#pragma omp simd reduction(| : any)
            for (int l = 0; l < WIDTH; l++) {
                const COUNT middle = (low[l] + high[l]) / 2, on = low[l] < high[l];
                const COUNT is_left = table[MIN(middle, m - 1)] < w[l];
                low[l] = on & is_left ? middle + 1 : low[l];
                high[l] = on & !is_left ? middle : high[l];
                any |= on;
            }
        }
        for (i64 l = 0; l < count; l++)
            out[from + l] = low[l];
    }
}

/* Element by element: a few walks are so long that lanes would mostly wait for them. */
void FUNCTION(walk)(const u64 *seeds, i64 n, const REAL *starts, i64 n_too, i64 *out) {
    const REAL unit = 0x1p-24;
#pragma omp parallel for schedule(dynamic, 64)
    for (i64 i = 0; i < n; i++) {
        u64 state = seeds[i];
        REAL x = starts[i];
        i64 k = 0;
        for (; fabs(x) < 4 && k < 2000; k++) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            x += (REAL)(i64)(state >> 40) * unit * 2 - 1;
        }
        out[i] = k;
    }
}
