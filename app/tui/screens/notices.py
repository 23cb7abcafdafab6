"""Lines between the transcript and the prompt: a notice, the queued messages, the attached files.

`notice_of` has all notices of the chat, the most important first: a new one is a case there. `ChatView.show_notices`
shows it; screens with several answers have notices of their own.

Guards: tests/tui/test_sample_model.py and test_queue.py, tests/tui/screens/test_chips.py.
"""

from collections.abc import Sequence

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget
from textual.widgets import Static

from headrace.app.answer.repetition import REPEATS
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.unsent_message import UnsentMessage
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.screens.model_loading import DownloadProgress

_QUEUE_LINES = 3  # shown of the messages that wait
_NOTICE_LINES = 5  # more are cut off, which shows; `max-height` in headrace.tcss
_PADDING = 6  # cells left and right of both, by headrace.tcss
_HEAD = 2  # cells before the text of a queued message
_NO_BREAK = "\u00a0"  # a space at which no line is broken
_CHIPS = 4  # files by name; of more, how many


class Notice(Static):
    """A few lines, hidden without text."""

    _shown: object = None

    def show(self, text: str, *, error: bool = False) -> None:
        """Show a text, wrapped for the width; the same text at the same width is not drawn again."""
        width = max(2, _size_around(self).width - _PADDING)
        if (text, error, width) == self._shown:
            return
        self._shown = text, error, width
        self.display = bool(text)
        self.set_class(error, "-error")
        lines = Content(sanitise(text)).wrap(width)
        if len(lines) > _NOTICE_LINES:
            lines = [*lines[: _NOTICE_LINES - 1], lines[_NOTICE_LINES - 1].truncate(width - 1) + "…"]
        self.update(Content("\n").join(lines))


def notice_of(conversation: Conversation, download: DownloadProgress, awaited: str | None) -> tuple[str, bool]:
    """Return the notice for a conversation, and whether it is an error.

    awaited: the model that is being fetched while another one is loaded.
    """
    state = conversation.engine.state
    failure = conversation.failure
    if failure is not None:
        if state == "failed" and not conversation.messages:  # the whole of it stands in the transcript's place
            return "", True
        way_out = "The next message or F8 starts it again"
        if state == "failed":
            way_out = "F8 tries again"
            if not conversation.engine.is_remote:  # a server's model stays
                way_out += ", F5 picks a model"
        return f"✗ {failure}. {way_out}.", True
    if state == "loading" and download.active and conversation.messages:
        return f"downloading {conversation.session.model or 'the default model'}: {download.summary()}", False
    if conversation.notice:
        return conversation.notice, False
    if conversation.writer.repeats:
        return f"{REPEATS}; Esc stops it", False
    if conversation.branch.shared:
        return "this session is also open in another terminal: messages from there become branches", False
    if awaited is not None:
        return f"{awaited} is loaded once it is here: {download.summary() or 'downloading'}", False
    return "", False


class QueuedMessages(Static):
    """Messages that are sent after the answer."""

    _shown: object = None

    def show(self, texts: Sequence[str]) -> None:
        """Show these, a line each, cut to the width; the same ones at the same width are not drawn again."""
        width = max(8, _size_around(self).width - _PADDING - _HEAD)
        if (tuple(texts), width) == self._shown:
            return
        self._shown = tuple(texts), width
        self.display = bool(texts)
        if not texts:
            self.update("")
            return
        lines = [Content(f"⧗ {sanitise(' '.join(text.split()))}").truncate(width, ellipsis=True) for text in texts]
        if len(lines) > _QUEUE_LINES:
            lines[_QUEUE_LINES - 1 :] = [Content(f"⧗ and {len(lines) - _QUEUE_LINES + 1} more")]
        hint = Content.styled("sent after this answer; /queue edits them", "$quiet")
        hint = hint.truncate(width, ellipsis=True)
        self.update(Content("\n").join([*lines, hint]))


class Chips(Static):
    """Attached files of the unsent message: name and tokens of each. Hidden while there are none.

    Tokens are counted by the engine, so they come a moment later.
    """

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self._shown: object = None

    def show(self, unsent: UnsentMessage | None) -> None:
        """Draw the attachments if they changed."""
        names: list[str] = []
        tokens: list[int | None] = []
        problem = ""
        if unsent is not None:
            names = [file.name for file in unsent.files]
            tokens = list(unsent.file_tokens)
            problem = unsent.problem
        if (names, tokens, problem) == self._shown:
            return
        self._shown = names, tokens, problem
        self.display = bool(names or problem)
        if problem:
            self.update(Content.styled(f"✗ {sanitise(problem)}", "$text-error"))
            return
        chips = [_chip(name, count) for name, count in zip(names, tokens, strict=True)][:_CHIPS]
        if len(names) > _CHIPS:
            text = f"and {len(names) - _CHIPS} more"
            counts = [count for count in tokens if count is not None]
            if len(counts) == len(tokens):
                text += f", {sum(counts):,} tokens in all"
            chips.append(Content.styled(text, "$quiet"))
        self.update(Content("  ").join(chips))


def _chip(name: str, tokens: int | None) -> Content:
    """Return a file's name and size, which are not broken over lines. tokens: None until they are counted."""
    size = " … " if tokens is None else f" {tokens:,} tokens "
    return Content.assemble(
        (f" {sanitise(name)}".replace(" ", _NO_BREAK), "bold $text-accent on $surface"),
        (size.replace(" ", _NO_BREAK), "$quiet on $surface"),
    )


def _size_around(widget: Static) -> Size:
    """Return the size of the column that the widget stands in; its own may be 0 while it is hidden."""
    if isinstance(widget.parent, Widget):
        return widget.parent.size
    return widget.size
