# Generated from notebooks/04_sampling.ipynb by `helios export`; edit the notebook.
"""Choosing the next token.

The transformer ends in one number per vocabulary entry. This notebook turns those logits into a
choice: greedy or random, penalised, filtered by top-k, top-p and min-p, the same for a seed
whatever shares the batch, and all rows of a batch at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helios.model.params import RequestError as RequestError  # the engine and the server look for both here
from helios.model.params import SamplingParams as SamplingParams

__all__ = [
    "BLOCK",
    "GOLDEN",
    "MASK64",
    "SampleRow",
    "Sampled",
    "TokenLogprob",
    "choice_seed",
    "choose_randomly",
    "draw",
    "edit_logits",
    "kept_from",
    "list_width",
    "mix64",
    "needs_editing",
    "raw_logprobs",
    "sample",
    "thresholds",
    "uniform",
]


@dataclass
class SampleRow:
    """What one row of logits is sampled for. `seed` and the number of `output_ids` fix the draw."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    banned: Sequence[int] = ()


@dataclass
class TokenLogprob:
    """ln p of the chosen token and of the likeliest ones, in the model's own distribution, before any processing."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Sampled:
    """One token id per row. Rows in `bad` had logits that are not finite: their id is -1."""

    ids: list[int]
    logprobs: list[TokenLogprob | None]
    bad: list[int]


MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): every output bit depends on every input bit."""
    value &= MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK64
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of this seed at this position: 53 bits, the same on every machine."""
    return (mix64(mix64(seed + GOLDEN) + GOLDEN * (position + 1)) >> 11) * 2.0**-53


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request; the first choice keeps the request's own."""
    return seed if index == 0 else mix64(mix64(seed) ^ (GOLDEN * index & MASK64)) - 2**63


def needs_editing(row: SampleRow) -> bool:
    """Whether anything changes this row's logits before the choice."""
    p = row.params
    penalties = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    return bool(row.banned) or p.logit_bias is not None or penalties


def _flat(entries: Sequence[tuple[int, Sequence[int], float]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """(row, token ids, value) entries as index into the flattened logits and a value for each index."""
    vocab, device = logits.shape[1], logits.device
    index = [row * vocab + token for row, tokens, _ in entries for token in tokens if 0 <= token < vocab]
    values = [value for _, tokens, value in entries for token in tokens if 0 <= token < vocab]
    return torch.tensor(index, device=device), torch.tensor(values, dtype=logits.dtype, device=device)


def edit_logits(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Bans, biases and penalties of all rows, in place: `logits` [R, V] is touched only at the tokens named."""
    banned = [(r, row.banned, -math.inf) for r, row in enumerate(rows) if row.banned]
    biased = [(r, [token], bias) for r, row in enumerate(rows) for token, bias in (row.params.logit_bias or {}).items()]
    repeated: list[tuple[int, Sequence[int], float]] = []
    subtracted: list[tuple[int, Sequence[int], float]] = []
    for r, row in enumerate(rows):
        p = row.params
        if p.repetition_penalty != 1.0:
            repeated.append((r, list({*row.prompt_ids, *row.output_ids}), p.repetition_penalty))
        if p.presence_penalty != 0.0:
            subtracted.append((r, list(set(row.output_ids)), -p.presence_penalty))
        if p.frequency_penalty != 0.0:
            subtracted.append((r, row.output_ids, -p.frequency_penalty))
    flat = logits.view(-1)
    if banned:
        index, values = _flat(banned, logits)
        flat.index_put_((index,), values)
    if biased:
        flat.index_put_(*_pair(_flat(biased, logits)), accumulate=True)
    if repeated:
        index, penalty = _flat(repeated, logits)
        seen = flat[index]
        flat.index_put_((index,), torch.where(seen > 0, seen / penalty, seen * penalty))
    if subtracted:
        flat.index_put_(*_pair(_flat(subtracted, logits)), accumulate=True)


def _pair(entries: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor], Tensor]:
    return (entries[0],), entries[1]


def list_width(params: SamplingParams, vocab: int) -> int:
    """How many of the likeliest tokens to look at for this row's top-k and top-p; 0 when it has neither."""
    if not 0 < params.top_k < vocab and params.top_p >= 1.0:
        return 0
    return min(vocab, 128 if 0 < params.top_k <= 64 else 1024)


def thresholds(probs: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The least probability that top-k, then top-p keep, from the `width` likeliest tokens of each row.

    probs [S, V]; top_k [S] (V = off); top_p [S]. Returns the threshold [S], and whether the list was long enough [S].
    """
    vocab = probs.shape[1]
    likeliest = probs.sort(dim=1, descending=True).values if width >= vocab else probs.topk(width, dim=1).values
    kth = likeliest.gather(1, (top_k.clamp(max=width) - 1)[:, None])
    has_k = top_k < vocab
    inside = (likeliest >= kth) | ~has_k[:, None]  # ties with the k-th stay: the kept set does not depend on order
    mass = torch.where(inside, likeliest, 0.0)
    before = mass.cumsum(1) - mass
    total = torch.where(has_k, mass.sum(1), 1.0)
    kept = inside & ((before < (top_p * total)[:, None]) | (top_p >= 1.0)[:, None])
    kept[:, 0] = True
    least = torch.where(kept, likeliest, math.inf).amin(1)
    if width >= vocab:
        return least, torch.ones_like(has_k)
    complete = torch.where(has_k, (top_k <= width) & (likeliest[:, -1] < kth[:, 0]), mass.sum(1) >= top_p)
    return least, complete


def kept_from(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """The least probability each row keeps [S], from its top-k, top-p and min-p; None when no row filters."""
    vocab, device = probs.shape[1], probs.device
    widths = [list_width(p, vocab) for p in params]
    if not any(widths) and not any(p.min_p for p in params):
        return None
    least = torch.zeros(len(params), device=device)
    for width in sorted(set(widths) - {0}):
        group = [s for s, w in enumerate(widths) if w == width]
        top_k = torch.tensor([params[s].top_k or vocab for s in group], device=device).clamp(max=vocab)
        top_p = torch.tensor([params[s].top_p for s in group], device=device)
        rows = torch.tensor(group, device=device)
        chosen = probs if len(group) == len(params) else probs[rows]
        found, complete = thresholds(chosen, top_k, top_p, width)
        short = (~complete).nonzero()[:, 0]
        if len(short):
            found[short] = thresholds(chosen[short], top_k[short], top_p[short], vocab)[0]
        least[rows] = found
    if any(p.min_p for p in params):
        min_p = torch.tensor([p.min_p for p in params], device=device)
        least = torch.maximum(least, min_p * probs.amax(1))
    return least


BLOCK = 512


def draw(probs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Invert each row's cumulative distribution at its uniform: ids [S]. probs [S, V] need not sum to one.

    In two steps, the block and then the token in it, so that the slow running sum covers V / 512 + 512 numbers, not V.
    """
    rows, vocab = probs.shape
    exact = torch.float32 if probs.device.type == "mps" else torch.float64
    tail = vocab % BLOCK
    sums = probs[:, : vocab - tail].reshape(rows, -1, BLOCK).sum(2)
    if tail:
        sums = torch.cat([sums, probs[:, vocab - tail :].sum(1, keepdim=True)], dim=1)
    goal = torch.tensor(uniforms, dtype=exact, device=probs.device)[:, None]
    block, rest = _invert(sums.to(exact), goal)
    inside = block * BLOCK + torch.arange(BLOCK, device=probs.device)
    within = probs.gather(1, inside.clamp(max=vocab - 1)).to(exact).masked_fill(inside >= vocab, 0.0)
    token, _ = _invert(within, rest)
    return (block * BLOCK + token)[:, 0]


def _invert(weights: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """The column [S, 1] in which `goal` [S, 1] (a share of the total) falls, and the goal as a share of that column."""
    ends = weights.cumsum(1)
    # Below the total even after rounding: the column found then has a weight above zero.
    target = torch.minimum(
        goal * ends[:, -1:], ends[:, -1:] * (1 - 2.0**-20 if weights.dtype == torch.float32 else 1 - 2.0**-52)
    )
    column = torch.searchsorted(ends, target, right=True).clamp(max=weights.shape[1] - 1)
    weight = weights.gather(1, column)
    share = (target - (ends.gather(1, column) - weight)) / weight
    return column, share.clamp(0.0, 1.0)


def raw_logprobs(logits: Tensor, ids: Tensor, wanted: Sequence[int]) -> list[TokenLogprob]:
    """Logprobs of `ids` [R] and of the `wanted[r]` likeliest tokens, from logits [R, V] as the model gave them."""
    total = logits.logsumexp(1, keepdim=True)
    chosen = (logits.gather(1, ids[:, None]) - total).clamp(min=-9999.0)[:, 0].tolist()
    most = min(max(wanted), logits.shape[1])
    values, tokens = logits.topk(most, dim=1)
    top_values, top_tokens = (values - total).clamp(min=-9999.0).tolist(), tokens.tolist()
    return [
        TokenLogprob(token, chosen[r], list(zip(top_tokens[r], top_values[r], strict=True))[: wanted[r]])
        for r, token in enumerate(ids.tolist())
    ]


def choose_randomly(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Temperature, top-k, top-p, min-p and one draw for each row: ids [S] from logits [S, V]."""
    params = [row.params for row in rows]
    temperatures = [p.temperature for p in params]
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    probs = torch.softmax(logits, dim=1)
    least = kept_from(probs, params)
    if least is not None:
        probs = probs.masked_fill_(probs < least[:, None], 0.0)
    return draw(probs, [uniform(row.seed, len(row.output_ids)) for row in rows])


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Choose one token for each row of logits [R, V] (float32; not changed). Rows do not influence each other."""
    if not rows:
        return Sampled([], [], [])
    best, ids = logits.max(dim=1)  # NaN wins every comparison, so one look at the maximum finds it
    bad = [r for r, fine in enumerate(best.isfinite().tolist()) if not fine]
    edited = [r for r, row in enumerate(rows) if needs_editing(row)]
    random = [r for r, row in enumerate(rows) if not row.params.greedy]
    work = logits
    if edited:
        work = logits.clone()
        part = logits[edited]
        edit_logits(part, [rows[r] for r in edited])
        work[edited] = part
        ids = work.argmax(dim=1)
    if random:
        drawn = choose_randomly(work if len(random) == len(rows) else work[random], [rows[r] for r in random])
        ids = drawn if len(random) == len(rows) else ids.index_copy(0, torch.tensor(random, device=ids.device), drawn)
    shown = [r for r, row in enumerate(rows) if row.params.logprobs is not None and r not in set(bad)]
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    if shown:
        found = raw_logprobs(logits[shown], ids[shown], [rows[r].params.logprobs or 0 for r in shown])
        for r, entry in zip(shown, found, strict=True):
            logprobs[r] = entry
    chosen = ids.tolist()
    for r in bad:
        chosen[r] = -1
    return Sampled(chosen, logprobs, bad)
