"""Commands that generate parallel answers: /compare and /again."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.parameters import PARAMETERS, read_parameter
from headrace.app.sessions.records import Draft
from headrace.app.tui.screens.chat_view import ChatView
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from headrace.app.config.presets import Preset
    from headrace.app.tui.screens.parallel_screen import ParallelScreen

_NAMES = {parameter.name for parameter in PARAMETERS}
_HINT = "as in /compare qwen3-0.6b, /compare temperature=0.2, /compare preset=NAME system=TEXT"


class CompareActions:
    def __init__(self, view: ChatView) -> None:
        self._view = view
        self._state = view.state
        self.commands = {"compare": self._compare, "again": self._again}

    def _again(self, count: str) -> None:
        """Generate several answers to the last question."""
        from headrace.app.chat.candidates import Candidates
        from headrace.app.tui.screens.again_screen import AgainScreen

        try:
            number = int(count)
        except ValueError:
            raise UsageError(f"/again takes a number, not {count}", "as in /again 4") from None
        candidates = Candidates(self._state.conversation, number)
        self._state.metrics.begin_batch(candidates.ids)
        self._open(AgainScreen(self._state, candidates))

    def _compare(self, arguments: str) -> None:
        """Compare this session's setup with another one; without arguments, let the user pick."""
        conversation = self._state.conversation
        if conversation.phase != "idle":
            raise UsageError("an answer is in progress; Esc stops it")
        here = AnswerSetup.of(conversation.session)
        if arguments:
            self._compare_with(_read_setup(arguments, here))
            return
        offered = _suggestions(here, conversation.temperature or 0.0)
        names = [name if not text else f"{name}  /compare {text}" for name, text in offered]
        self._view.pick(
            "compare with what?", names, lambda n: self._compare_with(_read_setup(offered[n][1], here)), always=True
        )

    def _compare_with(self, setup: AnswerSetup) -> None:
        """Compare with a setup, after a question if its model has to be downloaded."""
        from headrace.app.chat.download_plan import download_plan
        from headrace.app.chat.model_names import check_model_name
        from headrace.app.tui.screens.models_screen import fetch_question

        another = setup.model_name != AnswerSetup.of(self._state.conversation.session).model_name
        if another:
            check_model_name(setup.model_name)
        if not another or (plan := download_plan(setup.model)) is None:
            self._start(setup)
            return

        def resolve(answer: str | None) -> None:
            if answer == "fetch":
                self._view.attempt(lambda: self._start(setup))

        self._view.screen.app.push_screen(fetch_question(plan), resolve)

    def _start(self, setup: AnswerSetup) -> None:
        from headrace.app.chat.comparison import Comparison
        from headrace.app.tui.screens.compare_screen import CompareScreen

        state = self._state
        comparison = Comparison(state.conversation, setup, state.second_engine)
        self._open(CompareScreen(state, comparison))

    def _open(self, screen: "ParallelScreen") -> None:
        self._state.comparison = screen.answers

        def left(typed: Draft | None) -> None:
            self._state.unsent = self._view.unsent
            self._view.conversation_changed()
            if typed:
                self._view.prompt.put_before(typed.whole)

        self._view.screen.app.push_screen(screen, left)


def _read_setup(text: str, session: AnswerSetup) -> AnswerSetup:
    """Parse `MODEL`, `PRESET` and `NAME=VALUE` in any order; names are parameters, `model`, `preset` and `system`.

    The rest is the session's. Raises UsageError, but not for an unknown model.
    """
    from headrace.app.config.presets import load_presets  # not imported at the start

    try:
        words = shlex.split(text)
    except ValueError:
        raise UsageError("missing quotation mark", _HINT) from None
    presets = load_presets()
    setup = session
    if text.strip() in presets:
        words = [f"preset={text.strip()}"]
    while words:
        word = words.pop(0)
        if "=" in word:
            name, _, value = word.partition("=")
        elif words and word.replace("-", "_") in _NAMES:  # as after /set
            name = word
            value = words.pop(0)
        else:
            name = "preset" if word in presets else "model"
            value = word
        setup = _with(setup, name, value, presets)
    return setup


def _with(setup: AnswerSetup, name: str, value: str, presets: "Mapping[str, Preset]") -> AnswerSetup:
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


def _suggestions(session: AnswerSetup, temperature: float) -> list[tuple[str, str]]:
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
