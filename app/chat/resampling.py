"""Sampling settings for another answer to a question that has one."""

from headrace.app.answer.options import AnswerOptions
from headrace.app.chat.session_branch import SessionBranch
from headrace.runtime.errors import UsageError

WARM = AnswerOptions(temperature=0.7, min_p=0.05)
"""Sampling of another answer in place of greedy decoding."""
WARMER = f"temperature 0 would repeat the answer: sampled at {WARM.temperature}"


def question_of(branch: SessionBranch, message_id: int | None) -> tuple[int, bool]:
    """Return the question that this message (None: the last) asks or answers, and whether the branch answers it."""
    if not branch.messages:
        raise UsageError("nothing was asked yet")
    again = branch.messages[-1] if message_id is None else branch.message(message_id)
    question = again.id if again.role == "user" else again.parent_id
    if question is None:
        raise UsageError("no question stands before this answer")
    return question, any(message.parent_id == question for message in branch.messages)


def resampled(branch: SessionBranch, question: int, *, greedy: bool, later: int = 0) -> dict[str, object]:
    """Return the settings of one more answer, after `later` others: another seed, no greedy sampling."""
    sampling = dict(branch.session.sampling)
    if greedy:
        sampling |= WARM.given()
    seed = sampling.get("seed")
    if isinstance(seed, int):
        answer = next((message for message in branch.messages if message.parent_id == question), None)
        existing = len(branch.store.alternatives(answer)) if answer is not None else 0
        sampling["seed"] = (seed + existing + later) % 2**64
    return sampling
