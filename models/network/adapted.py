"""Weights with an adapter: its low-rank products beside those of the weights (`models.checkpoint.adapter`).

A quantized weight stays as it is: y = W x + B (A x). The native kernels add the second product within the node of the
first (`Ops.add_low_rank`); with other operations `AdaptedOps` adds it. A plain weight has B A added when it is read.
N = outputs of a projection, K = inputs, r = rank.

Guard: tests/models/network/test_adapters.py.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from headrace.models.checkpoint.adapter import Adapter
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from headrace.runtime.ops import Curve, LayersNode, LayerWeights, LowRank, Ops, Weight
from headrace.runtime.ops.activations import unit

# A module of a text layer, in any spelling of a multimodal checkpoint. Other towers have layers, too.
_IN_LAYERS = re.compile(r"(?:(?:model|language_model|text_model)\.)*(layers\.\d+\..*)")


class Change(NamedTuple):
    """A (r, K) and B (N, r) as stored: scale * B A is added to a weight."""

    a: mx.array
    b: mx.array
    scale: float

    def rows(self, order: mx.array) -> "Change":
        """Return the change of these rows."""
        return self._replace(b=self.b[order])

    def scaled(self) -> tuple[mx.array, mx.array]:
        """Return A, and B with the scale in it, in float32."""
        return self.a.astype(mx.float32), self.b.astype(mx.float32) * self.scale

    def merged(self, weight: mx.array) -> mx.array:
        """Return W + scale * B A in the type of W (N, K), computed in float32."""
        a, b = self.scaled()
        return (weight.astype(mx.float32) + b @ a).astype(weight.dtype)


class Factors(NamedTuple):
    """A change, prepared for the operations."""

    a: Weight
    b: Weight


class Changes:
    """An adapter's changes by module, each taken once.

    adapter: None changes nothing.
    stored: tensor names of the text part -> names in the checkpoint.
    Raises UnsupportedModelError for a change of what the checkpoint does not have.
    """

    def __init__(self, adapter: Adapter | None, stored: Mapping[str, str]) -> None:
        self.exist = adapter is not None
        self._left: dict[str, Change] = {}
        if adapter is None:
            return
        arrays = mx.load(str(adapter.file), format="safetensors")
        assert isinstance(arrays, dict)
        modules = module_names(stored)
        for name, stated in adapter.modules.items():
            module = modules.get(name) or modules.get(below_the_model(name))
            if module is None or module in self._left:
                raise _wrong_base(adapter, f"changes {name}, which the model does not have")
            a = arrays[stated.a]
            b = arrays[stated.b]
            if stated.transposed:
                a = mx.contiguous(a.T)
                b = mx.contiguous(b.T)
            self._left[module] = Change(a, b, stated.scale)
        factors = [factor for change in self._left.values() for factor in change.scaled()]
        if not mx.all(mx.stack([mx.isfinite(factor).all() for factor in factors])).item():
            raise CheckpointError(f"the adapter {adapter.path.name} has factors that are infinite or no numbers")

    def take(self, module: str, rows: int, columns: int) -> Change | None:
        """Return the change of a module of this size; None without one. Raises CheckpointError for another size."""
        change = self._left.pop(module, None)
        if change is not None and (change.b.shape[0], change.a.shape[1]) != (rows, columns):
            raise CheckpointError(
                f"the adapter changes {module} as a matrix of {change.b.shape[0]} x {change.a.shape[1]}, "
                f"the model has {rows} x {columns}"
            )
        return change

    def keep(self, module: str, change: Change | None) -> None:
        """Put back the change of a module that is read in two parts."""
        if change is not None:
            self._left[module] = change

    def check_taken(self) -> None:
        """Raise UnsupportedModelError if something that the adapter changes was not read as a projection."""
        if self._left:
            raise UnsupportedModelError(
                f"the adapter changes {min(self._left)}, to which headrace applies no adapter",
                "merge the adapter into its base, and load the result",
            )


def _wrong_base(adapter: Adapter, reason: str) -> UnsupportedModelError:
    hint = f"it was made for {adapter.base}" if adapter.base else None
    return UnsupportedModelError(f"the adapter {adapter.path.name} {reason}", hint)


def module_names(stored: Mapping[str, str]) -> dict[str, str]:
    """Return our names of modules by those of the checkpoint, and by our own, whole and from `layers` on."""
    modules: dict[str, str] = {}
    for ours, theirs in stored.items():
        if not ours.endswith(".weight"):
            continue
        module = ours.removesuffix(".weight")
        names = {module, theirs.removesuffix(".weight")}
        # An adapter names modules as the checkpoint or as we do, with what stands before `layers` or without it.
        modules |= dict.fromkeys(names | {below_the_model(name) for name in names}, module)
    return modules


def below_the_model(name: str) -> str:
    """Return the name of a text layer's module from `layers` on; other names as they are."""
    match = _IN_LAYERS.fullmatch(name)
    if match is None:
        return name
    return match[1]


def low_rank_products(changes: Sequence[Change | None], rows: Iterable[int]) -> list[LowRank]:
    """Return the products of stacked modules with these rows."""
    products = []
    start = 0
    for change, count in zip(changes, rows, strict=True):
        if change is not None:
            products.append(LowRank(start, *change))
        start += count
    return products


def joined(changes: Sequence[Change | None], rows: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Return A, and B with the scales in it, of stacked modules with these rows.

    Their ranks follow one another in A. B has zeros where a rank is another module's.
    """
    ranks = sum(change.a.shape[0] for change in changes if change is not None)
    a_parts = []
    b_parts = []
    start = 0
    for change, count in zip(changes, rows, strict=True):
        b = mx.zeros((count, 0))  # (rows of the module, its rank)
        if change is not None:
            a, b = change.scaled()
            a_parts.append(a)
        rank = b.shape[1]
        b_parts.append(mx.pad(b, [(0, 0), (start, ranks - start - rank)]))
        start += rank
    return mx.concatenate(a_parts), mx.concatenate(b_parts)


class AdaptedOps:
    """Operations that add the products of `factors`, by the prepared weight to whose product they are added.

    A layer with one of these weights is computed one operation at a time. Every operation that multiplies by a single
    projection is overridden, but for `experts`: factors of its router, and of projections around experts, are refused
    (`Parameters.refuse_factors`). Stacks of experts never have factors (`Changes.check_taken`), and those of embeddings
    are refused by their names or sizes. `tests/models/network/test_adapters.py` compares with merged weights.
    """

    def __init__(self, ops: Ops, factors: Mapping[Weight, Factors]) -> None:
        self._ops = ops
        self._factors = factors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def fuse(self, layers: Sequence[LayerWeights], eps: float, activation: str, **more: Any) -> LayersNode | None:
        if any(weight in self._factors for layer in layers for weight in layer.matrices):
            return None
        return self._ops.fuse(layers, eps, activation, **more)

    def linear(self, x: mx.array, w: Weight) -> mx.array:
        product = self._ops.linear(x, w)
        factors = self._factors.get(w)
        if factors is None:
            return product
        return product + self._ops.linear(self._ops.linear(x, factors.a), factors.b)

    def linear_add(self, x: mx.array, w: Weight, residual: mx.array) -> mx.array:
        if w not in self._factors:
            return self._ops.linear_add(x, w, residual)
        return residual + self.linear(x, w)

    def linear_add_norm(
        self,
        x: mx.array,
        w: Weight,
        residual: mx.array,
        post_norm: mx.array | None,
        norm: mx.array | None,
        eps: float,
        scalar: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        if w not in self._factors:
            return self._ops.linear_add_norm(x, w, residual, post_norm, norm, eps, scalar)
        return self._ops.add_norms(self.linear(x, w), residual, post_norm, norm, eps, scalar)

    def norm_linear(self, x: mx.array, norm: mx.array | None, eps: float, w: Weight) -> mx.array:
        if w not in self._factors:
            return self._ops.norm_linear(x, norm, eps, w)
        if norm is not None:
            x = self._ops.rms_norm(x, norm, eps)
        return self.linear(x, w)

    def norm_glu(self, x: mx.array, norm: mx.array | None, eps: float, w: Weight, activation: str | Curve) -> mx.array:
        if w not in self._factors:
            return self._ops.norm_glu(x, norm, eps, w, activation)
        # Not compiled: this runs on the CPU, too, where MLX would run a C++ compiler first.
        return unit(self.norm_linear(x, norm, eps, w), activation, compiled=False)
