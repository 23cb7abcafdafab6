"""Tensors of a GGUF file that are converted when they are read, one after the other.

A part knows its shape without reading. It can be cut before, as parts of safetensors files (`checkpoint.file_parts`).

Guard: tests/models/gguf/test_link.py.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from headrace.models.checkpoint.file_parts import TYPES
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.shard_header import TensorInfo
from headrace.models.gguf.container import Container, forget, open_container
from headrace.models.gguf.convert import converted, layout_of, made_vectors
from headrace.models.gguf.numpy_blocks import Array
from headrace.models.gguf.target import Target
from headrace.runtime.errors import CheckpointError

_CHUNK = 4 << 20  # bytes of a tensor's rows that are converted together: they stay in the processor's cache


class _Conversion:
    """Conversion of one tensor to its arrays. It happens when the first is read; each is released when it is read."""

    def __init__(self, container: Container, target: Target, infos: Mapping[str, TensorInfo]) -> None:
        """infos: of the arrays, by name."""
        self._container = container
        self._target = target
        self._infos = infos
        self._arrays: dict[str, mx.array] = {}

    def take(self, name: str) -> mx.array:
        """Return the array `name` and release it. Raises CheckpointError for values that no format holds.

        The other arrays of the tensor stay in memory until they are taken. An array that is taken again is converted
        again, with all others.
        """
        if name not in self._arrays:
            self._arrays = {}
            arrays = {name: _zeros(info) for name, info in self._infos.items()}
            for rows in self._chunks():
                self._convert(rows, arrays)
            self._arrays = arrays  # only now: after an error they are half filled
        return self._arrays.pop(name)

    def _chunks(self) -> Sequence[slice]:
        """Return the rows that are converted together: all of them where rows move or the shape changes."""
        target = self._target
        tensor = self._container.tensors[target.source]
        vector = len(tensor.shape) < 2
        if vector or target.rows is not None or target.below or target.index is not None or target.stored:
            return [slice(None)]
        count = max(1, _CHUNK * len(tensor.data) // tensor.data.nbytes)  # _CHUNK over the bytes of a row
        return [slice(start, start + count) for start in range(0, len(tensor.data), count)]

    def _convert(self, rows: slice, arrays: Mapping[str, mx.array]) -> None:
        """Fill these rows of the tensor's arrays, and take the pages of the file that were read out of memory."""
        whole = rows == slice(None)
        made = converted(self._container, self._target, groups_of_16=True, rows=None if whole else rows)
        for name, stored in made.arrays.items():
            wanted = self._infos[name].dtype
            if stored.dtype != wanted and (stored.dtype, wanted) != ("F16", "F32"):  # which is exact
                raise CheckpointError(
                    f"tensor {made.source.name} ({made.source.type}) has scales beyond half precision"
                )
            np.asarray(arrays[name])[rows] = stored.array.view(TYPES[stored.dtype][0])
        for source in self._target.sources:
            forget(self._container.tensors[source] if whole else made.source)


def _zeros(info: TensorInfo) -> mx.array:
    """Return an array whose memory numpy can fill: of words where numpy has no such type."""
    kind = mx.array(np.zeros((), TYPES[info.dtype][0])).dtype
    zeros = mx.zeros(info.shape, kind)
    mx.eval(zeros)
    return zeros


class GgufPart:
    """Array of a converted tensor, or part of it. It has those methods of an array that cut one.

    take: returns the whole array.
    kind: type in MLX, where numpy has none.
    example: an array of this part's shape that takes no memory.
    cut: cuts the part out of the whole array; None for all of it.
    """

    def __init__(
        self,
        take: Callable[[], mx.array],
        kind: mx.Dtype | None,
        example: Array,
        cut: Callable[[Array], Array] | None = None,
    ) -> None:
        self._take = take
        self._kind = kind
        self._example = example
        self._cut = cut
        self.shape = example.shape
        self.ndim = example.ndim
        self.size = example.size
        self.nbytes = example.nbytes

    @classmethod
    def whole(cls, take: Callable[[], mx.array], info: TensorInfo) -> "GgufPart":
        """Return all of an array."""
        kind, ours = TYPES[info.dtype]
        return cls(take, ours, _empty(info.shape, kind))

    def __getitem__(self, index: Any) -> "GgufPart":
        return self._changed(lambda array: array[index])

    def swapaxes(self, first: int, second: int) -> "GgufPart":
        return self._changed(lambda array: array.swapaxes(first, second))

    def reshape(self, *shape: int) -> "GgufPart":
        return self._changed(lambda array: array.reshape(*shape))

    def joined(self, others: Sequence["GgufPart"], axis: int) -> "GgufPart":
        """Return this part and others of the same array, one after the other."""
        parts = (self, *others)
        shape = list(self.shape)
        shape[axis] = sum(part.shape[axis] for part in parts)

        def cut_all(whole: Array) -> Array:
            return np.concatenate([part._cut_of(whole) for part in parts], axis)

        return GgufPart(self._take, self._kind, _empty(tuple(shape), self._example.dtype), cut_all)

    def read(self) -> mx.array:
        """Convert the tensor and return the part. Raises CheckpointError for values that no format holds."""
        read = self._take()
        if self._cut is not None:
            read = mx.array(np.asarray(self._cut(np.asarray(read)), order="C"))
        return read if self._kind is None else read.view(self._kind)

    def _changed(self, change: Callable[[Array], Array]) -> "GgufPart":
        """Return the part after a change, which is made now on the example, and on the array when it is read."""
        return GgufPart(self._take, self._kind, change(self._example), lambda array: change(self._cut_of(array)))

    def _cut_of(self, whole: Array) -> Array:
        return whole if self._cut is None else self._cut(whole)


def _empty(shape: tuple[int, ...], kind: npt.DTypeLike) -> Array:
    """Return an array of that shape that takes no memory."""
    return np.broadcast_to(np.zeros((), kind), shape)


def gguf_parts(checkpoint: Checkpoint) -> dict[str, GgufPart]:
    """Return the arrays of a checkpoint that links to a GGUF file.

    Raises CheckpointError for a file that is broken, or has other tensors than when it was linked.
    """
    container = open_container(checkpoint.gguf[0])
    layout = layout_of(container)
    vectors = made_vectors(layout)
    takes: dict[str, Callable[[], mx.array]] = {
        name: partial(mx.array, np.asarray(values, "<f4")) for name, values in vectors.items()
    }
    # Types and shapes that the file gives now, to compare with those that the store lists.
    forms = {name: ("F32", np.shape(values)) for name, values in vectors.items()}
    container = replace(container, metadata={})  # a vocabulary takes more memory than the tokenizer
    for target in layout.targets:
        arrays = layout.described(target).arrays
        forms |= arrays
        infos = {name: checkpoint.tensors[name] for name in arrays if name in checkpoint.tensors}
        conversion = _Conversion(container, target, infos)
        takes |= {name: partial(conversion.take, name) for name in arrays}
    if forms != {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}:
        raise CheckpointError(f"{checkpoint.gguf[0].name} has other tensors than its entry in the store lists")
    return {name: GgufPart.whole(take, checkpoint.tensors[name]) for name, take in takes.items()}
