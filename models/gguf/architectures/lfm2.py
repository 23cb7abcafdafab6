"""LFM2, dense or with experts: short convolutions between layers of attention.

`GGUFArchitecture` explains the fields of a row, `TensorRule` its shapes. The names on the right are those of mlx-lm's
classes, which `models.architectures.lfm2` reads, too. Guard: tests/models/gguf/test_layered.py.
"""

from headrace.models.gguf.architecture import Config, Contents, Entries, GGUFArchitecture, TensorRule
from headrace.models.gguf.architectures.blocks import attention, experts, head_norms, mlp
from headrace.models.gguf.keys import layers_of
from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import UnsupportedModelError


def _lfm2(metadata: Metadata, _file: Contents, _config: Config) -> Entries:
    """Return the kinds of layers: those without K/V heads are convolutions."""
    if metadata.integer("{arch}.attention.sliding_window", 0):
        raise UnsupportedModelError("an LFM2 with a sliding window is not supported")
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", layers_of(metadata))
    return {"layer_types": ["full_attention" if count else "conv" for count in kv_heads]}


def _dense(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the entries of the dense class, which has its own names of sizes."""
    sizes = {"block_dim": config["hidden_size"], "block_ff_dim": config["intermediate_size"]}
    return _lfm2(metadata, file, config) | sizes


def _groups(*mlp_names: str) -> dict[str, dict[str, TensorRule]]:
    """Return the tensors of layers. mlp_names: of the dense feed-forward's projections."""
    return {
        "layer": {"attn_norm": TensorRule("operator_norm", "hidden"), "ffn_norm": TensorRule("ffn_norm", "hidden")},
        "full_attention": {
            **attention(output="out_proj"), **head_norms("self_attn.q_layernorm", "self_attn.k_layernorm"),
        },
        "conv": {
            "shortconv.in_proj.weight": TensorRule("conv.in_proj", "3*hidden hidden"),
            "shortconv.conv.weight": TensorRule("conv.conv", "hidden kernel", stored="hidden kernel 1", plain=True),
            "shortconv.out_proj.weight": TensorRule("conv.out_proj", "hidden hidden"),
        },
        "dense": mlp("feed_forward", *mlp_names),
        "sparse": {
            **experts("feed_forward.gate", "feed_forward.switch_mlp"),
            "exp_probs_b.bias": TensorRule("feed_forward", "experts", "expert_bias", optional=True),
        },
    }  # fmt: skip


_TABLES = {
    "token_embd": TensorRule("model.embed_tokens", "vocab hidden"),
    "token_embd_norm": TensorRule("model.embedding_norm", "hidden"),
}
_CONSTANTS = {"conv_bias": False, "tie_word_embeddings": True}
ROWS = {
    "lfm2": GGUFArchitecture(
        "Lfm2ForCausalLM", "lfm2", _groups("w1", "w3", "w2"), _TABLES, keys=("intermediate_size", "conv_L_cache"),
        constants={
            **_CONSTANTS, "block_auto_adjust_ff_dim": False, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        },
        entries=_dense, epsilon="norm_eps", head_counts=True,
    ),
    "lfm2moe": GGUFArchitecture(
        "Lfm2MoeForCausalLM", "lfm2_moe", _groups(), _TABLES,
        keys=("intermediate_size", "conv_L_cache", "num_dense_layers"),
        experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        constants={**_CONSTANTS, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        by_tensor={"use_expert_bias": "exp_probs_b.bias"}, entries=_lfm2, epsilon="norm_eps", head_counts=True,
        sigmoid=True,
    ),
}  # fmt: skip
