"""How far one model's logits are from another's, token by token. Natural logarithms throughout, so nats.

With p the reference's distribution, q the other's, and d = logits of p - logits of q:

    KL(p || q) = E_p[log p - log q] = log E_p[exp(-c)],  c = d - E_p[d]
               = log1p(E_p[exp(-c) - 1 + c]),  since E_p[c] = 0

The last form adds up what is never negative, so that a divergence of 1e-6 nats survives float32, in which
E_p[log p - log q] loses it among logarithms of the size of 10.
N = tokens, V = vocabulary.
"""

from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

_LARGE = 8.0  # from a |c| like this on the divergence is large, the plain form exact enough, and exp(-c) is not safe


@dataclass(slots=True)
class Divergence:
    """Of each token scored, in order of the text."""

    kl: list[float] = field(default_factory=list)
    """KL(reference || other), nats."""
    agrees: list[float] = field(default_factory=list)
    """1.0 where both find the same token likeliest, else 0.0."""
    reference_nll: list[float] = field(default_factory=list)
    """-log p of the token that the text goes on with."""
    nll: list[float] = field(default_factory=list)
    """-log q of it."""

    def __iadd__(self, more: "Divergence") -> "Divergence":
        self.kl += more.kl
        self.agrees += more.agrees
        self.reference_nll += more.reference_nll
        self.nll += more.nll
        return self


def divergence(reference: mx.array, other: mx.array, targets: mx.array) -> Divergence:
    """reference, other: logits (N, V) of the same rows; targets (N,): the tokens that the text goes on with."""
    a, b = reference.astype(mx.float32), other.astype(mx.float32)
    log_p, log_q = _log_softmax(a), _log_softmax(b)
    p = mx.exp(log_p)
    difference = a - b
    c = difference - (p * difference).sum(axis=-1, keepdims=True)
    small = mx.log1p((p * (mx.expm1(-mx.clip(c, -_LARGE, _LARGE)) + c)).sum(axis=-1))
    plain = (p * (log_p - log_q)).sum(axis=-1)
    kl = mx.where(mx.abs(c).max(axis=-1) < _LARGE, small, plain)
    agrees = mx.argmax(a, axis=-1) == mx.argmax(b, axis=-1)
    column = targets[:, None]
    found = [
        mx.maximum(kl, 0.0),
        agrees.astype(mx.float32),
        -mx.take_along_axis(log_p, column, axis=-1)[:, 0],
        -mx.take_along_axis(log_q, column, axis=-1)[:, 0],
    ]
    mx.eval(found)
    return Divergence(*[cast(list[float], values.tolist()) for values in found])


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
