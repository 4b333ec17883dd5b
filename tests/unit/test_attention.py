"""Fused attention against the formula, and the choice of a backend."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helios.model import attention
from helios.model.attention import additive, attend_causal, attend_decode, causal_mask, choose_attention


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in loops and float64, written without looking at the package."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    past, group = k.shape[0] - q.shape[0], q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = k[: past + i + 1, h // group].double(), v[: past + i + 1, h // group].double()
            weights = (keys @ q[i, h].double() / math.sqrt(q.shape[2])).softmax(0)
            out[i, h] = weights @ values
    return out


def random_qkv(tokens: int, keys: int, heads: int, kv_heads: int, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens * 1000 + keys)
    shapes = ((tokens, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


SHAPES = [(1, 1), (1, 33), (2, 5), (7, 7), (7, 40), (40, 41), (65, 65)]
HEADS = [(4, 4), (4, 2), (9, 3), (8, 1)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
def test_causal_attention_is_the_formula(shape: tuple[int, int], heads: tuple[int, int]) -> None:
    q, k, v = random_qkv(*shape, *heads)
    expected = formula(q, k, v)
    torch.testing.assert_close(attend_causal(q, k, v).double(), expected, rtol=1e-4, atol=1e-5)
    mask = causal_mask(*shape, "cpu")
    for given in (mask, additive(mask, q.dtype)):
        torch.testing.assert_close(attend_causal(q, k, v, given).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
def test_the_forms_for_gpus_are_the_formula_too(heads: tuple[int, int]) -> None:
    q, k, v = random_qkv(11, 11, *heads)
    torch.testing.assert_close(attention._attend_members(q, k, v).double(), formula(q, k, v), rtol=1e-4, atol=1e-5)
    q, k, v = random_qkv(6, 15, *heads)
    for mask in (causal_mask(6, 15, "cpu"), additive(causal_mask(6, 15, "cpu"), q.dtype)):
        got = attention._attend_folded(q, k, v, mask).double()
        torch.testing.assert_close(got, formula(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
def test_views_into_larger_tensors_are_fine(heads: tuple[int, int]) -> None:
    # The transformer hands out q and k as slices of one qkv tensor, the cache k and v as slices of its store.
    q, k, v = random_qkv(5, 12, *heads)
    q_view = torch.cat((q, torch.full_like(q, 99.0)), dim=1)[:, : heads[0]]
    k_view, v_view = torch.stack((k, v), dim=1).unbind(1)
    assert not q_view.is_contiguous() and not k_view.is_contiguous()
    torch.testing.assert_close(attend_causal(q_view, k_view, v_view), attend_causal(q, k, v))
    one = attend_decode(q_view[:1], k_view[None], v_view[None])
    torch.testing.assert_close(one.double(), formula(q[:1], k, v), rtol=1e-4, atol=1e-5)
    for form in (attention._attend_members(q_view, k_view[:5], v_view[:5]),):
        torch.testing.assert_close(form, attend_causal(q, k[:5], v[:5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_decode_equals_each_sequence_alone(dtype: torch.dtype) -> None:
    lengths = [1, 9, 64, 30]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 9, 16, generator=generator).to(dtype)
    k, v = (torch.randn(4, 64, 3, 16, generator=generator).to(dtype) for _ in range(2))
    bias = additive(torch.arange(64) < torch.tensor(lengths)[:, None], dtype)[:, None, None]
    got = attend_decode(q, k, v, bias)
    assert got.shape == q.shape and got.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for i, n in enumerate(lengths):
        expected = formula(q[i : i + 1], k[i, :n], v[i, :n])[0]
        torch.testing.assert_close(got[i].double(), expected, rtol=tolerance, atol=tolerance)


def test_bfloat16_stays_near_the_formula() -> None:
    q, k, v = (x.bfloat16() for x in random_qkv(20, 50, 9, 3))
    got = attend_causal(q, k, v)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), formula(q, k, v), rtol=2e-2, atol=2e-2)


def test_causal_mask_is_aligned_at_the_bottom_right() -> None:
    assert causal_mask(2, 4, "cpu").tolist() == [[True, True, True, False], [True] * 4]
    assert additive(torch.tensor([True, False]), torch.bfloat16).tolist() == [0.0, float("-inf")]


class TestChoosingABackend:
    def test_cpu_takes_sdpa_and_says_why(self) -> None:
        name, why = choose_attention(torch.device("cpu"), torch.bfloat16)
        assert name == "sdpa" and "CUDA" in why
        assert choose_attention(torch.device("cpu"), torch.float32, "sdpa") == ("sdpa", "asked for")

    def test_the_impossible_is_refused_with_advice(self) -> None:
        with pytest.raises(ValueError, match="CUDA.*attention='auto'"):
            choose_attention(torch.device("cpu"), torch.bfloat16, "varlen")
        with pytest.raises(ValueError, match="auto, sdpa or varlen"):
            choose_attention(torch.device("cpu"), torch.bfloat16, "flash")

    @pytest.mark.parametrize(
        ("capability", "dtype", "paged", "expected"),
        [
            ((8, 0), torch.bfloat16, True, "varlen"),
            ((9, 0), torch.float16, True, "varlen"),
            ((7, 5), torch.float16, True, "sdpa"),
            ((8, 0), torch.float32, True, "sdpa"),
            ((8, 0), torch.bfloat16, False, "sdpa"),
        ],
    )
    def test_cuda_goes_by_capability_and_signature(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capability: tuple[int, int],
        dtype: torch.dtype,
        paged: bool,
        expected: str,
    ) -> None:
        class Module:
            @staticmethod
            def varlen_attn(q: Tensor) -> None: ...

        class PagedModule:
            @staticmethod
            def varlen_attn(q: Tensor, block_table: Tensor) -> None: ...

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(attention, "import_module", lambda name: PagedModule if paged else Module)
        assert choose_attention(torch.device("cuda"), dtype)[0] == expected
