"""Questions on lines: a choice by key, a full context, a full disk."""

from collections.abc import Sequence
from typing import cast

from headrace.app.chat.context_question import CONTEXT_CHOICES, DISK_CHOICES, ContextChoice
from headrace.app.chat.conversation import Conversation
from headrace.app.line_chat.terminal import Lines, say
from headrace.runtime.errors import UsageError


def choose(lines: Lines, text: str, answers: Sequence[tuple[str, str, str]]) -> str | None:
    """Ask until the key of one of `answers` (name, key, description) is typed. Return its name; None for Ctrl-C."""
    say(lines, text)
    for _, key, description in answers:
        say(lines, f"{key}: {description}")
    names = {key: name for name, key, _ in answers}
    while True:
        try:
            typed = lines.read(f"{' or '.join(names)}? ").strip().lower()
        except (KeyboardInterrupt, EOFError):
            lines.write("\n")
            return None
        except UsageError:
            continue
        if typed in names:
            return names[typed]


def agreed(lines: Lines, question: str) -> bool:
    """Ask a question that is answered by yes or no."""
    return choose(lines, question, [("yes", "y", "yes"), ("no", "n", "no")]) == "yes"


def ask_about_context(lines: Lines, conversation: Conversation) -> bool:
    """Ask how the open context question is to be resolved, and resolve it. Return whether it was."""
    question = conversation.trimming.question
    if question is None:
        return False
    answers = [answer for answer in CONTEXT_CHOICES if answer[0] in question.choices]
    choice = choose(lines, f"The context is full. {question.text}", answers)
    if choice is None:
        return False
    conversation.resolve(cast(ContextChoice, choice))
    return True


def ask_about_disk(lines: Lines, conversation: Conversation) -> None:
    """Offer to go on without saving, after the disk of the sessions was full. Raises SessionError."""
    path = conversation.store.db.path
    choice = choose(lines, f"The disk is full: the sessions in {path} cannot be written.", DISK_CHOICES)
    if choice == "unsaved":
        conversation.store.go_unsaved()
    if choice is not None:
        conversation.settle()
