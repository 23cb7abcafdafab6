"""What one decode step of an mlx-lm model reads and computes, from the graph of a step and the caches it set up.

    parameters          the share of each that `touched` finds: tables are looked up, experts chosen by the router
    keys and values     every visible row of every layer's cache, sliding windows included

Recurrent state is left out: constant, and small beside the weights. Nothing here evaluates an array.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from headrace.models.network.touched import owner, touched_shares
from headrace.runtime.metrics.cost import LayerKV, StepCost, attention_flops_per_entry

_SHORT, _LONG = 256, 512  # tokens to see a cache grow by: multiples of what any architecture pools


@dataclass(frozen=True, slots=True)
class Measured:
    """What a model was found to read in a step. `shares`: of each parameter, by name."""

    vocab_size: int
    shares: Mapping[str, float]
    cost: StepCost


def measure(model: Any, config: Mapping[str, Any]) -> Measured:
    """The cost of a step of `model`. Raises whatever its class raises for a config that it does not expect."""
    from mlx_lm.models.cache import make_prompt_cache

    vocab_size = int(model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1])
    kv = layers_kv(model, lambda: list(make_prompt_cache(model)))
    shares = touched_shares(model, config, vocab_size)
    return Measured(vocab_size, shares, _step_cost(model, config, shares, kv))


def _step_cost(model: Any, config: Mapping[str, Any], shares: Mapping[str, float], kv: Sequence[LayerKV]) -> StepCost:
    text = config.get("text_config", config)
    modules: dict[str, Any] = dict(model.named_modules())
    nbytes = weights = 0.0
    for name, array in tree_flatten(model.parameters()):
        nbytes += shares[name] * array.nbytes
        if is_matrix(name, array):
            weights += shares[name] * array.size * weights_per_element(modules, name, array)
    heads, width = text.get("num_attention_heads", 0), text.get("hidden_size", 0)
    head_dim = text.get("head_dim") or (width // heads if heads else 0)
    return StepCost(round(nbytes), 2 * round(weights), kv, attention_flops_per_entry(heads, head_dim))


def layers_kv(model: Any, make_parts: Callable[[], list[Any]]) -> list[LayerKV]:
    """K/V of every cache that `make_parts` makes for `model`."""

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
    """From the shapes (1, Hkv, capacity, D) of keys and values; state that does not grow has none. None: not known.

    Quantized, they are several arrays each: codes, scales and offsets.
    """
    from mlx_lm.models.cache import ArraysCache

    keys, values = ([leaf for _, leaf in tree_flatten(getattr(part, name, None))] for name in ("keys", "values"))
    arrays = [leaf for leaf in (*keys, *values) if isinstance(leaf, mx.array)]
    if arrays and len(arrays) == len(keys) + len(values):
        row = sum(int(array.shape[1]) * int(array.shape[3]) * array.dtype.size for array in arrays)
        return [LayerKV(1, row, getattr(part, "max_size", None))]
    return [] if isinstance(part, ArraysCache) else None


def _of_growth(short: Any, long: Any) -> list[LayerKV]:
    """From how the arrays of any other cache grow; those that have stopped at the cache's window are its rows."""
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


def leaves(parts: Sequence[Any]) -> list[Any]:
    """The caches, with those that hold several (attention beside recurrent state) taken apart."""
    return [leaf for part in parts for leaf in (leaves(part.caches) if hasattr(part, "caches") else [part])]


def is_matrix(name: str, array: mx.array) -> bool:
    """Whether a parameter multiplies something: two dimensions or more, and no scales or zero points of another."""
    return array.ndim >= 2 and not name.endswith((".scales", ".biases"))


def weights_per_element(modules: Mapping[str, Any], name: str, array: mx.array) -> float:
    """How many weights one element of the parameter holds: several where it is packed."""
    return 32 / int(modules[owner(modules, name)].bits) if array.dtype == mx.uint32 else 1
