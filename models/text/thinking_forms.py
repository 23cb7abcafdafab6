"""Control tokens that mark thinking in various model families, and their conversion to `<think>` sections.

`<think>` and `</think>` are text to most tokenizers. Other families use control tokens, which a detokenizer would
drop. `ThinkingStream` writes them as `<think>` sections, so that `run`, the chat and JSON see one form;
`ThinkingForm.native` converts an answer back, to continue it.

    one token opens, one closes     Mistral, Seed-OSS, Command A, Apertus, Kimi
    Harmony (GPT-OSS)               <|channel|>analysis<|message|> ... <|end|>, then the same with `final`
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.models.text.thinking import CLOSE, OPEN, split_thinking

if TYPE_CHECKING:
    from headrace.models.text.detokenizer import Detokenizer

_PAIRS = (
    ("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("◁think▷", "◁/think▷"),  # Kimi
)
_CHANNEL, _MESSAGE, _END, _START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
_OPENED, _CLOSED = f"{OPEN}\n", f"\n{CLOSE}\n\n"


@dataclass(frozen=True, slots=True)
class ThinkingForm:
    """Control tokens of a family by role, and the form of its answers."""

    ids: dict[int, str]  # "open" and "close", or the text of Harmony's four tokens
    opening: str
    closing: str

    def native(self, answer: str) -> list[tuple[str, bool]]:
        """Convert an answer with a `<think>` section to the model's form: (text, whether it is control tokens)."""
        parts = split_thinking(answer)
        if parts.thinking is None:
            return [(answer, False)]
        pieces = [(self.opening, True), (parts.thinking, False)]
        return pieces if parts.is_open else [*pieces, (self.closing, True), (parts.answer, False)]


def thinking_form(id_of: Callable[[str], int | None]) -> ThinkingForm | None:
    """Return the form of a vocabulary, None if thinking is text. id_of: id of a control token, or None."""
    harmony = {index: text for text in (_CHANNEL, _MESSAGE, _END, _START) if (index := id_of(text)) is not None}
    if len(harmony) == 4:
        final = f"{_END}{_START}assistant{_CHANNEL}final{_MESSAGE}"
        return ThinkingForm(harmony, f"{_CHANNEL}analysis{_MESSAGE}", final)
    for opening, closing in _PAIRS:
        first, last = id_of(opening), id_of(closing)
        if first is not None and last is not None:
            return ThinkingForm({first: "open", last: "close"}, opening, closing)
    return None


class ThinkingStream:
    """Detokenizer that writes a family's thinking as a `<think>` section."""

    def __init__(self, inner: "Detokenizer", form: ThinkingForm) -> None:
        self._inner = inner
        self._form = form
        self._header: str | None = None  # text between <|start|> or <|channel|> and <|message|>
        self._thinks = False

    def add(self, token_id: int) -> str:
        """Return the text that this token completed; often empty."""
        mark = self._form.ids.get(token_id)
        if mark is None:
            text = self._inner.add(token_id)
            if self._header is None:
                return text
            self._header += text
            return ""
        if mark in ("open", "close"):
            return self._turn(mark == "open")
        if mark == _END:
            return ""
        if mark != _MESSAGE:
            self._header = ""
            return ""
        channel, self._header = (self._header or "").strip(), None
        return self._turn(channel.startswith(("analysis", "commentary")))

    def finish(self) -> str:
        """End the stream and return the text held back."""
        return self._inner.finish()

    def _turn(self, thinks: bool) -> str:
        before, self._thinks = self._thinks, thinks
        return "" if before == thinks else _OPENED if thinks else _CLOSED
