"""The default model's real file: exact, complete, and able to answer."""

import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint

pytestmark = pytest.mark.real

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_embedding_and_projections_are_exact(
    default_gguf: Path, default_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = json.loads((default_directory / "headrace.json").read_text())
    assert (facts["tensor_types"], facts["inexact_tensors"]) == (["F32", "Q4_1", "Q8_0"], [])
    # The file's tensors, with MLX's scales and biases beside them.
    assert open_checkpoint(default_directory).nbytes > 96_576_768
    ours = mx.load(str(default_directory / "model.safetensors"))
    # The reader takes a slice for each of 150,000 texts: from an array in half the time of one from a memory map.
    monkeypatch.setattr(np, "memmap", lambda file, mode: np.fromfile(file, np.uint8))  # noqa: ARG005
    source = {tensor.name: tensor for tensor in gguf.GGUFReader(default_gguf).tensors}
    for name, module, bits, every in (
        ("token_embd", "model.embed_tokens", 8, 16),  # of 49,152 rows
        ("blk.0.attn_v", "model.layers.0.self_attn.v_proj", 4, 1),
        ("blk.29.ffn_down", "model.layers.29.mlp.down_proj", 4, 1),
    ):
        stored = source[f"{name}.weight"]
        assert ours[f"{module}.scales"].dtype == ours[f"{module}.biases"].dtype == mx.float16
        scales, biases = (ours[f"{module}.{leaf}"][::every].astype(mx.float32) for leaf in ("scales", "biases"))
        values = np.array(mx.dequantize(ours[f"{module}.weight"][::every], scales, biases, group_size=32, bits=bits))
        np.testing.assert_array_equal(values, gguf.quants.dequantize(stored.data[::every], stored.tensor_type))


def test_the_config_matches_the_file(default_directory: Path) -> None:
    config = json.loads((default_directory / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (576, 30, 49152)
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100000.0, 1e-5, True)
    assert config["quantization"]["bits"] == 4
    assert config["quantization"]["model.embed_tokens"]["bits"] == 8
    assert config["eos_token_id"] == [2, 0]


@pytest.mark.peer
@pytest.mark.filterwarnings("default")  # transformers' own
def test_mlx_lm_answers_sensibly(default_directory: Path) -> None:
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(default_directory))
    assert set(tokenizer.eos_token_ids) == {2, 0}
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert tokenizer.decode(prompt).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert "Paris" in mlx_lm.generate(model, tokenizer, "The capital of France is", max_tokens=1)
