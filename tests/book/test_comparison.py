"""The page that compares: drawn from the file, honest about what is worse, and empty-handed without a file."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook's module; it lies beside the package, where mkdocs finds it."""
    monkeypatch.syspath_prepend(str(ROOT / "site" / "hooks"))
    sys.modules.pop("comparison", None)
    import comparison  # type: ignore[import-not-found]

    return comparison


def summary(speed: float, seconds: float) -> dict[str, Any]:
    spread = {"p50": seconds, "p95": seconds, "max": seconds}
    return {"output_tok_s": speed, "ttft_s": spread, "itl_s": spread, "e2e_s": spread}


def a_file(folder: Path, hook: Any, speed: float, seconds: float, agreed: bool = True) -> Path:
    """Helios: 100 tokens/s and 1 s of everything. The other: `speed` and `seconds`."""
    ratio = {metric: speed / 100 if metric == "output_tok_s" else seconds for metric in hook.METRICS}
    spread = (0.9, 1.1) if agreed else (0.1, 10)
    found = {
        "lengths": "1×128/64",
        "median": {"Helios": summary(100, 1.0), "vLLM <eager>": summary(speed, seconds)},
        "ratio": ratio,
        "ratio_range": {metric: [spread[0] * value, spread[1] * value] for metric, value in ratio.items()},
    }
    servers = [{"name": "Helios", "version": None}, {"name": "vLLM <eager>", "version": "0.32"}]
    data = {
        "started": "2026-11-30T00:00:00",
        "machine": {"cpu": "a CPU", "cores": 2, "torch": "2.13"},
        "commit": "abc",
        "model": "small",
        "dtype": "bfloat16",
        "settings": {"KEY": "4"},
        "servers": {
            "vLLM <eager>": {"ready_s": 40.0, "peak_bytes": 2**32, "command": "vllm serve"},
            "Helios": {"ready_s": 4.0, "peak_bytes": 2**30, "command": "helios serve"},
        },
        "comparisons": [{"servers": servers, "pairs": 3, "seed": 7, "workloads": {"single": found}}],
    }
    path = folder / "compare.json"
    path.write_text(json.dumps(data))
    return path


def test_without_a_file_it_says_how_to_make_one(hook: Any, tmp_path: Path) -> None:
    assert "make bench-vllm" in hook.drawn_comparison(tmp_path / "none.json", "speeds")
    assert hook.drawn_comparison(tmp_path / "none.json", "losses") == ""


def test_better_is_above_one_for_speeds_and_for_times(hook: Any, tmp_path: Path) -> None:
    text = hook.drawn_comparison(a_file(tmp_path, hook, speed=50, seconds=2.0), "speeds")
    assert "Single: 1×128/64" in text and "vLLM &lt;eager&gt;" in text
    assert text.count("<strong>2.00 (1.80–2.20)</strong>") == 6, "half the time, six times"
    assert "<strong>2.00 (1.82–2.22)</strong>" in text, "twice the speed"
    assert "100.0" in text and "2.00 s" in text


def test_a_loss_is_listed_when_every_pair_agrees(hook: Any, tmp_path: Path) -> None:
    text = hook.drawn_comparison(a_file(tmp_path, hook, speed=200, seconds=0.5), "losses")
    assert "against vLLM &lt;eager&gt;, single: output tokens/s (0.50); first token, median (0.50)" in text
    nothing = hook.drawn_comparison(a_file(tmp_path, hook, speed=200, seconds=0.5, agreed=False), "losses")
    assert "lost no number" in nothing


def test_start_memory_and_circumstances(hook: Any, tmp_path: Path) -> None:
    path = a_file(tmp_path, hook, 50, 2.0)
    text = hook.drawn_comparison(path, "starts")
    assert text.index("Helios") < text.index("vLLM") and "4.0 s" in text and "4.00 GiB" in text
    facts = hook.drawn_comparison(path, "facts")
    for part in ("a CPU", "vLLM &lt;eager&gt; 0.32", "3 pairs", "seeds 7", "KEY=4", "commit abc", "2026-11-30"):
        assert part in facts


def test_what_the_comparison_writes_can_be_drawn(hook: Any) -> None:
    """The real file, when there is one, and the names that the module writes."""
    from helios.bench.compare import RATIOS

    assert set(hook.METRICS) == set(RATIOS)
    real = ROOT / "chapters" / "results" / "compare.json"
    for part in ("speeds", "starts", "losses", "facts"):
        assert isinstance(hook.drawn_comparison(real, part), str)
