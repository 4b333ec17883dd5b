# Generated from notebooks/04_sampling.ipynb by `helios export`; edit the notebook.
"""Choosing the next token.

The transformer ends in one number per vocabulary entry. This notebook turns those logits into a
choice: greedy or random, penalised, filtered by top-k, top-p and min-p, the same for a seed
whatever shares the batch, and all rows of a batch at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from helios.model.chance import uniform
from helios.model.draw import draw, likeliest, wide_dtype
from helios.model.masks import Mask, forbidden
from helios.model.params import RequestError as RequestError  # engine and server look for both here
from helios.model.params import SamplingParams as SamplingParams

__all__ = [
    "CHUNK",
    "Edits",
    "Filters",
    "HUGE",
    "SampleRow",
    "Sampled",
    "TokenLogprob",
    "choose_edited",
    "choose_picky",
    "draw_batch",
    "draw_from_all",
    "draw_from_list",
    "draw_rows",
    "edit_logits",
    "filter_list",
    "flat_edits",
    "list_width",
    "needs_editing",
    "raw_logprobs",
    "sample",
    "to_draw",
]


def list_width(params: SamplingParams, vocab: int) -> int:
    """How many of the likeliest tokens to look at first for this row; 0 when neither top-k nor top-p filters."""
    if not 0 < params.top_k < vocab and params.top_p >= 1.0:
        return 0
    return min(vocab, 128 if 0 < params.top_k <= 64 else 512)


@dataclass
class Filters:
    """top_k (0 = off), top_p and min_p of several rows, as tensors [S]."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], like: Tensor) -> Filters:
        """For rows of logits [S, V] `like` these; a top_k of V or more is off."""
        top_k = [p.top_k if p.top_k < like.shape[1] else 0 for p in params]
        floats = [[p.top_p for p in params], [p.min_p for p in params]]
        top_p, min_p = torch.tensor(floats, dtype=like.dtype, device=like.device)
        return cls(torch.tensor(top_k, device=like.device), top_p, min_p)

    def rows(self, index: Tensor) -> Filters:
        return Filters(self.top_k[index], self.top_p[index], self.min_p[index])


def filter_list(weights: Tensor, p: Filters, total: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries of weights [S, W] (descending, the first 1) stay, and for which rows [S] the list was long enough.

    `total` [S] is the weight of the whole vocabulary; W may be the whole vocabulary.
    """
    by_k = p.top_k > 0
    kth = weights.gather(1, (p.top_k.clamp(min=1, max=weights.shape[1]) - 1)[:, None])
    kept = (weights >= kth) | ~by_k[:, None]
    inside = torch.where(kept, weights, 0.0).to(wide_dtype(weights))
    ends = inside.cumsum(1)
    goal = p.top_p * torch.where(by_k, ends[:, -1], total.to(ends.dtype))
    kept &= ((ends - inside) < goal[:, None]) | (p.top_p >= 1.0)[:, None]
    kept[:, 0] = True  # a top_p of almost nothing still keeps one
    least = torch.where(kept, weights, math.inf).amin(1)
    least = torch.maximum(least, p.min_p)
    # Long enough when what follows the list is known to be out: it is no likelier than the list's last entry.
    return weights >= least[:, None], weights[:, -1] < least


def draw_from_list(logits: Tensor, p: Filters, uniforms: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """One filtered draw per row of logits [S, V] from its `width` likeliest: ids [S], and whether they sufficed [S]."""
    whole = width >= logits.shape[1]
    values, ids = logits.sort(dim=1, descending=True) if whole else logits.topk(width, dim=1)
    weights = (values - values[:, :1]).exp()
    total = (logits.logsumexp(1) - values[:, 0]).exp() if bool((p.top_k == 0).any()) else weights[:, 0]
    kept, enough = filter_list(weights, p, total)
    ids, order = ids.sort(1)
    column = draw(torch.where(kept, weights, 0.0).gather(1, order), uniforms)
    drawn = ids.gather(1, column.clamp(min=0)[:, None])[:, 0]
    return torch.where(column < 0, column, drawn), enough | whole


def draw_from_all(logits: Tensor, p: Filters, uniforms: Tensor) -> Tensor:
    """One draw per row of logits [S, V] with at most a min-p filter: ids [S]."""
    probs = torch.softmax(logits, dim=1)
    if bool((p.min_p > 0).any()):
        probs *= probs >= (p.min_p * probs.amax(1))[:, None]
    return draw(probs, uniforms)


def draw_rows(logits: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """Temperature, filters and one draw for each row of logits [S, V], which is overwritten: ids [S]."""
    temperatures = torch.tensor([p.temperature for p in params], dtype=logits.dtype, device=logits.device)
    logits /= temperatures[:, None]
    filters, width = Filters.of(params, logits), list_width(params[0], logits.shape[1])
    if width == 0:
        return draw_from_all(logits, filters, uniforms)
    ids, enough = draw_from_list(logits, filters, uniforms, width)
    short = (~enough).nonzero()[:, 0]
    if len(short):
        ids[short] = draw_from_list(logits[short], filters.rows(short), uniforms[short], logits.shape[1])[0]
    return ids


@dataclass
class SampleRow:
    """What one row of logits is sampled for. `seed` and the number of `output_ids` fix the random number.

    `banned` ids are never chosen; where `allowed` (packed bits, see `pack_mask`) is given, nothing else is.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    banned: Sequence[int] = ()
    allowed: Mask | None = None
    adjusts: bool = field(init=False)  # its params change logits
    simple: bool = field(init=False)  # its params ask for the likeliest token and nothing else

    def __post_init__(self) -> None:
        p = self.params  # they never change, so look once
        penalties = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        self.adjusts = penalties or p.logit_bias is not None
        self.simple = p.greedy and p.logprobs is None and not self.adjusts


def needs_editing(row: SampleRow) -> bool:
    """Whether anything changes this row's logits before the choice."""
    return row.adjusts or bool(row.banned) or row.allowed is not None


Edits = list[tuple[int, Sequence[int], float]]  # row, token ids, value


def flat_edits(edits: Edits, logits: Tensor) -> tuple[tuple[Tensor], Tensor]:
    """Edits as an index into the flattened logits [R · V], and a value for each index."""
    vocab, device = logits.shape[1], logits.device
    # An id beyond the vocabulary would point into the next row, which is somebody else's.
    index = [row * vocab + token for row, tokens, _ in edits for token in tokens if 0 <= token < vocab]
    values = [value for _, tokens, value in edits for token in tokens if 0 <= token < vocab]
    index_tensor = torch.tensor(index, dtype=torch.int64, device=device)
    return (index_tensor,), torch.tensor(values, dtype=logits.dtype, device=device)


def edit_logits(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Bans, biases and penalties of all rows, in place; logits [R, V] are touched only at the tokens concerned."""
    flat, numbered = logits.view(-1), list(enumerate(rows))
    biased: Edits = [(r, [token], bias) for r, row in numbered for token, bias in (row.params.logit_bias or {}).items()]
    flat.index_put_(*flat_edits(biased, logits), accumulate=True)
    repeated: Edits = [
        (r, list({*row.prompt_ids, *row.output_ids}), row.params.repetition_penalty)
        for r, row in numbered
        if row.params.repetition_penalty != 1.0
    ]
    where, penalty = flat_edits(repeated, logits)
    seen, limit = flat[where], torch.finfo(logits.dtype).max
    # Cut where a huge logit would overflow: an infinity would be a broken row, or a ban that nobody asked for.
    flat.index_put_(where, torch.where(seen > 0, seen / penalty, seen * penalty).clamp(-limit, limit))
    once: Edits = [(r, list(set(row.output_ids)), -row.params.presence_penalty) for r, row in numbered]
    each: Edits = [(r, row.output_ids, -row.params.frequency_penalty) for r, row in numbered]
    subtracted = [edit for edit in once + each if edit[2] != 0.0]
    flat.index_put_(*flat_edits(subtracted, logits), accumulate=True)
    banned: Edits = [(r, row.banned, -math.inf) for r, row in numbered if row.banned]
    flat.index_put_(*flat_edits(banned, logits))
    if any(row.allowed is not None for row in rows):
        logits.masked_fill_(forbidden([row.allowed for row in rows], logits), -math.inf)


def choose_edited(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
    """Edit logits [R, V] in place; value and id of each row's largest [R]. A ban that leaves nothing is lifted."""
    raw = logits.clone() if any(row.banned for row in rows) else logits
    edit_logits(logits, rows)
    best, chosen = likeliest(logits)
    stuck = [r for r in (~best.isfinite()).nonzero()[:, 0].tolist() if rows[r].banned]
    if stuck:
        free = raw[stuck]
        edit_logits(free, [replace(rows[r], banned=()) for r in stuck])
        logits[stuck] = free
        best[stuck], chosen[stuck] = likeliest(free)
    return best, chosen


@dataclass
class TokenLogprob:
    """ln p of the chosen token and of the likeliest ones, in the model's own distribution, before any processing."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def raw_logprobs(logits: Tensor, ids: Tensor, wanted: Sequence[int]) -> list[TokenLogprob]:
    """ln p of `ids` [R] and of the `wanted[r]` likeliest tokens of each row of logits [R, V]; never below -9999."""
    total = logits.logsumexp(1, keepdim=True)
    chosen = (logits.gather(1, ids[:, None]) - total).clamp(min=-9999.0)[:, 0].tolist()
    values, tokens = logits.topk(min(max(wanted), logits.shape[1]), dim=1)
    best = [
        list(zip(row_tokens, row_values, strict=True))
        for row_tokens, row_values in zip(tokens.tolist(), (values - total).clamp(min=-9999.0).tolist(), strict=True)
    ]
    return [TokenLogprob(token, chosen[r], best[r][: wanted[r]]) for r, token in enumerate(ids.tolist())]


@dataclass
class Sampled:
    """One token id per row. Rows in `bad` had a NaN, +inf or nothing but -inf among their logits: their id is -1."""

    ids: list[int]
    logprobs: list[TokenLogprob | None]
    bad: list[int]


CHUNK = 2**22  # numbers worked on at a time on a CPU: 16 MB of float32
HUGE = 1e38  # float32 ends a little above three times this


def draw_batch(logits: Tensor, picks: Sequence[int], rows: Sequence[SampleRow], ids: Tensor) -> None:
    """Draw for the rows numbered `picks` of logits [R, V] and write the tokens to `ids` [R]; logits are not changed."""
    vocab, device = logits.shape[1], logits.device
    step = max(1, CHUNK // vocab) if device.type == "cpu" else len(picks)
    widths = {r: list_width(rows[r].params, vocab) for r in picks}
    for width in sorted(set(widths.values())):
        group = [r for r in picks if widths[r] == width]
        for start in range(0, len(group), step):
            part = group[start : start + step]
            numbers = [uniform(rows[r].seed, len(rows[r].output_ids)) for r in part]
            index, u = torch.tensor(part, device=device), torch.tensor(numbers, dtype=wide_dtype(logits), device=device)
            ids[index] = draw_rows(logits[index], [rows[r].params for r in part], u)


def to_draw(best: Sequence[float], picks: Sequence[int], rows: Sequence[SampleRow]) -> list[int]:
    """Those of the rows numbered `picks` that need a random number; `best` is the largest logit of every row.

    Not greedy and broken ones, nor those where temperature would carry the largest logit past float32: logits so far
    apart leave all the probability to the largest, which is chosen already.
    """
    return [r for r in picks if not rows[r].params.greedy and abs(best[r]) < HUGE * rows[r].params.temperature]


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Choose one token for each row of logits [R, V] (float32, not changed). Rows do not influence each other."""
    if not rows:
        return Sampled([], [], [])
    best, ids = likeliest(logits)
    ids = torch.where(best.isfinite(), ids, -1)
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    picky = [r for r, row in enumerate(rows) if not row.simple or row.banned or row.allowed is not None]
    if picky:
        choose_picky(logits, picky, rows, best, ids)
    tokens = ids.tolist()
    shown = [r for r in picky if rows[r].params.logprobs is not None and tokens[r] >= 0]
    if shown:
        found = raw_logprobs(logits[shown], ids[shown], [rows[r].params.logprobs or 0 for r in shown])
        for r, entry in zip(shown, found, strict=True):
            logprobs[r] = entry
    return Sampled(tokens, logprobs, [r for r, token in enumerate(tokens) if token < 0])


def choose_picky(logits: Tensor, picky: Sequence[int], rows: Sequence[SampleRow], best: Tensor, ids: Tensor) -> None:
    """Edit or draw for the rows numbered `picky` of logits [R, V], and write the tokens to `ids` [R].

    `best` [R] is each row's largest raw logit.
    """
    edited = [r for r in picky if needs_editing(rows[r])]
    plain = [r for r in picky if not needs_editing(rows[r])]
    draw_batch(logits, to_draw(best.tolist(), plain, rows), rows, ids)
    if edited:
        part, part_rows = logits[edited], [rows[r] for r in edited]
        peaks, chosen = choose_edited(part, part_rows)
        draw_batch(part, to_draw(peaks.tolist(), range(len(edited)), part_rows), part_rows, chosen)
        # The raw logits count too: a ban may have covered the only NaN.
        ids[edited] = torch.where(peaks.isfinite() & best[edited].isfinite(), chosen, -1)
