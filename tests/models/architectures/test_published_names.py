"""Checkpoints as their makers publish them, with other names than those of mlx-lm's classes."""

from pathlib import Path

import mlx.core as mx
import pytest

from headrace.models.architectures.families import architecture_named
from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.checkpoint.text_part import headrace_name
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.runtime.errors import CheckpointError, ContextLimitError, UnsupportedModelError
from headrace.runtime.ops import reference
from tests.support.alone import new_cache
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder

_STEP = (
    (".mlp.gate.gate.", ".moe.gate."), (".mlp.gate.router_bias", ".moe.router_bias"), (".mlp.switch_mlp.", ".moe."),
    (".mlp.share_expert.", ".share_expert."),
)  # fmt: skip
_NEOX = (("model.embed_out.", "embed_out."), ("model.h.", "gpt_neox.layers."), ("model.", "gpt_neox."))
_NANOCHAT = (
    ("transformer.h.", "model.layers."), ("transformer.wte.", "model.embed_tokens."),
    (".attn.c_proj.", ".self_attn.o_proj."), *((f".attn.c_{part}.", f".self_attn.{part}_proj.") for part in "qkv"),
    (".mlp.c_fc.", ".mlp.fc1."), (".mlp.c_proj.", ".mlp.fc2."),
)  # fmt: skip
_GPTJ = (("model.", "transformer."),)


def published(name: str, array: mx.array, names: tuple[tuple[str, str], ...], *, centred: bool) -> tuple[str, mx.array]:
    for converted, original in names:
        name = name.replace(converted, original)
    return name, array - 1 if centred and "norm" in name else array


@pytest.mark.parametrize(
    ("model", "names", "unread"),
    [
        ("step3.5", _STEP, ()),
        ("gpt-neox", _NEOX, (".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq")),
        ("nanochat", _NANOCHAT, ()),
        ("gptj", _GPTJ, (".attn.bias", ".attn.masked_bias")),
    ],
)
def test_published_tensors_equal_converted_ones(
    tmp_path: Path, model: str, names: tuple[tuple[str, str], ...], unread: tuple[str, ...]
) -> None:
    converted = write_mlx_lm_model(tmp_path / "converted", config_of(model))
    original = tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_bytes((converted / "config.json").read_bytes())
    arrays = mx.load(str(converted / "model.safetensors"))
    assert isinstance(arrays, dict)
    tensors = dict(published(name, array, names, centred=model == "step3.5") for name, array in arrays.items())
    layers = {name.partition("0.")[0] + "0" for name in tensors if ".0." in name}
    assert len(layers) == 1
    tensors |= {layer + end: mx.zeros((1,)) for layer in layers for end in unread}
    mx.save_safetensors(str(original / "model.safetensors"), tensors)
    assert mx.allclose(logits_of(converted), logits_of(original), atol=1e-5).item()


def logits_of(directory: Path) -> mx.array:
    network = load_decoder(directory, reference)
    cache = new_cache(network, 16)
    cache.reserve(5)
    return network.all_logits(network.layers(network.embed(mx.array([[1, 2, 3, 4, 5]])), cache))


def test_dbrx_has_the_experts_of_a_layer_in_one_matrix(tmp_path: Path) -> None:
    converted = write_mlx_lm_model(tmp_path / "converted", config_of("dbrx"))
    original = tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_bytes((converted / "config.json").read_bytes())
    arrays = mx.load(str(converted / "model.safetensors"))
    assert isinstance(arrays, dict)
    tensors = {}
    for name, array in arrays.items():
        before, is_expert, after = name.partition(".experts.")
        number, _, part = after.removesuffix(".weight").partition(".")
        if not is_expert:
            tensors[name] = array
        elif number == "0":
            every = [arrays[f"{before}.experts.{expert}.{part}.weight"] for expert in range(6)]
            rows = [each.T if part == "w2" else each for each in every]
            tensors[f"{before}.experts.mlp.{part}"] = mx.concatenate(rows)
    mx.save_safetensors(str(original / "model.safetensors"), tensors)
    assert mx.array_equal(logits_of(converted), logits_of(original)).item()
    shapes = [shape_of_checkpoint(open_checkpoint(directory)) for directory in (converted, original)]
    assert shapes[0].cost.weight_bytes == shapes[1].cost.weight_bytes == load_decoder(converted).cost.weight_bytes
    broken = {name: array[1:] if name.endswith("mlp.w1") else array for name, array in tensors.items()}
    mx.save_safetensors(str(original / "model.safetensors"), broken)
    with pytest.raises(CheckpointError, match=r"experts\.mlp\.gate_proj is of no 6 experts"):
        logits_of(original)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2s_own_checkpoints_have_inputs_first(tmp_path: Path, prefix: str) -> None:
    converted = write_mlx_lm_model(tmp_path / "converted", config_of("gpt2"))
    original = tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_bytes((converted / "config.json").read_bytes())
    arrays = mx.load(str(converted / "model.safetensors"))
    assert isinstance(arrays, dict)
    turned = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    tensors = {
        name.replace("model.", prefix, 1): mx.contiguous(array.T) if name.endswith(turned) else array
        for name, array in arrays.items()
    }
    tensors[f"{prefix}h.0.attn.bias"] = mx.zeros((1, 1, 256, 256))  # a mask, which no layer reads
    mx.save_safetensors(str(original / "model.safetensors"), tensors)
    assert mx.allclose(logits_of(converted), logits_of(original), atol=1e-5).item()


def test_learned_positions_end_with_their_table(tmp_path: Path) -> None:
    network = load_decoder(write_mlx_lm_model(tmp_path, {**config_of("gpt2"), "n_positions": 4}), reference)
    cache = new_cache(network, 16)
    cache.reserve(5)
    with pytest.raises(ContextLimitError, match="beyond 4"):
        network.layers(network.embed(mx.array([[1, 2, 3, 4, 5]])), cache)


def test_other_scales_of_gpt2s_scores_are_refused() -> None:
    config = {**config_of("gpt2"), "scale_attn_by_inverse_layer_idx": True}
    with pytest.raises(UnsupportedModelError, match="scale_attn_by_inverse_layer_idx"):
        decoder_config(normalized(config))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("self_attn.q_proj", {"model_type": "mllama_text_model", "cross_attention_layers": [1]}),
        ("self_attn.k_proj", {"model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 2}),
        ("self_attn.k_proj", {"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}}),
        ("mixer.in_proj", {"model_type": "nemotron_h", "hybrid_override_pattern": "M*"}),
        ("attention.dense", {"model_type": "bailing_moe_v3", "num_hidden_layers": 5}),
    ],
)
def test_a_tensor_name_with_a_huge_layer_number_is_kept(name: str, config: dict[str, object]) -> None:
    """Python refuses to convert a text of more than 4,300 digits."""
    stored = f"model.layers.{'7' * 5000}.{name}.weight"
    is_unread = architecture_named(str(config["model_type"])).is_unread
    assert headrace_name(stored, config) == stored
    assert is_unread is None or not is_unread(stored, config)
