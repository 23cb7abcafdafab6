"""DeepSeek V4 as it is published and converted: FP8 in blocks of 128 x 128, FP4 experts; turns, costs and refusals.

tests/parity/test_transformers.py compares its logits with those of transformers.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from msgspec.structs import replace

from headrace.models.checkpoint.adapter import open_adapter
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.mlx_lm_shape import shape_of_mlx_lm_checkpoint, shape_of_mlx_lm_config
from headrace.models.cost.step_shape import total
from headrace.models.mlx_lm.load import of_config
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.models.mlx_lm.ranked import check_classes
from headrace.runtime.errors import CheckpointError, UnsupportedModelError, UsageError
from headrace.runtime.ops.kv_format import Q8
from headrace.runtime.ranks.split import Split
from tests.parity.modules import NEAR_TIE, class_of, largest_gap
from tests.support.adapters import write_adapter, write_merged
from tests.support.alone import new_cache, prefill
from tests.support.foreign import Tensors, write_tensors

pytestmark = pytest.mark.peer

BLOCK = 128
SECTION = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [BLOCK, BLOCK]}
TOPK = 4
CONFIG: dict[str, Any] = {  # a layer of each kind, the first two with tables of experts
    "model_type": "deepseek_v4", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "head_dim": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 16,
    "compress_ratios": [0, 4, 8, 4, 0], "index_n_heads": 16, "index_head_dim": 16, "index_topk": TOPK,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "num_hash_layers": 2,
    "max_position_embeddings": 4096, "dtype": "float32", "hc_sinkhorn_iters": 3,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip
PROMPT = [1 + i * 7 % 90 for i in range(40)]
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")  # of attention, indexers and shared experts


def drawn() -> Tensors:
    """Random weights under the names here."""
    draw = np.random.default_rng(5)
    tensors: Tensors = {}
    for name, array in tree_flatten(of_config(CONFIG).parameters()):
        if name.endswith("tid2eid"):
            first = draw.integers(0, 8, (array.shape[0], 1))
            tensors[name] = ((first + np.array([0, 3])) % 8, "I64")
            continue
        noise = draw.standard_normal(array.shape).astype(np.float32)
        scale = 0.1 if "norm" in name or array.ndim < 2 else array.shape[-1] ** -0.5
        tensors[name] = (np.float32("norm" in name) + noise * np.float32(scale), "F32")
    return tensors


def published_name(name: str) -> str:
    for ours, theirs in (
        ("lm_head.", "head."), ("model.embed_tokens.", "embed."), ("model.hc_head.", "hc_head_"), ("model.", ""),
        (".e_score_correction_bias", ".bias"), (".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_"),
        (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3."),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return name


def published() -> tuple[Tensors, Tensors]:
    """Return tensors as they are published, and the same values in float32, each expert by itself."""
    packed: Tensors = {}
    plain: Tensors = {}
    draw = np.random.default_rng(6)
    for name, (values, dtype) in drawn().items():
        theirs = published_name(name)
        module, _, kind = theirs.rpartition(".")
        part = module.rpartition(".")[2]
        if ".switch_mlp." in theirs:
            for number in range(values.shape[0]):
                expert = module.replace("switch_mlp", f"experts.{number}")
                rows, columns = values.shape[1:]
                codes = draw.integers(0, 16, (rows, columns), np.uint8)
                scale = draw.integers(123, 125, (rows, columns // 32), np.uint8)  # 1/16 or 1/8
                packed[f"{expert}.weight"] = ((codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8), "I8")
                packed[f"{expert}.scale"] = (scale, "F8_E8M0")
                exact = np.where(codes < 8, 1, -1) * _FP4[codes % 8] * np.repeat(2.0 ** (scale - 127.0), 32, axis=1)
                plain[f"{expert}.weight"] = (exact.astype(np.float32), "F32")
        elif kind == "weight" and part in _FP8 and ".compressor." not in theirs:
            rows, columns = values.reshape(-1, values.shape[-1]).shape
            codes = draw.integers(0, 40, (rows, columns), np.uint8)  # of up to 0.25
            codes |= draw.integers(0, 2, (rows, columns), np.uint8) << 7
            scale = draw.integers(127, 129, (-(-rows // BLOCK), -(-columns // BLOCK)), np.uint8)  # 1 or 2
            packed[theirs] = (codes, "F8_E4M3")
            packed[f"{module}.scale"] = (scale, "F8_E8M0")
            spread = np.repeat(np.repeat(2.0 ** (scale - 127.0), BLOCK, 0), BLOCK, 1)[:rows, :columns]
            plain[theirs] = ((np.array(mx.from_fp8(mx.array(codes), mx.float32)) * spread).astype(np.float32), "F32")
        else:
            packed[theirs] = plain[theirs] = (values, dtype)
    return packed, plain


def network_of(directory: Path) -> MlxLmNetwork:
    return MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu)


def logits(network: MlxLmNetwork) -> mx.array:
    out = network.layers(mx.array([PROMPT]), new_cache(network, 256).reserve(len(PROMPT)))
    assert not mx.isnan(out).any().item()
    return out


def are_close(ours: mx.array, theirs: mx.array) -> bool:
    return bool(mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * mx.abs(theirs).max().item()).item())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint under the names here."""
    return write_tensors(tmp_path_factory.mktemp("plain"), drawn(), CONFIG)


def test_published_weights_stay_packed_and_have_the_published_values(tmp_path: Path) -> None:
    packed, plain = published()
    heads: Tensors = {"mtp.0.attn.wq_a.weight": (np.zeros((64, 64), np.uint8), "F8_E4M3")}
    config = {**CONFIG, "quantization_config": SECTION}
    checkpoint = open_checkpoint(write_tensors(tmp_path / "packed", packed | heads, config))
    ours = MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu).use_kernels()
    assert are_close(logits(ours), logits(network_of(write_tensors(tmp_path / "plain", plain, CONFIG))))
    stored = sum(array.nbytes for array, _ in packed.values())
    resident = shape_of_mlx_lm_checkpoint(checkpoint).resident_bytes
    assert resident < 1.2 * stored  # scales are repeated for each row
    assert shape_of_mlx_lm_config(config).resident_bytes == resident


@pytest.mark.parametrize("fault", ["float scales", "scales of another shape"])
def test_other_scales_are_refused_by_name(tmp_path: Path, fault: str) -> None:
    packed, _ = published()
    scale = "layers.1.attn.wq_b.scale"
    packed[scale] = (np.ones((2, 1), np.uint8), "F8_E8M0")
    if fault == "float scales":
        packed[scale] = (np.ones((1, 1), np.float32), "F32")
    directory = write_tensors(tmp_path, packed, {**CONFIG, "quantization_config": SECTION})
    with pytest.raises(CheckpointError, match=r"\.(scale|wq_b)"):
        network_of(directory)


def test_a_conversion_for_mlx_loads(tmp_path: Path, directory: Path) -> None:
    """Its modules have formats of their own, and the matrix of each group of heads is a part of one."""
    model = network_of(directory).model
    plain = ("compressor.wkv", "compressor.wgate")
    nn.quantize(
        model,
        group_size=32,
        bits=4,
        class_predicate=lambda path, module: hasattr(module, "to_quantized") and not path.endswith(plain),
    )
    arrays = dict(tree_flatten(model.parameters()))
    joined = {name: array.flatten(0, 1) if ".wo_a." in name else array for name, array in arrays.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), joined)
    section = {"group_size": 64, "bits": 8, "model.layers.0.attn.wq_a": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization": section}))
    assert are_close(logits(network_of(tmp_path)), model(mx.array([PROMPT])))


def test_turns_have_the_tokens_of_one_pass(directory: Path) -> None:
    """A first turn, a second on its prefix and an edited one, on the kernels; longer than the window."""
    assert largest_gap(network_of(directory).model, directory, class_of(directory)) < NEAR_TIE


def test_bytes_are_those_of_the_window_the_chosen_entries_and_the_index_keys(directory: Path) -> None:
    network = network_of(directory)
    short, long = (new_cache(network, 2048) for _ in range(2))
    for cache, tokens in ((short, 200), (long, 400)):
        for _ in prefill(network, cache, [1 + i % 90 for i in range(tokens)]):
            pass
    entry = 32 * 4  # bytes of a latent in float32
    key = 16 * 4
    pooled = 2 * 400 // 4 * (entry + key) + 400 // 8 * entry  # of two indexed layers and one with groups of 8
    window = 4 * 16 * entry
    kept = sum(layer.bytes_per_token * (layer.window or 400) for layer in network.cost.kv)
    assert kept == pooled + window
    # The tokens of open groups, and of the last closed one of those that overlap, are beside them.
    open_rows = sum(part.nbytes for part in long.parts) - pooled - window
    assert 0 < open_rows == sum(part.nbytes for part in short.parts) - pooled // 2 - window
    read = 2 * TOPK * entry + 2 * 400 // 4 * key + 400 // 8 * entry + window
    assert network.cost.kv_bytes_read(399) == read


def test_costs_are_those_of_the_headers_and_of_the_config(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    network = MlxLmNetwork(checkpoint, device=mx.DeviceType.gpu)
    shape = shape_of_mlx_lm_checkpoint(checkpoint)
    for past in (0, 5, 100):
        assert total(shape.step(past)) == (shape.cost.step_bytes(past), shape.cost.step_flops(past))
        assert shape.cost.step_bytes(past) == network.cost.step_bytes(past)
    assert shape.resident_bytes == sum(array.nbytes for array in network.arrays)
    assert shape_of_mlx_lm_config(CONFIG).cost.weight_bytes == shape.cost.weight_bytes
    matrices = {matrix.name for matrix in shape.matrices}
    assert "weights_proj" in matrices  # of indexers, which have nothing to read in the first step of a sequence


def test_an_adapter_changes_projections_but_not_those_of_groups_of_heads(tmp_path: Path, directory: Path) -> None:
    def adapted(base: Path, adapter: Path) -> MlxLmNetwork:
        checkpoint = replace(open_checkpoint(base), adapter=open_adapter(adapter))
        return MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu).use_kernels()

    changes = write_adapter(tmp_path / "two", directory, modules=("attn.wq_a", "attn.wkv"))
    ours = logits(adapted(directory, tmp_path / "two"))
    assert are_close(ours, logits(network_of(write_merged(tmp_path / "merged", directory, changes))))
    assert not are_close(ours, logits(network_of(directory)))
    in_groups = tmp_path / "in_groups"
    write_adapter(in_groups, directory, modules=("attn.wo_b",), rename=lambda name: name.replace("wo_b", "wo_a"))
    with pytest.raises(UnsupportedModelError, match=r"attn\.wo_a, to which headrace applies no adapter"):
        adapted(directory, in_groups)
    packed = write_tensors(tmp_path / "packed", published()[0], {**CONFIG, "quantization_config": SECTION})
    with pytest.raises(UnsupportedModelError, match="which headrace's class of deepseek_v4 has in another form"):
        adapted(packed, tmp_path / "two")


def test_packed_kv_and_several_machines_are_refused(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    with pytest.raises(UsageError, match="LayerCache"):
        MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu, kv=Q8)
    for kind in ("tensor", "pipeline"):
        with pytest.raises(UsageError, match="headrace's class of deepseek_v4 runs on one machine") as caught:
            check_classes(checkpoint, Split(kind, (1, 1)))
        assert caught.value.hint == "start it without --hosts"


@pytest.mark.parametrize(
    "change",
    [
        {"compress_ratios": [0, 4]},
        {"compress_ratios": [0, 4, -8, 4]},
        {"scoring_func": "tanh"},
        {"n_shared_experts": 2},
        {"norm_topk_prob": False},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {**CONFIG["rope_scaling"], "attention_factor": 1.1386}},
        {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {"layer_types": ["sliding_attention"] * 4, "compress_rates": {"compressed_sparse_attention": 8}},
        {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]},
    ],
)
def test_settings_that_the_class_does_not_have_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError)):
        shape_of_mlx_lm_config({**CONFIG, **change})
