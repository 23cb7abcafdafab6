"""DeepSeek V4.1 as it is published: names of its own, 8-bit floats in blocks of 32 x 32, experts in 4 bits."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.mlx_lm_shape import shape_of_mlx_lm_checkpoint
from headrace.models.gguf.safetensors_writer import SafetensorsWriter
from headrace.models.mlx_lm.load import of_config
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from tests.models.mlx_lm.test_costs import DEEPSEEK
from tests.support.alone import new_cache

pytestmark = pytest.mark.peer

BLOCK = 32
SECTION = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [BLOCK, BLOCK]}
PROMPT = [1 + i * 7 % 90 for i in range(40)]
# Parts of the class's names -> DeepSeek's
_NAMES = (
    ("lm_head.", "head."), ("model.embed_tokens.", "embed."), ("model.", ""), (".self_attn.", ".attn."),
    (".mlp.gate.e_score_correction_bias", ".ffn.gate.bias"), (".mlp.", ".ffn."), (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."), (".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_"),
    (".sinks", ".attn_sink"), (".q_a_proj.", ".wq_a."), (".q_b_proj.", ".wq_b."), (".kv_proj.", ".wkv."),
    (".o_a_proj.", ".wo_a."), (".o_b_proj.", ".wo_b."), (".q_a_norm.", ".q_norm."),
    (".compressor.kv_norm.", ".compressor.norm."), (".compressor.gate_proj.", ".compressor.wgate."),
    (".indexer.k_proj.", ".indexer.wk."), (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3."),
)  # fmt: skip
_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")  # of attention and the shared expert


def published_name(name: str) -> str:
    for ours, theirs in _NAMES:
        name = name.replace(ours, theirs)
    return name


def write_published(directory: Path, config: dict[str, Any]) -> Path:
    """Write random weights as they are published. config: its `quantization_config` is added."""
    shapes = _shapes(config)
    draw = np.random.default_rng(5)
    tensors: dict[str, tuple[np.ndarray[Any, Any], str]] = {}

    def fp8(module: str, rows: int, columns: int) -> None:
        """Codes of up to 0.25 times scales of 1 or 2, one for each block."""
        codes = draw.integers(0, 40, (rows, columns), np.uint8) | (draw.integers(0, 2, (rows, columns), np.uint8) << 7)
        scales = draw.integers(127, 129, (rows // BLOCK, columns // BLOCK), np.uint8)
        tensors[f"{module}.weight"] = (codes, "F8_E4M3")
        tensors[f"{module}.scale"] = (scales, "F8_E8M0")

    def fp4(module: str, rows: int, columns: int) -> None:
        """Two codes a byte, scales of 1/16 or 1/8, one for 32 columns."""
        tensors[f"{module}.weight"] = (draw.integers(0, 256, (rows, columns // 2), np.uint8).view(np.int8), "I8")
        tensors[f"{module}.scale"] = (draw.integers(123, 125, (rows, columns // BLOCK), np.uint8), "F8_E8M0")

    for name, shape in shapes.items():
        theirs = published_name(name)
        module, _, kind = theirs.rpartition(".")
        if ".switch_mlp." in theirs:
            for expert in range(shape[0]):
                fp4(module.replace("switch_mlp.", f"{expert}."), *shape[1:])
        elif kind == "weight" and module.rpartition(".")[2] in _FP8 and ".compressor." not in theirs:
            *groups, rows, columns = shape
            fp8(module, rows * (groups[0] if groups else 1), columns)
        else:
            scale = 0.1 if "norm" in name else (shape[-1] if len(shape) > 1 else 100) ** -0.5
            values = draw.normal(1.0 if "norm" in name else 0.0, scale, shape).astype(np.float32)
            tensors[theirs] = (values, "F32")
    directory.mkdir(parents=True, exist_ok=True)
    with SafetensorsWriter(directory / "model.safetensors", list(tensors)) as writer:
        for name, (array, dtype) in tensors.items():
            writer.add(name, array, dtype)
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": SECTION}))
    return directory


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    from mlx.utils import tree_flatten

    return {name: array.shape for name, array in tree_flatten(of_config(config).parameters())}


def test_published_weights_stay_packed_and_give_the_logits_of_mlx_lm(tmp_path: Path) -> None:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    directory = write_published(tmp_path, DEEPSEEK)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.foreign is None
    network = MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu).use_kernels()
    ours = network.layers(mx.array([PROMPT]), new_cache(network, 256).reserve(len(PROMPT)))
    model, _ = load_model(directory)
    model.set_dtype(mx.float32)
    theirs = model(mx.array([PROMPT]), cache=make_prompt_cache(model))
    assert not mx.isnan(theirs).any().item()
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * mx.abs(theirs).max().item())
    stored = sum(info.nbytes for info in checkpoint.tensors.values())
    resident = shape_of_mlx_lm_checkpoint(checkpoint).resident_bytes
    assert stored <= resident < 1.2 * stored  # scales of blocks are repeated for each row


def test_scales_of_other_blocks_are_refused_by_name(tmp_path: Path) -> None:
    directory = write_published(tmp_path, DEEPSEEK)
    section = {**SECTION, "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps({**DEEPSEEK, "quantization_config": section}))
    with pytest.raises(UnsupportedModelError, match=r"scale named .*\.scale"):
        open_checkpoint(directory)


def test_n_gram_memories_are_refused_by_name(tmp_path: Path) -> None:
    directory = write_published(tmp_path, DEEPSEEK)
    config = {**DEEPSEEK, "engram_layer_ids": [1], "quantization_config": SECTION}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="engram"):
        MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu)
