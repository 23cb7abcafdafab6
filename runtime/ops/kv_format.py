"""How K and V are stored: what a format costs, and how a block of entries lies in memory. No arrays.

Whoever needs to know what an entry of the KV cache takes asks a `KVFormat`, never a dtype or a size per element: a
format may store several values together. `kv_format` knows the names that people use.

Packed formats are whole numbers of a few bits. A group of values along the head dimension shares a scale (float16): 8
bits stand for scale * (n - 128), 4 bits, which also share an offset, for scale * n + offset. What lies where in a block
only the kernels know (runtime/native/core/packed.h).
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Coding:
    """How keys, or values, are stored: `bits` each, and `beside` bytes for every `group` of a row, a last part too."""

    bits: int
    group: int = 1
    beside: int = 0

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one head's row."""
        return head_dim * self.bits // 8 + -(-head_dim // self.group) * self.beside

    @property
    def bytes_per_value(self) -> Fraction:
        """On average: what is stored once per group has its share in it."""
        return Fraction(self.bits, 8) + Fraction(self.beside, self.group)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Keys and values, each in a coding of their own. `name`: what people call it, and keys of stored blocks have."""

    name: str
    keys: Coding
    values: Coding
    dtype_name: str = "uint8"

    @property
    def packed(self) -> bool:
        """Whether values are whole numbers with scales beside them: only kernels that know the format read it."""
        return self.dtype_name == "uint8"

    @property
    def bytes_per_value(self) -> Fraction:
        """On average over K and V, of whole groups."""
        return (self.keys.bytes_per_value + self.values.bytes_per_value) / 2

    def row_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one position's K and V in one layer."""
        return kv_heads * (self.keys.row_bytes(head_dim) + self.values.row_bytes(head_dim))

    def block_shape(self, layers: int, kv_heads: int, entries: int, head_dim: int) -> tuple[int, ...]:
        """The array that a block of `entries` positions in `layers` layers is: K, then V of each layer.

        (layers, 2, Hkv, entries, D); packed, the bytes of each head: (layers, Hkv, entries * bytes of K and V).
        """
        if self.packed:
            return layers, kv_heads, entries * self.row_bytes(1, head_dim)
        return layers, 2, kv_heads, entries, head_dim

    def part_shape(self, block_shape: tuple[int, ...], entries: int) -> tuple[int, ...]:
        """The array of a block's first `entries`: all of it where entries are stored together."""
        return block_shape if self.packed else (*block_shape[:-2], entries, block_shape[-1])

    @property
    def dtype(self) -> "mx.Dtype":
        """Of the arrays it is stored in."""
        import mlx.core as mx

        dtype: mx.Dtype = getattr(mx, self.dtype_name)
        return dtype


def _plain(name: str, dtype_name: str, bits: int) -> KVFormat:
    return KVFormat(name, Coding(bits), Coding(bits), dtype_name)


_EIGHT = Coding(8, group=32, beside=2)  # a scale
_FOUR = Coding(4, group=32, beside=4)  # a scale and an offset

FLOAT32 = _plain("f32", "float32", 32)
FLOAT16 = _plain("f16", "float16", 16)
BFLOAT16 = _plain("bf16", "bfloat16", 16)
Q8 = KVFormat("q8", _EIGHT, _EIGHT)
K8V4 = KVFormat("k8v4", _EIGHT, _FOUR)
Q4 = KVFormat("q4", _FOUR, _FOUR)

FORMATS = (FLOAT16, Q8, K8V4, Q4)
"""What people can choose, the largest first. FLOAT16 stands for K/V as the operations keep them unquantized."""


def kv_format(name: str) -> KVFormat:
    """The format that people call so. Raises UsageError for another name."""
    for known in FORMATS:
        if known.name == name:
            return known
    raise UsageError(f"no K/V format is called {name!r}", f"known: {', '.join(known.name for known in FORMATS)}")


def plain(dtype: "mx.Dtype") -> KVFormat:
    """Every value by itself, in `dtype`. Raises ValueError for a dtype that is none of the three."""
    name = str(dtype).rpartition(".")[2]
    for known in (FLOAT32, FLOAT16, BFLOAT16):
        if known.dtype_name == name:
            return known
    raise ValueError(f"K/V are not stored as {name}")
