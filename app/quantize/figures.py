"""Size, speed and quality of a quantized copy: `quantized_here` in its headrace.json.

`headrace quantize` stores them, `headrace show` reads them. Needs no MLX. A new field has a default, since copies of
older versions lack it.

Guard: tests/app/quantize/test_quantize.py.
"""

from msgspec import Struct

from headrace.app.bench.stats import Figure


class PredictedSpeed(Struct, frozen=True):
    """Predicted decode speed of the copy.

    target: name of the chip.
    context: tokens in the cache.
    bound: the speed is an upper bound.
    """

    target: str
    context: int
    tokens_per_second: float
    bound: bool


class FormatCount(Struct, frozen=True):
    """A format, and the parts and weights that have it."""

    bits: int
    group_size: int
    mode: str
    parts: int
    weights: int


class QuantizedHere(Struct, frozen=True, kw_only=True):
    """Figures of a copy, by its measurement and by prediction.

    bits_per_weight: scales and norms included.
    weight_bytes, source_weight_bytes: of the copy, and of the given weights.
    weight_bytes_per_step: that a decode step of the copy reads.
    measured_tokens_per_second: on the machine that quantized, at the beginning of a context.
    scored_tokens: tokens of the text that `kl` and `top1_agreement` are means over.
    kl: divergence from the given weights, in nats.
    top1_agreement: share of tokens whose most likely successor is the same, 0 to 1.
    budget: as asked for, in words.
    predicted_kl: of the chosen bits, before they were measured.
    leaves_head: the given model has a multi-token prediction head, and the copy has none.
    """

    bits_per_weight: float
    weight_bytes: int
    source_weight_bytes: int
    weight_bytes_per_step: int
    predicted: PredictedSpeed
    measured_tokens_per_second: float
    scored_tokens: int
    kl: Figure
    top1_agreement: Figure
    budget: str = ""
    predicted_kl: float = 0.0
    leaves_head: bool = False
    formats: list[FormatCount] = []
