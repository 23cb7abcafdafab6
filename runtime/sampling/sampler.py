"""Sampling stages, from logits to token ids.

    logits
      -> forced token            all others are excluded (`runtime.sampling.section_limit`)
      -> constraint              tokens that are not allowed are excluded (`runtime.sampling.constraint`)
      -> logit bias              added as it is
      -> repetition penalty      divides positive, multiplies negative logits of seen tokens (arXiv:1909.05858)
      -> presence, frequency     subtract once per seen token, and once per occurrence (the OpenAI API's definition;
                                 only generated tokens count for these two)
      -> temperature             divides; 0 (or below MIN_TEMPERATURE) is greedy and skips the rest
      -> top-k                   keeps the k most likely tokens
      -> top-p                   keeps the smallest set with at least p of the mass (arXiv:1904.09751)
      -> min-p                   drops tokens below p times the highest probability (arXiv:2407.01082)
      -> sample                  from the rest, with the request's own random key

Stages that are off cost nothing. All arithmetic is float32. From the temperature on, one operation of `runtime.ops`
serves the rows of all sequences, each with its own rule and key; rows do not affect each other. Keys are host
integers; tokens and counts stay on the device. The same seed on the same machine gives the same tokens.
`logprobs` are those of the logits before any stage.

`BuiltPass.select` calls `choose` for all sequences of a pass. A key depends on a token's position alone, so drafts
and preemption change no output. Guards: tests/runtime/sampling/test_sampler.py (each stage in plain Python) and
tests/runtime/speculation/test_speculation_distribution.py.
B = sequences, V = vocabulary.
"""

import math
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from headrace.runtime.errors import UsageError
from headrace.runtime.ops import SampleRule, select
from headrace.runtime.sampling.params import SamplingParams

MIN_TOP_P = 1e-30  # a top-p that is 0 as a float32 still keeps the best token

# Threefry-2x32 (Salmon et al., SC 2011), whose two 32-bit words stand in lanes of one Python integer; see `split_key`.
_WORD = 2**32 - 1
_LANES = _WORD | _WORD << 64  # a mask of both lanes; the bits between them take the carry of a sum
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of four rounds each, in turn
_PARITY = 0x1BD11BDA


class Logprobs(NamedTuple):
    """Log probabilities of one token, on the device. B = 1 for a sequence's token.

    chosen (B,): that of the chosen token.
    ids (B, top), best (B, top): the most likely tokens and their log probabilities, the best first.
    digest (B,): of the bits of all logits.
    """

    chosen: mx.array
    ids: mx.array
    best: mx.array
    digest: mx.array


class _RowState(NamedTuple):
    """A sampler's state once the token of a row is chosen.

    key: random key for the next row.
    counts (1, V): occurrences among generated tokens; None without penalties.
    """

    key: int
    counts: mx.array | None


class Sampler:
    """Token selection for one request, with its random key and its counts of generated tokens.

    `choose` calls `begin`, `adjust` and `record`; `commit` then keeps the state after the accepted tokens.
    """

    def __init__(self, params: SamplingParams, *, vocab_size: int, prompt: Sequence[int]) -> None:
        self._params = params
        self._key = secrets.randbits(64) if params.seed is None else params.seed
        self._bias = _bias_row(params.logit_bias, vocab_size)
        self._forbids = -math.inf in params.logit_bias.values()
        penalises = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self._states: list[_RowState] = []  # after each row that is begun and not committed
        self._forced: int | None = None
        self._masks: mx.array | None = None  # (N, V): allowed tokens of the rows begun
        self._changes = self._bias is not None or penalises
        self.rule = SampleRule()
        if not params.greedy:
            top_k = min(params.top_k, vocab_size)
            top_p = max(params.top_p, MIN_TOP_P)
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

    @property
    def adjusts(self) -> bool:
        """True if `adjust` changes logits."""
        return self._changes or self._forced is not None or self._masks is not None

    @property
    def plain(self) -> bool:
        """True if the token with the highest logit is chosen."""
        return self._params.greedy and not self.adjusts

    def force(self, token: int | None) -> None:
        """Choose `token`, whatever the logits are, until the next call; None: choose by the logits."""
        self._forced = token

    def constrain(self, masks: mx.array | None) -> None:
        """Exclude tokens from the next rows, until the next call. masks (N, V) bool: allowed tokens; None: all.

        Raises UsageError if the bias forbids all tokens that may be next.
        """
        if masks is not None and self._forbids:
            assert self._bias is not None
            if not mx.any(masks[:1] & (self._bias > -mx.inf)).item():
                raise UsageError("the logit bias forbids every token that the grammar allows")
        self._masks = masks

    def begin(self, draft: Sequence[int] = ()) -> list[int]:
        """Return the random keys of the next token and of the one after each draft token."""
        keys = []
        counts = self._counts
        self._states = []
        for token in (None, *draft):
            if counts is not None and token is not None:
                # Row i assumes that the draft tokens before it are accepted, and so counts them.
                counts = counts.at[:, mx.array([token])].add(1)
            key = 0
            if self.rule.temperature:
                self._key, key = split_key(self._key)
            keys.append(key)
            self._states.append(_RowState(self._key, counts))
        return keys

    def adjust(self, logits: mx.array) -> mx.array:
        """Apply bias, penalties and masks to the rows begun. logits (N, V) -> (N, V) float32."""
        logits = logits.astype(mx.float32)
        if self._forced is not None:
            return mx.where(mx.arange(logits.shape[-1]) == self._forced, mx.zeros_like(logits), -mx.inf)
        if self._bias is not None:
            logits = logits + self._bias
        counts = [counts for _, counts in self._states if counts is not None]
        if counts:
            logits = self._penalise(logits, mx.concatenate(counts))
        # Last, which excludes the same tokens as first: an infinite bias on an excluded token would be NaN.
        if self._masks is not None:
            logits = mx.where(self._masks, logits, -mx.inf)
        return logits

    def record(self, tokens: mx.array) -> None:
        """Count the chosen `tokens` (N,) of the rows begun."""
        for row, (key, counts) in enumerate(self._states):
            if counts is not None:
                self._states[row] = _RowState(key, counts.at[:, tokens[row : row + 1]].add(1))

    def commit(self, tokens: int) -> None:
        """Keep key and counts after the first `tokens` >= 1 rows."""
        if self._states:
            self._key, self._counts = self._states[tokens - 1]
            self._states = []

    def fork(self) -> "Sampler":
        """Return an independent sampler in the same state, without masks."""
        fork = copy(self)
        fork._masks = None
        return fork

    def _penalise(self, logits: mx.array, counts: mx.array) -> mx.array:
        """Apply the penalties. logits, counts (N, V)."""
        params = self._params
        generated = counts > 0
        if params.repetition_penalty != 1:
            penalty = params.repetition_penalty
            # Both ways the logit falls.
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
    drafts: Sequence[Sequence[int]] = (),
    errors: dict[int, Exception] | None = None,
) -> mx.array:
    """Choose a token for each row with its sequence's sampler, in one operation. logits (N, V) -> (N,) uint32.

    samplers: of each sequence.
    logits: a row for each sequence, and one more after it for each of its draft tokens.
    drafts: draft tokens of each sequence; () if none has any. The caller commits a sequence that has some.
    errors: collects exceptions by sampler index; that sampler's tokens are then undefined. None raises them.
    """
    if not drafts:
        drafts = [()] * len(samplers)
    if all(sampler.plain for sampler in samplers):
        return select().greedy(logits)
    rules: list[SampleRule] = []
    keys: list[int] = []
    adjusted: dict[int, tuple[slice, mx.array]] = {}
    for index, (sampler, draft) in enumerate(zip(samplers, drafts, strict=True)):
        # One row chooses the next token, and one the token after each draft token.
        rows = slice(len(rules), len(rules) + 1 + len(draft))
        rules += [sampler.rule] * (1 + len(draft))
        keys += [0] * (1 + len(draft))
        with _collected(errors, index):
            keys[rows] = sampler.begin(draft)
            if sampler.adjusts:
                adjusted[index] = rows, sampler.adjust(logits[rows])
    tokens = select().sample(_replace_rows(logits, adjusted.values()), rules, keys)
    for index, sampler in enumerate(samplers):
        with _collected(errors, index):
            if index in adjusted:
                rows, _ = adjusted[index]
                sampler.record(tokens[rows])
            if not drafts[index]:
                sampler.commit(1)
    return tokens


def _replace_rows(logits: mx.array, replaced: Collection[tuple[slice, mx.array]]) -> mx.array:
    """Return logits (N, V), in float32 with some rows replaced; as they are if none is."""
    if not replaced:
        return logits
    logits = logits.astype(mx.float32)
    parts = []
    row = 0
    for rows, replacement in replaced:
        if row < rows.start:
            parts.append(logits[row : rows.start])
        parts.append(replacement)
        row = rows.stop
    if row < logits.shape[0]:
        parts.append(logits[row:])
    return mx.concatenate(parts)


@contextmanager
def _collected(errors: dict[int, Exception] | None, index: int) -> Iterator[None]:
    """Store an exception of the block in `errors` at `index`; raise it if `errors` is None."""
    try:
        yield
    except Exception as error:
        if errors is None:
            raise
        errors.setdefault(index, error)


def _bias_row(bias: Mapping[int, float], vocab_size: int) -> mx.array | None:
    """Return the logit bias as one row (1, V), or None.

    Raises UsageError for ids outside the vocabulary, and for a bias against all of it.
    """
    if not bias:
        return None
    for token in bias:
        if not 0 <= token < vocab_size:
            raise UsageError(f"logit bias names token {token}, but the vocabulary has {vocab_size} tokens")
    if list(bias.values()).count(-math.inf) == vocab_size:
        raise UsageError("the logit bias forbids every token")
    row = mx.zeros((1, vocab_size), mx.float32)
    row[:, mx.array(list(bias))] = mx.array([float(value) for value in bias.values()])
    return row


def split_key(key: int) -> tuple[int, int]:
    """Return (next key, key to use now), 64 bits each, with the results of `mx.random.split`.

    On the host, so that no step waits for the device: 20 rounds of Threefry on the counters (0, 2) and (1, 3). The two
    blocks are independent, so both run at once: x has the first words of both, y the second ones.
    tests/runtime/sampling/test_sampler.py compares with MLX. (In Python `+` binds before `<<`, `&` and `|`.)
    """
    words = key >> 32, key & _WORD
    schedule = [word | word << 64 for word in (*words, words[0] ^ words[1] ^ _PARITY)]
    x = schedule[0] + (0 | 1 << 64) & _LANES
    y = schedule[1] + (2 | 3 << 64) & _LANES
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y & _LANES
            # A rotation within each lane: bits that leave a lane at its left end come in at its right end.
            y = (y << rotation | y >> 32 - rotation) & _LANES ^ x
        x = x + schedule[(group + 1) % 3] & _LANES
        y = y + schedule[(group + 2) % 3] + (group + 1) * (1 | 1 << 64) & _LANES
    return (x & _WORD) << 32 | x >> 64, (y & _WORD) << 32 | y >> 64


def logprobs(logits: mx.array, token: mx.array, top: int) -> Logprobs:
    """Return log probabilities before any sampling stage. logits (B, V), token (B,): the chosen one.

    top: the most likely tokens to return.
    Equal bits of logits give equal digests; other bits give others, almost always.
    """
    logits = logits.astype(mx.float32)
    normalised = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(normalised, token[:, None], axis=-1)[:, 0]
    size = logits.shape[-1]
    if 0 < top < size:
        ids = mx.argpartition(-normalised, kth=top - 1, axis=-1)[:, :top]
    else:
        ids = mx.broadcast_to(mx.arange(size, dtype=mx.uint32), logits.shape)[:, :top]
    best = mx.take_along_axis(normalised, ids, axis=-1)
    order = mx.argsort(-best, axis=-1)
    ids, best = (mx.take_along_axis(x, order, axis=-1) for x in (ids, best))
    digest = (logits.view(mx.uint32) * _odd_numbers(size)).sum(axis=-1)
    return Logprobs(chosen, ids, best, digest)


@cache
def _odd_numbers(size: int) -> mx.array:
    """Return odd numbers (size,), evaluated. In a sum of products with them, one changed term changes the sum."""
    numbers = mx.arange(size, dtype=mx.uint32) * 2654435761 | 1  # a prime near 2^32 / the golden ratio: well spread
    mx.eval(numbers)
    return numbers
