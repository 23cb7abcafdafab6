"""One decode step in its six stages, for all scheduled sequences at once.

A step feeds one token per decoding sequence and appends one K and one V entry per layer; prompt chunks may share the
pass. While the device computes step n, step n + 1 is built on n's tokens, which are not read yet. If such a token ends
an answer, the entry of step n + 1 is committed and its token is never read. So nothing is rolled back.

The mask of a constrained sequence's token depends on the token before it. So a step with such a sequence is built ahead
up to its logits, for all sequences; once the tokens of the step before are read, their masks are filled in and the
selection is queued behind the logits that the device is computing. Other sequences lose nothing by it.

Draft tokens may follow a sequence's token. Each row chooses by the sequence's own sampler, with the random key of its
position and the draft tokens before it counted as output. A draft token is accepted if the row before it chose it, and
all before it were accepted. So the output does not depend on draft tokens, sampled or not. (For draft tokens without
chance, as of n-grams, this is the exact rule of Leviathan et al. 2023, arXiv:2211.17192, and Chen et al. 2023,
arXiv:2302.01318. For a draft model that rule accepts a little more, with other output for the same seed; compare Daliri
et al. 2024, arXiv:2408.07978.) Rejected entries are rolled back; no step is built ahead of a pass with draft tokens.
"""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import cast

import mlx.core as mx

from headrace.runtime.engine.prefill import feed
from headrace.runtime.engine.request import TokenLogprobs
from headrace.runtime.engine.scheduler import ScheduledChunk, mean_context
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.errors import EngineError
from headrace.runtime.kv.backend import KVBackend
from headrace.runtime.kv.cache import KVPass, PassRow
from headrace.runtime.network import Network
from headrace.runtime.sampling.logprobs import Logprobs, logprobs
from headrace.runtime.sampling.sampler import Sampler, choose

Sample = Callable[[mx.array], mx.array]


def decode_step(
    network: Network,
    kv_pass: KVPass,
    sample: Sample,
    tokens: mx.array,
    rows: int | list[int] = 1,
    keep: Callable[[mx.array], None] | None = None,
) -> mx.array:
    """Run one pass over tokens (N,); `rows` of them choose the next token each -> (rows,), not yet computed.

    rows: the first so many, or these. keep: called with the output of the layers (1, N, E).
    """
    x = network.embed(tokens[None])  #          1. embedding  (1, N, E)
    x = network.layers(x, kv_pass)  #           2. layers, each with 3. attention over the whole KV cache  (1, N, E)
    logits = network.logits(_rows(x, rows))  #  4. logits  (rows, V)
    chosen = sample(logits)  #                  5. token selection  (rows,), of constrained rows later
    kv_pass.advance()  #                        6. KV append: one K and one V per layer, final once its token is read
    if keep is not None:
        keep(x)
    return chosen


def _rows(x: mx.array, rows: int | list[int]) -> mx.array:
    """Return rows of (1, N, ...), see `decode_step`, as sequences of one token: (rows, 1, ...)."""
    if x.shape[1] == 1:
        return x
    if isinstance(rows, list):
        return x[0, mx.array(rows)][:, None]
    return (x if x.shape[1] == rows else x[:, :rows]).reshape(rows, 1, *x.shape[2:])


@dataclass(slots=True)
class InFlightBatch:
    """Passes in flight. chosen: chunks of a pass that choose, and their tokens (N,), one for each token fed.

    defers: tokens are handed to the device with the next step's passes, see `start`.
    """

    chunks: list[ScheduledChunk]
    batch: int  # sequences of the first pass, which share one read of the weights
    started: float
    context: int  # mean cache entries of the sequences
    defers: bool = False
    chosen: list[tuple[list[ScheduledChunk], mx.array]] = field(default_factory=list)
    built: float = 0.0  # when it was handed to the device
    drafting_s: float = 0.0  # before it, of networks that proposed draft tokens
    ahead: bool = False  # built before the batch before it was read
    logprobs: dict[Sequence, list[Logprobs]] = field(default_factory=dict)  # of each row
    errors: dict[Sequence, Exception] = field(default_factory=dict)  # raised by samplers; their tokens are invalid
    appended: list[mx.array] = field(default_factory=list)  # K/V of passes that choose no token
    choosing: list[tuple[list[ScheduledChunk], mx.array]] = field(default_factory=list)  # and their logits, until then
    logits: list[mx.array] = field(default_factory=list)  # (N, 1): of the chosen tokens
    deferred: list[list[mx.array]] = field(default_factory=list)  # the last passes' tokens, and what is read with them
    hidden: dict[Sequence, mx.array] = field(default_factory=dict)  # (1, T, E): of sequences that draft from them

    @property
    def draft_tokens(self) -> int:
        """Number of draft tokens."""
        return sum(len(chunk.draft_tokens) for chunk in self.chunks)

    @property
    def decides(self) -> bool:
        """True if its tokens are needed to schedule the next pass: draft tokens, proposers or forced tokens depend."""
        return any(
            chunk.draft_tokens
            or any(proposer.needs_all_tokens and proposer.is_wanted for proposer in chunk.sequence.proposers)
            or chunk.sequence.may_force(1)
            for chunk in self.chunks
        )

    @property
    def constrained(self) -> bool:
        """True if a token's mask depends on tokens of the batch before."""
        return any(chunk.chooses and chunk.sequence.constraint is not None for chunk in self.chunks)

    def select(self) -> None:
        """Choose the tokens and hand that to the device. All tokens of the batch before have to be committed.

        Does nothing if they are chosen already, or none are to be chosen.
        """
        choosing = self.choosing
        self.choosing = []
        if not choosing:
            return
        for chunks, logits in choosing:
            tokens = self._select(chunks, logits)
            self.chosen.append((chunks, tokens))
            rows = [row for chunk in chunks for row in self.logprobs.get(chunk.sequence, ())]
            self.deferred.append([tokens, self.logits[-1], *(array for values in rows for array in values)])
        tokens_too = [] if self.defers else [array for arrays in self.deferred for array in arrays]
        mx.async_eval(*tokens_too, *self.appended, *self.hidden.values())
        if not self.defers:
            self.deferred.clear()

    def tokens_of(self, sequences: list[Sequence]) -> mx.array:
        """Return the tokens (N,) that sequences choose, in their order, after handing them to the device."""
        wanted = set(sequences)
        needed = [i for i, (chunks, _) in enumerate(self.chosen) if any(chunk.sequence in wanted for chunk in chunks)]
        self._submit(len(self.chosen) - 1 - needed[-1])
        choosing = [chunk.sequence for i in needed for chunk in self.chosen[i][0]]
        tokens = [self.chosen[i][1] for i in needed]
        chosen = tokens[0] if len(tokens) == 1 else mx.concatenate(tokens)
        if sequences == choosing:
            return chosen
        rows = {sequence: row for row, sequence in enumerate(choosing)}  # some ended, or have passes of their own
        return chosen[mx.array([rows[sequence] for sequence in sequences])]

    def _submit(self, left: int) -> None:
        """Hand deferred tokens to the device, in order, but for those of the last `left` passes."""
        while len(self.deferred) > left:
            mx.async_eval(*self.deferred.pop(0))

    def _select(self, chunks: list[ScheduledChunk], logits: mx.array) -> mx.array:
        """Return the tokens (N,) that the chunks choose from their logits (N, V)."""
        errors: dict[int, Exception] = {}
        samplers = [cast(Sampler, chunk.sequence.sampler) for chunk in chunks]
        for index, chunk in enumerate(chunks):
            try:
                chunk.sequence.constrain_next(chunk.draft_tokens)
            except Exception as error:
                errors[index] = error
        chosen = choose(samplers, logits, [chunk.draft_tokens for chunk in chunks], errors)
        self.errors |= {chunks[index].sequence: error for index, error in errors.items()}
        self.logits.append(mx.take_along_axis(logits, chosen[:, None], axis=-1))  # NaN is chosen before any number
        first = 0
        for chunk in chunks:
            if (top := chunk.sequence.request.logprobs) is not None:
                rows = [slice(row, row + 1) for row in range(first, first + chunk.rows)]
                self.logprobs[chunk.sequence] = [logprobs(logits[row], chosen[row], top) for row in rows]
            first += chunk.rows
        return chosen

    def wait(self) -> list[int]:
        """Wait for the device and return the chosen tokens. Raises EngineError if a logit is not finite."""
        self._submit(0)
        if self.appended:
            mx.eval(self.appended)
        tokens = [token for _, chosen in self.chosen for token in cast(list[int], chosen.tolist())]
        if not all(
            math.isfinite(logit) for logits in self.logits for [logit] in cast(list[list[float]], logits.tolist())
        ):
            raise EngineError(
                "the model computes values that are not finite (NaN or infinity), so its tokens are meaningless",
                "fetch its files anew; if that changes nothing, the model needs a type of more range",
            )
        return tokens


def start(network: Network, kv: KVBackend, chunks: list[ScheduledChunk], before: InFlightBatch | None) -> InFlightBatch:
    """Build the passes over `chunks` and hand them to the device without waiting. `select` chooses constrained tokens.

    Chunks that choose come first; of them first those that are fed the tokens of `before`, the in-flight batch.
    If other machines compute a part of each pass, this one works on the passes in turn: a pass's tokens are chosen when
    its sequences' next pass begins, so that the device does not wait for them before the passes behind.
    """
    rows = [
        PassRow(chunk.sequence.kv, chunk.count, chunk.phase, chunk.output, chunk.rows * chunk.chooses, chunk.drafts)
        for chunk in chunks
    ]
    passes = kv.make_passes(rows)
    in_flight = InFlightBatch(chunks, len(passes[0].rows), time.perf_counter(), mean_context(chunks))
    in_flight.ahead = before is not None
    in_flight.defers = len(passes) > 1 and network.division is not None and network.division.takes_turns
    rest = iter(chunks)
    for kv_pass in passes:
        _begin(network, kv_pass, list(islice(rest, len(kv_pass.rows))), before, in_flight)
    if in_flight.constrained or not in_flight.choosing:
        mx.async_eval(*in_flight.appended, *in_flight.hidden.values(), *(logits for _, logits in in_flight.choosing))
    else:
        in_flight.select()
    in_flight.built = time.perf_counter()
    return in_flight


def _begin(
    network: Network,
    kv_pass: KVPass,
    group: list[ScheduledChunk],
    before: InFlightBatch | None,
    in_flight: InFlightBatch,
) -> None:
    """Build one forward pass over the chunks, up to the logits of those that choose."""
    tokens = _fed(group, before)
    choosing = [chunk for chunk in group if chunk.chooses]

    def keep(x: mx.array) -> None:
        in_flight.hidden |= _kept_hidden(group, x)

    if not choosing:
        keep(feed(network, kv_pass, tokens))
        in_flight.appended += kv_pass.arrays
        return

    def sample(logits: mx.array) -> mx.array:  # `InFlightBatch.select` does
        in_flight.choosing.append((choosing, logits))
        return logits

    decode_step(network, kv_pass, sample, tokens, _choosing_rows(choosing), keep)


def _choosing_rows(choosing: list[ScheduledChunk]) -> int | list[int]:
    """Return the rows that choose, of the chunks at the beginning of a pass: see `decode_step`."""
    if not any(chunk.again for chunk in choosing):
        return sum(chunk.count for chunk in choosing)
    ends = accumulate(chunk.count for chunk in choosing)
    return [row for chunk, end in zip(choosing, ends, strict=True) for row in range(end - chunk.rows, end)]


def _kept_hidden(group: list[ScheduledChunk], x: mx.array) -> dict[Sequence, mx.array]:
    """Return the rows (1, T, E) of x (1, N, E) of the sequences that draft from hidden states."""
    if not any(chunk.drafts for chunk in group):
        return {}
    ends = list(accumulate(chunk.count for chunk in group))
    return {
        chunk.sequence: x[:, end - chunk.count : end] for chunk, end in zip(group, ends, strict=True) if chunk.drafts
    }


def _fed(group: list[ScheduledChunk], before: InFlightBatch | None) -> mx.array:
    """Return the tokens fed (N,): known ones, and those that the in-flight batch chooses."""
    chained: list[Sequence] = []
    known: list[int] = []
    order: list[int] = []  # of each token fed: its index in `known`, or -1 - its index in the chosen tokens
    for chunk in group:
        sequence = chunk.sequence
        position = sequence.kv.length
        if position < len(sequence.tokens):
            end = position + chunk.count - len(chunk.draft_tokens)
            fed: Row[int] = (*sequence.tokens[position:end], *chunk.draft_tokens)
        else:
            order.append(-1 - len(chained))
            chained.append(sequence)
            fed = chunk.draft_tokens
        order += range(len(known), len(known) + len(fed))
        known += fed
    if not chained:
        return mx.array(known, mx.uint32)
    assert before is not None
    chosen = before.tokens_of(chained)
    if not known:
        return chosen
    fed_tokens = mx.concatenate([chosen, mx.array(known, mx.uint32)])
    if any(chunk.draft_tokens for chunk in group[: len(chained) - 1]):  # else they are in their order
        fed_tokens = fed_tokens[mx.array([-1 - index if index < 0 else index + len(chained) for index in order])]
    return fed_tokens


def accepted(chosen: Row[int], draft_tokens: Row[int]) -> int:
    """Return how many leading draft tokens equal the token chosen before each."""
    for index, token in enumerate(draft_tokens):
        if chosen[index] != token:
            return index
    return len(draft_tokens)


def read(values: Logprobs) -> TokenLogprobs:
    """Return the log probabilities of one token, on the host."""
    chosen, ids, best, digest = values
    pairs = zip(cast(list[int], ids[0].tolist()), cast(list[float], best[0].tolist()), strict=True)
    return TokenLogprobs(cast(float, chosen.item()), list(pairs), cast(int, digest.item()))
