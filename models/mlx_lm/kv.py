"""K/V of mlx-lm's classes in fewer bits: mlx-lm's own quantized caches, for classes that attend to them.

mlx-lm quantizes its plain caches, keys and values in as many bits each. Most classes call mlx-lm's attention, which
reads these caches; others take the arrays apart. A trial pass, never evaluated, tells them apart. All tokens are
quantized: mlx-lm's own generator leaves the first chunk of a prompt plain.

`mlx_lm.network` calls both functions. Guard: tests/models/mlx_lm/test_kv.py.
"""

from collections.abc import Iterable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache
from msgspec.structs import replace

from headrace.models.mlx_lm.cache import CachePart, arrays_in
from headrace.runtime.config import environment
from headrace.runtime.ops import reference
from headrace.runtime.ops.kv_format import Coding, KVFormat

_BITS = {"q8": 8, "q4": 4}
"""Bits of keys and values alike, a whole number of codes in a dword."""


def make_parts(model: nn.Module, stored: KVFormat | None) -> list[CachePart]:
    """Return empty caches of a sequence, one a layer. stored: from `quantized`; None for the class's own choice."""
    parts = list(make_prompt_cache(model))
    if stored is None:
        return parts
    return [part.to_quantized(group_size=stored.keys.group, bits=stored.keys.bits) for part in parts]


def quantized(model: nn.Module, wanted: KVFormat) -> KVFormat | str:
    """Return the packed format for `wanted` that `model` can store K/V in, or the reason why it cannot."""
    if environment.exact():
        return "HEADRACE_EXACT asks for float32 throughout"
    if wanted.name not in _BITS:
        return "mlx-lm's classes run this model, whose caches have keys and values in as many bits each"
    parts = list(make_prompt_cache(model))
    if others := sorted({type(part).__name__ for part in parts if type(part) is not KVCache}):
        return f"the model's class has caches of its own, and mlx-lm does not quantize a {others[0]}"
    _build(model, parts)
    arrays = arrays_in([(part.keys, part.values) for part in parts])
    dims = {int(array.shape[-1]) for array in arrays}
    if not all(reference.supports_packed(dim) for dim in dims):
        return f"MLX quantizes groups of 32, and this model has heads of {min(dims)}"
    stored = _in_groups(wanted, dims, scale_bytes=2 * max(array.dtype.size for array in arrays))
    packed = make_parts(model, stored)
    try:
        _build(model, packed)
    except Exception:  # classes that take arrays for granted raise anything
        return "mlx-lm's class for this model does not attend to quantized caches"
    return stored


def _in_groups(wanted: KVFormat, dims: Iterable[int], scale_bytes: int) -> KVFormat:
    """Return the format in groups that divide heads of all `dims`.

    scale_bytes: of a scale and an offset, which are as wide as K/V.
    """
    bits = _BITS[wanted.name]
    group = 32
    if bits == 8:
        group = min(reference.packed_format(wanted, dim).keys.group for dim in dims)
    coding = Coding(bits, group, scale_bytes)
    return replace(wanted, keys=coding, values=coding)


def _build(model: nn.Module, parts: list[CachePart]) -> None:
    """Build the graphs of a pass over several tokens and of a step after it, never evaluated."""
    for tokens in (2, 1):
        model(mx.zeros((1, tokens), mx.int32), cache=parts)
