"""The bytes and floating-point operations of one decode step, computed from shapes: the one place with the formulas.

Plain arithmetic, no arrays. It is filled in next to the shapes it follows from: in `models/network` for arrays in
memory, in `models/cost` for headers and catalogs. Telemetry, benchmarks and predictions read it.
Only what a step touches counts: used cache entries, not capacity; no embedding table unless it is also the output
projection; no inactive experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROLLBACK = 256  # entries beside its window that a windowed layer keeps, so that a cache can go back
DROPPED = 64  # it drops multiples of that many: entries that are attended to together stay together
BESIDE_WINDOW = ROLLBACK + DROPPED + 512  # and what a chunk of prefill adds before it drops others


@dataclass(frozen=True, slots=True)
class LayerKV:
    """K/V traffic of `count` equal layers: bytes of one position in one layer, and the window they attend to."""

    count: int
    bytes_per_token: int
    window: int | None = None

    def nbytes(self, entries: int) -> int:
        """Bytes that are visible of `entries` entries, in all `count` layers."""
        return self.count * self.bytes_per_token * visible(entries, self.window)

    def held_bytes(self, entries: int) -> int:
        """Bytes set aside at most for `entries` entries: windowed layers drop what no query will see again."""
        span = None if self.window is None else self.window + BESIDE_WINDOW
        return self.count * self.bytes_per_token * visible(entries, span)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one decode step of one sequence must move and compute.

    weight_bytes: read once per step whatever the batch. weight_flops: 2 per multiply-add of a weight.
    attention_flops_per_entry: FLOPs per visible cache entry in one layer (q·k and weights·v over all heads).
    """

    weight_bytes: int
    weight_flops: int
    kv: Sequence[LayerKV]
    attention_flops_per_entry: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one more token adds to the cache, all layers."""
        return sum(layer.count * layer.bytes_per_token for layer in self.kv)

    def kv_bytes_read(self, past: int) -> int:
        """Bytes a step reads from a cache of `past` entries: past + 1 rows, since the new row is attended to."""
        total = 0
        for layer in self.kv:  # a loop: asked in every step, and a generator would take twice as long
            total += layer.nbytes(past + 1)
        return total

    def kv_bytes_written(self) -> int:
        """Bytes a step appends: one row of K and of V in every layer."""
        return self.kv_bytes_per_token

    def step_bytes(self, past: int, batch: int = 1) -> int:
        """All bytes a decode step of `batch` sequences moves, each with `past` entries in the cache."""
        return self.weight_bytes + batch * (self.kv_bytes_read(past) + self.kv_bytes_written())

    def step_flops(self, past: int) -> int:
        """FLOPs of a decode step with `past` entries in the cache."""
        attention = sum(
            layer.count * self.attention_flops_per_entry * visible(past + 1, layer.window) for layer in self.kv
        )
        return self.weight_flops + attention

    def kv_bytes(self, tokens: int) -> int:
        """Bytes that a cache of `tokens` entries takes."""
        return held_bytes(self.kv, tokens)

    def longest_context(self, room: int, most: int) -> int:
        """The most entries, up to `most`, whose cache fits into `room` bytes."""
        return longest_context(self.kv, room, most)


def held_bytes(kv: Sequence[LayerKV], tokens: int) -> int:
    """Bytes that the caches of all layers take for `tokens` entries."""
    return sum(layer.held_bytes(tokens) for layer in kv)


def longest_context(kv: Sequence[LayerKV], room: int, most: int) -> int:
    """The most entries, up to `most`, for which `held_bytes` fit into `room`; 0 where none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if held_bytes(kv, middle) <= room else (low, middle - 1)
    return low


def attention_flops_per_entry(heads: int, head_dim: int) -> int:
    """FLOPs per visible entry in one layer: a multiply-add per head dimension for q·k, and one for weights·v."""
    return 4 * heads * head_dim


# MLX's quantization modes whose weights are floats and whose scales are a byte: (bits, group size).
FLOAT_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}


def quantized_bytes(weights: int, bits: int, group_size: int, scale_bytes: int = 2) -> int:
    """MLX affine storage: `bits` per weight, and a scale and a bias per group."""
    return weights * bits // 8 + 2 * scale_bytes * weights // group_size


def visible(entries: int, window: int | None) -> int:
    """How many of `entries` positions a query sees that attends to its last `window`."""
    return entries if window is None else min(entries, window)
