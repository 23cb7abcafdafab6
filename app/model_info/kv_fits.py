"""Longest context that fits into memory in each K/V format.

`models list` and `models show` print it, `model_report.py` has it in documents as `context_fits`. Weights, working
memory and recurrent state are subtracted first; the rest of the memory holds K/V.

Guard: tests/app/model_info/test_kv_fits.py.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.runtime.ops.kv_format import FLOAT16, FORMATS, KVFormat

if TYPE_CHECKING:
    from headrace.models.cost.step_shape import StepShape

Fits = dict[str, int]
"""Tokens by format name, up to the model's limit; 0 if the weights do not fit."""


NOTHING = "nothing"
"""Text of `fits_text` where no context fits."""


def kv_fits(shape: "StepShape", usable: int | None, *, packs: bool) -> Fits | None:
    """Return the context that fits into `usable` bytes; None if `usable` is unknown.

    packs: the model allows formats other than f16, as far as head sizes do.
    """
    if usable is None:
        return None
    from headrace.models.cost.costs import working_memory
    from headrace.runtime import ops

    room = usable - shape.resident_bytes - working_memory(shape)
    formats: Sequence[KVFormat] = (FLOAT16,)
    if packs and ops.select().supports_packed(shape.head_dim):
        formats = FORMATS
    return {kind.name: shape.with_kv(kind).cost.longest_context(room, shape.context_length) for kind in formats}


def usable_memory() -> int | None:
    """Return the bytes available to a model now; None if unknown."""
    from headrace.runtime.machine.memory import budget

    memory = budget()
    if memory is None:
        return None
    return memory.usable


def fits_text(fits: Mapping[str, int] | None, limit: int | None) -> str:
    """Format for prose: `all 8,192`, `f16 41,200 · q8 all`, `nothing`; empty if unknown."""
    if not fits:
        return ""
    if not any(fits.values()):
        return NOTHING
    if fits[FLOAT16.name] == limit:
        return f"all {limit:,}"
    parts = []
    for name, tokens in _telling(fits, limit):
        count = "all" if tokens == limit else f"{tokens:,}"
        parts.append(f"{name} {count}")
    return " · ".join(parts)


def fits_short(fits: Mapping[str, int] | None, limit: int | None) -> str:
    """Format for a column: `134k/252k/all`, `all`, `-` if nothing fits or it is unknown."""
    if not fits or not any(fits.values()):
        return "-"
    counts = [tokens for _, tokens in _telling(fits, limit)]
    return "/".join("all" if count == limit else _short_count(count) for count in counts)


def _short_count(tokens: int) -> str:
    if tokens >= 1024:
        return f"{tokens >> 10}k"
    return str(tokens)


def _telling(fits: Mapping[str, int], limit: int | None) -> list[tuple[str, int]]:
    """Return the formats up to the first in which everything fits."""
    last = next((number for number, tokens in enumerate(fits.values(), 1) if tokens == limit), len(fits))
    return list(fits.items())[:last]
