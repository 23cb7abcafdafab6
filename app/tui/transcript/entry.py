"""One message as lines of the transcript: what was said, safe to show, and below an answer what it cost: in plain
words, and with all that is known while it is selected.

An answer that grows is sanitised and laid out piece by piece; nothing already laid out is touched again.
"""

import re
from dataclasses import dataclass
from typing import Literal

from textual.content import Content

from headrace.app.answer.phrases import phrases, plain_phrases
from headrace.app.output.sanitise import Sanitiser, sanitise
from headrace.app.sessions.export import made_with
from headrace.app.sessions.records import Message
from headrace.app.tui.transcript.accepted import accepted_lines
from headrace.app.tui.transcript.context_mark import mark_lines
from headrace.app.tui.transcript.growing_markdown import GrowingMarkdown
from headrace.models.text.thinking import split_thinking
from headrace.runtime.metrics.telemetry import Summary

RowKind = Literal["user", "body", "thinking", "summary", "meta", "blank"]
Row = tuple[Content, RowKind]

BLANK: Row = (Content(""), "blank")
_LONGEST_SYSTEM = 200  # characters of a system prompt that are looked at
_PLAIN = re.compile(r"[^\n`*_~\[\]<>&\\|]*")  # what changes nothing that stands before it
_NEXT_LINE = re.compile(r"[^\W\d_][^\n`*_~\[\]<>&\\|]*")  # a line in words below such a one
_BLANK_LINES = re.compile(r"\n{3,}")
_LEAD = re.compile(r" *(?:[•◦▪☐☑▎]|\d+\.)? +")  # of a line in a list or a quotation
_ENDINGS = {
    "cancelled": "■ stopped",
    "length": "▲ limit reached",
    "died": "✗ the engine died here",
    "failed": "✗ failed",
    "damaged": "✗ damaged on the disk",
}


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """What the layout depends on besides the message."""

    width: int
    ansi: bool = False
    dark: bool = True
    show_thinking: bool = False
    show_summary: bool = True


@dataclass(frozen=True, slots=True)
class MessageState:
    """Where a message stands in the conversation: its branch among its siblings, and whether it is sent."""

    branch: int = 0
    branches: int = 1
    sent: bool = True
    growing: bool = False
    waiting: str = ""  # what to show while there is no text yet
    accepted: tuple[tuple[int, int], ...] = ()  # spans of accepted draft tokens, if they are to be marked
    left_out: int = 0  # of the mark between what is sent and what is not: the messages above it


class Entry:
    """A message and its rows. `update` with the same message grown costs only what is new."""

    def __init__(self, message: Message, state: MessageState | None = None) -> None:
        self.message = message
        self.state = state or MessageState()
        self._raw = ""
        self._safe = ""
        self._sanitiser = Sanitiser()
        self._answer = GrowingMarkdown()
        self._thinking = GrowingMarkdown()
        self._thinks = False
        self._rows: list[Row] | None = None
        self._look: LayoutOptions | None = None
        self._detailed = False
        self._open: tuple[int, Content, int] | None = None  # the last line, which row it is, the text it ends with
        self._take(message.content)

    def update(self, message: Message, state: MessageState) -> bool:
        """Whether anything changed."""
        if message == self.message and state == self.state:
            return False
        self.message, self.state = message, state
        self._take(message.content)
        self._rows = None
        return True

    def highlight_code(self) -> bool:
        """Give what was laid out in a hurry its colours; whether there was any."""
        rough = self._answer.highlight_code() | self._thinking.highlight_code()
        if rough:
            self._rows = None
        return rough

    def extend_last_line(self, message: Message) -> tuple[int, list[Row]] | None:
        """Rows for the same answer grown by a few plain words, and from which row on they replace those before.

        For a quick look between two updates, which lay out what this leaves as it is written: None where more than the
        last line would be different.
        """
        if self._open is None or self._look is None or message.id != self.message.id:
            return None
        place, line, written = self._open
        added = message.content[written:].rstrip("\n")  # what comes after a line's end may change it
        first, *others = _BLANK_LINES.sub("\n\n", added).split("\n")
        if not message.content.startswith(self._raw) or not _PLAIN.fullmatch(first):
            return None
        if not first.isprintable() or not all(
            not one or (_NEXT_LINE.fullmatch(one) and one.isprintable()) for one in others
        ):
            return None
        lead = len(match[0]) if (match := _LEAD.match(line.plain)) else 0
        if lead and others:
            return None
        wrapped = Content.assemble(line[lead:], first).wrap(max(1, self._look.width - lead))
        lines = [Content.assemble(line[:lead], wrapped[0])]
        lines += [Content.assemble(" " * lead, part) for part in wrapped[1:]]
        lines += [part for one in others for part in (Content(one).wrap(self._look.width) if one else [Content("")])]
        lines[-1] = lines[-1].rstrip(" ")
        said = line.plain + added
        last = Content.assemble(lines[-1], " " * (len(said) - len(said.rstrip(" "))))
        self._open = place + len(lines) - 1, last, written + len(added)
        return place, [*((part, "body") for part in _with_caret(lines, self._look.width)), BLANK]

    def detail(self, wanted: bool) -> bool:
        """Whether to say all that is known of what it cost; returns whether that is different from before."""
        if wanted == self._detailed:
            return False
        self._detailed, self._rows = wanted, None
        return True

    def rows(self, look: LayoutOptions) -> list[Row]:
        """The message at this look, top to bottom, a blank line at the end."""
        if self._rows is None or look != self._look:
            self._look = look
            if self.state.left_out:
                self._rows = self._mark_rows(look)
            else:
                self._rows = self._user_rows(look) if self.message.role == "user" else self._answer_rows(look)
        return self._rows

    def _take(self, raw: str) -> None:
        if raw.startswith(self._raw):
            self._safe += self._sanitiser.feed(raw[len(self._raw) :])
        else:
            self._sanitiser = Sanitiser()
            self._safe = self._sanitiser.feed(raw)
        self._raw = raw
        if self.message.role == "user":
            return
        parts = split_thinking(self._safe, growing=self.state.growing)
        self._thinks = parts.is_open
        self._thinking = _grown(self._thinking, parts.thinking or "")
        self._answer = _grown(self._answer, parts.answer)
        if not self.state.growing:
            self.highlight_code()

    def _user_rows(self, look: LayoutOptions) -> list[Row]:
        lines = [line for part in self._safe.split("\n") for line in _wrapped(part.expandtabs(4), look.width - 2)]
        rows: list[Row] = []
        for place, line in enumerate(lines):
            lead = ("❯ ", "bold $text-accent") if place == 0 else ("  ", "")
            rows.append((Content.assemble(lead, line), "user"))
        for attachment in self.message.attachments:
            size = len(attachment.text)
            rows.append((Content.styled(f"  + {sanitise(attachment.name)}, {size:,} characters", "$quiet"), "user"))
        notes = self._notes()
        if notes:
            rows.append((Content.styled("  " + " · ".join(notes), "$quiet"), "meta"))
        return [*rows, BLANK]

    def _mark_rows(self, look: LayoutOptions) -> list[Row]:
        text = self._answer.lines(look.width - 2, ansi=look.ansi, dark=look.dark)
        words, left_out = len(self._answer.text.split()), self.state.left_out
        lines = mark_lines(text, words, left_out, look.width, unfolded=look.show_summary)
        return [*((line, "summary" if folds else "meta") for line, folds in lines), BLANK]

    def _answer_rows(self, look: LayoutOptions) -> list[Row]:
        rows: list[Row] = []
        if self.state.accepted:
            self._open = None
            rows = [(line, "body") for line in accepted_lines(self._raw, self.state.accepted, look.width)]
            return [*rows, *self._foot(look, apart=True), BLANK]
        if self._thinking.text or self._thinks:
            rows += self._thinking_rows(look)
        body = self._answer.lines(look.width, ansi=look.ansi, dark=look.dark)
        self._open = None
        if self.state.growing and not self._thinks and body and self._answer.in_words:
            spaces = len(self._answer.text) - len(self._answer.text.rstrip(" "))
            line = Content.assemble(body[-1], " " * spaces)
            self._open = len(rows) + len(body) - 1, line, len(self._raw)
        if self.state.growing and not self._thinks:
            body = _with_caret(body, look.width)
        rows += [(line, "body") for line in body]
        if self.state.growing and not self._safe:
            rows = [(Content.styled(self.state.waiting or "▍", "$text-accent"), "meta")]
        return [*rows, *self._foot(look, apart=bool(body)), BLANK]

    def _foot(self, look: LayoutOptions, *, apart: bool) -> list[Row]:
        """What stands below an answer."""
        rows: list[Row] = []
        if meta := self._meta():
            rows += [BLANK] if apart else []
            said = Content.styled(meta, "$quiet")
            # All of it is asked for with a selection, so all of it is there.
            lines = said.wrap(look.width) if self._detailed else [said.truncate(look.width, ellipsis=True)]
            rows += [(line, "meta") for line in lines]
        if self._detailed and (made := " · ".join(self._made())):
            rows.append((Content.styled(made, "$quiet").truncate(look.width, ellipsis=True), "meta"))
        return rows

    def _thinking_rows(self, look: LayoutOptions) -> list[Row]:
        words = len(self._thinking.text.split())
        mark = "▾" if look.show_thinking else "▸"
        state = "thinking…" if self._thinks else "thought"
        head = Content.assemble((f"{mark} {state}", "italic $text-secondary"), (f" {words} words", "$quiet"))
        rows: list[Row] = [(head, "thinking")]
        if look.show_thinking:
            lines = self._thinking.lines(look.width - 2, ansi=look.ansi, dark=look.dark)
            rows += [
                (Content.assemble(("┊ ", "$text-secondary"), line.stylize_before("$quiet")), "thinking")
                for line in lines
            ]
        return [*rows, BLANK]

    def _meta(self) -> str:
        """How it ended, which branch it is, what it cost; what matters most first, the line may be cut."""
        if self.state.growing:
            return ""
        reason = self.message.finish_reason
        if reason is None and not self.message.partial:
            parts = ["edited by hand"]  # no model ended it
        else:
            parts = [] if reason == "stop" else [_ENDINGS.get(reason or "", "■ incomplete")]
        return " · ".join([*parts, *self._notes(), *self._costs()])

    def _made(self) -> list[str]:
        """By which model, with which sampling and system prompt, as far as that was stored."""
        system = " ".join(sanitise((self.message.system or "")[:_LONGEST_SYSTEM]).split())
        return [*made_with(self.message), *([f"system prompt: {system}"] if system else [])]

    def _costs(self) -> list[str]:
        metrics = self.message.metrics
        if metrics is None:
            return []
        if self._detailed:
            return metrics_text(metrics)
        return plain_phrases(metrics.completion_tokens, metrics.decode_tokens_per_second, metrics.ttft_s)

    def _notes(self) -> list[str]:
        notes = []
        if self.state.branches > 1:
            notes.append(f"‹{self.state.branch + 1}/{self.state.branches}›")
        if not self.state.sent:
            notes.append("no longer sent")
        return notes


def metrics_text(metrics: Summary) -> list[str]:
    """All that is known of what an answer cost."""
    parts = phrases(metrics.completion_tokens, metrics.decode_tokens_per_second, metrics.ttft_s, metrics.mbu)
    if metrics.reused_tokens:
        parts.append(f"reused {metrics.reused_tokens:,} of {metrics.prompt_tokens:,}")
    return parts


def _wrapped(text: str, width: int) -> list[Content]:
    """A line of a message in lines of the screen. A pasted file has many, and most of them fit: to find that out costs
    a tenth of wrapping them."""
    line = Content(text)
    return [line] if line.cell_length <= width else line.wrap(width)


def _grown(markdown: GrowingMarkdown, text: str) -> GrowingMarkdown:
    if not text.startswith(markdown.text):
        return GrowingMarkdown(text)
    markdown.append(text[len(markdown.text) :])
    return markdown


def _with_caret(lines: list[Content], width: int) -> list[Content]:
    """The growing end marked."""
    caret = ("▍", "$text-accent")
    if lines and lines[-1].cell_length < width:
        return [*lines[:-1], Content.assemble(lines[-1], caret)]
    return [*lines, Content.assemble(caret)]
