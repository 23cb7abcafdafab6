"""Reading of config.json: each architecture's keys, and one error for wrong values."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.architectures.config import DecoderConfig, ScanConfig
from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from tests.support import mlx_lm_models
from tests.support.mlx_lm_models import MODELS
from tests.support.tiny import EVERY, LAYERS, config_of


def read(variant: str, **changes: Any) -> DecoderConfig:
    config = decoder_config({**config_of(variant), **changes})
    assert config is not None
    return config


def windows(config: DecoderConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


@pytest.mark.parametrize("variant", EVERY)
def test_every_test_variant_runs_in_the_decoder(variant: str) -> None:
    config = read(variant)
    assert config.architecture == config_of(variant)["model_type"]
    assert len(config.layers) == config_of(variant)["num_hidden_layers"]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "jamba"},
        {"model_type": ["llama"]},
        config_of("llama") | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        config_of("llama") | {"rope_traditional": True},
        config_of("llama") | {"partial_rotary_factor": 0.5},
        config_of("llama") | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
)
def test_other_architectures_are_left_to_mlx_lm(config: dict[str, Any]) -> None:
    assert decoder_config(config) is None


def test_configs_without_query_scaling_need_no_original_context() -> None:
    config = mlx_lm_models.config_of("ministral3")
    del config["rope_parameters"]
    plain = decoder_config(normalized({**config, "rope_theta": 1e4}))
    assert plain is not None
    assert {layer.growth for layer in plain.layers} == {None}
    growing = decoder_config(normalized(mlx_lm_models.config_of("ministral3")))
    assert growing is not None
    assert {layer.growth for layer in growing.layers} == {(0.3, 12, 0)}


def test_phi_moe_with_two_amplitudes_is_left_to_mlx_lm() -> None:
    config = mlx_lm_models.config_of("phimoe-scaled")
    assert decoder_config(normalized(config)) is not None
    config["rope_scaling"] = {**config["rope_scaling"], "short_mscale": 1.1}
    assert decoder_config(normalized(config)) is None


def test_an_unsupported_activation_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="relu"):
        read("llama", hidden_act="relu")
    assert read("llama", hidden_act="silu").family.activation == "silu"


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "rms_norm_eps"]
)
def test_a_missing_key_is_named(key: str) -> None:
    config = config_of("llama")
    del config[key]
    with pytest.raises(CheckpointError, match=key):
        decoder_config(config)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, "64", True, [64], {}])
def test_a_count_must_be_a_positive_integer(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        read("llama", **{key: value})


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("deepseek-v3", {"n_group": 3}, "groups"),
        ("deepseek-v3", {"topk_group": 5}, "groups"),
        ("deepseek-v3", {"first_k_dense_replace": [1]}, "first_k_dense_replace"),
        ("granite-hybrid", {"time_step_limit": [0.0, 10**400]}, "time_step_limit"),
        ("granite-hybrid", {"time_step_limit": [float("nan"), 1.0]}, "time_step_limit"),
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("apertus", {"post_norm": True}, "post_norm"),
        ("apertus", {"qk_norm": "no"}, "qk_norm"),
    ],
)
def test_wrong_values_of_newer_families_are_named(name: str, changes: dict[str, Any], complaint: str) -> None:
    config = mlx_lm_models.config_of(name)
    assert decoder_config(config) is not None
    with pytest.raises(CheckpointError, match=complaint):
        decoder_config({**config, **changes})


def test_wrong_types_of_newer_keys_are_named() -> None:
    wrong = {"moe_layers": {}, "attn_temperature_tuning": "on", "attention_chunk_size": {}, "moe_renormalize": "no"}
    for key, value in wrong.items():
        with pytest.raises(CheckpointError, match=key):
            normalized({"model_type": "llama4_text", key: value})


def test_null_and_numeric_flags_are_read_as_booleans() -> None:
    config = mlx_lm_models.config_of("llama4-dense")
    decoders = [decoder_config({**config, "use_qk_norm": value}) for value in (None, 0, 1)]
    assert [bool(decoder and decoder.family.qk_norm) for decoder in decoders] == [False, False, True]


@pytest.mark.parametrize("value", [0, -1e-5, float("inf"), float("nan"), "1e-5", True, [1e-5]])
def test_a_number_must_be_positive(value: object) -> None:
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        read("llama", rms_norm_eps=value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention must be an object"),
        ({"layer_types": ["full_attention"]}, "layer_types does not list 3 layers"),
        ({"layer_types": "full_attention"}, "layer_types does not list 3 layers"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
        ({"model_type": "smollm3", "no_rope_layers": 7}, "no_rope_layers"),
        ({"model_type": "mistral", "sliding_window": -4}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": "4"}, "sliding_window"),
    ],
)
def test_contradictory_settings_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        read("llama", **changes)


def test_windows_are_those_of_the_architecture() -> None:
    assert windows(read("llama", sliding_window=8)) == [None] * LAYERS
    assert windows(read("mistral", sliding_window=8)) == [8, 8]
    assert windows(read("mistral", sliding_window=None)) == [None, None]
    assert windows(read("gemma2", sliding_window=8)) == [8, None, 8]
    assert windows(read("gemma3", num_hidden_layers=6, sliding_window_pattern=3)) == [16, 16, None, 16, 16, None]
    assert windows(read("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)) == [None, None, 8]
    assert windows(read("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)) == [8, 8, 8]
    assert windows(read("qwen2", use_sliding_window=False, sliding_window=8, max_window_layers=0)) == [None] * LAYERS
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(read("llama", sliding_window=8, layer_types=kinds)) == [8, None, 8]
    assert windows(read("qwen3", use_sliding_window=False, sliding_window=8, layer_types=kinds)) == [None] * LAYERS


def test_layers_without_rope_follow_from_the_config() -> None:
    assert [layer.rope is None for layer in read("smollm3", num_hidden_layers=4).layers] == [False, True, False, True]
    listed = read("smollm3", no_rope_layers=[1, 0, 1])
    assert [layer.rope is None for layer in listed.layers] == [False, True, False]


def test_windows_and_ropes_of_smallthinker_are_listed_by_layer() -> None:
    experts = {"moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2, "moe_ffn_hidden_size": 32}
    config = {**config_of("llama"), **experts, "model_type": "smallthinker", "num_hidden_layers": 4}

    def layers(**changes: Any) -> list[tuple[int | None, bool]]:
        decoder = decoder_config(normalized({**config, **changes}))
        assert decoder is not None
        return [(layer.window, layer.rope is not None) for layer in decoder.layers]

    assert layers() == [(None, True)] * 4
    listed = layers(rope_layout=[0, 1, 1, 0], sliding_window_layout=[0, 1, 1, 1], sliding_window_size=16)
    assert listed == [(None, False), (16, True), (16, True), (16, False)]
    with pytest.raises(CheckpointError, match="sliding_window_size"):
        layers(sliding_window_layout=[0, 1, 1, 1])


def test_kv_heads_and_norms_of_falcon_follow_from_its_generation() -> None:
    config = {**config_of("llama"), "model_type": "falcon", "num_attention_heads": 4, "num_kv_heads": 2}

    def layers(**changes: Any) -> tuple[int, bool]:
        decoder = decoder_config(normalized({**config, **changes}))
        assert decoder is not None
        assert decoder.family.parallel
        return decoder.kv_heads, decoder.family.norms.attention != decoder.family.norms.mlp

    assert layers() == (1, False)
    assert layers(multi_query=False) == (4, False)
    assert layers(new_decoder_architecture=True) == (2, True)
    assert layers(new_decoder_architecture=True, num_ln_in_parallel_attn=1) == (2, False)
    for other in ({"alibi": True}, {"parallel_attn": False}):
        assert decoder_config(normalized({**config, **other})) is None


def test_granite_swa_states_the_rotation_of_each_layer() -> None:
    config = {**config_of("llama"), "model_type": "granite_swa", "num_hidden_layers": 5, "rope_theta": 1e4}

    def layers(**changes: Any) -> list[tuple[int | None, float | None]]:
        decoder = decoder_config(normalized({**config, **changes}))
        assert decoder is not None
        assert all(layer.sinks for layer in decoder.layers)
        return [(layer.window, None if layer.rope is None else layer.rope.theta) for layer in decoder.layers]

    assert layers() == [(None, 1e4), (128, 1e4), (128, 1e4), (128, 1e4), (None, 1e4)]
    assert layers(layer_rope_theta=[0, 5e4, 5e4, 5e4, 0]) == [(None, None), *[(128, 5e4)] * 3, (None, None)]
    with pytest.raises(UnsupportedModelError, match="several rotations"):
        layers(layer_rope_theta=[1e4, 5e4, 5e4, 5e4, 0])
    for wrong in ([{}] * 5, ["1e4"] * 5, [1e4]):
        with pytest.raises(CheckpointError):
            layers(layer_rope_theta=wrong)


def test_gemma3_rotates_sliding_layers_at_the_local_frequency() -> None:
    older = read("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    newer = config_of("gemma3")
    del newer["rope_theta"]
    newer["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    for config in (older, decoder_config(newer)):
        assert config is not None
        ropes = [(layer.window, layer.rope.theta, layer.rope.kind) for layer in config.layers if layer.rope]
        assert ropes == [(16, 1e4, "default"), (None, 1e6, "linear")] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_rope_settings_are_read_under_old_and_new_keys(changes: dict[str, Any]) -> None:
    rope = read("llama", **changes).layers[0].rope
    assert rope is not None
    assert (rope.theta, rope.kind) == (5e5, "linear")
    assert rope.scaling is not None
    assert rope.scaling["factor"] == 2.0


def test_missing_optional_keys_have_their_defaults() -> None:
    config = config_of("llama")
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta", "tie_word_embeddings"):
        del config[key]
    found = decoder_config(config)
    assert found is not None
    assert (found.kv_heads, found.head_dim, found.context_length) == (4, 16, 2048)


def test_gemma2_softcaps_can_be_switched_off() -> None:
    config = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.attention_softcap, config.logit_softcap) == (None, None)
    assert (read("gemma2").attention_softcap, read("gemma2").logit_softcap) == (50.0, 30.0)


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)
CONFIGS = {**{name: config_of(name) for name in EVERY}, **{name: mlx_lm_models.config_of(name) for name in MODELS}}
KEYS = sorted({key for config in CONFIGS.values() for key in config} | {"rope_parameters", "no_rope_layers"})


@given(st.sampled_from(sorted(CONFIGS)), st.dictionaries(st.sampled_from(KEYS), anything, min_size=1, max_size=3))
def test_any_value_is_read_or_refused_as_a_checkpoint_error(variant: str, changes: dict[str, Any]) -> None:
    try:
        config = decoder_config({**CONFIGS[variant], **changes})
    except CheckpointError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert config is None or len(config.layers) >= 1


def test_norms_before_mamba_gates_are_left_to_mlx_lm() -> None:
    config = mlx_lm_models.config_of("falcon-h1-normed")
    assert decoder_config(config) is not None
    assert decoder_config({**config, "mamba_norm_before_gate": True}) is None


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_scores_of_gemma_are_scaled_by_transformers_default(kind: str) -> None:
    config = {key: value for key, value in config_of("gemma2").items() if key != "query_pre_attn_scalar"}
    decoder = decoder_config(normalized({**config, "model_type": kind}))
    assert decoder is not None
    assert decoder.attention_scale == 256**-0.5


def test_minicpm3_has_transformers_defaults_and_one_kind_of_scaling() -> None:
    stated = mlx_lm_models.config_of("minicpm3")
    config = {key: value for key, value in stated.items() if key not in ("rope_theta", "tie_word_embeddings")}
    decoder = decoder_config(normalized(config))
    assert decoder is not None
    assert decoder.tied_embeddings
    assert {layer.rope.theta for layer in decoder.layers if layer.rope is not None} == {1e4}
    assert decoder_config(normalized({**config, "rope_scaling": {"type": "linear", "factor": 2.0}})) is None


def test_qwen_1_ends_where_its_scalings_begin_and_has_the_base_of_its_config() -> None:
    config = {**mlx_lm_models.config_of("qwen-1"), "seq_length": 64, "rotary_emb_base": 1e6}
    decoder = decoder_config(normalized(config))
    assert decoder is not None
    assert decoder.context_length == 64
    assert {layer.rope.theta for layer in decoder.layers if layer.rope is not None} == {1e6}
    assert decoder_config(normalized({**config, "kv_channels": 32})) is None


def test_a_minicpm3_with_a_head_is_not_tied() -> None:
    stated = mlx_lm_models.config_of("minicpm3")
    config = {key: value for key, value in stated.items() if key != "tie_word_embeddings"}
    decoder = decoder_config(normalized(config, ["lm_head.weight"]))
    assert decoder is not None
    assert not decoder.tied_embeddings


@pytest.mark.parametrize("key", ["mlp_layer_types", "num_attention_heads_per_layer"])
@pytest.mark.parametrize("listed", [[], ["sparse"]])
def test_a_list_by_layer_of_another_length_is_refused(key: str, listed: list[str]) -> None:
    config = mlx_lm_models.config_of("laguna")
    with pytest.raises(CheckpointError, match=f"{key} does not list 2 layers"):
        decoder_config(normalized({**config, key: listed}))


@pytest.mark.parametrize(("stated", "rank"), [("auto", 4), (3, 3)])
def test_a_falcon_mamba_states_no_heads(stated: object, rank: int) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "state_size": 16, "conv_kernel": 4}
    config = {"model_type": "falcon_mamba", "num_hidden_layers": 2, "vocab_size": 96, "time_step_rank": stated, **sizes}
    decoder = decoder_config(normalized(config))
    assert decoder is not None
    for layer in decoder.layers:
        assert layer.mixer is not None
        assert layer.mixer.scan == ScanConfig(rank, norm_eps=1e-6)


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 10**400, 1e29, -1, "2"])
@pytest.mark.parametrize(("kind", "key"), [("rwkv7", "hidden_ratio"), ("mamba2", "expand")])
def test_an_impossible_factor_of_the_width_is_named(kind: str, key: str, factor: object) -> None:
    with pytest.raises(CheckpointError, match=key) as caught:
        normalized({"model_type": kind, "hidden_size": 64, key: factor})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["deepseek-v3", "mimo-v2", "ling", "afmoe", "exaone-moe"])
def test_a_single_expert_keeps_its_score_as_its_weight(name: str) -> None:
    """As in mlx-lm's classes, whatever `norm_topk_prob` says."""
    config = {**mlx_lm_models.config_of(name), "norm_topk_prob": True, "route_norm": True, "n_group": 1}
    for active in (1, 2):
        decoder = decoder_config(normalized({**config, "topk_group": 1, "num_experts_per_tok": active}))
        assert decoder is not None
        normalize = {layer.experts.normalized for layer in decoder.layers if layer.experts is not None}
        assert normalize == {active > 1}
