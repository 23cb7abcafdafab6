"""Keys that macOS or its terminals take have another key or a command."""

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator

from textual.binding import Binding
from textual.dom import DOMNode

import headrace.app.tui
from headrace.app.chat.commands import COMMANDS
from headrace.app.tui.app import HeadraceApp
from tests.tui.conftest import Driver

TAKEN = {
    *("ctrl+up", "ctrl+down", "ctrl+left", "ctrl+right"),  # Mission Control and its spaces
    *("ctrl+home", "ctrl+end", "ctrl+pageup", "ctrl+pagedown"),  # fn and Ctrl with arrows: tiles of windows
    *("f11", "ctrl+space"),  # the desktop, the input source
}
OTHERWISE = {  # action: a command, or an action that leads there
    "to_transcript": "messages",
    "scroll_text('start')": "messages",  # and g
    "scroll_text('end')": "messages",  # and G
    "cursor(100000)": "app.freeze",  # twice: the newest step again
}


def bindings() -> Iterator[Binding]:
    for module in pkgutil.walk_packages(headrace.app.tui.__path__, "headrace.app.tui."):
        importlib.import_module(module.name)
    classes = [DOMNode]
    seen = set[type]()
    while classes:
        each = classes.pop()
        classes += each.__subclasses__()
        if each not in seen and each.__module__.startswith("headrace.app.tui"):
            seen.add(each)
            yield from Binding.make_bindings(vars(each).get("BINDINGS", []))


def test_no_action_needs_a_key_that_macos_takes() -> None:
    keys = defaultdict[str, set[str]](set)
    for binding in bindings():
        keys[binding.action].add(binding.key)
    assert len(keys) > 40
    hidden = {action for action, at in keys.items() if at <= TAKEN}
    assert hidden == set(OTHERWISE)
    known = {command.name for command in COMMANDS} | set(keys)
    assert set(OTHERWISE.values()) <= known


def test_bindings_of_the_app_are_among_those_checked() -> None:
    assert {binding.action for binding in Binding.make_bindings(HeadraceApp.BINDINGS)} <= {
        binding.action for binding in bindings()
    }


def test_the_messages_are_reached_by_a_command(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("first")
        await it.ask("second")
        await it.press(*"/messages", "enter")
        await it.until(lambda: it.transcript.selected is not None)
        await it.press("g")
        await it.until(lambda: it.transcript.scroll_offset.y == 0)
        await it.press("G")
        await it.until(lambda: it.transcript.scroll_offset.y == it.transcript.max_scroll_y)
        assert it.prompt.text == ""

    play(scenario)
