"""Speculation leaves output unchanged for any proposer and any end of an answer, alone and in a batch."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.draft_networks import DraftModel
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.prompt_chunks import FIRST
from headrace.runtime.engine.request import Event, Finished, Request, Step
from headrace.runtime.errors import NotEnoughMemoryError, UsageError
from headrace.runtime.ops import BLOCK, Ops, native, reference
from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.sampling.sampler import Sampler
from tests.support.speculating import Scripted, oracle, run, speculating
from tests.support.tiny import load_decoder, quantize_model, write_model
from tests.support.watched import WatchedNetwork, answer, same_rows, split

PROMPT = [(7 * i * i + 3 * i + 1) % 96 for i in range(BLOCK - 9)]  # answers cross the end of a block
SAYS = 40  # tokens of an answer
PLAIN = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=3)
EVERYTHING = replace(SAMPLED, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={5: 2.0})
GREEDY_PENALISED = replace(PLAIN, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 1.0, 9: -3.0})
SAMPLINGS = [PLAIN, SAMPLED, EVERYTHING, GREEDY_PENALISED]
BACKENDS: list[Ops] = [reference, *([native] if native.status().available else [])]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda ops: ops.__name__.rpartition(".")[2])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    root = tmp_path_factory.mktemp("speculation")
    return load_decoder(quantize_model(write_model(root / "plain", "llama"), root / "model"), request.param)


@pytest.fixture(scope="module")
def expected(network: Decoder) -> list[list[Any]]:
    """The output of each sampling without speculation, with log probabilities."""
    requests = [asked(sampling, speculate="off") for sampling in SAMPLINGS]
    return [said(list(Engine(network, context_limit=256).generate(request))) for request in requests]


def asked(sampling: SamplingParams = PLAIN, **more: Any) -> Request:
    """Return a request for PROMPT. more: other fields, which replace those set here."""
    return Request(PROMPT, **{"max_tokens": SAYS, "sampling": sampling, "logprobs": 4} | more)


def said(events: Sequence[Event]) -> list[Any]:
    """Return each output token with its log probabilities, or None without them."""
    steps = [event for event in events if isinstance(event, Step)]
    return [
        pair for step in steps for pair in zip(step.tokens, step.logprobs or [None] * len(step.tokens), strict=True)
    ]


def same(network: Decoder, ours: list[Any], theirs: list[Any]) -> None:
    """Compare bits on the native kernels, tokens on stock MLX."""
    if network._ops is native:
        assert ours == theirs
    else:
        assert [token for token, _ in ours] == [token for token, _ in theirs]


# Positions of the answer at which the proposer is wrong: nowhere, at the first token, here and there, everywhere.
WRONG = [(), (0,), (1, 7, 8, 30), tuple(range(0, SAYS, 3)), tuple(range(SAYS))]


@pytest.mark.sampled
@pytest.mark.parametrize("way", range(len(SAMPLINGS)))
@pytest.mark.parametrize("wrong", WRONG)
def test_speculation_leaves_output_unchanged(
    network: Decoder, expected: list[list[Any]], way: int, wrong: tuple[int, ...]
) -> None:
    if network._ops is reference and native.status().available and (way + WRONG.index(wrong)) % 2:
        pytest.skip("every pair on the native kernels, half of them on stock MLX")
    tokens = [token for token, _ in expected[way]]
    (events,) = run(speculating(network), [asked(SAMPLINGS[way])], [oracle(PROMPT, tokens, frozenset(wrong))])
    same(network, said(events), expected[way])
    end = split(list(events))[1].summary
    assert (end.completion_tokens, end.steps + end.accepted) == (SAYS, SAYS)
    steps = [event for event in events if isinstance(event, Step)]
    assert [len(step.tokens) for step in steps] == [step.record.tokens for step in steps]
    assert all(step.record.source == ("test" if step.record.proposed else None) for step in steps)
    assert end.proposed == sum(step.record.proposed for step in steps)
    assert all(len(step.rejected) == step.record.proposed - step.record.accepted for step in steps)
    assert all(step.rejected[0] != step.tokens[-1] for step in steps if step.rejected)
    if not wrong:
        assert end.steps < SAYS / 4
    if len(wrong) == SAYS:
        assert (end.accepted, end.steps) == (0, SAYS)


@pytest.mark.sampled
@settings(max_examples=12)
@given(st.data())
def test_any_proposer_leaves_output_unchanged(network: Decoder, expected: list[list[Any]], data: st.DataObject) -> None:
    """Random, too few, too many and invalid tokens, none, and exceptions."""
    way = data.draw(st.integers(0, len(SAMPLINGS) - 1))
    tokens = [*PROMPT, *(token for token, _ in expected[way])]
    chance = random.Random(data.draw(st.integers(0, 1000)))
    fails = data.draw(st.sampled_from([None, 3, 20]))

    def draft(known: Sequence[int], most: int) -> list[int]:
        if fails is not None and len(known) > len(PROMPT) + fails:
            raise RuntimeError("no idea")
        right = tokens[len(known) : len(known) + most]
        match chance.randrange(5):
            case 0:
                return []
            case 1:
                return [chance.randrange(96) for _ in range(chance.randint(0, 40))]
            case 2:
                return [*right[: chance.randint(0, most)], 96, -1, 1 << 40]
            case 3:
                return right[: chance.randint(0, most)]
        return [token if chance.random() < 0.8 else chance.randrange(96) for token in right]

    (events,) = run(speculating(network), [asked(SAMPLINGS[way])], [Scripted(draft)])
    same(network, said(events), expected[way])


@pytest.mark.sampled
@pytest.mark.parametrize("end", range(1, 20))
def test_a_stop_token_at_any_place_of_a_draft_ends_the_answer(
    network: Decoder, expected: list[list[Any]], end: int
) -> None:
    """By an end-of-turn token, by max tokens, by the end of the context."""
    if network._ops is reference and native.status().available and end % 3 != 1:
        pytest.skip("every place on the native kernels, one in three on stock MLX")
    tokens = [token for token, _ in expected[1]]
    for request, limit in (
        (asked(SAMPLED, stop_ids=frozenset({tokens[end]})), 256),
        (asked(SAMPLED, max_tokens=end), 256),
        (asked(SAMPLED), len(PROMPT) - 1 + end),
    ):
        watched = WatchedNetwork(network)
        plain = WatchedNetwork(network)
        found = run(speculating(watched, context_limit=limit), [request], [oracle(PROMPT, tokens)])[0]
        without = list(Engine(plain, context_limit=limit).generate(replace(request, speculate="off")))
        same(network, said(found), said(without))
        ours = split(list(found))[1]
        theirs = split(without)[1]
        assert (ours.reason, ours.stop_id) == (theirs.reason, theirs.stop_id)
        assert ours.summary.completion_tokens == theirs.summary.completion_tokens
        assert ours.summary.steps + ours.summary.accepted == theirs.summary.steps
        if ours.reason == "length" and network._ops is native:
            assert same_rows(watched.caches[0], plain.caches[0])


@pytest.mark.sampled
def test_tokens_after_a_cancel_within_a_step_do_not_count(network: Decoder, expected: list[list[Any]]) -> None:
    """As for a stop string: the cancel flag has the number of tokens that count."""
    tokens = [token for token, _ in expected[0]]
    for after in range(1, 18):  # also right before the end-of-turn token
        request = asked(stop_ids=frozenset({tokens[17]}))
        count = 0
        engine = speculating(network)
        sequence = engine.submit(request)
        sequence.proposers = [oracle(PROMPT, tokens)]
        while sequence.state != "finished":
            for _, event in engine.step():
                if isinstance(event, Step):
                    count += len(event.tokens)
                    if count >= after and not request.cancel:
                        request.cancel.set(after=after)
                elif isinstance(event, Finished):
                    end = event
        first = tokens.index(tokens[17])
        assert (end.reason, end.summary.completion_tokens) == (
            "cancelled" if after <= first else "stop",
            min(after, first),
        )
        if after <= first:
            assert end.summary.steps + end.summary.accepted == after


def test_rollback_restores_kv_entries_random_keys_and_penalty_counts(
    network: Decoder, expected: list[list[Any]]
) -> None:
    """After every step with rejected draft tokens, against decoding without speculation."""
    tokens = [token for token, _ in expected[2]]
    watched = WatchedNetwork(network)
    engine = speculating(watched)
    plain = Engine(WatchedNetwork(network), context_limit=256)
    ours = engine.submit(asked(EVERYTHING, logprobs=None))
    ours.proposers = [oracle(PROMPT, tokens, frozenset(range(2, SAYS, 5)))]
    theirs = plain.submit(asked(EVERYTHING, logprobs=None, speculate="off"))

    # Without speculation: random key and counts of penalties, by the number of tokens chosen.
    states = {}
    while theirs.state != "finished":
        plain.step()
        if theirs.sampler is not None and theirs.output_count and not theirs.remaining:
            break
        if theirs.sampler is not None and theirs.cache.committed:  # the pass under way has chosen already
            key = theirs.sampler._key
            counts = theirs.sampler._counts
            states[theirs.output_count + theirs.pending] = key, None if counts is None else counts.tolist()

    # With speculation: the same after the same number, wherever no draft token is left to verify.
    compared = 0
    while ours.state != "finished":
        engine.step()
        if ours.sampler is not None and not ours.sampler._states and ours.output_count:
            chosen = ours.output_count + (1 if ours.pending else 0)
            if chosen in states:
                assert ours.sampler._counts is not None
                assert (ours.sampler._key, ours.sampler._counts.tolist()) == states[chosen]
                compared += 1
    assert ours.tokens == [*PROMPT, *tokens]
    assert compared


@pytest.mark.sampled
def test_speculation_survives_cancels_and_little_memory_in_a_batch(network: Decoder) -> None:
    """With drafts of different quality; some requests are cancelled, and with room for two some are preempted."""
    chance = random.Random(7)
    requests = [
        Request([chance.randrange(96) for _ in range(chance.randint(1, 150))], 30, SAMPLINGS[n % 4], logprobs=2)
        for n in range(6)
    ]
    alone = [list(Engine(network, context_limit=300).generate(replace(r, speculate="off"))) for r in requests]
    proposers = [
        oracle(r.prompt, split(a)[0], frozenset(chance.sample(range(30), k)))
        for r, a, k in zip(requests, alone, [0, 5, 15, 30, 1, 8], strict=True)
    ]
    for memory in (None, 400 * network.cost.kv_bytes_per_token):
        engine = speculating(network, context_limit=300, kv_memory=memory)
        sequences = [engine.submit(request) for request in requests]
        for sequence, proposer in zip(sequences, proposers, strict=True):
            sequence.proposers = [proposer]
        passing = engine.submit(Request(PROMPT[:40], 90))
        passing.proposers = [Scripted(lambda _, most: [3] * most)]
        events: dict[Any, list[Event]] = {sequence: [] for sequence in [*sequences, passing]}
        while engine.has_work:
            if passing.output_count >= 5 and passing.state != "finished":
                engine.cancel(passing)
            for sequence, event in engine.step():
                events[sequence].append(event)
        for sequence, expected in zip(sequences, alone, strict=True):
            same(network, said(events[sequence]), said(expected))
        assert engine.load().kv_used_bytes == 0


def test_a_cancelled_speculative_step_caches_output_tokens_only(network: Decoder) -> None:
    """The next prompt reuses the first one's output tokens, and no draft tokens."""
    tokens = answer(network, asked(speculate="off"))[0]
    for wrong in (frozenset[int](), frozenset(range(SAYS))):
        engine = speculating(network, keep_prefix=True)
        sequence = engine.submit(asked())
        sequence.proposers = [oracle(PROMPT, tokens, wrong)]
        while sequence.output_count < 6:
            engine.step()
        engine.cancel(sequence)
        while engine.has_work:
            engine.step()
        whole = [*PROMPT, *tokens]
        assert sequence.tokens == whole[: len(sequence.tokens)]
        again = Request([*sequence.tokens, 5], max_tokens=8, speculate="off")
        warm = split(list(engine.generate(again)))
        assert warm[1].summary.reused_tokens >= len(PROMPT)
        assert warm[0] == answer(network, again)[0]


def test_repeated_text_is_drafted_by_default(network: Decoder) -> None:
    """N-gram drafts are on by default, with equal output."""
    prompt = PROMPT[:20] * 4
    request = Request(prompt, max_tokens=60)
    (events,) = run(speculating(network), [request])
    tokens, end = split(list(events))
    assert tokens == answer(network, replace(request, speculate="off"))[0]
    assert {event.record.source for event in events if isinstance(event, Step)} == {None, "ngram"}
    assert end.summary.proposed > 0


@pytest.mark.parametrize("pays", [True, False])
def test_proposers_are_not_updated_while_drafts_cannot_pay(
    network: Decoder, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    """Otherwise it takes no time."""
    engine = speculating(network)
    proposer = Scripted(lambda _tokens, _most: [])
    updates: list[int] = []
    monkeypatch.setattr(proposer, "update", lambda tokens: updates.append(len(tokens)))
    monkeypatch.setattr(engine._drafting.controller, "pays", lambda *_, **__: pays)
    run(engine, [Request(PROMPT, max_tokens=8)], [proposer])
    assert bool(updates) == pays


def test_a_repeated_answer_is_drafted_from_the_first(network: Decoder) -> None:
    """Both prompts end alike, and the second one lacks what the first answer says."""
    prompt = [7, *PROMPT[:3]]
    engine = speculating(network)
    first, second = (run(engine, [Request(prompt, max_tokens=40)])[0] for _ in range(2))
    assert split(first)[0] == split(second)[0]
    assert split(second)[1].summary.steps < split(first)[1].summary.steps


def test_speculation_can_be_turned_off(network: Decoder) -> None:
    (events,) = run(speculating(network), [Request(PROMPT[:20] * 4, max_tokens=30, speculate="off")])
    assert split(list(events))[1].summary.proposed == 0


@pytest.mark.sampled
@pytest.mark.parametrize("sampling", [PLAIN, EVERYTHING])
@pytest.mark.parametrize("own", [True, False])
def test_a_draft_model_leaves_output_unchanged(
    network: Decoder, expected: list[list[Any]], tmp_path: Path, sampling: SamplingParams, own: bool
) -> None:
    """The network as its own draft is always accepted; another one almost never."""
    other = network if own else load_decoder(write_model(tmp_path, "qwen2"), network._ops)
    engine = speculating(network, draft=other)
    (events,) = run(engine, [asked(sampling, speculate="draft")])
    same(network, said(events), expected[SAMPLINGS.index(sampling)])
    summary = split(list(events))[1].summary
    assert {event.record.source for event in events if isinstance(event, Step)} == {None, "draft"}
    if own and network._ops is native:
        assert summary.accepted == summary.proposed
        assert summary.steps <= SAYS / 8  # but for one beside which the prompt is read
    if not own:
        assert summary.accepted < summary.proposed / 2


def test_a_draft_reads_a_prompt_in_chunks_between_steps(network: Decoder) -> None:
    cache_lengths = []
    draft = DraftModel(
        network, 256, network.vocab_size, lambda: Sampler(PLAIN, vocab_size=network.vocab_size, prompt=())
    )
    draft.update(PROMPT[:100])
    while not (drafted := draft.propose(3)):
        cache_lengths.append(draft._cache.committed)
    assert cache_lengths[0] == FIRST
    assert len(drafted) == 3
    assert draft._cache.committed == 100


def test_budget_counts_the_draft_models_kv(network: Decoder) -> None:
    memory = network.cost.kv_bytes(256)
    alone = Engine(network, context_limit=256, kv_memory=memory)
    drafted = Engine(network, context_limit=256, kv_memory=memory, draft=network)
    prompt = (PROMPT * 3)[:200]
    alone.submit(Request(prompt))
    with pytest.raises(NotEnoughMemoryError):
        drafted.submit(Request(prompt))
    drafted.submit(Request(prompt[:100]))


@pytest.mark.sampled
def test_a_draft_model_leaves_the_output_of_a_batch_unchanged(network: Decoder) -> None:
    """With n-grams and plain requests in one batch; the cache has output tokens only."""
    requests = [
        Request(PROMPT[:number], 30, SAMPLINGS[number % 4], speculate=how)
        for number, how in ((40, "draft"), (17, "ngram"), (30, "off"), (25, "draft"))
    ]
    found = run(speculating(network, draft=network), requests)
    for request, events in zip(requests, found, strict=True):
        assert split(list(events))[0] == answer(network, replace(request, speculate="off"))[0]


def test_a_missing_draft_model_is_refused(network: Decoder) -> None:
    with pytest.raises(UsageError, match="draft"):
        Engine(network, context_limit=256).submit(asked(speculate="draft"))
