"""Messages left out of the prompt, and the summary sent in their place: seen, folded, changed and undone."""

from headrace.app.tui.screens.dialogs import Choose
from headrace.app.tui.transcript.context_mark import MARK
from tests.support.scripted_engine import Script, ScriptedEngine, with_context
from tests.tui.conftest import Driver

HEAD = "summary, sent in place of the 2 messages above"


def full() -> ScriptedEngine:
    engine = ScriptedEngine(card_to_load=with_context(64))
    return engine.script(Script(), Script(full=True), Script(["They spoke of mills."]), Script(["after"]))


async def summarised(it: Driver) -> None:
    await it.ask("one")
    await it.write("two")
    await it.until(lambda: isinstance(it.app.screen, Choose))
    await it.press("s")
    await it.until(lambda: it.said[-1:] == ["after"])
    await it.idle()


def system(it: Driver) -> str:
    """Return the first message of the prompt."""
    return it.engine.commands[-1].messages[0]["content"]


def test_a_summary_is_shown_and_can_be_folded(play) -> None:
    async def scenario(it: Driver) -> None:
        await summarised(it)
        assert HEAD in it.text()
        assert "They spoke of mills." in it.text()
        line = next(n for n, text in enumerate(it.text().split("\n")) if HEAD in text)
        await it.pilot.click("#transcript", offset=(6, line - 1))
        await it.pilot.pause()
        assert HEAD in it.text()
        assert "They spoke of mills." not in it.text()

    play(scenario, full())


def test_enter_folds_a_summary_that_was_selected(play) -> None:
    async def scenario(it: Driver) -> None:
        await summarised(it)
        await it.press("ctrl+up")
        assert "Fold" not in it.text()
        await it.press("up")
        while it.transcript.entries[it.transcript.selected or 0].message.id != MARK:
            await it.press("up")
        await it.until(lambda: "⏎ Fold" in it.text())
        await it.press("enter")
        assert HEAD in it.text()
        assert "They spoke of mills." not in it.text()
        await it.press("enter")
        assert "They spoke of mills." in it.text()

    play(scenario, full(), size=(80, 24))


def test_a_changed_summary_can_be_undone(play) -> None:
    async def scenario(it: Driver) -> None:
        await summarised(it)
        await it.write("/summary")
        assert it.prompt.text == "They spoke of mills."
        await it.write("They spoke of rivers.")
        await it.until(lambda: "They spoke of rivers." in it.text())
        await it.ask("three")
        assert "rivers" in system(it)
        await it.write("/summary undo")
        await it.until(lambda: "They spoke of mills." in it.text())
        await it.write("/summary undo")
        await it.until(lambda: "all messages are sent again" in it.text())
        assert HEAD not in it.text()
        await it.ask("four")
        assert it.engine.commands[-1].messages[0] == {"role": "user", "content": "one"}
        await it.write("/summary undo")
        await it.until(lambda: "nothing to undo" in it.text())

    play(scenario, full())


def test_keys_act_on_a_selected_summary(play) -> None:
    async def scenario(it: Driver) -> None:
        await summarised(it)
        await it.press("ctrl+up", "up", "up")
        assert it.transcript.entries[it.transcript.selected].message.id == MARK  # type: ignore[index]
        await it.press("e")
        assert it.prompt.text == "They spoke of mills."
        await it.press("escape", "ctrl+up", "up", "up", "u")
        await it.until(lambda: "all messages are sent again" in it.text())

    play(scenario, full())


def test_messages_left_out_without_a_summary_are_marked(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("one")
        await it.ask("two")
        conversation = it.state.conversation
        conversation.trimming.trim(conversation.messages[2].id, "")
        it.app.poller.chat.view.sync([])  # type: ignore[union-attr]
        await it.until(lambda: "the 2 messages above are not sent" in it.text())
        await it.write("/summary undo")
        await it.until(lambda: "not sent" not in it.text())

    play(scenario)
