"""Passes over many sequences: each result equals that of the sequence alone, for any blocks, and the reference's.

On the native kernels outputs and entries are compared as bytes, on every instruction set of this machine and on one to
three threads; on stock MLX, and between the two, within rounding.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.runtime.ops import (
    BLOCK,
    AttentionSpec,
    KVKind,
    KVStore,
    LayersNode,
    Ops,
    Pass,
    Phase,
    Projections,
    Rope,
    SequenceRows,
    native,
    reference,
)
from headrace.runtime.ops.kv_format import FLOAT16, FLOAT32, FORMATS, KVFormat, plain
from tests.support.alone import new_cache
from tests.support.kernels import INSTRUCTION_SETS, KERNELS, name_of, on_instruction_set, tolerance
from tests.support.tiny import load_decoder, quantize_model, write_model

needs_kernels = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")
SPEC = AttentionSpec(4, 2, 32, 0.2, Rope(32, 10_000 ** (mx.arange(0, 32, 2) / 32)))
WINDOWED = replace(SPEC, window=150, sinks=mx.array([0.5, -1.0, 3.0, 0.0]))
SPECS = [SPEC, WINDOWED, SPEC, WINDOWED]  # of the layers


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


@dataclass(eq=False)
class Sequence:
    """Blocks and new entries of one sequence, with `length` entries so far."""

    tables: list[list[int]]
    length: int = 0
    outputs: list[mx.array] = field(default_factory=list)


class Blocks:
    """A store and its free blocks, allocated at random."""

    def __init__(self, ops: Ops, store: KVStore, seed: int, slab: int = 3) -> None:
        self.ops, self.store, self._draw, self._slab = ops, store, random.Random(seed), slab
        self._free: list[list[int]] = [[] for _ in store.groups]

    def new(self) -> Sequence:
        return Sequence([[] for _ in self.store.groups])

    def rows(self, sequence: Sequence, count: int, phase: Phase) -> SequenceRows:
        """Make room for `count` more entries."""
        for number, (group, table) in enumerate(zip(self.store.groups, sequence.tables, strict=True)):
            while len(table) * BLOCK < sequence.length + count:
                table.append(self._take(number))
            if group.kind.window is not None:
                gone = max(0, sequence.length - group.kind.window + 1) // BLOCK
                self._free[number] += [block for block in table[:gone] if block >= 0]
                table[:gone] = [-1] * gone
        return SequenceRows(count, sequence.length, phase, sequence.tables)

    def entries(self, sequence: Sequence, layer: int) -> mx.array:
        """Return (2, Hkv, remaining entries, D) of a layer; nothing for packed ones."""
        if self.store.format.packed:
            return mx.zeros(1)
        group, index = self.store.locations[layer]
        left = [block for block in sequence.tables[group] if block >= 0]
        whole = mx.concatenate([self.store.block(group, block)[index] for block in left], axis=2)
        return whole[:, :, : sequence.length - (len(sequence.tables[group]) - len(left)) * BLOCK]

    def _take(self, number: int) -> int:
        group = self.store.groups[number]
        free = self._free[number]
        if not free:
            free += range(group.blocks, group.blocks + self._slab)
            group.slabs.append(self.ops.slab(self._slab, group.block_shape, self.store.format.dtype))
            junk = 255 if self.store.format.packed else float("nan")  # scales of these bytes are NaN, too
            for block in free:  # whoever reads too far will notice
                self.ops.write_block(
                    self.store, number, block, mx.full(group.block_shape, junk, self.store.format.dtype)
                )
        return free.pop(self._draw.randrange(len(free)))


def new_store(kv: KVFormat) -> KVStore:
    return KVStore([KVKind(spec.window, SPEC.kv_heads, SPEC.head_dim) for spec in SPECS], kv)


@dataclass(frozen=True)
class Step:
    """A sequence's rows in one pass."""

    count: int
    phase: Phase


def plan(draw: random.Random, length: int) -> list[Step]:
    """Prompts in chunks, then decode rows, some of them several at once."""
    steps: list[Step] = []
    while (left := length - sum(step.count for step in steps)) > 0:
        steps.append(Step(min(left, draw.choice([1, 60, 129, 300])), "prefill"))
    return steps + [Step(draw.choice([1, 1, 1, 4]), "decode") for _ in range(draw.randrange(1, 5))]


def projections(identity: int, layer: int, position: int, count: int) -> mx.array:
    """Return equal projections for equal sequence, layer and positions, for any chunks."""
    return _all_projections(identity, layer)[:, position : position + count]


@cache
def _all_projections(identity: int, layer: int) -> mx.array:
    width = (SPEC.heads + 2 * SPEC.kv_heads) * SPEC.head_dim
    drawn = 2 * mx.random.normal((1, 800, width), key=mx.random.key(100 * identity + layer))
    mx.eval(drawn)
    return drawn


def run(blocks: Blocks, work: dict[int, list[Step]], together: bool) -> dict[int, list[mx.array]]:
    """Return every sequence's outputs per layer, then its entries: in shared passes or one after another."""
    sequences = {identity: blocks.new() for identity in work}
    found: dict[int, list[list[mx.array]]] = {identity: [[] for _ in SPECS] for identity in work}
    left = {identity: list(steps) for identity, steps in work.items()}
    while any(left.values()):
        busy = [identity for identity, steps in left.items() if steps]
        now = {identity: left[identity].pop(0) for identity in (busy if together else busy[:1])}
        the_pass = Pass([blocks.rows(sequences[i], step.count, step.phase) for i, step in now.items()], blocks.store)
        for layer, spec in enumerate(SPECS):
            qkv = [projections(i, layer, sequences[i].length, step.count) for i, step in now.items()]
            out = blocks.ops.attend_pass([mx.concatenate(qkv, axis=1)], the_pass, layer, spec)
            mx.eval(out)
            row = 0
            for identity, step in now.items():
                found[identity][layer].append(out[:, row : row + step.count])
                row += step.count
        for identity, step in now.items():
            sequences[identity].length += step.count
    return {
        identity: [mx.concatenate(outs, axis=1) for outs in layers]
        + [blocks.entries(sequences[identity], layer) for layer in range(len(SPECS))]
        for identity, layers in found.items()
    }


def as_bytes(arrays: dict[int, list[mx.array]]) -> dict[int, list[bytes]]:
    def raw(array: mx.array) -> bytes:
        return bytes(memoryview(mx.contiguous(array.view(mx.uint8))))  # type: ignore[arg-type]

    return {identity: [raw(array) for array in held] for identity, held in arrays.items()}


def difference(ours: mx.array, theirs: mx.array) -> float:
    ours = ours.astype(mx.float32)
    theirs = theirs.astype(mx.float32)
    return float((mx.abs(ours - theirs).max() / mx.abs(theirs).max()).item())


def workload(seed: int, sequences: int) -> dict[int, list[Step]]:
    draw = random.Random(seed)
    return {identity: plan(draw, draw.choice([1, 5, 127, 128, 400, 700])) for identity in range(sequences)}


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("kv", [FLOAT32, *FORMATS], ids=lambda kv: kv.name)
@pytest.mark.usefixtures("instruction_set")
def test_sequences_alone_equal_sequences_in_a_batch_for_any_blocks(kv: KVFormat) -> None:
    for seed, (count, threads) in enumerate([(2, 1), (5, 2), (16, 3)]):
        work = workload(seed, count)
        native.set_threads(1)
        alone = as_bytes(run(Blocks(native, new_store(kv), seed=99, slab=64), work, together=False))
        native.set_threads(threads)
        assert as_bytes(run(Blocks(native, new_store(kv), seed), work, together=True)) == alone


@needs_kernels
def test_blocks_equal_contiguous_buffers() -> None:
    """A pass over blocks has the bits of contiguous buffers."""
    blocks = Blocks(native, new_store(FLOAT16), 1)
    steps = [Step(300, "prefill"), Step(1, "decode"), Step(6, "decode")]
    found = run(blocks, {7: steps}, together=True)[7]
    keys, values = (mx.zeros((1, SPEC.kv_heads, 400, SPEC.head_dim), mx.float16) for _ in range(2))
    outs = []
    done = 0
    for step in steps:
        qkv = projections(7, 0, done, step.count)
        out, keys, values = native.attend([qkv], keys, values, done, SPEC, 0, step.phase)
        mx.eval(out)
        outs.append(out)
        done += step.count
    assert mx.array_equal(found[0], mx.concatenate(outs, axis=1))
    assert mx.array_equal(found[len(SPECS)], mx.concatenate([keys, values])[:, :, :done])


@pytest.mark.sampled
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=["f32", "f16"])
def test_kernels_over_blocks_match_the_reference(ops: Ops, dtype: mx.Dtype) -> None:
    work = workload(5, 3)
    theirs = run(Blocks(reference, new_store(plain(dtype)), 1), work, together=False)
    ours = run(Blocks(ops, new_store(plain(dtype)), 2), work, together=True)
    for identity, arrays in ours.items():
        for mine, expected in zip(arrays, theirs[identity], strict=True):
            assert difference(mine, expected) < (2e-5 if dtype == mx.float32 else 4e-3)


@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
def test_sequences_share_a_prefix_and_a_copied_block(ops: Ops) -> None:
    store = KVStore([KVKind(None, SPEC.kv_heads, SPEC.head_dim)], FLOAT16)
    blocks = Blocks(ops, store, 3)

    def appended(sequence: Sequence, identity: int, count: int, phase: Phase) -> mx.array:
        the_pass = Pass([blocks.rows(sequence, count, phase)], store)
        out = ops.attend_pass([projections(identity, 0, sequence.length, count)], the_pass, 0, SPEC)
        mx.eval(out)
        sequence.length += count
        return out

    parent = blocks.new()
    alone = blocks.new()
    for sequence in (parent, alone):
        appended(sequence, 1, 200, "prefill")
    child = blocks.new()
    appended(child, 1, 1, "prefill")  # for a block of its own, which the copy goes into
    (own,), child.length = child.tables[0], 200
    ops.write_block(store, 0, own, store.block(0, parent.tables[0][1])[..., :72, :])
    child.tables[0][:] = [parent.tables[0][0], own]
    appended(parent, 2, 100, "prefill")  # goes on otherwise
    expected = [appended(alone, 3, count, "decode") for count in (1, 100, 1)]
    for count, theirs in zip((1, 100, 1), expected, strict=True):
        assert mx.array_equal(appended(child, 3, count, "decode"), theirs)


@pytest.mark.parametrize("ops", KERNELS[:2], ids=name_of)
def test_invalid_block_tables_are_refused(ops: Ops) -> None:
    store = KVStore([KVKind(None, SPEC.kv_heads, SPEC.head_dim)], FLOAT16)
    group = store.groups[0]
    group.slabs.append(ops.slab(2, group.block_shape, mx.float16))
    qkv = mx.zeros((1, 1, 8 * SPEC.head_dim))

    def attended(offset: int, table: list[int]) -> None:
        mx.eval(ops.attend_pass([qkv], Pass([SequenceRows(1, offset, "decode", [table])], store), 0, SPEC))

    attended(200, [1, 0])
    with pytest.raises(ValueError, match="too short"):
        attended(256, [1, 0])
    with pytest.raises(ValueError, match="block"):
        attended(200, [1, 2])
    with pytest.raises(ValueError, match="lacks a block"):
        attended(200, [-1, 0])
    with pytest.raises(ValueError, match="block"):
        ops.write_block(store, 0, 2, mx.zeros(group.block_shape, mx.float16))


@pytest.mark.skipif(not native.status().available, reason="of the kernels")
def test_invalid_slabs_are_refused() -> None:
    entries = mx.zeros((1, 2, 1, 1, 16), mx.float16)
    for shape in ((), (3,), (1, 1, 2, 1, 128)):
        slab = mx.zeros(shape, mx.float16)
        mx.eval(slab)
        with pytest.raises(ValueError, match="6 dimensions"):
            native.kernels.write_block(slab, 0, entries)
        with pytest.raises(ValueError, match="6 dimensions"):
            native.kernels.Pass([1], [0], [False], [[[0]]], [[slab]])
    only_keys = mx.zeros((1, 1, 1, 1, 128, 16), mx.float16)
    mx.eval(only_keys)
    with pytest.raises(ValueError, match="entries must be"):  # values would be written behind its end
        native.kernels.write_block(only_keys, 0, entries)


class Together:
    """A network's layers over a pass, as in a batched cache."""

    runs_fused = True

    def __init__(self, ops: Ops, the_pass: Pass) -> None:
        self._ops = ops
        self._pass = the_pass

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        return self._ops.attend_pass(qkv, self._pass, layer, spec)

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode) -> mx.array:
        return node.run_pass(x, self._pass, layers, (), 0, x.shape[1])[0]


def logits(network: Decoder, blocks: Blocks, work: list[tuple[Sequence, list[int], Phase]]) -> list[mx.array]:
    """Return the logits (T, V) of every sequence's rows, all in one pass."""
    the_pass = Pass([blocks.rows(sequence, len(tokens), phase) for sequence, tokens, phase in work], blocks.store)
    fed = mx.array([[token for _, tokens, _ in work for token in tokens]])
    x = network.all_logits(network.layers(network.embed(fed), Together(network.ops, the_pass)))[0]
    mx.eval(x)
    found = []
    row = 0
    for sequence, tokens, _ in work:
        sequence.length += len(tokens)
        found.append(x[row : row + len(tokens)])
        row += len(tokens)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
@pytest.mark.parametrize(
    "variant", ["llama", "4 bits", "gemma3", "gpt-oss"]
)  # the last: layer by layer, windows; experts
def test_a_network_answers_sequences_together_as_alone(variant: str, ops: Ops, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama" if variant == "4 bits" else variant)
    network = load_decoder(quantize_model(model, tmp_path / "quantized") if variant == "4 bits" else model, ops)
    shape = network.kv_shape
    store = KVStore(shape.kinds, shape.format)
    blocks = Blocks(ops, store, 4)
    prompts = [[3, 1, 4, 1, 5], [2, 7], [9] * 40]
    singles = [blocks.new() for _ in prompts]
    expected = []
    for prompt in prompts:
        cache = new_cache(network, 200)
        alone = []
        parts: list[tuple[list[int], Phase]] = [(prompt, "prefill"), ([6], "decode"), ([8, 2], "decode")]
        for part, phase in parts:
            cache.reserve(len(part), phase)
            alone.append(network.all_logits(network.layers(network.embed(mx.array([part])), cache))[0])
            cache.advance(len(part))
            mx.eval(alone[-1], cache.arrays)
        expected.append(alone)
    rounds: list[list[tuple[Sequence, list[int], Phase]]] = [
        [(singles[0], prompts[0], "prefill"), (singles[1], prompts[1], "prefill")],
        [(singles[0], [6], "decode"), (singles[2], prompts[2], "prefill"), (singles[1], [6], "decode")],
        [(singles[2], [6], "decode"), (singles[1], [8, 2], "decode"), (singles[0], [8, 2], "decode")],
        [(singles[2], [8, 2], "decode")],
    ]
    found: dict[int, list[mx.array]] = {}
    for work in rounds:
        for (sequence, *_), out in zip(work, logits(network, blocks, work), strict=True):
            found.setdefault(singles.index(sequence), []).append(out)
    for number, alone in enumerate(expected):
        for mine, theirs in zip(found[number], alone, strict=True):
            assert difference(mine, theirs) < tolerance(ops)
            assert ops is not native or variant != "4 bits" or mx.array_equal(mine, theirs)
