"""Llama, Mistral, and architectures with their layers.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import ATTENTION, BIASES, FEED_FORWARD, QKV, Architecture, Config
from headrace.models.architectures.config import DecoderConfig, ExpertLayers, ExpertsConfig, Family, RopeConfig
from headrace.models.architectures.experts import count_experts, equal_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import full_rope, state_usual_names

# Defaults of transformers' classes, which multimodal configs omit from the section of their text part.
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
_MISTRAL = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "sliding_window": 4096,
}  # fmt: skip


def growing_queries(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Let the queries of all layers grow with their position (Ministral 3, Mistral 4). See `AttentionSpec.growth`."""
    section = Fields(fields.section("rope_parameters"))
    growth = None
    if section.values.get("llama_4_scaling_beta"):
        # The queries' factors begin at the position `length`: 0 ahead of it, unlike Llama 4.
        length = section.count("original_max_position_embeddings")
        growth = section.positive("llama_4_scaling_beta"), length, 0
    return replace(decoder, layers=tuple(replace(layer, growth=growth) for layer in decoder.layers))


_CHUNK = 8192  # default of Llama 4's attention in chunks, and of the positions after which its queries grow


def _llama4(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the chunks that layers attend in, and the growth of queries in layers without rotation."""
    values = fields.values
    kinds = values.get("layer_types")
    # A key that is null or 0 turns chunks off; a missing one has its default.
    chunk = 0
    if values.get("attention_chunk_size", _CHUNK):
        chunk = fields.count("attention_chunk_size", default=_CHUNK)
    growth = None
    if values.get("attn_temperature_tuning", True):
        # Positions count from 1 here, so the factors begin one position ahead.
        growth = fields.positive("attn_scale", default=0.1), fields.count("floor_scale", default=_CHUNK), 1

    layers = []
    for number, layer in enumerate(decoder.layers):
        if kinds is None:  # the layers that rotate are those that attend in chunks
            listed = layer.rope is not None
        else:
            listed = kinds[number] == "chunked_attention"
        chunked = bool(chunk and listed)
        layers.append(
            replace(
                layer,
                window=chunk if chunked else None,
                chunked=chunked,
                growth=growth if layer.rope is None else None,
            )
        )
    return replace(decoder, layers=tuple(layers))


def _llama4_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of the layers in `moe_layers`; without a list, of every `interleave_moe_layer_step`-th.

    Experts and the shared expert have `intermediate_size`; dense layers have `intermediate_size_mlp`.
    """
    listed = fields.values.get("moe_layers")
    step = fields.values.get("interleave_moe_layer_step")
    if not isinstance(listed, list):
        listed = []
        if isinstance(step, int) and step > 0:
            listed = list(range(layers))[step - 1 :: step]
    if not listed:
        return [None] * layers
    experts = ExpertsConfig(
        *count_experts(fields, "num_local_experts"),
        size=fields.count("intermediate_size"),
        normalized=False,
        router="router",
        sigmoid=True,
        shared=fields.count("intermediate_size"),
        shared_at="shared_expert",
        shares_first=True,
    )
    return [experts if i in listed else None for i in range(layers)]


def _llama4_class(config: Config) -> str | None:
    """Return the multimodal model_type for experts: mlx-lm's class of the text part has none."""
    return "llama4" if config.get("moe_layers") else None


def _internlm_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation. Dynamic scaling changes nothing within the context of the config."""
    rope = full_rope(fields, architecture)
    if rope.kind == "dynamic":
        rope = RopeConfig(rope.theta)
    return rope, rope


def _lille_keys(config: Config) -> None:
    """Add the usual names of sizes. Feed-forwards are 8 / 3 as wide as the model, in steps of 256; tables are tied."""
    config["tie_word_embeddings"] = True
    names = {
        "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
        "n_layer": "num_hidden_layers", "block_size": "max_position_embeddings",
    }  # fmt: skip
    state_usual_names(config, names)
    width = config.get("hidden_size")
    if type(width) is int:
        config["intermediate_size"] = 256 * round(int(8 * width / 3) / 256)


# Order matters: the name of a norm or an output is replaced before the module that it belongs to.
_LILLE_NAMES = (
    ("model.tok_embeddings.", "model.embed_tokens."),
    (".attention.norm.", ".input_layernorm."),
    (".attention.out_proj.", ".self_attn.o_proj."),
    (".attention.", ".self_attn."),
    (".feed_forward.norm.", ".post_attention_layernorm."),
    (".feed_forward.", ".mlp."),
)

_INTERNLM2_NAMES = (
    ("model.tok_embeddings.", "model.embed_tokens."),
    (".attention.wqkv.", ".self_attn.qkv_proj."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
)

# Mixtral's names, which other families took over
EXPERT_NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)

ROWS = (
    Architecture("llama", Family(), tied=True, nested_defaults=_LLAMA),
    Architecture(
        "mistral", Family(), sliding="all", nested_defaults=_MISTRAL, context=131072,
    ),
    Architecture("ministral", same_as="mistral"),
    Architecture("ministral3", Family(), tied=True, complete=growing_queries),
    Architecture(
        "mixtral",
        Family(),
        tensor_names=EXPERT_NAMES,
        theta=1e6,
        sliding="all",
        experts=equal_experts("num_local_experts", normalized=True),
    ),
    Architecture(
        "internlm2",
        Family(by_kv_head=True),
        tensor_names=_INTERNLM2_NAMES,
        ropes=_internlm_ropes,
        biases={"bias": ("self_attn.qkv_proj", "self_attn.o_proj")},
    ),
    Architecture(
        "internlm3",
        Family(),
        ropes=_internlm_ropes,
        biases={"qkv_bias": ATTENTION, "bias": FEED_FORWARD},
    ),
    Architecture("telechat3", Family()),
    Architecture(
        "lille-130m",
        Family(interleaved=True),
        add_keys=_lille_keys,
        tensor_names=_LILLE_NAMES,
        tied=True,
        eps="layer_norm_eps",
        biases={},
    ),
    Architecture("helium", Family(interleaved=True), biases={**BIASES, "attention_bias": QKV}),
    Architecture("smollm3", Family(), position_free="listed"),
    Architecture(
        "seed_oss",
        Family(),
        tied=True,
        biases={**BIASES, "attention_bias": QKV, "attention_out_bias": ("self_attn.o_proj",)},
    ),
    Architecture("llama4", nests=True),
    Architecture(
        "llama4_text",
        Family(interleaved=True, qk_norm="turned_unit", norm_last=True),
        position_free="listed",
        outer=_llama4_class,
        tensor_names=((".feed_forward.", ".mlp."), (".experts.", ".switch_mlp.")),
        inner_size=lambda fields: fields.count("intermediate_size_mlp"),
        experts=_llama4_experts,
        complete=_llama4,
    ),
)  # fmt: skip
