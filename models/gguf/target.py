"""Destinations of GGUF tensors: names, required shapes, and changes of layout and values.

`names` makes them of the parts of a row; `convert` carries them out.

Guard: tests/models/gguf/test_link.py.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

Order = npt.NDArray[np.intp]
Values = Literal["same", "minus_one", "log", "log_negative"]
# Tensors that some files have in place of several, whose rows they stack.
# The rows are stacked in this order; `unfused` computes from it where each begins.
FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}


class Target(Struct, frozen=True, eq=False):
    """Destination of a tensor."""

    source: str  # tensor of the file
    module: str  # path without .weight / .bias
    leaf: str  # parameter of the module
    shape: tuple[int, ...]  # of the tensor, in elements
    rows: Order | None = None  # row of the tensor for each row in the network (matrices: second axis from the end)
    columns: Order | None = None  # block of columns for each block in the network
    values: Values = "same"  # "minus_one" subtracts 1, "log" takes the logarithm, "log_negative" that of the negative
    stored: tuple[int, ...] | None = None  # shape of an unquantized tensor in the network, if another
    plain: bool = False  # never quantized
    below: str = ""  # tensor of the same shape whose rows follow; empty for none
    index: int | None = None  # of the matrix in a stack

    @property
    def name(self) -> str:
        """Name of the tensor in the network."""
        return f"{self.module}.{self.leaf}"

    @property
    def axis(self) -> int:
        """The axis of the rows, from the end; matrices may be in a stack."""
        return -1 if self.leaf == "bias" or len(self.shape) == 1 else -2

    @property
    def sources(self) -> tuple[str, ...]:
        """The tensors of the file: one, or two whose rows are joined."""
        if self.below:
            return self.source, self.below
        return (self.source,)


def interleaved(heads: int, head_dim: int) -> Order:
    """Return the row of the tensor for each row in Hugging Face order.

    GGUF interleaves the halves of a head: 0, D/2, 1, D/2 + 1, ... So the even rows of a head come first.
    """
    return np.arange(heads * head_dim).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)  # (H, D / 2, 2)


def unfused(wanted: Mapping[str, Target], present: Collection[str]) -> Iterator[Target]:
    """Yield one layer's targets, with rows of a fused tensor in place of missing ones.

    wanted: by kind as in `FUSED`, a dot, and weight or bias.
    present: names of the file's tensors.
    """
    for key, target in wanted.items():
        # All parts of the fused tensor have to be in `wanted`: their sizes tell which of its rows are this target's.
        kind, _, leaf = key.partition(".")
        whole = next((name for name, parts in FUSED.items() if kind in parts), None)
        source = target.source.replace(kind, whole or kind)
        if target.source in present or whole is None or source not in present:
            yield target
            continue
        parts = [wanted[f"{part}.{leaf}"] for part in FUSED[whole]]
        before = parts[: [part.source for part in parts].index(target.source)]
        start = sum(part.shape[part.axis] for part in before)
        count = target.shape[target.axis]
        shape = list(target.shape)
        shape[target.axis] = sum(part.shape[part.axis] for part in parts)
        rows = start + (np.arange(count) if target.rows is None else target.rows)
        yield replace(target, source=source, shape=tuple(shape), rows=rows)
