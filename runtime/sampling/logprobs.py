"""Log probabilities of chosen and top tokens, and a digest of all logits."""

from functools import cache

import mlx.core as mx

Logprobs = tuple[mx.array, mx.array, mx.array, mx.array]


def logprobs(logits: mx.array, token: mx.array, top: int) -> Logprobs:
    """Return log probabilities before any sampling stage.

    logits (B, V), token (B,) -> (chosen (B,), ids of the `top` most likely (B, top), their log probabilities,
    digests (B,) of all logits). Equal bits give equal digests; other bits give others, almost always.
    """
    logits = logits.astype(mx.float32)
    normalised = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(normalised, token[:, None], axis=-1)[:, 0]
    size = logits.shape[-1]
    if 0 < top < size:
        ids = mx.argpartition(-normalised, kth=top - 1, axis=-1)[:, :top]
    else:
        ids = mx.broadcast_to(mx.arange(size, dtype=mx.uint32), logits.shape)[:, :top]
    best = mx.take_along_axis(normalised, ids, axis=-1)
    order = mx.argsort(-best, axis=-1)
    ids, best = (mx.take_along_axis(x, order, axis=-1) for x in (ids, best))
    return chosen, ids, best, (logits.view(mx.uint32) * _odd_numbers(size)).sum(axis=-1)


@cache
def _odd_numbers(size: int) -> mx.array:
    """Return odd numbers (size,), evaluated. In a sum of products with them, one changed term changes the sum."""
    numbers = mx.arange(size, dtype=mx.uint32) * 2654435761 | 1
    mx.eval(numbers)
    return numbers
