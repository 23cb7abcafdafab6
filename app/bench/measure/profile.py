"""Where one decode step's time goes, from measurements of its parts.

A step is recorded once: every operation with its inputs. Then each kind of operation is run again by itself, all
layers of it in one go on the inputs it had, so its weights stream from memory as they do in a step and synchronisation
is paid once. Building the graph is timed in the step itself. Rounds are interleaved and lower quartiles taken, because
interruptions only ever add time. `closure` says by how much the parts' sum misses a step of those same operations that
is built, run and read without overlap. In the real loop the next step is built while the device works, and the native
kernels compute several layers as one node: `overlap_ms` is what that hides and saves.

Only headrace's own decoder can be taken apart this way. Norms that are fused with a projection count with it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import quantiles
from typing import Any, cast

import mlx.core as mx

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.caches import make_caches
from headrace.runtime.engine.decode import decode_step
from headrace.runtime.engine.prefill import prefill
from headrace.runtime.errors import UsageError
from headrace.runtime.kv.cache import Cache
from headrace.runtime.ops import LayersNode, LayerWeights, Ops, Projections
from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.sampling.sampler import Sampler

ROUNDS = 30
_KINDS = {
    "linear": "weights",
    "linear_add": "weights",
    "norm_linear": "weights",
    "norm_glu": "weights",
    "experts": "weights",
    "attend": "attention and KV",
    "rms_norm": "norms and the rest",
    "glu": "norms and the rest",
    "embed": "norms and the rest",
}
PARTS = ("weights", "attention and KV", "norms and the rest", "token selection", "graph building")


class _Apart:
    """An `Ops` that computes every operation of a layer by itself."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def fuse(self, _layers: Sequence[LayerWeights], _eps: float, _activation: str) -> LayersNode | None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


class _Recorder(_Apart):
    """One that notes every call of a step and passes it on."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        if name not in _KINDS:
            return function

        def noted(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return function(*arguments)

        return noted


def profile(network: object, depth: int, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """One step at `depth`, in milliseconds by part. Raises UsageError for a network of mlx-lm's."""
    if not isinstance(network, Decoder):
        raise UsageError("--profile takes headrace's own decoder apart; this model runs through mlx-lm's classes")
    sampler = Sampler(SamplingParams(), vocab_size=network.vocab_size, prompt=())
    cache = make_caches(network, depth + 2 * rounds + 8, most_running=1, keep=False).begin([0])
    for _ in prefill(network, cache, [1 + i % (network.vocab_size - 1) for i in range(depth)]):
        pass
    token = mx.array([1])
    calls, logits = _record(network, cache, token)
    works: dict[str, Callable[[], Any]] = {
        "weights": lambda: [_again(network.ops, call) for call in calls if _KINDS[call[0]] == "weights"],
        "attention and KV": lambda: _attend_again(cache, calls),
        "norms and the rest": lambda: [
            _again(network.ops, call) for call in calls if _KINDS[call[0]] == "norms and the rest"
        ],
        "token selection": lambda: sampler(logits),
    }
    apart = network.with_ops(cast(Ops, _Apart(network.ops)))
    times: dict[str, list[float]] = {name: [] for name in (*PARTS, "step", "synchronous")}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(_evaluated(work))
            cache.rollback()
        built, whole = _synchronous(apart, cache, sampler, token)
        times["graph building"].append(built)
        times["synchronous"].append(whole)
    times["step"] = _loop(network, cache, sampler, token, rounds)
    found = {name: quantiles(values, n=4, method="inclusive")[0] * 1e3 for name, values in times.items()}
    total = sum(found[name] for name in PARTS)
    return {
        "depth": depth,
        "step_ms": found["step"],
        "synchronous_step_ms": found["synchronous"],
        "parts_ms": {name: found[name] for name in PARTS},
        "closure": total / found["synchronous"] - 1,
        "overlap_ms": max(0.0, found["synchronous"] - found["step"]),
        "rounds": rounds,
    }


def _record(network: Decoder, cache: Any, token: mx.array) -> tuple[list[tuple[str, tuple[Any, ...]]], mx.array]:
    """The calls of one step with their inputs computed, and its logits. The cache is as before."""
    recorder = _Recorder(network.ops)
    twin = network.with_ops(cast(Ops, recorder))
    kept: list[Projections] = []
    cache.reserve(1, "decode")
    x = twin.embed(token[:, None])

    class Noting:
        """The cache, with attention's inputs noted (its buffers must keep a single owner)."""

        def __getattr__(self, name: str) -> Any:
            return getattr(cache, name)

        def attend(self, layer: int, qkv: Projections, spec: Any) -> mx.array:
            recorder.calls.append(("attend", (layer, qkv, spec)))
            out: mx.array = cache.attend(layer, qkv, spec)
            return out

        def run_fused(self, _layers: slice, _x: mx.array, _node: LayersNode) -> mx.array:
            raise AssertionError("a recorder fuses nothing")

    x = twin.layers(x, Noting())
    logits = twin.logits(x)
    cache.advance(1)
    for _, arguments in recorder.calls:
        kept += [argument for argument in arguments if isinstance(argument, mx.array | list)]
    mx.eval(logits, kept, cache.arrays)
    cache.rollback()
    return recorder.calls, logits


def _again(ops: Ops, call: tuple[str, tuple[Any, ...]]) -> Any:
    name, arguments = call
    return getattr(ops, name)(*arguments)


def _attend_again(cache: Any, calls: list[tuple[str, tuple[Any, ...]]]) -> list[mx.array]:
    cache.reserve(1, "decode")
    outputs = [cache.attend(*arguments) for name, arguments in calls if name == "attend"]
    cache.advance(1)
    return [*outputs, *cache.arrays]


def _evaluated(work: Callable[[], Any]) -> float:
    """Seconds to compute what `work` builds; building it is not counted."""
    outputs = work()
    began = time.perf_counter()
    mx.eval(outputs)
    return time.perf_counter() - began


def _synchronous(network: Decoder, cache: Any, sampler: Sampler, token: mx.array) -> tuple[float, float]:
    """(seconds to build, seconds in all) of a step that overlaps with nothing."""
    began = time.perf_counter()
    chosen = decode_step(network, cache, sampler, token)
    built = time.perf_counter()
    chosen.item()
    ended = time.perf_counter()
    cache.rollback()
    return built - began, ended - began


def _loop(network: Decoder, cache: Any, sampler: Sampler, token: mx.array, steps: int) -> list[float]:
    """Step latencies of the real loop, the first one left out."""
    ready = [time.perf_counter() for _ in run_ahead(network, cache, sampler, token, steps + 1)]
    return [b - a for a, b in pairwise(ready)]


def run_ahead(network: Decoder, cache: Cache, sampler: Sampler, token: mx.array, steps: int) -> Iterator[None]:
    """Steps as the engine makes them: while the device works on one, the next is built on its token."""
    ahead = decode_step(network, cache, sampler, token)
    mx.async_eval(ahead)
    for left in range(steps - 1, -1, -1):
        chosen = ahead
        if left:
            ahead = decode_step(network, cache, sampler, chosen)
            mx.async_eval(ahead)
        chosen.item()
        cache.commit(1)
        yield
