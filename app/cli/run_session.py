"""The conversation a `headrace run` belongs to: a new one, or a stored one that it goes on with; kept where asked for.

Nothing is stored before the model begins to work: a misspelt option leaves no session behind. An answer is stored as
it comes, as the chat does it, and a store that fails meanwhile (a full disk) is said at the end: the answer goes first.
"""

import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.app.chat.prompt import ChatMessages, draft_messages
from headrace.app.config.settings import Settings, chosen_model
from headrace.app.sessions.records import Attachment, Message, Session
from headrace.models.text.answer import Completed, Part, TextChunk
from headrace.runtime.errors import SessionError

if TYPE_CHECKING:  # what only an answer that is kept needs
    from headrace.app.engine.events import Done
    from headrace.app.sessions.store import SessionStore


_STORE_S = 0.2  # between two writes of a growing answer


class RunSession:
    """model, system, sampling: what holds for this answer, the command line before what is stored or set."""

    def __init__(
        self,
        settings: Settings,
        *,
        resume: str | None = None,
        keep: bool | None = None,
        model: str | None = None,
        system: str | None = None,
        given: Mapping[str, Any],
    ) -> None:
        """resume: a stored session. keep: None for what the settings say; what is resumed is kept unless it is False.

        given: sampling options of the command line, `max_tokens`, `thinking` and `stop` included, None where not
        given. Raises SessionError.
        """
        self._keep = (resume is not None or settings.run.save) if keep is None else keep
        self._store = _store() if resume is not None or self._keep else None
        self._branch: list[Message] = []
        self._resumed = resume is not None
        if resume is not None:
            from headrace.app.chat.session_branch import SessionBranch

            assert self._store is not None
            opened = SessionBranch(self._store, self._store.find(resume))
            stored, self._branch = opened.session, opened.messages
        else:
            usual = chosen_model(None, settings)
            stored = Session("", "", 0.0, 0.0, usual, settings.chat.system, settings.sampling_given)
        options = {name: value for name, value in given.items() if value is not None and name != "logit_bias"}
        self._session = replace(
            stored,
            model=stored.model if model is None else model,
            system=stored.system if system is None else system,
            sampling={**stored.sampling, **options},
        )
        self.id: str | None = None
        """Of the session the answer is kept in; None until it is begun, and where nothing is kept."""

    @property
    def model(self) -> str | None:
        return self._session.model

    @property
    def resumed(self) -> bool:
        return self._resumed

    @property
    def sampling(self) -> Mapping[str, Any]:
        return self._session.sampling

    def messages(self, content: str, attachments: tuple[Attachment, ...]) -> ChatMessages:
        """What is sent to the model if this is said next."""
        return draft_messages(self._session, self._branch, content, attachments)

    def kept(
        self,
        parts: Iterable[Part],
        content: str,
        attachments: tuple[Attachment, ...],
        *,
        model: str,
        sampling: Mapping[str, Any],
        opening: str,
    ) -> Generator[Part, None, None]:
        """The parts as they come, stored on their way where the session is kept. Raises SessionError.

        model: who says it. sampling: the settings in effect. opening: what the template wrote of the answer itself.
        """
        if not self._keep:
            yield from parts
            return
        from headrace.app.chat.turn import Turn

        turn: Turn | None = None
        done: Done | None = None
        text, stored_at = opening, float("-inf")
        try:
            for part in parts:
                if turn is None:
                    store, system = self._store_question(content, attachments), self._session.system
                    turn = Turn(store, self._question, model=model, system=system)
                    turn.sampling = sampling
                yield part
                if isinstance(part, TextChunk | Completed):
                    text += part.text
                if isinstance(part, Completed):
                    done = _done(part)
                elif text != opening and time.monotonic() >= stored_at + _STORE_S:
                    with suppress(SessionError):  # said at the end, which tries again
                        turn.grow(text, model)
                        turn.save()
                    text, opening, stored_at = "", "", time.monotonic()
        finally:
            if turn is not None:
                if text != opening:
                    turn.grow(text, model)
                turn.end(done.reason if done is not None else "cancelled", done)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _store_question(self, content: str, attachments: tuple[Attachment, ...]) -> "SessionStore":
        """The session, if it is a new one, and the message that is answered."""
        store, session = self._store, self._session
        assert store is not None
        if not self._resumed:
            session = store.create(model=session.model, system=session.system, sampling=session.sampling)
        else:
            store.set_model(session.id, session.model)
            store.set_system(session.id, session.system)
        self.id = session.id
        parent = self._branch[-1].id if self._branch else None
        self._question = store.add(session.id, parent, "user", content, attachments=attachments)
        return store


def _store() -> "SessionStore":
    from headrace.app.sessions.store import SessionStore

    return SessionStore()


def _done(part: Completed) -> "Done":
    from headrace.app.engine.events import Done

    summary = part.finished.summary
    return Done(0, part.finished.reason, summary, 0.0, None, context_full=False, mbu=None)
