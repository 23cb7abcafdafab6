"""A disk that fills: the chat offers to go on, and says that nothing is saved; what is in force is visible."""

import pytest
from textual.widgets import OptionList

from headrace.app.config.presets import Preset, save_preset
from headrace.app.sessions.store import SessionStore
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.decode_screen import DecodeScreen
from headrace.app.tui.screens.dialogs import UnaskedChoice
from tests.support.scripted_engine import Script
from tests.tui.conftest import Driver

LONG = "word " * 3000


def fill(store: SessionStore) -> None:
    """Let the file have no more pages: as on a full disk, for SQLite."""
    (pages,) = store.db.rows("PRAGMA page_count")
    store.db.rows(f"PRAGMA max_page_count = {pages[0]}")


async def answer(it: Driver, key: str) -> None:
    await it.until(lambda: isinstance(it.app.screen, UnaskedChoice), "the offer")
    await it.until(lambda: it.app.screen.query_one(OptionList).has_focus)
    await it.press(key)
    await it.until(lambda: isinstance(it.app.screen, ChatScreen))


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(120, 40), (60, 20)])
def test_a_full_disk_offers_an_unsaved_session(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("kept")
        path = it.state.store.db.path
        fill(it.state.store)
        it.prompt.put(LONG)
        await it.press("enter")
        await answer(it, "u")
        assert it.prompt.text == LONG
        await it.press("enter")
        await it.idle()
        assert it.said == ["kept", "Hello, world.", LONG, "Hello, world."]
        assert "not saved" in it.text().splitlines()[0]
        stored = SessionStore(path)
        assert [message.content for message in stored.branch(it.state.conversation.session.id)] == it.said[:2]
        stored.close()

    play(scenario, size=size)


def test_an_answer_on_a_full_disk_is_stored_once_there_is_space(play) -> None:
    async def scenario(it: Driver) -> None:
        it.engine.script(Script([LONG, LONG, LONG], hold=2))
        await it.write("write")
        await it.until(lambda: len(it.said) == 2)
        fill(it.state.store)
        it.engine.release()
        await it.until(lambda: it.state.conversation.phase == "idle")
        await it.until(lambda: isinstance(it.app.screen, UnaskedChoice), "the offer")
        it.state.store.db.rows("PRAGMA max_page_count = 100000")
        await answer(it, "t")
        stored = SessionStore(it.state.store.db.path)
        assert stored.branch(it.state.conversation.session.id)[-1].content == LONG * 3
        stored.close()
        assert "not saved" not in it.text()

    play(scenario)


def test_a_full_disk_is_asked_about_in_the_chat_only_and_again_after_an_error(play) -> None:
    async def scenario(it: Driver) -> None:
        it.engine.script(Script([LONG, LONG], hold=1))
        await it.write("write")
        await it.until(lambda: len(it.said) == 2)
        await it.press("f2")
        fill(it.state.store)
        it.engine.release()
        await it.until(lambda: it.state.store.db.full)
        for screen in (DecodeScreen, UnaskedChoice):
            it.app.poller.tick()
            await it.pilot.pause()
            assert isinstance(it.app.screen, screen)
            await it.press("escape")
        await it.write("/frobnicate")
        await it.until(lambda: isinstance(it.app.screen, UnaskedChoice), "the offer")

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(120, 40), (80, 24), (50, 20)])
def test_the_header_names_the_system_prompt_and_the_preset(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        save_preset("pirate", Preset("Talk like a pirate.", {"temperature": 1.5}))
        assert "pirate" not in it.text()
        await it.write("/system Be brief.")
        await it.until(lambda: "system prompt" in it.text().splitlines()[0])
        await it.write("/preset pirate")
        await it.until(lambda: "preset pirate" in it.text().splitlines()[0])
        await it.write("/set temperature 0.1")
        await it.until(lambda: "system prompt" in it.text().splitlines()[0])
        await it.write("/system none")
        await it.until(lambda: "system prompt" not in it.text().splitlines()[0])

    play(scenario, size=size)
