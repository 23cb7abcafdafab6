"""Steps of several sequences through mlx-lm's classes at once: everyone says what it says alone, token for token."""

import random
from pathlib import Path
from typing import Any

import pytest

from headrace.models.mlx_lm.batch import BatchedPart, worth_batching
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Finished, Request, Step
from headrace.runtime.metrics.cost import LayerKV
from headrace.runtime.ops.kv_format import Q8
from headrace.runtime.sampling.params import SamplingParams
from tests.models.mlx_lm.test_network import CONFIGS, VOCAB, WINDOW, load, write
from tests.watched import WatchedNetwork, answer

pytestmark = pytest.mark.peer

JOINING = {
    **{name: CONFIGS[name] for name in ("olmo2", "qwen2_moe", "cohere2", "gpt_oss")},
    "gemma": {**CONFIGS["gemma"], "head_dim": 32},
}


@pytest.fixture(scope="module", params=JOINING)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MlxLmNetwork:
    return load(write(tmp_path_factory.mktemp("joined"), JOINING[request.param]))


@pytest.fixture(scope="module")
def expected(network: MlxLmNetwork) -> list[list[int]]:
    """The answer to each request by itself."""
    return [answer(network, request)[0] for request in requests(3)]


def always(network: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Weights of a tiny model are soon smaller than K/V: join all the same."""
    monkeypatch.setattr("headrace.models.mlx_lm.backend.worth_batching", lambda *_: True)
    return network


def requests(seed: int) -> list[Request]:
    """Beyond the rotating windows, some drawn, ending at different lengths."""
    draw = random.Random(seed)
    return [
        Request(
            [draw.randrange(VOCAB) for _ in range(draw.choice([1, 2, 9, 30, 50]))],
            max_tokens=draw.randrange(1, 2 * WINDOW),
            speculate="off",
            sampling=SamplingParams(temperature=0.8, seed=number) if number % 3 == 2 else SamplingParams(),
        )
        for number in range(9)
    ]


def serve(engine: Engine, wanted: list[Request], seed: int, *, cancels: bool) -> tuple[list[list[int]], int]:
    """(what each said, the most that shared a pass); they come at random, and some are cancelled."""
    draw = random.Random(seed)
    waiting = list(wanted)
    sequences = []
    said: dict[Any, list[int]] = {}
    most = 0
    while waiting or engine.has_work:
        if waiting and draw.random() < 0.3:
            sequences.append(engine.submit(waiting.pop(0)))
            said[sequences[-1]] = []
        for sequence, event in engine.step():
            if isinstance(event, Step):
                said[sequence] += event.tokens
                most = max(most, event.record.batch)
            assert not isinstance(event, Finished) or event.reason in ("length", "cancelled")
        running = [sequence for sequence in sequences if sequence.state != "finished"]
        if cancels and running and draw.random() < 0.1:
            engine.cancel(draw.choice(running))
    return [said[sequence] for sequence in sequences], most


@pytest.mark.sampled
@pytest.mark.parametrize("cancels", [False, True])
def test_batching_does_not_change_output(
    network: MlxLmNetwork, expected: list[list[int]], cancels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(always(network, monkeypatch), context_limit=256, most_running=6)
    found, most = serve(engine, requests(3), 5, cancels=cancels)
    assert most >= 4
    if cancels:
        expected = [whole[: len(tokens)] for whole, tokens in zip(expected, found, strict=True)]
        assert sum(map(len, expected)) < sum(request.max_tokens or 0 for request in requests(3))
    assert found == expected


def test_quantized_caches_join_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = always(load(write(tmp_path, JOINING["gemma"]), kv=Q8), monkeypatch)
    wanted = requests(7)
    said, most = serve(Engine(network, context_limit=256), wanted, 5, cancels=False)
    assert most >= 4
    assert said == [answer(network, request)[0] for request in wanted]


def test_a_class_whose_output_changes_in_a_batch_takes_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that leaves out the mask: from outside that cannot be seen."""

    def unmasked(self: BatchedPart, *_: Any, **__: Any) -> None:
        self.masked = True

    monkeypatch.setattr(BatchedPart, "make_mask", unmasked)
    network = always(load(write(tmp_path, CONFIGS["olmo2"])), monkeypatch)
    assert network.can_batch
    assert not network._shares_steps()
    wanted = requests(3)
    said, most = serve(Engine(network, context_limit=256), wanted, 5, cancels=False)
    assert most == 1
    assert said == [answer(network, request)[0] for request in wanted]


def test_recurrent_state_takes_turns(tmp_path: Path) -> None:
    network = load(write(tmp_path, CONFIGS["mamba"]))
    assert not network.can_batch
    assert not network._shares_steps()
    wanted = requests(3)[:4]
    said, most = serve(Engine(network, context_limit=256), wanted, 5, cancels=False)
    assert most == 1
    assert said == [answer(network, request)[0] for request in wanted]


def test_the_batch_check_reads_no_weights_until_several_sequences_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("headrace.models.mlx_lm.network.agrees", lambda *_: asked.append(1) or True)
    network = WatchedNetwork(load(write(tmp_path, CONFIGS["olmo2"])))
    answer(network, Request([1, 2, 3], max_tokens=4))
    assert not asked
    serve(Engine(network, context_limit=64), requests(3)[:3], 1, cancels=False)
    assert len(asked) == 1


def test_a_pass_is_shared_where_it_reads_fewer_bytes() -> None:
    kv = [LayerKV(4, 100), LayerKV(4, 100, window=10)]
    assert worth_batching([9, 3], 2 * 2 * 800 * 10, kv)  # 2 sequences, 10 entries of 800 bytes, read and written
    assert not worth_batching([9, 3], 2 * 2 * 800 * 10 - 1, kv)
    assert worth_batching([99, 3], 2 * 2 * (400 * 100 + 400 * 10), kv)
    assert worth_batching([9] * 8, 2 * 8 * 800 * 10 // 7 + 1, kv)
