"""One decode step in its six stages, for all scheduled sequences at once.

A step feeds one token per decoding sequence and appends one K and one V entry per layer; prompt chunks may share the
pass. While the device computes step n, step n + 1 is built on n's tokens, which are not read yet (`in_flight.py` has
the states). If such a token ends an answer, the entry of step n + 1 is committed and its token is never read. So
nothing is rolled back.

The mask of a constrained sequence's token depends on the token before it. So a step with such a sequence is built ahead
up to its logits, for all sequences; once the tokens of the step before are read, their masks are filled in and the
selection is queued after the logits that the device is computing. Other sequences lose nothing by it.

Draft tokens may follow a sequence's token. Each row chooses by the sequence's own sampler, with the random key of its
position and the draft tokens before it counted as output. A draft token is accepted if the row before it chose it, and
all before it were accepted. So the output does not depend on draft tokens, sampled or not. (For draft tokens without
chance, as of n-grams, this is the exact rule of Leviathan et al. 2023, arXiv:2211.17192, and Chen et al. 2023,
arXiv:2302.01318. For a draft model that rule accepts a little more, with other output for the same seed; compare Daliri
et al. 2024, arXiv:2408.07978.) Rejected entries are rolled back; no step is built on top of a pass in flight that
has draft tokens.

Rows: a row of the layers' output is a token fed; a row of logits is a token that chooses the next one; a `PassRow` is
all tokens of one sequence in a pass.

`Engine._run` calls `start`; draft networks and benchmarks call `decode_step` on a pass of one `PassRow`.
tests/runtime/engine/test_step_loop.py and tests/runtime/speculation/ guard these rules.
"""

import time
from collections.abc import Callable
from itertools import accumulate, islice

import mlx.core as mx

from headrace.runtime.engine.in_flight import BuiltPass, InFlightBatch, InFlightPass, PromptPass
from headrace.runtime.engine.prefill import feed
from headrace.runtime.engine.scheduler import ScheduledChunk, mean_context
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.kv.backend import KVBackend
from headrace.runtime.kv.cache import KVPass, PassRow
from headrace.runtime.network import Network

Sample = Callable[[mx.array], mx.array]
"""Returns the tokens (rows,) that are chosen from logits (rows, V)."""


def decode_step(
    network: Network,
    kv_pass: KVPass,
    sample: Sample,
    tokens: mx.array,
    rows: int | list[int] = 1,
    keep: Callable[[mx.array], None] | None = None,
) -> mx.array:
    """Run one pass over tokens (N,); `rows` of them choose the next token each -> (rows,), not yet computed.

    kv_pass: the cache entries of the tokens' sequences.
    sample: chooses tokens from logits.
    rows: the first so many, or these.
    keep: called with the output of the layers (1, N, E).
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
    if x.shape[1] == 1:  # the usual step of one sequence: no operation at all
        return x
    if isinstance(rows, list):
        return x[0, mx.array(rows)][:, None]
    if x.shape[1] != rows:
        x = x[:, :rows]
    return x.reshape(rows, 1, *x.shape[2:])


def start(
    network: Network,
    kv: KVBackend,
    chunks: list[ScheduledChunk],
    before: InFlightBatch | None,
    started_at: float,
    drafting_s: float,
) -> InFlightBatch:
    """Build the passes over `chunks` and hand them to the device without waiting.

    chunks: those that choose come first; of them first those that are fed the tokens of `before`.
    before: the in-flight batch; None if all its tokens are committed.
    started_at, drafting_s: see `InFlightBatch`.
    """
    rows = [
        PassRow(
            chunk.sequence.kv,
            chunk.count,
            chunk.phase,
            output=chunk.output,
            logits=chunk.rows if chunk.chooses else 0,
            hidden=chunk.drafts,
        )
        for chunk in chunks
    ]
    context = mean_context(chunks)  # now: each pass makes its caches longer as it is built
    kv_passes = kv.make_passes(rows)
    remaining = iter(chunks)  # passes have the rows in order, so each takes the next chunks
    passes: list[InFlightPass] = []
    # No comprehension: an error that is kept would keep the comprehension's closure, and `before` in it.
    for kv_pass in kv_passes:
        group = list(islice(remaining, len(kv_pass.rows)))
        passes.append(_forward(network, kv_pass, group, before))
    # Ranks that take turns compute the passes one after the other: a pass's tokens are queued only when its sequences'
    # next pass is built. A single pass has no other to wait for, so its tokens are queued at once.
    takes_turns = network.division is not None and network.division.takes_turns
    in_flight = InFlightBatch(
        chunks,
        passes,
        started_at,
        drafting_s,
        context,
        is_ahead=before is not None,
        defers=takes_turns and len(passes) > 1,
    )
    if in_flight.is_constrained or not in_flight.chooses:
        in_flight.queue_logits()
    else:
        in_flight.select()
    in_flight.built_at = time.perf_counter()
    return in_flight


def _forward(
    network: Network, kv_pass: KVPass, group: list[ScheduledChunk], before: InFlightBatch | None
) -> InFlightPass:
    """Build one forward pass over the chunks, up to the logits of those that choose."""
    tokens = _fed(group, before)
    choosing = [chunk for chunk in group if chunk.chooses]
    if not choosing:
        x = feed(network, kv_pass, tokens)
        return PromptPass(group, _draft_hidden(group, x), kv_pass.arrays)
    hidden: dict[Sequence, mx.array] = {}

    def keep(x: mx.array) -> None:
        hidden.update(_draft_hidden(group, x))

    # `InFlightBatch.select` chooses the tokens, later: without a sampler the result of a step is its logits.
    logits = decode_step(network, kv_pass, _unsampled, tokens, _choosing_rows(choosing), keep)
    return BuiltPass(group, hidden, logits)


def _unsampled(logits: mx.array) -> mx.array:
    return logits


def _choosing_rows(choosing: list[ScheduledChunk]) -> int | list[int]:
    """Return the rows that choose, of the chunks at the beginning of a pass: see `decode_step`."""
    # Without tokens that were fed before, every token of these chunks chooses, so the rows are the first of the pass.
    if not any(chunk.num_refed for chunk in choosing):
        return sum(chunk.count for chunk in choosing)
    # Tokens that are fed again come first in their chunk, and choose nothing.
    ends = accumulate(chunk.count for chunk in choosing)
    return [row for chunk, end in zip(choosing, ends, strict=True) for row in range(end - chunk.rows, end)]


def _draft_hidden(group: list[ScheduledChunk], x: mx.array) -> dict[Sequence, mx.array]:
    """Return the rows (1, T, E) of x (1, N, E) of the sequences that draft from hidden states."""
    if not any(chunk.drafts for chunk in group):
        return {}
    ends = list(accumulate(chunk.count for chunk in group))
    return {
        chunk.sequence: x[:, end - chunk.count : end] for chunk, end in zip(group, ends, strict=True) if chunk.drafts
    }


def _fed(group: list[ScheduledChunk], before: InFlightBatch | None) -> mx.array:
    """Return the tokens fed (N,): known ones, and those that the in-flight batch chooses."""
    # Sequences with their newest token on the device: the in-flight batch chooses it and this pass reads it.
    chained = [chunk.sequence for chunk in group if chunk.sequence.kv.length >= len(chunk.sequence.tokens)]
    num_chosen = 0
    known: list[int] = []
    order: list[int] = []  # of each token fed: its index among the chosen tokens, followed by the known ones
    for chunk in group:
        sequence = chunk.sequence
        position = sequence.kv.length
        if position < len(sequence.tokens):
            end = position + chunk.count - len(chunk.draft_tokens)
            fed: tuple[int, ...] = (*sequence.tokens[position:end], *chunk.draft_tokens)
        else:
            order.append(num_chosen)
            num_chosen += 1
            fed = chunk.draft_tokens
        first = len(chained) + len(known)
        order += range(first, first + len(fed))
        known += fed
    if not chained:
        return mx.array(known, mx.uint32)
    assert before is not None
    chosen = before.tokens_of(chained)
    if not known:
        return chosen
    fed_tokens = mx.concatenate([chosen, mx.array(known, mx.uint32)])
    # Chained sequences come first, so only draft tokens between two of them make another order.
    if order != list(range(len(order))):
        fed_tokens = fed_tokens[mx.array(order)]
    return fed_tokens
