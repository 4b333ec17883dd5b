# Generated from notebooks/26_launch.ipynb by `helios export`; edit the notebook.
"""`helios serve | chat | bench | export | fetch | plan | doctor | book`."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

__all__ = [
    "SENTENCES",
    "app",
    "bench_command",
    "book_app",
    "chat_command",
    "doctor_command",
    "fetch_command",
    "is_mistake",
    "main",
    "plan_command",
    "serve_command",
    "with_settings",
]
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Helios: a book that builds an LLM inference engine, and the engine.",
)


def with_settings(load: Callable[[], type[Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn the fields of a settings class into flags of a command, whose first argument is then the filled settings.

    Only flags that were given are passed on: the class itself looks at `HELIOS_…` variables and defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        settings = load()
        asked = inspect.signature(command, eval_str=True).parameters.values()
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in asked if p.name != "settings"]
        flags = [_flag(name, field) for name, field in settings.model_fields.items()]

        def run(**given: Any) -> None:
            extra = {p.name: given.pop(p.name) for p in own}
            command(_filled(settings, given), **extra)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(flags + own)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in flags + own}
        return run

    return decorate


def _flag(name: str, field: Any) -> inspect.Parameter:
    """One flag: `--name VALUE`, absent unless given; booleans get `--name/--no-name`."""
    kinds: list[Any] = [bool, int, float, list[str], str]
    kind = next((k for k in kinds if field.annotation in (k, k | None)), str)
    default = "" if field.default in (None, []) else f"default {field.default}; "
    option = typer.Option(help=f"{field.description} ({default}HELIOS_{name.upper()})", show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _filled(settings: type[Any], given: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    try:
        return settings(**{name: value for name, value in given.items() if value not in (None, [])})
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0])
        flag, variable = "--" + name.replace("_", "-"), "HELIOS_" + name.upper()
        shown = "not usable" if name == "api_key" else repr(wrong["input"])  # a key is not for the screen
        raise typer.BadParameter(f"{flag} (or {variable}) is {shown}: {wrong['msg']}") from None


SENTENCES = ("ModelError", "LaunchError", "BenchmarkError", "EngineDead", "RequestError", "ExportError", "NoCheckout")


def is_mistake(error: BaseException) -> bool:
    """Whether `error` is something that the user can mend, and its text says how."""
    building = any(frame.name == "build_engine" for frame in traceback.extract_tb(error.__traceback__))
    return type(error).__name__ in SENTENCES or (building and isinstance(error, ValueError))


def _no_mistakes(record: logging.LogRecord) -> bool:
    return not (record.exc_info and record.exc_info[1] and is_mistake(record.exc_info[1]))


def main() -> None:
    """The `helios` command: exit code 0, 1 for what the user can mend (said on stderr), 130 after Ctrl-C."""
    logging.getLogger("helios").addFilter(_no_mistakes)
    code: Any = 0
    try:
        app()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code
    except Exception as error:
        if not is_mistake(error):
            raise
        print(f"helios: {error}", file=sys.stderr)
        code = 1
    if any(thread.name == "helios-engine" for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    raise SystemExit(code)


def _engine_settings() -> type[Any]:
    from helios.serve import settings

    return settings.EngineSettings


def _serve_settings() -> type[Any]:
    from helios.serve import settings

    return settings.ServeSettings


@app.command("serve")
@with_settings(_serve_settings)
def serve_command(settings: Any) -> None:
    """Serve a model over HTTP, as OpenAI's API."""
    from helios.serve import launch

    launch.serve(settings)


@app.command("chat")
@with_settings(_engine_settings)
def chat_command(
    settings: Any,
    system: Annotated[str, typer.Option(help="a system message")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer")] = 512,
    temperature: Annotated[Optional[float], typer.Option(help="0 for greedy; default: the model's own")] = None,  # noqa: UP045
) -> None:
    """Talk to a model here. An empty line or Ctrl-D ends it."""
    from helios.engine.llm import LLM

    config = settings.engine_config()
    with LLM(**vars(config)) as llm:
        messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        for question in _questions():
            messages.append({"role": "user", "content": question})
            answer = ""
            for text in llm.stream_chat(messages, max_tokens=max_tokens, temperature=temperature):
                print(text, end="", flush=True)
                answer += text
            print("\n")
            messages.append({"role": "assistant", "content": answer})


def _questions() -> Iterator[str]:
    person = sys.stdin.isatty()
    while True:
        try:
            line = input("you: " if person else "").strip()
        except EOFError:
            return
        if line:
            yield line
        elif person:
            return


@app.command("bench")
@with_settings(_engine_settings)
def bench_command(
    settings: Any,
    url: Annotated[
        str, typer.Option(help="measure the OpenAI-style server at this address instead of this process")
    ] = "",
    workload: Annotated[str, typer.Option(help="mixed (30 requests), prefill, decode, balanced, single")] = "mixed",
    rate: Annotated[Optional[float], typer.Option(help="requests per second; default: all at once")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(help="seed of the prompts")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="measured runs; medians are reported")] = 3,
    warmup: Annotated[bool, typer.Option(help="one run that does not count")] = True,
    vocab: Annotated[int, typer.Option(help="token ids below this are drawn, with --url")] = 32000,
    as_json: Annotated[Optional[Path], typer.Option("--json", help="also write everything to this file")] = None,  # noqa: UP045
    compare: Annotated[Optional[tuple[str, str]], typer.Option(help="two servers in turn, --repeats pairs")] = None,  # noqa: UP045
    names: Annotated[str, typer.Option(help='with --compare: labels, such as "Helios,vLLM"')] = "",
    pids: Annotated[str, typer.Option(help="with --compare: process ids; the idle one's group is stopped")] = "",
    engine: Annotated[
        bool, typer.Option("--engine", help="what a tick costs without a model, few or many queued")
    ] = False,
) -> None:
    """The 30-request benchmark: latency, throughput, cache hits."""
    from helios.serve import bench

    if as_json is not None and not as_json.parent.is_dir():
        raise typer.BadParameter(f"--json: there is no folder {as_json.parent}")
    if engine:
        return bench.measure_ticks(as_json)
    if compare:
        from helios.bench.compare import compare_command

        seeds = seed or None  # 0: a fresh one
        return compare_command(compare, names, pids, workload, pairs=repeats, seed=seeds, vocab=vocab, to=as_json)
    from helios.bench.report import measure, print_table, write_json
    from helios.bench.workloads import make_workload

    try:  # what is wrong with the arguments is told before a model is loaded
        make_workload(workload, vocab, seed, rate)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with bench.target(settings, url) as (run, size, facts):
        counted: dict[str, Any] = {"seed": seed, "repeats": repeats, "warmup": warmup, "facts": facts}
        report = measure(workload, run, lambda s: make_workload(workload, size or vocab, s, rate), **counted)
    print_table({workload: report.median}, f"{workload}, median of {repeats}")
    if as_json is not None:
        write_json(as_json, [report])


def _hand_on(group: typer.Typer, name: str, about: str) -> None:
    """A command that hands its arguments to `NAME_command` of `helios.book.NAME`, which later chapters may export."""
    as_given = {"ignore_unknown_options": True, "allow_extra_args": True}

    @group.command(name, help=about, add_help_option=False, context_settings=as_given)
    def run(context: typer.Context) -> None:
        raise SystemExit(getattr(importlib.import_module(f"helios.book.{name}"), f"{name}_command")(context.args))


book_app = typer.Typer(no_args_is_help=True)
_hand_on(app, "export", "Write helios/ from the notebooks.")
_hand_on(book_app, "new", "Begin a chapter: page, notebook, solution and starter, where you say.")
_hand_on(book_app, "renumber", "Give chapters other numbers, in every link, name and sentence.")
_hand_on(book_app, "exercises", "Write the exercise notebooks from their solutions.")
_hand_on(book_app, "links", "Renew the links to where the project lives.")
app.add_typer(book_app, name="book", help="Work on the book: new, renumber, exercises, links.")


@app.command("fetch")
def fetch_command(model: Annotated[str, typer.Argument(help="smollm2, a hub id, or a .gguf file")] = "smollm2") -> None:
    """Download a model once, check it and prepare it."""
    from helios.model.files import resolve_model

    print(f"{model} is ready in {resolve_model(model)}")


@app.command("doctor")
def doctor_command(as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """What was detected, and what to do about what is missing."""
    from helios.serve import doctor

    findings = doctor.examine()
    if as_json:
        print(json.dumps([vars(finding) for finding in findings], indent=1))
        return
    for finding in findings:
        print(f"{finding.topic:<10} {finding.found}")
        if finding.advice:
            print(f"{'':<10} -> {finding.advice}")


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Argument(help="smollm2, a hub id, a folder or a .gguf file")] = "smollm2",
    device: Annotated[str, typer.Option(help="t4, l4, a100, h100, h200, or auto: this machine")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")] = "auto",
    context: Annotated[int, typer.Option(min=2, help="tokens of one request, prompt and output")] = 2048,
) -> None:
    """Will it fit, how many requests, how fast at best? Needs only the model's config."""
    import torch

    from helios.model.config import load_config
    from helios.model.device import choose_device, choose_dtype
    from helios.model.files import resolve_config
    from helios.serve import plan as planning

    here = choose_device() if device == "auto" else torch.device("cpu")
    if device != "auto" and device.lower() not in planning.KNOWN:
        raise typer.BadParameter(f"{device!r} is not known: choose auto, {', '.join(planning.KNOWN)}")
    if dtype not in (names := ("auto", "float32", "bfloat16", "float16")):
        raise typer.BadParameter(f"{dtype!r} is not known: choose one of {', '.join(names)}")
    default = "float16" if device.lower() == "t4" else "bfloat16"
    chosen = choose_dtype(here, dtype)[0] if device == "auto" else getattr(torch, default if dtype == "auto" else dtype)
    hardware = planning.this_machine(here) if device == "auto" else planning.KNOWN[device.lower()]
    config = load_config(resolve_config(model))
    made = planning.plan(config, hardware, chosen, context=min(context, config.context))
    print(planning.describe(config, hardware, chosen, made))
