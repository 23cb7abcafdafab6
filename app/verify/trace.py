"""Traces of answers: tokens, log probabilities and digests of K/V, and their comparison.

Per step: log probabilities of the chosen token and the TOP most likely, and a digest of the row's logits. Per entry of
a paged cache: a digest of its bytes in all layers.

Guard: tests/app/verify/test_verify.py.
"""

from hashlib import blake2b
from typing import Any

import mlx.core as mx
import numpy as np
from msgspec import Struct, field

from headrace.runtime.engine.request import Event, SequenceFailed, Step, TokenLogprobs
from headrace.runtime.kv.paged import BlockTable
from headrace.runtime.ops import BLOCK

TOP = 8  # most likely tokens, for which log probabilities are compared


class Trace(Struct):
    """A sequence's answer so far."""

    prompt: int = 0  # number of its tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token
    entries: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (layer group, position) -> digest of K/V

    def add(self, event: Event) -> None:
        """Add an event of the sequence. Raises the error of a failed one."""
        if isinstance(event, SequenceFailed):
            raise event.error
        if isinstance(event, Step):
            assert event.logprobs is not None, "requests of a verification ask for them"
            self.tokens += event.tokens
            self.logprobs += event.logprobs

    def see(self, cache: object) -> None:
        """Digest the committed entries of a paged cache before its release; packed ones by full block.

        A full block's digest stands at its last position.
        """
        if not isinstance(cache, BlockTable):
            return
        for group, table in enumerate(cache.tables):
            for index in range(cache.dropped[group], -(-cache.committed // BLOCK)):
                first = index * BLOCK
                end = min((index + 1) * BLOCK, cache.committed)
                entries = cache.pool.storage.read(group, table[index], end - first)
                if cache.pool.storage.shape.format.packed:
                    # Packed entries of a block are interleaved, so only the bytes of a full block can be compared.
                    if end - first == BLOCK:
                        self.entries[group, end - 1] = blake2b(np.array(entries).tobytes(), digest_size=8).digest()
                    continue
                for position, content in enumerate(_rows(entries), first):
                    self.entries[group, position] = blake2b(content, digest_size=8).digest()


def _rows(entries: mx.array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes (n, ...) of entries (L, 2, Hkv, n, D), one row each."""
    rows = mx.contiguous(mx.moveaxis(entries, 3, 0)).reshape(entries.shape[3], -1)
    return np.array(rows.view(mx.uint8))  # bytes: NumPy has no bfloat16


class Flip(Struct, frozen=True):
    """A position where another token was chosen.

    sequence, position: from 0.
    expected, got: token ids.
    margin: in nats, by which the token is less likely; None if it is not among the TOP.
    expected_text, got_text: texts of the tokens; empty until they are decoded.
    """

    sequence: int
    position: int
    expected: int
    got: int
    margin: float | None
    expected_text: str = ""
    got_text: str = ""


class TraceComparison(Struct, frozen=True):
    """Two answers to one request.

    tokens: number compared.
    same_bits: nothing differs.
    gap: largest difference of log probabilities (natural logarithms).
    flip: the first different token; None if all are equal.
    missing: difference in length.
    entries: number of cache entries compared.
    changed: positions of cache entries with different bytes.
    """

    tokens: int
    same_bits: bool
    gap: float
    flip: Flip | None
    missing: int
    entries: int = 0
    changed: tuple[int, ...] = ()


def compare(sequence: int, expected: Trace, got: Trace, *, cut: bool = False) -> TraceComparison:
    """Compare up to the first different token; later tokens continue another text.

    cut: `got` may end early, so missing tokens do not count.
    """
    same = True
    gap = 0.0
    flip = None
    count = 0
    for position, (token, other) in enumerate(zip(expected.tokens, got.tokens, strict=False)):
        count += 1
        ours = expected.logprobs[position]
        theirs = got.logprobs[position]
        known = dict(ours.top)
        logprobs = dict(theirs.top)
        gap = max([gap, *(abs(known[i] - logprobs[i]) for i in known.keys() & logprobs.keys())])
        if token != other:
            margin = None
            if token in known and other in known:
                margin = known[token] - known[other]
            flip = Flip(sequence, position, token, other, margin)
            break
        gap = max(gap, abs(ours.chosen - theirs.chosen))
        same = same and ours == theirs
    entries = expected.entries.keys() & got.entries.keys()
    missing = 0
    if flip:  # later tokens and entries belong to another text
        entries = {entry for entry in entries if entry[1] < got.prompt + flip.position}
    else:
        missing = len(expected.tokens) - len(got.tokens)
        if cut:
            missing = min(0, missing)  # an answer that is longer than expected is wrong all the same
    changed = sorted({entry[1] for entry in entries if expected.entries[entry] != got.entries[entry]})
    same = same and flip is None and not missing and not changed
    return TraceComparison(count, same, gap, flip, abs(missing), len(entries), tuple(changed))
