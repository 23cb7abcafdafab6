"""`/compare`: the same question to two models, or to one model with two setups.

The answers are generated one after the other, because two decoding models slow each other and falsify the figures. Both
are branches of the session. Each model keeps an engine of its own if both fit into memory; otherwise one engine loads
them in turn.

An answer's phase goes queued, loading, then as its `Turn` says, then idle. `_next` starts the first of the queue, and
each end calls it again (`_ended`). The compare screen draws `answers` and calls `poll`.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.attachments import parse_message
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parallel_answers import ParallelAnswer, ParallelAnswers, ParallelEvent, ParallelPhase
from headrace.app.chat.parameters import PARAMETERS, read_parameter
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.events import Damaged, Died, Event, Failed, Ready, one_line
from headrace.app.engine.model_card import ModelCard
from headrace.app.sessions.records import Message
from headrace.runtime.errors import EngineError, HeadraceError, UsageError

if TYPE_CHECKING:
    from headrace.app.config.presets import Preset

_PARAMETERS = {parameter.name for parameter in PARAMETERS}
_SETUP_HINT = "as in /compare qwen3-0.6b, /compare temperature=0.2, /compare preset=NAME system=TEXT"


class _ModelEngine:
    """An engine and the model it loaded last, None if it has none."""

    def __init__(self, engine: ChatEngine, model: str | None = None) -> None:
        self.engine = engine
        self.model = model


class Comparison(ParallelAnswers):
    """Two answers to each question, on branches of their own.

    answers: A, with the session's setup, and B.
    first: the number of messages before the compared question.
    """

    def __init__(
        self,
        conversation: Conversation,
        other: AnswerSetup,
        second: Callable[[], ChatEngine],
    ) -> None:
        """second: makes another engine.

        Raises EngineError while an answer is being written.

        An answer to the last question that A's setup gave stays A's; B answers at once.
        """
        super().__init__(conversation)
        self._second = second
        session = conversation.session
        own_setup = AnswerSetup.of(session)
        self.answers = (
            ParallelAnswer("A", own_setup, self._store, session),
            ParallelAnswer("B", other, self._store, session),
        )
        loaded_model = None
        if conversation.engine.state in ("loading", "ready"):
            loaded_model = own_setup.model_name
        self._main = _ModelEngine(conversation.engine, loaded_model)
        self._engines = dict.fromkeys(self.answers, self._main)  # both share one, unless the models fit side by side
        self._queue: list[ParallelAnswer] = []
        self._running: ParallelAnswer | None = None
        self._engines_chosen = self.one_model
        self.first = self._begin()

    @property
    def one_model(self) -> bool:
        """True if A and B are the same model."""
        return self.answers[0].setup.model_name == self.answers[1].setup.model_name

    @property
    def takes_turns(self) -> bool:
        """True if two models share one engine."""
        return self._engines_chosen and not self.one_model and not self.beside

    @property
    def beside(self) -> bool:
        """True if A and B have an engine each."""
        return self._engines[self.answers[1]] is not self._main

    @property
    def running(self) -> ParallelAnswer | None:
        """The answer that is being loaded or written."""
        return self._running

    @property
    def phase(self) -> ParallelPhase:
        if self._running is None:
            return "idle"
        if self._running.phase in ("prefill", "answering", "idle"):
            return self._running.phase
        return "waiting"

    def ask(self, text: str) -> None:
        """Ask A and B on their own branches. Raises UsageError, EngineError, SessionError."""
        self._require_idle()
        content, attachments = parse_message(text)
        session = self._conversation.session.id
        asked: dict[int | None, int] = {}
        for answer in self.answers:
            if answer.leaf not in asked:
                message = self._store.add(session, answer.leaf, "user", content, attachments=attachments)
                asked[answer.leaf] = message.id
            answer.show(asked[answer.leaf])
        self._ask(self.answers)

    def again(self) -> None:
        """Regenerate both answers as new branches. Raises UsageError, EngineError."""
        self._require_idle()
        for answer in self.answers:
            if not answer.messages:
                raise UsageError("nothing was asked yet")
        for answer in self.answers:
            question = next((m for m in reversed(answer.messages) if m.role == "user"), None)
            answer.show(question.id if question is not None else None)
        self._ask([answer for answer in self.answers if answer.messages])

    def stop(self) -> None:
        """Cancel the running answer; the other one is next."""
        answer = self._running
        if answer is None:
            return
        if answer.phase == "loading":
            self._end(answer, "cancelled")
        else:
            self._engines[answer].engine.cancel()

    def take(self, answer: ParallelAnswer | None) -> None:
        """Continue with this answer, its model and its settings."""
        self.close()
        conversation = self._conversation
        store = self._store
        session = conversation.session
        if answer is not None and answer.setup != AnswerSetup.of(session):
            store.set_model(session.id, answer.setup.model)
            store.set_system(session.id, answer.setup.system)
            store.set_sampling(session.id, answer.setup.sampling)
        self._activate(answer.leaf if answer is not None else self._before)
        up = conversation.engine.state in ("loading", "ready")
        if not up or self._main.model != AnswerSetup.of(conversation.session).model_name:
            conversation.load_model()

    def close(self) -> None:
        self._queue.clear()
        answer = self._running
        if answer is not None:
            self._engines[answer].engine.cancel()
            self._end(answer, "cancelled")
        self._close_second()
        self._settle()

    # --- engine events ---------------------------------------------------------------------------------------

    def poll(self) -> list[ParallelEvent]:
        events: list[ParallelEvent] = []
        for engine in list(dict.fromkeys(self._engines.values())):  # each once
            for event in engine.engine.poll():
                answer = None
                if self._running is not None and self._engines[self._running] is engine:
                    answer = self._running
                events.append((answer, event))
                with self._failure_noticed():
                    self._handle(engine, answer, event)
        self._save()
        return events

    def _handle(self, engine: _ModelEngine, answer: ParallelAnswer | None, event: Event) -> None:
        state = engine.engine.state  # a restarted engine may still send events of the process before
        if isinstance(event, Died) and state == "dead":
            engine.model = None
        if isinstance(event, Damaged):
            self.notice = one_line(event.message, event.hint)
        if answer is None:
            return
        if isinstance(event, Ready):
            if answer.phase == "loading" and state == "ready":
                self._submit(answer)
        elif isinstance(event, Failed) and event.id is None:
            if state == "failed":
                self._load_failed(engine, answer, event)
        elif isinstance(event, Died) and state == "dead":
            answer.notice = event.message
            self._end(answer, "died")
        elif answer.turn is not None and getattr(event, "id", None) == answer.turn.id:
            self._handle_own(answer, event)

    # --- one after the other ---------------------------------------------------------------------------------

    def _begin(self) -> int:
        """Set up both branches from the conversation; return the number of messages before the compared question.

        Three cases: no message yet, a last question without an answer, and an answered one.
        """
        a, b = self.answers
        messages = self._conversation.messages
        a.show(self._before)
        b.show(self._before)
        if not messages:
            return 0
        a.card = self._conversation.engine.card
        if messages[-1].role == "user":
            self._ask(self.answers)
        elif messages[-1].parent_id is None:  # an answer without a question: nothing can be compared yet
            return len(messages)
        else:
            b.show(messages[-1].parent_id)
            if self._made_by(a, messages[-1]):
                self._ask([b])
            else:
                a.show(messages[-1].parent_id)
                self._ask(self.answers)
        return next(n for n in range(len(messages) - 1, -1, -1) if messages[n].role == "user")

    def _ask(self, answers: Sequence[ParallelAnswer]) -> None:
        self.notice = None
        for answer in answers:
            answer.phase = "queued"
            answer.notice = None
        self._queue = list(answers)
        self._next()

    def _next(self) -> None:
        """Start the next answer of the queue, if none runs."""
        if self._running is not None or not self._queue:
            return
        answer = self._queue.pop(0)
        self._running = answer
        self._choose_engine(answer)
        engine = self._engines[answer]
        wanted = answer.setup.model_name
        if engine.model == wanted and engine.engine.state == "ready":
            self._submit(answer)
            return
        answer.phase = "loading"
        if engine.model != wanted or engine.engine.state != "loading":
            engine.model = wanted
            engine.engine.start(replace(self._conversation.spec, name=answer.setup.model))

    def _choose_engine(self, answer: ParallelAnswer) -> None:
        """Decide, before B's model is loaded for the first time, whether it fits into memory beside A's."""
        if self._engines_chosen or answer is not self.answers[1]:
            return
        self._engines_chosen = True
        card = self._conversation.engine.card
        if card is not None and fits_beside(card, answer.setup.model):
            self._engines[answer] = _ModelEngine(self._second())

    def _submit(self, answer: ParallelAnswer) -> None:
        engine = self._engines[answer].engine
        assert engine.card is not None
        for other in self._engines.values():
            if other.engine is not engine:
                other.engine.rest()  # its idle work would slow this answer down
        try:
            engine.submit(answer.begin(engine.card))
        except HeadraceError as error:
            answer.notice = str(error)
            self._end(answer, "failed")

    def _load_failed(self, engine: _ModelEngine, answer: ParallelAnswer, failure: Failed) -> None:
        engine.model = None
        if engine is not self._main:  # less memory than estimated: load it in place of A's
            self._close_second()
            self._running = None
            self._queue.insert(0, answer)
            self._next()
            return
        answer.notice = one_line(failure.message, failure.hint)
        self._end(answer, "failed")

    def _close_second(self) -> None:
        """Use one engine from now on."""
        for engine in self._engines.values():
            if engine is not self._main:
                engine.engine.close()
        self._engines = dict.fromkeys(self.answers, self._main)

    def _ended(self, answer: ParallelAnswer) -> None:
        self._running = None
        try:
            super()._ended(answer)
        finally:
            self._next()

    @staticmethod
    def _made_by(candidate: ParallelAnswer, answer: Message) -> bool:
        """True if nothing known of this stored answer differs from the candidate's setup."""
        names = [None, candidate.setup.model_name]
        if candidate.card is not None:
            names.append(candidate.card.name)
        same_sampling = answer.sampling in (None, candidate.effective)
        same_system = answer.system in (None, candidate.setup.system)
        return same_sampling and same_system and answer.model in names

    def _require_idle(self) -> None:
        if self._running is not None or self._queue:
            raise EngineError("an answer is being written", "stop it first")
        self._settle()


def fits_beside(card: ModelCard, name: str | None) -> bool:
    """Return whether a model fits beside `card`'s, both with MEMORY_CONTEXT tokens of K/V.

    False for a model that is not installed and a machine of unknown memory.
    """
    from headrace.app.model_info.model_report import MEMORY_CONTEXT, memory_needed

    if card.budget is None:
        return False
    try:
        needed = memory_needed(name)
    except HeadraceError:
        return False
    grows = card.cost.kv_bytes(min(MEMORY_CONTEXT, card.context_limit))
    return needed is not None and needed + grows <= card.budget.usable


# -- the other setup, as it is typed -----------------------------------------------------------------------------------


def read_setup(text: str, session: AnswerSetup) -> AnswerSetup:
    """Parse `MODEL`, `PRESET` and `NAME=VALUE` in any order; names are parameters, `model`, `preset` and `system`.

    The rest is the session's. Raises UsageError, but not for an unknown model.
    """
    from headrace.app.config.presets import load_presets  # not imported at the start

    try:
        words = shlex.split(text)
    except ValueError:
        raise UsageError("missing quotation mark", _SETUP_HINT) from None
    presets = load_presets()
    setup = session
    if text.strip() in presets:
        words = [f"preset={text.strip()}"]
    while words:
        word = words.pop(0)
        if "=" in word:
            name, _, value = word.partition("=")
        elif words and word.replace("-", "_") in _PARAMETERS:  # as after /set
            name = word
            value = words.pop(0)
        else:
            name = "preset" if word in presets else "model"
            value = word
        setup = _changed(setup, name, value, presets)
    return setup


def _changed(setup: AnswerSetup, name: str, value: str, presets: "Mapping[str, Preset]") -> AnswerSetup:
    if name == "model":
        return replace(setup, model=value or None)
    if name == "system":
        return replace(setup, system="" if value == "none" else value)
    if name == "preset":
        from headrace.app.config.presets import chosen_preset

        preset = chosen_preset(presets, value)
        return replace(setup, system=preset.system, sampling=dict(preset.sampling))
    changed = {**setup.sampling, name.replace("-", "_"): read_parameter(name, value)}
    return replace(setup, sampling={key: setting for key, setting in changed.items() if setting is not None})


def suggested_setups(session: AnswerSetup, temperature: float) -> list[tuple[str, str]]:
    """Return suggestions, (text, arguments), most useful first. temperature: the one in effect."""
    from headrace.app.config.presets import load_presets
    from headrace.models.registry.store import Store

    other = [(f"another model: {name}", name) for name in Store().names() if name != session.model_name]
    presets = [(f"the preset {name}", f"preset={shlex.quote(name)}") for name in load_presets()]
    warmth = [
        (f"the same model at temperature {value:g}" + (", greedy" if not value else ""), f"temperature={value:g}")
        for value in (0.0, 0.7, 1.2)
        if value != temperature
    ]
    return [*other, *presets, *warmth, ("the same setup again", "")]
