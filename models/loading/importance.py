"""Squares of the activations that meet each column of a projection, recorded while a text goes through.

An error of a weight changes an output by as much as the activation it is multiplied with, so that columns with large
activations are rounded more carefully (as llama.cpp's importance matrix does).

Each expert of a stack has its own columns, by the tokens that are routed to it. A short text gives some experts few
tokens, or none: every expert counts as if it had `_SHARED_TOKENS` more, with the mean activations of all experts.
So an expert without tokens has the columns of the others, and is rounded as carefully as they are.

X = experts, K = columns.

Guard: tests/models/loading/test_importance.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from headrace.models.network.decoder import Decoder
from headrace.runtime.ops import LayersNode, LayerWeights, Mixture, Ops, Weight, mixtures, reference

_PLAIN = ("linear", "linear_add", "linear_add_norm")  # x, weight, ...
_NORMED = ("norm_linear", "norm_glu")  # x, norm, epsilon, weight, ...
_SHARED_TOKENS = 8  # of all experts, in each expert's importance


class _InputRecorder:
    """An `Ops` that computes layers one operation at a time and sums up squares of the inputs of each weight.

    sums: (K,), or (X, K) of a stack, by the weight's identity; the recording decoder keeps the weights.
    tokens: (X,), of each expert of a stack.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.sums: dict[int, mx.array] = {}
        self.tokens: dict[int, mx.array] = {}

    def fuse(self, _layers: Sequence[LayerWeights], _eps: float, _activation: str, **_: object) -> LayersNode | None:
        """Refuse to fuse: a fused layer's inputs are not seen."""
        return None

    def experts(
        self,
        x: mx.array,
        norm: mx.array,
        eps: float,
        m: Mixture,
        activation: str,
        normed: mx.array | None = None,
        entered: mx.array | None = None,
    ) -> mx.array:
        """Compute a mixture one operation at a time, so that `expert_linear` sees the inputs of each expert."""
        ops = self._ops
        h = normed
        if h is None:
            h = ops.rms_norm(x, norm, eps)
        parts = mixtures.PartOps(ops.linear, self.expert_linear, ops.rms_norm)
        return mixtures.experts_in_parts(x, h, eps, m, activation, parts, entered)

    def expert_linear(self, x: mx.array, indices: mx.array, stack: Weight, experts: int) -> mx.array:
        """Add squares of rows x (M, K) to the sums of their experts; return the operation's result."""
        key = id(stack)
        chosen = indices.flatten()  # (pairs,): M times as many, those of a row together
        squares = mx.repeat(x.astype(mx.float32) ** 2, chosen.size // len(x), axis=0)  # (pairs, K)
        sums = self.sums.get(key, mx.zeros((experts, x.shape[-1])))
        tokens = self.tokens.get(key, mx.zeros((experts,)))
        self.sums[key] = sums.at[chosen].add(squares)
        self.tokens[key] = tokens.at[chosen].add(1.0)
        mx.eval(self.sums[key], self.tokens[key])  # or every pass would stay in memory, for a sum that is made later
        return self._ops.expert_linear(x, indices, stack, experts)

    def importance(self, weight: Weight) -> mx.array | None:
        """Return the importance of a weight's columns (K,), or (X, K) of a stack; None if nothing was recorded."""
        sums = self.sums.get(id(weight))
        tokens = self.tokens.get(id(weight))
        if sums is None or tokens is None:
            return sums
        mean = sums.sum(axis=0) / tokens.sum()  # (K,), of a token
        return (sums + _SHARED_TOKENS * mean) / (tokens[:, None] + _SHARED_TOKENS)

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
            self.sums[id(weight)] = squares  # (K,)
            mx.eval(squares)
            return function(*arguments)

        return call


def _normed(x: mx.array, norm: mx.array | None, eps: float, weight: Weight, *_: object) -> tuple[mx.array, Weight]:
    """Return the input of a weight after a norm, and the weight."""
    if norm is None:
        return x, weight
    return reference.rms_norm(x.astype(mx.float32), norm.astype(mx.float32), eps), weight


def record_importance(decoder: Decoder, feed: Callable[[Decoder], None]) -> dict[str, mx.array]:
    """Return the importance of columns, (K,) or (X, K), by the name of products; `feed` runs the decoder."""
    recorder = _InputRecorder(decoder.ops)
    recording = decoder.with_ops(recorder)
    feed(recording)
    importances = {name: recorder.importance(weight) for name, weight in recording.weights_by_input().items()}
    return {name: importance for name, importance in importances.items() if importance is not None}
