"""A decode step on a GPU launches no more kernels, and waits for no more of them, than mlx-lm's classes do."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.runtime.ops import reference
from headrace.runtime.ops.mixtures import routed
from headrace.runtime.ops.weights import Mixture, Weight
from headrace.runtime.routing import Routing
from tests.bench.graph_counts import RULES, count_layer, count_sampling, own_step, rows
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder

pytestmark = pytest.mark.peer


@pytest.mark.sampled(48)
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


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_norms_of_heads_and_norms_after_blocks_add_no_kernel(family: str, tmp_path: Path) -> None:
    counts = count_layer(own_step, family, tmp_path)
    assert (counts.kernels, counts.levels) == (11, 10)


def test_a_layer_of_a_mixture_has_the_counted_operations(tmp_path: Path) -> None:
    """Qwen 3's to the second norm; router, choice, shares (2), gate and up, activation, down, sum; norm."""
    counts = count_layer(own_step, "qwen3-moe", tmp_path)
    assert (counts.kernels, counts.levels) == (16, 13)


@pytest.fixture
def _compiled() -> None:
    """Compile functions in this test."""
    mx.enable_compile()


@pytest.mark.sampled
@pytest.mark.usefixtures("_compiled")
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


def test_a_layer_of_latent_attention_has_the_counted_operations(tmp_path: Path) -> None:
    """GLM-4.7 Flash.

    Queries with keys and latents, norm and projection of queries, absorbed product, joined; norm of latents, joined;
    heads placed, 2 writes, attention, values, output, sum with norm. Router, scores, choice, shares (3); gate and up,
    activation and down of experts, sum; the same of the shared expert, sum with norm.
    """
    counts = count_layer(own_step, "glm4-lite", tmp_path)
    assert (counts.kernels, counts.levels) == (28, 19)


def test_corrections_of_routers_stay_whole_in_half_precision(tmp_path: Path) -> None:
    """Corrections of 1 and 0.99999 are one number in float16: experts would be chosen by their place."""
    config = {**config_of("glm4-lite"), "first_k_dense_replace": 0}
    model = write_mlx_lm_model(tmp_path / "model", config)
    [stored] = (tmp_path / "model").glob("*.safetensors")
    weights = mx.load(str(stored))
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    weights[name] = 1 - 1e-5 * mx.arange(8)
    mx.save_safetensors(str(stored), weights)
    mixture = load_decoder(model, reference, mx.float16)._layers[0].mixture
    assert mixture is not None
    chosen, _ = routed(mx.zeros((1, 1, 8), mx.float16), mixture)
    assert set(chosen.flatten().tolist()) == {0, 1, 2}


_ROUTES: dict[str, dict[str, Any]] = {  # as many as run every compiled function
    "corrected, in groups": {"sigmoid": True, "correction": mx.linspace(-1, 1, 16), "groups": (4, 2), "scale": 1.7},
    "sigmoid": {"sigmoid": True},
    "softmax, in groups of one best": {"groups": (4, 2), "best": 1, "normalized": False, "scale": 16.0},
}


@pytest.mark.sampled
@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("route", _ROUTES)
def test_compiled_routing_is_the_plain_one(route: str) -> None:
    dtype = mx.float16  # a compiler runs for each
    router = Weight(mx.zeros((16, 8)))
    facts = dict(_ROUTES[route])
    correction = facts.pop("correction", None)
    routing = Routing(16, 4, **{"normalized": True, **facts})
    mixture = Mixture(routing, router, None, None, router, correction=correction)
    logits = mx.random.normal((2, 3, 16), key=mx.random.key(1)).astype(dtype)
    plain, fused = (routed(logits, mixture, compiled=compiled) for compiled in (False, True))
    assert mx.array_equal(plain[0], fused[0])
    assert fused[1].dtype == dtype
    assert mx.allclose(plain[1], fused[1], rtol=1e-2, atol=0, equal_nan=False)
