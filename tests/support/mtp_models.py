"""Tiny random checkpoints with multi-token prediction heads, as publishers write them, and their heads in NumPy."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from headrace.models.architectures.families import ARCHITECTURES

Array = np.ndarray[Any, np.dtype[Any]]
VOCAB = 64
WIDTH = 32
INNER = 64
EXPERTS = 4
EPS = 1e-5
# Architectures of our decoder whose checkpoints may have a head
WITH_HEADS = [name for name, row in ARCHITECTURES.items() if row.family is not None and row.head is not None]
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": EPS, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
_MIXTURE = {
    "moe_intermediate_size": 64, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "moe_layer_freq": 1, "attention_bias": False,
}  # fmt: skip
_DELTA = {
    "head_dim": 16, "full_attention_interval": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
_GATED = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 64, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **_BASE,
        **_MIXTURE,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_scaling": None,
    },
    "glm4_moe_lite": {**_BASE, **_MIXTURE, **_LATENT, "rope_scaling": None},
    "deepseek_v3": {**_BASE, **_MIXTURE, **_LATENT},
    "mimo": {**_BASE, "num_nextn_predict_layers": 1},
    "qwen3_5": {**_BASE, **_DELTA},
    "qwen3_5_moe": {**_BASE, **_DELTA, **_GATED},
    "qwen3_next": {**_BASE, **_DELTA, **_GATED},
}
# Prefix of the head's tensors, and the names of its two norms, projection and last norm.
_LAYERED = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
_QWEN = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
_NESTED = ("qwen3_5", "qwen3_5_moe")
PREFIX = {**dict.fromkeys(_LAYERED, "model.layers.2."), "mimo": "model.mtp_layers.0.", **dict.fromkeys(_QWEN, "mtp.")}
LAYER = {**dict.fromkeys((*_LAYERED, "mimo"), ""), **dict.fromkeys(_QWEN, "layers.0.")}
BODY = {kind: "model.language_model." if kind in _NESTED else "model." for kind in CONFIGS}
_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
ENDS = {
    **dict.fromkeys(_LAYERED, _DEEPSEEK),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    **dict.fromkeys(_QWEN, ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}


def write_model(directory: Path, kind: str, seed: int = 0, head: bool = True) -> dict[str, Array]:
    """Write config and weights of a family; return the tensors in float64. head: with the head's."""
    config = CONFIGS[kind]
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        BODY[kind] + "embed_tokens.weight": (VOCAB, WIDTH),
        "lm_head.weight": (VOCAB, WIDTH),
        BODY[kind] + "norm.weight": (WIDTH,),
    }
    prefixes = [f"{BODY[kind]}layers.{i}." for i in range(config["num_hidden_layers"])]
    for number, prefix in enumerate([*prefixes, PREFIX[kind] + LAYER[kind]] if head else prefixes):
        sparse = "num_experts_per_tok" in config and number >= config.get("first_k_dense_replace", 0)
        linear = "linear_conv_kernel_dim" in config and number % 2 == 0 and number < config["num_hidden_layers"]
        layer = _layer(kind, config, sparse=sparse, linear=linear)
        shapes |= {prefix + name: shape for name, shape in layer.items()}
    if head:
        embedding_norm, hidden_norm, projection, norm = (PREFIX[kind] + name for name in ENDS[kind])
        shapes |= {f"{name}.weight": (WIDTH,) for name in (embedding_norm, hidden_norm, norm)}
        shapes[f"{projection}.weight"] = (WIDTH, 2 * WIDTH)
        if ENDS[kind] is _DEEPSEEK:  # publishers add copies
            shapes |= {
                PREFIX[kind] + name: (VOCAB, WIDTH) for name in ("embed_tokens.weight", "shared_head.head.weight")
            }
    tensors: dict[str, Array] = {}
    for name, shape in shapes.items():
        noise = random.normal(size=shape)
        scale = 1.0 if "embed" in name else shape[-1] ** -0.5
        centre = 0 if kind in _QWEN and "linear_attn" not in name else 1
        values = centre + 0.2 * noise if "norm" in name else 0.2 * noise if name.endswith("bias") else scale * noise
        tensors[name] = values.astype(np.float32).astype(np.float64)
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: mx.array(values.astype(np.float32)) for name, values in tensors.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, metadata={"format": "pt"})
    nested = {"text_config": {**config, "model_type": f"{kind}_text"}}
    stated = {"model_type": kind} | (nested if kind in _NESTED else config)
    (directory / "config.json").write_text(json.dumps(stated))
    return tensors


def _layer(kind: str, config: dict[str, Any], *, sparse: bool, linear: bool) -> dict[str, tuple[int, ...]]:
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    width = WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if linear:
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        mixed = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
        gates = config["linear_num_value_heads"]
        rows = {"qkv": mixed, "z": values, "b": gates, "a": gates}
        rows = {"qkvz": mixed + values, "ba": 2 * gates} if kind == "qwen3_next" else rows
        attention: dict[str, tuple[int, ...]] = {
            **{f"in_proj_{name}.weight": (count, width) for name, count in rows.items()},
            "conv1d.weight": (mixed, 1, 4), "A_log": (gates,), "dt_bias": (gates,), "out_proj.weight": (width, values),
            "norm.weight": (config["linear_value_head_dim"],),
        }  # fmt: skip
    elif "kv_lora_rank" in config:
        rank = config["kv_lora_rank"]
        q_rank = config["q_lora_rank"]
        rope = config["qk_rope_head_dim"]
        nope = config["qk_nope_head_dim"]
        v_dim = config["v_head_dim"]
        attention = {
            "q_a_proj.weight": (q_rank, width), "q_a_layernorm.weight": (q_rank,),
            "q_b_proj.weight": (heads * (nope + rope), q_rank), "kv_a_proj_with_mqa.weight": (rank + rope, width),
            "kv_a_layernorm.weight": (rank,), "kv_b_proj.weight": (heads * (nope + v_dim), rank),
            "o_proj.weight": (width, heads * v_dim),
        }  # fmt: skip
    else:
        dim = config.get("head_dim", width // heads)
        gated = 2 if kind in _QWEN else 1
        sizes = {"q_proj": gated * heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        attention = {f"{name}.weight": (rows, width) for name, rows in sizes.items()}
        attention |= {f"{name}.bias": (rows,) for name, rows in sizes.items() if gated == 1}
        attention["o_proj.weight"] = (width, heads * dim)
        if config.get("use_qk_norm") or gated == 2:
            attention |= {"q_norm.weight": (dim,), "k_norm.weight": (dim,)}
    shapes |= {f"{'linear_attn' if linear else 'self_attn'}.{name}": shape for name, shape in attention.items()}

    def mlp(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
        sides = {f"{prefix}.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        return {**sides, f"{prefix}.down_proj.weight": (width, inner)}

    if not sparse:
        return shapes | mlp("mlp", INNER)
    for expert in range(EXPERTS):
        shapes |= mlp(f"mlp.experts.{expert}", config["moe_intermediate_size"])
    shapes["mlp.gate.weight"] = (EXPERTS, width)
    if kind in _QWEN:
        shapes["mlp.shared_expert_gate.weight"] = (1, width)
        return shapes | mlp("mlp.shared_expert", config["shared_expert_intermediate_size"])
    shapes["mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    return shapes | mlp("mlp.shared_experts", config["moe_intermediate_size"])


def head_logits(kind: str, tensors: dict[str, Array], tokens: list[int], hidden: Array) -> tuple[Array, Array]:
    """Return hidden states (T, E) and logits (T, V) of a head for hidden states (T, E) and the tokens behind them."""
    config, own = CONFIGS[kind], {
        name.removeprefix(PREFIX[kind]).removeprefix(LAYER[kind]): values + ("norm" in name and kind in _QWEN)
        for name, values in tensors.items() if name.startswith(PREFIX[kind])
    }  # fmt: skip
    embedding_norm, hidden_norm, projection, norm = (own[f"{name}.weight"] for name in ENDS[kind])
    parts = [_rms(tensors[BODY[kind] + "embed_tokens.weight"][tokens], embedding_norm), _rms(hidden, hidden_norm)]
    x = np.concatenate(parts[::-1] if kind == "mimo" else parts, axis=-1) @ projection.T
    normed = _rms(x, own["input_layernorm.weight"])
    x = x + (_latent_attention if "kv_lora_rank" in config else _attention)(config, own, normed)
    normed = _rms(x, own["post_attention_layernorm.weight"])
    x = x + (_experts(config, own, normed) if "mlp.gate.weight" in own else _mlp(own, "mlp", normed))
    x = _rms(x, norm)
    return x, x @ tensors["lm_head.weight"].T


def _rms(x: Array, weight: Array, eps: float = EPS) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _rotate(x: Array, dims: int, base: float, interleaved: bool) -> Array:
    """x (T, H, D), of which the first `dims` dimensions rotate."""
    angles = np.arange(len(x))[:, None, None] * base ** (-np.arange(0, dims, 2) / dims)
    cos = np.cos(angles)
    sin = np.sin(angles)
    turned = x[..., :dims]
    if interleaved:
        first = turned[..., ::2]
        second = turned[..., 1::2]
        both = np.stack([first * cos - second * sin, first * sin + second * cos], axis=-1).reshape(turned.shape)
    else:
        first, second = np.split(turned, 2, axis=-1)
        both = np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return np.concatenate([both, x[..., dims:]], axis=-1)


def _attend(q: Array, k: Array, v: Array, scale: float) -> Array:
    """q (T, H, D), k, v (T, Hkv, D) -> (T, H * D)."""
    k, v = (np.repeat(array, q.shape[1] // array.shape[1], axis=1) for array in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * scale
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", shares, v).reshape(len(q), -1)


def _attention(config: dict[str, Any], own: dict[str, Array], x: Array) -> Array:
    dim = config.get("head_dim", WIDTH // config["num_attention_heads"])
    q, k, v = (
        (x @ own[f"self_attn.{name}.weight"].T + own.get(f"self_attn.{name}.bias", 0.0)).reshape(len(x), -1, dim)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    gate = np.full((len(x), 1), np.inf)
    if "full_attention_interval" in config:  # each head's query, then its gate
        q, gate = np.split(q.reshape(len(x), -1, 2 * dim), 2, axis=-1)
        gate = gate.reshape(len(x), -1)
    if "self_attn.q_norm.weight" in own:
        q = _rms(q, own["self_attn.q_norm.weight"])
        k = _rms(k, own["self_attn.k_norm.weight"])
    dims = int(dim * config.get("partial_rotary_factor", 1.0))
    q, k = (_rotate(array, dims, config["rope_theta"], interleaved=False) for array in (q, k))
    return (_attend(q, k, v, dim**-0.5) / (1 + np.exp(-gate))) @ own["self_attn.o_proj.weight"].T


def _latent_attention(config: dict[str, Any], own: dict[str, Array], x: Array) -> Array:
    heads = config["num_attention_heads"]
    nope = config["qk_nope_head_dim"]
    rope = config["qk_rope_head_dim"]
    own = {name.removeprefix("self_attn."): values for name, values in own.items()}
    q = _rms(x @ own["q_a_proj.weight"].T, own["q_a_layernorm.weight"], 1e-6) @ own["q_b_proj.weight"].T
    q = q.reshape(len(x), heads, nope + rope)
    latent, k_rope = np.split(x @ own["kv_a_proj_with_mqa.weight"].T, [config["kv_lora_rank"]], axis=-1)
    kv = _rms(latent, own["kv_a_layernorm.weight"], 1e-6) @ own["kv_b_proj.weight"].T
    k, v = np.split(kv.reshape(len(x), heads, -1), [nope], axis=-1)

    def rotated(array: Array) -> Array:
        return _rotate(array, rope, config["rope_theta"], interleaved=True)

    q = np.concatenate([q[..., :nope], rotated(q[..., nope:])], axis=-1)
    k = np.concatenate([k, np.repeat(rotated(k_rope[:, None]), heads, axis=1)], axis=-1)
    return _attend(q, k, v, (nope + rope) ** -0.5) @ own["o_proj.weight"].T


def _mlp(own: dict[str, Array], prefix: str, x: Array) -> Array:
    gate, up = (x @ own[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ own[f"{prefix}.down_proj.weight"].T


def _experts(config: dict[str, Any], own: dict[str, Array], x: Array) -> Array:
    logits = x @ own["mlp.gate.weight"].T
    if "mlp.shared_expert_gate.weight" in own:
        gate = 1 / (1 + np.exp(-x @ own["mlp.shared_expert_gate.weight"].T))
        scores = np.exp(logits)
        out = gate * _mlp(own, "mlp.shared_expert", x)
    else:
        scores = 1 / (1 + np.exp(-logits))
        out = _mlp(own, "mlp.shared_experts", x)
    for row, score in enumerate(scores):
        ranks = score + own.get("mlp.gate.e_score_correction_bias", 0.0)
        order = np.argsort(-ranks)[: config["num_experts_per_tok"]]
        shares = score[order] / score[order].sum() * config.get("routed_scaling_factor", 1.0)
        for expert, share in zip(order, shares, strict=True):
            out[row] += share * _mlp(own, f"mlp.experts.{expert}", x[row : row + 1])[0]
    return out
