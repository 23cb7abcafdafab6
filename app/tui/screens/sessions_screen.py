"""Session list with search: resume, rename, delete, export.

Another process may change the store at any time: a failed action shows its error and reloads the list.

The ids of the list's options are `SESSION`, or `SESSION/MESSAGE` for a hit of the search.
tests/tui/screens/test_sessions_screen.py and tests/tui/test_nothing_lost.py guard this.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widget import Widget
from textual.widgets.option_list import Option

from headrace.app.output.sanitise import safe_line, sanitise
from headrace.app.sessions.kv_cache import delete_kv_cache, kv_cache_bytes
from headrace.app.sessions.records import Hit, SessionEntry
from headrace.app.sessions.search import search
from headrace.app.tui.input.fields import Field
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.dialogs import AskText, confirm
from headrace.app.tui.screens.list_screen import ListScreen
from headrace.app.tui.textual_overrides.option_list import PagedOptionList
from headrace.runtime.errors import EngineError, HeadraceError, SessionError
from headrace.runtime.metrics.units import format_bytes

_UNITS = ((86400 * 365, "y"), (86400 * 30, "mo"), (86400, "d"), (3600, "h"), (60, "min"))  # seconds, the largest first


class SessionsScreen(ListScreen[tuple[int, str] | None]):
    """A search field above the list. Resuming a search hit returns its message id and the words."""

    HEADING = "sessions"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "resume", "Resume", priority=True),
        Binding("ctrl+r,f2", "rename", "Rename", key_display="^R", priority=True),
        Binding("ctrl+d,delete", "delete", "Delete", key_display="^D", priority=True),
        Binding("ctrl+s", "export", "Export …", key_display="^S", priority=True),
        Binding("ctrl+k", "clear_kept", "Clear K/V", key_display="^K", priority=True),
        Binding("escape,f4", "dismiss(None)", "Close", key_display="Esc", priority=True),
    ]

    def __init__(self, state: ChatState, words: str = "") -> None:
        super().__init__()
        self._state = state
        self._first_words = words

    def parts(self) -> Iterator[Widget]:
        yield Field(self._first_words, placeholder="search all messages", id="words")
        yield PagedOptionList(id="sessions")

    def on_mount(self) -> None:
        self._show_kv_size()
        self._fill()
        self.query_one(Field).focus()

    def _fill(self) -> None:
        """List all sessions, or the search hits."""
        words = self.words.strip()
        store = self._state.store
        nothing = "no sessions yet"
        try:
            if words:
                nothing = "nothing found"
                options = [_hit_option(hit) for hit in search(store, words)]
            else:
                options = [_session_option(entry) for entry in store.sessions()]
        except SessionError as error:
            options = []
            nothing = sanitise(str(error))
        self.set_options(options, nothing, marked=0)

    @contextmanager
    def _up_to_date(self) -> Iterator[None]:
        """Show an error of the wrapped action and reload the list."""
        try:
            yield
        except HeadraceError as error:
            self._state.show_error(error)
            self._fill()

    @property
    def _chosen(self) -> tuple[str, int | None] | None:
        """Id of the highlighted session, and of the message of a hit."""
        index = self.options.highlighted
        if index is None:
            return None
        session, _, message = (self.options.get_option_at_index(index).id or "").partition("/")
        if not session:  # the line in place of no sessions
            return None
        return session, int(message) if message else None

    def on_input_changed(self) -> None:
        self._fill()

    def on_option_list_option_selected(self) -> None:
        self.action_resume()

    def action_resume(self) -> None:
        """Open the session; for a hit, on a branch with its message."""
        if (listed := self._chosen) is None:
            return
        chosen, hit = listed
        conversation = self._state.conversation
        store = self._state.store
        with self._up_to_date():
            session = store.session(chosen)
            open_already = chosen == conversation.session.id
            if hit is not None and not (open_already and any(message.id == hit for message in conversation.messages)):
                if open_already and conversation.phase != "idle":
                    raise EngineError("this message is on another branch and an answer is in progress; Esc stops it")
                session = store.reveal(store.message(hit))
                open_already = False
            if not open_already:
                self._state.open_session(session)
            if hit is None:
                self.dismiss(None)
            else:
                self.dismiss((hit, self.words))

    def action_rename(self) -> None:
        if (listed := self._chosen) is None:
            return
        chosen, _ = listed

        def renamed(title: str | None) -> None:
            if title is None:
                return
            with self._up_to_date():
                if chosen == self._state.conversation.session.id:
                    self._state.conversation.branch.rename(title)
                else:
                    self._state.store.rename(chosen, title)
                self._fill()

        with self._up_to_date():
            self.app.push_screen(AskText("rename the session", self._state.store.session(chosen).title), renamed)

    def action_delete(self) -> None:
        if (listed := self._chosen) is None:
            return
        chosen, _ = listed
        if chosen == self._state.conversation.session.id:
            self._state.notify("this session is open: start another one first (/new)", problem=True)
            return

        def delete() -> None:
            with self._up_to_date():
                self._state.store.delete(chosen)
                delete_kv_cache()
                self._fill()

        with self._up_to_date():
            title = self._state.store.session(chosen).title
            question = f"Delete {title!r} and all its messages?"
            confirm(self.app, "delete", question, "delete", delete, otherwise="keep")

    def _show_kv_size(self) -> None:
        """Show the size of the K/V that are kept on disk."""
        self.query_one(".dialog").border_subtitle = Content(f"K/V kept on disk: {format_bytes(kv_cache_bytes())}")

    def action_clear_kept(self) -> None:
        """Ask, then delete the K/V of all sessions from the disk; they are computed again when needed."""

        def clear() -> None:
            with self._up_to_date():
                delete_kv_cache()
            self._show_kv_size()

        text = f"Deletes {format_bytes(kv_cache_bytes())} of K/V; the sessions stay. A reopened one is prefilled again."
        confirm(self.app, "clear the K/V kept on disk?", text, "clear", clear, otherwise="keep")

    def action_export(self) -> None:
        """Ask for the file's name and export the session."""
        if (listed := self._chosen) is None:
            return
        chosen, _ = listed

        def named(name: str | None) -> None:
            if name is not None:
                with self._up_to_date():
                    self._state.export_session(chosen, name)

        with self._up_to_date():
            self._state.store.session(chosen)
            self.app.push_screen(AskText("export to a file: .md or .json", f"headrace-{chosen}.md"), named)


def _session_option(entry: SessionEntry) -> Option:
    """Return a session's option: its title, and a line of facts."""
    session = entry.session
    model = (session.model or "default model").rstrip("/").rpartition("/")[2]  # of a path or a hub id, its name
    facts = [f"{entry.messages} messages", ago(session.updated_at), sanitise(model)]
    if session.draft and entry.messages:
        facts.insert(1, "unsent text")
    title = sanitise(entry.title or "untitled").replace("\n", " ")
    return Option(Content.assemble((title, "bold"), "\n", (" · ".join(facts), "$quiet")), id=session.id)


def _hit_option(hit: Hit) -> Option:
    """Return a hit's option; the store marks found words with « and »."""
    snippet = safe_line(hit.snippet)
    head = Content.assemble((sanitise(hit.title), "bold"), (f"  {hit.role} · {ago(hit.created_at)}", "$quiet"))
    return Option(Content.assemble(head, "\n", (snippet, "$quiet")), id=f"{hit.session_id}/{hit.message_id}")


def ago(moment: float) -> str:
    """Return the age of a moment in one unit."""
    seconds = max(0.0, time.time() - moment)
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"
