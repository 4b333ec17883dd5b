"""The notebooks as a reader on Colab runs them: `make test ONLY=notebooks`.

A virtual environment with torch, numpy and Jupyter, and nothing else; Helios comes into it by the notebooks' own set-up
cell, from a repository that holds this working tree under the release's tag. The set-up cell is run twice and after a
restart, and must leave torch and numpy alone. Then every notebook runs there, cell by cell, and is compared with what
it shows. Names given on the command line choose notebooks: `python tests/fresh_environment.py 08 11`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from helios.book.links import project_url, release_ref

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "fresh"
KEPT = ("torch", "numpy")
# Two at a time: a notebook is one process that computes, and one that waits for it.
NBVAL = ["--nbval-lax", "--nbval-cell-timeout=240", f"--nbval-kernel-name={KERNEL}", "-p", "no:timeout"]
PARALLEL = ["-n", "2", "--dist", "loadfile"]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    return subprocess.run([*map(str, command)], cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def make_repository(folder: Path) -> Path:
    """A repository of the working tree as it is, with one commit under the tag that the set-up cells ask for."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    run("git", "init", "-q", "-b", "main", cwd=folder)
    run("git", "add", "-A", cwd=folder)
    run(
        "git",
        "-c",
        "user.name=tests",
        "-c",
        "user.email=tests@example.org",
        "commit",
        "-q",
        "-m",
        "as it is",
        cwd=folder,
    )
    if release_ref(ROOT) != "main":
        run("git", "tag", release_ref(ROOT), cwd=folder)
    return folder


def make_environment(folder: Path) -> Path:
    """An environment with what a reader has before the first cell; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pins = [f"{name}=={version(name)}" for name in KEPT]
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", "constraints.txt", *pins, "jupyter")
    return python


def install_kernel(python: Path, share: Path, repository: Path) -> None:
    """Tell Jupyter of a kernel in the environment, for which the project's address leads to the repository."""
    environment = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(python.parent.parent),
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": project_url(ROOT),
        "GIT_CONFIG_KEY_1": "safe.directory",
        "GIT_CONFIG_VALUE_1": "*",
    }
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": KERNEL, "language": "python", "env": environment}
    (share / "kernels" / KERNEL).mkdir(parents=True)
    (share / "kernels" / KERNEL / "kernel.json").write_text(json.dumps(spec), "utf-8")
    os.environ["JUPYTER_PATH"] = str(share)


def versions(python: Path) -> dict[str, str]:
    listed = json.loads(run(python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"))
    return {package["name"]: package["version"] for package in listed}


def run_setup_cell(folder: Path) -> str:
    """Run a notebook's set-up cell twice in a kernel of its own; what the second run printed."""
    setup = nbformat.read(ROOT / "notebooks" / "01_model_files.ipynb", as_version=4).cells[1].source
    cells = [nbformat.v4.new_code_cell(setup) for _ in range(2)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=600, kernel_name=KERNEL, resources={"metadata": {"path": str(folder)}}).execute()
    return "".join(output.get("text", "") for output in notebook.cells[-1].outputs)


def check_setup(python: Path, folder: Path) -> None:
    """The set-up cell brings Helios and nothing that is there already, also when run again and after a restart."""
    before = versions(python)
    if "helios" in before:
        sys.exit("the fresh environment has Helios already: it is not fresh")
    first, after = run_setup_cell(folder), versions(python)
    again = run_setup_cell(folder)  # a new kernel in the same environment: a runtime that was restarted
    if versions(python) != after or "Helios" not in first or first != again:
        sys.exit(f"the set-up cell is not the same when run again:\n{first}\n{again}")
    touched = {name: (before[name], after.get(name)) for name in before if before[name] != after.get(name)}
    if touched:
        sys.exit(f"the set-up cell changed what was there: {touched}")
    if after.get("helios") != version("helios"):
        sys.exit(f"the set-up cell installed Helios {after.get('helios')}, not {version('helios')}")
    print(f"the set-up cell installed {len(after) - len(before)} packages and changed none", flush=True)


def main(names: list[str]) -> int:
    """Run the set-up and the chosen notebooks; pytest's exit status."""
    notebooks = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if names:
        notebooks = [path for path in notebooks if path.name.startswith(tuple(names))]
    with tempfile.TemporaryDirectory(prefix="reader-") as folder:
        home = Path(folder)
        python = make_environment(home / "environment")
        install_kernel(python, home / "share", make_repository(home / "repository"))
        check_setup(python, home)
        command = [
            sys.executable,
            "-m",
            "pytest",
            *NBVAL,
            *(PARALLEL if len(notebooks) > 1 else []),
            *map(str, notebooks),
        ]
        return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
