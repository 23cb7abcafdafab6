"""Sizes of tensors by the keys of configs that state them: the names in `Part.shape`, such as "heads*head hidden".

`Architecture.sizes` adds those of a family.
"""

from collections.abc import Mapping
from typing import Any

# Sizes of tensors, and the keys of configs that state them; the first one counts.
_SIZES = {
    "hidden": ("hidden_size",),
    "vocab": ("vocab_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head": ("head_dim",),
    "inner": ("intermediate_size_mlp", "intermediate_size"),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "width": ("moe_intermediate_size", "intermediate_size"),
    "shared": ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"),
    "kernel": ("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "value": ("v_head_dim",),
    "index": ("index_head_dim",),
    "index_heads": ("index_n_heads",),
}
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def stated(config: Mapping[str, Any], *keys: str) -> int:
    """Return the value of the first key that a config states, 0 for none."""
    return next((int(config[key]) for key in keys if config.get(key)), 0)


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that parts are made of; 0 for those that a config does not state."""
    sizes = {name: stated(config, *keys) for name, keys in _SIZES.items()}
    if not sizes["shared"]:
        width = config.get("moe_shared_expert_intermediate_size", sizes["width"])
        sizes["shared"] = width * stated(config, *_SHARED_EXPERTS)
    return sizes | {
        "both": sizes["nope"] + sizes["value"],
        "qkv": (sizes["heads"] + 2 * sizes["kv_heads"]) * sizes["head"],
        "query": sizes["rope"] + sizes["nope"],
        "latent": sizes["kv_lora"] + sizes["rope"],
    }
