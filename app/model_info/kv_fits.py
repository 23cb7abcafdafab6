"""How much context fits into memory in each format that K/V can have here: a figure of every list of models."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.runtime.ops.kv_format import FLOAT16, FORMATS

if TYPE_CHECKING:
    from headrace.models.cost.step_shape import StepShape

Fits = dict[str, int]
"""Tokens by name of a format, up to what the model was made for; 0 where the weights alone do not fit."""


def kv_fits(shape: "StepShape", usable: int | None, *, packs: bool) -> Fits | None:
    """With `usable` bytes for weights, K/V and all else; None where that is not known.

    packs: whether formats other than f16 can be had, as far as that depends on more than the size of heads.
    """
    if usable is None:
        return None
    from headrace.models.cost.costs import working_memory
    from headrace.runtime import ops

    room = usable - shape.resident_bytes - working_memory(shape)
    formats = FORMATS if packs and ops.select().supports_packed(shape.head_dim) else (FLOAT16,)
    return {kind.name: max(0, shape.with_kv(kind).cost.longest_context(room, shape.context_length)) for kind in formats}


def usable_memory() -> int | None:
    """Bytes that a model may take here now; None where the machine does not say."""
    from headrace.runtime.machine.memory import budget

    found = budget()
    return found.usable if found else None


def fits_text(fits: Mapping[str, int] | None, most: int | None) -> str:
    """In words: `all 8,192`, `f16 41,200 · q8 all`, `nothing`; empty where it is not known."""
    if not fits:
        return ""
    if not any(fits.values()):
        return "nothing"
    if fits[FLOAT16.name] == most:
        return f"all {most:,}"
    return " · ".join(f"{name} {'all' if tokens == most else f'{tokens:,}'}" for name, tokens in _telling(fits, most))


def fits_short(fits: Mapping[str, int] | None, most: int | None) -> str:
    """For a column headed by the names: `134k/252k/all`, `all`, `-` where nothing fits or it is not known."""
    if not fits or not any(fits.values()):
        return "-"
    counts = [tokens for _, tokens in _telling(fits, most)]
    return "/".join("all" if n == most else f"{n >> 10}k" if n >= 1024 else str(n) for n in counts)


def _telling(fits: Mapping[str, int], most: int | None) -> list[tuple[str, int]]:
    """Up to the first format in which everything fits: then it does in those that take less, too."""
    last = next((number for number, tokens in enumerate(fits.values(), 1) if tokens == most), len(fits))
    return list(fits.items())[:last]
