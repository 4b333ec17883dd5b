"""`helios serve` as a person starts it: a process of its own, its printed curl line, its failures, its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helios.serve.launch import COMPILING

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


def url_of(said: str) -> str:
    found = re.search(r"http://[\d.]+:\d+", said)
    assert found is not None
    return found.group()


LONG = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.fixture
def patient(tiny_folder: Any) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], str]]]:
    """Starts a server with this `--shutdown-timeout`, one request at a time, no log lines."""
    started = []

    def start(timeout: str) -> tuple[subprocess.Popen[str], str]:
        flags = ("--model", str(tiny_folder("qwen3")), "--kv-pages", "16", "--port", "0", "--no-log-requests")
        started.append(launch(*flags, "--runner", "eager", "--shutdown-timeout", timeout))
        return started[-1], url_of(said_until(started[-1], "curl"))

    yield start
    for process in started:
        process.kill()
        process.wait()


@contextlib.contextmanager
def begun(url: str) -> Iterator[Iterator[str]]:
    """A long answer that has begun to stream: the lines behind its first."""
    with httpx.stream("POST", url + "/v1/completions", json=LONG, timeout=30) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield lines


def test_what_outlives_the_timeout_ends_with_an_error_and_done(patient: Any) -> None:
    process, url = patient("0.3")
    with begun(url) as lines:
        process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"code":503' in rest[-2] and "shutting down" in rest[-2]
    assert process.wait(20) == 0 and time.monotonic() - sent < 15


def test_while_it_drains_new_work_is_refused_and_a_second_signal_ends_it_at_once(patient: Any) -> None:
    process, url = patient("600")
    with begun(url):
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while httpx.get(url + "/health").status_code == 200:
            assert time.monotonic() < deadline
        refused = httpx.post(url + "/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_server_with_keys_says_how_to_ask_and_logs_who_did(tiny_folder: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-from-file\n")
    flags = ("--model", str(tiny_folder("qwen3")), "--kv-pages", "16", "--port", "0", "--api-key", "sk-flag")
    process = launch(*flags, "--api-key", "sk-two", "--api-key-file", str(keys), "--metrics-compat", "vllm")
    try:
        said = said_until(process, "curl")
        url = url_of(said)
        assert "3 accepted" in said and "authorization: Bearer $HELIOS_API_KEY" in said
        assert httpx.get(url + "/v1/models").status_code == 401
        for key in ("sk-flag", "sk-two", "sk-from-file"):
            assert httpx.get(url + "/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert (
            "vllm:num_requests_running" in httpx.get(url + "/metrics", headers={"authorization": "Bearer sk-two"}).text
        )
        process.send_signal(signal.SIGTERM)
        code, output = ended(process)
    finally:
        process.kill()
    told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert code == 0 and [each["status"] for each in told] == [401, 200, 200, 200]
    assert [each.get("key") for each in told] == [None, 1, 2, 3] and "sk-" not in said + output


@pytest.mark.parametrize("key", ["", "two words"])
def test_a_bad_key_costs_one_sentence_without_the_key(key: str) -> None:
    code, output = ended(launch("--port", "0", "--model", "nope", HELIOS_API_KEY=key))
    assert code == 1 and output.startswith("helios: API key 1") and output.count("\n") == 1 and "words" not in output


def test_an_open_address_is_warned_about_before_anything_is_loaded() -> None:
    code, output = ended(launch("--host", "0.0.0.0", "--port", "0", "--model", "nope"))
    assert code == 1 and output.startswith("Warning: 0.0.0.0") and output.count("\n") == 2


def test_compiling_for_the_first_time_is_announced(tiny_folder: Any, tmp_path: Path) -> None:
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("this machine has no C compiler")
    flags = ("--model", str(tiny_folder("qwen3")), "--kv-pages", "16", "--port", "0")
    for expected in (1, 0):
        process = launch(*flags, HELIOS_HOME=str(tmp_path))
        try:
            assert said_until(process, "curl").count("Compiling the C kernels") == expected
        finally:
            process.kill()
            process.wait()


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
    assert output.replace(COMPILING + "\n", "") == "", "on a machine's first start that line is due"


def test_chat_takes_questions_through_a_pipe(tiny_folder: Any) -> None:
    flags = ("--model", str(tiny_folder("qwen3")), "--dtype", "float32", "--kv-pages", "16", "--max-tokens", "3")
    command = [*HELIOS, "chat", *flags, "--temperature", "0"]
    done = subprocess.run(command, input="Hi\n\nHello\n", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("\n\n") >= 2, "two questions, two answers"


def test_a_bad_setting_names_flag_and_variable() -> None:
    code, output = ended(launch("--port", "0", HELIOS_KV_PAGES="many"))
    assert code == 2 and "--kv-pages" in output and "HELIOS_KV_PAGES" in output and "Traceback" not in output
