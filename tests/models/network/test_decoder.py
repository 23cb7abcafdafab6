"""The decoder on every architecture and kernel: equal results for every chunking, and stable dtypes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.models.network.projections import Residual
from headrace.runtime.engine.request import Request
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.cache import PassRow
from headrace.runtime.machine.memory import reading_weights
from headrace.runtime.ops import Ops, native, reference
from headrace.runtime.ops.weights import Weight
from tests.support.alone import new_cache
from tests.support.kernels import KERNELS, name_of, tolerance
from tests.support.tiny import EVERY, VOCAB, load_decoder, quantize_model, write_model
from tests.support.watched import WatchedNetwork, answer, committed_rows

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(45)]  # longer than every variant's window but Gemma 2's
HALVES = [mx.float16, mx.bfloat16]


@pytest.fixture(scope="module", params=EVERY)
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def directory(variant: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), variant)


def config_in(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def skip_plain_experts(directory: Path) -> None:
    if "num_experts_per_tok" in config_in(directory):
        pytest.skip("on a CPU MLX multiplies gathered matrices in float32 alone")


def feed(network: Decoder, chunks: list[int]) -> tuple[mx.array, list[mx.array]]:
    """PROMPT in chunks of these sizes -> (logits (T, V), the cache's rows)."""
    cache = new_cache(network, len(PROMPT))
    done = 0
    logits = []
    for size in chunks:
        part = PROMPT[done : done + size]
        cache.reserve(len(part))
        logits.append(network.all_logits(network.layers(network.embed(mx.array([part])), cache))[0])
        cache.advance(len(part))
        cache.commit(len(part))
        done += size
    assert cache.committed == len(PROMPT)
    return mx.concatenate(logits), committed_rows(cache)


def difference(a: mx.array, b: mx.array) -> float:
    """Largest difference, relative to the largest value of `b`."""
    a = a.astype(mx.float32)
    b = b.astype(mx.float32)
    return float((mx.abs(a - b).max() / mx.abs(b).max()).item())


@pytest.mark.sampled(8)
def test_a_decoder_without_layers_has_the_same_logits(directory: Path) -> None:
    network = load_decoder(directory, reference)
    cache = new_cache(network, len(PROMPT))
    cache.reserve(len(PROMPT))
    x = network.layers(network.embed(mx.array([PROMPT])), cache)
    ends = network.without_layers()
    assert mx.array_equal(ends.all_logits(x), network.all_logits(x))
    assert len(ends.arrays) <= 4  # the head, and the last norm's


@pytest.mark.sampled(24)
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
def test_chunks_do_not_change_the_result(directory: Path, ops: Ops) -> None:
    network = load_decoder(directory, ops)
    whole, whole_rows = feed(network, [len(PROMPT)])
    for chunks in ([1] * 45, [7] * 6 + [3], [16, 29], [44, 1], [2, 1, 13, 1, 28]):
        cut, cut_rows = feed(network, chunks)
        assert difference(cut, whole) < tolerance(ops), chunks
        assert max(difference(a, b) for a, b in zip(cut_rows, whole_rows, strict=True)) < tolerance(ops), chunks


@pytest.mark.sampled(24)
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
def test_decode_continues_after_prefill(directory: Path, ops: Ops) -> None:
    network = WatchedNetwork(load_decoder(directory, ops))
    tokens, _ = answer(network, Request(PROMPT[:20], max_tokens=25, speculate="off"))
    fresh = load_decoder(directory, ops)
    sequence = [*PROMPT[:20], *tokens]
    cache = new_cache(fresh, len(sequence))
    cache.reserve(len(sequence))
    whole = fresh.all_logits(fresh.layers(fresh.embed(mx.array([sequence])), cache))[0]
    stepwise = mx.concatenate(network.logits_seen)
    assert difference(stepwise, whole[19:-1]) < tolerance(ops)


class AuditedOps:
    """The reference operations, with the dtypes of everything they return."""

    name = "audited"

    def __init__(self) -> None:
        self.dtypes: set[mx.Dtype] = set()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(reference, name)

        def audited(*args: Any, **kwargs: Any) -> Any:
            result = operation(*args, **kwargs)
            results = result if isinstance(result, tuple) else (result,)
            self.dtypes |= {array.dtype for array in results if isinstance(array, mx.array)}
            return result

        return audited


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_stays_half(tmp_path: Path, directory: Path, variant: str, dtype: mx.Dtype) -> None:
    """One stray float32 constant would promote everything behind it, and halve a GPU's speed."""
    quantized = (EVERY.index(variant) + HALVES.index(dtype)) % 2 == 1  # in turn: all pairs of variant, dtype and this
    if not quantized:
        skip_plain_experts(directory)
    source = quantize_model(directory, tmp_path / "quantized") if quantized else directory
    audit = AuditedOps()
    network = load_decoder(source, audit, dtype)
    cache = new_cache(network, len(PROMPT))
    for part in (PROMPT[:30], PROMPT[30:44], PROMPT[44:]):
        cache.reserve(len(part))
        x = network.embed(mx.array([part]))
        hidden = network.layers(x, cache)
        logits = network.logits(hidden)
        cache.advance(len(part))
        assert {x.dtype, hidden.dtype, logits.dtype} == {dtype}
    assert audit.dtypes == {dtype}
    assert {array.dtype for array in cache.arrays} == {dtype}
    floats = {array.dtype for array in network.arrays if array.dtype != mx.uint32}
    assert floats == {dtype}
    assert mx.isfinite(logits).all().item()
    exact, _ = feed(load_decoder(source), [len(PROMPT)])
    # Half precision keeps 11 (float16) or 8 (bfloat16) bits, of quantization scales too; a few layers lose five. So do
    # the shares of experts, which are differences' powers of e.
    bound = 2**-6 if dtype == mx.float16 else 2**-3
    assert difference(logits[0], exact[-1]) < (4 * bound if "num_experts_per_tok" in config_in(directory) else bound)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_engine_runs_in_half_precision(directory: Path, dtype: mx.Dtype) -> None:
    skip_plain_experts(directory)
    network = WatchedNetwork(load_decoder(directory, reference, dtype))
    answer(network, Request(PROMPT, max_tokens=5))
    assert {logits.dtype for logits in network.logits_seen} == {dtype}
    assert {array.dtype for array in network.caches[0].arrays} == {dtype}


@pytest.mark.sampled
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
def test_sequences_of_a_pass_attend_to_their_own_entries_only(directory: Path, ops: Ops) -> None:
    network = load_decoder(directory, ops)
    rows = [PROMPT[:21], PROMPT[21:42], PROMPT[3:24]]
    kv = network.kv_backend(KVOptions(64, max_running=3))
    [one_pass] = kv.make_passes([PassRow(kv.acquire(()), len(row), "prefill") for row in rows])
    together = network.all_logits(
        network.layers(network.embed(mx.array([[token for row in rows for token in row]])), one_pass)
    )[0]
    for row, own in enumerate(rows):
        alone = new_cache(network, 64)
        alone.reserve(21)
        one = network.all_logits(network.layers(network.embed(mx.array([own])), alone))[0]
        assert difference(together[21 * row : 21 * row + 21], one) < tolerance(ops)


@pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")
@pytest.mark.parametrize("variant", ["llama", "gemma3", "qwen2"])
def test_projections_into_attention_of_several_formats_are_in_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """As in files of Q4_K_M, whose values have more bits than queries and keys in half of the layers."""
    wide = {f"model.layers.{index}.self_attn.v_proj": {"group_size": 32, "bits": 8} for index in (0, 2)}
    model = quantize_model(write_model(tmp_path / "plain", variant), tmp_path / "mixed", wide)
    network = load_decoder(model, native)
    count = len(network.config.layers)
    assert [(part, node is not None) for part, node in network._layer_groups] == [(slice(0, count), True)]
    together = feed(network, [40, 1, 1, 3])[0]
    monkeypatch.setattr(network, "_layer_groups", [(slice(index, index + 1), None) for index in range(count)])
    assert mx.array_equal(together, feed(network, [40, 1, 1, 3])[0]).item()


def test_loading_joined_experts_copies_less_than_one_stack(tmp_path: Path) -> None:
    """Peak of loading over the weights: less than one stack, where all layers' gate and up are twelve."""
    sizes = {"num_experts": 32, "moe_intermediate_size": 256, "num_hidden_layers": 6, "mlp_only_layers": []}
    directory = write_model(tmp_path, "qwen3-moe", changes=sizes)
    before = mx.get_active_memory()
    with reading_weights():
        mx.reset_peak_memory()
        arrays = load_decoder(directory, reference).arrays
        mx.eval(arrays)
        mx.synchronize()
    over = mx.get_peak_memory() - before - sum(array.nbytes for array in arrays)
    assert over < 32 * 256 * 64 * 4


def test_a_feed_forward_without_gate_needs_no_norm_before_it() -> None:
    """No family has both: its one projection has no half that could be the gate."""
    network = SimpleNamespace(
        _ops=reference, config=SimpleNamespace(norm_eps=1e-6, family=SimpleNamespace(activation="relu2"))
    )
    up = Weight(mx.random.normal((12, 8)))
    down = Weight(mx.zeros((8, 12)))
    layer: Any = SimpleNamespace(gate_up=[up], mlp_norm=None, curve=None, inner_norms=None, down=down)
    x = mx.random.normal((1, 3, 8))
    product = Decoder._feed_forward(network, Residual(x), layer)  # type: ignore[arg-type]
    assert mx.allclose(product.x, mx.maximum(x @ up.data.T, 0) ** 2, atol=1e-5)
