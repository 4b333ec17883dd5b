"""Compiling what strangers send: nothing of it may crash, block or slow down anybody else."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from helios.model.tokenizer import Tokenizer
from helios.serve import structured
from helios.serve.errors import APIError
from helios.serve.grammar import Grammar, response_grammar
from helios.serve.structured import Compiler
from helios.serve.trial import Trial, TrialLost
from tests.unit.structured_cases import as_format

Test = Callable[[Compiler], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def tokenizer(embedded: Path) -> Tokenizer:
    return Tokenizer.from_folder(embedded)


def run(tokenizer: Tokenizer, test: Test, **options: Any) -> None:
    """`test` with a compiler of its own, in a loop of its own."""

    async def whole() -> None:
        compiler = Compiler(tokenizer, tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids, **options)
        try:
            await test(compiler)
        finally:
            compiler.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def schema(value: dict[str, Any]) -> Grammar:
    grammar = response_grammar(as_format(value))
    assert grammar is not None
    return grammar


HARMLESS = {"type": "object", "properties": {"a": {"type": "integer"}}}
fresh = itertools.count()


def harmless() -> Grammar:
    """One that no cache has seen."""
    return schema({**HARMLESS, "title": f"number {next(fresh)}"})


def hanging(number: int = 0) -> Grammar:
    """Intersects patterns until the sun is cold."""
    return schema(
        {"title": str(number), "allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 30)]}
    )


def crashing() -> Grammar:
    """Recursion over 8,000 references overflows the stack of whoever compiles it."""
    links: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3000)
    }
    return schema({"$ref": "#/$defs/d0", "$defs": {**links, "d3000": {"type": "string"}}})


async def refused(compiler: Compiler, grammar: Grammar) -> APIError:
    with pytest.raises(APIError) as caught:
        await compiler.constraint(grammar)
    return caught.value


@asynccontextmanager
async def steady_loop(limit_s: float = 0.1) -> AsyncIterator[None]:
    """Fails if the event loop stood still meanwhile."""
    gaps, last, stop = [0.0], time.perf_counter(), False

    async def tick() -> None:
        nonlocal last
        while not stop:
            await asyncio.sleep(0.002)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    task = asyncio.create_task(tick())
    yield
    stop = True
    await task
    gaps.sort()
    assert gaps[int(0.99 * len(gaps))] < limit_s, f"the loop stood still for {gaps[-1]:.2f} s"


def test_what_hangs_is_ended_and_what_crashes_takes_nobody_along(tokenizer: Tokenizer) -> None:
    async def test(compiler: Compiler) -> None:
        await compiler.constraint(harmless())
        async with steady_loop():
            late, dead = await asyncio.gather(refused(compiler, hanging()), refused(compiler, crashing()))
        assert late.status == dead.status == 400 and late.param == "response_format"
        assert "0.5 seconds" in late.message and "recursion" in dead.message
        await compiler.constraint(harmless())

    run(tokenizer, test, time_limit_s=0.5)


def test_a_hostile_grammar_costs_once_and_others_pass_it_by(tokenizer: Tokenizer) -> None:
    async def test(compiler: Compiler) -> None:
        await compiler.constraint(harmless())
        crowd = [asyncio.create_task(refused(compiler, hanging())) for _ in range(20)]
        await asyncio.sleep(0.05)
        start = time.perf_counter()
        await compiler.constraint(harmless())  # its lane may have to start first
        assert time.perf_counter() - start < 1.0
        assert len({error.message for error in await asyncio.gather(*crowd)}) == 1
        start = time.perf_counter()
        await refused(compiler, hanging())
        assert time.perf_counter() - start < 0.1, "the refusal is kept"

    run(tokenizer, test, time_limit_s=2.0)


def test_who_leaves_frees_the_lane(tokenizer: Tokenizer) -> None:
    async def test(compiler: Compiler) -> None:
        await compiler.constraint(harmless())
        crowd = [asyncio.create_task(compiler.constraint(hanging(i))) for i in range(6)]
        await asyncio.sleep(0.2)
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        start = time.perf_counter()
        await compiler.constraint(harmless())
        assert time.perf_counter() - start < 5.0, "the time limit of 30 s would have to pass first"
        again = asyncio.create_task(compiler.constraint(hanging(0)))
        await asyncio.sleep(0.2)
        assert not again.done(), "what was abandoned is no refusal"
        again.cancel()

    run(tokenizer, test, time_limit_s=30.0)


def test_one_who_stays_keeps_the_job_alive(tokenizer: Tokenizer) -> None:
    async def test(compiler: Compiler) -> None:
        await compiler.constraint(harmless())
        grammar = schema({"enum": [f"entry {i} of a list" for i in range(3000)]})
        leaving, staying = (asyncio.create_task(compiler.constraint(grammar)) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await staying).mask() is not None

    run(tokenizer, test)


def test_the_queue_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "MAX_JOBS", 3)

    async def test(compiler: Compiler) -> None:
        crowd = [asyncio.create_task(compiler.constraint(hanging(i))) for i in range(3)]
        await asyncio.sleep(0.05)
        error = await refused(compiler, harmless())
        assert error.status == 503 and error.headers["retry-after"]
        for task in crowd:
            task.cancel()

    run(tokenizer, test, time_limit_s=30.0)


def test_the_least_used_grammar_leaves_the_cache(tokenizer: Tokenizer) -> None:
    async def test(compiler: Compiler) -> None:
        first, second, third = harmless(), harmless(), harmless()
        for grammar in (first, second, first, third):
            await compiler.constraint(grammar)
        assert list(compiler._cache) == [first, third]

    run(tokenizer, test, cache_entries=2)


def test_constraints_of_one_grammar_are_strangers(tokenizer: Tokenizer) -> None:
    async def test(compiler: Compiler) -> None:
        grammar = harmless()
        one, two = [await compiler.constraint(grammar) for _ in range(2)]
        before = two.mask()
        one.accept(tokenizer.encode("{")[0])
        after = two.mask()
        assert before is not None and after is not None and (before == after).all()

    run(tokenizer, test)


def test_several_loops_one_after_another(tokenizer: Tokenizer) -> None:
    compiler = Compiler(tokenizer, tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    for _ in range(2):
        asyncio.run(compiler.constraint(harmless()))
    compiler.close()


def test_closing_answers_those_who_wait(tokenizer: Tokenizer) -> None:
    async def test(compiler: Compiler) -> None:
        crowd = [asyncio.create_task(refused(compiler, hanging(i))) for i in range(4)]
        await asyncio.sleep(0.3)
        compiler.close()
        assert {error.status for error in await asyncio.wait_for(asyncio.gather(*crowd), 5)} == {503}

    run(tokenizer, test, time_limit_s=30.0)


def test_a_process_that_died_is_replaced_and_memory_is_bounded(tokenizer: Tokenizer) -> None:
    compiler = Compiler(tokenizer, tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    trial = Trial(compiler.alphabet().vocabulary)
    assert trial.alive and trial.judge("regex", "a+", 5) is None
    assert "regex" in (trial.judge("regex", "(a", 5) or "")
    threading.Timer(0.3, trial.kill).start()
    with pytest.raises(TrialLost) as lost:
        trial.judge(hanging().kind, hanging().source, 20)
    assert not lost.value.late and not trial.alive
    trial.close()


def test_masks_of_one_grammar_in_many_threads(tokenizer: Tokenizer) -> None:
    async def test(compiler: Compiler) -> None:
        constraints = [await compiler.constraint(schema({"type": "object"})) for _ in range(8)]
        ids = tokenizer.encode('{"key": [1, 2, {"inner": "text and more text"}]}')
        seen: list[list[int]] = [[] for _ in constraints]

        def walk(number: int) -> None:
            for token in ids:
                mask = constraints[number].mask()
                assert mask is not None
                seen[number].append(int(mask.view("<u4").sum()))
                constraints[number].accept(token)

        threads = [threading.Thread(target=walk, args=(number,)) for number in range(len(constraints))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(each == seen[0] for each in seen) and len(seen[0]) == len(ids)

    run(tokenizer, test)
