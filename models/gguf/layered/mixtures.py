"""Mixtures of experts with dense first layers or corrected scores: GLM-4.5 and later, DeepSeek, Step 3.5, ERNIE 4.5.

Layers for multi-token prediction are left out.
"""

from dataclasses import replace

import numpy as np

from headrace.models.gguf.layered.common import (
    LATENT_HEADS,
    LATENTS,
    NORMS,
    NUMBERED_DRAFTS,
    POST_NORMS,
    SIGMOID,
    SOFTMAX,
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
    permuted_heads,
    require_whole_heads,
    rotated_share,
    routed,
    scaled_rope,
    shared_expert,
)
from headrace.models.gguf.layered.parts import Config, Contents, LayeredArchitecture, Part, Vector, tables
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import ROPE_FACTORS
from headrace.models.gguf.windows import window_flags
from headrace.runtime.errors import CheckpointError, UnsupportedModelError


def _routed(metadata: Metadata) -> Config:
    """Return the entries of a mixture with dense first layers."""
    dense = metadata.integer("{arch}.leading_dense_block_count", 0)
    return routed(metadata) | {"first_k_dense_replace": dense, "intermediate_size": feed_forward(metadata)}


def _kinds(config: Config) -> list[tuple[str, ...]]:
    queries = "q_lora" if config.get("q_lora_rank") else "q"
    return [("layer", queries, "k_b", "sparse")] * config["num_hidden_layers"]


_GATE = {
    **experts("mlp.gate", "mlp.switch_mlp", plain=True),
    **shared_expert("mlp.shared_experts", optional=True),
    "exp_probs_b.bias": Part("mlp.gate", "experts", "e_score_correction_bias", optional=True),
}


def _glm(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "glm4_moe")
    rotated = metadata.integer("{arch}.rope.dimension_count", config["head_dim"], minimum=2, maximum=1 << 16)
    metadata.ignore("{arch}.rope.dimension_sections")  # positions of text are equal in all sections
    check_sigmoid(metadata)
    if config["tie_word_embeddings"]:
        raise UnsupportedModelError("a GLM-4.5 with tied embeddings is not supported")
    return config | _routed(metadata) | {
        "partial_rotary_factor": rotated / config["head_dim"], "rope_scaling": None,
        "attention_bias": "blk.0.attn_q.bias" in file.shapes, "use_qk_norm": "blk.0.attn_q_norm.weight" in file.shapes,
    }  # fmt: skip


GLM4_MOE = LayeredArchitecture(
    "Glm4MoeForCausalLM", _glm,
    {
        "layer": {
            **POST_NORMS, **biases(attention(), "attn_q", "attn_k", "attn_v", optional=True),
            **head_norms(optional=True),
        },
        "dense": mlp(), "sparse": _GATE,
    },
    tables(), drafts=NUMBERED_DRAFTS,
)  # fmt: skip


def _deepseek(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "deepseek_v3")
    corrected = any(name.endswith(".exp_probs_b.bias") for name in file.shapes)
    gating = metadata.integer("{arch}.expert_gating_func", 0) or (SIGMOID if corrected else SOFTMAX)
    if config["tie_word_embeddings"] or gating not in (SOFTMAX, SIGMOID):
        raise UnsupportedModelError("this variant of GGUF architecture 'deepseek2' is not supported")
    config |= _latent_attention(metadata, config) | _routed(metadata) | {
        "attention_bias": False, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    }  # fmt: skip
    if gating == SIGMOID:  # the class of GLM-4.7-Flash is that of DeepSeek V3 with a stated epsilon
        return config if config["rms_norm_eps"] == 1e-6 else config | {"model_type": "glm4_moe_lite"}
    if config["norm_topk_prob"]:
        raise UnsupportedModelError("a DeepSeek V2 with normalized weights of experts is not supported")
    method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return config | {"model_type": "deepseek_v2", "topk_method": method, "scoring_func": "softmax"}


def _latent_attention(metadata: Metadata, config: Config) -> Config:
    """Return the entries of attention over latents, and take the size of a head out of `config`, which has several."""
    mla = metadata.has("{arch}.attention.key_length_mla")
    query = metadata.integer("{arch}.attention.key_length_mla" if mla else "{arch}.attention.key_length")
    value = metadata.integer("{arch}.attention.value_length_mla" if mla else "{arch}.attention.value_length")
    rotated = metadata.integer("{arch}.rope.dimension_count", minimum=2)
    if not 0 < rotated < query:
        raise UnsupportedModelError(f"this variant of GGUF architecture {metadata.architecture!r} is not supported")
    scaling = scaled_rope(metadata, config, rotated)["rope_scaling"]
    if scaling is not None:
        scale = 10 * metadata.number("{arch}.rope.scaling.yarn_log_multiplier", 0.0)
        scaling = {**scaling, "type": scaling["rope_type"], "mscale": scale, "mscale_all_dim": scale}
    config.pop("head_dim")
    return {
        "q_lora_rank": metadata.integer("{arch}.attention.q_lora_rank", 0, maximum=1 << 20) or None,
        "kv_lora_rank": metadata.integer("{arch}.attention.kv_lora_rank", minimum=1, maximum=1 << 20),
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": query - rotated, "v_head_dim": value,
        "num_key_value_heads": config["num_attention_heads"], "rope_scaling": scaling,
    }  # fmt: skip


def _mistral4(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "mistral4")
    gating = metadata.integer("{arch}.expert_gating_func", 0) or SOFTMAX
    config |= _latent_attention(metadata, config) | _routed(metadata)
    scaling = config.pop("rope_scaling")
    if gating != SOFTMAX or scaling is None or scaling["rope_type"] != "yarn" or config["rms_norm_eps"] != 1e-6:
        raise UnsupportedModelError("this variant of GGUF architecture 'mistral4' is not supported")
    temperature = metadata.number("{arch}.attention.temperature_scale", 0.0)
    trained = "original_max_position_embeddings"
    if metadata.integer("{arch}.attention.temperature_length", scaling[trained]) != scaling[trained]:
        raise UnsupportedModelError("a Mistral 4 whose attention scales at another context than YaRN is not supported")
    return config | {
        "rope_parameters": {**scaling, "rope_theta": config["rope_theta"], "llama_4_scaling_beta": temperature},
        "rope_interleave": True, "attention_bias": False,
    }  # fmt: skip


_SELF = "self_attn"
DEEPSEEK2 = LayeredArchitecture(
    "DeepseekV3ForCausalLM", _deepseek,
    {
        "layer": {**NORMS, **LATENTS},
        "q": {"attn_q": Part(f"{_SELF}.q_proj", "heads*query hidden")},
        "q_lora": {
            "attn_q_a": Part(f"{_SELF}.q_a_proj", "q_lora hidden"),
            "attn_q_a_norm": Part(f"{_SELF}.q_a_layernorm", "q_lora"),
            "attn_q_b": Part(f"{_SELF}.q_b_proj", "heads*query q_lora"),
        },
        "kv_b": {"attn_kv_b": Part(f"{_SELF}.kv_b_proj", "heads*both kv_lora")},
        "k_b": LATENT_HEADS,
        "dense": mlp(), "sparse": _GATE,
    },
    tables(), kinds=_kinds,
    otherwise={"k_b": ("attn_k_b", "kv_b")},
    unused=("attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight"),  # some files have both forms
    drafts=NUMBERED_DRAFTS,
)  # fmt: skip


MISTRAL4 = replace(DEEPSEEK2, model_class="Mistral4ForCausalLM", config=_mistral4, drafts=None)


def _minimax(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "minimax")
    rotated = metadata.integer("{arch}.rope.dimension_count", config["head_dim"], minimum=2, maximum=1 << 16)
    check_sigmoid(metadata)
    config |= mixture(metadata, "num_local_experts", "num_experts_per_tok", "intermediate_size")
    return config | {
        "rotary_dim": rotated, "shared_intermediate_size": 0, "scoring_func": "sigmoid", "use_qk_norm": True,
    }  # fmt: skip


def _olmoe(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "olmoe") | {"norm_topk_prob": False, "attention_bias": False}
    inner = metadata.integer("{arch}.feed_forward_length", 0, maximum=1 << 22) or None
    config |= mixture(metadata, "num_experts", "num_experts_per_tok", "intermediate_size", inner)
    return config | scaled_rope(metadata, config, config["head_dim"])


def _wide_norms() -> dict[str, Part]:
    """Return norms of all heads together."""
    return {
        "attn_q_norm": Part("self_attn.q_norm", "heads*head"), "attn_k_norm": Part("self_attn.k_norm", "kv_heads*head")
    }  # fmt: skip


OLMOE = LayeredArchitecture(
    "OlmoeForCausalLM", _olmoe,
    {"layer": {**NORMS, **attention(), **_wide_norms(), **experts("mlp.gate", "mlp.switch_mlp")}},
    tables(),
)  # fmt: skip


def _dots(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "dots1")
    check_sigmoid(metadata)
    return config | _routed(metadata) | scaled_rope(metadata, config, config["head_dim"]) | {
        "scoring_func": "sigmoid", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


DOTS1 = LayeredArchitecture(
    "Dots1ForCausalLM", _dots,
    {
        "layer": {**NORMS, **attention(), **head_norms()}, "dense": mlp(),
        "sparse": {**_GATE, **experts("mlp.gate", "mlp.experts", plain=True)},
    },
    tables(),
)  # fmt: skip


def _deepseek_1(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "deepseek")
    require_whole_heads(config)
    if config["tie_word_embeddings"]:
        raise UnsupportedModelError("a DeepSeek MoE with tied embeddings is not supported")
    config |= mixture(metadata, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    return config | {
        "n_shared_experts": metadata.integer("{arch}.expert_shared_count", 0, maximum=1 << 10) or None,
        "first_k_dense_replace": metadata.integer("{arch}.leading_dense_block_count", 0), "moe_layer_freq": 1,
        "intermediate_size": feed_forward(metadata), "attention_bias": False,
    }  # fmt: skip


DEEPSEEK = LayeredArchitecture(
    "DeepseekForCausalLM", _deepseek_1,
    {"layer": {**NORMS, **attention(permuted=True)}, "dense": mlp(), "sparse": _GATE},
    tables(), orders=permuted_heads,
)  # fmt: skip


def _windowed(metadata: Metadata, config: Config, period: int) -> Config:
    """Return the kinds of attention of layers, of which every n-th sees everything."""
    flags = window_flags(metadata, config["num_hidden_layers"], period)
    return {
        "sliding_window": metadata.integer("{arch}.attention.sliding_window", minimum=1),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in flags],
    }


def _exaone(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "exaone_moe")
    check_sigmoid(metadata)
    config |= mixture(metadata, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    config |= scaled_rope(metadata, config, config["head_dim"], file.rope_factors) | _windowed(metadata, config, 4)
    more = routed(metadata)
    dense = metadata.integer("{arch}.leading_dense_block_count", 0)
    kept = ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
    return config | {key: more[key] for key in kept} | {
        "num_shared_experts": more["n_shared_experts"] or 0, "intermediate_size": feed_forward(metadata),
        "is_moe_layer": [layer >= dense for layer in range(config["num_hidden_layers"])], "scoring_func": "sigmoid",
    }  # fmt: skip


EXAONE_MOE = LayeredArchitecture(
    "ExaoneMoEForCausalLM", _exaone,
    {"layer": {**NORMS, **attention(), **head_norms()}, "dense": mlp(), "sparse": _GATE},
    tables(), rope_tensors=(ROPE_FACTORS,),
)  # fmt: skip


def _bailing(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "bailing_moe")
    require_whole_heads(config)
    config |= mixture(metadata, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    more = routed(metadata)
    gating = metadata.integer("{arch}.expert_gating_func", SOFTMAX) or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID):
        raise UnsupportedModelError("a Ling with experts chosen neither by softmax nor by sigmoid is not supported")
    corrected = any(name.endswith(".exp_probs_b.bias") for name in file.shapes)
    width = metadata.integer("{arch}.expert_shared_feed_forward_length", config["moe_intermediate_size"], minimum=1)
    kept = ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
    return config | {key: more[key] for key in kept} | rotated_share(metadata, config) | {
        "num_shared_experts": more["n_shared_experts"] or 0, "intermediate_size": feed_forward(metadata),
        "moe_shared_expert_intermediate_size": width, "use_qk_norm": "blk.0.attn_q_norm.weight" in file.shapes,
        "first_k_dense_replace": metadata.integer("{arch}.leading_dense_block_count", 0),
        "score_function": "softmax" if gating == SOFTMAX else "sigmoid", "moe_router_enable_expert_bias": corrected,
        "use_bias": False, "use_qkv_bias": False,
    } | scaled_rope(metadata, config, config["head_dim"])  # fmt: skip


BAILING_MOE2 = LayeredArchitecture(
    "BailingMoeV2ForCausalLM", _bailing,
    {
        "layer": {
            **NORMS, "attn_qkv": Part("attention.query_key_value", "qkv hidden"),
            "attn_output": Part("attention.dense", "hidden heads*head"),
            "attn_q_norm": Part("attention.query_layernorm", "head", optional=True),
            "attn_k_norm": Part("attention.key_layernorm", "head", optional=True),
        },
        "dense": mlp(),
        "sparse": {
            **experts("mlp.gate.gate_proj", "mlp.switch_mlp"), **shared_expert("mlp.shared_experts", optional=True),
            "exp_probs_b.bias": Part("mlp.gate", "experts", "expert_bias", optional=True),
        },
    },
    tables(embedding="model.word_embeddings"),
)  # fmt: skip


def _afmoe(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "afmoe")
    check_sigmoid(metadata)
    config |= mixture(metadata, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    config |= scaled_rope(metadata, config, config["head_dim"]) | _windowed(metadata, config, 4)
    more = routed(metadata)
    return config | {key: more[key] for key in ("n_group", "topk_group")} | {
        "route_norm": more["norm_topk_prob"], "route_scale": more["routed_scaling_factor"], "score_func": "sigmoid",
        "num_shared_experts": more["n_shared_experts"] or 0, "intermediate_size": feed_forward(metadata),
        "num_dense_layers": metadata.integer("{arch}.leading_dense_block_count", 0), "mup_enabled": True,
    }  # fmt: skip


AFMOE = LayeredArchitecture(
    "AfmoeForCausalLM", _afmoe,
    {
        "layer": {
            **attention(), **head_norms(), "attn_gate": Part("self_attn.gate_proj", "heads*head hidden"),
            "attn_norm": Part("input_layernorm", "hidden"),
            "post_attention_norm": Part("post_attention_layernorm", "hidden"),
            "ffn_norm": Part("pre_mlp_layernorm", "hidden"), "post_ffw_norm": Part("post_mlp_layernorm", "hidden"),
        },
        "dense": mlp(),
        "sparse": {
            **experts("mlp.router.gate", "mlp.experts"), **shared_expert("mlp.shared_experts", optional=True),
            "exp_probs_b.bias": Part("mlp", "experts", "expert_bias", plain=True),
        },
    },
    tables(),
)  # fmt: skip


def _hunyuan(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "hunyuan")
    require_whole_heads(config)
    if not config["tie_word_embeddings"] or not metadata.flag("{arch}.expert_weights_norm", True):
        raise UnsupportedModelError("this variant of GGUF architecture 'hunyuan-moe' is not supported")
    config |= mixture(metadata, "num_experts", "moe_topk", "moe_intermediate_size", feed_forward(metadata))
    shared = metadata.integer("{arch}.expert_shared_feed_forward_length", minimum=1, maximum=1 << 22)
    return config | {
        "intermediate_size": shared, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "attention_bias": False,
        "use_qk_norm": True, "use_cla": False, "cla_share_factor": 1,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1.0},  # the file's base is scaled already
    }  # fmt: skip


HUNYUAN_MOE = LayeredArchitecture(
    "HunYuanMoEV1ForCausalLM", _hunyuan,
    {
        "layer": {
            **NORMS, **attention(), "attn_q_norm": Part("self_attn.query_layernorm", "head"),
            "attn_k_norm": Part("self_attn.key_layernorm", "head"),
            **experts("mlp.gate.wg", "mlp.switch_mlp"), **shared_expert("mlp.shared_mlp"),
        },
    },
    tables(), sizes=lambda config: {"shared": config["intermediate_size"]},
)  # fmt: skip


def _mellum(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "mellum") | {"norm_topk_prob": True}
    config |= mixture(metadata, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    config |= _windowed(metadata, config, 4) | {"intermediate_size": config["moe_intermediate_size"]}
    scaling = scaled_rope(metadata, config, config["head_dim"])["rope_scaling"]
    local = metadata.positive("{arch}.rope.freq_base_swa", config["rope_theta"])
    return config | {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": config.pop("rope_theta"), **(scaling or {})},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    }  # fmt: skip


MELLUM = LayeredArchitecture(
    "MellumForCausalLM", _mellum,
    {"layer": {**NORMS, **attention(), **head_norms(), **experts("mlp.gate", "mlp.switch_mlp")}},
    tables(),
)  # fmt: skip


def _step(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "step3p5")
    count = layers_of(metadata)
    check_sigmoid(metadata)
    slides = window_flags(metadata, count, 4)
    heads = metadata.per_layer("{arch}.attention.head_count", count, minimum=1, maximum=1 << 16)
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", count, minimum=1, maximum=1 << 16)
    full_heads = {sizes for sizes, slide in zip(zip(heads, kv_heads, strict=True), slides, strict=True) if not slide}
    local_heads = {sizes for sizes, slide in zip(zip(heads, kv_heads, strict=True), slides, strict=True) if slide}
    if len(full_heads) != 1 or len(local_heads) != 1 or config["tie_word_embeddings"]:
        raise UnsupportedModelError("a Step 3.5 with other heads or with tied embeddings is not supported")
    (full,), (sliding,) = full_heads, local_heads
    theta = config["rope_theta"]
    local = metadata.positive("{arch}.rope.freq_base_swa", 10_000.0)
    slides = slides[: config["num_hidden_layers"]]
    more = routed(metadata)
    return config | mixture(metadata, "moe_num_experts", "moe_top_k", "moe_intermediate_size") | {
        "num_attention_heads": full[0], "num_attention_groups": full[1], "num_key_value_heads": full[1],
        "attention_other_setting": {"num_attention_heads": sliding[0], "num_attention_groups": sliding[1]},
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "sliding_window": metadata.integer("{arch}.attention.sliding_window", minimum=1),
        # llama.cpp turns half of each head in layers without a window.
        "partial_rotary_factors": [1.0 if each else 0.5 for each in slides],
        "rope_theta": [local if each else theta for each in slides], "yarn_only_types": ["full_attention"],
        "use_head_wise_attn_gate": "blk.0.attn_gate.weight" in file.shapes,
        "intermediate_size": feed_forward(metadata),
        "share_expert_dim": metadata.integer("{arch}.expert_shared_feed_forward_length", minimum=1, maximum=1 << 22),
        "moe_layers_enum": ",".join(
            str(layer) for layer in range(len(slides)) if f"blk.{layer}.ffn_gate_inp.weight" in file.shapes
        ),
        "moe_router_scaling_factor": more["routed_scaling_factor"], "norm_expert_weight": more["norm_topk_prob"],
        "swiglu_limits": _limits(metadata, "exp", count), "swiglu_limits_shared": _limits(metadata, "shexp", count),
        # The file's factors are those of whole heads. The class computes them anew for the half that turns, as the
        # model's own code does; llama.cpp applies the first ones.
    } | scaled_rope(metadata, config, config["head_dim"], file.rope_factors)  # fmt: skip


def _limits(metadata: Metadata, kind: str, layers: int) -> list[float] | None:
    """Return the bounds of activations in each layer, 0 for none."""
    key = f"{{arch}}.swiglu_clamp_{kind}"
    if metadata.is_list(key):
        return metadata.numbers(key, layers)
    return [metadata.number(key)] * layers if metadata.has(key) else None


def _step_sizes(config: Config) -> dict[str, int]:
    other = config["attention_other_setting"]
    return {"local_heads": other["num_attention_heads"], "local_kv_heads": other["num_attention_groups"]}


def _step_attention(local: str = "") -> dict[str, Part]:
    queries = f"{local}heads"
    keys = f"{local}kv_heads*head"
    return {
        "attn_q": Part("self_attn.q_proj", f"{queries}*head hidden"),
        "attn_k": Part("self_attn.k_proj", f"{keys} hidden"),
        "attn_v": Part("self_attn.v_proj", f"{keys} hidden"),
        "attn_output": Part("self_attn.o_proj", f"hidden {queries}*head"),
        "attn_gate": Part("self_attn.g_proj", f"{queries} hidden", optional=True),
    }


STEP35 = LayeredArchitecture(
    "Step3p5ForCausalLM", _step,
    {
        "layer": {**NORMS, **head_norms()},
        "full_attention": _step_attention(), "sliding_attention": _step_attention("local_"),
        "dense": mlp(),
        "sparse": {
            **experts("mlp.gate.gate", "mlp.switch_mlp"), **shared_expert("mlp.share_expert"),
            "exp_probs_b.bias": Part("mlp.gate", "experts", "router_bias"),
        },
    },
    tables(), sizes=_step_sizes, rope_tensors=(ROPE_FACTORS,),
)  # fmt: skip


_SPARSE = "block_sparse_moe"
MINIMAX_M2 = LayeredArchitecture(
    "MiniMaxM2ForCausalLM", _minimax,
    {
        "layer": {
            **NORMS, **attention(),
            **_wide_norms(),
            **experts(f"{_SPARSE}.gate", f"{_SPARSE}.switch_mlp"),
            "exp_probs_b.bias": Part(_SPARSE, "experts", "e_score_correction_bias"),
        },
    },
    tables(),
)  # fmt: skip


def _ernie(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "ernie4_5_moe")
    config |= mixture(metadata, "moe_num_experts", "moe_k", "moe_intermediate_size")
    shared = metadata.integer("{arch}.expert_shared_count", 0, maximum=1 << 10)
    stacked = file.shapes.get(f"blk.{config['num_hidden_layers'] - 1}.ffn_gate_shexp.weight")
    if stacked is not None and stacked[0] != shared * config["moe_intermediate_size"]:
        raise CheckpointError(f"the shared experts have width {stacked[0]}, not {shared} times an expert's")
    return config | {
        "intermediate_size": feed_forward(metadata), "use_bias": False, "moe_num_shared_experts": shared,
        "moe_layer_start_index": metadata.integer("{arch}.leading_dense_block_count", 0),
        "moe_layer_interval": metadata.integer("{arch}.interleave_moe_layer_step", 1, minimum=1),
        "moe_use_aux_free": True,
    }  # fmt: skip


ERNIE_MOE = LayeredArchitecture(
    "Ernie4_5_MoeForCausalLM", _ernie,
    {
        "layer": {**NORMS, **attention()}, "dense": mlp(),
        "sparse": {
            **experts("mlp.gate", "mlp.switch_mlp"), **shared_expert("mlp.shared_experts", optional=True),
            "exp_probs_b.bias": Part(
                "mlp.moe_statics", "experts", "e_score_correction_bias", stored="1 experts", plain=True
            ),
        },
    },
    tables(),
)  # fmt: skip


def _ling(metadata: Metadata, file: Contents) -> Config:
    """Return the config of ERNIE's class, which computes the same: the class of Ling 1 has Q, K and V in one matrix."""
    if not metadata.flag("{arch}.expert_weights_norm", False):
        raise UnsupportedModelError("a Ling 1 without normalized weights of experts is not supported")
    return _ernie(metadata, file)


def _no_corrections(_: Metadata, config: Config) -> dict[str, Vector]:
    """Return corrections of the routers' scores that correct nothing."""
    zeros = np.zeros((1, config["moe_num_experts"]), np.float32)
    first = config["moe_layer_start_index"]
    step = config["moe_layer_interval"]
    sparse = (layer for layer in range(first, config["num_hidden_layers"]) if (layer + 1) % step == 0)
    return {f"model.layers.{layer}.mlp.moe_statics.e_score_correction_bias": zeros for layer in sparse}


_UNCORRECTED = {key: part for key, part in ERNIE_MOE.groups["sparse"].items() if key != "exp_probs_b.bias"}
BAILING_MOE = replace(
    ERNIE_MOE, config=_ling, made=_no_corrections, groups={**ERNIE_MOE.groups, "sparse": _UNCORRECTED}
)
