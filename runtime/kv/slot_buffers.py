"""Buffers with a slot per sequence, so that one attention serves several sequences and gathers nothing.

Contract: the sequences have the first slots; later slots are idle. Passes append in place. Copies happen only when
sequences join or leave, one layer at a time: full buffers double if memory is spare, else they grow by the newcomers;
the last sequence moves into a free slot; idle slots are freed when they outnumber the used ones, or memory is short.
A sequence leaves by `close`, by growing out, or when it is garbage-collected.
Hkv = key/value heads, D = head dimension.
"""

from collections.abc import Callable, Sequence
from weakref import ReferenceType, WeakValueDictionary, ref

import mlx.core as mx

from headrace.runtime.kv.slot_cache import SlotCache
from headrace.runtime.machine.memory import moving_buffers
from headrace.runtime.ops import reference


class SlotBuffers:
    """Slots of `capacities` rows by layer, shaped as the unpacked K/V of `like`."""

    def __init__(self, like: SlotCache, capacities: Sequence[int]) -> None:
        def empty(layer: mx.array, capacity: int) -> mx.array:
            return mx.zeros((0, layer.shape[1], capacity, layer.shape[3]), layer.dtype)

        keys, values = ([empty(*layer) for layer in zip(side, capacities, strict=True)] for side in like.sides)
        self.sides = keys, values  # of each layer (slots, Hkv, capacity, D)
        self.slots = 0
        self.slot_bytes = sum(
            layer.itemsize * layer.shape[1] * layer.shape[2] * layer.shape[3] for layer in (*keys, *values)
        )
        self._caches: list[ReferenceType[SlotCache]] = []  # of the first slots

    @property
    def used(self) -> int:
        """Slots with a sequence."""
        return sum(self._cache(slot) is not None for slot in range(len(self._caches)))

    @property
    def idle(self) -> int:
        """Slots without a sequence."""
        return self.slots - self.used

    @moving_buffers()
    def assign(self, newcomers: Sequence[SlotCache], affords: Callable[[int], bool]) -> None:
        """Copy sequences into slots; each of their own buffers is freed at once. affords: whether bytes may be idle."""
        self.close_gaps()
        first = len(self._caches)
        last = len(self._caches) + len(newcomers)
        ahead = max(0, 2 * self.slots - last)
        grown = self.slots if last <= self.slots else last + (ahead if affords(ahead * self.slot_bytes) else 0)
        for side, held in enumerate(self.sides):
            for layer, buffer in enumerate(held):
                if grown > self.slots:
                    zeros = mx.broadcast_to(mx.zeros((), buffer.dtype), (grown - first, *buffer.shape[1:]))
                    buffer = mx.concatenate([buffer[:first], zeros])
                for slot, newcomer in enumerate(newcomers, start=first):
                    array = newcomer.sides[side][layer]
                    lacks = array.shape[2] < buffer.shape[2]
                    buffer[slot : slot + 1] = reference.grow(array, buffer.shape[2]) if lacks else array
                held[layer] = buffer
                del array, buffer
                mx.eval(held[layer])
                for newcomer in newcomers:
                    newcomer.sides[side][layer] = held[layer]
        self.slots = grown
        for slot, newcomer in enumerate(newcomers, start=first):
            newcomer.share(self, self.sides, slot)
            self._caches.append(ref(newcomer))

    def close_gaps(self) -> None:
        """Move the last sequences into free slots between others."""
        caches = self._caches
        slot = 0
        while slot < len(caches):
            if self._cache(slot) is not None:
                slot += 1
                continue
            moved = self._cache(len(caches) - 1)
            reference_ = caches.pop()
            if moved is not None:
                self._move(moved.slot, slot)
                moved.slot, caches[slot] = slot, reference_

    @moving_buffers()
    def trim(self) -> None:
        """Free idle slots."""
        self.close_gaps()
        used = mx.arange(len(self._caches))
        for held in self.sides:
            for layer in range(len(held)):
                held[layer] = mx.take(held[layer], used, axis=0)
                mx.eval(held[layer])
        self.slots = len(self._caches)

    def _cache(self, slot: int) -> SlotCache | None:
        cache = self._caches[slot]()
        return cache if cache is not None and cache.buffers is self and cache.slot == slot else None

    def _move(self, source: int, target: int) -> None:
        for held in self.sides:
            for layer in range(len(held)):
                held[layer][target : target + 1] = mx.take(held[layer], mx.array([source]), axis=0)
                mx.eval(held[layer])


SharedBuffers = WeakValueDictionary[tuple[int, ...], SlotBuffers]
"""By capacities of the layers. Buffers exist as long as they have sequences."""


def idle_bytes(shared: SharedBuffers) -> int:
    """Return the bytes of all idle slots."""
    return sum(buffers.idle * buffers.slot_bytes for buffers in list(shared.values()))


def assign(
    shared: SharedBuffers, caches: Sequence[SlotCache], affords: Callable[[int], bool]
) -> list[tuple[SlotBuffers, list[SlotCache]]]:
    """Assign slots, and return the caches that attend together: at least two, and half of the slots that are read."""
    alike: dict[tuple[int, ...], list[SlotCache]] = {}
    for cache in caches:
        alike.setdefault(cache.shared_capacities(), []).append(cache)
    together = []
    for capacities, members in alike.items():
        if len(members) < 2:
            continue
        buffers = shared.get(capacities) or SlotBuffers(members[0], capacities)
        shared[capacities] = buffers
        newcomers = [member for member in members if member.buffers is not buffers]
        if newcomers:
            buffers.assign(newcomers, affords)
        else:
            buffers.close_gaps()
        if 2 * len(members) >= buffers.used:
            together.append((buffers, members))
    return together


def free_idle(shared: SharedBuffers, short: bool) -> None:
    """Free idle slots: all if memory is `short`, else only where they outnumber the used ones."""
    for buffers in list(shared.values()):
        if buffers.idle > (0 if short else buffers.used):
            buffers.trim()
