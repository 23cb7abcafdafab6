"""The K/V format, everywhere the chat shows it, and the context that fits in each format."""

import pytest
from msgspec.structs import replace
from textual.widgets import OptionList

from headrace.runtime import ops
from headrace.runtime.machine.memory import MemoryBudget
from tests.support.scripted_engine import CARD, ScriptedEngine
from tests.tui.conftest import Driver


def test_a_packed_format_is_at_the_top_and_in_the_decode_view(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        assert "K/V q8" in it.text().splitlines()[0]
        await it.press("f2")
        assert "/token as q8" in it.text()

    play(scenario, ScriptedEngine(card_to_load=replace(CARD, kv="q8")))


def test_coarse_activations_are_at_the_top_and_in_the_decode_view(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        assert "activations 8" in it.text().splitlines()[0]
        await it.press("f2", "7")
        assert it.text().count("activations") == 2

    play(scenario, ScriptedEngine(card_to_load=replace(CARD, kv="f16", activations=8)))


def test_an_unquantized_cache_is_not_named_at_the_top(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        assert "K/V" not in it.text().splitlines()[0]
        assert "activations" not in it.text()
        await it.press("f2")
        assert "/token as f16" in it.text()

    play(scenario, ScriptedEngine(card_to_load=replace(CARD, kv="f16")))


def test_the_picker_shows_the_context_that_fits_in_each_format(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.select(), "supports_packed", lambda _head_dim: True)

    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        await it.press("f5")
        models = it.app.screen.query_one("#models", OptionList)
        await it.until(lambda: models.option_count > 3)
        names = [str(models.get_option_at_index(i).id) for i in range(models.option_count)]
        models.highlighted = names.index("smollm2-135m")
        await it.until(lambda: "context that fits: all 8,192" in it.text())
        models.highlighted = names.index("llama-3.2-1b")
        await it.until(lambda: "context that fits: f16 " in it.text())
        assert " · k8v4 " in it.text()
        models.highlighted = names.index("qwen3-8b")
        await it.until(lambda: "context that fits: nothing" in it.text())

    budget = MemoryBudget(total=4 << 30, free=2 << 30, reserve=0, source="available RAM")
    play(scenario, ScriptedEngine(card_to_load=replace(CARD, budget=budget)))
