"""Sanitiser of model text for terminals and pipes, independent of how the text is cut.

Every surface passes text of models and files through it before it prints or draws (SECURITY.md); the property tests in
`tests/app/output/test_sanitise.py` guard the promises below.

Its output cannot move the cursor, change colours, retitle the window, reorder or hide text:

- newline and tab stay; CR LF and a lone CR become a newline;
- other C0 controls and DEL become their control pictures (ESC as ␛);
- C1 controls, bidi embeddings, overrides and isolates, line and paragraph separators and misplaced
    invisible characters become numbers (‹U+202E›);
- lone surrogates become U+FFFD.

Invisible characters stay where scripts need them: joiners, non-joiners and zero-width spaces in the scripts that use
them, ZWJ and variation selectors in emoji, tags in flags, soft hyphens in words, direction marks (they move
punctuation but cannot reorder words). Ordinary text of every script passes unchanged, and sanitising is idempotent.
"""

import re
import unicodedata
from bisect import bisect_right

_ZWSP = "\u200b"
_ZWNJ = "\u200c"
_ZWJ = "\u200d"
_VS16 = "\ufe0f"
_BLACK_FLAG = "\U0001f3f4"
_MAX_INVISIBLE = 8  # in a row: a subdivision flag has six tags and an end tag

# Characters that need a decision; all others pass.
_SUSPECT = re.compile(
    "\r\n?|["
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u180b-\u180f\u200b-\u200d\u2028-\u202e\u2060-\u206f"
    "\ufe00-\ufe0f\ufeff\ufff9-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)

# Blocks that use joiners or zero-width spaces: first and last code point, in order.
_JOINING_BLOCKS = (
    (0x0590, 0x109F),  # Hebrew, Arabic, Syriac, Thaana, N'Ko, the scripts of India, Thai, Lao, Tibetan, Myanmar
    (0x1700, 0x18AF),  # Philippine scripts, Khmer, Mongolian
    (0x1900, 0x1CFF),  # Limbu to Vedic extensions
    (0xA800, 0xABFF),  # Syloti Nagri to Meetei Mayek
    (0xFB1D, 0xFDFF),  # Hebrew and Arabic presentation forms
    (0xFE70, 0xFEFC),
    (0x10A00, 0x10FFF),  # Kharoshthi to Sogdian
    (0x11000, 0x11FFF),  # Brahmi and its descendants
    (0x1E900, 0x1EEFF),  # Adlam, Arabic mathematical symbols
)
_BLOCK_STARTS = [first for first, _ in _JOINING_BLOCKS]


class Sanitiser:
    """One stream of text. Decisions look back only, so nothing is held back."""

    def __init__(self) -> None:
        self._base = ""  # the last visible character
        self._invisible = ""  # invisible ones kept since
        self._after_cr = False

    def feed(self, text: str) -> str:
        """Return the safe form of the next piece."""
        if not text:
            return ""
        start = 1 if self._after_cr and text[0] == "\n" else 0
        self._after_cr = text[-1] == "\r"
        out: list[str] = []
        for match in _SUSPECT.finditer(text, start):
            self._show(text[start : match.start()], out)
            start = match.end()
            char = match[0]
            if self._belongs(char):
                out.append(char)
                self._invisible += char
            else:
                self._show(_visible(char), out)
        self._show(text[start:], out)
        return "".join(out)

    def _show(self, text: str, out: list[str]) -> None:
        if text:
            out.append(text)
            self._base = text[-1]
            self._invisible = ""

    def _belongs(self, char: str) -> bool:
        """Return whether an invisible character is ordinary at this place."""
        base = self._base
        before = self._invisible
        if not base or len(before) >= _MAX_INVISIBLE:
            return False
        code = ord(char[0])
        if 0xE0020 <= code <= 0xE007F:  # tags, in a flag such as Scotland's
            return base == _BLACK_FLAG and all("\U000e0020" <= tag < "\U000e007f" for tag in before)
        if 0xFE00 <= code <= 0xFE0F:  # a variation selector, after a character that has variants in Unicode
            return not before and unicodedata.category(base) in {"So", "Sm", "Po", "Pd", "Nd", "Lo"}
        if 0xE0100 <= code <= 0xE01EF:
            return not before and unicodedata.category(base) == "Lo"  # ideographic variants
        if char == _ZWJ and _is_pictograph(base) and before in ("", _VS16):
            return True
        # U+034F joins combining marks; U+180B to U+180F are Mongolian variation selectors and vowel separator.
        if char in (_ZWSP, _ZWNJ, _ZWJ, "\u034f") or 0x180B <= code <= 0x180F:
            return len(before) < 2 and _is_joining(base)
        if char == "\xad":  # a soft hyphen, in a word
            return not before and unicodedata.category(base).startswith("L")
        return False


def sanitise(text: str) -> str:
    """Return the safe form of a whole text."""
    return Sanitiser().feed(text)


def safe_line(text: str) -> str:
    """Return a text sanitised and on one line: a space in place of all white space between two words."""
    return " ".join(sanitise(text).split())


def _visible(char: str) -> str:
    code = ord(char[0])
    if char[0] == "\r":
        return "\n"
    if code < 0x20:
        return chr(0x2400 + code)  # its control picture
    if code == 0x7F:
        return "\u2421"  # that of DEL
    if 0xD800 <= code <= 0xDFFF:
        return "\ufffd"
    return f"‹U+{code:04X}›"


def _is_pictograph(char: str) -> bool:
    is_control_picture = "\u2400" <= char <= "\u243f"
    return char > "\u2000" and not is_control_picture and unicodedata.category(char) in {"So", "Sm", "Sk"}


def _is_joining(char: str) -> bool:
    index = bisect_right(_BLOCK_STARTS, ord(char)) - 1
    return index >= 0 and ord(char) <= _JOINING_BLOCKS[index][1]
