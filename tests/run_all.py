"""Every check of the project, one after another, and one summary at the end: `make test`.

`make test ONLY=notebooks` (or several names with commas) runs a part. Exit status 1 if anything failed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PYTHON = sys.executable

CHECKS: dict[str, list[str]] = {
    "export": [PYTHON, "-m", "helios.book.export", "--check"],
    "links": [PYTHON, "-m", "helios.book.links", "--check"],
    "exercises": [PYTHON, "-m", "helios.book.exercises", "--check"],
    "lint": [str(BIN / "ruff"), "check", "."],
    "format": [str(BIN / "ruff"), "format", "--check", "helios", "tests", "site"],
    "types": [str(BIN / "mypy")],
    "words": [str(BIN / "codespell")],
    "site": [str(BIN / "mkdocs"), "build", "--strict", "--quiet"],
    "model": [str(BIN / "helios"), "fetch"],
    "browser": [PYTHON, "-m", "pytest", "tests/browser", "-n", "2", "--dist", "load"],
    "tests": [PYTHON, "-m", "pytest", "tests", "--ignore=tests/browser", "--durations=10"],
    "notebooks": [PYTHON, "tests/fresh_environment.py"],
}


def chosen(names: list[str]) -> list[str]:
    """The checks to run; exits with a sentence for a name that does not exist."""
    wanted = [name for argument in names for name in argument.split(",")] or list(CHECKS)
    if unknown := [name for name in wanted if name not in CHECKS]:
        sys.exit(f"no check is called {unknown[0]!r}; there are: {', '.join(CHECKS)}")
    return wanted


def run(name: str, built: bool) -> tuple[bool, float]:
    """Run one check with its output shown, the site being `built` or not; whether it passed, and its seconds."""
    command = " ".join(Path(part).name if part.startswith("/") else part for part in CHECKS[name])
    print(f"\n=== {name}: {command}", flush=True)
    started = time.monotonic()
    # Waiting torch threads sleep instead of spinning: tests start many processes, and spinning ones starve each other.
    settings = {"OMP_WAIT_POLICY": "PASSIVE", "NO_MKDOCS_2_WARNING": "1"}
    if built:
        settings["HELIOS_SITE"] = str(ROOT / "public")
    environment = {**os.environ, **settings, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    passed = subprocess.run(CHECKS[name], cwd=ROOT, env=environment, check=False).returncode == 0
    return passed, time.monotonic() - started


def main() -> int:
    """Run the chosen checks; 0 if all passed."""
    results: dict[str, tuple[bool, float]] = {}
    for name in chosen(sys.argv[1:]):
        results[name] = run(name, built=results.get("site", (False, 0.0))[0])
    print("\n=== summary")
    for name, (passed, seconds) in results.items():
        print(f"{'passed' if passed else 'FAILED':<8}{name:<12}{seconds:7.1f} s")
    good = sum(passed for passed, _ in results.values())
    print(f"{good} passed, {len(results) - good} failed")
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
