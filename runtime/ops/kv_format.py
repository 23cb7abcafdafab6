"""K/V storage formats: bytes per entry and block shapes. No arrays.

The size of a KV cache entry comes from its `KVFormat`, never from a dtype: a format may store several values together.

Packed formats store integers of a few bits. A group of values along the head dimension shares a float16 scale: a code n
of B bits means scale * (n - 2^(B - 1)). The byte order inside a block is defined by the kernels
(runtime/native/core/packed.h).

Errors of keys cost several times those of values, so keys have more bits. A number of `q4` takes 5.375 bits on average,
and more in heads that are no multiple of 64.

A new format is a constant and an entry of `FORMATS`; its name is then a choice of `--kv`. The whole format is part of
the key of stored blocks, so another coding of the same name reads none of them. The kernels have to read its bits and
groups. `reference.packed_format` gives the layout of stock MLX instead. tests/runtime/ops/test_kv_format.py compares
sizes with real arrays.
"""

from fractions import Fraction
from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    import mlx.core as mx


class Coding(Struct, frozen=True):
    """Storage of keys or of values: `bits` per value, and `group_bytes` per `group` of a row (rounded up)."""

    bits: int
    group: int = 1
    group_bytes: int = 0

    def row_bytes(self, head_dim: int) -> int:
        """Return the bytes of one head's row."""
        groups = -(-head_dim // self.group)
        # Codes of 5 and 6 bits are 4 bits of each value, and the others, which take the room of whole groups.
        high = self.bits - 4 if self.bits in (5, 6) else 0
        return head_dim * (self.bits - high) // 8 + groups * (self.group * high // 8 + self.group_bytes)

    @property
    def bytes_per_value(self) -> Fraction:
        """Mean bytes per value, group bytes included."""
        return Fraction(self.bits, 8) + Fraction(self.group_bytes, self.group)


class KVFormat(Struct, frozen=True):
    """Codings of keys and values. `name` is the `--kv` choice; all of it is part of the key of stored blocks.

    dtype_name: of the stored arrays in MLX; "uint8" for packed formats.
    """

    name: str
    keys: Coding
    values: Coding
    dtype_name: str = "uint8"

    @property
    def packed(self) -> bool:
        """True if values are integers with group scales, which only format-specific kernels read."""
        return self.dtype_name == "uint8"

    @property
    def bytes_per_value(self) -> Fraction:
        """Mean bytes per value over K and V, for whole groups."""
        return (self.keys.bytes_per_value + self.values.bytes_per_value) / 2

    def row_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Return the bytes of one position's K and V in one layer."""
        return kv_heads * (self.keys.row_bytes(head_dim) + self.values.row_bytes(head_dim))

    def block_shape(self, layers: int, kv_heads: int, entries: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of a block of `entries` positions in `layers` layers.

        Plain: (layers, 2, Hkv, entries, D), K before V. Packed: (layers, Hkv, entries * bytes of K and V).
        """
        if self.packed:
            return layers, kv_heads, entries * self.row_bytes(1, head_dim)
        return layers, 2, kv_heads, entries, head_dim

    def part_shape(self, block_shape: tuple[int, ...], entries: int) -> tuple[int, ...]:
        """Return the shape of a block's first `entries`; packed blocks are stored whole."""
        if self.packed:
            return block_shape
        return (*block_shape[:-2], entries, block_shape[-1])

    @property
    def dtype(self) -> "mx.Dtype":
        """Dtype of the stored arrays."""
        import mlx.core as mx

        dtype: mx.Dtype = getattr(mx, self.dtype_name)
        return dtype


def _plain(name: str, dtype_name: str, bits: int) -> KVFormat:
    return KVFormat(name, Coding(bits), Coding(bits), dtype_name)


_EIGHT = Coding(8, group=32, group_bytes=2)  # a group has a scale in float16
_SIX = Coding(6, group=64, group_bytes=2)
_FIVE = Coding(5, group=64, group_bytes=2)
_FOUR = Coding(4, group=32, group_bytes=2)

FLOAT32 = _plain("f32", "float32", 32)
FLOAT16 = _plain("f16", "float16", 16)
BFLOAT16 = _plain("bf16", "bfloat16", 16)
Q8 = KVFormat("q8", _EIGHT, _EIGHT)
K8V4 = KVFormat("k8v4", _EIGHT, _FIVE)
Q4 = KVFormat("q4", _SIX, _FOUR)

FORMATS = (FLOAT16, Q8, K8V4, Q4)
"""Formats for `--kv`, largest first. FLOAT16 stands for the unquantized format of the operations in use."""


def kv_format(name: str) -> KVFormat:
    """Return the format of this name. Raises UsageError for unknown names."""
    for known in FORMATS:
        if known.name == name:
            return known
    raise UsageError(f"{name!r} is not a K/V format", f"choose one of {', '.join(known.name for known in FORMATS)}")


def plain(dtype: "mx.Dtype") -> KVFormat:
    """Return the unquantized format in `dtype`. Raises ValueError unless it is float32, float16 or bfloat16."""
    name = str(dtype).rpartition(".")[2]
    for known in (FLOAT32, FLOAT16, BFLOAT16):
        if known.dtype_name == name:
            return known
    raise ValueError(f"K/V cannot be stored as {name}")
