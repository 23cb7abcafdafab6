"""The heart: one decode step in its six stages, for every sequence that takes part in it.

Semantics the loop of `runtime.engine.engine` keeps. A step feeds one token per decoding sequence and appends one K and
one V entry per layer for it; chunks of prompts may pass beside. While the device works on step n, step n + 1 is built
on n's tokens, values nobody has read yet. If such a token turns out to end an answer, the step built ahead has fed a
token of that sequence all the same: its entry is committed, its own token is never read. So nothing has to be taken
back, and any cache can be run ahead of.

Guesses may ride along behind a sequence's token. Each row chooses by the sequence's own sampler what the model says
there, with the random key of that position and the guesses before it counted as said: a guess is accepted if it is what
the row before it chose, and all before it were. So what is said is what would have been said without, token for token,
drawn or not, whatever guesses. (For a guess that comes without chance, as an n-gram's does, this is the exact rule of
Leviathan et al. 2023, arXiv:2211.17192, and Chen et al. 2023, arXiv:2302.01318. Of what a draft model draws that rule
accepts a little more, and says something else for the same seed; compare Daliri et al. 2024, arXiv:2408.07978.) What
was not accepted is rolled back, and nothing is built ahead on a pass with guesses.
"""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

import mlx.core as mx

from headrace.runtime.engine.prefill import feed
from headrace.runtime.engine.request import TokenLogprobs
from headrace.runtime.engine.scheduler import Share
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.errors import EngineError
from headrace.runtime.kv.backend import KVBackend
from headrace.runtime.kv.cache import KVPass, PassRow
from headrace.runtime.network import Network
from headrace.runtime.sampling.logprobs import Logprobs, logprobs
from headrace.runtime.sampling.sampler import Sampler, choose

Sample = Callable[[mx.array], mx.array]


def decode_step(network: Network, kv_pass: KVPass, sample: Sample, tokens: mx.array, rows: int = 1) -> mx.array:
    """Run one pass over tokens (N,); the first `rows` choose the next token each -> (rows,), not yet computed."""
    x = network.embed(tokens[None])  #          1. embedding  (1, N, E)
    x = network.layers(x, kv_pass)  #           2. layers, each with 3. attention over the whole KV cache  (1, N, E)
    logits = network.logits(_rows(x, rows))  #  4. logits  (rows, V)
    chosen = sample(logits)  #                  5. token selection  (rows,)
    kv_pass.advance()  #                        6. KV append: one K and one V per layer, final once its token is read
    return chosen


def _rows(x: mx.array, rows: int) -> mx.array:
    """(1, N, ...) -> the first `rows` of N, as sequences of one token: (rows, 1, ...)."""
    if x.shape[1] == 1:
        return x
    return (x if x.shape[1] == rows else x[:, :rows]).reshape(rows, 1, *x.shape[2:])


@dataclass(slots=True)
class Flight:
    """A pass under way. `token` (N,) is what the rows of the shares that choose do, one for each token fed."""

    shares: list[Share]
    batch: int  # sequences for which the weights are read at once
    started: float
    token: mx.array | None = None
    ahead: bool = False  # built before the one before it had landed
    logprobs: dict[Sequence, list[Logprobs]] = field(default_factory=dict)  # of each row
    errors: dict[Sequence, Exception] = field(default_factory=dict)  # that samplers raised: their tokens mean nothing
    appended: list[mx.array] = field(default_factory=list)  # of passes that choose no token
    logits: list[mx.array] = field(default_factory=list)  # (N, 1): of the tokens

    @property
    def guesses(self) -> int:
        """Rows that were guessed."""
        return sum(len(share.guesses) for share in self.shares)

    @property
    def decides(self) -> bool:
        """Whether it has to land before the next pass is planned: how much was guessed right is to be known."""
        return any(
            share.guesses or ((proposer := share.sequence.proposer) is not None and proposer.needs_all_tokens)
            for share in self.shares
        )

    def land(self) -> list[int]:
        """Wait for the device; the chosen tokens. EngineError where the logit of one is no number."""
        if self.appended:
            mx.eval(self.appended)
        tokens = [] if self.token is None else cast(list[int], self.token.tolist())
        if not all(
            math.isfinite(logit) for logits in self.logits for [logit] in cast(list[list[float]], logits.tolist())
        ):
            raise EngineError(
                "the model computes what is not finite (NaN or infinity), so its tokens would mean nothing",
                "fetch its files anew; if that changes nothing, they need more range than is computed with",
            )
        return tokens


def start(network: Network, kv: KVBackend, shares: list[Share], before: Flight | None) -> Flight:
    """Build the passes over `shares` and hand them to the device without waiting.

    Shares that choose come first; of them those first that are fed what `before`, the pass under way, chooses.
    """
    passes = kv.make_passes([PassRow(share.sequence.kv, share.count, share.phase) for share in shares])
    flight = Flight(shares, len(passes[0].rows), time.perf_counter(), ahead=before is not None)
    rest = iter(shares)
    tokens = [_begin(network, kv_pass, list(islice(rest, len(kv_pass.rows))), before, flight) for kv_pass in passes]
    chosen = [token for token in tokens if token is not None]
    if chosen:
        flight.token = chosen[0] if len(chosen) == 1 else mx.concatenate(chosen)
        kept = [array for rows in flight.logprobs.values() for values in rows for array in values]
        mx.async_eval(flight.token, *flight.logits, *kept, *flight.appended)
    else:
        mx.async_eval(*flight.appended)
    return flight


def _begin(
    network: Network, kv_pass: KVPass, group: list[Share], before: Flight | None, flight: Flight
) -> mx.array | None:
    """Build one forward pass over the shares; return the tokens that they choose, if any."""
    tokens = _fed(group, before)
    choosing = [share for share in group if share.chooses]
    if not choosing:
        feed(network, kv_pass, tokens)
        flight.appended += kv_pass.arrays
        return None

    def sample(logits: mx.array) -> mx.array:
        samplers = [cast(Sampler, share.sequence.sampler) for share in choosing]
        errors: dict[int, Exception] = {}
        chosen = choose(samplers, logits, [share.guesses for share in choosing], errors)
        flight.errors |= {choosing[place].sequence: error for place, error in errors.items()}
        flight.logits.append(mx.take_along_axis(logits, chosen[:, None], axis=-1))  # NaN is chosen before any number
        first = 0
        for share in choosing:
            if (top := share.sequence.request.logprobs) is not None:
                rows = [slice(row, row + 1) for row in range(first, first + share.count)]
                flight.logprobs[share.sequence] = [logprobs(logits[row], chosen[row], top) for row in rows]
            first += share.count
        return chosen

    return decode_step(network, kv_pass, sample, tokens, sum(share.count for share in choosing))


def _fed(group: list[Share], before: Flight | None) -> mx.array:
    """What the shares are fed (N,): tokens that are known, and what the pass under way chooses."""
    chained: list[Sequence] = []
    known: list[int] = []
    places: list[int] = []  # of each token fed: in what was chosen, or behind that
    for share in group:
        sequence, at = share.sequence, share.sequence.kv.length
        if at < len(sequence.tokens):
            fed: Row[int] = (*sequence.tokens[at : at + share.count - len(share.guesses)], *share.guesses)
        else:
            places.append(-1 - len(chained))
            chained.append(sequence)
            fed = share.guesses
        places += range(len(known), len(known) + len(fed))
        known += fed
    if not chained:
        return mx.array(known, mx.uint32)
    assert before is not None
    assert before.token is not None
    chosen = before.token
    choosing = [share.sequence for share in before.shares if share.chooses]
    if chained != choosing:  # some have ended, or take turns
        rows = {sequence: row for row, sequence in enumerate(choosing)}
        chosen = chosen[mx.array([rows[sequence] for sequence in chained])]
    if not known:
        return chosen
    fed_tokens = mx.concatenate([chosen, mx.array(known, mx.uint32)])
    if any(share.guesses for share in group[: len(chained) - 1]):  # else they are in their order
        order = [-1 - place if place < 0 else place + len(chained) for place in places]
        fed_tokens = fed_tokens[mx.array(order)]
    return fed_tokens


def agreed(chosen: Row[int], guesses: Row[int]) -> int:
    """How many of the guesses behind a token are what was chosen in front of each, up to the first that is not."""
    for place, guess in enumerate(guesses):
        if chosen[place] != guess:
            return place
    return len(guesses)


def read(values: Logprobs) -> TokenLogprobs:
    """The log probabilities of one token, on the host."""
    chosen, ids, best, digest = values
    pairs = zip(cast(list[int], ids[0].tolist()), cast(list[float], best[0].tolist()), strict=True)
    return TokenLogprobs(cast(float, chosen.item()), list(pairs), cast(int, digest.item()))
