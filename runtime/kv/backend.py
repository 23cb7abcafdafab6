"""KV cache allocation and prefix reuse, with one interface: acquire, release, make_passes.

`runtime.kv.paged` keeps K/V in blocks, for the native kernels. `runtime.kv.buffers` keeps them in contiguous buffers,
for stock MLX. `models.mlx_lm.backend` wraps mlx-lm's caches. The network chooses one per engine.

On several machines `LeaderBackend` (`runtime.ranks.leader`) is one, too, and followers repeat its calls. All calls come
on the engine's thread. tests/runtime/kv/test_cache_protocol.py runs an engine over an implementation of its own.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from headrace.runtime.kv.cache import KVCache, KVPass, PassRow
from headrace.runtime.kv.disk import DiskStore
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.ops import Phase


class KVOptions(Struct, frozen=True):
    """Requirements of one engine.

    limit: entries of a sequence, at most.
    max_running: sequences with a cache at a time.
    keep_prefix: K/V outlive their sequence, answers included, for later prompts with the same beginning; else only
        entries equal to a cold prefill are shared, among concurrent sequences.
    key: identity of the K/V on disk.
    spare: takes the bytes of all caches, and returns those that are free for cached blocks; None for no bound.
    """

    limit: int
    max_running: int = 1
    keep_prefix: bool = False
    key: bytes = b""
    spare: Callable[[int], int] | None = None


class KVBackend(Protocol):
    """All K/V memory of one engine, or of a network that drafts for one sequence."""

    rolls_back: bool
    """True if caches can drop their newest entries, so that draft tokens can be verified."""

    shares_prefixes: bool
    """True if a sequence can begin with a running one's entries."""

    copies_to_grow: bool
    """True if a full cache is copied to grow, so that room for output is reserved with the prompt's."""

    @property
    def pool(self) -> BlockPool | None:
        """Blocks shared by sequences; None without prefix sharing."""
        ...

    def acquire(self, prompt: Sequence[int], entries: int = 0, /) -> KVCache:
        """Return a cache with the longest available prefix of `prompt`, at most all tokens but the last.

        entries: reserved for the sequence; a cache that is copied to grow gets room for all of them at once.
        """
        ...

    def make_passes(self, rows: Sequence[PassRow]) -> list[KVPass]:
        """Reserve room and return one pass for all rows, or several if rows cannot share one; rows keep their order."""
        ...

    def release(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Take back a cache, nothing pending; its entries are those of the first of `tokens`."""
        ...

    def on_prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Make the committed entries, of the first of `tokens`, available to other sequences; nothing is pending."""
        ...

    def evict(self) -> None:
        """Free cached memory beyond `KVOptions.spare`, after reservations changed."""
        ...

    def trim(self) -> None:
        """Free memory that no later prompt needs; no sequence is left."""
        ...

    def store(self, tokens: Sequence[int], store: DiskStore, stop: Callable[[], bool]) -> None:
        """Write the cached entries of `tokens` that the disk lacks. Ends early, at a file's end, if `stop()`."""
        ...

    def load(self, prompt: Sequence[int], store: DiskStore) -> None:
        """Cache the disk's entries of a prompt's beginning."""
        ...

    def clear(self) -> None:
        """Drop everything, after an error or at the end."""
        ...


def one_pass(kv: KVBackend, cache: KVCache, tokens: int, phase: Phase = "prefill", *, output: bool = True) -> KVPass:
    """Return a pass of one row. output: its logits are computed."""
    [kv_pass] = kv.make_passes([PassRow(cache, tokens, phase, output, tokens if output else 0)])
    return kv_pass
