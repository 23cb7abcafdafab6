"""Table of the decoder's architectures: the properties that a config.json does not state."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "clamped", "xielu", "relu2"]
# "mrope" has separate axes for time, height and width, which are equal for text.
OWN_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "mrope", "proportional")


@dataclass(frozen=True, slots=True)
class NormNames:
    """Modules of a layer's norms, before and after attention and feed-forward; None: no norm there."""

    attention: str | None = "input_layernorm"
    after_attention: str | None = None
    mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of one model_type.

    tied: default of `tie_word_embeddings`. rotated: default of `partial_rotary_factor`; None: only whole heads turn.
    interleaved: RoPE turns neighbouring dimensions instead of halves. centred: norms subtract the mean (LayerNorm
    without bias). parallel: attention and feed-forward have the same input. sliding: layers with a window, unless
    `layer_types` lists them.
    """

    norms: NormNames = NormNames()
    activation: Activation = "silu"
    # Each head by itself, or all of them together; "unit": each head that turns, without weights.
    qk_norm: Literal["head", "heads", "unit"] | None = None
    tied: bool = False
    rotated: float | None = None
    interleaved: bool = False
    centred: bool = False
    parallel: bool = False
    eps: str = "rms_norm_eps"
    sliding: Literal["all", "even", "period", "tail"] | None = None
    period: int = 0  # default of `sliding_window_pattern`: every such layer has no window
    position_free: Literal["listed", "full"] | None = None  # layers without RoPE
    beside: bool = False  # recurrent state in every layer, beside attention
    norm_last: bool = False  # queries and keys are normalized behind the rotation
    v_norm: bool = False  # values are normalized, without weights
    scaled: bool = False  # a factor multiplies every layer's output, if the checkpoint has it
    mixer_norms: NormNames | None = None  # of layers with recurrent state alone, if they differ
    gated: bool = False  # attention's heads are multiplied by gates, stored with the queries

    def norms_of(self, attends: bool) -> NormNames:
        """Return the norms of a layer with attention, or with recurrent state alone."""
        return self.norms if attends else self.mixer_norms or self.norms

    @property
    def inputs(self) -> tuple[str, ...]:
        """Projections into a feed-forward: no gate for an activation that gates nothing."""
        return ("up_proj",) if self.activation in ("relu2", "xielu") else ("gate_proj", "up_proj")


_AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_AROUND = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_GLM = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_SHARED = NormNames("input_layernorm", None, "input_layernorm", None)
_QWEN35 = Family(qk_norm="head", rotated=0.25, gated=True)
_LFM2 = Family(qk_norm="head", tied=True, eps="norm_eps")

FAMILIES: dict[str, Family] = {
    "llama": Family(tied=True),
    "mistral": Family(sliding="all"),
    "smollm3": Family(position_free="listed"),
    "llama4_text": Family(interleaved=True, qk_norm="unit", norm_last=True, position_free="listed"),
    "apertus": Family(NormNames("attention_layernorm", None, "feedforward_layernorm"), "xielu", "head"),
    "qwen2": Family(sliding="tail"),
    "qwen3": Family(qk_norm="head", sliding="tail"),
    "qwen3_moe": Family(qk_norm="head", sliding="all"),
    "gpt_oss": Family(activation="clamped", sliding="even"),
    "gemma2": Family(_AROUND, activation="gelu", tied=True, sliding="even"),
    "gemma3_text": Family(_AROUND, activation="gelu", qk_norm="head", tied=True, sliding="period", period=6),
    "gemma4_text": Family(
        _AROUND, activation="gelu", qk_norm="head", tied=True, sliding="period", period=5, v_norm=True, scaled=True
    ),
    "phi3": Family(rotated=1.0, sliding="all"),
    "seed_oss": Family(tied=True),
    "granite": Family(tied=True),
    "ernie4_5": Family(interleaved=True),
    "olmo2": Family(_AFTER, qk_norm="heads", tied=True),
    "olmo3": Family(_AFTER, qk_norm="heads", sliding="period", period=4),
    "exaone4": Family(_AFTER, qk_norm="head", sliding="period", position_free="full"),
    "cohere2": Family(
        _SHARED, tied=True, interleaved=True, centred=True, parallel=True, eps="layer_norm_eps", sliding="period",
        period=4, position_free="full",
    ),
    "glm4": Family(_GLM, rotated=0.5, interleaved=True),
    "ministral3": Family(tied=True),
    "hunyuan_v1_dense": Family(qk_norm="head", norm_last=True),
    "glm4_moe": Family(qk_norm="head", rotated=0.5),
    "glm4_moe_lite": Family(rotated=1.0, interleaved=True),
    "deepseek_v2": Family(rotated=1.0, interleaved=True),
    "deepseek_v3": Family(rotated=1.0, interleaved=True),
    "minimax": Family(qk_norm="heads", rotated=0.5),
    "qwen3_5": _QWEN35, "qwen3_5_moe": _QWEN35, "qwen3_next": _QWEN35, "lfm2": _LFM2, "lfm2_moe": _LFM2,
    "granitemoehybrid": Family(tied=True), "falcon_h1": Family(tied=True, beside=True),
    "nemotron_h": Family(activation="relu2", eps="layer_norm_epsilon"),
    "olmo_hybrid": Family(_AFTER, qk_norm="heads", mixer_norms=NormNames()),
    "kimi_linear": Family(),
}  # fmt: skip
# Architectures whose checkpoints may have multi-token prediction heads.
WITH_HEADS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe", "qwen3_next")
