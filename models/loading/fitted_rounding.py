"""Rounding of plain matrices to MLX's formats, with scales fitted to the least squared error.

MLX's quantizer spans each group from its smallest to its largest weight. Here narrower spans are tried, and scale and
bias are fitted by least squares to the codes of each span. The storage is MLX's own. G = weights of a group.

Squared errors count by column: `importance` (K,) is the sum of squares of the activations that meet the column, so that
they are those of the projection's outputs, correlations left aside. None counts all columns alike. A stack of X
matrices (X, N, K) may have an importance (X, K), of the columns of each.

Guard: tests/models/loading/test_fitted_rounding.py.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import cast

import mlx.core as mx
import numpy as np

from headrace.models.checkpoint.quantization import Groups
from headrace.runtime.ops import Weight

_SPANS = (1.0, 0.92, 0.84, 0.76, 0.68)  # of the range of a group; outliers beyond are clipped
_SPANS_WIDE = (1.0, 0.95)  # for 5 bits and more, where clipping costs more than it saves
_LEAST = 1e-3  # importance of a column without activations, over the mean
_PIECE = 1 << 18  # weights rounded at a time, so that temporary arrays stay small
_SAMPLE = 1 << 15  # weights whose error stands for a matrix's


def stored_bytes(weights: int, groups: Groups) -> int:
    """Return the bytes of so many weights in a format, with half-precision scales and biases."""
    scale_bytes = 1
    if groups.mode == "affine":
        scale_bytes = 4  # a scale and a bias in 16 bits
    return weights * groups.bits // 8 + scale_bytes * weights // groups.group_size


def rounded(matrix: mx.array, groups: Groups, importance: mx.array | None = None) -> Weight:
    """Round a plain matrix (N, K) or a stack (X, N, K); K must be a multiple of the group size.

    importance: of the columns, for affine formats.
    """
    if groups.mode != "affine":
        data, scales, *_ = mx.quantize(matrix, groups.group_size, groups.bits, mode=groups.mode)
        return Weight(data, scales, None, groups.bits, groups.group_size, None, groups.mode)
    flat, importance_of = _flat(matrix, importance)
    parts = [_affine(flat[rows], groups, importance_of(rows)) for rows in _pieces(flat)]
    joined = (mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True))
    data, scales, biases = (array.reshape(*matrix.shape[:-1], -1) for array in joined)
    mx.eval(data, scales, biases)
    return Weight(data, scales, biases, groups.bits, groups.group_size)


def through_rounding(matrix: mx.array, groups: Groups, importance: mx.array | None = None) -> mx.array:
    """Return the plain matrix that a rounded one stands for, in the matrix's type. For affine formats.

    Pieces are rounded and dequantized one by one: MLX's arrays for a whole table of tokens take ten times its memory.
    """
    flat, importance_of = _flat(matrix, importance)
    values = mx.zeros_like(flat)
    for rows in _pieces(flat):
        weight = Weight(*_affine(flat[rows], groups, importance_of(rows)), groups.bits, groups.group_size)
        values[rows] = dequantized(weight, matrix.dtype)
        mx.eval(values)  # in place
    return values.reshape(matrix.shape)


def dequantized(weight: Weight, dtype: mx.Dtype) -> mx.array:
    """Return the plain matrix that a rounded one stands for."""
    assert weight.scales is not None
    return mx.dequantize(
        weight.data, weight.scales, weight.biases, weight.group_size, weight.bits, mode=weight.mode, dtype=dtype
    )


def squared_error(matrix: mx.array, groups: Groups, importance: mx.array | None = None) -> float:
    """Return the squared error of rounding the matrix, estimated from evenly spaced rows."""
    flat, importance_of = _flat(matrix, importance)
    sample = slice(None, None, -(-matrix.size // _SAMPLE))  # every n-th row, n rounded up
    rows = flat[sample]
    of_rows = importance_of(sample)
    if groups.mode == "affine":
        data, scales, biases = _affine(rows, groups, of_rows)
        weight = Weight(data, scales, biases, groups.bits, groups.group_size)
    else:
        weight = rounded(rows, groups)
    error = rows.astype(mx.float32) - dequantized(weight, mx.float32)
    counted = error * error
    if of_rows is not None:
        counted = counted * of_rows
    return float(cast(float, counted.sum().item())) * matrix.size / prod(rows.shape)


def _flat(matrix: mx.array, importance: mx.array | None) -> tuple[mx.array, Callable[[slice], mx.array | None]]:
    """Return all rows of a matrix or a stack (R, K), and the function from some of them to their importance."""
    flat = matrix.reshape(-1, matrix.shape[-1])
    if importance is None or importance.ndim == 1:
        return flat, lambda _rows: importance
    matrices = mx.arange(flat.shape[0]) // matrix.shape[-2]  # (R,): the matrix of each row
    return flat, lambda rows: importance[matrices[rows]]


def _pieces(matrix: mx.array) -> Iterator[slice]:
    """Yield the rows of a matrix in groups of about _PIECE weights."""
    rows = max(1, _PIECE // matrix.shape[1])
    for start in range(0, matrix.shape[0], rows):
        yield slice(start, start + rows)


def _affine(matrix: mx.array, groups: Groups, importance: mx.array | None) -> tuple[mx.array, mx.array, mx.array]:
    """Return packed codes, scales and biases of rows (N, K). importance: of the columns of all rows, or (N, K)."""
    # The groups, and how much each weight's error counts, both in float32 (N, groups, G).
    rows, columns = matrix.shape
    # A scale in float32 would take twice the bytes, and mlx-lm writes half precision too.
    dtype = matrix.dtype
    if dtype == mx.float32:
        dtype = mx.float16
    weights = matrix.astype(mx.float32).reshape(rows, columns // groups.group_size, groups.group_size)
    counts = mx.ones((columns,))
    if importance is not None:
        counts = importance / mx.maximum(importance.mean(axis=-1, keepdims=True), 1e-30) + _LEAST
    counts = counts.reshape(-1, columns // groups.group_size, groups.group_size)  # (1 or rows, groups, G)

    # For each group the span with the least error.
    lowest = weights.min(axis=-1, keepdims=True)  # (rows, groups, 1)
    highest = weights.max(axis=-1, keepdims=True)
    spans: tuple[float, ...] = _SPANS
    if groups.bits >= 5:
        spans = _SPANS_WIDE
    best = None
    for span in spans:
        margin = (highest - lowest) * (1 - span) / 2
        tried = _fitted(weights, counts, lowest + margin, highest - margin, groups.bits, dtype)
        best = tried if best is None else _smaller_error(best, tried)
        mx.eval(best)  # or the attempts of all spans would be in memory at once
    assert best is not None

    # The layout of MLX's storage.
    _, codes, scales, biases = best
    packed = mx.array(_packed(np.array(codes.astype(mx.uint8)).reshape(rows, columns), groups.bits))
    mx.eval(packed)
    return packed, scales.squeeze(-1).astype(dtype), biases.squeeze(-1).astype(dtype)


_Tried = tuple[mx.array, mx.array, mx.array, mx.array]
"""Squared error, codes, scales and biases of each group."""


def _fitted(weights: mx.array, counts: mx.array, low: mx.array, high: mx.array, bits: int, dtype: mx.Dtype) -> _Tried:
    """Round groups (N, groups, G) to codes between low and high, fit scale and bias to them, and round again."""
    # Codes between the ends of the span.
    max_code = 2**bits - 1
    codes = _codes(weights, (high - low) / max_code, low, max_code)

    # The line through (code, weight) with the least squared error: slope = covariance / variance of the codes.
    total = counts.sum(axis=-1, keepdims=True)
    mean_code = (counts * codes).sum(axis=-1, keepdims=True) / total
    mean = (counts * weights).sum(axis=-1, keepdims=True) / total
    spread = (counts * (codes - mean_code) ** 2).sum(axis=-1, keepdims=True)
    together = (counts * (codes - mean_code) * (weights - mean)).sum(axis=-1, keepdims=True)
    scale = mx.where(spread > 0, together / mx.maximum(spread, 1e-30), 0.0)
    bias = mean - scale * mean_code

    # Codes for this line, as it is stored, and their error.
    scale, bias = (fit.astype(dtype).astype(mx.float32) for fit in (scale, bias))
    codes = _codes(weights, scale, bias, max_code)
    error = (counts * (weights - scale * codes - bias) ** 2).sum(axis=-1, keepdims=True)
    return error, codes, scale, bias


def _codes(weights: mx.array, scale: mx.array, bias: mx.array, max_code: int) -> mx.array:
    """Return the nearest codes of weights, for `weight = scale * code + bias`."""
    divisor = mx.where(scale == 0, 1.0, scale)  # a group of equal weights has its bias alone
    return mx.clip(mx.round((weights - bias) / divisor), 0, max_code)


def _smaller_error(tried: _Tried, other: _Tried) -> _Tried:
    """Return, of each group, the one with the smaller error."""
    (error, *_), (other_error, *_) = tried, other
    better = other_error < error
    error, codes, scales, biases = (mx.where(better, b, a) for a, b in zip(tried, other, strict=True))
    return error, codes, scales, biases


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes (N, K) as rows of 32-bit words: MLX's layout is a stream of bits, the lowest first."""
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little").reshape(len(codes), -1)
    return np.packbits(stream, axis=-1, bitorder="little").view(np.uint32)
