"""Tiny random checkpoints of architectures as mlx-lm's classes write them, by name."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

VOCAB, WINDOW = 96, 16
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_GRANITE = {
    "model_type": "granite", "head_dim": 16, "attention_bias": False, "mlp_bias": False, "logits_scaling": 6.0,
    "attention_multiplier": 0.11, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
}  # fmt: skip
_COHERE = {
    "model_type": "cohere2", "head_dim": 16, "layer_norm_eps": 1e-2, "logit_scale": 0.7, "sliding_window": WINDOW,
    "sliding_window_pattern": 2, "tie_word_embeddings": True,
}  # fmt: skip
_EXAONE = {
    "model_type": "exaone4", "sliding_window": WINDOW, "sliding_window_pattern": "LG", "rope_scaling": None,
}  # fmt: skip

# name -> additions to the base config
MODELS: dict[str, dict[str, Any]] = {
    "seed-oss": {"model_type": "seed_oss", "attention_bias": True},
    "seed-oss-biased": {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True, "rope_scaling": _YARN},
    "granite": _GRANITE,
    "granite-tied": {**_GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "ernie4_5": {"model_type": "ernie4_5", "use_bias": False},
    "ernie4_5-biased": {"model_type": "ernie4_5", "use_bias": True, "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2"},
    "olmo2-biased": {"model_type": "olmo2", "attention_bias": True, "mlp_bias": True, "rope_scaling": _YARN},
    "olmo3": {
        "model_type": "olmo3", "sliding_window": WINDOW, "rope_scaling": _YARN,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo3-period": {"model_type": "olmo3", "sliding_window": WINDOW, "num_hidden_layers": 4},
    "exaone4": _EXAONE,
    "exaone4-full": {**_EXAONE, "sliding_window": None, "sliding_window_pattern": None, "rope_scaling": _YARN},
    "cohere2": _COHERE,
    "cohere2-biased": {**_COHERE, "attention_bias": True},
    "glm4": {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4-whole": {"model_type": "glm4", "attention_bias": False, "partial_rotary_factor": 1.0},
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return {**_BASE, **MODELS[name]}


def write_mlx_lm_model(directory: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write random weights of the shapes that mlx-lm's class has for `config`; return the directory."""
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config)
    model, key, tensors = model_class(arguments.from_dict(config)), mx.random.key(seed), {}
    for name, array in tree_flatten(model.parameters()):
        key, sub = mx.random.split(key)
        noise = mx.random.normal(array.shape, key=sub)
        tensors[name] = 1 + 0.1 * noise if "norm" in name else noise * (array.shape[-1] ** -0.5 if array.ndim else 1)
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), tensors)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
