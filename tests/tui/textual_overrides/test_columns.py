"""Rows keep their columns on terminals that count emoji and flags in different ways."""

import re
from collections.abc import Callable
from unicodedata import category, east_asian_width

import pytest
from rich.cells import cell_len

from headrace.app.tui.textual_overrides.columns import count_vowel_signs, with_columns

_MOVES = re.compile(r"\x1b\[(?:(\d+);)?(\d+)[HG]|\x1b\[(\d+)X|\x1b\[[\d;]*m|(.)", re.DOTALL)
_JOINING = "\ufe0f\u200d\u20e3\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"


def one_by_one(char: str) -> int:
    """Return the width of a character on a terminal that knows no sequences."""
    if category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if east_asian_width(char) in "WF" else 1


def narrow(char: str) -> int:
    """Return the width on a terminal that draws every emoji in one cell."""
    return 0 if char in _JOINING else min(1, one_by_one(char))


def wide(char: str) -> int:
    """Return the width on a terminal that counts signs which join to the character before, too."""
    return 1 if char in "\ufe0f\u20e3" else one_by_one(char)


def row_of(data: str, width_of: Callable[[str], int], old: str = "") -> str:
    """Return the cells of a row after output is drawn over the old ones; a wide character has a blank after it."""
    cells = list(old.ljust(60))
    column = 0
    for _, move, erased, char in _MOVES.findall(data):
        if move:
            column = int(move) - 1
        elif erased:
            cells[column : column + int(erased)] = " " * int(erased)
        elif char and width_of(char):
            cells[column : column + width_of(char)] = (char, " ")[: width_of(char)]
            column += width_of(char)
    return "".join(cells)


@pytest.mark.parametrize("width_of", [one_by_one, narrow, wide])
@pytest.mark.parametrize("text", ["❤️", "1️⃣", "⚠️⚠️", "👍🏽", "🇬🇧", "👩‍💻", "🫩", "x️"])
def test_text_after_emoji_stands_in_its_column(text: str, width_of: Callable[[str], int]) -> None:
    data = with_columns(f"\x1b[4;7H\x1b[1mab{text}\x1b[0mcd{text}|")
    after = 6 + 2 + cell_len(text)
    row = row_of(data, width_of, old="*" * 60)
    assert row[after : after + 2] == "cd"
    assert row[after + 2 + cell_len(text)] == "|"
    assert "*" not in row[6 : after + 2 + cell_len(text)], "cells that are not drawn keep what stood there"


INDIC = {"हिन्दी में": 7, "தமிழ்": 4, "বাংলা": 5, "ភាសាខ្មែរ": 8, "မြန်မာ": 5, "മലയാളം": 6, "සිංහල": 4, "ไทย": 3}


def no_vowel_signs(char: str) -> int:
    """Return the width on a terminal that counts no vowel signs."""
    return 0 if category(char) == "Mc" else one_by_one(char)


@pytest.mark.parametrize("width_of", [one_by_one, no_vowel_signs])
@pytest.mark.parametrize("text", INDIC)
def test_frames_after_vowel_signs_stand_in_their_columns(text: str, width_of: Callable[[str], int]) -> None:
    """The widths are those of tmux 3.3, VTE and glibc."""
    count_vowel_signs()
    assert cell_len(text) == INDIC[text]
    after = 6 + cell_len(text)
    row = row_of(with_columns(f"\x1b[4;7H\x1b[1m{text}\x1b[0m    │ab {text}│"), width_of, old="*" * 60)
    assert row[after + 4 : after + 7] == "│ab"
    assert row[after + 8 + cell_len(text)] == "│"
    assert "*" not in row[6 : after + 9 + cell_len(text)], "cells that are not drawn keep what stood there"


def test_output_without_ambiguous_widths_is_unchanged() -> None:
    ordinary = "\x1b[2;1H│ ✓ naïve ██▌ 日本語 한국어 😀 → ≤ ⏎ \x1b[0m┈"
    assert with_columns(ordinary) == ordinary
    assert with_columns("❤️ without a place") == "❤️ without a place"
