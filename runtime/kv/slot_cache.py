"""Blocks beside caches that read none: prefixes are copied out of a sequence's buffers and into another's.

Stock MLX attends only to whole buffers, so a sequence decodes from its own, or beside others from a slot of a bank's,
and the pool's blocks are for what is shared and kept. Contract: `resume` and `publish` are those of
`runtime.kv.tables`, but no sequence holds a block for longer than a call, so every one of them can be given up at any
time (`SlotPool.give_way`).
L = layers of a group, Hkv = key/value heads, D = head dimension.
"""

import sys
from collections.abc import Callable, Sequence
from weakref import WeakSet

import mlx.core as mx

from headrace.runtime.errors import PoolFullError
from headrace.runtime.kv.bank import Bank, Banks
from headrace.runtime.kv.cache import CHUNK, KVCache, KVShape, Placed
from headrace.runtime.kv.chain import Link, digest
from headrace.runtime.kv.paged_cache import KVPool
from headrace.runtime.kv.pool import Found
from headrace.runtime.kv.slabs import Slabs
from headrace.runtime.metrics.cost import ROLLBACK
from headrace.runtime.ops import BLOCK, AttentionSpec, Ops, Projections, reference


class SlotCache(KVCache):
    """One sequence's buffers, or its slot in a bank's, that begin with what `pool` has and leave it what they have."""

    def __init__(self, pool: "SlotPool", *, limit: int, ops: Ops) -> None:
        super().__init__(pool.slabs.shape, limit=limit, ops=ops)
        self.pool = pool
        self.bank: Bank | None = None
        self.slot = 0
        self._links: list[Link] = []  # of each full block that was published
        self._answered = bytearray()  # of each entry, whether a decode step wrote it

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        self._answered += (b"\1" if self.phase == "decode" else b"\0") * tokens

    def rollback(self) -> None:
        super().rollback()
        self._forget()

    def trim(self, length: int) -> None:
        super().trim(length)
        self._forget()

    def begin_again(self) -> None:
        super().begin_again()
        self._forget()

    def close(self) -> None:
        self.pool.slabs.slots.discard(self)
        self.bank = None

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        if self.bank is None:
            return super().attend(layer, qkv, spec)
        keys, values, first = self._keys, self._values, self.firsts[layer]
        out, keys[layer], values[layer] = reference.attend(
            qkv, keys[layer], values[layer], self.length, spec, first, self.phase, self.slot
        )
        return out

    @property
    def sides(self) -> tuple[list[mx.array], list[mx.array]]:
        """See `Sitter`."""
        return self._keys, self._values

    def shared_capacities(self) -> tuple[int, ...]:
        """See `Sitter`."""
        capacities = [0] * self._shape.layers
        for span in self._spans:
            for layer in span.layers:
                capacities[layer] = span.shared_capacity(self.limit)
        return tuple(capacities)

    def sit(self, bank: Bank, slot: int) -> None:
        """See `Sitter`."""
        self.bank, self.slot = bank, slot
        self._keys, self._values = bank.sides
        for span in self._spans:
            span.capacity = span.shared_capacity(self.limit)
        self._before = self._newest = None  # a bank's arrays say by themselves what was appended

    def leave(self) -> None:
        """Go on in buffers of its own."""
        if self.bank is None:
            return
        own = mx.array([self.slot])
        self._keys, self._values = ([mx.take(layer, own, axis=0) for layer in side] for side in self.bank.sides)
        mx.eval(self._held)
        self.bank, self.slot = None, 0

    def resume(self, tokens: Sequence[int], *, answers: bool = False) -> int:
        """Begin with what the pool has of `tokens`, committed: how many entries. See `BlockPool.lookup`."""
        if self.length or self.committed:
            raise ValueError("only an empty cache can begin with what others left")
        found = self.pool.blocks.lookup(tokens, answers=answers)
        if found.length:
            for group in range(len(self._spans)):
                self._fill(group, found)
            self._answered += b"".join(link.answered for link in found.links)[: found.length]
            self._links = list(found.links[: found.length // BLOCK])
            self.length = self.committed = found.length
        return found.length

    def publish(self, tokens: Sequence[int], *, end: bool = False) -> None:
        """The committed entries are those of the first of `tokens`: others may begin with the full blocks of them.

        `end`: with the block that is not full, too. What there is no memory for is not published.
        """
        blocks = self.pool.blocks
        last = -(-self.committed // BLOCK) if end else self.committed // BLOCK
        there = next((i for i, link in enumerate(self._links) if link.before is None), len(self._links))
        del self._links[there:]
        if there == last:
            return
        held: list[tuple[int, int]] = []  # so that a chain's end does not take the place of its beginning
        try:
            for link in self._links:
                self._hold(link, held)
            for index in range(there, last):
                entries = slice(index * BLOCK, min((index + 1) * BLOCK, self.committed))
                stored = self._store(tokens[entries], entries, held)
                if stored is None:
                    return
                if entries.stop - entries.start == BLOCK:
                    self._links.append(stored)
        except PoolFullError:
            pass
        finally:
            for group, block in reversed(held):
                blocks.release(group, block)

    def _store(self, tokens: Sequence[int], entries: slice, held: list[tuple[int, int]]) -> Link | None:
        """The link of these entries, behind those published before, with blocks that are held from now on.

        None where what came before has no block that was held, and went with another chain.
        """
        blocks = self.pool.blocks
        before = self._links[-1] if self._links else blocks.chains.root
        answered = bytes(self._answered[entries])
        link = before.after.get(digest(before.key, tokens, answered))
        lacking = [
            group
            for group, span in enumerate(self._spans)
            if span.first <= entries.start and (link is None or link.blocks[group] is None)
        ]
        if link is not None:
            self._hold(link, held)
        numbers: list[int | None] = [None] * len(self._spans)
        for group in lacking:
            numbers[group] = number = blocks.allocate(group)
            held.append((group, number))
            self.pool.slabs.write(group, number, self._read(group, entries))
        return blocks.publish(before, tokens, answered, numbers)

    def _hold(self, link: Link, held: list[tuple[int, int]]) -> None:
        for group, block in enumerate(link.blocks):
            if block is not None:
                self.pool.blocks.share(group, block)
                held.append((group, block))

    def _place(self, spans: Sequence[Placed]) -> None:
        if any(capacity != span.capacity for span, _, capacity in spans):
            self.leave()
        super()._place(spans)

    def _move(self, layer: int, kept: slice, capacity: int) -> None:
        if self.bank is None:
            super()._move(layer, kept, capacity)
            return
        own = slice(self.slot, self.slot + 1)
        for side in self.bank.sides:
            rows = reference.grow(side[layer][own, :, kept], capacity)
            mx.eval(rows)
            side[layer][own] = rows
            mx.eval(side[layer])

    def _read(self, group: int, entries: slice) -> mx.array:
        """Entries of a group as a block has them: (L, 2, Hkv, entries, D)."""
        span, arrays, layers = self._spans[group], self.arrays, self._shape.layers
        rows = slice(entries.start - span.first, entries.stop - span.first)
        parts = [arrays[side + layer][self.slot, :, rows] for layer in span.layers for side in (0, layers)]
        return mx.stack(parts).reshape(len(span.layers), 2, *parts[0].shape)

    def _fill(self, group: int, found: Found) -> None:
        """New buffers of a group's layers, with what its blocks hold as far back as its window needs it."""
        span, links, first = self._spans[group], found.links, len(found.links)
        least = 0 if span.window is None else max(0, found.length - span.window + 1 - ROLLBACK) // BLOCK
        numbers: list[int] = []
        while first > least and (number := links[first - 1].blocks[group]) is not None:
            numbers.insert(0, number)
            first -= 1
        count = found.length - first * BLOCK
        span.capacity = -(-count // CHUNK) * CHUNK
        self._begin(span, first * BLOCK)
        blocks = [self.pool.slabs.read(group, number, BLOCK) for number in numbers]
        for place, layer in enumerate(span.layers):
            for side, buffers in enumerate((self._keys, self._values)):
                rows = mx.concatenate([block[place, side] for block in blocks], axis=1)[None, :, :count]
                buffers[layer] = self._ops.grow(rows, span.capacity)
                mx.eval(buffers[layer])

    def _forget(self) -> None:
        del self._answered[self.length :]
        del self._links[self.length // BLOCK :]


class SlotSlabs(Slabs):
    """Slabs in what memory `spare` says there is while slots take so many bytes; None: without end."""

    def __init__(self, shape: KVShape, ops: Ops) -> None:
        super().__init__(shape, ops)
        self.slots: WeakSet[SlotCache] = WeakSet()  # that were not closed
        self.banks = Banks()
        self.spare: Callable[[int], int] | None = None

    @property
    def excess(self) -> int:
        """Bytes taken beyond what is spare; below 0: how many more may be."""
        if self.spare is None:
            return -sys.maxsize
        slots = sum(slot.allocated_bytes for slot in self.slots)
        return self.nbytes - self.spare(slots + self.banks.idle_bytes)

    def set_aside(self, group: int, blocks: int) -> int:
        blocks = min(blocks, -self.excess // self.block_bytes(group))
        return super().set_aside(group, blocks) if blocks > 0 else 0


class SlotPool(KVPool):
    """Blocks of prefixes, to be copied from and to slots."""

    slabs: SlotSlabs

    def __init__(self, shape: KVShape, ops: Ops, entries: int, key: bytes = b"", kept: int | None = None) -> None:
        super().__init__(shape, reference, entries, key, kept)
        self._slot_ops = ops

    def _make_slabs(self, shape: KVShape, ops: Ops) -> SlotSlabs:
        return SlotSlabs(shape, ops)

    def make_slot(self, limit: int) -> SlotCache:
        """An empty cache for one sequence of at most `limit` tokens."""
        slot = SlotCache(self, limit=limit, ops=self._slot_ops)
        self.slabs.slots.add(slot)
        return slot

    def seat(self, slots: Sequence[SlotCache]) -> list[tuple[Bank, list[SlotCache]]]:
        """Those of them, each with one new token, that attend together in a pass, by bank."""
        together = self.slabs.banks.seat(slots, lambda nbytes: self.slabs.excess + nbytes <= 0)
        self.slabs.banks.give_back(short=self.slabs.excess > 0)  # who has grown has left a slot
        return together

    def give_way(self) -> None:
        """Take no more than is spare. The last blocks go first: what many begin with came before."""
        self.slabs.banks.give_back(short=self.slabs.excess > 0)
        groups = self.slabs.store.groups
        while self.slabs.nbytes and self.slabs.excess > 0:
            group = max(range(len(groups)), key=lambda group: groups[group].blocks * self.slabs.block_bytes(group))
            self.blocks.give_up(group, groups[group].blocks - groups[group].slabs[-1].shape[0])
            self.give_back()
            mx.clear_cache()
