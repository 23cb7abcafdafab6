"""Compiled CPU kernels as nodes of MLX's lazy graph (sources: runtime/native). Absent if not built."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

class Matrix:
    """A projection's arrays, evaluated now, or `later` by `fill`. Raises ValueError for invalid shapes or types."""

    def __init__(
        self,
        data: mx.array,
        scales: mx.array | None,
        biases: mx.array | None,
        bias: mx.array | None,
        bits: int,
        group_size: int,
        mode: str = "affine",
        exact: bool = False,
        later: bool = False,
    ) -> None: ...
    def add_low_rank(self, a: mx.array, scales: mx.array, factors: Sequence[tuple[int, mx.array]]) -> None:
        """Add the products B (scales * A x) to those of the matrix, once. Raises ValueError for shapes that do not fit.

        a: (R, K).
        scales: (R,), float32.
        factors: first row, and B (rows, rank); ranks follow one another.
        """

    @property
    def low_rank_arrays(self) -> list[mx.array]: ...
    @property
    def data(self) -> mx.array: ...
    @property
    def scales(self) -> mx.array | None: ...
    @property
    def biases(self) -> mx.array | None: ...
    @property
    def bias(self) -> mx.array | None: ...

class Rope:
    """A rotation, shared by layers."""

    @property
    def dims(self) -> int: ...

class AttentionPlan:
    """Parameters of a layer's attention."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        rope: Rope | None,
        q_norm: mx.array | None,
        k_norm: mx.array | None,
        norm_eps: float,
        window: int | None,
        softcap: float | None,
        sinks: mx.array | None = None,
        norm_last: bool = False,
        growth: tuple[float, int, int] | None = None,
        v_norm: bool = False,
        parts: int = 3,
        chunked: bool = False,
    ) -> None: ...

class MixerPlan:
    """Parameters of a layer's recurrent mixing. Raises ValueError for inconsistent shapes."""

    def __init__(
        self,
        kind: str,
        heads: int,
        key_heads: int,
        key_dim: int,
        value_dim: int,
        taps: mx.array | None,
        tap_bias: mx.array | None,
        rate: mx.array | None,
        step_bias: mx.array | None,
        skip: mx.array | None,
        norm: mx.array | None,
        norm_first: bool,
        eps: float,
        steps: tuple[float, float],
        most_beta: float = 1.0,
        wkv: Sequence[mx.array] = (),
        gated: bool = True,
        silu: bool = False,
        mixes_values: bool = False,
    ) -> None: ...
    @property
    def state_floats(self) -> int: ...

class ExpertsPlan:
    """The experts of a layer. Raises ValueError for inconsistent shapes."""

    def __init__(
        self,
        router: Matrix,
        gate: Matrix | None,
        up: Matrix,
        down: Matrix,
        active: int,
        normalized: bool,
        activation: str,
        sigmoid: bool = False,
        correction: mx.array | None = None,
        scale: float = 1.0,
        groups: tuple[int, int] = (1, 1),
        router_norm: mx.array | None = None,
        expert_scale: mx.array | None = None,
        residual: bool = True,
        best: int = 2,
        before: bool = False,
    ) -> None: ...

class LayerNorms:
    """Norms of a layer, and a factor of its output; None where it has none."""

    def __init__(
        self,
        input: mx.array | None,
        attention_post: mx.array | None,
        mlp: mx.array | None,
        mlp_post: mx.array | None,
        after_dense: mx.array | None = None,
        before_experts: mx.array | None = None,
        after_experts: mx.array | None = None,
        scalar: mx.array | None = None,
    ) -> None: ...

class LayerPlan:
    """A whole layer's weights. Raises ValueError for inconsistent shapes."""

    def __init__(
        self,
        attention: AttentionPlan | None,
        qkv: Sequence[Matrix],  # into attention: several where their formats differ; or the one into the mixer
        output: Matrix | None,
        gate_up: Matrix | None,
        down: Matrix | None,
        eps: float,
        activation: str,
        experts: ExpertsPlan | None,
        mixer: MixerPlan | None,
        gates: tuple[Matrix | None, Matrix | None],  # of attention, and of `down`
        norms: LayerNorms,
        own_input: tuple[Matrix, Matrix, mx.array] | None = None,
        mixer_ends: tuple[Matrix, Matrix] | None = None,
        curve: tuple[float, float, float, float] | None = None,
    ) -> None: ...

class Packings:
    """Packed K/V codings (runtime/native/core/packed.h). Raises ValueError for unsupported ones."""

    def __init__(self, key_bits: int, key_group: int, value_bits: int, value_group: int) -> None: ...

class Pass:
    """The rows of a pass and their blocks. Raises ValueError for inconsistent tables and slabs."""

    def __init__(
        self,
        counts: list[int],
        offsets: list[int],
        prefill: list[bool],
        tables: Sequence[Sequence[Sequence[int]]],
        slabs: list[list[mx.array]],
        packings: Packings = ...,
        head_dims: Sequence[int] = (),
    ) -> None: ...

class Peer:
    """The connection to the only other rank: a stream socket, which it closes. rank: of this end, 0 or 1."""

    def __init__(self, socket: int, rank: int) -> None: ...
    def all_sum(self, x: mx.array) -> mx.array:
        """Return x plus the other rank's. Raises ValueError for other types than float32, int32 and uint32."""

    def all_gather(self, x: mx.array) -> mx.array:
        """Return rank 0's x (n, ...) and rank 1's behind it: (2n, ...)."""

    def gather_columns(self, x: mx.array, others: int) -> mx.array:
        """Return x (..., n) and the other rank's (..., others) beside it, on rank 0; x on the other, which sends it."""

    def send(self, x: mx.array) -> mx.array:
        """Return x, sent once it is evaluated."""

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, stream: mx.Stream) -> mx.array:
        """Return an array of the other rank, for which `stream` waits."""

class StreamingRead:
    """Filled memory, read by `threads` threads in 1, 2, 4 or 8 `streams` each."""

    def __init__(self, bytes: int, threads: int, streams: int) -> None: ...
    @property
    def bytes(self) -> int: ...
    def one_pass(self) -> float: ...

def make_rope(periods: mx.array, amplitude: float) -> Rope: ...
def embed(tokens: mx.array, w: Matrix, first: int | None = None) -> mx.array: ...
def linear(
    x: mx.array,
    w: Matrix,
    norm: mx.array | None = None,
    eps: float = 0.0,
    residual: mx.array | None = None,
    activation: str = "",
    rounding: int = 16,
    curve: tuple[float, float, float, float] | None = None,
) -> mx.array: ...
def experts(x: mx.array, norm: mx.array, eps: float, plan: ExpertsPlan) -> mx.array: ...
def expert_linear(x: mx.array, indices: mx.array, w: Matrix, experts: int) -> mx.array: ...
def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array: ...
def layer_norm(x: mx.array, weight: mx.array, bias: mx.array | None, eps: float) -> mx.array: ...
def free_unused_slabs() -> None: ...
def fill(matrices: Sequence[Matrix]) -> int: ...
def unpack_blocks(kind: str, blocks: Any, codes: Any, scales: Any, biases: Any) -> tuple[bool, bool]: ...
def grow(buffer: mx.array, capacity: int) -> mx.array: ...
def attend(
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    offset: int,
    plan: AttentionPlan,
    first: int = 0,
    prefill: bool = True,
) -> mx.array: ...
def layers(
    x: mx.array,
    keys: list[mx.array],
    values: list[mx.array],
    offset: int,
    plans: list[LayerPlan],
    firsts: Sequence[int] = (),
    prefill: bool = True,
    rounding: int = 16,
    wanted: int = -1,
    peer: Peer | None = None,
) -> mx.array: ...
def rotate_heads(x: mx.array, rope: Rope, offset: int) -> mx.array: ...
def attend_heads(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    prefill: bool,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array: ...
def mix_pass(
    x: mx.array, states: Sequence[mx.array], counts: Sequence[int], plan: MixerPlan
) -> tuple[mx.array, list[mx.array]]: ...
def recurrence(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array | None, state: mx.array
) -> tuple[mx.array, mx.array]: ...
def convolve(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array: ...
def gated(gate: mx.array, up: mx.array | None, activation: str) -> mx.array: ...
def attend_pass(
    qkv: mx.array, rows: Pass, group: int, index: int, plan: AttentionPlan, appends_only: bool = False
) -> mx.array: ...
def layers_pass(
    x: mx.array,
    rows: Pass,
    places: list[tuple[int, int]],
    plans: list[LayerPlan],
    states: Sequence[Sequence[mx.array]] = (),
    kept: int = 0,
    rounding: int = 16,
    wanted: int = -1,
    peer: Peer | None = None,
) -> list[mx.array]: ...
def slab(shape: Sequence[int], dtype: mx.Dtype) -> mx.array: ...
def cut_block(block: mx.array, entries: int, packings: Packings, head_dim: int) -> mx.array: ...
def write_block(slab: mx.array, block: int, entries: mx.array) -> None: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str) -> bool: ...
def threads() -> int: ...
def measure_regions(on: bool) -> None: ...
def region_times() -> dict[str, tuple[int, int, int, int]]: ...
def set_threads(threads: int) -> None: ...
def sample(logits: mx.array, rules: Sequence[tuple[float, int, float, float]], keys: Sequence[int]) -> mx.array: ...
