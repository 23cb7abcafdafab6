"""Mixtures of experts with dense first layers or corrected scores: GLM-4.5 and later, DeepSeek, MiniMax, ERNIE 4.5.

Layers for multi-token prediction are left out.
"""

from headrace.models.gguf.layered.common import (
    LATENT_HEADS,
    LATENTS,
    NORMS,
    NUMBERED_DRAFTS,
    POST_NORMS,
    alike,
    attention,
    attention_sizes,
    base_config,
    biases,
    experts,
    feed_forward,
    feed_forwards,
    head_norms,
    latent_sizes,
    mixture,
    mlp,
    refuse_scaled_rope,
    routed,
    scaled_rope,
    shared_expert,
)
from headrace.models.gguf.layered.parts import Config, Contents, LayeredArchitecture, Part, tables
from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_SOFTMAX, _SIGMOID = 1, 2


def _routed(metadata: Metadata) -> Config:
    """Return the entries of a mixture with dense first layers."""
    dense = metadata.integer("{arch}.leading_dense_block_count", 0)
    return routed(metadata) | {"first_k_dense_replace": dense, "intermediate_size": feed_forward(metadata)}


def _kinds(config: Config) -> list[tuple[str, ...]]:
    queries = "q_lora" if config.get("q_lora_rank") else "q"
    return [("layer", queries, "k_b", kind) for kind in feed_forwards(config)]


def _mixture_sizes(config: Config) -> dict[str, int]:
    width = config["moe_intermediate_size"]
    return attention_sizes(config) | {
        "inner": config["intermediate_size"], "experts": config["n_routed_experts"], "width": width,
        "shared": width * (config.get("n_shared_experts") or 0),
    }  # fmt: skip


_GATE = {
    **experts("mlp.gate", "mlp.switch_mlp", plain=True),
    **shared_expert("mlp.shared_experts", optional=True),
    "exp_probs_b.bias": Part("mlp.gate", "experts", "e_score_correction_bias", optional=True),
}


def _glm(metadata: Metadata, file: Contents) -> Config:
    refuse_scaled_rope(metadata)
    config = base_config(metadata, file, "glm4_moe")
    rotated = metadata.integer("{arch}.rope.dimension_count", config["head_dim"], minimum=2, maximum=1 << 16)
    if config["tie_word_embeddings"] or metadata.integer("{arch}.expert_gating_func", _SIGMOID) != _SIGMOID:
        raise UnsupportedModelError("a GLM-4.5 with tied embeddings or experts by softmax is not supported")
    return config | _routed(metadata) | {
        "partial_rotary_factor": rotated / config["head_dim"], "rope_scaling": None,
        "attention_bias": "blk.0.attn_q.bias" in file.shapes, "use_qk_norm": "blk.0.attn_q_norm.weight" in file.shapes,
    }  # fmt: skip


GLM4_MOE = LayeredArchitecture(
    "Glm4MoeForCausalLM", _glm, lambda config: [("layer", kind) for kind in feed_forwards(config)], _mixture_sizes,
    {
        "layer": {
            **POST_NORMS, **biases(attention(), "attn_q", "attn_k", "attn_v", optional=True),
            **head_norms(optional=True),
        },
        "dense": mlp(), "sparse": _GATE,
    },
    tables(), drafts=NUMBERED_DRAFTS,
)  # fmt: skip


def _deepseek(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "deepseek_v3")
    corrected = any(name.endswith(".exp_probs_b.bias") for name in file.shapes)
    gating = metadata.integer("{arch}.expert_gating_func", 0) or (_SIGMOID if corrected else _SOFTMAX)
    mla = metadata.has("{arch}.attention.key_length_mla")
    query = metadata.integer("{arch}.attention.key_length_mla" if mla else "{arch}.attention.key_length")
    value = metadata.integer("{arch}.attention.value_length_mla" if mla else "{arch}.attention.value_length")
    rotated = metadata.integer("{arch}.rope.dimension_count", minimum=2)
    if config["tie_word_embeddings"] or not 0 < rotated < query or gating not in (_SOFTMAX, _SIGMOID):
        raise UnsupportedModelError("this variant of GGUF architecture 'deepseek2' is not supported")
    config |= _routed(metadata) | scaled_rope(metadata, config, rotated) | {
        "q_lora_rank": metadata.integer("{arch}.attention.q_lora_rank", 0, maximum=1 << 20) or None,
        "kv_lora_rank": metadata.integer("{arch}.attention.kv_lora_rank", minimum=1, maximum=1 << 20),
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": query - rotated, "v_head_dim": value,
        "num_key_value_heads": config["num_attention_heads"], "attention_bias": False, "moe_layer_freq": 1,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    }  # fmt: skip
    config.pop("head_dim")
    if (scaling := config["rope_scaling"]) is not None:
        scale = 10 * metadata.number("{arch}.rope.scaling.yarn_log_multiplier", 0.0)
        config["rope_scaling"] = {**scaling, "type": scaling["rope_type"], "mscale": scale, "mscale_all_dim": scale}
    if gating == _SIGMOID:  # the class of GLM-4.7-Flash is that of DeepSeek V3 with a stated epsilon
        return config if config["rms_norm_eps"] == 1e-6 else config | {"model_type": "glm4_moe_lite"}
    if config["norm_topk_prob"]:
        raise UnsupportedModelError("a DeepSeek V2 with normalized weights of experts is not supported")
    method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return config | {"model_type": "deepseek_v2", "topk_method": method, "scoring_func": "softmax"}


def _deepseek_sizes(config: Config) -> dict[str, int]:
    sizes = _mixture_sizes(config | {"head_dim": 0}) | latent_sizes(config)
    return sizes | {"q_lora": config["q_lora_rank"] or 0, "both": sizes["nope"] + sizes["value"]}


_SELF = "self_attn"
DEEPSEEK2 = LayeredArchitecture(
    "DeepseekV3ForCausalLM", _deepseek, _kinds, _deepseek_sizes,
    {
        "layer": {**NORMS, **LATENTS},
        "q": {"attn_q": Part(f"{_SELF}.q_proj", "heads*query hidden")},
        "q_lora": {
            "attn_q_a": Part(f"{_SELF}.q_a_proj", "q_lora hidden"),
            "attn_q_a_norm": Part(f"{_SELF}.q_a_layernorm", "q_lora"),
            "attn_q_b": Part(f"{_SELF}.q_b_proj", "heads*query q_lora"),
        },
        "kv_b": {"attn_kv_b": Part(f"{_SELF}.kv_b_proj", "heads*both kv_lora")},
        "k_b": LATENT_HEADS,
        "dense": mlp(), "sparse": _GATE,
    },
    tables(),
    otherwise={"k_b": ("attn_k_b", "kv_b")},
    unused=("attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight"),  # some files have both forms
    drafts=NUMBERED_DRAFTS,
)  # fmt: skip


def _minimax(metadata: Metadata, file: Contents) -> Config:
    refuse_scaled_rope(metadata)
    config = base_config(metadata, file, "minimax")
    rotated = metadata.integer("{arch}.rope.dimension_count", config["head_dim"], minimum=2, maximum=1 << 16)
    if metadata.integer("{arch}.expert_gating_func", _SIGMOID) != _SIGMOID:
        raise UnsupportedModelError("a MiniMax-M2 with experts by softmax is not supported")
    config |= mixture(metadata, "num_local_experts", "num_experts_per_tok", "intermediate_size")
    return config | {
        "rotary_dim": rotated, "shared_intermediate_size": 0, "scoring_func": "sigmoid", "use_qk_norm": True,
    }  # fmt: skip


_SPARSE = "block_sparse_moe"
MINIMAX_M2 = LayeredArchitecture(
    "MiniMaxM2ForCausalLM", _minimax, alike,
    lambda config: attention_sizes(config)
    | {"experts": config["num_local_experts"], "width": config["intermediate_size"]},
    {
        "layer": {
            **NORMS, **attention(),
            "attn_q_norm": Part("self_attn.q_norm", "heads*head"),
            "attn_k_norm": Part("self_attn.k_norm", "kv_heads*head"),
            **experts(f"{_SPARSE}.gate", f"{_SPARSE}.switch_mlp"),
            "exp_probs_b.bias": Part(_SPARSE, "experts", "e_score_correction_bias"),
        },
    },
    tables(),
)  # fmt: skip


def _ernie(metadata: Metadata, file: Contents) -> Config:
    refuse_scaled_rope(metadata)
    config = base_config(metadata, file, "ernie4_5_moe")
    config |= mixture(metadata, "moe_num_experts", "moe_k", "moe_intermediate_size")
    shared = metadata.integer("{arch}.expert_shared_count", 0, maximum=1 << 10)
    stacked = file.shapes.get(f"blk.{config['num_hidden_layers'] - 1}.ffn_gate_shexp.weight")
    if stacked is not None and stacked[0] != shared * config["moe_intermediate_size"]:
        raise CheckpointError(f"the shared experts have width {stacked[0]}, not {shared} times an expert's")
    return config | {
        "intermediate_size": feed_forward(metadata), "use_bias": False, "moe_num_shared_experts": shared,
        "moe_layer_start_index": metadata.integer("{arch}.leading_dense_block_count", 0),
        "moe_layer_interval": metadata.integer("{arch}.interleave_moe_layer_step", 1, minimum=1),
        "moe_use_aux_free": True,
    }  # fmt: skip


def _ernie_kinds(config: Config) -> list[tuple[str, ...]]:
    first, step = config["moe_layer_start_index"], config["moe_layer_interval"]
    return [
        ("layer", "sparse" if layer >= first and (layer + 1) % step == 0 else "dense")
        for layer in range(config["num_hidden_layers"])
    ]


def _ernie_sizes(config: Config) -> dict[str, int]:
    width = config["moe_intermediate_size"]
    return attention_sizes(config) | {
        "inner": config["intermediate_size"], "experts": config["moe_num_experts"], "width": width,
        "shared": width * config["moe_num_shared_experts"],
    }  # fmt: skip


ERNIE_MOE = LayeredArchitecture(
    "Ernie4_5_MoeForCausalLM", _ernie, _ernie_kinds, _ernie_sizes,
    {
        "layer": {**NORMS, **attention()}, "dense": mlp(),
        "sparse": {
            **experts("mlp.gate", "mlp.switch_mlp"), **shared_expert("mlp.shared_experts", optional=True),
            "exp_probs_b.bias": Part(
                "mlp.moe_statics", "experts", "e_score_correction_bias", stored="1 experts", plain=True
            ),
        },
    },
    tables(),
)  # fmt: skip
