"""A full context: the question to the user, and trimming of the prompt.

Trimming drops the oldest turns or replaces them by a summary, with undo. The messages stay in the session: its
`prompt_from` is the first one that is still sent, and `summary` stands for those before it (`app.chat.prompt`).
`Conversation` owns a `ContextTrimming`, and both surfaces ask its `question`.

Guards: tests/app/chat/test_conversation.py and tests/tui/test_summary.py.
"""

from msgspec import Struct

from headrace.app.chat.prompt import runs
from headrace.app.chat.session_branch import SessionBranch
from headrace.app.sessions.records import Message
from headrace.runtime.errors import UsageError

_CHOICES = (
    ("drop", "d", "leave out the oldest turns"),
    ("summarise", "s", "summarise the oldest turns, then leave them out"),
    ("new", "n", "continue in a new session"),
)
"""Choices with a key and a description."""


class ContextQuestion(Struct, frozen=True):
    """The user has to choose which turns to leave out.

    tokens: of the prompt, or of prompt and answer.
    limit: tokens of the context.
    during_answer: the answer reached the limit and is kept as partial; `drop` and `summarise` continue it.
    leaf: the message concerned.
    choices: those that can work.
    """

    tokens: int
    limit: int
    during_answer: bool
    leaf: int
    choices: tuple[str, ...] = ("drop", "summarise", "new")

    @property
    def answers(self) -> list[tuple[str, str, str]]:
        """The rows of `_CHOICES` that can work."""
        return [(choice, key, text) for choice, key, text in _CHOICES if choice in self.choices]

    @property
    def text(self) -> str:
        """The question in words."""
        newest = "your message"
        if self.during_answer:
            newest = "this answer"
        return (
            f"With {newest} the conversation has {self.tokens:,} tokens; "
            f"the context holds {self.limit:,}, answer included. "
            "Nothing is removed without your choice."
        )


def context_full_notice(tokens: int, limit: int, why: str) -> str:
    """Return the notice if there is no choice. why: the reason.

    A prompt shorter than the limit may leave too little room for an answer.
    """
    if tokens < limit:
        return f"too little room for an answer: {tokens:,} of the context's {limit:,} tokens are taken; {why}"
    return f"the context is full: {tokens:,} tokens, the limit is {limit:,}; {why}"


class ContextTrimming:
    """Nothing is left out of the prompt unless the user chooses so.

    question: the choice the user has to make.
    returned: text of a message too long for the context, for the input.
    typed: content of the last message, and the text it was parsed from.
    """

    def __init__(self, branch: SessionBranch) -> None:
        self.question: ContextQuestion | None = None
        self.returned: str | None = None
        self.typed = "", ""
        self._branch = branch
        self._history: list[tuple[int | None, str]] = []  # prompt_from and summary before each change

    def context_full(
        self, tokens: int, limit: int, leaf: Message, *, during_answer: bool, last_turn_fits: bool
    ) -> str | None:
        """Ask the user which turns to drop. If that cannot help, take the message back and return the notice."""
        branch = self._branch
        turns = sum(message.role == "user" for message in branch.messages[branch.not_sent :])
        if turns > 1 and last_turn_fits:
            self.question = ContextQuestion(tokens, limit, during_answer, leaf.id)
            return None
        if turns > 1 and during_answer:
            why = "the last turn alone fills it"
        elif turns > 1:
            why = "this message alone does not fit"
        elif branch.session.summary and branch.not_sent:
            why = "there is only the summary before it"
        else:
            why = "nothing older is left to drop"
        self.take_back(leaf)
        return context_full_notice(tokens, limit, why)

    def take_back(self, leaf: Message) -> None:
        """Remove an unanswered message, which would be sent with all later ones, and return its text to the input."""
        branch = self._branch
        answered = any(message.parent_id == leaf.id for message in branch.store.messages(branch.session.id))
        if leaf.role == "user" and not answered:
            branch.store.take_back(leaf)
            branch.reload(leaf.parent_id)
            content, typed_text = self.typed
            self.returned = leaf.content
            if content == leaf.content:
                self.returned = typed_text

    def dropped(self, count: int) -> None:
        """Store that the engine left out the first `count` messages of the prompt."""
        first_left, *_ = runs(self._branch.session, self._branch.messages)[count]
        self.trim(first_left.id, self._branch.session.summary)

    def trim(self, first: int | None, summary: str) -> None:
        """Leave out all messages before `first` and send the summary instead."""
        session = self._branch.session
        self._history.append((session.prompt_from, session.summary))
        self._branch.session = self._branch.store.set_prompt_from(session.id, first, summary)

    def set_summary(self, text: str) -> None:
        """Replace the summary. Raises UsageError if no message is left out."""
        if not self._branch.not_sent:
            raise UsageError("all messages are sent: there is no summary")
        self.trim(self._branch.session.prompt_from, text.strip())

    def undo(self) -> None:
        """Undo the latest trimming; all trimming of earlier runs is undone in one step."""
        if not self._branch.not_sent and not self._history:
            raise UsageError("all messages are sent: there is nothing to undo")
        before: int | None = None
        summary = ""
        if self._history:
            before, summary = self._history.pop()
        self._branch.session = self._branch.store.set_prompt_from(self._branch.session.id, before, summary)

    def reset(self) -> None:
        """Forget the question and the history: the branch is of a new session."""
        self.question = None
        self._history.clear()
