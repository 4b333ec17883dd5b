"""What the tests of recorded ticks share: a graph runner whose recordings a CPU can replay."""

from typing import Any

from helios.fast.buckets import DirectLink, bucket_grid
from helios.fast.graphs import GraphRunner, ReplayByCalling, ReplayByTape
from helios.fast.static import GatheredDecode
from helios.kv.paged import PagedKVCache
from helios.model.attention import attend_decode
from helios.model.transformer import Transformer

PAGES = 40
MARGIN = 1e-3  # between the two likeliest logits: far more than fp32 sums in another order can differ
RECORDERS = {"called": ReplayByCalling, "taped": ReplayByTape}


def graph_runner(model: Transformer, cache: PagedKVCache, recorder: str, **options: Any) -> GraphRunner:
    """Ticks of up to six rows with contexts of up to three pages are recorded; a fourth page runs eagerly."""
    buckets = bucket_grid(6, 3)
    attention = GatheredDecode(attend_decode, cache.store, buckets)
    return GraphRunner(model, cache, attention, buckets, recorder=RECORDERS[recorder](), link=DirectLink(), **options)
