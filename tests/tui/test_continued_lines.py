"""Enter after a backslash and within triple quotes begins a line of the message."""

from tests.tui.conftest import Driver


def test_enter_after_a_backslash_begins_a_line(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press(*"one", "backslash", "enter", *"two")
        assert it.prompt.text == "one\ntwo"
        await it.press("enter")
        await it.idle()
        assert it.said[0] == "one\ntwo"

    play(scenario)


def test_enter_within_triple_quotes_begins_a_line(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press(*["quotation_mark"] * 3, *"one", "enter", "enter", *"two", *["quotation_mark"] * 3)
        assert it.prompt.text == '"""one\n\ntwo"""'
        await it.press("enter")
        await it.idle()
        assert it.said[0] == "one\n\ntwo"
        await it.press("up")
        assert it.prompt.text == '"""one\n\ntwo"""'

    play(scenario)
