"""The check for GPUs, on a CPU: every part runs with tiny sizes, so that it is not broken when a GPU is at hand."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.budget import Report, Skip, summary
from tests.gpu.machine import RUNNERS, SHAPES
from tests.gpu.questions import QUESTIONS

ROOT = Path(__file__).parents[2]


def run(*arguments: str, script: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
    command = ["-c", script] if script else ["-m", "tests.gpu.check", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **settings}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_dry_run_goes_through_every_part(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    done = run("--dry-run", "--json", str(path), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(path.read_text())
    parts: dict[str, Any] = found["parts"]
    assert "no number means anything" in found["device"]
    assert not [name for name, part in parts.items() if "failed" in part or part.get("passed") is False]
    ran = {name for name, part in parts.items() if "skipped" not in part}
    assert {"limits", "right: sdpa float32 eager", "right: varlen float32 eager", "attention: varlen"} <= ran
    assert {f"Qwen3-4B: {kind}" for kind in ("decode sdpa eager", "prefill sdpa eager", "thirty requests eager")} <= ran
    assert {f"right: {backend} float32 graphs" for backend in ("sdpa", "varlen")} <= ran
    assert "right: triton float32 eager" in ran or find_spec("triton") is None
    assert {f"asked: {name}" for name in QUESTIONS} <= parts.keys()
    assert all(any(name.endswith(runner) for name in parts) for runner in RUNNERS)
    assert all(name in done.stdout for name in parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_nothing_is_measured() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (1, "no CUDA device: nothing measured\n")


def test_it_needs_nothing_of_the_server() -> None:
    """A bare CUDA machine has torch, triton, transformers, tokenizers and safetensors, and what those bring."""
    absent = ["fastapi", "pydantic", "pydantic_settings", "typer", "uvicorn", "psutil", "rich", "httpx", "gguf"]
    absent += ["matplotlib", "nbformat", "pytest", "prometheus_client"]
    script = f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
from tests.gpu.check import main
sys.exit(main(["--dry-run", "--only", "eager", "--budget", "60"]))
"""
    done = run(script=script)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_parts_without_time_are_skipped_and_say_so() -> None:
    done = run("--dry-run", "--budget", "0")
    assert done.returncode == 0
    assert "limits" in done.stdout and "0 s are left" in done.stdout and ": 0 ran" in done.stdout


def test_the_report_keeps_what_every_part_came_to(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = Report({"device": "none"}, 50.0, path)

    def skips() -> dict[str, Any]:
        raise Skip("no such kernel")

    def breaks() -> dict[str, Any]:
        raise ZeroDivisionError("by nothing")

    def lasts() -> dict[str, Any]:
        while True:
            time.sleep(0.01)

    report.part("good", lambda: {"speed": 1.5})
    report.part("absent", skips)
    report.part("broken", breaks)
    report.part("slow", lasts, limit_s=0.2)
    report.part("long", lasts, needs_s=60.0)
    report.part("wrong", lambda: {"passed": False})
    parts = json.loads(path.read_text())["parts"]
    assert parts["good"]["speed"] == 1.5
    assert parts["absent"]["skipped"] == "no such kernel"
    assert "ZeroDivisionError" in parts["broken"]["failed"]
    assert "longer than 0 s" in parts["slow"]["failed"]
    assert "60 s" in parts["long"]["skipped"]
    assert summary(report.parts) == "6 parts: 1 ran, 2 skipped, 3 failed: broken, slow, wrong"


def test_what_hangs_is_ended_and_reported(tmp_path: Path) -> None:
    """A kernel that never returns cannot be interrupted; here a thread that ignores the signal stands for it."""
    path = tmp_path / "report.json"
    script = f"""
import signal, time
from pathlib import Path
from tests.gpu.budget import Report
report = Report({{}}, 2.0, Path({str(path)!r}))
report.guard(grace_s=0.2)
def hangs():
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(60)
report.part("hangs", hangs)
"""
    done = run(script=script)
    assert done.returncode == 2
    assert "still running" in json.loads(path.read_text())["parts"]["hangs"]["failed"]


def test_shapes_are_those_of_the_models() -> None:
    from helios.model.config import ModelConfig

    sizes = {name: ModelConfig.from_dict(shape).parameter_count / 1e9 for name, shape in SHAPES.items()}
    assert sizes["Qwen3-0.6B"] == pytest.approx(0.596, abs=0.001)
    assert sizes["Qwen3-4B"] == pytest.approx(4.022, abs=0.001)
