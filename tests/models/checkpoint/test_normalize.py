"""Configs of transformers 5 mean the same as their older forms, in both decoders."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.loading.decoder_choice import context_length
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.errors import CheckpointError
from tests.support.alone import new_cache
from tests.support.checkpoints import header, shard, tensor, write
from tests.support.tiny import EVERY, config_of, load_decoder, write_model

ROPE = {"rope_theta": 5e5, "rope_type": "default"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5e5}

# model_type, what transformers 5 states, what readers of older forms look for
RENAMED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(
        (kind, {"rope_parameters": ROPE}, {"rope_theta": 5e5, "rope_scaling": None})
        for kind in ("granite", "granitemoe", "ernie4_5", "helium", "dots1", "starcoder2", "falcon_h1", "llama4_text")
    ),
    *(
        (kind, {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, {"partial_rotary_factor": 0.5})
        for kind in ("phi", "phi3", "glm4", "glm4_moe", "stablelm", "qwen3_next", "nemotron")
    ),
    ("deepseek_v3", {"rope_parameters": YARN}, {"rope_theta": 5e5, "rope_scaling": {
        "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    ("deepseek_v4", {
        "num_hidden_layers": 2, "head_dim": 32, "partial_rotary_factor": 0.5, "mlp_layer_types": ["hash_moe", "moe"],
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "rope_parameters": {"main": ROPE, "compress": {**YARN, "rope_theta": 1e5, "attention_factor": 1.0}}},
     {"compress_ratios": [128, 4], "num_hash_layers": 1, "qk_rope_head_dim": 16, "rope_theta": 5e5,
      "compress_rope_theta": 1e5, "rope_scaling": {**YARN, "rope_theta": 1e5}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
     {"rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}}),
    ("phi3", {"max_position_embeddings": 256, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1], "long_factor": [2],
        "original_max_position_embeddings": 64}},
     {"original_max_position_embeddings": 64}),
    ("olmo3", {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}, {"rope_theta": 5e5}),
    ("gemma3_text", {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_theta": 1e4}}},
     {"rope_theta": 5e5, "rope_local_base_freq": 1e4}),
    ("qwen3_moe", {"num_local_experts": 8, "hidden_size": 64, "num_attention_heads": 4},
     {"num_experts": 8, "head_dim": 16}),
    ("gpt_neox", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
     {"rotary_emb_base": 5e5, "rotary_pct": 0.25}),
    ("gpt2", {"n_positions": 1024}, {"n_ctx": 1024, "max_position_embeddings": 1024}),
    ("lfm2", {"hidden_size": 64, "intermediate_size": 128}, {"block_dim": 64, "block_ff_dim": 128}),
    ("minimax_m2", {"head_dim": 128, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
     {"rotary_dim": 64, "shared_intermediate_size": 0}),
    ("qwen3_next", {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
     {"full_attention_interval": 4}),
    ("cohere2", {"layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2}, {"sliding_window_pattern": 3}),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "dense", "sparse"]}, {"first_k_dense_replace": 2}),
    ("ministral", {}, {"model_type": "mistral"}),
    ("llama", {"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
    ("falcon_h1", {"time_step_limit": [0.0, {"__float__": "Infinity"}]}, {"time_step_limit": [0.0, float("inf")]}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stated", "expected"), RENAMED)
@pytest.mark.parametrize("nested", [False, True])
def test_older_config_keys_are_read(kind: str, stated: dict[str, Any], expected: dict[str, Any], nested: bool) -> None:
    config = {"model_type": kind, **stated}
    before = json.dumps(config)
    found = normalized({"model_type": "x", "text_config": config})["text_config"] if nested else normalized(config)
    assert {key: found[key] for key in expected} == expected
    assert json.dumps(config) == before  # what was given is left alone


@pytest.mark.parametrize("variant", EVERY)
def test_older_configs_stay_as_they_are(variant: str) -> None:
    config = config_of(variant)
    assert normalized(config) == config


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "dbrx", "max_seq_len": 32768}, 32768),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, 131072),
        ({"model_type": "gemma2"}, 8192),
    ],
)
def test_the_context_is_found_under_its_other_names(tmp_path: Path, changes: dict[str, Any], length: int) -> None:
    assert context_length(open_checkpoint(write(tmp_path, config=changes))) == length


def test_an_output_projection_is_used_without_a_config_key(tmp_path: Path) -> None:
    entries = {**header(), "lm_head.weight": tensor("F32", [2, 1], 36)}
    shards = {"model.safetensors": shard(entries, 44)}
    assert open_checkpoint(write(tmp_path / "a", shards)).config["tie_word_embeddings"] is False
    assert "tie_word_embeddings" not in open_checkpoint(write(tmp_path / "b")).config
    said = write(tmp_path / "c", shards, config={"model_type": "llama", "tie_word_embeddings": True})
    assert open_checkpoint(said).config["tie_word_embeddings"] is True


def logits(network: Any) -> mx.array:
    tokens = [3, 7, 11, 2, 90, 41, 5]
    cache = new_cache(network, 16)
    cache.reserve(len(tokens))
    out: mx.array = network.logits(network.layers(network.embed(mx.array([tokens])), cache))
    return out


@pytest.mark.peer
@pytest.mark.parametrize("variant", ["llama", "llama3-scaled", "qwen3-yarn", "smollm3", "gemma3"])
def test_both_decoders_read_both_forms(tmp_path: Path, variant: str) -> None:
    older = write_model(tmp_path / "older", variant)
    newer = write_model(tmp_path / "newer", variant)
    config = config_of(variant)
    rope = {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling", {"rope_type": "default"})}
    if variant == "gemma3":
        kinds = ["full_attention" if (i + 1) % config.pop("sliding_window_pattern", 2) == 0 else "sliding_attention"
                 for i in range(4)]  # fmt: skip
        config["layer_types"] = kinds
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    (newer / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    wanted = logits(load_decoder(older))
    assert mx.allclose(logits(load_decoder(newer)), wanted, atol=1e-5)
    assert mx.allclose(logits(MlxLmNetwork(open_checkpoint(newer), device=mx.DeviceType.cpu)), wanted, atol=1e-3)


def test_a_soft_cap_that_gemma_3_states_is_applied(tmp_path: Path) -> None:
    plain = write_model(tmp_path, "gemma3")
    wanted = logits(load_decoder(plain))
    (plain / "config.json").write_text(json.dumps({**config_of("gemma3"), "final_logit_softcapping": 1.5}))
    assert mx.allclose(logits(load_decoder(plain)), mx.tanh(wanted / 1.5) * 1.5, atol=1e-5)


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)
KEYS = (
    "model_type", "rope_parameters", "layer_types", "mlp_layer_types", "head_dim", "hidden_size",
    "num_attention_heads", "n_positions", "text_config", "partial_rotary_factor",
)  # fmt: skip


@given(st.sampled_from([kind for kind, _, _ in RENAMED]), st.dictionaries(st.sampled_from(KEYS), anything))
def test_any_config_is_read_or_refused(kind: str, changes: dict[str, Any]) -> None:
    config = {"model_type": kind, **changes}
    try:
        once = normalized(config)
        decoder_config(once)
    except CheckpointError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert normalized(once) == once


@pytest.mark.parametrize("number", [10**400, -(10**400), float("inf"), float("nan"), 2**53])
@pytest.mark.parametrize("key", ["partial_rotary_factor", "hidden_size", "num_experts", "rope_theta"])
def test_numbers_that_no_float_holds_are_refused_by_name(key: str, number: float) -> None:
    for config in ({key: number}, {"rope_parameters": {"rope_type": "default", key: number}}):
        if "rope_parameters" in config and key in ("hidden_size", "num_experts"):
            continue  # nothing reads them there
        if key == "rope_theta" and number == 2**53:
            continue  # a base like another
        with pytest.raises(CheckpointError, match=key) as caught:
            normalized({"model_type": "llama", **config})
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("key", ["text_config", "rope_scaling", "quantization", "x"])
@pytest.mark.parametrize("levels", [40, 900, 20_000])
def test_a_config_without_a_floor_is_refused(key: str, levels: int) -> None:
    nested: dict[str, Any] = {}
    for _ in range(levels):
        nested = {key: nested, "model_type": "llama"}
    with pytest.raises(CheckpointError, match="nested"):
        normalized(nested)


@pytest.mark.parametrize("kind", [[], ["llama"], {"llama": 1}, 1, True])
def test_a_model_type_is_a_name(kind: object) -> None:
    for config in ({"model_type": kind}, {"model_type": "qwen2_vl", "text_config": {"model_type": kind}}):
        with pytest.raises(CheckpointError, match="model_type"):
            normalized({**config_of("llama"), **config})


@pytest.mark.parametrize("kind", ["llama", "phi"])
@pytest.mark.parametrize("layers", [1_001, 1_000_000])
def test_more_layers_than_any_decoder_has_are_refused_before_one_is_made(kind: str, layers: int) -> None:
    with pytest.raises(CheckpointError, match=f"num_hidden_layers.*1,000.*{layers}"):
        normalized({**config_of("llama"), "model_type": kind, "num_hidden_layers": layers})
