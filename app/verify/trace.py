"""What a sequence said, token by token, and whether it is what it said before.

Every step's log probabilities are kept of the chosen token and the TOP likeliest. They are taken over the whole
vocabulary, so they tell of all logits of the row.
"""

from dataclasses import dataclass, field

from headrace.runtime.request import Event, Step, TokenLogprobs

TOP = 8


@dataclass(slots=True)
class Trace:
    """A sequence's answer, as far as it got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """What an event of the sequence brought."""
        if isinstance(event, Step):
            assert event.logprobs is not None, "requests of a verification ask for them"
            self.tokens += event.tokens
            self.logprobs += event.logprobs


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
    """Two answers to one request. tokens: compared. gap: the largest of log probabilities (natural logarithms)."""

    tokens: int
    same_bits: bool
    gap: float
    flip: Flip | None
    missing: int
    """Tokens that should have been there."""


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
    return Comparison(count, same and not short and not more, gap, flip, short + more)
