"""Commands that open, search, rename and export sessions."""

from headrace.app.chat.attachments import unquoted
from headrace.app.tui.screens.chat_view import ChatView
from headrace.runtime.errors import UsageError


class SessionActions:
    def __init__(self, view: ChatView) -> None:
        self._view, self._state = view, view.state
        self.commands = {
            "new": self._new,
            "sessions": self._list,
            "search": self._search,
            "rename": self._rename,
            "export": self._export,
        }

    def _new(self, _: str) -> None:
        self._state.open_session(None)
        self._view.conversation_changed()

    def _list(self, _: str) -> None:
        self._search("")

    def _search(self, words: str) -> None:
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

    def _export(self, name: str) -> None:
        self._state.export_session(self._state.conversation.session.id, unquoted(name))
