"""GPT-OSS as transformers stores it, against the same weights as MLX's conversions have them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.loading.decoder_choice import own_decoder
from headrace.runtime.errors import UnsupportedModelError
from tests.alone import new_cache
from tests.kernels import KERNELS, name_of
from tests.tiny import VOCAB, load_decoder, quantize_model, write_model

TOKENS = [(5 * i * i + 2) % VOCAB for i in range(21)]
PLAIN = ("embed_tokens", "lm_head", "self_attn", "router")


def as_mlx_stores_it(directory: Path, *, quantized: bool) -> Path:
    """Experts in mxfp4, all else plain, if `quantized`."""
    plain = write_model(directory / "plain", "gpt-oss")
    if not quantized:
        return plain
    whole = quantize_model(plain, directory / "mlx", mode="mxfp4")
    tensors = load(whole)
    originals = load(plain)
    for name in originals:
        if any(part in name for part in PLAIN) and name.endswith(".weight"):
            tensors = {key: a for key, a in tensors.items() if key.rpartition(".")[0] != name.removesuffix(".weight")}
            tensors |= {
                key: a for key, a in originals.items() if key.rpartition(".")[0] == name.removesuffix(".weight")
            }
    mx.save_safetensors(str(whole / "model.safetensors"), tensors)
    return whole


def as_transformers_stores_it(source: Path, target: Path) -> Path:
    tensors, stored = load(source), {}
    for name, array in tensors.items():
        module, _, part = name.rpartition(".")
        if not module.endswith(("experts.gate_proj", "experts.up_proj", "experts.down_proj")):
            stored[name] = array
        if module.endswith("gate_proj"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            array = mx.stack([array, up], axis=2).reshape(array.shape[0], -1, *array.shape[2:])  # rows in turn
            name = name.replace("gate_proj", "gate_up_proj")
        elif not module.endswith("experts.down_proj"):
            continue
        module = name.rpartition(".")[0]
        if part == "weight" and array.dtype == mx.uint32:
            stored[f"{module}_blocks"] = array.view(mx.uint8).reshape(*array.shape[:2], -1, 16)
        elif part == "weight":
            stored[module] = mx.contiguous(array.swapaxes(1, 2))
        else:
            stored[f"{module}_{part}"] = array
    config = json.loads((source / "config.json").read_text())
    if config.pop("quantization", None):
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    target.mkdir()
    mx.save_safetensors(str(target / "model.safetensors"), stored)
    (target / "config.json").write_text(json.dumps(config))
    return target


def load(directory: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(directory / "model.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


def logits(directory: Path, ops: Any) -> mx.array:
    network = load_decoder(directory, ops)
    cache = new_cache(network, 64)
    cache.reserve(len(TOKENS))
    return network.all_logits(network.layers(network.embed(mx.array([TOKENS])), cache))


@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "mxfp4"])
def test_both_layouts_are_the_same_model(tmp_path: Path, quantized: bool, ops: Any) -> None:
    mine = as_mlx_stores_it(tmp_path, quantized=quantized)
    theirs = as_transformers_stores_it(mine, tmp_path / "transformers")
    assert own_decoder(open_checkpoint(theirs)) is not None
    assert mx.array_equal(logits(mine, ops), logits(theirs, ops))
    expected = load_decoder(mine).cost
    assert load_decoder(theirs).cost == expected
    assert shape_of_checkpoint(open_checkpoint(theirs)).cost.weight_bytes == expected.weight_bytes
    assert shape_of_checkpoint(open_checkpoint(mine)).cost.weight_bytes == expected.weight_bytes


def test_another_limit_of_its_activation_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "gpt-oss")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "swiglu_limit": 5.0}))
    with pytest.raises(UnsupportedModelError, match="swiglu_limit"):
        load_decoder(directory)
