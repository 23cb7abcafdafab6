"""The share of every parameter that a decode step reads, from the traced graph of an mlx-lm model.

Matrices count as a whole for every product, so those of layers that run several times have a share above 1. Stacks of
experts count by the share that the router's indices select, tables by the gathered part. Rows looked up by the token
itself do not count, and unused parameters have no share. If a step cannot be traced, tables are recognised by their
class, and the share of experts follows from the config.

tests/models/mlx_lm/test_costs.py guards this.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from headrace.models.architectures.fields import text_section
from headrace.models.mlx_lm.cache import leaves

# Operations that return their input, or a part of it, in another shape, without reading it.
_VIEWS = (
    "AsStrided", "Broadcast", "Contiguous", "Copy", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze",
    "StopGradient", "Transpose", "Unflatten",
)  # fmt: skip
# Config keys of the number of experts per token.
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
# Operations that read a matrix anew each time.
_PRODUCTS = frozenset({"AddMM", "GatherMM", "GatherQMM", "Matmul", "QuantizedMatmul"})
_POOLED = 256  # tokens: a multiple of the groups that caches with a window pool
_Value = tuple[str, tuple[int, ...], mx.Dtype]  # in a traced graph: name, shape, element type


def touched_shares(model: nn.Module, config: Mapping[str, object], vocab_size: int) -> dict[str, float]:
    """Return by parameter the share of its bytes that one step of one token reads. Logits: (B, T, `vocab_size`).

    Above 1: in a network that runs a layer several times in one step.
    """
    device = mx.default_device()
    mx.set_default_device(mx.cpu)  # custom GPU kernels of a class cannot be traced, their replacements can
    try:
        return _traced(model)
    except (ValueError, RuntimeError):
        return _assumed(model, config, vocab_size)
    finally:
        mx.set_default_device(device)


def _traced(model: nn.Module) -> dict[str, float]:
    """Return the shares by the graph of one step. Raises ValueError or RuntimeError if it cannot be exported."""
    parameters = [(name, array) for name, array in tree_flatten(model.parameters()) if isinstance(array, mx.array)]
    names = [name for name, _ in parameters]
    events: list[dict[str, Any]] = []  # of `mx.export_function`: inputs, then primitives in order
    states = _states(model)

    def step(token: mx.array, *arrays: mx.array) -> mx.array:
        model.update(tree_unflatten(list(zip(names, arrays, strict=True))))
        parts = make_prompt_cache(model)
        for part, state in zip(leaves(parts), states, strict=True):
            vars(part).update(tree_map(_zeros, state))
        logits: mx.array = model(token, cache=parts)
        return logits

    try:
        mx.export_function(events.append, step, mx.array([[0]]), *(array for _, array in parameters))
    finally:
        model.update(tree_unflatten(parameters))
    inputs = next(event["inputs"] for event in events if event["type"] == "inputs")
    read = _bytes_read(inputs, [event for event in events if event["type"] == "primitive"])
    return {
        name: read[value[0]] / max(array.nbytes, 1) for (name, array), value in zip(parameters, inputs[1:], strict=True)
    }


def _states(model: nn.Module) -> list[dict[str, Any]]:
    """Return attributes of each cache after some tokens, if a step reads parameters because of them; else none.

    The first step of a sequence has no recurrent state, so it would not read the parameters of its decay. Nor has it
    entries that are pooled from several tokens, so it would not read those of their index. Evaluates nothing.
    """
    parts = make_prompt_cache(model)
    model(mx.array([[0]]), cache=parts)
    if any(hasattr(part, "window_size") for part in leaves(parts)):
        parts = make_prompt_cache(model)
        model(mx.zeros((1, _POOLED), mx.int32), cache=parts)
    states: list[dict[str, Any]] = []
    for part in leaves(parts):
        if isinstance(part, ArraysCache) and all(isinstance(array, mx.array) for array in part.cache):
            states.append({"cache": part.cache})
        elif hasattr(part, "window_size"):
            states.append(dict(vars(part)))
        else:
            states.append({})
    return states


def _zeros(leaf: object) -> object:
    """Return zeros in place of an array."""
    return mx.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, mx.array) else leaf


def _bytes_read(inputs: Sequence[_Value], primitives: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    """Return the bytes read of each input by name. The first input is the token."""
    from_token = {inputs[0][0]}  # the token and values computed from it alone
    seen = {value[0]: (value[0], _nbytes(value)) for value in inputs[1:]}  # view -> (input, bytes)
    read: defaultdict[str, float] = defaultdict(float)  # by operations that share one read: at most the whole input
    multiplied: defaultdict[str, float] = defaultdict(float)  # by products, each of which reads its matrix anew
    for primitive in primitives:
        kind = primitive["name"]
        operands = primitive["inputs"]
        results = primitive["outputs"]
        sources = [operand for operand in operands if operand[0] in seen]
        if not sources:
            if any(operand[0] in from_token for operand in operands):
                from_token.update(result[0] for result in results)
        elif kind in _VIEWS:
            origin, nbytes = seen[sources[0][0]]
            seen.update((result[0], (origin, min(nbytes, _nbytes(result)))) for result in results)
        elif kind == "Gather" and operands[0][0] in seen:
            if not any(operand[0] in from_token for operand in operands[1:]):  # else a table of tokens
                origin, _ = seen[operands[0][0]]
                read[origin] += sum(_nbytes(result) for result in results)
        else:
            sums = multiplied if kind in _PRODUCTS else read
            for name, shape, _ in sources:
                origin, nbytes = seen[name]
                if kind.startswith("Gather"):  # products with chosen experts of a stack (X, ...)
                    _, indices_shape, _ = operands[-1]  # the experts' indices
                    nbytes = nbytes * min(1.0, prod(indices_shape) / shape[0])
                sums[origin] += nbytes
    return {value[0]: max(multiplied[value[0]], min(read[value[0]], _nbytes(value))) for value in inputs[1:]}


def _nbytes(value: _Value) -> int:
    """Return the bytes of a value of the graph."""
    _, shape, dtype = value
    return prod(shape) * int(dtype.size)


def _assumed(model: nn.Module, config: Mapping[str, object], vocab_size: int) -> dict[str, float]:
    """Return the shares by classes of modules and the config's number of active experts."""
    text = text_section(config)
    sections = (text, text.get("ffn_config") or {})
    active = next((part[key] for part in sections for key in _ACTIVE_EXPERTS if isinstance(part.get(key), int)), None)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    tables = _looked_up(modules, vocab_size)
    shares = {}
    listed = _listed_experts(modules)
    for name, array in tree_flatten(model.parameters()):
        path = owner(modules, name)
        mixture, of_list, _ = path.partition(".experts.")
        stacked = isinstance(modules[path], QuantizedSwitchLinear | SwitchLinear)
        if stacked:
            count = array.shape[0]
        elif of_list:
            count = listed.get(mixture, 0)
        else:
            count = 0
        shares[name] = 1.0
        if active and count:
            shares[name] = min(1.0, active / count)
        if path in tables:
            shares[name] = 0.0
    return shares


def _listed_experts(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return by path of a mixture the number of its experts, if they are a list of modules."""
    numbers: defaultdict[str, set[str]] = defaultdict(set)
    for path in modules:
        mixture, _, rest = path.partition(".experts.")
        number = rest.partition(".")[0]
        if number.isdecimal():
            numbers[mixture].add(number)
    return {mixture: len(experts) for mixture, experts in numbers.items()}


def _looked_up(modules: Mapping[str, nn.Module], vocab_size: int) -> set[str]:
    """Return the embedding tables of which a step reads one row.

    These are all tables except the output table: the only one with a row per logit, or the narrowest of them, since
    Gemma's tables per layer are wider than the model.
    """
    rows = {path: module for path, module in modules.items() if "weight" in module}
    tables = {path: module for path, module in rows.items() if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)}
    of_vocabulary = {path for path, module in rows.items() if module.weight.shape[0] == vocab_size}
    shared = of_vocabulary & tables.keys()
    if of_vocabulary == shared and shared:
        return tables.keys() - {min(shared, key=lambda path: tables[path].weight.shape[1])}
    return set(tables)


def owner(modules: Mapping[str, nn.Module], parameter: str) -> str:
    """Return the path of the module that has a parameter."""
    path = parameter
    while path not in modules:
        path = path.rpartition(".")[0]
    return path
