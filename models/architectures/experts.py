"""Mixtures of experts in a config.json."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layer_pairs import layer_pairs
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

Layers = list["ExpertsConfig | None"]


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A feed-forward of `count` experts of `size`, `active` of them per token; see `runtime.ops.Mixture`.

    Modules below the feed-forward: router, stacked (the stacks of experts), each (a single stored expert, with `{}` for
    its number), shared_at (the expert that all tokens use, of size `shared`; 0 without), shared_gate (see
    `LayerWeights.down_gate`). correction: tensor there. branch: added to the layer's dense feed-forward, each behind a
    norm of its own (Gemma 4). best, shares_first: as in `Mixture`.
    """

    count: int
    active: int
    size: int
    normalized: bool
    router: str = "gate"
    stacked: str = "switch_mlp"
    each: str = "experts.{}"
    sigmoid: bool = False
    correction: str | None = None
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    shared: int = 0
    shared_at: str = "shared_experts"
    shared_gate: str | None = None
    branch: bool = False
    best: int = 2
    shares_first: bool = False


def expert_layers(fields: Fields, layers: int) -> list[ExpertsConfig | None]:
    """Return every layer's experts, None for dense layers. Raises CheckpointError for contradictory values."""
    reader = _READERS.get(fields.values["model_type"])
    return [None] * layers if reader is None else reader(fields, layers)


def _qwen3(fields: Fields, layers: int) -> Layers:
    experts = ExpertsConfig(
        *_counts(fields, "num_experts"),
        size=fields.count("moe_intermediate_size"),
        normalized=bool(fields.values.get("norm_topk_prob")),
    )
    if fields.values["model_type"] == "qwen3_next":
        experts = _with_gated(fields, experts)
    step = fields.count("decoder_sparse_step", default=1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list, not {dense!r:.60}")
    return [experts if (i + 1) % step == 0 and i not in dense else None for i in range(layers)]


def _qwen3_5(fields: Fields, layers: int) -> Layers:
    if not fields.values.get("num_experts"):
        return [None] * layers
    counts = _counts(fields, "num_experts")
    size = fields.count("moe_intermediate_size")
    normalized = bool(fields.values.get("norm_topk_prob", True))
    return [_with_gated(fields, ExpertsConfig(*counts, size, normalized))] * layers


def _with_gated(fields: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    shared = fields.count("shared_expert_intermediate_size")
    return replace(experts, shared=shared, shared_at="shared_expert", shared_gate="shared_expert_gate")


def _gpt_oss(fields: Fields, layers: int) -> Layers:
    counts = _counts(fields, "num_local_experts")
    size = fields.count("intermediate_size")
    return [ExpertsConfig(*counts, size, normalized=True, router="router", stacked="experts")] * layers


def _granite(fields: Fields, layers: int) -> Layers:
    """Return experts next to a dense feed-forward, which has the modules of layers without experts."""
    if not fields.values.get("num_local_experts"):
        return [None] * layers
    counts = _counts(fields, "num_local_experts")
    size = fields.count("intermediate_size")
    shared = fields.count("shared_intermediate_size")
    return [ExpertsConfig(*counts, size, normalized=True, router="router.layer", shared=shared, shared_at="")] * layers


def _gemma4(fields: Fields, layers: int) -> Layers:
    if not fields.values.get("enable_moe_block"):
        return [None] * layers
    counts = _counts(fields, "num_experts", "top_k_experts")
    size = fields.count("moe_intermediate_size")
    return [ExpertsConfig(*counts, size, normalized=True, branch=True)] * layers


def _lfm2(fields: Fields, layers: int) -> Layers:
    experts = ExpertsConfig(
        *_counts(fields, "num_experts"),
        size=fields.count("moe_intermediate_size"),
        normalized=bool(fields.values.get("norm_topk_prob")),
        sigmoid=True,
        correction="expert_bias" if fields.values.get("use_expert_bias") else None,
        scale=fields.positive("routed_scaling_factor", default=1.0),
    )
    dense = fields.count("num_dense_layers") if fields.values.get("num_dense_layers") != 0 else 0
    return [None if i < dense else experts for i in range(layers)]


def _minimax(fields: Fields, layers: int) -> Layers:
    counts = _counts(fields, "num_local_experts")
    size = fields.count("intermediate_size")
    return [ExpertsConfig(*counts, size, normalized=True, sigmoid=True, correction="e_score_correction_bias")] * layers


def _corrected(fields: Fields) -> ExpertsConfig:
    return ExpertsConfig(
        *_counts(fields, "n_routed_experts"),
        size=fields.count("moe_intermediate_size"),
        normalized=bool(fields.values.get("norm_topk_prob")),
        sigmoid=True,
        correction="gate.e_score_correction_bias",
        scale=fields.positive("routed_scaling_factor", default=1.0),
        groups=_groups(fields),
    )


def _deepseek(fields: Fields, layers: int) -> Layers:
    experts = _corrected(fields)
    return _behind_dense(
        fields, layers, replace(experts, shared=experts.size * fields.count("n_shared_experts", default=1))
    )


def _behind_dense(fields: Fields, layers: int, experts: ExpertsConfig) -> Layers:
    dense = 0
    step = fields.count("moe_layer_freq", default=1)
    if fields.values.get("first_k_dense_replace"):
        dense = fields.count("first_k_dense_replace")
    return [None if i < dense or i % step else experts for i in range(layers)]


def _deepseek_v2(fields: Fields, layers: int) -> Layers:
    values = fields.values
    if not values.get("n_routed_experts"):
        return [None] * layers
    method = values.get("topk_method", "greedy")
    scores = values.get("scoring_func", "softmax")
    if method not in ("greedy", "gready", "group_limited_greedy") or scores != "softmax":
        raise UnsupportedModelError(f"config.json: a deepseek_v2 that routes by {method!r:.40} and {scores!r:.40}")
    grouped = _corrected(fields)
    experts = replace(
        grouped,
        sigmoid=False,
        correction=None,
        scale=1.0 if grouped.normalized else grouped.scale,
        groups=grouped.groups if method == "group_limited_greedy" else (1, 1),
        best=1,
    )
    shared = fields.count("n_shared_experts") if values.get("n_shared_experts") else 0
    return _behind_dense(fields, layers, replace(experts, shared=experts.size * shared))


def _llama4(fields: Fields, layers: int) -> Layers:
    listed = fields.values.get("moe_layers")
    step = fields.values.get("interleave_moe_layer_step")
    if not isinstance(listed, list):
        listed = list(range(layers))[step - 1 :: step] if isinstance(step, int) and step > 0 else []
    if not listed:
        return [None] * layers
    experts = ExpertsConfig(
        *_counts(fields, "num_local_experts"),
        size=fields.count("intermediate_size"),
        normalized=False,
        router="router",
        sigmoid=True,
        shared=fields.count("intermediate_size"),
        shared_at="shared_expert",
        shares_first=True,
    )
    return [experts if i in listed else None for i in range(layers)]


def _kimi(fields: Fields, layers: int) -> Layers:
    if not fields.values.get("num_experts"):
        return [None] * layers
    known = {"n_routed_experts": "num_experts", "n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize"}
    values = {ours: fields.values.get(theirs) for ours, theirs in known.items()}
    active = fields.count("num_experts_per_token")
    values |= {"num_experts_per_tok": active, "norm_topk_prob": active > 1 and values["norm_topk_prob"] is not False}
    shared = fields.count("num_shared_experts") if fields.values.get("num_shared_experts") else 0
    experts = _corrected(Fields({**fields.values, **values}))
    experts = replace(experts, shared=shared * experts.size, correction="e_score_correction_bias")
    dense = fields.values.get("first_k_dense_replace") and fields.count("first_k_dense_replace")
    step = fields.count("moe_layer_freq", default=1)
    return [None if i < (dense or 0) or i % step else experts for i in range(layers)]


def _nemotron(fields: Fields, _layers: int) -> Layers:
    pairs = layer_pairs(fields.values)
    if not any(letters.endswith("E") for letters in pairs):
        return [None] * len(pairs)
    shared = fields.count("moe_shared_expert_intermediate_size") if fields.values.get("n_shared_experts") else 0
    experts = replace(_corrected(fields), shared=shared)
    return [experts if letters.endswith("E") else None for letters in pairs]


def _groups(fields: Fields) -> tuple[int, int]:
    """Return the number of groups of experts and how many of them a token may use."""
    count, groups, kept = (fields.count(key, default=1) for key in ("n_routed_experts", "n_group", "topk_group"))
    if count % groups or kept > groups or fields.count("num_experts_per_tok") > count // groups * kept:
        raise CheckpointError(f"config.json: {kept} of {groups} groups do not fit {count} experts")
    return groups, kept


def _counts(fields: Fields, key: str, used: str = "num_experts_per_tok") -> tuple[int, int]:
    """Return the number of experts and how many of them a token uses."""
    count = fields.count(key)
    active = fields.count(used)
    if active > count:
        raise CheckpointError(f"config.json: a token cannot be given to {active} of {count} experts")
    return count, active


_READERS: dict[str, Callable[[Fields, int], Layers]] = {
    "qwen3_moe": _qwen3, "qwen3_next": _qwen3, "qwen3_5": _qwen3_5, "qwen3_5_moe": _qwen3_5, "gpt_oss": _gpt_oss,
    "granitemoehybrid": _granite, "lfm2_moe": _lfm2, "minimax": _minimax, "glm4_moe": _deepseek,
    "glm4_moe_lite": _deepseek, "deepseek_v3": _deepseek, "deepseek_v2": _deepseek_v2, "llama4_text": _llama4,
    "nemotron_h": _nemotron, "gemma4_text": _gemma4,
    "kimi_linear": _kimi,
}  # fmt: skip
