"""The heart: one decode step in its six stages, and the loop that keeps one step ahead of the reader.

Semantics the loop keeps. A step feeds exactly one token per sequence and appends exactly one K and one V entry per
layer. While the device works on step n, step n + 1 is built on n's token, a value nobody has read yet. If that
token turns out to end the answer, the step built ahead has fed a token of the sequence all the same: its entry is
committed, its own token is never read. So nothing has to be taken back, and any cache can be run ahead of.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from headrace.runtime.cache import Cache
from headrace.runtime.network import Network


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What token selection leaves on the device: token (B,), and log probabilities where asked for."""

    token: mx.array
    logprobs: tuple[mx.array, mx.array, mx.array] | None = None

    def start(self) -> "SampledToken":
        """Hand the step to the device without waiting for it."""
        mx.async_eval(self.token, *(self.logprobs or ()))
        return self


Sample = Callable[[mx.array], SampledToken]


def decode_step(network: Network[Any], cache: Cache, sample: Sample, token: mx.array) -> SampledToken:
    """One step for one new token per sequence. token (B,) -> the next one, not yet computed."""
    cache.reserve(1, "decode")
    x = network.embed(token[:, None])  # 1. embedding  (B, 1, E)
    x = network.layers(x, cache)  #      2. layers, each with 3. attention over the whole KV cache  (B, 1, E)
    logits = network.logits(x)  #        4. logits  (B, V)
    sampled = sample(logits)  #           5. token selection  (B,)
    cache.advance(1)  #                  6. KV append: one K and one V entry per layer, final once the token is read
    return sampled


def decode(
    network: Network[Any], cache: Cache, sample: Sample, token: mx.array, steps: int
) -> Generator[SampledToken, None, None]:
    """Up to `steps` steps starting from `token` (B,). Yields each token once it may be read.

    The consumer reads the token and commits the step. Closing the iterator after that commits the step built ahead
    too: what the last token read appended.
    """
    ahead = decode_step(network, cache, sample, token).start()
    try:
        for left in range(steps - 1, -1, -1):
            current = ahead
            if left:
                ahead = decode_step(network, cache, sample, current.token).start()
            yield current
    except GeneratorExit:
        cache.commit(cache.length - cache.committed)
        raise
