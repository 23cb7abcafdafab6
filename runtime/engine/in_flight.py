"""A batch from its building until its tokens are read.

    built -> selected -> queued -> read

Built: the device has its passes, up to the logits. Selected: the samplers have chosen, in arrays that are not computed
yet. Queued: the device has that, too. Read: the host has the tokens.

A batch is selected as soon as it is built, unless a token's mask depends on the tokens of the batch before; then once
those are committed. Selected tokens are queued at once, unless ranks take turns: then a pass's tokens are queued when
its sequences' next pass is built, so that the device does not wait for them before the passes that follow.

`decode.start` builds, `Engine.step` selects and reads; `commit_batch` takes the tokens that were read. Nothing
here waits for the device but `read`.

Guards: tests/runtime/engine/test_step_loop.py and tests/models/network/test_mtp.py.
"""

import math
from itertools import islice
from typing import cast

import mlx.core as mx
from msgspec import Struct, field

from headrace.runtime.engine.scheduler import ScheduledChunk
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.errors import EngineError
from headrace.runtime.ops.read_values import read_ints
from headrace.runtime.sampling.sampler import Logprobs, Sampler, choose, logprobs


class InFlightPass(Struct, eq=False):
    """One forward pass of a batch. N: tokens that its chunks choose, V: vocabulary.

    chunks: those that choose tokens come first.
    appended: the K/V arrays of a pass that chooses no token; else the tokens depend on them.
    logits (N, V): until tokens are selected; None if none are chosen.
    tokens (N,), token_logits (N, 1): once they are selected.
    unqueued: what is read with the tokens, until the device has it.
    """

    chunks: list[ScheduledChunk]
    appended: list[mx.array] = field(default_factory=list)
    logits: mx.array | None = None
    tokens: mx.array | None = None
    token_logits: mx.array | None = None
    unqueued: list[mx.array] = field(default_factory=list)

    @property
    def choosing(self) -> list[ScheduledChunk]:
        """The chunks that choose tokens."""
        return [chunk for chunk in self.chunks if chunk.chooses]

    def queue(self) -> None:
        """Hand the selected tokens to the device; later calls do nothing."""
        if self.unqueued:
            mx.async_eval(*self.unqueued)
            self.unqueued = []

    def read(self) -> list[tuple[ScheduledChunk, list[int]]]:
        """Wait for the device; return each chunk and the tokens that it chose."""
        if self.tokens is None:
            return [(chunk, []) for chunk in self.chunks]
        tokens = iter(read_ints(self.tokens))
        # As many tokens as rows that choose; none for a chunk that does not.
        return [(chunk, list(islice(tokens, chunk.rows * chunk.chooses))) for chunk in self.chunks]


class InFlightBatch(Struct, eq=False):
    """The passes of one step, and what is known of single sequences.

    chunks: of all passes, in their order.
    started, built: when its building began, and when the device had its passes; of `time.perf_counter`.
    context: mean cache entries of the sequences.
    is_ahead: it was built while the batch before it was not read yet.
    defers: selected tokens are not queued at once, since ranks take turns.
    passes: each has the next of `chunks`.
    drafting_s: time before it, of networks that proposed its draft tokens.
    hidden (1, T, E): of sequences that draft from the last hidden states.
    logprobs: of each token that a sequence chooses.
    errors: raised by samplers; their sequences' tokens are invalid.
    """

    chunks: list[ScheduledChunk]
    started: float
    context: int
    is_ahead: bool
    defers: bool
    passes: list[InFlightPass] = field(default_factory=list)
    built: float = 0.0
    drafting_s: float = 0.0
    hidden: dict[Sequence, mx.array] = field(default_factory=dict)
    logprobs: dict[Sequence, list[Logprobs]] = field(default_factory=dict)
    errors: dict[Sequence, Exception] = field(default_factory=dict)

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
        logits = [each.logits for each in self.passes if each.logits is not None]
        mx.async_eval(*self._appended(), *self.hidden.values(), *logits)

    def select(self) -> None:
        """Choose the tokens that are not chosen yet. All tokens of the batch before have to be committed by then."""
        selected = [each for each in self.passes if each.logits is not None]
        if not selected:
            return
        for each in selected:
            self._select(each)
        tokens: list[mx.array] = []
        if not self.defers:
            for each in selected:
                tokens += each.unqueued
                each.unqueued = []
        mx.async_eval(*tokens, *self._appended(), *self.hidden.values())

    def tokens_of(self, sequences: list[Sequence]) -> mx.array:
        """Return the tokens (N,) that sequences choose, in their order, after they are queued."""
        wanted = set(sequences)
        needed = [
            index for index, each in enumerate(self.passes) if any(chunk.sequence in wanted for chunk in each.choosing)
        ]
        for each in self.passes[: needed[-1] + 1]:  # those before as well: ranks compute passes in one order
            each.queue()
        choosing = [chunk.sequence for index in needed for chunk in self.passes[index].choosing]
        arrays = [cast(mx.array, self.passes[index].tokens) for index in needed]
        tokens = mx.concatenate(arrays)
        if sequences == choosing:
            return tokens
        # Some sequences ended, or have passes of their own. Each chose one token: a batch with draft tokens `decides`.
        rows = {sequence: row for row, sequence in enumerate(choosing)}
        return tokens[mx.array([rows[sequence] for sequence in sequences])]

    def read(self) -> list[tuple[ScheduledChunk, list[int]]]:
        """Wait for the device; return each chunk and the tokens that it chose.

        Raises EngineError if the logit of a token is not finite.
        """
        for each in self.passes:
            each.queue()
        if appended := self._appended():  # of passes without tokens to read, which would wait for nothing
            mx.eval(appended)
        chosen: list[tuple[ScheduledChunk, list[int]]] = []
        for each in self.passes:
            chosen += each.read()
        self._check_finite()
        return chosen

    def _appended(self) -> list[mx.array]:
        return [array for each in self.passes for array in each.appended]

    def _select(self, selected: InFlightPass) -> None:
        """Choose the tokens of one pass, from its logits."""
        choosing = selected.choosing
        logits = selected.logits
        assert logits is not None
        # A sampler or a constraint that raises ends its sequence; the others of the batch go on.
        samplers = [cast(Sampler, chunk.sequence.sampler) for chunk in choosing]
        errors: dict[int, Exception] = {}
        for index, chunk in enumerate(choosing):
            try:
                chunk.sequence.constrain_next(chunk.draft_tokens)
            except Exception as error:  # of a grammar: that sequence alone ends
                errors[index] = error
        tokens = choose(samplers, logits, [chunk.draft_tokens for chunk in choosing], errors)
        self.errors |= {choosing[index].sequence: error for index, error in errors.items()}
        token_logits = mx.take_along_axis(logits, tokens[:, None], axis=-1)  # NaN is chosen before any number
        selected.logits = None
        selected.tokens = tokens
        selected.token_logits = token_logits
        selected.unqueued = [tokens, token_logits]
        first = 0
        for chunk in choosing:
            top = chunk.sequence.request.logprobs
            if top is not None:
                rows = [slice(row, row + 1) for row in range(first, first + chunk.rows)]
                values = [logprobs(logits[row], tokens[row], top) for row in rows]
                self.logprobs[chunk.sequence] = values
                for arrays in values:
                    selected.unqueued += arrays
            first += chunk.rows

    def _check_finite(self) -> None:
        """Raise EngineError if the logit of a chosen token is NaN or infinite.

        One value a token is enough, since selection prefers NaN and infinity to any number.
        """
        for each in self.passes:
            if each.token_logits is None:
                continue
            token_logits = cast(list[list[float]], each.token_logits.tolist())  # (N, 1)
            if not all(math.isfinite(logit) for [logit] in token_logits):
                raise EngineError(
                    "the model computes values that are not finite (NaN or infinity), so its tokens are meaningless",
                    "fetch its files anew; if that changes nothing, the model needs a type of more range",
                )
