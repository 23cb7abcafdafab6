"""One message as rows of the transcript: sanitised text, and an answer's metrics below it.

A growing answer is sanitised and laid out incrementally: `update` costs its new text and last block, and
`extend_last_line` the last line alone. `Transcript` has an entry per message, and draws its rows. All text of a model
passes `_SafeText` before anything else sees it (tests/tui/test_safety.py).
"""

import re
from typing import Literal, NamedTuple

from msgspec import Struct
from textual.content import Content

from headrace.app.answer.phrases import ENDINGS, plain_phrases, summary_phrases
from headrace.app.output.sanitise import Sanitiser, safe_line, sanitise
from headrace.app.sessions.export import made_with
from headrace.app.sessions.records import Message
from headrace.app.tui.transcript.context_mark import mark_lines
from headrace.app.tui.transcript.draft_marks import DraftMarks, mark_drafts, sanitised
from headrace.app.tui.transcript.growing_markdown import GrowingMarkdown
from headrace.app.tui.widgets.lines import folded
from headrace.runtime.metrics.telemetry import Summary

_BRANCHES = re.compile(r"‹\d+/\d+›")  # ‹1/2›
RowKind = Literal["user", "body", "thinking", "summary", "meta", "blank"]


class ShownRow(NamedTuple):
    """A line of the transcript. kind: what it is, for its look and for clicks."""

    content: Content
    kind: RowKind


BLANK = ShownRow(Content(""), "blank")
_LONGEST_SYSTEM = 200  # characters of a system prompt that are looked at
_PLAIN = re.compile(r"[^\n`*_~\[\]<>&\\|]*")  # text that changes nothing before it: no character of Markdown
_NEXT_LINE = re.compile(r"[^\W\d_][^\n`*_~\[\]<>&\\|]*")  # the same from a letter on: no list, no heading
_BLANK_LINES = re.compile(r"\n{3,}")
_LEAD = re.compile(r" *(?:[•◦▪☐☑▎]|\d+\.)? +")  # of a line in a list or a quotation: `  • `, `12. `, `▎ `
_INCOMPLETE = ("■", "incomplete")  # of unknown end


class _OpenLine(NamedTuple):
    """The last line of a growing answer, which a few more words may extend.

    row: index of its row among those of the message.
    line: without the caret, with the spaces at its end.
    written: characters of the answer that are laid out.
    """

    row: int
    line: Content
    written: int


class LayoutOptions(Struct, frozen=True):
    """Everything the layout depends on besides the message."""

    width: int  # cells
    ansi: bool = False  # the terminal's own 16 colours
    dark: bool = True
    show_thinking: bool = False
    show_summary: bool = True


class MessageState(Struct, frozen=True):
    """A message's place among its branches, and whether it is sent or growing."""

    branch: int = 0
    branches: int = 1
    sent: bool = True
    growing: bool = False
    waiting: str = ""  # text shown before the first token
    drafts: DraftMarks | None = None  # if they are to be marked
    left_out: int = 0  # of the context mark: number of messages above it


class Entry:
    """A message and its rows. `update` with a grown message costs only the new part."""

    def __init__(self, message: Message, state: MessageState | None = None) -> None:
        self.message = message
        self.state = state or MessageState()
        self._text = _SafeText()  # of a question, or an answer's content
        self._thought = _SafeText()
        self._answer = GrowingMarkdown()
        self._thinking = GrowingMarkdown()
        self._thinks = False
        self._rows: list[ShownRow] | None = None
        self._layout: LayoutOptions | None = None
        self._detailed = False
        self._open: _OpenLine | None = None  # None: added text needs a whole layout
        self._take(message)

    def update(self, message: Message, state: MessageState) -> bool:
        """Take a new version of the message; return whether anything changed."""
        if message == self.message and state == self.state:
            return False
        self.message = message
        self.state = state
        self._take(message)
        self._rows = None
        return True

    def highlight_code(self) -> bool:
        """Give code its colours; return whether there was uncoloured code."""
        rough = self._answer.highlight_code() | self._thinking.highlight_code()  # not `or`: both get their colours
        if rough:
            self._rows = None
        return rough

    def extend_last_line(self, message: Message) -> tuple[int, list[ShownRow]] | None:
        """Return the index of the answer's last row and the rows in its place, for a few plain words appended to it.

        None if more than the last line would change. The next `update` lays the text out exactly.
        """
        if self._open is None or self._layout is None or message.id != self.message.id:
            return None
        row, line, written = self._open
        content = message.by_kind.content
        added = content[written:].rstrip("\n")  # later text may change it
        first, *others = _BLANK_LINES.sub("\n\n", added).split("\n")
        # Only words that no Markdown can change, and no second line within a list or a quotation.
        if not content.startswith(self._text.raw) or not _PLAIN.fullmatch(first):
            return None
        if not first.isprintable() or not all(_is_plain_line(text) for text in others):
            return None
        match = _LEAD.match(line.plain)
        lead = match.end() if match else 0
        if lead and others:
            return None
        # Wrap the line with the added words; lines after it begin below its text.
        wrapped = Content.assemble(line[lead:], first).wrap(max(1, self._layout.width - lead))
        lines = [Content.assemble(line[:lead], wrapped[0])]
        lines += [Content.assemble(" " * lead, part) for part in wrapped[1:]]
        for text in others:
            lines += Content(text).wrap(self._layout.width) or [Content("")]
        # The caret stands right after the text; the spaces at its end are kept for the words that follow.
        lines[-1] = lines[-1].rstrip(" ")
        extended = line.plain + added
        last = Content.assemble(lines[-1], " " * (len(extended) - len(extended.rstrip(" "))))
        self._open = _OpenLine(row + len(lines) - 1, last, written + len(added))
        return row, [*(ShownRow(part, "body") for part in _with_caret(lines, self._layout.width)), BLANK]

    def detail(self, wanted: bool) -> bool:
        """Show all known metrics, or a short form; return whether that changed."""
        if wanted == self._detailed:
            return False
        self._detailed = wanted
        self._rows = None
        return True

    def rows(self, options: LayoutOptions) -> list[ShownRow]:
        """Return the rows of the message, a blank one at the end."""
        if self._rows is None or options != self._layout:
            self._layout = options
            if self.state.left_out:
                self._rows = self._mark_rows(options)
            elif self.message.role == "user":
                self._rows = self._user_rows(options)
            else:
                self._rows = self._answer_rows(options)
        return self._rows

    def _take(self, message: Message) -> None:
        """Sanitise the message's text, and give it to its Markdown; only new text costs anything."""
        written = message.by_kind
        content = self._text.take(written.content)
        if message.role == "user":
            return
        self._thinks = written.is_open
        self._thinking = _grown(self._thinking, self._thought.take(written.thinking or ""))
        self._answer = _grown(self._answer, content)
        if not self.state.growing:
            self.highlight_code()

    def _user_rows(self, options: LayoutOptions) -> list[ShownRow]:
        """Return a question as it was typed, its attachments, and notes on its branches."""
        rows: list[ShownRow] = []
        lead = ("❯ ", "bold $text-accent")
        for part in self._text.safe.split("\n"):
            for line in folded(Content(part.expandtabs(4)), options.width - 2):
                rows.append(ShownRow(Content.assemble(lead, line), "user"))
                lead = ("  ", "")
        for attachment in self.message.attachments:
            label = f"  + {sanitise(attachment.name)}, {len(attachment.text):,} characters"
            rows.append(ShownRow(Content.styled(label, "$quiet"), "user"))
        notes = self._notes()
        if notes:
            rows.append(ShownRow(Content.styled("  " + " · ".join(notes), "$quiet"), "meta"))
        return [*rows, BLANK]

    def _mark_rows(self, options: LayoutOptions) -> list[ShownRow]:
        """Return the context mark, with its summary."""
        text = self._answer.lines(options.width - 2, ansi=options.ansi, dark=options.dark)
        words = len(self._answer.text.split())
        left_out = self.state.left_out
        lines = mark_lines(text, words, left_out, options.width, unfolded=options.show_summary)
        return [*(ShownRow(line, "summary" if folds else "meta") for line, folds in lines), BLANK]

    def _answer_rows(self, options: LayoutOptions) -> list[ShownRow]:
        """Return thinking, the answer with its caret or marks of draft tokens, and its metrics.

        Sets `_open` where the last line may be extended.
        """
        rows: list[ShownRow] = []
        if self._thinking.text or self._thinks:
            rows += self._thinking_rows(options)
        body = self._answer.lines(options.width, ansi=options.ansi, dark=options.dark)
        self._open = None
        if self.state.drafts:
            source, marks = sanitised(self.message.content, self.state.drafts)
            body = mark_drafts(body, source, marks, options.width, max(0, source.find(self._answer.text.strip())))
        elif self.state.growing and not self._thinks and body and self._answer.in_words:
            spaces = len(self._answer.text) - len(self._answer.text.rstrip(" "))
            line = Content.assemble(body[-1], " " * spaces)
            self._open = _OpenLine(len(rows) + len(body) - 1, line, len(self._text.raw))
        if self.state.growing and not self._thinks:
            body = _with_caret(body, options.width)
        rows += [ShownRow(line, "body") for line in body]
        if self.state.growing and not self._thinks and not self._thought.safe and not self._text.safe:
            rows = [ShownRow(Content.styled(self.state.waiting or "▍", "$text-accent"), "meta")]
        return [*rows, *self._foot(options, apart=bool(body)), BLANK]

    def _foot(self, options: LayoutOptions, *, apart: bool) -> list[ShownRow]:
        """Return the rows below an answer."""
        rows: list[ShownRow] = []
        if meta := self._meta():
            if apart:
                rows.append(BLANK)
            content = Content.styled(meta, "$quiet")
            lines = [content.truncate(options.width, ellipsis=True)]
            if self._detailed:  # all of it is asked for with a selection
                lines = content.wrap(options.width)
            rows += [ShownRow(line, "meta") for line in lines]
        made = " · ".join(self._made())
        if self._detailed and made:
            rows.append(ShownRow(Content.styled(made, "$quiet").truncate(options.width, ellipsis=True), "meta"))
        return rows

    def _thinking_rows(self, options: LayoutOptions) -> list[ShownRow]:
        """Return the head of the thinking section, and its text if it is unfolded."""
        words = len(self._thinking.text.split())
        mark = "▾" if options.show_thinking else "▸"
        state = "thinking…" if self._thinks else "thought"
        head = Content.assemble((f"{mark} {state}", "italic $text-secondary"), (f" {words} words", "$quiet"))
        rows = [ShownRow(head, "thinking")]
        if options.show_thinking:
            lines = self._thinking.lines(options.width - 2, ansi=options.ansi, dark=options.dark)
            for line in lines:
                content = Content.assemble(("┊ ", "$text-secondary"), line.stylize_before("$quiet"))
                rows.append(ShownRow(content, "thinking"))
        return [*rows, BLANK]

    def _meta(self) -> str:
        """Return ending, branch and metrics, most important first: the line may be cut."""
        if self.state.growing:
            return ""
        reason = self.message.finish_reason
        parts = []
        if reason is None and not self.message.partial:
            parts.append("edited by hand")  # no model ended it
        elif reason != "stop":
            parts.append(" ".join(ENDINGS.get(reason or "", _INCOMPLETE)))
        return " · ".join([*parts, *self._notes(), *self._costs()])

    def _made(self) -> list[str]:
        """Return model, sampling and system prompt, as far as stored."""
        parts = list(made_with(self.message))
        if system := safe_line((self.message.system or "")[:_LONGEST_SYSTEM]):
            parts.append(f"system prompt: {system}")
        return parts

    def _costs(self) -> list[str]:
        """Return the answer's metrics, all of them or a few; none before its end."""
        metrics = self.message.metrics
        if metrics is None:
            return []
        if self._detailed:
            return metrics_text(metrics)
        return plain_phrases(metrics.completion_tokens, metrics.decode_tokens_per_second, metrics.ttft_s)

    def _notes(self) -> list[str]:
        """Return the message's place among its branches, and whether it is sent."""
        notes = []
        if self.state.branches > 1:
            notes.append(f"‹{self.state.branch + 1}/{self.state.branches}›")
        if not self.state.sent:
            notes.append("not sent")
        return notes


class _SafeText:
    """A growing text, and the same sanitised."""

    def __init__(self) -> None:
        self.raw = ""
        self.safe = ""
        self._sanitiser = Sanitiser()

    def take(self, raw: str) -> str:
        """Return a new version of the text, sanitised; one that only grew costs only the new part."""
        if not raw.startswith(self.raw):
            self.raw = ""
            self.safe = ""
            self._sanitiser = Sanitiser()
        self.safe += self._sanitiser.feed(raw[len(self.raw) :])
        self.raw = raw
        return self.safe


def branch_at(row: ShownRow, x: int) -> int:
    """Return -1 or 1 for a cell in the left or right half of a row's ‹1/2›, else 0."""
    content, kind = row
    if kind != "meta":
        return 0
    for match in _BRANCHES.finditer(content.plain):
        if match.start() <= x < match.end():
            return -1 if 2 * x + 1 < match.start() + match.end() else 1
    return 0


def metrics_text(metrics: Summary) -> list[str]:
    """Return all metrics of an answer."""
    parts = summary_phrases(metrics)
    if metrics.reused_tokens:
        parts.append(f"{metrics.reused_tokens:,} of {metrics.prompt_tokens:,} prompt tokens cached")
    return parts


def _is_plain_line(text: str) -> bool:
    """Return whether a line shows as it is written, and leaves the lines before it as they are."""
    return not text or (_NEXT_LINE.fullmatch(text) is not None and text.isprintable())


def _grown(markdown: GrowingMarkdown, text: str) -> GrowingMarkdown:
    """Return the Markdown of a text: the same object if the text only grew."""
    if not text.startswith(markdown.text):
        return GrowingMarkdown(text)
    markdown.append(text[len(markdown.text) :])
    return markdown


def _with_caret(lines: list[Content], width: int) -> list[Content]:
    """Append the caret of a growing answer."""
    caret = ("▍", "$text-accent")
    if lines and lines[-1].cell_length < width:
        return [*lines[:-1], Content.assemble(lines[-1], caret)]
    return [*lines, Content.assemble(caret)]
