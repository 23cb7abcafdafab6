"""A paste is one piece of text, whatever is in it and however the terminal's bytes are cut; nothing in it is a key."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from textual import events
from textual.message import Message

from headrace.app.tui.textual_overrides.paste import PATIENCE_S, PasteParser
from tests.tui.conftest import Driver

BEGIN = b"\x1b[200~"
END = b"\x1b[201~"
NASTY = [b"\x1b", b"[", b"20", b"0~", b"1~", b"\x1b[31m", b"\x1b[A", b"\x11", b"\r", b"\x07", b"\x1b[<0;3;3M", BEGIN]
PASTES = (st.lists(st.sampled_from(NASTY) | st.binary(max_size=6), max_size=12).map(b"".join)).filter(
    lambda pasted: END not in pasted
)
TYPED = st.sampled_from([b"a", b"Z", b"\r", b"\x11", b"\x1b[A", b"\x1b[1;5A", "é".encode()])
STREAM = st.lists(TYPED | PASTES.map(lambda pasted: BEGIN + pasted + END), max_size=8)


def read(pieces: Sequence[bytes]) -> list[Message]:
    """Return the parser's events of these reads."""
    parser = PasteParser()
    decode = getincrementaldecoder("utf-8")("replace").decode
    return [message for piece in pieces if (text := decode(piece)) for message in parser.feed(text)]


def cut(stream: bytes, places: Sequence[int]) -> list[bytes]:
    ends = [0, *sorted({place % (len(stream) + 1) for place in places}), len(stream)]
    return [stream[begin:end] for begin, end in pairwise(ends)]


def seen(message: Message) -> object:
    return message.text if isinstance(message, events.Paste) else repr(message)


@example([BEGIN + b"log \x1b[31mred \x11 after" + END, b"a"], [7, 12, 13])
@given(STREAM, st.lists(st.integers(0, 300), max_size=20))
def test_a_paste_is_one_event_and_keys_around_it_are_unchanged(parts: list[bytes], places: list[int]) -> None:
    expected: list[object] = []
    for part in parts:
        if part.startswith(BEGIN):
            expected.append(part[len(BEGIN) : -len(END)].decode(errors="replace").replace("\0", ""))
        else:
            expected += map(seen, read([part]))
    assert [seen(message) for message in read(cut(b"".join(parts), places))] == expected


def test_a_delayed_start_of_a_paste_causes_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal's first byte alone is the Escape key after a while; what is pasted stays text."""
    parser = PasteParser()
    assert list(parser.feed("\x1b")) == []
    monkeypatch.setattr("textual._parser.get_time", lambda: float("inf"))
    assert [seen(message) for message in parser.tick()] == [repr(events.Key("escape", "\x1b"))]
    assert [seen(message) for message in parser.feed("[200~\x11\x1b[20")] == []
    assert [seen(message) for message in (*parser.tick(), *parser.feed("1~"))] == ["\x11"]


def test_a_paste_mark_that_arrives_slowly_types_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut within the mark by more than textual waits for a key; only much later is it what somebody typed."""
    now = 0.0
    monkeypatch.setattr("textual._parser.get_time", lambda: float("inf"))
    monkeypatch.setattr("headrace.app.tui.textual_overrides.paste.time", SimpleNamespace(monotonic=lambda: now))
    parser = PasteParser()
    assert [*parser.feed("\x1b[20"), *parser.tick()] == []
    assert [seen(message) for message in parser.feed("0~\x11\x1b[201~a")] == ["\x11", repr(events.Key("a", "a"))]
    assert [*parser.feed("\x1b[2"), *parser.tick()] == []
    now = 2 * PATIENCE_S
    assert seen([*parser.tick()][-1]) == repr(events.Key("2", "2"))


def test_pasted_text_is_shown_as_it_is_sent(play) -> None:
    """A long paste, which is folded, too."""

    async def scenario(it: Driver) -> None:
        for text in ("log \x1b[31mred\x11 after\r\nend", "\x1b[31m" + 3000 * "x"):
            it.prompt.post_message(events.Paste(text))
            await it.until(lambda: it.prompt.text, "it stands in the input")
            await it.press("enter")
            await it.idle()
        assert it.said[0] == "log ␛[31mred␑ after\nend"
        assert it.said[2] == "␛[31m" + 3000 * "x"

    play(scenario)
