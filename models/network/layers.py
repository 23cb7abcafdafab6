"""Weights of the decoder's layers, read from a checkpoint's parameters."""

import mlx.core as mx

from headrace.models.network.config import DecoderConfig, ExpertsConfig, LayerConfig
from headrace.models.network.parameters import Parameters
from headrace.models.network.rope import make_rope
from headrace.runtime.ops import AttentionSpec, LayerWeights, Mixture, Rope, Weight


def read_layers(config: DecoderConfig, parameters: Parameters) -> list[LayerWeights]:
    """Return the weights of all layers; layers of one kind share one rotation."""
    ropes = {
        layer.rope: make_rope(layer.rope, config.head_dim, config.context_length)
        for layer in config.layers
        if layer.rope is not None
    }
    return [
        _layer(config, parameters, f"model.layers.{index}", layer, ropes[layer.rope] if layer.rope else None)
        for index, layer in enumerate(config.layers)
    ]


def _layer(
    config: DecoderConfig, parameters: Parameters, prefix: str, layer: LayerConfig, rope: Rope | None
) -> LayerWeights:
    width, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def norm(name: str) -> mx.array:
        return parameters.vector(f"{prefix}.{name}.weight", width, config.norm_weight_offset)

    attention = _attention(config, parameters, attn, layer, rope)
    input_norm = norm("input_layernorm")
    projections = [(f"{attn}.q_proj", q_rows), (f"{attn}.k_proj", kv_rows), (f"{attn}.v_proj", kv_rows)]
    qkv = parameters.fused(projections, width, f"{attn}.qkv_proj")
    output = parameters.matrix(f"{attn}.o_proj", width, q_rows)
    gate_up, down, mixture = list[Weight](), None, None
    if layer.experts is None:
        halves = [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)]
        gate_up = parameters.fused(halves, width, f"{mlp}.gate_up_proj")
        down = parameters.matrix(f"{mlp}.down_proj", width, inner)
    else:
        mixture = _mixture(config, parameters, mlp, layer.experts)
    return LayerWeights(
        attention=attention,
        input_norm=input_norm,
        qkv=qkv,
        output=output,
        attention_post_norm=norm("post_attention_layernorm") if config.post_norms else None,
        mlp_norm=norm("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"),
        gate_up=gate_up,
        down=down,
        mlp_post_norm=norm("post_feedforward_layernorm") if config.post_norms else None,
        mixture=mixture,
    )


def _attention(
    config: DecoderConfig, parameters: Parameters, prefix: str, layer: LayerConfig, rope: Rope | None
) -> AttentionSpec:
    def head_norm(name: str) -> mx.array | None:
        if not config.qk_norm:
            return None
        return parameters.vector(f"{prefix}.{name}.weight", config.head_dim, config.norm_weight_offset)

    return AttentionSpec(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        rope=rope,
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        norm_eps=config.norm_eps,
        window=layer.window,
        softcap=config.attention_softcap,
        sinks=parameters.vector(f"{prefix}.sinks", config.heads) if config.sinks else None,
    )


def _mixture(config: DecoderConfig, parameters: Parameters, mlp: str, experts: ExpertsConfig) -> Mixture:
    width, stacked, each = config.hidden_size, f"{mlp}.{experts.stacked}", f"{mlp}.{experts.each}"

    def stack(name: str, rows: int, columns: int) -> Weight:
        return parameters.stack(f"{stacked}.{name}", f"{each}.{name}", experts.count, rows, columns)

    return Mixture(
        router=parameters.router(f"{mlp}.{experts.router}", experts.count, width),
        gate=stack("gate_proj", experts.size, width),
        up=stack("up_proj", experts.size, width),
        down=stack("down_proj", width, experts.size),
        active=experts.active,
        normalized=experts.normalized,
    )
