"""A `Constraint` of llguidance: an Earley parser over the bytes of tokens (https://github.com/guidance-ai/llguidance).

llguidance raises nothing: a matcher enters an error state, in which it allows the end of the turn. So `masks` and
`accept` check the state; the masks come before a token is chosen, and find an error of `allowed` and `forced`, too.

Guard: tests/models/text/structured/test_grammars.py.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher
from msgspec import Struct

from headrace.models.text.structured.json_scan import ByteFlags, JsonState, JsonTokens
from headrace.runtime.errors import EngineError

_MAX_MESSAGE = 200  # characters of llguidance's message


class MatcherGrammar(Struct, frozen=True):
    """A compiled grammar.

    matcher: in its first state.
    vocab_size: logits of the network.
    ends: end-of-turn tokens, at least one.
    json: the vocabulary, if the answer is JSON.
    """

    matcher: LLMatcher
    vocab_size: int
    ends: Sequence[int]
    json: JsonTokens | None = None

    def start(self) -> "Matcher":
        """Return the state of a new answer."""
        return Matcher(self)


class Matcher:
    """State of one sequence. See `Constraint`."""

    def __init__(self, grammar: MatcherGrammar) -> None:
        self._matcher = grammar.matcher.deep_copy()
        self._vocab_size = grammar.vocab_size
        self._ends = grammar.ends
        self._json = grammar.json
        self._state: JsonState | None = None
        if grammar.json is not None:
            self._state = grammar.json.start()

    def masks(self, draft_tokens: Sequence[int]) -> mx.array:
        # The row of the next token, then one after each draft token that the grammar allows.
        state = self._state
        rows = [self._mask(state)]
        num_consumed = 0
        for token in draft_tokens:
            if not self._matcher.try_consume_tokens([token]):
                break
            num_consumed += 1
            state = self._after(state, [token])
            rows.append(self._mask(state))
        if num_consumed:
            self._matcher.rollback(num_consumed)
        self._check()
        # Rows after the first token that is not allowed: they are not used, so they allow all.
        rows += [np.ones(self._vocab_size, np.bool_)] * (1 + len(draft_tokens) - len(rows))
        return mx.array(np.stack(rows))

    def accept(self, tokens: Sequence[int]) -> None:
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            raise EngineError(f"the answer left its grammar: {first_line(self._matcher.get_error())}")
        self._state = self._after(self._state, tokens)

    def allowed(self, draft_tokens: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(draft_tokens))

    def forced(self) -> Sequence[int]:
        """See `Constraint`. After a whole answer, this is the end of the turn."""
        if self._matcher.is_stopped():
            return self._ends[:1]
        return self._matcher.compute_ff_tokens()

    def _mask(self, state: JsonState | None) -> ByteFlags:
        """Return the allowed tokens (V,)."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        row = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._json is None:
            return row
        return self._json.narrow(row, state)

    def _after(self, state: JsonState | None, tokens: Sequence[int]) -> JsonState | None:
        """Return the state of JSON after more tokens."""
        if self._json is None:
            return None
        return self._json.after(state, tokens)

    def _check(self) -> None:
        """Raise EngineError if the matcher is in its error state."""
        if self._matcher.is_error():
            raise EngineError(f"no token can follow: {first_line(self._matcher.get_error())}")


def first_line(message: str) -> str:
    """Return the first line of llguidance's message, without the state of its parser."""
    line = next((line for line in message.splitlines() if line.strip()), "unknown error")
    return line.removeprefix("Error: ").partition("; state:")[0][:_MAX_MESSAGE]
