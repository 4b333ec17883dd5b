"""From a name to a folder; the hub is a small local server that huggingface_hub talks to as to the real one."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

from helios.model.config import ModelConfig, ModelError
from helios.model.files import check_folder, needed_files, resolve_model
from helios.model.weights import placements, random_weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RAW: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def weight_bytes(shards: int) -> dict[str, bytes]:
    """The safetensors files of a tiny model, with an index when there are several."""
    config = ModelConfig.from_dict(RAW)
    weights = random_weights(config)
    parts = {n: weights[p.target][p.start : p.start + p.shape[0]].clone() for n, p in placements(config).items()}
    if shards == 1:
        return {"model.safetensors": save(parts)}
    files, weight_map = {}, {}
    for shard in range(shards):
        names = list(parts)[shard::shards]
        files[f"model-{shard}.safetensors"] = save({name: parts[name] for name in names})
        weight_map |= dict.fromkeys(names, f"model-{shard}.safetensors")
    return files | {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}


SIDE = {
    "config.json": json.dumps(RAW).encode(),
    "generation_config.json": b'{"eos_token_id": [7]}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"model_max_length": 128}',
    "README.md": b"hello",
}
UNSUPPORTED = SIDE | {"config.json": json.dumps(RAW | {"architectures": ["MambaForCausalLM"]}).encode()}
OWN_CODE = json.dumps(RAW | {"architectures": ["Mine"], "auto_map": {"AutoModel": "mine.Mine"}}).encode()
REPOS: dict[str, dict[str, bytes]] = {
    "team/single": SIDE | weight_bytes(1) | {"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"onnx"},
    "team/sharded": SIDE | weight_bytes(3) | {"consolidated.safetensors": b"another copy"},
    "team/pickles": SIDE | {"pytorch_model.bin": b"pickle"},
    "team/ggufs": SIDE | {"model-q4.gguf": b"GGUF"},
    "team/empty": SIDE,
    "team/untokenized": {k: v for k, v in SIDE.items() if k != "tokenizer.json"} | weight_bytes(1),
    "team/dataset": {"README.md": b"hello"},
    "team/mamba": UNSUPPORTED | weight_bytes(1),
    "team/own-code": SIDE | weight_bytes(1) | {"config.json": OWN_CODE},
    "team/shard-gone": SIDE | {k: v for k, v in weight_bytes(2).items() if k != "model-1.safetensors"},
    "team/gated": SIDE | weight_bytes(1),
}


class Hub(http.server.ThreadingHTTPServer):
    """Serves REPOS by the hub's protocol and remembers which files were fetched."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fetched: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        if path[:2] == ["api", "models"]:
            return self.model_info("/".join(path[2:4]), path[4:])
        repo, _, _, file = "/".join(path[:2]), path[2], path[3], "/".join(path[4:])
        if repo == "team/gated":
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        content = REPOS.get(repo, {}).get(file)
        if content is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        if self.command == "GET":
            self.server.fetched.add(f"{repo}/{file}")
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return self.answer(200, content, headers)

    def model_info(self, repo: str, rest: list[str]) -> None:
        if repo not in REPOS:
            return self.answer(404, b'{"error": "not found"}', {"X-Error-Code": "RepoNotFound"})
        siblings = [{"rfilename": name, "size": len(content)} for name, content in REPOS[repo].items()]
        info: Any = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        if rest[:1] == ["tree"]:
            info = [{"type": "file", "path": s["rfilename"], "size": s["size"], "oid": "0" * 40} for s in siblings]
        return self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


RESOLVE = """
import json, sys
from helios.model.config import ModelError, load_config
from helios.model.files import resolve_config, resolve_model
from helios.model.weights import load_weights
results = {}
if sys.argv[1] == "--config":
    results = {repo: load_config(resolve_config(repo)).layers for repo in sys.argv[2:]}
    sys.argv = []
for repo in sys.argv[1:]:
    try:
        folder = resolve_model(repo)
        tensors = load_weights(folder, load_config(folder))
        results[repo] = {"files": sorted(p.name for p in folder.iterdir()), "tensors": len(tensors)}
    except ModelError as error:
        results[repo] = str(error)
print("RESULT", json.dumps(results))
"""


def resolve(repos: list[str], cache: Path, **environment: str) -> dict[str, Any]:
    """Resolve hub ids in a fresh process (huggingface_hub reads its settings at import), as a user's program would."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    settings = {"HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-c", RESOLVE, *repos]
    done = subprocess.run(command, capture_output=True, text=True, env=clean | settings, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT ")[2])
    return result


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub-cache")


@pytest.fixture(scope="module")
def resolved(hub: Hub, cache: Path) -> dict[str, Any]:
    return resolve([*REPOS, "team/missing"], cache, HF_ENDPOINT=hub.url)


def test_a_repository_with_one_file(resolved: dict[str, Any], hub: Hub) -> None:
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert resolved["team/single"] == {"files": names, "tensors": 2 * 8 + 2}
    assert {file for file in hub.fetched if file.startswith("team/single/")} == {f"team/single/{n}" for n in names}


def test_a_repository_in_shards(resolved: dict[str, Any], hub: Hub) -> None:
    found = resolved["team/sharded"]
    assert [name for name in found["files"] if "safetensors" in name] == [
        "model-0.safetensors",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
    ]
    assert found["tensors"] == resolved["team/single"]["tensors"]
    assert "team/sharded/consolidated.safetensors" not in hub.fetched


@pytest.mark.parametrize(
    ("repo", "sentence"),
    [
        ("team/pickles", "team/pickles has only pickle files, which can run code when opened: choose one with"),
        ("team/ggufs", "team/ggufs has only GGUF files: download the one you want and give its path."),
        ("team/empty", "team/empty holds no *.safetensors weights: choose another repository."),
        ("team/untokenized", "team/untokenized has no tokenizer.json"),
        ("team/dataset", "team/dataset has no config.json"),
        ("team/mamba", "This model has the architecture MambaForCausalLM. Choose one of the architectures"),
        ("team/own-code", "This model brings its own Python code (auto_map), which Helios never runs."),
        ("team/missing", "The hub has no repository team/missing: check the spelling"),
        ("team/gated", "team/gated is gated: accept its terms on its page, then log in with `hf auth login`"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(repo: str, sentence: str, resolved: dict[str, Any]) -> None:
    assert resolved[repo].startswith(sentence)


def test_no_weights_are_fetched_of_a_model_that_cannot_run(resolved: dict[str, Any], hub: Hub) -> None:
    assert resolved and not {"team/mamba/model.safetensors", "team/own-code/model.safetensors"} & hub.fetched


def test_a_shard_that_the_index_names_but_nobody_has(resolved: dict[str, Any]) -> None:
    assert "model-1.safetensors is missing" in resolved["team/shard-gone"]


def test_what_was_fetched_once_needs_no_hub(resolved: dict[str, Any], cache: Path) -> None:
    assert resolved["team/single"] == resolve(["team/single"], cache, HF_ENDPOINT="http://127.0.0.1:9")["team/single"]


def test_offline_mode_uses_the_cache_and_says_when_it_is_empty(resolved: dict[str, Any], cache: Path) -> None:
    found = resolve(["team/sharded", "team/never-fetched"], cache, HF_HUB_OFFLINE="1")
    assert found["team/sharded"] == resolved["team/sharded"]
    assert found["team/never-fetched"].startswith("The hub did not deliver team/never-fetched")


def test_a_plan_needs_the_configuration_alone(hub: Hub, tmp_path: Path) -> None:
    before = set(hub.fetched)
    hub.fetched.clear()
    assert resolve(["--config", "team/sharded"], tmp_path, HF_ENDPOINT=hub.url) == {"team/sharded": 2}
    assert hub.fetched == {"team/sharded/config.json"}
    hub.fetched |= before


def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    message = resolve(["team/single"], tmp_path, HF_ENDPOINT="http://127.0.0.1:9")["team/single"]
    assert message.startswith("The hub did not deliver team/single and it is not whole in its cache")
    assert "HF_ENDPOINT" in message and "smollm2" in message


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_local_folder_is_used_where_it_lies(tmp_path: Path) -> None:
    assert resolve_model(write_folder(tmp_path, SIDE | weight_bytes(1))) == tmp_path


def test_a_home_folder_may_be_written_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path, SIDE | weight_bytes(1))
    assert resolve_model("~") == tmp_path


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model-1.safetensors"])
def test_a_folder_that_lacks_a_file_is_refused(missing: str, tmp_path: Path) -> None:
    write_folder(tmp_path, SIDE | weight_bytes(2))
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError, match=missing.replace(".", r"\.")):
        check_folder(tmp_path)


@pytest.mark.parametrize("name", ["smollm3", "a/b/c", "./nothing", "/no/where", "../up", "https://example.com/x"])
def test_a_name_that_means_nothing_is_explained(name: str) -> None:
    with pytest.raises(ModelError, match="There is no model.*smollm2.*gguf.*hub id"):
        resolve_model(name)


def test_only_one_copy_of_the_weights_is_needed() -> None:
    names = ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "x.bin"]
    assert needed_files(names, "a/b") == ["config.json", "tokenizer.json", "model.safetensors.index.json"]
