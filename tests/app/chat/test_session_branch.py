"""Context tokens of a stored session."""

import pytest

from headrace.app.chat.session_branch import tokens_held


@pytest.mark.parametrize(
    ("completion", "reason", "held"), [(63, "length", 64), (40, "stop", 42), (40, "cancelled", 41)]
)
def test_tokens_held_by_a_full_context_are_its_limit(completion: int, reason: str, held: int) -> None:
    """With a limit of 64, an answer to two prompt tokens ends at its 63rd token, which is never fed."""
    assert tokens_held(2, completion, reason) == held
