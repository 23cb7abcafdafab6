"""Answers whose storing fails: tried again in order, unless they were deleted."""

import pytest

from headrace.app.chat.unstored_answers import UnstoredAnswers
from headrace.runtime.errors import DeletedError, SessionError


def test_answers_are_stored_in_order_once_the_store_works() -> None:
    stored: list[str] = []
    failures = [SessionError("the disk is full")]

    def first() -> None:
        if failures:
            raise failures.pop()
        stored.append("first")

    unstored = UnstoredAnswers()
    unstored.add(first)
    unstored.add(lambda: stored.append("second"))
    with pytest.raises(SessionError):
        unstored.settle()
    assert (stored, len(unstored), unstored.retry_due) == ([], 2, False)
    unstored.settle()
    assert (stored, len(unstored)) == (["first", "second"], 0)


def test_a_deleted_answer_is_given_up() -> None:
    def deleted() -> None:
        raise DeletedError("the session was deleted")

    unstored = UnstoredAnswers()
    unstored.add(deleted)
    with pytest.raises(DeletedError):
        unstored.settle()
    assert not unstored
