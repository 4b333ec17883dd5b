"""`helios bench --compare` with two small fake OpenAI servers, in processes of their own where they are stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from helios.bench.compare import Server, alone, compare_servers, comparison_table
from helios.bench.drivers import BenchmarkError
from helios.bench.metrics import Summary
from helios.cli import app

VOCAB = 4096


class Fake:
    """Streams `max_tokens` chunks (less `short`), `gap_s` apart; `log` is shared by two to see who was asked when."""

    def __init__(self, model: str, log: list[tuple[str, tuple[int, ...]]], gap_s: float = 0.0, short: int = 0) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = {"/v1/models": {"data": [{"id": model}]}, "/version": {"version": "1.2.3"}}
                self.reply(200 if self.path in known else 404, [json.dumps(known.get(self.path)).encode()])

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                fake.log.append((model, tuple(body["prompt"])))
                self.reply(200, self.events(len(body["prompt"]), body["max_tokens"] - short))

            def events(self, prompt: int, output: int) -> Iterator[bytes]:
                for number in range(output):
                    time.sleep(gap_s)
                    choice = {"index": 0, "text": "x", "finish_reason": "length" if number + 1 == output else None}
                    yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
                usage = {"prompt_tokens": prompt, "completion_tokens": output}
                yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"

            def reply(self, status: int, pieces: Any) -> None:
                self.send_response(status)
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece)

            def log_message(self, *args: Any) -> None:
                pass

        self.log = log
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes fake servers that share one log."""
    log: list[tuple[str, tuple[int, ...]]] = []
    made: list[Fake] = []

    def start(model: str, **options: Any) -> Fake:
        made.append(Fake(model, log, **options))
        return made[-1]

    yield start
    for fake in made:
        fake.server.shutdown()


def test_they_are_asked_in_turn_the_same_each_pair_anew(make: Any) -> None:
    fast, slow = make("fast"), make("slow", gap_s=0.002)
    result = compare_servers(Server("A", fast.url), Server("B", slow.url + "/v1"), ["single"], pairs=3, vocab=VOCAB)
    assert [model for model, _ in fast.log] == ["fast", "slow"] * 4, "a warm-up of each, then three pairs"
    prompts = [prompt for _, prompt in fast.log]
    assert prompts[0::2] == prompts[1::2] and len(set(prompts)) == 4
    found = result["workloads"]["single"]
    assert [len(runs) for runs in found["runs"].values()] == [3, 3]
    low, high = found["ratio_range"]["output_tok_s"]
    assert low <= found["ratio"]["output_tok_s"] <= high < 1
    assert Summary.from_dict(found["median"]["B"]).itl_s.p50 > Summary.from_dict(found["median"]["A"]).itl_s.p50
    assert "output tok/s" in comparison_table(result)


def test_the_result_says_how_to_repeat_it(make: Any) -> None:
    first, second = make("model-a"), make("model-b")
    asked = (Server("A", first.url), Server("B", second.url), ["single", "decode"])
    result = json.loads(json.dumps(compare_servers(*asked, pairs=1, vocab=VOCAB)))
    assert [server["model"] for server in result["servers"]] == ["model-a", "model-b"]
    assert [server["version"] for server in result["servers"]] == ["1.2.3", "1.2.3"]
    assert {"pairs", "seed", "vocab", "machine", "commit", "started", "seconds"} <= set(result)
    assert [found["lengths"] for found in result["workloads"].values()] == ["1×128/64", "10×32/128"]
    before = [prompt for _, prompt in first.log]
    first.log.clear()
    compare_servers(*asked, pairs=1, seed=result["seed"], vocab=VOCAB)
    assert sorted(prompt for _, prompt in first.log) == sorted(before), "the seed repeats the prompts"
    first.log.clear()
    compare_servers(*asked, pairs=1, vocab=VOCAB)
    assert not {prompt for _, prompt in first.log} & set(before), "without one they are new: caches remember"


def test_an_answer_of_another_length_is_no_answer(make: Any) -> None:
    good, short = make("good"), make("short", short=1)
    with pytest.raises(BenchmarkError, match="B: 1 of 1 requests.*asked for 128/64.*got 128/63"):
        compare_servers(Server("A", good.url), Server("B", short.url), ["single"], pairs=1, vocab=VOCAB)


def test_the_command(make: Any, tmp_path: Path) -> None:
    first, second = make("a"), make("b")
    to = tmp_path / "compare.json"
    flags = ["bench", "--compare", first.url, second.url, "--workload", "single", "--vocab", str(VOCAB)]
    answer = CliRunner().invoke(app, [*flags, "--names", "Helios,vLLM eager", "--json", str(to)])
    assert answer.exit_code == 0, answer.output
    assert "Helios" in answer.output and "vLLM eager" in answer.output
    assert json.loads(to.read_text())["workloads"]["single"]["runs"]["vLLM eager"]
    for wrong, said in (
        (["--names", "one"], "two values"),
        (["--pids", "1,x"], "two values"),
        (["--repeats", "2"], "three pairs"),
        (["--names", "same,same"], "two names"),
    ):
        assert said in str(CliRunner().invoke(app, [*flags, *wrong]).exception)
    assert "no workload 'x'" in str(CliRunner().invoke(app, [*flags, "--workload", "x"]).exception)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own."""
    code = "import time\nwhile True: time.sleep(0.01)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def becomes(process: subprocess.Popen[bytes], stopped: bool) -> bool:
    deadline = time.monotonic() + 5
    while (psutil.Process(process.pid).status() == psutil.STATUS_STOPPED) != stopped:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_the_idle_one_stands_still_and_is_woken_whatever_happens(sleeper: subprocess.Popen[bytes]) -> None:
    measured, idle = Server("A", "http://127.0.0.1:9"), Server("B", "http://127.0.0.1:9", sleeper.pid)
    with pytest.raises(ValueError), alone(measured, idle):
        assert becomes(sleeper, stopped=True)
        raise ValueError
    assert becomes(sleeper, stopped=False)


def test_nobody_stops_himself_or_a_stranger() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # in this process's own group
    measured, idle = Server("A", ""), Server("B", "", child.pid)
    try:
        with (
            pytest.raises(BenchmarkError, match="own process group"),
            alone(measured, idle),
        ):
            pass
    finally:
        child.kill()
        child.wait()
    with pytest.raises(BenchmarkError, match="cannot be stopped"), alone(measured, idle):
        pass


def test_nobody_there() -> None:
    nobody = Server("B", "http://127.0.0.1:9")
    with pytest.raises(BenchmarkError, match="no model list from B"):
        compare_servers(nobody, Server("C", "http://127.0.0.1:9"), ["single"], pairs=1)
