"""What `/metrics` says: the names that dashboards read, and that the numbers agree with what happened."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from helios.engine.job import Job, JobEvent
from helios.engine.sequence import Request
from helios.model.params import SamplingParams
from helios.serve.metrics import BETWEEN_TOKENS_S, HISTOGRAMS, Histogram, Metrics
from tests.server.watched import Watched, launched, of, samples_of, slow_down

ASSETS = Path(__file__).parents[2] / "chapters" / "assets"
COMPLETE = "/v1/completions"
FIVE: dict[str, Any] = {"prompt": "x", "max_tokens": 5, "ignore_eos": True}

# From the tables of vLLM's dashboards: name → (type, bounds that must be among the buckets).
FIRST = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
BETWEEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
PHASE = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000"
NAMES = {
    **dict.fromkeys(("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), ("gauge", "")),
    **dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"), ("counter", "")),
    **dict.fromkeys(("prompt_tokens", "generation_tokens", "request_success"), ("counter", "")),
    "time_to_first_token_seconds": ("histogram", FIRST),
    "inter_token_latency_seconds": ("histogram", BETWEEN),
    "request_time_per_output_token_seconds": ("histogram", BETWEEN),
    **{
        f"{phase}_seconds": ("histogram", PHASE)
        for phase in (
            "e2e_request_latency",
            *(f"request_{each}_time" for each in ("queue", "inference", "prefill", "decode")),
        )
    },
    "request_prompt_tokens": ("histogram", TOKENS),
    "request_generation_tokens": ("histogram", TOKENS),
    "iteration_tokens_total": ("histogram", "1 8 16 32 64 128 256 512 1024 2048"),
    "cache_config_info": ("gauge", ""),
}


@pytest.fixture(scope="module")
def watched(tiny_folder: Any) -> Iterator[Watched]:
    with launched(tiny_folder("qwen3"), metrics_compat="vllm", max_batch_size=2, max_waiting=2) as running:
        yield running


@pytest.mark.parametrize("prefix", ["helios", "vllm"])
def test_names_types_and_buckets(watched: Watched, prefix: str) -> None:
    families = {each.name: each for each in text_string_to_metric_families(watched.client.get("/metrics").text)}
    for name, (kind, bounds) in NAMES.items():
        family = families[f"{prefix}:{name}"]
        assert family.type == kind, name
        assert all(sample.labels["model_name"] == "tiny" for sample in family.samples)
        assert all(("engine" in sample.labels) == (prefix == "vllm") for sample in family.samples)
        if kind == "counter":
            assert all(sample.name == f"{prefix}:{name}_total" for sample in family.samples), "one _total, not two"
        if kind == "histogram":
            have = {float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")}
            assert {float(bound) for bound in bounds.split()} <= have, name


def test_only_asked_for_names_of_others(tiny_folder: Any) -> None:
    with launched(tiny_folder("qwen3")) as plain:
        assert "vllm:" not in plain.client.get("/metrics").text


def test_metrics_answers_at_exactly_its_path(watched: Watched) -> None:
    answer = watched.client.get("/metrics", follow_redirects=False)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    build = next(line for line in answer.text.splitlines() if line.startswith("helios:build_info"))
    assert 'version="' in build and build.endswith(" 1.0") and "process_resident_memory_bytes" in answer.text


def agree(watched: Watched) -> dict[str, float]:
    """What must hold whenever the server is idle; returns the samples."""
    watched.until(watched.idle)
    now, stats = watched.samples(), watched.scheduler.stats()
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert now[of(gauge)] == 0, gauge
    ends = sum(
        now[of("request_success_total", finished_reason=reason)] for reason in ("stop", "length", "abort", "error")
    )
    assert ends == stats["submitted"]
    for each in (
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prompt_tokens",
        "request_params_n",
    ):
        assert now[of(f"{each}_count")] == ends, each
    assert now[of("generation_tokens_total")] == stats["generated_tokens"]
    assert now[of("iteration_tokens_total_sum")] == watched.engine.stats()["tick_tokens_total"]
    assert now[of("iteration_tokens_total_count")] == watched.engine.stats()["ticks_total"]
    return now


def test_finished_requests_are_counted_to_the_token(watched: Watched) -> None:
    before = agree(watched)
    for n in (1, 2):
        assert watched.post(COMPLETE, **FIVE, n=n, temperature=1).status_code == 200
    after = agree(watched)
    grown = {name: value - before[name] for name, value in after.items() if name in before}
    assert grown[of("request_success_total", finished_reason="length")] == 2
    assert grown[of("generation_tokens_total")] == grown[of("request_generation_tokens_sum")] == 15
    assert grown[of("inter_token_latency_seconds_count")] == 12, "four gaps in each of three choices"
    assert grown[of("request_max_num_generation_tokens_sum")] == 10 and grown[of("request_params_n_sum")] == 3
    assert grown[of("prompt_tokens_total")] == grown[of("request_prompt_tokens_sum")] == 2
    assert grown[of("time_to_first_token_seconds_count")] == grown[of("request_decode_time_seconds_count")] == 2
    phases = sum(grown[of(f"request_{phase}_time_seconds_sum")] for phase in ("queue", "prefill", "decode"))
    assert phases == pytest.approx(grown[of("e2e_request_latency_seconds_sum")])


def test_aborts_are_counted_and_leave_the_gauges_at_zero(watched: Watched) -> None:
    before = agree(watched)
    slow_down(watched, 0.01)
    long = {**FIVE, "max_tokens": 1500}

    def impatient(seconds: float) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(watched.url + COMPLETE, json=long, timeout=seconds)

    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(impatient, 2) for _ in range(2)]
        watched.until(lambda: watched.scheduler.stats()["running"] == 2)
        asked += [clients.submit(impatient, 0.3) for _ in range(2)]  # these two wait
        for each in asked:
            each.result()
    after = agree(watched)
    aborts = of("request_success_total", finished_reason="abort")
    assert after[aborts] - before[aborts] == 4
    admitted = of("request_inference_time_seconds_count")
    assert after[admitted] - before[admitted] == 2, "who only waited was never in a phase behind admission"


def test_refusals_are_counted_as_answers_and_not_as_requests(watched: Watched) -> None:
    before = agree(watched)
    for _ in range(3):
        assert watched.post(COMPLETE, prompt="x", temperature=9).status_code == 400
    for path in ("/v1/nowhere", "/v1/models/gpt-4", '/"}evil{"'):
        assert watched.client.get(path).status_code == 404
    assert watched.post(COMPLETE, model="evil-name", prompt="x").status_code == 404
    after = agree(watched)
    assert after['helios:http_requests_total{path="/v1/completions",status="400"}'] >= 3
    assert after['helios:http_requests_total{path="other",status="404"}'] >= 3
    assert "evil" not in watched.client.get("/metrics").text
    success = {name for name in after if "request_success" in name}
    assert all(after[name] == before[name] for name in success)


def test_prefix_hits_are_counted_in_tokens(watched: Watched) -> None:
    before = agree(watched)
    for _ in range(2):
        watched.post(COMPLETE, prompt=[7] * 600, max_tokens=1)
    after = agree(watched)
    queries, hits = (of(f"prefix_cache_{name}_total") for name in ("queries", "hits"))
    assert after[queries] - before[queries] == 1200 and after[hits] - before[hits] == 512


def test_a_dead_engine_counts_its_errors_and_says_so(tiny_folder: Any) -> None:
    with launched(tiny_folder("qwen3")) as doomed:

        def broken(inputs: Any) -> None:
            raise RuntimeError("the disk is on fire")

        doomed.engine.runner.forward = broken  # type: ignore[method-assign,assignment]
        assert doomed.post(COMPLETE, **FIVE).status_code == 500
        now = doomed.samples()
        assert now[of("request_success_total", finished_reason="error")] == 1 and now[of("healthy")] == 0
        assert now[of("num_requests_running")] == 0


def test_metrics_answer_while_the_model_is_loading() -> None:
    from helios.engine.scheduler import Scheduler
    from helios.serve.scrape import Scrape, scraper

    unborn = Scheduler(lambda: pytest.fail("nobody started it"))
    now = samples_of(scraper(Scrape(Metrics(), unborn, "tiny"))().decode())
    assert now[of("healthy")] == 0 and now[of("kv_cache_usage_perc")] == 0


def test_a_mistake_in_counting_does_not_stop_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    Metrics().observe([(None, None)])  # type: ignore[list-item]
    assert "could not be counted" in caplog.text


def test_nothing_is_remembered_of_jobs_that_have_ended() -> None:
    metrics = Metrics()
    for reason in ("stop", "abort", "error"):
        job = Job(Request(reason, [1], SamplingParams(n=2)), lambda _: True, 0.0)
        metrics.observe([(job, JobEvent(0, "a", [1]))])
        metrics.observe([(job, JobEvent(1, finish_reason=reason)), (job, JobEvent(0, finish_reason=reason))])
    assert not metrics._live and sum(metrics.reasons.values()) == 3


@given(st.lists(st.one_of(st.floats(0, 100), st.sampled_from(BETWEEN_TOKENS_S)), max_size=50))
def test_a_histogram_counts_as_the_library_does(values: list[float]) -> None:
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("h", "-", buckets=BETWEEN_TOKENS_S, registry=registry)
    ours = Histogram(BETWEEN_TOKENS_S)
    for value in values:
        ours.add(value)
        theirs.observe(value)
    samples = [each for family in registry.collect() for each in family.samples]
    assert ours.buckets() == [(s.labels["le"], s.value) for s in samples if s.name == "h_bucket"]
    assert ours.total == pytest.approx(next(s.value for s in samples if s.name == "h_sum"))


@given(st.integers(1, 4), st.lists(st.integers(0, 4), max_size=20))
def test_gaps_add_up_to_the_time_that_passed(first: int, rest: list[int]) -> None:
    """However the tokens come bundled: as many gaps as tokens after the first, and their sum is the time."""
    now = 10.0
    metrics = Metrics(clock=lambda: now)
    job = Job(Request("a", [1], SamplingParams()), lambda _: True, 9.0)
    job.timings.admitted_s, job.timings.first_token_s = 9.5, 10.0
    pieces = [first, *rest]
    for position, tokens in enumerate(pieces):
        now = 10.0 + 0.125 * position
        metrics.observe([(job, JobEvent(0, "x", [1] * tokens))])
    gaps = metrics.histograms["inter_token_latency_seconds"]
    assert sum(gaps.counts) == sum(pieces) - 1
    assert gaps.total == pytest.approx(0.125 * max(i for i, tokens in enumerate(pieces) if tokens))


def test_the_dashboard_asks_for_what_is_there(watched: Watched) -> None:
    board = json.loads((ASSETS / "helios-grafana.json").read_text("utf-8"))
    questions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"\w+:\w+", " ".join(questions)))
    there = {series.partition("{")[0] for series in watched.samples()}
    assert len(asked) >= 12 and asked <= there, asked - there
    assert {panel["type"] for panel in board["panels"]} == {"timeseries"}
    used = {target["datasource"]["uid"] for panel in board["panels"] for target in panel["targets"]}
    assert used == {"${" + board["templating"]["list"][0]["name"] + "}"}


def test_the_scrape_config_asks_where_the_metrics_are() -> None:
    config = yaml.safe_load((ASSETS / "helios-prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["static_configs"][0]["targets"] == ["127.0.0.1:8000"]


def test_every_histogram_is_exported() -> None:
    assert set(HISTOGRAMS) >= {name for name, (kind, _) in NAMES.items() if kind == "histogram"}
