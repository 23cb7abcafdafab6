"""GPT-OSS's experts as transformers stores them, under the names and in the layout that MLX's conversions have.

Gate and up come as one, row by row in turn: `gate_up_proj_blocks` (X, 2 F, G, 16) and `_scales`, a byte for each group
of 32 (mxfp4), or, plain, `gate_up_proj` (X, E, 2 F), its columns in turn; `gate_up_proj_bias` (X, 2 F). `down_proj`
likewise.
"""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

_STORED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_blocks|_scales|_bias)?")
_PARTS = {"_blocks": "weight", "_scales": "scales", "_bias": "bias", None: "weight"}


def stacks_of(name: str) -> list[str]:
    """The tensors that the tensor `name` becomes, in equal shares; none where it is not stored this way."""
    found = _STORED.fullmatch(name)
    if found is None:
        return []
    experts, stored, part = found.groups()
    modules = ["gate_proj", "up_proj"] if stored == "gate_up_proj" else [stored]
    return [f"{experts}.{module}.{_PARTS[part]}" for module in modules]


def with_stacks(arrays: "dict[str, mx.array]") -> "dict[str, mx.array]":
    """The arrays, lazily, with what is stored this way as stacks (X, N, ...)."""
    import mlx.core as mx  # here: `stacks_of` is asked where nothing heavy may be loaded

    result: dict[str, mx.array] = {}
    for name, array in arrays.items():
        stacks = stacks_of(name)
        if not stacks:
            result[name] = array
            continue
        if name.endswith("_blocks"):
            array = array.reshape(*array.shape[:2], -1).view(mx.uint32)
        elif not name.endswith(("_scales", "_bias")):
            array = array.swapaxes(1, 2)
        for i, stack in enumerate(stacks):
            result[stack] = array[:, i :: len(stacks)]
    return result
