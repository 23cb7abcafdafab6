"""Chat messages of a prompt from a session and a branch: pure functions.

The chat's answers and prefetches, and `headrace run`, make prompts here alone: equal prompts share their prefix in the
KV cache, so a message of a branch must give the same text every time.

Guards: tests/app/chat/test_conversation.py and test_session_branch.py.
"""

from collections.abc import Sequence
from itertools import groupby

from headrace.app.chat.attachments import with_attachments
from headrace.app.sessions.records import Attachment, Message, Session

ChatMessages = list[dict[str, str]]

# Longest summary: this number of tokens, and at most a quarter of the context.
_SUMMARY_TOKENS = 512
_SUMMARY_SHARE = 4
_SUMMARISE = (
    "Summarise our conversation so far for yourself, in at most {words} words. Keep names, numbers, decisions, open "
    "questions and what I asked you to remember. Write the summary only."
)
_SUMMARY_HEAD = "Summary of the conversation before this point:"


def first_sent(session: Session, branch: Sequence[Message]) -> int:
    """Return the index of the first message of the prompt: 0 if `prompt_from` is on another branch."""
    return next((i for i, message in enumerate(branch) if message.id == session.prompt_from), 0)


def runs(session: Session, branch: Sequence[Message]) -> list[list[Message]]:
    """Return the branch's messages, one list per message of the prompt.

    Successive messages of one role (an unanswered question) are one: many chat templates refuse them otherwise.
    """
    sent = branch[first_sent(session, branch) :]
    return [list(run) for _, run in groupby(sent, key=lambda message: message.role)]


def prompt_messages(
    session: Session, branch: Sequence[Message], content: str = "", attachments: tuple[Attachment, ...] = ()
) -> ChatMessages:
    """Return the system message, if any, then user and assistant messages in turns.

    content, attachments: an unsent message after the branch; both are empty without one.
    """
    if content or attachments:
        branch = [*branch, Message(0, session.id, None, "user", content, 0.0, attachments=attachments)]
    head = session.system
    if session.summary and first_sent(session, branch):
        head = f"{head}\n\n{_SUMMARY_HEAD}\n{session.summary}".strip()
    messages: ChatMessages = []
    if head:
        messages.append({"role": "system", "content": head})
    for run in runs(session, branch):
        texts = [with_attachments(message.by_kind.content, message.attachments) for message in run]
        thinking = [message.by_kind.thinking for message in run if message.by_kind.thinking is not None]
        messages.append({"role": run[0].role, "content": "\n\n".join(texts)})
        if thinking:
            messages[-1]["reasoning_content"] = "\n\n".join(thinking)
    return messages


def summary_tokens(limit: int | None) -> int:
    """Return the longest summary in tokens; limit: of the context."""
    if limit is None:
        return _SUMMARY_TOKENS
    return min(_SUMMARY_TOKENS, max(1, limit // _SUMMARY_SHARE))


def summary_messages(session: Session, branch: Sequence[Message], tokens: int) -> ChatMessages:
    """Return the messages that ask for a summary of everything before the last user message."""
    request = _SUMMARISE.format(words=tokens * 2 // 5)  # two and a half tokens a word, with room to spare
    last = max(i for i, message in enumerate(branch) if message.role == "user")
    messages = prompt_messages(session, branch[:last])
    if messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += f"\n\n{request}"
    else:
        messages.append({"role": "user", "content": request})
    return messages
