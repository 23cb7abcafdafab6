"""What an open session says of its context."""

import pytest

from headrace.app.chat.session_branch import tokens_held


@pytest.mark.parametrize(
    ("completion", "reason", "held"), [(63, "length", 64), (40, "stop", 42), (40, "cancelled", 41)]
)
def test_a_full_context_holds_its_limit_and_not_one_more(completion: int, reason: str, held: int) -> None:
    """A prompt of two tokens; with a limit of 64 the answer is cut off at the 63rd, which is said and never fed."""
    assert tokens_held(2, completion, reason) == held
