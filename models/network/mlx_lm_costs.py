"""What one decode step of an mlx-lm model reads and computes, from its modules and the caches it set up.

    embedding tables    looked up, so not counted, except the one that makes the logits too
    expert matrices     the share of them that one token is routed to
    all other tensors   whole
    keys and values     every visible row of every layer's cache, sliding windows included

Recurrent state is left out: constant, and small beside the weights. Nothing here evaluates an array.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from headrace.runtime.cost import LayerKV, StepCost, attention_flops_per_entry

# How architectures call the number of experts a token is routed to.
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")


def step_cost(model: Any, config: Mapping[str, Any], vocab_size: int, kv: Sequence[LayerKV]) -> StepCost:
    """The cost of a step of `model`, whose logits are (B, T, `vocab_size`) and whose caches are `kv`.

    Experts whose active number `config` does not state under a known name count whole.
    """
    text = config.get("text_config", config)
    modules: dict[str, Any] = dict(model.named_modules())
    unread = _looked_up(modules, vocab_size)
    active = next((text[key] for key in _ACTIVE_EXPERTS if isinstance(text.get(key), int)), None)
    nbytes = weights = 0.0
    for name, array in tree_flatten(model.parameters()):
        owner = _owner(modules, name)
        if owner in unread:
            continue
        share = min(1.0, active / array.shape[0]) if active and _holds_experts(modules[owner]) else 1.0
        nbytes += share * array.nbytes
        if array.ndim >= 2 and not name.endswith((".scales", ".biases")):
            weights += share * array.size * _weights_per_element(modules[owner], array)
    heads, width = text.get("num_attention_heads", 0), text.get("hidden_size", 0)
    head_dim = text.get("head_dim") or (width // heads if heads else 0)
    return StepCost(round(nbytes), 2 * round(weights), kv, attention_flops_per_entry(heads, head_dim))


def layers_kv(parts: Sequence[Any]) -> list[LayerKV]:
    """K/V bytes of every cache, from the shapes (1, Hkv, capacity, D) it set up for one token."""
    found = []
    for part in leaves(parts):
        keys, values = getattr(part, "keys", None), getattr(part, "values", None)
        if isinstance(keys, mx.array) and isinstance(values, mx.array):
            row = sum(int(a.shape[1]) * int(a.shape[3]) * a.dtype.size for a in (keys, values))
            found.append(LayerKV(1, row, getattr(part, "max_size", None)))
    return found


def leaves(parts: Sequence[Any]) -> list[Any]:
    """The caches, with those that hold several (attention beside recurrent state) taken apart."""
    return [leaf for part in parts for leaf in (leaves(part.caches) if hasattr(part, "caches") else [part])]


def _looked_up(modules: Mapping[str, Any], vocab_size: int) -> set[str]:
    """The embedding tables of which a step reads one row.

    A table makes the logits where nothing else has a row for every one of them. Should several tables have, it is the
    narrowest, as wide as the model: Gemma's tables per layer are wider.
    """
    rows = {path: module for path, module in modules.items() if "weight" in module}
    tables = {path: module for path, module in rows.items() if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)}
    of_vocabulary = {path for path, module in rows.items() if module.weight.shape[0] == vocab_size}
    shared = of_vocabulary & tables.keys()
    if of_vocabulary == shared and shared:
        return tables.keys() - {min(shared, key=lambda path: tables[path].weight.shape[1])}
    return set(tables)


def _owner(modules: Mapping[str, Any], parameter: str) -> str:
    path = parameter
    while path not in modules:
        path = path.rpartition(".")[0]
    return path


def _holds_experts(module: Any) -> bool:
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    return isinstance(module, QuantizedSwitchLinear | SwitchLinear)


def _weights_per_element(module: Any, array: mx.array) -> float:
    return 32 / int(module.bits) if array.dtype == mx.uint32 else 1
