"""What `test_triton_decode.py` runs in a process of its own: numbers by name, all of them differences."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helios.fast.triton_decode import TritonPagedKVCache, decode_paged
from helios.kv.paged import PagedKVCache, Span
from helios.kv.pages import PAGE_SIZE, SCRATCH_PAGE
from helios.model.attention import attend_causal, attend_decode
from helios.model.config import KVSpec

LENGTHS = (1, 255, 256, 257, 700)


def ragged(
    dtype: torch.dtype, group: int, kv_heads: int = 2, dim: int = 16, lengths: tuple[int, ...] = LENGTHS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, one layer's pages, page table, lengths. Pages in random order; all that is nobody's is NaN."""
    generator = torch.Generator().manual_seed(len(lengths) + group)
    counts = [-(-n // PAGE_SIZE) for n in lengths]
    pages = torch.full((2, sum(counts) + 3, PAGE_SIZE, kv_heads, dim), float("nan"))
    order = torch.randperm(sum(counts) + 2, generator=generator) + 1
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count], order = order[:count], order[count:]
        own = torch.randn(2, n, kv_heads, dim, generator=generator)
        for at, page in enumerate(table[row, :count].tolist()):
            piece = own[:, at * PAGE_SIZE : (at + 1) * PAGE_SIZE]
            pages[:, page, : piece.shape[1]] = piece
    q = torch.randn(len(lengths), kv_heads * group, dim, generator=generator)
    return q.to(dtype), pages.to(dtype), table, torch.tensor(lengths, dtype=torch.int32)


def formula(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Softmax attention from its definition, in float32, sequence by sequence."""
    rows = []
    for query, row, n in zip(q.float(), table.long(), lengths.tolist(), strict=True):
        group = query.shape[0] // pages.shape[3]
        k, v = pages[:, row].flatten(1, 2)[:, :n].float().repeat_interleave(group, 2)
        weights = (torch.einsum("hd,nhd->hn", query, k) * query.shape[1] ** -0.5).softmax(-1)
        rows.append(torch.einsum("hn,nhd->hd", weights, v))
    return torch.stack(rows)


def differ(found: Tensor, expected: Tensor) -> float:
    """The largest difference; NaN counts as infinite."""
    return float((found.float() - expected.float()).abs().nan_to_num(float("inf")).max())


def kernel_cases() -> dict[str, float]:
    """The function alone."""
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for group in (1, 3, 8) if dtype == torch.float32 else (4,):
            q, pages, *rest = ragged(dtype, group)
            for splits in (1, 7):
                name = f"formula {str(dtype).removeprefix('torch.')} group {group} splits {splits}"
                found[name] = differ(decode_paged(q, *pages, *rest, splits=splits), formula(q, pages, *rest))
    case = ragged(torch.float32, 3, lengths=(5, 300))
    q, pages, table, lengths = case
    found["splits 64"] = differ(decode_paged(q, *pages, table, lengths, splits=64), formula(*case))
    for dim in (8, 64, 128):
        case = ragged(torch.float32, 4, kv_heads=1, dim=dim, lengths=(70, 257))
        found[f"dim {dim}"] = differ(decode_paged(case[0], *case[1], *case[2:], splits=2), formula(*case))
    return found


def edge_cases() -> dict[str, float]:
    """Against `attend_decode`, an own token, and slices of a larger pass."""
    q, pages, table, lengths = case = ragged(torch.float32, 3, lengths=(300, 300))
    truth = decode_paged(q, *pages, table, lengths, splits=3)
    k, v = (part[table.long()].flatten(1, 2)[:, :300] for part in pages)
    found = {"attend_decode": differ(truth, attend_decode(q, k, v))}
    before = pages[1, table[1, 1], 43].clone()
    pages[1, table[1, 1], 43] += 100
    found["own token changed"] = differ(decode_paged(q, *pages, table, lengths), truth)
    pages[1, table[1, 1], 43] = before
    fused = torch.randn(4, 6 + 2 + 2, 16)  # queries, keys and values of a pass side by side
    fused[1:3, :6] = q
    out = torch.zeros(4, 6, 16)
    decode_paged(fused[1:3, :6], *pages, table, lengths, splits=2, out=out[1:3])
    found["strided"] = differ(out[1:3], formula(*case))
    found["rows outside the slice"] = float(out[[0, 3]].abs().max())
    return found


def documented_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, *_: Any, **options: Any) -> Tensor:
    """What torch's paged kernel promises, for prompts."""
    out = torch.empty_like(q)
    ends = cu_q.tolist()
    for n, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        table, used = options["block_table"][n].long(), int(options["seqused_k"][n])
        out[start:stop] = attend_causal(q[start:stop], k[table].flatten(0, 1)[:used], v[table].flatten(0, 1)[:used])
    return out


PASSES = {
    "mixed": [Span(1, 300, [5, 2]), Span(1, 256, [1]), Span(3, 258, [7, 4]), Span(4, 4, [9])],
    "decode only": [Span(1, 1, [3]), Span(1, 257, [6, 8, 10]), Span(1, 1, [SCRATCH_PAGE])],
    "prompts only": [Span(2, 2, [3]), Span(5, 260, [6, 8])],
    "scattered": [Span(1, 1, [3]), Span(2, 259, [7, 4]), Span(1, 301, [5, 2]), Span(1, 257, [6, 8])],
}


def cache_cases() -> dict[str, float]:
    """The cache beside the plain one, through the same passes and two layers."""
    found = {}
    spec = KVSpec(layers=2, heads=2, head_dim=16)
    for attention in ("sdpa", "matmul", "varlen"):
        torch.manual_seed(0)
        varlen = documented_varlen if attention == "varlen" else None
        plain = PagedKVCache(spec, 12, query_heads=6)
        ours = TritonPagedKVCache(spec, 12, query_heads=6, attention=attention, varlen=varlen)
        ours.store.copy_(plain.store.normal_())
        for name, spans in PASSES.items():
            rows = sum(span.query for span in spans)
            for cache in (plain, ours):
                cache.plan(spans)
            worst = 0.0
            for layer in range(2):
                q, k, v = (torch.randn(rows, heads, 16) for heads in (6, 2, 2))
                worst = max(worst, differ(ours.attend(layer, q, k, v), plain.attend(layer, q, k, v)))
            found[f"cache {attention} {name}"] = worst
        found[f"cache {attention} stores"] = differ(ours.store, plain.store)
    return found


def padding_case() -> dict[str, float]:
    """A padding row beside a real one; the real one must not see what padding wrote."""
    cache = TritonPagedKVCache(KVSpec(1, 2, 16), 4, query_heads=6)
    q, k, v = (torch.randn(2, heads, 16) for heads in (6, 2, 2))
    cache.plan([Span(1, 1, [2])])
    alone = cache.attend(0, q[:1], k[:1], v[:1])
    k[1], v[1] = float("nan"), float("nan")
    cache.plan([Span(1, 1, [2]), Span(1, 1, [SCRATCH_PAGE])])
    return {"padding": differ(cache.attend(0, q, k, v)[:1], alone)}


def run_all() -> dict[str, float]:
    """Every case by name."""
    return kernel_cases() | edge_cases() | cache_cases() | padding_case()


def compile_part(capability: int, dtype: str, group: int, dim: int, direct: bool, ints: str = "i32") -> tuple[int, int]:
    """Registers and bytes of stack of `attend_part`, for the shape that `decode_paged` would choose."""
    from helios.fast.triton_decode import SHORTEST, TILE
    from helios.fast.triton_kernels import attend_part

    rows = 1 << (group - 1).bit_length()
    block = max(4, min(TILE // (rows * dim), SHORTEST))
    fixed = dict(KV_HEADS=8, GROUP=group, ROWS=rows, DIM=dim, PAGE=256, BLOCK=block, DIRECT=direct)
    kinds = {"scale": "fp32", "table": "*" + ints, "lengths": "*" + ints, "part": "*" + dtype if direct else "*fp32"}
    kinds |= {"sums": kinds["part"]} | dict.fromkeys(("q", "keys", "values"), "*" + dtype)
    return compiled(attend_part, capability, fixed, kinds, {"scale", "table_row", "splits"}, rows * block * dim // TILE)


def compile_merge(capability: int, dtype: str) -> tuple[int, int]:
    """The same of `merge_parts`."""
    from helios.fast.triton_decode import MOST_SPLITS
    from helios.fast.triton_kernels import merge_parts

    fixed = dict(HEADS=32, DIM=128, MOST=MOST_SPLITS)
    kinds = {"part": "*fp32", "sums": "*fp32", "out": "*" + dtype}
    return compiled(merge_parts, capability, fixed, kinds, {"splits"}, 4)


def compiled(
    kernel: Any, capability: int, fixed: dict[str, Any], kinds: dict[str, str], unaligned: set[str], warps: int
) -> tuple[int, int]:
    """Compile for a GPU that is not there; registers of a thread and bytes of stack, as ptxas reports them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    whole = {*fixed, *unaligned}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if name not in whole}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": max(1, warps)})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert match, told
    return int(match[1]), int(match[2])
