"""GGUF metadata against the config.json it must become."""

import math
from typing import Any

import pytest

from headrace.models.gguf.architecture import Contents
from headrace.models.gguf.config import generation_config, model_config
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import LongFactors, llama3_factor
from headrace.models.gguf.vocabulary import SpecialIds
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

BASE = {
    "block_count": 2, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
}  # fmt: skip


def config(arch: str = "llama", tensors: tuple[str, ...] = ("output.weight",), **changes: Any) -> dict[str, Any]:
    """The config of BASE; in `changes`, `__` stands for a dot and None leaves the key out."""
    values = {**BASE, **{key.replace("__", "."): value for key, value in changes.items()}}
    keyed = {f"{arch}.{key}": value for key, value in values.items() if value is not None}
    factors = keyed.pop(f"{arch}.rope_factors", None)
    metadata = Metadata({"general.architecture": arch, **keyed})
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(tensors, ())
    return model_config(metadata, Contents(shapes, vocab_size=10, rope_factors=factors))


def test_llama_names_sizes_as_hugging_face_does() -> None:
    assert config(rope__freq_base=5e5) == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 10,
        "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def test_a_key_of_positions_that_llama_cpp_lacks_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'qwen3' with rope\.global\.freq_base is not supported"):
        config("qwen3", rope__global__freq_base=1e6)


def test_tied_embeddings_and_biases_follow_from_tensors() -> None:
    assert config(tensors=())["tie_word_embeddings"] is True
    assert config(tensors=("blk.0.attn_output.bias",))["attention_bias"] is True
    assert config(tensors=("blk.0.ffn_down.bias",))["mlp_bias"] is True
    assert config("qwen2")["attention_bias"] is True
    assert config("qwen3", attention__key_length=32)["head_dim"] == 32


def test_uniform_per_layer_settings_are_one_setting() -> None:
    assert config(attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2
    assert config(attention__head_count_kv=None)["num_key_value_heads"] == 4
    with pytest.raises(CheckpointError, match="head_count_kv"):
        config(attention__head_count_kv=[2, 1])


def test_gemma_gets_the_constants_its_files_leave_out() -> None:
    gemma2 = config("gemma2", attn_logit_softcapping=50.0, attention__key_length=32)
    assert (gemma2["sliding_window"], gemma2["query_pre_attn_scalar"]) == (4096, 32)
    assert (gemma2["attn_logit_softcapping"], gemma2["final_logit_softcapping"]) == (50.0, 30.0)
    assert config("gemma2", block_count=46, attention__key_length=32)["query_pre_attn_scalar"] == 64 // 4

    gemma3 = config("gemma3", block_count=26, attention__sliding_window=512, rope__freq_base=1e6)
    assert gemma3["model_type"] == "gemma3_text"
    assert (gemma3["sliding_window_pattern"], gemma3["rope_local_base_freq"], gemma3["rope_theta"]) == (6, 1e4, 1e6)
    assert gemma3["hidden_act"] == "gelu_pytorch_tanh"
    with pytest.raises(CheckpointError, match=r"gemma3\.attention\.sliding_window"):
        config("gemma3", block_count=26)


def test_ggufs_of_mixtures_become_configs_with_their_experts() -> None:
    counts = {"expert_count": 8, "expert_used_count": 2}
    mixtral = config(**counts)
    assert (mixtral["model_type"], mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == ("mixtral", 8, 2)
    qwen = config("qwen3moe", **counts, expert_feed_forward_length=32)
    assert (qwen["num_experts"], qwen["moe_intermediate_size"], qwen["norm_topk_prob"]) == (8, 32, True)
    qwen = config("qwen2moe", **counts, expert_feed_forward_length=32, expert_shared_feed_forward_length=40)
    assert (qwen["shared_expert_intermediate_size"], qwen["norm_topk_prob"]) == (40, False)
    oss = config(
        "gpt-oss", **counts, feed_forward_length=None, expert_feed_forward_length=32, attention__sliding_window=128
    )
    assert (oss["intermediate_size"], oss["sliding_window"]) == (32, 128)
    assert oss["layer_types"] == ["sliding_attention", "full_attention"]


def test_long_rope_names_its_factors_and_checks_its_amplitude() -> None:
    factors = LongFactors([9.0] * 6, [1.0] * 6)
    base = {f"phi3.{key}": value for key, value in BASE.items()}
    base |= {"general.architecture": "phi3", "phi3.rope.dimension_count": 12}
    base |= {"phi3.rope.scaling.original_context_length": 64}

    def of(**more: float) -> dict[str, Any]:
        metadata = Metadata({**base, **{f"phi3.rope.scaling.{key}": value for key, value in more.items()}})
        return model_config(metadata, Contents({}, vocab_size=10, long_factors=factors))

    assert of()["partial_rotary_factor"] == 0.75
    assert of()["original_max_position_embeddings"] == 64
    assert of()["rope_scaling"]["long_factor"] == [9.0] * 6
    assert of(attn_factor=1.1547005)["rope_scaling"]["type"] == "longrope"
    with pytest.raises(UnsupportedModelError, match="attention factor"):
        of(attn_factor=1.3)


def test_vision_models_text_parts_are_the_text_models() -> None:
    sections = {"rope__dimension_sections": [4, 2, 2, 0]}
    assert config("qwen2vl", **sections) == config("qwen2")
    assert config("qwen3vl", **sections) == config("qwen3")
    counts = {"expert_count": 8, "expert_used_count": 2}
    assert config("qwen3vlmoe", **counts, **sections) == config("qwen3moe", **counts)


def test_rope_scaling_is_read_or_refused_by_kind() -> None:
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    assert config(**linear)["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert "rope_scaling" not in config(rope__scaling__type="none", rope__scaling__factor=8.0)
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
    assert config(**yarn)["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="longrope"):
        config(rope__scaling__type="longrope")


def test_yarn_multiplies_its_amplitude_by_the_stated_factor() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    usual = 0.1 * math.log(4) + 1
    assert config(**yarn)["rope_scaling"]["original_max_position_embeddings"] == BASE["context_length"]
    assert "attention_factor" not in config(**yarn, rope__scaling__yarn_attn_factor=usual)["rope_scaling"]
    stated = config(**yarn, rope__scaling__attn_factor=1.5)["rope_scaling"]
    assert stated["attention_factor"] == pytest.approx(1.5 * usual)
    with pytest.raises(UnsupportedModelError, match="yarn_attn_factor"):
        config(**yarn, rope__scaling__yarn_attn_factor=1.0)


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("rope.scaling.alpha", 0.0, 50.0),
        ("rope.scaling.attn_factor", 1.0, 1.2),
        ("rope.scaling.yarn_log_multiplier", 0.0, 0.1),
        ("rope.scaling.yarn_ext_factor", 1.0, 0.5),
        ("rope.dimension_count", 16, 8),
        ("rope.dimension_sections", [0, 0, 0, 0], [4, 2, 2, 0]),
        ("rope.freq_base_swa", 10_000.0, 5e5),
        ("attention.rope_pattern", [True, True], [True, False]),
        ("attention.causal", True, False),
        ("attention.scale", 0.0, 0.1),
        ("attention.clamp_kqv", 0.0, 8.0),
        ("attention.max_alibi_bias", 0.0, 8.0),
        ("attention.temperature_scale", 0.0, 0.1),
        ("logit_scale", 1.0, 0.5),
        ("embedding_scale", 1.0, 12.0),
        ("residual_scale", 1.0, 0.2),
        ("final_logit_softcapping", 0.0, 30.0),
        ("swiglu_clamp_exp", [0.0, 0.0], [0.0, 7.0]),
        ("expert_weights_scale", 1.0, 2.5),
        ("expert_gating_func", 1, 2),
    ],
)
def test_keys_that_change_logits_are_applied_or_refused_by_name(key: str, neutral: Any, other: Any) -> None:
    spelled = key.replace(".", "__")
    plain = config("qwen2")
    assert config("qwen2", **{spelled: neutral}) == plain
    with pytest.raises(UnsupportedModelError, match=rf"(?i){key.rpartition('.')[2]}"):
        config("qwen2", **{spelled: other})


def test_layers_with_windows_are_those_that_the_file_lists() -> None:
    window = {"attention__sliding_window": 8, "block_count": 4}
    listed = {**window, "attention__sliding_window_pattern": [False, True, True, False]}
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert config("olmo2", **listed)["layer_types"] == types
    every = {**window, "attention__sliding_window_pattern": [True, False, True, False], "logit_scale": 0.1}
    cohere = {"attention__layer_norm_epsilon": 1e-5, "attention__layer_norm_rms_epsilon": None}
    assert config("cohere2", **every, **cohere)["sliding_window_pattern"] == 2
    for arch in ("gemma2", "gemma3"):
        with pytest.raises(UnsupportedModelError, match="window"):
            config(arch, **listed)


@pytest.mark.parametrize(
    ("factor", "high", "context"),
    [(8.0, 4.0, 8192), (32.0, 4.0, 8192), (16.0, 4.0, 4096), (8.0, 4.0, 32768), (2.0, 32.0, 131072), (8.0, 2.5, 8192)],
)
def test_llama_3_parameters_are_recovered_from_the_factors(factor: float, high: float, context: int) -> None:
    wanted = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }  # fmt: skip
    wavelengths = [2 * 3.141592653589793 * 5e5 ** (2 * index / 64) for index in range(32)]
    factors = [llama3_factor(wavelength, wanted) for wavelength in wavelengths]
    assert sum(1 < each < factor for each in factors) > 1  # some lie on the slope
    scaled = config(rope__freq_base=5e5, attention__key_length=64, rope_factors=factors)
    assert scaled["rope_scaling"] == wanted
    with pytest.raises(CheckpointError, match=r"31.*64"):
        config(rope__freq_base=5e5, attention__key_length=64, rope_factors=factors[1:])
    with pytest.raises(UnsupportedModelError, match="Llama 3 formula"):
        config(rope__freq_base=4e5, attention__key_length=64, rope_factors=factors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "klingon"}, "architecture 'klingon' is not supported$"),
        ({"arch": "bitnet"}, "architecture 'bitnet' is not supported: its file does not state its activation"),
        ({"arch": "plamo"}, "architecture 'plamo' is not supported: its heads have another order"),
        ({"arch": "plamo3"}, "architecture 'plamo3' is not supported: its tokenizer chooses"),
        ({"arch": "deepseek4"}, "architecture 'deepseek4' is not supported: its compressed attention"),
        ({"arch": "talkie"}, "architecture 'talkie' is not supported: its file states"),
        ({"arch": "qwen2", "expert_count": 8}, "expert_count = 8 is not supported"),
        ({"arch": "qwen3moe"}, "lacks qwen3moe.expert_count"),
        ({"arch": "granite", "attention__key_length": 32}, "heads of 32 are not supported in a granite"),
        ({"arch": "qwen3moe", "expert_count": 8, "expert_used_count": 9}, "expert_used_count should be"),
        ({"attention__value_length": 8}, "value_length = 8 is not supported"),
        ({"rope__dimension_count": 8}, "dimension_count = 8 is not supported"),
        ({"attention__head_count_kv": 3}, "cannot share 3"),
        ({"attention__key_length": 15}, "cannot be rotated"),
        ({"attention__head_count": 0}, "head_count should be a whole number from 1"),
        ({"block_count": 10**6}, "block_count should be a whole number"),
        ({"rope__freq_base": 0.0}, "freq_base should be above zero"),
        ({"rope__freq_base": float("nan")}, "freq_base should be a finite number"),
        ({"embedding_length": None}, "lacks llama.embedding_length"),
        ({"context_length": "256"}, "context_length should be a whole number"),
        ({"context_length": True}, "context_length should be a whole number"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        config(**changes)
    assert isinstance(caught.value, UnsupportedModelError) == ("not supported" in message)


def test_generation_settings_appear_only_where_the_file_recommends_them() -> None:
    special = SpecialIds(bos=1, eos=2, pad=None, unknown=0, ends=[2, 7], add_bos=True, add_eos=False)
    base: dict[str, Any] = {"general.architecture": "llama"}
    ids = {"bos_token_id": 1, "eos_token_id": [2, 7]}
    assert generation_config(Metadata(base), special) == ids
    given = {"general.sampling.temp": 0.699999988079071, "general.sampling.top_k": 20, "general.sampling.min_p": 0.0}
    sampled = {"temperature": 0.7, "top_k": 20, "min_p": 0.0, "do_sample": True}
    assert generation_config(Metadata(base | given), special) == ids | sampled
    with pytest.raises(CheckpointError, match="top_k"):
        generation_config(Metadata(base | {"general.sampling.top_k": 0.5}), special)
