"""Mixtures of experts in a config.json, as several families state them.

A family whose config has other keys hands them over under DeepSeek's: `Fields({**values, "n_group": ...})`.
tests/parity/test_mlx_lm_families.py compares logits.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from headrace.models.architectures.config import ExpertLayers, ExpertsConfig
from headrace.models.architectures.fields import Fields
from headrace.runtime.errors import CheckpointError


def count_experts(fields: Fields, key: str, used: str = "num_experts_per_tok") -> tuple[int, int]:
    """Return the number of experts and how many of them a token uses."""
    count = fields.count(key)
    active = fields.count(used)
    if active > count:
        raise CheckpointError(f"config.json: a token cannot be given to {active} of {count} experts")
    return count, active


def equal_experts(key: str, **facts: Any) -> Callable[[Fields, int], ExpertLayers]:
    """Return the function of a row whose layers all have the same experts, of the width `intermediate_size`.

    key: of the number of experts.
    facts: fields of `ExpertsConfig`.
    """

    def experts(fields: Fields, layers: int) -> ExpertLayers:
        counts = count_experts(fields, key)
        return [ExpertsConfig(*counts, size=fields.count("intermediate_size"), **facts)] * layers

    return experts


def corrected_experts(fields: Fields, key: str = "n_routed_experts") -> ExpertsConfig:
    """Return experts that corrected sigmoid scores choose, in groups, as in DeepSeek V3; without shared ones.

    One expert a token keeps its score as its weight, whatever `norm_topk_prob`. Families whose classes normalize it
    leave such models to mlx-lm (`several_experts`).

    key: of the number of experts.
    """
    count, active = count_experts(fields, key)
    return ExpertsConfig(
        count,
        active,
        size=fields.count("moe_intermediate_size"),
        normalized=active > 1 and bool(fields.values.get("norm_topk_prob")),
        sigmoid=True,
        correction="gate.e_score_correction_bias",
        scale=fields.positive("routed_scaling_factor", default=1.0),
        groups=_groups(fields, count, active),
    )


def deepseek_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of DeepSeek V3, with shared ones, after the first dense layers."""
    experts = corrected_experts(fields)
    shared = experts.size * fields.count("n_shared_experts", default=1)
    return after_dense_layers(fields, layers, replace(experts, shared=shared))


def experts_by_step(fields: Fields, layers: int, experts: ExpertsConfig) -> ExpertLayers:
    """Return the experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not list."""
    step = fields.count("decoder_sparse_step", default=1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list, not {dense!r:.60}")
    return [experts if (i + 1) % step == 0 and i not in dense else None for i in range(layers)]


def after_dense_layers(fields: Fields, layers: int, experts: ExpertsConfig) -> ExpertLayers:
    """Return the experts in every `moe_layer_freq`-th layer, but not in the first `first_k_dense_replace`."""
    step = fields.count("moe_layer_freq", default=1)
    dense = fields.count_or_zero("first_k_dense_replace", default=0)  # layers before the first one with experts
    return [None if i < dense or i % step else experts for i in range(layers)]


def several_experts(fields: Fields) -> bool:
    """Return False for one expert a token, whose weight is 1 in mlx-lm's class, whatever its score."""
    return fields.values.get("num_experts_per_tok") != 1


def _groups(fields: Fields, count: int, active: int) -> tuple[int, int]:
    """Return the number of groups of experts and how many of them a token may use.

    count, active: experts, and those of a token.
    """
    groups = fields.count("n_group", default=1)
    kept_groups = fields.count("topk_group", default=1)
    if count % groups or kept_groups > groups or active > count // groups * kept_groups:
        raise CheckpointError(f"config.json: {kept_groups} of {groups} groups do not fit {count} experts")
    return groups, kept_groups
