"""`/compare`: the same question to two models, or to one model with two setups.

The answers are generated one after the other, because two decoding models slow each other and falsify the figures. Both
are branches of the session. Each model keeps an engine of its own if both fit into memory; otherwise one engine loads
them in turn.

The compare screen draws `answers` and calls `poll`; `parallel_answers.py` has the queue and what `/again` shares.
Guards: tests/app/chat/test_comparison.py, and for the two engines test_comparison_engines.py.
"""

import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.attachments import parse_message
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parallel_answers import ModelEngine, ParallelAnswer, ParallelAnswers
from headrace.app.chat.parameters import PARAMETERS, read_parameter, read_system
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.model_card import ModelCard
from headrace.app.sessions.records import Message
from headrace.runtime.errors import EngineError, HeadraceError, UsageError

if TYPE_CHECKING:
    from headrace.app.config.presets import Preset

_PARAMETERS = {parameter.name for parameter in PARAMETERS}
_TEMPERATURES = {0.0: "0, greedy", 0.7: "0.7", 1.2: "1.2"}  # suggested, with their words
_SETUP_HINT = "as in /compare qwen3-0.6b, /compare temperature=0.2, /compare preset=NAME system=TEXT"


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
        """Begin with the last question. An answer to it that A's setup gave stays A's, and B answers at once.

        conversation: whose branches both answers become.
        other: B's setup; A has the session's.
        second: makes another engine.

        Raises EngineError while an answer is being written.
        """
        super().__init__(conversation, max_running=1)
        self._second = second
        self.answers = (
            ParallelAnswer("A", AnswerSetup.of(conversation.session), conversation),
            ParallelAnswer("B", other, conversation),
        )
        # One engine for both, until B's model is to be loaded: then it may get its own (`_engine_for`).
        self._share_main()
        self._engines_chosen = self.one_model  # nothing is left to decide
        self.first = self._begin()

    @property
    def one_model(self) -> bool:
        """True if A and B are the same model."""
        return self.answers[0].setup.model_name == self.answers[1].setup.model_name

    @property
    def takes_turns(self) -> bool:
        """True if two models share one engine."""
        return self._engines_chosen and not self.one_model and not self.has_two_engines

    @property
    def has_two_engines(self) -> bool:
        """True if A and B have an engine each."""
        return self._engines[self.answers[1]] is not self._main

    @property
    def running(self) -> ParallelAnswer | None:
        """The answer that is being loaded or written."""
        return next(iter(self._running), None)

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
            answer.branch.reload(asked[answer.leaf])
        self._ask(self.answers)

    def again(self) -> None:
        """Regenerate both answers as new branches. Raises UsageError, EngineError."""
        self._require_idle()
        for answer in self.answers:
            if not answer.messages:
                raise UsageError("nothing was asked yet")
        for answer in self.answers:
            question = next((message.id for message in reversed(answer.messages) if message.role == "user"), None)
            answer.branch.reload(question)
        self._ask([answer for answer in self.answers if answer.messages])

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
        self._activate(answer)
        up = conversation.engine.state in ("loading", "ready")
        if not up or self._main.model != AnswerSetup.of(conversation.session).model_name:
            conversation.load_model()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._close_second()

    # --- one after the other ---------------------------------------------------------------------------------

    def _begin(self) -> int:
        """Set up both branches from the conversation; return the number of messages before the compared question.

        Three cases: no message yet, a last question without an answer, and an answered one.
        """
        a, b = self.answers
        messages = self._conversation.messages
        a.branch.reload(self._before)
        b.branch.reload(self._before)
        if not messages:
            return 0
        a.card = self._conversation.engine.card
        if messages[-1].role == "user":
            self._ask(self.answers)
        elif messages[-1].parent_id is None:  # an answer without a question: nothing can be compared yet
            return len(messages)
        else:
            b.branch.reload(messages[-1].parent_id)
            if self._made_by(a, messages[-1]):
                self._ask([b])
            else:
                a.branch.reload(messages[-1].parent_id)
                self._ask(self.answers)
        return next(n for n in range(len(messages) - 1, -1, -1) if messages[n].role == "user")

    def _engine_for(self, answer: ParallelAnswer) -> ModelEngine:
        """Decide, before B's model is loaded for the first time, whether it fits into memory beside A's."""
        if not self._engines_chosen and answer is self.answers[1]:
            self._engines_chosen = True
            card = self._conversation.engine.card
            if card is not None and fits_with(card, answer.setup.model):
                self._engines[answer] = ModelEngine(self._second())
        return super()._engine_for(answer)

    def _load_failed(self, engine: ModelEngine, reason: str) -> None:
        if engine is self._main:
            super()._load_failed(engine, reason)
            return
        # Less memory than estimated: load the model in place of A's.
        waiting = self._running_on(engine)
        self._queue[:0] = waiting
        self._running = [answer for answer in self._running if answer not in waiting]
        self._close_second()
        self._next()

    def _close_second(self) -> None:
        """Use one engine from now on."""
        for engine in self._engines.values():
            if engine is not self._main:
                engine.engine.close()
        self._share_main()

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
        if self._running or self._queue:
            raise EngineError("an answer is being written", "stop it first")
        self._settle()


def fits_with(card: ModelCard, name: str | None) -> bool:
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
        return replace(setup, system=read_system(value))
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
    temperatures = [
        (f"the same model at temperature {words}", f"temperature={value:g}")
        for value, words in _TEMPERATURES.items()
        if value != temperature
    ]
    return [*other, *presets, *temperatures, ("the same setup again", "")]
