# Generated from notebooks/14_native.ipynb by `helios export`; edit the notebook.
"""Attention in place.

Attention that reads keys and values where they lie, page by page, and the runner that puts all
kernels together: the same passes as before, in a third of the calls and without a gather.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from helios.fast.blocks import PAGES, PRODUCT
from helios.kv.layout import Ints, Layout
from helios.kv.pages import PAGE_SIZE

__all__ = [
    "ATTEND_BLOCK",
    "ATTEND_DECODE",
    "ATTEND_PREFILL",
    "ATTENTION",
    "ATTENTION_FUNCTIONS",
    "AttentionPlan",
    "DECODE",
    "MERGE",
    "SOFTEN",
    "WORK",
    "prefill_tasks",
]
DECODE = r"""
#define G (H / K)             // query heads that share a key head
#define PART (H * D + 2 * H)  // floats of one part's result: weighted values, then maxima, then sums
#define TOGETHER (G <= 6 ? G : G % 6 == 0 ? 6 : G % 4 == 0 ? 4 : G % 5 == 0 ? 5 : G % 3 == 0 ? 3 : 1)

// scores [PAGE] of one query to weights over its n tokens, zero up to the block's end; their maximum and sum
static void weigh(float *score, int n, unit *weight, float *top_out, float *total_out) {
    float top = -INFINITY, total = 0;
    int end = (n + KEYS - 1) / KEYS * KEYS;
    #pragma omp simd reduction(max : top)
    for (int j = 0; j < n; j++) top = score[j] > top ? score[j] : top;
    for (int j = 0; j < n; j++) total += score[j] = exponential((score[j] - top) / sqrtf(D));
    for (int j = n; j < end; j++) score[j] = 0;
    units_of(score, weight, end);
    *top_out = top / sqrtf(D);
    *total_out = total;
}

// one query token, one page: attention over its first n tokens, for all heads, not yet divided by the sum
static void attend_page(const num *q, const num *keys, const num *values, long page, int n, float *out) {
    for (int h = 0; h < H; h += TOGETHER) {
        unit query[TOGETHER][D / DEPTH], weight[TOGETHER][PAGE / DEPTH];
        float score[TOGETHER][PAGE] = {0}, *sum = out + h * D;
        memset(sum, 0, TOGETHER * D * sizeof(float));
        for (int i = 0; i < TOGETHER * D; i += DEPTH) query[0][i / DEPTH] = unit_of(q + h * D + i);
        for (int j = 0; j < n; j += KEYS)
            score_block(TOGETHER, query[0], keys + block_at(page, h / G, j / KEYS), score[0] + j, PAGE);
        for (int g = 0; g < TOGETHER; g++) weigh(score[g], n, weight[g], out + H * D + h + g, out + H * D + H + h + g);
        for (int j = 0; j < n; j += KEYS)
            add_block(TOGETHER, weight[0] + j / DEPTH, PAGE / DEPTH, values + block_at(page, h / G, j / KEYS), sum,
                      n - j < KEYS ? n - j : KEYS);
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
                long left = context[b] - p * PAGE;
                if (left > 0)
                    attend_page(qkv + rows[b] * (H + 2 * K) * D, keys, values, table[b * P + p],
                                left < PAGE ? left : PAGE, parts + (b * P + p) * PART);
            }
        #pragma omp for schedule(static)
        for (long b = 0; b < B; b++)
            merge(parts + b * P * PART, (context[b] + PAGE - 1) / PAGE, out + rows[b] * H * D);
    }
}
"""

WORK = r"""
#define SIX 6                                        // lines at a time
#define QUERIES (240 / G)                            // tokens whose queries share the keys in the cache
#define LINES ((QUERIES * G + SIX - 1) / SIX * SIX)  // their queries, G for each token

typedef struct {
    unit q[LINES][D / DEPTH];
    float out[LINES][D], top[LINES], total[LINES];
} Work;
"""

SOFTEN = r"""
// scores of one line to weights: the first n keys are visible; what was summed so far is rescaled to the new maximum
static inline void soften(Work *w, long line, float *score, long n, unit *weight) {
    float top = w->top[line], total = 0;
    for (int j = n < 0 ? 0 : n; j < KEYS; j++) score[j] = -1e30f;
    #pragma omp simd reduction(max : top)
    for (int j = 0; j < KEYS; j++) top = score[j] > top ? score[j] : top;
    for (int j = 0; j < KEYS; j++) total += score[j] = exponential((score[j] - top) / sqrtf(D));
    if (top > w->top[line]) {
        float scale = exponential((w->top[line] - top) / sqrtf(D));
        w->top[line] = top;
        w->total[line] *= scale;
        for (int d = 0; d < D; d++) w->out[line][d] *= scale;
    }
    w->total[line] += total;
    units_of(score, weight, KEYS);
}
"""

ATTEND_BLOCK = r"""
// six lines against a block; line's token sees the first `seen` of its keys, the next token one more
static void attend_block(Work *w, long line, const num *keys, const num *values, long seen) {
    float score[SIX][KEYS] = {0};
    unit weight[SIX][KEYS / DEPTH];
    score_block(SIX, w->q[line], keys, score[0], KEYS);
    for (int r = 0; r < SIX; r++) soften(w, line + r, score[r], seen + (line + r) / G - line / G, weight[r]);
    add_block(SIX, weight[0], KEYS / DEPTH, values, w->out[line], KEYS);
}
"""

ATTEND_PREFILL = r"""
// tokens of one span: n queries from `qkv`, the first at `position`, key head k
static void attend_span(Work *w, const num *qkv, num *out, const num *keys, const num *values, const int64_t *pages,
                        long n, long position, int k) {
    memset(w->out, 0, sizeof w->out + sizeof w->top + sizeof w->total);
    for (long i = 0; i < LINES; i++) w->top[i] = -1e30f;
    for (long i = 0; i < n * G; i++)
        for (int d = 0; d < D / DEPTH; d++)
            w->q[i][d] = unit_of(qkv + (i / G * (H + 2 * K) + k * G + i % G) * D + d * DEPTH);
    for (long j = 0; j < position + n; j += KEYS) {
        long at = block_at(pages[j / PAGE], k, j % PAGE / KEYS);
        for (long line = 0; line < n * G; line += SIX)
            if (position + (line + SIX - 1) / G >= j)
                attend_block(w, line, keys + at, values + at, position + line / G + 1 - j);
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

ATTENTION = PAGES + PRODUCT + DECODE + MERGE + ATTEND_DECODE + WORK + SOFTEN + ATTEND_BLOCK + ATTEND_PREFILL
ATTENTION_FUNCTIONS = {
    "rope_store": "ppppppf" + "pppl",
    "attend_decode": "ppppppp" + "llp",
    "attend_prefill": "ppppp" + "lpl",
}
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
