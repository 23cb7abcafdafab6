"""Divergence of one model's logits from another's, per token, in nats.

With p the reference's distribution, q the other's, and d = logits of p - logits of q:

        KL(p || q) = E_p[log p - log q] = log E_p[exp(-c)],  c = d - E_p[d]
                              = log1p(E_p[exp(-c) - 1 + c]),  since E_p[c] = 0

The last form sums non-negative terms, so a divergence of 1e-6 nats survives float32; the first form loses it to
cancellation. N = tokens, V = vocabulary.

Guard: tests/models/loading/test_divergence.py.
"""

import mlx.core as mx
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from headrace.runtime.ops.read_values import read_ints

LogitRow = NDArray[np.float32]
"""Logits, or logarithms of probabilities, of one token (V,)."""

_LARGE = 8.0  # for a |c| this large the plain form is exact enough, and exp(-c) may overflow


class Divergence(Struct):
    """Figures of each scored token, in order of the text.

    kl: KL(reference || other), nats.
    agrees: 1.0 if both have the same most likely token, else 0.0.
    reference_nll: -log p of the text's next token.
    nll: -log q of it.
    """

    kl: list[float] = field(default_factory=list)
    agrees: list[float] = field(default_factory=list)
    reference_nll: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)

    def __iadd__(self, more: "Divergence") -> "Divergence":
        """Add the figures of the tokens that follow."""
        self.kl += more.kl
        self.agrees += more.agrees
        self.reference_nll += more.reference_nll
        self.nll += more.nll
        return self


def divergence(reference: mx.array, other: mx.array, targets: mx.array) -> Divergence:
    """Return the figures of each row.

    reference, other: logits (N, V) of the same tokens.
    targets: the text's next tokens (N,).
    """
    # NumPy, row by row: MLX takes many times as long on a CPU.
    result = Divergence()
    a, b = (np.array(logits.astype(mx.float32), copy=False) for logits in (reference, other))
    with np.errstate(all="ignore"):  # tokens of zero probability
        for p_logits, q_logits, target in zip(a, b, read_ints(targets), strict=True):
            log_p = _log_softmax(p_logits)
            log_q = _log_softmax(q_logits)
            result.kl.append(max(_kl(log_p, log_q, p_logits - q_logits), 0.0))
            result.agrees.append(float(p_logits.argmax() == q_logits.argmax()))
            result.reference_nll.append(-float(log_p[target]))
            result.nll.append(-float(log_q[target]))
    return result


def _kl(log_p: LogitRow, log_q: LogitRow, difference: LogitRow) -> float:
    """Return KL(p || q) of one row. difference: logits of p less those of q; see the module."""
    p = np.exp(log_p)
    c = difference - p.dot(difference)
    if np.abs(c).max() < _LARGE:
        return float(np.log1p(p.dot(np.expm1(-c) + c)))
    return float(p.dot(log_p - log_q))


def _log_softmax(logits: LogitRow) -> LogitRow:
    """Return the logarithms of a row's probabilities."""
    shifted: LogitRow = logits - logits.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted
