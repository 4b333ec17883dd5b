"""The ledger as a table with bars: what each chapter's engine measured on the same six requests."""

import html
import json
from pathlib import Path
from typing import Any

NOT_MEASURED = """
!!! note "Not measured yet"
    The ledger has no {row} yet; running the notebook with HELIOS_RECORD=1 records it.
"""
COLUMNS = ("", "output tokens/s", "", "× row above", "first token, median", "between tokens, median")


def drawn_ledger(path: Path, row: str) -> str:
    """HTML for the rows up to `row` (or "all" of them) of the ledger file; a note when it was not measured."""
    rows = json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else []
    names = [entry["name"] for entry in rows]
    if row != "all" and row not in names or not rows:
        return NOT_MEASURED.format(row="rows" if row == "all" else f"row “{html.escape(row)}”")
    return table(rows if row == "all" else rows[: names.index(row) + 1])


def table(rows: list[dict[str, Any]]) -> str:
    most = max(speed_of(entry) for entry in rows)
    head = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    body, before = "", None
    for entry in rows:
        speed, summary = speed_of(entry), entry["summary"]
        cells = [f'<th scope="row">{html.escape(entry["name"])}</th>', f"<td>{speed:.3g}</td>"]
        cells.append(f'<td class="bar"><div style="width:{100 * speed / most:.1f}%"></div></td>')
        cells.append(f"<td>{speed / before:.2f}</td>" if before else "<td></td>")
        cells += [f"<td>{milliseconds(summary, key)}</td>" for key in ("ttft_s", "itl_s")]
        body += f"<tr>{''.join(cells)}</tr>"
        before = speed
    drawn = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'\n<div class="ledger">{drawn}</div>\n\n{note(rows)}\n'


def speed_of(entry: dict[str, Any]) -> float:
    return float(entry["summary"]["output_tok_s"] or 0)


def milliseconds(summary: dict[str, Any], key: str) -> str:
    value = (summary.get(key) or {}).get("p50")
    return "" if value is None else f"{1000 * value:,.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"


def note(rows: list[dict[str, Any]]) -> str:
    """What the numbers belong to; where rows differ, all values are named."""
    kinds = {
        "model": "", "gpu": "", "cpu": "", "cores": " cores", "device": "", "dtype": "", "lengths": "",
        "torch": "torch ", "commit": "commit ",
    }  # fmt: skip
    parts = []
    for key, word in kinds.items():
        values = list(dict.fromkeys(str(entry["facts"][key]) for entry in rows if entry["facts"].get(key)))
        if values:
            text = ", ".join(values)
            parts.append(f"{text}{word}" if word.startswith(" ") else f"{word}{text}")
    return html.escape("Measured: " + "; ".join(parts) + ".") + "\n{ .measured }"
