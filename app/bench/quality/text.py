"""The scored text in a model's tokens: `assets/quality_text.txt` or a file.

The scored tokens are the last ones of the text, the same at every depth; only the context before them differs.

Guard: tests/app/bench/quality/test_quality_run.py.
"""

import io
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from headrace.app.config.bounded_input import PROMPT, decoded, read_bounded
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.config.paths import ASSETS
from headrace.runtime.errors import UsageError

SHIPPED = ASSETS / "quality_text.txt"
DEPTHS = (0, 1024, 4096)
"""Tokens in the cache, unless -d names others."""
SCORED = 512
"""Tokens that are scored at each depth, unless -n says otherwise."""


class Passage(Struct, frozen=True):
    """A context and the tokens fed after it; `targets` are the next tokens of each."""

    context: list[int]
    fed: list[int]
    targets: list[int]


def read_text(file: Path | None) -> str:
    """Return the text of a file, None for the shipped one. Raises UsageError for an unreadable file."""
    file = file or SHIPPED
    return io.StringIO(decoded(read_bounded(file, PROMPT), str(file)), newline=None).read()  # any line ends


def passages(
    text: str, tokenizer: Tokenizer, depths: Sequence[int], scored: int, room: int, *, asked: bool
) -> dict[int, Passage]:
    """Return a passage per depth, with the last `scored` tokens of the text as targets.

    `depth` tokens are in the cache. One more is fed before the targets, and predicts the first of them.
    A BOS token goes first, in the context or before the text. Depths without enough text or room are left out.

    text: the whole text.
    tokenizer: of the models.
    depths: numbers of tokens in the cache.
    scored: number of targets.
    room: the models' context limit.
    asked: the user named the depths, so none may be left out.
    Raises UsageError for such a depth, and if no depth is left.
    """
    ids = tokenizer.encode(text)
    opening = tokenizer.encode_prompt("")  # BOS, or nothing
    # The greatest depth: one token of the text is fed before the targets, and the opening is in the context.
    longest = min(len(ids) - 1 + len(opening), room) - scored
    fitting = [depth for depth in depths if depth <= longest]
    if not fitting or (asked and len(fitting) < len(depths)):
        limit = f"the text has {len(ids):,} tokens"
        if room < len(ids):
            limit = f"the model takes {room:,} tokens"
        hint = "use a smaller -n, or a longer --text"
        if longest >= 0:
            hint = f"use -d up to {longest:,}"
        raise UsageError(f"{limit}: not enough for {scored:,} scored tokens at depth {max(depths):,}", hint)
    start = len(ids) - scored  # of the targets
    return {depth: _passage(ids, start, depth, opening) for depth in fitting}


def _passage(ids: list[int], start: int, depth: int, opening: list[int]) -> Passage:
    """Return the passage of the targets from `start` on. opening: tokens that begin every text of this tokenizer."""
    targets = ids[start:]
    # The token before the targets is fed as well, since it predicts the first. The context is the text before it, in
    # `depth` tokens with the opening; at depth 0 the opening is fed in its place.
    if depth == 0:
        return Passage([], [*(opening or [ids[start - 1]]), *targets[:-1]], targets)
    before = depth - len(opening)
    return Passage([*opening, *ids[start - 1 - before : start - 1]], ids[start - 1 : -1], targets)
