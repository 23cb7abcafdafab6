"""Configuration of headrace's own decoder, from a checkpoint's config.json.

Each difference between the supported architectures is a field; `models/network/decoder.py` reads nothing else.
`decoder_config` returns None for other architectures and variants, which mlx-lm's classes run, and raises
CheckpointError for contradictory values and for values that both would ignore.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.models.architectures.experts import expert_layers
from headrace.models.architectures.falcon import logit_factor
from headrace.models.architectures.families import FAMILIES, OWN_ROPE_TYPES, Family
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.gemma import gemma4_inputs, gemma4_layers, gemma4_ropes
from headrace.models.architectures.latent import LATENT, LatentConfig, latent_config, latent_scale
from headrace.models.architectures.layer_pairs import layer_pairs
from headrace.models.architectures.layers import LayerConfig, RopeConfig, has_positions, sliding_layers
from headrace.models.architectures.llama4 import llama4_layers, query_growth
from headrace.models.architectures.mixers import mixer_layers, mixer_of
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_ONLY = {"apertus": {"post_norm": False, "qk_norm": True}, "kimi_linear": {"mla_use_nope": True}}
_MILLION = ("gemma3_text", "lfm2", "lfm2_moe")  # their default rope_theta


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and variants of a decoder-only transformer. Sizes are in elements.

    norm_eps: of the norms of the residual stream, which is stored divided by Granite's `residual_multiplier`.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    tied_embeddings: bool
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    family: Family = field(default_factory=Family)
    sinks: bool = False  # GPT-OSS: a learned score per head in the softmax
    norm_weight_offset: float = 0.0  # Gemma and Qwen 3.5 store norm weights minus one
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    embedding_scale_in_bfloat16: bool = False  # Gemma 3 was trained with the rounded factor
    attention_softcap: float | None = None
    latent: LatentConfig | None = None  # then K/V are of one head, of latents
    logit_softcap: float | None = None
    input_size: int = 0  # of each layer's own input of a token, from a table of `input_vocab` rows
    input_vocab: int = 0

    @property
    def plain(self) -> bool:
        """True if only sizes of prepared weights matter to the making of layers."""
        return not (self.latent or self.input_size or any(layer.experts or layer.mixer for layer in self.layers))

    @property
    def appending(self) -> int:
        """Layers up to the last that has K/V or recurrent state of its own."""
        return max(i for i, layer in enumerate(self.layers) if layer.source is None) + 1

    def heads_of(self, layer: LayerConfig) -> tuple[int, int]:
        """Return a layer's K/V heads and their size."""
        return layer.kv_heads or self.kv_heads, layer.head_dim or self.head_dim


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig | None:
    """Return the decoder configuration, or None if headrace's own decoder does not support the config.

    config: of a text-only model, as `models.checkpoint.text_part` returns it.
    """
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or (family := FAMILIES.get(architecture)) is None:
        return None
    fields = Fields(config)
    if not config.get("use_qk_norm", True):
        family = replace(family, qk_norm=None)
    rope, local_rope = _ropes(fields, architecture, family)
    if not _runs(fields, architecture, family, (rope, local_rope)):
        return None
    gemma = architecture.startswith("gemma")
    harmony = architecture == "gpt_oss"
    _refuse_other(config, architecture)
    if harmony and fields.positive("swiglu_limit", default=7.0) != 7.0:
        raise UnsupportedModelError(f"config.json: a gpt_oss with the swiglu_limit {config['swiglu_limit']!r}")
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    head_dim = fields.count("head_dim", default=hidden // heads)
    latent = latent_config(fields) if architecture in LATENT else None
    if latent is not None:
        kv_heads = 1
        head_dim = latent.head_dim
        rope = replace(rope, share=latent.rotated / latent.head_dim)
        local_rope = rope
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads")
    granite = architecture.startswith("granite")
    falcon = architecture == "falcon_h1"
    scalar = fields.positive("query_pre_attn_scalar", default=head_dim) if gemma else head_dim
    scale = fields.positive("attention_multiplier") if granite else scalar**-0.5
    scale *= fields.positive("key_multiplier", default=1.0) if falcon else 1.0
    residual = fields.positive("residual_multiplier", default=1.0) if granite else 1.0
    embedding = fields.positive("embedding_multiplier", default=1.0) if granite else 1.0
    decoder = DecoderConfig(
        architecture=architecture,
        family=family,
        hidden_size=hidden,
        intermediate_size=_intermediate_size(fields),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size"),
        context_length=fields.count("max_position_embeddings", default=2048),
        norm_eps=fields.positive(family.eps) / residual**2,
        tied_embeddings=bool(config.get("tie_word_embeddings", family.tied)),
        layers=_layers(fields, family, rope, local_rope),
        attention_scale=scale if latent is None else latent_scale(fields, latent),
        latent=latent,
        sinks=harmony,
        norm_weight_offset=1.0 if gemma or family.gated else 0.0,
        embedding_scale=(hidden**0.5 if gemma else embedding) / residual,
        logit_scale=_logit_scale(fields, architecture),
        embedding_scale_in_bfloat16=architecture == "gemma3_text",
        attention_softcap=fields.optional("attn_logit_softcapping", 50.0) if architecture == "gemma2" else None,
        logit_softcap=_logit_softcap(fields, architecture),
    )
    return _as_gemma4(decoder, fields) if architecture == "gemma4_text" else decoder


def _refuse_other(config: Mapping[str, Any], architecture: str) -> None:
    known = ("xielu",) if architecture == "apertus" else ("silu", "swish")
    key, known = ("mlp_hidden_act", ("relu2",)) if architecture == "nemotron_h" else ("hidden_act", known)
    if not architecture.startswith("gemma") and config.get(key, known[0]) not in known:
        raise UnsupportedModelError(f"config.json: a {architecture} with the activation {config[key]!r}")
    for key, only in _ONLY.get(architecture, {}).items():
        if config.get(key) not in (None, only):
            raise UnsupportedModelError(f"config.json: a {architecture} with {key} {config[key]!r:.40}")


def _as_gemma4(decoder: DecoderConfig, fields: Fields) -> DecoderConfig:
    size, rows = gemma4_inputs(fields)
    layers = gemma4_layers(fields, decoder.layers)
    return replace(
        decoder, attention_scale=1.0, norm_weight_offset=0.0, layers=layers, input_size=size, input_vocab=rows
    )


def _runs(fields: Fields, architecture: str, family: Family, ropes: tuple[RopeConfig, RopeConfig]) -> bool:
    """Return whether the decoder runs this variant of a family."""
    config = fields.values
    mixer = mixer_of(fields)
    if any(rope.kind not in OWN_ROPE_TYPES for rope in ropes) or config.get("layer_norm_bias"):
        return False
    if bool(config.get("rope_traditional", family.interleaved)) != family.interleaved:
        return False
    if architecture == "gemma4_text":
        return all(rope.share == 1 or rope.kind == "proportional" for rope in ropes)
    rope, _ = ropes
    if (rope.share != 1 and family.rotated is None) or rope.kind == "proportional":
        return False
    if architecture == "nemotron_h" and (
        any(letters[0] in "-E" for letters in layer_pairs(config)) or config.get("moe_latent_size")
    ):
        return False
    single = config.get("num_experts_per_tok") == 1
    if architecture in ("minimax", "lfm2_moe") and single:  # the expert's weight is 1 whatever its score
        return False
    heads = fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", default=max(1, fields.count("hidden_size") // heads))
    if architecture == "kimi_linear":
        if config.get("moe_router_activation_func", "sigmoid") != "sigmoid" or not config.get("qk_rope_head_dim"):
            return False
        head_dim = latent_config(fields).head_dim
    return mixer is None or (mixer.fits and head_dim % 16 == 0)  # recurrent state is kept beside blocks only


def _intermediate_size(fields: Fields) -> int:
    if fields.values["model_type"] == "llama4_text":
        return fields.count("intermediate_size_mlp")
    if fields.values["model_type"] != "lfm2":
        only_experts = fields.values["model_type"] == "qwen3_5_moe"
        return fields.count("intermediate_size", default=1 if only_experts else None)
    size = fields.count("block_ff_dim")
    multiple = fields.count("block_multiple_of", default=256)
    if not fields.values.get("block_auto_adjust_ff_dim"):
        return size
    size = int(fields.positive("block_ffn_dim_multiplier", default=1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _logit_scale(fields: Fields, architecture: str) -> float:
    if architecture.startswith("granite"):
        return 1 / fields.positive("logits_scaling", default=1.0)
    if architecture == "falcon_h1" and fields.values.get("tie_word_embeddings", True):
        return logit_factor(fields)
    return fields.positive("logit_scale", default=0.0625) if architecture == "cohere2" else 1.0


def _logit_softcap(fields: Fields, architecture: str) -> float | None:
    if architecture in ("gemma2", "gemma4_text"):
        return fields.optional("final_logit_softcapping", 30.0)
    stated = architecture == "gemma3_text" and fields.values.get("final_logit_softcapping") is not None
    return fields.positive("final_logit_softcapping") if stated else None


def _ropes(fields: Fields, architecture: str, family: Family) -> tuple[RopeConfig, RopeConfig]:
    """Return (rotation of full-attention layers, rotation of sliding layers); the latter is never scaled.

    They differ only in Gemma 3, Gemma 4 and OLMo 3.

    Older configs have `rope_theta` and `rope_scaling`; newer ones nest both under `rope_parameters`.
    """
    if architecture == "gemma4_text":
        return gemma4_ropes(fields)
    nested = fields.section("rope_parameters")
    local = Fields({})
    if "full_attention" in nested:  # one section per kind of layer
        local = Fields(Fields(nested).section("sliding_attention"))
        nested = Fields(nested).section("full_attention")
    scaling = fields.section("rope_scaling") or nested
    source = nested if "rope_theta" in nested else fields.values
    theta = Fields(source).positive("rope_theta", default=1e6 if architecture in _MILLION else 1e4)
    if architecture == "hunyuan_v1_dense" and scaling.get("alpha"):
        dims = fields.count("head_dim", default=fields.count("hidden_size") // fields.count("num_attention_heads"))
        theta = theta * Fields(scaling).positive("alpha") ** (dims / (dims - 2))
        scaling = {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if architecture == "phi3" and kind in ("su", "yarn"):  # older names of longrope
        kind = "longrope"
    if kind == "longrope":
        scaling = _trained_context(fields, scaling)
    shared = Fields({**nested, **fields.values}).positive("partial_rotary_factor", default=family.rotated or 1.0)
    if architecture == "minimax":
        dims = fields.count("head_dim", default=fields.count("hidden_size") // fields.count("num_attention_heads"))
        shared = fields.count("rotary_dim", default=dims) / dims
    full = RopeConfig(theta, kind, scaling if kind != "default" else None, shared)
    if architecture == "olmo3":
        return full, RopeConfig(theta)
    if architecture != "gemma3_text":
        return full, full
    return full, RopeConfig(local.positive("rope_theta", default=fields.positive("rope_local_base_freq", default=1e4)))


def _trained_context(fields: Fields, scaling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a longrope section with the original context, which older configs have outside it."""
    key = "original_max_position_embeddings"
    stated = Fields({**fields.values, **{name: value for name, value in scaling.items() if value is not None}})
    longest = fields.count("max_position_embeddings", default=4096)
    return {**scaling, key: stated.count(key, default=min(longest, 4096))}


def _layers(fields: Fields, family: Family, rope: RopeConfig, local_rope: RopeConfig) -> tuple[LayerConfig, ...]:
    nemotron = fields.values["model_type"] == "nemotron_h"
    pairs = layer_pairs(fields.values) if nemotron else []
    count = len(pairs) or fields.count("num_hidden_layers")
    windowed = not fields.values["model_type"].startswith("qwen") or fields.values.get("use_sliding_window")
    if family.sliding == "period" and not family.period:
        windowed = fields.values.get("layer_types") or fields.values.get("sliding_window_pattern")
    window = fields.count("sliding_window") if windowed and fields.values.get("sliding_window") else None
    sliding = [window is not None and slides for slides in sliding_layers(fields, family, count)]
    rotates = [has_positions(fields)] * count
    if family.position_free == "full" and window is not None:
        rotates = sliding
    elif family.position_free == "listed":
        interval = fields.count("no_rope_layer_interval", default=4)
        listed = fields.values.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
        if not isinstance(listed, list) or len(listed) != count:
            raise CheckpointError(f"config.json: no_rope_layers does not list {count} layers")
        rotates = [bool(entry) for entry in listed]
    growth = query_growth(fields)
    kinds = zip(sliding, rotates, expert_layers(fields, count), mixer_layers(fields, count), strict=True)
    layers = tuple(
        LayerConfig(
            (local_rope if slides else rope) if rotating else None,
            window if slides else None,
            experts,
            mixer,
            attends=mixer is None or family.beside,
            feeds=not pairs or len(pairs[number]) > 1,
            growth=growth,
        )
        for number, (slides, rotating, experts, mixer) in enumerate(kinds)
    )
    return llama4_layers(fields, layers) if fields.values["model_type"] == "llama4_text" else layers
