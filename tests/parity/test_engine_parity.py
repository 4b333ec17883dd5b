"""The engine against transformers' generate(): fp32, greedy, token for token, by every runner."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.engine.build import choose_runner
from helios.engine.config import EngineConfig
from helios.engine.engine import Engine
from helios.engine.sequence import Request, TokenEvent
from helios.kv.paged import PagedKVCache
from helios.kv.pages import PagePool
from helios.kv.prefix import PrefixCache
from helios.model.sampling import SamplingParams
from helios.model.tokenizer import Tokenizer
from helios.model.transformer import Transformer, load_transformer
from tests.answers import drain

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
LENGTHS = (1, 2, 255, 256, 257, 511, 512, 513, 700)
NEW = 48
MARGIN = 1e-3  # between the two likeliest logits: far more than fp32 sums in another order can differ
CHATS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three prime numbers.",
    "Explain in two sentences why the sky is blue.",
    "Translate 'good morning' into Spanish.",
)


@dataclass
class Answer:
    """What transformers says: the greedy tokens, and the whole distribution before each of them."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor  # [NEW, V]
    margin: float


def greedy_answer(model: Any, prompt: list[int], new: int = NEW) -> Answer:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=None,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(out.logits).float()
    best = logits.topk(2).values
    return Answer(
        prompt, out.sequences[0, len(prompt) :].tolist(), logits.log_softmax(-1), float((best[:, 0] - best[:, 1]).min())
    )


def reference_model(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def answers(tiny_folder: Callable[[str], Path]) -> Callable[[str], dict[int, Answer]]:
    """`answers(family)[prompt length]`, each computed once a session, with prompts whose answers are no near-ties."""
    known: dict[str, dict[int, Answer]] = {}

    def find(family: str) -> dict[int, Answer]:
        if family not in known:
            model = reference_model(tiny_folder(family))
            known[family] = {length: clear_answer(model, length) for length in LENGTHS}
        return known[family]

    return find


def clear_answer(model: Any, length: int) -> Answer:
    for seed in range(50):
        answer = greedy_answer(model, random.Random(1000 * length + seed).choices(range(250), k=length))
        if answer.margin > MARGIN:
            return answer
    raise AssertionError("no prompt with a clear answer: give the tiny models larger weights")


def engine_over(model: Transformer, *, pages: int = 80, prefix: bool = True, **settings: Any) -> Engine:
    pool, config = PagePool(pages + 1), EngineConfig(debug_checks=True, **settings)
    cache = PagedKVCache(model.config.kv_spec, pages + 1, query_heads=model.config.heads)
    try:
        _, runner, _ = choose_runner(model, cache, config)
    except ValueError as obstacle:
        pytest.skip(str(obstacle))
    return Engine(model, cache, pool, PrefixCache(pool) if prefix else None, config, runner=runner)


@pytest.fixture(params=["eager", "native"])
def engine_of(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Callable[..., Engine]:
    """`engine_of(family, **settings)`: an engine over a fresh tiny model (a runner may take the weights over)."""

    def build(family: str, **settings: Any) -> Engine:
        model = load_transformer(tiny_folder(family), device="cpu", dtype=torch.float32)
        return engine_over(model, runner=request.param, **settings)

    return build


def ask(name: str, answer: Answer, **params: Any) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, **params)
    return Request(name, answer.prompt, sampling, arrival_s=0.0)


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_cold_and_warm(family: str, answers: Any, engine_of: Any) -> None:
    engine = engine_of(family)
    for temperature in ("cold", "warm"):
        for length, answer in answers(family).items():
            engine.admit(ask(str(length), answer))
            events = drain(engine)[str(length), 0]
            assert tokens_of(events) == answer.tokens, (temperature, length)
            hit = (length - 1) // 256 * 256 if temperature == "warm" else 0
            assert events[-1].cached_tokens == hit


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, 256, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_in_any_chunks(family: str, chunk: int, prefix: bool, answers: Any, engine_of: Any) -> None:
    lengths = LENGTHS if chunk > 1 else LENGTHS[:5]
    engine = engine_of(family, prefix=prefix, prefill_chunk_size=chunk)
    for _ in range(2 if prefix and chunk > 7 else 1):
        for length in lengths:
            engine.admit(ask(str(length), answers(family)[length]))
        events = drain(engine)
        for length in lengths:
            assert tokens_of(events[str(length), 0]) == answers(family)[length].tokens, length


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_arrive_and_leave_while_others_run(family: str, seed: int, answers: Any, engine_of: Any) -> None:
    rng = random.Random(seed)
    engine = engine_of(family, pages=24, max_batch_size=6, prefill_chunk_size=rng.choice([64, 200, 256]))
    known = answers(family)
    queue = [(f"{i}", rng.choice(LENGTHS)) for i in range(20)]
    lengths, cancelled = dict(queue), set()
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    now = 0.0
    while queue or engine.running_count:
        if queue and rng.random() < 0.4:
            name, length = queue[0]
            request = ask(name, known[length], n=rng.choice([1, 1, 2]))
            if engine.can_admit(request):
                engine.admit(request)
                queue.pop(0)
        for event in engine.tick(now):
            events.setdefault((event.request_id, event.index), []).append(event)
        if rng.random() < 0.03 and events:
            name, _ = rng.choice(sorted(events))
            if engine.cancel(name):
                cancelled.add(name)
        now += 0.02
    assert set(lengths) == {name for name, _ in events} | cancelled
    for (name, _), mine in events.items():
        ids = tokens_of(mine)
        assert ids == known[lengths[name]].tokens[: len(ids)]
        assert len(ids) == NEW or name in cancelled


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(family: str, answers: Any, engine_of: Any) -> None:
    engine = engine_of(family, prefill_chunk_size=100)
    for length in LENGTHS:
        engine.admit(ask(str(length), answers(family)[length], logprobs=4))
    for (name, _), mine in drain(engine).items():
        for event, row in zip(mine, answers(family)[int(name)].logprobs, strict=True):
            assert event.logprob is not None
            assert event.logprob.logprob == pytest.approx(row[event.token_id].item(), abs=1e-4)
            likeliest = row.topk(4)
            assert [value for _, value in event.logprob.top] == pytest.approx(likeliest.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("runner", ["eager", "native"])
def test_the_embedded_model_answers_chats_as_transformers_does(embedded: Path, runner: str) -> None:
    tokenizer = Tokenizer.from_folder(embedded)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in CHATS]
    reference = reference_model(embedded)
    wanted = [greedy_answer(reference, prompt) for prompt in prompts]
    del reference
    model = load_transformer(embedded, device="cpu", dtype=torch.float32)
    engine = engine_over(model, pages=16, runner=runner)
    for name, answer in enumerate(wanted):
        engine.admit(ask(str(name), answer, logprobs=0))
    events = drain(engine)
    for name, answer in enumerate(wanted):
        mine = events[str(name), 0]
        assert tokens_of(mine) == answer.tokens, (CHATS[name], answer.margin)
        ours = [event.logprob.logprob for event in mine if event.logprob]
        theirs = [row[token].item() for row, token in zip(answer.logprobs, answer.tokens, strict=True)]
        assert ours == pytest.approx(theirs, abs=1e-4)
