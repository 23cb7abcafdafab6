"""Our CPU kernels in an mlx-lm model: layers by module type, and functions that its classes call.

Projections, stacks of experts and embedding tables become modules that call `runtime.ops` with the weights in the types
they are stored in; RMSNorm runs there, too. Everything else of a class stays stock MLX, recurrent state and
convolutions included, and so does a layer of which the class reads the weights itself.

Classes import functions for attention, rotation and activations by name, so a model's modules get subclasses whose
methods see ours. Other models in the process keep mlx-lm's. Attention over a quantized cache goes to mlx-lm's function.
Other calls that the kernels do not support go to MLX's operations: here, or in `Ops`. A new function is a method of
`KernelFunctions` with the original's parameters, and an entry of `_replacements`.

Guard: tests/models/mlx_lm/test_kernels.py.
"""

from collections.abc import Callable, Container, Mapping
from copy import copy
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from msgspec import Struct

from headrace.models.mlx_lm.cache import CachePart
from headrace.runtime.ops import Ops, Phase, Rope, Weight

Names = dict[str, object]  # members of a module or a class
Stored = dict[str, dict[str, mx.array]]
"""Arrays of each layer in the types of its checkpoint, by path and parameter."""

_PARTS = ("weight", "scales", "biases", "bias")
_TABLES = (nn.Embedding, nn.QuantizedEmbedding)
# Names of routers, or of the module around one. They choose whole experts, so they are never rounded further.
_ROUTERS = {"gate", "router"}
_MOST_ROPES = 64  # of a model; more come from a class that makes new periods in each pass


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
    functions: "KernelFunctions"  # which the network tells the phase of a pass


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

    def __init__(self, functions: "KernelFunctions", rope: nn.RoPE) -> None:
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


# Functions that classes call


class KernelFunctions:
    """Replacements on `ops`. phase: of the rows of the pass that is built; None: one token is a decode step."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.phase: Phase | None = None
        self._ropes: dict[object, Rope] = {}  # by settings, or by the id of periods, which they hold

    def bind(self, model: nn.Module) -> None:
        """Give every module of an mlx-lm model a class whose methods call these functions."""
        ours = self._replacements()
        namespaces: dict[str, Names] = {}
        classes: dict[type, type] = {}
        # A shared object would bind every model in the process: each gets its own.
        for _, module in model.named_modules():
            shared = module.get("activation")
            if isinstance(shared, nn.Module):  # a default argument of mlx-lm's classes
                module.activation = copy(shared)
        for _, module in model.named_modules():
            stock = type(module)
            if stock not in classes:
                classes[stock] = _bound_class(stock, ours, namespaces)
            if classes[stock] is not stock:
                module.__class__ = classes[stock]

    def _replacements(self) -> dict[int, object]:
        """Return replacements of functions and modules by the id of the original.

        By id, since a class may have imported the original under any name.
        """
        from mlx_lm.models import activations, base

        fast = _module(mx.fast, rms_norm=self.rms_norm, rope=self.rope)
        return {
            id(base.scaled_dot_product_attention): self.attention,
            id(activations.swiglu): self.swiglu,
            id(nn): _module(nn, silu=self.silu, gelu_approx=self.gelu_approx),
            id(mx): _module(mx, fast=fast),
        }

    def attention(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: object,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend over a cache's keys and values, with the parameters of mlx-lm's function."""
        from mlx_lm.models.base import scaled_dot_product_attention

        if hasattr(cache, "bits") or not isinstance(keys, mx.array):
            stock: mx.array = scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
            return stock
        return self._ops.attend_heads(queries, keys, values, scale, mask, sinks, self.phase)

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float, **options: Any) -> mx.array:
        if weight is None or options:
            return mx.fast.rms_norm(x, weight, eps, **options)
        return self._ops.rms_norm(x, weight, eps)

    def rope(
        self,
        x: mx.array,
        dims: int,
        *,
        base: float | None = None,
        scale: float = 1.0,
        offset: int | mx.array = 0,
        freqs: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        """Rotate heads as `mx.fast.rope` does, with its parameters; calls that the kernels do not support go to it."""
        supported = x.ndim == 4 and not any(options.values()) and (freqs is None or scale == 1.0)
        if isinstance(offset, int) and supported:
            rope = self._rope(dims, base, scale, freqs)
            if rope is not None:
                return self._ops.rotate_heads(x, rope, offset)
        return mx.fast.rope(x, dims, base=base, scale=scale, offset=offset, freqs=freqs, **options)

    def _rope(self, dims: int, base: float | None, scale: float, freqs: mx.array | None) -> Rope | None:
        """Return the rotation, shared by the layers; None if a class makes new ones all the time."""
        key: object = id(freqs)
        if freqs is None:
            key = (dims, base, scale)
        if key not in self._ropes:
            if len(self._ropes) >= _MOST_ROPES:
                return None
            if freqs is None:
                assert base is not None
                freqs = mx.array([base ** (2 * i / dims) / scale for i in range(dims // 2)], mx.float32)
            self._ropes[key] = Rope(dims, freqs)
        return self._ropes[key]

    def swiglu(self, gate: mx.array, x: mx.array) -> mx.array:
        return self._ops.glu(gate, x, "silu")

    def silu(self, x: mx.array) -> mx.array:
        return self._ops.activate(x, "silu")

    def gelu_approx(self, x: mx.array) -> mx.array:
        return self._ops.activate(x, "gelu")


def _module(stock: ModuleType, **replaced: object) -> ModuleType:
    """Return a copy of a module with some of its members replaced."""
    copied = ModuleType(stock.__name__)
    copied.__dict__.update(vars(stock), **replaced)  # the stock module stays as it is, for other models
    return copied


def _bound_class(stock: type, ours: dict[int, object], namespaces: dict[str, Names]) -> type:
    """Return a subclass whose methods see `ours`; the class itself if it has no methods of mlx-lm's model files."""
    members: Names = {}
    for base in reversed(stock.__mro__):  # a subclass comes after its bases, and its members replace theirs
        for name, member in vars(base).items():
            # First, since a subclass may replace a function of the model files by one from elsewhere, which stays.
            members.pop(name, None)
            # The modules exist already, so `__init__` is not called.
            if isinstance(member, FunctionType) and _of_models(member) and name != "__init__":
                members[name] = _with_globals(member, _namespace(member, ours, namespaces))
    if not members:
        return stock
    return type(stock.__name__, (stock,), {**members, "__module__": stock.__module__})


def _namespace(function: FunctionType, ours: dict[int, object], namespaces: dict[str, Names]) -> Names:
    """Return the globals of a function's module with `ours` in place of the originals, its own functions included."""
    name = function.__module__
    if name not in namespaces:
        own_globals = dict(function.__globals__)
        namespaces[name] = own_globals
        for key, value in function.__globals__.items():
            if id(value) in ours:
                own_globals[key] = ours[id(value)]
            elif isinstance(value, FunctionType) and value.__module__ == name:
                own_globals[key] = _with_globals(value, own_globals)
    return namespaces[name]


def _of_models(function: FunctionType) -> bool:
    """Return whether a function is defined in a model file of mlx-lm."""
    return function.__module__.startswith("mlx_lm.models.")


def _with_globals(function: FunctionType, own_globals: Names) -> FunctionType:
    """Return the function with other globals."""
    bound = FunctionType(function.__code__, own_globals, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    bound.__module__ = function.__module__
    return bound
