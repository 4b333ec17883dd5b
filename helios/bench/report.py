# Generated from notebooks/05_measuring.ipynb by `helios export`; edit the notebook.
"""Run a benchmark with warm-up and repeats, put the medians in a table or in JSON, and compare two engines fairly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helios.bench.drivers import check_lengths
from helios.bench.metrics import RequestRecord, Summary, median_summary, ratio, summarize
from helios.bench.workloads import Work

__all__ = [
    "Comparison",
    "METRICS",
    "Report",
    "alternate",
    "measure",
    "plain_table",
    "print_table",
    "table_rows",
    "write_json",
]


@dataclass(frozen=True)
class Report:
    """The repeats of one workload on one engine, and the median of every number."""

    workload: str
    runs: list[Summary]
    median: Summary
    facts: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain dict: workload, facts, median, and every run."""
        runs = [run.to_dict() for run in self.runs]
        return {"workload": self.workload, "facts": self.facts, "median": self.median.to_dict(), "runs": runs}


def write_json(path: str | Path, reports: Sequence[Report]) -> None:
    """Write the reports as one JSON file."""
    data = {"reports": [report.to_dict() for report in reports]}
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def measure(
    name: str,
    run: Callable[[Sequence[Work]], list[RequestRecord]],
    works: Callable[[int], Sequence[Work]],
    *,
    seed: int = 0,
    repeats: int = 3,
    warmup: bool = True,
    facts: dict[str, Any] | None = None,
) -> Report:
    """Run a workload `repeats` times after one uncounted warm-up and take medians.

    `works(seed)` makes the requests; every repeat has a seed of its own, so that a prefix cache meets new prompts.
    Each run's lengths are checked; `BenchmarkError` if an answer is not what was asked for.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    summaries = []
    for number in range(0 if warmup else 1, repeats + 1):
        asked = works(seed + number)
        records = run(asked)
        check_lengths(asked, records)
        if number > 0:
            summaries.append(summarize(records))
    return Report(name, summaries, median_summary(summaries), facts or {})


@dataclass(frozen=True)
class Comparison:
    """Two engines measured in turn; `ratio(path)` is the median of b over the median of a."""

    a: list[Summary]
    b: list[Summary]

    def ratio(self, path: str) -> float:
        """Median of b divided by median of a for one number, such as `"output_tok_s"`."""
        return ratio(median_summary(self.b).value(path), median_summary(self.a).value(path))

    def ratio_range(self, path: str) -> tuple[float, float]:
        """The smallest and largest ratio b / a over the pairs: if 1 lies between them, no difference was shown."""
        ratios = [ratio(b.value(path), a.value(path)) for a, b in zip(self.a, self.b, strict=True)]
        return min(ratios), max(ratios)


def alternate(run_a: Callable[[int], Summary], run_b: Callable[[int], Summary], pairs: int = 3) -> Comparison:
    """Run A B A B …: both see the same machine drift. Each is called with the pair's number (use it as the seed)."""
    if pairs < 1:
        raise ValueError(f"pairs must be at least 1, not {pairs}")
    a: list[Summary] = []
    b: list[Summary] = []
    for pair in range(pairs):
        a.append(run_a(pair))
        b.append(run_b(pair))
    return Comparison(a, b)


METRICS: tuple[tuple[str, str, str], ...] = (
    ("TTFT p50 (s)", "ttft_s.p50", ".3f"),
    ("TTFT p95 (s)", "ttft_s.p95", ".3f"),
    ("E2E p50 (s)", "e2e_s.p50", ".3f"),
    ("E2E p95 (s)", "e2e_s.p95", ".3f"),
    ("decode tok/s p50", "decode_tok_s.p50", ".1f"),
    ("decode tok/s p95", "decode_tok_s.p95", ".1f"),
    ("prefill tok/s p50", "prefill_tok_s.p50", ".1f"),
    ("prefill tok/s p95", "prefill_tok_s.p95", ".1f"),
    ("inter-token p50 (s)", "itl_s.p50", ".4f"),
    ("inter-token p95 (s)", "itl_s.p95", ".4f"),
    ("inter-token max (s)", "itl_s.max", ".4f"),
    ("output tok/s", "output_tok_s", ".1f"),
    ("total tok/s", "total_tok_s", ".1f"),
    ("requests/s", "requests_s", ".2f"),
    ("peak concurrency", "peak_concurrency", ".0f"),
    ("mean concurrency", "mean_concurrency", ".1f"),
    ("drain time (s)", "drain_s", ".3f"),
    ("drain fraction", "drain_fraction", ".1%"),
    ("duration (s)", "duration_s", ".3f"),
    ("prompt tokens", "prompt_tokens", ".0f"),
    ("output tokens", "output_tokens", ".0f"),
    ("completion ratio", "completion_ratio", ".1%"),
    ("max-token hit rate", "max_token_rate", ".1%"),
    ("cache hit rate", "cache_hit_rate", ".1%"),
    ("restored tokens", "restored_tokens", ".0f"),
)


def table_rows(columns: dict[str, Summary]) -> list[list[str]]:
    """The table as rows of cells, header first; a number that does not exist is a dash."""
    rows = [["", *columns]]
    for label, path, form in METRICS:
        numbers = [summary.value(path) for summary in columns.values()]
        rows.append([label, *("–" if number != number else format(number, form) for number in numbers)])
    return rows


def plain_table(columns: dict[str, Summary]) -> str:
    """All numbers as aligned plain text, one column per summary."""
    rows = table_rows(columns)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for label, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *padded]))
    return "\n".join(lines)


def print_table(columns: dict[str, Summary], title: str = "") -> None:
    """The same table through rich, for a terminal."""
    from rich.console import Console
    from rich.table import Table

    head, *body = table_rows(columns)
    table = Table(title=title or None)
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left")
    for row in body:
        table.add_row(*row)
    Console().print(table)
