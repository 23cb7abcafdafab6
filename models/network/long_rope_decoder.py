"""The decoder with LongRoPE (arXiv:2402.13753): short factors up to the original context, long ones beyond.

The factors follow from a sequence's whole length. Keys of one list are invalid once the other list applies: all tokens
are then fed again, as in transformers. `TokenHistory` keeps them, also for mlx-lm's classes (`models.mlx_lm.network`).
A pass has one row: rows may need different factors.

Guards: tests/parity/test_transformers.py, on both sides of the original context, and
tests/models/mlx_lm/test_long_rope.py.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig, RopeConfig
from headrace.models.network.decoder import Decoder
from headrace.models.network.parameters import Parameters
from headrace.models.network.rope import make_rope
from headrace.runtime.kv.backend import KVBackend, KVOptions
from headrace.runtime.kv.cache import KVCache, KVPass, PassRow
from headrace.runtime.ops import Ops

CHUNK = 512  # tokens of a pass that feeds a sequence again


class _Fed(NamedTuple):
    """Tokens that a cache has been fed, and their rotation."""

    pieces: list[mx.array]  # tokens (1, n), in order
    long: bool  # the long factors rotated its keys


class TokenHistory:
    """The tokens of each cache, and which factors rotated its keys. original: longest length of the short factors."""

    def __init__(self, original: int) -> None:
        self._original = original
        self._fed: WeakKeyDictionary[KVCache, _Fed] = WeakKeyDictionary()

    def append(self, cache: KVCache, tokens: mx.array) -> tuple[bool, list[mx.array]]:
        """Note tokens (1, T) about to be fed. Return whether they use the long factors, and what is fed again first.

        That is the pieces (1, n) of all tokens before, if the other factors have rotated their keys; else nothing.
        """
        pieces, was_long = self._fed.get(cache, _Fed([], False))
        before = first_tokens(pieces, cache.length)  # a cache may have dropped rejected draft tokens
        long = cache.length + tokens.shape[1] > self._original
        self._fed[cache] = _Fed([*before, tokens], long)
        if not before or long == was_long:
            return long, []
        return long, mx.concatenate(before, axis=1).split(tuple(range(CHUNK, cache.length, CHUNK)), axis=1)


def first_tokens(pieces: list[mx.array], length: int) -> list[mx.array]:
    """Return the first `length` tokens of pieces (1, T)."""
    first: list[mx.array] = []
    for piece in pieces:
        if length <= 0:
            break
        first.append(piece[:, :length])
        length -= piece.shape[1]
    return first


def long_rope(config: DecoderConfig) -> RopeConfig | None:
    """Return the rope with short and long factors that differ, or None. With one, sequences take turns."""
    ropes = (layer.rope for layer in config.layers if layer.rope is not None)
    return next((rope for rope in ropes if rope.changes), None)


class LongRopeDecoder(Decoder):
    """Its own layers use the short factors; `_long` has the same weights and uses the long factors."""

    def __init__(self, config: DecoderConfig, parameters: Parameters, rope: RopeConfig) -> None:
        super().__init__(config, parameters)
        self.pages = False  # no blocks: see `kv_backend`
        self._history = TokenHistory(int((rope.scaling or {})["original_max_position_embeddings"]))
        self._long_rope = make_rope(rope, config.head_dim, config.context_length, long=True)
        self._long = self.with_rope(self._long_rope)

    def kv_backend(self, options: KVOptions) -> KVBackend:
        """Buffers of sequences alone: those of one pass may need different factors."""
        from headrace.runtime.kv.buffers import BufferBackend  # late: few models have LongRoPE

        return BufferBackend(self.kv_shape, self._ops, options, alone=True)

    def with_ops(self, ops: Ops) -> "LongRopeDecoder":
        return self._with_long(super().with_ops(ops))

    def with_part(self, parameters: Parameters, layer: int | None) -> "LongRopeDecoder":
        return self._with_long(super().with_part(parameters, layer))

    def without_layers(self) -> "LongRopeDecoder":
        twin = super().without_layers()
        assert isinstance(twin, LongRopeDecoder)
        twin._long = twin
        return twin

    def _with_long(self, twin: Decoder) -> "LongRopeDecoder":
        """Return a changed copy of this decoder, whose `_long` is still the one from before the change."""
        assert isinstance(twin, LongRopeDecoder)
        twin._long = twin.with_rope(self._long_rope)
        return twin

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens (B, T), unchanged: `layers` embeds them."""
        return tokens

    def layers(self, x: mx.array, kv: KVPass) -> mx.array:
        """x: tokens (1, T) of one row -> (1, T, E), T entries per layer appended.

        Where this row crosses the original context, all tokens before it are fed again first.
        """
        from headrace.runtime.kv.buffers import BufferPass
        from headrace.runtime.kv.slot_cache import SlotCache

        [row] = kv.rows
        cache = row.cache
        assert isinstance(cache, SlotCache)
        long, again = self._history.append(cache, x)
        if again:
            cache.restart()
            # Passes of their own, without logits; the row's own pass follows, with room for its entries again.
            for tokens in again:
                feeding = BufferPass([PassRow(cache, tokens.shape[1], "prefill", output=False)])
                self._run(tokens, feeding, long)
                feeding.advance()
                mx.eval(feeding.arrays)
            cache.reserve(row.count, row.phase)
        return self._run(x, kv, long)

    def _run(self, tokens: mx.array, kv: KVPass, long: bool) -> mx.array:
        network = self._long if long else self
        return Decoder.layers(network, super().embed(tokens), kv)
