"""Granite 3 and 4, MiniCPM: multipliers of everything, Mamba-2 layers, experts next to a dense feed-forward."""

from dataclasses import replace

from headrace.models.architectures.architecture import BIASES, MIXER, Architecture, Config
from headrace.models.architectures.config import DecoderConfig, ExpertLayers, ExpertsConfig, Family
from headrace.models.architectures.experts import count_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.mixers import mamba2


def _multiplied(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the multipliers. The residual stream is stored divided by `residual_multiplier`."""
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
    residual = fields.positive("scale_depth") / len(decoder.layers) ** 0.5
    return replace(
        decoder,
        norm_eps=decoder.norm_eps / residual**2,
        embedding_scale=fields.positive("scale_emb") / residual,
        logit_scale=fields.count("dim_model_base") / decoder.hidden_size,
    )


def _moe_experts(fields: Fields, layers: int) -> ExpertLayers:
    counts = count_experts(fields, "num_local_experts")
    size = fields.count("intermediate_size")
    return [ExpertsConfig(*counts, size, normalized=True, router="router.layer")] * layers


def _hybrid_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return experts next to a dense feed-forward, which has the modules of layers without experts."""
    if not fields.values.get("num_local_experts"):
        return [None] * layers
    shared = fields.count("shared_intermediate_size")
    return [experts and replace(experts, shared=shared, shared_at="") for experts in _moe_experts(fields, layers)]


def _older_keys(config: Config) -> None:
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
    Architecture("minicpm", Family(), theta=1e6, complete=_minicpm, only={"num_experts": 0}),
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
