"""Strict parsing of untrusted GGUF headers.

Every count, length, type and offset is checked against the file: nothing outside it is read, and a count is accepted
only if that many of the smallest entries fit. Violations raise CheckpointError. The `gguf` package's reader, which
trusts its input, is not used.

Layout per the GGUF specification (ggml/docs/gguf.md), versions 2 and 3, little-endian.

Guards: tests/models/gguf/test_container.py and tests/faults/test_gguf.py.
"""

import itertools
import mmap
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from headrace.runtime.errors import CheckpointError, UnsupportedModelError

# Metadata value types by number: struct format of the fixed-size ones.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
# Value types with a meaning of their own here
_UINT32 = 4
_BOOL = 7
_STRING = 8
_ARRAY = 9
_LENGTH = struct.Struct("<Q")

_MAX_DIMS = 4  # of the specification
_MAX_ALIGNMENT = 1 << 16  # bytes; 32 in use
_MAX_NAME_BYTES = 256  # the specification limits tensor names to 64; keys in use are no longer
# Array elements take a few dozen bytes each. The largest vocabularies in use have 1.3 million
# elements (tokens, scores, types and merges together).
_MAX_ARRAY_ELEMENTS = 1 << 21
_MAX_TEXT_BYTES = 4 << 20  # chat templates in use have up to 20,000
MAX_HEADER_BYTES = 48 << 20  # headers in use have up to 20 MB
_MANY_TEXTS = 1 << 12  # from that many on, their ends are searched for together
_USUAL_TEXT_BYTES = 32  # of a text and its length, on average: tokens and merges in use have 12 to 25
_MAX_KEYS = 1 << 14  # in use: about 60
_MAX_TENSORS = 1 << 16  # in use: 2,000

# Convertible tensor types: (elements per block, bytes per block).
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}
# Their numbers in files, as in the package gguf, which is slow to import: tests/models/gguf/test_tensors.py compares.
_NUMBERS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
# Unsupported types, by the beginning of `_type_name`: a common file type of about the same size to suggest.
_INSTEAD = {
    "NVFP4": "Q4_K_M",
    "Q1_0": "Q2_K",
    "Q4_0_": "Q4_0",
    "type": "Q4_K_M",
}
# Numbers that llama.cpp had for ARM and has no more, and that of bitnet.cpp
_OTHER_TYPES = {31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "I2_S of bitnet.cpp"}
_IK_TYPES = range(97, 400)  # ik_llama.cpp's
ANEW = "download the file again, or take another one of this model"
_TRUNCATED = "download it again; join a file that was cut into pieces first: `cat PIECE1 PIECE2 > MODEL.gguf`"


class StringList:
    """Texts of an array, decoded on request: loading weights asks for no vocabulary."""

    def __init__(self, content: bytes, ends: Sequence[int]) -> None:
        """content: the texts, each after its length in 8 bytes. ends: where each ends in it."""
        self._content = content
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def decode(self) -> list[str]:
        """Raises UnicodeDecodeError for texts that are not UTF-8."""
        content = self._content
        return [content[start + 8 : end].decode() for start, end in itertools.pairwise((0, *self._ends))]


# A metadata value: number, boolean, text, or a flat list of one of them.
Value = int | float | bool | str | list[Any] | StringList


class TensorEntry(Struct, frozen=True):
    """One entry of the tensor table."""

    name: str
    type: str  # a key of `BLOCKS`
    shape: tuple[int, ...]  # slowest dimension first
    start: int  # byte in the data section
    nbytes: int


class Header(Struct, frozen=True):
    """Metadata by key, tensors in file order, and the start of the data section."""

    metadata: dict[str, Value]
    tensors: list[TensorEntry]
    data_start: int


_FIRST_BYTES = 64 << 10  # of a file, before its vocabulary


class HeaderCutError(Exception):
    """The header goes on beyond the bytes at hand."""


def read_header(file_name: str, data: mmap.mmap | bytes, size: int | None = None) -> Header:
    """Parse and check the header of a GGUF file.

    data: the file, or its first bytes. size: of the file, if `data` is a part. Raises CheckpointError for a broken
    header or tensors outside the file, UnsupportedModelError for a tensor type without conversion, HeaderCutError if
    the part ends before the header.
    """
    return _HeaderReader(file_name, data, len(data) if size is None else size).run()


def first_metadata(file: Path) -> dict[str, Value]:
    """Return the metadata in the first bytes of a GGUF file, which say its kind; nothing of a broken one."""
    try:
        with file.open("rb") as stream:
            reader = _HeaderReader(file.name, stream.read(_FIRST_BYTES), file.stat().st_size)
    except OSError:  # another user's file, or deleted meanwhile
        return {}
    with suppress(CheckpointError, UnsupportedModelError, HeaderCutError):  # cut within the vocabulary
        reader.read_metadata()
    return reader.metadata


def _type_name(number: int) -> str:
    """Return the name of a tensor type, as in `BLOCKS`. Other numbers are named for messages."""
    if number in _NUMBERS:
        return _NUMBERS[number]
    from gguf import GGMLQuantizationType  # late: the package takes 0.1 s to import

    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return _OTHER_TYPES.get(number, f"type {number}" + " of ik_llama.cpp" * (number in _IK_TYPES))


def _foreign(start: bytes) -> str | None:
    """Return a hint for a file of another format, from its first bytes."""
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS: fetch the file itself with `git lfs pull`"
    if start.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return "it is a web page: download the file itself, not the page about it"
    if start[:4] in (b"lmgg", b"fmgg", b"tjgg"):  # GGML, GGMF and GGJT
        return "it has a format from before GGUF: look for a GGUF version of this model"
    return None


def _instead(type_name: str) -> str:
    """Return the file type to suggest in place of an unsupported tensor type."""
    return next((other for kind, other in _INSTEAD.items() if type_name.startswith(kind)), "Q8_0")


def _ends_of_texts(data: mmap.mmap | bytes, first: int, count: int, limit: int) -> list[int]:
    """Return where each text ends after `first`, before which it begins: those before `limit` and of usual length."""
    end = first
    ends: list[int] = []
    with suppress(struct.error):
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, end)
            end += length + 8
            if end > limit or length > _MAX_TEXT_BYTES:
                break
            ends.append(end - first)
    return ends


def _ends_of_short_texts(data: mmap.mmap | bytes, first: int, count: int, limit: int) -> list[int] | None:
    """Return `_ends_of_texts` at once; None unless each text has 1 to 255 bytes without seven zeros in a row.

    The length of such a text is one byte and seven zeros. If every text ends where the next seven zeros are due, these
    places are all lengths.
    """
    import numpy as np  # late: reading the first keys of many files needs none

    block = np.frombuffer(data, np.uint8, min(limit - first, count * _USUAL_TEXT_BYTES), first)
    is_zero = block == 0
    is_zero = is_zero[:-1] & is_zero[1:]  # two in a row
    is_zero = is_zero[:-2] & is_zero[2:]  # four
    is_zero = is_zero[:-3] & is_zero[3:]  # seven
    lengths_at = np.flatnonzero(is_zero)[:count] - 1
    ends = lengths_at + 8 + block[lengths_at]
    follow = len(ends) == count and lengths_at[0] == 0 and np.array_equal(ends[:-1], lengths_at[1:])
    return ends.tolist() if follow and ends[-1] <= len(block) else None


class _HeaderReader:
    """A single pass over the header; `position` stays within `[0, size]`.

    file_name: for messages.
    data: the file, or its first bytes: HeaderCutError is raised where they end.
    size: of the whole file.
    """

    def __init__(self, file_name: str, data: mmap.mmap | bytes, size: int) -> None:
        self.file_name = file_name
        self.data = data
        self.size = size
        self.position = 0
        self.alignment = 32  # bytes, of tensors and of the data section; unless the metadata state another
        self.array_elements = 0  # of all arrays so far
        self.metadata: dict[str, Value] = {}

    def run(self) -> Header:
        """Read the metadata, then the tensor table, and check where the tensors lie."""
        tensor_count = self.read_metadata()
        tensors = [self.tensor() for _ in range(tensor_count)]
        if len({tensor.name for tensor in tensors}) != len(tensors):
            self.fail("two tensors have the same name")
        # The data section begins at the next multiple of the alignment: rounded up.
        data_start = -(-self.position // self.alignment) * self.alignment
        self.check_spans(tensors, data_start)
        return Header(self.metadata, tensors, data_start)

    def read_metadata(self) -> int:
        """Read all keys; return the count of tensors, which follow."""
        if self.size < 24:  # magic, version and two counts: 4 + 4 + 8 + 8 bytes
            self.fail("too short to be a GGUF file")
        self.skip(4, "the magic")
        if self.data[:4] != b"GGUF":
            self.fail("not a GGUF file (wrong magic)", _foreign(self.data[:64]))
        version = self.number("I")
        if version & 0xFFFF == 0:  # a small number with its bytes in the other order
            raise UnsupportedModelError(
                f"{self.file_name}: big-endian GGUF files are not supported",
                hint="turn it with gguf-convert-endian of the package gguf, or take the usual file of this model",
            )
        if version not in (2, 3):
            raise UnsupportedModelError(f"{self.file_name}: GGUF version {version} is not supported (2 and 3 are)")
        tensor_count = self.number("Q")
        key_count = self.number("Q")
        self.expect(tensor_count, 24, "tensors")  # length of the name, dimensions, type, offset: 8 + 4 + 4 + 8 bytes
        self.expect(key_count, 13, "metadata keys")  # length of the name, type, a value of one byte: 8 + 4 + 1
        if key_count > _MAX_KEYS or tensor_count > _MAX_TENSORS:
            self.fail(f"{key_count} metadata keys and {tensor_count} tensors are more than any model has")

        for _ in range(key_count):
            key = self.name("metadata key")
            if key in self.metadata or key.startswith("GGUF."):
                self.fail(f"metadata key {key!r} appears twice or is reserved")
            self.metadata[key] = self.value(key)
        return tensor_count

    def value(self, key: str) -> Value:
        """Read a value's type and the value. That of general.alignment holds for all tensors, which come later."""
        kind = self.number("I")
        if key == "general.alignment":
            return self.read_alignment(kind)
        if kind == _ARRAY:
            return self.array(key)
        if kind == _STRING:
            return self.text(key)
        if kind not in _SCALARS:
            self.fail(f"{key} has an unknown value type {kind}")
        value: Value = self.scalars(kind, 1, key)[0]
        return value

    def array(self, key: str) -> list[Any] | StringList:
        """Read an array. Its length is checked before anything is allocated."""
        kind = self.number("I")
        length = self.number("Q")
        if kind == _ARRAY:
            self.fail(f"{key} is an array of arrays")
        if kind != _STRING and kind not in _SCALARS:
            self.fail(f"{key} has an unknown element type {kind}")
        self.expect(length, 8 if kind == _STRING else struct.calcsize(_SCALARS[kind]), f"elements of {key}")
        self.array_elements += length
        if self.array_elements > _MAX_ARRAY_ELEMENTS:
            self.fail(f"the metadata arrays have more than {_MAX_ARRAY_ELEMENTS} elements")
        return self.texts(length, key) if kind == _STRING else self.scalars(kind, length, key)

    def tensor(self) -> TensorEntry:
        """Read an entry of the tensor table. The file has the fastest dimension first, `TensorEntry.shape` last."""
        name = self.name("tensor name")
        n_dims = self.number("I")
        if not 1 <= n_dims <= _MAX_DIMS:
            self.fail(f"tensor {name} has {n_dims} dimensions")
        dims = [self.number("Q") for _ in range(n_dims)]
        kind = self.number("I")
        offset = self.number("Q")
        type_name = _type_name(kind)
        if type_name not in BLOCKS:
            raise UnsupportedModelError(
                f"{self.file_name}: tensor {name} is {type_name}, which headrace cannot convert",
                hint=f"take the {_instead(type_name)} file of this model; headrace converts {', '.join(BLOCKS)}",
            )
        block, block_bytes = BLOCKS[type_name]
        elements = 1
        for dim in dims:
            elements *= dim  # Python integers do not overflow
        if elements == 0 or dims[0] % block:  # blocks run along the fastest dimension
            self.fail(f"tensor {name} has shape {dims}, not a multiple of the {type_name} block of {block}")
        if offset % self.alignment:
            self.fail(f"tensor {name} starts at {offset}, which is not aligned to {self.alignment}")
        return TensorEntry(name, type_name, tuple(reversed(dims)), offset, elements // block * block_bytes)

    def check_spans(self, tensors: list[TensorEntry], data_start: int) -> None:
        """Fail unless every tensor is inside the data section and none overlap."""
        end = 0
        previous = ""
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            if data_start + tensor.start + tensor.nbytes > self.size:
                self.fail(f"tensor {tensor.name} reaches past the end of the file (truncated?)", _TRUNCATED)
            if tensor.start < end:
                self.fail(f"tensors {previous} and {tensor.name} overlap")
            end = tensor.start + tensor.nbytes
            previous = tensor.name

    def read_alignment(self, kind: int) -> int:
        """Read the alignment of tensors: a power of two, in bytes. kind: type of the value."""
        if kind != _UINT32:
            self.fail("general.alignment is not a 32-bit number")
        self.alignment = self.number("I")
        if not 0 < self.alignment <= _MAX_ALIGNMENT or self.alignment & (self.alignment - 1):
            self.fail(f"general.alignment is {self.alignment}, not a power of two up to {_MAX_ALIGNMENT}")
        return self.alignment

    def scalars(self, kind: int, count: int, key: str) -> list[Any]:
        """Return `count` consecutive numbers or booleans."""
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        start = self.position
        self.skip(layout.size, key)
        values = list(layout.unpack_from(self.data, start))
        if kind != _BOOL:
            return values
        if any(value > 1 for value in values):
            self.fail(f"{key} has a boolean that is neither 0 nor 1")
        return [bool(value) for value in values]

    def texts(self, count: int, key: str) -> StringList:
        """Return `count` consecutive texts. A vocabulary and its merges have some 500,000."""
        data = self.data
        limit = min(len(data), self.size, MAX_HEADER_BYTES)
        first = self.position
        ends = _ends_of_short_texts(data, first, count, limit) if count > _MANY_TEXTS else None
        if ends is None:
            ends = _ends_of_texts(data, first, count, limit)
        self.position = first + ends[-1] if ends else first
        for _ in range(count - len(ends)):
            self.text(key)  # refuses the first, which is too long or cut off
        return StringList(data[first : self.position], ends)

    def text(self, key: str) -> str:
        """Read a text of UTF-8, after its length."""
        length = self.number("Q")
        start = self.position
        self.skip(length, key)
        if length > _MAX_TEXT_BYTES:
            self.fail(f"a text of {key} is {length} bytes long")
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError:
            self.fail(f"unreadable GGUF metadata ({key} is not UTF-8 text)")

    def name(self, what: str) -> str:
        """Read a short printable name. what: its kind, for messages."""
        length = self.number("Q")
        start = self.position
        if length > _MAX_NAME_BYTES:
            self.fail(f"a {what} is {length} bytes long")
        self.skip(length, what)
        name = self.data[start : self.position].decode(errors="replace")
        if "\ufffd" in name or not name.isprintable():  # names appear in messages
            self.fail(f"a {what} is not plain text")
        return name

    def number(self, code: str) -> int:
        """Read a whole number. code: its format in `struct`."""
        start = self.position
        self.skip(struct.calcsize(code), "a number")
        return int(struct.unpack_from("<" + code, self.data, start)[0])

    def expect(self, count: int, bytes_each: int, what: str) -> None:
        """Fail unless `count` of the smallest possible entries fit into the rest of the file."""
        if count * bytes_each > self.size - self.position:
            self.fail(f"claims {count} {what}, more than the file can hold")

    def skip(self, length: int, what: str) -> None:
        """Move past bytes that are all there: callers read them afterwards, without checks. what: for messages."""
        if length > self.size - self.position:
            self.fail(f"ends in the middle of {what}")
        if self.position + length > MAX_HEADER_BYTES:
            self.fail(f"has a header of more than {MAX_HEADER_BYTES >> 20} MiB")
        if self.position + length > len(self.data):
            raise HeaderCutError
        self.position += length

    def fail(self, reason: str, hint: str | None = None) -> NoReturn:
        """Raise CheckpointError. Without a hint of its own, it says to fetch the file anew."""
        raise CheckpointError(f"{self.file_name}: {reason}", hint or ANEW)
