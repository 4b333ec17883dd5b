# Generated from notebooks/26_launch.ipynb by `helios export`; edit the notebook.
"""Launch.

Everything the book built, assembled: settings from flags and environment, a server that says what
it chose and ends cleanly, the offline API, and the command line that starts them all.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
import sys
import threading
from importlib.metadata import version
from types import FrameType
from typing import Any

import uvicorn

from helios.engine.build import build_engine, default_model
from helios.engine.scheduler import Scheduler
from helios.engine.worker import EngineDead
from helios.model.device import choose_device
from helios.model.embedded import cache_home
from helios.serve.access import LogWriter
from helios.serve.app import create_app
from helios.serve.exchange import Mailroom
from helios.serve.keys import Keys, read_keys
from helios.serve.metrics import Metrics
from helios.serve.scrape import Scrape, scraper
from helios.serve.settings import ServeSettings
from helios.serve.watch import both, watch

__all__ = [
    "COMPILING",
    "HEADER_BYTES",
    "LaunchError",
    "Server",
    "accepted_keys",
    "announce",
    "bind",
    "compiler_folders",
    "is_loopback",
    "listen_options",
    "make_server",
    "serve",
    "served_name",
    "welcome",
]


class LaunchError(RuntimeError):
    """The server cannot start; the message says what to do."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises `LaunchError` if the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        other = port + 1 if port < 65535 else 8000
        hint = f"Choose another port: make serve PORT={other}, or helios serve --port {other}"
        raise LaunchError(f"Cannot listen on {host}:{port} ({error.strerror}). {hint}") from None
    return listener


class Server(uvicorn.Server):
    """uvicorn, with the scheduler drained before connections are waited for. `log` is closed by who runs it."""

    def __init__(
        self, config: uvicorn.Config, scheduler: Scheduler, drain_s: float, log: LogWriter | None = None
    ) -> None:
        super().__init__(config)
        self.scheduler, self.log, self._drain_s = scheduler, log, drain_s
        self.failure: str | None = None
        self.stopping = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain, then stop. A second one stops at once."""
        if self.stopping:
            self.should_exit = self.force_exit = True
            return
        self.stopping = True
        threading.Thread(target=self._drain, name="helios-drain", daemon=True).start()

    def _drain(self) -> None:
        if self.scheduler.health().status != "loading":
            note = f"\nStopping: running requests get up to {self._drain_s:g} s. Again to stop at once."
            print(note, file=sys.stderr, flush=True)
        try:
            self.scheduler.shutdown(drain_s=self._drain_s)
        finally:
            self.should_exit = True


def welcome(url: str, name: str, report: dict[str, str], keys: int = 0) -> str:
    """The text printed when the server is ready. `keys`: how many it accepts; none: it asks for none."""
    asked = '"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0, "max_tokens": 64'
    body = f'{{"model": "{name}", {asked}}}'
    facts = {**report, "keys": f"{keys} accepted" if keys else "none: whoever reaches this address may ask"}
    chosen = "\n".join(f"  {key:<12} {value}" for key, value in facts.items())
    headers = "-H 'content-type: application/json'" + (' -H "authorization: Bearer $HELIOS_API_KEY"' if keys else "")
    return (
        f"Helios {version('helios')} serves {name} at {url}\n{chosen}\n\n"
        f"Try it:\n  curl {url}/v1/chat/completions {headers} -d '{body}'\n"
    )


def served_name(settings: ServeSettings, model: str) -> str:
    """The name clients use: as asked, else the model's, without the folders of a local path."""
    plain = model.replace("\\", "/").rstrip("/")
    is_path = plain.startswith((".", "/", "~")) or plain.count("/") > 1 or plain.endswith(".gguf")
    return settings.served_model_name or (plain.removesuffix(".gguf").split("/")[-1] if is_path else model)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def accepted_keys(settings: ServeSettings) -> Keys:
    """The keys of flags, variable and file. Raises `LaunchError` for one that cannot be meant."""
    try:
        keys = Keys(read_keys(settings.api_key, settings.api_key_file))
    except ValueError as error:
        raise LaunchError(
            f"{str(error)[0].upper()}{str(error)[1:]}. (--api-key, HELIOS_API_KEY, --api-key-file)"
        ) from None
    if not keys and not is_loopback(settings.host):
        note = f"Warning: {settings.host} is open to your network, and the server asks nobody for a key."
        print(note, "Give it one: HELIOS_API_KEY=…, or --api-key-file FILE.", file=sys.stderr)
    return keys


HEADER_BYTES = 32 * 1024


def make_server(settings: ServeSettings, keys: Keys | None = None) -> tuple[Server, str]:
    """The server for `settings`, not started yet, and the served model's name. `keys`: those it accepts."""
    config = settings.engine_config()
    if config.model == "auto":
        config = dataclasses.replace(config, model=default_model(choose_device(config.device)))
    name = served_name(settings, config.model)
    mail, metrics = Mailroom(), Metrics()
    scheduler = Scheduler(
        lambda: metrics.meter(build_engine(config)),
        max_waiting=settings.max_waiting,
        deliver=both(mail.deliver, metrics.observe),
        stall_after_s=settings.stall_after,
    )
    prefixes = ("helios", "vllm") if settings.metrics_compat else ("helios",)
    writer = LogWriter(sys.stderr) if settings.log_requests else None
    app = watch(
        create_app(scheduler, mail, name=name, version=version("helios")),
        metrics,
        scraper(Scrape(metrics, scheduler, name, prefixes)),
        keys=keys,
        public_metrics=settings.public_metrics,
        origins=settings.cors_origin,
        write=writer.write if writer else None,
    )
    return Server(listen_options(app), scheduler, settings.shutdown_timeout, writer), name


def listen_options(app: Any) -> uvicorn.Config:
    """How uvicorn serves `app`."""
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    limits: dict[str, Any] = {"http": "h11", "ws": "none", "h11_max_incomplete_event_size": HEADER_BYTES}
    return uvicorn.Config(app, timeout_graceful_shutdown=5, **quiet, **limits)


COMPILING = "Compiling the C kernels for this CPU; that happens once."


def compiler_folders() -> set[str]:
    """The temporary folders in which kernels are being compiled right now, or were when somebody pulled the plug."""
    return {folder.name for folder in (cache_home() / "kernels").glob("tmp*")}


def announce(server: Server, url: str, name: str, keys: int = 0) -> None:
    """Wait for the engine, then print the welcome; if it cannot be built, stop the server and keep the reason."""
    told, before = False, compiler_folders()
    while True:
        try:
            report = server.scheduler.wait_ready(0.1).report
        except TimeoutError:
            if not told and compiler_folders() - before:
                told = True
                print(COMPILING, file=sys.stderr, flush=True)
        except EngineDead as error:
            if not server.stopping:
                server.failure = str(error.__cause__ or error)
                server.should_exit = True
            return
        else:
            return print(welcome(url, name, report, keys), flush=True)


def serve(settings: ServeSettings) -> None:
    """Serve until a signal ends it. Raises `LaunchError` if the address is taken or the model cannot be loaded."""
    listener, keys = bind(settings.host, settings.port), accepted_keys(settings)
    server, name = make_server(settings, keys)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    told = (server, url, name, len(keys))
    threading.Thread(target=announce, args=told, name="helios-announce", daemon=True).start()
    try:
        server.run(sockets=[listener])
    finally:
        if server.log is not None:
            server.log.close()
    if server.failure is not None:
        raise LaunchError(server.failure)
