"""From tensors to matrices: shapes checked against config.json, quantization per layer, stacking."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.checkpoint.quantization import BITS, GROUP_SIZES, Quantization
from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.request import Request
from headrace.runtime.errors import CheckpointError, UnsupportedModelError, UsageError
from headrace.runtime.ops import Ops
from tests.support.alone import new_cache
from tests.support.kernels import KERNELS, name_of, tolerance
from tests.support.tiny import HIDDEN, VOCAB, load_decoder, quantize_model, write_model
from tests.support.watched import WatchedNetwork, answer

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(12)]


def read_tensors(directory: Path) -> dict[str, mx.array]:
    tensors = mx.load(str(directory / "model.safetensors"))
    assert isinstance(tensors, dict)
    return tensors


def change(directory: Path, *, tensors: dict[str, mx.array | None] | None = None, **config: Any) -> Path:
    """Replace (or, with None, remove) tensors and config keys."""
    present = {**read_tensors(directory), **(tensors or {})}
    kept = {name: array for name, array in present.items() if array is not None}
    mx.eval(list(kept.values()))
    mx.save_safetensors(str(directory / "model.safetensors"), kept)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return directory


def logits(network: Decoder) -> mx.array:
    cache = new_cache(network, len(PROMPT))
    cache.reserve(len(PROMPT))
    return network.all_logits(network.layers(network.embed(mx.array([PROMPT])), cache))


MATRICES = [
    "model.embed_tokens.weight",
    "model.layers.2.self_attn.k_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.mlp.gate_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
]
VECTORS = ["model.norm.weight", "model.layers.1.input_layernorm.weight"]


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        *(("missing", name) for name in [*MATRICES, *VECTORS]),
        *(("longer", name) for name in [*MATRICES, *VECTORS, "lm_head.weight"]),
        *(("transposed", name) for name in MATRICES if "k_proj" not in name),  # that one is square
    ],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, fault: str, name: str) -> None:
    directory = write_model(tmp_path, "llama")
    array = read_tensors(directory)[name]
    wrong = {"missing": None, "transposed": array.T, "longer": mx.concatenate([array, array[:1]])}[fault]
    change(directory, tensors={name: wrong})
    with pytest.raises(CheckpointError, match=re.escape(name)) as caught:
        load_decoder(directory)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_an_output_projection_is_tied(tmp_path: Path) -> None:
    directory = change(write_model(tmp_path, "llama"), tensors={"lm_head.weight": None})
    tied = write_model(tmp_path / "tied", "llama")
    change(tied, tensors={"lm_head.weight": None}, tie_word_embeddings=True)
    assert mx.array_equal(logits(load_decoder(directory)), logits(load_decoder(tied)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plain"), "llama-biased")


def uniform(bits: int, group_size: int) -> dict[str, dict[str, int]]:
    """`quantize_model`'s overrides that make every module of the tiny llama the same."""
    kind = {"bits": bits, "group_size": group_size}
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    modules = [*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layers = [f"model.layers.{layer}.{module}" for layer in range(3) for module in modules]
    return dict.fromkeys(["model.embed_tokens", *layers], kind)


@pytest.mark.sampled
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [size for size in GROUP_SIZES if size <= HIDDEN])
def test_quantized_weights_give_nearly_the_logits_of_plain_ones(
    tmp_path: Path, plain: Path, bits: int, group_size: int
) -> None:
    quantized = load_decoder(quantize_model(plain, tmp_path, uniform(bits, group_size)))
    error = mx.abs(logits(quantized) - logits(load_decoder(plain))).max().item()
    assert 0 < error < 32 / 2**bits  # wider is closer, and none of them is exact


@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
def test_projections_of_different_widths_are_not_stacked(tmp_path: Path, plain: Path, ops: Ops) -> None:
    mixed = {
        "model.layers.0.self_attn.q_proj": {"bits": 8, "group_size": 32},
        "model.layers.0.self_attn.k_proj": {"bits": 6, "group_size": 64},
        "model.layers.1.mlp.up_proj": {"bits": 3, "group_size": 32},
    }
    network = load_decoder(quantize_model(plain, tmp_path / "mixed", mixed), ops)
    assert [len(layer.qkv) for layer in network._layers] == [3, 1, 1]
    assert [len(layer.gate_up) for layer in network._layers] == [1, 2, 1]

    expanded = tmp_path / "expanded"  # the same numbers, all plain
    tensors = read_tensors(tmp_path / "mixed")
    section = json.loads((tmp_path / "mixed/config.json").read_text())
    for module in {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}:
        kind = section["quantization"].get(module, section["quantization"])
        packed, scales, biases = (tensors.pop(f"{module}.{part}") for part in ("weight", "scales", "biases"))
        tensors[f"{module}.weight"] = mx.dequantize(packed, scales, biases, kind["group_size"], kind["bits"])
    write_model(expanded, "llama-biased")
    change(expanded, tensors=dict(tensors))
    difference = mx.abs(logits(network) - logits(load_decoder(expanded))).max().item()
    assert difference < 5 * tolerance(ops)
    assert answer(WatchedNetwork(network), Request(PROMPT, max_tokens=6))[1].reason == "length"


@pytest.mark.parametrize(
    ("section", "error", "complaint"),
    [
        (None, UnsupportedModelError, "U32"),
        ({"bits": 4, "group_size": 64}, CheckpointError, "scales has shape"),
        ({"bits": 8, "group_size": 32}, CheckpointError, "weight has shape"),
        ({"bits": 7, "group_size": 32}, UnsupportedModelError, "7 bits"),
        ({"bits": 4.0, "group_size": 32}, UnsupportedModelError, "4.0 bits"),
        ({"bits": "4", "group_size": 32}, UnsupportedModelError, "'4' bits"),
        ({"bits": 4, "group_size": [32]}, UnsupportedModelError, r"groups of \[32\]"),
        ({"bits": 4}, UnsupportedModelError, "groups of None"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, CheckpointError, "not stored as mxfp4 is"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, UnsupportedModelError, "mxfp4 to 4 bits by 64"),
        ({"bits": 4, "group_size": 32, "mode": "unheard"}, UnsupportedModelError, "unheard"),
        ({"bits": 4, "group_size": 32, "model.embed_tokens": 5}, CheckpointError, "must be an object"),
    ],
)
def test_quantization_sections_that_do_not_fit(
    tmp_path: Path, plain: Path, section: Any, error: type[Exception], complaint: str
) -> None:
    directory = change(quantize_model(plain, tmp_path), quantization=section)
    with pytest.raises(error, match=complaint):
        load_decoder(directory)


@pytest.mark.parametrize(
    ("name", "replacement", "complaint"),
    [
        ("model.layers.0.mlp.down_proj.biases", None, "down_proj.biases"),
        ("model.layers.0.mlp.down_proj.weight", mx.zeros((HIDDEN, 16), mx.int32), "I32"),
        ("model.layers.0.mlp.down_proj.scales", mx.zeros((HIDDEN, 5)), "down_proj.scales has shape"),
    ],
)
def test_broken_quantized_tensors_are_refused(
    tmp_path: Path, plain: Path, name: str, replacement: mx.array | None, complaint: str
) -> None:
    directory = change(quantize_model(plain, tmp_path), tensors={name: replacement})
    with pytest.raises(CheckpointError, match=complaint):
        load_decoder(directory)


@pytest.mark.parametrize(("bits", "group_size"), [(1, 64), (7, 64), (16, 64), (4, 16), (4, 256)])
def test_widths_mlx_does_not_have_are_refused(bits: int, group_size: int) -> None:
    with pytest.raises(UsageError, match=f"{bits} bits in groups of {group_size}"):
        Quantization(bits, group_size)
