"""Mixtures of experts: Mixtral and its kin, DeepSeek, GLM-4.5, ERNIE 4.5, Ling, dots, Step 3.5, Llama 4 and others.

Functions before the rows return entries of config.json that a family's files state in their own way.
`GGUFArchitecture` explains the fields of a row.

Guard: tests/models/gguf/test_layered.py.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from headrace.models.gguf.architecture import (
    Config,
    Contents,
    Entries,
    GGUFArchitecture,
    TensorRule,
    TensorRules,
    Vector,
)
from headrace.models.gguf.architectures.blocks import (
    INDEXER,
    LATENT_HEADS,
    LATENT_QUERIES,
    LATENTS,
    NORMS,
    NUMBERED_DRAFTS,
    POST_NORMS,
    WIDE_NORMS,
    attention,
    biases,
    equal_layers,
    experts,
    head_norms,
    mlp,
    shared_expert,
    tables,
)
from headrace.models.gguf.architectures.dense import GRANITE_KEYS, LLAMA_BIASES, granite
from headrace.models.gguf.keys import (
    HEADS,
    KEYS,
    ROUTED,
    SECTIONS,
    SIGMOID,
    SOFTMAX,
    WIDTH,
    gating_of,
    layer_type,
    layers_of,
    mixture,
    rotated_part,
    window_flags,
)
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import rope_scaling
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

# Entries of experts; where the class has no other width, it is that of all feed-forwards.
_LOCAL = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
_NAMED = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_ROUTED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
GROUPED = ("n_group", "topk_group")
_SPARSE = "block_sparse_moe"  # module of experts in Mixtral's class and its kin
_HIDDEN_GATE = TensorRule("mlp.shared_expert_gate", "hidden", stored="1 hidden")
_GATE = {
    **experts(plain=True), **shared_expert(optional=True),
    "exp_probs_b.bias": TensorRule("mlp.gate", "experts", "e_score_correction_bias", optional=True),
}  # fmt: skip


def _gpt_oss(_metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """State that YaRN's range of pairs is not rounded, as in the model."""
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False
    return {}


# Amplitude of Phi-3.5-MoE's LongRoPE, which its file does not have
_PHI_AMPLITUDE = 1.243163121016122


def _phimoe(_metadata: Metadata, _file: Contents, config: Entries) -> Entries:
    """Return the scaling of rotation with its amplitude. Raises UnsupportedModelError for other kinds."""
    scaling = config.setdefault("rope_scaling", None)
    if scaling is None:
        return {}
    if scaling["rope_type"] != "longrope":
        raise UnsupportedModelError(f"a Phi-3.5-MoE with {scaling['rope_type']} RoPE scaling is not supported")
    return {"rope_scaling": {**scaling, "short_mscale": _PHI_AMPLITUDE, "long_mscale": _PHI_AMPLITUDE}}


def _deepseek2(metadata: Metadata, file: Contents, config: Entries) -> Entries:
    """Return the entries of DeepSeek V2 or V3, whose files have one architecture, and the class that computes them."""
    gating = gating_of(metadata, SIGMOID if file.has("exp_probs_b.bias") else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise UnsupportedModelError("this variant of GGUF architecture 'deepseek2' is not supported")
    config |= latent_attention(metadata, config)
    if gating == SIGMOID:  # the class of GLM-4.7-Flash is that of DeepSeek V3 with a stated epsilon
        return {} if config["rms_norm_eps"] == 1e-6 else {"model_type": "glm4_moe_lite"}
    if config["norm_topk_prob"]:
        raise UnsupportedModelError("a DeepSeek V2 with normalized weights of experts is not supported")
    method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return {"model_type": "deepseek_v2", "topk_method": method, "scoring_func": "softmax"}


def latent_attention(metadata: Metadata, config: Entries) -> Entries:
    """Return the entries of attention over latents, and take the size of a head out of `config`, which has several."""
    mla = metadata.has("{arch}.attention.key_length_mla")
    metadata.ignore("{arch}.attention.value_length")  # with `mla`, of an entry of K/V
    query = metadata.integer("{arch}.attention.key_length_mla" if mla else "{arch}.attention.key_length")
    value = metadata.integer("{arch}.attention.value_length_mla" if mla else "{arch}.attention.value_length")
    rotated = metadata.integer("{arch}.rope.dimension_count", minimum=2)
    if not 0 < rotated < query:
        raise UnsupportedModelError(f"this variant of GGUF architecture {metadata.architecture!r} is not supported")
    scaling = rope_scaling(metadata, rotated, config["rope_theta"], None)
    if scaling is not None:
        scale = 10 * metadata.number("{arch}.rope.scaling.yarn_log_multiplier", 0.0)
        scaling = {**scaling, "type": scaling["rope_type"], "mscale": scale, "mscale_all_dim": scale}
    config.pop("head_dim")
    return {
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": query - rotated, "v_head_dim": value,
        "num_key_value_heads": config["num_attention_heads"], "rope_scaling": scaling,
    }  # fmt: skip


def _indexed(metadata: Metadata, _file: Contents, config: Entries) -> Entries:
    """Return the rotation of DeepSeek V3.2 and GLM 5, which have an indexer in every layer."""
    if gating_of(metadata, SIGMOID) != SIGMOID or metadata.has("{arch}.attention.indexer.types"):
        raise UnsupportedModelError(f"this variant of GGUF architecture {metadata.architecture!r} is not supported")
    config |= latent_attention(metadata, config)
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    return {"rope_parameters": {**scaling, "rope_theta": config["rope_theta"]}}


def _mistral4(metadata: Metadata, _file: Contents, config: Entries) -> Entries:
    """Return the rotation of Mistral 4, and the growth of its queries. Raises UnsupportedModelError for others."""
    config |= latent_attention(metadata, config)
    scaling = config.pop("rope_scaling")
    is_yarn = scaling is not None and scaling["rope_type"] == "yarn"
    if gating_of(metadata, SOFTMAX) != SOFTMAX or not is_yarn or config["rms_norm_eps"] != 1e-6:
        raise UnsupportedModelError("this variant of GGUF architecture 'mistral4' is not supported")
    temperature = metadata.number("{arch}.attention.temperature_scale", 0.0)
    trained = scaling["original_max_position_embeddings"]
    if metadata.integer("{arch}.attention.temperature_length", trained) != trained:
        raise UnsupportedModelError("a Mistral 4 whose attention scales at another context than YaRN is not supported")
    return {"rope_parameters": {**scaling, "rope_theta": config["rope_theta"], "llama_4_scaling_beta": temperature}}


def _latent_kinds(config: Config) -> list[tuple[str, ...]]:
    """Return the groups of each layer: queries with or without a latent of their own."""
    queries = "q_lora" if config.get("q_lora_rank") else "q"
    return [("layer", queries, "k_b", "sparse")] * config["num_hidden_layers"]


def _cohere(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the epsilon of RMSNorm, which llama.cpp takes in place of LayerNorm where the file has one."""
    if not metadata.is_list("{arch}.attention.sliding_window_pattern"):
        raise UnsupportedModelError("a Command A+ whose file does not list its layers with windows is not supported")
    if not metadata.has("{arch}.attention.layer_norm_rms_epsilon"):
        return {}
    return {"rms_norm_eps": config["layer_norm_eps"]}


def _dbrx(metadata: Metadata, _file: Contents, config: Entries) -> Entries:
    """Return the sections of DBRX's config."""
    names = ("moe_num_experts", "moe_top_k", "ffn_hidden_size")
    return {
        "d_model": config["hidden_size"], "n_heads": config["num_attention_heads"],
        "n_layers": config["num_hidden_layers"],
        "attn_config": {
            "kv_n_heads": config["num_key_value_heads"], "rope_theta": config["rope_theta"],
            "clip_qkv": metadata.positive("{arch}.attention.clamp_kqv"),
        },
        "ffn_config": mixture(metadata, names),
    }  # fmt: skip


def _minimax(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return how many numbers of a head turn."""
    return {"rotary_dim": rotated_part(metadata, config["head_dim"])}


# Keys of MiniMax M3's indexer
_BLOCK_INDEXER = ("index_block_size", "index_head_dim", "index_local_blocks", "index_n_heads", "index_topk_blocks")


def _minimax3(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the width of MiniMax M3's shared experts, and its layers with experts and with an indexer."""
    layers = range(config["num_hidden_layers"])
    shared = metadata.integer("{arch}.expert_shared_count", minimum=1, maximum=1 << 10)
    if not metadata.flag("{arch}.expert_weights_norm", False):
        raise UnsupportedModelError("a MiniMax M3 without normalized weights of experts is not supported")
    indexed = [f"blk.{layer}.indexer.q_proj.weight" in file.shapes for layer in layers]
    indexer = {key: KEYS[key].read(metadata) for key in _BLOCK_INDEXER} if any(indexed) else {}
    return {
        "shared_intermediate_size": shared * config["intermediate_size"],
        "moe_layer_freq": [int(f"blk.{layer}.ffn_gate_inp.weight" in file.shapes) for layer in layers],
        "sparse_attention_freq": [int(each) for each in indexed], **indexer,
    }  # fmt: skip


def _minimax3_kinds(config: Config) -> list[tuple[str, ...]]:
    """Return the groups of each layer."""
    return [("layer", "sparse", *(("indexer",) if indexed else ())) for indexed in config["sparse_attention_freq"]]


def _minimax3_sizes(config: Config) -> dict[str, int]:
    """Return the width of dense layers; the class calls that of an expert `intermediate_size`."""
    return {"inner": config["dense_intermediate_size"]}


def _exaone(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return for each layer whether it has experts."""
    dense = metadata.integer("{arch}.leading_dense_block_count", 0)
    return {"is_moe_layer": [layer >= dense for layer in range(config["num_hidden_layers"])]}


def _bailing2(metadata: Metadata, _file: Contents, _config: Config) -> Entries:
    """Return the function of scores of Ling 2. Raises UnsupportedModelError for another one."""
    gating = gating_of(metadata, SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise UnsupportedModelError("a Ling with experts chosen neither by softmax nor by sigmoid is not supported")
    return {"score_function": "softmax" if gating == SOFTMAX else "sigmoid"}


def _hunyuan(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the width of the shared expert, which Hunyuan's class takes for that of feed-forwards."""
    if not config["tie_word_embeddings"] or not metadata.flag("{arch}.expert_weights_norm", True):
        raise UnsupportedModelError("this variant of GGUF architecture 'hunyuan-moe' is not supported")
    shared = metadata.integer("{arch}.expert_shared_feed_forward_length", minimum=1, maximum=WIDTH)
    return {"intermediate_size": shared}


def _hunyuan3(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the shared experts and the first dense layers of Hunyuan 3."""
    width = config["moe_intermediate_size"]
    shared = metadata.integer("{arch}.expert_shared_feed_forward_length", width, minimum=1, maximum=WIDTH)
    if shared % width:
        raise UnsupportedModelError(f"a Hunyuan 3 with shared experts of {shared} is not supported")
    layers = range(config["num_hidden_layers"])
    dense = [f"blk.{layer}.ffn_gate_inp.weight" not in file.shapes for layer in layers]
    return {"n_shared_experts": shared // width, "first_k_dense_replace": dense.count(True)}


def _grok(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the factors and soft caps of Grok; older files of Grok 1 state none."""
    cap = metadata.number("{arch}.final_logit_softcapping", 0.0)
    return {
        "residual_moe": file.has("ffn_up.weight"),
        "attn_output_multiplier": metadata.positive("{arch}.attention.output_scale", config["head_dim"] ** -0.5),
        "attn_logit_softcapping": metadata.positive("{arch}.attn_logit_softcapping", 30.0),
        "embedding_multiplier_scale": metadata.positive("{arch}.embedding_scale", config["hidden_size"] ** 0.5),
        "output_multiplier_scale": metadata.positive("{arch}.logit_scale", 3**-0.5),
        "final_logit_softcapping": cap or None,
    }


def _smallthinker(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the experts' scores, and windows in all layers but every fourth, of which only these rotate.

    Without a window, all layers rotate.
    """
    if metadata.has("{arch}.attention.sliding_window_pattern"):
        raise UnsupportedModelError("a SmallThinker that lists its windows is not supported")
    by_softmax = gating_of(metadata, SOFTMAX) == SOFTMAX
    entries: Entries = {"moe_primary_router_apply_softmax": by_softmax, "norm_topk_prob": True}
    if not metadata.integer("{arch}.attention.sliding_window", 0, minimum=0):
        return entries
    layout = [int(layer % 4 != 0) for layer in range(config["num_hidden_layers"])]
    window = KEYS["sliding_window"].read(metadata)
    return {**entries, "rope_layout": layout, "sliding_window_layout": layout, "sliding_window_size": window}


def _mellum(metadata: Metadata, _file: Contents, config: Entries) -> Entries:
    """Return the rotations of both kinds of layers."""
    theta = config.pop("rope_theta")
    full = {"rope_type": "default", "rope_theta": theta, **config.pop("rope_scaling", {})}
    local = metadata.positive("{arch}.rope.freq_base_swa", theta)
    return {
        "rope_parameters": {
            "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "intermediate_size": config["moe_intermediate_size"],
    }  # fmt: skip


_Heads = TypeVar("_Heads")
"""Heads of a layer: their number, or that of queries and that of K/V."""


def _only(heads: Iterable[_Heads], model: str) -> _Heads:
    """Return the heads that all these layers have. Raises UnsupportedModelError, which names the model, for others."""
    different = set(heads)
    if len(different) != 1:
        raise UnsupportedModelError(f"a {model} with other heads is not supported")
    return next(iter(different))


def _by_kind(heads: Sequence[_Heads], slides: Sequence[bool], model: str) -> tuple[_Heads, _Heads]:
    """Return the heads of layers without a window, and of those with one. slides: whether a layer has a window.

    Raises UnsupportedModelError, which names the model, if layers of one kind differ, or if there are none of one.
    """
    full = _only((number for number, slide in zip(heads, slides, strict=True) if not slide), model)
    local = _only((number for number, slide in zip(heads, slides, strict=True) if slide), model)
    return full, local


def _step(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the entries of Step 3.5: heads and rotations of both kinds of layers, experts, bounds of activations."""
    count = layers_of(metadata)
    slides = window_flags(metadata, count, 4)
    heads = metadata.per_layer("{arch}.attention.head_count", count, minimum=1, maximum=HEADS)
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", count, minimum=1, maximum=HEADS)
    sizes = list(zip(heads, kv_heads, strict=True))
    (heads_full, kv_full), (heads_local, kv_local) = _by_kind(sizes, slides, "Step 3.5")
    theta = config["rope_theta"]
    local = KEYS["rope_local_base_freq"].read(metadata)
    slides = slides[: config["num_hidden_layers"]]
    return {
        "num_attention_heads": heads_full, "num_attention_groups": kv_full, "num_key_value_heads": kv_full,
        "attention_other_setting": {"num_attention_heads": heads_local, "num_attention_groups": kv_local},
        # llama.cpp turns half of each head in layers without a window.
        "partial_rotary_factors": [1.0 if each else 0.5 for each in slides],
        "rope_theta": [local if each else theta for each in slides],
        "moe_layers_enum": ",".join(
            str(layer) for layer in range(len(slides)) if f"blk.{layer}.ffn_gate_inp.weight" in file.shapes
        ),
        "swiglu_limits": _limits(metadata, "exp", count), "swiglu_limits_shared": _limits(metadata, "shexp", count),
    }  # fmt: skip


def _mimo(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the entries of MiMo V2: heads, sinks and rotations of both kinds of layers, sizes of values, experts."""
    count = layers_of(metadata)
    layers = range(config["num_hidden_layers"])
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", count, minimum=1, maximum=HEADS)
    slides = window_flags(metadata, count, 0)[: len(layers)]
    sinks = {slides[layer] for layer in layers if f"blk.{layer}.attn_sinks.weight" in file.shapes}
    heads = metadata.integer("{arch}.attention.head_count")  # all layers have as many
    head = config["head_dim"]
    value = metadata.integer("{arch}.attention.value_length", head, minimum=1, maximum=HEADS)
    rotated = rotated_part(metadata, head)
    full, local = _by_kind(kv_heads[: len(layers)], slides, "MiMo 2")
    return {
        "num_key_value_heads": full, "swa_num_key_value_heads": local, "swa_num_attention_heads": heads,
        "swa_head_dim": head, "v_head_dim": value, "swa_v_head_dim": value,
        "partial_rotary_factor": (rotated + 0.5) / head,  # its class takes the whole part of the product
        "swa_rope_theta": KEYS["rope_local_base_freq"].read(metadata),
        "attention_value_scale": metadata.number("{arch}.attention.value_scale", 0.0) or None,
        "add_swa_attention_sink_bias": True in sinks, "add_full_attention_sink_bias": False in sinks,
        "hybrid_layer_pattern": [int(slide) for slide in slides],
        "moe_layer_freq": [int(f"blk.{layer}.ffn_gate_inp.weight" in file.shapes) for layer in layers],
        "layer_types": [layer_type(slide) for slide in slides],
    }  # fmt: skip


def _mimo_attention(kv_heads: str) -> dict[str, TensorRule]:
    """Return the tensors of one kind of attention. kv_heads: name of its number of K/V heads."""
    return {
        "attn_q": TensorRule("self_attn.q_proj", "heads*head hidden"),
        "attn_k": TensorRule("self_attn.k_proj", f"{kv_heads}*head hidden"),
        "attn_v": TensorRule("self_attn.v_proj", f"{kv_heads}*value hidden"),
        "attn_output": TensorRule("self_attn.o_proj", "hidden heads*value"),
        "attn_sinks": TensorRule("self_attn", "heads", "attention_sink_bias", optional=True),
    }


def _limits(metadata: Metadata, kind: str, layers: int) -> list[float] | None:
    """Return the bounds of activations in each layer, 0 for none."""
    key = f"{{arch}}.swiglu_clamp_{kind}"
    if metadata.is_list(key):
        return metadata.numbers(key, layers)
    if not metadata.has(key):
        return None
    return [metadata.number(key)] * layers


def _laguna(metadata: Metadata, _file: Contents, config: Entries) -> Entries:
    """Return the entries of Laguna: heads and rotations of both kinds of layers, and sparse layers."""
    count = config["num_hidden_layers"]
    window = metadata.integer("{arch}.attention.sliding_window", 0)
    period = metadata.integer("{arch}.attention.sliding_window_pattern", _EVERY, minimum=1)
    slides = [window > 0 and layer % period != 0 for layer in range(count)]
    heads = metadata.per_layer("{arch}.attention.head_count", count, minimum=1, maximum=HEADS)
    if window:
        full_heads, _ = _by_kind(heads, slides, "Laguna")
    else:
        full_heads = _only(heads, "Laguna")
    if not metadata.flag("{arch}.expert_weights_norm", False):
        raise UnsupportedModelError("a Laguna with other experts is not supported")
    theta = config.pop("rope_theta")
    full = {"rope_type": "default", **config.pop("rope_scaling", {}), "rope_theta": theta}
    full["partial_rotary_factor"] = config.pop("partial_rotary_factor")
    rope = {"full_attention": full}
    if window:
        turned = metadata.integer("{arch}.rope.dimension_count_swa", minimum=2, maximum=config["head_dim"])
        rope["sliding_attention"] = {
            "rope_type": "default", "rope_theta": metadata.positive("{arch}.rope.freq_base_swa", theta),
            "partial_rotary_factor": turned / config["head_dim"],
        }  # fmt: skip
    dense = metadata.integer("{arch}.leading_dense_block_count", 0)
    return {
        "num_attention_heads": full_heads, "num_attention_heads_per_layer": heads, "rope_parameters": rope,
        "sliding_window": window or None, "layer_types": [layer_type(slide) for slide in slides],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(count)],
    }  # fmt: skip


def _laguna_sizes(config: Config) -> dict[str, int]:
    """Return the heads of layers with a window."""
    heads = dict(zip(config["layer_types"], config["num_attention_heads_per_layer"], strict=True))
    local = heads.get("sliding_attention", config["num_attention_heads"])
    return {"local_heads": local, "local_kv_heads": config["num_key_value_heads"]}


def _step_sizes(config: Config) -> dict[str, int]:
    """Return the heads of layers with a window."""
    other = config["attention_other_setting"]
    return {"local_heads": other["num_attention_heads"], "local_kv_heads": other["num_attention_groups"]}


def _step_attention(local: str = "") -> dict[str, TensorRule]:
    """Return the tensors of one kind of attention. local: prefix of its sizes in layers with a window."""
    queries = f"{local}heads"
    keys = f"{local}kv_heads*head"
    return {
        "attn_q": TensorRule("self_attn.q_proj", f"{queries}*head hidden"),
        "attn_k": TensorRule("self_attn.k_proj", f"{keys} hidden"),
        "attn_v": TensorRule("self_attn.v_proj", f"{keys} hidden"),
        "attn_output": TensorRule("self_attn.o_proj", f"hidden {queries}*head"),
        "attn_gate": TensorRule("self_attn.g_proj", f"{queries} hidden", optional=True),
    }


def _ernie(_metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Check the width of shared experts, which are stored as one. Raises CheckpointError for another."""
    shared = config["moe_num_shared_experts"]
    stacked = file.shapes.get(f"blk.{config['num_hidden_layers'] - 1}.ffn_gate_shexp.weight")
    if stacked is None:
        return {}
    width, *_ = stacked
    if width != shared * config["moe_intermediate_size"]:
        raise CheckpointError(f"the shared experts have width {width}, not {shared} times an expert's")
    return {}


def _ling(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Check a Ling 1, which the class of ERNIE runs. Raises UnsupportedModelError for other weights of experts."""
    if not metadata.flag("{arch}.expert_weights_norm", False):
        raise UnsupportedModelError("a Ling 1 without normalized weights of experts is not supported")
    return _ernie(metadata, file, config)


def _no_corrections(_: Metadata, config: Config) -> dict[str, Vector]:
    """Return corrections of the routers' scores that correct nothing."""
    zeros = np.zeros((1, config["moe_num_experts"]), np.float32)
    first = config["moe_layer_start_index"]
    step = config["moe_layer_interval"]
    sparse = (layer for layer in range(first, config["num_hidden_layers"]) if (layer + 1) % step == 0)
    return {f"model.layers.{layer}.mlp.moe_statics.e_score_correction_bias": zeros for layer in sparse}


# Constants of llama.cpp
_CHUNK = 8192  # tokens of a chunk of attention
_MAVERICK = 128  # experts of the size without norms of queries and keys
_EVERY = 4  # every fourth layer attends to everything


def _llama4(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return whether queries and keys are normalized. Raises UnsupportedModelError for other chunks."""
    if metadata.integer("{arch}.attention.sliding_window", _CHUNK) == 0:
        raise UnsupportedModelError("a Llama 4 without windows is not supported")
    count = config["num_hidden_layers"]
    if window_flags(metadata, count, _EVERY) != [(layer + 1) % _EVERY != 0 for layer in range(count)]:
        raise UnsupportedModelError("a Llama 4 with chunks in other layers is not supported")
    return {"use_qk_norm": config["num_local_experts"] != _MAVERICK}


def _mixture(stacks: TensorRules, *, permuted: bool = False) -> TensorRules:
    """Return a layer of attention and a mixture of experts, whose matrices are stacked in both formats."""
    return {**NORMS, **attention(permuted=permuted), **stacks}


_QWEN3 = equal_layers(
    "Qwen3MoeForCausalLM", "qwen3_moe", {**_mixture(experts()), **head_norms()}, experts=_NAMED,
    constants={"decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False, "norm_topk_prob": True},
)  # fmt: skip
_DEEPSEEK2 = GGUFArchitecture(
    "DeepseekV3ForCausalLM", "deepseek_v3",
    {
        "layer": {**NORMS, **LATENTS},
        "q": {"attn_q": TensorRule("self_attn.q_proj", "heads*query hidden")},
        "q_lora": LATENT_QUERIES,
        "kv_b": {"attn_kv_b": TensorRule("self_attn.kv_b_proj", "heads*both kv_lora")},
        "k_b": LATENT_HEADS,
        "dense": mlp(), "sparse": _GATE,
    },
    tables(), keys=(*ROUTED, "q_lora_rank", "kv_lora_rank"), experts=_ROUTED, untied=True, entries=_deepseek2,
    constants={"attention_bias": False, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    kinds=_latent_kinds, otherwise={"k_b": ("attn_k_b", "kv_b")},
    ignored=("attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight"),  # some files have both forms
    drafts=NUMBERED_DRAFTS,
)  # fmt: skip
_DEEPSEEK32 = replace(
    _DEEPSEEK2, model_class="DeepseekV32ForCausalLM", model_type="deepseek_v32", entries=_indexed, drafts=None,
    groups={**_DEEPSEEK2.groups, "layer": {**_DEEPSEEK2.groups["layer"], **INDEXER}},
    keys=(*_DEEPSEEK2.keys, "index_n_heads", "index_head_dim", "index_topk"),
)  # fmt: skip
_ERNIE = GGUFArchitecture(
    "Ernie4_5_MoeForCausalLM", "ernie4_5_moe",
    {
        "layer": {**NORMS, **attention()}, "dense": mlp(),
        "sparse": {
            **experts(), **shared_expert(optional=True),
            "exp_probs_b.bias": TensorRule(
                "mlp.moe_statics", "experts", "e_score_correction_bias", stored="1 experts", plain=True
            ),
        },
    },
    tables(), keys=("intermediate_size", "moe_num_shared_experts", "moe_layer_start_index", "moe_layer_interval"),
    experts=("moe_num_experts", "moe_k", "moe_intermediate_size"),
    constants={"use_bias": False, "moe_use_aux_free": True}, entries=_ernie,
)  # fmt: skip
_UNCORRECTED = {key: part for key, part in _ERNIE.groups["sparse"].items() if key != "exp_probs_b.bias"}

_DOTS1 = GGUFArchitecture(
    "Dots1ForCausalLM", "dots1",
    {
        "layer": {**NORMS, **attention(), **head_norms()}, "dense": mlp(),
        "sparse": {**_GATE, **experts(at="mlp.experts", plain=True)},
    },
    tables(), keys=ROUTED, experts=_ROUTED, scales_rope=True, sigmoid=True,
    constants={"scoring_func": "sigmoid", "attention_bias": False, "mlp_bias": False, "rope_scaling": None},
)  # fmt: skip

# Architecture `llama` with experts
MIXTRAL = equal_layers(
    "MixtralForCausalLM", "mixtral", _mixture(experts(f"{_SPARSE}.gate", f"{_SPARSE}.switch_mlp"), permuted=True),
    keys=(), experts=_LOCAL, by_tensor=LLAMA_BIASES, whole_heads=True,
)  # fmt: skip
ROWS: dict[str, GGUFArchitecture] = {
    "granitemoe": equal_layers(
        "GraniteMoeForCausalLM", "granitemoe",
        _mixture(experts(f"{_SPARSE}.router.layer", f"{_SPARSE}.switch_mlp"), permuted=True), keys=GRANITE_KEYS,
        experts=_LOCAL, constants={"attention_bias": False, "mlp_bias": False}, entries=granite, whole_heads=True,
    ),
    # llama.cpp takes RMSNorm for LayerNorm, and weighs experts by softmax; our decoder is true to the model.
    "phimoe": equal_layers(
        "PhiMoEForCausalLM", "phimoe",
        {**biases(NORMS), **attention(), **experts(f"{_SPARSE}.gate", f"{_SPARSE}.switch_mlp")},
        tables=biases(tables(), "output_norm", "output"), keys=(), experts=_LOCAL, entries=_phimoe, whole_heads=True,
        untied=True, half="bfloat16", constants={"router_jitter_noise": 0.01},
    ),
    "qwen2moe": equal_layers(
        "Qwen2MoeForCausalLM", "qwen2_moe",
        {**_mixture(experts()), "ffn_gate_inp_shexp": _HIDDEN_GATE, **shared_expert("mlp.shared_expert")},
        keys=("intermediate_size", "shared_expert_intermediate_size"), experts=_NAMED, whole_heads=True,
        constants={"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False},
    ),
    "qwen3moe": _QWEN3,
    "qwen3vlmoe": replace(_QWEN3, unread=SECTIONS),
    "gpt-oss": equal_layers(
        "GptOssForCausalLM", "gpt_oss",
        {
            **POST_NORMS, **attention(), "attn_sinks": TensorRule("self_attn", "heads", "sinks"),
            **experts("mlp.router", "mlp.experts"),
        },
        keys=(), experts=_LOCAL, constants={"attention_bias": True, "swiglu_limit": 7.0}, entries=_gpt_oss,
        window_period=2,
    ),
    "glm4moe": GGUFArchitecture(
        "Glm4MoeForCausalLM", "glm4_moe",
        {"layer": {**POST_NORMS, **attention(), **head_norms(optional=True)}, "dense": mlp(), "sparse": _GATE},
        tables(), keys=ROUTED, experts=_ROUTED, constants={"rope_scaling": None}, unread=SECTIONS, sigmoid=True,
        by_tensor={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"}, untied=True,
        rotates_part=True, drafts=NUMBERED_DRAFTS,
    ),
    # North Mini Code and Command A+
    "cohere2moe": GGUFArchitecture(
        "Cohere2MoeForCausalLM", "cohere2_moe",
        {
            "layer": {"attn_norm": NORMS["attn_norm"], **attention()}, "dense": mlp(),
            "sparse": {**experts(), **shared_expert(optional=True)},
        },
        tables(),
        keys=(
            "first_k_dense_replace", "num_shared_experts", "norm_topk_prob", "logit_scale",
            "prefix_dense_intermediate_size",
        ),
        experts=("num_experts", "num_experts_per_tok", "intermediate_size"), epsilon="layer_norm_eps",
        constants={
            "attention_bias": False, "expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "average",
            "prefix_dense_sliding_window_pattern": 1,
        },
        entries=_cohere, window_period=4, sigmoid=True,
        sizes=lambda config: {"inner": config["prefix_dense_intermediate_size"]},
    ),
    "dbrx": GGUFArchitecture(
        "DbrxForCausalLM", "dbrx",
        {
            "layer": {
                "attn_norm": TensorRule("norm_attn_norm.norm_1", "hidden"),
                "attn_output_norm": TensorRule("norm_attn_norm.norm_2", "hidden"),
                "attn_qkv": TensorRule("norm_attn_norm.attn.Wqkv", "qkv hidden"),
                "attn_output": TensorRule("norm_attn_norm.attn.out_proj", "hidden hidden"),
                **experts("ffn.router.layer", "ffn.switch_mlp"),
            },
        },
        tables("transformer.norm_f", "transformer.wte"), epsilon="layer_norm_eps", entries=_dbrx, whole_heads=True,
        untied=True, layer="transformer.blocks.{}", sizes=lambda config: {
            "experts": config["ffn_config"]["moe_num_experts"], "width": config["ffn_config"]["ffn_hidden_size"],
        },
    ),
    "deepseek2": _DEEPSEEK2,
    "deepseek32": _DEEPSEEK32,
    "glm-dsa": replace(_DEEPSEEK32, model_class="GlmMoeDsaForCausalLM", model_type="glm_moe_dsa"),
    "mistral4": replace(
        _DEEPSEEK2, model_class="Mistral4ForCausalLM", model_type="mistral4", entries=_mistral4, untied=False,
        constants={"rope_interleave": True, "attention_bias": False}, drafts=None,
    ),
    "minimax-m2": GGUFArchitecture(
        "MiniMaxM2ForCausalLM", "minimax",
        {
            "layer": {
                **NORMS, **attention(), **WIDE_NORMS, **experts(f"{_SPARSE}.gate", f"{_SPARSE}.switch_mlp"),
                "exp_probs_b.bias": TensorRule(_SPARSE, "experts", "e_score_correction_bias"),
            },
        },
        tables(), keys=(), experts=_LOCAL, entries=_minimax, sigmoid=True,
        constants={"shared_intermediate_size": 0, "scoring_func": "sigmoid", "use_qk_norm": True},
    ),
    "minimax-m3": GGUFArchitecture(
        "MiniMaxM3SparseForConditionalGeneration", "minimax_m3",
        {
            "layer": {**NORMS, **attention(), **head_norms()},
            "dense": mlp(),
            "sparse": {
                **experts(f"{_SPARSE}.gate", f"{_SPARSE}.switch_mlp"), **shared_expert(f"{_SPARSE}.shared_experts"),
                "exp_probs_b.bias": TensorRule(_SPARSE, "experts", "e_score_correction_bias"),
            },
            "indexer": {
                "indexer.q_proj.weight": TensorRule("self_attn.index_q_proj", "index_heads*index hidden"),
                "indexer.k_proj.weight": TensorRule("self_attn.index_k_proj", "index hidden"),
                "indexer.q_norm.weight": TensorRule("self_attn.index_q_norm", "index"),
                "indexer.k_norm.weight": TensorRule("self_attn.index_k_norm", "index"),
            },
        },
        tables(), keys=("dense_intermediate_size", "routed_scaling_factor"), experts=_LOCAL, entries=_minimax3,
        # The converter has added 1 to the weights of norms.
        constants={"use_qk_norm": True, "use_gemma_norm": False}, sigmoid=True, rotates_part=True,
        wrapped="minimax_m3_vl", kinds=_minimax3_kinds, sizes=_minimax3_sizes,
    ),
    "ernie4_5-moe": _ERNIE,
    # The class of Ling 1 has Q, K and V in one matrix; that of ERNIE computes the same.
    "bailingmoe": replace(
        _ERNIE, entries=_ling, made=_no_corrections, groups={**_ERNIE.groups, "sparse": _UNCORRECTED}
    ),
    "llama4": GGUFArchitecture(
        "Llama4ForConditionalGeneration", "llama4_text",
        {
            "layer": {**NORMS, **attention()}, "dense": mlp("feed_forward"),
            "sparse": {
                **experts("feed_forward.router", "feed_forward.experts"), **shared_expert("feed_forward.shared_expert"),
            },
        },
        tables(), keys=("intermediate_size_mlp", "interleave_moe_layer_step"), experts=_LOCAL, untied=True,
        constants={
            "attention_bias": False, "attention_chunk_size": _CHUNK, "attn_temperature_tuning": 4,
            "floor_scale": _CHUNK, "attn_scale": 0.1, "rope_scaling": None,
        },
        entries=_llama4, scales_rope=True, wrapped="llama4",
        sizes=lambda config: {"shared": config["intermediate_size"]},
    ),
    "olmoe": GGUFArchitecture(
        "OlmoeForCausalLM", "olmoe", {"layer": {**_mixture(experts()), **WIDE_NORMS}}, tables(), keys=(),
        experts=("num_experts", "num_experts_per_tok", "intermediate_size"), scales_rope=True,
        constants={"norm_topk_prob": False, "attention_bias": False, "rope_scaling": None},
    ),
    "dots1": _DOTS1,
    "hy_v3": replace(  # the same layers
        _DOTS1, entries=_hunyuan3,
        keys=("norm_topk_prob", "routed_scaling_factor", "intermediate_size"),
        constants={**_DOTS1.constants, "n_group": 1, "topk_group": 1},
        groups={
            **_DOTS1.groups,
            "sparse": {
                **experts(at="mlp.experts", plain=True), **shared_expert(),
                "exp_probs_b.": TensorRule("mlp.gate", "experts", "e_score_correction_bias"),
            },
        },
    ),
    "grok": GGUFArchitecture(
        "Grok1ForCausalLM", "grok",
        {
            "layer": {
                "attn_norm": TensorRule("pre_attn_norm", "hidden"),
                "attn_output_norm": TensorRule("post_attn_norm", "hidden"),
                "ffn_norm": TensorRule("pre_moe_norm", "hidden"),
                "layer_output_norm": TensorRule("post_moe_norm", "hidden", optional=True),
                "post_ffw_norm": TensorRule("post_moe_norm", "hidden", optional=True),  # its name in Grok 2
                **attention(), **experts(),
                **{key: replace(rule, optional=True) for key, rule in mlp().items()},  # Grok 2's
            },
        },
        tables(), experts=("num_local_experts", "num_experts_per_tok", "moe_intermediate_size"), entries=_grok,
        scales_rope=True, unread=("router_logit_softcapping", "attention.temperature_length"),  # as in llama.cpp
    ),
    "smallthinker": GGUFArchitecture(
        "SmallThinkerForCausalLM", "smallthinker",
        {"layer": {**NORMS, **attention(), **experts("mlp.primary_router", "mlp.experts")}}, tables(),
        keys=(), experts=_NAMED, entries=_smallthinker,
    ),
    "deepseek": GGUFArchitecture(
        "DeepseekForCausalLM", "deepseek",
        {"layer": {**NORMS, **attention(permuted=True)}, "dense": mlp(), "sparse": _GATE}, tables(),
        keys=("n_shared_experts", "first_k_dense_replace", "intermediate_size"), experts=_ROUTED,
        constants={"moe_layer_freq": 1, "attention_bias": False}, whole_heads=True, untied=True,
    ),
    "exaone-moe": GGUFArchitecture(
        "ExaoneMoEForCausalLM", "exaone_moe",
        {"layer": {**NORMS, **attention(), **head_norms()}, "dense": mlp(), "sparse": _GATE}, tables(),
        keys=(*GROUPED, "norm_topk_prob", "routed_scaling_factor", "num_shared_experts", "intermediate_size"),
        experts=_NAMED, constants={"scoring_func": "sigmoid", "rope_scaling": None}, entries=_exaone, sigmoid=True,
        window_period=4, scales_rope=True,
    ),
    "bailingmoe2": GGUFArchitecture(
        "BailingMoeV2ForCausalLM", "bailing_moe",
        {
            "layer": {
                **NORMS, "attn_qkv": TensorRule("attention.query_key_value", "qkv hidden"),
                "attn_output": TensorRule("attention.dense", "hidden heads*head"),
                **head_norms("attention.query_layernorm", "attention.key_layernorm", optional=True),
            },
            "dense": mlp(),
            "sparse": {
                **experts("mlp.gate.gate_proj"), **shared_expert(optional=True),
                "exp_probs_b.bias": TensorRule("mlp.gate", "experts", "expert_bias", optional=True),
            },
        },
        tables(embedding="model.word_embeddings"),
        keys=(
            *GROUPED, "norm_topk_prob", "routed_scaling_factor", "num_shared_experts", "first_k_dense_replace",
            "moe_shared_expert_intermediate_size", "intermediate_size",
        ),
        experts=_NAMED, constants={"use_bias": False, "use_qkv_bias": False, "rope_scaling": None},
        by_tensor={"use_qk_norm": "attn_q_norm.weight", "moe_router_enable_expert_bias": "exp_probs_b.bias"},
        entries=_bailing2, rotates_part=True, scales_rope=True, whole_heads=True,
    ),
    "afmoe": GGUFArchitecture(
        "AfmoeForCausalLM", "afmoe",
        {
            "layer": {
                **attention(), **head_norms(), "attn_gate": TensorRule("self_attn.gate_proj", "heads*head hidden"),
                **POST_NORMS, "ffn_norm": TensorRule("pre_mlp_layernorm", "hidden"),
                "post_ffw_norm": TensorRule("post_mlp_layernorm", "hidden"),
            },
            "dense": mlp(),
            "sparse": {
                **experts("mlp.router.gate", "mlp.experts"), **shared_expert(optional=True),
                "exp_probs_b.bias": TensorRule("mlp", "experts", "expert_bias", plain=True),
            },
        },
        tables(),
        keys=(*GROUPED, "route_norm", "route_scale", "num_shared_experts", "num_dense_layers", "intermediate_size"),
        experts=_NAMED, constants={"score_func": "sigmoid", "mup_enabled": True, "rope_scaling": None},
        window_period=4, scales_rope=True, sigmoid=True,
    ),
    "hunyuan-moe": GGUFArchitecture(
        "HunYuanMoEV1ForCausalLM", "hunyuan",
        {
            "layer": {
                **NORMS, **attention(), **head_norms("self_attn.query_layernorm", "self_attn.key_layernorm"),
                **experts("mlp.gate.wg"), **shared_expert("mlp.shared_mlp"),
            },
        },
        tables(), keys=(), experts=("num_experts", "moe_topk", "moe_intermediate_size"), entries=_hunyuan,
        constants={
            "num_shared_expert": 1, "use_mixed_mlp_moe": True, "attention_bias": False, "use_qk_norm": True,
            "use_cla": False, "cla_share_factor": 1,
            "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1.0},  # the file's base is scaled already
        },
        whole_heads=True, sizes=lambda config: {"shared": config["intermediate_size"]},
    ),
    "mellum": GGUFArchitecture(
        "MellumForCausalLM", "mellum", {"layer": {**_mixture(experts()), **head_norms()}}, tables(), keys=(),
        experts=_NAMED, constants={"norm_topk_prob": True}, entries=_mellum, window_period=4, scales_rope=True,
    ),
    "step35": GGUFArchitecture(
        "Step3p5ForCausalLM", "step3p5",
        {
            "layer": {**NORMS, **head_norms()},
            "full_attention": _step_attention(), "sliding_attention": _step_attention("local_"),
            "dense": mlp(),
            "sparse": {
                **experts("mlp.gate.gate"), **shared_expert("mlp.share_expert"),
                "exp_probs_b.bias": TensorRule("mlp.gate", "experts", "router_bias"),
            },
        },
        tables(), keys=("intermediate_size", "share_expert_dim", "moe_router_scaling_factor", "norm_expert_weight"),
        experts=("moe_num_experts", "moe_top_k", "moe_intermediate_size"),
        # The file's factors of RoPE are those of whole heads. The class computes them anew for the half that turns, as
        # the model's own code does; llama.cpp applies the first ones.
        constants={"yarn_only_types": ["full_attention"], "rope_scaling": None},
        by_tensor={"use_head_wise_attn_gate": "attn_gate.weight"}, entries=_step, head_counts=True, window_period=4,
        scales_rope=True, sigmoid=True, untied=True, sizes=_step_sizes,
    ),
    "mimo2": GGUFArchitecture(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash",
        {
            "layer": NORMS,
            "full_attention": _mimo_attention("kv_heads"), "sliding_attention": _mimo_attention("local_kv_heads"),
            "dense": mlp(),
            "sparse": {
                **experts(plain=True),
                "exp_probs_b.bias": TensorRule("mlp.gate", "experts", "e_score_correction_bias"),
            },
        },
        tables(), keys=("intermediate_size", "sliding_window_size", "routed_scaling_factor"), experts=_ROUTED,
        epsilon="layernorm_epsilon", constants={
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_shared_experts": None, "norm_topk_prob": True,
            "n_group": 1, "topk_group": 1,
        },
        entries=_mimo, head_counts=True, sigmoid=True, untied=True,
        sizes=lambda config: {"local_kv_heads": config["swa_num_key_value_heads"]},
    ),
    "laguna": GGUFArchitecture(
        "LagunaForCausalLM", "laguna",
        {
            "layer": {**NORMS, **head_norms()},
            "full_attention": _step_attention(), "sliding_attention": _step_attention("local_"),
            "dense": mlp(),
            "sparse": {
                **experts("mlp.gate.proj"), **shared_expert("mlp.shared_expert"),
                "exp_probs_b.bias": TensorRule("mlp.gate", "experts", "e_score_correction_bias"),
            },
        },
        tables(), keys=("intermediate_size", "shared_expert_intermediate_size", "moe_routed_scaling_factor"),
        experts=_NAMED, constants={"attention_bias": False, "qkv_bias": False}, entries=_laguna,
        by_tensor={"gating": "attn_gate.weight"}, head_counts=True, rotates_part=True, scales_rope=True, sigmoid=True,
        sizes=_laguna_sizes,
    ),
}  # fmt: skip
