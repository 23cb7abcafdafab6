"""The cache of an ended sequence of mlx-lm's classes as one file of a `DiskStore`.

The file has the state of every part, and of the newest earlier mark, since a next prompt may open the last answer
differently. Its name follows from the tokens (`runtime.kv.disk.file_names`). Content is a safetensors file: arrays, and
other attributes as JSON.

Guard: tests/models/mlx_lm/test_prefixes.py.
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
