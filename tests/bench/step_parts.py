"""Time of a decode step by part, in the engine's own loop.

    python -m tests.bench.step_parts [MODEL] [--depths 0,2048,4096] [--temperature 1 --top-p 0.9]

The kernels' pool records for every parallel region its duration, the calling thread's wait for the others, and their
busy time. The rest of a step lies between regions: graph dispatch, waiting for the next step to be built, and stock MLX
operations. `headrace bench --profile` measures each kind of operation alone instead. Medians of rounds; use an idle
machine.
"""

import argparse
import statistics
import time

import mlx.core as mx

from headrace.app.bench.measure.profile import run_ahead
from headrace.models.loading.load import load_model
from headrace.models.network.decoder import Decoder
from headrace.models.registry.resolve import resolve
from headrace.runtime.engine.prefill import prefill
from headrace.runtime.kv.backend import KVBackend, KVOptions
from headrace.runtime.kv.cache import KVCache
from headrace.runtime.ops import native
from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.sampling.sampler import Sampler

KINDS = ("weights", "attention", "sampling")


def round_of(network: Decoder, kv: KVBackend, cache: KVCache, steps: int, params: SamplingParams) -> dict[str, float]:
    """Return the milliseconds of a step after the cached entries, by part."""
    depth = cache.committed
    sampler = Sampler(params, vocab_size=network.vocab_size, prompt=())
    ahead = run_ahead(network, kv, cache, sampler, mx.array([1]), steps + 1)
    next(ahead)
    native.measure_regions(True)
    began = time.perf_counter()
    for _ in ahead:
        pass
    step = (time.perf_counter() - began) / steps
    times = native.region_times()
    native.measure_regions(False)
    cache.trim(depth)
    others = max(1, (native.status().threads or 1) - 1)
    parts = {"step": step * 1e3}
    for kind in KINDS:
        parts[kind] = times[kind].wall_ns / steps / 1e6
    wall = sum(times[kind].wall_ns for kind in KINDS) / steps / 1e6
    waiting = sum(times[kind].waiting_ns for kind in KINDS) / steps / 1e6
    busy = sum(times[kind].busy_ns for kind in KINDS) / steps / 1e6
    parts["between regions"] = parts["step"] - wall
    parts["of regions: caller waits"] = waiting
    parts["of regions: others not busy"] = wall - busy / others
    parts["regions"] = sum(times[kind].regions for kind in KINDS) / steps
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--depths", default="0,2048,4096")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    options = parser.parse_args()
    resolved = resolve(options.model)
    network = load_model(resolved.path, name=resolved.name).network
    if not isinstance(network, Decoder) or not native.status().available:
        raise SystemExit(f"needs headrace's own decoder on the native kernels: {native.status()}")
    params = SamplingParams(temperature=options.temperature, top_p=options.top_p, seed=1)
    print(f"{resolved.name}: {native.status()}")
    for depth in map(int, options.depths.split(",")):
        kv = network.kv_backend(KVOptions(depth + options.steps + 2))
        cache = kv.acquire(())
        for _ in prefill(network, kv, cache, [1 + i % (network.vocab_size - 1) for i in range(depth)]):
            pass
        rounds = [round_of(network, kv, cache, options.steps, params) for _ in range(options.rounds)]
        print(f"depth {depth}")
        for part in rounds[0]:
            print(f"  {part:28} {statistics.median(found[part] for found in rounds):8.3f}")


if __name__ == "__main__":
    main()
