"""Kimi Linear: delta networks with a decay for each channel, and attention over latents without positions.

A layer without K/V heads is a delta network. The files store -exp(A_log).
"""

from headrace.models.gguf.layered.common import (
    NORMS,
    attention_sizes,
    base_config,
    experts,
    feed_forward,
    layers_of,
    mixture,
    mlp,
    shared_expert,
)
from headrace.models.gguf.layered.parts import Config, Contents, LayeredArchitecture, Part, tables
from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_SIGMOID = 2


def _config(metadata: Metadata, file: Contents) -> Config:
    config, count = base_config(metadata, file, "kimi_linear"), layers_of(metadata)
    query = metadata.integer("{arch}.attention.key_length_mla", minimum=1, maximum=1 << 16)
    rotated = metadata.integer("{arch}.rope.dimension_count", minimum=2, maximum=1 << 16)
    gating = metadata.integer("{arch}.expert_gating_func", _SIGMOID)
    if gating != _SIGMOID or metadata.integer("{arch}.attention.q_lora_rank", 0) or config["tie_word_embeddings"]:
        raise UnsupportedModelError("this variant of GGUF architecture 'kimi-linear' is not supported")
    if rotated >= query:
        raise CheckpointError(f"the GGUF's heads of {query} have no part beside the {rotated} shared numbers")
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", count)
    listed = {name: [i + 1 for i in range(count) if bool(kv_heads[i]) == full] for name, full in _LAYERS.items()}
    return config | mixture(metadata, "num_experts", "num_experts_per_token", "moe_intermediate_size") | {
        "num_key_value_heads": config["num_attention_heads"], "model_max_length": config["max_position_embeddings"],
        "kv_lora_rank": metadata.integer("{arch}.attention.kv_lora_rank", minimum=1, maximum=1 << 20),
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": query - rotated, "mla_use_nope": True,
        "v_head_dim": metadata.integer("{arch}.attention.value_length_mla", minimum=1, maximum=1 << 16),
        "intermediate_size": feed_forward(metadata), "moe_renormalize": True, "moe_layer_freq": 1,
        "num_shared_experts": metadata.integer("{arch}.expert_shared_count", 0, maximum=1 << 10),
        "first_k_dense_replace": metadata.integer("{arch}.leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("{arch}.expert_weights_scale", 0.0) or 1.0,
        "linear_attn_config": {
            **listed, "num_heads": config["num_attention_heads"],
            "head_dim": metadata.integer("{arch}.kda.head_dim", minimum=1, maximum=1 << 16),
            "short_conv_kernel_size": metadata.integer("{arch}.ssm.conv_kernel", minimum=1, maximum=64),
        },
    }  # fmt: skip


_LAYERS = {"kda_layers": False, "full_attn_layers": True}


def _kinds(config: Config) -> list[tuple[str, ...]]:
    delta, dense = config["linear_attn_config"]["kda_layers"], config["first_k_dense_replace"]
    return [
        ("norms", "delta" if i + 1 in delta else "attention", "dense" if i < dense else "sparse")
        for i in range(config["num_hidden_layers"])
    ]


def _sizes(config: Config) -> dict[str, int]:
    linear, rotated, other = config["linear_attn_config"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    width = config["moe_intermediate_size"]
    return attention_sizes(config) | {
        "state": linear["head_dim"], "kernel": linear["short_conv_kernel_size"], "query": rotated + other,
        "nope": other, "value": config["v_head_dim"], "kv_lora": config["kv_lora_rank"],
        "latent": config["kv_lora_rank"] + rotated, "inner": config["intermediate_size"],
        "experts": config["num_experts"], "width": width, "shared": width * config["num_shared_experts"],
    }  # fmt: skip


_SELF = "self_attn"


def _taps(name: str) -> Part:
    stored = "heads*state kernel 1"
    return Part(f"{_SELF}.{name}_conv.conv", "1 heads*state 1 kernel", stored=stored, plain=True)


KIMI_LINEAR = LayeredArchitecture(
    "KimiLinearForCausalLM", _config, _kinds, _sizes,
    {
        "norms": NORMS,
        "delta": {
            **{f"attn_{name}": Part(f"{_SELF}.{name}_proj", "heads*state hidden") for name in "qkv"},
            **{f"ssm_conv1d_{name}": _taps(name) for name in "qkv"},
            **{f"ssm_{name}_a": Part(f"{_SELF}.{name}_a_proj", "state hidden") for name in "fg"},
            **{f"ssm_{name}_b": Part(f"{_SELF}.{name}_b_proj", "heads*state state") for name in "fg"},
            "ssm_beta": Part(f"{_SELF}.b_proj", "heads hidden"),
            "ssm_a.": Part(_SELF, "1 1 heads 1", "A_log", values="log", stored="1 1 heads 1", plain=True),
            "ssm_dt.bias": Part(_SELF, "heads*state", "dt_bias"),
            "ssm_norm": Part(f"{_SELF}.o_norm", "state"),
            "attn_output": Part(f"{_SELF}.o_proj", "hidden heads*state"),
        },
        "attention": {
            "attn_q": Part(f"{_SELF}.q_proj", "heads*query hidden"),
            "attn_kv_a_mqa": Part(f"{_SELF}.kv_a_proj_with_mqa", "latent hidden"),
            "attn_kv_a_norm": Part(f"{_SELF}.kv_a_layernorm", "kv_lora"),
            "attn_k_b": Part(f"{_SELF}.embed_q", "heads kv_lora nope"),
            "attn_v_b": Part(f"{_SELF}.unembed_out", "heads value kv_lora"),
            "attn_output": Part(f"{_SELF}.o_proj", "hidden heads*value"),
        },
        "dense": mlp(),
        "sparse": {
            **experts("mlp.gate", "mlp.switch_mlp"), **shared_expert("mlp.shared_experts", optional=True),
            "exp_probs_b.bias": Part("mlp", "experts", "e_score_correction_bias"),
        },
    },
    tables(),
)  # fmt: skip
