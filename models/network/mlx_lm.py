"""Every architecture headrace has no decoder for, run through mlx-lm's own model classes by the same engine.

mlx-lm gives one call for a whole forward pass, so stages 1 to 4 of a step happen inside `layers`; in prefill its
logits are never evaluated. Its caches sit behind the same interface as ours. Importing mlx-lm costs about 0.6 s and
happens only here.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from headrace.models.checkpoint.quantization import Quantization
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.network.long_rope import CHUNK, LongRope, said_before
from headrace.models.network.mlx_lm_costs import leaves, measure
from headrace.models.network.mlx_lm_load import load, quantize, refused
from headrace.runtime.cache import Lengths
from headrace.runtime.cost import LayerKV
from headrace.runtime.errors import EngineError


class MlxLmCache(Lengths):
    """mlx-lm's per-layer caches as one cache. Recurrent and wrapped rotating caches cannot be rolled back."""

    def __init__(self, parts: list[Any], limit: int, kv: Sequence[LayerKV]) -> None:
        super().__init__(limit)
        self.parts = parts
        self.said: list[mx.array] = []  # tokens (1, T) in the order they came: kept for LongRoPE only
        self.long = False  # by which of its factors the keys are turned
        self._kv = kv

    @property
    def can_rollback(self) -> bool:
        return all(_can_trim_after_one_more(part) for part in leaves(self.parts))

    def reserve(self, tokens: int) -> None:
        """mlx-lm's caches grow by themselves."""

    def rollback(self) -> None:
        self._drop(self.length - self.committed)
        super().rollback()

    def trim(self, length: int) -> None:
        surplus = self.length - length
        super().trim(length)
        self._drop(surplus)

    @property
    def committed_bytes(self) -> int:
        return sum(layer.nbytes(self.committed) for layer in self._kv)

    @property
    def allocated_bytes(self) -> int:
        return sum(int(part.nbytes) for part in self.parts if not part.empty())

    @property
    def arrays(self) -> list[mx.array]:
        flat = tree_flatten([part.state for part in self.parts if not part.empty()])
        return [array for _, array in flat if isinstance(array, mx.array)]

    def _drop(self, tokens: int) -> None:
        for part in leaves(self.parts) if tokens else ():
            if _forgotten(part) or part.trim(tokens) != tokens:
                raise EngineError("the cache has forgotten what it would have to go back to")


class MlxLmNetwork:
    """A network (see `runtime.network`) around an mlx-lm model. Until `arrays` are evaluated no weight is read."""

    def __init__(
        self, checkpoint: Checkpoint, *, device: mx.DeviceType, requantize: Quantization | None = None
    ) -> None:
        self._model = load(checkpoint, device)
        if requantize is not None:
            quantize(self._model, requantize)
        self.arrays = [array for _, array in tree_flatten(self._model.parameters()) if isinstance(array, mx.array)]
        try:
            measured = measure(self._model, checkpoint.config)
        except Exception as error:
            raise refused(checkpoint.config, checkpoint.path.name, error) from error
        self._long_rope = LongRope.of(self._model, checkpoint.config)
        self.vocab_size, self.cost = measured.vocab_size, measured.cost

    def make_cache(self, limit: int) -> MlxLmCache:
        return MlxLmCache(self._fresh_parts(), limit, self.cost.kv)

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens (B, T), unchanged: the model embeds them itself."""
        return tokens

    def layers(self, tokens: mx.array, cache: MlxLmCache) -> mx.array:
        """tokens (B, T) -> logits (B, T, V)."""
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
            cache.parts = self._fresh_parts()
            for piece in mx.concatenate(said, axis=1).split(tuple(range(CHUNK, cache.length, CHUNK)), axis=1):
                self._model(piece, cache=cache.parts)
                mx.eval(cache.arrays)
        cache.long, cache.said = long, [*said, tokens]

    def logits(self, x: mx.array) -> mx.array:
        """(B, T, V) -> (B, V)."""
        return x[:, -1]

    def _fresh_parts(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        return list(make_prompt_cache(self._model))


def _can_trim_after_one_more(part: Any) -> bool:
    """Whether a part still holds all it was given, and will after one more token: what it forgot cannot come back."""
    room = getattr(part, "max_size", None) or getattr(part, "chunk_size", None)
    return bool(part.is_trimmable()) and not _forgotten(part) and (room is None or part.offset + 2 < room)


def _forgotten(part: Any) -> int:
    """How many of the tokens that a part was given it has dropped from its front."""
    keys = getattr(part, "keys", None)
    if not isinstance(keys, mx.array):
        return 0
    return max(int(getattr(part, "start_position", 0)), int(part.offset) - int(keys.shape[2]))
