"""Right and fast on this GPU? `python -m tests.gpu.check --json FILE`, or `make gpu-check`.

Needs torch with CUDA, and for some parts triton and transformers; not pytest, and nothing of the server's. Correctness
first, then speed as a share of what the machine can do, then questions about kernels. The time budget is kept: a part
for which there is no time is skipped, and says so. Exit status: 0 all right, 1 no CUDA device or something wrong, 2
stopped because the time was over.
`--dry-run` goes through the same parts on the CPU with tiny sizes, and its numbers mean nothing.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch

from tests.gpu import correctness, questions, serving, speed
from tests.gpu.budget import Report, Result, summary
from tests.gpu.machine import RUNNERS, Machine, facts

BUDGET_S = 330.0


def arguments(given: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for everything that was found")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all of it")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: does the check itself work?")
    parser.add_argument("--only", default="", help="run parts whose name contains this")
    return parser.parse_args(given)


class Check:
    """The parts in order: what matters most first; last of all compiling, which may take long."""

    def __init__(self, machine: Machine, report: Report, only: str) -> None:
        self.machine, self.report, self.only = machine, report, only
        self.limits = speed.Limits()

    def part(self, name: str, run: object, needs_s: float = 1.0, limit_s: float = 30.0) -> Result:
        """Run it, unless other parts were asked for."""
        if self.only not in name:
            return {}
        return self.report.part(name, run, needs_s=needs_s, limit_s=limit_s)  # type: ignore[arg-type]

    def correctness(self, runners: tuple[str, ...]) -> None:
        """Every backend, format and runner, what is served with first; compiling costs more time."""
        half, best = self.machine.half, self.machine.best_backend()
        dtypes = sorted(self.machine.dtypes, key=lambda dtype: dtype != half)
        backends = sorted(correctness.BACKENDS, key=lambda backend: backend != best)
        if self.machine.dry and "compiled" in runners:
            backends = [best]
        for runner in runners:
            needs = 40.0 if runner == "compiled" else 5.0
            for dtype in dtypes:
                for backend in backends:
                    kind = str(dtype).removeprefix("torch.")
                    run = partial(correctness.check, self.machine, backend, dtype, runner)
                    self.part(f"right: {backend} {kind} {runner}", run, needs, 60.0)

    def backends(self) -> list[str]:
        """The engine's choice, and the Triton kernel beside it."""
        best = self.machine.best_backend()
        return [best] if best == "triton" else [best, "triton"]

    def attention(self) -> None:
        """Decode attention alone, by backend."""
        for backend in correctness.BACKENDS:
            self.part(f"attention: {backend}", partial(speed.attention_only, self.machine, backend, self.limits), 4.0)
        self.part("attention: triton tiles", partial(speed.tiles, self.machine, self.limits), 15.0, 30.0)

    def model(self, name: str, runners: tuple[str, ...]) -> None:
        """Decode, prefill and the thirty requests on one shape."""
        loaded = speed.Loaded(self.machine, name)
        built = self.part(f"{name}: build for {', '.join(runners)}", loaded.load, 10.0, 60.0)
        if "failed" in built or "skipped" in built:
            return
        slow = 60.0 if "compiled" in runners else 12.0
        for runner in runners:
            for backend in self.backends():
                run = partial(speed.decode, loaded, backend, runner, self.limits)
                self.part(f"{name}: decode {backend} {runner}", run, slow, 90.0)
        best = self.machine.best_backend()
        for runner in runners:
            if runner != "graphs":  # prompts are never replayed
                run = partial(speed.prefill, loaded, best, runner, self.limits)
                self.part(f"{name}: prefill {best} {runner}", run, slow, 60.0)
            run = partial(serving.thirty, loaded, best, runner)
            self.part(f"{name}: thirty requests {runner}", run, slow, 60.0)
        loaded.drop()

    def run(self) -> None:
        """All parts."""
        quick = RUNNERS[:2]
        self.part("limits", partial(self.limits.measure, self.machine), 3.0)
        self.correctness(quick)
        self.attention()
        self.model("Qwen3-0.6B", quick)
        self.model("Qwen3-4B", quick)
        theirs = partial(serving.transformers_thirty, self.machine, "Qwen3-4B")
        self.part("Qwen3-4B: thirty requests transformers", theirs, 30.0, 75.0)
        for name, ask in questions.QUESTIONS.items():
            self.part(f"asked: {name}", partial(ask, self.machine), 2.0, 15.0)
        if not self.machine.dry:  # on a CPU compiling takes most of the time, and one example is enough
            self.model("Qwen3-0.6B", RUNNERS[2:])
        self.correctness(RUNNERS[2:])
        if not self.machine.dry:
            self.model("Qwen3-4B", RUNNERS[2:])


def main(given: list[str]) -> int:
    """Run the check; 0 if nothing was wrong."""
    options = arguments(given)
    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return 1
    machine = Machine(torch.device("cpu" if options.dry_run else "cuda"), options.dry_run)
    report = Report(facts(machine), options.budget, options.json)
    report.guard()
    print(*(f"{key}: {value}" for key, value in report.facts.items()), sep="\n", flush=True)
    Check(machine, report, options.only).run()
    report.save()
    print(summary(report.parts))
    bad = [found for found in report.parts.values() if "failed" in found or found.get("passed") is False]
    return 1 if bad else 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a worker thread of another library must not keep the process alive
