"""Code colours: textual's themes, quieter. Imports Pygments: import it with the first code block.

Unknown tokens are no errors here: growing code has unfinished strings, and models mix languages.
"""

from pygments.token import Token
from textual.highlight import ANSIDarkHighlightTheme, ANSILightHighlightTheme, HighlightTheme


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
