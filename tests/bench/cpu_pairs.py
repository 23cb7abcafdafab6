"""CPU time per token of headrace and llama.cpp, in turns, on machines that others use meanwhile.

    python -m tests.bench.cpu_pairs FOLDER NAME --llama-python PYTHON [--threads 1] [--rounds 3]

FOLDER/NAME-mlx and FOLDER/NAME.gguf are of `tests.bench.make_family` or `make_model`. With one thread no time is spent
waiting for another one, so the ratio of CPU times is that of speeds on an idle machine with one thread. --turns instead
compares time to first token of a second turn with that of a cold start.
"""

import argparse
import subprocess
from pathlib import Path
from statistics import median

import mlx.core as mx

from headrace.models.loading.load import load_model
from headrace.runtime.engine.decode import decode_step
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.prefill import feed
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.kv.backend import KVOptions, one_pass
from headrace.runtime.kv.cache import PassRow
from headrace.runtime.network import Network
from headrace.runtime.ops import native
from tests.support.watched import split

_TESTS = (("decode", 1, 16), ("decode", 8, 8), ("prefill", 1, 128))
_PROMPT = 4000
_NEW = 50


def cpu_seconds() -> float:
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def per_token(network: Network, kind: str, sequences: int, count: int) -> float:
    """Return CPU seconds per token of `count` steps of all sequences, or of a prompt."""
    kv = network.kv_backend(KVOptions(4096, max_running=sequences))
    caches = [kv.acquire(()) for _ in range(sequences)]

    def fill(tokens: list[int]) -> None:
        for cache in caches:
            kv_pass = one_pass(kv, cache, len(tokens))
            feed(network, kv_pass, mx.array(tokens))
            mx.eval(kv_pass.arrays)
            cache.commit(len(tokens))

    if kind == "prefill":
        began = cpu_seconds()
        fill([1 + i % 1000 for i in range(count)])
        return (cpu_seconds() - began) / count
    fill([5, 6, 7])
    tokens = mx.array([9 + i for i in range(sequences)], mx.uint32)
    began = cpu_seconds()
    for _ in range(count):
        chosen = []
        first = 0
        for kv_pass in kv.make_passes([PassRow(cache, 1, "decode") for cache in caches]):
            last = first + len(kv_pass.rows)
            chosen.append(decode_step(network, kv_pass, native.greedy, tokens[first:last], last - first))
            first = last
        tokens = mx.concatenate(chosen)
        mx.eval(tokens)
        for cache in caches:
            cache.commit(1)
    return (cpu_seconds() - began) / count / sequences


def pairs(network: Network, file: Path, options: argparse.Namespace) -> None:
    child = Path(__file__).with_name("llama_cpu.py")
    command = [options.llama_python, str(child), str(file), str(options.threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        for kind, sequences, count in _TESTS:
            rows = []
            for _ in range(options.rounds + 1):
                ours = per_token(network, kind, sequences, count)
                peer.stdin.write(f"{kind} {sequences} {count}\n")
                peer.stdin.flush()
                rows.append((ours, float(peer.stdout.readline())))
            ratio = median(theirs / ours for ours, theirs in rows[1:])  # the first one warms up
            ours, theirs = (median(column) * 1e3 for column in zip(*rows[1:], strict=True))
            print(f"{kind} {sequences} x {count}: {ratio:.2f}x, {ours:.2f} ms and {theirs:.2f} ms", flush=True)
        peer.stdin.close()


def turns(network: Network) -> None:
    """Print CPU time to first token of a prompt, and of a second turn behind it."""
    engine = Engine(network, context_limit=_PROMPT + 200, keep_prefix=True)
    prompt = [1 + i * 7 % 300 for i in range(_PROMPT)]
    for _ in range(2):
        began = cpu_seconds()
        events = []
        for event in engine.generate(Request(prompt, max_tokens=8, speculate="off")):
            if isinstance(event, Step) and not any(isinstance(before, Step) for before in events):
                print(f"{len(prompt)} tokens: first one after {cpu_seconds() - began:.3f} s of CPU time", flush=True)
            events.append(event)
        prompt = [*prompt, *split(events)[0], *range(2, 2 + _NEW)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--llama-python")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", action="store_true")
    options = parser.parse_args()
    native.set_threads(options.threads)
    network = load_model(options.folder / f"{options.name}-mlx", name=options.name).network
    turns(network) if options.turns else pairs(network, options.folder / f"{options.name}.gguf", options)


if __name__ == "__main__":
    main()
