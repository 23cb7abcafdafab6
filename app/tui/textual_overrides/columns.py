"""Columns that do not depend on how a terminal counts emoji and vowel signs.

Terminals disagree on the width of emoji with a variation selector (❤️, 1️⃣), flags, skin tones, joined and new emoji.
If a terminal counts other cells than rich, the rest of the row is shifted and old text stays in it. Therefore such
emoji are drawn over blanks of the width that rich counts, and the cursor is then moved to the column after them.

Vowel signs with a place of their own (हि, தி: Unicode's Mc) are counted as one cell, as by glibc, VTE, tmux and
Alacritty; rich counts none of them. Terminals that count otherwise shift text. Therefore rows with such signs are
erased first, and the cursor is moved to its column after blanks and before frames, where no letter is covered.

    ESC[4;7H a ❤️ b    ->    ESC[4;7H a, two blanks, ESC[8G ❤️ ESC[10G b

`TerminalDriver.write` passes all output through `with_columns`, which returns text without such signs at once.
docs/workarounds.md has widths of a terminal. tests/tui/textual_overrides/test_columns.py draws on terminals that count
in other ways.
"""

import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING

import rich.cells
from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.cells import CellTable

_JOINED = r"(?:\ufe0f|\u20e3|[\U0001f3fb-\U0001f3ff]|\u200d.)"  # a sign that belongs to the character before
_NEW = r"\U0001f000-\U0001f2ff\U0001f650-\U0001faff"  # emoji planes, without the emoji of Unicode 6
_INDIC = r"\u0900-\u0dff\u0f00-\u109f\u1700-\u1cff\ua800-\uabff\U00011000-\U00011fff"
_SIGNS = re.compile(rf"[\ufe0f\u200d\u20e3\U0001f3fb-\U0001f3ff{_NEW}{_INDIC}]")  # output without any is as it is
_EMOJI = rf"[\U0001f1e6-\U0001f1ff]{{2}}|[^\x00-\x1f]{_JOINED}+|[{_NEW}]"  # a flag, a joined emoji, a new one
_ESCAPE = r"(?P<escape>\x1b\[[\d;?]*[A-Za-z]|\x1b\].*?(?:\x07|\x1b\\))"  # ESC[1;32m, ESC[?25l, ESC]0;title BEL
_PIECE = re.compile(rf"{_ESCAPE}|{_EMOJI}", re.DOTALL)
_PLACE = re.compile(rf"{_ESCAPE}|(?P<blanks> {{2,}})|[│▐▏╭╮╰╯]", re.DOTALL)  # also two blanks, or a frame
_VOWEL_SIGNS = re.compile(f"[{_INDIC}]")  # any letter of these scripts: their rows may have such signs
_MOVE = re.compile(r"\x1b\[(\d+;\d+)H")  # ESC[4;7H: row 4, column 7, both from 1


def with_columns(data: str) -> str:
    """Return output for a terminal with the column written where terminals count what is before it in different ways.

    Text that follows no move of the cursor to a row and a column stays as it is.
    """
    if _SIGNS.search(data) is None:  # nearly always
        return data
    before, *rows = _MOVE.split(data)
    pieces = [before]
    for position, text in zip(rows[::2], rows[1::2], strict=True):
        pieces += [f"\x1b[{position}H", _row(text, int(position.partition(";")[2]))]
    return "".join(pieces)


def _row(text: str, column: int) -> str:
    """Return the text of a row that starts in this column, the first of which is 1."""
    if _SIGNS.search(text) is None:
        return text
    if _VOWEL_SIGNS.search(text) is not None:
        return _row_with_vowel_signs(text, column)
    pieces = []
    end = 0
    for match in _PIECE.finditer(text):
        before = text[end : match.start()]
        column += cell_len(before)
        piece = match[0]
        if not match["escape"]:
            cells = cell_len(piece)
            piece = f"{' ' * cells}\x1b[{column}G{piece}\x1b[{column + cells}G"
            column += cells
        pieces += [before, piece]
        end = match.end()
    return "".join([*pieces, text[end:]])


def _row_with_vowel_signs(text: str, column: int) -> str:
    """Return the text of a row that starts in this column, with columns where only blanks can be covered."""
    pieces = []
    end = 0
    start = column
    for match in _PLACE.finditer(text):
        before = text[end : match.start()]
        column += cell_len(before)
        if match["escape"]:
            pieces += [before, match[0]]
        elif match["blanks"]:
            column += len(match[0])
            pieces += [before, f"{match[0]}\x1b[{column}G"]
        else:
            pieces += [before, f"\x1b[{column}G{match[0]}"]
            column += 1
        end = match.end()
    column += cell_len(text[end:])
    return "".join([f"\x1b[{column - start}X", *pieces, text[end:]])


@cache
def count_vowel_signs() -> None:
    """Make rich, and so textual, count vowel signs with a place of their own as one cell."""
    load: Callable[[str], CellTable] | None = getattr(rich.cells, "load_cell_table", None)
    if load is None:  # before rich 14.3, which counts them
        return

    @cache
    def load_counting(unicode_version: str = "auto") -> "CellTable":
        table = load(unicode_version)
        return table._replace(widths=[part for entry in table.widths for part in _without_signs(entry)])

    rich.cells.load_cell_table = load_counting  # type: ignore[attr-defined]  # imported there
    rich.cells.get_character_cell_size.cache_clear()
    rich.cells.cached_cell_len.cache_clear()


def _without_signs(entry: tuple[int, int, int]) -> "Iterator[tuple[int, int, int]]":
    """Yield the ranges of a range (first, last, width) that have no vowel signs with a place of their own.

    rich's table has the ranges whose width is not 1, so a sign that is in none of them has one cell.
    """
    first, last, width = entry
    if width or not _VOWEL_SIGNS.match(chr(first)):
        yield entry
        return
    for code in range(first, last + 1):
        if unicodedata.category(chr(code)) != "Mc":
            yield code, code, 0
