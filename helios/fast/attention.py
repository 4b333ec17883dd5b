# Generated from notebooks/13_native.ipynb by `helios export`; edit the notebook.
"""Attention in place.

Attention that reads keys and values where they lie, page by page, and the runner that puts all
kernels together: the same passes as before, in a third of the calls and without a gather.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from helios.kv.layout import Ints, Layout
from helios.kv.pages import PAGE_SIZE

__all__ = [
    "ATTEND_DECODE",
    "ATTEND_KEYS",
    "ATTEND_PREFILL",
    "ATTENTION",
    "ATTENTION_FUNCTIONS",
    "AttentionPlan",
    "DECODE",
    "LOAD",
    "MERGE",
    "PRODUCT",
    "SOFTEN",
    "WORK",
    "prefill_tasks",
]
DECODE = r"""
#define PAGE 256
#define G (H / K)             // query heads that share a key head
#define PART (H * D + 2 * H)  // floats of one part's result: weighted values, then maxima, then sums

// one query, one page: attention over its first n tokens, for all heads, not yet divided by the sum
static void attend_page(const num *q, const num *keys, const num *values, int n, float *out) {
    for (int k = 0; k < K; k++) {
        float query[G][D], weight[G][PAGE], sum[G][D] = {0};
        for (int g = 0; g < G; g++)
            for (int d = 0; d < D; d++) query[g][d] = get(q[(k * G + g) * D + d]) / sqrtf(D);
        for (int j = 0; j < n; j++)
            for (int g = 0; g < G; g++) {
                float score = 0;
                for (int d = 0; d < D; d++) score += query[g][d] * get(keys[(j * K + k) * D + d]);
                weight[g][j] = score;
            }
        for (int g = 0; g < G; g++) {
            float top = -INFINITY, total = 0;
            #pragma omp simd reduction(max : top)
            for (int j = 0; j < n; j++) top = weight[g][j] > top ? weight[g][j] : top;
            for (int j = 0; j < n; j++) total += weight[g][j] = exponential(weight[g][j] - top);
            out[H * D + k * G + g] = top;
            out[H * D + H + k * G + g] = total;
        }
        for (int j = 0; j < n; j++)
            for (int g = 0; g < G; g++)
                for (int d = 0; d < D; d++) sum[g][d] += weight[g][j] * get(values[(j * K + k) * D + d]);
        memcpy(out + k * G * D, sum, sizeof sum);
    }
}
"""

MERGE = r"""
// one query's answer from the results of its pages
static void merge(const float *parts, long pages, num *out) {
    for (int h = 0; h < H; h++) {
        float top = -INFINITY, total = 0, sum[D] = {0};
        for (long p = 0; p < pages; p++) top = fmaxf(top, parts[p * PART + H * D + h]);
        for (long p = 0; p < pages; p++) {
            const float *part = parts + p * PART;
            float weight = exponential(part[H * D + h] - top);
            total += weight * part[H * D + H + h];
            for (int d = 0; d < D; d++) sum[d] += weight * part[h * D + d];
        }
        for (int d = 0; d < D; d++) out[h * D + d] = put(sum[d] / total);
    }
}
"""

ATTEND_DECODE = r"""
// decode rows: B queries rows[B] of qkv [T, H+2K, D], each over context[B] tokens in the pages of table [B, P]
void attend_decode(const num *qkv, num *out, const num *keys, const num *values, const int64_t *rows,
                   const int64_t *context, const int64_t *table, long B, long P, float *parts) {
    #pragma omp parallel
    {
        #pragma omp for schedule(dynamic, 1) collapse(2)
        for (long p = 0; p < P; p++)
            for (long b = 0; b < B; b++) {
                long left = context[b] - p * PAGE, at = table[b * P + p] * PAGE * K * D;
                if (left > 0)
                    attend_page(qkv + rows[b] * (H + 2 * K) * D, keys + at, values + at, left < PAGE ? left : PAGE,
                                parts + (b * P + p) * PART);
            }
        #pragma omp for schedule(static)
        for (long b = 0; b < B; b++)
            merge(parts + b * P * PART, (context[b] + PAGE - 1) / PAGE, out + rows[b] * H * D);
    }
}
"""

WORK = r"""
#if LANES == 16
#define WIDE 4  // vectors of sums per row, six rows at a time
#else
#define WIDE 2
#endif
#define SIX 6
#define KEYS 64                                         // keys at a time
#define QUERIES (240 / G)                               // tokens whose queries share them
#define LINES ((QUERIES * G + SIX - 1) / SIX * SIX)     // their queries, G for each token

typedef struct {
    unit q[LINES][D / DEPTH];
    float out[LINES][D], top[LINES], total[LINES];
    vec keys[D / DEPTH][KEYS / LANES];  // transposed: a vector is one component of LANES keys
    vec values[KEYS / DEPTH][D / LANES];
} Work;
"""

LOAD = r"""
static void load_keys(Work *w, const num *keys, const num *values, long n) {
    unit (*k)[KEYS] = (void *)w->keys, (*v)[D] = (void *)w->values;
    if (n < KEYS) memset(w->keys, 0, sizeof w->keys), memset(w->values, 0, sizeof w->values);
    for (long j = 0; j < n; j++)
        for (int d = 0; d < D / DEPTH; d++) k[d][j] = unit_of(keys + j * K * D + d * DEPTH);
    for (long j = 0; j < n; j += DEPTH)
        for (int d = 0; d < D; d++) {
#if DEPTH == 2
            v[j / 2][d] = values[j * K * D + d] | (j + 1 < n ? (uint32_t)values[(j + 1) * K * D + d] << 16 : 0);
#else
            v[j][d] = get(values[j * K * D + d]);
#endif
        }
}
"""

PRODUCT = r"""
// sums [SIX][columns of b] += a [SIX][depth] · b [depth][columns], WIDE vectors of columns
static inline __attribute__((always_inline)) void product(float *sums, long width, const unit *a, long stride,
                                                          const vec *b, long columns, int depth) {
    vec s[SIX][WIDE];
    #pragma GCC unroll 6
    for (int r = 0; r < SIX; r++)
        #pragma GCC unroll 4
        for (int c = 0; c < WIDE; c++) memcpy(&s[r][c], sums + r * width + c * LANES, sizeof(vec));
    for (int d = 0; d < depth; d++)
        #pragma GCC unroll 6
        for (int r = 0; r < SIX; r++)
            #pragma GCC unroll 4
            for (int c = 0; c < WIDE; c++) s[r][c] = fma_lanes(s[r][c], a[r * stride + d], b[d * columns + c]);
    #pragma GCC unroll 6
    for (int r = 0; r < SIX; r++)
        #pragma GCC unroll 4
        for (int c = 0; c < WIDE; c++) memcpy(sums + r * width + c * LANES, &s[r][c], sizeof(vec));
}
"""

SOFTEN = r"""
// scores of one line to weights: the first n keys are visible; what was summed so far is rescaled to the new maximum
static inline void soften(Work *w, long line, float *score, long n, unit *weight) {
    float top = w->top[line], total = 0;
    for (int j = 0; j < KEYS; j++) score[j] = j < n ? score[j] / sqrtf(D) : -1e30f;
    #pragma omp simd reduction(max : top)
    for (int j = 0; j < KEYS; j++) top = score[j] > top ? score[j] : top;
    for (int j = 0; j < KEYS; j++) total += score[j] = exponential(score[j] - top);
    float scale = exponential(w->top[line] - top);
    w->top[line] = top;
    w->total[line] = w->total[line] * scale + total;
    if (scale != 1)
        for (int d = 0; d < D; d++) w->out[line][d] *= scale;
    units_of(score, weight, KEYS);
}
"""

ATTEND_KEYS = r"""
// six lines against the loaded keys; line's token sees the first `seen` of them, the next token one more
static void attend_keys(Work *w, long line, long seen) {
    float score[SIX][KEYS] = {0};
    unit weight[SIX][KEYS / DEPTH];
    for (int c = 0; c < KEYS / LANES; c += WIDE)
        product(score[0] + c * LANES, KEYS, w->q[line], D / DEPTH, &w->keys[0][c], KEYS / LANES, D / DEPTH);
    for (int r = 0; r < SIX; r++) soften(w, line + r, score[r], seen + (line + r) / G - line / G, weight[r]);
    int c = 0;
    for (; c + WIDE <= D / LANES; c += WIDE)
        product(w->out[line] + c * LANES, D, weight[0], KEYS / DEPTH, &w->values[0][c], D / LANES, KEYS / DEPTH);
    for (; c < D / LANES; c++)  // head sizes that are no multiple of WIDE vectors
        for (int r = 0; r < SIX; r++)
            for (int j = 0; j < KEYS / DEPTH; j++) {
                vec *o = (vec *)(w->out[line + r] + c * LANES);
                *o = fma_lanes(*o, weight[r][j], w->values[j][c]);
            }
}
"""

ATTEND_PREFILL = r"""
// tokens of one span: n queries from `qkv`, the first at `position`, key head k
static void attend_span(Work *w, const num *qkv, num *out, const num *keys, const num *values, const int64_t *pages,
                        long n, long position, int k) {
    memset(w, 0, offsetof(Work, keys));
    for (long i = 0; i < LINES; i++) w->top[i] = -1e30f;
    for (long i = 0; i < n * G; i++)
        for (int d = 0; d < D / DEPTH; d++)
            w->q[i][d] = unit_of(qkv + (i / G * (H + 2 * K) + k * G + i % G) * D + d * DEPTH);
    for (long j = 0; j < position + n; j += KEYS) {
        long at = (pages[j / PAGE] * PAGE + j % PAGE) * K * D + k * D, left = position + n - j;
        load_keys(w, keys + at, values + at, left < KEYS ? left : KEYS);
        for (long line = 0; line < n * G; line += SIX)
            if (position + (line + SIX - 1) / G >= j) attend_keys(w, line, position + line / G + 1 - j);
    }
    for (long i = 0; i < n * G; i++)
        for (int d = 0; d < D; d++) out[(i / G * H + k * G + i % G) * D + d] = put(w->out[i][d] / w->total[i]);
}

// tasks [N, 4]: first packed row, tokens (at most QUERIES), position of the first, row of table [., P]
void attend_prefill(const num *qkv, num *out, const num *keys, const num *values, const int64_t *table, long P,
                    const int64_t *tasks, long N) {
    #pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (long i = 0; i < N; i++)
        for (int k = 0; k < K; k++) {
            static _Thread_local Work *work;
            if (!work) work = aligned_alloc(64, (sizeof(Work) + 63) / 64 * 64);
            const int64_t *task = tasks + 4 * i;
            attend_span(work, qkv + task[0] * (H + 2 * K) * D, out + task[0] * H * D, keys, values, table + task[3] * P,
                        task[1], task[2], k);
        }
}
const int queries = QUERIES, part_floats = PART;
"""

ATTENTION = DECODE + MERGE + ATTEND_DECODE + WORK + LOAD + PRODUCT + SOFTEN + ATTEND_KEYS + ATTEND_PREFILL
ATTENTION_FUNCTIONS = {"attend_decode": "ppppppp" + "llp", "attend_prefill": "ppppp" + "lpl"}
ATTENTION_FUNCTIONS |= {"queries": "", "part_floats": ""}


def prefill_tasks(layout: Layout, spans: Ints, queries: int) -> Ints:
    """Prefill spans in blocks of `queries` tokens, `[N, 4]`: first packed row, tokens, position of the first, span."""
    tasks = [
        (layout.starts[i] + done, min(queries, layout.query[i] - done), layout.context[i] - layout.query[i] + done, i)
        for i in spans
        for done in range(0, int(layout.query[i]), queries)
    ]
    tasks.sort(key=lambda task: -task[1] * (task[2] + task[1]))
    return np.array(tasks, dtype=np.int64).reshape(-1, 4)


class AttentionPlan:
    """What the attention kernels need to know of a pass: made once, used by every layer."""

    def __init__(self, layout: Layout, queries: int) -> None:
        decode = np.flatnonzero(layout.query == 1)
        self.table = layout.table
        self.tasks = prefill_tasks(layout, np.flatnonzero(layout.query > 1), queries)
        self.rows, self.context = layout.starts[decode], layout.context[decode]
        pages = -(-int(self.context.max(initial=0)) // PAGE_SIZE)
        self.decode_table = np.ascontiguousarray(layout.table[decode, :pages])
        self.parts = len(decode) * pages

    def decode_arguments(self, scratch: int) -> tuple[Any, ...]:
        """The last arguments of `attend_decode`; `scratch`: the address of `parts · part_floats` floats."""
        rows, context, table = (array.ctypes.data for array in (self.rows, self.context, self.decode_table))
        return rows, context, table, *self.decode_table.shape, scratch

    def prefill_arguments(self) -> tuple[Any, ...]:
        """The last arguments of `attend_prefill`."""
        return self.table.ctypes.data, self.table.shape[1], self.tasks.ctypes.data, len(self.tasks)
