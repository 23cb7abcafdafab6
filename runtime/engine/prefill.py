"""Prefill: the prompt into the cache, chunk by chunk, without computing a single logit.

Contract: everything but the prompt's last token is fed here; that last one is fed by the first decode step, so every
token that comes out costs exactly one step. Chunks follow the measured speed, so that progress shows and a cancel
is heard about every TARGET_S whatever the machine; chunking does not change what ends up in the cache. What a chunk
was computed in is given back at the end.
"""

import time
from collections.abc import Iterator, Sequence

import mlx.core as mx

from headrace.runtime.kv.backend import KVBackend, one_pass
from headrace.runtime.kv.cache import KVCache, KVPass
from headrace.runtime.network import Network

TARGET_S = 0.4
FIRST = 32  # tokens of the first chunk ever
STEP = 32  # chunks are rounded to a multiple of it
# Of a chunk; bounds working memory. A GPU, whose attention keeps no scores, needs many rows to be busy.
LARGEST = {mx.DeviceType.cpu: 512, mx.DeviceType.gpu: 2048}
OPENING = 16  # tokens: as many as templates open an answer with, or a few more


class ChunkSizer:
    """How many tokens the next chunk has. Kept from prompt to prompt, it begins with what was measured last."""

    def __init__(self, device: mx.DeviceType | None = None) -> None:
        self.size = FIRST
        self._largest = LARGEST[device or mx.default_device().type]

    def took(self, tokens: int, seconds: float) -> None:
        """So long for a chunk of so many."""
        affordable = int(tokens / max(seconds, 1e-6) * TARGET_S)
        self.size = max(STEP, min(self._largest, affordable // STEP * STEP))


def prefill(
    network: Network, kv: KVBackend, cache: KVCache, tokens: Sequence[int], sizer: ChunkSizer | None = None
) -> Iterator[int]:
    """Append `tokens` to the cache and commit them; yield the number done after each chunk."""
    done, sizer = 0, sizer or ChunkSizer()
    while done < len(tokens):
        chunk = tokens[done : done + sizer.size]
        started = time.perf_counter()
        kv_pass = one_pass(kv, cache, len(chunk))
        feed(network, kv_pass, mx.array(list(chunk)))
        mx.eval(kv_pass.arrays)
        cache.commit(len(chunk))
        done += len(chunk)
        sizer.took(len(chunk), time.perf_counter() - started)
        if done == len(tokens):
            mx.clear_cache()  # decoding needs none of it
        yield done


def feed(network: Network, kv_pass: KVPass, tokens: mx.array) -> None:
    """Run a pass over tokens (N,) that chooses none."""
    network.layers(network.embed(tokens[None]), kv_pass)  # (1, N) -> (1, N, E)
    # The output is never evaluated: the last layer's feed-forward and the logits cost nothing here.
    kv_pass.advance()


def chunk_end(done: int, prompt: int, marks: bool) -> int:
    """Where the chunk that begins at `done` of `prompt` entries has to end at the latest.

    With marks to come back to also a little before the end: what opens this answer may not be what opens it in the next
    prompt (a template that drops the thinking).
    """
    opening = max(0, prompt - OPENING)
    return opening if marks and done < opening else prompt
