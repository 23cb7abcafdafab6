"""Config entries and tensors that many architectures share."""

from dataclasses import replace

from headrace.models.gguf.layered.parts import Config, Contents, DraftLayer, Orders, Part
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import rope_scaling
from headrace.models.gguf.target import interleaved
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

NORMS = {"attn_norm": Part("input_layernorm", "hidden"), "ffn_norm": Part("post_attention_layernorm", "hidden")}
POST_NORMS = {
    "attn_norm": Part("input_layernorm", "hidden"),
    "post_attention_norm": Part("post_attention_layernorm", "hidden"),
}

NUMBERED_DRAFTS = DraftLayer("model.layers.{}.", "", "eh_proj", "enorm", "hnorm", "shared_head.norm")


def attention(
    at: str = "self_attn", output: str = "o_proj", *, gate: int = 1, permuted: bool = False
) -> dict[str, Part]:
    """Return the projections of attention. gate: 2 if queries come with gates. permuted: rows as `permuted_heads`."""
    queries, keys = ("queries", "keys") if permuted else ("", "")
    return {
        "attn_q": Part(f"{at}.q_proj", f"heads*head*{gate} hidden", rows=queries),
        "attn_k": Part(f"{at}.k_proj", "kv_heads*head hidden", rows=keys),
        "attn_v": Part(f"{at}.v_proj", "kv_heads*head hidden"),
        "attn_output": Part(f"{at}.{output}", "hidden heads*head"),
    }


def permuted_heads(config: Config) -> Orders:
    """Return the rows of queries and keys that llama.cpp's converter interleaves, as those of Llama."""
    counts = {"queries": config["num_attention_heads"], "keys": config["num_key_value_heads"]}
    return {name: interleaved(count, count * config["head_dim"]) for name, count in counts.items()}


def biases(parts: dict[str, Part], *keys: str, optional: bool = False) -> dict[str, Part]:
    """Return the parts, and biases of those at `keys`; of all without keys."""
    more = {f"{key}.bias": replace(bias_of(parts[key]), optional=optional) for key in keys or parts}
    return {**parts, **more}


def bias_of(part: Part) -> Part:
    """Return the bias of a matrix, a stack or a norm: a number for each row."""
    axes = part.shape.split()
    return replace(part, shape=" ".join(axes[:-1] or axes), leaf="bias", stored="")


def head_norms(*, optional: bool = False) -> dict[str, Part]:
    return {f"attn_{x}_norm": Part(f"self_attn.{x}_norm", "head", optional=optional) for x in "qk"}


_GATED = ("gate_proj", "up_proj", "down_proj")


def mlp(at: str = "mlp", names: tuple[str, str, str] = _GATED, *, inner: str = "inner") -> dict[str, Part]:
    gate, up, down = names
    return {
        "ffn_gate": Part(f"{at}.{gate}", f"{inner} hidden"),
        "ffn_up": Part(f"{at}.{up}", f"{inner} hidden"),
        "ffn_down": Part(f"{at}.{down}", f"hidden {inner}"),
    }


def experts(router: str, at: str, *, plain: bool = False) -> dict[str, Part]:
    """Return a mixture's router and stacks. plain: the class never quantizes its router."""
    return {
        "ffn_gate_inp": Part(router, "experts hidden", plain=plain),
        "ffn_gate_exps": Part(f"{at}.gate_proj", "experts width hidden"),
        "ffn_up_exps": Part(f"{at}.up_proj", "experts width hidden"),
        "ffn_down_exps": Part(f"{at}.down_proj", "experts hidden width"),
    }


def shared_expert(at: str, *, optional: bool = False) -> dict[str, Part]:
    return {
        "ffn_gate_shexp": Part(f"{at}.gate_proj", "shared hidden", optional=optional),
        "ffn_up_shexp": Part(f"{at}.up_proj", "shared hidden", optional=optional),
        "ffn_down_shexp": Part(f"{at}.down_proj", "hidden shared", optional=optional),
    }


LATENTS = {
    "attn_kv_a_mqa": Part("self_attn.kv_a_proj_with_mqa", "latent hidden"),
    "attn_kv_a_norm": Part("self_attn.kv_a_layernorm", "kv_lora"),
    "attn_output": Part("self_attn.o_proj", "hidden heads*value"),
}
"""Attention over latents (MLA)."""
LATENT_HEADS = {
    "attn_k_b": Part("self_attn.embed_q", "heads kv_lora nope"),
    "attn_v_b": Part("self_attn.unembed_out", "heads value kv_lora"),
}


def base_config(metadata: Metadata, file: Contents, model_type: str, *, layer_norm: str = "rms_norm_eps") -> Config:
    """Return the entries of any decoder. layer_norm: the class's name of the epsilon."""
    hidden = metadata.integer("{arch}.embedding_length", minimum=1, maximum=1 << 20)
    heads = max(metadata.per_layer("{arch}.attention.head_count", layers_of(metadata), maximum=1 << 16))
    kv_heads = max(metadata.per_layer("{arch}.attention.head_count_kv", layers_of(metadata), heads, maximum=1 << 16))
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads cannot share {kv_heads} key/value heads")
    kinds = ("layer_norm_rms_epsilon", "layer_norm_epsilon")
    kind = next((kind for kind in kinds if metadata.has(f"{{arch}}.attention.{kind}")), kinds[0])
    table = file.shapes.get("token_embd.weight", ())
    if len(table) != 2:
        raise CheckpointError("tensor token_embd.weight is missing or no matrix")
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers_of(metadata) - metadata.integer("{arch}.nextn_predict_layers", 0, maximum=64),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": metadata.integer("{arch}.attention.key_length", hidden // heads, minimum=1, maximum=1 << 16),
        "max_position_embeddings": metadata.integer("{arch}.context_length", minimum=1),
        layer_norm: metadata.positive(f"{{arch}}.attention.{kind}"),
        "rope_theta": metadata.positive("{arch}.rope.freq_base", 10_000.0),
        "vocab_size": table[0],
        "tie_word_embeddings": "output.weight" not in file.shapes,
    }


def scaled_rope(metadata: Metadata, config: Config, size: int, factors: list[float] | None = None) -> Config:
    """Return the `rope_scaling` entry, None for plain RoPE. size: rotated part of a head."""
    return {"rope_scaling": rope_scaling(metadata, size, config["rope_theta"], factors)}


SOFTMAX = 1
SIGMOID = 2


def check_sigmoid(metadata: Metadata) -> None:
    """Raise UnsupportedModelError if experts are not chosen by sigmoids of their scores."""
    if metadata.integer("{arch}.expert_gating_func", SIGMOID) not in (0, SIGMOID):
        raise UnsupportedModelError(f"a GGUF {metadata.architecture!r} with experts by softmax is not supported")


def rotated_share(metadata: Metadata, config: Config) -> Config:
    """Return the entry for the part of each head that turns."""
    rotated = metadata.integer("{arch}.rope.dimension_count", config["head_dim"], minimum=2, maximum=1 << 16)
    return {"partial_rotary_factor": rotated / config["head_dim"]}


def require_whole_heads(config: Config) -> None:
    """Raise UnsupportedModelError unless the heads together are as wide as the model, as some classes take them."""
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise UnsupportedModelError(f"heads of {config['head_dim']} are not supported in a {config['model_type']}")


def feed_forward(metadata: Metadata, default: int | None = None) -> int:
    return metadata.integer("{arch}.feed_forward_length", default, minimum=1, maximum=1 << 22)


def mixture(metadata: Metadata, count: str, active: str, width: str, default: int | None = None) -> Config:
    """Return the counts and the width of experts under the class's names. default: the width, if none is stated."""
    experts = metadata.integer("{arch}.expert_count", minimum=1, maximum=1 << 14)
    return {
        count: experts,
        active: metadata.integer("{arch}.expert_used_count", minimum=1, maximum=experts),
        width: metadata.integer("{arch}.expert_feed_forward_length", default, minimum=1, maximum=1 << 22),
    }


def routed(metadata: Metadata) -> Config:
    """Return the entries of DeepSeek's way to choose experts."""
    return mixture(metadata, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size") | {
        "n_shared_experts": metadata.integer("{arch}.expert_shared_count", 0, maximum=1 << 10) or None,
        "norm_topk_prob": metadata.flag("{arch}.expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("{arch}.expert_weights_scale", 0.0) or 1.0,
        "n_group": metadata.integer("{arch}.expert_group_count", 0) or 1,
        "topk_group": metadata.integer("{arch}.expert_group_used_count", 0) or 1,
    }


def layers_of(metadata: Metadata) -> int:
    """Return the number of layers, those for multi-token prediction included."""
    return metadata.integer("{arch}.block_count", minimum=1, maximum=4096)
