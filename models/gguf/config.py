"""GGUF metadata -> `config.json` and `generation_config.json` in Hugging Face terms.

Key names follow gguf-py's constants and llama.cpp's converter; constants that the converter leaves out because
llama.cpp has them built in (Gemma's sliding window pattern, local RoPE base and query scale) are added here.
"""

from collections.abc import Collection
from typing import Any

from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import rope_scaling
from headrace.models.gguf.vocabulary import SpecialIds
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

Config = dict[str, Any]

# GGUF architecture: Hugging Face model type and class.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}

# Layer counts of the two Gemma sizes that scale queries by the model width per head instead of the head size.
_WIDE_QUERY_SCALE = {"gemma2": 46, "gemma3": 62}
_GEMMA3_PATTERN, _GEMMA3_LOCAL_BASE = 6, 10_000.0
_GEMMA2_WINDOW = 4096

# generation_config.json key: GGUF key of the recommendation.
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def model_config(
    metadata: Metadata, *, vocab_size: int, tensors: Collection[str], rope_factors: list[float] | None
) -> Config:
    """`config.json` without its quantization part.

    `tensors` are the file's tensor names (they tell tied embeddings and biases), `rope_factors` the content of
    `rope_freqs.weight`. Raises `UnsupportedModelError` for an architecture or feature headrace does not run.
    """
    arch = metadata.architecture
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {arch!r} is not supported", hint=f"supported: {', '.join(ARCHITECTURES)}"
        )
    if metadata.integer("{arch}.expert_count", 0):
        raise UnsupportedModelError(f"GGUF architecture {arch!r} with mixture of experts is not supported")
    model_type, model_class = ARCHITECTURES[arch]
    hidden = metadata.integer("{arch}.embedding_length", least=1, most=1 << 20)
    heads = metadata.integer("{arch}.attention.head_count", least=1, most=1 << 16)
    kv_heads = metadata.integer("{arch}.attention.head_count_kv", heads, least=1, most=heads)
    head_dim = _head_dim(metadata, hidden, heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads cannot share {kv_heads} key/value heads")
    config: Config = {
        "architectures": [model_class],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("{arch}.feed_forward_length", least=1, most=1 << 22),
        "num_hidden_layers": metadata.integer("{arch}.block_count", least=1, most=4096),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("{arch}.context_length", least=1),
        "rms_norm_eps": metadata.positive("{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.positive("{arch}.rope.freq_base", 10_000.0),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "gelu_pytorch_tanh" if arch.startswith("gemma") else "silu",
    }
    if scaling := rope_scaling(metadata, head_dim, config["rope_theta"], rope_factors):
        config["rope_scaling"] = scaling
    config |= _particulars(metadata, config, tensors)
    return config


def _head_dim(metadata: Metadata, hidden: int, heads: int) -> int:
    head_dim = metadata.integer("{arch}.attention.key_length", hidden // heads, least=1, most=1 << 16)
    if metadata.integer("{arch}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("key and value heads of different sizes are not supported")
    if metadata.integer("{arch}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError("RoPE over a part of the head is not supported")
    if head_dim % 2:
        raise CheckpointError(f"a head size of {head_dim} cannot be rotated")
    return head_dim


def _particulars(metadata: Metadata, config: Config, tensors: Collection[str]) -> Config:
    """What only some architectures have."""
    arch = metadata.architecture
    if arch == "llama":
        return {
            "attention_bias": "blk.0.attn_output.bias" in tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        }
    if arch == "qwen2":
        return {"attention_bias": True}
    if arch in ("gemma", "qwen3"):
        return {"attention_bias": False}
    wide = config["num_hidden_layers"] == _WIDE_QUERY_SCALE[arch]
    gemma: Config = {
        "attention_bias": False,
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
        ),
        "sliding_window": metadata.integer(
            "{arch}.attention.sliding_window", _GEMMA2_WINDOW if arch == "gemma2" else None, least=1
        ),
    }
    if arch == "gemma2":
        return gemma | {
            "attn_logit_softcapping": metadata.positive("{arch}.attn_logit_softcapping", 50.0),
            "final_logit_softcapping": metadata.positive("{arch}.final_logit_softcapping", 30.0),
        }
    if metadata.number("{arch}.final_logit_softcapping", 0.0):
        raise UnsupportedModelError("Gemma 3 with capped logits is not supported")
    return gemma | {
        "sliding_window_pattern": metadata.integer("{arch}.attention.sliding_window_pattern", _GEMMA3_PATTERN, least=1),
        "rope_local_base_freq": metadata.positive("{arch}.rope.freq_base_swa", _GEMMA3_LOCAL_BASE),
    }


def generation_config(metadata: Metadata, special: SpecialIds) -> Config:
    """End-of-turn ids and, where the file recommends them, sampling settings."""
    config: Config = {"bos_token_id": special.bos, "eos_token_id": special.ends, "pad_token_id": special.pad}
    config = {key: value for key, value in config.items() if value not in (None, [])}
    for name, key in _SAMPLING.items():
        if metadata.has(key):
            config[name] = metadata.integer(key) if name == "top_k" else metadata.number(key)
    if "temperature" in config:
        config["do_sample"] = config["temperature"] > 0
    return config
