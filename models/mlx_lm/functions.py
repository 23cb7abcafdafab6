"""Functions that mlx-lm's classes call, on our CPU kernels: attention, rotation, activations, RMSNorm.

Classes import them by name, so a model's modules get subclasses whose methods see ours. Other models in the process
keep mlx-lm's. Attention over a quantized cache goes to mlx-lm's function. Other calls that the kernels do not support
go to MLX's operations: here, or in `Ops`.

`kernels.exchange` calls `bind`. `network` sets the phase before each pass. A new function is a method here with the
original's parameters, and an entry of `_replacements`.

Guards: tests/models/mlx_lm/test_kernels.py.
"""

from copy import copy
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.runtime.ops import Ops, Phase, Rope

_MOST_ROPES = 64  # of a model; more come from a class that makes new periods in each pass
Names = dict[str, object]  # members of a module or a class


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
