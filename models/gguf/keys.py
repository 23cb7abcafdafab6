"""Table of the metadata keys that are entries of config.json, and entries that follow from several keys.

Rows of `gguf.architectures` name entries in their `keys`. A key that is read counts as understood (`config`).

Guard: tests/models/gguf/test_config.py.
"""

from typing import Any, Literal

from msgspec import Struct

from headrace.models.gguf.architecture import Config, Entries
from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import UnsupportedModelError

# Largest values that are believed, far above those of any model: sizes of arrays are products of them
HEADS = 1 << 16  # also of sizes of a head
WIDTH = 1 << 22
_EXPERTS = 1 << 14

_WINDOWED = "{arch}.attention.sliding_window_pattern"  # a flag for each layer, or the period of those without


class Key(Struct, frozen=True):
    """A key of the metadata, below the architecture's name, and the values that it may have."""

    name: str
    kind: Literal["integer", "number", "positive", "flag"] = "integer"
    default: Any = None  # None: the file must have the key
    minimum: int = 1
    maximum: int = 2**31 - 1
    zero: Any = 0  # entry for the value 0
    otherwise: str = ""  # key of files that lack this one

    def read(self, metadata: Metadata) -> Any:
        """Return the entry. Raises CheckpointError for a missing key or another value."""
        key = f"{{arch}}.{self.name}"
        other = f"{{arch}}.{self.otherwise}"
        if not metadata.has(key) and metadata.has(other):
            key = other
        if self.kind == "flag":
            return metadata.flag(key, self.default)
        if self.kind == "integer":
            return metadata.integer(key, self.default, minimum=self.minimum, maximum=self.maximum) or self.zero
        read = metadata.positive if self.kind == "positive" else metadata.number
        return read(key, self.default) or self.zero


def _width(name: str, otherwise: str = "") -> Key:
    """Return the key of a width in numbers."""
    return Key(name, maximum=WIDTH, otherwise=otherwise)


_DENSE_LAYERS = Key("leading_dense_block_count", default=0, minimum=0)
_INNER = _width("feed_forward_length", "expert_feed_forward_length")
_SHARED = _width("expert_shared_feed_forward_length", "expert_feed_forward_length")
_SHARED_EXPERTS = Key("expert_shared_count", default=0, minimum=0, maximum=1 << 10)
_NORMALIZED = Key("expert_weights_norm", "flag", default=False)
_EXPERT_SCALE = Key("expert_weights_scale", "number", default=0.0, zero=1.0)
_TAPS = Key("ssm.conv_kernel", maximum=64)
_GROUPS = Key("ssm.group_count", maximum=HEADS)
_STATE = Key("ssm.state_size", maximum=HEADS)
_STEP_RANK = Key("ssm.time_step_rank", maximum=HEADS)

KEYS = {
    "intermediate_size": _INNER,
    "dense_intermediate_size": _INNER,
    "intermediate_size_mlp": _INNER,
    "moe_shared_expert_intermediate_size": _SHARED,
    "prefix_dense_intermediate_size": _INNER,
    "share_expert_dim": _SHARED,
    "shared_expert_intermediate_size": _SHARED,
    # Experts
    "first_k_dense_replace": _DENSE_LAYERS,
    "moe_layer_start_index": _DENSE_LAYERS,
    "num_dense_layers": _DENSE_LAYERS,
    "interleave_moe_layer_step": Key("interleave_moe_layer_step"),
    "moe_layer_interval": Key("interleave_moe_layer_step", default=1),
    "moe_num_shared_experts": _SHARED_EXPERTS,
    "n_shared_experts": Key("expert_shared_count", default=0, minimum=0, maximum=1 << 10, zero=None),
    "num_shared_experts": _SHARED_EXPERTS,
    "routed_expert_hidden_size": Key("expert_latent_length", default=0, minimum=0, maximum=WIDTH, zero=None),
    "moe_renormalize": _NORMALIZED,
    "norm_expert_weight": _NORMALIZED,
    "norm_topk_prob": _NORMALIZED,
    "route_norm": _NORMALIZED,
    "moe_routed_scaling_factor": _EXPERT_SCALE,
    "moe_router_scaling_factor": _EXPERT_SCALE,
    "route_scale": _EXPERT_SCALE,
    "routed_scaling_factor": _EXPERT_SCALE,
    "n_group": Key("expert_group_count", default=0, minimum=0, zero=1),
    "topk_group": Key("expert_group_used_count", default=0, minimum=0, zero=1),
    # Attention
    "index_block_size": Key("attention.indexer.block_size"),
    "index_head_dim": Key("attention.indexer.key_length", maximum=HEADS),
    "index_n_heads": Key("attention.indexer.head_count", maximum=HEADS),
    "index_local_blocks": Key("attention.indexer.local_blocks", default=1, minimum=0),
    "index_topk": Key("attention.indexer.top_k"),
    "index_topk_blocks": Key("attention.indexer.top_k"),
    "kv_lora_rank": Key("attention.kv_lora_rank", maximum=1 << 20),
    "q_lora_rank": Key("attention.q_lora_rank", default=0, minimum=0, maximum=1 << 20, zero=None),
    "rope_local_base_freq": Key("rope.freq_base_swa", "positive", default=10_000.0),
    "sliding_window": Key("attention.sliding_window"),
    "sliding_window_size": Key("attention.sliding_window"),
    # Recurrent state; of Mamba-2 and of gated delta networks, the rank of steps is the number of heads
    "conv_L_cache": Key("shortconv.l_cache", maximum=64),
    "conv_kernel": _TAPS,
    "linear_conv_kernel_dim": _TAPS,
    "mamba_d_conv": _TAPS,
    "short_conv_kernel_size": _TAPS,
    "linear_key_head_dim": _STATE,
    "mamba_d_state": _STATE,
    "ssm_state_size": _STATE,
    "state_size": _STATE,
    "linear_num_key_heads": _GROUPS,
    "mamba_n_groups": _GROUPS,
    "n_groups": _GROUPS,
    "linear_num_value_heads": _STEP_RANK,
    "mamba_dt_rank": _STEP_RANK,
    "mamba_n_heads": _STEP_RANK,
    "mamba_num_heads": _STEP_RANK,
    "num_heads": _STEP_RANK,
    "time_step_rank": _STEP_RANK,
    "decay_low_rank_dim": Key("attention.decay_lora_rank", maximum=HEADS),
    "a_low_rank_dim": Key("attention.iclr_lora_rank", maximum=HEADS),
    "gate_low_rank_dim": Key("attention.gate_lora_rank", maximum=HEADS),
    "v_low_rank_dim": Key("attention.value_residual_mix_lora_rank", maximum=HEADS),
    "full_attention_interval": Key("full_attention_interval", default=4),
    "attn_res_block_size": Key("attn_res.block_size", default=0, minimum=0, zero=None),
    # Factors
    "activation_situ_beta": Key("activation.situ_beta", "positive"),
    "activation_situ_linear_beta": Key("activation.situ_linear_beta", "number", default=0.0, zero=None),
    "attention_multiplier": Key("attention.scale", "positive"),
    "embedding_multiplier": Key("embedding_scale", "positive", default=1.0),
    "residual_multiplier": Key("residual_scale", "positive", default=1.0),
    "logits_scaling": Key("logit_scale", "positive", default=1.0),
    "logit_scale": Key("logit_scale", "number", zero=1.0),
    "attn_logit_softcapping": Key("attn_logit_softcapping", "positive", default=50.0),
    "final_logit_softcapping": Key("final_logit_softcapping", "positive", default=30.0),
}
"""Entries of config.json by their names in the classes. Widths are in numbers."""

ROUTED = (
    "n_shared_experts", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "first_k_dense_replace",
    "intermediate_size",
)  # fmt: skip
"""DeepSeek's way to choose experts, after dense first layers."""

SECTIONS = ("rope.dimension_sections",)
"""Keys of multimodal RoPE, which change nothing: positions of text are equal in all sections."""


def layers_of(metadata: Metadata) -> int:
    """Return the number of layers, those for multi-token prediction included."""
    return metadata.integer("{arch}.block_count", minimum=1, maximum=4096)


def mixture(metadata: Metadata, names: tuple[str, str, str]) -> Entries:
    """Return the entries `names` for the number of experts, those for each token, and their width."""
    count, active, width = names
    experts = metadata.integer("{arch}.expert_count", minimum=1, maximum=_EXPERTS)
    return {
        count: experts,
        active: metadata.integer("{arch}.expert_used_count", minimum=1, maximum=experts),
        width: _width("expert_feed_forward_length", "feed_forward_length").read(metadata),
    }


def has_experts(metadata: Metadata) -> bool:
    """Return whether a file is of a mixture of experts."""
    return metadata.integer("{arch}.expert_count", 0, maximum=_EXPERTS) > 0


# Values of `expert_gating_func`, as llama.cpp numbers them
SOFTMAX = 1
SIGMOID = 2


def gating_of(metadata: Metadata, default: int) -> int:
    """Return how experts are chosen, by `SOFTMAX` or by `SIGMOID` of their scores. default: without the key."""
    return metadata.integer("{arch}.expert_gating_func", 0) or default


def check_sigmoid(metadata: Metadata) -> None:
    """Raise UnsupportedModelError if experts are not chosen by sigmoids of their scores."""
    if gating_of(metadata, SIGMOID) != SIGMOID:
        raise UnsupportedModelError(f"a GGUF {metadata.architecture!r} with experts by softmax is not supported")


def rotated_part(metadata: Metadata, head_dim: int) -> int:
    """Return how many numbers of each head turn."""
    return metadata.integer("{arch}.rope.dimension_count", head_dim, minimum=1, maximum=head_dim)


def require_whole_heads(config: Config) -> None:
    """Raise UnsupportedModelError unless the heads together are as wide as the model, as some classes take them."""
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise UnsupportedModelError(f"heads of {config['head_dim']} are not supported in a {config['model_type']}")


def window_flags(metadata: Metadata, layers: int, period: int) -> list[bool]:
    """Return whether each layer has a window. period: every n-th layer has none, unless the file states it."""
    if metadata.is_list(_WINDOWED):
        return metadata.flags(_WINDOWED, layers)
    period = metadata.integer(_WINDOWED, period, maximum=1 << 16)
    return [period == 0 or (layer + 1) % period != 0 for layer in range(layers)]


def window_period(metadata: Metadata, layers: int, period: int) -> int:
    """Return n if every n-th layer has no window. Raises UnsupportedModelError for another order of layers."""
    flags = window_flags(metadata, layers, period)
    if all(flags):
        return layers + 1
    stated = flags.index(False) + 1
    if flags != [(layer + 1) % stated != 0 for layer in range(layers)]:
        raise UnsupportedModelError(f"a GGUF {metadata.architecture!r} with windows in these layers is not supported")
    return stated


def windows(metadata: Metadata, layers: int, period: int) -> Entries:
    """Return the entries for windows in `layers` layers, of which every n-th sees everything."""
    flags = window_flags(metadata, layers_of(metadata), period)
    return {
        "sliding_window": KEYS["sliding_window"].read(metadata),
        "layer_types": [layer_type(slides) for slides in flags[:layers]],
    }


def layer_type(slides: bool) -> str:
    """Return the word of config.json for a layer with or without a window."""
    return "sliding_attention" if slides else "full_attention"
