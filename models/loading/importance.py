"""Sums of squares of the activations that meet each column of a projection, recorded while a text goes through.

An error of a weight changes an output by as much as the activation it is multiplied with, so that columns with large
activations are rounded more carefully (as llama.cpp's importance matrix does).
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from headrace.models.network.decoder import Decoder
from headrace.runtime.ops import LayersNode, LayerWeights, Ops, Weight, reference

_PLAIN = ("linear", "linear_add", "linear_add_norm")  # x, weight, ...
_NORMED = ("norm_linear", "norm_glu")  # x, norm, epsilon, weight, ...


class _InputRecorder:
    """An `Ops` that computes layers one operation at a time and sums up squares of the inputs of each weight.

    sums: (columns,) by the weight's identity; the recording decoder keeps the weights.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.sums: dict[int, mx.array] = {}

    def fuse(self, _layers: Sequence[LayerWeights], _eps: float, _activation: str, **_: object) -> LayersNode | None:
        """Refuse to fuse: a fused layer's inputs are not seen."""
        return None

    def __getattr__(self, name: str) -> Any:
        """Return an operation, one that has a weight with the recording before it."""
        function = getattr(self._ops, name)
        if name in _PLAIN:
            return self._recorded(function, lambda x, weight, *_: (x, weight))
        if name in _NORMED:
            return self._recorded(function, _normed)
        return function

    def _recorded(self, function: Callable[..., object], read: Callable[..., tuple[mx.array, Weight]]) -> object:
        """Return an operation that records its input. read: returns input and weight of a call."""

        def call(*arguments: object) -> object:
            x, weight = read(*arguments)
            squares = (x.astype(mx.float32).reshape(-1, x.shape[-1]) ** 2).sum(axis=0)
            if id(weight) in self.sums:
                squares = self.sums[id(weight)] + squares
            self.sums[id(weight)] = squares  # (columns,)
            mx.eval(squares)
            return function(*arguments)

        return call


def _normed(x: mx.array, norm: mx.array | None, eps: float, weight: Weight, *_: object) -> tuple[mx.array, Weight]:
    """Return the input of a weight after a norm, and the weight."""
    if norm is None:
        return x, weight
    return reference.rms_norm(x.astype(mx.float32), norm.astype(mx.float32), eps), weight


def record_importance(decoder: Decoder, feed: Callable[[Decoder], None]) -> dict[str, mx.array]:
    """Return the importance of columns (K,) by the name of projections with one input; `feed` runs the decoder."""
    recorder = _InputRecorder(decoder.ops)
    recording = decoder.with_ops(recorder)
    feed(recording)
    weights = recording.weights_by_input()
    return {name: recorder.sums[id(weight)] for name, weight in weights.items() if id(weight) in recorder.sums}
