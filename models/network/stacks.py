"""Conversion of stored experts to the layout of MLX conversions: stacks (X, N, ...) of gate, up and down.

GPT-OSS has gate and up as one with alternating rows: `gate_up_proj_blocks` (X, 2 F, G, 16) and `_scales`, one byte per
group of 32 (mxfp4), or plain `gate_up_proj` (X, E, 2 F) with alternating columns; `gate_up_proj_bias` (X, 2 F).
`down_proj` likewise. Other families have both halves as one, which `models.checkpoint.text_part` calls `input_linear`,
(X, 2 F, E). Llama 4 has `gate_up_proj` (X, E, 2 F), gate before up, and `down_proj` (X, F, E), which `text_part` calls
`switch_mlp`.
"""

import re
from typing import Any

from headrace.runtime.errors import CheckpointError

_STORED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_blocks|_scales|_bias)?")
_PARTS = {"_blocks": "weight", "_scales": "scales", "_bias": "bias", None: "weight"}
_HALVES = ".switch_mlp.input_linear."
_COLUMNS = re.compile(r"(.*\.switch_mlp)\.(gate_up_proj|down_proj)")


def stacks_of(name: str) -> list[str]:
    """Return the tensors that the tensor `name` becomes, in equal parts; empty if it is in neither layout."""
    if _HALVES in name:
        return [name.replace("input_linear", half) for half in ("gate_proj", "up_proj")]
    if (match := _COLUMNS.fullmatch(name)) is not None:
        halves = ["down_proj"] if match[2] == "down_proj" else ["gate_proj", "up_proj"]
        return [f"{match[1]}.{half}.weight" for half in halves]
    if (match := _STORED.fullmatch(name)) is None:
        return []
    experts, stored, part = match.groups()
    modules = ["gate_proj", "up_proj"] if stored == "gate_up_proj" else [stored]
    return [f"{experts}.{module}.{_PARTS[part]}" for module in modules]


def with_stacks(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays, or parts of files, lazily, with tensors of these layouts as stacks (X, N, ...).

    Raises CheckpointError for halves of different sizes.
    """
    import mlx.core as mx  # late: callers of `stacks_of` need no mlx

    result: dict[str, Any] = {}
    for name, array in arrays.items():
        stacks = stacks_of(name)
        if not stacks:
            result[name] = array
            continue
        if _HALVES in name or _COLUMNS.fullmatch(name) is not None:
            array = array if _HALVES in name else array.swapaxes(1, 2)
            rows, rest = divmod(array.shape[1], len(stacks))
            if rest:
                raise CheckpointError(f"tensor {name} has no two halves of {array.shape[1]} rows")
            result |= {stack: array[:, i * rows : (i + 1) * rows] for i, stack in enumerate(stacks)}
            continue
        if name.endswith("_blocks"):
            array = array.reshape(*array.shape[:2], -1)
            array = array.view(mx.uint32) if isinstance(array, mx.array) else array.words()
        elif not name.endswith(("_scales", "_bias")):
            array = array.swapaxes(1, 2)
        for i, stack in enumerate(stacks):
            result[stack] = array[:, i :: len(stacks)]
    return result
