"""One sequence whose passes are made by hand: a cache and its current pass as one object."""

from typing import Any

import mlx.core as mx

from headrace.models.mlx_lm.backend import MlxLmPass
from headrace.models.mlx_lm.cache import MlxLmCache
from headrace.runtime.engine.prefill import prefill as prefill_chunks
from headrace.runtime.engine.prompt_chunks import ChunkSizer
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.buffers import BufferPass
from headrace.runtime.kv.cache import KVPass, PassRow
from headrace.runtime.kv.paged import BlockTable, PagedPass
from headrace.runtime.kv.slot_cache import SlotCache
from headrace.runtime.ops import Phase

_PASSES: dict[type, Any] = {BlockTable: PagedPass, SlotCache: BufferPass, MlxLmCache: MlxLmPass}


class Alone:
    """A cache, and after `reserve` its pass. Can be passed to `Network.layers`, and as a backend of one sequence."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.kv_pass: Any = None

    def reserve(self, tokens: int, phase: Phase = "prefill") -> "Alone":
        self.kv_pass = _PASSES[type(self.cache)]([PassRow(self.cache, tokens, phase)])
        return self

    def advance(self, _tokens: int | None = None) -> None:
        self.kv_pass.advance()

    def make_passes(self, rows: list[PassRow]) -> list[KVPass]:
        [row] = rows
        return [self.reserve(row.count, row.phase).kv_pass]

    @property
    def arrays(self) -> list[mx.array]:
        held = self.cache.pool.storage if isinstance(self.cache, BlockTable) else self.cache
        arrays: list[mx.array] = held.arrays
        return arrays

    def __getattr__(self, name: str) -> Any:
        of_pass = self.kv_pass is not None and name in ("attend", "mix", "run_fused", "runs_fused", "rows")
        return getattr(self.kv_pass if of_pass else self.cache, name)


def new_cache(network: Any, limit: int) -> Any:
    """An empty cache: of a decoder in buffers of its own, unless it needs blocks: for packed K/V or recurrent state."""
    if hasattr(network, "kv_shape") and not network.kv_format.packed and not network.kv_shape.mixers:
        return Alone(SlotCache(network.kv_shape, network.ops, limit))
    return Alone(network.kv_backend(KVOptions(limit)).acquire(()))


def prefill(network: Any, cache: Any, tokens: Any, sizer: ChunkSizer | None = None) -> Any:
    return prefill_chunks(network, cache, cache, tokens, sizer)
