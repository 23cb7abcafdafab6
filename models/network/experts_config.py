"""Mixtures of experts in a config.json."""

from dataclasses import dataclass

from headrace.models.network.config_fields import Fields
from headrace.runtime.errors import CheckpointError

_SIGMOID = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "minimax")


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A feed-forward of `count` experts of `size`, `active` of them per token; see `runtime.ops.Mixture`.

    router, stacked, each: modules below the feed-forward: the router, the stacks of experts, and a single stored
    expert, with `{}` for its number. correction: tensor below the feed-forward, None without. shared: size of the
    expert that all tokens use, 0 without.
    """

    count: int
    active: int
    size: int
    normalized: bool
    router: str
    stacked: str
    each: str
    sigmoid: bool = False
    correction: str | None = None
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    shared: int = 0


def expert_layers(fields: Fields, layers: int) -> list[ExpertsConfig | None]:
    """Return every layer's experts, None for dense layers. Raises CheckpointError for contradictory values."""
    architecture = fields.values["model_type"]
    if architecture in _SIGMOID:
        return _sigmoid(fields, layers)
    if architecture not in ("qwen3_moe", "gpt_oss"):
        return [None] * layers
    harmony = architecture == "gpt_oss"
    experts = ExpertsConfig(
        *_counts(fields, "num_local_experts" if harmony else "num_experts"),
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


def _sigmoid(fields: Fields, layers: int) -> list[ExpertsConfig | None]:
    glm = fields.values["model_type"] != "minimax"
    size = fields.count("moe_intermediate_size" if glm else "intermediate_size")
    experts = ExpertsConfig(
        *_counts(fields, "n_routed_experts" if glm else "num_local_experts"),
        size=size,
        normalized=not glm or bool(fields.values.get("norm_topk_prob")),
        router="gate",
        stacked="switch_mlp",
        each="experts.{}",
        sigmoid=True,
        correction="gate.e_score_correction_bias" if glm else "e_score_correction_bias",
        scale=fields.positive("routed_scaling_factor", default=1.0) if glm else 1.0,
        groups=_groups(fields) if glm else (1, 1),
        shared=size * fields.count("n_shared_experts", default=1) if glm else 0,
    )
    dense, step = 0, fields.count("moe_layer_freq", default=1)
    if fields.values.get("first_k_dense_replace"):
        dense = fields.count("first_k_dense_replace")
    return [None if glm and (i < dense or i % step) else experts for i in range(layers)]


def _groups(fields: Fields) -> tuple[int, int]:
    """Return the number of groups of experts and how many of them a token may use."""
    count, groups, kept = (fields.count(key, default=1) for key in ("n_routed_experts", "n_group", "topk_group"))
    if count % groups or kept > groups or fields.count("num_experts_per_tok") > count // groups * kept:
        raise CheckpointError(f"config.json: {kept} of {groups} groups do not fit {count} experts")
    return groups, kept


def _counts(fields: Fields, key: str) -> tuple[int, int]:
    """Return the number of experts and how many of them a token uses."""
    count, active = fields.count(key), fields.count("num_experts_per_tok")
    if active > count:
        raise CheckpointError(f"config.json: a token cannot be given to {active} of {count} experts")
    return count, active
