"""Shapes of about a billion weights of newer families: mlx-lm's config.json and llama.cpp's metadata, by name."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FamilyShape:
    """One model. config: as mlx-lm's class takes it. keys: GGUF metadata, the architecture's prefix left out.

    vectors: tensors of the GGUF alone.
    """

    config: dict[str, Any]
    architecture: str
    keys: dict[str, Any]
    vectors: dict[str, list[Any]] = field(default_factory=dict)


CONTEXT = 8192


def common(config: dict[str, Any], eps: str = "rms_norm_eps") -> dict[str, Any]:
    """Return the metadata that every architecture has."""
    heads = config["num_attention_heads"]
    theta = config.get("rope_theta") or 1e6
    if isinstance(theta, list):  # of each layer
        theta = theta[0]
    return {
        "context_length": CONTEXT,
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim", config["hidden_size"] // heads),
        "attention.value_length": config.get("head_dim", config["hidden_size"] // heads),
        "attention.layer_norm_rms_epsilon": float(config.get(eps, 1e-5)),
        "rope.freq_base": float(theta),
        "vocab_size": config["vocab_size"],
    }


def latent(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of attention over latents, whose K/V have one head."""
    rotated = config["qk_rope_head_dim"]
    return {
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.head_count_kv": 1,
        "attention.key_length": config["kv_lora_rank"] + rotated,
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
    }


def _dense(kind: str, architecture: str, keys: dict[str, Any], **more: Any) -> FamilyShape:
    config = {
        "model_type": kind, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 65536, "rms_norm_eps": 1e-5,
        "max_position_embeddings": CONTEXT, "rope_theta": 1e6, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, **more,
    }  # fmt: skip
    return FamilyShape(config, architecture, {**common(config), "rope.dimension_count": config["head_dim"], **keys})


_QWEN35 = {
    "model_type": "qwen3_5", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "rms_norm_eps": 1e-6,
    "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "full_attention_interval": 4,
    "linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
_QWEN35_MOE = {
    **_QWEN35, "model_type": "qwen3_5_moe", "num_hidden_layers": 16, "vocab_size": 65536, "num_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
_LFM2_ATTENDS = (2, 5, 8, 10, 12, 14)
_LFM2 = {
    "model_type": "lfm2", "hidden_size": 2048, "block_dim": 2048, "block_ff_dim": 8192, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT, "conv_L_cache": 3, "conv_bias": False, "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "rope_theta": 1e6, "tie_word_embeddings": True,
    "full_attn_idxs": list(_LFM2_ATTENDS),
}  # fmt: skip
_LFM2_MOE = {
    "model_type": "lfm2_moe", "hidden_size": 1024, "intermediate_size": 3584, "moe_intermediate_size": 896,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 65536, "norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT, "conv_L_cache": 3, "conv_bias": False, "rope_theta": 1e6, "num_experts": 16,
    "num_experts_per_tok": 4, "num_dense_layers": 2, "norm_topk_prob": True, "use_expert_bias": True,
    "full_attn_idxs": list(_LFM2_ATTENDS), "tie_word_embeddings": True,
}  # fmt: skip
_GRANITE_ATTENDS = (5, 15, 25, 35)
_GRANITE = {
    "model_type": "granitemoehybrid", "hidden_size": 1536, "intermediate_size": 4096, "shared_intermediate_size": 4096,
    "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 100352,
    "rms_norm_eps": 1e-5, "max_position_embeddings": CONTEXT, "attention_bias": False, "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0078125, "logits_scaling": 6.0, "residual_multiplier": 0.22, "num_local_experts": 0,
    "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_proj_bias": False, "mamba_d_state": 128, "mamba_d_conv": 4,
    "mamba_n_groups": 1, "mamba_conv_bias": True, "position_embedding_type": "nope", "tie_word_embeddings": True,
    "layer_types": ["attention" if i in _GRANITE_ATTENDS else "mamba" for i in range(40)],
}  # fmt: skip
_FALCON = {
    "model_type": "falcon_h1", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 36,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32784, "rms_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_groups": 1, "rope_theta": 1e11, "tie_word_embeddings": True,
}  # fmt: skip
_NEMOTRON_PATTERN = "M-M-M-M*-M-M-M-M*-M-M-M-M-"
_NEMOTRON = {
    "model_type": "nemotron_h", "hidden_size": 1536, "intermediate_size": 6144,
    "num_hidden_layers": len(_NEMOTRON_PATTERN), "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 65536, "max_position_embeddings": CONTEXT, "attention_bias": False, "mamba_num_heads": 48,
    "mamba_head_dim": 64, "mamba_proj_bias": False, "ssm_state_size": 128, "conv_kernel": 4, "n_groups": 8,
    "mlp_bias": False, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
    "hybrid_override_pattern": list(_NEMOTRON_PATTERN), "tie_word_embeddings": False,
}  # fmt: skip
_GLM4_LITE = {
    "model_type": "glm4_moe_lite", "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 704,
    "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 1,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "kv_lora_rank": 512,
    "q_lora_rank": 768, "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1,
    "topk_group": 1, "moe_layer_freq": 1, "first_k_dense_replace": 1, "vocab_size": 65536, "norm_topk_prob": True,
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "rope_scaling": None,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
}  # fmt: skip
_GLM4_MOE = {
    "model_type": "glm4_moe", "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 704,
    "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "n_routed_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "vocab_size": 65536, "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "rope_scaling": None, "use_qk_norm": True, "tie_word_embeddings": False,
    "attention_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip


_KIMI_ATTENDS = (3, 7, 11)
_KIMI = {
    "model_type": "kimi_linear", "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 704,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 65536,
    "rope_theta": 1e4, "rms_norm_eps": 1e-5, "model_max_length": CONTEXT, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "num_experts": 16, "num_experts_per_token": 4,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "kda_layers": [i + 1 for i in range(12) if i not in _KIMI_ATTENDS],
        "full_attn_layers": [i + 1 for i in _KIMI_ATTENDS], "num_heads": 8, "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}  # fmt: skip


_GEMMA4_SLIDES = [i % 5 != 4 for i in range(20)]
_GEMMA4 = {
    "model_type": "gemma4_text", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 20,
    "num_attention_heads": 8, "num_key_value_heads": 1, "num_global_key_value_heads": 1, "head_dim": 256,
    "global_head_dim": 512, "vocab_size": 131072, "attention_k_eq_v": False, "enable_moe_block": False,
    "vocab_size_per_layer_input": 131072, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 10,
    "use_double_wide_mlp": True, "sliding_window": 512, "rms_norm_eps": 1e-6, "max_position_embeddings": CONTEXT,
    "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention" if slides else "full_attention" for slides in _GEMMA4_SLIDES],
}  # fmt: skip


_LLAMA4 = {
    "model_type": "llama4_text", "hidden_size": 1024, "intermediate_size": 1408, "intermediate_size_mlp": 4096,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 65536,
    "rms_norm_eps": 1e-5, "max_position_embeddings": CONTEXT, "rope_theta": 5e5, "rope_scaling": None,
    "attention_bias": False, "attention_chunk_size": 8192, "interleave_moe_layer_step": 2, "num_local_experts": 16,
    "num_experts_per_tok": 1, "use_qk_norm": True, "attn_temperature_tuning": 4, "tie_word_embeddings": False,
}  # fmt: skip
_DEEPSEEK_V2 = {  # as V2-Lite, which llama.cpp knows by its 27 layers
    "model_type": "deepseek_v2", "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 384,
    "num_hidden_layers": 27, "num_attention_heads": 8, "num_key_value_heads": 8, "n_shared_experts": 2,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "routed_scaling_factor": 1.0, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "moe_layer_freq": 1, "first_k_dense_replace": 1, "vocab_size": 65536,
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def _ssm(width: int, inner: int, state: int, heads: int, groups: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": width, "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }  # fmt: skip


def _where(layers: int, attends: tuple[int, ...], heads: int) -> list[int]:
    """Return the K/V heads of every layer, 0 without attention."""
    return [heads if i in attends else 0 for i in range(layers)]


_MIXED = {
    "expert_count": 16, "expert_used_count": 4, "expert_feed_forward_length": 704, "leading_dense_block_count": 1,
    "expert_weights_scale": 1.0,
}  # fmt: skip
_XIELU = {"alpha_p": 0.3, "alpha_n": 0.3, "beta": 0.5, "eps": -1e-6}

_TINY = {
    **_LFM2, "hidden_size": 64, "block_dim": 64, "block_ff_dim": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "full_attn_idxs": [1],
}  # fmt: skip

FAMILIES: dict[str, FamilyShape] = {
    "tiny": FamilyShape(  # for tests of the scripts themselves
        _TINY,
        "lfm2",
        {
            **common(_TINY, "norm_eps"), "shortconv.l_cache": 3, "attention.head_count_kv": _where(2, (1,), 2),
            "rope.dimension_count": 16,
        },
    ),
    "qwen3.5-0.8b": FamilyShape(
        _QWEN35,
        "qwen35",
        {
            **common(_QWEN35), **_ssm(4, 2048, 128, 16, 16), "full_attention_interval": 4, "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
        },
    ),
    "lfm2-1.2b": FamilyShape(
        _LFM2,
        "lfm2",
        {
            **common(_LFM2, "norm_eps"), "shortconv.l_cache": 3,
            "attention.head_count_kv": _where(16, _LFM2_ATTENDS, 8), "rope.dimension_count": 64,
        },
    ),
    "qwen3.5-moe": FamilyShape(
        _QWEN35_MOE,
        "qwen35moe",
        {
            **common(_QWEN35_MOE), **_ssm(4, 2048, 128, 16, 16), "full_attention_interval": 4, "expert_count": 32,
            "expert_used_count": 4, "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 512,
            "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0],
        },
    ),
    "lfm2-moe": FamilyShape(
        _LFM2_MOE,
        "lfm2moe",
        {
            **common(_LFM2_MOE, "norm_eps"), "shortconv.l_cache": 3, "leading_dense_block_count": 2,
            "attention.head_count_kv": _where(16, _LFM2_ATTENDS, 4), "rope.dimension_count": 64, "expert_count": 16,
            "expert_used_count": 4, "expert_feed_forward_length": 896, "expert_gating_func": 2,
        },
    ),
    "granite4-h-1b": FamilyShape(
        _GRANITE,
        "granitehybrid",
        {
            **common(_GRANITE), **_ssm(4, 3072, 128, 48, 1), "attention.scale": 0.0078125, "embedding_scale": 12.0,
            "residual_scale": 0.22, "logit_scale": 6.0, "rope.dimension_count": 128, "rope.scaling.finetuned": False,
            "attention.head_count_kv": _where(40, _GRANITE_ATTENDS, 4),
        },
    ),
    "falcon-h1-0.5b": FamilyShape(
        _FALCON, "falcon-h1", {**common(_FALCON), **_ssm(4, 1536, 128, 24, 1), "rope.dimension_count": 64}
    ),
    "nemotron-h-1b": FamilyShape(
        _NEMOTRON,
        "nemotron_h",
        {
            **common(_NEMOTRON), **_ssm(4, 3072, 128, 48, 8), "attention.layer_norm_epsilon": 1e-5,
            "attention.head_count_kv": [8 if kind == "*" else 0 for kind in _NEMOTRON_PATTERN],
            "feed_forward_length": [6144 if kind == "-" else 0 for kind in _NEMOTRON_PATTERN],
        },
    ),
    "glm4.7-flash": FamilyShape(
        _GLM4_LITE,
        "deepseek2",
        {
            **common(_GLM4_LITE), **latent(_GLM4_LITE), "attention.q_lora_rank": 768, **_MIXED,
            "expert_shared_count": 1, "expert_gating_func": 2, "expert_weights_norm": True,
        },
    ),
    "glm4-moe": FamilyShape(
        _GLM4_MOE,
        "glm4moe",
        {
            **common(_GLM4_MOE), **_MIXED, "expert_shared_count": 1, "expert_gating_func": 2,
            "expert_weights_norm": True, "rope.dimension_count": 64,
        },
    ),
    "gemma4-e1b": FamilyShape(  # as E2B, smaller
        _GEMMA4,
        "gemma4",
        {
            **common(_GEMMA4), "attention.key_length": 512, "attention.value_length": 512, "rope.dimension_count": 512,
            "attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count_swa": 256,
            "rope.freq_base_swa": 1e4, "attention.sliding_window": 512, "attention.shared_kv_layers": 10,
            "attention.sliding_window_pattern": _GEMMA4_SLIDES, "embedding_length_per_layer_input": 256,
            "feed_forward_length": [4096] * 10 + [8192] * 10, "final_logit_softcapping": 30.0,
        },
        {"rope_freqs.weight": [1.0] * 64 + [1e30] * 192},
    ),
    "kimi-linear": FamilyShape(
        _KIMI,
        "kimi-linear",
        {
            **common(_KIMI), **_MIXED, **latent(_KIMI), "kda.head_dim": 128, "ssm.conv_kernel": 4,
            "attention.head_count_kv": _where(12, _KIMI_ATTENDS, 1), "expert_shared_count": 1, "expert_gating_func": 2,
        },
    ),
    "llama4-moe": FamilyShape(
        {key: _LLAMA4[key] for key in ("vocab_size", "num_hidden_layers")}
        | {"model_type": "llama4", "text_config": _LLAMA4},
        "llama4",
        {
            **common({**_LLAMA4, "intermediate_size": 4096}), "rope.dimension_count": 128, "expert_count": 16,
            "expert_used_count": 1, "expert_feed_forward_length": 1408, "interleave_moe_layer_step": 2,
        },
    ),
    "deepseek-v2-lite": FamilyShape(
        _DEEPSEEK_V2,
        "deepseek2",
        {
            **common(_DEEPSEEK_V2), **latent(_DEEPSEEK_V2), "expert_count": 16, "expert_used_count": 4,
            "expert_feed_forward_length": 384, "leading_dense_block_count": 1, "expert_weights_scale": 1.0,
            "expert_shared_count": 2, "expert_gating_func": 1, "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 4096, "rope.scaling.yarn_log_multiplier": 0.0707,
        },
    ),
    "apertus": _dense(
        "apertus", "apertus", {f"xielu.{name}": [value] * 16 for name, value in _XIELU.items()}, post_norm=False,
        qk_norm=True, intermediate_size=9216, tie_word_embeddings=False,  # llama.cpp takes no tied ones
    ),
    "llama": _dense("llama", "llama", {}),
    "llama-3b": _dense(
        "llama", "llama", {}, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        vocab_size=128256,
    ),
    "olmo2": _dense("olmo2", "olmo2", {}, tie_word_embeddings=False),  # llama.cpp takes no tied ones
    "exaone4": _dense(
        "exaone4", "exaone4", {}, sliding_window=None, sliding_window_pattern=None, rope_scaling=None
    ),
    "granite": _dense(
        "granite", "granite",
        {"attention.scale": 0.0078125, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0},
        attention_multiplier=0.0078125, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0,
    ),
    "glm4": _dense("glm4", "glm4", {"rope.dimension_count": 64}, partial_rotary_factor=0.5),
    "ernie4.5": _dense("ernie4_5", "ernie4_5", {}, use_bias=False),
    "hunyuan": _dense("hunyuan_v1_dense", "hunyuan-dense", {}, use_qk_norm=True),
    "seed-oss": _dense("seed_oss", "seed_oss", {}),
    "ministral3": _dense(
        "ministral3", "mistral3", {},
        rope_parameters={
            "rope_type": "default", "type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8192,
        },
    ),
}  # fmt: skip
