"""llguidance and xgrammar side by side: what a grammar costs to compile, and a mask to compute.

    python scripts/bench_grammars.py smollm2 [MODEL …] --out chapters/results/grammars.json

Each library follows the same texts, token by token, in the same vocabulary. xgrammar is not a dependency of Helios:
without it only llguidance is measured. Times are medians of five runs in milliseconds, each with a compiler that has
seen nothing yet; a mask's first time at a place is what counts, because an answer is at each place once.
"""

import argparse
import importlib.metadata
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from helios.bench.ledger import commit_name, cpu_name
from helios.model.files import resolve_model
from helios.model.tokenizer import Tokenizer
from helios.serve.masking import Alphabet
from helios.serve.trial import GrammarError, build_matcher

RUNS = 5
TEXT = 'A text of several words, with \\"quotes\\" and änderungen.'
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "email": {"type": "string", "format": "email"}},
    "required": ["name", "email"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"},
        "buyer": {"$ref": "#/$defs/person"},
        "items": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"what": {"type": "string"}, "count": {"type": "integer"}, "price": {"type": "number"}},
                "required": ["what", "count", "price"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "buyer", "items"],
    "additionalProperties": False,
    "$defs": {"person": PERSON},
}
NAMES = {"enum": [f"product number {number} of a long list" for number in range(2000)]}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "any object": ({"type": "object"}, f'{{"a": [1, 2.5, true, null], "b": {{"c": "{TEXT}"}}}}'),
    "three fields": (WEATHER, f'{{"city": "{TEXT}", "unit": "celsius", "days": 12}}'),
    "nested order": (
        ORDER,
        '{"id": "DE-12345", "buyer": {"name": "Ada Lovelace", "email": "ada@example.org"}, "items": '
        f'[{{"what": "{TEXT}", "count": 3, "price": 12.5}}, {{"what": "tea", "count": 1, "price": 4}}]}}',
    ),
    "one of 2,000": (NAMES, '"product number 1234 of a long list"'),
}
REFUSALS: dict[str, dict[str, Any]] = {
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "if/then": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "overlapping oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "unknown format": {"type": "string", "format": "isbn"},
    "remote $ref": {"$ref": "http://127.0.0.1:9/schema.json"},
    "multipleOf": {"type": "integer", "multipleOf": 7},
}


def chain(depth: int) -> dict[str, Any]:
    """Definitions that refer to each other, `depth` of them."""
    links = {f"d{i}": {"type": "object", "properties": {"next": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{depth}": {"type": "string"}}}


HOSTILE: dict[str, dict[str, Any]] = {
    "29 patterns at once": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 30)]},
    "a choice in 20 choices": {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(2)]}
            for i in range(20)
        ]
    },
    "a window of 30 letters": {"type": "string", "pattern": "^(a|b)*a(a|b){30}$"},
    "ten billion repeats": {"type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100}){1,100}$"},
    "a million items": {"type": "array", "items": {"type": "string"}, "minItems": 10**6},
    "a text of a million": {"type": "string", "minLength": 10**6},
    "5,000 links": chain(5000),
    "itself": {"$ref": "#"},
}
PATIENCE_S = 10.0


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and the result."""
    start = time.perf_counter()
    result = work()
    return 1e3 * (time.perf_counter() - start), result


def follow_llguidance(alphabet: Alphabet, schema: dict[str, Any], ids: Sequence[int]) -> tuple[float, list[float]]:
    """Compile, then one mask before each of `ids`: milliseconds of the one, and of each of the others."""
    source = json.dumps({**schema, "x-guidance": {"whitespace_pattern": r" |\n {0,16}"}})
    compiling, matcher = timed(lambda: build_matcher(alphabet.compiled, "json_schema", source))
    masks = []
    for token in ids:
        masks.append(timed(matcher.compute_bitmask)[0])
        assert matcher.consume_token(token), f"token {token} is not allowed"
    return compiling, masks


class XGrammar:
    """The other library, if it is there."""

    def __init__(self, alphabet: Alphabet) -> None:
        import xgrammar

        self.library = xgrammar
        tokens, stops = list(alphabet.vocabulary.tokens), list(alphabet.vocabulary.stops)
        self.info = xgrammar.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=stops)
        self.words = np.zeros((1, -(-len(tokens) // 32)), np.int32)

    def compiled(self, schema: dict[str, Any]) -> Any:
        """A grammar from a compiler that has seen nothing."""
        compiler = self.library.GrammarCompiler(self.info, max_threads=2, cache_enabled=False)
        return compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, max_whitespace_cnt=17)

    def follow(self, schema: dict[str, Any], ids: Sequence[int]) -> tuple[float, list[float]]:
        """As `follow_llguidance`."""
        import torch

        words = torch.from_numpy(self.words)
        compiling, grammar = timed(lambda: self.compiled(schema))
        matcher, masks = self.library.GrammarMatcher(grammar), []
        for token in ids:
            masks.append(timed(lambda: matcher.fill_next_token_bitmask(words, 0))[0])
            assert matcher.accept_token(token), f"token {token} is not allowed"
        return compiling, masks


def summary(runs: Sequence[tuple[float, list[float]]]) -> dict[str, float]:
    """Medians over the runs; of the masks their mean, and the slowest."""
    middle = statistics.median
    return {
        "compile_ms": round(middle(run[0] for run in runs), 3),
        "mask_mean_ms": round(middle(statistics.mean(run[1]) for run in runs), 4),
        "mask_max_ms": round(middle(max(run[1]) for run in runs), 3),
        "masks": len(runs[0][1]),
    }


def silently(work: Callable[[], Any]) -> str:
    """Whether a schema is refused or taken."""
    try:
        work()
    except (GrammarError, RuntimeError, ValueError) as error:
        return f"refused: {' '.join(str(error).split())[-120:]}"
    return "accepted"


def survive(model: str, library: str, case: str) -> str:
    """What becomes of a hostile schema, in a process of its own: refused, accepted, hung or dead, and how fast."""
    command = [sys.executable, *sys.orig_argv[1:2], model, "--hostile", library, case]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S + 10)
    except subprocess.TimeoutExpired:
        return f"no answer in {PATIENCE_S:g} s"
    return done.stdout.strip().splitlines()[-1] if not done.returncode else f"died ({done.returncode})"


def try_hostile(model: str, library: str, case: str) -> None:
    """In that process: compile it and compute one mask."""
    tokenizer = Tokenizer.from_folder(resolve_model(model) if not Path(model).is_dir() else Path(model))
    alphabet, schema = Alphabet(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids), HOSTILE[case]
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
    if library == "llguidance":
        spent, said = timed(
            lambda: silently(lambda: build_matcher(alphabet.compiled, "json_schema", json.dumps(schema)))
        )
    else:
        other = XGrammar(alphabet)
        spent, said = timed(lambda: silently(lambda: other.follow(schema, [])))
    print(f"{said.partition(':')[0]} after {spent:.0f} ms")


def measure(name: str) -> dict[str, Any]:
    """One model's vocabulary, with each library."""
    tokenizer = Tokenizer.from_folder(resolve_model(name) if not Path(name).is_dir() else Path(name))
    size = tokenizer.vocab_size
    alphabet = Alphabet(tokenizer, size, tokenizer.eos_token_ids)
    found: dict[str, Any] = {"vocabulary": size, "cases": {}}
    other: XGrammar | None = None
    try:
        other = XGrammar(alphabet)
    except ImportError:
        print("xgrammar is not installed: only llguidance is measured")
    for case, (schema, text) in CASES.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        runs = [follow_llguidance(alphabet, schema, ids) for _ in range(RUNS)]
        found["cases"][case] = {"llguidance": summary(runs)}
        if other is not None:
            found["cases"][case]["xgrammar"] = summary([other.follow(schema, ids) for _ in range(RUNS)])
        print(name, case, found["cases"][case])
    found["keywords"] = {}
    for keyword, schema in REFUSALS.items():
        source = json.dumps(schema)
        said = {"llguidance": silently(lambda source=source: build_matcher(alphabet.compiled, "json_schema", source))}
        if other is not None:
            said["xgrammar"] = silently(lambda schema=schema: other.compiled(schema))
        found["keywords"][keyword] = said
        print(keyword, said)
    found["hostile"] = {}
    for case in HOSTILE:
        libraries = ["llguidance", "xgrammar"] if other is not None else ["llguidance"]
        found["hostile"][case] = {library: survive(name, library, case) for library in libraries}
        print(case, found["hostile"][case])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="a model's name or folder, as NAME=FOLDER to call it by another name")
    parser.add_argument("--out", type=Path, default=Path("chapters/results/grammars.json"))
    parser.add_argument("--hostile", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.hostile:
        return try_hostile(asked.models[0], *asked.hostile)
    versions = {}
    for package in ("llguidance", "xgrammar"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    result: dict[str, Any] = {"cpu": cpu_name(), "versions": versions, "commit": commit_name(Path.cwd()), "runs": RUNS}
    result |= {"date": datetime.now(UTC).date().isoformat(), "models": {}}
    for model in asked.models:
        title, _, folder = model.rpartition("=")
        result["models"][title or folder] = measure(folder)
    asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
