"""Thirty random prompts with and without speculation: alone, in a batch, with stops in every place."""

import random
from functools import partial

import pytest
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Finished, Request
from headrace.runtime.ops import Ops, native, reference
from tests.support.speculating import oracle, run, speculating
from tests.support.tiny import load_decoder, quantize_model, write_model
from tests.support.watched import split

PROMPTS = 30
LENGTH = 17
BESIDE = 8
BACKENDS: list[Ops] = [reference, *([native] if native.status().available else [])]

Answers = list[tuple[list[int], str, int | None]]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda ops: ops.__name__.rpartition(".")[2])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    root = tmp_path_factory.mktemp("speculation")
    return load_decoder(quantize_model(write_model(root / "plain", "llama"), root / "model"), request.param)


@pytest.fixture(scope="module")
def asked(network: Decoder) -> tuple[list[Request], Answers]:
    """Greedy requests, two thirds of them with a stop token or a token limit, and their plain output."""
    draw = random.Random(14)
    engine = Engine(network, context_limit=128)
    requests: list[Request] = []
    expected: Answers = []
    for number in range(PROMPTS):
        words = [[draw.randrange(96) for _ in range(draw.randint(2, 6))] for _ in range(3)]
        prompt = [token for _ in range(draw.randint(1, 6)) for token in draw.choice(words)]  # repeats, as texts do
        request = Request(prompt, LENGTH, speculate="off")
        tokens, _ = split(list(engine.generate(request)))
        place = number % LENGTH
        match number % 3:
            case 0:
                requests.append(replace(request, stop_ids=frozenset({tokens[place]})))
                expected.append((tokens[: tokens.index(tokens[place])], "stop", tokens[place]))
            case 1:
                requests.append(replace(request, max_tokens=place + 1))
                expected.append((tokens[: place + 1], "length", None))
            case _:
                requests.append(request)
                expected.append((tokens, "length", None))
    return requests, expected


def ended(events: list) -> tuple[list[int], str, int | None]:  # type: ignore[type-arg]
    tokens, end = split(events)
    assert isinstance(end, Finished)
    return tokens, end.reason, end.stop_id


@pytest.mark.sampled
@pytest.mark.parametrize("beside", [1, BESIDE])
@pytest.mark.parametrize("proposer", ["ngram", "oracle"])
def test_speculation_leaves_the_output_of_random_prompts_unchanged(
    network: Decoder, asked: tuple[list[Request], Answers], beside: int, proposer: str
) -> None:
    """With n-gram drafts, always verified, and with drafts that are wrong in one place."""
    if network._ops is reference and native.status().available and (beside == 1) == (proposer == "ngram"):
        pytest.skip("every pair on the native kernels, each value once on stock MLX")
    requests, expected = asked
    whole = partial(run, speculating(network, context_limit=128, max_running=beside))
    found: Answers = []
    accepted = 0
    for first in range(0, PROMPTS, beside):
        own = [replace(request, speculate="ngram") for request in requests[first : first + beside]]
        answers = expected[first : first + beside]
        oracles = [
            oracle(request.prompt, answer[0], frozenset({(first + row) % LENGTH}))
            for row, (request, answer) in enumerate(zip(own, answers, strict=True))
        ]
        for events in whole(own, oracles if proposer == "oracle" else ()):
            found.append(ended(list(events)))
            accepted += split(list(events))[1].summary.accepted
    assert found == expected
    assert accepted > PROMPTS // 2
