"""The cache of an ended sequence of mlx-lm's classes as one file of a `DiskStore`.

The file has the state of every part, and of the newest earlier mark, since a next prompt may open the last answer
differently. Its name follows from the tokens (`runtime.kv.disk.file_names`). Content is a safetensors file: arrays, and
other attributes as JSON.
"""

import json
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any

import mlx.core as mx

from headrace.models.mlx_lm.cache import MlxLmCache, leaves
from headrace.runtime.kv.disk import DiskStore, StoredBlock, file_names
from headrace.runtime.kv.prefix_index import digest
from headrace.runtime.ops import BLOCK


def store_cache(cache: MlxLmCache, tokens: Sequence[int], root: bytes, store: DiskStore) -> bool:
    """Write a cache, whose entries are of `tokens`, if the store lacks it; return whether the store has it now."""
    *_, (file_name, part) = file_names(root, tokens)
    parent = digest(root, tokens[: len(tokens) - len(part)], b"")
    key = digest(parent, part, bytes(len(part)))
    if store.has(file_name, key):
        return True
    arrays: list[mx.array] = []
    try:
        about = json.dumps(_packed(_state(cache), arrays))
    except TypeError:  # an attribute that JSON has no form for
        return False
    file = BytesIO()
    mx.save_safetensors(file, {str(number): array for number, array in enumerate(arrays)}, {"state": about})
    return store.put(file_name, StoredBlock(parent, key, tuple(part), bytes(len(part)), (file.getvalue(),)))


def load_cache(empty: MlxLmCache, prompt: Sequence[int], root: bytes, store: DiskStore) -> list[int]:
    """Fill an empty cache with the longest stored prefix of `prompt`; return the tokens of its entries, [] for none.

    Only the last tokens, less than a block, may differ from the prompt's.
    """
    for key, done in reversed(list(_ends(root, prompt))):
        block = store.get(key)
        if block is None or len(block.groups) != 1 or block.groups[0] is None or not block.tokens:
            continue
        tokens = [*prompt[:done], *block.tokens]
        if block.parent == digest(root, tokens[:done], b"") and _fill(empty, block.groups[0], len(tokens)):
            return tokens
    return []


def _ends(root: bytes, prompt: Sequence[int]) -> Iterator[tuple[bytes, int]]:
    """Yield the places where a stored cache may end, and the prompt tokens before its last block."""
    yield digest(root, (), b"end"), 0
    for number, (key, part) in enumerate(file_names(root, prompt)):
        if len(part) == BLOCK:
            yield key, number * BLOCK
            yield digest(key, (), b"end"), (number + 1) * BLOCK


def _state(cache: MlxLmCache) -> dict[str, object]:
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
    """Give an empty cache a stored state; return whether it fits the cache."""
    loaded: Any = mx.load(BytesIO(content), format="safetensors", return_metadata=True)
    arrays, about = loaded
    state = _unpacked(json.loads(about["state"]), [arrays[str(number)] for number in range(len(arrays))])
    mx.eval(list(arrays.values()))  # reads the file
    parts = leaves(cache.parts)
    if state["classes"] != [type(part).__name__ for part in parts] or not state["length"] == length <= cache.limit:
        return False
    for part, attributes in zip(parts, state["parts"], strict=True):
        vars(part).update(attributes)
    if state["mark"] is not None:
        cache.add_mark(state["mark"]["length"], state["mark"]["state"])
    cache.advance(length)
    cache.commit(length)
    cache.mark()
    return True


def _packed(tree: object, arrays: list[mx.array]) -> Any:
    """Return a tree as JSON values, with its arrays replaced by their numbers in `arrays`, which grows."""
    if isinstance(tree, mx.array):
        arrays.append(tree)
        return {"array": len(arrays) - 1}
    if isinstance(tree, dict):
        return {"dict": {name: _packed(each, arrays) for name, each in tree.items()}}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [_packed(each, arrays) for each in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"{type(tree).__name__} is neither an array nor a JSON value")


def _unpacked(tree: Any, arrays: Sequence[mx.array]) -> Any:
    if not isinstance(tree, dict):
        return tree
    [(kind, value)] = tree.items()
    if kind == "array":
        return arrays[value]
    if kind == "dict":
        return {name: _unpacked(each, arrays) for name, each in value.items()}
    values = [_unpacked(each, arrays) for each in value]
    if kind == "tuple":
        return tuple(values)
    return values
