"""Columns that do not depend on how a terminal counts emoji.

Terminals disagree on the width of emoji with a variation selector (❤️, 1️⃣), flags, skin tones, joined and new emoji.
If a terminal counts other cells than rich, the rest of the row is shifted and old text stays in it. Therefore such
emoji are drawn over blanks of the width that rich counts, and the cursor is then moved to the column after them.

Rows with vowel signs that some terminals count (हि) are left as they are: moving the cursor would cover letters.
"""

import re

from rich.cells import cell_len

_JOINED = r"(?:\ufe0f|\u20e3|[\U0001f3fb-\U0001f3ff]|\u200d.)"  # a sign that belongs to the character before
_NEW = r"\U0001f000-\U0001f2ff\U0001f650-\U0001faff"  # emoji planes, without the emoji of Unicode 6
_SIGNS = re.compile(rf"[\ufe0f\u200d\u20e3\U0001f3fb-\U0001f3ff{_NEW}]")
_EMOJI = rf"[\U0001f1e6-\U0001f1ff]{{2}}|[^\x00-\x1f]{_JOINED}+|[{_NEW}]"
_PIECE = re.compile(rf"(?P<escape>\x1b\[[\d;?]*[A-Za-z]|\x1b\].*?(?:\x07|\x1b\\))|{_EMOJI}", re.DOTALL)
_VOWEL_SIGNS = re.compile(r"[\u0900-\u0dff\u0f00-\u109f\u1700-\u1cff\ua800-\uabff\U00011000-\U00011fff]")
_MOVE = re.compile(r"\x1b\[(\d+;\d+)H")


def with_columns(data: str) -> str:
    """Return output for a terminal with the column written after each emoji that terminals count in different ways.

    Text that follows no move of the cursor to a row and a column stays as it is.
    """
    if _SIGNS.search(data) is None:  # nearly always
        return data
    before, *rows = _MOVE.split(data)
    pieces = [before]
    for place, text in zip(rows[::2], rows[1::2], strict=True):
        pieces += [f"\x1b[{place}H", _row(text, int(place.partition(";")[2]))]
    return "".join(pieces)


def _row(text: str, column: int) -> str:
    """Return the text of a row that starts in this column, the first of which is 1."""
    if _SIGNS.search(text) is None or _VOWEL_SIGNS.search(text) is not None:
        return text
    pieces = []
    end = 0
    for found in _PIECE.finditer(text):
        before = text[end : found.start()]
        column += cell_len(before)
        piece = found[0]
        if not found["escape"]:
            cells = cell_len(piece)
            piece = f"{' ' * cells}\x1b[{column}G{piece}\x1b[{column + cells}G"
            column += cells
        pieces += [before, piece]
        end = found.end()
    return "".join([*pieces, text[end:]])
