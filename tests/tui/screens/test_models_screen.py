"""The model picker: filtering by typing, and the mark of recommended models."""

import pytest
from msgspec.structs import replace
from textual.widgets import OptionList

from headrace.runtime.machine.memory import MemoryBudget
from tests.support.scripted_engine import CARD, PEAK, ScriptedEngine
from tests.tui.conftest import Driver


def _names(models: OptionList) -> list[str | None]:
    return [models.get_option_at_index(index).id for index in range(models.option_count)]


def test_typing_filters_the_models(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f5")
        models = it.app.screen.query_one("#models", OptionList)
        await it.until(lambda: models.option_count > 3)
        await it.press(*"coder")
        assert _names(models)[:2] == ["qwen2.5-coder-7b", "deepseek-coder-v2-lite"]
        assert all("coder" in str(name) for name in _names(models))
        await it.press("enter")
        await it.until(lambda: "download qwen2.5-coder-7b?" in it.text())
        await it.press("n")
        for _ in "coder":
            await it.press("backspace")
        assert models.option_count > 3
        await it.press(*"xyz", "enter")  # x is a letter here
        assert "no model has this in its name" in it.text()
        await it.press(*["backspace"] * 3, *"qwen3")
        await it.press("down")
        assert models.highlighted == 1

    play(scenario)


def test_the_picker_marks_recommended_models(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.app.predict.targets.cached_peak", lambda _host: PEAK)

    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        await it.press("f5")
        models = it.app.screen.query_one("#models", OptionList)
        await it.until(lambda: models.option_count > 3)
        await it.press(*"chat")
        await it.until(lambda: "★ best chat" in it.text())
        assert len(_names(models)) == 1
        assert f"{_names(models)[0]} ★" in it.text()

    budget = MemoryBudget(total=32 << 30, free=20 << 30, reserve=0, source="available RAM")
    play(scenario, ScriptedEngine(card_to_load=replace(CARD, budget=budget)))
