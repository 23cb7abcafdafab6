"""The decoder with LongRoPE (arXiv:2402.13753): short factors up to the original context, long ones beyond it.

Which list turns a sequence follows from its whole length, so keys that one list turned are of no use once the other
holds: the sequence is then read again, as transformers does.
"""

from dataclasses import dataclass, field

import mlx.core as mx

from headrace.models.network.config import DecoderConfig, RopeConfig
from headrace.models.network.decoder import Decoder
from headrace.models.network.long_rope import CHUNK, said_before
from headrace.models.network.parameters import Parameters
from headrace.models.network.rope import make_rope
from headrace.runtime.kv.cache import KVCache
from headrace.runtime.ops import Ops
from headrace.runtime.ops.kv_format import KVFormat


def make_decoder(
    config: DecoderConfig, parameters: Parameters, ops: Ops, dtype: mx.Dtype, kv: KVFormat | None = None
) -> Decoder:
    """The decoder that `config` asks for, with K/V in `kv` (`models.network.stored_kv`; None: as `ops` keep them).

    Raises CheckpointError for tensors that do not fit it.
    """
    if rope := long_rope(config):
        return LongRopeDecoder(config, parameters, ops, dtype, rope)
    return Decoder(config, parameters, ops, dtype, kv)


def long_rope(config: DecoderConfig) -> RopeConfig | None:
    """The rope that has short and long factors, if there is one; then sequences take turns."""
    ropes = (layer.rope for layer in config.layers if layer.rope is not None)
    return next((rope for rope in ropes if rope.kind == "longrope"), None)


@dataclass(slots=True)
class Reading:
    """How a cache was filled: its tokens, in pieces (1, T), and whether the long factors turned them."""

    said: list[mx.array] = field(default_factory=list)
    long: bool = False


class LongRopeCache(KVCache):
    """The decoder's cache, and how it was filled."""

    reading: Reading


class LongRopeDecoder(Decoder):
    """Its own layers turn by the short factors; `_beyond` has the same weights and turns by the long ones."""

    joins = False  # sequences of one pass may want different factors
    rolls_back = False  # what a cache was fed is remembered, guesses too

    def __init__(
        self, config: DecoderConfig, parameters: Parameters, ops: Ops, dtype: mx.Dtype, rope: RopeConfig
    ) -> None:
        super().__init__(config, parameters, ops, dtype)
        self._original = int((rope.scaling or {})["original_max_position_embeddings"])
        self._beyond = self.with_rope(make_rope(rope, config.head_dim, config.context_length, long=True))

    def make_pool(self, _entries: int, _kept: int, _key: bytes = b"") -> None:
        return None  # keys that one list of factors turned are of no use to a sequence of another length

    def with_ops(self, ops: Ops) -> "LongRopeDecoder":
        twin = super().with_ops(ops)
        assert isinstance(twin, LongRopeDecoder)
        twin._beyond = Decoder.with_ops(self._beyond, ops)
        return twin

    def make_cache(self, limit: int) -> LongRopeCache:
        cache = LongRopeCache(self.kv_shape, limit=limit, ops=self._ops)
        cache.reading = Reading()
        return cache

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens (B, T), unchanged: `layers` may have to read those before them again."""
        return tokens

    def layers(self, tokens: mx.array, cache: LongRopeCache) -> mx.array:  # type: ignore[override]
        """tokens (B, T) -> (B, T, E), T entries per layer appended to the cache."""
        said = said_before(cache.reading.said, cache.length)
        long = cache.length + tokens.shape[1] > self._original
        if said and long != cache.reading.long:
            self._read_again(said, cache, long)
        cache.reading.said, cache.reading.long = [*said, tokens], long
        return self._pass(tokens, cache, long)

    def _pass(self, tokens: mx.array, cache: LongRopeCache, long: bool) -> mx.array:
        return Decoder.layers(self._beyond if long else self, super().embed(tokens), cache)

    def _read_again(self, said: list[mx.array], cache: LongRopeCache, long: bool) -> None:
        length, phase = cache.length, cache.phase
        cache.begin_again()
        for piece in mx.concatenate(said, axis=1).split(tuple(range(CHUNK, length, CHUNK)), axis=1):
            cache.reserve(piece.shape[1])
            self._pass(piece, cache, long)
            cache.advance(piece.shape[1])
            mx.eval(cache.arrays)
        cache.phase = phase  # of the pass that this came before
