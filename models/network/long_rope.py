"""LongRoPE (arXiv:2402.13753) as its models were trained: short factors up to the original context, long ones beyond.

The factors follow from a sequence's whole length. Keys of one list are invalid once the other list applies: all tokens
are then fed again, as in transformers. mlx-lm's classes rotate by the long factors always.
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from headrace.runtime.errors import CheckpointError
from headrace.runtime.kv.cache import KVCache

CHUNK = 512  # tokens of a pass that feeds a sequence again


class TokenHistory:
    """The tokens of each cache, and which factors rotated its keys. original: longest length of the short factors."""

    def __init__(self, original: int) -> None:
        self._original = original
        self._fed: WeakKeyDictionary[KVCache, tuple[list[mx.array], bool]] = WeakKeyDictionary()

    def append(self, cache: KVCache, tokens: mx.array) -> tuple[bool, list[mx.array]]:
        """Note tokens (1, T) about to be fed. Return whether they use the long factors, and the pieces (1, n) of all
        tokens before, if those have to be fed again."""
        pieces, was_long = self._fed.get(cache, ([], False))
        before = first_tokens(pieces, cache.length)
        long = cache.length + tokens.shape[1] > self._original
        self._fed[cache] = [*before, tokens], long
        if not before or long == was_long:
            return long, []
        return long, mx.concatenate(before, axis=1).split(tuple(range(CHUNK, cache.length, CHUNK)), axis=1)


def first_tokens(pieces: list[mx.array], length: int) -> list[mx.array]:
    """Return the first `length` tokens of pieces (1, T)."""
    kept: list[mx.array] = []
    for piece in pieces:
        if length <= 0:
            break
        kept.append(piece if piece.shape[1] <= length else piece[:, :length])
        length -= piece.shape[1]
    return kept


class LongRope:
    """Every LongRoPE module of an mlx-lm model, and its two lists of factors."""

    def __init__(
        self, modules: list[Any], original: int, short: mx.array, long: mx.array, scales: tuple[Any, Any]
    ) -> None:
        """original: longest sequence of the short factors. scales: amplitudes, if they differ."""
        self._modules = modules
        self.original = original
        self._short = [module._freqs * (short / long) for module in modules]
        self._long = [module._freqs for module in modules]
        self._scales = scales

    @classmethod
    def of(cls, model: Any, config: Mapping[str, Any]) -> "LongRope | None":
        """Return a model's LongRoPE, or None. Raises CheckpointError for lists that do not fit."""
        from mlx_lm.models.rope_utils import SuScaledRoPE

        modules = [module for _, module in model.named_modules() if isinstance(module, SuScaledRoPE)]
        section = config.get("rope_scaling")
        if not modules or not isinstance(section, Mapping):
            return None
        try:
            short, long = (mx.array(section[key], mx.float32) for key in ("short_factor", "long_factor"))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"config.json: the longrope section is broken ({error!r:.80})") from None
        if short.shape != long.shape or any(module._freqs.shape != long.shape for module in modules):
            raise CheckpointError("config.json: the longrope factors are not one for each pair of a head")
        scales = (section.get("short_mscale"), section.get("long_mscale"))
        return cls(modules, int(modules[0].original_max_position_embeddings), short, long, scales)

    def use(self, long: bool) -> None:
        """Rotate by the long or the short factors from here on."""
        for module, frequencies in zip(self._modules, self._long if long else self._short, strict=True):
            module._freqs = frequencies
            if (scale := self._scales[long]) is not None:
                module._scale = scale
