"""The contiguous cache against recomputation: the same tokens, however the sequence is cut."""

import random

import pytest
import torch

from helios.kv.contiguous import ContiguousCache, generate_greedy
from helios.model.config import KVSpec, tiny_config
from helios.model.transformer import NoCache, Transformer, naive_attention
from helios.model.weights import random_weights

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")


def make_model(family: str, seed: int = 0) -> Transformer:
    config = tiny_config(family)  # type: ignore[arg-type]
    return Transformer.from_weights(config, random_weights(config, seed=seed))


def make_cache(model: Transformer, capacity: int) -> ContiguousCache:
    return ContiguousCache(model.config.kv_spec, capacity, heads=model.config.heads)


def logits_in_pieces(model: Transformer, ids: list[int], cuts: list[int]) -> torch.Tensor:
    cache = make_cache(model, len(ids))
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        with torch.inference_mode():
            parts.append(model(torch.tensor(ids[begin:end]), torch.arange(begin, end), cache))
        cache.advance(end - begin)
    return torch.cat(parts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt_length", [1, 2, 33])
def test_same_tokens_as_the_oracle(family: str, prompt_length: int) -> None:
    model = make_model(family, seed=prompt_length)
    prompt = [random.Random(prompt_length).randrange(256) for _ in range(prompt_length)]
    expected = list(generate_greedy(model, NoCache(), prompt, 16))
    assert list(generate_greedy(model, make_cache(model, prompt_length + 15), prompt, 16)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_any_cut_of_the_prompt_gives_the_same_logits(family: str) -> None:
    model = make_model(family)
    rng = random.Random(1)
    ids = [rng.randrange(256) for _ in range(40)]
    with torch.inference_mode():
        expected = model(torch.tensor(ids), torch.arange(40), NoCache())
    for cuts in ([], [1], [39], sorted(rng.sample(range(1, 40), 5)), list(range(1, 40))):
        torch.testing.assert_close(logits_in_pieces(model, ids, cuts), expected, atol=1e-4, rtol=1e-4)


def test_a_used_cache_gives_the_same_as_a_new_one() -> None:
    model = make_model("qwen3")
    cache = make_cache(model, 64)
    first = list(generate_greedy(model, cache, [1, 2, 3], 20))
    list(generate_greedy(model, cache, list(range(50)), 4))
    assert list(generate_greedy(model, cache, [1, 2, 3], 20)) == first


def test_the_attention_function_is_the_one_given() -> None:
    seen: list[tuple[int, int]] = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((q.shape[0], k.shape[0]))
        return naive_attention(q, k, v)

    model = make_model("llama")
    cache = ContiguousCache(model.config.kv_spec, 16, heads=model.config.heads, attend=spy)
    list(generate_greedy(model, cache, [1, 2, 3, 4], 3))
    assert seen == [(4, 4)] * 2 + [(1, 5)] * 2 + [(1, 6)] * 2


def test_stores_behind_the_past_and_only_there() -> None:
    cache = ContiguousCache(KVSpec(2, 2, 4), 8, heads=4)
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    cache.attend(1, torch.randn(3, 4, 4), k, v)
    cache.advance(3)
    cache.attend(1, torch.randn(1, 4, 4), k[:1], v[:1])
    assert torch.equal(cache.store[1, 0, :3], k)
    assert torch.equal(cache.store[1, 1, 3], v[0])
    assert not cache.store[0].any()
    assert not cache.store[1, :, 4:].any()
    assert cache.length == 3


def test_what_does_not_fit_is_refused_and_nothing_is_overwritten() -> None:
    cache = ContiguousCache(KVSpec(1, 2, 4), 4, heads=2)
    tokens = torch.randn(3, 2, 4)
    cache.attend(0, tokens, tokens, tokens)
    cache.advance(3)
    before = cache.store.clone()
    with pytest.raises(ValueError, match="6 tokens do not fit a cache of 4"):
        cache.attend(0, tokens, tokens, tokens)
    assert torch.equal(cache.store, before)
    with pytest.raises(ValueError, match="cannot advance by 2"):
        cache.advance(2)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        ContiguousCache(KVSpec(1, 2, 4), 0, heads=2)
    with pytest.raises(ValueError, match="multiple"):
        ContiguousCache(KVSpec(1, 2, 4), 8, heads=3)


def test_memory_is_what_the_spec_says() -> None:
    spec = KVSpec(layers=3, heads=2, head_dim=8)
    cache = ContiguousCache(spec, 10, heads=4, dtype=torch.bfloat16)
    assert cache.nbytes == 10 * spec.bytes_per_token(torch.bfloat16)
