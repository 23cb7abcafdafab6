"""K/V backend of mlx-lm's caches: one list of mlx-lm's own caches per sequence, and prefix reuse between them.

The engine calls it as any `runtime.kv.backend.KVBackend`. A cache (`cache.MlxLmCache`) can go back to an earlier length
only where its parts have all entries, or a mark: `reachable` says how far.

Guards: tests/models/mlx_lm/test_cache.py and test_prefixes.py.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from msgspec import Struct

from headrace.models.mlx_lm.cache import CachePart, MlxLmCache, leaves
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.cache import KVCache, KVPass, PassRow
from headrace.runtime.kv.common_prefix import common_prefix
from headrace.runtime.kv.disk import DiskStore, StoredBlock, file_names
from headrace.runtime.kv.prefix_index import digest
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.ops import BLOCK, AttentionSpec, LayersNode, MixerSpec, Projections


class MlxLmPass:
    """One row. The model gets the parts of its cache; its layers append and attend."""

    runs_fused = False

    def __init__(self, rows: Sequence[PassRow]) -> None:
        self.rows = rows
        [row] = rows
        assert isinstance(row.cache, MlxLmCache)
        self._cache = row.cache
        # Draft tokens may be rejected. Recurrent state has no entries to drop, so that from before the pass is kept.
        if self._cache.needs_marks and row.phase == "decode" and row.count > 1:
            self._cache.hold()

    def attend(self, _layer: int, _qkv: Projections, _spec: AttentionSpec) -> mx.array:
        raise NotImplementedError("mlx-lm's classes attend by themselves")

    def mix(self, _layer: int, _x: mx.array, _spec: MixerSpec) -> mx.array:
        raise NotImplementedError("mlx-lm's classes keep their recurrent state by themselves")

    def run_fused(self, _layers: slice, _x: mx.array, _node: LayersNode) -> mx.array:
        raise NotImplementedError("mlx-lm's classes attend by themselves")

    def advance(self) -> None:
        self._cache.advance(self.rows[0].count)

    @property
    def arrays(self) -> list[mx.array]:
        return self._cache.arrays


class EndedSequence(Struct, frozen=True):
    """The cache of an ended sequence, and the tokens of all its entries."""

    cache: MlxLmCache
    tokens: list[int]
    nbytes: int  # allocated when it ended


class PrefixCaches:
    """Caches that prompts can begin with: those of ended sequences, and of running ones up to their prompt.

    Copies share memory until they are written to.
    max_entries: of all ended sequences; the newest is cached whatever its length.
    spare: bytes free for cached sequences beside caches of so many bytes; None for no bound.
    can_copy: False if only an ended sequence's cache itself can go on.
    """

    def __init__(self, max_entries: int, spare: Callable[[int], int] | None, *, can_copy: bool) -> None:
        self._max_entries = max_entries
        self._spare = spare
        self._can_copy = can_copy
        self._ended: list[EndedSequence] = []  # the most recent last
        self._prompts: WeakKeyDictionary[MlxLmCache, list[int]] = WeakKeyDictionary()  # committed, of running ones

    def take(self, prompt: Sequence[int]) -> MlxLmCache | None:
        """Return a cache with the longest available prefix of `prompt`, all tokens but the last at most, or None."""
        wanted = prompt[:-1]
        length = 0
        source: MlxLmCache | EndedSequence | None = None
        for ended in reversed(self._ended):  # of equal lengths, the most recent
            reachable = ended.cache.reachable(common_prefix(ended.tokens, wanted))
            if reachable > length:
                length = reachable
                source = ended
        if self._can_copy:
            for running, tokens in list(self._prompts.items()):
                reachable = running.reachable(common_prefix(tokens, wanted))
                if reachable > length:
                    length = reachable
                    source = running
        if source is None:
            return None
        if isinstance(source, MlxLmCache):
            cache = source.duplicate()
        elif length == len(source.tokens) or not self._can_copy:
            # The prompt goes on with the whole sequence, or nothing but the cache itself can go on.
            self._ended.remove(source)
            cache = source.cache
        else:
            cache = source.cache.duplicate()
        cache.trim(length)
        return cache

    def has(self, prompt: Sequence[int]) -> bool:
        """Return whether an ended sequence has entries of `prompt` only."""
        return any(ended.tokens == list(prompt[: len(ended.tokens)]) for ended in self._ended)

    def add_running(self, cache: MlxLmCache, prompt: Sequence[int]) -> None:
        """Offer the committed entries, of the first of `prompt`, while the cache lives."""
        self._prompts[cache] = list(prompt[: cache.committed])

    def end(self, cache: MlxLmCache, tokens: Sequence[int], *, outputs: bool) -> None:
        """Keep the cache of an ended sequence; its committed entries are of the first of `tokens`.

        outputs: with the output's entries; else with those of a prompt that was offered, if it was.
        """
        prompt = self._prompts.pop(cache, [])
        if not outputs:
            if not prompt:
                return
            cache.trim(cache.reachable(min(len(prompt), cache.committed)))
        if not cache.committed:
            return
        cache.mark()
        committed = list(tokens[: cache.committed])
        # An ended sequence that this one begins with is dropped if this cache can go back to its whole length. A cache
        # with marks may have fewer of them within that length.
        self._ended = [
            ended
            for ended in self._ended
            if ended.tokens != committed[: len(ended.tokens)] or cache.reachable(len(ended.tokens)) != len(ended.tokens)
        ]
        self._ended.append(EndedSequence(cache, committed, cache.allocated_bytes))
        while len(self._ended) > 1 and sum(len(ended.tokens) for ended in self._ended) > self._max_entries:
            del self._ended[0]

    def evict(self) -> None:
        """Drop the oldest ended sequences beyond the spare memory."""
        if self._spare is None:
            return
        # `spare` takes the larger of reserved and allocated bytes. 0: here running sequences count with those reserved.
        while self._ended and sum(ended.nbytes for ended in self._ended) > self._spare(0):
            del self._ended[0]

    def clear(self) -> None:
        """Drop all."""
        self._ended.clear()
        self._prompts.clear()

    def __iter__(self) -> Iterator[EndedSequence]:
        return iter(self._ended)


class MlxLmBackend:
    """Caches of one mlx-lm model.

    Each row is a pass of its own: mlx-lm's caches are those of one sequence.
    options: requirements of the engine.
    make_parts: returns empty caches, one a layer.
    cost: of the model's step, for the bytes of entries.
    rolls_back: the caches can drop their newest entries.
    can_copy: False if a cache's entries belong to that object alone.
    """

    pool = None

    def __init__(
        self,
        options: KVOptions,
        make_parts: Callable[[], list[CachePart]],
        cost: StepCost,
        *,
        rolls_back: bool,
        can_copy: bool = True,
    ) -> None:
        self._options = options
        self._make_parts = make_parts
        self._cost = cost
        self.rolls_back = rolls_back
        self.shares_prefixes = can_copy
        self.copies_to_grow = False
        self._prefixes = PrefixCaches(options.limit, options.spare, can_copy=can_copy)

    def acquire(self, prompt: Sequence[int], _entries: int = 0) -> KVCache:
        return self._prefixes.take(prompt) or self._new_cache()

    def release(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, MlxLmCache)
        # With `keep_prefix` all committed entries stay, those of the output included. Else those of the prompt stay for
        # sequences that run meanwhile, until `trim`; none if caches cannot be copied.
        if self._options.keep_prefix or self.shares_prefixes:
            self._prefixes.end(cache, tokens, outputs=self._options.keep_prefix)

    def make_passes(self, rows: Sequence[PassRow]) -> list[KVPass]:
        return [MlxLmPass([row]) for row in rows]

    def on_prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, MlxLmCache)
        if cache.needs_marks:
            cache.mark()
        self._prefixes.add_running(cache, tokens)

    def evict(self) -> None:
        self._prefixes.evict()

    def trim(self) -> None:
        if not self._options.keep_prefix:
            self._prefixes.clear()

    def store(self, tokens: Sequence[int], store: DiskStore, stop: Callable[[], bool]) -> None:
        for prefix in self._prefixes:
            if prefix.tokens == list(tokens[: len(prefix.tokens)]) and not stop():
                store_cache(prefix.cache, prefix.tokens, self._options.key, store)

    def load(self, prompt: Sequence[int], store: DiskStore) -> None:
        if self.shares_prefixes and not self._prefixes.has(prompt):
            cache = self._new_cache()
            tokens = load_cache(cache, prompt, self._options.key, store)
            if tokens:
                self._prefixes.end(cache, tokens, outputs=True)

    def _new_cache(self) -> MlxLmCache:
        return MlxLmCache(self._make_parts(), self._options.limit, self._cost.kv)

    def clear(self) -> None:
        self._prefixes.clear()


# --- the cache of an ended sequence as one file of a `DiskStore` -------------------------------------------------
#
# The file has the state of every part, and of the newest earlier mark, since a next prompt may open the last answer
# differently. Its name follows from the tokens (`runtime.kv.disk.file_names`). Content is a safetensors file: arrays,
# and other attributes as JSON.


def store_cache(cache: MlxLmCache, tokens: Sequence[int], root: bytes, store: DiskStore) -> bool:
    """Write a cache, if the store lacks it; return whether the store has it now.

    tokens: of the cache's entries, at least one.
    root: the key of the model's files and kernels.
    store: gets the whole cache as the last block of these tokens.
    """
    file_name, block_tokens = list(file_names(root, tokens))[-1]
    parent = digest(root, tokens[: len(tokens) - len(block_tokens)], b"")
    decode_written = bytes(len(block_tokens))
    key = digest(parent, block_tokens, decode_written)
    if store.has(file_name, key):
        return True
    arrays: list[mx.array] = []
    try:
        document = json.dumps(_pack(_state(cache), arrays))
    except TypeError:  # an attribute that JSON has no form for
        return False
    file = BytesIO()
    mx.save_safetensors(file, {str(number): array for number, array in enumerate(arrays)}, {"state": document})
    return store.put(file_name, StoredBlock(parent, key, tuple(block_tokens), decode_written, (file.getvalue(),)))


def load_cache(empty: MlxLmCache, prompt: Sequence[int], root: bytes, store: DiskStore) -> list[int]:
    """Fill an empty cache with the longest stored prefix of `prompt`; return the tokens of its entries, [] for none.

    Only the last tokens, less than a block, may differ from the prompt's.

    root, store: see `store_cache`.
    """
    for file_name, num_before in reversed(list(_possible_files(root, prompt))):
        block = store.get(file_name)
        if block is None or len(block.groups) != 1 or block.groups[0] is None or not block.tokens:
            continue
        tokens = [*prompt[:num_before], *block.tokens]
        is_of_prompt = block.parent == digest(root, tokens[:num_before], b"")
        if is_of_prompt and _fill(empty, block.groups[0], len(tokens)):
            return tokens
    return []


def _possible_files(root: bytes, prompt: Sequence[int]) -> Iterator[tuple[bytes, int]]:
    """Yield the names of the files that a prefix may be in, shortest first, each with the tokens before its block.

    After each whole block of the prompt another partial one may follow, whatever its tokens are.
    """
    yield digest(root, (), b"end"), 0
    for number, (file_name, block_tokens) in enumerate(file_names(root, prompt)):
        if len(block_tokens) == BLOCK:
            yield file_name, number * BLOCK
            yield digest(file_name, (), b"end"), (number + 1) * BLOCK


def _state(cache: MlxLmCache) -> dict[str, object]:
    """Return the attributes of every part, and the newest earlier mark, as a tree with arrays."""
    mark_document = None
    mark = cache.mark_before(cache.committed)
    if mark is not None:
        mark_document = {"length": mark.length, "state": mark.state}
    parts = leaves(cache.parts)
    return {
        "length": cache.committed,
        "classes": [type(part).__name__ for part in parts],
        "parts": [dict(vars(part)) for part in parts],
        "mark": mark_document,
    }


def _fill(cache: MlxLmCache, content: bytes, length: int) -> bool:
    """Give an empty cache a stored state; return whether it fits the cache.

    content: of the safetensors file.
    length: entries that the state has to have.
    """
    loaded: Any = mx.load(BytesIO(content), format="safetensors", return_metadata=True)
    arrays, metadata = loaded
    state = _unpack(json.loads(metadata["state"]), [arrays[str(number)] for number in range(len(arrays))])
    mx.eval(list(arrays.values()))  # reads the file
    parts = leaves(cache.parts)
    if state["classes"] != [type(part).__name__ for part in parts]:
        return False
    if state["length"] != length or length > cache.limit:
        return False
    for part, attributes in zip(parts, state["parts"], strict=True):
        vars(part).update(attributes)
    if state["mark"] is not None:
        cache.add_mark(state["mark"]["length"], state["mark"]["state"])
    cache.advance(length)
    cache.commit(length)
    cache.mark()
    return True


def _pack(tree: object, arrays: list[mx.array]) -> Any:
    """Return a tree as JSON values. Each array is added to `arrays`, and stands as its number there.

    Containers are objects of one entry, whose key names the type: {"tuple": [...]}.
    """
    if isinstance(tree, mx.array):
        arrays.append(tree)
        return {"array": len(arrays) - 1}
    if isinstance(tree, dict):
        return {"dict": {name: _pack(value, arrays) for name, value in tree.items()}}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [_pack(value, arrays) for value in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"{type(tree).__name__} is neither an array nor a JSON value")


def _unpack(packed: Any, arrays: Sequence[mx.array]) -> Any:
    """Return the tree that `_pack` made JSON values of."""
    if not isinstance(packed, dict):
        return packed
    [(kind, content)] = packed.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {name: _unpack(value, arrays) for name, value in content.items()}
    values = [_unpack(value, arrays) for value in content]
    if kind == "tuple":
        return tuple(values)
    return values
