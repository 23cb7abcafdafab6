"""Mixtures of experts: routing, products with stacks of expert matrices, and both one operation at a time.

`reference.experts` uses the first two. `native` uses the last for mixtures that its kernels do not compute at once, and
`models.loading.importance` to see each operation. The kernels route by the same rules, in runtime/native, and
tests/runtime/ops/test_native_experts.py compares.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from headrace.runtime.ops.activations import unit
from headrace.runtime.ops.weights import Mixture, Weight
from headrace.runtime.routing import Routing


def routed(logits: mx.array, m: Mixture, *, compiled: bool = False) -> tuple[mx.array, mx.array]:
    """Return each token's experts and their weights, (B, T, active) each. logits (B, T, X).

    compiled: elementwise operations in a row are one kernel, as in `activations.py`.
    """
    chosen, shares = _chosen(logits, m, compiled)
    if m.expert_scale is not None:
        shares = shares * m.expert_scale[chosen]
    return chosen, shares


def _chosen(logits: mx.array, m: Mixture, compiled: bool) -> tuple[mx.array, mx.array]:
    """Return the same before the experts' own scales."""
    routing = m.routing
    if routing.band:
        return _chosen_in_turn(logits.astype(mx.float32), routing)
    if not routing.sigmoid and m.correction is None and routing.groups == (1, 1):
        chosen = mx.argpartition(logits, kth=-routing.active, axis=-1)[..., -routing.active :]
        # A softmax over the chosen logits is the softmax over all of them, divided by its sum over the chosen.
        if routing.normalized:
            shares = mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1, precise=True)
        else:
            shares = mx.take_along_axis(mx.softmax(logits, axis=-1, precise=True), chosen, axis=-1)
        if routing.scale != 1.0:
            shares = shares * routing.scale
        return chosen, shares
    groups, chosen_groups = routing.groups
    runs = _COMPILED if compiled else _RUNS
    scores, ranks = _scores(logits, m, runs)
    if chosen_groups < groups:
        # (B, T, groups, experts of a group): only experts of the best groups may be chosen (arXiv:2412.19437).
        parts = mx.unflatten(ranks, -1, (groups, -1))
        best = mx.topk(parts, min(routing.best, parts.shape[-1]), axis=-1).sum(axis=-1)  # (B, T, groups)
        least = mx.sort(best, axis=-1)[..., groups - chosen_groups, None]
        ranks = runs["within"](parts, best[..., None], least[..., None]).flatten(-2)
    chosen = mx.argpartition(ranks, kth=-routing.active, axis=-1)[..., -routing.active :]
    shares = mx.take_along_axis(scores, chosen, axis=-1)
    weigh = _weighing(routing.scale, logits.dtype, compiled)
    if routing.normalized and routing.active > 1:
        return chosen, weigh(shares, shares.sum(axis=-1, keepdims=True))
    return chosen, weigh(shares)


def _chosen_in_turn(logits: mx.array, routing: Routing) -> tuple[mx.array, mx.array]:
    """Return the experts of a sparse mixer (arXiv:2409.12136): the best, then the best of the others, and so on.

    The share of each is its softmax among those left whose logits are less than 2 * band below it, of the larger of
    both in size.
    """
    remaining = logits
    chosen = []
    shares = []
    for _ in range(routing.active):
        best = remaining.argmax(axis=-1, keepdims=True)
        top = mx.take_along_axis(remaining, best, axis=-1)
        is_far = (top - logits) / mx.maximum(mx.abs(logits), top) > 2 * routing.band
        near = mx.where(is_far, -mx.inf, remaining)
        chosen.append(best)
        shares.append(mx.take_along_axis(mx.softmax(near, axis=-1), best, axis=-1))
        remaining = mx.put_along_axis(remaining, best, mx.array(-mx.inf), axis=-1)
    return mx.concatenate(chosen, axis=-1), mx.concatenate(shares, axis=-1)


def _scores(logits: mx.array, m: Mixture, runs: Mapping[str, Callable[..., Any]]) -> tuple[mx.array, mx.array]:
    """Return the scores of all experts, and what ranks them, both float32 (B, T, X)."""
    if m.routing.sigmoid and m.correction is not None:
        scores, ranks = runs["corrected"](logits, m.correction)
        return scores, ranks
    if m.routing.sigmoid:
        wide, scores = runs["sigmoid"](logits)
    else:
        wide = logits.astype(mx.float32)
        scores = mx.softmax(wide, axis=-1)
    if m.correction is not None:
        return scores, scores + m.correction
    groups, num_used = m.routing.groups
    if num_used < groups:  # sums of groups are of scores
        return scores, scores
    return scores, wide  # logits are without the ties of rounded scores


def _corrected(logits: mx.array, correction: mx.array) -> tuple[mx.array, mx.array]:
    scores = mx.sigmoid(logits.astype(mx.float32))
    return scores, scores + correction


def _sigmoid(logits: mx.array) -> tuple[mx.array, mx.array]:
    wide = logits.astype(mx.float32)
    return wide, mx.sigmoid(wide)


def _within(parts: mx.array, best: mx.array, least: mx.array) -> mx.array:
    """Return the ranks of the groups that are as good as the least of those kept, else 0."""
    return mx.where(best >= least, parts, 0.0)


_RUNS: dict[str, Callable[..., Any]] = {"corrected": _corrected, "sigmoid": _sigmoid, "within": _within}
_COMPILED = {name: mx.compile(run, shapeless=True) for name, run in _RUNS.items()}


@lru_cache(maxsize=16)
def _weighing(scale: float, dtype: mx.Dtype, compiled: bool) -> Callable[..., mx.array]:
    """Return the function from experts' scores, and their sum if there is one, to weights in `dtype`."""

    def weigh(shares: mx.array, *total: mx.array) -> mx.array:
        if total:
            shares = shares / total[0]
        return (shares * scale).astype(dtype)

    return mx.compile(weigh, shapeless=True) if compiled else weigh


@lru_cache(maxsize=64)
def token_of_pair(pairs: int, active: int) -> mx.array:
    """Return the token of each (token, expert) pair, (pairs,) uint32, computed once: a step needs no kernel for it."""
    tokens = mx.arange(pairs, dtype=mx.uint32) // active
    mx.eval(tokens)
    return tokens


def gathered(x: mx.array, stack: Weight, indices: mx.array, rows: mx.array | None) -> mx.array:
    """Multiply rows of x by matrices of a stack -> (pairs, 1, N).

    x: (M, 1, K).
    stack: of X matrices (N, K).
    indices (pairs,): of the matrices.
    rows (pairs,): of x; None: each pair has its own row, and the indices are sorted.
    """
    ordered = rows is None
    if stack.scales is None:
        y = mx.gather_mm(x, stack.data.swapaxes(-1, -2), lhs_indices=rows, rhs_indices=indices, sorted_indices=ordered)
    else:
        y = mx.gather_qmm(
            x,
            stack.data,
            scales=stack.scales,
            biases=stack.biases,
            lhs_indices=rows,
            rhs_indices=indices,
            transpose=True,
            group_size=stack.group_size,
            bits=stack.bits,
            mode=stack.mode,
            sorted_indices=ordered,
        )
    if stack.bias is not None:
        y = y + stack.bias[indices][:, None]
    return y


def join_experts(gate: Weight, up: Weight) -> tuple[Weight, Weight | None]:
    """Return one stack, or both as they are, if their storage differs. See `Ops`.

    The result is evaluated: else the parts of all layers would be in memory at once while a model is loaded.
    """
    kinds = {(stack.bits, stack.group_size, stack.mode, stack.bias is None, stack.data.dtype) for stack in (gate, up)}
    if len(kinds) > 1:
        return gate, up

    def joined(first: mx.array | None, other: mx.array | None) -> mx.array | None:
        if first is None or other is None:
            return None
        return mx.concatenate([first, other], axis=1)

    data = mx.concatenate([gate.data, up.data], axis=1)
    scales = joined(gate.scales, up.scales)
    biases = joined(gate.biases, up.biases)
    bias = joined(gate.bias, up.bias)
    both = replace(gate, data=data, scales=scales, biases=biases, bias=bias)
    mx.eval(both.arrays)
    return both, None


def expert_linear(x: mx.array, indices: mx.array, stack: Weight, _experts: int) -> mx.array:
    chosen = indices.flatten()
    rows = token_of_pair(chosen.size, chosen.size // max(1, x.shape[0]))
    return gathered(x[:, None], stack, chosen, rows).reshape(*indices.shape, -1)


class PartOps(Struct, frozen=True):
    """The operations of any `Ops` that make a mixture of experts in parts."""

    linear: Callable[[mx.array, Weight], mx.array]
    expert_linear: Callable[[mx.array, mx.array, Weight, int], mx.array]
    rms_norm: Callable[[mx.array, mx.array, float], mx.array]


def experts_in_parts(
    x: mx.array, h: mx.array, eps: float, m: Mixture, activation: str, ops: PartOps, entered: mx.array | None = None
) -> mx.array:
    """Return x + the experts' output for h, as `reference.experts`.

    x: the layer's input (B, T, E); the output is added to it if `m.residual`.
    h: norm(x).
    eps: of the router's norm, if it has one.
    entered: the router's input, if `m.routing.routes_early`.
    """
    router_input = h if entered is None else entered
    if m.router_norm is not None:
        router_input = ops.rms_norm(x, m.router_norm, eps)
    chosen, shares = routed(ops.linear(router_input, m.router), m)  # (B, T, active) each
    if m.latent is not None:
        h = ops.linear(h, m.latent.into)
    rows = h  # of tokens, for all experts of each
    if m.routing.shares_first:
        rows = h[..., None, :] * shares[..., None].astype(h.dtype)  # (B, T, active, E): of tokens for each expert
        shares = mx.ones_like(shares)
    rows = rows.reshape(-1, rows.shape[-1])
    inputs = [ops.expert_linear(rows, chosen, stack, m.routing.count) for stack in (m.gate, m.up) if stack is not None]
    curve = activation if m.curve is None else m.curve
    inner = unit(mx.concatenate(inputs, axis=-1), curve, compiled=False)  # (B, T, active, F)
    inner = inner.reshape(-1, inner.shape[-1])
    outputs = ops.expert_linear(inner, chosen, m.down, m.routing.count)  # (B, T, active, E)
    output = (outputs * shares[..., None].astype(outputs.dtype)).sum(axis=-2)
    if m.latent is not None:
        if m.latent.norm is not None:
            output = ops.rms_norm(output, m.latent.norm, m.latent.eps)
        output = ops.linear(output, m.latent.out)
    return x + output if m.residual else output
