"""Contiguous K/V buffers for stock MLX, which has no paged attention.

Decoding sequences of similar length share buffers and attend in one operation; prompts, draft tokens and packed formats
attend row by row. Cached prefixes are copied from and to blocks of a pool. The cache of the last sequence is kept whole
if it was alone: there may be no memory for blocks beside it.

    BufferBackend -> SlotCache per sequence -> its own buffers, or a slot of SlotBuffers with sequences of its length
    BufferPass    -> for each layer one attention per SlotBuffers, and one per cache that is alone

The network makes the backend (`models/network/decoder.py`) on GPUs and without native kernels. `SlotBuffers` copy
memory between sequences; tests/runtime/kv/test_buffers.py compares them with sequences alone.
N = tokens of a pass, H / Hkv = query / key-value heads, D = head dimension.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import cast
from weakref import ReferenceType, WeakSet, WeakValueDictionary, proxy, ref

import mlx.core as mx

from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.cache import KVCache, KVPass, KVShape, PassRow
from headrace.runtime.kv.common_prefix import common_prefix
from headrace.runtime.kv.disk import DiskStore, load_blocks, store_blocks
from headrace.runtime.kv.paged_arrays import PagedArrays
from headrace.runtime.kv.pool import BlockPool, make_pool
from headrace.runtime.kv.prefix_index import matching_entries
from headrace.runtime.kv.slot_cache import SlotCache
from headrace.runtime.machine.memory import moving_buffers
from headrace.runtime.ops import BLOCK, AttentionSpec, LayersNode, MixerSpec, Ops, Projections, reference
from headrace.runtime.ops.slots import SlotRows, attend_slots


class SlotBuffers:
    """Buffers with a slot per sequence, so that one attention serves several sequences and gathers nothing.

    The sequences have the first slots; later slots are idle. Passes append in place. Copies happen only when sequences
    join or leave, one layer at a time: full buffers double if memory is spare, else they grow by the newcomers; the
    last sequence moves into a free slot; idle slots are freed when they outnumber the used ones, or memory is short.
    A sequence leaves by `close`, by growing out, or when it is garbage-collected.

    like: its unpacked K/V have the shapes and types of the layers.
    capacities: rows of each layer.
    """

    def __init__(self, like: SlotCache, capacities: Sequence[int]) -> None:
        def empty(layer: mx.array, capacity: int) -> mx.array:
            return mx.zeros((0, layer.shape[1], capacity, layer.shape[3]), layer.dtype)

        keys, values = ([empty(*layer) for layer in zip(side, capacities, strict=True)] for side in like.sides)
        self.sides = keys, values  # of each layer (slots, Hkv, capacity, D)
        self.slots = 0
        self.slot_bytes = sum(
            layer.itemsize * layer.shape[1] * layer.shape[2] * layer.shape[3] for layer in (*keys, *values)
        )
        # By slot, the first ones; weak, so that a dropped sequence leaves its slot by itself.
        self._caches: list[ReferenceType[SlotCache]] = []

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
        """Copy sequences into the first free slots. affords: whether so many bytes may be idle."""
        self.close_gaps()
        num_slots = self._slots_for(len(self._caches) + len(newcomers), affords)
        for side in (0, 1):
            for layer in range(len(self.sides[side])):
                self._copy_layer(side, layer, newcomers, num_slots)
        self.slots = num_slots
        for newcomer in newcomers:
            newcomer.share(self, self.sides, slot=len(self._caches))
            self._caches.append(ref(newcomer))

    def _slots_for(self, num_sequences: int, affords: Callable[[int], bool]) -> int:
        """Return the slots for so many sequences: if there are too few, twice as many, or no idle ones."""
        if num_sequences <= self.slots:
            return self.slots
        num_idle = max(0, 2 * self.slots - num_sequences)
        if affords(num_idle * self.slot_bytes):
            return num_sequences + num_idle
        return num_sequences

    def _copy_layer(self, side: int, layer: int, newcomers: Sequence[SlotCache], num_slots: int) -> None:
        """Copy one layer's keys or values of newcomers into the first free slots.

        side: 0 for keys, 1 for values.
        num_slots: to which the layer's buffer grows before.

        It is evaluated at once, and replaces the newcomers' own buffers of the layer: their memory is free before the
        next layer needs as much.
        """
        layers = self.sides[side]
        first = len(self._caches)
        buffer = layers[layer]  # (slots, Hkv, capacity, D)
        if num_slots > self.slots:
            zeros = mx.broadcast_to(mx.zeros((), buffer.dtype), (num_slots - first, *buffer.shape[1:]))
            buffer = mx.concatenate([buffer[:first], zeros])
        for slot, newcomer in enumerate(newcomers, start=first):
            array = newcomer.sides[side][layer]  # (1, Hkv, the newcomer's capacity, D)
            if array.shape[2] < buffer.shape[2]:
                array = reference.grow(array, buffer.shape[2])
            buffer[slot : slot + 1] = array
        layers[layer] = buffer
        del array, buffer  # MLX reuses the memory of an input that nothing else refers to
        mx.eval(layers[layer])
        for newcomer in newcomers:
            newcomer.sides[side][layer] = layers[layer]

    def close_gaps(self) -> None:
        """Move the last sequences into free slots between others."""
        caches = self._caches
        slot = 0
        while slot < len(caches):
            if self._cache(slot) is not None:
                slot += 1
                continue
            last = self._cache(len(caches) - 1)
            caches.pop()
            if last is not None:
                self._move(last.slot, slot)
                last.slot = slot
                caches[slot] = ref(last)

    @moving_buffers()
    def trim(self) -> None:
        """Free idle slots."""
        self.close_gaps()
        used = mx.arange(len(self._caches))
        for layers in self.sides:
            for layer in range(len(layers)):
                layers[layer] = mx.take(layers[layer], used, axis=0)
                mx.eval(layers[layer])
        self.slots = len(self._caches)

    def _cache(self, slot: int) -> SlotCache | None:
        """Return the cache in a slot; None if it was dropped, or left for other buffers."""
        cache = self._caches[slot]()
        if cache is None or cache.buffers is not self or cache.slot != slot:
            return None
        return cache

    def _move(self, source: int, target: int) -> None:
        """Copy the entries of one slot into another, layer by layer."""
        for layers in self.sides:
            for layer in range(len(layers)):
                layers[layer][target : target + 1] = mx.take(layers[layer], mx.array([source]), axis=0)
                mx.eval(layers[layer])


SharedBuffers = WeakValueDictionary[tuple[int, ...], SlotBuffers]
"""By capacities of the layers. Buffers exist as long as they have sequences: only their caches keep them."""

Together = list[tuple[SlotBuffers, list[SlotCache]]]
"""Caches that attend in one operation, with the buffers that they share."""

Attend = Callable[[int, Projections, AttentionSpec], mx.array]
"""Appends and attends in a layer: (layer, projections of (1, n) tokens, layout) -> (1, n, H * D)."""


def idle_bytes(shared: SharedBuffers) -> int:
    """Return the bytes of all idle slots."""
    return sum(buffers.idle * buffers.slot_bytes for buffers in list(shared.values()))


def assign(shared: SharedBuffers, caches: Sequence[SlotCache], affords: Callable[[int], bool]) -> Together:
    """Assign slots, and return the caches that attend together: at least two, and half of the slots that are read.

    shared: buffers in use; new ones are added.
    caches: those with one new token.
    affords: whether so many bytes may be idle.
    """
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
        # Attention reads all slots up to the highest one in use: not worth it for few of them.
        if 2 * len(members) >= buffers.used:
            together.append((buffers, members))
    return together


def free_idle(shared: SharedBuffers, short: bool) -> None:
    """Free idle slots: all if memory is `short`, else only where they outnumber the used ones."""
    for buffers in list(shared.values()):
        if buffers.idle > buffers.used or (short and buffers.idle):
            buffers.trim()


class BufferPass:
    """One pass over slot caches.

    assign: returns the caches with one new token that attend together; None if each attends alone.
    """

    def __init__(
        self, rows: Sequence[PassRow], assign: Callable[[Sequence[SlotCache]], Together] | None = None
    ) -> None:
        self.rows = rows
        self._caches = [cast(SlotCache, row.cache) for row in rows]
        for cache, row in zip(self._caches, rows, strict=True):
            cache.reserve(row.count, row.phase)
        self._order: mx.array | None = None  # (N,): tokens in the order of attentions; None if that is theirs
        self._back: mx.array | None = None  # (N,): the inverse
        together: Together = []
        if assign is not None and len(rows) > 1:
            together = assign([cast(SlotCache, row.cache) for row in rows if row.count == 1 and row.phase == "decode"])
        self._split(together)
        self.runs_fused = len(rows) == 1 and self._caches[0].parts == 1 and self._caches[0].buffers is None

    def _split(self, together: Together) -> None:
        """Divide the tokens among attentions, each with the tokens of one cache or of several that share buffers."""
        ends = accumulate(row.count for row in self.rows)
        indices_of = {
            cache: list(range(end - row.count, end))
            for cache, row, end in zip(self._caches, self.rows, ends, strict=True)
        }
        parts: list[tuple[list[int], Attend]] = []  # indices of tokens, and their attention
        for buffers, members in together:
            indices = [index for member in members for index in indices_of.pop(member)]
            parts.append((indices, _attend_together(buffers, members)))
        parts += [(indices, cache.attend) for cache, indices in indices_of.items()]
        parts.sort(key=lambda part: part[0])
        self._attends = [attend for _, attend in parts]
        self._ends = list(accumulate(len(indices) for indices, _ in parts))[:-1]
        order = [index for indices, _ in parts for index in indices]
        # Rows that attend together may stand apart in the pass: then tokens are gathered before, and put back after.
        if order != sorted(order):
            self._order = mx.array(order)
            self._back = mx.argsort(self._order)  # sorting a permutation gives its inverse

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        """Append and attend. qkv: projections of (1, N) tokens -> (1, N, H * D)."""
        if self._order is not None:
            qkv = [projected[:, self._order] for projected in qkv]
        # By attention: q, k and v of its tokens.
        groups = zip(*(mx.split(projected, self._ends, axis=1) for projected in qkv), strict=True)
        outs = [attend(layer, list(group_qkv), spec) for attend, group_qkv in zip(self._attends, groups, strict=True)]
        out = mx.concatenate(outs, axis=1)
        if self._back is not None:
            out = out[:, self._back]
        return out

    def mix(self, _layer: int, _x: mx.array, _spec: MixerSpec) -> mx.array:
        raise NotImplementedError("recurrent state is kept beside blocks only")

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode) -> mx.array:
        """x (1, N, E) -> (1, N, E), for one row."""
        return self._caches[0].run_fused(layers, x, node, output=self.rows[0].output)

    def advance(self) -> None:
        for cache, row in zip(self._caches, self.rows, strict=True):
            cache.advance(row.count)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.arrays]


def _attend_together(buffers: SlotBuffers, members: Sequence[SlotCache]) -> Attend:
    """Return the attention of one new token each of caches that share buffers."""
    rows_of: dict[tuple[int | None, int, int], SlotRows] = {}  # of the layers of each kind

    def attend(layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        layer = members[0].source(layer)
        kind = (spec.window, spec.kv_heads, spec.head_dim)
        rows = rows_of.get(kind)
        if rows is None:
            slots = [member.slot for member in members]
            lengths = [member.length for member in members]
            firsts = [member.firsts[layer] for member in members]
            rows = SlotRows(slots, lengths, firsts, spec)
            rows_of[kind] = rows
        keys, values = buffers.sides
        out, keys[layer], values[layer] = attend_slots(qkv, keys[layer], values[layer], rows, spec)
        return out

    return attend


class BufferBackend:
    """Slot caches of one network.

    shape: of the entries.
    ops: attention of a cache alone.
    options: requirements of the engine.
    shares_attention: `Ops.slots` holds for all layers.
    alone: no sequence shares a pass or a prefix with another, and none is rolled back.
    scales: see `SlotCache`.
    """

    def __init__(
        self,
        shape: KVShape,
        ops: Ops,
        options: KVOptions,
        *,
        shares_attention: bool = True,
        alone: bool = False,
        scales: mx.Dtype = mx.float16,
    ) -> None:
        self._shape = shape
        self._ops = ops
        self._options = options
        self._shares_attention = shares_attention and not shape.format.packed
        self._alone = alone
        self._scales = scales
        self.rolls_back = not alone
        self.copies_to_grow = True
        self._caches: WeakSet[SlotCache] = WeakSet()
        self.shared: SharedBuffers = WeakValueDictionary()
        self._last: SlotCache | None = None  # of the sequence that ended last, if it was alone
        self._last_tokens: list[int] = []  # of its entries
        self.pool = self._new_pool()
        self.shares_prefixes = self.pool is not None

    def acquire(self, prompt: Sequence[int], entries: int = 0) -> SlotCache:
        """See `KVBackend`. The last sequence's cache if it has no shorter prefix than the pool, else a new one."""
        pool = self.pool
        keep = self._options.keep_prefix
        reusable = 0
        if pool is not None:
            reusable = matching_entries(pool.lookup(prompt[:-1], answers=keep))
        cache = self._take_last(prompt)
        if cache is not None and cache.committed >= reusable:
            cache.reserved = entries
            return cache
        del cache  # frees its memory first
        cache = self.new_cache()
        cache.reserved = entries
        cache.load_prefix(prompt[:-1], answers=keep)
        return cache

    def _take_last(self, prompt: Sequence[int]) -> SlotCache | None:
        """Return the last sequence's cache, trimmed to its common prefix with `prompt`; drop it if there is none.

        At most len(prompt) - 1 entries stay: the first step feeds the prompt's last token.
        """
        cache = self._last
        if cache is None:
            return None
        shared = cache.reachable(common_prefix(self._last_tokens, prompt[:-1]))
        self._last = None
        if shared == 0:
            return None
        cache.trim(shared)
        return cache

    def new_cache(self) -> SlotCache:
        """Return an empty cache."""
        cache = SlotCache(self._shape, self._ops, self._options.limit, self.pool, self._scales)
        self._caches.add(cache)
        return cache

    def release(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """See `KVBackend`. The cache of a sequence that was alone is kept whole, for the next prompt."""
        assert isinstance(cache, SlotCache)
        if self._options.keep_prefix:
            cache.cache_blocks(tokens, end=True)
            if self.pool is None or sum(not other.closed for other in self._caches) == 1:
                cache.leave()
                if cache.committed:
                    cache.mark()
                    self._last = cache
                    self._last_tokens = list(tokens[: cache.committed])
                return
        cache.close()

    def make_passes(self, rows: Sequence[PassRow]) -> list[KVPass]:
        if self._alone:
            return [BufferPass([row]) for row in rows]
        return [BufferPass(rows, self.assign if self._shares_attention else None)]

    def assign(self, caches: Sequence[SlotCache]) -> Together:
        """Assign slots of shared buffers to caches with one new token each; return those that attend together."""
        together = assign(self.shared, caches, lambda nbytes: self._excess + nbytes <= 0)
        free_idle(self.shared, short=self._excess > 0)  # sequences that grew left slots
        return together

    def on_prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, SlotCache)
        if cache.needs_marks:
            cache.mark()
        cache.cache_blocks(tokens)

    def evict(self) -> None:
        """Free idle slots, then cached blocks, the last slabs first: shared prefixes were cached before the rest.

        Without a pool, free the cache of the last sequence.
        """
        if self.pool is None:
            if self._options.spare is not None and self._options.spare(self.allocated_bytes) < 0:
                self._last = None
            return
        free_idle(self.shared, short=self._excess > 0)
        storage = self.pool.storage
        groups = storage.store.groups
        before = storage.nbytes
        while storage.nbytes and self._excess > 0:
            # A whole slab is freed at once, of the group that takes most.
            group = max(range(len(groups)), key=lambda group: groups[group].blocks * storage.block_bytes(group))
            self.pool.evict_from(group, groups[group].blocks - groups[group].slabs[-1].shape[0])
            self.pool.free_slabs()
        if storage.nbytes < before:
            mx.clear_cache()  # once: a churn of freed buffers is linked to kernel panics on Macs

    def trim(self) -> None:
        if self.pool is not None and not self._options.keep_prefix:
            self.pool.clear()

    def store(self, tokens: Sequence[int], store: DiskStore, stop: Callable[[], bool]) -> None:
        if self.pool is not None:
            store_blocks(self.pool, tokens, store, stop)

    def load(self, prompt: Sequence[int], store: DiskStore) -> None:
        if self.pool is not None:
            load_blocks(self.pool, prompt, store)

    def clear(self) -> None:
        self._last = None
        if self.pool is not None:
            self.pool.evict_all()
        self.pool = self._new_pool()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all caches, the kept one included, and of idle slots; without the pool's."""
        nbytes = sum(cache.allocated_bytes for cache in self._caches if not cache.closed)
        return nbytes + idle_bytes(self.shared)

    @property
    def _excess(self) -> int:
        """Bytes that cached blocks take beyond the spare memory; negative if more may be allocated."""
        if self.pool is None:
            return 0
        return self.pool.storage.excess

    def _new_pool(self) -> BlockPool | None:
        """Return a pool for prefixes; None if sequences are alone, or rows are packed in MLX's own layout."""
        if self._alone or self._shape.format.packed:
            return None
        options = self._options
        spare: Callable[[], int] | None = None
        spare_beside = options.spare
        if spare_beside is not None:
            backend = proxy(self)  # a pool that owned its owner would outlive it until a garbage collection

            def bytes_left() -> int:
                return spare_beside(backend.allocated_bytes)

            spare = bytes_left
        storage = PagedArrays(self._shape, reference, spare)
        return make_pool(storage, options.max_running * (options.limit + BLOCK), options.key, options.limit)
