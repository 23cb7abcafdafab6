"""The chat's slash commands, by name, and the keys on a selected message."""

from collections.abc import Callable

from headrace.app.chat.attachments import unquoted
from headrace.app.sessions.records import Message
from headrace.app.tui.screens.chat_view import ChatView
from headrace.app.tui.screens.compare_actions import CompareActions
from headrace.app.tui.screens.copy_actions import CopyActions
from headrace.app.tui.screens.message_actions import MessageActions
from headrace.app.tui.screens.model_actions import ModelActions
from headrace.app.tui.transcript.context_mark import MARK
from headrace.runtime.errors import UsageError


class ChatActions:
    """Commands raise HeadraceError; the chat's screen shows it."""

    def __init__(self, view: ChatView) -> None:
        self._view, self._state = view, view.state
        self.messages = MessageActions(view)
        self._copying = CopyActions(view)
        self.commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._run("app.show_keys"),
            "stats": lambda _: self._run("app.decode_view"),
            "quit": lambda _: self._run("app.quit"),
            "restart": lambda _: self._state.restart_engine(),
            "messages": lambda _: self._run("screen.to_transcript"),
            "find": lambda words: view.find_bar.open(words),
            "think": self._toggle_thinking,
            "guesses": lambda _: self._state.notify(view.toggle_drafts()),
            "new": self._new,
            "sessions": lambda _: self._search(""),
            "search": self._search,
            "rename": self._rename,
            "export": lambda name: self._state.export_session(self._state.conversation.session.id, unquoted(name)),
            **self.messages.commands,
            **self._copying.commands,
            **ModelActions(view).commands,
            **CompareActions(view).commands,
        }

    def carry_out(self, name: str, argument: str) -> None:
        """Carry out the slash command of this name."""
        self.commands[name](argument)

    def act(self, action: str, message: Message) -> None:
        """Carry out a key on a selected message."""
        on_summary = message.id == MARK
        if action == "copy":
            self._copying.copy_message(message)
        elif action == "copy_code":
            self._copying.copy_code(message)
        elif action == "open_link":
            self._copying.open_link(message)
        elif action == "undo":
            if on_summary:
                self.messages.edit_summary("undo")
        elif action == "edit":
            self.messages.edit(message)
        elif on_summary:
            raise UsageError("this is the summary of the messages above: e edits it, u sends them again")
        elif action == "remove":
            self.messages.remove(message)
        elif action == "regenerate":
            self.messages.regenerate(message)
        elif action == "continue":
            self.messages.continue_answer("")
        elif action in ("branch_back", "branch_on"):
            self.messages.switch_branch(message, -1 if action == "branch_back" else 1)

    def _run(self, action: str) -> None:
        app = self._view.screen.app
        app.call_later(app.run_action, action)

    def _toggle_thinking(self, _: str) -> None:
        transcript = self._view.transcript
        transcript.show_thinking = not transcript.show_thinking
        if not transcript.has_thinking:
            self._state.notify(f"thinking sections will be {'unfolded' if transcript.show_thinking else 'folded'}")

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

    def _rename(self, title: str) -> None:
        if not title:
            raise UsageError("/rename TITLE")
        self._state.conversation.branch.rename(title)
