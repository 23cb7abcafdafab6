"""Gemma 1 to 4, and 3n.

Gemma 3n and 4 have K/V of earlier layers, and inputs of single layers. Gemma 3n has several residual streams, and
feed-forwards with few active gates; Gemma 4 has two head sizes, rotation of a part of a head, and experts next to a
dense feed-forward. Missing keys have the defaults of mlx-lm's class.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

import re
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture, Config
from headrace.models.architectures.config import (
    AltUpConfig,
    DecoderConfig,
    ExpertLayers,
    ExpertsConfig,
    Family,
    LayerConfig,
    NormNames,
    RopeConfig,
)
from headrace.models.architectures.experts import count_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import full_rope, ropes_by_kind
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

AROUND = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_FULL = "full_attention"
_SLIDING = "sliding_attention"
# Tensors of keys and values, such as "model.layers.30.self_attn.k_proj.weight"
_OF_KEYS = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.(k_proj|v_proj|k_norm)\..*")
# Defaults of transformers' class, which multimodal configs omit from the section of their text part
_GEMMA3 = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}  # fmt: skip

_GEMMA3N = {
    "vocab_size": 262400, "vocab_size_per_layer_input": 262144, "hidden_size": 2048,
    "hidden_size_per_layer_input": 256, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768, "sliding_window": 512, "final_logit_softcapping": 30.0, "altup_active_idx": 0,
    "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_num_inputs": 4, "num_kv_shared_layers": 15,
    "laurel_rank": 64, "rope_local_base_freq": 1e4, "rope_theta": 1e6,
}  # fmt: skip


def overflows_float16(model_type: object) -> bool:
    """Return whether a model's residual stream may be too large for float16: any Gemma's."""
    return str(model_type).startswith("gemma")


def _gemma(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the scales of scores and embeddings, and the one that norms are stored without."""
    return replace(
        decoder,
        attention_scale=fields.positive("query_pre_attn_scalar", default=decoder.head_dim) ** -0.5,
        embedding_scale=decoder.hidden_size**0.5,
        norm_weight_offset=1.0,
    )


def _gemma2(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the caps of scores and logits. A key that is null turns a cap off; a missing one has its default."""
    return replace(
        _gemma(fields, decoder),
        attention_softcap=fields.optional("attn_logit_softcapping", 50.0),
        logit_softcap=fields.optional("final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add Gemma's scales, and a cap of logits where the config states one."""
    softcap = None
    if fields.values.get("final_logit_softcapping") is not None:
        softcap = fields.positive("final_logit_softcapping")
    return replace(_gemma(fields, decoder), embedding_scale_in_bfloat16=True, logit_softcap=softcap)


def _gemma3_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return (rotation of full-attention layers, rotation of sliding layers), which has another base and no scaling."""
    local = Fields(Fields(fields.section("rope_parameters")).section(_SLIDING))
    theta = local.positive("rope_theta", default=fields.positive("rope_local_base_freq", default=1e4))
    return full_rope(fields, architecture), RopeConfig(theta)


def _gemma3n_keys(config: Config) -> None:
    """State the lists that transformers' class has by default."""
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        return
    if config.get("layer_types") is None:
        config["layer_types"] = [_SLIDING if (layer + 1) % 5 else _FULL for layer in range(count)]
    if config.get("activation_sparsity_pattern") is None:
        sparse = 10 if count > 10 else 0
        config["activation_sparsity_pattern"] = [0.95] * sparse + [0.0] * (count - sparse)


def _gemma3n_runs(fields: Fields) -> bool:
    """Return False for updates that begin at another stream, or that scale no output."""
    return fields.values.get("altup_active_idx") == 0 and bool(fields.values.get("altup_correct_scale"))


def _gemma3n_sizes(fields: Fields) -> list[int]:
    """Return the size of each layer's feed-forward, which the config states as a number or a list."""
    key = "intermediate_size"
    layers = fields.count("num_hidden_layers")
    if isinstance(fields.values.get(key), list):
        return [entry.count(key) for entry in fields.per_layer(key, layers)]
    return [fields.count(key)] * layers


def _gemma3n(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the scales, the cap of logits, the sizes and sources of layers, their own inputs, and the streams."""
    count = len(decoder.layers)
    shares = fields.required_list("activation_sparsity_pattern", count)
    sources = _kv_sources(decoder.layers, count - fields.count_or_zero("num_kv_shared_layers"))
    layers = tuple(
        replace(
            layer,
            inner=size,
            cutoff=_cutoff(share),
            source=source,
            projects="qkv" if source is None else "q",
        )
        for layer, size, share, source in zip(decoder.layers, _gemma3n_sizes(fields), shares, sources, strict=True)
    )
    bound = None
    if fields.values.get("altup_coef_clip") is not None:
        bound = fields.positive("altup_coef_clip")
    return replace(
        decoder,
        attention_scale=1.0,
        embedding_scale=decoder.hidden_size**0.5,
        logit_softcap=fields.optional("final_logit_softcapping", 30.0),
        layers=layers,
        input_size=fields.count("hidden_size_per_layer_input"),
        input_vocab=fields.count("vocab_size_per_layer_input"),
        altup=AltUpConfig(fields.count("altup_num_inputs"), fields.count("laurel_rank"), bound),
    )


def _cutoff(share: object) -> float | None:
    """Return how many standard deviations above the mean so large a share of normal numbers ends; None for none."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise CheckpointError(f"config.json: activation_sparsity_pattern must list shares below 1, not {share!r:.60}")
    if not share:
        return None
    return NormalDist().inv_cdf(share)


def _gemma4(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the scales, the cap of logits, the sizes of single layers and their own inputs."""
    size, rows = _gemma4_inputs(fields)
    return replace(
        decoder,
        attention_scale=1.0,
        embedding_scale=decoder.hidden_size**0.5,
        logit_softcap=fields.optional("final_logit_softcapping", 30.0),
        layers=_gemma4_layers(fields, decoder.layers),
        input_size=size,
        input_vocab=rows,
    )


def _gemma4_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts next to the dense feed-forward of every layer, if the model has some."""
    if not fields.values.get("enable_moe_block"):
        return [None] * layers
    counts = count_experts(fields, "num_experts", "top_k_experts")
    size = fields.count("moe_intermediate_size")
    return [ExpertsConfig(*counts, size=size, normalized=True, branch=True)] * layers


def _reads_earlier_kv(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether this tensor is of keys or values in a layer that reads those of an earlier one."""
    match = _OF_KEYS.fullmatch(name)
    if match is None:
        return False
    layers = config.get("num_hidden_layers")
    shared = config.get("num_kv_shared_layers", 20)
    return type(layers) is int and type(shared) is int and 0 < layers - shared <= int(match[1])


def _gemma4_layers(fields: Fields, layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Return the layers with their sizes and the sources of their K/V. Raises CheckpointError where there is none."""
    values = fields.values
    count = len(layers)
    if values.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError("config.json: a Gemma 4 that attends in both directions does not generate")
    if values.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise UnsupportedModelError(f"config.json: a Gemma 4 with the activation {values['hidden_activation']!r:.60}")
    first = count - fields.count_or_zero("num_kv_shared_layers", default=20)  # that reads an earlier layer's K/V
    inner = fields.count("intermediate_size")
    kv_heads = fields.count("num_key_value_heads", default=1)
    sliding = {"kv_heads": kv_heads, "head_dim": fields.count("head_dim", default=256), "projects": "qkv"}
    full = {**sliding, "head_dim": fields.count("global_head_dim", default=512)}
    if values.get("attention_k_eq_v"):  # keys are values, too
        full |= {"kv_heads": fields.count("num_global_key_value_heads", default=kv_heads), "projects": "qk"}
    sharing: dict[str, object] = {"projects": "q"}  # what differs in layers without K/V of their own
    if values.get("use_double_wide_mlp", True):
        sharing["inner"] = inner * 2
    sized: list[LayerConfig] = []
    for layer, source in zip(layers, _kv_sources(layers, first), strict=True):
        sizes: dict[str, Any] = {"inner": inner, "source": source}
        if layer.window is None:
            sizes |= full
        else:
            sizes |= sliding
        if source is not None:
            sizes |= sharing
        sized.append(replace(layer, **sizes))
    return tuple(sized)


def _kv_sources(layers: Sequence[LayerConfig], first: int) -> list[int | None]:
    """Return the layer whose K/V each one reads, from layer `first` on the last of its kind before; None for its own.

    Raises CheckpointError where there is none.
    """
    sources: list[int | None] = []
    newest: dict[bool, int] = {}  # whether it slides -> the last layer with K/V of its own
    for number, layer in enumerate(layers):
        slides = layer.window is not None
        if not number >= first > 0:
            newest[slides] = number
            sources.append(None)
            continue
        if slides not in newest:
            raise CheckpointError(f"config.json: no layer before {first} has K/V for layer {number}")
        sources.append(newest[slides])
    return sources


def _gemma4_inputs(fields: Fields) -> tuple[int, int]:
    """Return the size of each layer's own input and the rows of its table; (0, 0) without."""
    size = fields.values.get("hidden_size_per_layer_input", 256)
    if not size:
        return 0, 0
    rows = fields.count("vocab_size_per_layer_input", default=262144)
    vocabulary = fields.count("vocab_size")
    if rows < vocabulary:
        raise CheckpointError(f"config.json: {rows} inputs of single layers are too few for {vocabulary} tokens")
    return fields.count("hidden_size_per_layer_input", default=256), rows


def _gemma4_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return (rotation of full-attention layers, rotation of sliding layers)."""
    if not fields.section("rope_parameters"):
        return RopeConfig(1e6, "proportional", None, 0.25), RopeConfig(1e4)
    return ropes_by_kind(fields, architecture)


def _full_attention_keys(config: Config) -> None:
    """Add the head size and count of full-attention layers, which `per_layer_config` has by layer."""
    layers = config.get("per_layer_config")
    kinds = config.get("layer_types")
    if not isinstance(layers, dict):
        return
    known = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    if not isinstance(kinds, list) or not all(isinstance(entry, dict) for entry in layers.values()):
        raise CheckpointError("config.json: per_layer_config does not fit layer_types")
    # Each key has one value, and it is stated for exactly the full-attention layers, such as {"5": {"head_dim": 512}}.
    full = {str(number) for number, kind in enumerate(kinds) if kind == _FULL}
    for key in {key for entry in layers.values() for key in entry}:
        stated = {number: entry[key] for number, entry in layers.items() if key in entry}
        values = list(stated.values())
        if key not in known or stated.keys() != full or any(value != values[0] for value in values):
            raise CheckpointError(f"config.json: per_layer_config with {key!r:.40} for these layers is not supported")
        config.setdefault(known[key], values[0])


ROWS = (
    Architecture("gemma", Family(activation="gelu"), context=8192, tied=True, activation_key=None, complete=_gemma),
    Architecture(
        "gemma2",
        Family(AROUND, activation="gelu"),
        defaults={"sliding_window": 4096, "query_pre_attn_scalar": 256},
        context=8192,
        tied=True,
        activation_key=None,
        sliding="even",
        complete=_gemma2,
    ),
    Architecture("gemma3", nests=True),
    Architecture(
        "gemma3_text",
        Family(AROUND, activation="gelu", qk_norm="head"),
        defaults={"sliding_window": 4096, "query_pre_attn_scalar": 256},
        nested_defaults=_GEMMA3,
        context=131072,
        period_key="sliding_window_pattern",
        tied=True,
        activation_key=None,
        theta=1e6,
        ropes=_gemma3_ropes,
        sliding="period",
        period=6,
        complete=_gemma3,
    ),
    Architecture("gemma3n", nests=True),
    Architecture(
        "gemma3n_text",
        Family(AROUND, activation="gelu", qk_norm="head", v_norm=True),
        nested_defaults=_GEMMA3N,
        add_keys=_gemma3n_keys,
        outer=lambda _config: "gemma3n",
        is_unread=_reads_earlier_kv,
        tied=True,
        activation_key="hidden_activation",
        activations=("gelu_pytorch_tanh",),
        theta=1e6,
        ropes=_gemma3_ropes,
        inner_size=lambda fields: _gemma3n_sizes(fields)[0],
        runs=_gemma3n_runs,
        complete=_gemma3n,
        biases={},
    ),
    Architecture("gemma4", nests=True, outer_keys=("vocab_size",)),
    Architecture("gemma4_unified", nests=True, outer_keys=("vocab_size",)),
    Architecture(
        "gemma4_text",
        Family(AROUND, activation="gelu", qk_norm="head", v_norm=True, scaled=True),
        defaults={"sliding_window": 512, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256},
        add_keys=_full_attention_keys,
        tensor_names=(
            (".router.proj.", ".mlp.gate."),
            (".router.scale", ".mlp.router_norm.weight"),
            (".router.per_expert_scale", ".mlp.expert_scale"),
            (".experts.switch_glu.", ".mlp.switch_mlp."),
            (".experts.gate_up_proj", ".mlp.switch_mlp.input_linear.weight"),
            (".experts.down_proj", ".mlp.switch_mlp.down_proj.weight"),
        ),
        is_unread=_reads_earlier_kv,
        tied=True,
        activation_key=None,
        proportional=True,
        ropes=_gemma4_ropes,
        sliding="period",
        period=5,
        experts=_gemma4_experts,
        complete=_gemma4,
    ),
    Architecture(
        "gemma4_unified_text",
        same_as="gemma4_text",
        constants={"hidden_size_per_layer_input": 0},
    ),
)
