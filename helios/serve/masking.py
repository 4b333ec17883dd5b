# Generated from notebooks/22_structured.ipynb by `helios export`; edit the notebook.
"""The masks of one model: which ids are text, what a compiled grammar allows of them, and thoughts before an answer."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from helios.engine.constraint import Constraint
from helios.model.masks import Mask, pack_mask
from helios.model.tokenizer import Tokenizer
from helios.serve.reasoning import ThinkTags
from helios.serve.trial import GrammarError, LongestMatch, Vocabulary

__all__ = ["AfterThoughts", "Alphabet", "ExactSpelling", "GrammarConstraint", "vocabulary_of"]


class ExactSpelling:
    """Spells a text in the tokenizer's own ids, if their bytes are those of the text, else in any that are.

    A SentencePiece tokenizer puts a blank before a text's first word, and others normalise.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: tuple[bytes, ...]) -> None:
        self._tokenizer, self._tokens, self._other = tokenizer, tokens, LongestMatch(tokens)

    def __call__(self, text: bytes) -> list[int]:
        ids = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        tokens = self._tokens
        exact = all(number < len(tokens) for number in ids) and b"".join(tokens[number] for number in ids) == text
        return ids if exact else self._other(text)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, stops: tuple[int, ...]) -> Vocabulary:
    """The text of each of a model's `vocab_size` ids. Control tokens and padding are no text, so they have none.

    `stops` are the ids that end a text. A model without one gets an id of its own behind the vocabulary, which is never
    sampled: then only a grammar's own end ends a text.
    """
    ends = tuple(sorted({stop for stop in stops if 0 <= stop < vocab_size})) or (vocab_size,)
    silent = {number for number in range(tokenizer.vocab_size) if tokenizer.is_special(number)} | set(ends)
    texts = (b"" if number in silent else tokenizer.token_bytes(number) for number in range(max(vocab_size, *ends) + 1))
    return Vocabulary(tuple(texts)[: max(vocab_size, ends[-1] + 1)], ends)


class Alphabet:
    """What all constraints of one model share: its ids as llguidance sees them, and masks [ceil(V / 32)] of them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stops: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.vocabulary = vocabulary_of(tokenizer, vocab_size, stops)
        tokens = self.vocabulary.tokens
        self.compiled: LLTokenizer = self.vocabulary.compiled(ExactSpelling(tokenizer, tokens))
        self.text = pack_mask([number for number in range(vocab_size) if tokens[number]], vocab_size)
        self.ends = pack_mask([stop for stop in self.vocabulary.stops if stop < vocab_size], vocab_size)


class GrammarConstraint:
    """A `Constraint` that keeps one choice to a compiled grammar. One thread at a time.

    Text ids are allowed as the grammar says, ids that end the text exactly when it is complete, and no others ever.
    Raises GrammarError when the grammar reaches a limit of the library, or leaves nothing to say.
    """

    def __init__(self, matcher: LLMatcher, alphabet: Alphabet) -> None:
        self._matcher, self._alphabet = matcher, alphabet

    def mask(self) -> Mask:
        """The ids that may come next, as bits [ceil(V / 32)]; works without the interpreter's lock."""
        shared = self._alphabet
        words = np.frombuffer(self._matcher.compute_bitmask(), "<i4")[: len(shared.text)] & shared.text
        self._raise_error()
        if self._matcher.is_accepting():
            return words | shared.ends
        if not words.any():
            raise GrammarError("the grammar leaves no token to say, and is not complete")
        return words

    def accept(self, token_id: int) -> bool:
        """Take in the chosen token; True when nothing can follow it."""
        self._matcher.consume_token(token_id)
        self._raise_error()
        return self._matcher.is_stopped()

    def fork(self) -> Self:
        """The same grammar at the same place, going its own way from here."""
        return type(self)(self._matcher.deep_copy(), self._alphabet)

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(" ".join(self._matcher.get_error().split())[:200])


class AfterThoughts:
    """Any text inside a think block, and the inner constraint behind it. `place`: "start" may open a block, or not."""

    def __init__(self, inner: Constraint, tags: ThinkTags, text: Mask, place: Literal["start", "thought", "answer"]):
        self._inner, self._tags, self._text, self._place = inner, tags, text, place

    def mask(self) -> Mask | None:
        """As the inner one's; any text, but no end, inside the block."""
        if self._place == "thought":
            return self._text
        mask = self._inner.mask()
        if self._place == "start" and mask is not None:
            return mask | pack_mask([self._tags.think], 32 * len(mask))
        return mask

    def accept(self, token_id: int) -> bool:
        """Take in the chosen token; inside the block only its closing tag matters."""
        if self._place == "start":
            self._place = "thought" if token_id == self._tags.think else "answer"
        if self._place == "answer":
            return self._inner.accept(token_id)
        if token_id == self._tags.thought:
            self._place = "answer"
        return False

    def fork(self) -> Self:
        """A copy, the inner one with it."""
        return type(self)(self._inner.fork(), self._tags, self._text, self._place)
