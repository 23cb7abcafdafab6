"""Layers with recurrent state in stock MLX: gated delta networks, Mamba-2, short convolutions.

B = batch, T = new tokens, Hv = heads, Hk = heads of queries and keys (they divide Hv), C = channels.
"""

import mlx.core as mx


def recurrence(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array | None, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Update each head's state S with every token and read it: S = S * decay + delta k^T, y = S q.

    q, k (B, T, Hk, Dk); v (B, T, Hv, Dv); decay (B, T, Hv) or (B, T, Hv, Dk); state (B, Hv, Dv, Dk). delta is v
    (Mamba-2, arXiv:2405.21060), or with beta (B, T, Hv), by the gated delta rule (arXiv:2412.06464), beta * (v - S k)
    with the decayed S. Returns (y (B, T, Hv, Dv), the new state).
    """
    repeats = v.shape[2] // q.shape[2]
    q, k = (mx.repeat(x, repeats, axis=2)[..., None, :] for x in (q, k))  # (B, T, Hv, 1, Dk)
    decay = decay[..., None, None] if decay.ndim == 3 else decay[..., None, :]
    ys = []
    for t in range(v.shape[1]):
        state = state * decay[:, t]
        delta = v[:, t]  # (B, Hv, Dv)
        if beta is not None:
            delta = beta[:, t, :, None] * (delta - (state * k[:, t]).sum(axis=-1))
        state = state + delta[..., None] * k[:, t]
        ys.append((state * q[:, t]).sum(axis=-1))
    return mx.stack(ys, axis=1), state


def convolve(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """Convolve each channel by itself. x (B, T + width - 1, C), weight (width, C), bias (C) -> (B, T, C)."""
    y = mx.conv1d(x, weight.T[..., None], groups=x.shape[-1])
    return y if bias is None else y + bias
