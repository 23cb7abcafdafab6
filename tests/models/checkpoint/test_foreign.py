"""Weights quantized by other tools: correct in both decoders, or refused by name."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from headrace.models.checkpoint.arrays import read_arrays
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.costs import checkpoint_cost
from headrace.models.loading.decoder_choice import network_kind
from headrace.models.loading.load import load_model
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from headrace.runtime.network import Network
from tests.parity.record_transformers import RECORDED, weight
from tests.support.alone import new_cache
from tests.support.foreign import FORMATS, Tensors, encode, write_pair, write_tensors
from tests.support.tiny import config_of, load_decoder, random_tensors
from tests.support.tiny_chat import write_byte_tokenizer

PROMPT = [(7 * i * i + 3 * i + 5) % 96 for i in range(12)]
CONFIG = config_of("llama")


def weights(config: dict[str, Any] = CONFIG) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.array(array) for name, array in random_tensors(config, 0).items()}


@pytest.fixture(scope="module", params=FORMATS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    directory = tmp_path_factory.mktemp("foreign")
    return (request.param, *write_pair(directory, weights(), CONFIG, FORMATS[request.param]))


def logits(network: Network) -> mx.array:
    cache = new_cache(network, 64)
    cache.reserve(len(PROMPT))
    return network.logits(network.layers(network.embed(mx.array([PROMPT])), cache))


def distance(found: mx.array, wanted: mx.array) -> float:
    return float((mx.abs(found - wanted).max() / mx.abs(wanted).max()).item())


@pytest.mark.sampled
def test_every_weight_is_dequantized_exactly(pair: tuple[str, Path, Path]) -> None:
    _, foreign, plain = pair
    found = read_arrays(open_checkpoint(foreign), as_float=lambda _name, _matrix: True)
    wanted = read_arrays(open_checkpoint(plain))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert mx.array_equal(found[name].astype(mx.float32), array), name  # to the bit


@pytest.mark.sampled
def test_headers_match_the_arrays_read(pair: tuple[str, Path, Path]) -> None:
    checkpoint = open_checkpoint(pair[1])
    arrays = read_arrays(checkpoint)
    assert arrays.keys() == checkpoint.tensors.keys()
    for name, info in checkpoint.tensors.items():
        assert (tuple(arrays[name].shape), arrays[name].nbytes) == (info.shape, info.nbytes), name


@pytest.mark.sampled
def test_both_decoders_answer_as_from_float32(pair: tuple[str, Path, Path]) -> None:
    name, foreign, plain = pair
    exact = FORMATS[name].exact
    assert network_kind(open_checkpoint(foreign)) == "headrace"
    wanted = logits(load_decoder(plain))
    limit = 1e-5 if exact else 0.03  # 8 bits of a group's range are finer than E4M3's steps, and yet not the same
    assert distance(logits(load_decoder(foreign)), wanted) < limit
    assert distance(logits(MlxLmNetwork(open_checkpoint(foreign), device=mx.DeviceType.cpu)), wanted) < limit


@pytest.mark.sampled
def test_the_description_says_whether_dequantization_is_exact(pair: tuple[str, Path, Path]) -> None:
    checkpoint = open_checkpoint(pair[1])
    assert checkpoint.foreign is not None
    assert checkpoint.foreign.exact == FORMATS[pair[0]].exact
    assert ("exactly and requantized to 8 bits" in checkpoint.foreign.describe()) != FORMATS[pair[0]].exact
    assert "\n" not in checkpoint.foreign.describe()


def test_a_bitnet_answers_as_from_float32(tmp_path: Path) -> None:
    case = json.loads(RECORDED.read_text())["bitnet"]
    tensors = {name: weight(name, shape) for name, shape in case["tensors"].items()}
    foreign, plain = write_pair(tmp_path, tensors, case["config"], FORMATS["bitnet"])
    network = load_decoder(foreign)
    assert distance(logits(network), logits(load_decoder(plain))) < 1e-5
    assert checkpoint_cost(open_checkpoint(foreign)).weight_flops == network.cost.weight_flops


def test_a_loaded_model_notes_its_stored_format(tmp_path: Path) -> None:
    foreign, _ = write_pair(tmp_path, weights(), CONFIG, FORMATS["fp8-blocks"])
    write_byte_tokenizer(foreign)
    model = load_model(foreign, name="tiny", context=64)
    assert model.notes == ["tiny is stored as FP8, which is dequantized exactly and requantized to 8 bits"]


MOE: dict[str, Any] = {
    **{key: CONFIG[key] for key in CONFIG if key != "model_type"},
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


@pytest.mark.sampled
@pytest.mark.peer
@pytest.mark.parametrize("name", ["fp8-blocks", "compressed-int8", "gptq", "awq", "compressed-int4"])
def test_experts_are_stacked_after_dequantizing(tmp_path: Path, name: str) -> None:
    from mlx_lm.utils import _get_classes

    mx.random.seed(1)
    model_class, arguments = _get_classes(MOE)
    flat = dict(tree_flatten(model_class(arguments.from_dict(MOE)).parameters()))
    tensors: dict[str, Any] = {}
    for key, array in flat.items():
        if ".switch_mlp." in key:  # as the hub has them: one by one
            tensors |= {key.replace("switch_mlp", f"experts.{e}"): np.array(array[e]) for e in range(4)}
        else:
            tensors[key] = np.array(array)
    foreign, plain = write_pair(tmp_path, tensors, MOE, FORMATS[name])
    found, wanted = (MlxLmNetwork(open_checkpoint(path), device=mx.DeviceType.cpu) for path in (foreign, plain))
    assert distance(logits(found), logits(wanted)) < 0.03
    assert found.cost.weight_bytes < 0.5 * wanted.cost.weight_bytes


@pytest.mark.parametrize("name", ["fp8-blocks", "fbgemm-fp8", "compressed-fp8-blocks"])
def test_a_stack_of_experts_is_read_as_its_matrices(tmp_path: Path, name: str) -> None:
    how = FORMATS[name]
    draw = np.random.default_rng(3)
    experts = [how.encode("experts", draw.normal(size=(96, 100)).astype(np.float32)) for _ in range(3)]
    stacks: Tensors = {
        part: (np.stack([stored[part][0] for stored, _ in experts]), dtype)
        for part, (_, dtype) in experts[0][0].items()
    }
    directory = write_tensors(tmp_path, stacks, {**MOE, "quantization_config": dict(how.section)})
    arrays = read_arrays(open_checkpoint(directory))
    assert list(arrays) == ["experts.weight"]
    assert np.array_equal(np.array(arrays["experts.weight"]), np.stack([meant for _, meant in experts]))


@pytest.mark.parametrize("device", [mx.DeviceType.gpu])
def test_no_array_is_float32_on_a_gpu(tmp_path: Path, device: mx.DeviceType) -> None:
    foreign, _ = write_pair(tmp_path, weights(), CONFIG, FORMATS["fp8-blocks"])
    network = MlxLmNetwork(open_checkpoint(foreign), device=device)
    assert {array.dtype for array in network.arrays} == {mx.uint32, mx.bfloat16}


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "hqq"},
        {"quant_method": "aqlm"},
        {"quant_method": "quark"},
        {"quant_method": "torchao"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}}},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": {"format": "sparse-24-bitmask"}},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"},
        {"quant_method": None},
        {},
    ],
)
def test_unknown_quantization_is_refused_by_name(tmp_path: Path, section: dict[str, Any]) -> None:
    directory = write_tensors(
        tmp_path, {"a": (np.zeros(4, np.float32), "F32")}, {**CONFIG, "quantization_config": section}
    )
    with pytest.raises(UnsupportedModelError, match=str(section.get("quant_method"))) as caught:
        open_checkpoint(directory)
    assert caught.value.hint


@pytest.mark.parametrize("stated_by", ["key", "tensor"])
def test_a_bitnet_that_normalizes_the_inputs_of_projections_is_refused(tmp_path: Path, stated_by: str) -> None:
    case = json.loads(RECORDED.read_text())["bitnet"]
    tensors = {name: weight(name, tuple(shape)) for name, shape in case["tensors"].items()}
    foreign, _ = write_pair(tmp_path, tensors, case["config"], FORMATS["bitnet"])
    open_checkpoint(foreign)
    if stated_by == "key":
        config = json.loads((foreign / "config.json").read_text())
        config["quantization_config"]["use_rms_norm"] = True
        (foreign / "config.json").write_text(json.dumps(config))
    else:
        norm = {"model.layers.0.self_attn.q_proj.rms_norm.weight": np.ones(64, np.float32)}
        foreign, _ = write_pair(tmp_path / "normed", {**tensors, **norm}, case["config"], FORMATS["bitnet"])
    with pytest.raises(UnsupportedModelError, match="bitnet that normalizes the input of each projection"):
        open_checkpoint(foreign)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8", "U32", "I32"])
@pytest.mark.parametrize("section", [{}, {"quantization": {"bits": 4, "group_size": 32}}])
def test_unexplained_tensor_types_are_refused(tmp_path: Path, dtype: str, section: dict[str, Any]) -> None:
    tensors: Tensors = {name: (array, "F32") for name, array in weights().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    width = np.uint32 if dtype.endswith("32") else np.uint8
    tensors[name] = (np.ones(tensors[name][0].shape, width), dtype)
    with pytest.raises(UnsupportedModelError, match=f"{name} is {dtype}"):
        open_checkpoint(write_tensors(tmp_path, tensors, {**CONFIG, **section}))


BLOCKS_OF_32 = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}


@pytest.mark.parametrize(("kind", "with_scale"), [("llama", True), ("deepseek_v41", False)])
def test_scales_of_small_blocks_are_left_to_one_family(tmp_path: Path, kind: str, with_scale: bool) -> None:
    tensors: Tensors = {}
    for number in (1, 2):
        tensors[f"layers.{number}.weight"] = (np.ones((64, 64), np.uint8), "F8_E4M3")
        tensors[f"layers.{number}.scale"] = (np.ones((2, 2), np.uint8), "F8_E8M0")
    complaint = r"layers\.1\.scale"
    if not with_scale:
        del tensors["layers.2.scale"]
        complaint = r"layers\.2\.weight is F8_E4M3"
    directory = write_tensors(tmp_path, tensors, {**CONFIG, "model_type": kind, "quantization_config": BLOCKS_OF_32})
    with pytest.raises(UnsupportedModelError, match=complaint) as caught:
        open_checkpoint(directory)
    assert caught.value.hint


def test_tensors_that_the_class_drops_need_no_scale(tmp_path: Path) -> None:
    tensors: Tensors = {
        "layers.1.weight": (np.ones((64, 64), np.uint8), "F8_E4M3"),
        "layers.1.scale": (np.ones((2, 2), np.uint8), "F8_E8M0"),
        "vision.blocks.1.weight": (np.ones((64, 64), np.uint8), "F8_E4M3"),
    }
    config = {**CONFIG, "model_type": "deepseek_v41", "quantization_config": BLOCKS_OF_32}
    assert open_checkpoint(write_tensors(tmp_path, tensors, config)).foreign is None


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("fault", ["a part is gone", "scales of another shape", "scales of another type"])
def test_missing_and_misshapen_quantization_tensors_are_refused_by_name(tmp_path: Path, name: str, fault: str) -> None:
    how = FORMATS[name]
    stored, _ = encode(weights(), how)
    wanted = "scale" if not name.startswith("nf4") else "absmax"
    scale = next(key for key in stored if ".1.mlp.up_proj" in key and wanted in key and "input" not in key)
    array, _ = stored[scale]
    match fault:
        case "a part is gone":
            del stored[scale]
        case "scales of another shape":
            stored[scale] = (np.ones((7, 3), np.float32), "F32")
        case _:
            stored[scale] = (np.ones(array.shape, np.uint8), "I8" if name.startswith("nf4") else "U8")
    directory = write_tensors(tmp_path, stored, {**CONFIG, "quantization_config": dict(how.section)})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj") as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)


def test_columns_ordered_by_activation_must_be_declared(tmp_path: Path) -> None:
    stored, _ = encode(weights(), FORMATS["gptq-by-activation"])
    section = dict(FORMATS["gptq"].section)
    checkpoint = open_checkpoint(write_tensors(tmp_path, stored, {**CONFIG, "quantization_config": section}))
    with pytest.raises(CheckpointError, match="g_idx"):
        read_arrays(checkpoint)


@pytest.mark.parametrize("state", [{"shape": [96, 64]}, {"shape": [0, 64], "blocksize": 64}, {"shape": "x"}, {}])
def test_contradictory_bitsandbytes_states_are_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    stored, _ = encode(weights(), FORMATS["nf4"])
    name = next(key for key in stored if key.endswith("bitsandbytes__nf4"))
    stored[name] = (np.frombuffer(json.dumps(state).encode(), np.uint8), "U8")
    section = dict(FORMATS["nf4"].section)
    with pytest.raises(CheckpointError, match="bitsandbytes__nf4"):
        open_checkpoint(write_tensors(tmp_path, stored, {**CONFIG, "quantization_config": section}))


def test_settings_are_read_from_hf_quant_config_too(tmp_path: Path) -> None:
    foreign, plain = write_pair(tmp_path, weights(), CONFIG, FORMATS["modelopt-fp8"])
    (foreign / "config.json").write_text(json.dumps(CONFIG))
    (foreign / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert distance(logits(load_decoder(foreign)), logits(load_decoder(plain))) < 0.03
