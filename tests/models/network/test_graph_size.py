"""A decode step on a GPU launches no more kernels, and waits for no more of them, than mlx-lm's classes do."""

from pathlib import Path

import mlx.core as mx
import pytest

from headrace.runtime.ops import reference
from tests.bench.graph_counts import RULES, count_layer, count_sampling, own_step, rows

pytestmark = pytest.mark.peer


@pytest.mark.parametrize("name", rows())
def test_a_layer_is_no_longer_than_mlx_lms(name: str, tmp_path: Path) -> None:
    own, other, family, mixed = rows()[name]
    ours, theirs = (count_layer(step, family, tmp_path, mixed) for step in (own, other))
    assert 0 < ours.kernels <= theirs.kernels
    assert 0 < ours.levels <= theirs.levels


@pytest.mark.parametrize("name", RULES)
def test_sampling_is_no_longer_than_mlx_lms(name: str) -> None:
    ours, theirs = count_sampling(RULES[name])
    assert 0 < ours.kernels <= theirs.kernels
    assert 0 < ours.levels <= theirs.levels


def test_a_layer_of_llama_has_the_counted_operations(tmp_path: Path) -> None:
    """q/k/v, rotation, 2 writes, attention, output, sum with norm; gate and up, activation, down, sum with norm."""
    counts = count_layer(own_step, "llama", tmp_path)
    assert (counts.kernels, counts.levels) == (11, 10)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_norms_of_heads_and_norms_behind_blocks_add_no_kernel(family: str, tmp_path: Path) -> None:
    counts = count_layer(own_step, family, tmp_path)
    assert (counts.kernels, counts.levels) == (11, 10)


def test_a_layer_of_a_mixture_has_the_counted_operations(tmp_path: Path) -> None:
    """Qwen 3's to the second norm; router, choice, shares (2), gate and up, activation, down, sum; norm."""
    counts = count_layer(own_step, "qwen3-moe", tmp_path)
    assert (counts.kernels, counts.levels) == (16, 13)


@pytest.mark.parametrize(("activation", "dtype"), [("silu", mx.bfloat16), ("gelu", mx.float16)])
def test_compiled_activations_are_the_plain_ones(
    activation: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = mx.concatenate([mx.linspace(-400, 400, 64), mx.linspace(-4, 4, 64)])[None, None].astype(dtype)
    up = mx.linspace(-300, 300, 128)[None, None].astype(dtype)
    plain = reference.glu(gate, up, activation)
    monkeypatch.setattr(reference, "on_gpu", lambda: True)
    fused = reference.glu(gate, up, activation)
    assert fused.dtype == dtype
    assert mx.allclose(fused.astype(mx.float32), plain.astype(mx.float32), rtol=2e-2, atol=1e-2, equal_nan=False)


def test_gelu_is_the_tanh_approximation() -> None:
    x = mx.linspace(-9, 9, 301)
    expected = 0.5 * x * (1 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    assert mx.allclose(reference.glu(x, mx.ones_like(x), "gelu"), expected, rtol=1e-5, atol=2e-6)
