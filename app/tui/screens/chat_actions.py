"""The chat's slash commands, by name, and the keys on a selected message.

`ChatScreen` carries out what was typed or pressed here. The names are those of `COMMANDS` (`app/chat/commands.py`): a
test compares. Commands that need the conversation alone are in `IN_EVERY_CHAT` there. The letters of `act` are bindings
of `Transcript`.

Guard: tests/tui/test_chat.py.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.commands import IN_EVERY_CHAT, Invocation, preset_names
from headrace.app.sessions.records import Draft, Message
from headrace.app.tui.screens.chat_view import ChatView
from headrace.app.tui.screens.message_actions import MessageActions
from headrace.app.tui.transcript.context_mark import MARK
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from headrace.app.tui.screens.parallel_screen import ParallelScreen


class ChatActions:
    """Commands raise HeadraceError; the chat's screen shows it."""

    def __init__(self, view: ChatView) -> None:
        self._view = view
        self._state = view.state
        self.messages = MessageActions(view)
        self.commands: dict[str, Callable[[str], None]] = {
            **{name: partial(self._in_every_chat, name) for name in IN_EVERY_CHAT},
            "help": lambda _: self._run("app.show_keys"),
            "stats": lambda _: self._run("app.decode_view"),
            "quit": lambda _: self._run("app.quit"),
            "restart": lambda _: self._state.restart_engine(),
            "messages": lambda _: self._run("screen.to_transcript"),
            "find": lambda words: view.find_bar.show(words),
            "think": self._toggle_thinking,
            "guesses": lambda _: self._state.notify(view.toggle_drafts()),
            "new": self._new,
            "sessions": lambda _: self._search(""),
            "search": self._search,
            "model": self.switch_model,
            "system": self._system,
            "set": self._set,
            "preset": self._preset,
            **self.messages.commands,
            "compare": self._compare,
            "again": self._again,
        }

    def carry_out(self, invocation: Invocation) -> None:
        invocation.function(self.commands)(invocation.rest)

    def act(self, action: str, message: Message) -> None:
        """Carry out a key on a selected message."""
        messages = self.messages
        on_summary: dict[str, Callable[[Message], None]] = {
            "copy": messages.copy_message,
            "copy_code": messages.copy_code,
            "open_link": messages.open_link,
            "edit": messages.edit,
            "undo": lambda _: messages.edit_summary("undo"),
        }
        on_message = on_summary | {
            "undo": lambda _: None,
            "remove": messages.remove,
            "regenerate": messages.regenerate,
            "continue": lambda _: messages.continue_answer(""),
            "branch_back": lambda message: messages.switch_branch(message, -1),
            "branch_on": lambda message: messages.switch_branch(message, 1),
        }
        if message.id != MARK:
            on_message[action](message)
        elif action in on_summary:
            on_summary[action](message)
        else:
            raise UsageError("this is the summary of the messages above: e edits it, u sends them again")

    def _in_every_chat(self, name: str, argument: str) -> None:
        if text := IN_EVERY_CHAT[name](self._state.conversation, argument):
            self._state.notify(text)

    def _run(self, action: str) -> None:
        app = self._view.screen.app
        app.call_later(app.run_action, action)  # after the key that sent the command: the action may change the screen

    def _toggle_thinking(self, _: str) -> None:
        transcript = self._view.transcript
        transcript.show_thinking = not transcript.show_thinking
        if not transcript.has_thinking:
            state = "unfolded" if transcript.show_thinking else "folded"
            self._state.notify(f"thinking sections will be {state}")

    def _new(self, _: str) -> None:
        self._state.open_session(None)
        self._view.conversation_changed()

    def _search(self, words: str) -> None:
        """Open the list of sessions, or those with all words."""
        from headrace.app.tui.screens.sessions_screen import SessionsScreen

        def opened(hit: tuple[int, str] | None) -> None:
            self._view.sync()
            if hit is not None:
                self._view.transcript.go_to(*hit)

        self._view.screen.app.push_screen(SessionsScreen(self._state, words), opened)

    # -- model and settings, from the next answer on -------------------------------------------------------------------

    def switch_model(self, name: str) -> None:
        """Switch to a model, after a question if it has to be downloaded; without a name, open the picker."""
        from headrace.app.tui.screens.models_screen import ModelsScreen  # not imported at the start

        self._state.conversation.check_model(name)
        if not name:

            def switch(chosen: str | None) -> None:
                if chosen is not None:
                    self._state.attempt(lambda: self.switch_model(chosen))

            self._view.screen.app.push_screen(ModelsScreen(self._state), switch)
            return
        if not self._fetch_first(name, lambda: self._state.fetch_and_use(name)):
            self._state.use_model(name)

    def _fetch_first(self, name: str | None, then: Callable[[], object]) -> bool:
        """Return False for a model that is here; else ask whether to fetch it, and call `then` after a yes."""
        from headrace.app.chat.download_plan import download_plan
        from headrace.app.tui.screens.models_screen import ask_to_fetch

        plan = download_plan(name)
        if plan is None:
            return False
        ask_to_fetch(self._view.screen.app, plan, lambda: self._state.attempt(then))
        return True

    def _system(self, text: str) -> None:
        if text:
            self._in_every_chat("system", text)
        else:
            self._edit_parameters("system")

    def _set(self, assignment: str) -> None:
        """Set `NAME VALUE`, show `NAME`, or open the parameters' screen."""
        if assignment:
            self._in_every_chat("set", assignment)
        else:
            self._edit_parameters("filter")

    def _edit_parameters(self, begin_at: str) -> None:
        from headrace.app.tui.screens.parameters_screen import ParametersScreen

        screen = ParametersScreen(self._state.conversation, self._state.engine.card, begin_at=begin_at)
        self._view.screen.app.push_screen(screen)

    def _preset(self, argument: str) -> None:
        """Apply `NAME`, `save NAME` or `delete NAME`; without an argument, let the user pick."""
        if argument:
            self._in_every_chat("preset", argument)
            self._state.presets_changed()
        elif not (names := preset_names()):
            self._state.notify("there are no presets yet; /preset save NAME keeps this session's settings")
        else:
            self._view.pick("which preset?", names, lambda number: self._preset(names[number]), always=True)

    # -- parallel answers ----------------------------------------------------------------------------------------------

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
        self._show_answers(AgainScreen(self._state, candidates))

    def _compare(self, arguments: str) -> None:
        """Compare this session's setup with another one; without arguments, let the user pick."""
        from headrace.app.chat.comparison import read_setup, suggested_setups

        conversation = self._state.conversation
        if conversation.phase != "idle":
            raise UsageError("an answer is in progress; Esc stops it")
        here = AnswerSetup.of(conversation.session)
        if arguments:
            self._compare_with(read_setup(arguments, here))
            return
        offered = suggested_setups(here, conversation.temperature or 0.0)
        names = [f"{name}  /compare {text}" if text else name for name, text in offered]
        self._view.pick(
            "compare with what?", names, lambda n: self._compare_with(read_setup(offered[n][1], here)), always=True
        )

    def _compare_with(self, setup: AnswerSetup) -> None:
        """Compare with a setup, after a question if its model has to be downloaded."""
        conversation = self._state.conversation
        another = setup.model_name != AnswerSetup.of(conversation.session).model_name
        if another:
            conversation.check_model(setup.model_name)
        if not another or not self._fetch_first(setup.model, lambda: self._start_comparison(setup)):
            self._start_comparison(setup)

    def _start_comparison(self, setup: AnswerSetup) -> None:
        from headrace.app.chat.comparison import Comparison
        from headrace.app.tui.screens.compare_screen import CompareScreen

        state = self._state
        comparison = Comparison(state.conversation, setup, state.second_engine)
        self._show_answers(CompareScreen(state, comparison))

    def _show_answers(self, screen: "ParallelScreen") -> None:
        """Open a screen of parallel answers, which are polled until it is left."""
        self._state.comparison = screen.answers

        def left(typed: Draft | None) -> None:
            self._state.unsent = self._view.unsent
            self._view.conversation_changed()
            if typed:
                self._view.prompt.put_before(typed.whole)

        self._view.screen.app.push_screen(screen, left)
