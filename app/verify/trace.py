"""What a sequence said, token by token, what it left in the KV cache, and whether both are as they were before.

Of every step the log probabilities of the chosen token and the TOP likeliest are kept, and a digest of all logits of
the row; of every entry of the cache, where it is in blocks, a digest of its bytes in all layers.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import numpy as np

from headrace.runtime.engine.request import Event, Failed, Step, TokenLogprobs
from headrace.runtime.kv.paged_cache import PagedCache
from headrace.runtime.ops import BLOCK

TOP = 8


@dataclass(slots=True)
class Trace:
    """A sequence's answer, as far as it got, to a prompt of so many tokens."""

    prompt: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    entries: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (layer group, position) -> digest of K/V

    def add(self, event: Event) -> None:
        """What an event of the sequence brought. Raises what it failed with."""
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Step):
            assert event.logprobs is not None, "requests of a verification ask for them"
            self.tokens += event.tokens
            self.logprobs += event.logprobs

    def see(self, cache: Any) -> None:
        """The committed entries of the sequence's cache, before it is put away; packed ones where a block is full."""
        if not isinstance(cache, PagedCache):
            return
        for group, table in enumerate(cache.tables):
            for index in range(cache.left[group], -(-cache.committed // BLOCK)):
                first, end = index * BLOCK, min((index + 1) * BLOCK, cache.committed)
                held = cache.slabs.read(group, table[index], end - first)
                if cache.slabs.shape.format.packed:
                    if end - first == BLOCK:
                        self.entries[group, end - 1] = blake2b(np.array(held).tobytes(), digest_size=8).digest()
                    continue
                for position, content in enumerate(_rows(held), first):
                    self.entries[group, position] = blake2b(content, digest_size=8).digest()


def _rows(held: mx.array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Entries (L, 2, Hkv, n, D) -> their bytes (n, ...), one row each."""
    rows = mx.contiguous(mx.moveaxis(held, 3, 0)).reshape(held.shape[3], -1)
    return np.array(rows.view(mx.uint8))


@dataclass(frozen=True, slots=True)
class Flip:
    """Where another token was chosen. margin: by how much the first had been likelier; None: by more than TOP tell."""

    sequence: int
    position: int
    expected: int
    got: int
    margin: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one request. gap: the largest of log probabilities (natural logarithms).

    tokens, entries: compared. missing: tokens that should have been there. changed: the positions of entries of the
    cache whose bytes differ.
    """

    tokens: int
    same_bits: bool
    gap: float
    flip: Flip | None
    missing: int
    entries: int = 0
    changed: tuple[int, ...] = ()


def compare(sequence: int, expected: Trace, got: Trace, *, cut: bool = False) -> Comparison:
    """Hold `got` against `expected`, up to the first token that differs: what follows is the answer to another text.

    cut: it was to end at any time, so that only what there is counts.
    """
    same, gap, flip, count = True, 0.0, None, 0
    for position, (token, other) in enumerate(zip(expected.tokens, got.tokens, strict=False)):
        count += 1
        ours, theirs = expected.logprobs[position], got.logprobs[position]
        known, said = dict(ours.top), dict(theirs.top)
        gap = max([gap, *(abs(known[i] - said[i]) for i in known.keys() & said.keys())])
        if token != other:
            margin = known[token] - known[other] if token in known and other in known else None
            flip = Flip(sequence, position, token, other, margin)
            same = False
            break
        gap = max(gap, abs(ours.chosen - theirs.chosen))
        same = same and ours == theirs
    short = 0 if cut or flip else max(0, len(expected.tokens) - len(got.tokens))
    more = max(0, len(got.tokens) - len(expected.tokens)) if not flip else 0
    entries = expected.entries.keys() & got.entries.keys()
    if flip:  # what follows are entries of other tokens
        entries = {place for place in entries if place[1] < got.prompt + flip.position}
    changed = sorted({place[1] for place in entries if expected.entries[place] != got.entries[place]})
    same = same and not short and not more and not changed
    return Comparison(count, same, gap, flip, short + more, len(entries), tuple(changed))
