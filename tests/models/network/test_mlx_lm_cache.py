"""Rolling mlx-lm's caches back: whatever has dropped entries from its front says no, whatever class it is of."""

from typing import Any

import mlx.core as mx
import pytest

from headrace.models.network.mlx_lm import MlxLmCache
from headrace.runtime.errors import EngineError

pytestmark = pytest.mark.peer
SIZE = 8


def caches() -> dict[str, Any]:
    from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache

    return {
        "chunked": [ChunkedKVCache(SIZE), KVCache()],
        "rotating": [RotatingKVCache(max_size=SIZE), KVCache()],
        "nested": [CacheList(ChunkedKVCache(SIZE), KVCache())],
    }


def feed(cache: MlxLmCache, tokens: int) -> None:
    """Append as a model would, one token at a time."""
    from headrace.models.network.mlx_lm_costs import leaves

    for _ in range(tokens):
        for part in leaves(cache.parts):
            if hasattr(part, "maybe_trim_front"):
                part.maybe_trim_front()
            part.update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
        cache.advance(1)


@pytest.mark.parametrize("kind", ["chunked", "rotating", "nested"])
def test_what_has_forgotten_cannot_go_back(kind: str) -> None:
    cache = MlxLmCache(caches()[kind], 64, [])
    feed(cache, SIZE - 3)
    assert cache.can_rollback
    feed(cache, SIZE)
    cache.commit(2 * SIZE - 3)
    assert not cache.can_rollback
    with pytest.raises(EngineError, match="forgotten"):
        cache.trim(3)


def test_the_step_ahead_is_taken_back_before_anything_is_forgotten() -> None:
    cache = MlxLmCache(caches()["chunked"], 64, [])
    feed(cache, 4)
    cache.commit(3)
    cache.rollback()
    assert (cache.length, [part.offset for part in cache.parts]) == (3, [3, 3])
