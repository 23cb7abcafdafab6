"""Buffers with a slot for each of several sequences, so that one attention serves them all and nothing is gathered.

Contract: the sequences of a bank have its first slots; what is behind them is idle. Passes append in place. Copies are
made when sequences come and go, one layer at a time: a full bank grows to twice its slots where memory is spare, else
by those that come; the last one moves into a slot that falls free; and what is idle goes as soon as it is more than
what is taken, or memory is short. A sequence that is closed, forgotten or grown out of it has left by that alone.
Hkv = key/value heads, D = head dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar
from weakref import ReferenceType, WeakValueDictionary, ref

import mlx.core as mx

from headrace.runtime.ops import reference


class Sitter(Protocol):
    """A sequence's cache, whose entries are in buffers of its own or in a bank."""

    bank: "Bank | None"
    slot: int  # in the bank; 0 in its own

    @property
    def sides(self) -> tuple[list[mx.array], list[mx.array]]:
        """Keys and values of each layer (slots, Hkv, capacity, D). What is assigned to these lists is what it has."""
        ...

    def shared_capacities(self) -> tuple[int, ...]:
        """Of each layer, the capacity at which it would share a bank."""
        ...

    def sit(self, bank: "Bank", slot: int) -> None:
        """Its entries are in that slot from now on."""
        ...


S = TypeVar("S", bound=Sitter)


class Bank:
    """Slots of so many rows by layer, for the K/V of `sitter` and others like it."""

    def __init__(self, sitter: Sitter, capacities: Sequence[int]) -> None:
        def none(like: mx.array, capacity: int) -> mx.array:
            return mx.zeros((0, like.shape[1], capacity, like.shape[3]), like.dtype)

        keys, values = ([none(*layer) for layer in zip(side, capacities, strict=True)] for side in sitter.sides)
        self.sides = keys, values
        self.slots = 0
        self.slot_bytes = sum(
            layer.itemsize * layer.shape[1] * layer.shape[2] * layer.shape[3] for layer in (*keys, *values)
        )
        self._seats: list[ReferenceType[Sitter]] = []  # of the first slots

    @property
    def taken(self) -> int:
        """Slots that are sequences'."""
        return sum(self._sitter(slot) is not None for slot in range(len(self._seats)))

    @property
    def idle(self) -> int:
        """Slots that no sequence counts as its own."""
        return self.slots - self.taken

    def seat(self, newcomers: Sequence[Sitter], affords: Callable[[int], bool]) -> None:
        """Copy sequences into slots, of whose own buffers each goes at once. affords: whether so much may be idle."""
        self.close_up()
        first, last = len(self._seats), len(self._seats) + len(newcomers)
        ahead = max(0, 2 * self.slots - last)
        grown = self.slots if last <= self.slots else last + (ahead if affords(ahead * self.slot_bytes) else 0)
        for side, held in enumerate(self.sides):
            for layer, buffer in enumerate(held):
                if grown > self.slots:
                    zeros = mx.broadcast_to(mx.zeros((), buffer.dtype), (grown - first, *buffer.shape[1:]))
                    buffer = mx.concatenate([buffer[:first], zeros])
                for slot, newcomer in enumerate(newcomers, start=first):
                    own = newcomer.sides[side][layer]
                    lacks = own.shape[2] < buffer.shape[2]
                    buffer[slot : slot + 1] = reference.grow(own, buffer.shape[2]) if lacks else own
                held[layer] = buffer
                del own, buffer
                mx.eval(held[layer])
                for newcomer in newcomers:
                    newcomer.sides[side][layer] = held[layer]
                mx.clear_cache()
        self.slots = grown
        for slot, newcomer in enumerate(newcomers, start=first):
            newcomer.sit(self, slot)
            self._seats.append(ref(newcomer))

    def close_up(self) -> None:
        """Leave no free slot between sequences."""
        seats, slot = self._seats, 0
        while slot < len(seats):
            if self._sitter(slot) is not None:
                slot += 1
                continue
            mover = self._sitter(len(seats) - 1)
            seat = seats.pop()
            if mover is not None:
                self._move(mover.slot, slot)
                mover.slot, seats[slot] = slot, seat

    def trim(self) -> None:
        """Give back what is idle."""
        self.close_up()
        taken = mx.arange(len(self._seats))
        for held in self.sides:
            for layer in range(len(held)):
                held[layer] = mx.take(held[layer], taken, axis=0)
                mx.eval(held[layer])
                mx.clear_cache()
        self.slots = len(self._seats)

    def _sitter(self, slot: int) -> Sitter | None:
        sitter = self._seats[slot]()
        return sitter if sitter is not None and sitter.bank is self and sitter.slot == slot else None

    def _move(self, source: int, target: int) -> None:
        for held in self.sides:
            for layer in range(len(held)):
                held[layer][target : target + 1] = mx.take(held[layer], mx.array([source]), axis=0)
                mx.eval(held[layer])


class Banks:
    """The banks of a pool, one for sequences of the same capacities. Each is there as long as it has sequences."""

    def __init__(self) -> None:
        self._banks: WeakValueDictionary[tuple[int, ...], Bank] = WeakValueDictionary()

    def __iter__(self) -> Iterator[Bank]:
        return iter(list(self._banks.values()))

    @property
    def idle_bytes(self) -> int:
        """Bytes of slots that no sequence counts as its own."""
        return sum(bank.idle * bank.slot_bytes for bank in self)

    def seat(self, sitters: Sequence[S], affords: Callable[[int], bool]) -> list[tuple[Bank, list[S]]]:
        """Those that a pass can serve together, by bank: two or more, and half of all that would be read for them."""
        alike: dict[tuple[int, ...], list[S]] = {}
        for sitter in sitters:
            alike.setdefault(sitter.shared_capacities(), []).append(sitter)
        together = []
        for capacities, members in alike.items():
            if len(members) < 2:
                continue
            bank = self._banks.get(capacities) or Bank(members[0], capacities)
            self._banks[capacities] = bank
            newcomers = [member for member in members if member.bank is not bank]
            if newcomers:
                bank.seat(newcomers, affords)
            else:
                bank.close_up()
            if 2 * len(members) >= bank.taken:
                together.append((bank, members))
        return together

    def give_back(self, short: bool) -> None:
        """Let go of idle slots: of all where memory is `short`, else where they are more than those taken."""
        for bank in self:
            if bank.idle > (0 if short else bank.taken):
                bank.trim()
