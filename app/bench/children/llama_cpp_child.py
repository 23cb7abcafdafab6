"""llama.cpp through llama-cpp-python's bindings. Run as: python llama_cpp_child.py MODEL.gguf CONTEXT THREADS

Tokens are chosen greedily by llama.cpp's own sampler, as a chat would. THREADS 0 leaves the number to llama.cpp.
"""

import json
import os
import random
import sys
import time
from itertools import pairwise
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import llama_cpp as library

    path, context, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None
    batch = 512
    llama = library.Llama(
        path, n_ctx=context, n_batch=batch, n_threads=threads, n_threads_batch=threads, n_gpu_layers=-1, verbose=False
    )
    ctx = llama._ctx.ctx
    memory = library.llama_get_memory(ctx)
    sampler = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
    library.llama_sampler_chain_add(sampler, library.llama_sampler_init_greedy())
    draw = random.Random(1)
    vocabulary = llama.n_vocab()
    base = [draw.randrange(vocabulary) for _ in range(context)]
    filled = 0

    def feed(tokens: list[int]) -> None:
        for start in range(0, len(tokens), batch):
            chunk = tokens[start : start + batch]
            array = (library.llama_token * len(chunk))(*chunk)
            if library.llama_decode(ctx, library.llama_batch_get_one(array, len(chunk))) != 0:
                raise RuntimeError("llama_decode failed")

    def choose() -> Any:
        return library.llama_sampler_sample(sampler, ctx, -1)

    def at(depth: int) -> None:
        """The first `depth` tokens of the base text in the cache, and nothing else."""
        nonlocal filled
        filled = min(filled, depth)
        library.llama_memory_seq_rm(memory, -1, filled, -1)
        if filled < depth:
            feed(base[filled:depth])
            filled = depth
        library.llama_synchronize(ctx)

    def measure(prompt: int, generate: int, depth: int) -> dict[str, Any]:
        at(depth)
        fed = [draw.randrange(vocabulary) for _ in range(prompt or 1)]
        library.llama_perf_context_reset(ctx)
        began = time.perf_counter()
        feed(fed)
        token = choose()
        arrivals = [time.perf_counter()]
        for _ in range((generate or 1) - 1):
            feed([token])
            token = choose()
            arrivals.append(time.perf_counter())
        performance = library.llama_perf_context(ctx)
        own = None
        if generate and not prompt and performance.t_eval_ms > 0:
            own = performance.n_eval / performance.t_eval_ms * 1e3
        elif prompt and not generate and performance.t_p_eval_ms > 0:
            own = performance.n_p_eval / performance.t_p_eval_ms * 1e3
        return {
            "prefill_s": arrivals[0] - began,
            "first_step_s": 0.0,
            "latencies_s": [b - a for a, b in pairwise(arrivals)],
            "own_tokens_per_second": own,
        }

    print(json.dumps({"ready": library.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = measure(**json.loads(line))
        except Exception as error:
            reply = {"error": repr(error)}
        print(json.dumps(reply), file=answers, flush=True)


main()
