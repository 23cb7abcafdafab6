"""Published shapes of newer families, as `family_shapes` has others: true widths, heads and experts of each layer.

Sizes are those of the catalog and of the defaults in transformers and mlx-lm. Where none has them, they are those of
the published config.json; ranks of RWKV-7 are those that RWKV-LM's training script computes from the width.

Models of more than about two billion weights have fewer layers here, and some fewer experts, by the comments; each
token uses as many experts as published. Vocabularies of these have 65,536 entries or fewer, so that the last product
keeps its share of a step. Most metadata keys follow from the rows of `gguf.architectures`.
"""

from dataclasses import replace
from typing import Any

from headrace.models.gguf.architectures import ARCHITECTURES
from headrace.models.gguf.keys import KEYS, SIGMOID, SOFTMAX
from tests.bench.family_shapes import CONTEXT, FamilyShape, common, latent

_TYPES = {"integer": int, "flag": bool, "number": float, "positive": float}
_LOCAL = "sliding_attention"
_FULL = "full_attention"
_EVERYWHERE = {
    "vocab_size": 65536, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False, "attention_bias": False,
    "rope_scaling": None,
}  # fmt: skip


def _published(architecture: str, config: dict[str, Any], keys: dict[str, Any], **more: Any) -> FamilyShape:
    """Return a family. keys: the metadata that do not follow from the config. more: further fields."""
    row = ARCHITECTURES[architecture]
    config = {**_EVERYWHERE, **config}
    stated: dict[str, Any] = {}
    for entry in row.keys:
        if config.get(entry) is not None:
            key = KEYS[entry]
            stated[key.name] = _TYPES[key.kind](config[entry])
    if row.experts is not None:
        count, active, width = (config[entry] for entry in row.experts)
        stated |= {"expert_count": count, "expert_used_count": active, "expert_feed_forward_length": width}
        stated["expert_gating_func"] = SIGMOID if row.sigmoid else SOFTMAX
    if row.window_period:
        stated["attention.sliding_window"] = config["sliding_window"]
        stated["attention.sliding_window_pattern"] = [kind == _LOCAL for kind in config["layer_types"]]
    return FamilyShape(config, architecture, {**common(config, row.epsilon), **stated, **keys}, **more)


_GPT_OSS = {  # 3 of 24 layers
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 3,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "rms_norm_eps": 1e-5, "sliding_window": 128, "layer_types": [_LOCAL, _FULL, _LOCAL],
    "rope_theta": 150000.0, "attention_bias": True, "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
_QWEN3_VL = {  # the text part, whole
    "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 5e6, "tie_word_embeddings": True,
}  # fmt: skip
_ROPES = {"rope_type": "default", "rope_theta": 5e5}
_MELLUM = {  # 4 of 28 layers
    "model_type": "mellum", "hidden_size": 2304, "intermediate_size": 896, "moe_intermediate_size": 896,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "sliding_window": 1024,
    "layer_types": [_LOCAL] * 3 + [_FULL], "rope_theta": 5e5, "rope_parameters": {_LOCAL: _ROPES, _FULL: _ROPES},
}  # fmt: skip
_LAGUNA_HEADS = [48, 64, 64, 64, 48]
_LAGUNA = {  # 5 of 40 layers, 128 of 256 experts
    "model_type": "laguna", "hidden_size": 2048, "intermediate_size": 8192, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_hidden_layers": 5, "num_attention_heads": 48,
    "num_attention_heads_per_layer": _LAGUNA_HEADS, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "sliding_window": 512,
    "gating": True, "qkv_bias": False, "layer_types": [_FULL, _LOCAL, _LOCAL, _LOCAL, _FULL], "rope_theta": 5e5,
    "mlp_layer_types": ["dense"] + ["sparse"] * 4, "rope_parameters": {
        _FULL: {**_ROPES, "partial_rotary_factor": 0.5},
        _LOCAL: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
_MINIMAX = {  # 4 of 62 layers, 32 of 256 experts
    "model_type": "minimax", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 8, "shared_intermediate_size": 0, "rms_norm_eps": 1e-6, "rope_theta": 5e6,
    "scoring_func": "sigmoid", "use_qk_norm": True,
}  # fmt: skip
_LATENT = {
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "moe_layer_freq": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "qk_rope_head_dim": 64, "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
_MISTRAL4 = {  # 4 of 36 layers, 16 of 128 experts
    **_LATENT, "model_type": "mistral4", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 32, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "kv_lora_rank": 256,
    "q_lora_rank": 1024, "qk_nope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True, "rope_parameters": {
        "type": "yarn", "rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
_GLM5 = {  # 2 of 78 layers, the first of them dense, 16 of 256 experts
    **_LATENT, "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 16, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_head_dim": 128,
    "index_n_heads": 32, "index_topk": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rope_theta": 1e6,
}  # fmt: skip
_KIMI_K25 = {  # 2 of 61 layers, the first of them dense, 16 of 384 experts
    **_LATENT, "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 16, "num_experts_per_tok": 8, "routed_scaling_factor": 2.827, "first_k_dense_replace": 1,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "rope_theta": 5e4,
}  # fmt: skip
_TRINITY = {  # 4 of 32 layers, the first of them dense, 64 of 128 experts
    "model_type": "afmoe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64,
    "num_experts_per_tok": 8, "num_shared_experts": 1, "num_dense_layers": 1, "route_norm": True, "route_scale": 2.826,
    "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "sliding_window": 2048, "layer_types": [_LOCAL] * 3 + [_FULL],
    "rope_theta": 1e4,
}  # fmt: skip
_LING2 = {  # Ling-mini-2.0: 5 of 20 layers, 128 of 256 experts
    "model_type": "bailing_moe", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 512, "num_hidden_layers": 5, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1,
    "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True, "use_bias": False,
    "use_qkv_bias": False, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "rope_theta": 6e5,
}  # fmt: skip
_STEP = {  # 4 of 45 layers, the first of them dense, 32 of 288 experts; 96 heads with a window
    "model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264, "moe_intermediate_size": 1280,
    "share_expert_dim": 1280, "num_hidden_layers": 4, "num_attention_heads": 64, "num_attention_groups": 8,
    "num_key_value_heads": 8, "head_dim": 128, "moe_num_experts": 32, "moe_top_k": 8, "moe_layers_enum": "1,2,3",
    "moe_router_scaling_factor": 3.0, "norm_expert_weight": True, "use_head_wise_attn_gate": True, "rms_norm_eps": 1e-5,
    "sliding_window": 512, "layer_types": [_FULL] + [_LOCAL] * 3, "rope_theta": [5e6, 1e4, 1e4, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0], "yarn_only_types": [_FULL],
    "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
}  # fmt: skip
_LFM2_MOE = {  # LFM2.5 8B: 8 of 24 layers, the first two of them dense
    "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
    "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 32,
    "num_experts_per_tok": 4, "num_dense_layers": 2, "norm_topk_prob": True, "use_expert_bias": True, "norm_eps": 1e-5,
    "conv_L_cache": 3, "conv_bias": False, "rope_theta": 1e6, "full_attn_idxs": [2, 6], "vocab_size": 21504,
    "tie_word_embeddings": True,
}  # fmt: skip
_DOTS1 = {  # 3 of 62 layers, the first of them dense, 32 of 128 experts
    "model_type": "dots1", "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
    "n_routed_experts": 32, "n_shared_experts": 2, "num_experts_per_tok": 6, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "mlp_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 1e7,
}  # fmt: skip
_LING3 = {  # Ling-3.0-tiny: 8 of 24 layers, the first of them dense; 6 of them delta networks
    "model_type": "bailing_moe_v3", "hidden_size": 1536, "intermediate_size": 4608, "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "norm_topk_prob": True, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "layer_group_size": 4, "head_dim": 128, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "short_conv_kernel_size": 4, "kda_lower_bound": -5.0,
    "kda_safe_gate": True, "no_kda_lora": True, "rms_norm_eps": 1e-6, "rope_theta": 6e6, "rope_interleave": True,
}  # fmt: skip
_MINIMAX3 = {  # the text part: 3 of 60 layers, the first of them dense, 16 of 128 experts
    "model_type": "minimax_m3", "hidden_size": 6144, "intermediate_size": 3072, "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 128, "rotary_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "scoring_func": "sigmoid", "routed_scaling_factor": 2.0, "moe_layer_freq": [0, 1, 1], "use_routing_bias": True,
    "use_qk_norm": True, "use_gemma_norm": False, "rms_norm_eps": 1e-6, "rope_theta": 5e6, "index_n_heads": 4,
    "index_head_dim": 128, "index_block_size": 128, "index_topk_blocks": 16, "index_local_blocks": 1,
    "sparse_attention_freq": [0, 1, 1],
}  # fmt: skip
_MUSE_LAYERS = 4  # of 52
_MUSE = {
    "model_type": "muse_glimmer", "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": _MUSE_LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8,
    "sliding_window": 2048, "layer_types": [_LOCAL] * 3 + [_FULL], "qk_scale_factor": 3.87, "rope_theta": 5e5,
    "hidden_activation": "silu", "final_logit_softcapping": 20.0, "output_multiplier": 0.19611613513818404,
}  # fmt: skip
_MAMBA = {  # 130M, whole
    "model_type": "mamba", "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 24, "state_size": 16,
    "conv_kernel": 4, "time_step_rank": 48, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
    "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 50280, "tie_word_embeddings": True,
}  # fmt: skip
_MAMBA2 = {  # 1.3B, whole
    "model_type": "mamba2", "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 48, "num_heads": 64,
    "head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 50288, "state_size": 128,
    "n_groups": 1, "conv_kernel": 4, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
    "time_step_limit": [0.0, 1e9], "time_step_rank": 64, "tie_word_embeddings": True,
}  # fmt: skip


def _nested(kind: str, family: FamilyShape) -> FamilyShape:
    """Return a family whose config is the text part of one of the model type `kind`."""
    config = {key: family.config[key] for key in ("vocab_size", "num_hidden_layers")}
    return replace(family, config={**config, "model_type": kind, "text_config": family.config})


def _rwkv7(layers: int, size: int, decay: int, rate: int, value: int, gate: int) -> FamilyShape:
    """Return RWKV-7, whole. decay, rate, value and gate are ranks."""
    config = {
        "model_type": "rwkv7", "hidden_size": size, "intermediate_size": 4 * size, "num_hidden_layers": layers,
        "head_dim": 64, "num_attention_heads": size // 64, "num_key_value_heads": size // 64, "norm_eps": 1e-5,
        "decay_low_rank_dim": decay, "a_low_rank_dim": rate, "v_low_rank_dim": value, "gate_low_rank_dim": gate,
    }  # fmt: skip
    vectors: dict[str, Any] = {  # llama.cpp loads these of the first layer, too, of the rates' rank, and uses none
        "blk.0.time_mix_v0.weight": [0.0] * size,
        "blk.0.time_mix_v1.weight": [[0.0] * size] * rate,
        "blk.0.time_mix_v2.weight": [[0.0] * rate] * size,
    }
    keys = {"attention.head_count": 0, "attention.layer_norm_epsilon": 1e-5, "wkv.head_size": 64}
    return _published("rwkv7", config, keys, vectors=vectors)


PUBLISHED: dict[str, FamilyShape] = {
    "gpt-oss-20b": _published(
        "gpt-oss", _GPT_OSS,
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096},
    ),
    "qwen3-vl-2b": _published("qwen3vl", _QWEN3_VL, {"rope.dimension_sections": [24, 20, 20, 0]}),
    "mellum2": _published("mellum", _MELLUM, {}),
    "laguna-xs.2": _published(
        "laguna", _LAGUNA,
        {
            "attention.head_count": _LAGUNA_HEADS, "attention.sliding_window": 512, "rope.freq_base_swa": 1e4,
            "rope.dimension_count": 64, "rope.dimension_count_swa": 128, "leading_dense_block_count": 1,
            "expert_shared_count": 1, "expert_weights_norm": True,
        },
    ),
    "minimax-m2": _published("minimax-m2", _MINIMAX, {"rope.dimension_count": 64}),
    "mistral-small-4": _published(
        "mistral4", _MISTRAL4,
        {
            **latent(_MISTRAL4), "attention.temperature_scale": 0.1, "attention.temperature_length": 8192,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 128.0, "rope.scaling.original_context_length": 8192,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
    "glm-5": _published(
        "glm-dsa", _GLM5,
        {**latent(_GLM5), "attention.layer_norm_epsilon": 1e-6, "expert_gating_func": SIGMOID},
    ),
    "kimi-k2.5": _published("deepseek2", _KIMI_K25, {**latent(_KIMI_K25), "expert_gating_func": SIGMOID}),
    "trinity-mini": _published("afmoe", _TRINITY, {}),
    "ling-mini-2": _published("bailingmoe2", _LING2, {"rope.dimension_count": 64, "expert_gating_func": SIGMOID}),
    "step-3.5-flash": _published(
        "step35", _STEP,
        {
            "attention.head_count": [64, 96, 96, 96], "attention.head_count_kv": [8] * 4, "rope.freq_base_swa": 1e4,
            "leading_dense_block_count": 1,
        },
    ),
    "lfm2.5-8b": _published(
        "lfm2moe", _LFM2_MOE,
        {"attention.head_count_kv": [0, 0, 8, 0, 0, 0, 8, 0], "rope.dimension_count": 64},
    ),
    "dots.llm1": _published("dots1", _DOTS1, {}),
    "ling-3-tiny": _published(
        "bailingmoe3", _LING3,
        {
            **latent(_LING3), "attention.head_count_kv": [0, 0, 0, 1] * 2, "kda.head_dim": 128, "kda.safe_gate": True,
            "kda.gate_lower_bound": -5.0, "expert_weights_norm": True,
        },
    ),
    "minimax-m3": _nested(
        "minimax_m3_vl",
        _published(
            "minimax-m3", _MINIMAX3,
            {
                "feed_forward_length": 12288, "leading_dense_block_count": 1, "expert_shared_count": 1,
                "expert_weights_norm": True, "rope.dimension_count": 64, "attention.indexer.head_count": 4,
                "attention.indexer.key_length": 128, "attention.indexer.top_k": 16,
                "attention.indexer.block_size": 128, "attention.indexer.local_blocks": 1,
            },
        ),
    ),
    "muse-glimmer": _published(
        "muse-glimmer", _MUSE,
        {"logit_scale": 0.19611613513818404, "final_logit_softcapping": 20.0},
        vectors={  # the factor of queries, as llama.cpp's converter writes it
            f"blk.{layer}.attn_{name}_norm.weight": [factor] * 128
            for layer in range(_MUSE_LAYERS) for name, factor in (("q", 3.87), ("k", 1.0))
        },
    ),
    "rwkv7-0.1b": _rwkv7(12, 768, decay=64, rate=64, value=32, gate=128),
    "rwkv7-1.5b": _rwkv7(24, 2048, decay=96, rate=96, value=64, gate=256),
    "mamba-130m": _published(
        "mamba", _MAMBA, {"attention.head_count": 0, "feed_forward_length": 0, "ssm.inner_size": 1536},
    ),
    "mamba2-1.3b": _published(
        "mamba2", _MAMBA2, {"attention.head_count": 0, "feed_forward_length": 0, "ssm.inner_size": 4096},
    ),
}  # fmt: skip
