"""A batch between its building and its commit: its passes by state.

    chooses tokens:  BuiltPass --select--> SelectedPass --queue, read--> ComputedChunk of each chunk
    chooses none:    PromptPass ----------------------------------read--> ComputedChunk of each chunk

- Built: the device has the pass up to its logits, or gets it with the tokens.
- Selected: the samplers have chosen, in arrays that are not computed yet.
- Queued: the device has these, too.
- Read: the host has the tokens.

A batch is selected as soon as it is built, unless a token's mask depends on the tokens of the batch before; then once
those are committed. Selected tokens are queued at once, unless ranks take turns: then a pass's tokens are queued when
its sequences' next pass is built, so that the device does not wait for them before the passes that follow.

`decode.start` builds, `Engine.step` selects and reads; `commit_batch` takes the chunks that were read. Nothing here
waits for the device but `read`.

Guards: tests/runtime/engine/test_step_loop.py and tests/models/network/test_mtp.py.
"""

import math
from itertools import islice
from typing import cast

import mlx.core as mx
from msgspec import Struct

from headrace.runtime.engine.scheduler import ScheduledChunk
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.errors import EngineError
from headrace.runtime.ops.read_values import read_ints
from headrace.runtime.sampling.sampler import Logprobs, Sampler, choose, logprobs


class ComputedChunk(Struct, eq=False, frozen=True):
    """A chunk that the device has computed. T: tokens fed.

    tokens: that its rows chose; none if it does not choose.
    hidden (1, T, E): last hidden states; None unless a proposer drafts from them.
    logprobs: of each chosen token, on the device; None unless requested.
    error: raised by its sampler or its grammar, so `tokens` are invalid.
    """

    chunk: ScheduledChunk
    tokens: list[int]
    hidden: mx.array | None
    logprobs: list[Logprobs] | None = None
    error: Exception | None = None


class PromptPass(Struct, eq=False, frozen=True):
    """A pass that chooses no token: of prompts, or of output that is fed again after a preemption.

    hidden: last hidden states (1, T, E) of each sequence that drafts from them.
    appended: its K/V arrays. Nothing else depends on them, so they are evaluated by name.
    """

    chunks: list[ScheduledChunk]
    hidden: dict[Sequence, mx.array]
    appended: list[mx.array]

    def read(self) -> list[ComputedChunk]:
        """Return the chunks. The caller has evaluated `appended`."""
        return [ComputedChunk(chunk, [], self.hidden.get(chunk.sequence)) for chunk in self.chunks]


class BuiltPass(Struct, eq=False, frozen=True):
    """A pass up to its logits.

    chunks: those that choose tokens come first.
    hidden: as of `PromptPass`.
    logits (N, V): of the N tokens that choose, in the order of their chunks.
    """

    chunks: list[ScheduledChunk]
    hidden: dict[Sequence, mx.array]
    logits: mx.array

    def select(self) -> "SelectedPass":
        """Choose the tokens, in arrays that are not computed yet."""
        choosing = _choosing(self.chunks)
        # A sampler or a constraint that raises ends its sequence; the others of the batch go on.
        samplers = [cast(Sampler, chunk.sequence.sampler) for chunk in choosing]
        errors: dict[int, Exception] = {}
        for index, chunk in enumerate(choosing):
            try:
                chunk.sequence.constrain_next(chunk.draft_tokens)
            except Exception as error:  # of a grammar: that sequence alone ends
                errors[index] = error
        tokens = choose(samplers, self.logits, [chunk.draft_tokens for chunk in choosing], errors)
        token_logits = mx.take_along_axis(self.logits, tokens[:, None], axis=-1)  # NaN is chosen before any number
        requested = _requested_logprobs(choosing, self.logits, tokens)
        return SelectedPass(
            self.chunks,
            self.hidden,
            tokens,
            token_logits,
            logprobs=requested,
            errors={choosing[index].sequence: error for index, error in errors.items()},
            unqueued=[tokens, token_logits, *(array for rows in requested.values() for row in rows for array in row)],
        )


class SelectedPass(Struct, eq=False):
    """A pass whose tokens are chosen.

    chunks, hidden: as of `BuiltPass`.
    tokens (N,): chosen, in the order of their chunks.
    token_logits (N, 1): the logits of these tokens.
    logprobs: of each token that a sequence chooses, if requested.
    errors: raised by samplers and grammars; their sequences' tokens are invalid.
    unqueued: arrays that are read later, until the device has them; then empty.
    """

    chunks: list[ScheduledChunk]
    hidden: dict[Sequence, mx.array]
    tokens: mx.array
    token_logits: mx.array
    logprobs: dict[Sequence, list[Logprobs]]
    errors: dict[Sequence, Exception]
    unqueued: list[mx.array]

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that choose tokens, in the order of `tokens`."""
        return [chunk.sequence for chunk in _choosing(self.chunks)]

    def queue(self) -> None:
        """Hand the tokens to the device; later calls do nothing."""
        if self.unqueued:
            mx.async_eval(*self.unqueued)
            self.unqueued = []

    def read(self) -> list[ComputedChunk]:
        """Wait for the tokens, and return the chunks with them."""
        tokens = iter(read_ints(self.tokens))
        return [
            ComputedChunk(
                chunk,
                # As many tokens as rows that choose; none for a chunk that does not.
                list(islice(tokens, chunk.rows * chunk.chooses)),
                self.hidden.get(chunk.sequence),
                self.logprobs.get(chunk.sequence),
                self.errors.get(chunk.sequence),
            )
            for chunk in self.chunks
        ]

    def check_finite(self) -> None:
        """Raise EngineError if the logit of a chosen token is NaN or infinite.

        One value a token is enough, since selection prefers NaN and infinity to any number.
        """
        token_logits = cast(list[list[float]], self.token_logits.tolist())  # (N, 1)
        if not all(math.isfinite(logit) for [logit] in token_logits):
            raise EngineError(
                "the model computes values that are not finite (NaN or infinity), so its tokens are meaningless",
                "fetch its files anew; if that changes nothing, the model needs a type of more range",
            )


InFlightPass = PromptPass | BuiltPass | SelectedPass


def _choosing(chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
    return [chunk for chunk in chunks if chunk.chooses]


def _requested_logprobs(
    choosing: list[ScheduledChunk], logits: mx.array, tokens: mx.array
) -> dict[Sequence, list[Logprobs]]:
    """Return the log probabilities of each token (N,) of the sequences that want them, from logits (N, V)."""
    requested: dict[Sequence, list[Logprobs]] = {}
    first = 0  # row of the chunk's first token
    for chunk in choosing:
        top = chunk.sequence.request.logprobs
        if top is not None:
            rows = [slice(row, row + 1) for row in range(first, first + chunk.rows)]
            requested[chunk.sequence] = [logprobs(logits[row], tokens[row], top) for row in rows]
        first += chunk.rows
    return requested


class InFlightBatch(Struct, eq=False):
    """The passes of one step.

    chunks: of all passes, in their order.
    passes: in the order in which ranks compute them; `select` puts selected ones in the place of built ones.
    started_at, built_at: when its building began, and when the device had its passes; of `time.perf_counter`.
    drafting_s: time before it, of networks that proposed its draft tokens.
    context: mean cache entries of the sequences before it.
    is_ahead: it was built while the batch before it was not read yet.
    defers: selected tokens are not queued at once, since ranks take turns.
    """

    chunks: list[ScheduledChunk]
    passes: list[InFlightPass]
    started_at: float
    drafting_s: float
    context: int
    is_ahead: bool
    defers: bool
    built_at: float = 0.0

    @property
    def num_decoding(self) -> int:
        """Sequences that decode."""
        return sum(chunk.phase == "decode" for chunk in self.chunks)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prompts."""
        return sum(chunk.count for chunk in self.chunks if chunk.phase != "decode")

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(chunk.draft_tokens) for chunk in self.chunks)

    @property
    def chooses(self) -> bool:
        """True if a sequence chooses tokens; else it has prompts only."""
        return any(chunk.chooses for chunk in self.chunks)

    @property
    def decides(self) -> bool:
        """True if the next pass cannot be scheduled without its tokens.

        Either draft tokens are verified in it, or a proposer waits for all tokens, or the next token may be forced.
        """
        return any(
            chunk.draft_tokens
            or any(proposer.needs_all_tokens and proposer.is_wanted for proposer in chunk.sequence.proposers)
            or chunk.sequence.may_force(1)
            for chunk in self.chunks
        )

    @property
    def is_constrained(self) -> bool:
        """True if a token's mask depends on tokens of the batch before."""
        return any(chunk.chooses and chunk.sequence.constraint is not None for chunk in self.chunks)

    def queue_logits(self) -> None:
        """Hand the passes to the device, up to the logits."""
        logits = [each.logits for each in self.passes if isinstance(each, BuiltPass)]
        mx.async_eval(*self._appended(), *self._hidden(), *logits)

    def select(self) -> None:
        """Choose the tokens that are not chosen yet. All tokens of the batch before have to be committed by then.

        The first call selects all passes; later calls do nothing.
        """
        if not any(isinstance(each, BuiltPass) for each in self.passes):
            return
        # In place, so that nothing refers to the logits when the device gets what uses them: it reuses their memory.
        self.passes[:] = [each.select() if isinstance(each, BuiltPass) else each for each in self.passes]
        tokens: list[mx.array] = []
        if not self.defers:
            for each in self._selected():
                tokens += each.unqueued
                each.unqueued = []
        mx.async_eval(*tokens, *self._appended(), *self._hidden())

    def tokens_of(self, sequences: list[Sequence]) -> mx.array:
        """Return the tokens (N,) that sequences choose, in their order, after they are queued."""
        wanted = set(sequences)
        selected = self._selected()
        needed = [index for index, each in enumerate(selected) if not wanted.isdisjoint(each.sequences)]
        for each in selected[: needed[-1] + 1]:  # those before as well: ranks compute passes in one order
            each.queue()
        choosing = [sequence for index in needed for sequence in selected[index].sequences]
        tokens = mx.concatenate([selected[index].tokens for index in needed])
        if sequences == choosing:
            return tokens
        # Some sequences ended, or have passes of their own. Each chose one token: a batch with draft tokens `decides`.
        rows = {sequence: row for row, sequence in enumerate(choosing)}
        return tokens[mx.array([rows[sequence] for sequence in sequences])]

    def read(self) -> list[ComputedChunk]:
        """Wait for the device, and return the chunks with the tokens that they chose.

        Raises EngineError if the logit of a token is not finite.
        """
        selected = self._selected()
        for each in selected:
            each.queue()
        if appended := self._appended():  # of passes without tokens to read, which would wait for nothing
            mx.eval(appended)
        computed: list[ComputedChunk] = []
        for each_pass in self.passes:
            assert not isinstance(each_pass, BuiltPass), "read before it was selected"
            computed += each_pass.read()
        for each in selected:
            each.check_finite()
        return computed

    def _selected(self) -> list[SelectedPass]:
        return [each for each in self.passes if isinstance(each, SelectedPass)]

    def _appended(self) -> list[mx.array]:
        return [array for each in self.passes if isinstance(each, PromptPass) for array in each.appended]

    def _hidden(self) -> list[mx.array]:
        return [array for each in self.passes for array in each.hidden.values()]
