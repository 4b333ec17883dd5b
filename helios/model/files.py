# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""From a name to a model folder on this machine: the embedded model, a folder, a GGUF file, or a hub id."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from helios.model.config import load_config
from helios.model.convert import convert_gguf
from helios.model.embedded import build_once, cache_home, fetch_embedded
from helios.model.errors import ModelError
from helios.model.weights import indexed_files, weight_files

__all__ = [
    "EMBEDDED",
    "HUB_ID",
    "INDEX",
    "SIDE_FILES",
    "check_folder",
    "needed_files",
    "resolve_config",
    "resolve_model",
]
INDEX = "model.safetensors.index.json"
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def needed_files(names: list[str], repo: str) -> list[str]:
    """Of a repository's file names, those to download: side files, and the weights or their index."""
    if "tokenizer.json" not in names:
        raise ModelError(f"{repo} has no tokenizer.json: choose a repository with a fast tokenizer.")
    needed = [name for name in SIDE_FILES if name in names]
    for weights in (INDEX, "model.safetensors"):
        if weights in names:
            return [*needed, weights]
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise ModelError(
            f"{repo} has only pickle files, which can run code when opened: choose one with *.safetensors."
        )
    if any(name.endswith(".gguf") for name in names):
        raise ModelError(f"{repo} has only GGUF files: download the one you want and give its path.")
    raise ModelError(f"{repo} holds no *.safetensors weights: choose another repository.")


def check_folder(folder: Path) -> Path:
    """`folder`, once it is sure that Helios can use the model in it; ModelError says what is missing."""
    load_config(folder)
    for path in weight_files(folder):
        if not path.is_file():
            raise ModelError(f"{path.name} is missing in {folder}: the download is incomplete, fetch the model again.")
    if not (folder / "tokenizer.json").exists():
        raise ModelError(f"{folder} has no tokenizer.json: save it there with transformers' AutoTokenizer.")
    return folder


def _download_repo(repo: str) -> Path:
    """Fetch what is needed of a hub repository: first what tells whether Helios can use it, then the weights."""
    names = [file.rfilename for file in HfApi().model_info(repo).siblings or []]
    if "config.json" not in names:
        raise ModelError(f"{repo} has no config.json: it is not a language model that Helios can read.")
    load_config(Path(hf_hub_download(repo, "config.json")).parent)
    needed = needed_files(names, repo)
    if INDEX in needed:
        needed += indexed_files(Path(hf_hub_download(repo, INDEX)))
    return check_folder(Path(snapshot_download(repo, allow_patterns=needed)))


def _download_config(repo: str) -> Path:
    return Path(hf_hub_download(repo, "config.json")).parent


def _gguf_folder(path: Path) -> Path:
    """The converted folder of a GGUF file, made on first use and again when the file changes."""
    if not path.is_file():
        raise ModelError(f"There is no file {path}: check the path of the GGUF file.")
    state = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    return build_once(cache_home() / "models" / f"{path.stem}-{key}", lambda part: convert_gguf(path, part))


def _from_hub(repo: str, fetch: Callable[[str], Path]) -> Path:
    """What `fetch` brings of hub repository `repo`, or the hub's own cached copy of it; ModelError says why not."""
    try:
        return fetch(repo)
    except GatedRepoError:
        advice = "accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
        raise ModelError(f"{repo} is gated: {advice}.") from None
    except RepositoryNotFoundError:
        advice = "check the spelling; for a private one log in with `hf auth login` or set HF_TOKEN"
        raise ModelError(f"The hub has no repository {repo}: {advice}.") from None
    except ModelError:
        raise
    except Exception as error:  # the hub's client has changed its HTTP library twice: its failures share no base
        return _from_hub_cache(repo, error)


def _from_hub_cache(repo: str, reason: Exception) -> Path:
    try:
        return check_folder(Path(hf_hub_download(repo, "config.json", local_files_only=True)).parent)
    except (ModelError, OSError, ValueError):
        pass
    cause = (str(reason).splitlines() or [type(reason).__name__])[0]
    advice = "Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a local folder; 'smollm2' needs no hub"
    raise ModelError(f"The hub did not deliver {repo} and it is not whole in its cache ({cause}). {advice}.") from None


EMBEDDED = "smollm2"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str | Path) -> Path:
    """Folder of the model called `name`: "smollm2", a folder, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B.

    Fetches and converts as needed; the second call is quick. ModelError when there is no such model or Helios cannot
    use it; the message says what to do.
    """
    if str(name) == EMBEDDED:
        return check_folder(fetch_embedded())
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return check_folder(_gguf_folder(path))
    if path.is_dir():
        return check_folder(path)
    if HUB_ID.fullmatch(str(name)):
        return _from_hub(str(name), _download_repo)
    advice = "give 'smollm2', a folder, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B"
    raise ModelError(f"There is no model {str(name)!r}: {advice}.")


def resolve_config(name: str | Path) -> Path:
    """Like `resolve_model`, but of a hub id fetches config.json alone: enough to plan with, in a second."""
    if HUB_ID.fullmatch(str(name)) and Path(name).suffix != ".gguf" and not Path(name).is_dir():
        return _from_hub(str(name), _download_config)
    return resolve_model(name)
