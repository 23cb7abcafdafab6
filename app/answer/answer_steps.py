"""Text and latency of an answer's decode steps, token by token, and their stored form.

A chat's turn collects them, the session store keeps them with the answer, and the transcript and the HTML export mark
draft tokens by them. `packed` and `unpacked` are one format, which stored sessions have: a change must read the old
form, too.

Guard: tests/app/answer/test_answer_steps.py.
"""

import json
import zlib
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta, Struct, field

from headrace.runtime.config.typed import typed

if TYPE_CHECKING:  # the chat's first frame does not import it
    from headrace.models.text.events import Completed, TextChunk

NEAR = 1.25  # times the usual latency: a slow step
FAR = 2.0  # times the usual latency: a very slow one
_MAX_BYTES = 1 << 26  # of a stored document, unpacked: a damaged one may unpack without end
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class StepText(NamedTuple):
    """Text of one step.

    pieces: text that each output token completed, often "" (half a character). A step that only ended the answer has
        one piece.
    accepted: number of accepted draft tokens; their pieces are the first ones.
    rejected: texts of rejected draft tokens, which were drafted after the accepted ones.
    """

    pieces: tuple[str, ...]
    accepted: int = 0
    rejected: tuple[str, ...] = ()

    @classmethod
    def of(cls, part: "TextChunk | Completed") -> "StepText":
        """Return the text of a step, or of the end of an answer."""
        return cls(part.pieces, 0 if part.record is None else part.record.accepted, part.rejected)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def __deepcopy__(self, _memo: object) -> "StepText":
        return self  # as of a `StepRecord`


def nearness(latency_s: float, usual_s: float) -> int:
    """Return 0 for a usual latency, 1 for a slow one, 2 for a very slow one, for the colours of steps."""
    return int(latency_s > usual_s * NEAR) + int(latency_s > usual_s * FAR)


class AnswerSteps(Struct):
    """Steps of an answer, in order. `latencies_s` may be shorter while the answer grows.

    start: characters of the answer before the first step: an earlier part, or text that the chat template wrote.
    """

    start: int = 0
    texts: list[StepText] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.texts)

    def accepted_spans(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) in the answer's text of accepted draft tokens, without empty spans."""
        position = self.start
        for pieces, accepted, _ in self.texts:
            end = position + sum(map(len, pieces[:accepted]))
            if end > position:
                yield position, end
            position += sum(map(len, pieces))

    def rejected(self) -> Iterator[tuple[int, str]]:
        """Yield (character of the answer's text, text) of rejected draft tokens, those of a step together."""
        position = self.start
        for pieces, accepted, rejected in self.texts:
            if text := "".join(rejected):
                yield position + sum(map(len, pieces[:accepted])), text
            position += sum(map(len, pieces))

    def joined_to(self, earlier: "AnswerSteps | None") -> "AnswerSteps":
        """Return the steps of the whole answer, if `earlier` are all of the part before; else these alone."""
        if earlier is None or earlier.start + len(earlier.text) != self.start:
            return self
        if len(earlier.latencies_s) != len(earlier.texts):
            return self
        latencies = [*earlier.latencies_s, *self.latencies_s]
        return AnswerSteps(earlier.start, [*earlier.texts, *self.texts], latencies)

    def packed(self) -> bytes:
        """Return the stored form: compressed JSON, pieces as lengths, latencies in microseconds."""
        # The text itself is the stored answer. A step of two pieces, "ab" and "c", one accepted: [[2, 1], 1, []]
        steps = [[list(map(len, step.pieces)), step.accepted, step.rejected] for step in self.texts]
        micros = [round(latency * 1e6) for latency in self.latencies_s]
        document = {"start": self.start, "steps": steps, "latencies_us": micros}
        return zlib.compress(json.dumps(document, separators=(",", ":")).encode())


class _StoredSteps(Struct):
    """The document of `AnswerSteps.packed`. Its numbers are bounded: up to 2**53 every integer is exact as a float."""

    start: _Count
    steps: list[tuple[list[_Count], _Count, tuple[str, ...]]]
    latencies_us: list[_Count]


def unpacked(data: object, content: str) -> AnswerSteps | None:
    """Return the steps of a stored answer with this text; None if they are damaged or of another text."""
    if not isinstance(data, bytes):
        return None
    try:
        stored = typed(_StoredSteps, json.loads(zlib.decompressobj().decompress(data, _MAX_BYTES)))
    except (zlib.error, ValueError, RecursionError):
        return None
    steps = AnswerSteps(stored.start, [], [micros / 1e6 for micros in stored.latencies_us])
    position = stored.start
    for lengths, accepted, rejected in stored.steps:
        ends = list(accumulate(lengths, initial=position))
        pieces = tuple(content[begin:end] for begin, end in pairwise(ends))
        if accepted > len(pieces):
            return None
        steps.texts.append(StepText(pieces, accepted, rejected))
        position = ends[-1]
    if position != len(content) or len(steps.latencies_s) > len(steps.texts):
        return None
    return steps
