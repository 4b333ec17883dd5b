# Generated from notebooks/14_native.ipynb by `helios export`; edit the notebook.
"""The inside of a page: blocks of 64 tokens, laid out as the attention kernels read them, and products over them."""

from __future__ import annotations

__all__ = ["PAGES", "PRODUCT"]
PAGES = r"""
#define PAGE 256
#define KEYS 64          // tokens of a block
#define KV_BLOCK (KEYS * D) // numbers of a block

// where the keys (or values) of key head k and block b of a page begin: pages are [K][PAGE / KEYS] blocks
static inline long block_at(long page, int k, int b) { return ((page * K + k) * (PAGE / KEYS) + b) * KV_BLOCK; }

// one token's keys and values [K, D] to their slot; in units of DEPTH numbers a block of keys is [D / DEPTH][KEYS],
// a block of values [KEYS / DEPTH][D]
static inline void store_token(const num *k, const num *v, num *keys, num *values, long slot) {
    int j = slot % KEYS;
    for (int h = 0; h < K; h++, k += D, v += D) {
        long at = block_at(slot / PAGE, h, slot % PAGE / KEYS);
        for (int d = 0; d < D; d += DEPTH) memcpy(keys + at + d * KEYS + j * DEPTH, k + d, DEPTH * sizeof(num));
        for (int d = 0; d < D; d++) values[at + (j / DEPTH * D + d) * DEPTH + j % DEPTH] = v[d];
    }
}

// qkv [T, H+2K, D]: rotate queries and keys in place, then put keys and values into the pages
void rope_store(num *qkv, const num *cos, const num *sin, const int64_t *positions, const num *q_norm,
                const num *k_norm, float eps, const int64_t *slots, num *keys, num *values, long T) {
    #pragma omp parallel for schedule(static)
    for (long t = 0; t < T; t++) {
        num *x = qkv + t * (H + 2 * K) * D;
        rotate_token(x, cos, sin, positions[t], q_norm, k_norm, eps);
        store_token(x + H * D, x + (H + K) * D, keys, values, slots[t]);
    }
}
"""

PRODUCT = r"""
#define WIDE (LANES == 16 ? 4 : 2)  // vectors of sums per row

// sums [R][W vectors of a row] += a [R][depth] · b [depth][columns]; R · W sums stay in registers
static inline __attribute__((always_inline)) void product(int R, int W, float *sums, long width, const unit *a,
                                                          long stride, const num *b, long columns, int depth) {
    vec s[R][W];
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 4
        for (int c = 0; c < W; c++) memcpy(&s[r][c], sums + r * width + c * LANES, sizeof(vec));
    for (int d = 0; d < depth; d++)
        #pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            #pragma GCC unroll 4
            for (int c = 0; c < W; c++)
                s[r][c] = fma_lanes(s[r][c], a[r * stride + d], load(b + (d * columns + c * LANES) * DEPTH));
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 4
        for (int c = 0; c < W; c++) memcpy(sums + r * width + c * LANES, &s[r][c], sizeof(vec));
}

// scores [R][KEYS] of R queries against a block of keys
static inline __attribute__((always_inline)) void score_block(int R, const unit *q, const num *keys, float *score,
                                                              long width) {
    for (int j = 0; j < KEYS; j += WIDE * LANES)
        product(R, WIDE, score + j, width, q, D / DEPTH, keys + j * DEPTH, KEYS, D / DEPTH);
}

// out [R][D] += weights [R][tokens] · a block of values
static inline __attribute__((always_inline)) void add_block(int R, const unit *weight, long stride, const num *values,
                                                            float *out, int tokens) {
    int d = 0, depth = (tokens + DEPTH - 1) / DEPTH;
    for (; d + WIDE * LANES <= D; d += WIDE * LANES)
        product(R, WIDE, out + d, D, weight, stride, values + d * DEPTH, D, depth);
    for (; d < D; d += LANES) product(R, 1, out + d, D, weight, stride, values + d * DEPTH, D, depth);
}
"""
