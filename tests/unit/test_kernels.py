"""The C kernels: each against its formula in PyTorch, whatever the sizes; and what happens where they cannot be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helios.engine.build import choose_runner
from helios.engine.config import EngineConfig
from helios.engine.runner import ModelRunner, TickInputs
from helios.fast import compiler
from helios.fast.attention import AttentionPlan
from helios.fast.linear import FLOAT, GATED, PLAIN, PanelLinear
from helios.fast.native import model_kernels
from helios.kv.layout import Layout
from helios.kv.paged import PagedKVCache, Span
from helios.model.config import ModelConfig, tiny_config
from helios.model.transformer import Transformer, naive_attention
from helios.model.weights import random_weights

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}

try:
    compiler.find_compiler()
except compiler.NoKernels as obstacle:
    pytest.skip(str(obstacle), allow_module_level=True)


def kernels_for(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> SimpleNamespace:
    shape = SimpleNamespace(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    return model_kernels(shape, dtype)  # type: ignore[arg-type]


def tiny(dtype: torch.dtype = torch.float32, family: str = "qwen3", **overrides: Any) -> Transformer:
    config: ModelConfig = tiny_config(family, **overrides)
    return Transformer.from_weights(config, random_weights(config, seed=1, dtype=dtype)).pack()


def cache_for(model: Transformer, pages: int = 8) -> PagedKVCache:
    return PagedKVCache(model.config.kv_spec, pages, query_heads=model.config.heads, dtype=model.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 260),
    outputs=st.integers(1, 130),
    pairs=st.integers(1, 70),
    kind=st.sampled_from([PLAIN, FLOAT]),
)
def test_products_of_any_size(dtype: torch.dtype, rows: int, outputs: int, pairs: int, kind: int) -> None:
    kernels = kernels_for(4, 2, 16, dtype)
    generator = torch.Generator().manual_seed(rows * outputs)
    x, w, b = (
        torch.randn(*size, generator=generator).to(dtype)
        for size in ((rows, 2 * pairs), (outputs, 2 * pairs), (outputs,))
    )
    y = PanelLinear(kernels, w, None if kind == FLOAT else b, kind)(x)
    expected = x.double() @ w.double().T + (0 if kind == FLOAT else b.double())
    assert y.shape == (rows, outputs) and y.dtype == (torch.float32 if kind == FLOAT else dtype)
    torch.testing.assert_close(y.double(), expected, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 40), inner=st.integers(1, 90))
def test_the_gate_is_applied_before_the_store(dtype: torch.dtype, rows: int, inner: int) -> None:
    kernels = kernels_for(4, 2, 16, dtype)
    x, w = torch.randn(rows, 64).to(dtype), (torch.randn(2 * inner, 64) / 8).to(dtype)
    gate, up = (x.float() @ w.float().T).chunk(2, dim=-1)
    y = PanelLinear(kernels, w, kind=GATED)(x)
    torch.testing.assert_close(
        y[:, :inner].float(), F.silu(gate) * up, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype]
    )
    assert not y[:, inner:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    linear = PanelLinear(kernels_for(4, 2, 16, dtype), torch.randn(100, 64).to(dtype))
    x = torch.randn(300, 64).to(dtype)
    together = linear(x)
    assert torch.equal(together, torch.cat([linear(row[None]) for row in x]))
    assert torch.equal(together[:137], linear(x[:137].contiguous()))


def in_blocks(keys: torch.Tensor, values: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens `[pages · 256, K, D]` as the kernels lay them out inside a page."""
    heads, dim = keys.shape[1:]
    k = keys.view(-1, 4, 64, heads, dim // depth, depth).permute(0, 3, 1, 4, 2, 5)
    v = values.view(-1, 4, 64 // depth, depth, heads, dim).permute(0, 4, 1, 2, 5, 3)
    return k.reshape(-1, heads * dim), v.reshape(-1, heads * dim)


def attention_case(kernels: SimpleNamespace, shape: tuple[int, int, int], dtype: torch.dtype, spans: Any) -> None:
    """Packed spans (query, context) over scattered pages, against the formula.

    Pages of nobody hold NaN; what follows a context in its last page is old: finite, and larger than anything else.
    """
    heads, kv_heads, dim = shape
    rng = np.random.default_rng(sum(map(sum, spans)))
    free = iter(rng.permutation(60) + 1)
    tables = [[int(next(free)) for _ in range(-(-context // 256))] for _, context in spans]
    pool = torch.full((2, 61 * 256, kv_heads, dim), float("nan"), dtype=dtype)
    slots = [
        torch.tensor([table[p // 256] * 256 + p % 256 for p in range(context)])
        for (_, context), table in zip(spans, tables, strict=True)
    ]
    for mine, table in zip(slots, tables, strict=True):
        pool.view(2, 61, -1)[:, table] = 1e4
        pool[:, mine] = torch.randn(2, len(mine), kv_heads, dim).to(dtype)
    layout = Layout([q for q, _ in spans], [c for _, c in spans], tables)
    plan = AttentionPlan(layout, kernels.queries)
    qkv = torch.randn(sum(q for q, _ in spans), heads + 2 * kv_heads, dim).to(dtype)
    out, scratch = torch.empty(len(qkv), heads, dim, dtype=dtype), torch.empty(plan.parts * kernels.part_floats)
    pages = in_blocks(*pool, kernels.depth)
    pointers = [t.data_ptr() for t in (qkv, out, *pages)]
    if plan.parts:
        kernels.attend_decode(*pointers, *plan.decode_arguments(scratch.data_ptr()))
    if len(plan.tasks):
        kernels.attend_prefill(*pointers, *plan.prefill_arguments())
    for (query, _), start, mine in zip(spans, layout.starts, slots, strict=True):
        q = qkv[start : start + query, :heads].float()
        expected = naive_attention(q, pool[0, mine].float(), pool[1, mine].float())
        torch.testing.assert_close(
            out[start : start + query].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 16), (8, 1, 80), (16, 2, 128), (2, 1, 256)])
def test_attention_in_place(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    kernels = kernels_for(*shape, dtype)
    for spans in (
        [(1, 1)],
        [(1, 255), (1, 256), (1, 257), (1, 700)],
        [(2, 2), (64, 64), (1, 5), (65, 300)],
        [(300, 300), (1, 513), (81, 600), (512, 512)],
    ):
        attention_case(kernels, shape, dtype, spans)


def ticks() -> list[TickInputs]:
    return [
        TickInputs(np.arange(10, 50), np.r_[0:30, 0:10], [Span(30, 30, [1]), Span(10, 10, [2])], np.array([29, 39])),
        TickInputs(np.array([3, 4]), np.array([30, 10]), [Span(1, 31, [1]), Span(1, 11, [2])], np.array([0, 1])),
        TickInputs(
            np.arange(270) % 250, np.r_[31:300, 11], [Span(269, 300, [1, 3]), Span(1, 12, [2])], np.array([268, 269])
        ),
    ]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_logits_are_the_eager_runners(family: str, packed: bool) -> None:
    config = tiny_config(family, intermediate_size=90)  # no multiple of a vector
    models = [Transformer.from_weights(config, random_weights(config, seed=1)) for _ in range(2)]
    if packed:
        models = [model.pack() for model in models]
    cache = cache_for(models[1])
    name, native, _ = choose_runner(models[1], cache, EngineConfig(runner="native"))
    eager = ModelRunner(models[0], cache_for(models[0]))
    assert name == "native"
    for tick in ticks():
        torch.testing.assert_close(native.forward(tick), eager.forward(tick), atol=1e-4, rtol=1e-4)
    for stored, rows in zip(cache.store, eager.cache.store, strict=True):
        keys, values = rows.view(2, -1, config.kv_heads, config.head_dim)
        for kernel_s, plain in zip(stored, in_blocks(keys, values, native.kernels.depth), strict=True):
            torch.testing.assert_close(kernel_s[1:4].view(-1), plain.view(8, -1)[1:4].reshape(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_with_its_sequence(dtype: torch.dtype) -> None:
    model = tiny(dtype)
    model.embed.weight[3] = float("nan")
    _, runner, _ = choose_runner(model, cache_for(model), EngineConfig(runner="native"))
    first, second, _ = ticks()
    assert torch.isfinite(runner.forward(first)).all()
    logits = runner.forward(second)  # the first sequence's token is 3
    assert not torch.isfinite(logits[0]).any() and torch.isfinite(logits[1]).all()


def test_a_position_beyond_the_context_is_refused() -> None:
    model = tiny()
    _, runner, _ = choose_runner(model, cache_for(model), EngineConfig(runner="native"))
    far = TickInputs(np.array([1]), np.array([model.config.context]), [Span(1, 1, [1])], np.array([0]))
    with pytest.raises(IndexError, match="beyond the context"):
        runner.forward(far)


def test_without_a_compiler_the_eager_runner_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.find_compiler.cache_clear()
    monkeypatch.setattr("shutil.which", lambda name: None)
    try:
        model = tiny()
        name, runner, why = choose_runner(model, cache_for(model), EngineConfig())
        assert name == "eager" and "no C compiler" in why
        assert torch.isfinite(runner.forward(ticks()[0])).all(), "the model was not taken apart"
        with pytest.raises(ValueError, match=r"runner='native' is not possible here: .*no C compiler"):
            choose_runner(model, cache_for(model), EngineConfig(runner="native"))
    finally:
        compiler.find_compiler.cache_clear()


@pytest.mark.parametrize(
    ("change", "word"), [({"dtype": torch.float16}, "float16"), ({"head_dim": 24}, "heads of 24 values")]
)
def test_what_kernels_cannot_do_is_said(change: dict[str, Any], word: str) -> None:
    dtype = change.pop("dtype", torch.float32)
    model = tiny(dtype, **change)
    with pytest.raises(ValueError, match=word):
        choose_runner(model, cache_for(model), EngineConfig(runner="native"))


def test_an_attention_that_was_asked_for_is_not_ignored() -> None:
    model = tiny()
    name, _, why = choose_runner(model, cache_for(model), EngineConfig(attention="sdpa"))
    assert name == "eager" and "attention='sdpa' was asked for" in why
    with pytest.raises(ValueError, match="attention='sdpa' was asked for"):
        choose_runner(model, cache_for(model), EngineConfig(attention="sdpa", runner="native"))


def test_an_unknown_runner_is_named() -> None:
    with pytest.raises(ValueError, match="runner='warp' is unknown: use auto, eager"):
        choose_runner(tiny(), cache_for(tiny()), EngineConfig(runner="warp"))


def test_a_library_is_built_once_by_however_many_processes(tmp_path: Path) -> None:
    code = (
        "from helios.fast.compiler import compile_kernels\n"
        "f = compile_kernels('int seven = 7; void f(long n) {}', {'f': 'l', 'seven': ''}, [])\n"
        "f.f(1); print(f.seven)"
    )
    environment = {"HELIOS_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=60)[0].strip() for process in started] == ["7"] * 3
    assert len(list(tmp_path.glob("kernels/*.so"))) == 1 and len(list(tmp_path.glob("kernels/*"))) == 1


def test_the_compilers_complaint_is_passed_on() -> None:
    with pytest.raises(compiler.NoKernels, match="the C compiler refused: .*error"):
        compiler.compile_kernels("void f(void) { return 1 + ; }", {"f": "l"}, [])
