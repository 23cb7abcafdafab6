"""What the slash commands and the keys on a message do. One method a command, named `do_<command>`.

Errors of the tree pass through: the chat screen says them.
"""

from typing import TYPE_CHECKING, cast

from textual.app import SuspendNotSupported

from headrace.app.answer.phrases import sampling_text
from headrace.app.chat.attachments import parse_message
from headrace.app.chat.context_question import ContextChoice
from headrace.app.sessions.records import Message
from headrace.app.tui.input.commands import message_text
from headrace.app.tui.screens.copy_actions import CopyActions
from headrace.app.tui.screens.parameters import read_parameter, write_parameter
from headrace.app.tui.transcript.context_mark import MARK, mark_message
from headrace.runtime.errors import HeadraceError, UsageError

if TYPE_CHECKING:
    from headrace.app.chat.answer_setup import AnswerSetup


class ChatActions(CopyActions):
    """Works on the conversation that the screen shows."""

    # -- talking ---------------------------------------------------------------------------------------------------

    def send(self, text: str) -> None:
        """Say it, behind an answer that is being written; or finish an edit."""
        screen = self._screen
        if screen.editing is not None:
            if screen.editing == MARK:
                self._conversation.set_summary(text)
            else:
                self._conversation.edit(screen.editing, text)
            screen.action_leave_edit()
        elif self._conversation.phase != "idle" or self.queue.texts:
            self.queue.add(message_text(text))
        else:
            self._conversation.send(message_text(text))
        self._show_answer()

    def carry_out(self, name: str, argument: str) -> None:
        """The slash command of this name. Raises HeadraceError where it is refused."""
        getattr(self, f"do_{name}")(argument)

    def do_file(self, path: str) -> None:
        """A file that can be attached stays in the input, with a line below it for the message."""
        if not path:
            raise UsageError("/file PATH")
        line = f"/file {path}\n"
        _, attachments = parse_message(line)
        self._screen.prompt.put(line)
        what = attachments[0].name if len(attachments) == 1 else f"{len(attachments)} files"
        self._headrace.say(f"{what} goes with what you write now; Enter sends both")

    def do_editor(self, _: str) -> None:
        """What stands in the input, in the user's own editor."""
        from headrace.app.tui.input.editor import edit_text

        prompt = self._screen.prompt
        try:
            with self._screen.app.suspend():
                text = edit_text(prompt.whole_text)
        except SuspendNotSupported:
            raise UsageError("no editor can be opened here") from None
        prompt.put(text)

    def do_queue(self, _: str) -> None:
        """What waits goes back into the input."""
        if not self.queue.texts:
            raise UsageError("no message waits")
        self.return_queue()

    def return_queue(self) -> None:
        """Before what has been typed since."""
        prompt = self._screen.prompt
        waited = self.queue.take_back()
        prompt.put(f"{waited}\n\n{prompt.whole_text}" if prompt.text else waited)

    def do_regen(self, _: str) -> None:
        self._conversation.regenerate()
        self._show_answer()

    def do_again(self, count: str) -> None:
        """So many answers to the last question side by side, of which one is taken."""
        try:
            number = int(count)
        except ValueError:
            raise UsageError(f"/again takes a number, not {count}" if count else "/again N", "as in /again 4") from None
        self._headrace.again(number)

    def do_continue(self, _: str) -> None:
        self._conversation.continue_answer()
        self._show_answer()

    def _show_answer(self) -> None:
        """Wherever the conversation was scrolled to."""
        self._screen.sync([])
        self._screen.transcript.to_end()

    def do_compare(self, other: str) -> None:
        """The same question to this session's setup and to another; alone: choose which."""
        from headrace.app.chat.answer_setup import AnswerSetup
        from headrace.app.tui.screens.compare_setup import installed_models, read_setup, suggestions

        if self._conversation.phase != "idle":
            raise UsageError("an answer is being written; Esc stops it")
        here = AnswerSetup.of(self._conversation.session)
        if other:
            self._compare(read_setup(other, here))
            return
        offered = suggestions(here, installed_models(), self._conversation.effective["temperature"])
        words = [said if not text else f"{said}  /compare {text}" for said, text in offered]
        self._pick(
            "compare with what?", words, lambda number: self._compare(read_setup(offered[number][1], here)), always=True
        )

    def _compare(self, setup: "AnswerSetup") -> None:
        """Ask before anything is fetched."""
        from headrace.app.chat.answer_setup import AnswerSetup
        from headrace.app.chat.download_plan import download_plan
        from headrace.app.chat.model_names import check_model_name
        from headrace.app.tui.screens.models_screen import fetch_question

        another = setup.model_name != AnswerSetup.of(self._conversation.session).model_name
        if another:
            check_model_name(setup.model_name)
        if not another or (wanted := download_plan(setup.model)) is None:
            self._headrace.compare(setup)
        else:

            def resolve(answer: str | None) -> None:
                if answer != "fetch":
                    return
                try:
                    self._headrace.compare(setup)
                except HeadraceError as error:  # what was idle when it was asked may not be any more
                    self._headrace.refuse(error)

            self._screen.app.push_screen(fetch_question(wanted), resolve)

    def do_edit(self, which: str) -> None:
        """The last message of the user, or with `answer` the last answer, into the input."""
        role = "assistant" if which == "answer" else "user"
        for message in reversed(self._conversation.messages):
            if message.role == role:
                self._edit(message)
                return
        raise UsageError("there is nothing to edit yet")

    def _edit(self, message: Message) -> None:
        if self._conversation.phase != "idle":
            raise UsageError("an answer is being written; Esc stops it")
        self._screen.begin_edit(message)

    def do_summary(self, what: str) -> None:
        """Edit the summary that is sent in the place of older messages, or take back that they are left out."""
        conversation = self._conversation
        if what == "undo":
            conversation.undo_trimming()
            self._screen.sync([])
            left = conversation.branch.not_sent
            self._headrace.say(f"{left} messages are left out" if left else "all messages are sent again")
        elif not conversation.branch.not_sent:
            raise UsageError("all messages are sent: there is no summary")
        else:
            self._edit(mark_message(conversation.session.id, conversation.session.summary))

    def do_branch(self, direction: str) -> None:
        """The next alternative at the last place where there is one; after the last comes the first."""
        for message in reversed(self._conversation.messages):
            branches = self._conversation.branch.alternatives(message.id)
            if len(branches.ids) > 1:
                step = -1 if direction == "back" else 1
                if not 0 <= branches.shown + step < len(branches.ids):
                    step = -step * (len(branches.ids) - 1)
                self._conversation.switch_branch(message.id, step)
                return
        raise UsageError("there are no branches yet", "/regen and /edit make them")

    def act(self, action: str, message: Message) -> None:
        """A key on a selected message."""
        conversation = self._conversation
        if action == "copy":
            self.copy_message(message)
        elif action == "copy_code":
            self.copy_code(message)
        elif action == "open_link":
            self.open_link(message)
        elif action == "undo":
            if message.id == MARK:
                self.do_summary("undo")
        elif action == "edit":
            self._edit(message)
        elif message.id == MARK:
            raise UsageError("this is what stands for the messages above: e changes it, u sends them again")
        elif action == "remove":
            self._remove(message)
        elif action == "regenerate":
            conversation.regenerate(message.id)
            self._show_answer()
        elif action == "continue":
            self.do_continue("")
        elif action in ("branch_back", "branch_on"):
            conversation.switch_branch(message.id, -1 if action == "branch_back" else 1)

    # -- sessions --------------------------------------------------------------------------------------------------

    def do_new(self, _: str) -> None:
        self._headrace.open_session(None)

    def do_sessions(self, _: str) -> None:
        self.do_search("")

    def do_search(self, words: str) -> None:
        from headrace.app.tui.screens.sessions_screen import SessionsScreen

        self._screen.app.push_screen(SessionsScreen(self._headrace, words))

    def do_rename(self, title: str) -> None:
        if not title:
            raise UsageError("/rename TITLE")
        self._conversation.branch.rename(title)

    # -- model and parameters --------------------------------------------------------------------------------------

    def do_model(self, name: str) -> None:
        from headrace.app.chat.download_plan import download_plan
        from headrace.app.chat.model_names import check_model_name  # the catalog's reader is no part of the start
        from headrace.app.tui.screens.models_screen import ModelsScreen, fetch_question

        screen = self._screen
        if not name:
            screen.app.push_screen(
                ModelsScreen(self._headrace), lambda chosen: screen.run_command("model", chosen) if chosen else None
            )
            return
        check_model_name(name)
        if (wanted := download_plan(name)) is None:
            self._use_model(name)
        else:
            screen.app.push_screen(
                fetch_question(wanted), lambda answer: self._use_model(name) if answer == "fetch" else None
            )

    def _use_model(self, name: str) -> None:
        try:
            self._conversation.set_model(name)
        except HeadraceError as error:
            self._headrace.refuse(error)
        else:
            self._headrace.metrics.loading(f"loading {name}", None)

    def do_system(self, text: str) -> None:
        if text:
            self._conversation.branch.set_system("" if text == "none" else text)
            self._headrace.say("the system prompt is set; it counts from the next answer on")
        else:
            self.do_set("")

    def do_set(self, assignment: str) -> None:
        """`NAME VALUE`, `NAME` to see it, nothing to open the panel."""
        from headrace.app.tui.screens.parameters_screen import ParametersScreen

        name, _, value = assignment.replace("=", " ", 1).partition(" ")
        if not name:
            self._screen.app.push_screen(ParametersScreen(self._conversation, self._headrace.engine.card))
        elif not value.strip():
            read_parameter(name, "")  # refuses a name there is none of
            shown = write_parameter(name, self._conversation.session.sampling)
            self._headrace.say(
                f"{name}: {shown or 'not set'}; in effect: {sampling_text(self._conversation.effective)}"
            )
        else:
            self._conversation.branch.set_sampling({name.replace("-", "_"): read_parameter(name, value)})
            self._headrace.say(f"{name} is {value.strip()} from the next answer on")

    def do_preset(self, what: str) -> None:
        """`NAME` to take it, `save NAME` to keep what this session has, `delete NAME`; alone: choose one."""
        from headrace.app.config.presets import Preset, delete_preset, load_presets, save_preset

        session = self._conversation.session
        verb, _, name = what.partition(" ")
        if name.strip() and verb == "save":
            save_preset(name.strip(), Preset(session.system, session.sampling))
            self._headrace.say(f"preset {name.strip()} is this session's system prompt and settings")
        elif name.strip() and verb == "delete":
            delete_preset(name.strip())
            self._headrace.say(f"preset {name.strip()} is gone")
        elif not (presets := load_presets()):
            raise UsageError("there are no presets yet", "/preset save NAME keeps this session's")
        elif not what:
            names = list(presets)
            self._pick("which preset?", names, lambda number: self.do_preset(names[number]), always=True)
        elif what not in presets:
            raise UsageError(f"there is no preset {what}", "one of " + ", ".join(presets))
        else:
            self._conversation.branch.set_system(presets[what].system)
            self._conversation.branch.set_sampling(dict.fromkeys(session.sampling) | dict(presets[what].sampling))
            self._headrace.say(f"preset {what}, from the next answer on")

    def ask_about_context(self) -> None:
        """The context is full: the user says what goes."""
        from headrace.app.tui.screens.dialogs import Choose

        question = self._conversation.trimming.question
        if question is None:
            return
        text = (
            f"{'With this answer' if question.during_answer else 'With your message'} the conversation has "
            f"{question.tokens:,} tokens; the context holds {question.limit:,}, the answer included. "
            "Nothing is dropped without you."
        )
        answers = (
            ("drop", "d", "leave out the oldest turns"),
            ("summarise", "s", "have the oldest turns summarised, then leave them out"),
            ("new", "n", "go on in a new session"),
        )
        self._screen.app.push_screen(Choose("the context is full", text, answers), self._resolve)

    def _resolve(self, choice: str | None) -> None:
        if choice is None:
            return
        try:
            self._conversation.resolve(cast(ContextChoice, choice))
        except HeadraceError as error:  # the engine may have died since it was asked
            self._headrace.refuse(error)
        self._screen.sync([])

    # -- the rest --------------------------------------------------------------------------------------------------

    def do_tree(self, _: str) -> None:
        from headrace.app.tui.screens.tree_screen import TreeScreen

        self._screen.app.push_screen(TreeScreen(self._headrace))

    def do_delete(self, _: str) -> None:
        if not self._conversation.messages:
            raise UsageError("nothing was said yet")
        self._remove(self._conversation.messages[-1])

    def _remove(self, message: Message) -> None:
        """Ask, then remove a message and all that follow it."""
        from headrace.app.tui.screens.tree_screen import ask_to_remove

        if self._conversation.phase != "idle":
            raise UsageError("an answer is being written; Esc stops it")
        ask_to_remove(self._screen.app, self._headrace, message, lambda: self._screen.sync([]))

    def do_find(self, words: str) -> None:
        self._screen.find_bar.open(words)

    def do_help(self, _: str) -> None:
        self._headrace.action_show_keys()

    def do_stats(self, _: str) -> None:
        self._headrace.action_decode_view()

    def do_think(self, _: str) -> None:
        transcript = self._screen.transcript
        transcript.show_thinking = not transcript.show_thinking
        if not transcript.has_thinking:
            self._headrace.say(f"thinking sections will be {'unfolded' if transcript.show_thinking else 'folded'}")

    def do_guesses(self, _: str) -> None:
        marked = self._screen.toggle_accepted()
        if not marked:
            self._headrace.say("what was guessed is not marked any more")
        elif self._conversation.writer.accepted_spans:
            self._headrace.say("underlined: what had been guessed, and was right")
        else:
            self._headrace.say("what is guessed will be underlined; nothing has been, since the chat began")

    def do_restart(self, _: str) -> None:
        self._headrace.restart_engine()

    def do_quit(self, _: str) -> None:
        self._screen.app.call_later(self._screen.app.action_quit)
