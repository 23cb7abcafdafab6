"""Exchange of the layers of an mlx-lm model for our CPU kernels, by module type.

Projections, stacks of experts and embedding tables become modules that call `runtime.ops` with the weights in the types
they are stored in; RMSNorm runs there, too, and so do functions that classes call for attention, rotation and
activations (`functions`). Everything else of a class stays stock MLX, recurrent state and convolutions included, and so
does a layer of which the class reads the weights itself.

Guard: tests/models/mlx_lm/test_kernels.py.
"""

from collections.abc import Callable, Container, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from msgspec import Struct

from headrace.models.mlx_lm.cache import CachePart
from headrace.models.mlx_lm.functions import KernelFunctions
from headrace.runtime.ops import Ops, Weight

Stored = dict[str, dict[str, mx.array]]
"""Arrays of each layer in the types of its checkpoint, by path and parameter."""

_PARTS = ("weight", "scales", "biases", "bias")
_TABLES = (nn.Embedding, nn.QuantizedEmbedding)
# Names of routers, or of the module around one. They choose whole experts, so they are never rounded further.
_ROUTERS = {"gate", "router"}


def stored_arrays(model: nn.Module) -> Stored:
    """Return the arrays of all layers that can be exchanged; call it before they are converted."""
    return {
        path: {part: module[part] for part in _PARTS if part in module and isinstance(module[part], mx.array)}
        for path, module in model.named_modules()
        if _kernel_class(module) is not None
    }


def _kernel_class(module: nn.Module) -> "type[_OnKernels] | None":
    """Return the class that a layer is exchanged for; None if it stays."""
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    if type(module) in (SwitchLinear, QuantizedSwitchLinear) and module.get("global_scale") is None:
        return _Experts
    if type(module) in _TABLES:
        return _Table
    if type(module) in (nn.Linear, nn.QuantizedLinear):
        return _Projection
    return None


def exchange(model: nn.Module, stored: Stored, ops: Ops, make_parts: Callable[[], list[CachePart]]) -> "Exchanged":
    """Exchange layers in place and free their arrays, those in `stored` too. Weights are read and converted now."""
    # Layers with weights
    candidates = {path: module for path, module in model.named_modules() if _kernel_class(module) and path in stored}
    names_read = _read_by_class(model, candidates, make_parts)
    made: dict[int, nn.Module] = {}  # by id of the module: classes may share one
    arrays: list[mx.array] = []
    nbytes: dict[str, int] = {}
    for path, module in candidates.items():
        own_layer = stored.pop(path)
        if _last_name(path) in names_read:
            continue
        if id(module) not in made:
            is_router = not _ROUTERS.isdisjoint(path.split(".")[-2:])
            weight = ops.prepare(_weight(module, own_layer), mx.float32, exact=is_router)
            kernel_class = _kernel_class(module)
            assert kernel_class is not None  # as of all candidates
            made[id(module)] = kernel_class(ops, weight, int(own_layer["weight"].shape[0]))
            arrays += weight.arrays
            for part, array in zip(_PARTS, (weight.data, weight.scales, weight.biases, weight.bias), strict=True):
                if part in own_layer:
                    nbytes[f"{path}.{part}"] = 0  # symmetric weights lose their biases
                if part in own_layer and array is not None:
                    nbytes[f"{path}.{part}"] = array.nbytes
        _put(model, path, made[id(module)])

    # Norms, rotations, and functions that methods call
    functions = KernelFunctions(ops)
    for path, module in model.named_modules():
        if type(module) is nn.RMSNorm:
            _put(model, path, _Norm(ops, module))
        elif type(module) is nn.RoPE:
            _put(model, path, _Rotation(functions, module))
    functions.bind(model)
    return Exchanged(arrays, nbytes, functions)


class Exchanged(Struct, frozen=True):
    """Result of an exchange."""

    arrays: list[mx.array]  # of the exchanged layers
    nbytes: Mapping[str, int]  # theirs, by the name of the parameter they were
    functions: KernelFunctions  # which the network tells the phase of a pass


class _OnKernels(nn.Module):  # type: ignore[misc]
    """A layer with its weight on the kernels. count: first size of the weight, N or the size of a stack."""

    def __init__(self, ops: Ops, weight: Weight, count: int) -> None:
        super().__init__()
        self._ops = ops
        self._weight = weight
        self._count = count


class _Projection(_OnKernels):
    """A projection (..., K) -> (..., N) on the kernels."""

    def __call__(self, x: mx.array) -> mx.array:
        rows = x.astype(mx.float32)
        if rows.ndim != 3:
            rows = rows.reshape(1, -1, x.shape[-1])
        return self._ops.linear(rows, self._weight).reshape(*x.shape[:-1], -1).astype(x.dtype)


class _Table(_Projection):
    """An embedding table on the kernels, tokens (B, T) -> (B, T, E), that may be the output projection, too."""

    def __call__(self, x: mx.array) -> mx.array:
        tokens = x
        if x.ndim != 2:
            tokens = x.reshape(1, -1)
        return self._ops.embed(tokens, self._weight, mx.float32).reshape(*x.shape, -1)

    def as_linear(self, x: mx.array) -> mx.array:
        """Return logits (..., V)."""
        return _Projection.__call__(self, x)


class _Experts(_OnKernels):
    """A stack of X projections on the kernels."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:  # noqa: ARG002
        """Multiply x (..., M, K) by the matrices at `indices` (...), broadcast together -> (..., M, N)."""
        *batch, count, width = x.shape
        if count != 1 or tuple(batch) not in (indices.shape, (*indices.shape[:-1], 1)):
            shape = mx.broadcast_shapes(tuple(batch), indices.shape)
            x = mx.broadcast_to(x, (*shape, count, width))
            indices = mx.broadcast_to(mx.broadcast_to(indices, shape)[..., None], (*shape, count))
            return self._multiply(x, indices)
        return self._multiply(x, indices)[..., None, :]

    def _multiply(self, x: mx.array, indices: mx.array) -> mx.array:
        rows = x.astype(mx.float32).reshape(-1, x.shape[-1])
        return self._ops.expert_linear(rows, indices, self._weight, self._count).astype(x.dtype)


class _Norm(nn.RMSNorm):  # type: ignore[misc]
    """RMSNorm on the kernels. Its weight stays readable."""

    def __init__(self, ops: Ops, norm: nn.RMSNorm) -> None:
        nn.Module.__init__(self)  # not RMSNorm's, which makes a new weight
        self._ops = ops
        self.weight = norm.weight
        self.eps = norm.eps

    def __call__(self, x: mx.array) -> mx.array:
        return self._ops.rms_norm(x, self.weight, self.eps)


class _Rotation(nn.RoPE):  # type: ignore[misc]
    """Rotary position embedding on the kernels."""

    def __init__(self, functions: KernelFunctions, rope: nn.RoPE) -> None:
        super().__init__(rope.dims, rope.traditional, rope.base, rope.scale)
        self._functions = functions

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        settings = {"traditional": self.traditional, "base": self.base, "scale": self.scale}
        return self._functions.rope(x, self.dims, **settings, offset=offset)


class _Probe(nn.Module):  # type: ignore[misc]
    """A layer that adds its names to `read` if a class reads more than its output, such as its weight or `in` it."""

    def __init__(self, inner: nn.Module, names: set[str], read: set[str]) -> None:
        super().__init__()
        object.__setattr__(self, "_probed", (inner, names, read))  # `nn.Module` would count it as a parameter

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        result: mx.array = self._probed[0](*args, **options)
        return result

    def __contains__(self, key: object) -> bool:
        inner, names, read = self._probed
        read |= names
        return key in inner

    def __getattr__(self, key: str) -> Any:
        inner, names, read = object.__getattribute__(self, "_probed")
        if key != "as_linear":  # `_Table` has this method
            read |= names
        return getattr(inner, key)


def _read_by_class(
    model: nn.Module, candidates: Mapping[str, nn.Module], make_parts: Callable[[], list[CachePart]]
) -> Container[str]:
    """Return the last names of the layers of which the class reads weights or settings. Evaluates nothing.

    Names and not paths: a layer of the same name, in a block or a branch that these passes do not run, stays as well.
    """
    read: set[str] = set()
    names: dict[int, set[str]] = {}  # by id of the module: one module may have several paths
    for path, module in candidates.items():
        names.setdefault(id(module), set()).add(_last_name(path))
    probes = {id(module): _Probe(module, names[id(module)], read) for module in candidates.values()}
    for path, module in candidates.items():
        _put(model, path, probes[id(module)])
    try:
        parts = make_parts()
        for tokens in (3, 1, 1):  # a prompt, then steps
            model(mx.zeros((1, tokens), mx.int32), cache=parts)
    finally:
        for path, module in candidates.items():
            _put(model, path, module)
    return read


def _last_name(path: str) -> str:
    """Return the last part of a path: "q_proj" of "model.layers.0.self_attn.q_proj"."""
    return path.rpartition(".")[2]


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at a path."""
    model.update_modules(tree_unflatten([(path, module)]))


def _weight(module: nn.Module, stored: Mapping[str, mx.array]) -> Weight:
    """Return a layer's weight in the types of its checkpoint."""
    data, scales, biases, bias = (stored.get(part) for part in _PARTS)
    assert data is not None
    if scales is None:
        return Weight(data, bias=bias)
    return Weight(data, scales, biases, module.bits, module.group_size, bias, module.mode)
