"""Layers with recurrent state in stock MLX: gated delta networks, Mamba, RWKV-7, short convolutions.

`mix_pass` is that operation of `Ops`, and defines the native kernels' results (tests/runtime/ops/
test_native_recurrent.py). A new kind of mixer is a name in `MixerSizes.kind` and its branches in `_mix`.
B = batch, T = new tokens, Hv = heads, Hk = heads of queries and keys (they divide Hv),
C = channels.
"""

from collections.abc import Sequence

import mlx.core as mx

from headrace.runtime.ops.mixers import MixerSpec

_LENGTH_EPS = 1e-6  # added to the squared length of queries and keys
_SLOWEST_DECAY = -0.606531  # -exp(-1/2): the logarithm of RWKV-7's decay is this times a sigmoid
_SHORTEST_KEY = 1e-7  # length that a removed key of RWKV-7 is divided by, at least


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
    # A factor for each head, or for each key dimension of it: it multiplies S (B, Hv, Dv, Dk).
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
    if bias is not None:
        y = y + bias
    return y


def mix_pass(
    x: mx.array, states: Sequence[mx.array], counts: Sequence[int], spec: MixerSpec
) -> tuple[mx.array, list[mx.array]]:
    """See `Ops`. One sequence after the other."""
    ys = []
    after = []
    first = 0
    for state, count in zip(states, counts, strict=True):
        y, new = _mix(x[:, first : first + count], state, spec)
        ys.append(y)
        after.append(new)
        first += count
    return mx.concatenate(ys, axis=1), after


def _mix(x: mx.array, state: mx.array, spec: MixerSpec) -> tuple[mx.array, mx.array]:
    """Mix one sequence's tokens. Returns the mixed tokens (1, T, Hv * Dv) and the new state, flat like the old one.

    x: (1, T, projected).
    state: flat, the convolution's newest inputs, then that of the recurrence.

    In three stages: convolve, compute the step, run the recurrence with its decay and gate.
    - "conv" has the first stage only, with a gate before and after it, or with SiLU or nothing after it.
    - "delta" and "kda" normalize q and k, and have beta. The decay is that of a head, in "kda" of each key channel.
    - "ssm" has no beta. Its step also scales the values.
    """
    sizes = spec.sizes
    if sizes.kind == "scan":
        return _scan(x, state, spec)
    if sizes.kind == "wkv":
        return _wkv(x, state, spec)
    if sizes.kind == "shift":
        return _shift(x, state, spec)
    convolved, taps = _convolved(x, state, spec)
    if sizes.kind == "conv":
        return convolved, taps
    count = x.shape[1]
    channels = sizes.channels
    inner = sizes.inner
    keys = sizes.key_heads * sizes.key_dim
    q, k = (convolved[..., at : at + keys].reshape(1, count, sizes.key_heads, -1) for at in (0, keys))
    v = convolved[..., 2 * keys :].reshape(1, count, sizes.heads, -1)  # (1, T, Hv, Dv); q, k (1, T, Hk, Dk)

    # Stage 2: the step of each token. A state decays by exp(rate * step), with a negative rate.
    # After the channels: the gate z, beta of each head (not for Mamba-2), and what the decay is computed from.
    ends = [inner] if sizes.kind == "ssm" else [inner, inner + sizes.heads]
    z, *b, a = mx.split(x[..., channels:], ends, axis=-1)
    assert spec.rate is not None
    assert spec.step_bias is not None
    step = mx.logaddexp(a + spec.step_bias, mx.array(0.0))  # softplus, as a
    rate = spec.rate
    if spec.bound:
        # A bounded decay is exp(-bounded_steps): in the same formula, with these as steps and a rate of -1.
        step = bounded_steps(a, spec)
        rate = -mx.ones_like(rate)

    # Stage 3: decay and recurrence by kind, then skip and gate.
    recurrent = state[taps.size :].reshape(1, sizes.heads, sizes.value_dim, sizes.key_dim)
    if sizes.kind != "ssm":
        q, k = (r * mx.rsqrt((r * r).sum(axis=-1, keepdims=True) + _LENGTH_EPS) for r in (q, k))
        q = q * sizes.key_dim**-0.5
        step = step.reshape(1, count, sizes.heads, -1)  # (1, T, Hv, Dk) or (1, T, Hv, 1)
        decay = mx.exp(rate[:, None] * step)
        beta = mx.sigmoid(b[0]) * spec.most_beta  # (1, T, Hv)
        y, recurrent = recurrence(q, k, v, decay, beta, recurrent)
    else:
        step = mx.clip(step, *spec.steps)  # (1, T, Hv)
        # Mamba-2's names: C, B and x are q, k and v; the step multiplies the input, and the decay is exp(A * step).
        y, recurrent = recurrence(q, k, v * step[..., None], mx.exp(rate * step), None, recurrent)
    if spec.skip is not None:  # y (1, T, Hv, Dv)
        y = y + v * spec.skip[:, None]
    return _gated(y, z, spec), mx.concatenate([taps, recurrent.flatten()])


def _convolved(x: mx.array, state: mx.array, spec: MixerSpec) -> tuple[mx.array, mx.array]:
    """Compute stage 1 of `_mix`: return the convolution with its gates (1, T, C), and its newest inputs, flat."""
    assert spec.taps is not None
    sizes = spec.sizes
    count = x.shape[1]
    channels = sizes.channels
    before = sizes.width - 1
    mixed = x[..., :channels]
    out_gate: mx.array | None = None
    if sizes.kind == "conv" and spec.gated:
        gate, out_gate, value = mx.split(x, 3, axis=-1)
        mixed = gate * value
    # The state begins with the last `width - 1` inputs of the convolution, which the first new tokens see.
    seen = mx.concatenate([state[: before * channels].reshape(1, before, channels), mixed], axis=1)
    taps = seen[:, count:].flatten()  # the newest inputs
    convolved = convolve(seen, spec.taps, spec.tap_bias)  # (1, T, C)
    if out_gate is not None:
        return out_gate * convolved, taps  # (1, T, E), ((width - 1) * E,)
    if sizes.kind != "conv" or spec.silu:
        convolved = convolved * mx.sigmoid(convolved)
    return convolved, taps


def bounded_steps(a: mx.array, spec: MixerSpec) -> mx.array:
    """Return the negative logarithms of bounded decays; see `MixerSpec.bound`. a (1, T, Hv * Dk)."""
    assert spec.rate is not None
    assert spec.step_bias is not None
    rates = mx.repeat(spec.rate, spec.sizes.key_dim)
    return spec.bound * mx.sigmoid(-rates * (a + spec.step_bias))


def _gated(y: mx.array, z: mx.array, spec: MixerSpec) -> mx.array:
    """Normalize y (1, T, Hv, Dv) and multiply it by silu(z), z (1, T, Hv * Dv) -> (1, T, Hv * Dv).

    "kda" multiplies by the sigmoid of z.
    """

    def normed(rows: mx.array) -> mx.array:
        if spec.norm is None:
            return rows
        parts = rows.reshape(*rows.shape[:2], -1, spec.norm.shape[-1])
        return (mx.fast.rms_norm(parts, None, spec.norm_eps) * spec.norm).reshape(rows.shape)

    y = y.reshape(z.shape)
    gate = mx.sigmoid(z) if spec.sizes.kind == "kda" else z * mx.sigmoid(z)
    return normed(y) * gate if spec.norm_first else normed(y * gate)


def _scan(x: mx.array, state: mx.array, spec: MixerSpec) -> tuple[mx.array, mx.array]:
    """Run a selective scan: S = S exp(rate step) + step x B, y = (S . C + skip x) silu(z), for each channel.

    S is (Hv, Dk), step is softplus of what x has. x (1, T, projected) -> (1, T, Hv), and the flat state.
    """
    sizes = spec.sizes
    channels = sizes.heads
    assert spec.rate is not None
    ends = [channels, 2 * channels, 3 * channels, 3 * channels + sizes.key_dim]
    inputs, z, steps, b, c = mx.split(x[0], ends, axis=-1)
    steps = mx.logaddexp(steps, mx.array(0.0))
    scaled = steps * inputs  # (T, Hv)
    state = state.reshape(channels, sizes.key_dim)
    ys = []
    for t in range(x.shape[1]):
        state = state * mx.exp(spec.rate * steps[t, :, None]) + scaled[t, :, None] * b[t]
        ys.append((state * c[t]).sum(axis=-1))
    y = mx.stack(ys)  # (T, Hv)
    if spec.skip is not None:
        y = y + inputs * spec.skip
    return (y * z * mx.sigmoid(z))[None], state.flatten()


def _shift(x: mx.array, state: mx.array, spec: MixerSpec) -> tuple[mx.array, mx.array]:
    """Move each row towards the one before by several shares. x (1, T, E) -> (1, T, Hv E), and the newest row."""
    assert spec.taps is not None
    before = mx.concatenate([state[None, None], x[:, :-1]], axis=1)
    mixed = x[:, :, None] + (before - x)[:, :, None] * spec.taps  # (1, T, Hv, E)
    return mixed.reshape(1, x.shape[1], -1), x[0, -1]


def _wkv(x: mx.array, state: mx.array, spec: MixerSpec) -> tuple[mx.array, mx.array]:
    """Run RWKV-7's recurrence: S = S diag(w) + (S a) b^T + v k^T, y = S r, for each head.

    S is (Dv, Dk), w the decay of each of its columns; w, a and b come from logits. The results of a head are
    normalized, joined by the token's own value, and gated. x (1, T, 6 or 8 Hv Dk) -> (1, T, Hv Dv), and the flat state.
    """
    sizes = spec.sizes
    count = x.shape[1]
    heads = spec.wkv
    assert heads is not None
    columns = mx.split(x[0], 8 if spec.mixes_values else 6, axis=-1)
    parts = [part.reshape(count, sizes.heads, sizes.key_dim) for part in columns]  # (T, Hv, Dk)
    r, w, k, v, rate, gate = parts[:6]

    # Values, decays and rates from logits.
    if spec.mixes_values:
        first_v, share = parts[6:]
        v = v + (first_v - v) * mx.sigmoid(share)
    w = mx.exp(_SLOWEST_DECAY * mx.sigmoid(w))
    rate = mx.sigmoid(rate)

    # The key that is removed has a length of one; the key that is added depends on the rate.
    removed = k * heads.removed_key
    length = mx.sqrt((removed * removed).sum(axis=-1, keepdims=True))
    removed = removed / mx.maximum(length, _SHORTEST_KEY)
    k = k * (1 + (rate - 1) * heads.key_rate)
    a = -removed
    b = removed * rate

    state = state.reshape(sizes.heads, sizes.value_dim, sizes.key_dim)
    ys = []
    for t in range(count):
        replaced = (state @ a[t, ..., None]) * b[t, :, None, :]  # (Hv, Dv, Dk)
        state = state * w[t, :, None, :] + replaced + v[t, ..., None] * k[t, :, None, :]
        ys.append((state @ r[t, ..., None])[..., 0])
    y = mx.fast.layer_norm(mx.stack(ys), None, None, spec.norm_eps) * heads.norm + heads.norm_bias  # (T, Hv, Dv)
    bonus = (r * k * heads.bonus).sum(axis=-1, keepdims=True) * v
    return ((y + bonus) * gate).reshape(1, count, -1), state.flatten()
