"""`config.json` and `generation_config.json` in Hugging Face terms from GGUF metadata.

Key names follow gguf-py's constants and llama.cpp's converter. Constants that are built into llama.cpp (Gemma's sliding
window pattern, local RoPE base and query scale) are added here.
"""

from collections.abc import Callable
from typing import Any

from headrace.models.gguf.architectures import ARCHITECTURES, Architecture, find, has_experts
from headrace.models.gguf.layered import LAYERED, Contents
from headrace.models.gguf.layered.parts import Shapes
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import LongFactors, long_rope, rope_scaling
from headrace.models.gguf.unread_keys import refuse_unread
from headrace.models.gguf.vocabulary import SpecialIds
from headrace.models.gguf.windows import window_flags, window_period
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

Config = dict[str, Any]

# Layer counts of the two Gemma sizes that scale queries by the width per head instead of the head size.
_GEMMA2_WIDE = 46
_GEMMA3_WIDE = 62
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_BASE = 10_000.0
_GEMMA2_WINDOW = 4096
_EXAONE4_WINDOWED = 64  # layers of the size with sliding windows

# generation_config.json key: GGUF key.
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def model_config(
    metadata: Metadata,
    *,
    vocab_size: int,
    tensors: Shapes,
    rope_factors: list[float] | None,
    long_factors: LongFactors | None = None,
) -> Config:
    """Return `config.json` without its quantization section.

    tensors: shapes in the file, from which tied embeddings and biases follow. rope_factors: content of
    `rope_freqs.weight`. long_factors: content of LongRoPE's two tensors. Raises UnsupportedModelError for an
    unsupported architecture or feature.
    """
    layered = LAYERED.get(metadata.architecture)
    if layered is not None:
        config = layered.complete(layered.config(metadata, Contents(tensors, rope_factors)))
    else:
        config = _uniform(metadata, vocab_size, tensors, rope_factors, long_factors)
    refuse_unread(metadata)
    return config


def _uniform(
    metadata: Metadata,
    vocab_size: int,
    tensors: Shapes,
    rope_factors: list[float] | None,
    long_factors: LongFactors | None,
) -> Config:
    """Return the config of an architecture with equal layers."""
    arch = metadata.architecture
    experts = metadata.integer("{arch}.expert_count", 0, maximum=1 << 14)
    row = find(arch, experts=experts)
    if row is None:
        raise UnsupportedModelError(
            f"GGUF architecture {arch!r} is not supported",
            hint="look for an MLX or safetensors version; supported GGUF architectures: "
            + ", ".join([*ARCHITECTURES, *LAYERED]),
        )
    if bool(experts) != has_experts(row):
        what = "with" if experts else "without"
        raise UnsupportedModelError(f"GGUF architecture {arch!r} {what} mixture of experts is not supported")
    hidden = metadata.integer("{arch}.embedding_length", minimum=1, maximum=1 << 20)
    heads = metadata.integer("{arch}.attention.head_count", minimum=1, maximum=1 << 16)
    kv_heads = metadata.integer("{arch}.attention.head_count_kv", heads, minimum=1, maximum=heads)
    head_dim, rotated = _head_dim(metadata, hidden, heads, row)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads cannot share {kv_heads} key/value heads")
    config: Config = {
        "architectures": [row.model_class],
        "model_type": row.model_type,
        "hidden_size": hidden,
        "intermediate_size": _feed_forward_size(metadata),
        "num_hidden_layers": metadata.integer("{arch}.block_count", minimum=1, maximum=4096),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("{arch}.context_length", minimum=1),
        row.epsilon[1]: metadata.positive(f"{{arch}}.{row.epsilon[0]}"),
        "rope_theta": metadata.positive("{arch}.rope.freq_base", 10_000.0),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "gelu_pytorch_tanh" if row.gemma else "silu",
    }
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if long_factors is not None:
        config |= long_rope(metadata, config["max_position_embeddings"], rotated, long_factors)
    elif scaling := rope_scaling(metadata, rotated, config["rope_theta"], rope_factors):
        config["rope_scaling"] = scaling
    return config | _ENTRIES[row.model_type](metadata, config, tensors)


def _layer_type(slides: bool) -> str:
    return "sliding_attention" if slides else "full_attention"


def _feed_forward_size(metadata: Metadata) -> int:
    """Return the feed-forward width; files of mixtures may state only that of an expert."""
    expert = metadata.integer("{arch}.expert_feed_forward_length", 0, maximum=1 << 22)
    return metadata.integer("{arch}.feed_forward_length", expert or None, minimum=1, maximum=1 << 22)


def _head_dim(metadata: Metadata, hidden: int, heads: int, row: Architecture) -> tuple[int, int]:
    """Return (head size, rotated part of it)."""
    head_dim = metadata.integer("{arch}.attention.key_length", hidden // heads, minimum=1, maximum=1 << 16)
    if metadata.integer("{arch}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("key and value heads of different sizes are not supported")
    if head_dim * heads != hidden and not row.any_head_dim:
        raise UnsupportedModelError(
            f"heads of {head_dim} are not supported in a {row.model_type} of {heads} and width {hidden}"
        )
    rotated = metadata.integer("{arch}.rope.dimension_count", head_dim, minimum=1, maximum=head_dim)
    if rotated != head_dim and not row.partial_rope:
        raise UnsupportedModelError("RoPE over a part of the head is not supported")
    if rotated % 2:
        raise CheckpointError(f"a head size of {rotated} cannot be rotated")
    return head_dim, rotated


def _llama(_metadata: Metadata, _config: Config, tensors: Shapes) -> Config:
    return {
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }


def _mixtral(metadata: Metadata, config: Config, tensors: Shapes) -> Config:
    return _llama(metadata, config, tensors) | _experts(metadata, "num_local_experts")


def _smollm3(metadata: Metadata, config: Config, tensors: Shapes) -> Config:
    return _llama(metadata, config, tensors) | {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _phi3(metadata: Metadata, _config: Config, _tensors: Shapes) -> Config:
    window = metadata.integer("{arch}.attention.sliding_window", 0)
    return {"attention_bias": False, **({"sliding_window": window} if window else {})}


def _qwen_experts(metadata: Metadata, config: Config) -> Config:
    width = metadata.integer("{arch}.expert_feed_forward_length", config["intermediate_size"], minimum=1)
    mixture = _experts(metadata, "num_experts")
    return mixture | {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": width}


def _qwen2_moe(metadata: Metadata, config: Config, _tensors: Shapes) -> Config:
    shared = metadata.integer("{arch}.expert_shared_feed_forward_length", config["intermediate_size"], minimum=1)
    mixture = _qwen_experts(metadata, config)
    return mixture | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def _qwen3_moe(metadata: Metadata, config: Config, _tensors: Shapes) -> Config:
    return _qwen_experts(metadata, config) | {"attention_bias": False, "norm_topk_prob": True}


def _glm4(_metadata: Metadata, config: Config, tensors: Shapes) -> Config:
    share = config.get("partial_rotary_factor", 1.0)
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "partial_rotary_factor": share}


def _olmo2(metadata: Metadata, config: Config, _tensors: Shapes) -> Config:
    """Return the entries of OLMo 2, or those of OLMo 3 if there is a window."""
    window = metadata.integer("{arch}.attention.sliding_window", 0)
    if not window:
        return {"attention_bias": False}
    flags = window_flags(metadata, config["num_hidden_layers"], 4)
    return {
        "attention_bias": False, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3",
        "sliding_window": window, "layer_types": [_layer_type(slides) for slides in flags],
    }  # fmt: skip


def _experts(metadata: Metadata, count: str) -> Config:
    experts = metadata.integer("{arch}.expert_count", minimum=1, maximum=1 << 14)
    return {
        count: experts,
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count", minimum=1, maximum=experts),
    }


def _granite(metadata: Metadata, config: Config, _tensors: Shapes) -> Config:
    if not metadata.flag("{arch}.rope.scaling.finetuned", True):
        raise UnsupportedModelError("a Granite without RoPE is not supported")
    usual = config["head_dim"] ** -0.5 if metadata.architecture == "minicpm" else None
    return {
        "attention_bias": False,
        "mlp_bias": False,
        "attention_multiplier": metadata.positive("{arch}.attention.scale", usual),
        "embedding_multiplier": metadata.positive("{arch}.embedding_scale"),
        "residual_multiplier": metadata.positive("{arch}.residual_scale"),
        "logits_scaling": metadata.positive("{arch}.logit_scale"),
    }


def _ministral(metadata: Metadata, config: Config, _tensors: Shapes) -> Config:
    """Return the nested RoPE section that Ministral 3's class reads."""
    yarn = config.pop("rope_scaling", None)
    if yarn is None or yarn["rope_type"] != "yarn":
        raise UnsupportedModelError("GGUF architecture 'mistral3' without YaRN is not supported")
    return {
        "rope_parameters": {
            **yarn, "type": "yarn", "rope_theta": config["rope_theta"], "mscale": 1.0,
            "mscale_all_dim": metadata.number("{arch}.rope.scaling.yarn_log_multiplier", 0.0),
            "llama_4_scaling_beta": metadata.number("{arch}.attention.temperature_scale", 0.0),
        }
    }  # fmt: skip


def _cohere2(metadata: Metadata, config: Config, _tensors: Shapes) -> Config:
    return {
        "attention_bias": False,
        "sliding_window": metadata.integer("{arch}.attention.sliding_window", minimum=1),
        "sliding_window_pattern": window_period(metadata, config["num_hidden_layers"], 4),
        "logit_scale": metadata.positive("{arch}.logit_scale"),
    }


def _exaone4(metadata: Metadata, config: Config, _tensors: Shapes) -> Config:
    """Return the windows of EXAONE 4: llama.cpp gives one to its size of 64 layers alone."""
    layers = config["num_hidden_layers"]
    if layers != _EXAONE4_WINDOWED:
        return {"sliding_window": None, "sliding_window_pattern": None}
    window = metadata.integer("{arch}.attention.sliding_window", 4096, minimum=1)
    pattern = "L" * (window_period(metadata, layers, 4) - 1) + "G"
    return {"sliding_window": window, "sliding_window_pattern": pattern}


def _gpt_oss(metadata: Metadata, config: Config, _tensors: Shapes) -> Config:
    layers = config["num_hidden_layers"]
    if isinstance(scaling := config.get("rope_scaling"), dict):
        scaling["truncate"] = False
    return _experts(metadata, "num_local_experts") | {
        "attention_bias": True,
        "intermediate_size": metadata.integer("{arch}.expert_feed_forward_length", minimum=1, maximum=1 << 22),
        "sliding_window": metadata.integer("{arch}.attention.sliding_window", minimum=1),
        "layer_types": [_layer_type(slides) for slides in window_flags(metadata, layers, 2)],
        "swiglu_limit": 7.0,
    }


def _gemma2(metadata: Metadata, config: Config, _tensors: Shapes) -> Config:
    layers = config["num_hidden_layers"]
    if layers > 1 and window_period(metadata, layers, 2) != 2:
        raise UnsupportedModelError("Gemma 2 without a window in every second layer is not supported")
    return {
        "attention_bias": False,
        "query_pre_attn_scalar": _query_scale(config, layers == _GEMMA2_WIDE),
        "sliding_window": metadata.integer("{arch}.attention.sliding_window", _GEMMA2_WINDOW, minimum=1),
        "attn_logit_softcapping": metadata.positive("{arch}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.positive("{arch}.final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, config: Config, _tensors: Shapes) -> Config:
    layers = config["num_hidden_layers"]
    if metadata.number("{arch}.final_logit_softcapping", 0.0):
        raise UnsupportedModelError("Gemma 3 with capped logits is not supported")
    return {
        "attention_bias": False,
        "query_pre_attn_scalar": _query_scale(config, layers == _GEMMA3_WIDE),
        "sliding_window": metadata.integer("{arch}.attention.sliding_window", minimum=1),
        "sliding_window_pattern": window_period(metadata, layers, _GEMMA3_PATTERN),
        "rope_local_base_freq": metadata.positive("{arch}.rope.freq_base_swa", _GEMMA3_LOCAL_BASE),
    }


def _query_scale(config: Config, wide: bool) -> int:
    """Return the divisor of Gemma's queries. wide: for the width per head instead of the head size."""
    size: int = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    return size


def _granitemoe(metadata: Metadata, config: Config, tensors: Shapes) -> Config:
    return _granite(metadata, config, tensors) | _experts(metadata, "num_local_experts")


def _unbiased(_metadata: Metadata, _config: Config, _tensors: Shapes) -> Config:
    return {"attention_bias": False}


_ENTRIES: dict[str, Callable[[Metadata, Config, Shapes], Config]] = {
    "cohere2": _cohere2,
    "ernie4_5": lambda *_: {"use_bias": False},
    "exaone4": _exaone4,
    "gemma": _unbiased,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "hunyuan_v1_dense": lambda *_: {"attention_bias": False, "use_qk_norm": True},
    "llama": _llama,
    "ministral3": _ministral,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": lambda *_: {"attention_bias": True},
    "qwen2_moe": _qwen2_moe,
    "qwen3": _unbiased,
    "qwen3_moe": _qwen3_moe,
    "seed_oss": lambda *_: {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    "smollm3": _smollm3,
}
"""Entries of config.json that only one model_type has, from the metadata, the config so far, and the tensors."""


def generation_config(metadata: Metadata, special: SpecialIds) -> Config:
    """Return end-of-turn ids and the recommended sampling settings."""
    config: Config = {"bos_token_id": special.bos, "eos_token_id": special.ends, "pad_token_id": special.pad}
    config = {key: value for key, value in config.items() if value not in (None, [])}
    for name, key in _SAMPLING.items():
        if metadata.has(key):
            config[name] = metadata.integer(key) if name == "top_k" else metadata.number(key)
    if "temperature" in config:
        config["do_sample"] = config["temperature"] > 0
    return config
