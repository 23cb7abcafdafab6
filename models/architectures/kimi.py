"""Kimi Linear: delta networks with a decay of each channel (KDA), attention over latents without positions, experts."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.models.architectures.architecture import Architecture, Config
from headrace.models.architectures.config import ExpertLayers, Family, MixerConfig
from headrace.models.architectures.experts import corrected_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.latent import latent_with_eps
from headrace.models.architectures.mixers import mixer_sizes
from headrace.runtime.errors import CheckpointError

_ATTENTION = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.")  # "model.layers.3.self_attn.q_proj.weight", its begin
# Names of a delta network's tensors that differ from ours: "q_conv.conv.weight" is "q_conv1d.weight" here
_KDA = ((".o_proj", ".out_proj"), (".o_norm", ".norm"), ("_conv.conv", "_conv1d"))


def _kda_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers with a delta network, from 0."""
    section = config.get("linear_attn_config")
    listed = section.get("kda_layers") if isinstance(section, Mapping) else None
    if not isinstance(listed, list) or not all(isinstance(number, int) for number in listed):
        raise CheckpointError("config.json: linear_attn_config must list kda_layers")
    return frozenset(number - 1 for number in listed)


def _recurrent(fields: Fields, layers: int) -> list[bool]:
    """Return for each layer whether it has a delta network."""
    return [i in _kda_layers(fields.values) for i in range(layers)]


def _mixer(fields: Fields) -> MixerConfig:
    """Return the delta network: as many heads of keys as of values, of one size, and gates of rank that size."""
    inner = Fields(fields.section("linear_attn_config"))
    heads = inner.count("num_heads")
    size = inner.count("head_dim")
    width = inner.count("short_conv_kernel_size", default=4)
    sizes = mixer_sizes("kda", heads, key_heads=heads, key_dim=size, value_dim=size, width=width)
    return MixerConfig(sizes, fields.positive("rms_norm_eps"), apart=True, rank=size)


def _experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer; all are dense without `num_experts`."""
    if not fields.values.get("num_experts"):
        return [None] * layers
    # DeepSeek's key, which `corrected_experts` reads -> the key of this family
    known = {"n_routed_experts": "num_experts", "n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize"}
    values = {ours: fields.values.get(theirs) for ours, theirs in known.items()}
    active = fields.count("num_experts_per_token")
    values |= {"num_experts_per_tok": active, "norm_topk_prob": active > 1 and values["norm_topk_prob"] is not False}
    shared = fields.count("num_shared_experts") if fields.values.get("num_shared_experts") else 0
    experts = corrected_experts(Fields({**fields.values, **values}))
    experts = replace(experts, shared=shared * experts.size, correction="e_score_correction_bias")
    dense = fields.values.get("first_k_dense_replace") and fields.count("first_k_dense_replace")
    step = fields.count("moe_layer_freq", default=1)
    return [None if i < (dense or 0) or i % step else experts for i in range(layers)]


def _runs(fields: Fields) -> bool:
    """Return False for other scores than sigmoids, and for heads without the part that other families turn."""
    stated = fields.values.get("moe_router_activation_func", "sigmoid")
    return stated == "sigmoid" and bool(fields.values.get("qk_rope_head_dim"))


def _renamed(name: str, config: Config) -> str:
    """Return the name of a delta network's tensor: it is called attention in the checkpoint."""
    match = _ATTENTION.match(name)
    if match is None or int(match[1]) not in _kda_layers(config):
        return name
    name = f"model.layers.{match[1]}.mixer.{name[match.end() :]}"
    for theirs, ours in _KDA:
        name = name.replace(theirs, ours)
    return name


def _older_keys(config: Config) -> None:
    """Add the section of delta networks, and the first sparse layer."""
    kinds = config.get("layer_types")
    mlp = config.get("mlp_layer_types")
    if isinstance(mlp, list):
        dense = mlp.index("sparse") if "sparse" in mlp else len(mlp)
        if "dense" in mlp[dense:]:
            raise CheckpointError(
                "config.json: mlp_layer_types has a dense layer after a sparse one, which is not supported"
            )
        config.setdefault("first_k_dense_replace", dense)
    if not isinstance(kinds, list) or config.get("linear_attn_config") is not None:
        return
    config["linear_attn_config"] = {
        "kda_layers": [i for i, kind in enumerate(kinds, 1) if kind == "linear_attention"],
        "full_attn_layers": [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"],
        "num_heads": config.get("linear_num_heads"),
        "head_dim": config.get("linear_head_dim"),
        "short_conv_kernel_size": config.get("linear_conv_kernel_dim", 4),
    }
    config.setdefault("rope_theta", 10000.0)  # its class takes one, and rotates nothing


ROWS = (
    Architecture(
        "kimi_linear",
        Family(),
        add_keys=_older_keys,
        tensor_names=(
            (".block_sparse_moe.gate.e_score", ".mlp.e_score"),
            (".block_sparse_moe.", ".mlp."),
            (".w1.", ".gate_proj."),
            (".w2.", ".down_proj."),
            (".w3.", ".up_proj."),
        ),
        rename=_renamed,
        only={"mla_use_nope": True},
        rotates=lambda _fields: False,
        experts=_experts,
        mixer=_mixer,
        recurrent=_recurrent,
        latent=latent_with_eps,
        runs=_runs,
    ),
)
