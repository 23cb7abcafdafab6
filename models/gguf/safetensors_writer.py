"""Streaming writer of a safetensors file, tensor by tensor.

Format: an 8-byte little-endian header length, a JSON header (spaces may follow it), then the data without gaps
(huggingface/safetensors, README). Space for the header is reserved from the names and filled in last, so that no
tensor has to be in memory with another.

Guard: tests/models/gguf/test_convert.py.
"""

import json
import math
import struct
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

_ENTRY_BYTES = 160  # upper bound on an entry's dtype, shape (four dimensions) and offsets


class SafetensorsWriter:
    """Context manager: `add` the tensors announced in `names` in any order; a clean exit writes the header."""

    def __init__(self, path: Path, names: list[str]) -> None:
        # 64: metadata and brackets. The data begins at a multiple of 8 bytes.
        room = 64 + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
        self._header_bytes = math.ceil(room / 8) * 8
        self._entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
        self._end = 0  # of the data so far
        self._file = path.open("wb")
        self._file.seek(8 + self._header_bytes)

    def add(self, name: str, array: npt.NDArray[np.generic], dtype: str) -> None:
        """Append the bytes of `array` (little-endian) as a tensor of safetensors type `dtype`."""
        self._file.write(np.ascontiguousarray(array).reshape(-1).data.cast("B"))
        start = self._end
        self._end = start + array.nbytes
        self._entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, self._end]}

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                header = json.dumps(self._entries, separators=(",", ":")).encode()
                assert len(header) <= self._header_bytes  # else it would reach into the data
                self._file.seek(0)
                self._file.write(struct.pack("<Q", self._header_bytes) + header.ljust(self._header_bytes))
