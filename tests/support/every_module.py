"""Tiny configs of mlx-lm's model modules, from the names of their classes' arguments."""

from dataclasses import MISSING, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support import mlx_lm_models

LAYERS = 4
VOCAB = 96
EXPERTS = 8
_ALIKE: dict[tuple[str, ...], Any] = {
    ("vocab_size", "num_vocab", "embedding_size", "vocab_size_per_layer_input"): VOCAB,
    ("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim", "block_dim", "lru_width"): 64,
    ("intermediate_size", "ffn_hidden_size", "mlp_hidden_size", "ff_intermediate_size", "block_ff_dim", "n_inner"): 96,
    ("dense_intermediate_size", "intermediate_size_mlp"): 96,
    ("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size", "moe_hidden_size"): 48,
    ("moe_shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"): 48,
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_transformer_layers"): LAYERS,
    ("num_attention_heads", "n_head", "n_heads", "num_heads"): 4,
    ("num_key_value_heads", "num_kv_heads"): 2,
    ("head_dim", "hidden_size_per_head", "v_head_dim", "qk_nope_head_dim", "kv_lora_rank", "global_head_dim"): 32,
    ("qk_rope_head_dim", "rotary_dim", "kv_channels"): 16,
    ("q_lora_rank",): 48,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): EXPERTS,
    ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"): 2,
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"): 1,
    ("moe_layer_freq", "decoder_sparse_step", "n_group", "topk_group", "num_expert_group"): 1,
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon", "norm_epsilon"): 1e-5,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"): 512,
    ("rope_theta", "rotary_emb_base", "rope_local_base_freq", "rope_embedding_base"): 10000.0,
    ("sliding_window", "window_size", "attention_window_size", "sliding_window_size"): 16,
    ("sliding_window_pattern", "full_attention_interval", "layer_group_size"): 2,
    ("index_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "state_size"): 32,
    ("mamba_d_head", "ssm_state_size", "mamba_d_state"): 32,
    ("mamba_num_heads", "mamba_n_heads", "linear_num_value_heads", "linear_conv_kernel_dim"): 4,
    ("linear_num_key_heads",): 2,
    ("partial_rotary_factor", "rotary_pct"): 0.5,
    ("tie_word_embeddings", "attention_bias"): False,
}
_SIZES: dict[str, Any] = {
    **{name: value for names, value in _ALIKE.items() for name in names},
    "index_topk": 8, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
    "mlp_only_layers": [], "hidden_act": "silu", "mlp_hidden_act": "relu2", "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "layer_types": ["sliding_attention", "full_attention"] * 2,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4,
    },
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 12,
    },
}  # fmt: skip
_BY_TYPE: dict[Any, Any] = {bool: False, float: 1.0, int: 2}
_LONG = {"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
_YARN = {"rope_theta": 50000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_WITHOUT_WINDOW = {"sliding_window": None, "layer_types": None}
_LONGCAT = {
    "attention_method": "MLA", "zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "num_layers": 3,
}  # fmt: skip
_OTHERS: dict[str, dict[str, Any]] = {
    "apertus": {"qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2]},
    "cohere2": {"head_dim": 16},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "topk_method": "greedy",
    },
    "exaone": {"head_dim": 16},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LLLG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 512, "max_position_embeddings": 512},
    "gear": {"layer_types": ["sliding_attention", "conv_mixer", "sliding_attention", "full_attention"]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2, "mamba_d_conv": 4, "mamba_n_groups": 2, "mamba_conv_bias": True,
        "mamba_proj_bias": False, "position_embedding_type": "nope",
    },
    "hunyuan": {"cla_share_factor": 2, "rope_scaling": {"type": "dynamic", "alpha": 40.0, "factor": 1.0}},
    "glm_moe_dsa": {"index_n_heads": 32},  # few heads have equal scores of 0
    "helium": {"head_dim": 16},
    "jamba": {"attn_layer_offset": 1, "expert_layer_offset": 1},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "emb_split_num": 2, "emb_neighbor_num": 2},
    "kimi_k25": {"model_type": "deepseek_v3"},
    "kimi_k3": {
        "hidden_act": "situ", "activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.0, "attn_res_block_size": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "mamba2": {"time_step_limit": [0.0, 1e9], "time_step_rank": 4},
    "mellum": {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": _YARN}},
    "minicpm3": {"rope_scaling": _LONG},
    "muse_glimmer": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "plamo": {"num_attention_heads": 8},
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {"hybrid_override_pattern": "M*-M", "layer_types": None},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": size} if size else {"no_op": True}, "ffn": {"ffn_mult": 1.5}}
            for size in (2, 0, 4, 1)
        ],
    },
    "openelm": {
        "num_query_heads": [4, 8, 4, 4], "num_kv_heads": [2, 4, 2, 2], "ffn_multipliers": [1.0, 2.0, 1.0, 1.0],
        "ffn_dim_divisor": 32,
    },
    "mistral3": _WITHOUT_WINDOW,
    "phi3small": {
        "vocab_size": 100352, "dense_attention_every_n_layers": 2, "blocksparse_block_size": 64,
        "blocksparse_num_local_blocks": 4, "blocksparse_vert_stride": 2, "mup_attn_multiplier": 1.0,
        "mup_use_scaling": True, "mup_embedding_multiplier": 10.0, "mup_width_multiplier": 8.0,
        "rope_embedding_base": 10000.0, "rope_position_scale": 1.0, "gegelu_limit": 20.0,
    },
    "pixtral": _WITHOUT_WINDOW,
    "rwkv7": {
        "a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 32, "decay_low_rank_dim": 16,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "smollm3": {"sliding_window": None},
    "spark2_5": {
        "hidden_act": "gelu",
        "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e5}},
    },
}  # fmt: skip
_TEXTS = ("TextArgs", "TextConfig", "TextModelArgs")  # classes of arguments of a model's text part
# Multimodal modules around another one, and modules with a config among those of families.
_TEXT_OF = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "kimi_vl": "deepseek_v3", "lfm2-vl": "lfm2", "mistral3": "llama",
    "pixtral": "llama", "qwen2_vl": "qwen2", "qwen3_vl": "qwen3",
}  # fmt: skip
_OF_FAMILIES = {
    "ernie4_5_moe": "ernie4_5-moe", "gemma3n": "gemma3n", "gemma4_text": "gemma4", "laguna": "laguna",
    "llama4": "llama4", "mimo_v2_flash": "mimo-v2", "minimax_m3_vl": "minimax-m3",
    "qwen3_5": "qwen3.5", "qwen3_5_moe": "qwen3.5-moe", "qwen3_vl_moe": "qwen3-vl-moe", "solar_open": "solar-open",
}  # fmt: skip
LEFT_OUT = {
    "bitnet": "packed weights", "muse_spark": "Metal only", "olmo": "needs the package ai2-olmo",
    "prism_hadamard_qwen35": "packed weights",
}  # fmt: skip
"""Modules that random weights on a CPU do not run, and why."""


def names() -> list[str]:
    """Return the names of the modules with a config here."""
    spec = find_spec("mlx_lm")
    if spec is None or spec.origin is None:
        return []
    files = (Path(spec.origin).parent / "models").glob("*.py")
    return sorted(path.stem for path in files if "class ModelArgs" in path.read_text() and path.stem not in LEFT_OUT)


def config_of(name: str) -> dict[str, Any]:
    if name in _OF_FAMILIES:
        return mlx_lm_models.config_of(_OF_FAMILIES[name])
    if name in _TEXT_OF:
        text_config = config_of(_TEXT_OF[name]) | _OTHERS.get(name, {})
        return {"model_type": name, "vocab_size": VOCAB, "text_config": text_config}
    module = import_module(f"mlx_lm.models.{name}")
    text = next((found for part in _TEXTS if (found := getattr(module, part, None)) is not None), None)
    if text is None:
        return {"model_type": name, **_arguments(module.ModelArgs), **_OTHERS.get(name, {})}
    return {"model_type": name, "vocab_size": VOCAB, "text_config": {**_arguments(text), **_OTHERS.get(name, {})}}


def _arguments(stock: Any) -> dict[str, Any]:
    """Return the arguments of a dataclass that have a value here, and the required ones of simple types."""
    found = {}
    for field in fields(stock):
        required = field.default is MISSING and field.default_factory is MISSING
        if field.name in _SIZES:
            found[field.name] = _SIZES[field.name]
        elif required and (field.type in _BY_TYPE or "Optional" in str(field.type)):
            found[field.name] = _BY_TYPE.get(field.type)
    return found
