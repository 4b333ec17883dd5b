"""The command line: settings, plan, doctor, export, bench on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helios.cli import app
from helios.model.config import tiny_config
from helios.serve.plan import KNOWN, Hardware, plan
from helios.serve.settings import EngineSettings, ServeSettings

runner = CliRunner()


def test_a_flag_beats_a_variable_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineSettings().max_batch_size == 32
    monkeypatch.setenv("HELIOS_MAX_BATCH_SIZE", "7")
    assert EngineSettings().engine_config().max_batch_size == 7
    assert EngineSettings(max_batch_size=5).engine_config().max_batch_size == 5


def test_every_engine_setting_can_be_set() -> None:
    import dataclasses

    from helios.engine.config import EngineConfig

    names = {field.name for field in dataclasses.fields(EngineConfig)} - {"load_weights"}
    assert names <= set(EngineSettings.model_fields), "an engine setting has no flag"
    given = EngineSettings().model_dump()
    for field in dataclasses.fields(EngineConfig):
        if field.name in given:
            assert given[field.name] == field.default, f"{field.name} has two defaults"


@pytest.mark.parametrize("command", ["serve", "chat", "bench", "export", "fetch", "plan", "doctor", "book"])
def test_every_command_has_help(command: str) -> None:
    answer = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert answer.exit_code == 0
    if command in ("serve", "chat", "bench"):
        for name in EngineSettings.model_fields:
            assert "--" + name.replace("_", "-") in answer.output and f"HELIOS_{name.upper()}" in answer.output
    if command == "serve":
        assert all(f"HELIOS_{name.upper()}" in answer.output for name in ServeSettings.model_fields)


def test_importing_helios_loads_neither_torch_nor_fastapi() -> None:
    code = "import sys, helios, helios.cli; sys.exit(bool({'torch', 'fastapi', 'uvicorn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_engine_needs_no_server_packages() -> None:
    code = """
import sys
for name in ("fastapi", "pydantic", "pydantic_settings", "uvicorn", "starlette", "typer"):
    sys.modules[name] = None
import helios.engine.llm, helios.engine.build, helios.bench.report, helios.book.export
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_offline_names() -> None:
    import helios

    assert helios.LLM.__name__ == "LLM" and helios.SamplingParams.__name__ == "SamplingParams"
    with pytest.raises(AttributeError, match="LLM, SamplingParams"):
        helios.Nothing  # noqa: B018


def test_plan_by_hand() -> None:
    config = tiny_config("qwen3")
    per_token = 2 * config.layers * config.kv_heads * config.head_dim * 2
    hardware = Hardware("paper", 1e9 + 3e9, 1e9, "by hand")
    made = plan(config, hardware, torch.bfloat16, context=512, fraction=1.0)
    assert made.kv_token_bytes == per_token and made.kv_page_bytes == 256 * per_token
    assert made.pages == int((4e9 - made.weight_bytes - 1e9) // made.kv_page_bytes)
    assert made.requests == made.pages // 2
    assert made.decode_bound == pytest.approx(1e9 / (made.weight_bytes + 512 * per_token))
    assert plan(config, Hardware("tiny", 1000, 1e9, ""), torch.bfloat16).pages == 0
    assert KNOWN["h200"].bandwidth == 4800e9


def test_plan_command(tiny_folder: Any) -> None:
    answer = runner.invoke(app, ["plan", str(tiny_folder("qwen3")), "--device", "t4"])
    assert answer.exit_code == 0 and "NVIDIA T4" in answer.output and "computed bound" in answer.output
    assert runner.invoke(app, ["plan", str(tiny_folder("qwen3")), "--device", "abacus"]).exit_code == 2


def test_doctor_names_every_topic() -> None:
    findings = json.loads(runner.invoke(app, ["doctor", "--json"]).output)
    topics = {finding["topic"] for finding in findings}
    machine = {"python", "torch", "device", "dtype", "compiler", "memory", "disk"}
    assert topics == machine | {"runner", "attention", "model", "extras"}


def test_doctor_says_what_a_missing_compiler_costs() -> None:
    code = "import json; from helios.serve.doctor import examine; print(json.dumps([vars(f) for f in examine()]))"
    bare = {**{k: v for k, v in os.environ.items() if k != "CC"}, "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=bare, check=True)
    told = {finding["topic"]: finding for finding in json.loads(done.stdout)}
    assert "no C compiler" in told["compiler"]["found"] and "eager" in told["compiler"]["advice"]
    assert told["runner"]["found"].startswith("eager") and "no C compiler" in told["runner"]["found"]


def test_export_check_of_this_checkout() -> None:
    assert runner.invoke(app, ["export", "--check"]).exit_code == 0


def test_bench_in_process(tiny_folder: Any, tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    flags = ["--model", str(tiny_folder("qwen3")), "--dtype", "float32", "--kv-pages", "64"]
    more = ["--workload", "single", "--repeats", "1", "--no-warmup", "--json", str(target)]
    answer = runner.invoke(app, ["bench", *flags, *more])
    assert answer.exit_code == 0, answer.output
    report = json.loads(target.read_text())["reports"][0]
    assert report["median"]["output_tokens"] == 64 and report["median"]["completion_ratio"] == 1.0


def test_mistakes_are_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    absent = str(tmp_path / "no" / "x.json")
    for flags in (["--workload", "foo"], ["--rate", "0"], ["--json", absent]):
        answer = runner.invoke(app, ["bench", "--model", "/nowhere", *flags])
        assert answer.exit_code == 2, answer.output
    assert runner.invoke(app, ["plan", "smollm2", "--device", "t4", "--dtype", "zeros"]).exit_code == 2


def test_a_drain_has_an_end() -> None:
    with pytest.raises(ValueError, match="shutdown_timeout"):
        ServeSettings(shutdown_timeout=float("inf"))
