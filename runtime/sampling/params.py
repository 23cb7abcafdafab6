"""Sampling parameters of a request, validated.

A new parameter is a field here with its range, and the stage that uses it in `sampler.py`; `AnswerOptions`
(`app/answer/options.py`) gets a field of the same name, from which flags, settings and JSON keys follow.

Guard: tests/runtime/sampling/test_sampler.py.
"""

import secrets
from collections.abc import Mapping
from copy import copy
from typing import Annotated

from msgspec import Struct, field
from msgspec.structs import force_setattr

from headrace.runtime.config.value_types import LogitBias, Number, ValueType, Whole, annotations_of, read_value

SEEDS = 2**64  # seeds are 0 to SEEDS - 1: a random key of 64 bits
MAX_MAGNITUDE = 1e6  # of temperature and penalties: times any token count it is still a finite float32
MIN_TEMPERATURE = 1e-6  # lower temperatures are greedy: they no longer separate float32 logits


class SamplingParams(Struct, frozen=True):
    """Token selection options of one request; greedy decoding by default. Raises UsageError for values out of range.

    `sampler.py` has the meaning of each in its stages.

    temperature: 0 is greedy.
    top_k, top_p, min_p: off at 0, 1 and 0.
    repetition_penalty, presence_penalty, frequency_penalty: off at 1, 0 and 0.
    logit_bias: added to the logits of token ids.
    seed: None: a fresh one per request.
    """

    # Each type carries the range of its values, which `RANGES` collects.
    temperature: Annotated[float, Number(0, MAX_MAGNITUDE)] = 0.0
    top_k: Annotated[int, Whole()] = 0
    top_p: Annotated[float, Number(0, 1, above=True)] = 1.0
    min_p: Annotated[float, Number(0, 1)] = 0.0
    repetition_penalty: Annotated[float, Number(1 / MAX_MAGNITUDE, MAX_MAGNITUDE)] = 1.0
    presence_penalty: Annotated[float, Number(-MAX_MAGNITUDE, MAX_MAGNITUDE)] = 0.0
    frequency_penalty: Annotated[float, Number(-MAX_MAGNITUDE, MAX_MAGNITUDE)] = 0.0
    logit_bias: Annotated[Mapping[int, float], LogitBias()] = field(default_factory=dict)
    seed: Annotated[int | None, Whole(0, SEEDS - 1)] = None

    def __post_init__(self) -> None:
        for name, kind in RANGES.items():
            value = getattr(self, name)
            if name != "seed" or value is not None:
                force_setattr(self, name, read_value(kind, name, value))

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


def of_checked(values: Mapping[str, object]) -> SamplingParams:
    """Return parameters from values by name that `RANGES` has checked already."""
    params = copy(_DEFAULTS)  # which calls no `__post_init__`
    for name, value in values.items():
        force_setattr(params, name, value)
    return params


def random_seed() -> int:
    """Return a seed of 53 bits, exact in any JSON."""
    return secrets.randbits(53)


RANGES: Mapping[str, ValueType[object]] = annotations_of(SamplingParams)
"""Values of each parameter, for every interface that takes them."""
_DEFAULTS = SamplingParams()
