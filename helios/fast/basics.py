# Generated from notebooks/13_kernels.ipynb by `helios export`; edit the notebook.
"""C that all kernels share (numbers, vectors), and the small kernels of a layer: norm, rotation, gate."""

from __future__ import annotations

__all__ = ["COMMON", "EXPONENTIAL", "GATE", "NORM", "ROPE", "VECTOR"]
COMMON = r"""
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef BF16
typedef uint16_t num;  // the upper half of a float

static inline float get(num x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline num put(float value) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
typedef float num;
static inline float get(num x) { return x; }
static inline num put(float value) { return value; }
#endif
"""

EXPONENTIAL = r"""
static inline float exponential(float x) {  // 2^n · e^f with |f| ≤ ln 2 / 2; relative error below 5e-6
    float power = (x < -87 ? -87 : x > 88 ? 88 : x) * 1.44269504f, n = rintf(power), f = (power - n) * 0.69314718f;
    float e = 0.041666667f + f * (0.0083333333f + f * 0.0013888889f);
    e = 1 + f * (1 + f * (0.5f + f * (0.16666667f + f * e)));
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return e * scale;  // NaN stays NaN: neither comparison holds, and e is NaN
}
"""

NORM = r"""
// x [T, E] += y (if any); out = x over its length: weight and √E are folded into what follows
void add_norm(num *restrict x, const num *restrict y, num *restrict out, long T, long E, float softening) {
    #pragma omp parallel for schedule(static)
    for (long t = 0; t < T; t++) {
        num *a = x + t * E, *o = out + t * E;
        float sum = 0;
        if (y)
            for (long e = 0; e < E; e++) a[e] = put(get(a[e]) + get(y[t * E + e]));
        for (long e = 0; e < E; e++) sum += get(a[e]) * get(a[e]);
        float scale = 1 / sqrtf(sum + softening);
        for (long e = 0; e < E; e++) o[e] = put(get(a[e]) * scale);
    }
}
"""

GATE = r"""
// out [T, F] = silu(gate) · up, of both [T, 2F]
void silu_mul(const num *restrict both, num *restrict out, long T, long F) {
    #pragma omp parallel for schedule(static)
    for (long t = 0; t < T; t++) {
        const num *gate = both + 2 * t * F, *up = gate + F;
        for (long f = 0; f < F; f++) out[t * F + f] = put(get(gate[f]) / (1 + exponential(-get(gate[f]))) * get(up[f]));
    }
}
"""

ROPE = r"""
static inline void rotate(num *restrict x, const num *weight, const num *cos, const num *sin, float eps) {
    float scale = 1, sum = 0, a[D];
    for (int d = 0; d < D; d++) a[d] = get(x[d]);
    if (weight) {  // QK-norm comes before the rotation
        for (int d = 0; d < D; d++) sum += a[d] * a[d];
        scale = 1 / sqrtf(sum / D + eps);
        for (int d = 0; d < D; d++) a[d] *= scale * get(weight[d]);
    }
    for (int d = 0; d < D / 2; d++) {
        float c = get(cos[d]), s = get(sin[d]);
        x[d] = put(a[d] * c - a[d + D / 2] * s);
        x[d + D / 2] = put(a[d + D / 2] * c + a[d] * s);
    }
}

// all queries and keys of one token: x [H+2K, D]
static inline void rotate_token(num *x, const num *cos, const num *sin, long position, const num *q_norm,
                                const num *k_norm, float eps) {
    for (int h = 0; h < H + K; h++)
        rotate(x + h * D, h < H ? q_norm : k_norm, cos + position * D, sin + position * D / 2, eps);
}

// qkv [T, H+2K, D]: rotate queries and keys in place
void rope(num *qkv, const num *cos, const num *sin, const int64_t *positions, const num *q_norm, const num *k_norm,
          float eps, long T) {
    #pragma omp parallel for schedule(static)
    for (long t = 0; t < T; t++) rotate_token(qkv + t * (H + 2 * K) * D, cos, sin, positions[t], q_norm, k_norm, eps);
}
"""

VECTOR = r"""
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));

#if defined(BF16) && defined(__AVX512BF16__)
#include <immintrin.h>
#define DEPTH 2  // bfloat16 values that one lane multiplies at once
typedef uint32_t unit;
static inline vec fma_lanes(vec sum, unit a, vec b) {  // sum[i] += a.low · b[i].low + a.high · b[i].high
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
#else
#define DEPTH 1
typedef float unit;
static inline vec fma_lanes(vec sum, unit a, vec b) { return sum + a * b; }
#endif

static inline unit unit_of(const num *x) {  // the next DEPTH values as one unit
#if DEPTH == 2
    unit u;
    memcpy(&u, x, 4);
    return u;
#else
    return get(*x);
#endif
}

static inline vec load(const num *x) {  // the next LANES units
    vec v;
#if defined(BF16) && DEPTH == 1
    for (int i = 0; i < LANES; i++) v[i] = get(x[i]);
#else
    memcpy(&v, x, sizeof v);
#endif
    return v;
}

static inline void units_of(const float *x, unit *out, int n) {  // n floats as n / DEPTH units
#if DEPTH == 2
    for (int i = 0; i < n; i += 32) {
        __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i));
        memcpy(out + i / 2, &pairs, sizeof pairs);
    }
#else
    memcpy(out, x, n * sizeof *x);
#endif
}
"""
