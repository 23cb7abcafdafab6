"""Attention over latents (MLA) in a config.json."""

import math
from dataclasses import dataclass

from headrace.models.architectures.fields import Fields

LATENT = ("glm4_moe_lite", "deepseek_v2", "deepseek_v3", "kimi_linear")
_OWN_EPS = ("glm4_moe_lite", "kimi_linear")  # others have norms of 1e-6


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes. queries: of the queries' latent, 0 without. rotated, other: parts of a query's head. eps: of the norms."""

    queries: int
    size: int
    rotated: int
    other: int
    value: int
    eps: float

    @property
    def head_dim(self) -> int:
        """Size of an entry's key and value."""
        return self.rotated + self.size


def latent_config(fields: Fields) -> LatentConfig:
    """Return the sizes of a config.json of an architecture in `LATENT`."""
    return LatentConfig(
        queries=fields.count("q_lora_rank") if fields.values.get("q_lora_rank") else 0,
        size=fields.count("kv_lora_rank"),
        rotated=fields.count("qk_rope_head_dim"),
        other=fields.count("qk_nope_head_dim"),
        value=fields.count("v_head_dim"),
        eps=fields.positive("rms_norm_eps") if fields.values["model_type"] in _OWN_EPS else 1e-6,
    )


def latent_scale(fields: Fields, latent: LatentConfig) -> float:
    """Return the scale of scores, sharpened with YaRN."""
    scaling = Fields(fields.section("rope_scaling"))
    scale = 1 / math.sqrt(latent.rotated + latent.other)
    factor = scaling.values.get("factor")
    every = scaling.values.get("mscale_all_dim")
    if not factor or not every or scaling.positive("factor") <= 1:
        return scale
    return scale * (0.1 * scaling.positive("mscale_all_dim") * math.log(scaling.positive("factor")) + 1.0) ** 2
