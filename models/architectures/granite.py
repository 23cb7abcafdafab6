"""Granite 3, 4 and SWA, MiniCPM 1 to 3: multipliers of everything, Mamba-2 layers, experts next to a feed-forward.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import BIASES, MIXER, Architecture, Config
from headrace.models.architectures.config import (
    DecoderConfig,
    ExpertLayers,
    Family,
    LatentConfig,
    RopeConfig,
)
from headrace.models.architectures.experts import equal_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.latent import latent_sizes
from headrace.models.architectures.layers import full_rope, with_sinks
from headrace.models.architectures.mixers import mamba2
from headrace.runtime.config.typed import as_list
from headrace.runtime.errors import UnsupportedModelError


def _multiplied(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the multipliers. The residual stream is stored divided by `residual_multiplier`.

    Then the layers add the outputs of attention and feed-forward without a factor. Embeddings are divided once, and a
    norm's result is the same with an epsilon that is divided by the square.
    """
    residual = fields.positive("residual_multiplier", default=1.0)
    return replace(
        decoder,
        attention_scale=fields.positive("attention_multiplier"),
        norm_eps=decoder.norm_eps / residual**2,
        embedding_scale=fields.positive("embedding_multiplier", default=1.0) / residual,
        logit_scale=1 / fields.positive("logits_scaling", default=1.0),
    )


def _minicpm(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add MiniCPM's multipliers. mlx-lm's class leaves tied logits unscaled, the model's own code scales them."""
    # MiniCPM's training settings were found with small models, and carried over to large ones by these factors
    # (arXiv:2404.06395). Outputs of attention and feed-forward shrink with the square root of the depth, since a sum of
    # n independent ones grows with the root of n. Logits shrink with the width, over that of the small models.
    residual = fields.positive("scale_depth") / len(decoder.layers) ** 0.5
    return replace(
        decoder,
        norm_eps=decoder.norm_eps / residual**2,
        embedding_scale=fields.positive("scale_emb") / residual,
        logit_scale=fields.count("dim_model_base") / decoder.hidden_size,
    )


def _minicpm3_keys(config: Config) -> None:
    """State unscaled rotation as LongRoPE with factors of one, which is all its class takes."""
    rotated = config.get("qk_rope_head_dim")  # dimensions of a head
    longest = config.get("max_position_embeddings")
    if config.get("rope_scaling") is None and type(rotated) is int and type(longest) is int:
        ones = [1.0] * (rotated // 2)
        factors = {"short_factor": ones, "long_factor": ones, "original_max_position_embeddings": longest}
        config["rope_scaling"] = {"type": "longrope", "rope_type": "longrope", **factors}


def _minicpm3_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation. Its amplitude follows from the context alone, whatever the section states."""
    rope = full_rope(fields, architecture, older_names=("su",))
    unread = ("factor", "attention_factor")
    stated = (rope.scaling or {}).items()
    rope = RopeConfig(rope.theta, rope.kind, {key: value for key, value in stated if key not in unread})
    return rope, rope


def _minicpm3_latent(fields: Fields) -> LatentConfig:
    """Return the sizes. Heads of values are as wide as the model together, and norms have mlx-lm's epsilon."""
    value = fields.count("hidden_size") // fields.count("num_attention_heads")
    return latent_sizes(Fields({**fields.values, "v_head_dim": value}), 1e-5)


def _minicpm3_runs(fields: Fields) -> bool:
    """Return False for other scalings than LongRoPE, which its class does not tell from it."""
    scaling = fields.section("rope_scaling")
    return (scaling.get("rope_type") or scaling.get("type")) in ("longrope", "su")


def _swa_keys(config: Config) -> None:
    """State the layers of transformers' default, and those without rotation: the ones with a theta of 0."""
    count = config.get("num_hidden_layers")
    if type(count) is not int:
        count = 0
    if config.get("layer_types") is None:
        config["layer_types"] = ["sliding_attention" if layer % 4 else "full_attention" for layer in range(count)]
    thetas = config.get("layer_rope_theta")
    if not isinstance(thetas, list):
        thetas = [1] * count
    # Despite the name of the key, 1 stands for a layer that rotates.
    config["no_rope_layers"] = [int(bool(theta)) for theta in thetas]


def _swa_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation, by the theta of all layers that have one."""
    rope = full_rope(fields, architecture)
    key = "layer_rope_theta"
    stated = as_list(fields.values.get(key))
    thetas = {Fields({key: theta}).positive(key) for theta in stated if theta != 0}
    if not thetas or thetas == {rope.theta}:
        return rope, rope
    if len(thetas) > 1 or rope.scaling is not None:
        raise UnsupportedModelError("config.json: a granite_swa with several rotations is not supported")
    rope = RopeConfig(thetas.pop())
    return rope, rope


def _swa(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add Granite's multipliers, and sinks to every layer: a learned score for each head in the softmax."""
    return with_sinks(_multiplied(fields, decoder))


_moe_experts = equal_experts("num_local_experts", normalized=True, router="router.layer")


def _hybrid_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return experts next to a dense feed-forward, which has the modules of layers without experts."""
    if not fields.values.get("num_local_experts"):
        return [None] * layers
    shared = fields.count("shared_intermediate_size")
    return [experts and replace(experts, shared=shared, shared_at="") for experts in _moe_experts(fields, layers)]


def _older_keys(config: Config) -> None:
    """State layer kinds and positions of transformers 5 in the older words that mlx-lm's class reads.

    `uses_positions` also reads the older word for no positions, "nope".
    """
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    if isinstance(kinds := config.get("layer_types"), list):
        config["layer_types"] = [names.get(kind, kind) for kind in kinds]
    if config.get("position_embedding_type", "rope") is None:
        config["position_embedding_type"] = "nope"
    if config.get("num_local_experts") == 0 and config.get("shared_intermediate_size") is not None:
        config["intermediate_size"] = config["shared_intermediate_size"]  # the width of the only MLP there is


_EXPERT_NAMES = (
    (".block_sparse_moe.input_linear.", ".mlp.switch_mlp.input_linear."),
    (".block_sparse_moe.output_linear.", ".mlp.switch_mlp.down_proj."),
    (".block_sparse_moe.", ".mlp."),
)

ROWS = (
    Architecture("granite", Family(), tied=True, complete=_multiplied),
    Architecture(
        "granite_swa",
        Family(),
        defaults={"attention_multiplier": 1.0, "sliding_window": 128},
        add_keys=_swa_keys,
        tied=True,
        ropes=_swa_ropes,
        position_free="listed",
        complete=_swa,
    ),
    # theta: the default of mlx-lm's class
    Architecture("minicpm", Family(), theta=1e6, complete=_minicpm, only={"num_experts": 0}),
    Architecture(
        "minicpm3",
        Family(),
        defaults={"rope_theta": 1e4},
        add_keys=_minicpm3_keys,
        tied=True,
        rotated=1.0,
        ropes=_minicpm3_ropes,
        latent=_minicpm3_latent,
        runs=_minicpm3_runs,
        biases={"attention_bias": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj")},
        complete=_minicpm,
    ),
    Architecture(
        "granitemoe", Family(), tensor_names=_EXPERT_NAMES, tied=True, experts=_moe_experts, complete=_multiplied
    ),
    Architecture(
        "granitemoehybrid",
        Family(),
        add_keys=_older_keys,
        tensor_names=(
            (".mamba.", ".mixer."),
            (".shared_mlp.input_linear", ".mlp.gate_up_proj"),
            (".shared_mlp.output_linear", ".mlp.down_proj"),
            *_EXPERT_NAMES,
        ),
        tied=True,
        experts=_hybrid_experts,
        mixer=mamba2,
        biases={**BIASES, "mamba_proj_bias": MIXER},
        complete=_multiplied,
    ),
)
