"""Gemma 3n: alternating updates of several streams, a low-rank layer beside attention, inputs per layer.

Its last layers read the K/V of earlier ones. The file states the sparsity of activations in standard deviations.
"""

import math

from headrace.models.gguf.layered.common import (
    attention,
    attention_sizes,
    base_config,
    feed_forward,
    head_norms,
    layers_of,
    mlp,
    refuse_scaled_rope,
)
from headrace.models.gguf.layered.parts import Config, Contents, LayeredArchitecture, Part, tables
from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_CLIP = 120.0  # of the coefficients of updates, which the file does not state
_STREAMS = 4


def _config(metadata: Metadata, file: Contents) -> Config:
    refuse_scaled_rope(metadata)
    config, count = base_config(metadata, file, "gemma3n_text"), layers_of(metadata)
    windowed = metadata.flags("{arch}.attention.sliding_window_pattern", count)
    scales = metadata.numbers("{arch}.activation_sparsity_scale", count, infinite=True)
    rank = file.shapes.get("blk.0.laurel_l.weight", ())[:1]
    if not config["tie_word_embeddings"] or metadata.integer("{arch}.altup.num_inputs", _STREAMS) != _STREAMS:
        raise UnsupportedModelError("this variant of GGUF architecture 'gemma3n' is not supported")
    if not rank:
        raise CheckpointError("tensor blk.0.laurel_l.weight is missing")
    table = file.shapes.get("per_layer_token_embd.weight", (config["vocab_size"],))
    return config | {
        "intermediate_size": feed_forward(metadata), "laurel_rank": rank[0], "rope_scaling": None,
        "hidden_size_per_layer_input": metadata.integer(
            "{arch}.embedding_length_per_layer_input", minimum=1, maximum=1 << 16
        ),
        "vocab_size_per_layer_input": table[0],
        "num_kv_shared_layers": metadata.integer("{arch}.attention.shared_kv_layers", 0, maximum=count - 1),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in windowed],
        "sliding_window": metadata.integer("{arch}.attention.sliding_window", minimum=1),
        "rope_local_base_freq": metadata.positive("{arch}.rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": metadata.positive("{arch}.final_logit_softcapping", 30.0),
        "activation_sparsity_pattern": [0.5 + 0.5 * math.erf(scale / math.sqrt(2)) for scale in scales],
        "altup_num_inputs": _STREAMS, "altup_active_idx": metadata.integer("{arch}.altup.active_idx", 0, maximum=3),
        "altup_coef_clip": _CLIP, "altup_correct_scale": True, "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip


def _kinds(config: Config) -> list[tuple[str, ...]]:
    return [("layer",)] * config["num_hidden_layers"]


def _sizes(config: Config) -> dict[str, int]:
    per_layer = config["hidden_size_per_layer_input"]
    return attention_sizes(config) | {
        "inner": config["intermediate_size"], "rank": config["laurel_rank"], "streams": _STREAMS,
        "others": _STREAMS - 1, "inputs": per_layer, "all_inputs": per_layer * config["num_hidden_layers"],
        "input_vocab": config["vocab_size_per_layer_input"],
    }  # fmt: skip


_MODEL = "model.language_model"


def _projections(module: str, source: str) -> dict[str, Part]:
    """Return the matrices of a stack, one for each stream but the first."""
    return {
        f"{source}_{i}": Part(f"{_MODEL}.{module}.{i}", "others hidden hidden", source=source, index=i)
        for i in range(_STREAMS - 1)
    }


_TABLES = tables(f"{_MODEL}.norm", f"{_MODEL}.embed_tokens")
GEMMA3N = LayeredArchitecture(
    "Gemma3nForCausalLM", _config, _kinds, _sizes,
    {
        "layer": {
            "attn_norm": Part("input_layernorm", "hidden"),
            "post_attention_norm": Part("post_attention_layernorm", "hidden"),
            "ffn_norm": Part("pre_feedforward_layernorm", "hidden"),
            "post_ffw_norm": Part("post_feedforward_layernorm", "hidden"),
            **attention(), **head_norms(), **mlp(),
            "inp_gate": Part("per_layer_input_gate", "inputs hidden"),
            "proj": Part("per_layer_projection", "hidden inputs"),
            "post_norm": Part("post_per_layer_input_norm", "hidden"),
            "altup_correct_coef": Part("altup.correction_coefs", "streams streams"),
            "altup_correct_scale": Part("altup", "hidden", "correct_output_scale"),
            "altup_predict_coef": Part("altup.prediction_coefs", "streams*streams streams"),
            "altup_router": Part("altup.modality_router", "streams hidden"),
            "altup_router_norm": Part("altup.router_norm", "hidden"),
            "laurel_l": Part("laurel.linear_left", "rank hidden"),
            "laurel_r": Part("laurel.linear_right", "hidden rank"),
            "laurel_post_norm": Part("laurel.post_laurel_norm", "hidden"),
        },
    },
    {
        "token_embd": _TABLES["token_embd"], "output_norm": _TABLES["output_norm"],
        "per_layer_token_embd": Part(f"{_MODEL}.embed_tokens_per_layer", "input_vocab all_inputs"),
        "per_layer_model_proj": Part(f"{_MODEL}.per_layer_model_projection", "all_inputs hidden"),
        "per_layer_proj_norm": Part(f"{_MODEL}.per_layer_projection_norm", "inputs"),
        **_projections("altup_projections", "altup_proj"),
        **_projections("altup_unembed_projections", "altup_unembd_proj"),
    },
    layer=f"{_MODEL}.layers.{{}}",
)  # fmt: skip
