"""Mamba-2 alone and in hybrids (Granite 4, Nemotron-H with and without experts, Falcon-H1), Mamba-1, and Jamba with it.

The files store -exp(A_log), and A, D and norms of Mamba-2 with another axis. Attention of Granite 4 and Nemotron-H has
no positions, so its interleaved rows of Q and K need no order.

Guard: tests/models/gguf/test_layered.py.
"""

from headrace.models.gguf.architecture import Config, Contents, Entries, GGUFArchitecture, TensorRule
from headrace.models.gguf.architectures.blocks import NORMS, attention, experts, mlp, tables, ungated_mlp
from headrace.models.gguf.architectures.dense import GRANITE_KEYS
from headrace.models.gguf.keys import KEYS, WIDTH, check_sigmoid, has_experts, layers_of, mixture
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.names import stated
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_LONGEST_STEP = 1e30  # steps are not limited


def _mixer(at: str, *, norm: bool = True) -> dict[str, TensorRule]:
    """Return the tensors of a Mamba-2 layer. norm: all files have one."""
    return {
        "ssm_in": TensorRule(f"{at}.in_proj", "all hidden"),
        "ssm_conv1d": TensorRule(f"{at}.conv1d", "mixed kernel", stored="mixed kernel 1", plain=True),
        "ssm_conv1d.bias": TensorRule(f"{at}.conv1d", "mixed", "bias", optional=True),
        "ssm_dt.bias": TensorRule(at, "mamba_heads", "dt_bias"),
        "ssm_a.": TensorRule(at, "mamba_heads 1", "A_log", values="log_negative", stored="mamba_heads", plain=True),
        "ssm_d.": TensorRule(at, "mamba_heads 1", "D", stored="mamba_heads", plain=True),
        "ssm_norm": TensorRule(f"{at}.norm", "groups per_group", stored="states", plain=True, optional=not norm),
        "ssm_out": TensorRule(f"{at}.out_proj", "hidden states"),
    }


_KEYS = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_CONV_BIAS = "ssm_conv1d.bias"
# Entries for the same size in several classes
_HEADS = ("mamba_n_heads", "mamba_num_heads", "num_heads")
_GROUPS = ("mamba_n_groups", "n_groups")


def _head_size(metadata: Metadata, config: Config) -> int:
    """Return the size of a head of Mamba-2. Raises CheckpointError for sizes that do not fit each other."""
    heads = stated(config, *_HEADS)
    groups = stated(config, *_GROUPS)
    inner = metadata.integer("{arch}.ssm.inner_size", minimum=1, maximum=WIDTH)
    if inner % heads or heads % groups:
        raise CheckpointError(f"{heads} Mamba heads of {inner} in {groups} groups do not fit")
    return inner // heads


def _mamba_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of Mamba-2 layers."""
    heads = stated(config, *_HEADS)
    inner = heads * stated(config, "mamba_d_head", "mamba_head_dim", "head_dim")
    groups = stated(config, *_GROUPS)
    mixed = inner + 2 * groups * stated(config, "mamba_d_state", "ssm_state_size", "state_size")
    return {
        "mamba_heads": heads, "states": inner, "groups": groups, "per_group": inner // groups,
        "mixed": mixed, "all": inner + mixed + heads,
    }  # fmt: skip


def _granite(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the entries of Granite 4: kinds of layers, and widths with or without experts."""
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", layers_of(metadata))
    if metadata.flag("{arch}.rope.scaling.finetuned", True):  # llama.cpp's default
        raise UnsupportedModelError("GGUF architecture 'granitehybrid' with RoPE is not supported")
    config = {
        "mamba_d_head": _head_size(metadata, config),
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
    }
    if not has_experts(metadata):
        inner = KEYS["intermediate_size"].read(metadata)
        return config | {"intermediate_size": inner, "shared_intermediate_size": inner, "num_local_experts": 0}
    shared = metadata.integer("{arch}.expert_shared_feed_forward_length", minimum=1, maximum=WIDTH)
    names = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
    return config | mixture(metadata, names) | {"shared_intermediate_size": shared}


_SHARED = "shared_mlp"
_SPARSE = "block_sparse_moe"
_GRANITE_HYBRID = GGUFArchitecture(
    "GraniteMoeHybridForCausalLM", "granitemoehybrid",
    {
        "layer": NORMS, "mamba": _mixer("mamba"), "attention": attention(), "dense": mlp(),
        "sparse": {
            **experts(f"{_SPARSE}.router.layer", f"{_SPARSE}.switch_mlp"),
            "ffn_gate_shexp": TensorRule(f"{_SHARED}.input_linear", "shared hidden", below="ffn_up_shexp"),
            "ffn_down_shexp": TensorRule(f"{_SHARED}.output_linear", "hidden shared"),
        },
    },
    tables(), keys=(*_KEYS, "attention_multiplier", *GRANITE_KEYS), by_tensor={"mamba_conv_bias": _CONV_BIAS},
    constants={
        "mamba_proj_bias": False, "time_step_limit": [0.0, _LONGEST_STEP], "attention_bias": False, "mlp_bias": False,
        "position_embedding_type": "nope",
    },
    entries=_granite, head_counts=True, sizes=_mamba_sizes,
)  # fmt: skip


def _nemotron(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the entries of Nemotron-H. Each layer is one block: attention with K/V heads, else a feed-forward with a
    width, else Mamba-2."""
    count = layers_of(metadata)
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", count)
    inner = metadata.per_layer("{arch}.feed_forward_length", count)
    mixed = has_experts(metadata)
    feed_forward = "E" if mixed else "-"
    letters = ["*" if heads else "M" for heads in kv_heads]
    letters = [feed_forward if size and letter == "M" else letter for letter, size in zip(letters, inner, strict=True)]
    if "output.weight" not in file.shapes:
        raise UnsupportedModelError("a Nemotron-H with tied embeddings is not supported")
    config = {
        "mamba_head_dim": _head_size(metadata, config),
        "hybrid_override_pattern": "".join(letters[: config["num_hidden_layers"]]),
        "intermediate_size": max(max(inner), 1),
    }
    if not mixed:
        return config
    check_sigmoid(metadata)
    routed = ("n_shared_experts", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")
    names = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    return config | {key: KEYS[key].read(metadata) for key in routed} | mixture(metadata, names) | {
        "moe_shared_expert_intermediate_size": metadata.integer(
            "{arch}.expert_shared_feed_forward_length", 0, maximum=WIDTH
        ),
        "moe_latent_size": metadata.integer("{arch}.moe_latent_size", 0, maximum=1 << 20) or None,
    }  # fmt: skip


def _nemotron_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of Mamba-2 and of experts, whose input may be a latent of the layer's."""
    latent = config.get("moe_latent_size") or 0
    shared = config.get("moe_shared_expert_intermediate_size", 0)
    return _mamba_sizes(config) | {"latent": latent, "inputs": latent or config["hidden_size"], "shared": shared}


def _nemotron_kinds(config: Config) -> list[tuple[str, ...]]:
    """Return the groups of each layer, by its letter in the pattern."""
    shared = ("shared",) if config.get("n_shared_experts") else ()
    latent = ("latent",) if config.get("moe_latent_size") else ()
    return [("norms", kind, *(shared + latent if kind == "E" else ())) for kind in config["hybrid_override_pattern"]]


_MIXER = "mixer"
_NEMOTRON_GROUPS: dict[str, dict[str, TensorRule]] = {
    "norms": {"attn_norm": TensorRule("norm", "hidden")},
    "M": _mixer(_MIXER),
    "*": attention(_MIXER),
    "-": ungated_mlp(f"{_MIXER}.up_proj", f"{_MIXER}.down_proj"),
    "E": {
        "ffn_gate_inp": TensorRule(f"{_MIXER}.gate", "experts hidden", plain=True),
        "exp_probs_b.bias": TensorRule(f"{_MIXER}.gate", "experts", "e_score_correction_bias"),
        "ffn_up_exps": TensorRule(f"{_MIXER}.switch_mlp.fc1", "experts width inputs"),
        "ffn_down_exps": TensorRule(f"{_MIXER}.switch_mlp.fc2", "experts inputs width"),
    },
    "shared": {
        "ffn_up_shexp": TensorRule(f"{_MIXER}.shared_experts.up_proj", "shared hidden"),
        "ffn_down_shexp": TensorRule(f"{_MIXER}.shared_experts.down_proj", "hidden shared"),
    },
    "latent": {
        "ffn_latent_down": TensorRule(f"{_MIXER}.fc1_latent_proj", "latent hidden"),
        "ffn_latent_up": TensorRule(f"{_MIXER}.fc2_latent_proj", "hidden latent"),
    },
}
_NEMOTRON_H = GGUFArchitecture(
    "NemotronHForCausalLM", "nemotron_h", _NEMOTRON_GROUPS, tables("backbone.norm_f", "backbone.embeddings"),
    keys=("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel"), by_tensor={"use_conv_bias": _CONV_BIAS},
    epsilon="layer_norm_epsilon", entries=_nemotron, head_counts=True, layer="backbone.layers.{}",
    kinds=_nemotron_kinds, sizes=_nemotron_sizes,
    constants={
        "mamba_proj_bias": False, "attention_bias": False, "mlp_bias": False, "use_bias": False,
        "tie_word_embeddings": False,
    },
)  # fmt: skip


def _falcon(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the sizes of Falcon-H1's mixer. Raises UnsupportedModelError for norms of several groups."""
    if config["mamba_rms_norm"] and config["mamba_n_groups"] > 1:
        raise UnsupportedModelError("a Falcon-H1 with norms of several groups is not supported")
    size = _head_size(metadata, config)
    return {"mamba_d_head": size, "mamba_d_ssm": config["mamba_n_heads"] * size}


# llama.cpp's converter folds all multipliers into the weights.
_ONES = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")
_FALCON_H1 = GGUFArchitecture(
    "FalconH1ForCausalLM", "falcon_h1",
    {
        "layer": {
            "attn_norm": NORMS["attn_norm"], "ffn_norm.": TensorRule("pre_ff_layernorm", "hidden"),
            **attention(), **_mixer("mamba", norm=False), **mlp("feed_forward"),
        },
    },
    tables("model.final_layernorm"), keys=("intermediate_size", *_KEYS), entries=_falcon, sizes=_mamba_sizes,
    by_tensor={"mamba_conv_bias": _CONV_BIAS, "mamba_rms_norm": "ssm_norm.weight"},
    constants={
        "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mlp_bias": False, "attention_bias": False,
        "projectors_bias": False, **{f"{name}_multiplier": 1.0 for name in _ONES}, "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    },
)  # fmt: skip


def _mamba2(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the sizes of Mamba-2 alone."""
    size = _head_size(metadata, config)
    return {"head_dim": size, "intermediate_size": config["num_heads"] * size}


_MAMBA2 = GGUFArchitecture(
    "Mamba2ForCausalLM", "mamba2", {"layer": {"attn_norm": TensorRule("norm", "hidden"), **_mixer(_MIXER)}},
    tables("backbone.norm_f", "backbone.embeddings"), epsilon="layer_norm_epsilon",
    keys=("num_heads", "time_step_rank", "n_groups", "state_size", "conv_kernel"),
    by_tensor={"use_conv_bias": _CONV_BIAS}, constants={"use_bias": False, "time_step_limit": [0.0, _LONGEST_STEP]},
    entries=_mamba2, attends=False, layer="backbone.layers.{}", sizes=_mamba_sizes,
)  # fmt: skip


def _jamba(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the entries of Jamba: kinds of layers, and which of them have experts."""
    count = layers_of(metadata)
    inner = metadata.integer("{arch}.ssm.inner_size", minimum=1, maximum=WIDTH)
    if inner % config["hidden_size"]:
        raise CheckpointError(f"Mamba layers of {inner} are no multiple of the width {config['hidden_size']}")
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", count)
    attends = [heads > 0 for heads in kv_heads]
    if all(attends) or not any(attends):
        raise UnsupportedModelError("a Jamba without attention or without Mamba layers is not supported")
    period, offset = _sparse_layers([f"blk.{layer}.ffn_gate_inp.weight" in file.shapes for layer in range(count)])
    experts = metadata.integer("{arch}.expert_count", 0, maximum=1 << 14)
    return {
        "mamba_expand": inner // config["hidden_size"],
        "layers_block_type": ["attention" if attend else "mamba" for attend in attends],
        "attn_layer_period": count, "attn_layer_offset": attends.index(True),
        "expert_layer_period": period, "expert_layer_offset": offset, "num_experts": max(experts, 1),
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count", 1, minimum=0, maximum=max(experts, 1)),
    }  # fmt: skip


def _sparse_layers(sparse: list[bool]) -> tuple[int, int]:
    """Return (period, offset): the class has experts in layers whose number and the offset make a multiple."""
    if not any(sparse):
        return 1, 0
    for period in range(1, len(sparse) + 1):
        for offset in range(period):
            if sparse == [(layer + offset) % period == 0 for layer in range(len(sparse))]:
                return period, offset
    raise UnsupportedModelError("a Jamba with experts in these layers is not supported")


def _mamba1_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of Mamba-1 layers: rank of steps, state, width, and rows of the projection to dt, B and C."""
    rank = stated(config, "mamba_dt_rank", "time_step_rank")
    state = stated(config, "mamba_d_state", "state_size")
    states = stated(config, "mamba_expand") * config["hidden_size"] or config["intermediate_size"]
    return {"rank": rank, "state": state, "states": states, "inputs": rank + 2 * state}


def _mixer1(at: str) -> dict[str, TensorRule]:
    """Return the tensors of a Mamba-1 layer, without norms."""
    return {
        "ssm_in": TensorRule(f"{at}.in_proj", "2*states hidden"),
        "ssm_conv1d": TensorRule(f"{at}.conv1d", "states kernel", stored="states kernel 1", plain=True),
        "ssm_conv1d.bias": TensorRule(f"{at}.conv1d", "states", "bias"),
        "ssm_x": TensorRule(f"{at}.x_proj", "inputs states"),
        "ssm_dt": TensorRule(f"{at}.dt_proj", "states rank"),
        "ssm_dt.bias": TensorRule(f"{at}.dt_proj", "states", "bias"),
        "ssm_a.": TensorRule(at, "states state", "A_log", values="log_negative", plain=True),
        "ssm_d.": TensorRule(at, "states", "D", plain=True),
        "ssm_out": TensorRule(f"{at}.out_proj", "hidden states"),
    }


_JAMBA = GGUFArchitecture(
    "JambaForCausalLM", "jamba",
    {
        "layer": {"attn_norm": NORMS["attn_norm"], "ffn_norm": TensorRule("pre_ff_layernorm", "hidden")},
        "attention": attention(), "dense": mlp("feed_forward"),
        "sparse": experts("feed_forward.router", "feed_forward.switch_mlp"),
        "mamba": {
            **_mixer1("mamba"), "ssm_dt_norm": TensorRule("mamba.dt_layernorm", "rank"),
            "ssm_b_norm": TensorRule("mamba.b_layernorm", "state"),
            "ssm_c_norm": TensorRule("mamba.c_layernorm", "state"),
        },
    },
    tables("model.final_layernorm"), keys=("intermediate_size", "mamba_d_conv", "mamba_d_state", "mamba_dt_rank"),
    entries=_jamba, head_counts=True, whole_heads=True, sizes=_mamba1_sizes,
)  # fmt: skip


def _mamba1(metadata: Metadata, _file: Contents, _config: Config) -> Entries:
    """Return the entries of Mamba-1 alone."""
    return {
        "intermediate_size": metadata.integer("{arch}.ssm.inner_size", minimum=1, maximum=WIDTH),
        "use_bcdt_rms": metadata.flag("{arch}.ssm.dt_b_c_rms", False),
    }


_MAMBA = GGUFArchitecture(
    "MambaForCausalLM", "mamba", {"layer": {"attn_norm": TensorRule("norm", "hidden"), **_mixer1(_MIXER)}},
    tables("backbone.norm_f", "backbone.embeddings"), keys=("state_size", "conv_kernel", "time_step_rank"),
    epsilon="layer_norm_epsilon", constants={"use_bias": False, "use_conv_bias": True}, entries=_mamba1,
    attends=False, layer="backbone.layers.{}", sizes=_mamba1_sizes,
)  # fmt: skip

ROWS = {
    "granitehybrid": _GRANITE_HYBRID,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "falcon-h1": _FALCON_H1,
    "mamba": _MAMBA,
    "mamba2": _MAMBA2,
    "jamba": _JAMBA,
}
