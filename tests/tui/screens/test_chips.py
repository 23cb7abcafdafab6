"""The files that go with what is being typed, each with its tokens."""

from pathlib import Path

from headrace.app.engine.events import PromptCounted
from tests.tui.conftest import Driver


def plain(it: Driver) -> str:
    return it.text().replace("\u00a0", " ")


def test_files_show_with_their_tokens_before_they_are_sent(play, home: Path) -> None:
    (home / "src").mkdir()
    for number in range(12):
        (home / "src" / f"f{number:02}.py").write_text(f"n = {number}")
    (home / "notes.txt").write_text("notes")

    async def scenario(it: Driver) -> None:
        it.prompt.type("see @notes.txt and @src/ now")
        await it.until(lambda: it.engine.ahead and len(it.engine.ahead[-1].files) == 13)
        await it.until(lambda: " notes.txt … " in plain(it))
        assert it.engine.ahead[-1].files[:2] == ("notes", "n = 0")
        counted: set[int] = set()

        def shows_all() -> bool:
            """Count the latest request, since a pause in typing asks again; only its count shows."""
            if (latest := it.engine.ahead[-1].id) not in counted:
                counted.add(latest)
                it.engine._backlog.append(PromptCounted(latest, 100, 400, 50, (1234, *range(12))))
            shown = plain(it)
            parts = "notes.txt 1,234 tokens", "src/f00.py 0 tokens", "and 9 more, 1,300 tokens in all"
            return all(part in shown for part in parts)

        await it.until(shows_all)
        await it.press("enter")
        await it.idle()
        assert "1,234 tokens" not in plain(it)

    play(scenario)


def test_an_unusable_file_is_reported_while_its_name_is_typed(play) -> None:
    async def scenario(it: Driver) -> None:
        it.prompt.type("see @missing.txt")
        await it.until(lambda: "✗ missing.txt cannot be read" in it.text())
        it.prompt.put("see")
        await it.until(lambda: "✗" not in it.text())

    play(scenario)


def test_enter_sends_a_folder_or_completes_the_highlighted_entry(play, home: Path) -> None:
    (home / "src").mkdir()
    (home / "src" / "one.py").write_text("n = 1")

    async def scenario(it: Driver) -> None:
        await it.press(*"see @src/", "enter")
        await it.idle()
        assert it.said[0] == "see @src/"
        assert [one.name for one in it.state.conversation.messages[0].attachments] == ["src/one.py"]
        await it.press(*"see @src/", "down", "enter")
        assert it.prompt.text == "see @src/one.py "

    play(scenario)


def test_a_notification_covers_no_line_of_the_input(play, home: Path) -> None:
    for number in range(3):
        (home / f"a-file-with-a-long-name-{number}.txt").write_text("text")

    async def scenario(it: Driver) -> None:
        it.prompt.type(" ".join(f"@a-file-with-a-long-name-{number}.txt" for number in range(3)) + " these")
        await it.until(lambda: "name-2.txt …" in plain(it))
        before = plain(it).splitlines()[-9:]
        it.state.notify("a message that is long enough to need a second line of its own, if there is one", problem=True)
        await it.until(lambda: "a message that is" in it.text())
        shown = plain(it).splitlines()
        assert [line for line in before if line.strip() and line not in shown] == []

    play(scenario, size=(80, 24))
