"""Repeats and medians, fair comparison, the table, and the ledger's file."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from helios.bench.drivers import BenchmarkError
from helios.bench.ledger import ROW_ORDER, commit_name, ledger_rows, machine_facts, merge_rows, read_ledger, record_row
from helios.bench.metrics import RequestRecord, Summary, summarize
from helios.bench.report import METRICS, alternate, measure, plain_table, write_json
from helios.bench.workloads import Work


def records_of(works: Sequence[Work], seconds: float) -> list[RequestRecord]:
    count = len(works[0].prompt_ids)
    return [RequestRecord(0.0, [seconds] * w.max_tokens, count, w.max_tokens, w.max_tokens) for w in works]


def a_summary(seconds: float = 1.0) -> Summary:
    return summarize(records_of([Work([1, 2], 3, "decode")], seconds))


def test_measure_warms_up_repeats_with_new_seeds_and_takes_medians() -> None:
    seeds: list[int] = []
    times = iter([50.0, 3.0, 1.0, 2.0])

    def works(seed: int) -> list[Work]:
        seeds.append(seed)
        return [Work([seed] * 2, 3, "decode")]

    report = measure("decode", lambda asked: records_of(asked, next(times)), works, seed=7)
    assert seeds == [7, 8, 9, 10]
    assert [run.duration_s for run in report.runs] == [3.0, 1.0, 2.0]
    assert report.median.duration_s == 2.0


def test_measure_refuses_wrong_lengths_and_no_repeats() -> None:
    works = [Work([1, 2], 3, "decode")]
    wrong = [RequestRecord(0.0, [1.0], 2, 1, 3)]
    with pytest.raises(BenchmarkError, match="got 2/1"):
        measure("decode", lambda asked: wrong, lambda seed: works)
    with pytest.raises(ValueError, match="repeats"):
        measure("decode", lambda asked: wrong, lambda seed: works, repeats=0)


def test_alternate_takes_turns_and_compares_medians() -> None:
    order: list[str] = []

    def engine(name: str, times: list[float]):  # type: ignore[no-untyped-def]
        def run(pair: int) -> Summary:
            order.append(f"{name}{pair}")
            return a_summary(times[pair])

        return run

    result = alternate(engine("a", [1.0, 2.0, 30.0]), engine("b", [2.0, 4.0, 15.0]))
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert result.ratio("duration_s") == pytest.approx(2.0)
    assert result.ratio_range("duration_s") == pytest.approx((0.5, 2.0))
    with pytest.raises(ValueError, match="pairs"):
        alternate(engine("a", []), engine("b", []), pairs=0)


def test_the_table_has_every_number_and_dashes_for_missing_ones() -> None:
    table = plain_table({"one": a_summary(), "two": summarize([])})
    lines = table.splitlines()
    assert len(lines) == 1 + len(METRICS)
    assert len({len(line) for line in lines}) == 1
    assert [line for line in lines if line.startswith("TTFT p50")][0].split()[-2:] == ["1.000", "–"]
    assert "100.0%" in table


def test_json_report(tmp_path: Path) -> None:
    report = measure("one", lambda w: records_of(w, 2.0), lambda seed: [Work([1], 2, "decode")], facts={"dtype": "x"})
    write_json(tmp_path / "out.json", [report])
    data = json.loads((tmp_path / "out.json").read_text())["reports"][0]
    assert data["facts"] == {"dtype": "x"}
    assert data["median"]["duration_s"] == 2.0
    assert len(data["runs"]) == 3


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path / "notebooks")
    return tmp_path / "chapters" / "results" / "ledger.json"


def test_rows_are_written_only_when_recording(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HELIOS_RECORD", raising=False)
    row = record_row("KV cache", a_summary(), device="cpu", dtype="torch.bfloat16", model="tiny")
    assert row["facts"]["dtype"] == "bfloat16"
    assert row["facts"]["lengths"] == "3×288/8 + 2×32/32 + 1×96/16"
    assert not book.exists()
    monkeypatch.setenv("HELIOS_RECORD", "1")
    for name in ("SDPA", "mine", "naive recompute", "KV cache", "SDPA"):
        record_row(name, a_summary(), device="cpu")
    assert [r["name"] for r in read_ledger()] == ["naive recompute", "KV cache", "SDPA", "mine"]
    assert Summary.from_dict(read_ledger()[0]["summary"]).to_dict() == a_summary().to_dict()
    assert list(book.parent.iterdir()) == [book]


def test_rows_up_to_a_chapter(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIOS_RECORD", "1")
    for name in ROW_ORDER:
        record_row(name, a_summary(), device="cpu")
    fresh = {"name": "KV cache", "facts": {}, "summary": a_summary(9.0).to_dict()}
    rows = ledger_rows(fresh, until="KV cache")
    assert [row["name"] for row in rows] == ["naive recompute", "KV cache"]
    assert rows[1]["summary"]["duration_s"] == 9.0


def test_merge_keeps_chapter_order() -> None:
    rows = [{"name": name} for name in ("server", "paged", "x")]
    ordered = [row["name"] for row in merge_rows(rows, {"name": "SDPA"})]
    assert ordered == ["SDPA", "paged", "server", "x"]


def test_machine_facts_name_no_one(tmp_path: Path) -> None:
    import getpass
    import socket

    text = json.dumps(machine_facts())
    assert socket.gethostname() not in text or len(socket.gethostname()) < 3
    assert str(Path.home()) not in text
    assert f'"{getpass.getuser()}"' not in text
    assert commit_name(tmp_path) is None
