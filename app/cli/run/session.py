"""The conversation of one `headrace run`: a new or a stored one, and its storage if asked for.

Nothing is stored before the model begins to work. An answer is stored as it grows; a store that fails meanwhile (a full
disk) raises at the end, after the answer.

Guards: tests/app/cli/test_run.py and test_run_settings.py.
"""

from collections.abc import Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headrace.app.answer.answer import Answer
from headrace.app.answer.options import AnswerOptions, SamplingSource, recommended_options, sampling_source
from headrace.app.cli.run.arguments import RunArguments
from headrace.app.config.settings import Settings, chosen_model
from headrace.app.sessions.records import Attachment, Message, Session
from headrace.models.loading.load import LoadedModel
from headrace.models.text.events import Completed, Part, TextChunk
from headrace.runtime.errors import SessionError

if TYPE_CHECKING:  # imported only for an answer that is stored
    from headrace.app.engine.events import Delta
    from headrace.app.sessions.store import SessionStore
    from headrace.runtime.engine.request import Finished


_STORE_S = 0.2  # between two writes of a growing answer


class RunSession:
    """The session of one answer. The command line goes before the stored session or the settings.

    model, options: of this answer. Options of the command line count for it alone.
    record: the session with the model and the system message of this answer; its id is "" for a new one.
    branch: its messages before the prompt.
    resumed: it is a stored session.
    keeps: the answer is stored.
    id: of the session it is stored in; None until that is begun.
    """

    def __init__(
        self, settings: Settings, arguments: RunArguments, content: str, attachments: tuple[Attachment, ...]
    ) -> None:
        """content, attachments: the message that is answered. Raises SessionError."""
        self._content = content
        self._attachments = attachments
        wanted = arguments.session  # id of the stored session to continue; None: a new one
        self.resumed = wanted is not None
        self.keeps = self.resumed or settings.run.save
        if arguments.keep is not None:
            self.keeps = arguments.keep
        self._store: SessionStore | None = None
        if self.resumed or self.keeps:
            self._store = _store()
        self.branch: list[Message] = []
        self.id: str | None = None
        stored_as: SamplingSource
        if wanted is not None:
            from headrace.app.chat.answer_setup import stored_options
            from headrace.app.chat.session_branch import SessionBranch

            assert self._store is not None
            opened = SessionBranch(self._store, self._store.find(wanted))
            stored = opened.session
            self.branch = opened.messages
            options = stored_options(stored.sampling)
            stored_as = "session"
        else:
            usual = chosen_model(None, settings)
            stored = Session(
                id="",
                title="",
                created_at=0.0,
                updated_at=0.0,
                model=usual,
                system=settings.chat.system,
                sampling=settings.sampling.stored(),
            )
            options = settings.sampling
            stored_as = "settings"
        self.options = arguments.options.over(options)
        self._layers: dict[SamplingSource, AnswerOptions] = {"options": arguments.options, stored_as: options}
        self.record = stored
        if arguments.model is not None:
            self.record = replace(self.record, model=arguments.model)
        if arguments.system is not None:
            self.record = replace(self.record, system=arguments.system)

    def sampling_source(self, model: LoadedModel) -> SamplingSource:
        """Return the origin of the answer's temperature."""
        return sampling_source(self._layers, recommended_options(model.generation_defaults))

    @property
    def model(self) -> str | None:
        return self.record.model

    def stored(self, parts: Iterable[Part], answer: Answer, model: LoadedModel) -> Generator[Part, None, None]:
        """Yield the answer's parts, and store them if the session is stored. Raises SessionError."""
        if not self.keeps:
            yield from parts
            return
        from headrace.app.chat.turn import Turn
        from headrace.app.engine.outbox import Outbox

        turn: Turn | None = None
        done: Finished | None = None

        def store_delta(delta: "Delta") -> None:
            assert turn is not None
            with suppress(SessionError):  # raised at the end, which tries again
                turn.handle(delta)
                turn.save()

        outbox = Outbox(0, answer, store_delta, text_s=_STORE_S)
        try:
            for part in parts:
                if turn is None:
                    store, question = self._store_question()
                    system = self.record.system
                    used = self.options.resolved(recommended_options(model.generation_defaults)).stored()
                    turn = Turn(store, question, model=model.name, system=system, sampling=used)
                yield part
                if isinstance(part, TextChunk | Completed):
                    outbox.add(part)
                if isinstance(part, Completed):
                    done = part.finished
        finally:
            if turn is not None:
                outbox.flush()
                if done is None:
                    turn.end("cancelled")
                else:
                    turn.end(done.reason, done.summary)
                turn.settle()

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()

    def _store_question(self) -> "tuple[SessionStore, Message]":
        """Store the session, if it is new, and the message that is answered. Return the store and the message."""
        store = self._store
        session = self.record
        assert store is not None
        if not self.resumed:
            session = store.create(model=session.model, system=session.system, sampling=session.sampling)
        else:
            store.set_model(session.id, session.model)
            store.set_system(session.id, session.system)
        self.id = session.id
        parent = None
        if self.branch:
            parent = self.branch[-1].id
        question = store.add(session.id, parent, "user", self._content, attachments=self._attachments)
        return store, question


def _store() -> "SessionStore":
    from headrace.app.sessions.store import SessionStore

    return SessionStore()
