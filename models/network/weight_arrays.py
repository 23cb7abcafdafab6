"""Arrays of a checkpoint's weights, in safetensors or GGUF.

`Parameters` reads through it. In a GGUF a tensor is a part of a file, which is converted when it is needed.

Guard: tests/models/gguf/test_link.py.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from headrace.models.checkpoint.arrays import read_arrays
from headrace.models.checkpoint.safetensors import Checkpoint

_SHARD = 1 << 30  # bytes of a GGUF's tensors that are read together


def weight_arrays(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the arrays that `checkpoint.tensors` lists: lazy ones, or those of a GGUF as parts that `loaded` converts.

    Raises as `read_arrays` and `gguf_parts`.
    """
    if not checkpoint.gguf:
        return dict(read_arrays(checkpoint))
    from headrace.models.gguf.parts import gguf_parts  # late: imports numpy

    return dict(gguf_parts(checkpoint))


def loaded(array: Any) -> mx.array:
    """Return the array itself, or the content of a part of a file."""
    return array if isinstance(array, mx.array) else array.read()


def shard_arrays(checkpoint: Checkpoint) -> Iterator[dict[str, mx.array]]:
    """Yield the arrays of each shard; of a GGUF about a gigabyte at a time."""
    for shard in checkpoint.shards:
        arrays = mx.load(str(shard), format="safetensors")
        assert isinstance(arrays, dict)
        yield arrays
    if not checkpoint.gguf:
        return
    read: dict[str, mx.array] = {}
    for name, part in weight_arrays(checkpoint).items():
        read[name] = loaded(part)
        if sum(array.nbytes for array in read.values()) > _SHARD:
            yield read
            read = {}
    yield read
