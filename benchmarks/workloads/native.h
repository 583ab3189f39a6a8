/* What the rows in C share: names of types, vectors of mathematical functions, and the
   random numbers of hopflow and JAX. */

#ifndef NATIVE_H
#define NATIVE_H

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;
typedef uint64_t u64;
typedef int32_t i32;
typedef uint32_t u32;
typedef float f32;
typedef double f64;

/* Of arrays that are read and written as vectors in each step of a loop: a vector that
   lies in two lines of the cache takes twice as long. */
#define ALIGNED _Alignas(64)

/* How many batch elements of a type take turns in a loop with masks: four of the widest
   vectors, so that one computes while another waits. */
#define LANES(type) (256 / sizeof(type))

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* libmvec has these for vectors; its header declares so under -ffast-math alone. */
#pragma omp declare simd notinbranch
float expf(float);
#pragma omp declare simd notinbranch
float logf(float);
#pragma omp declare simd notinbranch
float log1pf(float);
#pragma omp declare simd notinbranch
float tanhf(float);
#pragma omp declare simd notinbranch
double exp(double);
#pragma omp declare simd notinbranch
double log(double);

static inline f64 dot(const f64 *restrict a, const f64 *restrict b, i64 n) {
    f64 sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (i64 i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* Four dot products with the same vector, so that no sum waits for its last addition:
   `rows` are so many numbers apart. */
static inline void four_dots(const f64 *restrict rows, i64 apart, const f64 *restrict x,
                             i64 n, f64 *restrict out) {
    const f64 *a = rows, *b = a + apart, *c = b + apart, *d = c + apart;
    f64 sum_a = 0.0, sum_b = 0.0, sum_c = 0.0, sum_d = 0.0;
#pragma omp simd reduction(+ : sum_a, sum_b, sum_c, sum_d)
    for (i64 i = 0; i < n; i++) {
        sum_a += a[i] * x[i];
        sum_b += b[i] * x[i];
        sum_c += c[i] * x[i];
        sum_d += d[i] * x[i];
    }
    out[0] = sum_a;
    out[1] = sum_b;
    out[2] = sum_c;
    out[3] = sum_d;
}

/* The dot products of some rows with the same vector. */
static inline void dots(const f64 *restrict rows, i64 count, i64 apart,
                        const f64 *restrict x, i64 n, f64 *restrict out) {
    i64 i = 0;
    for (; i + 4 <= count; i += 4)
        four_dots(rows + i * apart, apart, x, n, out + i);
    for (i64 rest = count % 4; rest; rest--, i++)
        out[i] = dot(rows + i * apart, x, n);
}

static inline f32 sigmoid(f32 x) { return 1.0f / (1.0f + expf(-x)); }

static inline u32 rotated(u32 x, int by) { return x << by | x >> (32 - by); }

/* A key, and the hash of a position under it. */
typedef struct {
    u32 high, low;
} Key;

#define MIX(r)               \
    do {                     \
        a += b;              \
        b = rotated(b, r) ^ a; \
    } while (0)
#define MIX_FOUR(p, q, r, s) \
    do {                     \
        MIX(p);              \
        MIX(q);              \
        MIX(r);              \
        MIX(s);              \
    } while (0)

/* Threefry-2x32 of 20 rounds. */
static inline Key hashed(Key key, u32 at) {
    const u32 third = key.high ^ key.low ^ 0x1BD11BDA;
    u32 a = key.high, b = at + key.low;
    MIX_FOUR(13, 15, 26, 6);
    a += key.low, b += third + 1;
    MIX_FOUR(17, 29, 16, 24);
    a += third, b += key.high + 2;
    MIX_FOUR(13, 15, 26, 6);
    a += key.high, b += key.low + 3;
    MIX_FOUR(17, 29, 16, 24);
    a += key.low, b += third + 4;
    MIX_FOUR(13, 15, 26, 6);
    a += third, b += key.high + 5;
    return (Key){a, b};
}

static inline Key key_of(i64 seed) { return (Key){(u64)seed >> 32, (u32)seed}; }

/* A float in [0, 1). */
static inline f32 uniform(Key key, u32 at) {
    const Key bits = hashed(key, at);
    return ((bits.high ^ bits.low) >> 9) * 0x1p-23f;
}

/* The inverse of the error function, by the polynomials of Giles (2010). */
static inline f32 erfinv(f32 x) {
    const f32 w = -log1pf(-x * x);
    const int near = w < 5.0f;
    const f32 t = near ? w - 2.5f : sqrtf(w) - 3.0f;
    f32 p = near ? 2.81022636e-08f : -0.000200214257f;
    p = (near ? 3.43273939e-07f : 0.000100950558f) + p * t;
    p = (near ? -3.5233877e-06f : 0.00134934322f) + p * t;
    p = (near ? -4.39150654e-06f : -0.00367342844f) + p * t;
    p = (near ? 0.00021858087f : 0.00573950773f) + p * t;
    p = (near ? -0.00125372503f : -0.0076224613f) + p * t;
    p = (near ? -0.00417768164f : 0.00943887047f) + p * t;
    p = (near ? 0.246640727f : 1.00167406f) + p * t;
    p = (near ? 1.50140941f : 2.83297682f) + p * t;
    return p * x;
}

static inline f32 normal(Key key, u32 at) {
    const f32 least = -0x1.fffffep-1f; /* the next number above -1 */
    return 0x1.6a09e6p0f * erfinv(MAX(least, uniform(key, at) * 2.0f + least));
}

#endif
