"""Sampling parameters of a request, validated."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real

from headrace.runtime.errors import UsageError

SEEDS = 2**64
MAX_MAGNITUDE = 1e6  # of temperature and penalties: times any token count it is still a finite float32
MIN_TEMPERATURE = 1e-6  # lower temperatures are greedy: they no longer separate float32 logits


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Token selection options of one request; greedy decoding by default. Raises UsageError for values out of range."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: a fresh one per request

    def __post_init__(self) -> None:
        self._check_types()
        numbers = (self.temperature, self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        rules = (
            (all(map(math.isfinite, numbers)), "temperature and penalties must be finite numbers"),
            (not any(map(math.isnan, self.logit_bias.values())), "a logit bias must be a number"),
            (self.temperature >= 0, "temperature must be 0 or more"),
            (
                all(abs(number) <= MAX_MAGNITUDE for number in numbers),
                f"temperature and penalties must be at most {MAX_MAGNITUDE:.0f}",
            ),
            (self.top_k >= 0, "top-k must be 0 (off) or more"),
            (0 < self.top_p <= 1, "top-p must be above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min-p must be between 0 and 1"),
            (self.repetition_penalty > 0, "repetition penalty must be above 0"),
            (self.repetition_penalty >= 1 / MAX_MAGNITUDE, f"repetition penalty must be at least {1 / MAX_MAGNITUDE}"),
            (self.seed is None or 0 <= self.seed < SEEDS, "seed must be between 0 and 2^64 - 1"),
        )
        for holds, complaint in rules:
            if not holds:
                raise UsageError(complaint)

    def _check_types(self) -> None:
        for row in fields(self):
            value = getattr(self, row.name)
            if row.name == "logit_bias":
                expected = "token ids and numbers"
                fits = isinstance(value, Mapping) and all(
                    isinstance(token, Integral) and isinstance(added, Real) for token, added in value.items()
                )
            else:
                is_whole = row.name in ("top_k", "seed")
                expected = "a whole number" if is_whole else "a number"
                fits = isinstance(value, Integral if is_whole else Real) and not isinstance(value, bool)
            if not fits and (row.name != "seed" or value is not None):
                raise UsageError(f"{row.name} must be {expected}, not {value!r:.60}")

    def with_seed(self) -> "SamplingParams":
        """Return these parameters with a seed: the given one, else a random one of 53 bits (exact in any JSON)."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(53))

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE
