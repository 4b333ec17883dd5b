# Generated from notebooks/26_launch.ipynb by `helios export`; edit the notebook.
"""Every setting, once: its name, type, default and help text, from a flag or a `HELIOS_…` variable."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from helios.engine.config import EngineConfig

__all__ = ["EngineSettings", "ServeSettings", "Words", "check_origins", "words"]


class EngineSettings(BaseSettings):
    """What every command that runs the engine can be told, by flag or by `HELIOS_…` variable."""

    model_config = SettingsConfigDict(env_prefix="HELIOS_", extra="ignore", protected_namespaces=())

    model: str = Field("auto", description="smollm2 (embedded), a hub id, a folder, a .gguf file; auto: what fits")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, …")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="format of weights and cache")
    attention: Literal["auto", "sdpa", "matmul", "varlen", "triton"] = Field(
        "auto", description="attention backend; auto: by capability"
    )
    runner: Literal["auto", "eager", "native", "compiled", "graphs"] = Field(
        "auto", description="what computes a tick; auto: the fastest that can"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads for torch; default: torch's own choice")
    debug_checks: bool = Field(False, description="verify every page and reference after each tick (slow)")

    max_batch_size: int = Field(32, ge=1, description="sequences that run together")
    prefill_chunk_size: int = Field(1024, ge=1, description="tokens of one tick, prompts and decodes together")
    max_waiting: int = Field(256, ge=1, description="requests that may wait; more are answered 429")
    kv_pages: int | None = Field(None, ge=2, description="pages of the KV pool; default: from --memory-fraction")
    memory_fraction: float = Field(0.5, gt=0, le=0.95, description="share of the free memory for the KV pool")
    max_context: int | None = Field(None, ge=2, description="longest prompt plus output; default: the model's")
    prefix_cache: bool = Field(True, description="share the pages of equal prompt beginnings")
    prefix_ttl_s: float = Field(600.0, gt=0, description="seconds an idle shared page is shielded from eviction")

    def engine_config(self) -> EngineConfig:
        """The engine's share of the settings."""
        names = {each.name for each in dataclasses.fields(EngineConfig)}
        return EngineConfig(**{key: value for key, value in self.model_dump().items() if key in names})


def words(value: Any) -> Any:
    """A variable's text as the list it stands for; a list stays what it is."""
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


def check_origins(origins: list[str]) -> list[str]:
    """The origins, without empty ones. Raises ValueError for what no browser would send."""
    for origin in filter(None, origins):
        if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ValueError(f"{origin!r} is no origin: write it as https://host or http://host:port, without a path")
    return [origin for origin in origins if origin]


Words = Annotated[list[str], NoDecode, BeforeValidator(words)]


class ServeSettings(EngineSettings):
    """The settings of `helios serve`."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 opens the server to the network")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes any free one")
    served_model_name: str | None = Field(None, description="the name clients use; default: the model's own")
    shutdown_timeout: float = Field(5.0, ge=0, le=3600, description="seconds running requests get to finish at the end")
    stall_after: float = Field(60.0, gt=0, description="seconds without a tick, work pending, until /health says 503")
    api_key: Words = Field([], repr=False, description="a key that clients must send; repeat it for several")
    api_key_file: Path | None = Field(None, description="file with one key a line, which other users' ps does not show")
    cors_origin: Annotated[Words, AfterValidator(check_origins)] = Field(
        [], description="origin whose web pages may call the server; repeat it for several"
    )
    public_metrics: bool = Field(False, description="/metrics needs no key")
    metrics_compat: Literal["vllm"] | None = Field(None, description="vllm: its metric names too, for its dashboards")
    log_requests: bool = Field(True, description="one line of JSON on stderr for each request")
