"""How code is coloured: textual's themes, quieter. Imports Pygments, so it is imported with the first code block.

What a language does not know is no error here: code that is being written has a string that does not end yet, and
models put one language into a block of another.
"""

from pygments.token import Token
from textual.highlight import ANSIDarkHighlightTheme, ANSILightHighlightTheme, HighlightTheme


class CodeTheme(HighlightTheme):
    """No underlines; a name that is defined is bold instead."""

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
    """In the terminal's own colours."""

    STYLES = {**ANSIDarkHighlightTheme.STYLES, **_MENDED}  # noqa: RUF012


class AnsiLightCodeTheme(ANSILightHighlightTheme):
    """In the terminal's own colours."""

    STYLES = {**ANSILightHighlightTheme.STYLES, **_MENDED}  # noqa: RUF012
