"""Attention over latents (MLA) in a config.json, and the indexer that makes it sparse (DSA).

Families name one of the first two functions as `Architecture.latent`; `models.network.latent` has the projections.

Guard: tests/parity/test_mlx_lm_families.py.
"""

import math

from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig, IndexerConfig, LatentConfig
from headrace.models.architectures.fields import Fields
from headrace.runtime.errors import CheckpointError


def latent_config(fields: Fields) -> LatentConfig:
    """Return the sizes, with norms of 1e-6."""
    return latent_sizes(fields, 1e-6)


def latent_with_eps(fields: Fields) -> LatentConfig:
    """Return the sizes, with norms of the config's epsilon."""
    return latent_sizes(fields, fields.positive("rms_norm_eps"))


def latent_sizes(fields: Fields, eps: float) -> LatentConfig:
    """Return the sizes, with norms of this epsilon. Without `q_lora_rank`, queries are projected directly."""
    return LatentConfig(
        queries=fields.count_or_zero("q_lora_rank", default=0),
        size=fields.count("kv_lora_rank"),
        rotated=fields.count("qk_rope_head_dim"),
        other=fields.count("qk_nope_head_dim"),
        value=fields.count("v_head_dim"),
        eps=eps,
    )


def latent_scale(fields: Fields, latent: LatentConfig) -> float:
    """Return the scale of scores, sharpened with YaRN: by the square of 0.1 mscale_all_dim ln(factor) + 1.

    The square stands for both sides of a score, query and key. Without either key, or for a factor up to 1, YaRN
    changes nothing.
    """
    scaling = Fields(fields.section("rope_scaling"))
    scale = 1 / math.sqrt(latent.rotated + latent.other)
    factor = scaling.values.get("factor")
    every = scaling.values.get("mscale_all_dim")
    if not factor or not every or scaling.positive("factor") <= 1:
        return scale
    return scale * (0.1 * scaling.positive("mscale_all_dim") * math.log(scaling.positive("factor")) + 1.0) ** 2


def with_indexers(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Return the decoder with an indexer in every layer. Layers of kind "shared" use an earlier layer's choice."""
    indexer = IndexerConfig(
        heads=fields.count("index_n_heads"),
        head_dim=fields.count("index_head_dim"),
        chosen=fields.count("index_topk"),
        interleaved=bool(fields.values.get("indexer_rope_interleave")),
    )
    kinds = _indexer_kinds(fields, len(decoder.layers))
    return replace(
        decoder,
        layers=tuple(
            replace(layer, indexer=replace(indexer, shared=kind == "shared"))
            for layer, kind in zip(decoder.layers, kinds, strict=True)
        ),
    )


def _indexer_kinds(fields: Fields, layers: int) -> list[str]:
    """Return "full" or "shared" for each layer's indexer, as listed, or as their period says."""
    kinds = fields.values.get("indexer_types")
    letters = fields.values.get("index_topk_pattern")
    if kinds is None and isinstance(letters, str):
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in letters]
    if kinds is None:
        period = fields.count("index_topk_freq", default=1)
        full = fields.count("index_skip_topk_offset", default=2)  # layers before the first shared one
        # The first `full` layers have their own, then every `period`-th, counted from the last of these.
        return ["shared" if max(i - full + 1, 0) % period else "full" for i in range(layers)]
    are_kinds = isinstance(kinds, list) and all(kind in ("full", "shared") for kind in kinds)
    if not isinstance(kinds, list) or not are_kinds or len(kinds) != layers or kinds[0] != "full":
        raise CheckpointError(f"config.json: indexer_types does not list {layers} full or shared ones, the first full")
    return kinds


def even_entries(fields: Fields) -> bool:
    """Return whether entries and an indexer's keys have two equal halves, as they are stored."""
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
    return bool(fields.values.get("q_lora_rank")) and all(fields.count(key) % 2 == 0 for key in sizes)
