"""The Triton decode kernel against the formula, in Triton's interpreter: its logic, not its speed.

Triton must be told to interpret before it is imported, so the cases run in a process of their own; those that need no
kernel run here.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.fast.triton_decode import MOST_SPLITS, PROGRAMS, SHORTEST, choose_splits, obstacle

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def in_a_process(script: str, **settings: str) -> Any:
    """What `script` prints as its last line, read as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cases() -> dict[str, float]:
    script = "import json; from tests.unit.triton_cases import run_all; print(json.dumps(run_all()))"
    found: dict[str, float] = in_a_process(script, TRITON_INTERPRET="1")
    return found


BOUNDS = {"float32": 2e-6, "float16": 6e-4, "bfloat16": 5e-3}


@needs_triton
@pytest.mark.parametrize(
    "dtype, group", [("float32", 1), ("float32", 3), ("float32", 8), ("float16", 4), ("bfloat16", 4)]
)
def test_agrees_with_the_formula_on_ragged_contexts(cases: dict[str, float], dtype: str, group: int) -> None:
    for splits in (1, 7):
        assert cases[f"formula {dtype} group {group} splits {splits}"] < BOUNDS[dtype]


@needs_triton
def test_agrees_with_attend_decode(cases: dict[str, float]) -> None:
    assert cases["attend_decode"] < 2e-6


@needs_triton
def test_reads_nothing_but_the_sequences_own_tokens(cases: dict[str, float]) -> None:
    """Every case's pool is NaN elsewhere; here a changed token of its own must show, too."""
    assert cases["own token changed"] > 1e-2


@needs_triton
def test_more_parts_than_blocks_and_head_sizes(cases: dict[str, float]) -> None:
    assert cases["splits 64"] < 2e-6
    assert cases["dim 8"] < 2e-6 and cases["dim 64"] < 2e-6 and cases["dim 128"] < 2e-6


@needs_triton
def test_slices_of_a_pass_are_read_and_written_in_place(cases: dict[str, float]) -> None:
    assert cases["strided"] < 2e-6
    assert cases["rows outside the slice"] == 0


@needs_triton
@pytest.mark.parametrize("attention", ["sdpa", "matmul", "varlen"])
def test_cache_agrees_with_the_plain_one(cases: dict[str, float], attention: str) -> None:
    for name in ("mixed", "decode only", "prompts only", "scattered"):
        assert cases[f"cache {attention} {name}"] < 5e-6
    assert cases[f"cache {attention} stores"] == 0


@needs_triton
def test_padding_rows_read_the_scratch_page_only(cases: dict[str, float]) -> None:
    assert cases["padding"] == 0


@needs_triton
@pytest.mark.parametrize("capability, dtype", [(75, "fp16"), (80, "bf16"), (90, "bf16")])
def test_compiles_for_gpus_without_spilling(capability: int, dtype: str) -> None:
    """The compiler needs no GPU. Groups and head sizes of real models: nothing may go to the stack."""
    script = f"""
import json
from tests.unit.triton_cases import compile_merge, compile_part
shapes = [(1, 128, True), (3, 64, False), (4, 128, False), (8, 128, False)]
found = [compile_part({capability}, {dtype!r}, *shape) for shape in shapes]
found.append(compile_part({capability}, {dtype!r}, 4, 128, False, "i64"))
found.append(compile_part({capability}, "fp32", 4, 128, False))
print(json.dumps([*found, compile_merge({capability}, {dtype!r})]))
"""
    found = in_a_process(script, TRITON_INTERPRET="0")
    assert len(found) == 7
    for registers, stack in found:
        assert 16 < registers <= 255 and stack == 0


@needs_triton
def test_a_cpu_without_the_interpreter_is_refused() -> None:
    script = """
import json
from helios.fast.triton_decode import TritonPagedKVCache
from helios.model.config import KVSpec
try:
    TritonPagedKVCache(KVSpec(1, 2, 16), 3, query_heads=4)
except ValueError as error:
    print(json.dumps(str(error)))
"""
    assert "needs a CUDA device" in in_a_process(script, TRITON_INTERPRET="0")


def test_the_module_does_without_triton() -> None:
    script = """
import json, sys
sys.modules["triton"] = None
import torch
from helios.fast.triton_decode import obstacle
print(json.dumps(["helios.fast.triton_kernels" in sys.modules, obstacle(torch.device("cpu"), torch.float32)]))
"""
    loaded, why = in_a_process(script)
    assert not loaded and why is not None


@pytest.mark.parametrize(
    "capability, dtype, head_dim, word",
    [
        ((6, 1), torch.float16, 128, "7.0"),
        ((7, 5), torch.bfloat16, 128, "8.0"),
        ((7, 5), torch.float64, 128, "float64"),
        ((7, 5), torch.float16, 96, "power of two"),
        ((7, 5), torch.float16, 128, None),
        ((7, 0), torch.float32, 64, None),
        ((9, 0), torch.bfloat16, 128, None),
    ],
)
@needs_triton
def test_obstacles(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, head_dim: int, word: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    why = obstacle(torch.device("cuda"), dtype, head_dim)
    assert why is None if word is None else word in str(why)
    assert "CUDA" in str(obstacle(torch.device("cpu"), dtype))


def test_splits_fill_the_processors_and_leave_no_part_too_short() -> None:
    for groups in (1, 8, 64, 512, 4096):
        for longest in (1, 64, 65, 1000, 100_000):
            for processors in (1, 40, 132):
                splits = choose_splits(groups, longest, processors)
                assert 1 <= splits <= MOST_SPLITS and (splits - 1) * SHORTEST < longest
                enough = splits * groups >= PROGRAMS * processors
                assert enough or splits == MOST_SPLITS or splits * SHORTEST >= longest
                assert splits == 1 or (splits - 1) * groups < PROGRAMS * processors
