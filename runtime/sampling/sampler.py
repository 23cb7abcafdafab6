"""From logits to a token: one documented order, each stage only when it is asked for.

    logits
      -> logit bias              added as it is
      -> repetition penalty      divides positive, multiplies negative logits of seen tokens (arXiv:1909.05858)
      -> presence, frequency     subtract once per seen token, and once per occurrence (the OpenAI API's definition;
                                 only generated tokens count for these two)
      -> temperature             divides; 0, or next to it, is greedy and skips the rest
      -> top-k                   the k most likely stay
      -> top-p                   the smallest set with at least p of the mass stays (arXiv:1904.09751)
      -> min-p                   tokens below p times the most likely one's probability go (arXiv:2407.01082)
      -> draw                    from what is left, with the request's own random key

All is computed in float32; SamplingParams refuses what would leave its range there. From the temperature on it is one
operation of `runtime.ops` for the rows of all sequences, each by its own rule and key: what a row draws does not depend
on the others. Keys are numbers of the host, tokens and counts stay on the device: nothing here waits for a value. Same
seed, same machine, same tokens.
B = sequences, V = vocabulary.
"""

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache

import mlx.core as mx

from headrace.runtime.errors import UsageError
from headrace.runtime.ops import SampleRule, select
from headrace.runtime.sampling.random_keys import split

SEEDS = 2**64
LARGEST = 1e6  # of temperature and penalties: beyond any use, and times any count still a float32
COLDEST = 1e-6  # temperatures below it are greedy: dividing by them tells float32 logits no further apart
SMALLEST_P = 1e-30  # what would be 0 as a float32 still keeps the best token


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. The defaults are greedy decoding. Raises UsageError for values out of range."""

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
        numbers = (self.temperature, self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        rules = (
            (all(map(math.isfinite, numbers)), "temperature and penalties must be finite numbers"),
            (not any(map(math.isnan, self.logit_bias.values())), "a logit bias must be a number"),
            (self.temperature >= 0, "temperature must be 0 or more"),
            (all(abs(number) <= LARGEST for number in numbers), f"temperature and penalties end at {LARGEST:.0f}"),
            (self.top_k >= 0, "top-k must be 0 (off) or more"),
            (0 < self.top_p <= 1, "top-p must be above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min-p must be between 0 and 1"),
            (self.repetition_penalty > 0, "repetition penalty must be above 0"),
            (self.repetition_penalty >= 1 / LARGEST, f"repetition penalty must be at least {1 / LARGEST}"),
            (self.seed is None or 0 <= self.seed < SEEDS, "seed must be between 0 and 2^64 - 1"),
        )
        for holds, complaint in rules:
            if not holds:
                raise UsageError(complaint)

    def with_seed(self) -> "SamplingParams":
        """The same with a seed, drawn now if there was none: what it takes to get the same answer again."""
        # 53 bits pass through any JSON reader unharmed.
        return self if self.seed is not None else replace(self, seed=secrets.randbits(53))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken every time."""
        return self.temperature < COLDEST


class Sampler:
    """Chooses a sequence's tokens. One sampler serves one request: it counts what was said, and has a key of its own.

    `choose` asks it to `begin`, what it makes of logits (`adjust`), and says what it `chose`; `settle` comes last.
    """

    def __init__(self, params: SamplingParams, *, vocab_size: int, prompt: Sequence[int]) -> None:
        self._params = params
        self._key = secrets.randbits(64) if params.seed is None else params.seed
        self._bias = _bias_row(params.logit_bias, vocab_size)
        penalises = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self._states: list[tuple[int, mx.array | None]] = []  # after each row of a choice
        self.adjusts = self._bias is not None or penalises  # logits, before they are chosen from
        self.plain = params.greedy and not self.adjusts  # the likeliest, and nothing else
        self.rule = SampleRule()
        if not params.greedy:
            top_k, top_p = min(params.top_k, vocab_size), max(params.top_p, SMALLEST_P)
            self.rule = SampleRule(params.temperature, top_k, top_p, params.min_p)
        self._counts: mx.array | None = None  # (1, V): occurrences among generated tokens
        if penalises:
            self._counts = mx.zeros((1, vocab_size), mx.int32)
            self._in_prompt = mx.zeros((1, vocab_size), mx.bool_)
            if prompt:
                self._in_prompt[:, mx.array(list(prompt))] = True

    def __call__(self, logits: mx.array) -> mx.array:
        """logits (1, V) -> chosen token id (1,) uint32."""
        return choose([self], logits)

    def begin(self, guesses: Sequence[int] = ()) -> list[int]:
        """The keys of the next choice, and of one behind each guess, as if all before it had been said."""
        keys, counts = [], self._counts
        self._states = []
        for guess in (None, *guesses):
            if counts is not None and guess is not None:
                counts = counts.at[:, mx.array([guess])].add(1)
            key = 0
            if self.rule.temperature:
                self._key, key = split(self._key)
            keys.append(key)
            self._states.append((self._key, counts))
        return keys

    def adjust(self, logits: mx.array) -> mx.array:
        """Bias and penalties, for the choices begun. logits (N, V) -> (N, V) float32."""
        logits = logits.astype(mx.float32)
        if self._bias is not None:
            logits = logits + self._bias
        counts = [counts for _, counts in self._states if counts is not None]
        return self._penalise(logits, mx.concatenate(counts)) if counts else logits

    def chose(self, tokens: mx.array) -> None:
        """`tokens` (N,) are the choices."""
        self._states = [
            (key, counts if counts is None else counts.at[:, tokens[row : row + 1]].add(1))
            for row, (key, counts) in enumerate(self._states)
        ]

    def settle(self, tokens: int) -> None:
        """Of the choices so many were said, one at least: key and counts are those after them."""
        if self._states:
            self._key, self._counts = self._states[tokens - 1]
            self._states = []

    def fork(self) -> "Sampler":
        """One that chooses from here on what this one would, which stays as it is."""
        return copy(self)

    def _penalise(self, logits: mx.array, counts: mx.array) -> mx.array:
        params = self._params
        generated = counts > 0
        if params.repetition_penalty != 1:
            penalty = params.repetition_penalty
            penalised = mx.where(logits > 0, logits / penalty, logits * penalty)
            logits = mx.where(generated | self._in_prompt, penalised, logits)
        if params.presence_penalty != 0:
            logits = logits - params.presence_penalty * generated.astype(logits.dtype)
        if params.frequency_penalty != 0:
            logits = logits - params.frequency_penalty * counts.astype(logits.dtype)
        return logits


def choose(
    samplers: Sequence[Sampler],
    logits: mx.array,
    guesses: Sequence[Sequence[int]] = (),
    errors: dict[int, Exception] | None = None,
) -> mx.array:
    """A token for each row by its sequence's own sampler, all in one operation. logits (N, V) -> (N,) uint32.

    A sequence has one row, and where `guesses` has some for it, one more behind it for each of them; then `settle` has
    to say how many were right. errors: takes what a sampler raises, by its place, whose tokens then mean nothing; None
    for raising it.
    """
    if all(sampler.plain for sampler in samplers):
        return select().likeliest(logits)
    rules: list[SampleRule] = []
    keys: list[int] = []
    adjusted: dict[int, tuple[slice, mx.array]] = {}
    for place, (sampler, guessed) in enumerate(zip(samplers, guesses or [()] * len(samplers), strict=True)):
        rows = slice(len(rules), len(rules) + 1 + len(guessed))
        rules += [sampler.rule] * (1 + len(guessed))
        keys += [0] * (1 + len(guessed))
        with _kept(errors, place):
            keys[rows] = sampler.begin(guessed)
            if sampler.adjusts:
                adjusted[place] = rows, sampler.adjust(logits[rows])
    tokens = select().sample(_with_rows(logits, adjusted.values()), rules, keys)
    for place, sampler in enumerate(samplers):
        with _kept(errors, place):
            if place in adjusted:
                sampler.chose(tokens[adjusted[place][0]])
            if not guesses or not guesses[place]:
                sampler.settle(1)
    return tokens


def _with_rows(logits: mx.array, adjusted: Iterable[tuple[slice, mx.array]]) -> mx.array:
    """logits (N, V), some of its rows in place of what they were -> (N, V) float32."""
    logits, parts, row = logits.astype(mx.float32), [], 0
    for rows, own in adjusted:
        if row < rows.start:
            parts.append(logits[row : rows.start])
        parts.append(own)
        row = rows.stop
    if row < logits.shape[0]:
        parts.append(logits[row:] if row else logits)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


@contextmanager
def _kept(errors: dict[int, Exception] | None, place: int) -> Iterator[None]:
    """What is raised within goes to `errors`, if there are any to take it."""
    try:
        yield
    except Exception as error:
        if errors is None:
            raise
        errors.setdefault(place, error)


def check_bias(bias: Mapping[int, float], vocab_size: int) -> None:
    """Raises UsageError for ids outside the vocabulary."""
    outside = [token for token in bias if not 0 <= token < vocab_size]
    if outside:
        raise UsageError(f"logit bias names token {outside[0]}, but the vocabulary has {vocab_size} tokens")


def _bias_row(bias: Mapping[int, float], vocab_size: int) -> mx.array | None:
    """The logit bias as one row (1, V), or None. Raises UsageError for ids outside the vocabulary."""
    if not bias:
        return None
    check_bias(bias, vocab_size)
    row = mx.zeros((1, vocab_size), mx.float32)
    row[:, mx.array(list(bias))] = mx.array([float(value) for value in bias.values()])
    return row


Logprobs = tuple[mx.array, mx.array, mx.array, mx.array]


def logprobs(logits: mx.array, token: mx.array, top: int) -> Logprobs:
    """Log probabilities before any sampling stage.

    logits (B, V), token (B,) -> (chosen (B,), ids of the `top` most likely (B, top), their log probabilities,
    digests (B,) of all logits: equal for equal bits, and for others as good as never).
    """
    logits = logits.astype(mx.float32)
    normalised = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(normalised, token[:, None], axis=-1)[:, 0]
    size = logits.shape[-1]
    ids = mx.argpartition(-normalised, kth=top - 1, axis=-1)[:, :top] if 0 < top < size else _every(logits)[:, :top]
    best = mx.take_along_axis(normalised, ids, axis=-1)
    order = mx.argsort(-best, axis=-1)
    ids, best = (mx.take_along_axis(x, order, axis=-1) for x in (ids, best))
    return chosen, ids, best, (logits.view(mx.uint32) * _odd(size)).sum(axis=-1)


@cache
def _odd(size: int) -> mx.array:
    """Odd numbers (size,), evaluated: in a sum of products with them no term alone can change without the sum."""
    numbers = mx.arange(size, dtype=mx.uint32) * 2654435761 | 1
    mx.eval(numbers)
    return numbers


def _every(logits: mx.array) -> mx.array:
    """The token ids of logits (B, V) -> (B, V)."""
    return mx.broadcast_to(mx.arange(logits.shape[-1], dtype=mx.uint32), logits.shape)
