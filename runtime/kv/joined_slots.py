"""Slot caches of several sequences as one cache, for one pass: those that decode in slots of a bank attend at once.

As `runtime.kv.joined_cache`, where attention goes sequence by sequence. So it does here for what one operation does not
express: chunks of prompts, tokens with guesses behind them, and a sequence of whose capacity there is no other.
N = rows of the pass, H / Hkv = query / key-value heads, D = head dimension.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from headrace.runtime.kv.bank import Bank
from headrace.runtime.kv.joined_cache import JoinedCache
from headrace.runtime.kv.slot_cache import SlotCache
from headrace.runtime.ops import AttentionSpec, Phase, Projections
from headrace.runtime.ops.slots import SlotRows, attend_slots


class JoinedSlots(JoinedCache):
    """A `Cache` and `LayerCache` of one pass. caches[i] gets the next tokens, as many and of the phase rows[i] says."""

    def reserve(self, tokens: int, _phase: Phase = "prefill") -> None:
        """Also seats those that attend together, and puts the rows of the pass in the order of who attends to them."""
        super().reserve(tokens)
        caches: Sequence[SlotCache] = self._caches
        rows_of = {
            cache: range(end - count, end)
            for cache, (count, _), end in zip(caches, self._rows, self._ends, strict=True)
        }
        single = [cache for cache, rows in zip(caches, self._rows, strict=True) if rows == (1, "decode")]
        together = caches[0].pool.seat(single)
        attending: list[tuple[Any, list[int]]] = [
            (_Together(bank, members), [rows_of[member].start for member in members]) for bank, members in together
        ]
        seated = {member for _, members in together for member in members}
        attending += [(cache, list(rows)) for cache, rows in rows_of.items() if cache not in seated]
        attending.sort(key=lambda part: part[1])
        order = [row for _, rows in attending for row in rows]
        self._parts = JoinedCache([part for part, _ in attending], [(len(rows), "decode") for _, rows in attending])
        self._order, self._back = None, None
        if order != sorted(order):
            self._order = mx.array(order)
            self._back = mx.argsort(self._order)

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        """qkv (1, N, (H + 2 Hkv) * D) or its parts -> (1, N, H * D)."""
        if self._order is None:
            return self._parts.attend(layer, qkv, spec)
        order = self._order
        ordered: Projections = qkv[:, order] if isinstance(qkv, mx.array) else [part[:, order] for part in qkv]
        return self._parts.attend(layer, ordered, spec)[:, self._back]


class _Together:
    """One new token each of sequences in a bank."""

    def __init__(self, bank: Bank, members: Sequence[SlotCache]) -> None:
        self._bank = bank
        self._members = members
        self._rows: dict[int | None, SlotRows] = {}  # of the layers of each window

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        """qkv (1, N, (H + 2 Hkv) * D) or its parts -> (1, N, H * D)."""
        if (rows := self._rows.get(spec.window)) is None:
            members = self._members
            rows = self._rows[spec.window] = SlotRows(
                [member.slot for member in members],
                [member.length for member in members],
                [member.firsts[layer] for member in members],
                spec.window,
            )
        keys, values = self._bank.sides
        out, keys[layer], values[layer] = attend_slots(qkv, keys[layer], values[layer], rows, spec)
        return out
