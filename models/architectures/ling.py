"""Ling 3: delta networks with bounded decays of each channel (KDA), attention over latents with gates, experts.

Ling 1 and 2 are rows of `deepseek.py`. mlx-lm's class is the reference (`bailing_moe_v3`):
tests/parity/test_mlx_lm_families.py compares logits. GGUF's conversion asks for `delta_layers`, too
(`models.gguf.architectures.delta`): its files state the same period.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture, Config
from headrace.models.architectures.config import ExpertLayers, Family, MixerConfig
from headrace.models.architectures.experts import after_dense_layers, corrected_experts, several_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.latent import latent_with_eps
from headrace.models.architectures.mixers import decay_bound, mixer_sizes

_ATTENTION = re.compile(r"model\.layers\.(\d{1,9})\.attention\.(.+)")  # "model.layers.3.attention.o_proj.weight"
# Modules of a delta network and of attention over latents -> their names here
_KDA = {"o_proj": "out_proj", "o_norm": "norm", "f_proj": "a_proj"}
_LATENT = {"dense": "o_proj", "g_proj": "gate_proj"}


def delta_layers(layers: int, group: int) -> list[bool]:
    """Return the layers with a delta network: all but the last of each whole group of `group`.

    Layers after the last whole group have attention, as the last of each.
    """
    grouped = layers // group * group
    return [i < grouped and (i + 1) % group != 0 for i in range(layers)]


def _recurrent(fields: Fields, layers: int) -> list[bool]:
    """Return `delta_layers`, by the config's size of a group."""
    return delta_layers(layers, fields.count("layer_group_size", default=4))


def _renamed(name: str, config: Mapping[str, Any]) -> str:
    """Return the name of a tensor here. The checkpoint calls a layer's delta network "attention", too."""
    match = _ATTENTION.fullmatch(name)
    if match is None:
        return name
    fields = Fields(config)
    layers = _recurrent(fields, fields.count("num_hidden_layers"))
    layer = int(match[1])
    is_delta = layer < len(layers) and layers[layer]  # a prediction head's layer comes after all others
    module, dot, rest = match[2].partition(".")
    at = "self_attn"
    names = _LATENT
    if is_delta:
        at = "mixer"
        names = _KDA
    return f"model.layers.{layer}.{at}.{names.get(module, module)}{dot}{rest}"


def _mixer(fields: Fields) -> MixerConfig:
    """Return the delta network, whose decays are bounded by the absolute value of `kda_lower_bound`."""
    heads = fields.count("num_attention_heads")
    size = fields.count("head_dim", default=128)
    width = fields.count("short_conv_kernel_size", default=4)
    bound = decay_bound(fields, "kda_lower_bound", -5.0)
    sizes = mixer_sizes("kda", heads, key_heads=heads, key_dim=size, value_dim=size, width=width)
    return MixerConfig(sizes, fields.positive("rms_norm_eps", default=1e-6), apart=True, decay_bound=bound)


def _experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer. Missing keys have the defaults of mlx-lm's class."""
    stated = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, **fields.values}
    experts = corrected_experts(Fields(stated), "num_experts")
    size = fields.count("moe_shared_expert_intermediate_size", default=512)
    experts = replace(
        experts,
        normalized=True,
        correction="gate.expert_bias",
        excludes=True,
        shared=size * fields.count("num_shared_experts", default=1),
    )
    return after_dense_layers(Fields({**stated, "moe_layer_freq": 1}), layers, experts)


def _runs(fields: Fields) -> bool:
    """Return False for variants that mlx-lm's class refuses, and for one expert a token: its weight is 1 there."""
    required = ("rope_interleave", "no_kda_lora", "kda_safe_gate")
    return all(fields.values.get(key, True) for key in required) and several_experts(fields)


def _name_ling3(config: Config) -> None:
    """Give Ling 3 the model_type of its class: its config has that of other hybrids."""
    if config.get("architectures") == ["BailingMoeV3ForCausalLM"]:
        config["model_type"] = "bailing_moe_v3"


ROWS = (
    Architecture("bailing_hybrid", add_keys=_name_ling3),
    Architecture(
        "bailing_moe_v3",
        Family(interleaved=True, gates="head_sigmoids"),
        tensor_names=((".word_embeddings.", ".embed_tokens."),),
        rename=_renamed,
        context=131072,
        theta=6e6,
        rotated=1.0,
        experts=_experts,
        mixer=_mixer,
        recurrent=_recurrent,
        latent=latent_with_eps,
        runs=_runs,
        biases={},
        plain=(
            ".mlp.gate", ".q_a_proj", ".q_b_proj", ".kv_a_proj_with_mqa", ".embed_q", ".unembed_out", ".mixer.b_proj",
            ".self_attn.q_proj", ".self_attn.gate_proj", "lm_head", "embed_tokens",
        ),
    ),
)  # fmt: skip
