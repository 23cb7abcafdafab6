"""Divergences against an independent computation in float64, from the definitions."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.loading.divergence import Divergence, divergence

ROWS = 7
VOCABULARY = 257


def expected(a: np.ndarray, b: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
    """(KL, agreement, -log p, -log q) by the textbook."""
    a = a.astype(np.float64)
    b = b.astype(np.float64)
    log_p = a - np.log(np.exp(a - a.max(-1, keepdims=True)).sum(-1, keepdims=True)) - a.max(-1, keepdims=True)
    log_q = b - np.log(np.exp(b - b.max(-1, keepdims=True)).sum(-1, keepdims=True)) - b.max(-1, keepdims=True)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    rows = np.arange(len(a))
    return kl, (a.argmax(-1) == b.argmax(-1)).astype(float), -log_p[rows, targets], -log_q[rows, targets]


def check(a: np.ndarray, b: np.ndarray, *, relative: float, absolute: float) -> Divergence:
    targets = np.random.default_rng(1).integers(0, a.shape[1], a.shape[0])
    found = divergence(mx.array(a), mx.array(b), mx.array(targets.astype(np.uint32)))
    kl, agrees, reference_nll, nll = expected(a, b, targets)
    np.testing.assert_allclose(found.kl, kl, rtol=relative, atol=absolute)
    np.testing.assert_allclose(found.reference_nll, reference_nll, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.nll, nll, rtol=1e-5, atol=1e-5)
    assert found.agrees == agrees.tolist()
    return found


@given(
    st.integers(0, 10_000), st.floats(0.1, 12), st.sampled_from([1e-4, 1e-3, 1e-2, 0.1, 1.0, 5.0, 40.0]),
    st.floats(-50, 50),
)  # fmt: skip
def test_figures_are_those_of_the_definition(seed: int, spread: float, noise: float, offset: float) -> None:
    draw = np.random.default_rng(seed)
    a = (draw.normal(size=(ROWS, VOCABULARY)) * spread).astype(np.float32)
    b = (a + draw.normal(size=a.shape) * noise + offset).astype(np.float32)
    check(a, b, relative=2e-3, absolute=2e-6 * (1 + abs(offset)) * noise + 1e-9)


def test_a_kl_divergence_of_a_millionth_is_measured() -> None:
    draw = np.random.default_rng(0)
    a = (draw.normal(size=(64, 4096)) * 6).astype(np.float32)
    b = (a + draw.normal(size=a.shape) * 1.5e-3).astype(np.float32)
    found = check(a, b, relative=0.02, absolute=0)
    assert 1e-7 < np.mean(found.kl) < 1e-5


def test_logits_have_no_divergence_from_themselves() -> None:
    a = mx.random.normal((5, 1000), key=mx.random.key(0)) * 8
    found = divergence(a, a, mx.array([1, 2, 3, 4, 5]))
    assert found.kl == [0.0] * 5
    assert found.agrees == [1.0] * 5
    assert found.nll == found.reference_nll


def test_a_token_of_probability_zero_has_infinite_divergence() -> None:
    a = np.zeros((2, 3), np.float32)
    b = np.array([[0, 0, -2000], [0, 0, 0]], np.float32)
    found = check(a, b, relative=1e-5, absolute=1e-9)
    assert found.kl[0] == pytest.approx(2000 / 3 + math.log(2 / 3), rel=1e-4)


def test_divergence_of_half_precision_logits_equals_that_of_float32() -> None:
    a = mx.random.normal((3, 300), key=mx.random.key(1)).astype(mx.float16)
    b = mx.random.normal((3, 300), key=mx.random.key(2)).astype(mx.float16)
    check(np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)), relative=1e-3, absolute=1e-6)
    wide = divergence(a.astype(mx.float32), b.astype(mx.float32), mx.array([0, 1, 2]))
    assert divergence(a, b, mx.array([0, 1, 2])).kl == wide.kl
