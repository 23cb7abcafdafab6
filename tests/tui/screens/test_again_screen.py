"""`/again N`: several answers side by side in the app over a scripted engine, their figures, and taking one."""

import pytest

from headrace.app.tui.decode.panel import DecodePanel
from headrace.app.tui.screens.again_screen import AgainScreen
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.decode_screen import DecodeScreen
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver


def scripted(*texts: str, hold: int = 0) -> ScriptedEngine:
    """An engine that gives a first answer and then these, five characters at a time."""
    scripts = [Script([text[n : n + 5] for n in range(0, len(text), 5)], hold=hold) for text in texts]
    return ScriptedEngine(pieces_per_poll=3).script(Script(("the first",)), *scripts)


async def again(it: Driver, count: int) -> AgainScreen:
    await it.ask("What turns?")
    await it.write(f"/again {count}")
    await it.until(lambda: isinstance(it.app.screen, AgainScreen), "the screen of candidates")
    screen = it.app.screen
    assert isinstance(screen, AgainScreen)
    return screen


async def over(it: Driver, screen: AgainScreen) -> None:
    await it.until(lambda: screen.candidates.phase == "idle" and all(side.answer for side in screen.candidates.answers))


TEXTS = tuple(f"Answer {n} says that gears and wheels turn." for n in range(1, 9))


def test_candidates_are_shown_and_one_is_taken(play) -> None:
    async def scenario(it: Driver) -> None:
        screen = await again(it, 3)
        await over(it, screen)
        text = it.text()
        assert all(f"Answer {n} says" in text for n in (1, 2, 3))
        assert "3 answers" in text
        assert "What turns?" in text
        await it.press("right")
        assert screen.chosen is screen.panes[1]
        await it.press("enter")
        assert isinstance(it.app.screen, ChatScreen)
        assert it.said == ["What turns?", TEXTS[1]]
        await it.write("/branch")
        assert it.said == ["What turns?", TEXTS[2]]
        await it.ask("And then?")
        assert it.engine.commands[-1].messages[1]["content"] == TEXTS[2]

    play(scenario, scripted(*TEXTS[:3]))


def test_escape_stops_all_candidates_then_restores_the_earlier_answer(play) -> None:
    async def scenario(it: Driver) -> None:
        screen = await again(it, 2)
        await it.until(lambda: "2 of 2 running" in it.text() and all(side.answer for side in screen.candidates.answers))
        await it.press("enter")  # not yet
        assert it.app.screen is screen
        await it.press("escape")
        await over(it, screen)
        assert it.app.screen is screen
        assert "■ stopped" in it.text()
        await it.press("escape")
        assert it.said == ["What turns?", "the first"]
        last = it.state.conversation.messages[-1]
        assert len(it.state.conversation.branch.alternatives(last.id).ids) == 3  # what came is kept

    play(scenario, scripted(*TEXTS[:2], hold=2))


def test_keys_scroll_the_chosen_answer_only(play) -> None:
    long = "".join(f"line {n}\n\n" for n in range(40))

    async def scenario(it: Driver) -> None:
        screen = await again(it, 2)
        await over(it, screen)
        a, b = (pane.transcript for pane in screen.panes)
        await it.until(lambda: a.top > 0 and b.top > 0)
        ends = a.top, b.top
        assert a.top + a.size.height == len(a._rows)  # no room is left for more
        await it.press("up", "up")
        assert (a.top, b.top) == (ends[0] - 2, ends[1])
        await it.press("ctrl+home")
        assert (a.top, b.top) == (0, ends[1])
        await it.press("ctrl+end", "pageup", "down")
        assert 0 < a.top < ends[0]

    play(scenario, scripted(long, long))


def test_the_candidates_screen_can_be_left_while_the_engine_hangs(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Driver) -> None:
        screen = await again(it, 2)
        await it.until(lambda: all(side.answer for side in screen.candidates.answers))
        monkeypatch.setattr(it.engine, "cancel", lambda _generation=None: None)
        monkeypatch.setattr("headrace.app.tui.screens.again_screen._STOP_WITHIN_S", 1e9)
        await it.press("escape", "escape")
        assert it.app.screen is screen
        monkeypatch.setattr("headrace.app.tui.screens.again_screen._STOP_WITHIN_S", 0.0)
        await it.press("escape")
        assert isinstance(it.app.screen, ChatScreen)
        assert it.said == ["What turns?", "the first"]
        left = [message.content for message in it.state.store.messages(it.state.conversation.session.id)]
        assert [text[:6] for text in left] == ["What t", "the fi", "Answer", "Answer"]

    play(scenario, scripted(*TEXTS[:2], hold=2))


def test_ctrl_c_stops_all_candidates(play) -> None:
    async def scenario(it: Driver) -> None:
        screen = await again(it, 2)
        await it.until(lambda: all(side.answer for side in screen.candidates.answers))
        await it.press("ctrl+c")
        await over(it, screen)
        await it.press("2", "enter")
        assert it.said[-1] == "Answe" + TEXTS[1][5:-10] or TEXTS[1].startswith(it.said[-1])

    play(scenario, scripted(*TEXTS[:2], hold=2))


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50), (40, 12)])
def test_eight_answers_fit_any_window(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        screen = await again(it, 8)
        await over(it, screen)
        await it.until(lambda: "8 answers" in it.text())
        seen = set()
        for _ in range(8):
            await it.press("tab")
            await it.pilot.pause()
            number = screen.panes.index(screen.chosen) + 1
            assert f"Answer {number} says" in it.text().replace("│", " ")
            seen.add(number)
        assert seen == set(range(1, 9))
        if size[0] >= 120:
            assert all(f"Answer {n} says" in it.text() for n in range(1, 9))

    play(scenario, scripted(*TEXTS), size=size)


def test_an_invalid_number_of_answers_is_refused(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("What turns?")
        for command, refusal in (("/again 1", "2 to 8, not 1"), ("/again 9", "2 to 8, not 9"), ("/again x", "not x")):
            await it.write(command)
            await it.until(lambda: any(refusal in toast.message for toast in it.app._notifications), refusal)  # noqa: B023
            assert isinstance(it.app.screen, ChatScreen)
            assert it.prompt.text == ""
            assert it.prompt.recent_texts[0] == command

    play(scenario, scripted())


def test_the_decode_view_has_a_row_for_each_and_goes_back_to_one(play) -> None:
    async def scenario(it: Driver) -> None:
        screen = await again(it, 3)
        await it.until(lambda: all(side.answer for side in screen.candidates.answers))
        await it.press("f2")
        assert isinstance(it.app.screen, DecodeScreen)
        await it.until(lambda: "decode" in it.text() and "sequences" in it.text() and "shared" in it.text())
        text = it.text()
        assert "last words" in text
        assert "step latency" in text
        assert "a token" in text
        await it.press("f2")
        it.engine.release()
        await over(it, screen)
        await it.press("enter")
        panel = it.app.screen.query_one(DecodePanel)
        await it.until(lambda: panel.query_one("#sequences").display)
        assert "✓ done" in it.text()
        await it.ask("And then?")
        await it.until(lambda: not panel.query_one("#sequences").display)
        assert "step latency" in it.text()

    play(scenario, scripted(*TEXTS[:3], hold=3), size=(160, 48))


def test_a_repetition_notice_names_its_candidate(play) -> None:
    looping = Script(["round ", "and ", "round"], hold=1, repeats=True)
    engine = ScriptedEngine().script(Script(("the first",)), Script(("other",)), looping)

    async def scenario(it: Driver) -> None:
        screen = await again(it, 2)
        await it.until(lambda: f"{screen.candidates.answers[1].name}: the answer has repeated itself" in it.text())
        engine.release()
        await over(it, screen)
        await it.until(lambda: "repeated itself" not in it.text())

    play(scenario, engine)
