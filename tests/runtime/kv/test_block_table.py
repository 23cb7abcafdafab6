"""Blocks of many sequences against a plain model of memory: whatever is appended, taken back, shared or given up.

What is written to a block is the whole sequence up to that entry, so that a block which holds anything but what its
reader believes is noticed at once.
"""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from headrace.runtime.errors import PoolFullError
from headrace.runtime.kv.cache import KVShape
from headrace.runtime.kv.disk import DiskStore, StoredBlock, file_names, load_blocks
from headrace.runtime.kv.paged import NO_BLOCK, BlockTable
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.kv.prefix_index import digest, matching_entries
from headrace.runtime.metrics.cost import ROLLBACK
from headrace.runtime.ops import BLOCK, MixerSizes, MixerSpec, Phase
from headrace.runtime.ops.kv_format import FLOAT16

LIMIT = 7 * BLOCK
WINDOW = 40
Entry = tuple[tuple[int, ...], bytes]  # all tokens up to it, and the phases that wrote them


class Memory:
    """Contents of the blocks of each group; a slab is a few blocks."""

    shape = KVShape(1, 1, 16, FLOAT16)

    @staticmethod
    def fresh_states() -> list[mx.array]:
        return []

    def __init__(self, groups: int, most: int) -> None:
        self.blocks: list[dict[int, list[Entry | None]]] = [{} for _ in range(groups)]
        self.most = most
        self.failing = 0  # how many of the next allocations of a slab fail

    def allocate(self, group: int, blocks: int) -> int:
        if self.failing:
            self.failing -= 1
            raise MemoryError("no slab to be had")
        new = min(3, blocks)
        held = self.blocks[group]
        for block in range(len(held), len(held) + new):
            held[block] = [None] * BLOCK
        return new

    def settle(self) -> None:
        pass

    def free_slabs(self, group: int, _num_needed: int) -> int:
        """They stay."""
        return len(self.blocks[group])

    def copy(self, group: int, source: int, target: int, entries: int) -> None:
        held = self.blocks[group]
        held[target] = [*held[source][:entries], *[None] * (BLOCK - entries)]


class Machine(RuleBasedStateMachine):
    """`said` is what each sequence should hold: its tokens and their phases."""

    windows: tuple[int | None, ...] = (None, WINDOW)
    most = 5
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(len(self.windows), self.most)
        self.pool = BlockPool(self.windows, [self.most] * len(self.windows), cast(Any, self.memory))
        self.said: dict[BlockTable, tuple[list[int], bytearray]] = {}
        self.dropped_at: dict[BlockTable, int] = {}  # the most entries when a window may have left some behind
        self.prompts: list[list[int]] = []  # what was ever held, so that new ones can begin like it

    @rule(target=sequences, data=st.data(), answers=st.booleans())
    def begin(self, data: st.DataObject, answers: bool) -> BlockTable:
        """A new sequence, on a prompt that begins like an old one for as long as it likes."""
        cache = BlockTable(self.pool, LIMIT)
        known = data.draw(st.sampled_from([[], *self.prompts]))
        kept = data.draw(st.integers(0, len(known)) | st.just(len(known)))
        prompt = [*known[:kept], *data.draw(st.lists(st.integers(0, 1), max_size=3))]
        length = cache.load_prefix(prompt, answers=answers)
        assert length == cache.length == cache.committed <= len(prompt)
        phases = self._phases(cache)
        assert answers or 1 not in phases
        self.said[cache] = (prompt[:length], bytearray(phases))
        self.dropped_at[cache] = length
        return cache

    def _phases(self, cache: BlockTable) -> bytes:
        if not cache.length:
            return b""
        index, entry = divmod(cache.length - 1, BLOCK)
        held = self.memory.blocks[0][cache.tables[0][index]][entry]
        assert held is not None
        return held[1]

    @rule(cache=sequences, count=st.sampled_from([1, 3, 100, BLOCK, 200]), token=st.integers(0, 1),
          phase=st.sampled_from(["prefill", "decode"]), fails=st.integers(0, 1))  # fmt: skip
    def append(self, cache: BlockTable, count: int, token: int, phase: Phase, fails: int) -> None:
        count = min(count, LIMIT - cache.length)
        held = cache.blocks
        self.memory.failing = fails
        self.dropped_at[cache] = max(self.dropped_at[cache], cache.committed)
        try:
            cache.reserve(count, phase)
        except (PoolFullError, MemoryError):
            assert cache.blocks <= held
            return
        finally:
            self.memory.failing = 0
        tokens, phases = self.said[cache]
        for position in range(cache.length, cache.length + count):
            tokens.append(token)
            phases.append(phase == "decode")
            for group, table in enumerate(cache.tables):
                block = table[position // BLOCK]
                assert self.pool.may_write(group, block)
                self.memory.blocks[group][block][position % BLOCK] = (tuple(tokens), bytes(phases))
        cache.advance(count)

    @rule(cache=sequences, data=st.data())
    def commit(self, cache: BlockTable, data: st.DataObject) -> None:
        pending = cache.length - cache.committed
        cache.commit(data.draw(st.just(pending) | st.integers(0, pending)))

    @rule(cache=sequences, end=st.booleans())
    def publish(self, cache: BlockTable, end: bool) -> None:
        tokens, _ = self.said[cache]
        cache.cache_blocks(tokens, end=end)
        self.prompts.append(tokens[: cache.committed])

    @rule(cache=sequences)
    def rollback(self, cache: BlockTable) -> None:
        cache.rollback()
        self._cut(cache)

    @rule(cache=sequences, data=st.data())
    def trim(self, cache: BlockTable, data: st.DataObject) -> None:
        length = data.draw(st.integers(max(0, cache.committed - ROLLBACK), cache.committed))
        if length >= self.dropped_at[cache] - ROLLBACK:
            assert cache.reachable(length) == length, "less than a window's own cache keeps"
        elif not cache.reachable(length):  # what several trims in a row come to may be too far
            with pytest.raises(ValueError, match="go back"):
                cache.trim(length)
            return
        cache.trim(length)
        self._cut(cache)

    def _cut(self, cache: BlockTable) -> None:
        for part in self.said[cache]:
            del part[cache.length :]

    @rule(cache=consumes(sequences))
    def end(self, cache: BlockTable) -> None:
        cache.close()
        del self.said[cache]
        assert cache.blocks == 0

    @precondition(lambda self: self.prompts)
    @rule()
    def clear(self) -> None:
        self.pool.clear()
        assert self.pool.stats.cached == 0
        assert not self.pool.index.root.children

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        for group, blocks in enumerate(self.pool.groups):
            assert blocks.free + blocks.used + blocks.cached == blocks.total == len(self.memory.blocks[group])
            holders = Counter(b for cache in self.said for b in cache.tables[group] if b != NO_BLOCK)
            assert [blocks.count(block) for block in range(blocks.total)] == [
                holders[block] for block in range(blocks.total)
            ]
            assert blocks.used == len(holders)
            assert blocks.shared == sum(1 for count in holders.values() if count > 1)

    @invariant()
    def sequences_hold_what_was_said(self) -> None:
        for cache, (tokens, phases) in self.said.items():
            assert cache.length == len(tokens)
            for group, table in enumerate(cache.tables):
                assert len(table) >= -(-cache.length // BLOCK)
                window = self.windows[group]
                first = 0 if window is None else max(0, cache.committed - window + 1)
                assert cache.dropped[group] * BLOCK <= first
                for position in {
                    first,
                    *range(first - first % BLOCK + BLOCK - 1, cache.length, BLOCK),
                    cache.length - 1,
                }:
                    if first <= position < cache.length:
                        held = self.memory.blocks[group][table[position // BLOCK]][position % BLOCK]
                        assert held == (tuple(tokens[: position + 1]), bytes(phases[: position + 1]))

    @invariant()
    def what_can_be_found_is_what_blocks_hold(self) -> None:
        known = [set[int]() for _ in self.windows]
        ways = [(node, ()) for node in self.pool.index.root.children.values()]
        while ways:
            node, before = ways.pop()
            tokens = (*before, *node.tokens)
            ways += [(after, tokens) for after in node.children.values()]
            for group, block in enumerate(node.blocks):
                if block is not None:
                    known[group].add(block)
                    last = self.memory.blocks[group][block][len(node.tokens) - 1]
                    assert last is not None
                    assert last[0] == tokens
                    assert last[1].endswith(node.decode_written)
            assert matching_entries(self.pool.lookup(tokens, answers=True)) <= len(tokens)
        for group, blocks in enumerate(self.pool.groups):
            assert known[group] == {block for block in range(blocks.total) if blocks.indexed(block)}


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTables = Machine.TestCase


class WindowsOnly(Machine):
    """No layer sees everything: the beginning goes, and what is behind it can still be found."""

    windows = (WINDOW, 3 * BLOCK)


WindowsOnly.TestCase.settings = Machine.TestCase.settings
TestTablesOfWindows = WindowsOnly.TestCase


def filled(pool: BlockPool, tokens: list[int], phase: Phase = "prefill") -> BlockTable:
    cache = BlockTable(pool, LIMIT)
    done = cache.load_prefix(tokens)
    cache.reserve(len(tokens) - done, phase)
    cache.advance(len(tokens) - done)
    cache.commit(len(tokens) - done)
    cache.cache_blocks(tokens, end=True)
    return cache


def a_pool(most: int = 9, windows: tuple[int | None, ...] = (None,)) -> tuple[BlockPool, Memory]:
    memory = Memory(len(windows), most)
    return BlockPool(windows, [most] * len(windows), cast(Any, memory)), memory


@given(st.integers(0, 3 * BLOCK))
def test_a_common_prefix_is_stored_once(common: int) -> None:
    pool, _ = a_pool()
    first = filled(pool, [7] * 3 * BLOCK)
    second = BlockTable(pool, LIMIT)
    assert second.load_prefix([7] * common + [8]) == common
    assert pool.stats.shared == common // BLOCK
    assert second.tables[0][: common // BLOCK] == first.tables[0][: common // BLOCK]
    assert len(second.tables[0]) == -(-common // BLOCK)


def test_blocks_of_decode_steps_are_reused_only_on_request() -> None:
    pool, _ = a_pool()
    cache = filled(pool, [1] * (BLOCK + 9))
    cache.reserve(BLOCK, "decode")
    cache.advance(BLOCK)
    cache.commit(BLOCK)
    tokens = [1] * (BLOCK + 9) + [2] * BLOCK
    cache.cache_blocks(tokens, end=True)
    assert matching_entries(pool.lookup(tokens)) == BLOCK + 9
    assert matching_entries(pool.lookup(tokens, answers=True)) == len(tokens)


def test_the_least_recent_node_is_evicted_from_its_end() -> None:
    pool, _ = a_pool(most=4)
    for token in (1, 2):
        filled(pool, [token] * 2 * BLOCK).close()
    assert pool.stats.cached == 4
    filled(pool, [3] * BLOCK)
    assert [matching_entries(pool.lookup([token] * 2 * BLOCK)) for token in (1, 2)] == [BLOCK, 2 * BLOCK]


def test_referenced_blocks_are_never_evicted() -> None:
    pool, _ = a_pool(most=3)
    held = filled(pool, [1] * 2 * BLOCK)
    other = BlockTable(pool, LIMIT)
    other.reserve(BLOCK)
    with pytest.raises(PoolFullError, match="all 3 blocks"):
        other.reserve(BLOCK + 1)
    assert (held.blocks, other.blocks, pool.groups[0].available) == (2, 0, 1)


def test_a_partial_block_is_not_copied_without_a_free_block() -> None:
    pool, _ = a_pool(most=2)
    held = filled(pool, [1] * (BLOCK + 5))
    second = BlockTable(pool, LIMIT)
    assert second.load_prefix([1] * (BLOCK + 5)) == BLOCK
    assert second.tables[0] == held.tables[0][:1]


def test_a_prefix_match_needs_the_blocks_of_the_window_only() -> None:
    pool, _ = a_pool(most=30, windows=(None, WINDOW))
    tokens = [1] * 6 * BLOCK
    cache = filled(pool, tokens)
    cache.reserve(1)
    assert cache.dropped[1] == (6 * BLOCK - WINDOW + 1 - ROLLBACK) // BLOCK
    second = BlockTable(pool, LIMIT)
    assert second.load_prefix(tokens) == len(tokens)
    assert second.dropped == cache.dropped
    while (oldest := pool.groups[1].oldest) is not None:  # as others would who need the place
        pool._evict(1, oldest)
    assert matching_entries(pool.lookup(tokens)) == len(tokens)
    assert matching_entries(pool.lookup(tokens[: 2 * BLOCK])) < BLOCK


class States(Memory):
    """Recurrent state alone: no layer has K/V."""

    shape = KVShape(
        1,
        1,
        16,
        FLOAT16,
        recurrent=(0,),
        mixers=(MixerSpec(MixerSizes("conv", 1, 0, 0, 16, 2)),),
        layers_without_kv=(0,),
    )

    @staticmethod
    def fresh_states() -> list[mx.array]:
        return [mx.zeros((16,))]


def test_prefix_nodes_without_recurrent_state_are_freed_with_their_sequence() -> None:
    pool = BlockPool((), [], cast(Any, States(0, 0)))
    tokens = [1] * (2 * BLOCK + 9)
    for number in range(50):
        cache = BlockTable(pool, LIMIT)
        cache.reserve(len(tokens))
        cache.advance(len(tokens))
        cache.commit(len(tokens) - 1)  # one is pending
        cache.cache_blocks([number, *tokens[1:]], end=number % 2 == 1)
        assert len(pool.index.root.children) == 1
        cache.close()
        assert not pool.index.root.children
    filled(pool, tokens).close()
    assert matching_entries(pool.lookup(tokens)) == len(tokens)


def test_loaded_blocks_without_recurrent_state_are_not_cached(tmp_path: Path) -> None:
    pool = BlockPool((), [], cast(Any, States(0, 0)))
    store = DiskStore(tmp_path, max_bytes=100_000)
    tokens = (1,) * BLOCK
    phases = bytes(BLOCK)
    parent = pool.index.root.key
    [(name, _)] = file_names(parent, tokens)
    assert store.put(name, StoredBlock(parent, digest(parent, tokens, phases), tokens, phases, (None,)))
    assert load_blocks(pool, tokens, store) == 1
    assert not pool.index.root.children


def test_prefix_keys_depend_on_the_weights() -> None:
    keys = {filled(BlockPool((None,), [2], cast(Any, Memory(1, 2)), key), [1]).pool.index.root.key
            for key in (b"", b"a", b"b")}  # fmt: skip
    assert len(keys) == 3


def test_ten_thousand_sequences_leak_no_blocks() -> None:
    """Sequences of random lengths, with shared beginnings, some refused, some cut off; no more than is cached stays."""
    pool, _ = a_pool(most=12, windows=(None, WINDOW))
    random = Random(7)
    running: list[BlockTable] = []
    refused = 0
    for number in range(10_000):
        cache = BlockTable(pool, LIMIT)
        tokens = [number % 3] * random.choice([5, BLOCK, 2 * BLOCK]) + [number] * random.randrange(1, 200)
        done = cache.load_prefix(tokens)
        try:
            cache.reserve(len(tokens) - done)
        except PoolFullError:
            refused += 1
            cache.close()
            running.pop(random.randrange(len(running))).close()
            continue
        cache.advance(len(tokens) - done)
        if random.random() < 0.9:  # else cut off: what was appended was never committed
            cache.commit(len(tokens) - done)
            cache.cache_blocks(tokens, end=True)
        running.append(cache)
    assert 100 < refused < 9_000
    for cache in running:
        cache.close()
    assert pool.stats.used == 0
    pool.clear()
    assert pool.stats.free == pool.stats.total <= 24
    assert not any(pool._nodes)
    for blocks in pool.groups:
        assert blocks.free_from() == 0
        blocks.shrink(0)
        assert (blocks.total, blocks.shared) == (0, 0)


def test_a_branch_within_a_block_is_cached_next_to_the_old_one() -> None:
    pool, _ = a_pool()
    cache = filled(pool, [1] * 2 * BLOCK)
    cache.trim(100)
    cache.reserve(2 * BLOCK)
    cache.advance(2 * BLOCK)
    cache.commit(2 * BLOCK)
    tokens = [1] * 100 + [2] * 2 * BLOCK
    cache.cache_blocks(tokens)
    assert matching_entries(pool.lookup(tokens)) == 2 * BLOCK
    assert matching_entries(pool.lookup([1] * 2 * BLOCK)) == 2 * BLOCK
    assert matching_entries(pool.lookup([1] * 2 * BLOCK + [2] * BLOCK)) == 2 * BLOCK
