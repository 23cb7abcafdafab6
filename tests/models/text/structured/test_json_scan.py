"""The state within JSON, for any JSON in pieces of any size; numbers and repeated keys end; keys have one spelling."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.text.structured.json_scan import MOST_DIGITS, JsonState, JsonTokens

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def state(*pieces: bytes) -> JsonState:
    found = JsonState()
    for piece in pieces:
        found = found.after(piece)
    return found


@given(VALUES, st.integers(0, 200))
def test_different_keys_are_accepted(value: Any, cut: int) -> None:
    data = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    one_by_one = JsonState()
    for byte in data:
        one_by_one = one_by_one.after(bytes((byte,)))
        assert not one_by_one.breaks
    whole = state(data[:cut], data[cut:])
    assert not whole.breaks
    assert (whole.levels, whole.in_text, whole.digits) == (one_by_one.levels, one_by_one.in_text, one_by_one.digits)
    assert not whole.levels
    assert not whole.in_text


@given(st.dictionaries(st.text(max_size=3), VALUES, min_size=1, max_size=4), st.data())
def test_a_repeated_key_is_found(value: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(list(value)))
    text = f"{json.dumps(value, ensure_ascii=False)[:-1]}, {json.dumps(key, ensure_ascii=False)}".encode()
    assert state(text[:-1]).breaks is False
    assert state(text[:-1], text[-1:]).breaks
    assert state(text).breaks


@given(st.characters(codec="utf-8"), st.integers(0, 12))
def test_an_object_key_is_written_without_needless_escapes(character: str, cut: int) -> None:
    code = character.encode("utf-16-be").hex()
    escaped = "".join(f"\\u{code[start : start + 4]}" for start in range(0, len(code), 4))
    shortest = json.dumps(character, ensure_ascii=False)
    for spelling in {f'"{escaped}"', f'"{escaped.upper().replace("U", "u")}"', shortest}:
        text = b'{"x' + spelling[1:].encode()
        broke = state(text[:cut]).breaks or state(text[:cut], text[cut:]).breaks
        assert broke == (spelling != shortest)
        assert state(text).breaks == broke
        assert not state(b'{"k":"x' + spelling[1:].encode()).breaks  # values may have any


TOKENS = [bytes((byte,)) for byte in range(256)] + [b'a"', b'b":1', b'","a":', b"12", b"1.5"]
ALL = np.ones(len(TOKENS), np.bool_)


def left_out(text: bytes, row: Any = ALL) -> set[bytes]:
    tokens = JsonTokens(TOKENS)
    narrowed = tokens.narrow(row, JsonState().after(text))
    return {TOKENS[int(index)] for index in np.flatnonzero(row & ~narrowed)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"a":1,"b":2,"', {b'a"', b'b":1', b'","a":'}),
        (b'{"a":1,"b":2,"a', {b'"', b'","a":'}),
        (b'{"a":1,"b":2,"ab', {b'","a":'}),
        (b'{"a":"x', {b'","a":'}),
        (b'{"x":"x', set()),
        (b'{"a":{"', set()),
        (b'{"a":["', set()),
        (b'[{"a":1},{"', set()),
        (b"1" * (MOST_DIGITS - 1), set()),
        (b'["' + b"1" * 99, set()),
    ],
)
def test_a_repeated_object_key_cannot_be_completed(text: bytes, expected: set[bytes]) -> None:
    assert left_out(text) == expected


@pytest.mark.parametrize(
    ("text", "may_follow", "stays"),
    [
        (b'{"x\\', b'"\\/bfnrtu', b'"\\bfnrtu'),
        (b'{"x\\u', b"0123456789abcdefABCDEF", b"0"),
        (b'{"x\\u00', b"0123456789abcdefABCDEF", b"01"),
        (b'{"x\\u000', b"0123456789abcdefABCDEF", b"01234567bef"),
        (b'{"k":"x\\', b'"\\/bfnrtu', b'"\\/bfnrtu'),
    ],
)
def test_a_key_is_escaped_where_it_has_to_be(text: bytes, may_follow: bytes, stays: bytes) -> None:
    row = np.array([len(token) == 1 and token in may_follow for token in TOKENS])
    assert {bytes((byte,)) for byte in may_follow} - left_out(text, row) == {bytes((byte,)) for byte in stays}


def test_digits_of_a_number_are_limited() -> None:
    digits = {token for token in TOKENS if token[:1].isdigit()}
    assert left_out(b"[0." + b"3" * MOST_DIGITS) == digits
    only_digits = np.array([token in digits for token in TOKENS])
    assert left_out(b"1" * MOST_DIGITS, only_digits) == set()  # nothing else can follow


def test_the_json_scan_begins_after_the_opening_token() -> None:
    tokens = JsonTokens([b'"', b"{", b"a", b""]).beginning_behind(3)
    assert tokens.after(tokens.start(), [0, 1, 2]) is None
    assert tokens.after(tokens.start(), [0, 1, 3, 1, 0, 2]) == state(b'{"a')
