"""Table of the tensors of blocks that many architectures share: norms, attention, feed-forwards, experts, tables.

Keys are names of tensors in files of llama.cpp, below "blk.N." but for `tables`; `names.named` adds ".weight" to those
without a dot. Values are their places in a model's class, and the names of their axes, whose sizes are `names.sizes_of`
a config. A change here changes every row that has the block: tests/models/gguf/test_layered.py converts a small file of
each.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from headrace.models.gguf.architecture import Config, DraftLayer, GGUFArchitecture, TensorRule, TensorRules
from headrace.models.gguf.rope import ROPE_LONG, ROPE_SHORT
from headrace.models.gguf.target import Order, interleaved

# Norms before attention and before the feed-forward
NORMS = {
    "attn_norm": TensorRule("input_layernorm", "hidden"),
    "ffn_norm": TensorRule("post_attention_layernorm", "hidden"),
}
# The same modules, with another name of the second in the file
POST_NORMS = {
    "attn_norm": TensorRule("input_layernorm", "hidden"),
    "post_attention_norm": TensorRule("post_attention_layernorm", "hidden"),
}
# Norms before and after both
SANDWICH_NORMS = {
    **POST_NORMS,
    "ffn_norm": TensorRule("pre_feedforward_layernorm", "hidden"),
    "post_ffw_norm": TensorRule("post_feedforward_layernorm", "hidden"),
}

# A draft layer that is stored after the last layer, as one more of them
NUMBERED_DRAFTS = DraftLayer(
    at="model.layers.{}.",
    layer="",
    projection="eh_proj",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    norm="shared_head.norm",
)


def attention(
    at: str = "self_attn", output: str = "o_proj", *, gate: int = 1, permuted: bool = False
) -> dict[str, TensorRule]:
    """Return the projections of attention. gate: 2 if queries come with gates. permuted: rows as Llama's."""
    return {
        "attn_q": TensorRule(f"{at}.q_proj", f"heads*head*{gate} hidden", rows=_permuted_queries if permuted else None),
        "attn_k": TensorRule(f"{at}.k_proj", "kv_heads*head hidden", rows=_permuted_keys if permuted else None),
        "attn_v": TensorRule(f"{at}.v_proj", "kv_heads*head hidden"),
        "attn_output": TensorRule(f"{at}.{output}", "hidden heads*head"),
    }


def _permuted_queries(config: Config) -> Order:
    """Return the rows of queries in Hugging Face order, see `target.interleaved`."""
    return interleaved(config["num_attention_heads"], config["head_dim"])


def _permuted_keys(config: Config) -> Order:
    """Return the rows of keys in that order."""
    return interleaved(config["num_key_value_heads"], config["head_dim"])


def biases(parts: TensorRules, *keys: str, optional: bool = False) -> dict[str, TensorRule]:
    """Return the parts, and biases of those at `keys`; of all without keys."""
    more = {f"{key}.bias": replace(parts[key].bias, optional=optional) for key in keys or parts}
    return {**parts, **more}


def minus_one(parts: TensorRules) -> dict[str, TensorRule]:
    """Return the parts; the converter has added 1 to the weights of their norms."""
    return {key: replace(part, values="minus_one") if key.endswith("norm") else part for key, part in parts.items()}


def head_norms(
    query: str = "self_attn.q_norm", key: str = "self_attn.k_norm", *, optional: bool = False
) -> dict[str, TensorRule]:
    """Return the norms of each head of queries and keys, by their modules."""
    return {
        "attn_q_norm": TensorRule(query, "head", optional=optional),
        "attn_k_norm": TensorRule(key, "head", optional=optional),
    }


# Norms of all heads together
WIDE_NORMS = {
    "attn_q_norm": TensorRule("self_attn.q_norm", "heads*head"),
    "attn_k_norm": TensorRule("self_attn.k_norm", "kv_heads*head"),
}  # fmt: skip


def mlp(
    at: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", *, inner: str = "inner"
) -> dict[str, TensorRule]:
    """Return a feed-forward. gate, up, down: its projections. inner: its width."""
    return {
        "ffn_gate": TensorRule(f"{at}.{gate}", f"{inner} hidden"),
        **ungated_mlp(f"{at}.{up}", f"{at}.{down}", inner),
    }


def ungated_mlp(up: str = "mlp.up_proj", down: str = "mlp.down_proj", inner: str = "inner") -> dict[str, TensorRule]:
    """Return a feed-forward without a gate."""
    return {"ffn_up": TensorRule(up, f"{inner} hidden"), "ffn_down": TensorRule(down, f"hidden {inner}")}


# Gate and up are stored as one.
FUSED_MLP = {
    "ffn_up": TensorRule("mlp.gate_up_proj", "2*inner hidden"),
    "ffn_down": TensorRule("mlp.down_proj", "hidden inner"),
}


def experts(router: str = "mlp.gate", at: str = "mlp.switch_mlp", *, plain: bool = False) -> dict[str, TensorRule]:
    """Return a mixture's router and stacks. plain: the class never quantizes its router."""
    return {
        "ffn_gate_inp": TensorRule(router, "experts hidden", plain=plain),
        "ffn_gate_exps": TensorRule(f"{at}.gate_proj", "experts width hidden"),
        "ffn_up_exps": TensorRule(f"{at}.up_proj", "experts width hidden"),
        "ffn_down_exps": TensorRule(f"{at}.down_proj", "experts hidden width"),
    }


def shared_expert(at: str = "mlp.shared_experts", *, optional: bool = False) -> dict[str, TensorRule]:
    """Return the expert that all tokens use."""
    return {
        "ffn_gate_shexp": TensorRule(f"{at}.gate_proj", "shared hidden", optional=optional),
        "ffn_up_shexp": TensorRule(f"{at}.up_proj", "shared hidden", optional=optional),
        "ffn_down_shexp": TensorRule(f"{at}.down_proj", "hidden shared", optional=optional),
    }


# Attention over latents (MLA)
LATENTS = {
    "attn_kv_a_mqa": TensorRule("self_attn.kv_a_proj_with_mqa", "latent hidden"),
    "attn_kv_a_norm": TensorRule("self_attn.kv_a_layernorm", "kv_lora"),
    "attn_output": TensorRule("self_attn.o_proj", "hidden heads*value"),
}
# Queries from latents, in larger models of MLA
LATENT_QUERIES = {
    "attn_q_a": TensorRule("self_attn.q_a_proj", "q_lora hidden"),
    "attn_q_a_norm": TensorRule("self_attn.q_a_layernorm", "q_lora"),
    "attn_q_b": TensorRule("self_attn.q_b_proj", "heads*query q_lora"),
}
# Sparse attention of DeepSeek-V3.2: scores of all entries, of which the best are attended to
INDEXER = {
    "indexer.attn_q_b.weight": TensorRule("self_attn.indexer.wq_b", "index_heads*index q_lora"),
    "indexer.attn_k.weight": TensorRule("self_attn.indexer.wk", "index hidden"),
    "indexer.proj.weight": TensorRule("self_attn.indexer.weights_proj", "index_heads hidden"),
    "indexer.k_norm.weight": TensorRule("self_attn.indexer.k_norm", "index"),
    "indexer.k_norm.bias": TensorRule("self_attn.indexer.k_norm", "index", "bias"),
}
# The matrices by which each head reads latents, as keys and as values
LATENT_HEADS = {
    "attn_k_b": TensorRule("self_attn.embed_q", "heads kv_lora nope"),
    "attn_v_b": TensorRule("self_attn.unembed_out", "heads value kv_lora"),
}


def tables(
    norm: str = "model.norm", embedding: str = "model.embed_tokens", head: str | None = "lm_head"
) -> dict[str, TensorRule]:
    """Return the tensors outside layers that most models have. head: None if the embeddings are the output matrix."""
    both = {"token_embd": TensorRule(embedding, "vocab hidden"), "output_norm": TensorRule(norm, "hidden")}
    return both if head is None else {**both, "output": TensorRule(head, "vocab hidden", optional=True)}


_TABLES = tables()  # of most models


def equal_layers(
    model_class: str,
    model_type: str,
    layer: TensorRules,
    *,
    tables: TensorRules = _TABLES,
    constants: Mapping[str, Any] | None = None,
    half: str = "float16",
    **more: Any,
) -> GGUFArchitecture:
    """Return the row of a model with equal layers and every kind of scaled RoPE.

    tables: tensors outside layers.
    constants: entries of the config besides `hidden_act`, which is SiLU unless they change it.
    half: half precision that the activations fit.
    more: further fields of the row.
    """
    return GGUFArchitecture(
        model_class, model_type, {"layer": layer}, tables,
        constants={"hidden_act": "silu", **(constants or {})}, scales_rope=True,
        config_tensors=(ROPE_LONG, ROPE_SHORT), half=half, **more,
    )  # fmt: skip
