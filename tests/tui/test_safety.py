"""A model's text is text: it cannot move the terminal, be markup, be a link, or hide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events
from textual.geometry import Region

from headrace.app.output.sanitise import sanitise
from headrace.app.tui.input.ask_line import AskLine
from headrace.app.tui.transcript.growing_markdown import GrowingMarkdown
from headrace.app.tui.transcript.markdown_lines import render
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver

ATTACKS = (
    "\x1b]52;c;aGFoYQ==\x07",
    "\x1b[2J\x1b[31mred",
    "\x9b31mred",
    "[bold red]markup[/] [@click=app.quit]go[/]",
    "[link](javascript:alert(1)) <https://example.org> https://example.org ![x](file:///etc/passwd)",
    "<script>alert(1)</script> <b>html</b>",
    "abc\u202edef\u2066ghi",
)


def test_model_text_cannot_control_the_terminal_or_the_chat(play) -> None:
    async def scenario(it: Driver) -> None:
        for attack in ATTACKS:
            await it.write("/new")
            await it.ask("attack")
            strips = it.transcript.render_lines(Region(0, 0, *it.transcript.size))
            text = "\n".join(strip.text for strip in strips)
            assert "attack" in text
            assert not set(text) & {chr(code) for code in [*range(10), *range(11, 32), *range(127, 160)]}
            assert "\u202e" not in text and "\u2066" not in text  # noqa: PT018
            for strip in strips:
                for segment in strip:
                    assert segment.style is None or segment.style.link is None
                    assert segment.style is None or not set(segment.style.meta) - {"offset"}
            for written in ("markup", "javascript", "<b>html</b>", "example.org"):
                assert (written in attack) == (written in text)

    engine = ScriptedEngine()
    for attack in ATTACKS:
        cut = len(attack) // 2  # also across two tokens
        engine.script(Script([attack[:cut], attack[cut:]]))
    play(scenario, engine)


def test_escape_sequences_pasted_into_the_decode_view_are_removed(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f2")
        line = it.app.screen.query_one(AskLine)
        line.post_message(events.Paste("red \x1b[31mtext"))
        await it.until(lambda: line.value.endswith("text"))
        assert "\x1b" not in line.value
        assert it.prompt.text == line.value

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize("attack", ATTACKS)
def test_escape_sequences_in_input_fields_are_not_drawn(play, attack: str) -> None:
    def drawn(it: Driver) -> str:
        text = it.text()
        assert not set(text) & {chr(code) for code in [*range(10), *range(11, 32), *range(127, 160)]}
        assert "\u202e" not in text and "\u2066" not in text  # noqa: PT018
        return text

    async def scenario(it: Driver) -> None:
        await it.ask("attack")
        await it.write("/edit answer")
        assert sanitise(attack).split()[0] in drawn(it)
        await it.press("escape")
        it.prompt.post_message(events.Paste(attack))
        await it.until(lambda: it.prompt.text == sanitise(attack))
        drawn(it)
        it.prompt.put("")
        it.state.conversation.branch.rename(attack)
        it.state.conversation.branch.set_system(attack)
        await it.press("f6")
        drawn(it)
        await it.press("escape", "f4", "ctrl+r")
        drawn(it)

    play(scenario, ScriptedEngine().script(Script([attack])))


def test_titles_and_names_are_no_markup_either(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("[bold]x[/bold] \x1b[31m")
        await it.press("f4")
        assert "[bold]x[/bold] ␛[31m" in it.text()

    play(scenario)


@given(st.text(alphabet="ab <>&[](){}*_`#>|-+.1\n\\!~:/'\"", max_size=200), st.integers(12, 60))
def test_any_markdown_fits_its_width(source: str, width: int) -> None:
    lines = render(source, width)
    for line in lines:
        assert "\n" not in line.plain
        assert line.cell_length <= max(width, 12) + 60  # deep nesting and wide tables may stick out


@pytest.mark.parametrize("marks", ["> ", "- ", "1. ", "123456789. ", "> - ", "- > 1. "])
@pytest.mark.parametrize("depth", [1, 6, 9, 12, 19, 60])
@pytest.mark.parametrize("width", [1, 12, 18, 24, 38, 100])
def test_deeply_nested_text_is_shown(marks: str, depth: int, width: int) -> None:
    source = marks * depth + "hello world"
    for lines in (render(source, width), GrowingMarkdown(source).lines(width)):
        words = " ".join(line.plain for line in lines).split()
        assert {"hello", "world"} <= set(words)
