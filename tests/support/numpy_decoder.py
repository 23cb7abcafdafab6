"""A third opinion: the decoder once more, in plain numpy and float64, with nothing reused and nothing fast.

Written from the architectures' published definitions, for the configs of `tests/support/tiny.py`; every position is
recomputed from the token ids. T = tokens, E = hidden size, D = head dimension, V = vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def logits(config: Mapping[str, Any], weights: Mapping[str, Array], tokens: list[int]) -> Array:
    """Logits of every position, (T, V)."""
    gemma = config["model_type"].startswith("gemma")
    eps = config["rms_norm_eps"]

    def norm(x: Array, name: str) -> Array:
        weight = weights[f"{name}.weight"] + (1.0 if gemma else 0.0)
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight

    def linear(x: Array, name: str) -> Array:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def attention(x: Array, layer: int) -> Array:
        at = f"model.layers.{layer}.self_attn"
        dim = config["head_dim"]
        if f"{at}.qkv_proj.weight" in weights:  # Phi-3: one matrix, in this order
            heads = config["num_attention_heads"]
            shared = config["num_key_value_heads"]
            qkv = linear(x, f"{at}.qkv_proj").reshape(len(tokens), -1, dim)
            q, k, v = np.split(qkv, [heads, heads + shared], axis=1)
        else:
            q, k, v = (linear(x, f"{at}.{name}_proj").reshape(len(tokens), -1, dim) for name in "qkv")
        if f"{at}.q_norm.weight" in weights:
            q = norm(q, f"{at}.q_norm")
            k = norm(k, f"{at}.k_norm")
        if rotates(config, layer):
            q = rotate(q, config, layer)
            k = rotate(k, config, layer)
        shared = q.shape[1] // k.shape[1]
        mask = visible(len(tokens), window(config, layer))
        seen = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // shared].T * config.get("query_pre_attn_scalar", dim) ** -0.5
            if config["model_type"] == "gemma2":
                scores = 50.0 * np.tanh(scores / 50.0)
            scores = np.where(mask, scores, -np.inf)
            sink = weights[f"{at}.sinks"][head] if f"{at}.sinks" in weights else -np.inf
            top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
            shares = np.exp(scores - top)
            seen.append(shares / (shares.sum(axis=-1, keepdims=True) + np.exp(sink - top)) @ v[:, head // shared])
        return linear(np.concatenate(seen, axis=-1), f"{at}.o_proj")

    def experts(x: Array, at: str, stacked: str, router: str) -> Array:
        scores = linear(x, f"{at}.{router}")
        out = np.zeros_like(x)
        for t, row in enumerate(scores):
            chosen = np.argsort(-row)[: config["num_experts_per_tok"]]
            shares = np.exp(row - row.max())
            shares /= shares[chosen].sum() if config.get("norm_topk_prob", True) else shares.sum()
            for e in chosen:
                gate, up = (one(x[t], f"{at}.{stacked}.{name}_proj", e) for name in ("gate", "up"))
                inner = clamped(gate, up) if config["model_type"] == "gpt_oss" else silu(gate) * up
                out[t] += shares[e] * one(inner, f"{at}.{stacked}.down_proj", e)
        return out

    def one(x: Array, name: str, expert: int) -> Array:
        bias = weights.get(f"{name}.bias")
        return weights[f"{name}.weight"][expert] @ x + (0.0 if bias is None else bias[expert])

    def feed_forward(x: Array, layer: int) -> Array:
        at = f"model.layers.{layer}.mlp"
        if f"{at}.switch_mlp.up_proj.weight" in weights:
            return experts(x, at, "switch_mlp", "gate")
        if f"{at}.experts.up_proj.weight" in weights:
            return experts(x, at, "experts", "router")
        if f"{at}.gate_up_proj.weight" in weights:
            gate, up = np.split(linear(x, f"{at}.gate_up_proj"), 2, axis=-1)
        else:
            gate = linear(x, f"{at}.gate_proj")
            up = linear(x, f"{at}.up_proj")
        return linear((gelu(gate) if gemma else silu(gate)) * up, f"{at}.down_proj")

    x = weights["model.embed_tokens.weight"][tokens] * (math.sqrt(config["hidden_size"]) if gemma else 1.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        if gemma:  # "sandwich": a norm before and behind each half
            x = x + norm(attention(norm(x, f"{at}.input_layernorm"), layer), f"{at}.post_attention_layernorm")
            inner = feed_forward(norm(x, f"{at}.pre_feedforward_layernorm"), layer)
            x = x + norm(inner, f"{at}.post_feedforward_layernorm")
        else:
            x = x + attention(norm(x, f"{at}.input_layernorm"), layer)
            x = x + feed_forward(norm(x, f"{at}.post_attention_layernorm"), layer)
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    out = norm(x, "model.norm") @ weights[f"{head}.weight"].T
    return 30.0 * np.tanh(out / 30.0) if config["model_type"] == "gemma2" else out


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def clamped(gate: Array, up: Array) -> Array:
    """GPT-OSS's."""
    gate = np.minimum(gate, 7.0)
    up = np.clip(up, -7.0, 7.0)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def gelu(x: Array) -> Array:
    """The tanh form Gemma was trained with."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def visible(length: int, span: int | None) -> NDArray[np.bool_]:
    """(T, T): query i sees key j when j <= i and, with a window, i - j < window."""
    ago = np.arange(length)[:, None] - np.arange(length)[None]
    return (ago >= 0) & (ago < (span or length))


def slides(config: Mapping[str, Any], layer: int) -> bool:
    match config["model_type"]:
        case "mistral" | "phi3":
            return True
        case "gemma2" | "gpt_oss":
            return layer % 2 == 0
        case "gemma3_text":
            return (layer + 1) % config["sliding_window_pattern"] != 0
        case "qwen2" | "qwen3":
            return bool(config.get("use_sliding_window")) and layer >= config["max_window_layers"]
    return "layer_types" in config and config["layer_types"][layer] == "sliding_attention"


def window(config: Mapping[str, Any], layer: int) -> int | None:
    return config.get("sliding_window") if slides(config, layer) else None


def rotates(config: Mapping[str, Any], layer: int) -> bool:
    return config["model_type"] != "smollm3" or (layer + 1) % config["no_rope_layer_interval"] != 0


def rotate(x: Array, config: Mapping[str, Any], layer: int) -> Array:
    """Rotary position embedding, halves paired. x (T, heads, D)."""
    local = config["model_type"] == "gemma3_text" and slides(config, layer)
    theta = 10000.0 if local else config["rope_theta"]
    scaling = {} if local else config.get("rope_scaling") or {}
    turning = int(x.shape[-1] * config.get("partial_rotary_factor", 1))
    x, still = x[..., :turning], x[..., turning:]
    speed, amplitude = angular_speed(theta, turning, scaling)
    angle = np.arange(x.shape[0])[:, None] * speed[None]  # (T, D / 2)
    cos, sin = (amplitude * f(angle)[:, None] for f in (np.cos, np.sin))
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, still], axis=-1)


def angular_speed(theta: float, dim: int, scaling: Mapping[str, Any]) -> tuple[Array, float]:
    """(radians per position of each pair, amplitude), with the scaling of Llama 3.1 or YaRN or a plain factor."""
    speed = theta ** (-np.arange(0, dim, 2) / dim)
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor", 1.0)
    trained = scaling.get("original_max_position_embeddings", 0)
    if kind == "linear":
        return speed / factor, 1.0
    if kind == "llama3":
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        keep = np.clip((trained * speed / (2 * math.pi) - low) / (high - low), 0, 1)
        return speed * (keep + (1 - keep) / factor), 1.0
    if kind == "yarn":
        first, last = (dim * math.log(trained / (t * 2 * math.pi)) / (2 * math.log(theta)) for t in (32, 1))
        first = max(math.floor(first), 0)
        last = min(math.ceil(last), dim - 1)
        keep = 1 - np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0, 1)
        return speed * (keep + (1 - keep) / factor), 0.1 * math.log(factor) + 1
    return speed, 1.0
