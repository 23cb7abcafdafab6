"""Tiny random checkpoints of architectures as mlx-lm's classes write them, by name."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

VOCAB = 96
WINDOW = 16
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_GRANITE = {
    "model_type": "granite", "head_dim": 16, "attention_bias": False, "mlp_bias": False, "logits_scaling": 6.0,
    "attention_multiplier": 0.11, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
}  # fmt: skip
_COHERE = {
    "model_type": "cohere2", "head_dim": 16, "layer_norm_eps": 1e-2, "logit_scale": 0.7, "sliding_window": WINDOW,
    "sliding_window_pattern": 2, "tie_word_embeddings": True,
}  # fmt: skip
_EXAONE = {
    "model_type": "exaone4", "sliding_window": WINDOW, "sliding_window_pattern": "LG", "rope_scaling": None,
}  # fmt: skip

_GLM_MOE = {
    "model_type": "glm4_moe", "moe_intermediate_size": 48, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "n_routed_experts": 8, "routed_scaling_factor": 1.7, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "rope_scaling": None, "use_qk_norm": True, "attention_bias": True,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
_GLM_LITE = {
    **_GLM_MOE, "model_type": "glm4_moe_lite", "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 64,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_layer_freq": 1, "attention_bias": False,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0, "head_dim": None,
}  # fmt: skip
_DOTS = {
    **_GLM_MOE, "model_type": "dots1", "scoring_func": "noaux_tc", "mlp_bias": False, "attention_bias": False,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
_MIMO_V2 = {
    "model_type": "mimo_v2_flash", "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1], "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "sliding_window_size": WINDOW, "moe_intermediate_size": 48, "n_shared_experts": None, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "routed_scaling_factor": None, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "layernorm_epsilon": 1e-2, "swa_rope_theta": 5000.0,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "head_dim": 48, "v_head_dim": 32, "swa_head_dim": 48,
    "swa_v_head_dim": 32, "partial_rotary_factor": 0.334,
}  # fmt: skip
_MINIMAX = {
    "model_type": "minimax", "num_experts_per_tok": 2, "num_local_experts": 6, "shared_intermediate_size": 0,
    "rotary_dim": 16, "use_qk_norm": True,
}  # fmt: skip
_MINIMAX_M3 = {
    "model_type": "minimax_m3", "num_hidden_layers": 3, "num_attention_heads": 8, "num_local_experts": 6,
    "num_experts_per_tok": 2, "intermediate_size": 48, "dense_intermediate_size": 96, "shared_intermediate_size": 32,
    "routed_scaling_factor": 1.7, "moe_layer_freq": [0, 1, 1], "partial_rotary_factor": 0.5,
    "sparse_attention_config": {
        "use_sparse_attention": True, "sparse_index_dim": 16, "sparse_num_index_heads": 2, "sparse_topk_blocks": 3,
        "sparse_block_size": 4, "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1],
    },
}  # fmt: skip
_QWEN35 = {
    "model_type": "qwen3_5", "num_hidden_layers": 4, "full_attention_interval": 2, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
_LFM2 = {
    "model_type": "lfm2", "num_hidden_layers": 3, "head_dim": 16, "norm_eps": 1e-2, "conv_L_cache": 3,
    "conv_bias": False, "block_dim": 64, "block_ff_dim": 96, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1], "tie_word_embeddings": True,
}  # fmt: skip
_GRANITE_HYBRID = {
    **_GRANITE, "model_type": "granitemoehybrid", "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_proj_bias": False,
    "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_n_groups": 2, "mamba_conv_bias": True,
    "position_embedding_type": "nope",
}  # fmt: skip
_SHARED_GATE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_LFM2_MOE = {
    **_LFM2, "model_type": "lfm2_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "norm_topk_prob": True, "use_expert_bias": True, "num_dense_layers": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
_FALCON = {
    "model_type": "falcon_h1", "head_dim": 16, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_conv_bias": True, "attention_in_multiplier": 0.8,
    "tie_word_embeddings": True,
}  # fmt: skip
_NEMOTRON = {
    "model_type": "nemotron_h", "head_dim": 16, "hybrid_override_pattern": "M-M*-M", "num_hidden_layers": 6,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "conv_kernel": 4,
    "layer_norm_epsilon": 1e-2, "attention_bias": False, "mamba_proj_bias": False, "mlp_bias": False, "use_bias": False,
    "use_conv_bias": True,
}  # fmt: skip
_NEMOTRON_MOE = {
    **_NEMOTRON, "hybrid_override_pattern": "MEM*E", "n_routed_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 48, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 64, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
_GEMMA4 = {  # as E2B: two sizes of heads, K/V of earlier layers, inputs of single layers
    "model_type": "gemma4_text", "num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 64, "num_key_value_heads": 1, "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB, "use_double_wide_mlp": True, "tie_word_embeddings": True,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
_GEMMA3N = {  # as E2B, with a table for fewer tokens than the vocabulary
    "model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_local_base_freq": 5000.0,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB - 16, "final_logit_softcapping": 3.0,
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.9], "altup_num_inputs": 3, "altup_coef_clip": 0.8,
    "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 32, "tie_word_embeddings": True,
}  # fmt: skip
_SPARK = {
    "model_type": "spark2_5", "hidden_act": "gelu", "sliding_window": WINDOW, "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_theta": 5e3, "partial_rotary_factor": 0.5},
        "full_attention": {"rope_theta": 1e5, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
_GEMMA4_MIXTURE = {  # as 26B-A4B: values are keys in full attention, experts beside a dense feed-forward
    **_GEMMA4, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_key_value_heads": 2,
    "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
    "moe_intermediate_size": 48, "use_double_wide_mlp": False,
}  # fmt: skip
_OLMO_HYBRID = {
    **_QWEN35, "model_type": "olmo_hybrid", "linear_allow_neg_eigval": True, "attention_bias": False,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": None, "layer_norm_epsilon": 1e-3,
}  # fmt: skip
_KIMI = {
    "model_type": "kimi_linear", "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "model_max_length": 256, "num_experts": 8,
    "num_experts_per_token": 3, "moe_intermediate_size": 48, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7, "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
_KIMI_K3 = {
    **_KIMI, "num_hidden_layers": 4, "hidden_act": "situ", "activation_situ_beta": 1.5,
    "activation_situ_linear_beta": 2.0, "attn_res_block_size": 2, "q_lora_rank": 64, "mla_use_output_gate": True,
    "routed_expert_hidden_size": 32, "latent_moe_use_norm": True,
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 32,
        "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0,
    },
}  # fmt: skip
_MAMBA2 = {
    "model_type": "mamba2", "num_heads": 8, "head_dim": 16, "state_size": 32, "conv_kernel": 4, "n_groups": 1,
    "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-2, "time_step_limit": [0.0, 1e9],
    "time_step_rank": 4,
}  # fmt: skip
_MAMBA = {
    "model_type": "mamba", "intermediate_size": 128, "state_size": 16, "conv_kernel": 4, "use_bias": False,
    "use_conv_bias": True, "time_step_rank": 4, "layer_norm_epsilon": 1e-2, "tie_word_embeddings": True,
}  # fmt: skip
_RWKV7 = {
    "model_type": "rwkv7", "norm_eps": 1e-2, "num_hidden_layers": 3, "a_low_rank_dim": 16, "v_low_rank_dim": 32,
    "gate_low_rank_dim": 48, "decay_low_rank_dim": 16,
}  # fmt: skip
_APERTUS = {
    "model_type": "apertus", "head_dim": 16, "mlp_bias": False, "attention_bias": False, "post_norm": False,
    "qk_norm": True, "hidden_act": "xielu",
}  # fmt: skip
_LLAMA4 = {  # its class has a nested text part, and norms of queries and keys with this epsilon
    "model_type": "llama4_text", "num_hidden_layers": 4, "rms_norm_eps": 1e-6, "attention_bias": False,
    "attention_chunk_size": WINDOW, "interleave_moe_layer_step": 2, "intermediate_size": 48,
    "intermediate_size_mlp": 96, "num_experts_per_tok": 1, "num_local_experts": 6, "use_qk_norm": True,
    "rope_scaling": None, "floor_scale": 8, "attn_scale": 0.3,
}  # fmt: skip
_DEEPSEEK_V2 = {
    **_GLM_LITE, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "scoring_func": "softmax",
    "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2,
    "rope_scaling": {
        **_YARN, "type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
_DEEPSEEK_V3 = {
    **_GLM_LITE, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2,
    "rope_scaling": {
        **_YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
_INDEXED = {"index_topk": 8, "index_n_heads": 32, "index_head_dim": 32}  # fewer heads: several scores are 0
_GLM5 = {
    **_GLM_LITE, **_INDEXED, "model_type": "glm_moe_dsa",
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip
_EXAONE_MOE = {
    "model_type": "exaone_moe", "sliding_window": WINDOW, "moe_intermediate_size": 48, "num_experts": 8,
    "num_experts_per_tok": 3, "num_shared_experts": 1, "is_moe_layer": [False, True],
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_LING = {
    "model_type": "bailing_moe", "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 8, "num_shared_experts": 2,
    "norm_topk_prob": True, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
}  # fmt: skip
_AFMOE = {
    "model_type": "afmoe", "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3, "sliding_window": WINDOW, "moe_intermediate_size": 48, "num_experts": 8,
    "num_experts_per_tok": 3, "num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 1.7,
}  # fmt: skip
_ERNIE_MOE = {
    "model_type": "ernie4_5_moe", "use_bias": False, "moe_num_experts": 8, "moe_layer_start_index": 1,
    "moe_intermediate_size": 48, "moe_k": 3, "moe_num_shared_experts": 2, "moe_use_aux_free": False,
}  # fmt: skip
_STABLELM = {
    "model_type": "stablelm", "head_dim": 16, "layer_norm_eps": 1e-2, "partial_rotary_factor": 0.5,
    "use_qkv_bias": False,
}  # fmt: skip
_HUNYUAN = {
    "model_type": "hunyuan", "head_dim": 16, "attention_bias": False, "moe_topk": 3, "num_experts": 6,
    "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True, "use_cla": False, "cla_share_factor": 2,
    "moe_intermediate_size": 48, "rope_scaling": {"type": "dynamic", "alpha": 40.0, "factor": 1.0},
    "tie_word_embeddings": True,
}  # fmt: skip
_LAGUNA = {
    "model_type": "laguna", "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads_per_layer": [6, 4], "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32, "moe_routed_scaling_factor": 2.5,
    "rope_parameters": {
        "full_attention": {**_YARN, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
_STEP = {
    "model_type": "step3p5", "num_attention_groups": 2, "num_hidden_layers": 4, "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],  # the last one's drafts tokens
    "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4},
    "rope_theta": [5e5, 1e4, 5e5, 1e4], "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
    "yarn_only_types": ["full_attention"], "rope_scaling": _LLAMA3, "moe_num_experts": 8, "moe_top_k": 3,
    "moe_intermediate_size": 48, "share_expert_dim": 32, "moe_layers_enum": "1,2,3",
    "swiglu_limits": [0.0, 0.0, 0.2, 0.0], "swiglu_limits_shared": [0.3, 0.0, 0.0, 0.1],
}  # fmt: skip
_NEOX = {  # its class has the approximated GELU
    "model_type": "gpt_neox", "head_dim": 16, "num_key_value_heads": 4, "layer_norm_eps": 1e-2, "rotary_pct": 0.5,
    "rotary_emb_base": 10000, "hidden_act": "gelu_fast", "intermediate_size": 256,
}  # fmt: skip
_LING3 = {
    "model_type": "bailing_moe_v3", "num_hidden_layers": 5, "layer_group_size": 2, "num_key_value_heads": 4,
    "kv_lora_rank": 32, "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3,
    "n_group": 4, "topk_group": 2, "rope_scaling": None,
}  # fmt: skip
_PHIMOE = {
    "model_type": "phimoe", "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rope_scaling": None,
}  # fmt: skip
_MUSE = {
    "model_type": "muse_glimmer", "num_hidden_layers": 4, "sliding_window": WINDOW, "post_norm_eps": 1e-3,
    "qk_scale_factor": 1.3,
}  # fmt: skip
_GPT2 = {
    "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "layer_norm_epsilon": 1e-2, "head_dim": 16,
    "num_key_value_heads": None, "intermediate_size": None, "tie_word_embeddings": True,
}  # fmt: skip
_NAS = {
    "model_type": "nemotron-nas", "num_hidden_layers": 4, "head_dim": 16, "num_key_value_heads": None,
    "intermediate_size": None, "attention_bias": False, "mlp_bias": False, "rope_scaling": None,
    "block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 7.0}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        {"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 1.5}},
    ],
}  # fmt: skip
_MINICPM3 = {
    "model_type": "minicpm3", "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "head_dim": None, "dim_model_base": 32, "scale_depth": 1.4,
    "scale_emb": 12.0, "attention_bias": False, "tie_word_embeddings": True, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0 + i for i in range(8)], "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
_OPENELM = {
    "model_type": "openelm", "model_dim": 64, "num_transformer_layers": 3, "max_context_length": 256,
    "num_query_heads": [4, 4, 8], "num_kv_heads": [1, 1, 2], "ffn_multipliers": [0.5, 1.0, 1.5], "ffn_dim_divisor": 32,
    "rms_norm_eps": 1e-2, "head_dim": 32, "num_key_value_heads": None, "intermediate_size": None,
    "tie_word_embeddings": True,
}  # fmt: skip
_GROWING = {**_YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 12}

_KLEAR = {
    "model_type": "Klear", "head_dim": 16, "attention_bias": False, "mlp_only_layers": [], "num_experts": 8,
    "num_experts_per_tok": 3, "decoder_sparse_step": 1, "n_shared_experts": 2, "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}  # fmt: skip

# name -> additions to the base config
MODELS: dict[str, dict[str, Any]] = {
    "seed-oss": {"model_type": "seed_oss", "attention_bias": True},
    "seed-oss-biased": {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True, "rope_scaling": _YARN},
    "granite": _GRANITE,
    "granite-tied": {**_GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "ernie4_5": {"model_type": "ernie4_5", "use_bias": False},
    "ernie4_5-biased": {"model_type": "ernie4_5", "use_bias": True, "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2"},
    "olmo2-biased": {"model_type": "olmo2", "attention_bias": True, "mlp_bias": True, "rope_scaling": _YARN},
    "olmo3": {
        "model_type": "olmo3", "sliding_window": WINDOW, "rope_scaling": _YARN,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo3-period": {"model_type": "olmo3", "sliding_window": WINDOW, "num_hidden_layers": 4},
    "exaone4": _EXAONE,
    "exaone4-full": {**_EXAONE, "sliding_window": None, "sliding_window_pattern": None, "rope_scaling": _YARN},
    "cohere2": _COHERE,
    "cohere2-biased": {**_COHERE, "attention_bias": True},
    "glm4": {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
    "ministral3": {"model_type": "ministral3", "rope_parameters": {**_GROWING, "type": "yarn"}},
    "hunyuan": {"model_type": "hunyuan_v1_dense"},
    "hunyuan-alpha": {
        "model_type": "hunyuan_v1_dense", "use_qk_norm": False, "attention_bias": True,
        "rope_scaling": {"type": "dynamic", "alpha": 40.0, "factor": 1.0},
    },
    "glm4-moe": _GLM_MOE,
    "glm4-moe-groups": {**_GLM_MOE, "n_group": 4, "topk_group": 2, "use_qk_norm": False},
    "mixtral": {"model_type": "mixtral", "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    "granite-moe": {**_GRANITE, "model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 2},
    "solar-open": {
        **_GLM_MOE, "model_type": "solar_open", "first_k_dense_replace": 0, "partial_rotary_factor": 1.0,
        "attention_bias": False, "use_qk_norm": False,
    },
    "qwen2-moe": {**_SHARED_GATE, "model_type": "qwen2_moe", "head_dim": 16},
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3},
    "olmoe-biased": {
        "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2, "attention_bias": True,
        "norm_topk_prob": True, "rope_scaling": _YARN,
    },
    "mimo": {"model_type": "mimo", "head_dim": 16},
    "mimo-v2": _MIMO_V2,
    "mimo-v2-shared": {
        **_MIMO_V2, "n_shared_experts": 1, "attention_value_scale": 0.7, "add_swa_attention_sink_bias": False,
        "add_full_attention_sink_bias": True, "swa_num_attention_heads": 8, "norm_topk_prob": False, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 1.3,
    },
    "minimax": _MINIMAX,
    "minimax-m3": {"model_type": "minimax_m3_vl", "text_config": _MINIMAX_M3},
    "minimax-m3-flat": {  # as transformers saves it; a block is no part of one of K/V
        "model_type": "minimax_m3_vl", "text_config": {
            **_MINIMAX_M3, "model_type": "minimax_m3_vl_text", "sparse_attention_config": None, "moe_layer_freq": None,
            "mlp_layer_types": ["dense", "sparse", "dense"], "use_qk_norm": False, "use_gemma_norm": False,
            "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"], "index_n_heads": 2,
            "index_head_dim": 32, "index_block_size": 3, "index_topk_blocks": 4, "index_local_blocks": 2,
        },
    },
    "dots1": _DOTS,
    "dots1-groups": {**_DOTS, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
    "glm4-lite": _GLM_LITE,
    "glm4-lite-at-once": {**_GLM_LITE, "q_lora_rank": None, "first_k_dense_replace": 0},
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v32": {**_DEEPSEEK_V3, **_INDEXED, "model_type": "deepseek_v32"},
    "deepseek-v32-turned": {
        **_DEEPSEEK_V3, **_INDEXED, "model_type": "deepseek_v32", "indexer_rope_interleave": True, "index_topk": 13,
        "attention_bias": True, "first_k_dense_replace": 0,
    },
    "glm5": _GLM5,
    "glm5-halves": {**_GLM5, "indexer_rope_interleave": False, "n_group": 4, "topk_group": 2},
    "deepseek-v2": _DEEPSEEK_V2,
    "deepseek-v2-lite": {
        **_DEEPSEEK_V2, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 0, "rope_scaling": {**_YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "apertus": _APERTUS,
    "apertus-biased": {**_APERTUS, "mlp_bias": True, "tie_word_embeddings": True, "rope_scaling": _LLAMA3},
    "llama4": {"model_type": "llama4", "text_config": _LLAMA4},
    "llama4-maverick": {
        "model_type": "llama4",
        "text_config": {
            **_LLAMA4, "use_qk_norm": False, "attention_bias": True, "interleave_moe_layer_step": 1,
            "rope_scaling": _LLAMA3,
        },
    },
    "llama4-dense": {  # as MobileLLM-R1
        **_LLAMA4, "no_rope_layers": [1, 1, 1, 1], "interleave_moe_layer_step": 0,
        "attn_temperature_tuning": False, "attention_chunk_size": 8192,
    },
    "qwen3.5": _QWEN35,
    "qwen3.5-tied": {**_QWEN35, "tie_word_embeddings": True, "linear_num_key_heads": 4},
    "lfm2": _LFM2,
    "lfm2-biased": {**_LFM2, "conv_bias": True, "block_auto_adjust_ff_dim": True},
    "granite-hybrid": _GRANITE_HYBRID,
    "granite-hybrid-rope": {**_GRANITE_HYBRID, "position_embedding_type": "rope", "tie_word_embeddings": False},
    "qwen3.5-moe": {**_QWEN35, **_SHARED_GATE, "model_type": "qwen3_5_moe"},
    "qwen3-next": {
        **_QWEN35, **_SHARED_GATE, "model_type": "qwen3_next", "mlp_only_layers": [1], "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
    },
    "lfm2-moe": _LFM2_MOE,
    "lfm2-moe-plain": {**_LFM2_MOE, "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
    "granite-hybrid-moe": {
        **_GRANITE_HYBRID, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
    },
    "falcon-h1": _FALCON,
    "falcon-h1-normed": {
        **_FALCON, "mamba_rms_norm": True, "mamba_n_groups": 1, "tie_word_embeddings": False, "mamba_proj_bias": True,
        "attention_bias": True, "projectors_bias": True,
    },
    "nemotron-h": _NEMOTRON,
    "nemotron-h-biased": {
        **_NEMOTRON, "attention_bias": True, "mamba_proj_bias": True, "mlp_bias": True, "n_groups": 8,
        "time_step_limit": [0.01, 0.5],
    },
    "nemotron-h-moe": _NEMOTRON_MOE,
    "nemotron-h-groups": {**_NEMOTRON_MOE, "n_group": 3, "topk_group": 2, "n_shared_experts": None},
    "spark2.5": _SPARK,
    "spark2.5-biased": {
        **_SPARK, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma4": _GEMMA4,
    "gemma4-narrow": {
        **_GEMMA4, "use_double_wide_mlp": False, "final_logit_softcapping": None, "num_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4-mixture": _GEMMA4_MIXTURE,
    "gemma3n": {"model_type": "gemma3n", "text_config": _GEMMA3N},
    "gemma3n-unbound": {
        "model_type": "gemma3n",
        "text_config": {
            **_GEMMA3N, "altup_num_inputs": 2, "altup_coef_clip": None, "num_kv_shared_layers": 0,
            "intermediate_size": [96, 96, 64, 128, 96],
        },
    },
    "olmo-hybrid": _OLMO_HYBRID,
    "olmo-hybrid-free": {  # without positions, beta of at most one
        **_OLMO_HYBRID, "rope_parameters": {"rope_theta": None}, "linear_allow_neg_eigval": False,
        "linear_num_key_heads": 4, "attention_bias": True, "tie_word_embeddings": True,
    },
    "mamba2": _MAMBA2,
    "mamba2-biased": {
        **_MAMBA2, "use_bias": True, "n_groups": 2, "tie_word_embeddings": True, "time_step_limit": [0.01, 0.5],
    },
    "mamba": _MAMBA,
    "mamba-normed": {  # as Falcon Mamba
        **_MAMBA, "model_type": "falcon_mamba", "use_bias": True, "state_size": 8, "mixer_rms_eps": 1e-3,
        "intermediate_size": 100,
        "tie_word_embeddings": False, "use_conv_bias": False,
    },
    "plamo3": {
        "model_type": "plamo3", "window_size": WINDOW, "sliding_window_pattern": 2, "rope_local_theta": 5e3,
        "tie_word_embeddings": True,
    },
    "rwkv7": _RWKV7,
    "rwkv7-tied": {**_RWKV7, "tie_word_embeddings": True, "head_dim": 16, "num_hidden_layers": 2},
    "kimi-linear": _KIMI,
    "kimi-k3": {"model_type": "kimi_k3", "text_config": _KIMI_K3},
    "kimi-k3-single": {  # with one residual stream, and no bound of up
        "model_type": "kimi_k3",
        "text_config": {
            **_KIMI_K3, "attn_res_block_size": None, "activation_situ_linear_beta": None, "q_lora_rank": None,
            "mla_use_output_gate": False, "routed_expert_hidden_size": None,
            "linear_attn_config": {**_KIMI["linear_attn_config"], "full_attn_layers": [2, 4]},
        },
    },
    "kimi-linear-groups": {
        **_KIMI, "num_expert_group": 4, "topk_group": 2, "num_shared_experts": 0, "moe_renormalize": False,
        "first_k_dense_replace": 0,
    },
    "mellum": {
        **_SHARED_GATE, "model_type": "mellum", "sliding_window": WINDOW, "norm_topk_prob": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {**_YARN, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "exaone-moe": _EXAONE_MOE,
    "exaone-moe-groups": {
        **_EXAONE_MOE, "n_group": 4, "topk_group": 2, "num_shared_experts": 0, "is_moe_layer": [True, True],
        "tie_word_embeddings": True,
    },
    "deepseek": {
        "model_type": "deepseek", "head_dim": 16, "moe_intermediate_size": 48, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1, "attention_bias": False,
    },
    "kimi-k2.5": {"model_type": "kimi_k25", "text_config": _DEEPSEEK_V3},
    "mistral4": {
        **_GLM_LITE, "model_type": "mistral4",
        "rope_parameters": {**_GROWING, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "mistral4-groups": {
        **_GLM_LITE, "model_type": "mistral4", "n_group": 4, "topk_group": 2, "tie_word_embeddings": True,
        "rope_parameters": {**_GROWING, "type": "yarn"}, "q_lora_rank": None,
    },
    "ling": _LING,
    "ling-2": {
        **_LING, "use_qk_norm": True, "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "use_qkv_bias": True,
        "moe_shared_expert_intermediate_size": 32, "tie_word_embeddings": True,
    },
    "cohere": {
        "model_type": "cohere", "head_dim": 16, "layer_norm_eps": 1e-2, "logit_scale": 0.7, "tie_word_embeddings": True,
    },
    "minicpm": {
        "model_type": "minicpm", "head_dim": 16, "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12.0,
        "rope_scaling": None,
    },
    "minicpm3": _MINICPM3,
    "minicpm3-long": {  # the prompt is longer than the original context
        **_MINICPM3, "attention_bias": True, "tie_word_embeddings": False,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.1] * 8, "long_factor": [float(2 + i) for i in range(8)],
            "original_max_position_embeddings": 32,
        },
    },
    "glm": {"model_type": "glm", "attention_bias": True, "partial_rotary_factor": 1.0},
    "glm4-whole": {"model_type": "glm4", "attention_bias": False, "partial_rotary_factor": 1.0},
    "cohere-norm-biased": {
        "model_type": "cohere", "head_dim": 16, "layer_norm_eps": 1e-2, "logit_scale": 0.7, "tie_word_embeddings": True,
        "layer_norm_bias": True,
    },
    "ernie4_5-moe": _ERNIE_MOE,
    "ernie4_5-moe-biased": {
        **_ERNIE_MOE, "use_bias": True, "moe_gate_act": "sigmoid", "moe_num_shared_experts": 0,
        "tie_word_embeddings": True, "moe_layer_start_index": 0, "moe_k": 2,
    },
    "exaone": {"model_type": "exaone", "num_layers": 2, "head_dim": 16, "layer_norm_epsilon": 1e-2},
    "exaone-biased": {
        "model_type": "exaone", "num_layers": 2, "head_dim": 16, "layer_norm_epsilon": 1e-2, "attention_bias": True,
        "mlp_bias": True, "tie_word_embeddings": True, "rope_scaling": _LLAMA3,
    },
    "afmoe": _AFMOE,
    "afmoe-groups": {
        **_AFMOE, "n_group": 4, "topk_group": 2, "route_norm": False, "mup_enabled": False, "num_dense_layers": 0,
        "num_shared_experts": 0, "tie_word_embeddings": True,
    },
    "phi": {"model_type": "phi", "head_dim": 16, "layer_norm_eps": 1e-2, "partial_rotary_factor": 0.5},
    "starcoder2": {  # its class has the exact GELU
        "model_type": "starcoder2", "head_dim": 16, "norm_epsilon": 1e-2, "hidden_act": "gelu",
    },
    "stablelm": _STABLELM,
    "stablelm-parallel": {**_STABLELM, "use_parallel_residual": True, "use_qkv_bias": True},
    "nemotron": {
        "model_type": "nemotron", "head_dim": 16, "norm_eps": 1e-2, "hidden_act": "relu2", "partial_rotary_factor": 0.5,
    },
    "qwen3-vl-moe": {
        "model_type": "qwen3_vl_moe",
        "text_config": {**_SHARED_GATE, "model_type": "qwen3_vl_moe_text", "norm_topk_prob": True},
    },
    "hunyuan-moe": _HUNYUAN,
    "hunyuan-moe-lists": {
        **_HUNYUAN, "moe_topk": [1, 3], "num_shared_expert": [1, 2], "moe_intermediate_size": [48, 32],
        "attention_bias": True, "use_qk_norm": False,
    },
    "youtu": {
        "model_type": "youtu_llm", "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 64,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": None,
        "tie_word_embeddings": True,
    },
    "klear": _KLEAR,
    "klear-dense": {
        **_KLEAR, "attention_bias": True, "mlp_only_layers": [0], "n_shared_experts": 1, "norm_topk_prob": False,
    },
    "iquest-loop": {
        "model_type": "iquestloopcoder", "head_dim": 16, "rope_theta": 5e5, "loop_num": 2, "loop_window_size": WINDOW,
    },
    "iquest-loop-biased": {
        "model_type": "iquestloopcoder", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
        "rope_scaling": _YARN, "loop_window_size": 5, "head_dim": 16,
    },
    "laguna": _LAGUNA,
    "laguna-ungated": {
        **_LAGUNA, "gating": False, "num_attention_heads_per_layer": None, "qkv_bias": True, "attention_bias": True,
        "mlp_layer_types": ["sparse", "sparse"], "tie_word_embeddings": True,
    },
    "step3.5": _STEP,
    "step3.5-ungated": {
        **_STEP, "use_head_wise_attn_gate": False, "attention_other_setting": None, "layer_types": None,
        "norm_expert_weight": False, "moe_layers_enum": None, "rope_theta": 1e4, "partial_rotary_factors": None,
        "yarn_only_types": None,
    },
    "stablelm-normed": {**_STABLELM, "qk_layernorm": True},
    "cohere-normed": {
        "model_type": "cohere", "head_dim": 16, "layer_norm_eps": 1e-2, "logit_scale": 0.7, "tie_word_embeddings": True,
        "use_qk_norm": True,
    },
    "internlm2": {"model_type": "internlm2", "head_dim": 16, "bias": False},
    "internlm2-biased": {
        "model_type": "internlm2", "head_dim": 16, "bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "internlm3": {
        "model_type": "internlm3", "head_dim": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    },
    "internlm3-biased": {
        "model_type": "internlm3", "head_dim": 16, "bias": True, "qkv_bias": True, "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "gpt-neox": _NEOX,
    "gpt-neox-sequential": {**_NEOX, "use_parallel_residual": False, "rotary_pct": 1.0},
    "nemotron-nas": _NAS,
    "nemotron-nas-ends": {
        **_NAS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_scaling": _LLAMA3,
        "block_configs": [
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
            *[{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}}] * 2,
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 3.0}},
        ],
    },
    "nanbeige": {"model_type": "nanbeige", "num_loops": 2},
    "nanbeige-unnormed": {
        "model_type": "nanbeige", "loop_loss_weights": [0.1, 0.2], "skip_loop_final_norm": True,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_scaling": _YARN,
    },
    "nanochat": {
        "model_type": "nanochat", "rms_norm_eps": 1e-5, "head_dim": 16, "intermediate_size": 256,
    },
    "muse-glimmer": _MUSE,
    "muse-glimmer-listed": {
        **_MUSE, "rms_norm_eps": 1e-3, "tie_word_embeddings": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 8, "layer_rope_theta": [1, 0, 1, 0, 1, 1, 0, 1],
    },
    "gpt2": {"model_type": "gpt2", **_GPT2, "n_ctx": 256},
    "starcoder": {"model_type": "gpt_bigcode", **_GPT2, "n_inner": 96, "activation_function": "gelu"},
    "starcoder-heads": {
        "model_type": "gpt_bigcode", **_GPT2, "n_inner": 256, "multi_query": False, "tie_word_embeddings": False,
        "activation_function": "gelu",
    },
    "qwen-1": {
        "model_type": "qwen", "kv_channels": 16, "head_dim": 16, "num_key_value_heads": 4, "layer_norm_epsilon": 1e-2,
        "intermediate_size": 192,
    },
    "lille": {
        "model_type": "lille-130m", "block_size": 256, "layer_norm_eps": 1e-2, "n_embd": 96, "n_head": 6,
        "n_kv_heads": 2, "n_layer": 2, "head_dim": None, "tie_word_embeddings": True,
    },
    "kimi-k2": {**_DEEPSEEK_V3, "model_type": "kimi_k2"},
    "kimi-vl": {"model_type": "kimi_vl", "text_config": {**_DEEPSEEK_V3, "rope_scaling": None}},
    "gptj": {
        "model_type": "gptj", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "rotary_dim": 8,
        "layer_norm_epsilon": 1e-2, "intermediate_size": 256, "head_dim": 16, "num_key_value_heads": 4,
    },
    "ling-3": _LING3,
    "ling-3-dense": {
        **_LING3, "q_lora_rank": None, "first_k_dense_replace": 5, "kda_lower_bound": -0.3, "tie_word_embeddings": True,
        "rope_scaling": {**_YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "phimoe": _PHIMOE,
    "phimoe-scaled": {
        **_PHIMOE, "num_experts_per_tok": 3, "router_jitter_noise": 0.2, "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.5] * 8, "long_factor": [1.5] * 8, "short_mscale": 1.3,
            "long_mscale": 1.3,
        },
    },
    "helium": {"model_type": "helium", "head_dim": 16, "attention_bias": False, "mlp_bias": False},
    "telechat3": {"model_type": "telechat3", "attention_bias": True, "mlp_bias": True},
    "gemma": {"model_type": "gemma", "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "dbrx": {
        "model_type": "dbrx", "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "head_dim": None,
        "num_key_value_heads": None, "intermediate_size": None,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3},
    },
    "openelm": _OPENELM,
    "openelm-plain": {
        **_OPENELM, "normalize_qk_projections": False, "share_input_output_layers": False, "rope_freq_constant": 5e3,
        "num_query_heads": [4, 4, 4], "num_kv_heads": [2, 1, 4], "ffn_multipliers": [1.5, 0.4, 1.5],
    },
    "nemotron-biased": {
        "model_type": "nemotron", "norm_eps": 1e-2, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True,
        "partial_rotary_factor": 1.0, "tie_word_embeddings": True,
        "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0},
    },
}  # fmt: skip


# model_type
RECURRENT = (
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "granitemoehybrid", "falcon_h1", "nemotron_h",
    "olmo_hybrid", "kimi_linear", "bailing_moe_v3", "mamba2", "mamba", "falcon_mamba",
    "rwkv7",
)  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    """Return a config.json, with the base in the text part if there is one."""
    own = MODELS[name]
    return {**own, "text_config": {**_BASE, **own["text_config"]}} if "text_config" in own else {**_BASE, **own}


def write_mlx_lm_model(directory: Path, config: dict[str, Any], seed: int = 0, *, dtype: mx.Dtype = mx.float32) -> Path:
    """Write random weights of the shapes that mlx-lm's class has for `config`; return the directory."""
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    key = mx.random.key(seed)
    tensors = {}
    for name, array in tree_flatten(model.parameters()):
        key, sub = mx.random.split(key)
        noise = mx.random.normal(array.shape, key=sub)
        if name.endswith("correction_bias"):  # experts of groups that are left out have rank 0, the lowest there is
            noise = mx.abs(noise)
        if name.endswith("q_norm.weight") and config["model_type"].startswith(("gemma3n", "gemma4")):
            noise = noise - 8.5  # its scores are not scaled by anything else
        is_norm = "norm" in name.replace("norm_attn_norm.", "")  # which has DBRX's projections, too
        value = 1 + 0.1 * noise if is_norm else noise * (array.shape[-1] ** -0.5 if array.ndim else 1)
        tensors[name] = value.astype(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), tensors)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
