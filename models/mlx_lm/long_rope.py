"""LongRoPE of mlx-lm's classes, which rotate by the long factors always. See `network.long_rope_decoder`.

docs/workarounds.md has the upstream reference.

Guard: tests/models/mlx_lm/test_long_rope.py.
"""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from headrace.runtime.errors import CheckpointError


class LongRope:
    """Every LongRoPE module of an mlx-lm model, and its two lists of factors."""

    def __init__(
        self,
        modules: list[nn.Module],
        original: int,
        short: mx.array,
        long: mx.array,
        scales: tuple[float, float],
    ) -> None:
        """Switch the factors of these modules.

        modules: the rotations of all layers.
        original: longest sequence of the short factors, in tokens.
        short, long: both lists of factors.
        scales: amplitude with the short factors, and with the long factors.
        """
        # mlx-lm's `_freqs` are periods times the long factors; the quotient gives them the short factors instead.
        self._modules = modules
        self.original = original
        self._short = [module._freqs * (short / long) for module in modules]
        self._long = [module._freqs for module in modules]
        self._scales = scales

    @classmethod
    def of(cls, model: nn.Module, config: Mapping[str, object]) -> "LongRope | None":
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
        original = int(modules[0].original_max_position_embeddings)
        return cls(modules, original, short, long, _scales(section, modules[0]))

    def use(self, long: bool) -> None:
        """Rotate by the long or the short factors from here on. Changes the modules, for all sequences."""
        short_scale, long_scale = self._scales
        frequencies = self._long if long else self._short
        scale = long_scale if long else short_scale
        for module, own_frequencies in zip(self._modules, frequencies, strict=True):
            module._freqs = own_frequencies
            module._scale = scale


def _scales(section: Mapping[str, object], module: nn.Module) -> tuple[float, float]:
    """Return the amplitudes with short and with long factors. Raises CheckpointError if only one is stated.

    section: the config's `rope_scaling`.
    module: a rotation, which has the default amplitude if the config states none.
    """
    short = section.get("short_mscale")
    long = section.get("long_mscale")
    if short is None and long is None:
        return module._scale, module._scale
    # With one alone, the other's default is unknown here: the module has either the stated one or the default.
    if not isinstance(short, int | float) or not isinstance(long, int | float):
        raise CheckpointError("config.json: the longrope section must state short_mscale and long_mscale, or neither")
    return float(short), float(long)
