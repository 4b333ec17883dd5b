# Generated from notebooks/09_prefix_caching.ipynb by `helios export`; edit the notebook.
"""Two servers measured in turn with the same requests, and all that is needed to do it again."""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from helios.bench.drivers import BenchmarkError, check_lengths, run_url
from helios.bench.ledger import commit_name, machine_facts
from helios.bench.metrics import Summary, median_summary, summarize
from helios.bench.report import METRICS, alternate
from helios.bench.workloads import WORKLOADS, Work, describe_lengths, make_workload
from helios.book.notebook import checkout_root

__all__ = [
    "RATIOS",
    "SETTLE_S",
    "Server",
    "alone",
    "compare_command",
    "compare_servers",
    "compare_workload",
    "comparison_table",
    "known",
    "run_side",
]


@dataclass(frozen=True)
class Server:
    """One side of a comparison. With a `pid`, its process group is stopped while the other side is measured."""

    name: str
    url: str
    pid: int | None = None

    @property
    def base(self) -> str:
        """The address without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")

    def send(self, number: signal.Signals) -> None:
        """Signal the server's process group; BenchmarkError when that is not possible, or would hit this process."""
        if self.pid is None:
            return
        try:
            group = os.getpgid(self.pid)
            if group == os.getpgrp():
                raise BenchmarkError(f"{self.name} is in this command's own process group: start it with `setsid`")
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError) as problem:
            raise BenchmarkError(f"process {self.pid} of {self.name} cannot be stopped: {problem.strerror}") from None

    def facts(self) -> dict[str, Any]:
        """What the server says of itself: its model, and its version where it tells."""
        try:
            with httpx.Client(base_url=self.base, timeout=10, trust_env=False) as client:
                model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
                told = client.get("/version")
                version = told.json().get("version") if told.status_code == 200 else None
        except (httpx.HTTPError, KeyError, IndexError, ValueError, AttributeError) as problem:
            raise BenchmarkError(f"no model list from {self.name} at {self.base} ({type(problem).__name__})") from None
        return {"name": self.name, "url": self.base, "model": model, "version": version, "paused": self.pid is not None}


SETTLE_S = 0.3  # after one has been stopped and the other woken


@contextmanager
def alone(server: Server, other: Server) -> Iterator[None]:
    """Inside, `server` runs and `other` stands still; afterwards both run, whatever happened."""
    try:
        other.send(signal.SIGSTOP)
        server.send(signal.SIGCONT)
        time.sleep(SETTLE_S if other.pid else 0.0)
        yield
    finally:
        other.send(signal.SIGCONT)


def run_side(server: Server, other: Server, works: Sequence[Work]) -> Summary:
    """Measure one server once. BenchmarkError, naming it, unless every answer has exactly the length asked for."""
    with alone(server, other):
        records = run_url(server.base, works)
    try:
        check_lengths(works, records)
    except BenchmarkError as problem:
        raise BenchmarkError(f"{server.name}: {problem}") from None
    return summarize(records)


RATIOS = ("output_tok_s", "ttft_s.p50", "ttft_s.p95", "itl_s.p50", "itl_s.p95", "itl_s.max", "e2e_s.p50")


def known(value: float) -> float | None:
    """The number, or None for NaN, which JSON does not have: gaps of tokens that came together have no ratio."""
    return None if math.isnan(value) else value


def compare_workload(a: Server, b: Server, kind: str, *, pairs: int, seed: int, vocab: int) -> dict[str, Any]:
    """One warm-up each, then A B A B …: each pair has its own prompts, the same for both. A plain dict for JSON.

    `ratio` is the median of b over the median of a; `ratio_range` the smallest and the largest over the pairs.
    """

    def works(pair: int) -> list[Work]:
        return make_workload(kind, vocab, seed + pair)

    for server, other in ((a, b), (b, a)):
        run_side(server, other, works(pairs))
    both = alternate(lambda pair: run_side(a, b, works(pair)), lambda pair: run_side(b, a, works(pair)), pairs)
    sides = {a.name: both.a, b.name: both.b}
    return {
        "lengths": describe_lengths(works(0)),
        "seeds": [seed + pair for pair in range(pairs)],
        "runs": {name: [run.to_dict() for run in runs] for name, runs in sides.items()},
        "median": {name: median_summary(runs).to_dict() for name, runs in sides.items()},
        "ratio": {path: known(both.ratio(path)) for path in RATIOS},
        "ratio_range": {path: [known(end) for end in both.ratio_range(path)] for path in RATIOS},
    }


def compare_servers(
    a: Server, b: Server, kinds: Sequence[str], *, pairs: int = 3, seed: int | None = None, vocab: int = 32000
) -> dict[str, Any]:
    """Compare two servers on each kind of workload; everything needed to repeat it, as a plain dict for JSON.

    Without a seed a fresh one is drawn: asked the same prompts twice, a prefix cache would be measured at remembering.
    """
    if a.name == b.name:
        raise BenchmarkError(f"both servers are called {a.name!r}: give them two names")
    root, started = checkout_root(), datetime.now(UTC)
    seed = secrets.randbelow(10**6) * 1000 if seed is None else seed
    asked: dict[str, Any] = {"pairs": pairs, "seed": seed, "vocab": vocab}
    result: dict[str, Any] = {
        "servers": [a.facts(), b.facts()],
        **asked,
        "machine": machine_facts(),
        "commit": commit_name(root) if root else None,
        "started": started.isoformat(timespec="seconds"),
        "workloads": {},
    }
    for number, kind in enumerate(kinds):
        result["workloads"][kind] = compare_workload(a, b, kind, **(asked | {"seed": seed + 100 * number}))
    result["seconds"] = round((datetime.now(UTC) - started).total_seconds(), 1)
    return result


def comparison_table(result: dict[str, Any]) -> str:
    """The medians of both, their ratio (second over first) and its range over the pairs, as plain text."""
    a, b = (server["name"] for server in result["servers"])
    wide = max(10, len(a), len(b))
    lines = []
    for kind, found in result["workloads"].items():
        lines.append(f"{kind + ', ' + found['lengths']:<34}{a:>{wide}}  {b:>{wide}}  ratio  pairs from … to")
        for label, path, form in METRICS:
            if path in RATIOS:
                left, right = (Summary.from_dict(found["median"][name]).value(path) for name in (a, b))
                given = (found["ratio"][path], *found["ratio_range"][path])
                middle, low, high = (math.nan if value is None else value for value in given)
                numbers = f"{left:>{wide}{form}}  {right:>{wide}{form}}"
                lines.append(f"  {label:<32}{numbers}  {middle:5.2f}  {low:.2f} … {high:.2f}")
    return "\n".join(lines)


def compare_command(
    urls: tuple[str, str],
    names: str,
    pids: str,
    kinds: str,
    *,
    pairs: int,
    seed: int | None,
    vocab: int,
    to: Path | None,
) -> None:
    """`helios bench --compare`: its text arguments, checked; the table is printed, and everything written to `to`."""
    labels = [name.strip() for name in names.split(",")] if names else ["A", "B"]
    ids = [int(pid) if pid.strip().isdigit() else 0 for pid in pids.split(",")] if pids else [None, None]
    if len(labels) != 2 or len(ids) != 2 or 0 in ids:
        raise BenchmarkError("--names and --pids each take two values with a comma between, such as --pids 4711,4712")
    wanted = list(WORKLOADS) if kinds == "all" else kinds.split(",")
    if unknown := set(wanted) - set(WORKLOADS):
        raise BenchmarkError(f"there is no workload {min(unknown)!r}; choose of {', '.join(WORKLOADS)}, or all")
    if pairs < 3:
        raise BenchmarkError(f"a comparison needs at least three pairs, not {pairs}: raise --repeats")
    a, b = (Server(*parts) for parts in zip(labels, urls, ids, strict=True))
    result = compare_servers(a, b, wanted, pairs=pairs, seed=seed, vocab=vocab)
    print(comparison_table(result))
    if to is not None:
        to.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
