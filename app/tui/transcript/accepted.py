"""An answer's raw text with accepted draft tokens underlined."""

from collections.abc import Iterable

from textual.content import Content

from headrace.app.output.sanitise import Sanitiser

_STYLE = "underline $text-accent"


def accepted_lines(text: str, spans: Iterable[tuple[int, int]], width: int) -> list[Content]:
    """Return lines of at most `width` cells, sanitised. spans: (begin, end) in characters of `text`, in order."""
    safe = Sanitiser()
    pieces: list[Content | str] = []
    at = 0
    for begin, end in spans:
        pieces.append(safe.feed(text[at:begin]))
        pieces.append(Content.styled(safe.feed(text[begin:end]), _STYLE))
        at = end
    pieces.append(safe.feed(text[at:]))
    whole = Content.assemble(*pieces)
    return [line for part in whole.split("\n", allow_blank=True) for line in part.expand_tabs(4).wrap(max(1, width))]
