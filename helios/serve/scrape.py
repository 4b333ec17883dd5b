# Generated from notebooks/25_watching.ipynb by `helios export`; edit the notebook.
"""What Prometheus reads: what was counted, and what the scheduler knows when asked, under Helios's names and vLLM's."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from helios.engine.scheduler import Scheduler
from helios.engine.worker import EngineDead
from helios.kv.pages import PAGE_SIZE
from helios.serve.metrics import HISTOGRAMS, Metrics

__all__ = ["CONTENT_TYPE", "COUNTERS", "GAUGES", "Scrape", "info", "scraper"]
# Counters by name: help, and the key in `scheduler.stats()`. The library adds `_total`.
COUNTERS = {
    "prompt_tokens": ("Prompt tokens of requests that got a first token.", "prompt_tokens"),
    "generation_tokens": ("Tokens generated.", "generated_tokens"),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prompt_tokens_total"),
    "prefix_cache_hits": ("Prompt tokens found there.", "cached_tokens_total"),
    "num_preemptions": ("Always 0: pages are reserved at admission, nothing is preempted.", ""),
}
GAUGES: dict[str, tuple[str, Callable[[dict[str, float]], float]]] = {
    "num_requests_running": ("Requests in the engine.", lambda now: now["running"]),
    "num_requests_waiting": ("Requests waiting for admission.", lambda now: now["waiting"]),
    "kv_cache_usage_perc": (
        "Share of the KV pages that running requests hold, 0 to 1.",
        lambda now: now.get("pages_used", 0.0) / (now.get("pages_total") or 1.0),
    ),
}


class Scrape(Collector):
    """All families of one server, made when asked for.

    `name` is the served model's. `prefixes`: "helios", and "vllm" for boards made for vLLM, with a label `engine`.
    """

    def __init__(
        self, metrics: Metrics, scheduler: Scheduler, name: str, prefixes: tuple[str, ...] = ("helios",)
    ) -> None:
        self._metrics, self._scheduler, self._prefixes = metrics, scheduler, prefixes
        self._labels = {"model_name": name}

    def collect(self) -> Iterator[Metric]:
        """The families, as the registry asks for them."""
        for prefix in self._prefixes:
            yield from self._shared(prefix, {**self._labels, **({"engine": "0"} if prefix == "vllm" else {})})
        yield from self._own()

    def _shared(self, prefix: str, labels: dict[str, str]) -> Iterator[Metric]:
        names, values = list(labels), list(labels.values())
        stats = self._scheduler.stats()
        for name, (text, key) in COUNTERS.items():
            counter = CounterMetricFamily(f"{prefix}:{name}", text, labels=names)
            counter.add_metric(values, stats.get(key, 0.0))
            yield counter
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(f"{prefix}:{name}", text, labels=names)
            gauge.add_metric(values, read(stats))
            yield gauge
        for name, (text, _) in HISTOGRAMS.items():
            counted = self._metrics.histograms[name]
            histogram = HistogramMetricFamily(f"{prefix}:{name}", text, labels=names)
            histogram.add_metric(values, counted.buckets(), counted.total)
            yield histogram
        ends = CounterMetricFamily(
            f"{prefix}:request_success", "Requests by how they ended.", labels=[*names, "finished_reason"]
        )
        for reason, count in self._metrics.reasons.items():
            ends.add_metric([*values, reason], count)
        yield ends
        yield from self._cache_info(prefix, labels)

    def _cache_info(self, prefix: str, labels: dict[str, str]) -> Iterator[Metric]:
        try:
            engine = self._scheduler.wait_ready(0)
        except (TimeoutError, EngineDead):
            return
        facts = {
            "block_size": str(PAGE_SIZE),
            "num_gpu_blocks": str(engine.pool.capacity),
            "cache_dtype": str(engine.model.dtype).removeprefix("torch."),
            "enable_prefix_caching": str(engine.prefix is not None),
        }
        yield info(f"{prefix}:cache_config_info", "How the KV cache is laid out.", {**labels, **facts})

    def _own(self) -> Iterator[Metric]:
        build = {"version": version("helios"), "torch": version("torch"), "python": platform.python_version()}
        yield info("helios:build_info", "What is running.", build)
        healthy = GaugeMetricFamily("helios:healthy", "1 when /health says 200, else 0.", labels=["model_name"])
        healthy.add_metric([self._labels["model_name"]], float(self._scheduler.health().status == "ready"))
        yield healthy
        answers = CounterMetricFamily(
            "helios:http_requests", "HTTP answers by path and status.", labels=["path", "status"]
        )
        for (path, status), count in list(self._metrics.answers.items()):
            answers.add_metric([path, str(status)], count)
        yield answers


def info(name: str, text: str, labels: dict[str, str]) -> Metric:
    """A family with one series that is always 1 and carries `labels`."""
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), 1.0)
    return family


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # the format that every scraper reads


def scraper(scrape: Scrape) -> Callable[[], bytes]:
    """A function that writes everything in Prometheus's text format, the process's memory and CPU time included.

    The registry is its own, not the library's global one: two servers in one process do not mix.
    """
    registry = CollectorRegistry()
    registry.register(scrape)
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)
