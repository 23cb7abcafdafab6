"""A stored session that is open: its settings, the branch that is shown, and what can be done without an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.app.chat.prompt import first_sent
from headrace.app.sessions.records import Message, Role, Session
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Branches:
    """The alternatives at one message: their ids, oldest first, and which one is shown."""

    ids: tuple[int, ...]
    shown: int  # index into ids


class OpenSession:
    """messages: the branch that is shown, first to last, up to `leaf` or an answer that is being written.

    context_tokens: of the last prompt and its answer, in the cache. shared: another process has the session open,
    too; what is said there makes branches of its own, and this one stays on its own, whatever the store calls active.
    """

    messages: list[Message]
    leaf: int | None
    context_tokens: int
    shared: bool

    def __init__(self, store: SessionStore, session: Session) -> None:
        self.store = store
        self.session = session
        store.recover(session.id)
        self.reload(store.session(session.id).active_leaf)

    def reload(self, leaf: int | None) -> None:
        """Take the session and the branch that ends with `leaf` from the store. None: nothing was said on it."""
        self.session, self.leaf = self.store.session(self.session.id), leaf
        self.messages = self.store.branch(self.session.id, leaf) if leaf is not None else []
        self.shared = self.store.hold(self.session.id)
        last = next((message for message in reversed(self.messages) if message.metrics), None)
        self.context_tokens = (
            tokens_held(last.metrics.prompt_tokens, last.metrics.completion_tokens, last.finish_reason)
            if last is not None and last.metrics is not None
            else 0
        )

    @property
    def not_sent(self) -> int:
        """How many messages at the start of the active branch the model no longer sees."""
        return first_sent(self.session, self.messages)

    def message(self, message_id: int) -> Message:
        """A message of the active branch. Raises UsageError if it is not on it."""
        for message in self.messages:
            if message.id == message_id:
                return message
        raise UsageError(f"message {message_id} is not on this branch")

    def last(self, role: Role) -> Message:
        """The last message of a role. Raises UsageError if there is none."""
        for message in reversed(self.messages):
            if message.role == role:
                return message
        raise UsageError("there is no answer yet" if role == "assistant" else "nothing was asked yet")

    def branches(self, message_id: int) -> Branches:
        """The alternatives at a message of the active branch; of one that another process has deleted, itself alone."""
        ids = self.store.alternatives(self.message(message_id))
        if message_id not in ids:
            return Branches((message_id,), 0)
        return Branches(tuple(ids), ids.index(message_id))

    def switch_branch(self, message_id: int, step: int) -> None:
        """Show the next (1) or previous (-1) alternative at this message; at the end nothing happens."""
        self._changing_branch()
        branches = self.branches(message_id)
        wanted = min(max(branches.shown + step, 0), len(branches.ids) - 1)
        self.reload(self.store.activate(self.store.message(branches.ids[wanted])).active_leaf)

    def show(self, message_id: int) -> None:
        """Show a branch that has this message; the one that shows where it has it."""
        self._changing_branch()
        if all(message.id != message_id for message in self.messages):
            self.reload(self.store.activate(self.store.message(message_id)).active_leaf)

    def remove(self, message_id: int) -> None:
        """Remove a message of any branch, and all that follow it."""
        self._changing_branch()
        session = self.store.remove(self.store.message(message_id))
        on_it = any(message.id == message_id for message in self.messages)
        self.reload(session.active_leaf if on_it else self.leaf)

    def _changing_branch(self) -> None:
        """Called before another branch shows: whoever cannot have that now raises."""

    def rename(self, title: str) -> None:
        """Give the session a name."""
        self.session = self.store.rename(self.session.id, title)

    def set_system(self, text: str) -> None:
        """The system prompt of this session, from the next answer on."""
        self.session = self.store.set_system(self.session.id, text)

    def set_sampling(self, values: Mapping[str, Any]) -> None:
        """Change sampling settings (SamplingParams fields, max_tokens, stop) of this session; None takes one back."""
        merged = {key: value for key, value in {**self.session.sampling, **values}.items() if value is not None}
        self.session = self.store.set_sampling(self.session.id, merged)


def tokens_held(prompt: int, completion: int, reason: str | None) -> int:
    """Tokens of prompt and answer that the KV cache holds: the one an answer is cut off at was never fed."""
    return prompt + completion - (reason != "stop")
