"""OpenELM: layers of different sizes, which the file lists.

Guard: tests/models/gguf/test_layered.py.
"""

from headrace.models.gguf.architecture import Config, Contents, Entries, GGUFArchitecture, TensorRule, TensorRules
from headrace.models.gguf.architectures.blocks import head_norms, mlp, tables
from headrace.models.gguf.keys import HEADS, WIDTH, layers_of
from headrace.models.gguf.metadata import Metadata


def _openelm(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the sizes of each layer, under the names of the family's config."""
    count = layers_of(metadata)
    widths = metadata.per_layer("{arch}.feed_forward_length", count, minimum=1, maximum=WIDTH)
    return {
        "model_dim": config["hidden_size"], "num_transformer_layers": count,
        "max_context_length": config["max_position_embeddings"], "rope_freq_constant": config["rope_theta"],
        "num_query_heads": metadata.per_layer("{arch}.attention.head_count", count, minimum=1, maximum=HEADS),
        "num_kv_heads": metadata.per_layer("{arch}.attention.head_count_kv", count, minimum=1, maximum=HEADS),
        "ffn_multipliers": [width / config["hidden_size"] for width in widths], "ffn_dim_divisor": 1,
        "share_input_output_layers": config["tie_word_embeddings"],
    }  # fmt: skip


def _layers(config: Config) -> list[TensorRules]:
    """Return the tensors of each layer."""
    widths = [round(multiple * config["hidden_size"]) for multiple in config["ffn_multipliers"]]
    sizes = zip(config["num_query_heads"], config["num_kv_heads"], widths, strict=True)
    return [
        {
            "attn_norm": TensorRule("attn_norm", "hidden"), "ffn_norm": TensorRule("ffn_norm", "hidden"),
            "attn_qkv": TensorRule("attn.qkv_proj", f"{heads + 2 * kv_heads}*head hidden"),
            "attn_output": TensorRule("attn.out_proj", f"hidden {heads}*head"),
            **head_norms("attn.q_norm", "attn.k_norm"), **mlp("ffn", inner=str(width)),
        }
        for heads, kv_heads, width in sizes
    ]  # fmt: skip


ROWS = {
    "openelm": GGUFArchitecture(
        "OpenELMForCausalLM", "openelm", {}, tables("transformer.norm", "transformer.token_embeddings"),
        keys=(), constants={"normalize_qk_projections": True, "ffn_with_glu": True}, entries=_openelm, head_counts=True,
        layer="transformer.layers.{}", layers=_layers,
    ),
}  # fmt: skip
