"""Exchange of the layers of an mlx-lm model for our CPU kernels, by module type.

Projections and embedding tables become modules that call `runtime.ops` with the weights in the types they are stored
in; RMSNorm runs there, too. Everything else of a class stays stock MLX, and so does a layer of which the class reads
the weights itself.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from headrace.runtime.ops import Ops, Weight

Stored = Mapping[str, Mapping[str, mx.array]]
"""Arrays of each layer in the types of its checkpoint, by path and parameter."""

_PARTS = ("weight", "scales", "biases", "bias")
_TABLES = (nn.Embedding, nn.QuantizedEmbedding)
_ROUTERS = ("gate", "router")  # they choose whole experts
_LAYERS = (nn.Linear, nn.QuantizedLinear, *_TABLES)


def stored_arrays(model: Any) -> dict[str, dict[str, mx.array]]:
    """Return the arrays of all layers that can be exchanged; call it before they are converted."""
    return {
        path: {part: module[part] for part in _PARTS if part in module and isinstance(module[part], mx.array)}
        for path, module in model.named_modules()
        if type(module) in _LAYERS
    }


def exchange(model: Any, stored: Stored, ops: Ops, make_parts: Callable[[], list[Any]]) -> "Exchanged":
    """Exchange layers in place and free their arrays. Weights are read and converted now."""
    candidates = {path: module for path, module in model.named_modules() if type(module) in _LAYERS and path in stored}
    read = _read_by_class(model, candidates, make_parts)
    made: dict[int, nn.Module] = {}  # by id of the module: classes may share one
    arrays: list[mx.array] = []
    nbytes: dict[str, int] = {}
    for path, module in candidates.items():
        name = path.rpartition(".")[2]
        if name in read:
            continue
        if id(module) not in made:
            weight = ops.prepare(_weight(module, stored[path]), mx.float32, exact=name in _ROUTERS)
            made[id(module)] = (_Table if isinstance(module, _TABLES) else _Projection)(ops, weight)
            arrays += weight.arrays
            for part, array in zip(_PARTS, (weight.data, weight.scales, weight.biases, weight.bias), strict=True):
                if array is not None:
                    nbytes[f"{path}.{part}"] = array.nbytes
        _put(model, path, made[id(module)])
    for path, module in model.named_modules():
        if type(module) is nn.RMSNorm:
            _put(model, path, _Norm(ops, module))
    return Exchanged(arrays, nbytes)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Arrays of the exchanged layers, and their bytes by the name of the parameter they were."""

    arrays: list[mx.array]
    nbytes: Mapping[str, int]


class _Projection(nn.Module):  # type: ignore[misc]
    """A projection (..., K) -> (..., N) on the kernels."""

    def __init__(self, ops: Ops, weight: Weight) -> None:
        super().__init__()
        self._ops, self._weight = ops, weight

    def __call__(self, x: mx.array) -> mx.array:
        rows = x.astype(mx.float32)
        rows = rows if x.ndim == 3 else rows.reshape(1, -1, x.shape[-1])
        return self._ops.linear(rows, self._weight).reshape(*x.shape[:-1], -1).astype(x.dtype)


class _Table(_Projection):
    """An embedding table on the kernels, tokens (B, T) -> (B, T, E), that may be the output projection, too."""

    def __call__(self, x: mx.array) -> mx.array:
        tokens = x if x.ndim == 2 else x.reshape(1, -1)
        return self._ops.embed(tokens, self._weight, mx.float32).reshape(*x.shape, -1)

    def as_linear(self, x: mx.array) -> mx.array:
        """Return logits (..., V)."""
        return _Projection.__call__(self, x)


class _Norm(nn.RMSNorm):  # type: ignore[misc]
    """RMSNorm on the kernels. Its weight stays readable."""

    def __init__(self, ops: Ops, norm: nn.RMSNorm) -> None:
        nn.Module.__init__(self)
        self._ops, self.weight, self.eps = ops, norm.weight, norm.eps

    def __call__(self, x: mx.array) -> mx.array:
        return self._ops.rms_norm(x, self.weight, self.eps)


class _Probe(nn.Module):  # type: ignore[misc]
    """A layer that notes the names of layers of which a class reads more than their output."""

    def __init__(self, inner: nn.Module, name: str, read: set[str]) -> None:
        super().__init__()
        object.__setattr__(self, "_probed", (inner, name, read))

    def __call__(self, x: mx.array) -> mx.array:
        result: mx.array = self._probed[0](x)
        return result

    def __contains__(self, key: object) -> bool:
        inner, name, read = self._probed
        read.add(name)
        return key in inner

    def __getattr__(self, key: str) -> Any:
        inner, name, read = object.__getattribute__(self, "_probed")
        if key != "as_linear":
            read.add(name)
        return getattr(inner, key)


def _read_by_class(
    model: Any, candidates: Mapping[str, nn.Module], make_parts: Callable[[], list[Any]]
) -> Container[str]:
    """Return the last names of the layers of which the class reads weights or settings. Evaluates nothing."""
    read: set[str] = set()
    probes = {id(module): _Probe(module, path.rpartition(".")[2], read) for path, module in candidates.items()}
    for path, module in candidates.items():
        _put(model, path, probes[id(module)])
    try:
        parts = make_parts()
        for tokens in (3, 1, 1):
            model(mx.zeros((1, tokens), mx.int32), cache=parts)
    finally:
        for path, module in candidates.items():
            _put(model, path, module)
    return read


def _put(model: Any, path: str, module: nn.Module) -> None:
    model.update_modules(tree_unflatten([(path, module)]))


def _weight(module: Any, stored: Mapping[str, mx.array]) -> Weight:
    data, scales, biases, bias = (stored.get(part) for part in _PARTS)
    assert data is not None
    if scales is None:
        return Weight(data, bias=bias)
    return Weight(data, scales, biases, module.bits, module.group_size, bias, module.mode)
