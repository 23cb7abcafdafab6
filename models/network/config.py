"""Configuration of headrace's own decoder, from a checkpoint's config.json.

Each difference between the supported architectures is a field; `models/network/decoder.py` reads nothing else.
`decoder_config` returns None for other architectures and variants, which mlx-lm's classes run, and raises
CheckpointError for contradictory values and for values that both would ignore.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.runtime.errors import CheckpointError, UnsupportedModelError

OWN_ARCHITECTURES = (
    "llama", "mistral", "smollm3", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma2", "gemma3_text", "phi3",
)  # fmt: skip
# "mrope" has separate axes for time, height and width, which are equal for text.
OWN_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "mrope")


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
    """Shapes and variants of a decoder-only transformer. Sizes are in elements."""

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
    activation: Literal["silu", "gelu", "clamped"]
    attention_scale: float
    qk_norm: bool = False
    sinks: bool = False  # GPT-OSS: a learned score per head in the softmax
    post_norms: bool = False  # Gemma: a second norm on the outputs of attention and feed-forward
    norm_weight_offset: float = 0.0  # Gemma stores norm weights minus one
    embedding_scale: float = 1.0
    embedding_scale_in_bfloat16: bool = False  # Gemma 3 was trained with the rounded factor
    attention_softcap: float | None = None
    logit_softcap: float | None = None


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig | None:
    """Return the decoder configuration, or None if headrace's own decoder does not support the config.

    config: of a text-only model, as `models.checkpoint.text_part` returns it.
    """
    architecture = config.get("model_type")
    if architecture not in OWN_ARCHITECTURES:
        return None
    fields = _Fields(config)
    rope, local_rope = _ropes(fields, architecture)
    if rope.kind not in OWN_ROPE_TYPES or config.get("rope_traditional"):
        return None
    if rope.share != 1 and architecture != "phi3":
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
    return DecoderConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size"),
        context_length=fields.count("max_position_embeddings", default=2048),
        norm_eps=fields.positive("rms_norm_eps"),
        tied_embeddings=bool(config.get("tie_word_embeddings", gemma or architecture == "llama")),
        layers=_layers(fields, architecture, rope, local_rope),
        activation="gelu" if gemma else "clamped" if harmony else "silu",
        attention_scale=scalar**-0.5,
        qk_norm=architecture in ("qwen3", "qwen3_moe", "gemma3_text"),
        sinks=harmony,
        post_norms=gemma,
        norm_weight_offset=1.0 if gemma else 0.0,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        embedding_scale_in_bfloat16=architecture == "gemma3_text",
        attention_softcap=fields.optional("attn_logit_softcapping", 50.0) if architecture == "gemma2" else None,
        logit_softcap=_logit_softcap(fields, architecture),
    )


def _logit_softcap(fields: "_Fields", architecture: str) -> float | None:
    if architecture == "gemma2":
        return fields.optional("final_logit_softcapping", 30.0)
    stated = architecture == "gemma3_text" and fields.values.get("final_logit_softcapping") is not None
    return fields.positive("final_logit_softcapping") if stated else None


def _ropes(fields: "_Fields", architecture: str) -> tuple[RopeConfig, RopeConfig]:
    """Return (rotation of full-attention layers, rotation of sliding layers), which differ only in Gemma 3.

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
    shared = _Fields({**nested, **fields.values}).positive("partial_rotary_factor", default=1.0)
    full = RopeConfig(theta, kind, scaling if kind != "default" else None, shared)
    if architecture != "gemma3_text":
        return full, full
    return full, RopeConfig(local.positive("rope_theta", default=fields.positive("rope_local_base_freq", default=1e4)))


def _trained_context(fields: "_Fields", scaling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a longrope section with the original context, which older configs have outside it."""
    key = "original_max_position_embeddings"
    stated = _Fields({**fields.values, **{name: value for name, value in scaling.items() if value is not None}})
    longest = fields.count("max_position_embeddings", default=4096)
    return {**scaling, key: stated.count(key, default=min(longest, 4096))}


def _layers(fields: "_Fields", architecture: str, rope: RopeConfig, local_rope: RopeConfig) -> tuple[LayerConfig, ...]:
    count = fields.count("num_hidden_layers")
    windowed = not architecture.startswith("qwen") or fields.values.get("use_sliding_window")
    window = fields.count("sliding_window") if windowed and fields.values.get("sliding_window") else None
    sliding = [window is not None and slides for slides in _sliding(fields, architecture, count)]
    rotates = [True] * count
    if architecture == "smollm3":
        interval = fields.count("no_rope_layer_interval", default=4)
        listed = fields.values.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
        if not isinstance(listed, list) or len(listed) != count:
            raise CheckpointError(f"config.json: no_rope_layers does not list {count} layers")
        rotates = [bool(entry) for entry in listed]
    return tuple(
        LayerConfig((local_rope if slides else rope) if rotating else None, window if slides else None, experts)
        for slides, rotating, experts in zip(sliding, rotates, _experts(fields, architecture, count), strict=True)
    )


def _experts(fields: "_Fields", architecture: str, layers: int) -> list[ExpertsConfig | None]:
    """Return every layer's experts, None for dense layers."""
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


def _sliding(fields: "_Fields", architecture: str, count: int) -> list[bool]:
    """Return for each layer whether it attends through a sliding window."""
    kinds = fields.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != count:
            raise CheckpointError(f"config.json: layer_types does not list {count} layers")
        return [kind == "sliding_attention" for kind in kinds]
    if architecture in ("mistral", "phi3", "qwen3_moe"):
        return [True] * count
    if architecture in ("gemma2", "gpt_oss"):
        return [i % 2 == 0 for i in range(count)]
    if architecture == "gemma3_text":
        pattern = fields.count("sliding_window_pattern", default=6)
        return [(i + 1) % pattern != 0 for i in range(count)]
    if architecture in ("qwen2", "qwen3") and fields.values.get("use_sliding_window"):
        all_slide = fields.values.get("max_window_layers") == 0
        first = 0 if all_slide else fields.count("max_window_layers", default=count)
        return [i >= first for i in range(count)]
    return [False] * count


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
