"""Bytes and FLOPs of a decode step, computed from shapes, and the least time that they allow.

Filled in by `models/network` from arrays and by `models/cost` from headers and catalogs; read by telemetry, benchmarks
and predictions. Only data that a step reads or writes counts: used cache entries, not capacity; the embedding table
only if it is also the output projection; no inactive experts.

    Matrix (one kind of projection) --step_cost--> StepCost <-- LayerKV (K/V of equal layers)
    StepCost + bandwidth + FLOP/s --step_limit--> StepLimit

`entries` and `past` are cache entries of one sequence, `rows` successive new tokens of it, `batch` sequences.
tests/runtime/metrics/test_cost.py and tests/models/cost/ compare with arrays of real networks.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

ROLLBACK = 256  # entries that a windowed layer keeps beyond its window, for rollback
DROPPED = 64  # entries are dropped in multiples of this, so that attention sums them in the same order
BESIDE_WINDOW = ROLLBACK + DROPPED + 512  # entries beyond its window at most, 512 of them of a prefill chunk on a CPU

Roof = Literal["memory", "arithmetic"]


class LayerKV(Struct, frozen=True):
    """K/V traffic of `count` equal layers.

    bytes_per_token: of one position in one layer.
    window: positions that a query sees, its own included; None for all.
    late: layers of these in which a prompt's tokens append only; see `StepCost.prompt_flops`.
    chunked: queries see the positions since the last multiple of `window`.
    chosen: positions that a query attends to at most, by an indexer's choice; None for all that it sees. All stay in
        the cache, and several successive queries read all.
    block: positions that the indexer chooses together, the newest ones always.
    unread: positions up to which a step reads none. So it is with an indexer's keys: nothing is left out before.
    flops: of a visible position in one layer; None: `StepCost.attention_flops_per_entry`.
    reads: times that a step reads the positions: more than once, if later layers attend to them, too (IQuest Coder).
    """

    count: int
    bytes_per_token: int
    window: int | None = None
    late: int = 0
    chunked: bool = False
    chosen: int | None = None
    block: int = 1
    unread: int = 0
    flops: int | None = None
    reads: int = 1

    def nbytes(self, entries: int) -> int:
        """Return the bytes that a step reads of `entries` entries, in all `count` layers."""
        return self.count * self.reads * self.bytes_per_token * self.visible(entries)

    def visible(self, entries: int) -> int:
        """Return the number of `entries` positions that the query at the last one sees."""
        if self.chunked and self.window is not None and entries:
            return (entries - 1) % self.window + 1
        if entries <= self.unread:
            return 0
        if self.chosen is not None and entries > self.chosen:
            return self.chosen - self.block + (entries - 1) % self.block + 1  # the newest block is not full
        return visible(entries, self.window)

    def read_by_all(self, entries: int, rows: int) -> int:
        """Return the number of positions that successive queries read, the first at the last of `entries` positions.

        A position that several of them see is read once: 3 rows from entry 100 on read 102 without a window.
        """
        all_entries = entries - 1 + rows  # in the cache at the last query
        if self.unread:
            return self.visible(all_entries)
        if self.chosen is not None and rows > 1:
            return all_entries
        return min(all_entries, self.visible(entries) + rows - 1)

    def visible_by_all(self, entries: int, rows: int) -> int:
        """Return the sum of `visible` over successive queries, the first at the last of `entries` positions.

        Unlike in `read_by_all`, a position counts for each query that sees it, as its FLOPs do.
        """
        if self.chosen is not None:
            return self._visible_of_chosen(entries, rows, self.chosen)
        if self.unread:
            # First queries that see up to `unread` positions, and read none; all others read all.
            idle = min(rows, max(0, self.unread + 1 - entries))
            return visible_by_all(entries + idle, rows - idle, None)
        if self.window is None or not self.chunked:
            return visible_by_all(entries, rows, self.window)
        # Queries from the first position on, less those before the first of these.
        last = entries - 1 + rows
        return self._visible_in_chunks(self.window, last) - self._visible_in_chunks(self.window, entries - 1)

    def _visible_of_chosen(self, entries: int, rows: int, chosen: int) -> int:
        """Return `visible_by_all` where each query sees its own choice.

        mlx-lm's class does so in a step alone: in a prefill it computes the scores of all positions, and masks them.
        """
        all_seen = min(rows, max(0, chosen + 1 - entries))  # first queries that see all positions
        first = entries + all_seen  # positions at the first query that sees chosen ones
        others = rows - all_seen
        newest = self._visible_in_chunks(self.block, first - 1 + others) - self._visible_in_chunks(
            self.block, first - 1
        )
        return visible_by_all(entries, all_seen, None) + others * (chosen - self.block) + newest

    @staticmethod
    def _visible_in_chunks(window: int, entries: int) -> int:
        """Return the sum of `visible` over queries at the first `entries` positions: 1 + 2 + ... in each chunk."""
        whole, rest = divmod(entries, window)
        return (whole * window * (window + 1) + rest * (rest + 1)) // 2

    def held_bytes(self, entries: int) -> int:
        """Return the most bytes allocated for `entries` entries; windowed layers drop old ones."""
        span = None
        if self.window is not None:
            span = self.window + BESIDE_WINDOW
        return self.count * self.bytes_per_token * visible(entries, span)


class StepCost(Struct, frozen=True):
    """Bytes and FLOPs of one decode step of one sequence.

    weight_bytes: read once per step for any batch.
    weight_flops: 2 per multiply-add of a weight.
    attention_flops_per_entry: per visible cache entry in one layer (q·k and weights·v over all heads).
    weight_parts: (name, bytes) of `weight_bytes` by part of the network: most of them, or none if they are not known.
    state_bytes: of the recurrent state of a sequence, which a step reads and writes whole; it counts as K/V.
    late_bytes, late_flops: of the weights after the last entry that a token appends, the output projection included.
    """

    weight_bytes: int
    weight_flops: int
    kv: Sequence[LayerKV]
    attention_flops_per_entry: int = 0
    weight_parts: tuple[tuple[str, int], ...] = ()
    state_bytes: int = 0
    late_bytes: int = 0
    late_flops: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token adds to the cache, all layers."""
        return sum(layer.count * layer.bytes_per_token for layer in self.kv)

    def kv_bytes_read(self, past: int) -> int:
        """Return the bytes a step reads from a cache of `past` entries and its own new one."""
        total = self.state_bytes
        for layer in self.kv:  # a hot path: a generator takes twice as long
            total += layer.nbytes(past + 1)
        return total

    def kv_bytes_written(self, rows: int = 1) -> int:
        """Return the bytes a step writes: K and V of `rows` tokens in every layer, and the state once."""
        return rows * self.kv_bytes_per_token + self.state_bytes

    def step_bytes(self, past: int, batch: int = 1) -> int:
        """Return all bytes of a decode step of `batch` sequences with `past` cache entries each."""
        return self.weight_bytes + batch * (self.kv_bytes_read(past) + self.kv_bytes_written())

    def step_flops(self, past: int, rows: int = 1) -> int:
        """Return the FLOPs of a step with `past` cache entries, attention's included.

        rows: successive tokens of one sequence, with draft tokens.
        """
        return rows * self.weight_flops + sum(
            layer.count * layer.reads * self.entry_flops(layer) * layer.visible_by_all(past + 1, rows)
            for layer in self.kv
        )

    def prompt_flops(self, past: int, rows: int) -> int:
        """Return the FLOPs of `rows` tokens of a prompt that choose no token.

        After the last K/V that they append, their pass ends: no `late_flops`, and no attention of late layers.
        """
        late = sum(layer.late * self.entry_flops(layer) * layer.visible_by_all(past + 1, rows) for layer in self.kv)
        return self.step_flops(past, rows) - rows * self.late_flops - late

    def entry_flops(self, layer: LayerKV) -> int:
        """Return the FLOPs of one visible position in one layer."""
        if layer.flops is not None:
            return layer.flops
        return self.attention_flops_per_entry

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of a cache of `tokens` entries."""
        if not tokens:
            return 0
        return held_bytes(self.kv, tokens) + self.state_bytes

    def longest_context(self, room: int, max_entries: int) -> int:
        """Return the most entries, up to `max_entries`, with a cache of at most `room` bytes."""
        return longest_context(self.kv, room - self.state_bytes, max_entries)


class Matrix(Struct, frozen=True):
    """`count` equal projections of a network."""

    name: str
    count: int
    rows: int  # outputs
    columns: int  # inputs
    nbytes: int  # of one, with bias and scales
    share: Fraction = Fraction(1)  # part that one token uses: of experts, the active ones over all
    reads: Fraction = Fraction(1)  # times that a step reads it: more than once if several layers use it
    output: bool = False  # makes the logits
    late: int = 0  # those whose last read comes after the last entry that a token appends: prefill leaves it out
    part: str = ""  # of the network, for `StepCost.weight_parts`; empty if it is not known
    divided: bool = True  # in tensor parallelism; False: every rank has all of it

    @property
    def weights(self) -> int:
        return self.rows * self.columns

    @property
    def step_bytes(self) -> int:
        """Return the bytes of all `count` that one step of one sequence reads."""
        return self.read_bytes(1)

    def read_bytes(self, batch: int) -> int:
        """Return the bytes that a step of `batch` sequences reads, if each sequence draws its experts independently."""
        if batch == 1 or self.share == 1:
            return round(self.count * self.nbytes * self.share * self.reads)
        # An expert is read unless none of the sequences uses it. Experts' `reads` is 1.
        return round(self.count * self.nbytes * (1 - float(1 - self.share) ** batch))

    @property
    def step_flops(self) -> int:
        return round(2 * self.count * self.weights * self.share * self.reads)

    @property
    def of_prompts(self) -> "Matrix":
        """The reads of a prompt's tokens, which make no logits: all but the late ones."""
        if self.reads > 1:
            return replace(self, reads=self.reads - Fraction(self.late, self.count))
        return replace(self, count=self.count - self.late)

    @property
    def left_out(self) -> "Matrix":
        """The reads that a prompt's tokens leave out: late ones, and the output projection."""
        return self if self.output else replace(self, count=self.late, reads=Fraction(1))


def step_cost(
    matrices: Sequence[Matrix], vector_bytes: int, kv: Sequence[LayerKV], attention_flops: int, state_bytes: int
) -> StepCost:
    """Return the cost of a step that reads these matrices. Prefill skips the output projection and late matrices.

    matrices: all projections of the network.
    vector_bytes: of norms and other small weights.
    kv: the K/V of all layers.
    attention_flops: per visible cache entry in one layer.
    state_bytes: of a sequence's recurrent state.
    """
    late = [matrix.left_out for matrix in matrices]
    parts = Counter[str]()
    for matrix in matrices:
        if matrix.part:
            parts[matrix.part] += matrix.step_bytes
    return StepCost(
        weight_bytes=sum(matrix.step_bytes for matrix in matrices) + vector_bytes,
        weight_flops=sum(matrix.step_flops for matrix in matrices),
        kv=kv,
        attention_flops_per_entry=attention_flops,
        weight_parts=tuple(parts.items()),
        state_bytes=state_bytes,
        late_bytes=sum(matrix.step_bytes for matrix in late),
        late_flops=sum(matrix.step_flops for matrix in late),
    )


def held_bytes(kv: Sequence[LayerKV], tokens: int) -> int:
    """Return the bytes of all layers' caches for `tokens` entries."""
    return sum(layer.held_bytes(tokens) for layer in kv)


def longest_context(kv: Sequence[LayerKV], room: int, max_entries: int) -> int:
    """Return the most entries, up to `max_entries`, with `held_bytes` of at most `room`; 0 if none."""
    low = 0
    high = max_entries
    while low < high:
        middle = (low + high + 1) // 2
        if held_bytes(kv, middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def attention_flops_per_entry(heads: int, head_dim: int) -> int:
    """Return FLOPs per visible entry in one layer: a multiply-add per head dimension for q·k and for weights·v."""
    return 4 * heads * head_dim


# MLX's quantization modes with float weights and one-byte scales: (bits, group size).
FLOAT_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}


def quantized_bytes(weights: int, bits: int, group_size: int, scale_bytes: int = 2) -> int:
    """Return the bytes of MLX affine storage: `bits` per weight, and a scale and a bias per group.

    weights: their number.
    bits: of a weight.
    group_size: weights that share a scale and a bias.
    scale_bytes: of a scale, and of a bias.
    """
    return weights * bits // 8 + 2 * scale_bytes * weights // group_size


def visible(entries: int, window: int | None) -> int:
    """Return the number of `entries` positions that a query with this window sees."""
    return entries if window is None else min(entries, window)


def visible_by_all(entries: int, rows: int, window: int | None) -> int:
    """Return the sum of `visible` over successive queries: the first of `entries` positions, each next of one more.

    3 rows from entry 5 on: 5 + 6 + 7 = 18 without a window, 5 + 6 + 6 = 17 with a window of 6.
    """
    growing = rows  # queries that see all positions, each one more than the one before
    if window is not None:
        growing = max(0, min(rows, window - entries))
    sum_of_growing = growing * entries + growing * (growing - 1) // 2
    return sum_of_growing + (rows - growing) * (window or 0)


class StepLimit(Struct, frozen=True):
    """The least time of a step, and the part of the machine that needs it."""

    seconds: float
    roof: Roof


def step_limit(
    nbytes: float, flops: float, bytes_per_second: float, flops_per_second: float | None = None
) -> StepLimit:
    """Return the limit of a step that moves `nbytes` and computes `flops`.

    bytes_per_second, flops_per_second: of the machine. Without the latter, arithmetic limits nothing.
    """
    reading_s = nbytes / bytes_per_second
    computing_s = 0.0
    if flops_per_second:
        computing_s = flops / flops_per_second
    if computing_s > reading_s:
        return StepLimit(computing_s, "arithmetic")
    return StepLimit(reading_s, "memory")
