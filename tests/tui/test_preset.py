"""Presets in the chat."""

from headrace.app.config.presets import load_presets
from headrace.app.tui.screens.dialogs import Choose
from tests.tui.conftest import Driver


def test_a_preset_is_kept_and_taken(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("/preset")
        assert "there are no presets yet" in it.text()
        assert it.prompt.text == ""
        await it.write("/system Be brief.")
        await it.write("/set temperature 0.3")
        await it.write("/preset save short answers")
        assert list(load_presets()) == ["short answers"]
        await it.write("/set temperature 1.5")
        await it.write("/set top_k 7")
        await it.write("/system none")
        await it.write("/preset nothing")
        assert it.state.conversation.session.sampling == {"temperature": 1.5, "top_k": 7}
        await it.write("/preset")
        await it.until(lambda: isinstance(it.app.screen, Choose))
        await it.press("enter")
        assert it.state.conversation.session.system == "Be brief."
        assert it.state.conversation.session.sampling == {"temperature": 0.3}
        await it.write("/preset delete short answers")
        assert load_presets() == {}

    play(scenario)
