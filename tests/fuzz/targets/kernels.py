"""The Python bindings of the native kernels: any shape, type and stride gives an array or a ValueError.

Resulting arrays are evaluated, so that invalid reads or writes can kill the process.
"""

import math
import random
from pathlib import Path
from typing import Any

import mlx.core as mx

from headrace.runtime.ops import native

_DTYPES = (
    mx.float32,
    mx.float32,
    mx.float32,
    mx.float16,
    mx.bfloat16,
    mx.uint32,
    mx.uint8,
    mx.int32,
    mx.bool_,
    mx.int64,
    mx.complex64,
)
_SIZES = (0, 1, 2, 3, 4, 7, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 128, 160, 256)
_ODD = (
    -(2**31),
    -129,
    -128,
    -17,
    -2,
    -1,
    0,
    1,
    2,
    3,
    5,
    16,
    31,
    32,
    64,
    100,
    127,
    128,
    129,
    255,
    256,
    1000,
    2**20,
    2**31 - 1,
)
_FLOATS = (0.0, -0.0, 1e-5, 1.0, -1.0, 0.5, 1e30, -1e30, float("inf"), float("-inf"), float("nan"), 1e-45)
_ACTIVATIONS = ("silu", "gelu", "clamped", "sigmoid", "relu2", "xielu", "x")
_REFUSED = (ValueError, TypeError, RuntimeError, OverflowError, MemoryError)

_LARGEST = 1 << 21  # numbers of an array


def array(chance: random.Random, shape: Any, dtype: mx.Dtype | None = None) -> mx.array:
    """Return an array of about this shape, in any layout."""
    shape = list(shape)
    odd = chance.random()
    if odd < 0.08 and shape:
        shape[chance.randrange(len(shape))] = chance.choice(_SIZES)
    elif odd < 0.1:
        shape = [chance.choice(_SIZES[:6]) for _ in range(chance.randrange(6))]
    if math.prod(shape) > _LARGEST:  # by one odd size among others: memory that no kernel asked for
        shape = [min(size, 64) for size in shape]
    dtype = dtype if dtype is not None and chance.random() < 0.93 else chance.choice(_DTYPES)
    layout = chance.randrange(8)
    if layout == 0 and shape:
        made = _filled(chance, [*shape[:-1], 2 * shape[-1]], dtype)[..., ::2]
    elif layout == 1 and len(shape) > 1:
        made = _filled(chance, [*shape[:-2], shape[-1], shape[-2]], dtype).swapaxes(-1, -2)
    elif layout == 2:
        made = mx.broadcast_to(_filled(chance, [1] * len(shape), dtype), shape)
    elif layout == 3 and shape:
        made = _filled(chance, [shape[0] + 3, *shape[1:]], dtype)[3:]
    else:
        made = _filled(chance, shape, dtype)
    return made


def _filled(chance: random.Random, shape: Any, dtype: mx.Dtype) -> mx.array:
    key = mx.random.key(chance.getrandbits(32))
    if dtype in (mx.uint32, mx.uint8, mx.int32, mx.int64):
        small = chance.random() < 0.5
        return mx.random.randint(0, 9 if small else 2**31 - 1, shape, key=key).astype(dtype)
    made = mx.random.normal(shape, key=key)
    if chance.random() < 0.15:
        made = made * chance.choice(_FLOATS)
    return made.astype(dtype)


def _number(chance: random.Random, usual: int) -> int:
    return usual if chance.random() < 0.85 else chance.choice(_ODD)


def _matrix(chance: random.Random, rows: int, columns: int) -> Any:
    """Return a kernel matrix of any format, some with an adapter's products; raises ValueError if refused."""
    made = _plain_matrix(chance, rows, columns)
    for _ in range(chance.choice((0, 0, 0, 0, 0, 0, 1, 1, 2)) if rows else 0):  # a second time is refused
        ranks = [chance.choice((1, 2, 8, 16, 17)) for _ in range(chance.choice((1, 1, 2, 3, 0)))]
        a = array(chance, (sum(ranks), columns), chance.choice(_DTYPES[2:5]))
        scales = array(chance, (sum(ranks),), mx.float32)
        factors = []
        for rank in ranks:
            count = chance.choice((rows, rows, max(1, rows // 2), 1))
            first = _number(chance, chance.randrange(rows - count + 1))
            factors.append((first, array(chance, (count, rank), chance.choice(_DTYPES[2:5]))))
        made.add_low_rank(a, scales, factors)
    return made


def _plain_matrix(chance: random.Random, rows: int, columns: int) -> Any:
    bias = array(chance, (rows,)) if chance.random() < 0.3 else None
    kind = chance.randrange(4)
    exact = chance.random() < 0.3
    if kind == 0:
        data = array(chance, (rows, columns), chance.choice(_DTYPES[2:5]))
        return native.kernels.Matrix(data, None, None, bias, _number(chance, 0), _number(chance, 0), "affine", exact)
    if kind == 1:
        mode, bits, group = chance.choice((("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)))
        data = array(chance, (rows, columns * bits // 32), mx.uint32)
        scales = array(chance, (rows, columns // group), mx.uint8)
        return native.kernels.Matrix(
            data, scales, None, bias, _number(chance, bits), _number(chance, group), mode, exact
        )
    bits = chance.choice((2, 3, 4, 5, 6, 8))
    group = chance.choice((16, 32, 64, 128))
    kind_of = chance.choice(_DTYPES[2:5])
    data = array(chance, (rows, columns * bits // 32), mx.uint32)
    scales, biases = (array(chance, (rows, columns // group), kind_of) for _ in range(2))
    mode = "affine" if chance.random() < 0.97 else chance.choice(("", "mxfp4", "x"))
    return native.kernels.Matrix(data, scales, biases, bias, _number(chance, bits), _number(chance, group), mode, exact)


def _plan(chance: random.Random, heads: int, kv_heads: int, dim: int) -> Any:
    rope = None
    if chance.random() < 0.6:
        rope = native.kernels.make_rope(
            array(chance, (chance.choice((dim // 2, dim // 4, 1, dim)),), mx.float32),
            chance.choice((1.0, 0.5, *_FLOATS)),
        )
    together = chance.random() < 0.2
    sizes = [heads * dim, kv_heads * dim] if together else [dim, dim]
    norms = [array(chance, (size,), mx.float32) if chance.random() < 0.3 else None for size in sizes]
    window = chance.choice((None, None, 1, 16, 100, *_ODD))
    cap = chance.choice((None, None, 50.0, *_FLOATS))
    sinks = array(chance, (heads,), mx.float32) if chance.random() < 0.2 else None
    return native.kernels.AttentionPlan(
        _number(chance, heads), _number(chance, kv_heads), _number(chance, dim), chance.choice((dim**-0.5, *_FLOATS)),
        rope, norms[0], norms[1], chance.choice((1e-5, 0.0)), window, cap, sinks, chance.random() < 0.1,
        chance.choice((None, None, (0.3, 16, 1), (chance.choice(_FLOATS), chance.choice(_ODD), chance.choice(_ODD)))),
        chance.random() < 0.2, _number(chance, chance.choice((3, 3, 2, 1))), chance.random() < 0.2,
    )  # fmt: skip


def _experts(chance: random.Random, rows: int, columns: int) -> Any:
    """Return the plan of a mixture, with any of its options."""
    count = chance.choice((1, 2, 5, 6))
    active = chance.choice((1, 2, 3, *_ODD))
    router, gate, up, down = (
        _matrix(chance, count * many, deep)
        for many, deep in ((1, columns), (rows, columns), (rows, columns), (columns, rows))
    )
    activation = chance.choice(_ACTIVATIONS)
    return native.kernels.ExpertsPlan(
        router, None if (activation == "relu2") != (chance.random() < 0.05) else gate, up, down, active,
        chance.random() < 0.5, activation, chance.random() < 0.5, _maybe(chance, count), chance.choice((1.0, *_FLOATS)),
        chance.choice(((1, 1), (1, 1), (2, 1), (3, 2), (chance.choice(_ODD), chance.choice(_ODD)))),
        _maybe(chance, columns), _maybe(chance, count), chance.random() < 0.8, _number(chance, chance.choice((1, 2))),
        chance.random() < 0.3,
    )  # fmt: skip


def _maybe(chance: random.Random, *shape: int) -> mx.array | None:
    return array(chance, shape, mx.float32) if chance.random() < 0.4 else None


def _mixer(chance: random.Random) -> tuple[Any, int, int]:
    """Return a mixer's plan, the numbers of a projected row, and those of its result."""
    kind = chance.choice(("delta", "kda", "ssm", "conv", "scan", "wkv", "shift", "x"))
    if kind in ("scan", "wkv", "shift"):
        return _unconvolved_mixer(chance, kind)
    keys, dim, rows, width = (chance.choice(of) for of in ((1, 2), (16, 32, 48), (1, 5, 16, 33), (1, 2, 4)))
    heads = keys * chance.choice((1, 2, 3))
    if kind == "conv":
        heads = 1
        keys = 0
        dim = 0
    inner = heads * rows
    decays = heads * (dim if kind == "kda" else 1)
    channels = 2 * keys * dim + inner
    recurs = kind != "conv" or chance.random() < 0.1
    vectors = [
        array(chance, (size,), mx.float32) if recurs and chance.random() < 0.97 else None for size in (heads, decays)
    ]
    norm = chance.choice((None, (rows,), (inner,), (keys or 1, inner // (keys or 1)), ()))
    gated = chance.random() < (0.5 if kind == "conv" else 0.97)
    plan = native.kernels.MixerPlan(
        kind, *(_number(chance, size) for size in (heads, keys, dim, rows)),
        array(chance, (width, channels), mx.float32), _maybe(chance, channels), *vectors, _maybe(chance, heads),
        None if norm is None else array(chance, norm, mx.float32), kind in ("delta", "kda"), chance.choice((1e-5, 0.0)),
        chance.choice(((0.0, float("inf")), (0.1, 0.9), (chance.choice(_FLOATS), chance.choice(_FLOATS)))),
        chance.choice((1.0, 2.0, *_FLOATS)), [], gated, not gated and chance.random() < 0.5,
    )  # fmt: skip
    gates = {"delta": heads, "kda": heads, "ssm": 0}
    if kind == "conv":
        return plan, (3 if gated else 1) * rows, inner
    projected = channels + inner + gates[kind] + decays
    return plan, projected, inner


def _unconvolved_mixer(chance: random.Random, kind: str) -> tuple[Any, int, int]:
    """Return the same of a scan, or of RWKV-7's recurrence or shift."""
    heads = chance.choice((1, 2, 67))
    dim = chance.choice((1, 16, 20, 48))
    taps: mx.array | None = None
    rate: mx.array | None = None
    skip: mx.array | None = None
    wkv: list[mx.array] = []
    mixes_values = chance.random() < (0.5 if kind == "wkv" else 0.03)
    if kind == "shift":
        sizes = heads, 0, 0, dim
        projected = dim
        taps = _maybe(chance, heads) if chance.random() < 0.1 else array(chance, (heads, dim), mx.float32)
    elif kind == "scan":
        sizes = heads, 1, dim, 1
        projected = 3 * heads + 2 * dim
        rate = _maybe(chance, heads) if chance.random() < 0.1 else array(chance, (heads, dim), mx.float32)
        skip = _maybe(chance, heads)
    else:
        sizes = heads, heads, dim, dim
        projected = (8 if mixes_values else 6) * heads * dim
        wkv = [array(chance, (heads, dim), mx.float32) for _ in range(_number(chance, 5) % 7)]
    numbers = [_number(chance, size) for size in sizes]
    plan = native.kernels.MixerPlan(
        kind,
        *numbers,
        taps,
        None,
        rate,
        None,
        skip,
        None,
        False,
        chance.choice((1e-5, 0.0)),
        (0.0, 1.0),
        1.0,
        wkv,
        mixes_values=mixes_values,
    )
    return plan, projected, heads * (1 if kind == "scan" else dim)


class _Kernels:
    """An input is a seed: MLX arrays cannot be compared or stored, and are cheap to make."""

    def __init__(self, folder: Path) -> None:
        assert native.status().available

    def make(self, chance: random.Random) -> int:
        return chance.getrandbits(48)

    def run(self, given: int) -> None:
        chance = random.Random(given)
        try:
            made = self.call(chance)
            mx.eval(made)
        except _REFUSED:
            return
        if chance.random() < 0.01:
            mx.clear_cache()

    def call(self, chance: random.Random) -> Any:
        raise NotImplementedError


class Bindings(_Kernels):
    """Projections, norms, embeddings, experts, token selection, buffers, attention over one sequence."""

    def call(self, chance: random.Random) -> Any:
        kernels = native.kernels
        rows = chance.choice(_SIZES[1:])
        columns = chance.choice((32, 64, 96, 128, 160, 256, *_SIZES))
        lead = [chance.choice((1, 1, 2, 3, 17, 0)) for _ in range(chance.choice((2, 2, 2, 1, 0, 3)))]
        x = array(chance, [*lead, columns], mx.float32)
        match chance.randrange(10):
            case 0 | 1 | 2:
                norm = array(chance, (columns,), mx.float32) if chance.random() < 0.5 else None
                residual = array(chance, [*lead, rows], mx.float32) if chance.random() < 0.3 else None
                curve = tuple(chance.choice(_FLOATS) for _ in range(4)) if chance.random() < 0.3 else None
                return kernels.linear(
                    x, _matrix(chance, rows, columns), norm, chance.choice((1e-5, *_FLOATS)), residual,
                    chance.choice(("", "", *_ACTIVATIONS)), chance.random() < 0.3, curve,
                )  # fmt: skip
            case 3:
                weight = array(chance, (columns,), mx.float32)
                eps = chance.choice((1e-5, *_FLOATS))
                if chance.random() < 0.5:
                    return kernels.layer_norm(x, weight, _maybe(chance, columns), eps)
                return kernels.rms_norm(x, weight, eps)
            case 4:
                tokens = array(chance, lead, mx.int32 if chance.random() < 0.5 else mx.uint32)
                if chance.random() < 0.3:
                    tokens = tokens - 5
                return kernels.embed(tokens, _matrix(chance, rows, columns))
            case 5:
                norm = array(chance, (columns,), mx.float32)
                return kernels.experts(x, norm, 1e-5, _experts(chance, rows, columns))
            case 6:
                batch = chance.choice((1, 2, 5))
                logits = array(chance, (batch, rows), mx.float32)
                rules = [
                    (
                        chance.choice((0.0, 1.0, 0.7, *_FLOATS)),
                        chance.choice((0, 5, *_ODD)),
                        chance.choice((1.0, 0.9, *_FLOATS)),
                        chance.choice((0.0, 0.05, *_FLOATS)),
                    )
                    for _ in range(chance.choice((0, batch, batch, batch, batch + 1)))
                ]
                keys = [chance.getrandbits(64) for _ in range(len(rules) + (chance.random() < 0.1))]
                return kernels.sample(logits, rules, keys)
            case 7:
                shape = [_number(chance, size) for size in (2, 1, 2, 2, 128, 16)][: chance.choice((6, 6, 4, 0))]
                if math.prod(shape) in range(_LARGEST, 2**40):  # memory that a sound caller may ask for
                    shape = [16, 16]
                return kernels.slab(shape, chance.choice(_DTYPES))
            case 8:
                buffer = array(chance, (1, 2, chance.choice(_SIZES), 16), chance.choice(_DTYPES[2:5]))
                return kernels.grow(buffer, chance.choice((*_SIZES, -1)))
            case _:
                kv_heads = chance.choice((1, 2, 3))
                dim = chance.choice((16, 32, 64, 48))
                length = chance.choice((1, 2, 16, 17, 130))
                heads = kv_heads * chance.choice((1, 2, 3))
                capacity = chance.choice((128, 256, 300))
                offset = chance.choice((0, 1, 120, *_ODD))
                first = _number(chance, 0)
                kind = chance.choice(_DTYPES[2:5])
                cache = [array(chance, (1, kv_heads, capacity, dim), kind) for _ in range(2)]
                mx.eval(cache)
                qkv = array(chance, (1, length, (heads + 2 * kv_heads) * dim), mx.float32)
                return kernels.attend(
                    qkv, *cache, offset, _plan(chance, heads, kv_heads, dim), first, chance.random() < 0.5
                )


class Passes(_Kernels):
    """Attention of several sequences with invalid counts, offsets, tables and slabs."""

    def call(self, chance: random.Random) -> Any:
        kernels = native.kernels
        kv_heads = chance.choice((1, 2))
        dim = chance.choice((16, 32, 64))
        layers = chance.choice((1, 2))
        heads = kv_heads * chance.choice((1, 2))
        kind = chance.choice(_DTYPES[2:5])
        groups = chance.choice((1, 1, 2))
        slabs = [
            [
                self._slab(chance, chance.choice((1, 2, 3)), layers, kv_heads, dim, kind)
                for _ in range(chance.choice((1, 2)))
            ]
            for _ in range(groups)
        ]
        held = sum(slab.shape[0] if slab.ndim else 0 for slab in slabs[0])
        sequences = chance.choice((1, 2, 3))
        counts = [_number(chance, chance.choice((1, 1, 3, 16, 140))) for _ in range(sequences)]
        offsets = [_number(chance, chance.choice((0, 5, 127, 128, 200))) for _ in range(sequences)]
        if chance.random() < 0.05:
            counts.append(1)
        tables = [
            [self._table(chance, held, count, offset) for _ in range(groups)]
            for count, offset in zip(counts, offsets, strict=False)
        ]
        entries = array(chance, (layers, 2, kv_heads, chance.choice((1, 5, 128)), dim), kind)
        if chance.random() < 0.2:
            return kernels.write_block(slabs[0][0], _number(chance, 0), entries)
        made = kernels.Pass(counts, offsets, [chance.random() < 0.5 for _ in offsets], tables, slabs)
        qkv = array(chance, (1, _number(chance, max(0, sum(counts)) % 1000), (heads + 2 * kv_heads) * dim), mx.float32)
        plan = _plan(chance, heads, kv_heads, dim)
        if chance.random() < 0.5:
            return kernels.attend_pass(
                qkv, made, _number(chance, 0), _number(chance, layers - 1), plan, chance.random() < 0.2
            )
        return self._layers(chance, made, counts, plan, (heads, kv_heads, dim))

    def _layers(
        self, chance: random.Random, made: Any, counts: list[int], attends: Any, heads: tuple[int, int, int]
    ) -> Any:
        """Return what a layer of any parts makes of the rows of a pass."""
        width = chance.choice((32, 64))
        inner = chance.choice((32, 96))
        rows = max(0, sum(counts)) % 1000
        own = chance.choice((0, 0, 32))
        states = []
        ends = None
        plan = attends
        projected = (heads[0] + 2 * heads[1]) * heads[2]
        mixed = heads[0] * heads[2]
        mixer = None
        if (recurs := chance.random()) < 0.5:
            mixer, into, out = _mixer(chance)
            states = [[array(chance, (mixer.state_floats,), mx.float32) for _ in counts]]
            if recurs < 0.1:
                ends = _matrix(chance, into, width), _matrix(chance, width, out)
            else:
                plan = None
                projected = into
                mixed = out
        feeds = chance.random() < 0.8
        activation = chance.choice(_ACTIVATIONS)
        double = 1 if activation == "relu2" else 2
        gate = _matrix(chance, mixed, width) if chance.random() < 0.2 else None
        row = _matrix(chance, 1, width) if chance.random() < 0.2 else None
        norms = [_maybe(chance, width) for _ in range(7)]
        inputs = (_matrix(chance, own, width), _matrix(chance, width, own), array(chance, (width,), mx.float32))
        layer = native.kernels.LayerPlan(
            plan, self._inputs(chance, projected, width), _matrix(chance, width, mixed),
            _matrix(chance, double * inner, width) if feeds else None, _matrix(chance, width, inner) if feeds else None,
            1e-5, activation, _experts(chance, inner, width) if chance.random() < 0.3 else None, mixer, (gate, row),
            native.kernels.LayerNorms(*norms, _maybe(chance, 1)), inputs if own else None, ends,
        )  # fmt: skip
        x = array(chance, (1, _number(chance, rows), width + own), mx.float32)
        place = (_number(chance, 0), _number(chance, 0)) if plan is not None else (-1, -1)
        kept, wanted = (_number(chance, chance.choice((0, 0, min(1, rows), rows))) for _ in range(2))
        return native.kernels.layers_pass(
            x, made, [place], [layer], states, kept, chance.random() < 0.3, chance.choice((-1, wanted))
        )

    def _inputs(self, chance: random.Random, projected: int, width: int) -> list[Any]:
        """Return the matrices into attention or a mixer: mostly one, else two with `projected` rows together."""
        if chance.random() < 0.7:
            return [_matrix(chance, projected, width)]
        first = _number(chance, projected // 2)
        return [_matrix(chance, rows, width) for rows in (first, projected - first) if chance.random() < 0.95]

    def _slab(
        self, chance: random.Random, blocks: int, layers: int, kv_heads: int, dim: int, kind: mx.Dtype
    ) -> mx.array:
        if chance.random() < 0.1:
            made = array(chance, (blocks, layers, 2, kv_heads, 128, dim), kind)
            mx.eval(made)
            return made
        return native.kernels.slab([blocks, layers, 2, kv_heads, 128, dim], kind)

    def _table(self, chance: random.Random, held: int, count: int, offset: int) -> list[int]:
        needed = -(-max(0, min(count + offset, 2000)) // 128)
        table = [chance.randrange(held) if held else 0 for _ in range(needed)]
        if table and chance.random() < 0.15:
            table[chance.randrange(len(table))] = chance.choice((-1, -1, held, *_ODD))
        return table[:-1] if chance.random() < 0.05 else table


class Mixers(_Kernels):
    """Recurrent mixing of several sequences with states of any shape."""

    def call(self, chance: random.Random) -> Any:
        plan, projected, _ = _mixer(chance)
        counts = [_number(chance, chance.choice((1, 2, 17))) for _ in range(chance.choice((1, 2, 3)))]
        x = array(chance, (1, max(0, sum(counts)) % 1000, projected), mx.float32)
        states = [array(chance, (plan.state_floats,), mx.float32) for _ in counts]
        y, after = native.kernels.mix_pass(x, states, counts, plan)
        return [y, *after]
