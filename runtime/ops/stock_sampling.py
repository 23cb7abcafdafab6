"""Sampling in stock MLX: temperature, top-k, top-p and min-p for many rows, each with its own rule.

`sample` defines it, for GPUs (`sample_on_gpu`) and the native kernels alike: each token has to be the same, since a
sampled answer must not depend on the device's way (tests/runtime/ops/test_stock_sampling.py, test_native_sampling.py).
B = rows, V = vocabulary, K = tokens that are left.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import mlx.core as mx
from msgspec import Struct

from headrace.runtime.ops.weights import SampleRule

NARROW = 32  # largest top-k of all rows with which a GPU goes on with the best tokens only, after the sort


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def sample(logits: mx.array, rules: Sequence[SampleRule], keys: Sequence[int]) -> mx.array:
    """Choose a token for each row by its own rule: temperature, top-k, top-p, min-p, then a sample. See `Ops`.

    A key is a fraction of the kept mass: the token at that point
    of the cumulative sum in vocabulary order is chosen. Of equal logits at a cut the first stay; a NaN logit is chosen.
    Rows do not affect each other.
    """
    logits = logits.astype(mx.float32)
    is_greedy = [rule.temperature == 0 for rule in rules]
    best = greedy(logits)
    if all(is_greedy):
        return best

    size = logits.shape[-1]
    mass = mx.softmax(logits / _column(rule.temperature or 1.0 for rule in rules), axis=-1)
    if any(0 < rule.top_k < size or rule.top_p < 1 for rule in rules):
        # (B, V) ids by falling logit. Equal logits stay in vocabulary order, since the sort is stable.
        order = mx.argsort(-logits, axis=-1)
        sorted_mass = mx.take_along_axis(mass, order, axis=-1)
        is_kept = mx.arange(size) < _column(rule.top_k or size for rule in rules)
        sorted_mass = mx.where(is_kept, sorted_mass, 0.0)
        # Mass of the better tokens, without its own: so the token that crosses top-p is left, and one at least.
        before = mx.cumsum(sorted_mass, axis=-1) - sorted_mass
        edges = _column(rule.top_p if rule.top_p < 1 else math.inf for rule in rules)
        is_kept &= before < edges * sorted_mass.sum(axis=-1, keepdims=True)
        # Back in vocabulary order: a key chooses the same token whether rows beside it were sorted or not.
        mass = mx.put_along_axis(mx.zeros_like(mass), order, mx.where(is_kept, sorted_mass, 0.0), axis=-1)
    floor = _column(rule.min_p for rule in rules) * mass.max(axis=-1, keepdims=True)
    mass = mx.where(mass < floor, 0.0, mass)
    reached = mx.where(mass > 0, mx.cumsum(mass, axis=-1), 0.0)  # a parallel sum may grow even at a zero
    # The upper 24 bits of a key: as many as a float32 fraction of 1 has without rounding.
    points = _column((key >> 40) * 2.0**-24 for key in keys)
    sampled = mx.argmax(reached > points * reached.max(axis=-1, keepdims=True), axis=-1)  # the first index
    # With a NaN or infinite logit the mass is NaN; then the best token, which `SelectedPass` then reads and refuses.
    use_sampled = mx.isfinite(logits.max(axis=-1)) & ~mx.array(is_greedy)
    return mx.where(use_sampled, sampled, best)


class _Plan(Struct, frozen=True):
    """The steps that some row needs; a function is compiled for each plan."""

    top_k: int  # of all rows; 0: none has one, or they differ
    ranks: bool  # top-k by row
    top_p: bool
    min_p: bool
    greedy: bool


def sample_on_gpu(logits: mx.array, rules: Sequence[SampleRule], keys: Sequence[int]) -> mx.array:
    """Choose a token for each row, as `sample` does, in fewer kernels.

    Elementwise runs are compiled, filters that no row has are left out, and with a top-k of at most NARROW all that
    follows the sort works on the best tokens only.
    """
    sampled = [rule for rule in rules if rule.temperature]
    if not sampled:
        return greedy(logits)
    size = logits.shape[-1]
    # Greedy rows take any plan: their result is replaced by the best token.
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
        _column(rule.temperature or 1.0 for rule in rules),
        _column((key >> 40) * 2.0**-24 for key in keys),
        _column(rule.top_k or size for rule in rules),
        _column(rule.top_p if rule.top_p < 1 else 2.0 for rule in rules),
        _column(rule.min_p for rule in rules),
        _column(float(rule.temperature == 0) for rule in rules),
    )


@lru_cache(maxsize=64)
def _compiled(plan: _Plan) -> Callable[..., mx.array]:
    """Return the compiled function of a plan; its arguments are those of its call in `sample_on_gpu`."""

    def chosen(logits: mx.array, temperature: mx.array, points: mx.array, *rules: mx.array) -> mx.array:
        top_k, top_p, min_p, is_greedy = rules
        best = mx.argmax(logits, axis=-1, keepdims=True)
        highest = mx.take_along_axis(logits, best, axis=-1)
        # (B, K) each; ids is None where K = V and index i is token i.
        ids, mass = _candidates(logits, temperature, top_k, top_p, plan)
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
    logits: mx.array, temperature: mx.array, top_k: mx.array, top_p: mx.array, plan: _Plan
) -> tuple[mx.array | None, mx.array]:
    """Return the token ids (B, K) in their order, None for all, and their mass (B, K), 0 for those that are cut.

    logits: (B, V).
    temperature, top_k, top_p: of each row (B, 1).
    plan: the filters that a row has.
    """
    if not (plan.top_k or plan.ranks or plan.top_p):
        return None, _softmax(logits, temperature)
    order = mx.argsort(-logits, axis=-1)
    if plan.top_k:
        order = order[:, : plan.top_k]
        # The softmax of the K best tokens alone differs by a factor, which cancels: a key is a fraction of the mass.
        if not plan.top_p:
            ids = mx.sort(order, axis=-1)
            return ids, _softmax(mx.take_along_axis(logits, ids, axis=-1), temperature)
    mass = _softmax(mx.take_along_axis(logits, order, axis=-1), temperature)
    if plan.ranks:
        mass = mx.where(mx.arange(mass.shape[-1]) < top_k, mass, 0.0)
    if plan.top_p:
        total = mass.sum(axis=-1, keepdims=True) if plan.ranks else 1.0
        mass = mx.where(mx.cumsum(mass, axis=-1) - mass < top_p * total, mass, 0.0)
    if plan.top_k:
        # From falling logits to vocabulary order, in which a key is a point of the cumulative sum.
        back = mx.argsort(order, axis=-1)
        return mx.take_along_axis(order, back, axis=-1), mx.take_along_axis(mass, back, axis=-1)
    return None, mx.put_along_axis(mx.zeros_like(mass), order, mass, axis=-1)


def _softmax(logits: mx.array, temperature: mx.array) -> mx.array:
    return mx.softmax(logits.astype(mx.float32) / temperature, axis=-1)


def _column(values: Iterable[float]) -> mx.array:
    """Return a value for each row, (B, 1)."""
    return mx.array(list(values), mx.float32)[:, None]
