"""Hunyuan 1, dense and mixtures, with the text part of its vision models; Hy3, a mixture with a shared expert.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guards: tests/parity/test_mlx_lm_families.py and tests/parity/test_transformers.py, which compare logits.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture, Config
from headrace.models.architectures.config import ExpertLayers, ExpertsConfig, Family, RopeConfig
from headrace.models.architectures.experts import corrected_experts, count_experts, several_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import full_rope, head_size, state_usual_names
from headrace.runtime.errors import CheckpointError

# Keys that may list a value for each layer
_LISTS = ("moe_topk", "num_shared_expert", "moe_intermediate_size")
_NAMES = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))
_MOE = {  # what transformers' class for hunyuan_v1_moe does, as keys of the class for hunyuan
    "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True, "use_cla": False,
    "cla_share_factor": 2, "rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0},
}  # fmt: skip


def _ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations. Dynamic scaling by `alpha` is a larger base."""
    rope = full_rope(fields, architecture)
    scaling = fields.section("rope_scaling") or fields.section("rope_parameters")
    if scaling.get("alpha"):
        dims = head_size(fields)
        base = rope.theta * Fields(scaling).positive("alpha") ** (dims / (dims - 2))  # NTK-aware scaling
        rope = RopeConfig(base, share=rope.share)
    return rope, rope


def _experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer, which may differ; one expert is a dense feed-forward."""
    if fields.values.get("num_experts") == 1:
        return [None] * layers
    return [_experts_of(_of_layer(fields, layer)) for layer in range(layers)]


def _of_layer(fields: Fields, layer: int) -> Fields:
    """Return the values of one layer, where a config lists one for each."""
    listed = {key: value for key in _LISTS if isinstance(value := fields.values.get(key), list)}
    if any(layer >= len(value) for value in listed.values()):
        raise CheckpointError(f"config.json: {', '.join(listed)} must have an entry for each layer")
    return Fields({**fields.values, **{key: value[layer] for key, value in listed.items()}})


def _experts_of(fields: Fields) -> ExpertsConfig:
    """Return the experts of a layer of Hunyuan, by that layer's values."""
    shares = fields.values.get("use_mixed_mlp_moe")
    inner = fields.count("intermediate_size")
    return ExpertsConfig(
        *count_experts(fields, "num_experts", "moe_topk"),
        size=fields.count("moe_intermediate_size", default=inner),
        normalized=True,
        router="gate.wg",
        shared=inner * fields.count("num_shared_expert") if shares else 0,
        shared_at="shared_mlp",
    )


def _runs(fields: Fields) -> bool:
    """Return False for layers that read the keys of earlier ones before they are normalized."""
    return not fields.values.get("use_cla")


def _vl_keys(config: Config) -> None:
    """State the size of heads under its usual key."""
    state_usual_names(config, {"attention_head_dim": "head_dim"})


# Hy3
_V3_NAMES = (
    (".mlp.router.gate.", ".mlp.gate."),
    (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".mlp.shared_mlp.", ".mlp.shared_experts."),
)
_V3_DEFAULTS = {"router_scaling_factor": 2.826, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5}


def _v3_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of sparse layers; without a list, of all but the first dense ones."""
    scale = fields.values.get("router_scaling_factor")
    stated = {**fields.values, "norm_topk_prob": True, "routed_scaling_factor": scale}
    experts = corrected_experts(Fields(stated), "num_experts")
    experts = replace(experts, shared=experts.size * fields.count("num_shared_experts", default=1))
    kinds = fields.listed("mlp_layer_types", layers)
    if kinds is None:
        dense = fields.count_or_zero("first_k_dense_replace", default=1)
        kinds = ["dense" if i < dense else "sparse" for i in range(layers)]
    return [experts if kind == "sparse" else None for kind in kinds]


ROWS = (
    Architecture(
        "hunyuan_v1_dense",
        Family(qk_norm="head", norm_last=True),
        tensor_names=_NAMES,
        ropes=_ropes,
    ),
    Architecture(
        "hunyuan",
        Family(qk_norm="head", norm_last=True),
        tensor_names=_NAMES,
        tied=True,
        ropes=_ropes,
        experts=_experts,
        runs=_runs,
    ),
    Architecture("hunyuan_v1_moe", same_as="hunyuan", constants=_MOE),
    Architecture("hunyuan_vl", nests=True, add_keys=_vl_keys),  # published ones are flat
    Architecture(
        "hunyuan_vl_text",
        layers_of="hunyuan_v1_dense",
        nested_defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        add_keys=_vl_keys,
    ),
    Architecture(
        "hy_v3",
        Family(qk_norm="head"),
        defaults=_V3_DEFAULTS,
        tensor_names=_V3_NAMES,
        # The model's own program has keys for variants that no published model is.
        only={
            "route_norm": True,
            "qk_norm": True,
            "moe_router_use_sigmoid": True,
            "moe_router_enable_expert_bias": True,
        },
        theta=11158840.0,
        experts=_v3_experts,
        runs=several_experts,
        plain=(".mlp.gate",),
    ),
)
