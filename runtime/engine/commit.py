"""Commits a batch that the device has computed: entries of the cache, tokens, records, events.

The third of a step's four parts (schedule, run, commit, deliver); it returns the events that are then delivered.
`Engine._commit` calls it with the tokens that the host has read. A token is output only after its step's entries are
committed: tests/runtime/engine/test_step_loop.py.
"""

from typing import cast

import mlx.core as mx

from headrace.runtime.engine.ending import Ending
from headrace.runtime.engine.in_flight import ComputedChunk
from headrace.runtime.engine.request import Finished, Step, TokenLogprobs
from headrace.runtime.engine.sequence import Delivery, Sequence
from headrace.runtime.kv.backend import KVBackend
from headrace.runtime.metrics.telemetry import PassFacts
from headrace.runtime.ops.read_values import read_floats, read_ints
from headrace.runtime.sampling.sampler import Logprobs
from headrace.runtime.speculation.proposer import num_accepted


def commit_batch(computed: list[ComputedChunk], facts: PassFacts, kv: KVBackend, ending: Ending) -> list[Delivery]:
    """Commit the chunks of a batch and return its events.

    facts: for the records.
    kv: shares the entries of prompts.
    ending: ends sequences at a token that ends the turn, or at an error of their own.
    """
    events: list[Delivery] = []
    decodes = any(each.chunk.phase == "decode" for each in computed)
    for each in computed:
        chunk = each.chunk
        sequence = chunk.sequence
        if sequence.state == "finished":  # while the batch was in flight
            continue
        # An error in a chunk that chooses ends its sequence alone; other errors are raised.
        if chunk.chooses:
            with ending.end_on_error(sequence, events):
                if each.error is not None:
                    raise each.error
                events.append((sequence, _commit_decode(each, facts, ending)))
            continue
        _hand_over(each, chunk.count)
        sequence.kv.commit(chunk.count)
        if chunk.phase == "prefill":
            _commit_prefill(sequence, kv, events)
            # The prompt has ended, and no sequence decoded in this batch.
            if not decodes and sequence.kv.committed == sequence.prefill_end:
                mx.clear_cache()  # decoding needs no working memory of chunks
    return events


def _commit_decode(computed: ComputedChunk, facts: PassFacts, ending: Ending) -> Step | Finished:
    """Commit a decode chunk: one token, and as many more as draft tokens were accepted.

    The order matters: hidden states are handed over before their entries are committed, and the record is made after
    that. The rollback comes last, as caches with recurrent state then drop committed entries, too.
    """
    chunk = computed.chunk
    sequence = chunk.sequence
    draft_tokens = chunk.draft_tokens
    accepted = num_accepted(computed.tokens, draft_tokens)
    output = computed.tokens[: accepted + 1]
    stop = next((index for index, token in enumerate(output) if token in sequence.request.stop_ids), None)
    # The entry of a token that ends the turn is committed as any other; its token is no output.
    if sequence.constraint is not None:
        sequence.constraint.accept(output[:stop])
    if stop is not None:
        output = output[: stop + 1]
    num_committed = chunk.num_refed + len(output)  # entries; those fed again had been rolled back
    _hand_over(computed, num_committed)
    sequence.kv.commit(num_committed)
    source = None
    if draft_tokens:
        assert sequence.sampler is not None
        sequence.sampler.commit(len(output))
        sequence.draft_entries = 0
        source = chunk.source
    sequence.tokens += output
    record = sequence.timeline.step_done(sequence.kv, facts, len(output), len(draft_tokens), source)
    if draft_tokens:
        sequence.kv.rollback()
    if stop == 0:  # no other token came with it: the step is part of the end
        return ending.finish(sequence, "stop", output[0], record)
    if stop is not None:
        sequence.stop_id = output.pop()  # `Finished` follows in the next step, after these tokens
    sequence.output_count += len(output)
    logprobs = None
    if computed.logprobs is not None:
        logprobs = tuple(_read(values) for values in computed.logprobs[: len(output)])
    return Step(tuple(output), record, logprobs, rejected=draft_tokens[accepted:])


def _commit_prefill(sequence: Sequence, kv: KVBackend, events: list[Delivery]) -> None:
    """Share a committed chunk of a prompt, and report it."""
    cache = sequence.kv
    if sequence.is_reusable:
        kv.on_prefill(cache, sequence.tokens)
    if cache.committed > sequence.reported:  # else it was preempted, and computes these entries again
        sequence.reported = cache.committed
        events.append((sequence, sequence.progress()))
        sequence.timeline.prefilled()


def _hand_over(computed: ComputedChunk, count: int) -> None:
    """Give the hidden states of the chunk's first `count` tokens to the proposer that drafts from them.

    Call it before these are committed: the first of them is at `committed`.
    """
    sequence = computed.chunk.sequence
    if computed.hidden is not None and sequence.mtp is not None:
        sequence.mtp.take(sequence.kv.committed, computed.hidden[:, :count])


def _read(values: Logprobs) -> TokenLogprobs:
    """Return the log probabilities of one token, on the host."""
    chosen, ids, best, digest = values
    pairs = zip(read_ints(ids[0]), read_floats(best[0]), strict=True)
    return TokenLogprobs(cast(float, chosen.item()), list(pairs), cast(int, digest.item()))
