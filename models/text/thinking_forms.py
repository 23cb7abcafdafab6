"""Control tokens that mark thinking in various model families, and their conversion to `<think>` sections.

`<think>` and `</think>` are text to most tokenizers. Other families use control tokens, which a detokenizer would
drop. `ThinkingStream` writes them as `<think>` sections, so that `run`, the chat and JSON see one form;
`ThinkingForm.native` converts an answer back, to continue it.

    one token opens, one closes     Mistral, Seed-OSS, Command A, Apertus, Kimi
    the same, with a name           Gemma 4: <|channel>thought, a line break ... <channel|>
    Harmony (GPT-OSS)               <|channel|>analysis<|message|> ... <|end|>, then the same with `final`
    recipients (Muse)                to=self<|message|> ... <|eom|>, then the same with `to=user`
    tags (Kimi K3)                  <|open|>think<|sep|> ... <|close|>think<|sep|>, then the same with `response`

Guard: tests/models/text/test_thinking_forms.py.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.models.text.thinking import CLOSING, OPENING, TextByKind

if TYPE_CHECKING:
    from headrace.models.text.detokenizer import Detokenizer

_PAIRS = (
    ("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("◁think▷", "◁/think▷"),  # Kimi
)
_NAMED = ("<|channel>", "thought\n", "<channel|>")  # Gemma 4
# Harmony and Muse.
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_END = "<|end|>"
_START = "<|start|>"
_END_OF_MESSAGE = "<|eom|>"
# Muse's recipients.
_THINKER = "self"
_USER = "user"
# Kimi K3: control tokens, and names of tags.
_TAGS = ("<|open|>", "<|close|>", "<|sep|>")
_THOUGHT = "think"
_RESPONSE = "response"
_WHOLE = "message"
# Around the recipient of a tool call, for `models.text.tools`: no text has lone surrogates.
CALL_BEGIN = "\udffe"
CALL_MESSAGE = "\udfff"
_TO = "to="
# `to=functions.get_weather` in the head of a message: the recipient.
_RECIPIENT = re.compile(r"to=(\S+)")


class ThinkingForm(Struct, frozen=True):
    """Control tokens of a family by role, and the form of its answers.

    ids: "open" and "close" by id, or the texts of the tokens around messages.
    opening, closing: before and after thinking; `closing` goes on to the head of the answer, if that has one.
    name: text after the opening token, up to its line break.
    has_recipients: messages have recipients instead of channels.
    end_of_text: between the text of an answer and its calls, where tags are around both.
    end_of_answer: after `end_of_text` in an answer without calls.
    """

    ids: dict[int, str]
    opening: str
    closing: str
    name: str = ""
    has_recipients: bool = False
    end_of_text: str = ""
    end_of_answer: str = ""

    @property
    def has_tags(self) -> bool:
        """True where tags are around thinking, text and calls, and the prompt has begun one: Kimi K3."""
        return self.end_of_text != ""

    @property
    def has_channels(self) -> bool:
        """True where an answer is a message with a head of its own, too: Harmony, Muse."""
        return len(self.ids) > 2 and not self.has_tags

    @property
    def answer_head(self) -> str:
        """The head of an answer in a message of its own."""
        return self.closing.partition("assistant")[2]

    @property
    def end_of_thought(self) -> str:
        """The text from the end of a thought's message to the head of the next one."""
        return self.closing.removesuffix(self.answer_head)

    def native(self, answer: TextByKind, *, is_open: bool = False) -> list[tuple[str, bool]]:
        """Convert an answer to the model's form: (text, whether it is control tokens).

        is_open: the prompt has begun the section.
        """
        if self.has_tags and not is_open:
            return [(answer.content, False)]
        if answer.thinking is None:
            if self.has_tags:
                return [(self.closing, True), (answer.content, False)]
            if self.has_channels:
                return [(self.answer_head, True), (answer.content, False)]
            return [(answer.content, False)]
        pieces: list[tuple[str, bool]] = []
        if not is_open:
            pieces += [(self.opening, True), (self.name, False)]
        pieces.append((answer.thinking, False))
        if answer.is_open:
            return pieces
        if self.name:
            pieces.append(("\n", False))
        return [*pieces, (self.closing, True), (answer.content, False)]


def thinking_form(id_of: Callable[[str], int | None]) -> ThinkingForm | None:
    """Return the form of a vocabulary, None if thinking is text. id_of: id of a control token, or None."""
    # Messages with channels, or with recipients.
    harmony = {index: text for text in (_CHANNEL, _MESSAGE, _END, _START) if (index := id_of(text)) is not None}
    if len(harmony) == 4:
        final = f"{_END}{_START}assistant{_CHANNEL}final{_MESSAGE}"
        return ThinkingForm(harmony, f"{_CHANNEL}analysis{_MESSAGE}", final)
    recipients = {index: text for text in (_MESSAGE, _END_OF_MESSAGE, _START) if (index := id_of(text)) is not None}
    if len(recipients) == 3 and len(harmony) == 2:
        answer = f"{_END_OF_MESSAGE}{_START}assistant to={_USER}{_MESSAGE}"
        return ThinkingForm(recipients, f" to={_THINKER}{_MESSAGE}", answer, has_recipients=True)

    # Tags around thinking and answer.
    tags = {index: text for text in _TAGS if (index := id_of(text)) is not None}
    if len(tags) == 3:
        begin, end, after_name = _TAGS
        opening = f"{begin}{_THOUGHT}{after_name}"
        closing = f"{end}{_THOUGHT}{after_name}{begin}{_RESPONSE}{after_name}"
        end_of_text = f"{end}{_RESPONSE}{after_name}"
        end_of_answer = f"{end}{_WHOLE}{after_name}"
        return ThinkingForm(tags, opening, closing, end_of_text=end_of_text, end_of_answer=end_of_answer)

    # One token opens, one closes.
    for opening, closing in _PAIRS:
        first = id_of(opening)
        last = id_of(closing)
        if first is not None and last is not None:
            return ThinkingForm({first: "open", last: "close"}, opening, closing)
    opening, name, closing = _NAMED
    first = id_of(opening)
    last = id_of(closing)
    if first is not None and last is not None:
        return ThinkingForm({first: "open", last: "close"}, opening, closing, name)
    return None


class ThinkingStream:
    """Detokenizer that writes a family's thinking as a `<think>` section.

    An empty section is left out.

    inner: the model's detokenizer.
    form: the family's.
    calls: Harmony's messages to functions are written as CALL_BEGIN, recipient, CALL_MESSAGE and text.
    thinks: the prompt has begun the section.
    """

    def __init__(self, inner: "Detokenizer", form: ThinkingForm, *, calls: bool = False, thinks: bool = False) -> None:
        self._inner = inner
        self._calls = calls
        self._form = form
        self._header: str | None = None  # text between <|start|> or <|channel|> and <|message|>, or a name so far
        self._thinks = thinks
        self._blank: str | None = None  # spaces of a section without its opening so far
        self._begun = False  # an answer begins within the head of a message, where its recipient may stand
        self._start = ""  # text of an answer that may be its recipient

    def _begin_header(self, text: str) -> str:
        """Hold the beginning of an answer while it may be a recipient; return it if it is not."""
        self._start += text
        start = self._start.lstrip()
        if start.startswith(_TO):
            self._header = ""
            self._start = ""
            text = start
        elif _TO.startswith(start):
            return ""
        else:
            text = self._start
            self._start = ""
        self._begun = True
        return text

    def add(self, token_id: int) -> str:
        """Return the text that this token completed; often empty."""
        mark = self._form.ids.get(token_id)
        pending = ""
        if mark is not None:
            pending = self._start
            self._start = ""
        return pending + self._opened(self._add(token_id, mark))

    def _opened(self, text: str) -> str:
        """Return text with the opening before it, where that was held back; nothing for spaces."""
        if self._blank is None:
            return text
        text = self._blank + text
        if not text.strip():
            self._blank = text
            return ""
        self._blank = None
        return f"{OPENING}{text}"

    def _add(self, token_id: int, mark: str | None) -> str:
        """Return the text of a token: one of the section, of the answer, or of neither (a message's head).

        mark: the token's meaning in this family's form; None for text.
        """
        if mark is None:
            return self._add_text(self._inner.add(token_id))
        self._begun = True
        if mark in ("open", "close"):
            opens = mark == "open"
            self._header = None
            if opens and self._form.name:  # the name follows, up to the end of its line
                self._header = ""
            return self._turn(opens)
        if mark in (_END, _END_OF_MESSAGE):
            return ""
        if mark != _MESSAGE:  # <|start|> or <|channel|>: the head of a message begins, or goes on
            header = self._header or ""
            self._header = ""
            if "to=" in header:  # a recipient may stand before the channel
                self._header = f"{header} "
            return ""
        return self._begin_message()

    def _add_text(self, text: str) -> str:
        """Return text of the section or the answer; add text of a head to it."""
        has_head = self._form.has_recipients or (self._calls and self._form.has_channels)
        if self._header is None and has_head and not self._begun:
            text = self._begin_header(text)
        if self._header is None:
            return text
        self._header += text
        if not self._form.name or "\n" not in self._header:
            return ""
        text = self._header.partition("\n")[2]
        self._header = None
        return text

    def _begin_message(self) -> str:
        """End the head of a message; return what its channel and its recipient begin: a section, a call, or nothing."""
        channel = (self._header or "").strip()
        self._header = None
        recipient = _RECIPIENT.search(channel)
        if self._form.has_recipients and (recipient is None or recipient[1] in (_THINKER, _USER)):
            return self._turn(recipient is not None and recipient[1] == _THINKER)
        if self._calls and recipient is not None:
            return f"{self._turn(False)}{CALL_BEGIN}{recipient[1]}{CALL_MESSAGE}"
        # Commentary without a recipient is a preamble for the user.
        return self._turn(channel.startswith("analysis") or recipient is not None)

    def finish(self, *, cut: bool = False) -> str:
        """End the stream and return the text held back. cut: without a character that is incomplete at the end."""
        pending = self._start
        self._start = ""
        return pending + self._inner.finish(cut=cut)

    def _turn(self, thinks: bool) -> str:
        """Begin or end a section; return its closing. Its opening is returned with its first text."""
        if thinks == self._thinks:
            return ""
        self._thinks = thinks
        if thinks:
            self._blank = ""
            return ""
        is_empty = self._blank is not None
        self._blank = None
        if is_empty:
            return ""
        return CLOSING


class TaggedStream(ThinkingStream):
    """Detokenizer of answers whose parts have tags. Tags around thinking and text are left out, those of calls stay."""

    def __init__(self, inner: "Detokenizer", form: ThinkingForm, *, calls: bool = False, thinks: bool = False) -> None:
        super().__init__(inner, form, calls=calls, thinks=thinks)
        self._ids = {text: index for index, text in form.ids.items()}
        self._begin = ""  # control token of the tag whose name is being written
        self._has_ended = False  # the text
        self._has_calls = False

    def _add(self, token_id: int, mark: str | None) -> str:
        text = self._inner.add(token_id)
        if self._has_calls:
            return text
        # Text, or a part of a tag's name; the control token that begins a tag.
        if mark is None:
            if self._header is None:
                return text
            self._header += text
            return ""
        opens, closes, after_name = _TAGS
        if mark != after_name:
            self._begin = mark
            self._header = ""
            return ""

        # The one that ends it.
        name = self._header or ""
        self._header = None
        is_opening = self._begin == opens
        if name == _THOUGHT:
            return self._turn(is_opening)
        if name in (_RESPONSE, _WHOLE):
            self._has_ended = name == _RESPONSE and not is_opening
            return self._turn(False)
        self._has_calls = self._calls
        if not self._calls:
            return f"{self._turn(False)}{name}"
        # Calls are read with the end of the text before them, as the template writes them.
        written = [self._begin, name]
        if self._has_ended:
            written = [closes, _RESPONSE, after_name, *written]
        return self._turn(False) + "".join(map(self._text_of, written)) + text

    def _text_of(self, part: str) -> str:
        """Return the text of a control token, or of a name."""
        if part not in self._ids:
            return part
        return self._inner.add(self._ids[part])
