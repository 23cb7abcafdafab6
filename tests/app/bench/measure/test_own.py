"""The engine as a backend: the right tokens at the right depth, with caches that trim and caches that cannot."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.app.bench.measure.own import OwnEngine
from headrace.app.bench.measure.plan import Test
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.models.network.decoder import Decoder
from headrace.runtime.errors import EngineError
from headrace.runtime.kv.cache import KVCache
from headrace.runtime.machine.sensors import Readings
from tests.support.tiny import load_decoder, write_model

MAMBA = {
    "model_type": "mamba", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "state_size": 8,
    "num_hidden_layers": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(write_model(tmp_path_factory.mktemp("own") / "tiny", "qwen3"))


@pytest.mark.parametrize("depth", [0, 1, 40])
def test_a_decode_counts_the_bytes_of_its_own_depth(decoder: Decoder, depth: int) -> None:
    backend = OwnEngine("tiny", decoder, limit=128)
    for _ in range(3):
        sample = backend.measure(Test(0, 5, depth))
        assert len(sample.latencies_s) == 4
        # The first step is no interval; the others have depth + 1 ... depth + 4 entries before them.
        expected = [decoder.cost.step_bytes(depth + k) for k in range(1, 5)]
        assert sample.weight_bytes is not None
        assert sample.kv_bytes is not None
        assert sample.weight_bytes + sample.kv_bytes == sum(expected) / 4
        assert sample.flops == sum(decoder.cost.step_flops(depth + k) for k in range(1, 5)) / 4


def test_a_depth_is_prefilled_once_for_all_repetitions(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    advance = KVCache.advance

    def counted(cache: KVCache, tokens: int) -> None:
        fed.append(tokens)
        advance(cache, tokens)

    monkeypatch.setattr(KVCache, "advance", counted)
    backend = OwnEngine("tiny", decoder, limit=256)
    backend.warm_up(Test(0, 4, 100))
    assert sum(fed) >= 100
    fed.clear()
    backend.measure(Test(0, 4, 100))
    assert sum(fed) <= 1 + 4  # the last token of the depth, and the steps
    fed.clear()
    backend.measure(Test(32, 0, 100))
    assert sum(fed) == 1 + 31 + 1  # ... the prompt but its last token, and the step that feeds it


def test_repeated_depths_are_measured_with_their_kv_bytes(decoder: Decoder) -> None:
    backend = OwnEngine("tiny", decoder, limit=256)
    for test in (Test(0, 4, 64), Test(0, 4, 8), Test(8, 4, 64), Test(8, 0), Test(0, 4, 8), Test(0, 4, 64)):
        sample = backend.measure(test)
        if test.kind == "decode":
            assert sample.kv_bytes == sum(
                decoder.cost.step_bytes(test.depth + k) - decoder.cost.weight_bytes for k in (1, 2, 3)
            ) / 3  # fmt: skip


def test_a_prefill_test_ends_with_its_first_token(decoder: Decoder) -> None:
    sample = OwnEngine("tiny", decoder, limit=64).measure(Test(16, 0))
    assert sample.ttft_s == pytest.approx(sample.prefill_s + (sample.first_step_s or 0))
    assert not sample.latencies_s
    assert sample.tokens_per_second(Test(16, 0)) == pytest.approx(16 / (sample.ttft_s or 1))


def test_a_cache_that_cannot_be_trimmed_is_filled_anew(tmp_path: Path) -> None:
    from mlx.utils import tree_flatten
    from mlx_lm.models.mamba import Model, ModelArgs

    weights = dict(tree_flatten(Model(ModelArgs.from_dict(MAMBA)).parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(MAMBA))
    network = MlxLmNetwork(open_checkpoint(tmp_path), device=mx.DeviceType.cpu)
    backend = OwnEngine("mamba", network, limit=128)
    for test in (Test(0, 4, 20), Test(8, 0, 20), Test(0, 4, 20), Test(8, 4)):
        backend.measure(test)  # raises if the depth was not there before the clock started


@pytest.mark.parametrize("depth", [0, 20])
def test_a_batch_counts_the_bytes_of_all_its_sequences_once_all_decode(decoder: Decoder, depth: int) -> None:
    test = Test(0, 5, depth, batch=3)
    backend = OwnEngine("tiny", decoder, limit=test.tokens)
    backend.warm_up(test)
    sample = backend.measure(test)
    assert len(sample.latencies_s) == 4
    assert sample.weight_bytes == decoder.cost.weight_bytes  # once for all of them
    assert sample.kv_bytes is not None
    alone = decoder.cost.step_bytes(depth + 5) - decoder.cost.weight_bytes
    assert sample.kv_bytes >= 3 * (decoder.cost.step_bytes(depth + 1) - decoder.cost.weight_bytes)
    assert sample.kv_bytes < 4 * alone
    assert sample.tokens_per_second(test) == pytest.approx(3 * 4 / sample.decode_s)


def test_a_joining_prompt_is_compared_with_before_and_alone(decoder: Decoder) -> None:
    test = Test(40, 6, 8, batch=3)
    sample = OwnEngine("tiny", decoder, limit=test.tokens).measure(test)
    assert sample.arrival is not None
    assert len(sample.arrival.before_s) == 3 * 6
    assert len(sample.latencies_s) >= 3  # in every pass that had a part of the prompt
    assert sample.tokens_per_second(test) == pytest.approx(40 / sample.prefill_s)
    assert sample.arrival.alone_s > 0
    with pytest.raises(EngineError, match="ended"):
        OwnEngine("tiny", decoder, limit=10).measure(Test(8, 20, 0, batch=2))


def test_a_batch_without_room_for_those_that_are_ahead_is_an_error(decoder: Decoder) -> None:
    with pytest.raises(EngineError, match="ended"):
        OwnEngine("tiny", decoder, limit=4).measure(Test(0, 9, 0, batch=2))


class _Counter:
    """A counter of one joule a look; the clock stands still between looks, and a second passes with each."""

    looks = 0

    def __call__(self) -> Readings:
        self.looks += 1
        return Readings(joules=float(self.looks), energy_parts="CPU")


@pytest.mark.parametrize(("test", "looks"), [(Test(0, 5), 3), (Test(8, 0), 2), (Test(0, 5, batch=2), 2)])
def test_energy_is_read_around_the_tokens_that_count(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, test: Test, looks: int
) -> None:
    monkeypatch.setattr("headrace.runtime.machine.energy.LEAST_S", 0.0)
    backend = OwnEngine("tiny", decoder, limit=test.tokens)
    assert backend.measure(test).energy is None  # nothing is read
    counter = _Counter()
    backend = OwnEngine("tiny", decoder, limit=test.tokens, sensors=counter)
    energy = backend.measure(test).energy
    assert energy is not None
    assert counter.looks == looks  # before a request, again at the first step of a decode, and at the end
    assert energy.joules == 1.0
    assert energy.seconds > 0
