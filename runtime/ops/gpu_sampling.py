"""Sampling on GPUs: `runtime.ops.stock_sampling`, which defines it, in fewer kernels.

Elementwise runs are compiled, filters that no row has are left out, and with a top-k of at most NARROW all that follows
the sort works on the best tokens only. B = rows, V = vocabulary, K = tokens that are left.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from headrace.runtime.ops.stock_sampling import column, greedy
from headrace.runtime.ops.weights import SampleRule

NARROW = 32


class _Plan(NamedTuple):
    """The steps that some row needs."""

    top_k: int  # of all rows; 0: none has one, or they differ
    ranks: bool  # top-k by row
    top_p: bool
    min_p: bool
    greedy: bool


def sample(logits: mx.array, rules: Sequence[SampleRule], keys: Sequence[int]) -> mx.array:
    """Choose a token for each row, see `stock_sampling.sample`. logits (B, V) -> (B,) uint32."""
    sampled = [rule for rule in rules if rule.temperature]
    if not sampled:
        return greedy(logits)
    size = logits.shape[-1]
    top_ks = {rule.top_k if 0 < rule.top_k < size else 0 for rule in sampled}
    top_k = 0
    if len(top_ks) == 1 and max(top_ks) <= NARROW:
        [top_k] = top_ks
    plan = _Plan(
        top_k=top_k,
        ranks=top_k == 0 and top_ks != {0},
        top_p=any(rule.top_p < 1 for rule in sampled),
        min_p=any(rule.min_p for rule in sampled),
        greedy=len(sampled) < len(rules),
    )

    return _compiled(plan)(
        logits,
        column(rule.temperature or 1.0 for rule in rules),
        column((key >> 40) * 2.0**-24 for key in keys),
        column(rule.top_k or size for rule in rules),
        column(rule.top_p if rule.top_p < 1 else 2.0 for rule in rules),
        column(rule.min_p for rule in rules),
        column(float(rule.temperature == 0) for rule in rules),
    )


@lru_cache(maxsize=64)
def _compiled(plan: _Plan) -> Callable[..., mx.array]:
    def chosen(logits: mx.array, heat: mx.array, points: mx.array, *rules: mx.array) -> mx.array:
        top_k, top_p, min_p, is_greedy = rules
        best = mx.argmax(logits, axis=-1, keepdims=True)
        highest = mx.take_along_axis(logits, best, axis=-1)
        ids, mass = _candidates(logits, heat, top_k, top_p, plan)
        if plan.min_p:
            mass = mx.where(mass < min_p * mass.max(axis=-1, keepdims=True), 0.0, mass)
        reached = mx.where(mass > 0, mx.cumsum(mass, axis=-1), 0.0)
        index = mx.argmax(reached > points * reached.max(axis=-1, keepdims=True), axis=-1, keepdims=True)
        token = index
        if ids is not None:
            token = mx.take_along_axis(ids, index, axis=-1)
        use_sampled = mx.abs(highest) < mx.inf  # false for NaN
        if plan.greedy:
            use_sampled = use_sampled & (is_greedy == 0)
        return mx.where(use_sampled, token, best)[:, 0]

    return mx.compile(chosen)


def _candidates(
    logits: mx.array, heat: mx.array, top_k: mx.array, top_p: mx.array, plan: _Plan
) -> tuple[mx.array | None, mx.array]:
    """Return the token ids (B, K) in their order, None for all, and their mass (B, K), 0 for those that are cut."""
    if not (plan.top_k or plan.ranks or plan.top_p):
        return None, _softmax(logits, heat)
    order = mx.argsort(-logits, axis=-1)
    if plan.top_k:
        order = order[:, : plan.top_k]
        if not plan.top_p:
            ids = mx.sort(order, axis=-1)
            return ids, _softmax(mx.take_along_axis(logits, ids, axis=-1), heat)
    mass = _softmax(mx.take_along_axis(logits, order, axis=-1), heat)
    if plan.ranks:
        mass = mx.where(mx.arange(mass.shape[-1]) < top_k, mass, 0.0)
    if plan.top_p:
        total = mass.sum(axis=-1, keepdims=True) if plan.ranks else 1.0
        mass = mx.where(mx.cumsum(mass, axis=-1) - mass < top_p * total, mass, 0.0)
    if plan.top_k:
        back = mx.argsort(order, axis=-1)
        return mx.take_along_axis(order, back, axis=-1), mx.take_along_axis(mass, back, axis=-1)
    return None, mx.put_along_axis(mx.zeros_like(mass), order, mass, axis=-1)


def _softmax(logits: mx.array, heat: mx.array) -> mx.array:
    return mx.softmax(logits.astype(mx.float32) / heat, axis=-1)
