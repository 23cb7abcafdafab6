"""A stored session and its active branch: messages, alternatives, settings.

Messages form a tree by `parent_id`; a branch is the path from a root to a leaf. `Conversation` and `headrace run` read
the store through this class. Each change is written to the store first, then `session` and `messages` are read again.

Guards: tests/app/chat/test_session_branch.py, test_conversation.py; tests/app/sessions/test_damaged_store.py.
"""

from collections.abc import Mapping

from msgspec import Struct

from headrace.app.chat.prompt import first_sent
from headrace.app.sessions.records import Draft, Message, Role, Session
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import UsageError


class Alternatives(Struct, frozen=True):
    """Ids of the alternatives at one message, oldest first. shown: index of the active one."""

    ids: tuple[int, ...]
    shown: int


class SessionBranch:
    """The active branch of one session.

    store: of all sessions.
    session: its record, as read after the newest change.
    messages: up to `leaf`, first to last, or up to an answer that is being written.
    leaf: id of the last stored message; None for an empty branch.
    context_tokens: of the last prompt and its answer; the KV cache may have dropped them since.
    shared: another process has the session open, too; each process stays on its own branch.
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
        """Read the session and the branch that ends with `leaf` from the store; None is an empty branch."""
        self.session = self.store.session(self.session.id)
        self.leaf = leaf
        messages: list[Message] = []
        if leaf is not None:
            messages = self.store.branch(self.session.id, leaf)
        self.messages = messages  # the old ones stay if the store cannot be read
        # One process holds one session: this locks it, and releases the lock of the session that was open before.
        self.shared = self.store.hold(self.session.id)
        self.context_tokens = cached_tokens(self.messages)

    def start_session(self) -> None:
        """Continue in a new, empty session with the same settings."""
        self.session = new_session(self.store, self.session)
        self.reload(None)

    @property
    def last_id(self) -> int | None:
        """Id of the last message, the growing answer included; None for an empty branch."""
        if not self.messages:
            return None
        return self.messages[-1].id

    @property
    def not_sent(self) -> int:
        """Number of messages at the start of the branch that are left out of the prompt."""
        return first_sent(self.session, self.messages)

    def message(self, message_id: int) -> Message:
        """Return a message of the active branch. Raises UsageError for any other."""
        for message in self.messages:
            if message.id == message_id:
                return message
        raise UsageError(f"message {message_id} is not on this branch")

    def last(self, role: Role) -> Message:
        """Return the last message of a role. Raises UsageError if there is none."""
        for message in reversed(self.messages):
            if message.role == role:
                return message
        if role == "user":
            raise UsageError("nothing was asked yet")
        raise UsageError("there is no answer yet")

    def alternatives(self, message_id: int) -> Alternatives:
        """Return the alternatives at a message of the branch, only itself if another process deleted it."""
        return self._alternatives(self.message(message_id))

    def _alternatives(self, message: Message) -> Alternatives:
        ids = self.store.alternatives(message)
        if message.id not in ids:  # another process deleted it; the screen still shows it
            return Alternatives((message.id,), 0)
        return Alternatives(tuple(ids), ids.index(message.id))

    def switch(self, message_id: int, step: int) -> None:
        """Activate the alternative `step` places after the active one at this message, or the nearest to that.

        The message may be of a branch that was just left: keys are quicker than the screen that shows the new one.
        """
        shown = {message.id: message for message in self.messages}
        options = self._alternatives(shown.get(message_id) or self.store.message(message_id))
        wanted = min(max(options.shown + step, 0), len(options.ids) - 1)
        self.reload(self.store.activate(self.store.message(options.ids[wanted])).active_leaf)

    def show(self, message_id: int) -> None:
        """Activate a branch that has this message, unless the active one has it."""
        if all(message.id != message_id for message in self.messages):
            self.reload(self.store.activate(self.store.message(message_id)).active_leaf)

    def remove(self, message_id: int) -> None:
        """Remove a message of any branch and all that follow it."""
        session = self.store.remove(self.store.message(message_id))
        leaf = self.leaf
        if any(message.id == message_id for message in self.messages):
            leaf = session.active_leaf
        self.reload(leaf)

    def rename(self, title: str) -> None:
        self.session = self.store.rename(self.session.id, title)

    def set_system(self, text: str) -> None:
        """Set the system prompt, from the next answer on."""
        self.session = self.store.set_system(self.session.id, text)

    def set_draft(self, draft: Draft) -> None:
        """Keep unsent text with the session, if it changed."""
        if draft != self.session.draft:
            self.session = self.store.set_draft(self.session.id, draft)

    def set_sampling(self, values: Mapping[str, object]) -> None:
        """Change settings of answers, by option name, in the form of `AnswerOptions.stored`; None removes one."""
        merged = {key: value for key, value in {**self.session.sampling, **values}.items() if value is not None}
        self.session = self.store.set_sampling(self.session.id, merged)


def cached_tokens(branch: list[Message]) -> int:
    """Return `tokens_held` after the last answer of a branch with metrics; 0 without one."""
    for message in reversed(branch):
        if (metrics := message.metrics) is not None:
            return tokens_held(metrics.prompt_tokens, metrics.completion_tokens, message.finish_reason)
    return 0


def tokens_held(prompt: int, completion: int, reason: str | None) -> int:
    """Return the tokens in the KV cache right after an answer. reason: its `finish_reason`."""
    tokens = prompt + completion
    if reason != "stop":  # the last token of a cut-off answer was never fed
        tokens -= 1
    return tokens


def new_session(store: SessionStore, before: Session) -> Session:
    """Create an empty session with the model and the settings of another one."""
    return store.create(model=before.model, system=before.system, sampling=before.sampling)
