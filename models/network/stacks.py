"""Conversion of stored experts to the layout of MLX conversions: stacks (X, N, ...) of gate, up and down.

Four layouts are converted (X = experts, E = width, F = inner width, G = groups of 32 weights):

    GPT-OSS   experts.gate_up_proj_blocks (X, 2 F, G, 16)     rows of gate and up alternate; 4-bit floats (mxfp4)
              experts.gate_up_proj_scales (X, 2 F, G)         a byte for each group
              experts.gate_up_proj_bias   (X, 2 F)
              experts.gate_up_proj        (X, E, 2 F)         plain: columns alternate
    Llama 4   switch_mlp.gate_up_proj     (X, E, 2 F)         columns of gate, then of up; Qwen 3 VL's, too, which
                                                              transformers 5 writes as the others'
    DBRX      experts.mlp.gate_proj       (X * F, E)          one expert after the other, also of `down_proj`
    others    switch_mlp.input_linear     (X, 2 F, E)         rows of gate, then of up

`down_proj` of the first two is likewise, with one part. `models.checkpoint.text_part` makes the names of `switch_mlp`.
Norms that are stored head by head (StableLM 2) become one tensor here, too. `tests/models/network/test_stacks.py` has
each layout.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.runtime.errors import CheckpointError

# "model.layers.0.mlp.experts.gate_up_proj_blocks"
_GPT_OSS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_blocks|_scales|_bias)?")
_PARTS = {"_blocks": "weight", "_scales": "scales", "_bias": "bias", None: "weight"}
_MODULES = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}
# "model.layers.0.mlp.switch_mlp.gate_up_proj"
_LLAMA4 = re.compile(r"(.*\.switch_mlp)\.(gate_up_proj|down_proj)")
# "model.layers.0.mlp.experts.mlp.down_proj"
_DBRX = re.compile(r"(.*)\.experts\.mlp\.(gate_proj|up_proj|down_proj)")
# "model.layers.0.self_attn.q_norm.norms.3.weight"
_HEAD_NORM = re.compile(r"(.*\.[qk]_norm)\.norms\.(\d{1,5})\.weight")
_JOINED = ".switch_mlp.input_linear."


def stacks_of(name: str) -> list[str]:
    """Return the tensors that the tensor `name` becomes, in equal parts; empty if it is in none of these layouts."""
    if _JOINED in name:
        return [name.replace("input_linear", half) for half in ("gate_proj", "up_proj")]
    match = _LLAMA4.fullmatch(name)
    if match is not None:
        return [f"{match[1]}.{module}.weight" for module in _MODULES[match[2]]]
    match = _DBRX.fullmatch(name)
    if match is not None:
        return [f"{match[1]}.switch_mlp.{match[2]}.weight"]
    match = _GPT_OSS.fullmatch(name)
    if match is None:
        return []
    experts, stored, part = match.groups()
    return [f"{experts}.{module}.{_PARTS[part]}" for module in _MODULES[stored]]


def inputs_first(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return whether the tensor `name` has experts as (X, inputs, outputs) in Llama 4's layout.

    shapes: of all tensors. Qwen 3 VL's are stored either way: gates and ups are twice the inputs of `down_proj`.
    """
    match = _LLAMA4.fullmatch(name)
    if match is None:
        return False
    gate_up = shapes.get(f"{match[1]}.gate_up_proj")
    down = shapes.get(f"{match[1]}.down_proj")
    return gate_up is None or down is None or gate_up[-1] == 2 * down[1]


def with_stacks(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays, or parts of files, lazily, with tensors of these layouts as stacks (X, N, ...).

    Raises CheckpointError for halves of different sizes.
    """
    arrays = _with_head_norms(arrays)
    result: dict[str, Any] = {}
    shapes = {name: array.shape for name, array in arrays.items() if _LLAMA4.fullmatch(name)}
    for name, array in arrays.items():
        stacks = stacks_of(name)
        if not stacks:
            result[name] = array
        elif _GPT_OSS.fullmatch(name) is not None:
            rows = _gpt_oss_rows(name, array)
            result |= {stack: rows[:, i :: len(stacks)] for i, stack in enumerate(stacks)}
        elif (match := _DBRX.fullmatch(name)) is not None:
            result[stacks[0]] = _dbrx_stack(array, name, arrays.get(f"{match[1]}.router.layer.weight"))
        else:
            rows = array
            if inputs_first(name, shapes):
                rows = array.swapaxes(1, 2)
            size, rest = divmod(rows.shape[1], len(stacks))
            if rest:
                raise CheckpointError(f"tensor {name} has no two halves of {rows.shape[1]} rows")
            result |= {stack: rows[:, i * size : (i + 1) * size] for i, stack in enumerate(stacks)}
    return result


def _with_head_norms(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays with norms of single heads (D,) as those of all, (H, D) (StableLM 2)."""
    norms: dict[str, dict[int, Any]] = {}
    for name, array in arrays.items():
        if (match := _HEAD_NORM.fullmatch(name)) is not None:
            norms.setdefault(f"{match[1]}.weight", {})[int(match[2])] = array
    if not norms:
        return arrays
    import mlx.core as mx  # late: callers of `stacks_of` need no mlx

    from headrace.models.network.weight_arrays import loaded

    others = {name: array for name, array in arrays.items() if _HEAD_NORM.fullmatch(name) is None}
    for name, heads in norms.items():
        if sorted(heads) != list(range(len(heads))) or len({tuple(head.shape) for head in heads.values()}) != 1:
            raise CheckpointError(f"tensor {name} is not of heads 0 to {len(heads) - 1}, of one size")
        others[name] = mx.stack([loaded(heads[i]) for i in range(len(heads))])
    return others


def _dbrx_stack(array: Any, name: str, router: Any) -> Any:
    """Return a tensor (X * F, E) of experts as a stack. router: its rows are the number of experts."""
    count = 0 if router is None else router.shape[0]
    if not count or array.shape[0] % count:
        raise CheckpointError(f"tensor {name} is of no {count} experts")
    stack = array.reshape(count, -1, array.shape[-1])
    return stack.swapaxes(1, 2) if name.endswith("down_proj") else stack


def _gpt_oss_rows(name: str, array: Any) -> Any:
    """Return one of GPT-OSS's tensors as (X, rows, ...)."""
    import mlx.core as mx  # late: callers of `stacks_of` need no mlx

    if name.endswith("_blocks"):  # eight weights in a word
        array = array.reshape(*array.shape[:2], -1)
        if isinstance(array, mx.array):
            return array.view(mx.uint32)
        return array.words()
    if name.endswith(("_scales", "_bias")):
        return array
    return array.swapaxes(1, 2)
