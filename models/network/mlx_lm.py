"""Every architecture headrace has no decoder for, run through mlx-lm's own model classes by the same engine.

mlx-lm gives one call for a whole forward pass, so stages 1 to 4 of a step happen inside `layers`; in prefill its
logits are never evaluated. Its caches sit behind the same interface as ours. Importing mlx-lm costs about 0.6 s and
happens only here.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from headrace.models.checkpoint.quantization import Quantization
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.network.long_rope import CHUNK, LongRope, said_before
from headrace.models.network.mlx_lm_cache import MlxLmCache
from headrace.models.network.mlx_lm_costs import layers_kv, measure
from headrace.models.network.mlx_lm_joined import JoinedMlxLm, agrees, can_join, worth_joining
from headrace.models.network.mlx_lm_kv import make_parts, quantized
from headrace.models.network.mlx_lm_load import load, quantize, refused
from headrace.models.network.stored_kv import refused as refused_kv
from headrace.runtime.ops import Phase
from headrace.runtime.ops.kv_format import KVFormat


class MlxLmNetwork:
    """A network (see `runtime.network`) around an mlx-lm model. Until `arrays` are evaluated no weight is read.

    kv: how K/V are to be stored, if not as the class does; raises UsageError where they cannot.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: mx.DeviceType,
        requantize: Quantization | None = None,
        kv: KVFormat | None = None,
    ) -> None:
        self._model = load(checkpoint, device)
        if requantize is not None:
            quantize(self._model, requantize)
        self.arrays = [array for _, array in tree_flatten(self._model.parameters()) if isinstance(array, mx.array)]
        self.kv_format: KVFormat | None = None  # None: as the class does
        try:
            measured = measure(self._model, checkpoint.config)
        except Exception as error:
            raise refused(checkpoint.config, checkpoint.path.name, error) from error
        self._long_rope = LongRope.of(self._model, checkpoint.config)
        self.vocab_size, self.cost = measured.vocab_size, measured.cost
        self._can_join: bool | None = None  # None: not asked yet
        self._agrees: bool | None = None  # whether sequences say together what they say alone; None: not seen yet
        if kv is not None and kv.packed:
            self._store(kv)
        self.rolls_back = self._long_rope is None and not self.make_cache(1).needs_marks

    def with_kv(self, kv: KVFormat) -> "MlxLmNetwork":
        """The same weights, K/V stored as `kv`. Raises UsageError where they cannot."""
        twin = copy(self)
        twin._store(kv)
        return twin

    def _store(self, kv: KVFormat) -> None:
        stored = None
        if kv.packed:
            if self._long_rope is not None:
                raise refused_kv(kv, "LongRoPE turns keys anew as a sequence grows")
            found = quantized(self._model, kv)
            if isinstance(found, str):
                raise refused_kv(kv, found)
            stored = found
        self.kv_format = stored
        self._can_join = self._agrees = None
        self.cost = replace(self.cost, kv=layers_kv(self._model, self._fresh_parts))

    def make_cache(self, limit: int) -> MlxLmCache:
        return MlxLmCache(self._fresh_parts(), limit, self.cost.kv)

    def make_pool(self, _entries: int, _kept: int, _key: bytes = b"") -> None:
        return None

    @property
    def can_join(self) -> bool:
        """Whether steps of several sequences can be built, as far as shapes tell. Reads no weight."""
        if self._can_join is None:
            self._can_join = self._long_rope is None and can_join(self._model, self._fresh_parts)
        return self._can_join

    @property
    def joins(self) -> bool:
        """Whether steps can share a pass: `can_join`, and the first time it is asked, whether they say the same."""
        if not self.can_join:
            return False
        if self._agrees is None:
            self._agrees = agrees(self._model, self._fresh_parts)
        return self._agrees

    def shares_pass(self, caches: Sequence[MlxLmCache], rows: Sequence[tuple[int, Phase]]) -> bool:
        """Steps of one token do, as long as their contexts are short beside the weights."""
        lengths = [cache.length for cache in caches]
        return all(row == (1, "decode") for row in rows) and worth_joining(
            lengths, self.cost.weight_bytes, self.cost.kv
        )

    def join(self, caches: Sequence[MlxLmCache], _rows: Sequence[tuple[int, Phase]]) -> JoinedMlxLm:
        return JoinedMlxLm(caches)

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens (B, T), unchanged: the model embeds them itself."""
        return tokens

    def layers(self, tokens: mx.array, cache: MlxLmCache | JoinedMlxLm) -> mx.array:
        """tokens (B, T) -> logits (B, T, V)."""
        if isinstance(cache, JoinedMlxLm):
            together: mx.array = self._model(tokens.T, cache=cache.parts)  # (N, 1) -> (N, 1, V)
            return together.swapaxes(0, 1)
        if self._long_rope is not None:
            self._turn(self._long_rope, tokens, cache)
        logits: mx.array = self._model(tokens, cache=cache.parts)
        return logits

    def _turn(self, rope: LongRope, tokens: mx.array, cache: MlxLmCache) -> None:
        """Let the rope and every key in the cache be turned as the sequence's new length wants it."""
        said = said_before(cache.said, cache.length)
        long = cache.length + tokens.shape[1] > rope.original
        rope.use(long)
        if said and long != cache.long:
            cache.start_again(self._fresh_parts())
            for piece in mx.concatenate(said, axis=1).split(tuple(range(CHUNK, cache.length, CHUNK)), axis=1):
                self._model(piece, cache=cache.parts)
                mx.eval(cache.arrays)
        cache.long, cache.said = long, [*said, tokens]

    def logits(self, x: mx.array) -> mx.array:
        """(B, T, V) -> (B, V)."""
        return x[:, -1]

    def _fresh_parts(self) -> list[Any]:
        return make_parts(self._model, self.kv_format)
