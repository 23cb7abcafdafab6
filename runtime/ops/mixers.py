"""Parameters of recurrent token mixing: sizes of a layer's state, and its vectors.

`runtime.ops.recurrent` has the formulas in stock MLX, the native kernels the same in C++ (`native_plans.mixer_plan`
passes these fields by position). K/V caches and costs take the bytes of a state from `MixerSizes.state`.

Guard: tests/runtime/ops/test_native_recurrent.py.
"""

from typing import Literal, NamedTuple

import mlx.core as mx
from msgspec import Struct

MixerKind = Literal["delta", "kda", "ssm", "conv", "scan", "wkv", "shift"]
"""Kinds of recurrent mixing, see `MixerSizes`."""


class MixerSizes(Struct, frozen=True):
    """Sizes of a layer's recurrent mixing. C = convolved channels.

    "delta": gated delta networks (arXiv:2412.06464). "kda": those with a decay for each channel of the keys
    (arXiv:2510.26692). "ssm": Mamba-2 (arXiv:2405.21060). "conv": a short convolution (LFM2), with one head of size E.
    "scan": the selective scan of Mamba (arXiv:2312.00752), each channel a head. "wkv": RWKV-7 (arXiv:2503.14456).
    "shift": the state is the row before, and each of Hv results lies between the two rows (RWKV-7).
    `runtime.ops.recurrent` has the formulas. All but "conv" and "shift" have Hv heads with a state (Dv, Dk) each, and
    Hk heads of queries and keys that divide them. A projected row, with C = 2 Hk Dk + Hv Dv:

        "delta"   [q, k, v (C) | z (Hv Dv) | b (Hv) | a (Hv)]
        "kda"     [q, k, v (C) | z (Hv Dv) | b (Hv) | a (Hv Dk)]
        "ssm"     [C, B, x (C) | z (Hv Dv) | a (Hv)]         in Mamba-2's names, which are q, k and v here
        "conv"    [B (E) | C (E) | x (E)], and C = E channels are convolved; or x alone (`MixerSpec.gated`)
        "scan"    [x (Hv) | z (Hv) | step (Hv) | B (Dk) | C (Dk)]         without a convolution: its width is 1
        "wkv"     [r | w | k | v | a | g] (Hv Dk each), and two more with `MixerSpec.mixes_values`; likewise
        "shift"   x (E), with E = Dv, and C = E; its width is 2
    """

    kind: MixerKind
    heads: int  # Hv
    key_heads: int  # Hk
    key_dim: int  # Dk
    value_dim: int  # Dv
    width: int  # tokens that the convolution sees

    @property
    def decays(self) -> int:
        """Numbers of a."""
        if self.kind == "kda":
            return self.heads * self.key_dim
        return self.heads

    @property
    def inner(self) -> int:
        """Numbers of the result."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """C."""
        if self.kind == "shift":
            return self.value_dim
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def state(self) -> int:
        """Numbers of a sequence's state: (width - 1, C) inputs of the convolution, then (Hv, Dv, Dk)."""
        taps = (self.width - 1) * self.channels
        if self.kind in ("conv", "shift"):
            return taps
        return taps + self.inner * self.key_dim


class WkvVectors(NamedTuple):
    """Vectors of the heads of RWKV-7, (Hv, Dk) each."""

    removed_key: mx.array  # factor of the key that is removed from the state
    key_rate: mx.array  # share of the rate in the key that is added
    bonus: mx.array  # of the token's own value in the result
    norm: mx.array  # LayerNorm of each head's result
    norm_bias: mx.array


class MixerSpec(Struct, frozen=True, eq=False, weakref=True):
    """Recurrent token mixing of one layer, in place of attention or beside it."""

    sizes: MixerSizes
    # (width, C); None: no convolution. "shift": (Hv, C), the share of the row before in each result
    taps: mx.array | None = None
    tap_bias: mx.array | None = None  # (C,)
    # (Hv,), negative: decay is exp(rate * softplus(a + step_bias)). "scan": (Hv, Dk), of each number of the state
    rate: mx.array | None = None
    step_bias: mx.array | None = None  # as a
    bound: float = 0.0  # if above 0, decay is exp(-bound * sigmoid(-rate * (a + step_bias))); "kda" only
    most_beta: float = 1.0  # beta is this times the sigmoid of b
    steps: tuple[float, float] = (0.0, float("inf"))  # least and most of softplus, "ssm" only
    skip: mx.array | None = None  # (Hv,)
    norm: mx.array | None = None  # (Dv,), over all heads (Hv * Dv,), or in parts (parts, Hv * Dv / parts)
    norm_first: bool = True  # before the gate, (Dv,) only; else after it
    norm_eps: float = 1e-6
    wkv: WkvVectors | None = None  # "wkv" only
    mixes_values: bool = False  # a "wkv" whose rows also have the values of the first layer, and logits of their shares
    gated: bool = True  # a "conv" has B and C
    silu: bool = False  # after a "conv" without gates

    @property
    def vectors(self) -> list[mx.array]:
        every = (self.taps, self.tap_bias, self.rate, self.step_bias, self.skip, self.norm, *(self.wkv or ()))
        return [vector for vector in every if vector is not None]
