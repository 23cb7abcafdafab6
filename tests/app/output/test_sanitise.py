"""Nothing a model writes can act on a terminal, and ordinary text is left alone."""

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.app.output.sanitise import Sanitiser, sanitise

ORDINARY = {
    "English": "It’s 5 o’clock — “fine”, said Zoë.\n\tIndented…\n",
    "code": "if (a < b && c[0] != '\\n') {\n\treturn `x${y}`; // ok\n}\n",
    "soft hyphen": "Donau\u00addampf\u00adschiff",
    "combining": "e\u0301 n\u0303 Z\u0351\u036b\u0343algo",
    "Chinese and Japanese": "我喜欢喝茶。日本語のテキスト、ｶﾞｷﾞ\u3000葛\U000e0100城市",
    "Korean": "한국어 \u1112\u1161\u11ab",
    "Arabic with marks": "مرحبا بالعالم، \u200fكيف حالك؟\u200e (abc)",
    "Persian": "می\u200cخواهم کتاب\u200cها را",
    "Hebrew": "שָׁלוֹם עולם\u200f!",
    "Hindi": "क्षत्रिय क्\u200dष क्\u200cष",
    "Malayalam, Sinhala": "ന്\u200d ശ്രී ක්\u200dෂ",
    "Thai, Khmer, Burmese": "ภาษาไทย\u200bไม่มี ភាសា\u200bខ្មែរ\u200b\u200bនេះ မြန်မာ\u200bစာ",
    "Mongolian": "ᠮᠣᠩᠭᠣᠯ\u180b\u180eᠠ",
    "emoji": "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🏴‍☠️ 🇫🇷 ❤️‍🔥 1️⃣ #️⃣ ©️ ™︎ 〰️ 🧑🏿‍🚀 🤷🏼‍♂️ ↔️ 👁️‍🗨️",
    "flag of Wales": "🏴\U000e0067\U000e0062\U000e0077\U000e006c\U000e0073\U000e007f",
    "mathematics": "∀x∈ℝ: ⌈x⌉ ≥ x, 𝔘𝔫𝔦 ∩\ufe00",
    "visible controls": "␛[31m ‹U+202E›",
    "private use": "\ue0b0 \uf8ff",
}

HARMFUL = {
    "colour": ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
    "title": ("\x1b]0;owned\x07", "␛]0;owned␇"),
    "eight-bit escape": ("\x9b31mred\x9d0;x\x9c", "‹U+009B›31mred‹U+009D›0;x‹U+009C›"),
    "next line": ("a\x85b", "a‹U+0085›b"),
    "overprint": ("safe\revil", "safe\nevil"),
    "backspace": ("rm x\b\b\b\bok", "rm x␈␈␈␈ok"),
    "delete and null": ("a\x7fb\x00", "a␡b␀"),
    "windows lines": ("a\r\nb\r\n\r\nc\r", "a\nb\n\nc\n"),
    "bidi override": ("\u202egnp.exe\u202c", "‹U+202E›gnp.exe‹U+202C›"),
    "bidi isolate": ("\u2066a\u2069", "‹U+2066›a‹U+2069›"),
    "hidden in a word": ("pass\u200bword\u2060\ufeff", "pass‹U+200B›word‹U+2060›‹U+FEFF›"),
    "joiners in Latin": ("a\u200db\u200cc", "a‹U+200D›b‹U+200C›c"),
    "at the start": ("\u200dx", "‹U+200D›x"),
    "tags without flag": ("a\U000e0041\U000e0042", "a‹U+E0041›‹U+E0042›"),
    "many joiners": ("न" + "\u200d" * 3, "न\u200d\u200d‹U+200D›"),
    "selector after a letter": ("a\ufe0f\U000e0100", "a‹U+FE0F›‹U+E0100›"),
    "line separator": ("a\u2028b\u2029c", "a‹U+2028›b‹U+2029›c"),
    "surrogates": ("a\ud800b\udc80\udcff", "a\ufffdb\ufffd\ufffd"),
    "annotation": ("\ufff9a\ufffab\ufffb", "‹U+FFF9›a‹U+FFFA›b‹U+FFFB›"),
}

_tricky = st.sampled_from(
    "a 1.é\n\t\r\x1b[\x00\x7f\x85\x9bन\u094dمש日👍🏽🏴♂❤#\u200b\u200c\u200d\u200e\ufe0f\ufe00\u202e\u2066"
    "\u2069\u2028\ufeff\xad\u034f\u180b\U000e0067\U000e007f\U000e0100\ud800\udc00›‹"
)
any_text = st.one_of(
    st.lists(_tricky, max_size=25).map("".join),
    st.lists(st.characters(codec=None, exclude_categories=()), max_size=25).map("".join),
)


@pytest.mark.parametrize("text", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert sanitise(text) == text


@pytest.mark.parametrize(("text", "shown"), HARMFUL.values(), ids=HARMFUL)
def test_control_characters_are_made_visible(text: str, shown: str) -> None:
    assert sanitise(text) == shown


@given(pieces=st.lists(any_text, max_size=5))
@example(pieces=["a\r", "", "\nb\r", "c"])
@example(pieces=["❤", "\ufe0f", "\u200d🔥"])
def test_chunking_does_not_change_sanitised_text(pieces: list[str]) -> None:
    stream = Sanitiser()
    assert "".join(map(stream.feed, pieces)) == sanitise("".join(pieces))


@given(text=any_text)
@example(text="".join(ORDINARY.values()))
@example(text="".join(text for text, _ in HARMFUL.values()))
def test_sanitising_by_character_equals_sanitising_the_whole_text(text: str) -> None:
    stream = Sanitiser()
    assert "".join(map(stream.feed, text)) == sanitise(text)


@given(text=any_text)
def test_no_forbidden_character_comes_out(text: str) -> None:
    for char in sanitise(text):
        assert unicodedata.category(char) not in ("Cs", "Zl", "Zp")
        assert unicodedata.category(char) != "Cc" or char in "\n\t"
        assert not "\u202a" <= char <= "\u202e"
        assert not "\u2060" <= char <= "\u206f"
    sanitise(text).encode()


@given(text=any_text)
def test_sanitising_twice_changes_nothing(text: str) -> None:
    assert sanitise(sanitise(text)) == sanitise(text)


@given(text=st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs", "M"))))
def test_visible_text_of_any_script_is_unchanged(text: str) -> None:
    ordinary = "".join(char for char in text if not _is_selector(char))
    assert sanitise(ordinary) == ordinary


def _is_selector(char: str) -> bool:
    """Combining marks without a picture of their own, allowed after certain characters only."""
    return "VARIATION SELECTOR" in unicodedata.name(char, "") or char == "\u034f"


def test_a_long_text_takes_one_pass() -> None:
    stream = Sanitiser()
    assert "".join(stream.feed("\x1b\u200d" * 500) for _ in range(100)) == "␛‹U+200D›" * 50_000
