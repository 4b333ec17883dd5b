# Generated from notebooks/22_structured.ipynb by `helios export`; edit the notebook.
"""Compiling a client's grammar, and a process that tries it first: what crashes or hangs there costs nobody else."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

__all__ = [
    "GrammarError",
    "LIMITS",
    "LongestMatch",
    "MEMORY",
    "STACK",
    "START",
    "Trial",
    "TrialLost",
    "Vocabulary",
    "build_matcher",
    "confine",
    "definition",
    "run_trials",
    "serve_trials",
]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A model's ids as a grammar sees them: the bytes of each, b"" for ids that are no text; `stops` end the text."""

    tokens: tuple[bytes, ...]
    stops: tuple[int, ...]

    def compiled(self, spell: Callable[[bytes], list[int]]) -> LLTokenizer:
        """llguidance's form. `spell` gives ids for a text: where a grammar leaves no choice, they are forced."""
        tokens = list(self.tokens)

        class Wrapped:
            eos_token_id, bos_token_id, special_token_ids = self.stops[0], None, list(self.stops)

            def __init__(self) -> None:
                self.tokens = tokens

            def __call__(self, text: bytes | str) -> list[int]:
                return spell(text if isinstance(text, bytes) else text.encode())

        return LLTokenizer(TokenizerWrapper(Wrapped()), eos_token=list(self.stops))


class LongestMatch:
    """Spells a text in ids, the longest token first: some spelling, where the tokenizer's own is not at hand."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._ids = {spelled: number for number, spelled in reversed(list(enumerate(tokens))) if spelled}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            piece = text[: self._longest]
            while piece and piece not in self._ids:
                piece = piece[:-1]
            if not piece:
                break
            ids.append(self._ids[piece])
            text = text[len(piece) :]
        return ids


LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=20_000)


class GrammarError(ValueError):
    """What the library said about a grammar."""


def definition(kind: str, source: str) -> str:
    """A grammar of one of the kinds of `Grammar`, in llguidance's own form. It is not checked yet."""
    if kind in ("json_object", "json_schema"):
        return LLMatcher.grammar_from_json_schema(source)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(source))
        return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")
    return LLMatcher.grammar_from_lark(any_to_lark(source))


def build_matcher(tokenizer: LLTokenizer, kind: str, source: str) -> LLMatcher:
    """Compile, and compute the first mask, which finds grammars that no text satisfies. Raises GrammarError."""
    try:
        matcher = LLMatcher(tokenizer, definition(kind, source), log_level=0, limits=LIMITS)
    except Exception as error:
        raise GrammarError(str(error)) from error
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher


MEMORY = 512 * 2**20  # bytes that a trial may take beyond what the process needs anyway
STACK = 2**20  # bytes of a trial's stack: less than a thread of the server has, so what fits here fits there


def confine() -> None:
    """Bound this process's memory and leave no core file; where the system cannot, the time limit remains."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as numbers:
            used = int(numbers.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def serve_trials() -> None:
    """The process: a vocabulary on the first line of stdin, then a grammar a line; an answer a line on stdout."""
    words = json.loads(sys.stdin.buffer.readline())
    tokens = tuple(base64.b64decode(word) for word in words["tokens"])
    tokenizer = Vocabulary(tokens, tuple(words["stops"])).compiled(LongestMatch(tokens))
    confine()
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        task = json.loads(line)
        if hasattr(signal, "setitimer"):  # whoever asked may be gone by then
            signal.setitimer(signal.ITIMER_REAL, task["limit_s"] + 1)
        error = None
        try:
            build_matcher(tokenizer, task["kind"], task["source"])
        except GrammarError as found:
            error = str(found)[:2000]
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"error": error}), flush=True)


def run_trials() -> None:
    """Serve trials in a thread with a small stack."""
    threading.stack_size(STACK)
    worker = threading.Thread(target=serve_trials)
    worker.start()
    worker.join()


class TrialLost(Exception):
    """The process died over a grammar, or was ended: `late` when its time was up."""

    def __init__(self, late: bool) -> None:
        super().__init__("time was up" if late else "the process died")
        self.late = late


START = "import sys; sys.path.insert(0, sys.argv[1]); from helios.serve.trial import run_trials; run_trials()"


class Trial:
    """A process in which grammars of one vocabulary are compiled for the first time. One thread at a time.

    A child of its own, not a thread: a thread cannot be stopped, and a stack that overflows ends its whole process.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        package = find_spec("helios")
        assert package is not None and package.origin is not None
        command = [sys.executable, "-P", "-c", START, str(Path(package.origin).parents[1])]
        self._ended = False
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
        )
        tokens = [base64.b64encode(token).decode() for token in vocabulary.tokens]
        self._ask({"tokens": tokens, "stops": vocabulary.stops}, limit_s=60.0)

    @property
    def alive(self) -> bool:
        """Whether it can judge another grammar."""
        return not self._ended and self._process.poll() is None

    def _ask(self, message: dict[str, Any], limit_s: float) -> bytes:
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        answer = b""
        with suppress(OSError):
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        timer.cancel()
        if not answer.endswith(b"\n"):
            self.kill()
            raise TrialLost(late.is_set())
        return answer

    def judge(self, kind: str, source: str, limit_s: float) -> str | None:
        """Compile it there: None if all is well, else what the library said. Raises TrialLost."""
        reply = self._ask({"kind": kind, "source": source, "limit_s": limit_s}, limit_s)
        error: str | None = json.loads(reply)["error"]
        return error

    def kill(self) -> None:
        """End the process now, from any thread; whoever waits for its answer gets TrialLost."""
        self._ended = True  # it may take a moment until it has
        self._process.kill()

    def close(self) -> None:
        """End the process and wait until it has left."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.wait()
