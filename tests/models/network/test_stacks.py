"""Experts as publishers store them, against the same weights as MLX's conversions have them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.checkpoint.quantization import Quantization
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.loading.keep_quantized import keep_quantized
from headrace.models.registry.resolve import resolve
from headrace.runtime.errors import UnsupportedModelError
from headrace.runtime.ops import native, reference
from tests.support.alone import new_cache
from tests.support.kernels import KERNELS, name_of
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.tiny import VOCAB, load_decoder, quantize_model, write_model

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
    tensors = load(source)
    stored = {}
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


@pytest.mark.sampled
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "mxfp4"])
def test_gpt_oss_experts_in_both_layouts_give_the_same_logits(tmp_path: Path, quantized: bool, ops: Any) -> None:
    mine = as_mlx_stores_it(tmp_path, quantized=quantized)
    theirs = as_transformers_stores_it(mine, tmp_path / "transformers")
    assert own_decoder(open_checkpoint(theirs)) is not None
    assert mx.array_equal(logits(mine, ops), logits(theirs, ops))
    expected = load_decoder(mine).cost
    assert load_decoder(theirs).cost == expected
    assert shape_of_checkpoint(open_checkpoint(theirs)).cost.weight_bytes == expected.weight_bytes
    assert shape_of_checkpoint(open_checkpoint(mine)).cost.weight_bytes == expected.weight_bytes


def test_another_swiglu_limit_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "gpt-oss")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "swiglu_limit": 5.0}))
    with pytest.raises(UnsupportedModelError, match="swiglu_limit"):
        load_decoder(directory)


@pytest.mark.peer
@pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")
@pytest.mark.parametrize(
    ("name", "apart", "joined", "down"),
    [
        ("qwen3.5-moe", "mlp.switch_mlp", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        (
            "granite-hybrid-moe", "block_sparse_moe.switch_mlp", "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
        ),
    ],
)  # fmt: skip
def test_joined_gate_and_up_matrices_give_the_same_logits(
    tmp_path: Path, name: str, apart: str, joined: str, down: str
) -> None:
    plain = write_mlx_lm_model(tmp_path / "plain", config_of(name))
    stored = write_joined(plain, tmp_path / "joined", apart, joined, down)
    assert mx.array_equal(logits(stored, native), logits(plain, native))
    shapes = [shape_of_checkpoint(open_checkpoint(directory)) for directory in (stored, plain)]
    assert shapes[0].cost.weight_bytes == shapes[1].cost.weight_bytes == load_decoder(stored).cost.weight_bytes


@pytest.mark.peer
@pytest.mark.parametrize("inputs_first", [True, False], ids=["as-released", "as-transformers-5"])
def test_experts_of_qwen_3_vl_are_read_in_both_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs_first: bool
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    plain = write_mlx_lm_model(tmp_path / "plain", config_of("qwen3-vl-moe"))
    names = ("mlp.switch_mlp", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    stored = write_joined(plain, tmp_path / "joined", *names)
    tensors = load(stored)
    if inputs_first:
        turned = {name: mx.contiguous(a.swapaxes(1, 2)) for name, a in tensors.items() if ".mlp.experts." in name}
        mx.save_safetensors(str(stored / "model.safetensors"), tensors | turned)
    assert mx.array_equal(logits(stored, reference), logits(plain, reference))
    ours, wanted = (keep_quantized(resolve(str(each)), Quantization(4, 32)).path for each in (stored, plain))
    assert mx.array_equal(logits(ours, reference), logits(wanted, reference))


def write_joined(plain: Path, target: Path, apart: str, joined: str, down: str) -> Path:
    """Write the model with gate and up of all experts as one tensor."""
    tensors = load(plain)
    for gate in [key for key in tensors if key.endswith(f"{apart}.gate_proj.weight")]:
        halves = [tensors.pop(gate), tensors.pop(gate.replace("gate_proj", "up_proj"))]
        tensors[gate.replace(f"{apart}.gate_proj.weight", joined)] = mx.concatenate(halves, axis=1)
        moved = tensors.pop(gate.replace("gate_proj", "down_proj"))
        tensors[gate.replace(f"{apart}.gate_proj.weight", down)] = moved
    target.mkdir()
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    (target / "config.json").write_text((plain / "config.json").read_text())
    return target


@pytest.mark.peer
@pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")
def test_a_quantized_copy_of_joined_matrices_is_that_of_separate_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    plain = write_mlx_lm_model(tmp_path / "plain", config_of("qwen3.5-moe"))
    names = ("mlp.switch_mlp", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    stored = write_joined(plain, tmp_path / "joined", *names)
    ours, wanted = (keep_quantized(resolve(str(each)), Quantization(4, 32)).path for each in (stored, plain))
    assert mx.array_equal(logits(ours, native), logits(wanted, native))
    assert load_decoder(ours, native).cost == load_decoder(wanted, native).cost
