"""Helios beside other engines, as tables: drawn from chapters/results/compare.json, which `make bench-vllm` writes."""

import html
import json
from pathlib import Path
from typing import Any

NOT_MEASURED = """
!!! note "Not measured yet"
    `make bench-vllm` compares on this machine and records it.
"""
OURS = "Helios"
MORE_IS_BETTER = ("output_tok_s",)
METRICS = {
    "output_tok_s": "output tokens/s",
    "ttft_s.p50": "first token, median",
    "ttft_s.p95": "first token, 95th percentile",
    "itl_s.p50": "between tokens, median",
    "itl_s.p95": "between tokens, 95th percentile",
    "itl_s.max": "between tokens, longest",
    "e2e_s.p50": "whole answer, median",
}
Found = dict[str, Any]


def drawn_comparison(path: Path, what: str) -> str:
    """HTML for one part of the comparison: "speeds", "starts", "losses" or "facts"; a note when none was recorded."""
    parts = {"speeds": speeds, "starts": starts, "losses": losses, "facts": facts}
    if not path.is_file():
        return NOT_MEASURED if what == "speeds" else ""
    return parts[what](json.loads(path.read_text("utf-8")))


def opponent(comparison: Found) -> str:
    """The name of the side that is not Helios."""
    return next(str(server["name"]) for server in comparison["servers"] if server["name"] != OURS)


def advantage(found: Found, metric: str) -> tuple[float, float, float] | None:
    """How many times better Helios was, above 1, or worse, below: of the medians, and the range over the pairs."""
    ratio, ends = found["ratio"][metric], found["ratio_range"][metric]
    if not ratio or not all(ends):
        return None
    if metric in MORE_IS_BETTER:  # the file has theirs over ours
        return 1 / ratio, 1 / max(ends), 1 / min(ends)
    return ratio, min(ends), max(ends)


def value(found: Found, name: str, metric: str) -> str:
    """One median with its unit."""
    number: Any = found["median"][name]
    for part in metric.split("."):
        number = number[part]
    if number is None:
        return "–"
    if metric in MORE_IS_BETTER:
        return f"{number:.1f}"
    if number >= 1:
        return f"{number:.2f} s"
    return f"{1000 * number:.0f} ms" if number >= 0.1 else f"{1000 * number:.1f} ms"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in the ledger's dress; cells are HTML already."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = ""
    for first, *rest in rows:
        body += f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"
    return f'\n<div class="ledger"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>\n'


def times(better: tuple[float, float, float] | None) -> str:
    """The advantage with its range, in bold where every pair agreed."""
    if better is None:
        return "–"
    middle, low, high = better
    text = f"{middle:.2f} ({low:.2f}–{high:.2f})"
    return f"<strong>{text}</strong>" if low > 1 or high < 1 else text


def speeds(data: Found) -> str:
    """One table for each workload: for each opponent, Helios and it, and how many times better Helios was."""
    text = ""
    for kind in data["comparisons"][0]["workloads"]:
        both = [(opponent(each), each["workloads"][kind]) for each in data["comparisons"] if kind in each["workloads"]]
        head = [""] + [cell for name, _ in both for cell in (OURS, html.escape(name), "×")]
        rows = []
        for metric, label in METRICS.items():
            row = [label]
            for name, found in both:
                row += [value(found, OURS, metric), value(found, name, metric), times(advantage(found, metric))]
            rows.append(row)
        text += f"\n### {kind.capitalize()}: {both[0][1]['lengths']}\n{table(head, rows)}"
    return text


def starts(data: Found) -> str:
    """From start to ready, and the most memory that the whole process tree had."""
    rows = []
    for name, server in sorted(data["servers"].items(), key=lambda item: item[0] != OURS):
        memory = f"{server['peak_bytes'] / 2**30:.2f} GiB"
        rows.append(
            [html.escape(name), f"{server['ready_s']:.1f} s", memory, f"<code>{html.escape(server['command'])}</code>"]
        )
    return table(["", "start to ready", "peak memory", "command"], rows)


def losses(data: Found) -> str:
    """Where Helios was worse in every pair, as a list; and a line where that is nowhere."""
    lines = []
    for comparison in data["comparisons"]:
        for kind, found in comparison["workloads"].items():
            worse = []
            for metric, label in METRICS.items():
                better = advantage(found, metric)
                if better is not None and better[2] < 1:
                    worse.append(f"{label} ({better[0]:.2f})")
            if worse:
                lines.append(f"- against {html.escape(opponent(comparison))}, {kind}: {'; '.join(worse)}")
    return "\n".join(lines) + "\n" if lines else "In this run Helios lost no number in every pair.\n"


def facts(data: Found) -> str:
    """What the numbers belong to."""
    machine, first = data["machine"], data["comparisons"][0]
    versions = [
        f"{server['name']} {server['version']}"
        for each in data["comparisons"]
        for server in each["servers"]
        if server["version"]
    ]
    seeds = ", ".join(str(each["seed"]) for each in data["comparisons"])
    settings = ", ".join(f"{key}={setting}" for key, setting in data["settings"].items())
    text = (
        f"Measured: {data['model']}, {data['dtype']}; {machine['cpu']}, {machine['cores']} cores; "
        f"torch {machine['torch']}; {'; '.join(dict.fromkeys(versions))}; {first['pairs']} pairs, seeds {seeds}; "
        f"{settings}; commit {data['commit']}; {data['started'][:10]}."
    )
    return html.escape(text) + "\n{ .measured }\n"
