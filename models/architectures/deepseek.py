"""DeepSeek, Kimi K2, Mistral 4, Youtu, dots.llm1, Ling 1 and 2, Sarvam: mixtures with shared experts.

Most have attention over latents.

Ling 3 has layers of its own, in `ling.py`.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import QKV, Architecture, Config, HeadNames
from headrace.models.architectures.config import ExpertLayers, ExpertsConfig, Family, RopeConfig
from headrace.models.architectures.experts import (
    after_dense_layers,
    corrected_experts,
    count_experts,
    deepseek_experts,
    several_experts,
)
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.latent import even_entries, latent_config, latent_with_eps, with_indexers
from headrace.models.architectures.layers import full_rope, head_size, state_usual_names
from headrace.models.architectures.llama import growing_queries
from headrace.runtime.errors import UnsupportedModelError

DEEPSEEK_HEAD = HeadNames(
    prefix="model.layers.{}.",
    layer="",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    norm="shared_head.norm",
)


def _first_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of the first DeepSeek: chosen by a softmax, whose scores are the weights."""
    if not fields.values.get("n_routed_experts"):
        return [None] * layers
    size = fields.count("moe_intermediate_size")
    shared = fields.count_or_zero("n_shared_experts", default=0)
    counts = count_experts(fields, "n_routed_experts")
    experts = ExpertsConfig(*counts, normalized=False, size=size, shared=shared * size)
    return after_dense_layers(fields, layers, experts)


def _mistral4_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return DeepSeek V3's experts, chosen by a softmax without corrections."""
    return [
        experts and replace(experts, sigmoid=False, correction=None) for experts in deepseek_experts(fields, layers)
    ]


def _ling_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of Ling 1 and 2, which may be chosen by either kind of score, with or without corrections."""
    values = fields.values
    experts = corrected_experts(fields, "num_experts")
    width = values.get("moe_shared_expert_intermediate_size")
    shared = fields.count("moe_shared_expert_intermediate_size") if width else experts.size
    shares = values.get("num_shared_experts") and values.get("moe_router_enable_shared_expert", True)
    experts = replace(
        experts,
        sigmoid=values.get("score_function", "softmax") == "sigmoid",
        correction="gate.expert_bias" if values.get("moe_router_enable_expert_bias") else None,
        shared=shared * fields.count("num_shared_experts") if shares else 0,
    )
    return after_dense_layers(fields, layers, experts)


def _ling_runs(fields: Fields) -> bool:
    """Return False for variants with biases of experts, or with a head that its class normalizes."""
    return not fields.values.get("use_bias") and not fields.values.get("norm_head")


def _ling_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation of the first `rotary_dim` dimensions of a head, if the config states that."""
    dims = fields.values.get("rotary_dim")
    rope = full_rope(fields, architecture, share=fields.count("rotary_dim") / head_size(fields) if dims else None)
    return rope, rope


def _v2_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of DeepSeek V2. Raises UnsupportedModelError for other choices than by softmax."""
    values = fields.values
    if not values.get("n_routed_experts"):
        return [None] * layers
    method = values.get("topk_method", "greedy")
    scores = values.get("scoring_func", "softmax")
    # "gready": so mlx-lm's class spells its default
    if method not in ("greedy", "gready", "group_limited_greedy") or scores != "softmax":
        raise UnsupportedModelError(f"config.json: a deepseek_v2 that routes by {method!r:.40} and {scores!r:.40}")
    grouped = corrected_experts(fields)
    experts = replace(
        grouped,
        sigmoid=False,
        correction=None,
        scale=1.0 if grouped.normalized else grouped.scale,
        groups=grouped.groups if method == "group_limited_greedy" else (1, 1),
        best=1,
    )
    shared = fields.count_or_zero("n_shared_experts", default=0)
    return after_dense_layers(fields, layers, replace(experts, shared=experts.size * shared))


# DeepSeek V4's kinds of layers -> tokens in a group whose entry outlives the window; 0: there are no groups
_V4_GROUPS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _v4_keys(config: Config) -> None:
    """Add the keys of the published DeepSeek V4 to a config that transformers wrote.

    Raises UnsupportedModelError for layers that no published model has.
    """
    fields = Fields(config)
    layers = fields.count("num_hidden_layers")

    # Kinds of layers, as sizes of groups
    kinds = fields.listed("layer_types", layers)
    if kinds is not None:
        groups = {**_V4_GROUPS, **fields.section("compress_rates")}
        # The class knows layers with an indexer by their groups of 4.
        indexed = [kind for kind, size in groups.items() if size == _V4_GROUPS["compressed_sparse_attention"]]
        if indexed != ["compressed_sparse_attention"] or not groups.keys() >= set(kinds):
            raise UnsupportedModelError(f"config.json: deepseek_v4 with groups of {groups!r:.120}")
        config["compress_ratios"] = [groups[kind] for kind in kinds]

    # Layers whose experts follow from a table by token id: the first ones
    routers = fields.listed("mlp_layer_types", layers)
    if routers is not None:
        hashed = routers.count("hash_moe")
        if routers != ["hash_moe"] * hashed + ["moe"] * (layers - hashed):
            raise UnsupportedModelError("config.json: deepseek_v4 with tables of experts after other layers")
        config["num_hash_layers"] = hashed
    if config.get("partial_rotary_factor") is not None:
        config["qk_rope_head_dim"] = int(fields.count("head_dim") * fields.positive("partial_rotary_factor"))

    # Rotations: of the layers' own rows, and of the entries of groups
    rope = fields.section("rope_parameters")
    main = rope.get("main")
    pooled = rope.get("compress")
    if isinstance(main, dict) and isinstance(pooled, dict):
        config["rope_theta"] = main.get("rope_theta")
        config["compress_rope_theta"] = pooled.get("rope_theta")
        config["rope_scaling"] = None if pooled.get("rope_type", "default") == "default" else dict(pooled)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("attention_factor") == 1.0:  # so it is without the key
        config["rope_scaling"] = {key: value for key, value in scaling.items() if key != "attention_factor"}


# Sarvam: the 30B has Ling's names, the 105B DeepSeek V3's layers
_SARVAM_KEYS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
_SARVAM_DEFAULTS = {
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip


def _sarvam_keys(config: Config) -> None:
    """State the numbers of experts under DeepSeek's keys, and a head's size and YaRN as DeepSeek V3 does."""
    state_usual_names(config, _SARVAM_KEYS)
    if config.get("kv_lora_rank") is None:
        return
    config["head_dim"] = None  # the published config states that of an entry
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        config["rope_scaling"] = {**scaling, "type": "yarn", "rope_type": "yarn"}


_LING_NAMES = (
    (".word_embeddings.", ".embed_tokens."),
    (".attention.query_key_value.", ".self_attn.qkv_proj."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.query_layernorm.", ".self_attn.q_norm."),
    (".attention.key_layernorm.", ".self_attn.k_norm."),
    (".mlp.gate.gate_proj.", ".mlp.gate."),
)

ROWS = (
    Architecture(
        "deepseek",
        Family(),
        only={"norm_topk_prob": False, "scoring_func": "softmax"},
        experts=_first_experts,
        plain=(".mlp.gate",),
    ),
    Architecture(
        "deepseek_v2",
        Family(interleaved=True),
        # mlx-lm's class needs a scaling; this one changes no angle.
        constants={"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 1.0}},
        rotated=1.0,
        experts=_v2_experts,
        latent=latent_config,
        plain=(".mlp.gate", ".embed_q"),  # "embed_q": see `models.cost.shape_sources`
    ),
    Architecture(
        "deepseek_v3",
        Family(interleaved=True),
        head=DEEPSEEK_HEAD,
        rotated=1.0,
        experts=deepseek_experts,
        latent=latent_config,
        plain=(".mlp.gate",),
    ),
    Architecture(
        "deepseek_v32",
        Family(interleaved=True),
        defaults={"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
        dense_first=True,
        rotated=1.0,
        experts=deepseek_experts,
        latent=latent_config,
        runs=even_entries,
        complete=with_indexers,
        plain=(".mlp.gate",),
    ),
    Architecture(
        "dots1",
        Family(qk_norm="head"),
        tensor_names=(
            (".experts.gate_proj.", ".switch_mlp.gate_proj."),
            (".experts.up_proj.", ".switch_mlp.up_proj."),
            (".experts.down_proj.", ".switch_mlp.down_proj."),
        ),
        experts=deepseek_experts,
        runs=several_experts,
        plain=(".mlp.gate",),
    ),
    Architecture(
        "sarvam_moe",
        Family(qk_norm="head"),
        defaults={**_SARVAM_DEFAULTS, "head_dim": 64},
        add_keys=_sarvam_keys,
        only={"use_bias": False},
        tensor_names=(*_LING_NAMES, (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias")),
        theta=8e6,
        rotated=1.0,
        experts=deepseek_experts,
        runs=several_experts,
        biases={"attention_bias": QKV, "use_qkv_bias": QKV},
        plain=(".mlp.gate",),
    ),
    Architecture(
        "sarvam_mla",
        Family(interleaved=True),
        defaults=_SARVAM_DEFAULTS,
        add_keys=_sarvam_keys,
        only={"rope_interleave": True},
        rotated=1.0,
        experts=deepseek_experts,
        latent=latent_config,
        plain=(".mlp.gate",),
    ),
    Architecture("deepseek_v4", add_keys=_v4_keys),  # mlx-lm's class runs it: the row completes its config alone
    Architecture("kimi_k2", same_as="deepseek_v3"),
    Architecture("kimi_k25", nests=True),
    Architecture("kimi_vl", nests=True),
    Architecture(
        "mistral4",
        Family(interleaved=True),
        rotated=1.0,
        experts=_mistral4_experts,
        latent=latent_config,
        runs=several_experts,
        complete=growing_queries,
    ),
    Architecture(
        "youtu_llm",
        Family(interleaved=True),
        tied=True,
        theta=1.6e6,
        rotated=1.0,
        latent=latent_with_eps,
        runs=lambda fields: not fields.section("rope_scaling"),  # its class does not sharpen scores
    ),
    Architecture(
        "bailing_moe",
        Family(qk_norm="head"),
        defaults={"use_qk_norm": False},
        tensor_names=_LING_NAMES,
        rotated=1.0,
        ropes=_ling_ropes,
        experts=_ling_experts,
        runs=_ling_runs,
        biases={"use_qkv_bias": QKV},
    ),
)
