"""Time of a decode step by part, from measurements of the parts.

One step is recorded with the inputs of every operation. Each kind of operation then runs by itself, all layers at
once, so that weights stream from memory and synchronisation is paid once. Rounds are interleaved and lower quartiles
taken, since interruptions only add time. `closure` compares the parts' sum with a step that is built, run and read
without overlap. The real loop builds the next step while the device works, and the native kernels fuse operations:
`overlap_ms` is the time saved by both.

Only headrace's own decoder is supported. A norm fused with a projection counts as projection. An operation that is new
in `runtime/ops` needs its part in `_KINDS`.

Guard: tests/app/bench/measure/test_profile.py.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import quantiles
from typing import Any, NamedTuple

import mlx.core as mx

from headrace.app.bench.measure.records import Profile
from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.decode import decode_step
from headrace.runtime.engine.prefill import prefill
from headrace.runtime.errors import UsageError
from headrace.runtime.kv.backend import KVBackend, KVOptions, one_pass
from headrace.runtime.kv.cache import KVCache
from headrace.runtime.ops import LayersNode, LayerWeights, Ops, Projections
from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.sampling.sampler import Sampler

ROUNDS = 30  # of which the lower quartile counts
# Operations of `Ops` and of a pass, each with the part that its time counts to.
_KINDS = {
    "linear": "weights",
    "linear_add": "weights",
    "linear_add_norm": "weights",
    "norm_linear": "weights",
    "norm_glu": "weights",
    "experts": "weights",
    "expert_linear": "weights",
    "attend": "attention and KV",
    "mix": "attention and KV",
    "rms_norm": "norms and the rest",
    "layer_norm": "norms and the rest",
    "add_norms": "norms and the rest",
    "glu": "norms and the rest",
    "embed": "norms and the rest",
}
PARTS = ("weights", "attention and KV", "norms and the rest", "token selection", "graph building")


class RecordedCall(NamedTuple):
    """A recorded call of an operation: its name, a key of `_KINDS`, and its arguments."""

    name: str
    arguments: tuple[Any, ...]


class _Apart:
    """An `Ops` that computes every operation of a layer by itself."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def fuse(self, _layers: Sequence[LayerWeights], _eps: float, _activation: str, **_: object) -> LayersNode | None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


class _CallRecorder(_Apart):
    """An `Ops` that records every call of a step and passes it on."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self.calls: list[RecordedCall] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        if name not in _KINDS:
            return function

        # Layers pass these operations' arguments by position alone. A keyword raises a TypeError here.
        def recorded(*arguments: Any) -> Any:
            self.calls.append(RecordedCall(name, arguments))
            return function(*arguments)

        return recorded


def profiled_decoder(network: object) -> Decoder:
    """Return the network. Raises UsageError for one of mlx-lm's, whose operations are not recorded."""
    if not isinstance(network, Decoder):
        raise UsageError("--profile needs headrace's own decoder, which does not run this model")
    return network


def profile(network: object, depth: int, *, rounds: int = ROUNDS) -> Profile:
    """Profile one step at `depth`, in milliseconds per part. Raises UsageError for a network of mlx-lm's."""
    network = profiled_decoder(network)
    sampler = Sampler(SamplingParams(), vocab_size=network.vocab_size, prompt=())
    # Entries: the prompt's, and rounds + 1 of `_loop`; all other steps are rolled back. The rest is to spare.
    kv = network.kv_backend(KVOptions(depth + 2 * rounds + 8))
    cache = kv.acquire([0])
    for _ in prefill(network, kv, cache, [1 + i % (network.vocab_size - 1) for i in range(depth)]):
        pass

    # The operations of one step, and how to run those of each part alone.
    token = mx.array([1])
    calls, logits = _record(network, kv, cache, token)
    works: dict[str, Callable[[], Any]] = {
        "weights": lambda: [_again(network.ops, call) for call in calls if _KINDS[call.name] == "weights"],
        "attention and KV": lambda: _attend_again(kv, cache, calls),
        "norms and the rest": lambda: [
            _again(network.ops, call) for call in calls if _KINDS[call.name] == "norms and the rest"
        ],
        "token selection": lambda: sampler(logits),
    }
    apart = network.with_ops(_Apart(network.ops))

    # Each round: every part alone, then a whole step without overlap. The real loop follows at the end.
    times: dict[str, list[float]] = {name: [] for name in (*PARTS, "step", "synchronous")}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(_evaluated(work))
            cache.rollback()
        built, whole = _synchronous(apart, kv, cache, sampler, token)
        times["graph building"].append(built)
        times["synchronous"].append(whole)
    times["step"] = _loop(network, kv, cache, sampler, token, rounds)

    quartiles_ms = {name: quantiles(values, n=4, method="inclusive")[0] * 1e3 for name, values in times.items()}
    total = sum(quartiles_ms[name] for name in PARTS)
    return Profile(
        depth=depth,
        step_ms=quartiles_ms["step"],
        synchronous_step_ms=quartiles_ms["synchronous"],
        parts_ms={name: quartiles_ms[name] for name in PARTS},
        closure=total / quartiles_ms["synchronous"] - 1,
        overlap_ms=max(0.0, quartiles_ms["synchronous"] - quartiles_ms["step"]),
        rounds=rounds,
    )


def _record(network: Decoder, kv: KVBackend, cache: KVCache, token: mx.array) -> tuple[list[RecordedCall], mx.array]:
    """Return the calls of one step with evaluated inputs, and its logits. The cache is left as it was."""
    recorder = _CallRecorder(network.ops)
    twin = network.with_ops(recorder)
    inputs: list[mx.array | Projections] = []
    kv_pass = one_pass(kv, cache, 1, "decode")
    x = twin.embed(token[:, None])

    # Attention and mixers are calls of the pass, the others are calls of `Ops`.
    class RecordingPass:
        """The pass, with a record of the inputs of attention and mixers."""

        def __getattr__(self, name: str) -> Any:
            return getattr(kv_pass, name)

        def attend(self, layer: int, qkv: Projections, spec: Any) -> mx.array:
            recorder.calls.append(RecordedCall("attend", (layer, qkv, spec)))
            return kv_pass.attend(layer, qkv, spec)

        def mix(self, layer: int, x: mx.array, spec: Any) -> mx.array:
            recorder.calls.append(RecordedCall("mix", (layer, x, spec)))
            return kv_pass.mix(layer, x, spec)

        def run_fused(self, _layers: slice, _x: mx.array, _node: LayersNode) -> mx.array:
            raise AssertionError("a recorder fuses nothing")

    x = twin.layers(x, RecordingPass())
    logits = twin.logits(x)
    kv_pass.advance()

    # Evaluated now: repeating a call then computes that call alone.
    for call in recorder.calls:
        inputs += [argument for argument in call.arguments if isinstance(argument, mx.array | list)]
    mx.eval(logits, inputs, kv_pass.arrays)
    cache.rollback()
    return recorder.calls, logits


def _again(ops: Ops, call: RecordedCall) -> Any:
    return getattr(ops, call.name)(*call.arguments)


def _attend_again(kv: KVBackend, cache: KVCache, calls: list[RecordedCall]) -> list[mx.array]:
    """Return the graph of a pass over all layers' attention alone, on its recorded inputs."""
    kv_pass = one_pass(kv, cache, 1, "decode")
    outputs = [getattr(kv_pass, name)(*arguments) for name, arguments in calls if name in ("attend", "mix")]
    kv_pass.advance()
    return [*outputs, *kv_pass.arrays]


def _evaluated(work: Callable[[], Any]) -> float:
    """Return the seconds to evaluate the graph that `work` builds, without building it."""
    outputs = work()
    began = time.perf_counter()
    mx.eval(outputs)
    return time.perf_counter() - began


def _synchronous(
    network: Decoder, kv: KVBackend, cache: KVCache, sampler: Sampler, token: mx.array
) -> tuple[float, float]:
    """Return (seconds to build, seconds in all) of a step without overlap."""
    began = time.perf_counter()
    chosen = decode_step(network, one_pass(kv, cache, 1, "decode"), sampler, token)
    built = time.perf_counter()
    chosen.item()
    ended = time.perf_counter()
    cache.rollback()
    return built - began, ended - began


def _loop(
    network: Decoder, kv: KVBackend, cache: KVCache, sampler: Sampler, token: mx.array, steps: int
) -> list[float]:
    """Return the step latencies of the real loop, without the first."""
    ready = [time.perf_counter() for _ in run_ahead(network, kv, cache, sampler, token, steps + 1)]
    return [b - a for a, b in pairwise(ready)]


def run_ahead(
    network: Decoder, kv: KVBackend, cache: KVCache, sampler: Sampler, token: mx.array, steps: int
) -> Iterator[None]:
    """Make steps as the engine does: the next step is built while the device computes one."""
    ahead = decode_step(network, one_pass(kv, cache, 1, "decode"), sampler, token)
    mx.async_eval(ahead)
    for left in range(steps - 1, -1, -1):
        chosen = ahead
        if left:
            ahead = decode_step(network, one_pass(kv, cache, 1, "decode"), sampler, chosen)
            mx.async_eval(ahead)
        chosen.item()
        cache.commit(1)
        yield
