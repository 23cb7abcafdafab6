"""Parts of a message that can be copied alone: its code blocks, its links; and the platform's tools for them."""

from pathlib import Path

import pytest

from headrace.app.tui.input.platform_tools import copy_with_tool
from headrace.app.tui.screens.dialogs import Choose
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver

CODE = "one\n\n```py\nfirst()\n```\n\ntwo\n\n```\nsecond\nlines\n```\n"
CODE_ANSWER = "done\n\n```\nfinal()\n```\n"
LINKS = "[a](https://a.example/x) and https://b.example."


def test_one_of_several_code_blocks_is_chosen(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Driver) -> None:
        copied: list[str] = []
        monkeypatch.setattr(it.state, "copy", lambda text, _what: copied.append(text))
        await it.ask("code")
        await it.write("/copy code")
        await it.until(lambda: isinstance(it.app.screen, Choose))
        assert "first()" in it.text()
        assert "second  (2 lines)" in it.text()
        await it.press("2")
        assert copied == ["second\nlines\n"]
        await it.press("ctrl+up", "b", "escape")
        assert copied == ["second\nlines\n"]
        await it.press("b", "enter")
        assert copied[1:] == ["first()\n"]

    play(scenario, ScriptedEngine().script(Script([CODE])))


def test_a_link_is_opened_only_when_it_was_chosen(play, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = home / "bin" / "xdg-open"
    browser.parent.mkdir()
    browser.write_text(f'#!/bin/sh\necho "$1" > {home}/part && mv {home}/part {home}/opened\n')
    browser.chmod(0o755)
    monkeypatch.setenv("PATH", f"{browser.parent}:/usr/bin:/bin")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("WSL_DISTRO_NAME", raising=False)
    monkeypatch.setattr("sys.platform", "linux")

    async def scenario(it: Driver) -> None:
        await it.ask("links")
        await it.press("ctrl+up", "o")
        await it.until(lambda: isinstance(it.app.screen, Choose))
        assert "https://a.example/x" in it.text()
        assert not (home / "opened").exists()
        await it.press("2")
        await it.until((home / "opened").exists)
        assert (home / "opened").read_text() == "https://b.example\n"

    play(scenario, ScriptedEngine().script(Script([LINKS])))


def test_without_a_browser_the_address_is_copied(play, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("sys.platform", "linux")

    async def scenario(it: Driver) -> None:
        copied: list[str] = []
        monkeypatch.setattr(it.state, "copy", lambda text, _what: copied.append(text))
        await it.ask("links")
        await it.write("/links")
        await it.press("enter")
        assert copied == ["https://a.example/x"]

    play(scenario, ScriptedEngine().script(Script([LINKS])))


def test_thinking_is_not_copied(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Driver) -> None:
        copied: list[str] = []
        monkeypatch.setattr(it.state, "copy", lambda text, _what: copied.append(text))
        await it.ask("code")
        await it.write("/copy")
        await it.press("ctrl+up", "c", "b", "escape")
        await it.write("/copy code")
        assert copied == [CODE_ANSWER, CODE_ANSWER, "final()\n", "final()\n"]
        await it.write("/links")
        await it.until(lambda: "this message has no link" in it.text())

    thinking = "<think>\nhttps://draft.example\n```\ndraft()\n```\n</think>\n"
    play(scenario, ScriptedEngine().script(Script([thinking, CODE_ANSWER])))


def test_text_goes_to_the_clipboard_tool_of_the_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("wl-copy", "xclip"):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\ncat > "{tmp_path}/{name}.text"\n')
        tool.chmod(0o755)
    assert copy_with_tool("é\n")
    assert (tmp_path / "xclip.text").read_text() == "é\n"
    assert not (tmp_path / "wl-copy.text").exists()

    (tmp_path / "xclip").write_text("#!/bin/sh\nexit 1\n")
    assert not copy_with_tool("lost")
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WSL_DISTRO_NAME", raising=False)
    assert not copy_with_tool("lost")


def test_without_messages_nothing_is_copied(play) -> None:
    async def scenario(it: Driver) -> None:
        for command in ("/links", "/copy code"):
            await it.write(command)
            assert "there is no answer yet" in it.text()
        await it.ask("plain")
        await it.write("/links")
        await it.until(lambda: "this message has no link" in it.text())

    play(scenario, ScriptedEngine().script(Script(["text"])))
