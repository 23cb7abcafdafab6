"""Configuration of headrace's own decoder, from a checkpoint's config.json.

Each difference between the supported architectures is a field; `models/network/decoder.py` reads nothing else.
`decoder_config` returns None for other architectures and variants, which mlx-lm's classes run, and raises
CheckpointError for contradictory values and for values that both would ignore.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.models.network.families import FAMILIES, OWN_ROPE_TYPES, Family
from headrace.runtime.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, slots=True, eq=False)
class RopeConfig:
    """Rotation of one kind of layer: base frequency, and the checkpoint's scaling section.

    share: rotated part of a head. Compared by identity: layers of one kind share one object.
    """

    theta: float
    kind: str = "default"
    scaling: Mapping[str, Any] | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A feed-forward of `count` experts of `size`, `active` of them per token; see `runtime.ops.Mixture`.

    router, stacked, each: modules below the feed-forward: the router, the stacks of experts, and a single stored
    expert, with `{}` for its number.
    """

    count: int
    active: int
    size: int
    normalized: bool
    router: str
    stacked: str
    each: str


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Properties that vary by layer: rotation (None: no position information), attention window and experts."""

    rope: RopeConfig | None
    window: int | None = None
    experts: ExpertsConfig | None = None


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
    norm_weight_offset: float = 0.0  # Gemma stores norm weights minus one
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    embedding_scale_in_bfloat16: bool = False  # Gemma 3 was trained with the rounded factor
    attention_softcap: float | None = None
    logit_softcap: float | None = None


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig | None:
    """Return the decoder configuration, or None if headrace's own decoder does not support the config.

    config: of a text-only model, as `models.checkpoint.text_part` returns it.
    """
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or (family := FAMILIES.get(architecture)) is None:
        return None
    fields = _Fields(config)
    rope, local_rope = _ropes(fields, architecture, family)
    if rope.kind not in OWN_ROPE_TYPES or config.get("layer_norm_bias"):
        return None
    if bool(config.get("rope_traditional", family.interleaved)) != family.interleaved:
        return None
    if rope.share != 1 and family.rotated is None:
        return None
    gemma, harmony = architecture.startswith("gemma"), architecture == "gpt_oss"
    if harmony and fields.positive("swiglu_limit", default=7.0) != 7.0:
        raise UnsupportedModelError(f"config.json: a gpt_oss with the swiglu_limit {config['swiglu_limit']!r}")
    if not gemma and config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"config.json: a {architecture} with the activation {config['hidden_act']!r}")
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    head_dim = fields.count("head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads")
    scalar = fields.positive("query_pre_attn_scalar", default=head_dim) if gemma else head_dim
    granite = architecture == "granite"
    residual = fields.positive("residual_multiplier", default=1.0) if granite else 1.0
    embedding = fields.positive("embedding_multiplier", default=1.0) if granite else 1.0
    return DecoderConfig(
        architecture=architecture,
        family=family,
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size"),
        context_length=fields.count("max_position_embeddings", default=2048),
        norm_eps=fields.positive(family.eps) / residual**2,
        tied_embeddings=bool(config.get("tie_word_embeddings", family.tied)),
        layers=_layers(fields, family, rope, local_rope),
        attention_scale=fields.positive("attention_multiplier") if granite else scalar**-0.5,
        sinks=harmony,
        norm_weight_offset=1.0 if gemma else 0.0,
        embedding_scale=(hidden**0.5 if gemma else embedding) / residual,
        logit_scale=_logit_scale(fields, architecture),
        embedding_scale_in_bfloat16=architecture == "gemma3_text",
        attention_softcap=fields.optional("attn_logit_softcapping", 50.0) if architecture == "gemma2" else None,
        logit_softcap=_logit_softcap(fields, architecture),
    )


def _logit_scale(fields: "_Fields", architecture: str) -> float:
    if architecture == "granite":
        return 1 / fields.positive("logits_scaling", default=1.0)
    return fields.positive("logit_scale", default=0.0625) if architecture == "cohere2" else 1.0


def _logit_softcap(fields: "_Fields", architecture: str) -> float | None:
    if architecture == "gemma2":
        return fields.optional("final_logit_softcapping", 30.0)
    stated = architecture == "gemma3_text" and fields.values.get("final_logit_softcapping") is not None
    return fields.positive("final_logit_softcapping") if stated else None


def _ropes(fields: "_Fields", architecture: str, family: Family) -> tuple[RopeConfig, RopeConfig]:
    """Return (rotation of full-attention layers, rotation of sliding layers); the latter is never scaled.

    They differ only in Gemma 3 and OLMo 3.

    Older configs have `rope_theta` and `rope_scaling`; newer ones nest both under `rope_parameters`.
    """
    nested, local = fields.section("rope_parameters"), _Fields({})
    if "full_attention" in nested:  # one section per kind of layer
        local = _Fields(_Fields(nested).section("sliding_attention"))
        nested = _Fields(nested).section("full_attention")
    scaling = fields.section("rope_scaling") or nested
    source = nested if "rope_theta" in nested else fields.values
    theta = _Fields(source).positive("rope_theta", default=1e6 if architecture == "gemma3_text" else 1e4)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if architecture == "phi3" and kind in ("su", "yarn"):  # older names of longrope
        kind = "longrope"
    if kind == "longrope":
        scaling = _trained_context(fields, scaling)
    shared = _Fields({**nested, **fields.values}).positive("partial_rotary_factor", default=family.rotated or 1.0)
    full = RopeConfig(theta, kind, scaling if kind != "default" else None, shared)
    if architecture == "olmo3":
        return full, RopeConfig(theta)
    if architecture != "gemma3_text":
        return full, full
    return full, RopeConfig(local.positive("rope_theta", default=fields.positive("rope_local_base_freq", default=1e4)))


def _trained_context(fields: "_Fields", scaling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a longrope section with the original context, which older configs have outside it."""
    key = "original_max_position_embeddings"
    stated = _Fields({**fields.values, **{name: value for name, value in scaling.items() if value is not None}})
    longest = fields.count("max_position_embeddings", default=4096)
    return {**scaling, key: stated.count(key, default=min(longest, 4096))}


def _layers(fields: "_Fields", family: Family, rope: RopeConfig, local_rope: RopeConfig) -> tuple[LayerConfig, ...]:
    count = fields.count("num_hidden_layers")
    windowed = not fields.values["model_type"].startswith("qwen") or fields.values.get("use_sliding_window")
    if family.sliding == "period" and not family.period:
        windowed = fields.values.get("layer_types") or fields.values.get("sliding_window_pattern")
    window = fields.count("sliding_window") if windowed and fields.values.get("sliding_window") else None
    sliding = [window is not None and slides for slides in _sliding(fields, family, count)]
    rotates = [True] * count
    if family.position_free == "full" and window is not None:
        rotates = sliding
    elif family.position_free == "listed":
        interval = fields.count("no_rope_layer_interval", default=4)
        listed = fields.values.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
        if not isinstance(listed, list) or len(listed) != count:
            raise CheckpointError(f"config.json: no_rope_layers does not list {count} layers")
        rotates = [bool(entry) for entry in listed]
    return tuple(
        LayerConfig((local_rope if slides else rope) if rotating else None, window if slides else None, experts)
        for slides, rotating, experts in zip(sliding, rotates, _experts(fields, count), strict=True)
    )


def _experts(fields: "_Fields", layers: int) -> list[ExpertsConfig | None]:
    """Return every layer's experts, None for dense layers."""
    architecture = fields.values["model_type"]
    if architecture not in ("qwen3_moe", "gpt_oss"):
        return [None] * layers
    harmony = architecture == "gpt_oss"
    count = fields.count("num_local_experts" if harmony else "num_experts")
    active = fields.count("num_experts_per_tok")
    if active > count:
        raise CheckpointError(f"config.json: a token cannot be given to {active} of {count} experts")
    experts = ExpertsConfig(
        count=count,
        active=active,
        size=fields.count("intermediate_size" if harmony else "moe_intermediate_size"),
        normalized=harmony or bool(fields.values.get("norm_topk_prob")),
        router="router" if harmony else "gate",
        stacked="experts" if harmony else "switch_mlp",
        each="experts.{}",
    )
    step = fields.count("decoder_sparse_step", default=1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list, not {dense!r:.60}")
    return [experts if (i + 1) % step == 0 and i not in dense else None for i in range(layers)]


def _sliding(fields: "_Fields", family: Family, count: int) -> list[bool]:
    """Return for each layer whether it attends through a sliding window."""
    kinds = fields.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != count:
            raise CheckpointError(f"config.json: layer_types does not list {count} layers")
        return [kind == "sliding_attention" for kind in kinds]
    if family.sliding == "period":
        pattern = fields.values.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern and not pattern.strip("LG"):  # EXAONE: "LLLG"
            return [pattern[i % len(pattern)] == "L" for i in range(count)]
        period = fields.count("sliding_window_pattern", default=family.period or 1)
        return [(i + 1) % period != 0 for i in range(count)]
    if family.sliding == "tail" and fields.values.get("use_sliding_window"):
        all_slide = fields.values.get("max_window_layers") == 0
        first = 0 if all_slide else fields.count("max_window_layers", default=count)
        return [i >= first for i in range(count)]
    return [family.sliding == "all" or (family.sliding == "even" and i % 2 == 0) for i in range(count)]


class _Fields:
    """Typed access to untrusted JSON; a wrong type or value raises CheckpointError naming the key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise CheckpointError(f"config.json: {key} must be a positive integer, not {value!r:.60}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise CheckpointError(f"config.json: {key} must be a positive number, not {value!r:.60}")
        return float(value)

    def optional(self, key: str, default: float) -> float | None:
        """Return a positive number, `default` if the key is missing, None if it is null."""
        return None if key in self.values and self.values[key] is None else self.positive(key, default)

    def section(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {key} must be an object, not {value!r:.60}")
        return value

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"config.json: {key} is missing")
        return value
