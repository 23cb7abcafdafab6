"""Finding one's way in a long conversation: words, its top, and what came below while one read above."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.app.tui.transcript.find import seek
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver

LONG = "\n\n".join(f"paragraph {n} needle{n % 2}" for n in range(60))


@given(st.lists(st.text("ab ", max_size=6), max_size=12), st.text("ab ", min_size=1, max_size=3))
def test_every_match_is_found_once_in_each_direction(rows: list[str], words: str) -> None:
    text = "\n".join(rows)
    pattern = r"\s+".join(words.split())
    expected = [match.start() for match in re.finditer(pattern, text)] if words.split() else []
    for by in (-1, 1):
        at = None
        seen = []
        for _ in expected:
            found = seek(rows, words, at, by)
            assert found is not None
            assert found.count == len(expected)
            at = found.begins
            seen.append(sum(len(row) + 1 for row in rows[: at[0]]) + at[1])
            assert re.sub(r"\s", "", "".join(rows[r][a:b] for r, (a, b) in found.spans.items())) == "".join(
                words.split()
            )
        assert sorted(seen) == expected
    if not expected:
        assert seek(rows, words, None, -1) is None


def test_case_and_line_breaks_do_not_matter() -> None:
    found = seek(["one Two", "three two"], "TWO  three", None, -1)
    assert found is not None
    assert found.spans == {0: (4, 7), 1: (0, 5)}


def test_words_are_found_in_the_conversation(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("long")
        await it.press("ctrl+f", *"needle1")
        await it.until(lambda: "30 of 30" in it.text())
        assert "paragraph 59" in it.text()
        await it.press(*["enter"] * 20)
        await it.until(lambda: "10 of 30" in it.text())
        assert "paragraph 19 " in it.text()
        await it.press("down")
        await it.until(lambda: "11 of 30" in it.text())
        await it.press(*"x")
        await it.until(lambda: "not found" in it.text())
        assert it.prompt.text == ""
        await it.press("escape", *"abc")
        assert it.prompt.text == "abc"
        assert "not found" not in it.text()

    play(scenario, ScriptedEngine().script(Script([LONG])))


def test_the_same_words_are_searched_again_in_a_new_bar(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("long")
        await it.write("/find needle1")
        await it.until(lambda: "30 of 30" in it.text())
        await it.press("escape")
        await it.ask("needle1")
        await it.write("/find needle1")
        await it.until(lambda: "31 of 31" in it.text())
        assert it.transcript._match is not None

    play(scenario, ScriptedEngine().script(Script([LONG]), Script(["short"])))


def test_searching_the_history_keeps_the_matches_of_find(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("long")
        await it.press("ctrl+f", *"needle1")
        await it.until(lambda: "30 of 30" in it.text())
        match = it.transcript._match
        await it.press("ctrl+r", "escape")
        assert "30 of 30" in it.text()
        assert it.transcript._match is match
        await it.press("ctrl+f", "escape")
        assert it.transcript._match is None

    play(scenario, ScriptedEngine().script(Script([LONG])))


def test_new_text_below_the_screen_is_announced(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("long")
        await it.press("ctrl+home")
        assert "paragraph 0 " in it.text()
        assert "new text below" not in it.text()
        it.state.conversation.send("more")
        await it.idle()
        await it.until(lambda: "new text below" in it.text())
        assert "paragraph 0 " in it.text()
        await it.press("ctrl+end")
        assert "new text below" not in it.text()
        await it.press("ctrl+home")
        await it.pilot.resize_terminal(70, 30)
        await it.pilot.pause()
        assert "new text below" not in it.text()

    play(scenario, ScriptedEngine().script(Script([LONG]), Script(["short"])))


def test_ctrl_l_redraws_the_same_screen(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        before = it.text()
        await it.press("ctrl+l")
        assert it.text() == before

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["ctrl+b", "ctrl+g"])
def test_an_answer_that_was_asked_for_comes_into_view(play, how: str) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("question")
        await it.press("ctrl+home")
        assert not it.transcript.following
        await it.press(how)
        await it.idle()
        assert it.transcript.following
        assert "the end" in it.text()

    lines = [f"line {n}\n\n" for n in range(60)]
    play(scenario, ScriptedEngine(pieces_per_poll=60).script(Script([*lines, "half"]), Script([*lines, "the end"])))
