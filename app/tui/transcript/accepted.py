"""An answer as it was said, with what had been guessed of it underlined: no Markdown, which has other characters."""

from collections.abc import Iterable

from textual.content import Content

from headrace.app.output.sanitise import Sanitiser

_STYLE = "underline $text-accent"


def accepted_lines(text: str, spans: Iterable[tuple[int, int]], width: int) -> list[Content]:
    """Lines of at most `width` cells, safe to show. spans: (begin, end) of characters of `text`, in order."""
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
