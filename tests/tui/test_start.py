"""Start of the program: its needs of a terminal, its imports, its first session and theme."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from textual.app import App
from textual.pilot import Pilot

from headrace.app.config.settings import ScreenSettings, Settings, load_settings, settings_path
from headrace.app.tui.app import HeadraceApp
from headrace.app.tui.themes import terminal_theme
from tests.support.scripted_engine import Script
from tests.tui.conftest import Driver

ROOT = Path(__file__).resolve().parents[2]


def _headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", *arguments]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def test_without_a_terminal_the_error_names_the_alternative(home: Path) -> None:
    done = _headrace("chat")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "the chat needs a terminal" in done.stderr
    assert "headrace run" in done.stderr
    assert not (home / "home").exists()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("term", ["dumb", ""])
def test_top_refuses_a_terminal_that_cannot_redraw(term: str) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "headrace", "top", "http://127.0.0.1:1"]
    environment = {**os.environ, "TERM": term}
    code = subprocess.call(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert code == 2
    assert b"terminal" in shown
    assert b"\x1b" not in shown


@pytest.mark.usefixtures("home")
def test_bare_headrace_in_a_pipe_reads_a_prompt() -> None:
    done = _headrace()
    assert done.returncode == 2
    assert done.stderr.startswith("headrace: no prompt\n")
    assert done.stdout == ""


@pytest.mark.usefixtures("home")
def test_a_wait_for_an_app_without_a_screen_ends() -> None:
    """Tests replace textual's wait, which returns False then."""
    assert not asyncio.run(Pilot(App())._wait_for_screen())


def test_the_screen_imports_no_model_code() -> None:
    heavy = "{'mlx.core', 'transformers', 'tokenizers', 'numpy', 'gguf', 'jinja2', 'pygments', 'markdown_it'}"
    code = f"import sys, headrace.app.tui.app; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("ground", "theme"), [("15;0", "headrace-dark"), ("0;15", "headrace-light"), ("", "headrace-dark")]
)
def test_the_theme_follows_the_terminal(monkeypatch: pytest.MonkeyPatch, ground: str, theme: str) -> None:
    monkeypatch.setenv("COLORFGBG", ground)
    assert terminal_theme() == theme


def test_a_theme_that_was_chosen_is_kept(play) -> None:
    async def scenario(it: Driver) -> None:
        it.app.theme = "headrace-light"
        await it.until(lambda: load_settings().screen.theme == "headrace-light")

    play(scenario)


def test_a_default_theme_is_not_stored(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        assert not settings_path().exists()
        it.app.theme = "nord"
        await it.until(lambda: load_settings().screen.theme == "nord")
        it.app.theme = "headrace-dark"
        await it.until(lambda: load_settings().screen.theme == "headrace-dark")

    play(scenario)


def test_an_unknown_theme_is_reported(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.until(lambda: "no theme called 'solarised'" in it.text())

    play(scenario, settings=Settings(screen=ScreenSettings(theme="solarised")))


@pytest.mark.sampled
@pytest.mark.parametrize("theme", ["ansi-dark", "ansi-light"])
def test_no_color_uses_the_default_colours_only(play, monkeypatch: pytest.MonkeyPatch, theme: str) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        update = it.app.screen._compositor.render_full_update().render_segments(it.app.console)
        colours = {code for codes in re.findall(r"\x1b\[([\d;]+)m", update) for code in codes.split(";")}
        assert colours <= {"0", "1", "2", "3", "4", "7", "39", "49"}

    play(scenario, settings=Settings(screen=ScreenSettings(theme=theme)))


@pytest.mark.sampled
@pytest.mark.parametrize("theme", ["ansi-dark", "ansi-light", "nord", "textual-light"])
def test_code_is_drawn_in_every_theme(play, theme: str) -> None:
    code = '```python\n@cached\ndef __len__(self):\n    """Why."""\n    return self.n + len(\'x\')  # 1\n```\n\n'

    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        it.app.theme = theme
        it.engine.script(Script([code, "```html\n<a href='b'>c</a>\n```"]))
        await it.ask("and code?")
        assert "return self.n" in it.text()
        assert "href='b'" in it.text()
        await it.press("f2")
        assert "roofline" in it.text()

    play(scenario)


def test_no_color_means_no_colour(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        assert isinstance(it.app, HeadraceApp)
        for strip in it.app.screen._compositor.render_strips():
            for segment in strip:
                color = segment.style.color if segment.style else None
                if color is not None and color.triplet is not None:
                    red, green, blue = color.triplet
                    assert max(red, green, blue) - min(red, green, blue) <= 2

    play(scenario)
