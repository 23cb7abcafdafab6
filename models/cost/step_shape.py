"""Bytes and FLOPs of a decoder pass, matrix by matrix.

A `StepShape` is made from shapes alone (`models.cost.shape_sources`). Its sums are a `StepCost`; its rows are printed
by `headrace predict --explain`. Sizes are in bytes; a FLOP is one multiplication or addition. For a mixture of experts
only the active share of each matrix is read.

Guard: tests/models/cost/test_step_shape.py.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from headrace.runtime.metrics.cost import (
    LayerKV,
    Matrix,
    StepCost,
    attention_flops_per_entry,
    quantized_bytes,
    step_cost,
)
from headrace.runtime.ops.kv_format import FLOAT16, FORMATS, KVFormat

_GROUP_SIZE = 64  # weights that share a scale, in `StepShape.stored_at`


class Operation(Struct, frozen=True):
    """One row of a step: bytes moved `count` times, and FLOPs each time."""

    name: str
    count: int
    shape: str  # in words, such as "576 x 1536"
    nbytes: int  # each time
    flops: int  # each time

    @property
    def intensity(self) -> float:
        """Return FLOPs per byte."""
        if self.nbytes == 0:
            return 0.0
        return self.flops / self.nbytes


class StepShape(Struct, frozen=True):
    """The matrices and K/V that a decode step reads."""

    source: str  # origin of the shapes, in words
    layers: int  # that a step runs, those of every loop
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int  # positions that the model was made for
    matrices: Sequence[Matrix]
    vector_bytes: int  # norms and other small weights, which count once per step, also where layers run several times
    kv: Sequence[LayerKV]  # as in `StepCost`
    resident_bytes: int  # all weights in memory
    kv_format: KVFormat = FLOAT16  # of `kv`
    kv_formats: Sequence[KVFormat] = FORMATS  # supported ones, largest first
    stock: bool = False  # only mlx-lm's classes run it
    state_bytes: int = 0  # as in `StepCost`
    splits: tuple[Sequence[str], Sequence[str]] = (("tensor", "pipeline"),) * 2  # for ranks: on CPU kernels, on a GPU
    joint_norms: int = 0  # norms a token that tensor parallel adds sums for
    family: str = ""  # model_type, or the catalog's name
    head_bytes: int = 0  # weights of a prediction head, which a step reads only to draft

    @property
    def parameters(self) -> int:
        """Return the weights of all matrices, with inactive experts and without an untied embedding table."""
        return sum(matrix.count * matrix.weights for matrix in self.matrices)

    def takes_turns(self, *, on_gpu: bool) -> bool:
        """Return whether each sequence has a pass of its own: mlx-lm's classes run models with state on a GPU, too."""
        return self.stock or (on_gpu and self.state_bytes > 0)

    def weight_bytes(self, batch: int) -> int:
        """Return the weight bytes that a step of `batch` sequences reads."""
        return sum(matrix.read_bytes(batch) for matrix in self.matrices) + self.vector_bytes

    @property
    def mixture(self) -> bool:
        """True for a mixture of experts."""
        return any(matrix.share < 1 for matrix in self.matrices)

    def stored_at(self, bits: int) -> "StepShape":
        """Return the shape with every matrix quantized in groups of 64; vectors stay."""

        def stored(matrix: Matrix) -> Matrix:
            return replace(matrix, nbytes=quantized_bytes(matrix.weights, bits, _GROUP_SIZE))

        matrices = [stored(matrix) for matrix in self.matrices]
        change = sum(new.count * (new.nbytes - old.nbytes) for new, old in zip(matrices, self.matrices, strict=True))
        return replace(self, matrices=matrices, resident_bytes=self.resident_bytes + change)

    def with_kv(self, stored: KVFormat) -> "StepShape":
        """Return the shape with K/V in another format."""
        row, now = (kind.row_bytes(1, self.head_dim) for kind in (stored, self.kv_format))
        kv = [replace(layer, bytes_per_token=layer.bytes_per_token * row // now) for layer in self.kv]
        return replace(self, kv=kv, kv_format=stored)

    @property
    def cost(self) -> StepCost:
        """The sums of a step."""
        return step_cost(
            self.matrices,
            self.vector_bytes,
            self.kv,
            attention_flops_per_entry(self.heads, self.head_dim),
            self.state_bytes,
        )

    def step(self, past: int) -> list[Operation]:
        """Return the rows of one decode step with `past` entries in the cache; they sum to `cost`."""
        rows = [_operation(matrix, 1) for matrix in self.matrices]
        return [*rows, self._vectors(), *self._cache(past, 1)]

    def prefill(self, tokens: int, past: int = 0) -> list[Operation]:
        """Return the rows of a prefill pass of `tokens` after `past`, which appends and makes no logits."""
        needed = [matrix.of_prompts for matrix in self.matrices if not matrix.output]
        rows = [_operation(matrix, tokens) for matrix in needed if matrix.count]
        return [*rows, self._vectors(), *self._cache(past, tokens, prompt=True)]

    def _vectors(self) -> Operation:
        return Operation("norms", 1, "", self.vector_bytes, 0)

    def _cache(self, past: int, tokens: int, *, prompt: bool = False) -> Iterator[Operation]:
        """Yield the rows of K/V and state. prompt: late layers append only, see `LayerKV`."""
        cost = self.cost
        for layer in self.kv:
            # Query i attends to the past and the i + 1 newest entries within its window.
            seen = layer.visible_by_all(past + 1, tokens)
            read = layer.read_by_all(past + 1, tokens)
            name = "K/V read" if layer.window is None else f"K/V, window {layer.window}"
            yield Operation(
                name,
                layer.count * layer.reads - layer.late * prompt,
                f"{read} x {2 * self.kv_heads} x {self.head_dim}",
                layer.bytes_per_token * read,
                cost.entry_flops(layer) * seen,
            )
        for layer in self.kv:
            shape = f"{tokens} x {2 * self.kv_heads} x {self.head_dim}"
            yield Operation("K/V append", layer.count, shape, layer.bytes_per_token * tokens, 0)
        if self.state_bytes:
            yield Operation("recurrent state", 1, "read and written", 2 * self.state_bytes, 0)


def total(operations: Sequence[Operation]) -> tuple[int, int]:
    """Return (bytes, FLOPs) of all rows."""
    return sum(row.count * row.nbytes for row in operations), sum(row.count * row.flops for row in operations)


def _operation(matrix: Matrix, tokens: int) -> Operation:
    """Return the row of a matrix in a pass over `tokens`."""
    shape = f"{matrix.rows} x {matrix.columns}"
    if tokens == 1 or matrix.reads > 1:
        count = round(matrix.count * matrix.share * matrix.reads)
        return Operation(matrix.name, count, shape, matrix.nbytes, 2 * matrix.weights * tokens)
    # Several tokens may use any expert, so all are counted.
    return Operation(matrix.name, matrix.count, shape, matrix.nbytes, round(2 * matrix.weights * tokens * matrix.share))
