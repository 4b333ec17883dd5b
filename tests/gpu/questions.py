"""What documentation and sources left open about attention kernels: small questions that a machine answers in seconds.

Each function says what it asks. The last ones do what the kernels' authors warn of, so they come last; what was found
before is on disk by then.
"""

import logging
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from helios.kv.pages import PAGE_SIZE
from helios.kv.varlen import takes_splits
from helios.model.attention import attend_decode
from tests.gpu.budget import Result, Skip
from tests.gpu.machine import Machine

HEADS, KV_HEADS, DIM = 8, 2, 64
GROUP = HEADS // KV_HEADS


class Paged:
    """Random pages for sequences of the given lengths, the arguments of a decode call, and the truth in float32."""

    def __init__(self, machine: Machine, lengths: tuple[int, ...], kv_heads: int = KV_HEADS) -> None:
        torch.manual_seed(0)
        device, dtype = machine.device, machine.half
        width = max(-(-n // PAGE_SIZE) for n in lengths)
        self.table = torch.arange(len(lengths) * width, dtype=torch.int32, device=device).view(len(lengths), width)
        self.k, self.v = (
            torch.randn(self.table.numel(), PAGE_SIZE, kv_heads, DIM, device=device).to(dtype) for _ in range(2)
        )
        self.q = torch.randn(len(lengths), HEADS, DIM, device=device).to(dtype)
        self.used = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.ends = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
        self.max_k = width * PAGE_SIZE

    def call(self, varlen: Callable[..., Any], window: tuple[int, int], max_k: int = 0, **options: Any) -> Tensor:
        """A decode call; `max_k` in whole pages unless given."""
        positions = (self.q, self.k, self.v, self.ends, self.ends, 1, max_k or self.max_k)
        options = {"seqused_k": self.used, "block_table": self.table, "enable_gqa": True, **options}
        out: Tensor = varlen(*positions, window_size=window, **options)
        return out

    def truth(self) -> Tensor:
        """The same in float32, sequence by sequence."""
        rows = []
        for q, pages, used in zip(self.q.float(), self.table.long(), self.used.tolist(), strict=True):
            k, v = (part[pages].flatten(0, 1)[:used].float() for part in (self.k, self.v))
            rows.append(attend_decode(q[None], k[None], v[None]))
        return torch.cat(rows)


def error(found: Tensor, right: Tensor) -> float:
    """Largest difference; infinite if anything is NaN."""
    return float((found.float() - right).abs().nan_to_num(math.inf).max())


def said(run: Callable[[], float]) -> float | str:
    """The number, or the first line of the exception."""
    try:
        return run()
    except Exception as problem:  # the message is the answer
        return f"{type(problem).__name__}: {str(problem).partition(chr(10))[0][:160]}"


def ragged_op(machine: Machine) -> Result:
    """Does torch's memory-efficient kernel serve ragged decode by its private op, without a mask, and how fast?"""
    if machine.dry:
        raise Skip("the op has no CPU form")
    found: Result = {}
    for context in (512, 4096):
        lengths = (context, context // 2, 7, context - 1)
        case = Paged(machine, lengths)
        q = case.q.view(4, KV_HEADS, GROUP, DIM).transpose(1, 2).reshape(1, 4 * GROUP, KV_HEADS, DIM)
        k, v = (part.view(1, -1, KV_HEADS, DIM) for part in (case.k, case.v))
        starts_q, starts_k = case.ends * GROUP, case.ends * case.max_k
        options = {"scale": DIM**-0.5, "seqlen_k": case.used}

        def run(a: tuple[Any, ...] = (q, k, v, None, starts_q, starts_k), o: Any = options, m: int = case.max_k) -> Any:
            return torch.ops.aten._efficient_attention_forward(*a, GROUP, m, 0.0, 0, False, **o)[0]

        out = run().view(4, GROUP, KV_HEADS, DIM).transpose(1, 2).reshape(4, HEADS, DIM)
        found[f"{context}_error"] = error(out, case.truth())
        found[f"{context}_us"] = machine.seconds(run) * 1e6
        hidden = torch.arange(case.max_k, device=machine.device) >= case.used[:, None]
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -math.inf)[:, None, None]
        keys, values = (part.view(4, -1, KV_HEADS, DIM) for part in (case.k, case.v))
        args = (case.q, keys, values, bias)
        found[f"{context}_masked_us"] = machine.seconds(lambda a=args: attend_decode(*a)) * 1e6  # type: ignore[misc]
    return found


def grouped_sdpa(machine: Machine) -> Result:
    """Which fused kernels accept `enable_gqa`? A kernel that does not is silently replaced by a slow one."""
    q = torch.randn(1, HEADS, 64, DIM, device=machine.device, dtype=machine.half)
    k = torch.randn(1, KV_HEADS, 64, DIM, device=machine.device, dtype=machine.half)
    found: Result = {}
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):

        def run(name: str = name) -> float:
            with sdpa_kernel(getattr(SDPBackend, name)):
                return float(F.scaled_dot_product_attention(q, k, k, enable_gqa=True).float().abs().max())

        answer = said(run)
        found[name.partition("_")[0].lower()] = "accepted" if isinstance(answer, float) else answer
    return found


def windows(machine: Machine) -> Result:
    """Decoding by varlen_attn with an open and a causal window: equal? how much faster is the open one?"""
    varlen = machine.varlen(machine.half)
    case = Paged(machine, (300, 40) if machine.dry else (4000, 3000, 2000, 1000))
    one = {"num_splits": 1} if takes_splits(varlen) else {}
    found: Result = {"open_error": error(case.call(varlen, (-1, -1)), case.truth())}
    found["causal_error"] = error(case.call(varlen, (-1, 0), **one), case.truth())
    found["open_us"] = machine.seconds(lambda: case.call(varlen, (-1, -1))) * 1e6
    found["causal_us"] = machine.seconds(lambda: case.call(varlen, (-1, 0), **one)) * 1e6
    return found


def splits(machine: Machine) -> Result:
    """pytorch#194167: with a causal window and several splits, are rows of later sequences left unwritten?"""
    varlen = machine.varlen(machine.half)
    found: Result = {}
    for name, kv_heads in (("gqa", KV_HEADS), ("mha", HEADS)):
        case = Paged(machine, (300, 290) if machine.dry else (4000, 3900), kv_heads)
        choices: list[tuple[str, Result]] = [("none", {})]
        if takes_splits(varlen) or machine.dry:
            choices += [("1", {"num_splits": 1}), ("2", {"num_splits": 2})]
        for splits_, options in choices:
            for kind, window in (("open", (-1, -1)), ("causal", (-1, 0))):
                answer = said(lambda c=case, w=window, o=options: error(c.call(varlen, w, **o), c.truth()))  # type: ignore[misc]
                found[f"{name}_{kind}_splits_{splits_}"] = answer
    return found


def given_output(machine: Machine) -> Result:
    """Does `varlen_attn_out` write the buffer it is given when a group's heads are packed?"""
    machine.varlen(machine.half)
    if machine.dry:
        raise Skip("it has no CPU form")
    kernel = getattr(import_module("torch.nn.attention.varlen"), "varlen_attn_out", None)
    if kernel is None:
        raise Skip("this torch has no varlen_attn_out")
    case = Paged(machine, (700, 300))
    out = torch.full_like(case.q, math.nan)
    returned = case.call(lambda *a, **o: kernel(out, *a, **o), (-1, -1))
    return {"buffer_error": error(out, case.truth()), "returned_error": error(returned, case.truth())}


def splits_on_2_12(machine: Machine) -> Result:
    """Does this torch take `num_splits=1` for a prompt?"""
    varlen = machine.varlen(machine.half)
    case = Paged(machine, (300, 290))
    return {
        "torch": torch.__version__,
        "answer": said(lambda: error(case.call(varlen, (-1, 0), num_splits=1), case.truth())),
    }


def chosen_backend(machine: Machine) -> Result:
    """Which backend does varlen_attn say that it uses?"""
    varlen = machine.varlen(machine.half)
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch.nn.attention.varlen")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        Paged(machine, (300, 290)).call(varlen, (-1, -1))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return {"said": heard[:3] or "nothing"}


def fully_masked(machine: Machine) -> Result:
    """What is the attention of a row that may see nothing: zeros, or NaN?"""
    q = torch.randn(2, HEADS, 16, DIM, device=machine.device, dtype=machine.half)
    bias = torch.zeros(2, 1, 16, 16, device=machine.device, dtype=machine.half)
    bias[1] = -math.inf
    out = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)[1]
    found: Result = {"sdpa": "NaN" if bool(out.isnan().any()) else f"largest {float(out.abs().max()):.3g}"}
    try:
        varlen = machine.varlen(machine.half)
    except Skip:
        return found
    if not machine.dry:
        case = Paged(machine, (300, 290))
        case.used[1] = 0
        row = case.call(varlen, (-1, -1))[1]
        found["varlen"] = "NaN" if bool(row.isnan().any()) else f"largest {float(row.abs().max()):.3g}"
    return found


def streaming(machine: Machine) -> Result:
    """Bytes per second of `x.add_(1)` on a gigabyte (read and written)."""
    x = torch.ones(2**18 if machine.dry else 2**28, device=machine.device)
    return {"GB_s": 2 * x.nbytes / machine.seconds(lambda: x.add_(1)) / 1e9}


def short_max_k(machine: Machine) -> Result:
    """Is attention cut off, silently, where `max_k` is smaller than a length?"""
    varlen = machine.varlen(machine.half)
    if machine.dry:
        raise Skip("only the real kernel can answer")
    case = Paged(machine, (1000, 900))
    return {"error_when_256": said(lambda: error(case.call(varlen, (-1, -1), max_k=256), case.truth()))}


QUESTIONS: dict[str, Callable[[Machine], Result]] = {
    "streaming": streaming,
    "fully masked row": fully_masked,
    "grouped SDPA": grouped_sdpa,
    "decode windows": windows,
    "backend of varlen_attn": chosen_backend,
    "num_splits=1 accepted": splits_on_2_12,
    "varlen_attn_out": given_output,
    "ragged efficient op": ragged_op,
    "splits and lost rows": splits,
    "max_k too small": short_max_k,
}
