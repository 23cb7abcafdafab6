"""Gated delta networks: Qwen 3.5, its mixtures, Qwen3-Next, Kimi Linear and K3, and Ling 3.

llama.cpp's converter stores Qwen 3.5's value heads tiled, [G0 v0, G1 v0, ..., G0 v1, ...], and the class reads them
grouped by key head. Qwen3-Next is converted to the class of Qwen 3.5's mixture, which has its projections apart.
Kimi Linear has a decay for each channel, and attention over latents without positions in layers with K/V heads. Its
files store -exp(A_log). Those of K3 store the product of the two vectors that weigh a residual sum. Ling 3 has such
layers with other projections, and gates at the output of attention; its files store exp(A_log).

Fields of a row are explained in `gguf/architecture.py`. A wrong order of heads changes logits, which
tests/models/gguf/test_layered.py compares with llama.cpp's.
"""

from functools import partial

import numpy as np
from msgspec.structs import replace

from headrace.models.architectures.ling import delta_layers
from headrace.models.gguf.architecture import (
    Config,
    Contents,
    DraftLayer,
    Entries,
    GGUFArchitecture,
    TensorRule,
    TensorRules,
    Vector,
)
from headrace.models.gguf.architectures.blocks import (
    LATENT_HEADS,
    LATENT_QUERIES,
    LATENTS,
    NORMS,
    POST_NORMS,
    attention,
    experts,
    head_norms,
    mlp,
    shared_expert,
    tables,
)
from headrace.models.gguf.architectures.mixtures import GROUPED, latent_attention
from headrace.models.gguf.keys import HEADS, SECTIONS, WIDTH, layers_of
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.target import Order
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_SECTIONS = [11, 11, 10]  # of multimodal RoPE, which are equal for text
_DELTA = "linear_attn"  # module of a delta network


def _qwen35(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the entries of Qwen 3.5: heads of values, kinds of layers, and the rotated part of a head."""
    rotated = metadata.integer("{arch}.rope.dimension_count", config["head_dim"] // 4, minimum=2)
    keys = config["linear_num_key_heads"]
    values = config["linear_num_value_heads"]
    inner = metadata.integer("{arch}.ssm.inner_size", minimum=1, maximum=WIDTH)
    if values % keys or inner % values or rotated > config["head_dim"] or rotated % 2:
        raise CheckpointError("the sizes of the GGUF's delta network do not fit each other")
    interval = config["full_attention_interval"]
    share = rotated / config["head_dim"]
    return {
        "linear_value_head_dim": inner // values,
        "partial_rotary_factor": share,
        "layer_types": [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": config["rope_theta"], "mrope_interleaved": True,
            "mrope_section": _SECTIONS, "partial_rotary_factor": share,
        },
    }  # fmt: skip


def _sizes(config: Config) -> dict[str, int]:
    """Return the sizes of a delta network: heads of values, their rows, rows of q, k and v, and of these and z."""
    keys = config["linear_num_key_heads"]
    values = config["linear_num_value_heads"]
    key = keys * config["linear_key_head_dim"]
    value = values * config["linear_value_head_dim"]
    return {
        "values": values, "value_rows": value, "mixed": 2 * key + value, "all": 2 * key + 2 * value,
        "value": config["linear_value_head_dim"],
    }  # fmt: skip


def _tiled_heads(config: Config) -> Order:
    """Return the tiled head of each grouped head of values."""
    keys = config["linear_num_key_heads"]
    return np.arange(config["linear_num_value_heads"]).reshape(-1, keys).T.reshape(-1)


def _tiled_rows(config: Config) -> Order:
    """Return the rows of tiled heads of values, in the grouped order."""
    size = config["linear_value_head_dim"]
    rows: Order = _tiled_heads(config)[:, None] * size + np.arange(size)
    return rows.reshape(-1)


def _tiled_channels(config: Config) -> Order:
    """Return the rows of queries and keys as they are, then those of tiled values."""
    key_rows = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return np.concatenate([np.arange(key_rows), key_rows + _tiled_rows(config)])


def _by_key_head(config: Config) -> list[Order]:
    """Return the rows of q, k, v and z in Qwen3-Next's joined projection, which is stored by key head."""
    keys = config["linear_num_key_heads"]
    key = config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    rows = np.arange(keys * (2 * key + 2 * value)).reshape(keys, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum([key, key, value]), axis=1)]


def _joined_channels(config: Config) -> Order:
    """Return the rows of q, k and v in the joined projection."""
    q, k, v, _ = _by_key_head(config)
    return np.concatenate([q, k, v])


def _joined_gates(config: Config) -> Order:
    """Return the rows of z in the joined projection."""
    *_, z = _by_key_head(config)
    return z


def _joined_scalars(part: int, config: Config) -> Order:
    """Return the rows of b (part 0) or a (part 1) in their joined projection, which is stored by key head."""
    rows = np.arange(2 * config["linear_num_value_heads"]).reshape(config["linear_num_key_heads"], 2, -1)
    return rows[:, part].reshape(-1)


def _delta(*, tiled: bool = False) -> dict[str, TensorRule]:
    """Return the tensors of a delta network. tiled: heads of values are stored tiled."""
    heads, rows, mixed = (_tiled_heads, _tiled_rows, _tiled_channels) if tiled else (None, None, None)
    return {
        "attn_qkv": TensorRule(f"{_DELTA}.in_proj_qkv", "mixed hidden", rows=mixed),
        "attn_gate": TensorRule(f"{_DELTA}.in_proj_z", "value_rows hidden", rows=rows),
        "ssm_beta": TensorRule(f"{_DELTA}.in_proj_b", "values hidden", rows=heads),
        "ssm_alpha": TensorRule(f"{_DELTA}.in_proj_a", "values hidden", rows=heads),
        "ssm_conv1d": TensorRule(f"{_DELTA}.conv1d", "mixed kernel", rows=mixed, stored="mixed kernel 1", plain=True),
        "ssm_dt.bias": TensorRule(_DELTA, "values", "dt_bias", rows=heads),
        "ssm_a.": TensorRule(_DELTA, "values", "A_log", rows=heads, values="log_negative"),
        "ssm_norm": TensorRule(f"{_DELTA}.norm", "value"),
        "ssm_out": TensorRule(f"{_DELTA}.out_proj", "hidden value_rows", columns=heads),
    }


# Qwen3-Next: b and a share a tensor, and in some files q, k, v and z do, too.
_NEXT = _delta()
_B = TensorRule(f"{_DELTA}.in_proj_b", "2*values hidden", rows=partial(_joined_scalars, 0), source="ssm_ba")
_A = TensorRule(f"{_DELTA}.in_proj_a", "2*values hidden", rows=partial(_joined_scalars, 1), source="ssm_ba")
_APART = {key: part for key, part in _NEXT.items() if key not in ("ssm_beta", "ssm_alpha")}
_JOINED = {key: part for key, part in _APART.items() if key not in ("attn_qkv", "attn_gate")}
_REST = {
    "layer": POST_NORMS,
    "full_attention": attention(gate=2) | head_norms(),
    "dense": mlp(),
    "sparse": {
        **experts(), **shared_expert("mlp.shared_expert"),
        "ffn_gate_inp_shexp": TensorRule("mlp.shared_expert_gate", "hidden", stored="1 hidden", plain=True),
    },
}  # fmt: skip
_KEYS = (
    "intermediate_size", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_conv_kernel_dim", "full_attention_interval",
)  # fmt: skip
_CONSTANTS = {"hidden_act": "silu", "attention_bias": False, "attn_output_gate": True}
_QWEN35 = GGUFArchitecture(
    "Qwen3_5ForConditionalGeneration", "qwen3_5_text",
    {**_REST, "linear_attention": _delta(tiled=True)}, tables(), keys=_KEYS, constants=_CONSTANTS,
    entries=_qwen35, sizes=_sizes, wrapped="qwen3_5", unread=SECTIONS,
    drafts=DraftLayer(
        at="mtp.",
        layer="layers.0.",
        projection="fc",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        norm="norm",
    ),
)  # fmt: skip
_QWEN35_MOE = replace(
    _QWEN35, model_class="Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe_text", wrapped="qwen3_5_moe",
    keys=(*_KEYS, "shared_expert_intermediate_size"), constants={**_CONSTANTS, "norm_topk_prob": True},
    experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
)  # fmt: skip


def _kimi(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the entries of Kimi Linear. Raises UnsupportedModelError for one with latents of queries."""
    if metadata.integer("{arch}.attention.q_lora_rank", 0):
        raise UnsupportedModelError("this variant of GGUF architecture 'kimi-linear' is not supported")
    return _kimi_entries(metadata, config)


def _kimi_entries(metadata: Metadata, config: Config) -> Entries:
    """Return sizes of latents, and the section of delta networks."""
    count = layers_of(metadata)
    query = metadata.integer("{arch}.attention.key_length_mla", minimum=1, maximum=HEADS)
    rotated = metadata.integer("{arch}.rope.dimension_count", minimum=2, maximum=HEADS)
    metadata.ignore("{arch}.attention.value_length")  # of an entry of K/V
    if rotated >= query:
        raise CheckpointError(f"the GGUF's heads of {query} have no part beside the {rotated} shared numbers")
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", count)
    listed = {name: [i + 1 for i in range(count) if bool(kv_heads[i]) == full] for name, full in _LAYERS.items()}
    return {
        "num_key_value_heads": config["num_attention_heads"], "model_max_length": config["max_position_embeddings"],
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": query - rotated,
        "v_head_dim": metadata.integer("{arch}.attention.value_length_mla", minimum=1, maximum=HEADS),
        "linear_attn_config": {
            **listed, "num_heads": config["num_attention_heads"],
            "head_dim": metadata.integer("{arch}.kda.head_dim", minimum=1, maximum=HEADS),
            "short_conv_kernel_size": metadata.integer("{arch}.ssm.conv_kernel", minimum=1, maximum=64),
        },
    }  # fmt: skip


def _k3(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the entries of Kimi K3: those of Kimi Linear, with whole gates and a bound of the decay."""
    entries = _kimi_entries(metadata, config)
    section = {**entries["linear_attn_config"], "use_full_rank_gate": True}
    if metadata.has("{arch}.kda.gate_lower_bound"):
        section["gate_lower_bound"] = metadata.negative("{arch}.kda.gate_lower_bound")
    return {**entries, "linear_attn_config": section}


def _k3_kinds(config: Config) -> list[tuple[str, ...]]:
    """Return the groups of each layer, as `_kimi_kinds`, with those of residual sums and of latent experts."""
    more: tuple[str, ...] = ()
    if config["attn_res_block_size"]:
        more = ("residuals",)
    queries = "q_lora" if config["q_lora_rank"] else "q"
    return [(*kinds, *((queries,) if "attention" in kinds else ()), *more) for kinds in _kimi_kinds(config)]


def _k3_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of a delta network, and the width of vectors that experts see."""
    return {**_kimi_sizes(config), "routed": config["routed_expert_hidden_size"] or config["hidden_size"]}


def _no_norms(_: Metadata, config: Config) -> dict[str, Vector]:
    """Return norms of one, where files have the product of a norm and the projection after it."""
    if not config["attn_res_block_size"]:
        return {}
    ones = np.ones(config["hidden_size"], np.float32)
    layers = range(config["num_hidden_layers"])
    at = "language_model.model"
    names = [f"{at}.layers.{layer}.{part}_res_norm.weight" for layer in layers for part in ("self_attention", "mlp")]
    return dict.fromkeys((*names, f"{at}.output_attn_res_norm.weight"), ones)


_LAYERS = {"kda_layers": False, "full_attn_layers": True}  # list in the config -> whether its layers have K/V heads


def _kimi_kinds(config: Config) -> list[tuple[str, ...]]:
    """Return the groups of each layer. The config counts layers from 1."""
    delta = config["linear_attn_config"]["kda_layers"]
    layers = range(1, config["num_hidden_layers"] + 1)
    return [("norms", "delta" if layer in delta else "attention", "sparse") for layer in layers]


def _kimi_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of a delta network: a head, and the tokens that its convolutions see."""
    linear = config["linear_attn_config"]
    return {"state": linear["head_dim"], "kernel": linear["short_conv_kernel_size"]}


_SELF = "self_attn"  # module of attention and delta networks in the class of Kimi Linear


def _taps(name: str) -> TensorRule:
    """Return the convolution of q, k or v, which files store with further axes of one."""
    stored = "heads*state kernel 1"
    return TensorRule(f"{_SELF}.{name}_conv.conv", "1 heads*state 1 kernel", stored=stored, plain=True)


def _ling3(metadata: Metadata, _file: Contents, config: Entries) -> Entries:
    """Return the entries of Ling 3. Raises UnsupportedModelError for variants that its class does not have."""
    layers = config["num_hidden_layers"]
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", layers_of(metadata))[:layers]
    period = next((layer + 1 for layer, heads in enumerate(kv_heads) if heads), 0)
    config |= latent_attention(metadata, config)
    safe = metadata.flag("{arch}.kda.safe_gate", True) and metadata.flag("{arch}.expert_weights_norm", False)
    entries = {
        "layer_group_size": period, "head_dim": metadata.integer("{arch}.kda.head_dim", minimum=1, maximum=HEADS),
        "kda_lower_bound": metadata.negative("{arch}.kda.gate_lower_bound"), "no_kda_lora": True,
        "kda_safe_gate": True, "rope_interleave": True,
    }  # fmt: skip
    deltas = delta_layers(layers, period) if period else []
    if not safe or config["rope_scaling"] is not None or deltas != [heads == 0 for heads in kv_heads]:
        raise UnsupportedModelError("this variant of GGUF architecture 'bailingmoe3' is not supported")
    return entries


def _ling3_kinds(config: Config) -> list[tuple[str, ...]]:
    """Return the groups of each layer."""
    attention = ("attention", "q_lora" if config.get("q_lora_rank") else "q")
    deltas = delta_layers(config["num_hidden_layers"], config["layer_group_size"])
    return [("norms", *(("delta",) if delta else attention), "sparse") for delta in deltas]


def _ling3_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of a delta network, as `_kimi_sizes`."""
    return {"state": config["head_dim"], "kernel": config["short_conv_kernel_size"]}


_LING = "attention"  # module of attention and delta networks in its class


def _at_ling(parts: TensorRules) -> dict[str, TensorRule]:
    """Return parts of other classes with the module's name in this class."""
    return {key: replace(part, module=part.module.replace(_SELF, _LING)) for key, part in parts.items()}


_LING3 = GGUFArchitecture(
    "BailingMoeV3ForCausalLM", "bailing_moe_v3",
    {
        "norms": NORMS,
        "delta": {
            **{f"attn_{name}": TensorRule(f"{_LING}.{name}_proj", "heads*state hidden") for name in "qkv"},
            **{
                f"ssm_conv1d_{name}": replace(_taps(name), module=f"{_LING}.{name}_conv1d") for name in "qkv"
            },
            **{f"ssm_{name}_a": TensorRule(f"{_LING}.{name}_proj", "heads*state hidden") for name in "fg"},
            "ssm_beta": TensorRule(f"{_LING}.b_proj", "heads hidden"),
            "ssm_a.": TensorRule(_LING, "heads 1", "A_log", values="log", stored="heads", plain=True),
            "ssm_dt.bias": TensorRule(_LING, "heads*state", "dt_bias"),
            "ssm_norm": TensorRule(f"{_LING}.o_norm", "state"),
            "attn_output": TensorRule(f"{_LING}.o_proj", "hidden heads*state"),
        },
        "attention": {
            **_at_ling({**LATENTS, **LATENT_HEADS}), "attn_gate": TensorRule(f"{_LING}.g_proj", "heads hidden"),
            "attn_output": TensorRule(f"{_LING}.dense", "hidden heads*value"),
        },
        "q": {"attn_q": TensorRule(f"{_LING}.q_proj", "heads*query hidden")},
        "q_lora": _at_ling(LATENT_QUERIES),
        "dense": mlp(),
        "sparse": {
            **experts(plain=True), **shared_expert(),
            "exp_probs_b.bias": TensorRule("mlp.gate", "experts", "expert_bias"),
        },
    },
    tables(embedding="model.word_embeddings"),
    keys=(
        *GROUPED, "kv_lora_rank", "q_lora_rank", "intermediate_size", "num_shared_experts", "first_k_dense_replace",
        "moe_shared_expert_intermediate_size", "routed_scaling_factor", "short_conv_kernel_size",
    ),
    experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"), entries=_ling3, head_counts=True,
    scales_rope=True, sigmoid=True, kinds=_ling3_kinds, sizes=_ling3_sizes,
)  # fmt: skip

_KDA: dict[str, TensorRule] = {
    **{f"attn_{name}": TensorRule(f"{_SELF}.{name}_proj", "heads*state hidden") for name in "qkv"},
    **{f"ssm_conv1d_{name}": _taps(name) for name in "qkv"},
    "ssm_f_a": TensorRule(f"{_SELF}.f_a_proj", "state hidden"),
    "ssm_f_b": TensorRule(f"{_SELF}.f_b_proj", "heads*state state"),
    "ssm_beta": TensorRule(f"{_SELF}.b_proj", "heads hidden"),
    "ssm_dt.bias": TensorRule(_SELF, "heads*state", "dt_bias"),
    "ssm_norm": TensorRule(f"{_SELF}.o_norm", "state"),
    "attn_output": TensorRule(f"{_SELF}.o_proj", "hidden heads*state"),
}
_RESIDUAL = TensorRule("", "hidden", stored="1 hidden", plain=True)  # norm and projection in one
_KIMI_KEYS = (
    "kv_lora_rank", "intermediate_size", "num_shared_experts", "first_k_dense_replace", "routed_scaling_factor",
)  # fmt: skip
_K3 = GGUFArchitecture(
    "KimiK3ForConditionalGeneration", "kimi_linear",
    {
        "norms": NORMS,
        "delta": {
            **_KDA, "ssm_g": TensorRule(f"{_SELF}.g_proj", "heads*state hidden"),
            "ssm_a.": TensorRule(_SELF, "heads", "A_log", values="log_negative", plain=True),
        },
        "attention": {
            **LATENTS, **LATENT_HEADS, "attn_gate": TensorRule(f"{_SELF}.g_proj", "heads*value hidden", optional=True),
        },
        "q": {"attn_q": TensorRule(f"{_SELF}.q_proj", "heads*query hidden")},
        "q_lora": LATENT_QUERIES,
        "residuals": {
            "attn_res_score": replace(_RESIDUAL, module="self_attention_res_proj"),
            "ffn_res_score": replace(_RESIDUAL, module="mlp_res_proj"),
        },
        "dense": mlp(),
        "sparse": {
            **{key: replace(part, shape=part.shape.replace("hidden", "routed")) for key, part in experts().items()},
            "ffn_gate_inp": experts()["ffn_gate_inp"], **shared_expert(optional=True),
            "exp_probs_b.bias": TensorRule("mlp", "experts", "e_score_correction_bias"),
            "ffn_routed_down": TensorRule("mlp.routed_expert_down_proj", "routed hidden", optional=True),
            "ffn_routed_up": TensorRule("mlp.routed_expert_up_proj", "hidden routed", optional=True),
            "ffn_routed_norm": TensorRule("mlp.routed_expert_norm", "routed", optional=True),
        },
    },
    {**tables(), "output_res_score": replace(_RESIDUAL, module="model.output_attn_res_proj", optional=True)},
    keys=(
        *_KIMI_KEYS, "q_lora_rank", "moe_renormalize", "activation_situ_beta", "activation_situ_linear_beta",
        "attn_res_block_size", "routed_expert_hidden_size",
    ),
    experts=("num_experts", "num_experts_per_token", "moe_intermediate_size"), entries=_k3, head_counts=True,
    by_tensor={"latent_moe_use_norm": "ffn_routed_norm.weight", "mla_use_output_gate": "attn_gate.weight"},
    constants={"hidden_act": "situ", "mla_use_nope": True, "moe_layer_freq": 1}, untied=True, sigmoid=True,
    wrapped="kimi_k3", kinds=_k3_kinds, sizes=_k3_sizes, made=_no_norms,
)  # fmt: skip

ROWS = {
    "bailingmoe3": _LING3,
    "kimi-k3": _K3,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    "qwen3next": replace(
        _QWEN35_MOE, otherwise={"linear_attention": ("attn_qkv", "joined_delta")},
        groups={
            **_REST, "linear_attention": {**_APART, "b": _B, "a": _A},
            "joined_delta": {
                **_JOINED, "b": _B, "a": _A,
                "qkv": TensorRule(f"{_DELTA}.in_proj_qkv", "all hidden", rows=_joined_channels, source="ssm_in"),
                "z": TensorRule(f"{_DELTA}.in_proj_z", "all hidden", rows=_joined_gates, source="ssm_in"),
            },
        },
    ),
    "kimi-linear": GGUFArchitecture(
        "KimiLinearForCausalLM", "kimi_linear",
        {
            "norms": NORMS,
            "delta": {
                **_KDA, "ssm_g_a": TensorRule(f"{_SELF}.g_a_proj", "state hidden"),
                "ssm_g_b": TensorRule(f"{_SELF}.g_b_proj", "heads*state state"),
                "ssm_a.": TensorRule(
                    _SELF, "1 1 heads 1", "A_log", values="log_negative", stored="1 1 heads 1", plain=True,
                ),
            },
            "attention": {"attn_q": TensorRule(f"{_SELF}.q_proj", "heads*query hidden"), **LATENTS, **LATENT_HEADS},
            "dense": mlp(),
            "sparse": {
                **experts(), **shared_expert(optional=True),
                "exp_probs_b.bias": TensorRule("mlp", "experts", "e_score_correction_bias"),
            },
        },
        tables(),
        keys=_KIMI_KEYS,
        experts=("num_experts", "num_experts_per_token", "moe_intermediate_size"), entries=_kimi, head_counts=True,
        constants={"mla_use_nope": True, "moe_renormalize": True, "moe_layer_freq": 1}, untied=True, sigmoid=True,
        kinds=_kimi_kinds, sizes=_kimi_sizes,
    ),
}  # fmt: skip
