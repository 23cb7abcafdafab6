"""Gemma 1 to 4 and 3n.

Gemma 3n and 4 have inputs per layer, and last layers that read the K/V of earlier ones. Gemma 4 has two sizes of heads,
and a mixture in one size. RoPE of its full attention turns a part of each head ("proportional"); `rope_freqs.weight`
divides the frequencies of the rest by 1e30. Gemma 3n has alternating updates of several streams and a low-rank layer
beside attention; the file states the sparsity of activations in standard deviations.

Guard: tests/models/gguf/test_layered.py.
"""

import math

from headrace.models.gguf.architecture import Config, Contents, Entries, GGUFArchitecture, TensorRule
from headrace.models.gguf.architectures.blocks import (
    NORMS,
    SANDWICH_NORMS,
    attention,
    equal_layers,
    experts,
    head_norms,
    minus_one,
    mlp,
    tables,
)
from headrace.models.gguf.keys import HEADS, KEYS, WIDTH, layer_type, layers_of, mixture, window_period
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import ROPE_FACTORS
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

# Layer counts of the two sizes that scale queries by the width per head instead of the head size. A GGUF does not state
# the scale; config.json does, as `query_pre_attn_scalar`.
_GEMMA2_WIDE = 46  # 27B: 4608 / 32 heads = 144
_GEMMA3_WIDE = 62  # 27B: 5376 / 32 heads = 168
_GEMMA3_PATTERN = 6  # layers, of which the last has no window; where the file is silent
_GEMMA2_WINDOW = 4096  # tokens, likewise
_SLIDING = layer_type(True)
_FULL = layer_type(False)


def _gemma2(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the scale of queries and the window of Gemma 2, which every second layer has."""
    layers = config["num_hidden_layers"]
    if layers > 1 and window_period(metadata, layers, 2) != 2:
        raise UnsupportedModelError("Gemma 2 without a window in every second layer is not supported")
    return {
        "query_pre_attn_scalar": _query_scale(config, layers == _GEMMA2_WIDE),
        "sliding_window": metadata.integer("{arch}.attention.sliding_window", _GEMMA2_WINDOW, minimum=1),
    }


def _gemma3(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the scale of queries and the period of layers without windows of Gemma 3."""
    layers = config["num_hidden_layers"]
    return {
        "query_pre_attn_scalar": _query_scale(config, layers == _GEMMA3_WIDE),
        "sliding_window_pattern": window_period(metadata, layers, _GEMMA3_PATTERN),
    }


def _query_scale(config: Config, wide: bool) -> int:
    """Return the divisor of Gemma's queries. wide: for the width per head instead of the head size."""
    size: int = config["head_dim"]
    if wide:
        size = config["hidden_size"] // config["num_attention_heads"]
    return size


def _gemma4(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the entries of Gemma 4. Raises UnsupportedModelError for sizes of layers that its class cannot have."""
    count = layers_of(metadata)
    windowed = metadata.flags("{arch}.attention.sliding_window_pattern", count)
    kinds = [layer_type(slides) for slides in windowed]
    shared = metadata.integer("{arch}.attention.shared_kv_layers", 0, maximum=count - 1)
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", count, minimum=1, maximum=HEADS)
    inner = metadata.per_layer("{arch}.feed_forward_length", count, minimum=1, maximum=WIDTH)

    # Sizes: K/V heads by kind of layer; feed-forward widths of the layers with their own K/V, and of the last ones,
    # which read earlier K/V. Each may have one value.
    heads = {kind: {n for n, each in zip(kv_heads, kinds, strict=True) if each == kind} for kind in (_SLIDING, _FULL)}
    widths = [inner[: count - shared], inner[count - shared :]]
    double = bool(shared) and inner[-1] == 2 * inner[0]
    if any(len(each) > 1 for each in heads.values()) or any(len(set(each)) > 1 for each in widths):
        raise UnsupportedModelError("a Gemma 4 with other sizes in each layer is not supported")
    if inner[-1] != inner[0] * (2 if double else 1):
        raise UnsupportedModelError(f"a Gemma 4 with feed-forwards of {inner[0]} and {inner[-1]} is not supported")

    # Keys are values, too, if the first layer of full attention has no projection of values.
    first_full = next((layer for layer, kind in enumerate(kinds[: count - shared]) if kind == _FULL), None)
    keys_are_values = first_full is not None and f"blk.{first_full}.attn_v.weight" not in file.shapes
    full = next(iter(heads[_FULL]), kv_heads[0])
    sliding = next(iter(heads[_SLIDING]), full)
    if not keys_are_values and full != sliding:
        raise UnsupportedModelError("a Gemma 4 with two counts of K/V heads and values of their own is not supported")

    # The entries, with those of experts if there are some
    has_experts = metadata.has("{arch}.expert_count")
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    return (mixture(metadata, names) if has_experts else {}) | {
        "head_dim": metadata.integer("{arch}.attention.key_length_swa", minimum=1, maximum=HEADS),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": sliding,
        "num_global_key_value_heads": full,
        "num_kv_shared_layers": shared,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": double,
        "layer_types": kinds,
        "attention_k_eq_v": keys_are_values,
        "final_logit_softcapping": metadata.number("{arch}.final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": metadata.integer("{arch}.embedding_length_per_layer_input", 0, maximum=HEADS),
        "vocab_size_per_layer_input": _input_vocab(file),
        "enable_moe_block": has_experts,
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": config["rope_theta"],
                "partial_rotary_factor": _share(metadata, file.rope_factors),
            },
            _SLIDING: {"rope_type": "default", "rope_theta": KEYS["rope_local_base_freq"].read(metadata)},
        },
    }


def _input_vocab(file: Contents) -> int:
    """Return the rows of the table of inputs per layer."""
    return file.shapes.get("per_layer_token_embd.weight", (file.vocab_size,))[0]


def _share(metadata: Metadata, factors: list[float] | None) -> float:
    """Return the rotated part of a head of full attention, from the content of `rope_freqs.weight`."""
    if factors is None:
        return 1.0
    # Pairs that turn have a factor of 1, the others one so large (1e30) that they stand still.
    turned = sum(factor == 1 for factor in factors)
    if factors[:turned] != [1.0] * turned or any(factor < 1e20 for factor in factors[turned:]):
        raise UnsupportedModelError("rope_freqs.weight does not turn a part of each head")
    if 2 * len(factors) != metadata.integer("{arch}.attention.key_length"):
        raise CheckpointError(f"rope_freqs.weight has {len(factors)} factors for heads of another size")
    return turned / len(factors)


def _gemma4_kinds(config: Config) -> list[tuple[str, ...]]:
    """Return the groups of each layer of Gemma 4."""
    count = config["num_hidden_layers"]
    shared = config["num_kv_shared_layers"]
    all_layers = ["inputs"] if config["hidden_size_per_layer_input"] else []  # groups that every layer has
    all_layers += ["experts"] if config["enable_moe_block"] else []
    layer_kinds = []
    for layer, kind in enumerate(config["layer_types"]):
        name = "full" if kind == _FULL else "sliding"
        wide = config["use_double_wide_mlp"] and layer >= count - shared
        without_v = kind == _FULL and config["attention_k_eq_v"]
        keys: tuple[str, ...]
        if layer >= count - shared:
            keys = ()
        elif without_v:
            keys = (f"{name}_k",)
        else:
            keys = (f"{name}_k", f"{name}_v")
        layer_kinds.append(("norms", name, *keys, "wide" if wide else "mlp", *all_layers))
    return layer_kinds


def _sizes(config: Config) -> dict[str, int]:
    """Return the sizes of inputs per layer."""
    per_layer = config["hidden_size_per_layer_input"]
    return {
        "inputs": per_layer, "all_inputs": per_layer * config["num_hidden_layers"],
        "input_vocab": config["vocab_size_per_layer_input"],
    }  # fmt: skip


def _gemma4_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of inputs per layer, and of heads in full attention."""
    full = {"full_head": config["global_head_dim"], "full_kv_heads": config["num_global_key_value_heads"]}
    return _sizes(config) | full


def _attention(full: str) -> dict[str, dict[str, TensorRule]]:
    """Return the groups of one kind of attention. full: prefix of its sizes, "full_" or "" for sliding layers."""
    name = "full" if full else "sliding"
    kv = f"{full}kv_heads*{full}head"
    return {
        name: {
            "attn_q": TensorRule("self_attn.q_proj", f"heads*{full}head hidden"),
            "attn_output": TensorRule("self_attn.o_proj", f"hidden heads*{full}head"),
            "attn_q_norm": TensorRule("self_attn.q_norm", f"{full}head"),
        },
        f"{name}_k": {
            "attn_k": TensorRule("self_attn.k_proj", f"{kv} hidden"),
            "attn_k_norm": TensorRule("self_attn.k_norm", f"{full}head"),
        },
        f"{name}_v": {"attn_v": TensorRule("self_attn.v_proj", f"{kv} hidden")},
    }


def _input_tables(at: str, *, optional: bool) -> dict[str, TensorRule]:
    """Return the tensors outside layers of inputs per layer."""
    return {
        "per_layer_token_embd": TensorRule(f"{at}.embed_tokens_per_layer", "input_vocab all_inputs", optional=optional),
        "per_layer_model_proj": TensorRule(f"{at}.per_layer_model_projection", "all_inputs hidden", optional=optional),
        "per_layer_proj_norm": TensorRule(f"{at}.per_layer_projection_norm", "inputs", optional=optional),
    }


_INPUTS = {
    "inp_gate": TensorRule("per_layer_input_gate", "inputs hidden"),
    "proj": TensorRule("per_layer_projection", "hidden inputs"),
    "post_norm": TensorRule("post_per_layer_input_norm", "hidden"),
}

_CLIP = 120.0  # of the coefficients of updates, which the file does not state; `altup_coef_clip` in config.json
_STREAMS = 4  # of Gemma 3n's alternating updates


def _gemma3n(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the entries of Gemma 3n. Raises UnsupportedModelError for other streams."""
    count = layers_of(metadata)
    windowed = metadata.flags("{arch}.attention.sliding_window_pattern", count)
    scales = metadata.numbers("{arch}.activation_sparsity_scale", count, infinite=True)
    rank = file.shapes.get("blk.0.laurel_l.weight", ())[:1]
    if not config["tie_word_embeddings"] or metadata.integer("{arch}.altup.num_inputs", _STREAMS) != _STREAMS:
        raise UnsupportedModelError("this variant of GGUF architecture 'gemma3n' is not supported")
    if not rank:
        raise CheckpointError("tensor blk.0.laurel_l.weight is missing")
    return {
        "laurel_rank": rank[0],
        "hidden_size_per_layer_input": metadata.integer(
            "{arch}.embedding_length_per_layer_input", minimum=1, maximum=HEADS
        ),
        "vocab_size_per_layer_input": _input_vocab(file),
        "num_kv_shared_layers": metadata.integer("{arch}.attention.shared_kv_layers", 0, maximum=count - 1),
        "layer_types": [layer_type(slides) for slides in windowed],
        # Share of values below so many standard deviations of a normal distribution
        "activation_sparsity_pattern": [0.5 + 0.5 * math.erf(scale / math.sqrt(2)) for scale in scales],
        "altup_active_idx": metadata.integer("{arch}.altup.active_idx", 0, maximum=_STREAMS - 1),
    }


def _gemma3n_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of inputs per layer, of the low-rank layer and of the streams."""
    return _sizes(config) | {"rank": config["laurel_rank"], "streams": _STREAMS, "others": _STREAMS - 1}


_MODEL = "model.language_model"


def _projections(module: str, source: str) -> dict[str, TensorRule]:
    """Return the matrices of a stack, one for each stream but the first."""
    return {
        f"{source}_{i}": TensorRule(f"{_MODEL}.{module}.{i}", "others hidden hidden", source=source, index=i)
        for i in range(_STREAMS - 1)
    }


_HALF = "bfloat16"  # activations overflow float16
_GELU = {"attention_bias": False, "hidden_act": "gelu_pytorch_tanh"}
_TIED = minus_one(tables(head=None))
ROWS: dict[str, GGUFArchitecture] = {
    "gemma": equal_layers(
        "GemmaForCausalLM", "gemma", minus_one({**NORMS, **attention(), **mlp()}), tables=_TIED, constants=_GELU,
        half=_HALF,
    ),
    "gemma2": equal_layers(
        "Gemma2ForCausalLM", "gemma2", minus_one({**SANDWICH_NORMS, **attention(), **mlp()}), tables=_TIED,
        keys=("intermediate_size", "attn_logit_softcapping", "final_logit_softcapping"), constants=_GELU, half=_HALF,
        entries=_gemma2,
    ),
    "gemma3": equal_layers(
        "Gemma3ForCausalLM", "gemma3_text",
        minus_one({**SANDWICH_NORMS, **attention(), **head_norms(), **mlp()}), tables=minus_one(tables()),
        keys=("intermediate_size", "sliding_window", "rope_local_base_freq"), constants=_GELU, half=_HALF,
        entries=_gemma3,
    ),
    "gemma4": GGUFArchitecture(
        "Gemma4ForCausalLM", "gemma4_text",
        {
            "norms": {**SANDWICH_NORMS, "layer_output_scale": TensorRule("", "1", "layer_scalar", optional=True)},
            **_attention(""), **_attention("full_"), "mlp": mlp(), "wide": mlp(inner="2*inner"), "inputs": _INPUTS,
            "experts": {
                **experts("router.proj", "experts.switch_glu"),
                "ffn_gate_inp.scale": TensorRule("router", "hidden", "scale"),
                "ffn_down_exps.scale": TensorRule("router", "experts", "per_expert_scale"),
                "pre_ffw_norm_2": TensorRule("pre_feedforward_layernorm_2", "hidden"),
                "post_ffw_norm_1": TensorRule("post_feedforward_layernorm_1", "hidden"),
                "post_ffw_norm_2": TensorRule("post_feedforward_layernorm_2", "hidden"),
            },
        },
        {**tables(), **_input_tables("model", optional=True)}, keys=("sliding_window",), entries=_gemma4,
        constants={"hidden_activation": "gelu_pytorch_tanh"}, head_counts=True, kinds=_gemma4_kinds,
        sizes=_gemma4_sizes, ignored=("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"),
        config_tensors=(ROPE_FACTORS,),
    ),
    "gemma3n": GGUFArchitecture(
        "Gemma3nForCausalLM", "gemma3n_text",
        {
            "layer": {
                **SANDWICH_NORMS, **attention(), **head_norms(), **mlp(), **_INPUTS,
                "altup_correct_coef": TensorRule("altup.correction_coefs", "streams streams"),
                "altup_correct_scale": TensorRule("altup", "hidden", "correct_output_scale"),
                "altup_predict_coef": TensorRule("altup.prediction_coefs", "streams*streams streams"),
                "altup_router": TensorRule("altup.modality_router", "streams hidden"),
                "altup_router_norm": TensorRule("altup.router_norm", "hidden"),
                "laurel_l": TensorRule("laurel.linear_left", "rank hidden"),
                "laurel_r": TensorRule("laurel.linear_right", "hidden rank"),
                "laurel_post_norm": TensorRule("laurel.post_laurel_norm", "hidden"),
            },
        },
        {
            **tables(f"{_MODEL}.norm", f"{_MODEL}.embed_tokens", None), **_input_tables(_MODEL, optional=False),
            **_projections("altup_projections", "altup_proj"),
            **_projections("altup_unembed_projections", "altup_unembd_proj"),
        },
        keys=("intermediate_size", "sliding_window", "rope_local_base_freq", "final_logit_softcapping"),
        constants={
            "altup_num_inputs": _STREAMS, "altup_coef_clip": _CLIP, "altup_correct_scale": True,
            "hidden_activation": "gelu_pytorch_tanh", "rope_scaling": None,
        },
        entries=_gemma3n, layer=f"{_MODEL}.layers.{{}}", sizes=_gemma3n_sizes,
    ),
}  # fmt: skip
