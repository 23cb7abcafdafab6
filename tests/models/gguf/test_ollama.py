"""Files as Ollama's own converter writes them: Gemma 3 with its keys, without its constants, beside a vision tower."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from headrace.models.gguf import convert_gguf
from headrace.models.gguf.architecture import Contents
from headrace.models.gguf.config import model_config
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.ollama import as_llama_cpp
from headrace.runtime.errors import UnsupportedModelError
from tests.support.gguf_models import gguf_weights, header, hf_weights, write_gguf

OWN_KEYS = {"attention.sliding_window": 12, "rope.local.freq_base": 1e4, "rope.global.freq_base": 1e6}
VISION = {"vision.block_count": 2, "vision.embedding_length": 32, "mm.tokens_per_image": 256}
SIZES = {
    "general.architecture": "gemma3", "gemma3.block_count": 26, "gemma3.embedding_length": 64,
    "gemma3.feed_forward_length": 96, "gemma3.context_length": 256, "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 2, "gemma3.attention.sliding_window": 12,
}  # fmt: skip


def write_ollama(path: Path, metadata: dict[str, Any], *, epsilon: bool, towers: bool) -> Path:
    """Write the weights of `write_gguf`'s gemma3 with these keys. towers: beside those of a vision tower."""
    writer = header(path, "gemma3", metadata=metadata)
    values = writer.kv_data[0]
    del values["tokenizer.ggml.add_space_prefix"]  # Ollama's converter knows no such key
    if not epsilon:
        del values["gemma3.attention.layer_norm_rms_epsilon"]
    for name, weights in gguf_weights("gemma3", hf_weights("gemma3")).items():
        writer.add_tensor(name, np.ascontiguousarray(weights))
    if towers:
        for name in ("v.blk.0.attn_q.weight", "v.patch_embedding.bias", "mm.mm_input_projection.weight"):
            writer.add_tensor(name, np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path) -> tuple[dict[str, Any], bytes, dict[str, mx.array]]:
    """Return the config, tokenizer.json and weights that a file becomes."""
    target = path.with_suffix("")
    target.mkdir()
    convert_gguf(path, target)
    weights = mx.load(str(target / "model.safetensors"))
    assert isinstance(weights, dict)
    return json.loads((target / "config.json").read_text()), (target / "tokenizer.json").read_bytes(), weights


@pytest.mark.parametrize("towers", [False, True])
def test_a_file_becomes_the_model_that_llama_cpps_becomes(tmp_path: Path, towers: bool) -> None:
    metadata = {"attention.sliding_window": 12, **VISION} if towers else OWN_KEYS
    theirs = converted(write_ollama(tmp_path / "ollama.gguf", metadata, epsilon=not towers, towers=towers))
    config, tokenizer, weights = converted(write_gguf(tmp_path / "llama.gguf", "gemma3"))
    if towers:  # the value that their program has built in; `write_gguf` has another one
        assert theirs[0].pop("rms_norm_eps") == 1e-6
        del config["rms_norm_eps"]
    assert theirs[0] == config
    assert theirs[1] == tokenizer
    assert theirs[2].keys() == weights.keys()
    assert all(mx.array_equal(theirs[2][name], weights[name]) for name in weights)


def config_of(**changes: Any) -> dict[str, Any]:
    """Return the config of a file with the keys of Ollama's converter. `__` stands for a dot."""
    stated = {f"gemma3.{key.replace('__', '.')}": value for key, value in changes.items()}
    values, _ = as_llama_cpp(SIZES | {"gemma3.vision.block_count": 2} | stated, {})
    return model_config(Metadata(values), Contents({"output.weight": ()}, vocab_size=10))


@pytest.mark.parametrize("layers", [34, 48, 62])
def test_larger_models_divide_positions_by_8(layers: int) -> None:
    assert config_of(block_count=layers)["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config_of(block_count=layers, rope__scaling__factor=4.0)["rope_scaling"]["factor"] == 4.0


def test_the_limit_of_logits_in_early_files_of_1b_is_left_out() -> None:
    config = config_of(final_logit_softcapping=30.0)
    assert "rope_scaling" not in config
    assert "final_logit_softcapping" not in config
    with pytest.raises(UnsupportedModelError, match="final_logit_softcapping"):
        config_of(block_count=18, final_logit_softcapping=30.0)


def test_files_of_llama_cpp_stay_as_they_are() -> None:
    tensors = {"v.blk.0.attn_q.weight": 1}
    assert as_llama_cpp(SIZES, tensors) == (SIZES, tensors)
    others = {"general.architecture": "qwen3vl", "qwen3vl.vision.block_count": 2}
    assert as_llama_cpp(others, tensors) == (others, tensors)
