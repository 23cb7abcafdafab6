"""GLM 4 and 5, Solar Open: dense layers with four norms, mixtures, attention over latents.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from headrace.models.architectures.architecture import BIASES, QKV, Architecture
from headrace.models.architectures.config import Family, NormNames
from headrace.models.architectures.deepseek import DEEPSEEK_HEAD
from headrace.models.architectures.experts import deepseek_experts
from headrace.models.architectures.latent import even_entries, latent_config, latent_with_eps, with_indexers

# "post_attention_layernorm" stands before the feed-forward here, as its name means in most families
_AROUND = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")

_BIASES = {**BIASES, "attention_bias": QKV}
# Defaults of transformers' classes, which multimodal configs omit from the section of their text part
_GLM4V = {"attention_bias": True, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
_GLM4V_MOE = {
    "attention_bias": True, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_routed_experts": 128, "routed_scaling_factor": 1.0, "moe_intermediate_size": 1408, "use_qk_norm": False,
}  # fmt: skip

ROWS = (
    Architecture("glm", Family(interleaved=True), rotated=0.5, biases=_BIASES),
    Architecture("glm4", Family(_AROUND, interleaved=True), rotated=0.5, biases=_BIASES),
    Architecture(
        "glm4_moe",
        Family(qk_norm="head"),
        states_head_dim=True,
        head=DEEPSEEK_HEAD,
        rotated=0.5,
        experts=deepseek_experts,
        biases=_BIASES,
        plain=(".mlp.gate",),
    ),
    Architecture(
        "glm4_moe_lite",
        Family(interleaved=True),
        dense_first=True,
        head=DEEPSEEK_HEAD,
        rotated=1.0,
        experts=deepseek_experts,
        latent=latent_with_eps,
        plain=(".mlp.gate",),
    ),
    Architecture(
        "solar_open",
        Family(qk_norm="head"),
        constants={"first_k_dense_replace": 0, "partial_rotary_factor": 1.0, "intermediate_size": 0},
        inner_size=lambda fields: fields.count("intermediate_size") if fields.values.get("intermediate_size") else 1,
        experts=deepseek_experts,
        biases=_BIASES,
        plain=(".mlp.gate",),
    ),
    Architecture("glm4v_text", layers_of="glm4", nested_defaults=_GLM4V),
    Architecture("glm4v_moe_text", layers_of="glm4_moe", nested_defaults=_GLM4V_MOE),
    Architecture(
        "glm_moe_dsa",
        Family(interleaved=True),
        defaults={"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "indexer_rope_interleave": True},
        constants={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
        dense_first=True,
        rotated=1.0,
        experts=deepseek_experts,
        latent=latent_config,
        runs=even_entries,
        complete=with_indexers,
        plain=(".mlp.gate",),
    ),
)
