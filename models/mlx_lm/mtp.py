"""The layer of a multi-token prediction head as a model of mlx-lm's class. See `models.network.mtp`.

mlx-lm's classes drop the head's tensors. Its layer becomes the only one of a model of the same class, so that caches,
quantization and kernels are those of every other model.

Guard: tests/models/network/test_mtp.py.
"""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from msgspec import Struct

from headrace.models.network.mtp import HeadTensors


class HeadInput(nn.Module):  # type: ignore[misc]
    """The head's input, in place of the table of the model of one layer."""

    def __init__(self, table: nn.Module, norm: nn.RMSNorm, *, hidden_first: bool) -> None:
        super().__init__()
        width = int(norm.weight.shape[0])
        self.embedding_norm = nn.RMSNorm(width, norm.eps)
        self.hidden_norm = nn.RMSNorm(width, norm.eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        object.__setattr__(self, "_shared", (table, hidden_first))  # no parameters of the head
        self._hidden: mx.array | None = None

    def use(self, hidden: mx.array) -> None:
        """Set the hidden states (1, T, E) of the next call."""
        object.__setattr__(self, "_hidden", hidden)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Join the embeddings of tokens (1, T) with the hidden states before them -> (1, T, E)."""
        table, hidden_first = self._shared
        embedded = table(tokens)
        hidden = mx.zeros_like(embedded)  # of a trial pass
        if self._hidden is not None:
            hidden = self._hidden.astype(embedded.dtype)
            self._hidden = None
        parts = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        if hidden_first:
            parts.reverse()
        x: mx.array = self.projection(mx.concatenate(parts, axis=-1))  # (1, T, 2E) -> (1, T, E)
        return x

    def as_linear(self, x: mx.array) -> mx.array:
        """Return logits by the network's table."""
        logits: mx.array = self._shared[0].as_linear(x)
        return logits


class _Shared(nn.Module):  # type: ignore[misc]
    """The network's output projection, without parameters of the head."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_projection", projection)

    def __call__(self, x: mx.array) -> mx.array:
        logits: mx.array = self._projection(x)
        return logits


class Head(Struct, frozen=True):
    """A head's tensors and the network that it belongs to."""

    tensors: HeadTensors
    network: nn.Module

    def adapt(self, model: nn.Module) -> None:
        """Give a new model of one layer the head's input, and the network's output projection."""
        outer = text_model(self.network)
        inner = text_model(model)
        inner.model.embed_tokens = HeadInput(
            outer.model.embed_tokens, inner.model.norm, hidden_first=self.tensors.hidden_first
        )
        if hasattr(inner.model, "ssm_idx"):
            inner.model.ssm_idx = None  # of a layer with recurrent state, for its mask: there is none
        if "lm_head" in inner:
            inner.lm_head = _Shared(outer.lm_head)

    def arrays(self, stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the head's arrays under the names of the model of one layer."""
        return {self.tensors.renamed[name]: array for name, array in stored.items() if name in self.tensors.renamed}

    def shifted(self, arrays: Mapping[str, mx.array], before: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Add the one that norms are stored without, unless the class did. before: what the class got."""
        shifted = dict(arrays)
        if not self.tensors.shifts:
            return shifted
        unchanged = {id(array) for array in before.values()}
        for name, array in arrays.items():
            if id(array) in unchanged and array.ndim == 1 and "norm" in name:
                shifted[name] = array + 1.0
        return shifted


def text_model(model: nn.Module) -> nn.Module:
    """Return the part with the layers (`model`) and the output projection, of a multimodal class or a text-only one."""
    if "language_model" in model:
        return model.language_model
    return model


def project(model: nn.Module, hidden: mx.array) -> mx.array:
    """Return logits (B, T, V) of hidden states (B, T, E) by a model's output projection."""
    text = text_model(model)
    output = text.lm_head if "lm_head" in text else text.model.embed_tokens.as_linear
    logits: mx.array = output(hidden)
    return logits
