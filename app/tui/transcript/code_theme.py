"""How code is coloured: textual's theme, quieter. Imports Pygments, so it is imported with the first code block."""

from pygments.token import Token
from textual.highlight import HighlightTheme


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
    }
