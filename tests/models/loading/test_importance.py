"""Recorded importance is the sum of squares of a projection's inputs."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.app.quantize.sensitivity import Excerpt, importances_of
from headrace.models.loading.importance import _InputRecorder
from headrace.models.loading.load import load_model
from headrace.models.loading.mixed_quantization import plain_model
from headrace.models.network.decoder import Decoder
from headrace.runtime.ops import mixtures, reference
from tests.runtime.ops.test_native_experts import EPS, EXPERTS, answers, mixture
from tests.support.tiny import VARIANTS
from tests.support.tiny_chat import write_chat_model


@pytest.mark.parametrize("family", ["llama", "qwen3", "llama-biased"])
def test_every_matrix_but_a_table_of_rows_has_one(tmp_path: Path, family: str) -> None:
    loaded = load_model(write_chat_model(tmp_path / "tiny", **VARIANTS[family]), name="tiny")
    assert isinstance(loaded.network, Decoder)
    importances = importances_of(loaded.network, Excerpt([1, 2, 3, 4], [2, 3, 4, 5]))
    parts = {part.name: part for part in plain_model(loaded.checkpoint, "tiny").parts}
    untied = not loaded.network.config.tied_embeddings
    assert parts.keys() - importances.keys() == ({"model.embed_tokens"} if untied else set())
    for name, part in parts.items():
        if name in importances:
            [columns] = {shape[1] for shape in part.shapes.values()}
            assert importances[name].shape == (columns,)


def test_the_first_layer_sees_normalized_embeddings(tmp_path: Path) -> None:
    directory = write_chat_model(tmp_path / "tiny")
    network = load_model(directory, name="tiny").network
    assert isinstance(network, Decoder)
    found = importances_of(network, Excerpt([7, 8, 9], [8, 9, 1]))["model.layers.0.self_attn.qkv"]
    tensors = mx.load(str(directory / "model.safetensors"))
    assert isinstance(tensors, dict)
    norm = tensors["model.layers.0.input_layernorm.weight"].astype(mx.float32)
    rows = tensors["model.embed_tokens.weight"][mx.array([7, 8, 9])].astype(mx.float32)
    wanted = (reference.rms_norm(rows, norm, network.config.norm_eps) ** 2).sum(axis=0)
    assert mx.allclose(found, wanted, rtol=1e-3).item()


_MIXTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shares first": {"shares_first": True},
    "router's norm": {"router_norm": mx.linspace(0.5, 2.0, 96)},
    "scaled experts": {"expert_scale": mx.linspace(0.5, 2.0, EXPERTS)},
    "alone": {"residual": False},
    "in turn": {"band": 0.1},
}


@pytest.mark.parametrize("name", _MIXTURES)
@pytest.mark.parametrize("bits", [0, 4])
def test_a_mixture_is_computed_the_same_while_it_is_recorded(name: str, bits: int) -> None:
    m = mixture(bits, **_MIXTURES[name])
    x = mx.random.normal((1, 7, 96))
    recorder = _InputRecorder(reference)
    answer = recorder.experts(x, mx.linspace(0.5, 1.5, 96), EPS, m, "silu")
    assert mx.allclose(answer, answers(m, x, reference), atol=1e-4).item()
    for weight in m.stacks:
        assert recorder.tokens[id(weight)].sum().item() == 7 * m.routing.active


def test_inputs_of_experts_are_summed_by_expert() -> None:
    m = mixture(0)
    x = mx.random.normal((1, 7, 96))
    norm = mx.linspace(0.5, 1.5, 96)
    recorder = _InputRecorder(reference)
    recorder.experts(x, norm, EPS, m, "silu")
    h = reference.rms_norm(x, norm, EPS)
    chosen, _ = mixtures.routed(reference.linear(h, m.router), m)
    assert m.gate is not None
    for expert in range(EXPERTS):
        has_expert = (chosen == expert).any(axis=-1)[..., None]  # (1, 7, 1)
        wanted = (mx.where(has_expert, h, 0) ** 2).sum(axis=(0, 1))
        assert mx.allclose(recorder.sums[id(m.gate)][expert], wanted, rtol=1e-4).item()
