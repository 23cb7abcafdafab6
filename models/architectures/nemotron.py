"""Nemotron-H: blocks of Mamba-2, attention, a feed-forward or experts, each with a norm; Llama Nemotron (NAS).

A layer of Nemotron-H here is a block that mixes tokens, and the feed-forward after it, if there is one. Blocks have
letters: M Mamba-2, * attention, - a feed-forward, E experts.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guards: tests/parity/test_mlx_lm_families.py by logits, and tests/models/architectures/test_nas.py.
"""

import re
from collections.abc import Mapping

from msgspec.structs import replace

from headrace.models.architectures.architecture import BIASES, MIXER, Architecture, Config
from headrace.models.architectures.config import DecoderConfig, ExpertLayers, Family, MixerConfig
from headrace.models.architectures.experts import corrected_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.mixers import mixer_sizes, step_limits
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
_BLOCK = re.compile(r"model\.layers\.(\d{1,9})\.(norm|mixer)\b")  # "model.layers.7.mixer.in_proj.weight", its begin
# By the letter of a block that mixes tokens: the names of its norm and of itself. Others are feed-forwards.
_PARTS = {"M": ("input_layernorm", "mixer"), "*": ("input_layernorm", "self_attn")}
_STACKS = ((".switch_mlp.fc1", ".switch_mlp.up_proj"), (".switch_mlp.fc2", ".switch_mlp.down_proj"))


def _pairs(config: Mapping[str, object]) -> list[str]:
    """Return the letters of each layer, such as "M-", "M" or "*E"; "-" or "E" alone for one that mixes nothing.

    Raises CheckpointError for unknown blocks.
    """
    listed = config.get("hybrid_override_pattern") or config.get("layers_block_type") or config.get("layer_types")
    if not isinstance(listed, list | str) or not all(isinstance(kind, str) for kind in listed):
        raise CheckpointError("config.json: hybrid_override_pattern must list the layers")
    pattern = "".join(_LETTERS.get(kind, kind) for kind in listed)
    if not pattern or pattern.strip("M*-E"):
        raise CheckpointError(f"config.json: hybrid_override_pattern has unknown layers: {pattern!r:.60}")
    # A mixing block joins the feed-forward after it: "M-M*-" is "M-", "M", "*-".
    return re.findall(r"[M*]?[-E]|[M*]", pattern)


def _renamed(name: str, config: Config) -> str:
    """Return the name of a tensor or module by its layer: `mixer`, `self_attn`, `mlp`, and norms."""
    blocks = [(number, letter) for number, letters in enumerate(_pairs(config)) for letter in letters]

    def renamed(match: re.Match[str]) -> str:
        block = int(match[1])
        # A block beyond the pattern keeps its number, which no layer has.
        number, letter = blocks[block] if block < len(blocks) else (block, "M")
        norm, part = _PARTS.get(letter, ("post_attention_layernorm", "mlp"))
        if match[2] == "norm":
            part = norm
        return f"model.layers.{number}.{part}"

    name = _BLOCK.sub(renamed, name)
    for theirs, ours in _STACKS:
        name = name.replace(theirs, ours)
    return name


def _mixer(fields: Fields) -> MixerConfig:
    """Return the Mamba-2 mixer, whose norm is over each group of heads."""
    limits = step_limits(fields, 0.0, float("inf"))
    sizes = mixer_sizes(
        "ssm",
        heads=fields.count("mamba_num_heads"),
        key_heads=fields.count("n_groups", default=1),
        key_dim=fields.count("ssm_state_size"),
        value_dim=fields.count("mamba_head_dim"),
        width=fields.count("conv_kernel", default=4),
    )
    return MixerConfig(sizes, fields.positive("layer_norm_epsilon"), limits, norm_parts=sizes.key_heads)


def _recurrent(fields: Fields, _layers: int) -> list[bool]:
    """Return for each layer whether its block is Mamba-2."""
    return [letters.startswith("M") for letters in _pairs(fields.values)]


def _experts(fields: Fields, _layers: int) -> ExpertLayers:
    """Return the experts of layers with the letter E."""
    pairs = _pairs(fields.values)
    if not any(letters.endswith("E") for letters in pairs):
        return [None] * len(pairs)
    shared = fields.count("moe_shared_expert_intermediate_size") if fields.values.get("n_shared_experts") else 0
    experts = replace(corrected_experts(fields), shared=shared)
    return [experts if letters.endswith("E") else None for letters in pairs]


def _runs(fields: Fields) -> bool:
    """Return False for layers that mix nothing, and for experts of latents."""
    alone = any(letters[0] in "-E" for letters in _pairs(fields.values))
    return not alone and not fields.values.get("moe_latent_size")


# Llama Nemotron: each layer has its number of K/V heads or no attention, and its width of the feed-forward or none
_STEP = 256  # widths are rounded up to a multiple of it


def _blocks(fields: Fields) -> list[tuple[Fields, Fields]]:
    """Return the sections of attention and of the feed-forward of each layer."""
    listed = fields.values.get("block_configs")
    count = fields.count("num_hidden_layers")
    if not isinstance(listed, list) or len(listed) != count or not all(isinstance(block, dict) for block in listed):
        raise CheckpointError(f"config.json: block_configs must list {count} layers")
    return [(Fields(Fields(block).section("attention")), Fields(Fields(block).section("ffn"))) for block in listed]


def _widths(fields: Fields) -> list[int]:
    """Return the width of each layer's feed-forward, 0 without."""
    hidden = fields.count("hidden_size")
    widths = []
    for _, feed_forward in _blocks(fields):
        width = 0
        if not feed_forward.values.get("no_op"):
            # As its class: the factor in six decimals, two thirds of it since a gate is a third matrix, whole steps.
            inner = int(2 * round(feed_forward.positive("ffn_mult"), 6) * hidden / 3)
            width = -(-inner // _STEP) * _STEP
        widths.append(width)
    return widths


def _nas_runs(fields: Fields) -> bool:
    """Return False for single matrices in place of halves of a layer, and for layers or models without any half."""
    blocks = _blocks(fields)
    linear = any(half.values.get("replace_with_linear") for block in blocks for half in block)
    halves = [[not half.values.get("no_op") for half in block] for block in blocks]
    return not linear and all(any(block) for block in halves) and any(attends for attends, _ in halves)


def _nas(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the sizes of each layer. Raises UnsupportedModelError for windows, which mlx-lm's class leaves out."""
    layers = []
    for layer, (attention, _), width in zip(decoder.layers, _blocks(fields), _widths(fields), strict=True):
        for key in ("window_length", "num_sink_tokens", "unshifted_sink"):
            if attention.values.get(key):
                raise UnsupportedModelError(f"config.json: a nemotron-nas with {key} {attention.values[key]!r:.40}")
        kv_heads = 0
        if not attention.values.get("no_op"):
            group = attention.count("n_heads_in_group")
            if decoder.heads % group:
                raise CheckpointError(f"config.json: {decoder.heads} attention heads have no groups of {group}")
            kv_heads = decoder.heads // group
        layers.append(replace(layer, attends=kv_heads > 0, kv_heads=kv_heads, feeds=width > 0, inner=width))
    return replace(decoder, kv_heads=max(layer.kv_heads for layer in layers), layers=tuple(layers))


ROWS = (
    Architecture(
        "nemotron-nas",
        Family(),
        defaults={"rope_theta": 5e5},
        inner_size=lambda fields: max(_widths(fields)) or 1,
        runs=_nas_runs,
        complete=_nas,
    ),
    Architecture(
        "nemotron_h",
        Family(activation="relu2"),
        tensor_names=(("model.embeddings", "model.embed_tokens"), ("model.norm_f", "model.norm")),
        rename=_renamed,
        eps="layer_norm_epsilon",
        activations=("relu2",),
        activation_key="mlp_hidden_act",
        rotates=lambda _fields: False,
        pairs=_pairs,
        experts=_experts,
        mixer=_mixer,
        recurrent=_recurrent,
        biases={**BIASES, "mamba_proj_bias": MIXER},
        runs=_runs,
        plain=(".mlp.gate",),
    ),
)
