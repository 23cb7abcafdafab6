"""What the screens need of the application, which stands above them: they are given one, and never import it."""

from typing import TYPE_CHECKING, Protocol

from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parallel_answer import ParallelAnswer
from headrace.app.config.settings import Settings
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.events import PullProgress
from headrace.app.sessions.records import Session
from headrace.app.sessions.store import SessionStore
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.status_bar import Status
from headrace.runtime.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.app.chat.parallel_answers import ParallelAnswers


class ChatApp(Protocol):
    """One engine, one conversation at a time, and what can be done with them from any screen."""

    engine: ChatEngine
    store: SessionStore
    settings: Settings
    conversation: Conversation
    metrics: LiveMetrics
    comparison: "ParallelAnswers | None"
    """What the app polls in the place of the conversation, while there is one."""
    pulls: dict[str, PullProgress]
    """The downloads under way, by name."""

    def say(self, text: str, *, problem: bool = False) -> None:
        """A short message in the corner. Never parsed as markup."""

    def refuse(self, error: HeadraceError) -> None:
        """Say what cannot be done, and what can."""

    def copy(self, text: str, what: str) -> None:
        """To the clipboard; `what` it is, for the message that says so."""

    def status(self) -> Status:
        """What the line at the top says."""
        ...

    def draw_metrics(self, *, force: bool = False) -> None:
        """Draw the decode view, if it shows and if there is news."""

    def open_session(self, session: Session | None) -> None:
        """Go on with a session, or begin a new one with the settings of the old."""

    def compare(self, other: AnswerSetup) -> None:
        """Ask this session's setup and another one the same; `end_comparison` leaves. Raises HeadraceError."""

    def again(self, count: int) -> None:
        """Grow so many answers to the last question; `end_comparison` leaves. Raises UsageError."""

    def end_comparison(self, side: ParallelAnswer | None) -> None:
        """Go on with what this side said, its model and its settings; None: as it was before.

        Raises SessionError, and UsageError for a side that cannot be taken.
        """

    def go_to(self, message_id: int, words: str) -> None:
        """Bring a message of the branch that shows into view, at the line with most of the words."""

    def export_session(self, session_id: str, name: str) -> None:
        """Write a session to a file: .json with all branches, anything else as Markdown of the branch that shows.

        name: "" is a file named after the session, the only one that is written over. Raises UsageError.
        """

    def restart_engine(self) -> None:
        """Bring the engine back after it died, or try a failed load again."""

    def action_show_keys(self) -> None:
        """Open the page of keys and commands."""

    def action_decode_view(self) -> None:
        """Open the decode view in full."""
