"""Tiny random checkpoints of every architecture that headrace decodes, as model directories.

Shapes are awkward (odd head counts, head_dim other than hidden / heads), so that transposed or mis-split tensors fail.
There is no tokenizer.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.checkpoint.text_part import text_part
from headrace.models.network.decoder import Decoder
from headrace.models.network.make_decoder import make_decoder
from headrace.models.network.parameters import Parameters
from headrace.runtime.metrics.cost import FLOAT_MODES
from headrace.runtime.ops import Ops, native, reference
from headrace.runtime.ops.kv_format import KVFormat

VOCAB = 96
HIDDEN = 64
INNER = 128
LAYERS = 3
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# name -> what it adds to the base config
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama3-scaled": {"model_type": "llama", "rope_scaling": _LLAMA3, "rope_theta": 5e5},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "mistral": {"model_type": "mistral", "num_hidden_layers": 2, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "head_dim": HIDDEN // HEADS},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-yarn": {"model_type": "qwen3", "rope_scaling": _YARN},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": 96,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 16,
        "rope_theta": 150000.0,
        "rope_scaling": _YARN,
        "tie_word_embeddings": False,
    },
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 24, "sliding_window": 4096},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
        "rope_theta": 1e6,
    },
    "phi3": {"model_type": "phi3", "head_dim": HIDDEN // HEADS, "tie_word_embeddings": False},
    "phi3-partial": {"model_type": "phi3", "head_dim": HIDDEN // HEADS, "partial_rotary_factor": 0.75},
}


# Windows shorter than the prompts of our tests, where mlx-lm's classes attend to everything.
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral-window": {**VARIANTS["mistral"], "sliding_window": 9},
    "gemma2-window": {**VARIANTS["gemma2"], "sliding_window": 12},
    "qwen2-window": {**VARIANTS["qwen2"], "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    "qwen3-window": {**VARIANTS["qwen3"], "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2},
    "phi3-window": {**VARIANTS["phi3"], "sliding_window": 11},
    "llama-layer-types": {
        **VARIANTS["llama"],
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
EVERY = (*VARIANTS, *WINDOWED)


def config_of(variant: str) -> dict[str, Any]:
    """Return the config.json of a variant."""
    return {**_BASE, **(VARIANTS | WINDOWED)[variant]}


def write_model(
    directory: Path,
    variant: str,
    *,
    dtype: mx.Dtype = mx.float32,
    seed: int = 0,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write a variant with random weights of `dtype` and config changes; returns the directory."""
    config = {**config_of(variant), **(changes or {})}
    tensors = random_tensors(config, seed)
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), {k: v.astype(dtype) for k, v in tensors.items()})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def quantize_model(source: Path, target: Path, layers: dict[str, Any] | None = None, mode: str = "affine") -> Path:
    """Quantize every projection to 4 bits in groups of 32, or in another mode, in MLX's directory format.

    Mixtures of residual sums (Kimi K3) and norms of heads (RWKV-7) stay plain, as in MLX's conversions. `layers`
    overrides single modules.
    """
    config = json.loads((source / "config.json").read_text())
    bits, group = FLOAT_MODES.get(mode, (4, 32))
    section: dict[str, Any] = {"group_size": group, "bits": bits, "mode": mode, **(layers or {})}
    tensors: dict[str, mx.array] = {}
    loaded = mx.load(str(source / "model.safetensors"))
    assert isinstance(loaded, dict)
    for name, array in loaded.items():
        module = name.removesuffix(".weight")
        is_plain = section.get(module) is False or module.endswith(("_res_proj", ".g_norm"))
        if array.ndim < 2 or not name.endswith(".weight") or array.shape[-1] % group or is_plain:
            tensors[name] = array
            continue
        kind = section.get(module, section)
        packed, scales, *biases = mx.quantize(
            array, group_size=kind["group_size"], bits=kind["bits"], mode=kind.get("mode", "affine")
        )
        tensors |= {f"{module}.weight": packed, f"{module}.scales": scales}
        if biases:
            tensors[f"{module}.biases"] = biases[0]
    target.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    (target / "config.json").write_text(json.dumps({**config, "quantization": section}))
    return target


def load_decoder(
    directory: Path, ops: Ops | None = None, dtype: mx.Dtype = mx.float32, kv: KVFormat | None = None
) -> Decoder:
    """Load a directory written here. ops: by default stock MLX, or the kernels, which alone keep recurrent state."""
    checkpoint = open_checkpoint(directory)
    config = decoder_config(text_part(checkpoint).config)
    assert config is not None
    ops = ops or (native if any(layer.mixer for layer in config.layers) else reference)
    return make_decoder(config, Parameters(checkpoint, ops, dtype), kv)


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    """Return random weights, scaled for distinct logits without saturation."""
    key = mx.random.key(seed)
    width = config["hidden_size"]
    inner = config["intermediate_size"]
    dim = config["head_dim"]
    q_rows = config["num_attention_heads"] * dim
    kv_rows = config["num_key_value_heads"] * dim
    harmony = config["model_type"] == "gpt_oss"
    gemma = config["model_type"].startswith("gemma")
    biased = config["model_type"] == "qwen2"
    tensors: dict[str, mx.array] = {}
    stack: tuple[int, ...]

    def add(name: str, *shape: int) -> None:
        nonlocal key
        key, sub = mx.random.split(key)
        noise = mx.random.normal(shape, key=sub)
        if "norm" in name:
            tensors[name] = 0.1 * noise + (0.0 if gemma else 1.0)
        else:
            tensors[name] = noise * (shape[-1] ** -0.5)

    add("model.embed_tokens.weight", config["vocab_size"], width)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", config["vocab_size"], width)
    add("model.norm.weight", width)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        fused = config["model_type"] == "phi3"
        apart = [("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)]
        for name, rows in [("qkv_proj", q_rows + 2 * kv_rows)] if fused else apart:
            add(f"{at}.self_attn.{name}.weight", rows, width)
            if biased or harmony or config.get("attention_bias"):
                add(f"{at}.self_attn.{name}.bias", rows)
        add(f"{at}.self_attn.o_proj.weight", width, q_rows)
        if harmony or config.get("attention_bias"):
            add(f"{at}.self_attn.o_proj.bias", width)
        stack = ()
        size = inner
        mlp = f"{at}.mlp"
        if "num_experts" in config and i not in config["mlp_only_layers"]:
            stack = (config["num_experts"],)
            size = config["moe_intermediate_size"]
            mlp = f"{at}.mlp.switch_mlp"
            add(f"{at}.mlp.gate.weight", *stack, width)
        if harmony:
            stack = (config["num_local_experts"],)
            mlp = f"{at}.mlp.experts"
            add(f"{at}.mlp.router.weight", *stack, width)
            add(f"{at}.mlp.router.bias", *stack)
            add(f"{at}.self_attn.sinks", config["num_attention_heads"])
        halves = [("gate_proj", size), ("up_proj", size)]
        for name, rows, columns in [
            *((name, rows, width) for name, rows in ([("gate_up_proj", 2 * size)] if fused else halves)),
            ("down_proj", width, size),
        ]:
            add(f"{mlp}.{name}.weight", *stack, rows, columns)
            if config.get("mlp_bias") or harmony:
                add(f"{mlp}.{name}.bias", *stack, rows)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            add(f"{at}.{name}.weight", width)
        if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
            add(f"{at}.self_attn.q_norm.weight", dim)
            add(f"{at}.self_attn.k_norm.weight", dim)
    return tensors
