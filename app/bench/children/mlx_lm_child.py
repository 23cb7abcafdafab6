"""mlx-lm, measured from outside its public generator. Run as: python mlx_lm_child.py MODEL_DIRECTORY"""

import json
import os
import random
import sys
import time
from itertools import pairwise
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints must not look like an answer

    from importlib.metadata import version

    from mlx_lm import load, stream_generate
    from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

    model, tokenizer = load(sys.argv[1])[:2]
    tokenizer._eos_token_ids = {}  # as its own benchmark does: nothing ends a generation early
    draw = random.Random(1)
    vocabulary = len(tokenizer.get_vocab())
    caches: dict[int, Any] = {}

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    def cache_at(depth: int) -> Any:
        """A cache with `depth` tokens in it, from the last time where it can be trimmed back."""
        kept = caches.pop(depth, None)
        if kept is not None and depth and can_trim_prompt_cache(kept) and kept[0].offset >= depth:
            trim_prompt_cache(kept, kept[0].offset - depth)
            return kept
        fresh = make_prompt_cache(model)
        if depth:
            for _ in stream_generate(model, tokenizer, tokens(depth), max_tokens=1, prompt_cache=fresh):
                pass
            trim_prompt_cache(fresh, max(0, fresh[0].offset - depth))
        return fresh

    def measure(prompt: int, generate: int, depth: int) -> dict[str, Any]:
        cache = cache_at(depth)
        arrivals: list[float] = []
        last: Any = None
        began = time.perf_counter()
        stream = stream_generate(model, tokenizer, tokens(prompt or 1), max_tokens=generate or 1, prompt_cache=cache)
        for response in stream:
            arrivals.append(time.perf_counter())
            last = response
        caches[depth] = cache
        arrivals = arrivals[: generate or 1]  # its last response repeats the last token
        latencies = [b - a for a, b in pairwise(arrivals)]
        own = None
        if generate and not prompt:
            # It divides all tokens by the time after the first; ours are the intervals.
            own = last.generation_tps * (generate - 1) / generate
        elif prompt and not generate:
            own = last.prompt_tps
        return {
            "prefill_s": arrivals[0] - began,
            "first_step_s": 0.0,
            "latencies_s": latencies,
            "own_tokens_per_second": own,
        }

    print(json.dumps({"ready": version("mlx-lm")}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = measure(**json.loads(line))
        except Exception as error:
            reply = {"error": repr(error)}
        print(json.dumps(reply), file=answers, flush=True)


main()
