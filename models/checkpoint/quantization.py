"""MLX quantization settings of a checkpoint's modules, and quantization of plain weights.

Affine: groups of G neighbours in a row share a scale and a bias, w = scale * q + bias, q of `bits` bits. The other
modes are floats of 4 or 8 bits that share a scale of one byte: mxfp4, mxfp8 (OCP microscaling formats) and nvfp4.

A config.json states general settings and those of single modules:
{"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 64}}.

Guards: tests/models/network/test_parameters.py and tests/models/loading/test_keep_quantized.py.
"""

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
from msgspec import Struct

from headrace.runtime.errors import CheckpointError, UnsupportedModelError, UsageError
from headrace.runtime.metrics.cost import FLOAT_MODES
from headrace.runtime.ops import Weight, groups_of_16

# Affine settings of MLX
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


class Groups(NamedTuple):
    """Quantization of a stored matrix: one of MLX's settings, or groups of 16 (GGUF's Q6_K)."""

    bits: int
    group_size: int
    mode: str = "affine"


GROUPS_OF_16 = Groups(groups_of_16.BITS, groups_of_16.GROUP)


class Quantization(Struct, frozen=True):
    """`bits` per weight in groups of `group_size`. Raises UsageError for settings that MLX lacks."""

    bits: int
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.group_size not in GROUP_SIZES:
            raise UsageError(
                f"cannot quantize to {self.bits} bits in groups of {self.group_size}",
                f"bits: {', '.join(map(str, BITS))}; group sizes: {', '.join(map(str, GROUP_SIZES))}",
            )

    def fits(self, columns: int) -> bool:
        """Return whether rows of `columns` weights divide into groups."""
        return columns % self.group_size == 0

    def apply(self, data: mx.array) -> Weight:
        """Quantize a plain matrix (N, K) with MLX's quantizer."""
        packed, scales, biases = mx.quantize(data, group_size=self.group_size, bits=self.bits)
        return Weight(packed, scales, biases, self.bits, self.group_size)


def stated_quantization(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the general settings that a config.json states, with those of modules; None without any.

    For a config.json without its weights. MLX conversions write the same section under both names, and older ones under
    the second alone. Sections of other tools that state `bits` are taken as they are: without tensors, their format
    cannot be recognised. For the config of an opened checkpoint see `safetensors.quantization_section`.
    """
    section = config.get("quantization") or config.get("quantization_config")
    if not isinstance(section, Mapping) or not section.get("bits"):
        return None
    return section


def layer_quantization(section: Mapping[str, object] | None, module: str) -> Groups:
    """Return the settings of one module: its own entry in config.json's `quantization`, else the general ones.

    section: of `Checkpoint.quantization`.

    Raises CheckpointError without a section and for an entry that is no object, and UnsupportedModelError for unknown
    modes, bits and group sizes.
    """
    if section is None:
        raise CheckpointError(f"{module} is quantized, but config.json has no quantization section")
    entry = section.get(module, section)
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"config.json: the quantization entry of {module} must be an object, not {entry!r}")
    mode = entry.get("mode", "affine")  # an entry without mode is affine, whatever the general mode
    if isinstance(mode, str) and mode in FLOAT_MODES:
        mode_bits, mode_group_size = FLOAT_MODES[mode]
        bits = entry.get("bits", mode_bits)
        group_size = entry.get("group_size", mode_group_size)
        if (bits, group_size) != (mode_bits, mode_group_size):
            raise UnsupportedModelError(f"{module} is quantized as {mode} to {bits!r} bits by {group_size!r}")
        return Groups(mode_bits, mode_group_size, mode)
    if mode != "affine":
        raise UnsupportedModelError(f"{module} is quantized in mode {mode!r}, which headrace does not know")
    bits = entry.get("bits", section.get("bits"))
    group_size = entry.get("group_size", section.get("group_size"))
    known = (bits in BITS and group_size in GROUP_SIZES) or (bits, group_size) == GROUPS_OF_16[:2]
    if not known or {type(bits), type(group_size)} != {int}:
        raise UnsupportedModelError(f"{module} is quantized to {bits!r} bits in groups of {group_size!r}")
    return Groups(bits, group_size)


def has_groups_of_16(section: Mapping[str, object] | None) -> bool:
    """Return whether any module is in groups of 16, which only the native kernels support."""
    if section is None:
        return False
    entries = [section, *section.values()]
    affine = [entry for entry in entries if isinstance(entry, Mapping) and entry.get("mode", "affine") == "affine"]
    return any(entry.get("group_size") == groups_of_16.GROUP for entry in affine)


def is_known(section: Mapping[str, object] | None) -> bool:
    """Return whether every module has a supported mode; True for plain weights.

    `layer_quantization` checks bits and group sizes.
    """
    if section is None:
        return True
    entries = [section, *(entry for entry in section.values() if isinstance(entry, Mapping))]
    return all(entry.get("mode", "affine") in ("affine", *FLOAT_MODES) for entry in entries)
