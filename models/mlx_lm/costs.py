"""Step cost of an mlx-lm model, from the graph of a step and its caches, without evaluating an array.

    parameters          the share of each that `touched` finds: tables are looked up, experts chosen by the router
    keys and values     every visible row of every layer's cache, sliding windows included

Recurrent state is left out: it is constant, and small compared with the weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from headrace.models.mlx_lm.touched import leaves, owner, touched_shares
from headrace.runtime.metrics.cost import LayerKV, StepCost, attention_flops_per_entry

_SHORT, _LONG = 256, 512  # tokens for measuring cache growth: multiples of every architecture's pooling


@dataclass(frozen=True, slots=True)
class Measured:
    """Reads of a step. shares: read share of each parameter, by name."""

    vocab_size: int
    shares: Mapping[str, float]
    cost: StepCost


def measure(model: Any, config: Mapping[str, Any], shares: Mapping[str, float] | None = None) -> Measured:
    """Return the cost of a step of `model`. Raises what its class raises for an unexpected config.

    shares: read shares of parameters, if they are known.
    """
    vocab_size = int(model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1])
    kv = layers_kv(model, lambda: list(make_prompt_cache(model)))
    shares = touched_shares(model, config, vocab_size) if shares is None else shares
    return Measured(vocab_size, shares, _step_cost(model, config, shares, kv))


def _step_cost(model: Any, config: Mapping[str, Any], shares: Mapping[str, float], kv: Sequence[LayerKV]) -> StepCost:
    text = config.get("text_config", config)
    modules: dict[str, Any] = dict(model.named_modules())
    nbytes = weights = 0.0
    parts: dict[str, float] = {}
    for name, array in tree_flatten(model.parameters()):
        nbytes += shares[name] * array.nbytes
        if (part := _part(name)) is not None:
            parts[part] = parts.get(part, 0.0) + shares[name] * array.nbytes
        if is_matrix(name, array):
            weights += shares[name] * array.size * weights_per_element(modules, name, array)
    heads = text.get("num_attention_heads", 0)
    width = text.get("hidden_size", 0)
    head_dim = text.get("head_dim") or (width // heads if heads else 0)
    known = [(name, round(size)) for name, size in parts.items() if round(size)]
    return StepCost(round(nbytes), 2 * round(weights), kv, attention_flops_per_entry(heads, head_dim), known)


def _part(name: str) -> str | None:
    """Return the part of the network that a parameter belongs to, by its name; None for norms and others."""
    found = {"experts": "experts used", "switch_mlp": "experts used", "attn": "attention", "attention": "attention",
             "mlp": "MLP", "feed_forward": "MLP", "lm_head": "head", "embed_tokens": "head", "wte": "head"}  # fmt: skip
    modules = name.split(".")
    return next((part for word, part in found.items() if any(word in module for module in modules)), None)


def layers_kv(model: Any, make_parts: Callable[[], list[Any]]) -> list[LayerKV]:
    """Return the K/V of every cache that `make_parts` makes for `model`."""

    def probe(tokens: int) -> list[Any]:
        parts = make_parts()
        model(mx.zeros((1, tokens), mx.int32), cache=parts)  # shapes only: never evaluated
        return parts

    parts = leaves(probe(1))
    found = [_of_keys(part) for part in parts]
    if None in found:
        grown = zip(leaves(probe(_SHORT)), leaves(probe(_LONG)), strict=True)
        found = [_of_growth(*pair) if known is None else known for known, pair in zip(found, grown, strict=True)]
    return [layer for layers in found for layer in layers or ()]


def _of_keys(part: Any) -> list[LayerKV] | None:
    """Return K/V from the shapes (1, Hkv, capacity, D) of keys and values, or None if unknown.

    State that does not grow has none. Quantized K/V are several arrays each: codes, scales and offsets.
    """
    keys, values = ([leaf for _, leaf in tree_flatten(getattr(part, name, None))] for name in ("keys", "values"))
    arrays = [leaf for leaf in (*keys, *values) if isinstance(leaf, mx.array)]
    if arrays and len(arrays) == len(keys) + len(values):
        row = sum(int(array.shape[1]) * int(array.shape[3]) * array.dtype.size for array in arrays)
        return [LayerKV(1, row, getattr(part, "max_size", None))]
    return [] if isinstance(part, ArraysCache) else None


def _of_growth(short: Any, long: Any) -> list[LayerKV]:
    """Return K/V from the growth of a cache's arrays; arrays that no longer grow have the rows of its window."""
    layers = []
    window = getattr(long, "window_size", None)
    before = dict(tree_flatten({name: value for name, value in vars(short).items() if value is not None}))
    for name, array in tree_flatten({name: value for name, value in vars(long).items() if value is not None}):
        if not isinstance(array, mx.array) or not isinstance(before.get(name), mx.array):
            continue
        growth = (array.nbytes - before[name].nbytes) / (_LONG - _SHORT)
        if growth > 0:
            layers.append(LayerKV(1, round(growth), window if window and window > _LONG else None))
        elif isinstance(window, int) and window in array.shape:
            layers.append(LayerKV(1, array.nbytes // window, window))
    return layers


def is_matrix(name: str, array: mx.array) -> bool:
    """Return whether a parameter is a matrix, not scales or zero points of one."""
    return array.ndim >= 2 and not name.endswith((".scales", ".biases"))


def weights_per_element(modules: Mapping[str, Any], name: str, array: mx.array) -> float:
    """Return the number of weights in one element of the parameter: several if it is packed."""
    return 32 / int(modules[owner(modules, name)].bits) if array.dtype == mx.uint32 else 1
