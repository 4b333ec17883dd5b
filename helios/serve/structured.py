# Generated from notebooks/22_structured.ipynb by `helios export`; edit the notebook.
"""Structured output: answers that programs can read.

A grammar decides which tokens may come next: one bit for each, computed while the model computes,
so that an answer is valid JSON, fits a schema or matches a pattern, whatever the model would rather
say. Grammars come from strangers, so each is first compiled where a crash or a hang hurts nobody.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from llguidance import LLMatcher

from helios.engine.constraint import Constraint
from helios.model.tokenizer import Tokenizer
from helios.serve.errors import APIError, bad_request, unavailable
from helios.serve.grammar import Grammar, explain
from helios.serve.masking import AfterThoughts, Alphabet, GrammarConstraint
from helios.serve.reasoning import think_tags
from helios.serve.trial import GrammarError, Trial, TrialLost, build_matcher

__all__ = ["Compiler", "DIED", "Job", "LATE", "MAX_JOBS"]


@dataclass
class Job:
    """One grammar on its way: how many wait for it, and the process that is at it."""

    grammar: Grammar
    waiting: int = 0
    abandoned: bool = False
    trial: Trial | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    future: Future[LLMatcher | APIError] = field(default_factory=Future)

    def hold(self, trial: Trial | None) -> None:
        """Note which process is at it; None: none any more."""
        with self.lock:
            self.trial = trial
            if trial is not None and self.abandoned:
                trial.kill()

    def abandon(self) -> None:
        """Nobody waits any more: end what is under way."""
        with self.lock:
            self.abandoned = True
            if self.trial is not None:
                self.trial.kill()

    def settle(self, outcome: LLMatcher | APIError | Exception) -> None:
        """Tell everybody who waits; only the first word counts. What is no APIError is raised where they wait."""
        with self.lock:
            if self.future.done():
                return
            if isinstance(outcome, Exception) and not isinstance(outcome, APIError):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)


LATE = "it takes longer than {0:g} seconds to compile: make it smaller"
DIED = "compiling it takes more memory or deeper recursion than is allowed: make it smaller"
MAX_JOBS = 64


class Compiler:
    """Grammars to constraints, for one model: tried in a process of its own, then compiled in a thread, then kept.

    `time_limit_s` bounds a trial, `cache_entries` how many grammars are kept (least recently used leave), refused ones
    too. `lanes` grammars are compiled at a time. Everything starts when it is first needed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        eos_token_ids: tuple[int, ...] = (),
        time_limit_s: float = 3.0,
        cache_entries: int = 64,
        lanes: int = 2,
    ) -> None:
        self._tokenizer, self._vocab_size, self._stops = tokenizer, vocab_size, tuple(eos_token_ids)
        self._time_limit_s, self._cache_entries = time_limit_s, cache_entries
        self._cache: OrderedDict[Grammar, LLMatcher | APIError] = OrderedDict()
        self._jobs: dict[Grammar, Job] = {}
        self._lock = threading.RLock()
        self._alphabet: Alphabet | None = None
        self._trials = threading.local()
        self._started: list[Trial] = []
        self._closed = False
        self._threads = ThreadPoolExecutor(lanes, "helios-grammars")

    def alphabet(self) -> Alphabet:
        """The model's ids, made once: about a fifth of a second for 50,000 of them."""
        with self._lock:
            if self._alphabet is None:
                self._alphabet = Alphabet(self._tokenizer, self._vocab_size, self._stops)
            return self._alphabet

    def _trial(self) -> Trial:
        """This thread's trial process, started again if the last one is gone."""
        trial: Trial | None = getattr(self._trials, "mine", None)
        if trial is not None and not trial.alive:
            trial.close()
            trial = None
        if trial is None:
            trial = self._trials.mine = Trial(self.alphabet().vocabulary)
            with self._lock:
                self._started = [each for each in self._started if each.alive] + [trial]
                if self._closed:
                    trial.kill()
        return trial

    def _compile(self, job: Job) -> LLMatcher | APIError:
        """In a thread of ours: try it in the process, then compile it here."""
        if job.abandoned:
            return unavailable("Nobody waits for this grammar any more.")
        grammar, trial = job.grammar, self._trial()
        try:
            job.hold(trial)
            error = trial.judge(grammar.kind, grammar.source, self._time_limit_s)
        except TrialLost as lost:
            reason = LATE.format(self._time_limit_s) if lost.late else DIED
            return bad_request(f"`{grammar.param}`: {reason}.", grammar.param)
        finally:
            job.hold(None)
        if error is not None:
            return explain(error, grammar.param)
        try:
            matcher = build_matcher(self.alphabet().compiled, grammar.kind, grammar.source)
            GrammarConstraint(matcher, self.alphabet()).mask()  # is there a way to begin?
            return matcher
        except GrammarError as found:
            return explain(str(found), grammar.param)

    def _finish(self, job: Job) -> None:
        try:
            outcome = self._compile(job)
        except Exception as error:
            self._forget(job)
            job.settle(error)
            return
        with self._lock:
            self._forget(job)
            if not job.abandoned:
                self._cache[job.grammar] = outcome
                while len(self._cache) > self._cache_entries:
                    self._cache.popitem(last=False)
        job.settle(outcome)

    def _forget(self, job: Job) -> None:
        with self._lock:
            if self._jobs.get(job.grammar) is job:
                del self._jobs[job.grammar]

    def _begin(self, grammar: Grammar) -> Job | LLMatcher | APIError:
        """What is known of it already, or a job that will tell."""
        with self._lock:
            known = self._cache.get(grammar)
            if known is not None:
                self._cache.move_to_end(grammar)
                return known
            job = self._jobs.get(grammar)
            if job is None:
                if len(self._jobs) >= MAX_JOBS:
                    raise unavailable("Too many grammars are waiting to be compiled; try again later.")
                job = self._jobs[grammar] = Job(grammar)
                self._threads.submit(self._finish, job)
            job.waiting += 1
            return job

    async def _compiled(self, grammar: Grammar) -> LLMatcher:
        job = self._begin(grammar)
        if isinstance(job, Job):
            try:
                job_outcome = await asyncio.shield(asyncio.wrap_future(job.future))
            finally:
                with self._lock:
                    job.waiting -= 1
                    if not job.waiting and not job.future.done():
                        self._forget(job)
                        job.abandon()
        outcome = job_outcome if isinstance(job, Job) else job
        if isinstance(outcome, APIError):
            raise APIError(outcome.status, outcome.message, outcome.kind, outcome.code, grammar.param)
        return outcome

    async def constraint(
        self, grammar: Grammar, thoughts: Literal["open", "closed", "neither"] = "closed"
    ) -> Constraint:
        """A constraint at the beginning of `grammar`. Raises a 400 if it does not compile or takes too long.

        `thoughts` says how the prompt leaves the think block (see `prompt_leaves`): the grammar begins behind it.
        Cancel the waiting and, unless others wait for the same, the compiling ends too.
        """
        matcher = await self._compiled(grammar)
        alphabet = self.alphabet()
        inner = GrammarConstraint(matcher.deep_copy(), alphabet)
        tags = think_tags(self._tokenizer) if thoughts != "closed" else None
        if tags is None:
            return inner
        return AfterThoughts(inner, tags, alphabet.text, "thought" if thoughts == "open" else "start")

    def close(self) -> None:
        """End all trials; whoever waits gets an error."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            for job in self._jobs.values():
                job.abandon()
                job.settle(unavailable("The server is shutting down."))
            for trial in self._started:
                trial.kill()
