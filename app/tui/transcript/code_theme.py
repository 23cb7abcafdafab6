"""Code colours: textual's themes, quieter. Imports Pygments: import it with the first code block.

Unknown tokens are no errors here: growing code has unfinished strings, and models mix languages. The time for a block
is limited, since lexers search ahead from every bracket; the rest of a slow block has no colours.

`markdown_lines` calls `coloured` for finished code, and now and then for growing code. Every style in the tables has to
be one of textual's or of `app.tui.themes`: an unknown colour ends the chat when it is drawn.

Guard: tests/tui/test_parts.py.
"""

import time

from pygments.lexers import get_lexer_by_name
from pygments.token import Token
from pygments.util import ClassNotFound
from textual.content import Content, Span
from textual.highlight import ANSIDarkHighlightTheme, ANSILightHighlightTheme, HighlightTheme

_LONGEST_S = 0.1  # processor time of any block
_PER_CHARACTER_S = 10e-6  # and per character: lexers in common use take 1e-6 to 5e-6


def coloured(code: str, language: str, theme: type[HighlightTheme]) -> Content:
    """Return code with the theme's colours; without any in an unknown language."""
    code = "\n".join(code.splitlines())
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=True)
    except ClassNotFound:
        return Content.styled(code, "$text")
    deadline = time.thread_time() + _LONGEST_S + _PER_CHARACTER_S * len(code)
    spans = list[Span]()
    end = 0
    for kind, token in lexer.get_tokens(code):
        start = end
        end = end + len(token)
        style = next((theme.STYLES[each] for each in reversed(kind.split()) if theme.STYLES.get(each)), None)
        if style is not None:
            spans.append(Span(start, end, style))
        if time.thread_time() > deadline:
            break
    return Content(code, spans=spans).stylize_before("$text")


class CodeTheme(HighlightTheme):
    """No underlines; defined names are bold."""

    STYLES = {  # noqa: RUF012 (the base class declares it so)
        **HighlightTheme.STYLES,
        Token.Name: "",
        Token.Name.Function: "bold $text-primary",
        Token.Name.Function.Magic: "bold $text-primary",
        Token.Name.Class: "bold $text-primary",
        Token.Keyword.Namespace: "$text-accent",
        Token.Operator: "",
        Token.Operator.Word: "$text-accent",
        Token.Comment: "italic $quiet",
        Token.Error: "",
    }


# In the terminal's own colours some of textual's are no colours ("ansi_greenb"), which ends the chat at a string.
_MENDED: dict[tuple[str, ...], str] = {
    Token.Error: "",
    Token.Literal.String: "ansi_green",
    Token.Name.Attribute: "",
    Token.Name.Function.Magic: "ansi_blue",
}


class AnsiDarkCodeTheme(ANSIDarkHighlightTheme):
    """For ANSI colours."""

    STYLES = {**ANSIDarkHighlightTheme.STYLES, **_MENDED}  # noqa: RUF012


class AnsiLightCodeTheme(ANSILightHighlightTheme):
    """For ANSI colours."""

    STYLES = {**ANSILightHighlightTheme.STYLES, **_MENDED}  # noqa: RUF012
