"""Sampling in stock MLX: temperature, top-k, top-p and min-p for many rows, each with its own rule."""

import math
from collections.abc import Iterable, Sequence

import mlx.core as mx

from headrace.runtime.ops.weights import SampleRule


def greedy(logits: mx.array) -> mx.array:
    """Return the token of the largest logit. (B, V) -> (B,) uint32."""
    return mx.argmax(logits, axis=-1)


def sample(logits: mx.array, rules: Sequence[SampleRule], keys: Sequence[int]) -> mx.array:
    """Choose a token for each row by its own rule: temperature, top-k, top-p, min-p, then a sample.

    logits (B, V) -> (B,) uint32. A key, 64 random bits, is a fraction of the kept mass: the token at that point
    of the cumulative sum in vocabulary order is chosen. Of equal logits at a cut the first stay; a NaN logit is chosen.
    Rows do not affect each other.
    """
    logits = logits.astype(mx.float32)
    is_greedy = [rule.temperature == 0 for rule in rules]
    best = greedy(logits)
    if all(is_greedy):
        return best

    size = logits.shape[-1]
    mass = mx.softmax(logits / column(rule.temperature or 1.0 for rule in rules), axis=-1)
    if any(0 < rule.top_k < size or rule.top_p < 1 for rule in rules):
        order = mx.argsort(-logits, axis=-1)
        sorted_mass = mx.take_along_axis(mass, order, axis=-1)
        is_kept = mx.arange(size) < column(rule.top_k or size for rule in rules)
        sorted_mass = mx.where(is_kept, sorted_mass, 0.0)
        before = mx.cumsum(sorted_mass, axis=-1) - sorted_mass
        edges = column(rule.top_p if rule.top_p < 1 else math.inf for rule in rules)
        is_kept &= before < edges * sorted_mass.sum(axis=-1, keepdims=True)
        mass = mx.put_along_axis(mx.zeros_like(mass), order, mx.where(is_kept, sorted_mass, 0.0), axis=-1)
    floor = column(rule.min_p for rule in rules) * mass.max(axis=-1, keepdims=True)
    mass = mx.where(mass < floor, 0.0, mass)
    reached = mx.where(mass > 0, mx.cumsum(mass, axis=-1), 0.0)  # a parallel sum may grow even at a zero
    points = column((key >> 40) * 2.0**-24 for key in keys)
    sampled = mx.argmax(reached > points * reached.max(axis=-1, keepdims=True), axis=-1)  # the first index
    use_sampled = mx.isfinite(logits.max(axis=-1)) & ~mx.array(is_greedy)
    return mx.where(use_sampled, sampled, best)


def column(values: Iterable[float]) -> mx.array:
    """Return a value for each row, (B, 1)."""
    return mx.array(list(values), mx.float32)[:, None]
