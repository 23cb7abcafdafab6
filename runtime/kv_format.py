"""How K and V are stored: what a format costs, and how a block of entries lies in memory. No arrays.

Whoever needs to know what an entry of the KV cache takes asks a `KVFormat`, never a dtype or a size per element: a
format may store several values together.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True, slots=True)
class KVFormat:
    """`group` values of K or V take `nbytes` bytes. `name` tells formats apart in keys of stored blocks."""

    name: str
    group: int
    nbytes: int

    @property
    def bytes_per_value(self) -> Fraction:
        """On average: what is stored once per group has its share in it."""
        return Fraction(self.nbytes, self.group)

    def row_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one position's K and V in one layer."""
        return 2 * kv_heads * head_dim * self.nbytes // self.group

    def block_shape(self, layers: int, kv_heads: int, entries: int, head_dim: int) -> tuple[int, ...]:
        """The array that a block of `entries` positions in `layers` layers is: K, then V of each layer."""
        return layers, 2, kv_heads, entries, head_dim

    @property
    def dtype(self) -> "mx.Dtype":
        """Of the arrays it is stored in. Raises ValueError for a format that only predictions know."""
        import mlx.core as mx

        if self not in (FLOAT32, FLOAT16, BFLOAT16):
            raise ValueError(f"K/V as {self.name} can be counted, not stored")
        dtype: mx.Dtype = getattr(mx, self.name)
        return dtype


FLOAT32 = KVFormat("float32", 1, 4)
FLOAT16 = KVFormat("float16", 1, 2)
BFLOAT16 = KVFormat("bfloat16", 1, 2)
AFFINE_8 = KVFormat("affine 8-bit", 64, 68)  # with a half-precision scale and bias per 64


def plain(dtype: "mx.Dtype") -> KVFormat:
    """Every value by itself, in `dtype`. Raises ValueError for a dtype that is none of the three."""
    name = str(dtype).rpartition(".")[2]
    for known in (FLOAT32, FLOAT16, BFLOAT16):
        if known.name == name:
            return known
    raise ValueError(f"K/V are not stored as {name}")
