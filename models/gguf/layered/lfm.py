"""LFM2 and its mixtures: short convolutions, and attention in some layers."""

from headrace.models.gguf.layered.common import (
    attention,
    attention_sizes,
    base_config,
    experts,
    feed_forward,
    layers_of,
    mixture,
    mlp,
    refuse_scaled_rope,
)
from headrace.models.gguf.layered.parts import Config, Contents, LayeredArchitecture, Part
from headrace.models.gguf.metadata import Metadata

_CONV = "conv"


def _config(metadata: Metadata, file: Contents) -> Config:
    refuse_scaled_rope(metadata)
    mixed = metadata.architecture == "lfm2moe"
    config = base_config(metadata, file, "lfm2_moe" if mixed else "lfm2", layer_norm="norm_eps")
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", layers_of(metadata))
    inner = feed_forward(metadata)
    config |= {
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "conv_L_cache": metadata.integer("{arch}.shortconv.l_cache", minimum=1, maximum=64),
        "conv_bias": False,
        "intermediate_size": inner,
        "tie_word_embeddings": True,
    }
    if not mixed:
        return config | {
            "block_dim": config["hidden_size"], "block_ff_dim": inner, "block_auto_adjust_ff_dim": False,
            "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        }  # fmt: skip
    return config | mixture(metadata, "num_experts", "num_experts_per_tok", "moe_intermediate_size") | {
        "num_dense_layers": metadata.integer("{arch}.leading_dense_block_count", 0),
        "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in file.shapes),
    }  # fmt: skip


def _kinds(config: Config) -> list[tuple[str, ...]]:
    dense: int = config.get("num_dense_layers") or config["num_hidden_layers"]
    return [("norms", kind, "dense" if layer < dense else "sparse") for layer, kind in enumerate(config["layer_types"])]


def _sizes(config: Config) -> dict[str, int]:
    return attention_sizes(config) | {
        "inner": config["intermediate_size"], "kernel": config["conv_L_cache"],
        "experts": config.get("num_experts", 0), "width": config.get("moe_intermediate_size", 0),
    }  # fmt: skip


def _architecture(model_class: str, names: tuple[str, str, str]) -> LayeredArchitecture:
    groups: dict[str, dict[str, Part]] = {
        "norms": {"attn_norm": Part("operator_norm", "hidden"), "ffn_norm": Part("ffn_norm", "hidden")},
        "full_attention": {
            **attention(output="out_proj"),
            "attn_q_norm": Part("self_attn.q_layernorm", "head"), "attn_k_norm": Part("self_attn.k_layernorm", "head"),
        },
        "conv": {
            "shortconv.in_proj.weight": Part(f"{_CONV}.in_proj", "3*hidden hidden"),
            "shortconv.conv.weight": Part(
                f"{_CONV}.conv", "hidden kernel", stored="hidden kernel 1", plain=True
            ),
            "shortconv.out_proj.weight": Part(f"{_CONV}.out_proj", "hidden hidden"),
        },
        "dense": mlp("feed_forward", names),
        "sparse": {
            **experts("feed_forward.gate", "feed_forward.switch_mlp"),
            "exp_probs_b.bias": Part("feed_forward", "experts", "expert_bias", optional=True),
        },
    }  # fmt: skip
    outside = {
        "token_embd": Part("model.embed_tokens", "vocab hidden"),
        "token_embd_norm": Part("model.embedding_norm", "hidden"),
    }
    return LayeredArchitecture(model_class, _config, _kinds, _sizes, groups, outside)


LFM2 = _architecture("Lfm2ForCausalLM", ("w1", "w3", "w2"))
LFM2_MOE = _architecture("Lfm2MoeForCausalLM", ("gate_proj", "up_proj", "down_proj"))
