"""Recorded importance is the sum of squares of a projection's inputs."""

from pathlib import Path

import mlx.core as mx
import pytest

from headrace.app.quantize.sensitivity import Excerpt, importances_of
from headrace.models.loading.load import load_model
from headrace.models.loading.mixed_quantization import plain_model
from headrace.models.network.decoder import Decoder
from headrace.runtime.ops import reference
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
