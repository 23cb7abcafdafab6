"""Activations as products with 8-bit activations see them: the definition for the native kernels."""

import mlx.core as mx


def rounded_to_bytes(x: mx.array, group: int) -> mx.array:
    """Return activations (..., K) as products with weights in groups of `group` see them in 8 bits, in float32.

    A group of 32 values, or of `group` if that is less, shares a scale: its largest magnitude / 127. In each run of 16
    groups, the eighth with the largest magnitudes (rounded up) have an outlier each, the first value of that
    magnitude: their scale is the second largest / 127, or the largest / 2032 if that is more.
    """
    size = min(group, 32)
    groups = x.reshape(-1, x.shape[-1] // size, size)  # (rows, groups, size)
    order = mx.sort(mx.abs(groups), axis=-1)
    top = mx.maximum(order[..., -1], 1e-30)
    second = mx.maximum(order[..., -2], 1e-30)
    runs = [top[:, i : i + 16] for i in range(0, top.shape[1], 16)]
    ranks = [mx.argsort(mx.argsort(-run, axis=-1), axis=-1) for run in runs]
    has_outlier = mx.concatenate([rank < (rank.shape[-1] + 7) // 8 for rank in ranks], axis=1)
    peak = mx.where(has_outlier, mx.maximum(second, top / 16), top)[..., None]
    return (mx.round(groups * (127 / peak)) * (peak / 127)).reshape(x.shape)
