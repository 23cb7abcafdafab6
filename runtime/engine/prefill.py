"""Prefill: feeds a prompt in chunks, without computing logits.

Contract: all tokens but the prompt's last are fed here; the first decode step feeds the last one. Chunking does not
change the cache's content. Working memory is freed at the end.

The engine's steps feed prompts by `feed`. `prefill` and `prefill_prompt` run outside of steps: for the expected next
prompt, for draft models and for measurements. tests/runtime/engine/test_step_loop.py guards the entries.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from headrace.runtime.engine.prompt_chunks import ChunkSizer, chunk_end
from headrace.runtime.kv.backend import KVBackend, one_pass
from headrace.runtime.kv.cache import KVCache, KVPass
from headrace.runtime.network import Network, waiting_for_ranks


def prefill(
    network: Network, kv: KVBackend, cache: KVCache, tokens: Sequence[int], sizer: ChunkSizer | None = None
) -> Iterator[int]:
    """Append `tokens` to the cache and commit them; yield the number done after each chunk."""
    done = 0
    sizer = sizer or ChunkSizer()
    while done < len(tokens):
        chunk = tokens[done : done + sizer.size]
        started = time.perf_counter()
        kv_pass = one_pass(kv, cache, len(chunk), output=False)
        with waiting_for_ranks(network):  # once a chunk: the limit is a pass's, and a long prompt is many
            feed(network, kv_pass, mx.array(list(chunk)))
            mx.eval(kv_pass.arrays)  # until here MLX has only built the chunk: it is computed, and timed, now
        cache.commit(len(chunk))
        done += len(chunk)
        sizer.record(len(chunk), time.perf_counter() - started)
        if done == len(tokens):
            mx.clear_cache()  # decoding does not need it
        yield done


def prefill_prompt(
    network: Network,
    kv: KVBackend,
    cache: KVCache,
    prompt: Sequence[int],
    sizer: ChunkSizer,
    stop: Callable[[], bool],
) -> None:
    """Prefill a prompt outside of steps, with the marks that its cache needs.

    stop: called after each chunk; True ends the prefill there.
    """
    end = len(prompt) - 1
    while cache.committed < end:
        until = chunk_end(cache.committed, end, cache.needs_marks)
        for _ in prefill(network, kv, cache, prompt[cache.committed : until], sizer):
            if cache.needs_marks:
                kv.on_prefill(cache, prompt)
            kv.evict()
            if stop():
                return


def feed(network: Network, kv_pass: KVPass, tokens: mx.array) -> mx.array:
    """Run a pass over tokens (N,) that chooses none -> the output of the layers, as far as the rows want it.

    Unless the output is evaluated, the last layer's feed-forward costs nothing.
    """
    x = network.layers(network.embed(tokens[None]), kv_pass)  # (1, N) -> (1, wanted, E)
    kv_pass.advance()
    return x
