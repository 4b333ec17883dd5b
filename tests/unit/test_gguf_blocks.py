"""Block formats and row order of GGUF, each against a slow reading of its specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from helios.model.gguf import dequantize, split_halves


def interleave(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The row order of llama GGUFs, element by element: row 2i is the old row i of a head, row 2i+1 the old i + D/2."""
    result, head_dim = np.empty_like(rows), rows.shape[0] // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            result[head * head_dim + 2 * i] = rows[head * head_dim + i]
            result[head * head_dim + 2 * i + 1] = rows[head * head_dim + i + head_dim // 2]
    return result


def fake_tensor(kind: Kind, blocks: bytes, rows: int) -> Any:
    class Fake:
        data = np.frombuffer(blocks, dtype=np.uint8).reshape(rows, -1)
        tensor_type, name, shape = kind, "fake", (256, rows)

    return Fake


def test_q6_k_by_its_specification() -> None:
    """256 weights: 4 low bits each, 2 high bits each, 16 signed scales, one float16."""
    rng = np.random.default_rng(0)
    low, high = rng.integers(0, 256, 128, dtype=np.uint8), rng.integers(0, 256, 64, dtype=np.uint8)
    scales, d = rng.integers(-60, 60, 16, dtype=np.int8), np.float16(0.01)
    expected = np.empty(256, dtype=np.float32)
    for i in range(256):
        half, quarter, j = i // 128, i % 128 // 32, i % 32
        nibble = low[64 * half + 32 * (quarter % 2) + j] >> (4 * (quarter // 2)) & 15
        top = high[32 * half + j] >> (2 * quarter) & 3
        expected[i] = np.float32(d) * scales[i // 16] * (int(nibble | top << 4) - 32)
    block = low.tobytes() + high.tobytes() + scales.tobytes() + d.tobytes()
    assert torch.allclose(dequantize(fake_tensor(Kind.Q6_K, block, 1))[0], torch.from_numpy(expected))


def test_q4_k_by_its_specification() -> None:
    """256 weights in 8 groups, each with a 6-bit scale and a 6-bit minimum packed into 12 bytes."""
    rng = np.random.default_rng(1)
    scales, minima = rng.integers(0, 64, 8), rng.integers(0, 64, 8)
    packed = np.zeros(12, dtype=np.uint8)
    for j in range(4):
        packed[j] = scales[j] | (scales[j + 4] >> 4) << 6
        packed[j + 4] = minima[j] | (minima[j + 4] >> 4) << 6
        packed[j + 8] = (scales[j + 4] & 15) | (minima[j + 4] & 15) << 4
    nibbles = rng.integers(0, 256, 128, dtype=np.uint8)
    d, dmin = np.float16(0.02), np.float16(0.03)
    expected = np.empty(256, dtype=np.float32)
    for i in range(256):
        group, pair = i // 32, i // 64
        q = nibbles[32 * pair + i % 32] >> (4 * (group % 2)) & 15
        expected[i] = np.float32(d) * scales[group] * q - np.float32(dmin) * minima[group]
    block = d.tobytes() + dmin.tobytes() + packed.tobytes() + nibbles.tobytes()
    found = dequantize(fake_tensor(Kind.Q4_K, block * 2, 2))
    assert found.shape == (2, 256)
    assert torch.allclose(found[1], torch.from_numpy(expected), atol=1e-5)


def test_halves_are_the_inverse_of_interleaving() -> None:
    rows = np.arange(48 * 3, dtype=np.float32).reshape(48, 3)
    assert torch.equal(split_halves(torch.from_numpy(interleave(rows, 3)), 3), torch.from_numpy(rows))
    flat = torch.arange(8.0)
    assert torch.equal(split_halves(torch.from_numpy(interleave(flat.numpy(), 2)), 2), flat)
