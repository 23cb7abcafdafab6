"""DeepSeek V2 and V3, dots.llm1: mixtures with shared experts; attention over latents in the first two."""

from dataclasses import replace

from headrace.models.architectures.architecture import Architecture, HeadNames
from headrace.models.architectures.config import ExpertLayers, Family
from headrace.models.architectures.experts import (
    after_dense_layers,
    corrected_experts,
    deepseek_experts,
    several_experts,
)
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.latent import latent_config
from headrace.runtime.errors import UnsupportedModelError

DEEPSEEK_HEAD = HeadNames("model.layers.{}.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm")


def _v2_experts(fields: Fields, layers: int) -> ExpertLayers:
    values = fields.values
    if not values.get("n_routed_experts"):
        return [None] * layers
    method = values.get("topk_method", "greedy")
    scores = values.get("scoring_func", "softmax")
    if method not in ("greedy", "gready", "group_limited_greedy") or scores != "softmax":
        raise UnsupportedModelError(f"config.json: a deepseek_v2 that routes by {method!r:.40} and {scores!r:.40}")
    grouped = corrected_experts(fields)
    experts = replace(
        grouped,
        sigmoid=False,
        correction=None,
        scale=1.0 if grouped.normalized else grouped.scale,
        groups=grouped.groups if method == "group_limited_greedy" else (1, 1),
        best=1,
    )
    shared = fields.count("n_shared_experts") if values.get("n_shared_experts") else 0
    return after_dense_layers(fields, layers, replace(experts, shared=experts.size * shared))


ROWS = (
    Architecture(
        "deepseek_v2",
        Family(interleaved=True),
        constants={"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 1.0}},
        rotated=1.0,
        experts=_v2_experts,
        latent=latent_config,
        plain=(".mlp.gate", ".embed_q"),  # "embed_q": see `models.cost.shape_sources`
    ),
    Architecture(
        "deepseek_v3",
        Family(interleaved=True),
        head=DEEPSEEK_HEAD,
        rotated=1.0,
        experts=deepseek_experts,
        latent=latent_config,
        plain=(".mlp.gate",),
    ),
    Architecture(
        "dots1",
        Family(qk_norm="head"),
        tensor_names=(
            (".experts.gate_proj.", ".switch_mlp.gate_proj."),
            (".experts.up_proj.", ".switch_mlp.up_proj."),
            (".experts.down_proj.", ".switch_mlp.down_proj."),
        ),
        experts=deepseek_experts,
        runs=several_experts,
        plain=(".mlp.gate",),
    ),
)
