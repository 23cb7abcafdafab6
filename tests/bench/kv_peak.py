"""Peak memory of a long prefill in each K/V format, and the share of K/V: `python -m tests.bench.kv_peak`.

One process and one JSON line per format, in bytes.
"""

import argparse
import json
import subprocess
import sys


def measured(model: str | None, kv: str, tokens: int) -> dict[str, int | str]:
    """Measure in this process."""
    from headrace.models.loading.load import load_resolved
    from headrace.models.registry.resolve import resolve
    from headrace.runtime.engine.engine import Engine
    from headrace.runtime.engine.request import Finished, Request
    from headrace.runtime.ops.kv_format import kv_format

    loaded = load_resolved(resolve(model), kv=kv_format(kv), force=True)
    prompt = [token % loaded.network.vocab_size for token in range(7, 7 + 31 * tokens, 31)]
    engine = Engine(loaded.network, context_limit=tokens + 8)
    peak = 0
    for event in engine.generate(Request(prompt, max_tokens=2, speculate="off")):
        if isinstance(event, Finished):
            peak = event.summary.peak_memory_bytes
    cost = loaded.network.cost
    return {"kv": kv, "tokens": tokens, "peak": peak, "kv_bytes": tokens * cost.kv_bytes_per_token}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model")
    parser.add_argument("-p", "--prompt", type=int, default=8192)
    parser.add_argument("--kv", default="f16,q8,k8v4,q4")
    options = parser.parse_args()
    if "," not in options.kv:
        print(json.dumps(measured(options.model, options.kv, options.prompt)), flush=True)
        return
    for kv in options.kv.split(","):
        own = [sys.executable, "-m", "tests.bench.kv_peak", "-p", str(options.prompt), "--kv", kv]
        subprocess.run([*own, *(["-m", options.model] if options.model else [])], check=True)


if __name__ == "__main__":
    main()
