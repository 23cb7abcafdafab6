"""OpenELM: layers with other numbers of heads and other widths, growing from the first to the last.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture, Config
from headrace.models.architectures.config import DecoderConfig, Family
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import check_shared_heads, state_usual_names


def _keys(config: Config) -> None:
    """Add the usual names of sizes, and the largest numbers of heads."""
    names = {
        "model_dim": "hidden_size", "num_transformer_layers": "num_hidden_layers",
        "max_context_length": "max_position_embeddings", "rope_freq_constant": "rope_theta",
        "share_input_output_layers": "tie_word_embeddings", "normalize_qk_projections": "use_qk_norm",
    }  # fmt: skip
    state_usual_names(config, names)
    for listed, usual in (("num_query_heads", "num_attention_heads"), ("num_kv_heads", "num_key_value_heads")):
        counts = config.get(listed)
        if isinstance(counts, list) and all(type(count) is int for count in counts):
            config[usual] = max(counts, default=0)


def _widths(fields: Fields) -> list[int]:
    """Return the width of each layer's feed-forward, a multiple of the divisor that is not much below the product."""
    key = "ffn_multipliers"
    divisor = fields.count("ffn_dim_divisor")
    widths = []
    for entry in fields.per_layer(key, fields.count("num_hidden_layers")):
        wanted = entry.positive(key) * fields.count("hidden_size")
        width = max(divisor, int(wanted + divisor / 2) // divisor * divisor)
        if width < 0.9 * wanted:  # as its code rounds: never more than a tenth below
            width += divisor
        widths.append(width)
    return widths


def _complete(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the sizes of each layer."""
    count = len(decoder.layers)
    queries = [entry.count("num_query_heads") for entry in fields.per_layer("num_query_heads", count)]
    entries = [entry.count("num_kv_heads") for entry in fields.per_layer("num_kv_heads", count)]
    layers = []
    for layer, heads, kv_heads, width in zip(decoder.layers, queries, entries, _widths(fields), strict=True):
        check_shared_heads(heads, kv_heads)
        layers.append(replace(layer, heads=heads, kv_heads=kv_heads, inner=width))
    return replace(decoder, layers=tuple(layers))


ROWS = (
    Architecture(
        "openelm",
        Family(qk_norm="head"),
        defaults={"rms_norm_eps": 1e-6},
        add_keys=_keys,
        context=2048,
        tensor_names=(
            ("model.token_embeddings.", "model.embed_tokens."),
            (".attn_norm.", ".input_layernorm."),
            (".ffn_norm.", ".post_attention_layernorm."),
            (".attn.out_proj.", ".self_attn.o_proj."),
            (".attn.", ".self_attn."),
            (".ffn.proj_1.", ".mlp.gate_up_proj."),
            (".ffn.proj_2.", ".mlp.down_proj."),
            (".ffn.", ".mlp."),
        ),
        tied=True,
        activation_key=None,
        only={"ffn_with_glu": True, "rope_scaling": None},
        inner_size=lambda fields: max(_widths(fields)),
        biases={},
        complete=_complete,
    ),
)
