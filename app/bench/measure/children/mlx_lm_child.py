"""mlx-lm through its public generator. Usage: python mlx_lm_child.py MODEL_DIRECTORY

It runs as users call it: its own prefill step size, its own wired memory limit. Several sequences use its batch
generator. MLX has no thread setting. Protocol: `app.bench.measure.children`.

Guard: tests/app/cli/test_bench.py.
"""

import json
import os
import random
import sys
import time
from itertools import pairwise
from typing import Any


class MlxLm:
    """One model, with a cache for every depth used."""

    def __init__(self, directory: str) -> None:
        from mlx_lm import load

        self._model, self._tokenizer, *_ = load(directory)
        self._tokenizer._eos_token_ids = {}  # as in its own benchmark: no early end
        self._draw = random.Random(1)
        self._vocabulary = len(self._tokenizer.get_vocab())
        self._caches: dict[int, Any] = {}
        self._bases: dict[int, list[Any]] = {}  # caches for batches, by depth; never appended to

    def setup(self) -> dict[str, object]:
        """Return the generator's own defaults, read from its signature."""
        import inspect

        import mlx.core as mx
        from mlx_lm.generate import generate_step

        defaults = inspect.signature(generate_step).parameters
        settings = {
            "device": mx.default_device().type.name,
            "prefill_step": defaults["prefill_step_size"].default,
            "kv_type": "the model's own",
            "wired_limit": "its own",
        }
        return {"threads": None, "threads_batch": None, "settings": settings}

    def measure(self, prompt: int, generate: int, depth: int, batch: int = 1) -> dict[str, object]:
        """Return the times of one test.

        prompt: tokens fed after `depth` cached ones; 0: one token.
        generate: tokens chosen then; 0: one token.
        depth: tokens in the cache.
        batch: sequences that decode at once; with several, no prompt is measured.
        """
        if batch > 1:
            return self._measure_batch(generate, depth, batch)
        num_fed = max(1, prompt)
        num_chosen = max(1, generate)
        cache = self._cache_at(depth)
        arrivals: list[float] = []
        last: Any = None
        began = time.perf_counter()
        for response in self._stream(num_fed, num_chosen, cache):
            arrivals.append(time.perf_counter())
            last = response
        self._caches[depth] = cache
        own_speed = None
        if generate and not prompt:
            # mlx-lm divides all tokens by the time after the first; these are intervals.
            own_speed = last.generation_tps * (generate - 1) / generate
        elif prompt and not generate:
            own_speed = last.prompt_tps
        return {
            "prefill_s": arrivals[0] - began,
            "first_step_s": 0.0,
            "latencies_s": [b - a for a, b in pairwise(arrivals)],
            "own_tokens_per_second": own_speed,
        }

    def _measure_batch(self, generate: int, depth: int, batch: int) -> dict[str, object]:
        """Return times of `generate` tokens per sequence, from when all `batch` sequences decode."""
        from mlx_lm.generate import BatchGenerator

        caches = self._batch_caches(depth, batch)
        prompts = [[self._draw.randrange(self._vocabulary)] for _ in caches]
        # The first sequence decodes before the last one is prefilled: it must not end by its length meanwhile.
        max_tokens = generate + 2 * batch
        generator = BatchGenerator(self._model, max_tokens=max_tokens, completion_batch_size=batch)
        arrivals: list[float] = []
        try:
            generator.insert(prompts, caches=caches)
            while len(arrivals) < generate:
                _, responses = generator.next()
                if any(response.finish_reason for response in responses):
                    raise RuntimeError("a sequence ended before the others started")
                if len(responses) == batch:
                    arrivals.append(time.perf_counter())
        finally:
            generator.close()
        return {
            "prefill_s": 0.0,
            "first_step_s": None,
            "latencies_s": [b - a for a, b in pairwise(arrivals)],
            "own_tokens_per_second": None,
        }

    def _batch_caches(self, depth: int, batch: int) -> list[Any]:
        """Return a cache per sequence, each with `depth` other tokens; the generator copies them."""
        from mlx_lm.models.cache import make_prompt_cache

        if not depth:
            return [make_prompt_cache(self._model) for _ in range(batch)]
        bases = self._bases.setdefault(depth, [])
        while len(bases) < batch:
            bases.append(self._filled_cache(depth))
        return bases[:batch]

    def _stream(self, num_fed: int, num_chosen: int, cache: Any) -> Any:
        """Return mlx-lm's responses to random tokens, one for each token that it chooses."""
        from mlx_lm import stream_generate

        tokens = [self._draw.randrange(self._vocabulary) for _ in range(num_fed)]
        return stream_generate(self._model, self._tokenizer, tokens, max_tokens=num_chosen, prompt_cache=cache)

    def _cache_at(self, depth: int) -> Any:
        """Return a cache with `depth` tokens, the previous one if it can be trimmed."""
        from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

        cache = self._caches.pop(depth, None)
        if cache is not None and depth and can_trim_prompt_cache(cache) and cache[0].offset >= depth:
            trim_prompt_cache(cache, cache[0].offset - depth)
            return cache
        return self._filled_cache(depth)

    def _filled_cache(self, depth: int) -> Any:
        """Return a new cache with `depth` random tokens."""
        from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

        fresh = make_prompt_cache(self._model)
        if depth:
            for _ in self._stream(depth, 1, fresh):
                pass
            trim_prompt_cache(fresh, max(0, fresh[0].offset - depth))
        return fresh


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the library's prints off the protocol's stream

    from importlib.metadata import version

    peer = MlxLm(sys.argv[1])
    print(json.dumps({"ready": version("mlx-lm"), **peer.setup()}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            reply: dict[str, object] = peer.measure(**json.loads(line))
        except Exception as error:  # the parent reports it, and other tests go on
            reply = {"error": repr(error)}
        print(json.dumps(reply), file=answers, flush=True)


main()
