# Generated from notebooks/13_kernels.ipynb by `helios export`; edit the notebook.
"""The matrix product: weights in panels, sums in registers, and what becomes of a sum before it is stored."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from helios.model.linear import Linear

__all__ = [
    "FLOAT",
    "GATED",
    "LINEAR",
    "LINEAR_FUNCTIONS",
    "PACK",
    "PLAIN",
    "PanelLinear",
    "STORE",
    "TILE",
    "pad",
    "plain_weight",
]
PACK = r"""
#if LANES == 16
#define ROWS 12  // rows × columns of sums that fit the 32 vector registers, with room for the operands
#else
#define ROWS 6
#endif
#define COLUMNS (2 * LANES)

// w [N, C] to panels [N / COLUMNS][C / DEPTH][COLUMNS]; both N and C are padded by the caller
void pack_panels(const num *restrict w, unit *restrict panels, long N, long C) {
    #pragma omp parallel for schedule(static)
    for (long n = 0; n < N; n += COLUMNS)
        for (long c = 0; c < C / DEPTH; c++)
            for (long i = 0; i < COLUMNS; i++)
                panels[n * (C / DEPTH) + c * COLUMNS + i] = unit_of(w + (n + i) * C + c * DEPTH);
}
"""

TILE = r"""
// sums [R, COLUMNS] = x [R, C] times one panel
static inline __attribute__((always_inline)) void multiply(int R, const num *x, const vec *panel, vec (*sums)[2],
                                                           long C) {
    vec sum[ROWS][2];
    #pragma GCC unroll 12
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = (vec){0};
    for (long c = 0; c < C; c += DEPTH, panel += 2)
        #pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            unit u = unit_of(x + r * C + c);
            sum[r][0] = fma_lanes(sum[r][0], u, panel[0]);
            sum[r][1] = fma_lanes(sum[r][1], u, panel[1]);
        }
    memcpy(sums, sum, R * sizeof *sums);
}

static void tile(int R, const num *x, const vec *panel, vec (*sums)[2], long C) {
    switch (R) {  // a constant R lets the compiler keep all sums in registers
#define CASE(r) case r: multiply(r, x, panel, sums, C); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}
"""

STORE = r"""
enum { PLAIN, GATED, FLOAT };  // what becomes of a sum: a num; silu(gate) · up of the two vectors; a float

static inline void store(const float *sum, void *y, const num *bias, long row, long n, long N, int kind) {
    long end = N - n < COLUMNS ? N - n : COLUMNS;
    if (kind == GATED) {
        num *out = (num *)y + row * (N / 2) + n / 2;
        for (long i = 0; i < end / 2; i++) out[i] = put(sum[i] / (1 + exponential(-sum[i])) * sum[LANES + i]);
    } else if (kind == FLOAT)
        memcpy((float *)y + row * N + n, sum, end * 4);
    else
        for (long i = 0; i < end; i++) ((num *)y)[row * N + n + i] = put(sum[i] + (bias ? get(bias[n + i]) : 0));
}
"""

LINEAR = r"""
#define BLOCK 120  // rows that stay in the cache while panels go by

// y [T, N] = x [T, C] times the panels of w [N, C], plus bias
void linear(const num *x, const unit *panels, const num *bias, void *y, long T, long C, long N, int kind) {
    #pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (long first = 0; first < T; first += BLOCK)
        for (long n = 0; n < N; n += COLUMNS) {
            long end = first + BLOCK < T ? first + BLOCK : T, tiles = (end - first + ROWS - 1) / ROWS;
            for (long t = first; tiles; tiles--) {
                long R = (end - t + tiles - 1) / tiles;  // rows shared out evenly: 13 are 7 and 6, not 12 and 1
                vec sums[ROWS][2];
                tile(R, x + t * C, (const vec *)(panels + n * (C / DEPTH)), sums, C);
                for (long r = 0; r < R; r++) store((const float *)sums[r], y, bias, t + r, n, N, kind);
                t += R;
            }
        }
}
const int columns = COLUMNS, depth = DEPTH;
"""
LINEAR_FUNCTIONS = {"pack_panels": "ppll", "linear": "pppplll" + "i", "columns": "", "depth": ""}
PLAIN, GATED, FLOAT = 0, 1, 2  # what becomes of a sum: see STORE


def plain_weight(linear: Linear) -> Tensor:
    """The weight `[out, in]` of a linear, packed for oneDNN or not."""
    weight = linear.packed.to_dense() if linear.weight is None else linear.weight.detach()
    assert isinstance(weight, Tensor)
    return weight.contiguous()


def pad(weight: Tensor, rows: int, width: int = 0) -> Tensor:
    """`weight` with zero rows up to a multiple of `rows`, and zero columns up to `width`."""
    below, right = -len(weight) % rows, max(0, width - weight.shape[1])
    return torch.nn.functional.pad(weight, (0, right, 0, below)).contiguous()


class PanelLinear:
    """`y = x Wᵀ + b` by our kernel: W `[N, C]` in panels. `kind` GATED: W is gates above ups, y = silu(gate) · up.
    `inputs`: the width of x, where it is padded with zeros.

    Every row of y is computed alike, whatever other rows there are: batching does not change an answer's bits.
    """

    def __init__(
        self, kernels: SimpleNamespace, weight: Tensor, bias: Tensor | None = None, kind: int = PLAIN, inputs: int = 0
    ) -> None:
        self.kernels, self.kind, self.bias = kernels, kind, bias
        lanes = kernels.columns // 2
        self.outputs = len(weight)
        if kind == GATED:  # a vector of gates, then the vector of their ups
            gates, ups = (pad(half, lanes) for half in weight.chunk(2))
            self.outputs = len(gates)  # padded: what reads it has as many inputs
            weight = torch.cat((gates.view(-1, lanes, gates.shape[1]), ups.view(-1, lanes, ups.shape[1])), 1).flatten(
                0, 1
            )
        weight = pad(weight, kernels.columns, inputs)
        self.inputs = weight.shape[1]
        self.panels = torch.empty(weight.numel(), dtype=torch.float32 if kernels.depth == 1 else weight.dtype)
        kernels.pack_panels(weight.data_ptr(), self.panels.data_ptr(), *weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """`x [T, C]`, contiguous, to `[T, N]` (GATED: `[T, N/2]`, FLOAT: in float32)."""
        y = x.new_empty(len(x), self.outputs, dtype=torch.float32 if self.kind == FLOAT else None)
        width = 2 * self.outputs if self.kind == GATED else self.outputs
        bias = None if self.bias is None else self.bias.data_ptr()
        self.kernels.linear(
            x.data_ptr(), self.panels.data_ptr(), bias, y.data_ptr(), len(x), self.inputs, width, self.kind
        )
        return y
