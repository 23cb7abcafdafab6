"""Kimi Linear and K3: delta networks with a decay of each channel (KDA), attention over latents, experts.

K3 has the keys and layers of Kimi Linear, and adds mixtures of residual sums, SiTU, and experts with a width of their
own. Nothing rotates.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture, Config
from headrace.models.architectures.config import DecoderConfig, ExpertLayers, Family, MixerConfig
from headrace.models.architectures.experts import after_dense_layers, corrected_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.latent import latent_config, latent_with_eps
from headrace.models.architectures.mixers import decay_bound, mixer_sizes
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
    return MixerConfig(
        sizes,
        fields.positive("rms_norm_eps"),
        apart=True,
        rank=size,
        full_gate=bool(inner.values.get("use_full_rank_gate")),
        decay_bound=decay_bound(inner, "gate_lower_bound"),
    )


def _experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer; all are dense without `num_experts`."""
    if not fields.values.get("num_experts"):
        return [None] * layers
    # The keys that `corrected_experts` reads, which have other names in this family
    values = fields.values
    stated = {
        **values,
        "num_experts_per_tok": fields.count("num_experts_per_token"),
        "n_group": values.get("num_expert_group"),
        "norm_topk_prob": values.get("moe_renormalize") is not False,
    }
    experts = corrected_experts(Fields(stated), "num_experts")
    shared = fields.count_or_zero("num_shared_experts", default=0)
    experts = replace(experts, shared=shared * experts.size, correction="e_score_correction_bias")
    return after_dense_layers(fields, layers, experts)


def _runs(fields: Fields) -> bool:
    """Return False for a router without sigmoid scores, and for a config without `qk_rope_head_dim`.

    mlx-lm's class of Kimi Linear takes 0 for that size; `latent_sizes` needs it above 0.
    """
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


def _k3_renamed(name: str, config: Config) -> str:
    """Return the name of a delta network's tensor, or of attention's gates."""
    return _renamed(name, config).replace(".self_attn.g_proj", ".self_attn.gate_proj")


def _k3_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return Kimi Linear's experts, which may have a width of their own."""
    if fields.values.get("routed_expert_hidden_size") is None:
        return _experts(fields, layers)
    width = fields.count("routed_expert_hidden_size")
    normed = bool(fields.values.get("latent_moe_use_norm"))
    return [experts and replace(experts, latent=width, latent_norm=normed) for experts in _experts(fields, layers)]


def _k3(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the blocks of residual sums, the activation's bounds, and the gates of attention."""
    values = fields.values
    family = decoder.family
    if values.get("mla_use_output_gate"):
        family = replace(family, gates="apart")
    blocks = 0
    if values.get("attn_res_block_size") is not None:
        blocks = fields.count("attn_res_block_size")
    up_bound = None
    if values.get("activation_situ_linear_beta") is not None:
        up_bound = fields.positive("activation_situ_linear_beta")
    bounds = (fields.positive("activation_situ_beta", default=1.0), up_bound)
    return replace(decoder, family=family, block_layers=blocks, soft_bounds=bounds)


def _name_text(config: Config) -> None:
    """Name the text part, which has the model_type of Kimi Linear in its files."""
    text = config.get("text_config")
    if isinstance(text, dict):
        text["model_type"] = "kimi_k3"


def _older_keys(config: Config) -> None:
    """Add `linear_attn_config`, the section of published configs, from the keys of transformers' class."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or config.get("linear_attn_config") is not None:
        return
    config["linear_attn_config"] = {
        "kda_layers": [i for i, kind in enumerate(kinds, 1) if kind == "linear_attention"],
        "full_attn_layers": [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"],
        "num_heads": config.get("linear_num_heads"),
        "head_dim": config.get("linear_head_dim"),
        "short_conv_kernel_size": config.get("linear_conv_kernel_dim", 4),
    }
    config.setdefault("rope_theta", 10000.0)  # mlx-lm's class requires it, and rotates nothing


_NAMES = (
    (".block_sparse_moe.gate.e_score", ".mlp.e_score"),
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)

ROWS = (
    Architecture(
        "kimi_linear",
        Family(),
        add_keys=_older_keys,
        dense_first=True,
        tensor_names=_NAMES,
        rename=_renamed,
        only={"mla_use_nope": True},
        rotates=lambda _fields: False,
        experts=_experts,
        mixer=_mixer,
        recurrent=_recurrent,
        latent=latent_with_eps,
        runs=_runs,
    ),
    Architecture(
        "kimi_k3",
        Family(),
        add_keys=_name_text,
        nests=True,
        tensor_names=(*_NAMES, ("_res.norm_weight", "_res_norm.weight"), ("_res.proj_weight", "_res_proj.weight")),
        rename=_k3_renamed,
        activations=("situ",),
        only={"mla_use_nope": True},
        rotates=lambda _fields: False,
        experts=_k3_experts,
        mixer=_mixer,
        recurrent=_recurrent,
        latent=latent_config,
        runs=_runs,
        biases={},
        complete=_k3,
        class_splits=("tensor", "pipeline"),
    ),
)
