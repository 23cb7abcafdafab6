"""Parts of stored tensors that are read from the file when they are needed, with little beside them.

A shard is mapped into memory, so that slicing reads nothing, and copying a slice reads its pages. Ranks of tensor
parallelism cut their parts of the weights so (`loading.rank_part`), and read these alone: see
tests/models/network/test_rank_parts.py. `gguf.parts.GgufPart` has the same methods.
"""

import mmap
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from headrace.models.checkpoint.arrays import read_arrays
from headrace.models.checkpoint.safetensors import Checkpoint

# Element type in numpy, and in MLX where numpy has none.
TYPES: dict[str, tuple[str, mx.Dtype | None]] = {
    "F32": ("<f4", None), "F16": ("<f2", None), "BF16": ("<u2", mx.bfloat16), "U32": ("<u4", None), "U8": ("u1", None),
}  # fmt: skip
View = NDArray[np.generic]  # part of a mapped file, of any of these types
_RUN = 1 << 15  # bytes; shorter rows are read together with the gaps between them, since each row is a system call


class _Shard:
    """A mapped file. Pages are read as asked for: a system's reading ahead would fetch the parts of other ranks."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.mapped.madvise(mmap.MADV_RANDOM)
        self._start = np.frombuffer(self.mapped, np.uint8).ctypes.data

    def fetch(self, view: View) -> None:
        """Have the pages of a view read: row by row where rows have gaps between them and span _RUN bytes or more."""
        if view.nbytes and _span(view) > view.nbytes and _span(view[0]) >= _RUN:
            for inner in view:
                self.fetch(inner)
        else:
            self._advise(view, mmap.MADV_WILLNEED)

    def forget(self, view: View) -> None:
        """Take the pages of a view out of this process's memory."""
        self._advise(view, mmap.MADV_DONTNEED)

    def _advise(self, view: View, advice: int) -> None:
        """Tell the system about the pages of a view."""
        offset = view.ctypes.data - self._start
        first = offset - offset % mmap.PAGESIZE  # madvise takes whole pages
        self.mapped.madvise(advice, first, offset + _span(view) - first)


def _span(view: View) -> int:
    """Return the bytes from a view's first to its last."""
    gaps = ((count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True))
    return int(view.itemsize + sum(gaps))


class FilePart:
    """Part of a tensor: pieces of it, joined along an axis. It has those methods of an array that cut one."""

    def __init__(self, pieces: Sequence[View], kind: mx.Dtype | None, shard: _Shard, axis: int = 0) -> None:
        """kind: MLX's type of the elements, if numpy's is another; see `TYPES`."""
        self._pieces = list(pieces)
        self._kind = kind
        self._shard = shard
        self._axis = axis
        first = self._pieces[0]
        self.ndim = first.ndim
        self.shape: tuple[int, ...] = ()
        if first.ndim:
            axis %= first.ndim
            length = sum(piece.shape[axis] for piece in self._pieces)
            self.shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
        self.size = prod(self.shape)
        self.nbytes = self.size * first.itemsize

    def __getitem__(self, index: Any) -> "FilePart":
        return self._made(self._whole[index])

    def swapaxes(self, first: int, second: int) -> "FilePart":
        return self._made(self._whole.swapaxes(first, second))

    def reshape(self, *shape: int) -> "FilePart":
        return self._made(self._whole.reshape(*shape))

    def words(self) -> "FilePart":
        """Return its bytes as uint32."""
        return self._made(self._whole.view("<u4"))

    def joined(self, others: Sequence["FilePart"], axis: int) -> "FilePart":
        """Return this part and others of the same tensor, one after the other."""
        return FilePart([self._whole, *(other._whole for other in others)], self._kind, self._shard, axis)

    def read(self) -> mx.array:
        """Read the bytes."""
        for piece in self._pieces:
            self._shard.fetch(piece)
        # numpy copies without the interpreter lock, which heartbeats need while a slow disk is read.
        if self.ndim:
            copied = np.concatenate(self._pieces, axis=self._axis)
        else:
            copied = self._whole.copy()
        array = mx.array(np.asarray(copied, order="C"))
        for piece in self._pieces:
            self._shard.forget(piece)
        if self._kind is not None:
            array = array.view(self._kind)
        return array

    @property
    def _whole(self) -> View:
        """The only piece."""
        [whole] = self._pieces  # a joined part is cut no more
        return whole

    def _made(self, view: View) -> "FilePart":
        """Return a view of the same file as a part."""
        assert not view.size or np.may_share_memory(view, self._whole)  # a view, not a copy
        return FilePart([view], self._kind, self._shard)


def file_parts(checkpoint: Checkpoint) -> "dict[str, mx.array | FilePart]":
    """Return the checkpoint's tensors as parts of their files; as lazy arrays those that another tool's format needs.

    Raises OSError for files that cannot be read.
    """
    foreign = checkpoint.foreign
    shards = dict[Path, _Shard]()
    converted = set[str]()
    if foreign is not None:
        converted = {*foreign.matrices, *foreign.dropped}
    arrays: dict[str, mx.array | FilePart] = {**read_arrays(checkpoint)}
    for name, info in checkpoint.tensors.items():
        if name not in converted and info.dtype in TYPES and info.nbytes:
            if info.shard not in shards:
                shards[info.shard] = _Shard(info.shard)
            kind, ours = TYPES[info.dtype]
            flat = np.frombuffer(shards[info.shard].mapped, kind, prod(info.shape), info.start)
            arrays[name] = FilePart([flat.reshape(info.shape)], ours, shards[info.shard])
    return arrays
