"""`helios serve` as a person starts it: a process of its own, its printed curl line, its failures, its end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

HELIOS = [sys.executable, "-c", "from helios.cli import main; main()"]


def launch(*flags: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HELIOS, "serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


def said_until(process: subprocess.Popen[str], text: str) -> str:
    """Output up to the line holding `text`; fails with what was said if the process ends first."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    pytest.fail(f"the server ended with {process.wait()}:\n{seen}")


@pytest.fixture
def server(tiny_folder: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    flags = ("--model", str(tiny_folder("qwen3")), "--kv-pages", "16", "--served-model-name", "tiny")
    process = launch(*flags, "--port", "0", HELIOS_MAX_BATCH_SIZE="3")
    yield process, said_until(process, "curl")
    process.kill()
    process.wait()


def test_it_says_what_it_chose_and_the_curl_line_works(server: tuple[subprocess.Popen[str], str]) -> None:
    _, said = server
    assert "cpu" in said and "16 of 256 tokens" in said
    assert "batch        3 sequences" in said, "the HELIOS_… variable was not taken"
    line = re.search(r"curl .*", said)
    assert line is not None
    if shutil.which("curl") is None:
        pytest.skip("this machine has no curl")
    answer = subprocess.run(line.group(), shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert '"chat.completion"' in answer.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(server: tuple[subprocess.Popen[str], str], number: signal.Signals) -> None:
    process, said = server
    url = re.search(r"http://[\d.]+:\d+", said).group()  # type: ignore[union-attr]
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=30) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(number)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2], "the running request may finish"
    assert process.wait(20) == 0
    assert process.stdout is not None and "Traceback" not in process.stdout.read()


def ended(process: subprocess.Popen[str], seconds: float = 60) -> tuple[int, str]:
    """The exit code and the whole output of a process that ends by itself."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    output, _ = process.communicate()
    timer.cancel()
    return process.returncode, output


def test_a_taken_port_costs_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = ended(launch("--port", str(port)))
    assert code == 1 and output.count("\n") == 1
    assert f"127.0.0.1:{port}" in output and "--port" in output


@pytest.mark.parametrize("flags", [("--model", "nope"), ("--model", "tiny", "--attention", "varlen")])
def test_a_model_that_cannot_be_built_costs_one_sentence(flags: tuple[str, ...], tiny_folder: Any) -> None:
    flags = tuple(str(tiny_folder("qwen3")) if flag == "tiny" else flag for flag in flags)
    code, output = ended(launch(*flags, "--device", "cpu", "--port", "0"))
    assert code == 1
    assert output.startswith("helios: ") and output.count("\n") == 1 and flags[-1] in output


def test_ctrl_c_while_loading_ends_it_quickly_and_quietly(embedded: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = launch("--model", str(embedded), "--kv-pages", "16", "--port", str(port))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).json()["status"] == "loading"
            break
        except httpx.ConnectError:
            time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    code, output = ended(process)
    assert code in (0, 130) and time.monotonic() - sent < 5
    assert output == ""


def test_chat_takes_questions_through_a_pipe(tiny_folder: Any) -> None:
    flags = ("--model", str(tiny_folder("qwen3")), "--dtype", "float32", "--kv-pages", "16", "--max-tokens", "3")
    command = [*HELIOS, "chat", *flags, "--temperature", "0"]
    done = subprocess.run(command, input="Hi\n\nHello\n", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("\n\n") >= 2, "two questions, two answers"


def test_a_bad_setting_names_flag_and_variable() -> None:
    code, output = ended(launch("--port", "0", HELIOS_KV_PAGES="many"))
    assert code == 2 and "--kv-pages" in output and "HELIOS_KV_PAGES" in output and "Traceback" not in output
