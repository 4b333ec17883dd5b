# Generated from notebooks/22_launch.ipynb by `helios export`; edit the notebook.
"""Launch.

Everything the book built, assembled: settings from flags and environment, a server that says what
it chose and ends cleanly, the offline API, and the command line that starts them all.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading
from importlib.metadata import version
from types import FrameType

import uvicorn

from helios.engine.build import build_engine, default_model
from helios.engine.scheduler import Scheduler
from helios.engine.worker import EngineDead
from helios.model.device import choose_device
from helios.serve.app import create_app
from helios.serve.exchange import Mailroom
from helios.serve.settings import ServeSettings

__all__ = ["LaunchError", "Server", "announce", "bind", "make_server", "serve", "served_name", "welcome"]


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
    """uvicorn, with the scheduler drained before connections are waited for."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler, drain_s: float) -> None:
        super().__init__(config)
        self.scheduler, self._drain_s = scheduler, drain_s
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


def welcome(url: str, name: str, report: dict[str, str]) -> str:
    """The text printed when the server is ready."""
    asked = '"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0, "max_tokens": 64'
    body = f'{{"model": "{name}", {asked}}}'
    chosen = "\n".join(f"  {key:<12} {value}" for key, value in report.items())
    return (
        f"Helios {version('helios')} serves {name} at {url}\n{chosen}\n\n"
        f"Try it:\n  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
    )


def served_name(settings: ServeSettings, model: str) -> str:
    """The name clients use: as asked, else the model's, without the folders of a local path."""
    plain = model.replace("\\", "/").rstrip("/")
    is_path = plain.startswith((".", "/", "~")) or plain.count("/") > 1 or plain.endswith(".gguf")
    return settings.served_model_name or (plain.removesuffix(".gguf").split("/")[-1] if is_path else model)


def make_server(settings: ServeSettings) -> tuple[Server, str]:
    """The server for `settings`, not started yet, and the served model's name."""
    config = settings.engine_config()
    if config.model == "auto":
        config = dataclasses.replace(config, model=default_model(choose_device(config.device)))
    name = served_name(settings, config.model)
    mail = Mailroom()
    scheduler = Scheduler(lambda: build_engine(config), max_waiting=settings.max_waiting, deliver=mail.deliver)
    app = create_app(scheduler, mail, name=name, version=version("helios"))
    options = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=5, server_header=False
    )
    return Server(options, scheduler, settings.shutdown_timeout), name


def announce(server: Server, url: str, name: str) -> None:
    """Wait for the engine, then print the welcome; if it cannot be built, stop the server and keep the reason."""
    try:
        report = server.scheduler.wait_ready().report
    except EngineDead as error:
        if not server.stopping:
            server.failure = str(error.__cause__ or error)
            server.should_exit = True
        return
    print(welcome(url, name, report), flush=True)


def serve(settings: ServeSettings) -> None:
    """Serve until a signal ends it. Raises `LaunchError` if the address is taken or the model cannot be loaded."""
    listener = bind(settings.host, settings.port)
    server, name = make_server(settings)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if host in ("0.0.0.0", "::"):
        print("Warning: this address is open to your network, and the server asks nobody for a key.", file=sys.stderr)
    threading.Thread(target=announce, args=(server, url, name), name="helios-announce", daemon=True).start()
    server.run(sockets=[listener])
    if server.failure is not None:
        raise LaunchError(server.failure)
