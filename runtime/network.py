"""What the engine needs of a model. `models/` provides it; the runtime never learns which architecture it is."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from headrace.runtime.kv.cache import Cache
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.ops import Phase
from headrace.runtime.ops.kv_format import KVFormat

C = TypeVar("C", bound=Cache)


class Network(Protocol[C]):
    """Stages 1 to 4 of a decode step. B = sequences, T = new tokens, V = vocabulary."""

    @property
    def cost(self) -> StepCost:
        """Bytes and FLOPs of one step, from shapes."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_format(self) -> KVFormat | None:
        """How its caches store K/V; None where that is theirs to know."""
        ...

    @property
    def arrays(self) -> list[mx.array]:
        """Every array it holds, to load before the first step and to count."""
        ...

    def make_cache(self, limit: int) -> C:
        """An empty cache for one sequence of at most `limit` tokens."""
        ...

    @property
    def joins(self) -> bool:
        """Whether several sequences can share a pass. Where they cannot, they take turns."""
        ...

    @property
    def rolls_back(self) -> bool:
        """Whether its caches can take back what was appended last, so that guesses can be verified."""
        ...

    def make_pool(self, entries: int, kept: int, key: bytes = b"") -> Any:
        """A `KVPool` that makes caches for `join`, of at most so many entries together; None where there is none."""
        ...

    def shares_pass(self, caches: Sequence[C], rows: Sequence[tuple[int, Phase]], /) -> bool:
        """Where it `joins`: whether a pass of so many rows of each, of the phase named, is to be shared."""
        ...

    def join(self, caches: Sequence[C], rows: Sequence[tuple[int, Phase]], /) -> Any:
        """The caches of several sequences as one, for a pass (1, N) of so many rows of each, of the phase named."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids (B, T) -> what `layers` takes."""
        ...

    def layers(self, x: mx.array, cache: C) -> mx.array:
        """All layers, each appending T keys and values to `cache` and attending over all of it."""
        ...

    def logits(self, x: mx.array) -> mx.array:
        """Logits of the last position: what `layers` gave -> (B, V)."""
        ...
