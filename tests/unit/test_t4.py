"""A T4, simulated: capability 7.5, bfloat16 only by emulation. Each branch on such facts takes the T4's way itself."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helios.book import notebook
from helios.engine import build
from helios.fast import compiled, graphs, triton_decode
from helios.kv.matmul import choose_paged_attention
from helios.model import attention
from helios.model.config import tiny_config
from helios.model.device import choose_device, choose_dtype
from helios.model.transformer import Transformer
from helios.serve import doctor

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")
ASKS = re.compile(r"get_device_capability|is_bf16_supported")
# Modules that ask what the GPU can do; each is put before the T4 below.
COVERED = {
    "book/notebook.py",
    "fast/compiled.py",
    "fast/graphs.py",
    "fast/triton_decode.py",
    "model/attention.py",
    "model/device.py",
    "serve/doctor.py",
}


@pytest.fixture(autouse=True)
def t4(monkeypatch: pytest.MonkeyPatch) -> None:
    def bf16(including_emulation: bool = True) -> bool:
        return including_emulation  # as torch answers on a T4: it computes bfloat16, slowly, in float32

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: "Tesla T4",
        "get_device_capability": lambda device=None: (7, 5),
        "is_bf16_supported": bf16,
        "mem_get_info": lambda device=None: (15_000_000_000, 15_800_000_000),
        "device": lambda device: nullcontext(),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    attention._flash_shares_heads.cache_clear()


def test_every_module_that_asks_is_covered() -> None:
    helios = ROOT / "helios"
    asking = {path.relative_to(helios).as_posix() for path in helios.rglob("*.py") if ASKS.search(path.read_text())}
    assert asking == COVERED


def test_no_notebook_asks_the_gpu_outside_of_an_exported_cell() -> None:
    import json

    for path in sorted((ROOT / "notebooks").rglob("[0-9][0-9]_*.ipynb")):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and not source.startswith("#| export"):
                assert not re.search(r"is_bf16_supported\(\)", source), f"{path.name} takes emulation for support"


def test_it_computes_in_float16_on_the_gpu() -> None:
    assert choose_device() == CUDA
    dtype, why = choose_dtype(CUDA)
    assert dtype == torch.float16 and "bfloat16" in why


def test_it_attends_by_sdpa_and_says_why() -> None:
    name, why = choose_paged_attention(CUDA, torch.float16)
    assert name == "sdpa" and "8.0" in why
    with pytest.raises(ValueError, match=r"8\.0.*attention='auto'"):
        choose_paged_attention(CUDA, torch.float16, "varlen")
    assert build.choose_cache(CUDA, torch.float16, "auto")[0] == "sdpa"


def test_heads_are_not_shared_inside_one_fused_call() -> None:
    assert not attention._flash_shares_heads(CUDA, torch.float16)


def test_triton_serves_in_float16_and_not_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "find_spec", lambda name: object())
    assert triton_decode.obstacle(CUDA, torch.float16) is None
    assert "8.0" in (triton_decode.obstacle(CUDA, torch.bfloat16) or "")


def test_nothing_is_compiled_in_emulated_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "has_triton", lambda: True)
    model = Transformer(tiny_config("qwen3"))
    monkeypatch.setattr(Transformer, "device", property(lambda self: CUDA))
    monkeypatch.setattr(Transformer, "dtype", property(lambda self: torch.bfloat16))
    assert "bfloat16" in (compiled.obstacle(model) or "")
    assert "compiled" not in build.AUTO, "compiling is asked for, never chosen: on a T4 it costs minutes"


def test_sums_of_float16_products_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(graphs, "assemble", lambda *parts: seen.update(graphs=parts[-1]) or ("runner", "how"))
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: None)
    monkeypatch.setattr(graphs, "CudaLink", lambda: None)
    before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    try:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
        model: Any = SimpleNamespace(device=CUDA, dtype=torch.float16)
        graphs.build_runner(model, SimpleNamespace(attention="sdpa"), None)  # type: ignore[arg-type]
        assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction is False
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = before
    assert seen["graphs"] == 12, "half as many graphs: a T4 has half the room"


def test_notebooks_and_doctor_tell_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    notebook.describe_machine()
    assert "device cuda (Tesla T4) · dtype float16" in capsys.readouterr().out
    assert "Tesla T4, capability 7.5" in doctor._gpu(CUDA).found
