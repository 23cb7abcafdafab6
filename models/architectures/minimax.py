"""MiniMax M1 to M3: mixtures chosen by sigmoids; M3 attends to blocks of entries that an indexer chooses.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture, Config
from headrace.models.architectures.config import (
    DecoderConfig,
    ExpertLayers,
    Family,
    IndexerConfig,
    RopeConfig,
)
from headrace.models.architectures.experts import equal_experts, several_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import full_rope, head_size
from headrace.models.architectures.llama import EXPERT_NAMES
from headrace.runtime.errors import UnsupportedModelError

# Values of transformers' class, which published configs state in part
_M3 = {
    "intermediate_size": 3072, "dense_intermediate_size": 12288, "shared_intermediate_size": 3072,
    "num_local_experts": 128, "num_experts_per_tok": 4, "routed_scaling_factor": 2.0, "head_dim": 128,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "use_qk_norm": True, "use_gemma_norm": True,
}  # fmt: skip
# Names in `sparse_attention_config` -> those of configs that transformers has saved
_SPARSE_KEYS = {
    "sparse_num_index_heads": "index_n_heads", "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size", "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks", "sparse_attention_freq": "sparse_attention_freq",
}  # fmt: skip


def _minimax_keys(config: Config) -> None:
    """Add the keys that mlx-lm's class requires: dimensions of a head that turn, and no shared expert."""
    share = config.get("partial_rotary_factor") or 1.0
    width = config.get("head_dim")
    if isinstance(share, int | float) and type(width) is int:
        config.setdefault("rotary_dim", int(share * width))
    config.setdefault("shared_intermediate_size", 0)


def _minimax_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation of the first `rotary_dim` dimensions of a head."""
    dims = head_size(fields)
    rope = full_rope(fields, architecture, share=fields.count("rotary_dim", default=dims) / dims)
    return rope, rope


_minimax_experts = equal_experts(
    "num_local_experts", normalized=True, sigmoid=True, correction="e_score_correction_bias"
)


# MiniMax M3
def _m3_keys(config: Config) -> None:
    """State what `sparse_attention_config` nests under the flat names of newer configs."""
    section = config.get("sparse_attention_config")
    if isinstance(section, Mapping):
        config |= {flat: section[nested] for nested, flat in _SPARSE_KEYS.items() if nested in section}


def _m3_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation of the first `rotary_dim` dimensions of a head, or of the stated part."""
    rope = full_rope(fields, architecture)
    rope = replace(rope, share=_turned(fields, rope.share) / head_size(fields))
    return rope, rope


def _turned(fields: Fields, share: float) -> int:
    """Return the number of dimensions of a head that turn."""
    return fields.count("rotary_dim", default=int(share * head_size(fields)))


def _m3_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of sparse layers, as either of two lists marks them; without a list, of all."""
    [experts] = _minimax_experts(fields, 1)
    if experts is not None:
        experts = replace(
            experts,
            scale=fields.positive("routed_scaling_factor"),
            shared=fields.count("shared_intermediate_size"),
        )
    kinds = fields.listed("mlp_layer_types", layers)
    if kinds is not None:
        return [experts if kind == "sparse" else None for kind in kinds]
    stated = fields.listed("moe_layer_freq", layers)
    return [experts if kind else None for kind in stated or [True] * layers]


def _sparse_layers(fields: Fields, layers: int) -> list[bool]:
    """Return for each layer whether an indexer chooses what it attends to."""
    is_used = Fields(fields.section("sparse_attention_config")).values.get("use_sparse_attention", True)
    if not is_used or fields.values.get("index_block_size") is None:
        return [False] * layers
    kinds = fields.listed("layer_types", layers)
    if kinds is not None:
        return [kind != "full_attention" for kind in kinds]
    stated = fields.listed("sparse_attention_freq", layers)
    return [bool(kind) for kind in stated or [True] * layers]


def _indexer(fields: Fields) -> IndexerConfig:
    """Return the sizes of the indexer, the same in all layers that have one."""
    block = fields.count("index_block_size")
    return IndexerConfig(
        heads=fields.count("index_n_heads"),
        head_dim=fields.count("index_head_dim"),
        chosen=block * fields.count("index_topk_blocks"),
        block=block,
        local=fields.count_or_zero("index_local_blocks", default=1),
    )


def _m3_runs(fields: Fields) -> bool:
    """Return False for other activations, and for indexers that the decoder does not compute."""
    # The constants of "clamped" in `runtime.ops.activations`
    if fields.positive("swiglu_alpha", default=1.702) != 1.702 or fields.positive("swiglu_limit", default=7.0) != 7.0:
        return False
    if not several_experts(fields):
        return False
    if not any(_sparse_layers(fields, fields.count("num_hidden_layers"))):
        return True
    indexer = _indexer(fields)
    share = fields.positive("partial_rotary_factor", default=0.5)
    fits = indexer.head_dim % 2 == 0 and _turned(fields, share) <= indexer.head_dim  # keys are stored as two halves
    by_kv_head = indexer.heads == fields.count("num_key_value_heads")
    return fits and by_kv_head and 0 < indexer.local <= indexer.chosen // indexer.block


def _m3(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the indexers, and the one that Gemma's norms are stored without."""
    section = fields.section("sparse_attention_config")
    for key, only in {"sparse_score_type": "max", "sparse_init_block": 0}.items():
        if section.get(key, only) != only:
            raise UnsupportedModelError(f"config.json: a minimax_m3 with {key} {section[key]!r:.40}")
    sparse = _sparse_layers(fields, len(decoder.layers))
    indexer = None
    if any(sparse):
        indexer = _indexer(fields)
    norm_weight_offset = 0.0
    if fields.values.get("use_gemma_norm"):
        norm_weight_offset = 1.0
    return replace(
        decoder,
        norm_weight_offset=norm_weight_offset,
        layers=tuple(
            replace(layer, indexer=indexer if is_sparse else None)
            for layer, is_sparse in zip(decoder.layers, sparse, strict=True)
        ),
    )


ROWS = (
    Architecture(
        "minimax",
        Family(qk_norm="heads"),
        add_keys=_minimax_keys,
        tensor_names=EXPERT_NAMES,
        rotated=0.5,
        ropes=_minimax_ropes,
        experts=_minimax_experts,
        runs=several_experts,
    ),
    Architecture("minimax_m2", same_as="minimax"),
    Architecture(
        "minimax_m3",
        Family(activation="clamped", qk_norm="head"),
        defaults=_M3,
        add_keys=_m3_keys,
        tensor_names=EXPERT_NAMES,
        activation_key=None,
        only={"scoring_func": "sigmoid", "use_routing_bias": True, "qk_norm_type": "per_head"},
        theta=5e6,
        rotated=0.5,
        ropes=_m3_ropes,
        inner_size=lambda fields: fields.count("dense_intermediate_size"),
        experts=_m3_experts,
        runs=_m3_runs,
        complete=_m3,
        biases={},
    ),
    Architecture("minimax_m3_vl_text", same_as="minimax_m3"),
    Architecture("minimax_m3_vl", nests=True),
)
