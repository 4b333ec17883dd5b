"""The chunk budget, swept: 30 mixed requests in one process, several budgets in turn, to chapters/results/budget.json.

`python scripts/budget_sweep.py [REPEATS]`. The order of the budgets is reversed every other time, so that a machine
that gets slower or faster meanwhile favours none of them.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from helios.bench.drivers import check_lengths, run_scheduler
from helios.bench.metrics import Summary, summarize
from helios.bench.workloads import make_workload
from helios.engine.build import build_engine
from helios.engine.config import EngineConfig
from helios.engine.engine import Engine
from helios.engine.scheduler import Scheduler

BUDGETS = (256, 512, 1024, 1536, 2048)
RESULT = Path(__file__).resolve().parent.parent / "chapters" / "results" / "budget.json"


def figures(runs: list[Summary]) -> dict[str, float]:
    """Medians over the runs of one budget."""
    columns = {
        "output_tok_s": [run.output_tok_s for run in runs],
        "ttft_p50_s": [run.ttft_s.p50 for run in runs],
        "ttft_p95_s": [run.ttft_s.p95 for run in runs],
        "itl_p50_s": [run.itl_s.p50 for run in runs],
        "itl_p95_s": [run.itl_s.p95 for run in runs],
    }
    return {name: round(statistics.median(values), 4) for name, values in columns.items()}


def main(repeats: int) -> None:
    """Sweep and write."""
    engines: list[Engine] = []

    def build() -> Engine:
        engines.append(build_engine(EngineConfig(model="smollm2", kv_pages=160)))
        return engines[0]

    scheduler = Scheduler(build)
    scheduler.start()
    scheduler.wait_ready()
    engine = engines[0]
    vocabulary = engine.model.config.vocab_size

    def run(budget: int, seed: int) -> Summary:
        engine.config = dataclasses.replace(engine.config, prefill_chunk_size=budget)
        works = make_workload("mixed", vocabulary, seed)
        records = run_scheduler(scheduler, works)
        check_lengths(works, records)
        return summarize(records)

    run(1024, 1)
    runs: dict[int, list[Summary]] = {budget: [] for budget in BUDGETS}
    for repeat in range(repeats):
        for place, budget in enumerate(BUDGETS if repeat % 2 == 0 else BUDGETS[::-1]):
            runs[budget].append(run(budget, 7000 + 10 * repeat + place))
            print(budget, figures(runs[budget][-1:]), flush=True)
    facts = {"model": "SmolLM2-135M-Instruct", "dtype": str(engine.model.dtype).removeprefix("torch."), "device": "cpu"}
    facts |= {"workload": "mixed, 30 requests, in process", "repeats": repeats, "torch": torch.__version__}
    facts |= {"threads": torch.get_num_threads(), "day": time.strftime("%Y-%m-%d"), "runner": engine.report["runner"]}
    table = {str(budget): figures(runs[budget]) for budget in BUDGETS}
    RESULT.write_text(json.dumps({"facts": facts, "budgets": table}, indent=1) + "\n", "utf-8")
    print(RESULT.read_text("utf-8"))
    sys.stdout.flush()
    os._exit(0)  # the worker is a daemon


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
