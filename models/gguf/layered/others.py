"""StarCoder 2 and Phi-2 with LayerNorm and biases, Apertus with xIELU, Llama 4, and LFM2 with short convolutions."""

import numpy as np

from headrace.models.gguf.layered.common import (
    NORMS,
    attention,
    base_config,
    biases,
    check_sigmoid,
    experts,
    feed_forward,
    head_norms,
    layers_of,
    mixture,
    mlp,
    require_whole_heads,
    scaled_rope,
    shared_expert,
)
from headrace.models.gguf.layered.parts import Config, Contents, LayeredArchitecture, Part, Vector, tables
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import ROPE_FACTORS
from headrace.models.gguf.windows import window_flags
from headrace.runtime.errors import UnsupportedModelError


def _starcoder(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "starcoder2", layer_norm="norm_epsilon")
    require_whole_heads(config)
    return config | {"intermediate_size": feed_forward(metadata), "use_bias": True}


STARCODER2 = LayeredArchitecture(
    "Starcoder2ForCausalLM", _starcoder,
    {
        "layer": {
            **biases({
                **NORMS, "ffn_up": Part("mlp.c_fc", "inner hidden"), "ffn_down": Part("mlp.c_proj", "hidden inner"),
            }),
            **biases(attention()),
        },
    },
    {**tables(), "output_norm.bias": Part("model.norm", "hidden", "bias")},
)  # fmt: skip


def _phi(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "phi", layer_norm="layer_norm_eps")
    require_whole_heads(config)
    rotated = metadata.integer("{arch}.rope.dimension_count", config["head_dim"], minimum=2, maximum=1 << 16)
    return config | {
        "intermediate_size": feed_forward(metadata), "partial_rotary_factor": rotated / config["head_dim"],
        "tie_word_embeddings": False,
    }  # fmt: skip


PHI2 = LayeredArchitecture(
    "PhiForCausalLM", _phi,
    {
        "layer": biases({
            "attn_norm": Part("input_layernorm", "hidden"), "ffn_up": Part("mlp.fc1", "inner hidden"),
            "ffn_down": Part("mlp.fc2", "hidden inner"), **attention(output="dense"),
        }),
    },
    {
        "token_embd": Part("model.embed_tokens", "vocab hidden"), "output": Part("lm_head", "vocab hidden"),
        "output.bias": Part("lm_head", "vocab", "bias"), "output_norm": Part("model.final_layernorm", "hidden"),
        "output_norm.bias": Part("model.final_layernorm", "hidden", "bias"),
    },
)  # fmt: skip


def _apertus(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "apertus")
    require_whole_heads(config)
    return config | scaled_rope(metadata, config, config["head_dim"], file.rope_factors) | {
        "intermediate_size": feed_forward(metadata), "mlp_bias": False, "attention_bias": False, "post_norm": False,
        "qk_norm": True, "hidden_act": "xielu",
    }  # fmt: skip


def _xielu(metadata: Metadata, config: Config) -> dict[str, Vector]:
    """Return the parameters of the activations, which the file has as metadata."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    values = {name: metadata.numbers(f"xielu.{name}", config["num_hidden_layers"]) for name in names}
    return {
        f"model.layers.{layer}.mlp.act_fn.{name}": np.full([1] * name.startswith("alpha"), value, np.float32)
        for name, column in values.items()
        for layer, value in enumerate(column)
    }


APERTUS = LayeredArchitecture(
    "ApertusForCausalLM", _apertus,
    {
        "layer": {
            "attn_norm": Part("attention_layernorm", "hidden"), "ffn_norm": Part("feedforward_layernorm", "hidden"),
            **attention(), **head_norms(), "ffn_up": Part("mlp.up_proj", "inner hidden"),
            "ffn_down": Part("mlp.down_proj", "hidden inner"),
        },
    },
    tables(), made=_xielu, rope_tensors=(ROPE_FACTORS,),
)  # fmt: skip


def _llama4(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "llama4_text")
    if metadata.integer("{arch}.attention.sliding_window", _CHUNK) == 0 or config["tie_word_embeddings"]:
        raise UnsupportedModelError("a Llama 4 without windows or with tied embeddings is not supported")
    count = config["num_hidden_layers"]
    if window_flags(metadata, count, _EVERY) != [(layer + 1) % _EVERY != 0 for layer in range(count)]:
        raise UnsupportedModelError("a Llama 4 with chunks in other layers is not supported")
    config |= mixture(metadata, "num_local_experts", "num_experts_per_tok", "intermediate_size")
    return config | scaled_rope(metadata, config, config["head_dim"], file.rope_factors) | {
        "intermediate_size_mlp": feed_forward(metadata), "attention_bias": False, "attention_chunk_size": _CHUNK,
        "interleave_moe_layer_step": metadata.integer("{arch}.interleave_moe_layer_step", minimum=1),
        "use_qk_norm": config["num_local_experts"] != _MAVERICK, "attn_temperature_tuning": 4,
        "floor_scale": _CHUNK, "attn_scale": 0.1,
    }  # fmt: skip


_CHUNK, _MAVERICK = 8192, 128  # tokens, experts: constants of llama.cpp
_EVERY = 4  # every fourth layer attends to everything
LLAMA4 = LayeredArchitecture(
    "Llama4ForConditionalGeneration", _llama4,
    {
        "layer": {**NORMS, **attention()}, "dense": mlp("feed_forward"),
        "sparse": {
            **experts("feed_forward.router", "feed_forward.experts"), **shared_expert("feed_forward.shared_expert"),
        },
    },
    tables(), sizes=lambda config: {"shared": config["intermediate_size"]}, wrapped="llama4",
    rope_tensors=(ROPE_FACTORS,),
)  # fmt: skip


_CONV = "conv"


def _lfm(metadata: Metadata, file: Contents) -> Config:
    mixed = metadata.architecture == "lfm2moe"
    if metadata.integer("{arch}.attention.sliding_window", 0):
        raise UnsupportedModelError("an LFM2 with a sliding window is not supported")
    config = base_config(metadata, file, "lfm2_moe" if mixed else "lfm2", layer_norm="norm_eps")
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", layers_of(metadata))
    inner = feed_forward(metadata)
    config |= {
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "conv_L_cache": metadata.integer("{arch}.shortconv.l_cache", minimum=1, maximum=64),
        "conv_bias": False,
        "intermediate_size": inner,
        "tie_word_embeddings": True,
    }
    if not mixed:
        return config | {
            "block_dim": config["hidden_size"], "block_ff_dim": inner, "block_auto_adjust_ff_dim": False,
            "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        }  # fmt: skip
    check_sigmoid(metadata)
    return config | mixture(metadata, "num_experts", "num_experts_per_tok", "moe_intermediate_size") | {
        "num_dense_layers": metadata.integer("{arch}.leading_dense_block_count", 0),
        "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in file.shapes),
    }  # fmt: skip


def _lfm2(model_class: str, names: tuple[str, str, str]) -> LayeredArchitecture:
    groups: dict[str, dict[str, Part]] = {
        "layer": {"attn_norm": Part("operator_norm", "hidden"), "ffn_norm": Part("ffn_norm", "hidden")},
        "full_attention": {
            **attention(output="out_proj"),
            "attn_q_norm": Part("self_attn.q_layernorm", "head"), "attn_k_norm": Part("self_attn.k_layernorm", "head"),
        },
        "conv": {
            "shortconv.in_proj.weight": Part(f"{_CONV}.in_proj", "3*hidden hidden"),
            "shortconv.conv.weight": Part(
                f"{_CONV}.conv", "hidden kernel", stored="hidden kernel 1", plain=True
            ),
            "shortconv.out_proj.weight": Part(f"{_CONV}.out_proj", "hidden hidden"),
        },
        "dense": mlp("feed_forward", names),
        "sparse": {
            **experts("feed_forward.gate", "feed_forward.switch_mlp"),
            "exp_probs_b.bias": Part("feed_forward", "experts", "expert_bias", optional=True),
        },
    }  # fmt: skip
    outside = {
        "token_embd": Part("model.embed_tokens", "vocab hidden"),
        "token_embd_norm": Part("model.embedding_norm", "hidden"),
    }
    return LayeredArchitecture(model_class, _lfm, groups, outside)


LFM2 = _lfm2("Lfm2ForCausalLM", ("w1", "w3", "w2"))
LFM2_MOE = _lfm2("Lfm2MoeForCausalLM", ("gate_proj", "up_proj", "down_proj"))
