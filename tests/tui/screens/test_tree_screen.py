"""The tree of a conversation: what it looks like, going to a branch of it, removing a part of it."""

from pathlib import Path

from headrace.app.sessions.records import Message
from headrace.app.sessions.tree import tree_lines
from headrace.app.tui.screens.dialogs import Choose
from headrace.app.tui.screens.tree_screen import TreeScreen
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver


def message(number: int, parent: int | None) -> Message:
    return Message(number, "s", parent, "user", f"m{number}", 0.0)


def test_the_tree_draws_chains_straight_and_branches_at_their_fork() -> None:
    tree = [(1, None), (2, 1), (3, 2), (4, 1), (5, 4), (6, 4), (7, 6), (8, 3)]
    lines = tree_lines([message(*each) for each in tree], {1, 4, 6, 7})
    drawn = [f"{line.lead}{line.message.content}{'*' * line.shown}" for line in lines]
    assert drawn == ["m1*", "├ m2", "│ m3", "│ m8", "└ m4*", "  ├ m5", "  └ m6*", "    m7*"]


def test_a_chain_of_20000_messages_is_straight() -> None:
    chain = [message(n, n - 1 if n else None) for n in range(20_000)]
    assert {line.lead for line in tree_lines(chain, set())} == {""}


def test_the_tree_switches_to_a_branch_and_deletes_it(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("question")
        await it.ask("then")
        await it.press("ctrl+up", "up", "up", "r")
        await it.idle()
        assert it.said == ["question", "b"]
        await it.write("/tree")
        await it.until(lambda: isinstance(it.app.screen, TreeScreen))
        text = it.text()
        assert "├ ◆ a" in text
        assert "│ ❯ then" in text
        assert "└ ◆ b" in text
        await it.press("up", "enter")
        assert it.said == ["question", "a", "then", "c"]
        await it.write("/tree")
        await it.press("up", "delete")
        await it.until(lambda: isinstance(it.app.screen, Choose))
        assert "this message and the 1 after it" in it.text()
        await it.press("y")
        assert "then" not in it.text()
        await it.press("escape")
        assert it.said == ["question", "a"]

    play(scenario, ScriptedEngine().script(Script(["a"]), Script(["c"]), Script(["b"])))


def test_a_message_is_a_line_of_the_tree_however_long_it_is(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("word " * 200)
        await it.write("/tree")
        await it.until(lambda: isinstance(it.app.screen, TreeScreen))
        lines = it.text().splitlines()
        first = next(n for n, line in enumerate(lines) if "❯ word" in line)
        assert "…" in lines[first]
        assert "◆ Hello" in lines[first + 1]

    play(scenario, size=(80, 24))


def test_a_message_is_deleted_only_when_that_was_confirmed(play, home: Path) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("/delete")
        assert "the conversation is empty" in it.text()
        await it.ask("question")
        await it.press("ctrl+up", "d", "escape")
        assert len(it.said) == 2
        await it.press("d", "y")
        await it.until(lambda: it.said == ["question"])
        assert b"Hello, world" not in (home / "sessions.db").read_bytes()

    play(scenario)


def test_the_tree_shows_answers_without_thinking(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("2+2")
        await it.write("/tree")
        await it.until(lambda: isinstance(it.app.screen, TreeScreen))
        assert "◆ It is 4." in it.text()

    play(scenario, ScriptedEngine().script(Script(["<think>\nlet me see\n</think>\n", "It is 4."])))
