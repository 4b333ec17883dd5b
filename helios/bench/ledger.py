# Generated from notebooks/05_measuring.ipynb by `helios export`; edit the notebook.
"""The book's ledger: one row per chapter, the same six requests measured with the engine as it stood then."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from helios.bench.metrics import Summary
from helios.bench.workloads import Work, describe_lengths, ledger_workload
from helios.book.notebook import checkout_root
from helios.book.plots import COLORS, figure, show

__all__ = [
    "ROW_ORDER",
    "Row",
    "commit_name",
    "cpu_name",
    "ledger_path",
    "ledger_plot",
    "ledger_rows",
    "machine_facts",
    "merge_rows",
    "read_ledger",
    "record_row",
]


def cpu_name() -> str:
    """The processor's marketing name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine_facts(device: str | torch.device = "cpu") -> dict[str, Any]:
    """What a number depends on: device, processor, cores, threads, versions. No host name, user or path."""
    facts: dict[str, Any] = {"device": torch.device(device).type, "cpu": cpu_name(), "cores": os.cpu_count()}
    if facts["device"] == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    facts |= {"threads": torch.get_num_threads(), "system": f"{platform.system()} {platform.machine()}"}
    return facts | {"python": platform.python_version(), "torch": torch.__version__}


ROW_ORDER = ["naive recompute", "KV cache", "SDPA", "paged", "prefix cache", "continuous batching", "scheduler"]
ROW_ORDER += ["native kernels", "server"]
Row = dict[str, Any]


def commit_name(folder: Path) -> str | None:
    """The short name of the checked-out commit, or None where git cannot tell."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def ledger_path() -> Path | None:
    """`chapters/results/ledger.json` of the repository, or None outside one."""
    root = checkout_root()
    return root / "chapters" / "results" / "ledger.json" if root else None


def read_ledger(path: Path | None = None) -> list[Row]:
    """The recorded rows in chapter order: dicts with `name`, `facts` and `summary` (as `Summary.to_dict` gives it)."""
    path = path or ledger_path()
    if path is None or not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def merge_rows(rows: Sequence[Row], new: Row) -> list[Row]:
    """`rows` with `new` in place of the row of its name, in chapter order; names the book does not know go last."""
    kept = [row for row in rows if row["name"] != new["name"]] + [new]
    return sorted(kept, key=lambda row: ROW_ORDER.index(row["name"]) if row["name"] in ROW_ORDER else len(ROW_ORDER))


def record_row(name: str, summary: Summary, *, works: Sequence[Work] | None = None, **facts: Any) -> Row:
    """Make the ledger's row of this chapter, and write it to the ledger when HELIOS_RECORD=1.

    Pass `device`, `dtype` and `model`; the processor, versions, commit and lengths (of `works`, by default those of
    `ledger_workload`) are added. Returns the row.
    """
    root = checkout_root()
    known = machine_facts(facts.get("device", "cpu")) | {"lengths": describe_lengths(works or ledger_workload(256))}
    known["commit"] = commit_name(root) if root else None
    known["date"] = datetime.now(UTC).date().isoformat()
    given = {key: str(value).removeprefix("torch.") for key, value in facts.items()}
    row = {"name": name, "facts": known | given, "summary": summary.to_dict()}
    path = ledger_path()
    if path and os.environ.get("HELIOS_RECORD") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"rows": merge_rows(read_ledger(path), row)}, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
    return row


def ledger_rows(*fresh: Row, until: str | None = None, path: Path | None = None) -> list[Row]:
    """The recorded rows with `fresh` ones in their places, up to and including the row named `until`."""
    rows = read_ledger(path)
    for row in fresh:
        rows = merge_rows(rows, row)
    names = [row["name"] for row in rows]
    return rows[: names.index(until) + 1] if until in names else rows


def ledger_plot(
    *fresh: Row,
    until: str | None = None,
    metric: str = "output_tok_s",
    label: str = "output tokens per second",
    name: str | None = None,
) -> None:
    """Bars of one number over the chapters so far; rows measured just now (`fresh`) stand out.

    `name` keeps the figure under chapters/figures/ when recording.
    """
    rows = ledger_rows(*fresh, until=until)
    if not rows:
        return
    now = {row["name"] for row in fresh}
    values = [Summary.from_dict(row["summary"]).value(metric) for row in rows]
    fig, ax = figure(width=6.0, height=0.8 + 0.38 * len(rows), title="The ledger: six requests, chapter by chapter")
    colors = [COLORS[1] if row["name"] in now else COLORS[0] for row in rows]
    bars = ax.barh([row["name"] for row in rows], values, color=colors)
    ax.bar_label(bars, labels=[f"{value:.3g}" for value in values], padding=3)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_xlabel(label)
    spoken = ", ".join(f"{row['name']} {value:.3g}" for row, value in zip(rows, values, strict=True))
    show(fig, alt=f"Bar chart of {label}: {spoken}", name=name)
