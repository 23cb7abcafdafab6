"""Products with stacks of expert matrices in stock MLX."""

import mlx.core as mx

from headrace.runtime.ops.weights import Weight


def gathered(x: mx.array, stack: Weight, indices: mx.array, ordered: bool) -> mx.array:
    """Multiply each row of x (pairs, 1, K) by the stack's matrix at `indices` (pairs,) -> (pairs, 1, N)."""
    if stack.scales is None:
        y = mx.gather_mm(x, stack.data.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=ordered)
    else:
        y = mx.gather_qmm(
            x,
            stack.data,
            scales=stack.scales,
            biases=stack.biases,
            rhs_indices=indices,
            transpose=True,
            group_size=stack.group_size,
            bits=stack.bits,
            mode=stack.mode,
            sorted_indices=ordered,
        )
    return y if stack.bias is None else y + stack.bias[indices][:, None]


def expert_linear(x: mx.array, indices: mx.array, stack: Weight, _experts: int) -> mx.array:
    """Return products of rows with the matrices at their indices, of a stack of so many.

    x (M, K); indices (...): M times as many, those of a row together -> (..., N).
    """
    chosen = indices.flatten()
    rows = mx.repeat(x, chosen.size // max(1, x.shape[0]), axis=0)[:, None]  # (pairs, 1, K)
    return gathered(rows, stack, chosen, ordered=False).reshape(*indices.shape, -1)
