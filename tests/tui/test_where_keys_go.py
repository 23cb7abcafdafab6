"""Letters go to the input, wherever one clicked; they are commands only where a message was selected on purpose."""

import pytest
from textual import events

from headrace.app.tui.transcript.transcript import Transcript
from headrace.app.tui.widgets.status_bar import StatusBar
from tests.tui.conftest import Driver


@pytest.mark.sampled
@pytest.mark.parametrize("place", [(40, 2), (5, 30)])
@pytest.mark.parametrize("clicked", [Transcript, StatusBar, "#panel"])
def test_after_a_click_letters_are_text(play, clicked: type | str, place: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        await it.pilot.click(clicked, offset=place if clicked is Transcript else (1, 0))
        await it.press(*"encrbjk", "left_square_bracket")
        assert it.prompt.text == "encrbjk["
        assert it.app.poller.chat.view.editing is None  # type: ignore[union-attr]
        assert len(it.engine.commands) == 1

    play(scenario)


def test_tab_does_not_move_the_focus(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        await it.press("tab", "n", "shift+tab", "e")
        assert it.prompt.text == "ne"

    play(scenario)


def test_other_keys_on_a_selected_message_are_text(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        await it.press("ctrl+up", "up")
        assert it.transcript.selected == 0
        await it.press(*"hence")
        assert it.prompt.text == "hence"
        await it.press("ctrl+up")
        it.transcript.post_message(events.Paste(" now"))
        await it.pilot.pause()
        assert it.prompt.text == "hence now"

    play(scenario)


def test_all_keys_of_a_burst_go_to_the_input(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        await it.press("ctrl+up")
        for letter in "/find onrdeck":
            it.app.post_message(events.Key({"/": "slash", " ": "space"}.get(letter, letter), letter))
        await it.until(lambda: it.prompt.text)
        await it.pilot.pause()
        assert it.prompt.text == "/find onrdeck"
        assert it.app.poller.chat.view.editing is None  # type: ignore[union-attr]
        assert len(it.engine.commands) == 1

    play(scenario)


def test_branch_keys_work_after_switching_to_a_shorter_branch(play) -> None:
    """The key that was pressed for the branch before is pressed again, and is no text."""

    async def scenario(it: Driver) -> None:
        await it.ask("one")
        await it.ask("two")
        await it.press("ctrl+up", "up", "up", "up", "e")  # a branch of one turn beside one of two
        await it.press("enter")
        await it.idle()
        await it.press("ctrl+up", "up", "left_square_bracket", "right_square_bracket", "left_square_bracket")
        await it.until(lambda: it.said[2:3] == ["two"])
        assert it.prompt.text == ""

    play(scenario)


def test_a_visible_notice_is_not_repeated(play) -> None:
    async def scenario(it: Driver) -> None:
        for _ in range(5):
            await it.press("ctrl+g")
        await it.until(lambda: it.text().count("there is nothing to continue") == 1)
        it.state.notify("another")
        await it.until(lambda: "another" in it.text())
        assert it.text().count("another") == 1

    play(scenario)
