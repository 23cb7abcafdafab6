"""Attachments named in a message, and files that are refused."""

import glob
import os
import shutil
from pathlib import Path

import pytest

from headrace.app.chat import attachments as attachments_module
from headrace.app.chat.attachments import MAX_BYTES, parse_message, take_attachments, with_attachments
from headrace.app.sessions.records import Attachment, Message
from headrace.runtime.errors import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "my file.md").write_text("mine")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("a = 1")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "rest", "names"),
    [
        ("plain", "plain", []),
        ("/file notes.txt\nwhat?", "what?", ["notes.txt"]),
        ("what?\n/file my file.md", "what?", ["my file.md"]),
        ('/file "my file.md"  \n/file notes.txt', "", ["my file.md", "notes.txt"]),
        ("see @notes.txt.", "see @notes.txt.", ["notes.txt"]),
        (
            "see @src/a.py, @~/notes.txt and @src/a.py",
            "see @src/a.py, @~/notes.txt and @src/a.py",
            ["a.py", "notes.txt"],
        ),
        ('see @"my file.md"', 'see @"my file.md"', ["my file.md"]),
        ("mail me@notes.txt", "mail me@notes.txt", []),
        ("@property and @john, a/file notes.txt", "@property and @john, a/file notes.txt", []),
        ("@org/name is a model", "@org/name is a model", []),
    ],
)
def test_words_that_name_a_file_are_attached(text: str, rest: str, names: list[str]) -> None:
    found, attachments = take_attachments(text)
    assert (found, [attachment.name for attachment in attachments]) == (rest, names)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("/file missing.txt", "missing.txt cannot be read: No such file"),
        ("@./missing.txt", "./missing.txt"),
        ("what is in @missing/?", "missing/ cannot be read: No such file"),
        ("@missing/deep/ is empty", "missing/deep/ cannot be read: No such file"),
        ("/file empty", "empty"),
        ("/file many", "many: more than 100"),
        ("/file big", "big: 2 files of 300"),
        ("/file binary", "binary .*UTF-8"),
        ("/file nul", "nul "),
        ("/file large", "large: .*256 KiB"),
        ("/file /dev/zero", "/dev/zero"),
        ("/file pipe", "pipe"),
        ("/file " + "x" * 5000, "xxx"),
        ("/file ~nobody-has-this-name/x", "~nobody-has-this-name/x"),
        ("/file a\0b", "a\0b"),
    ],
)
def test_files_that_cannot_be_sent_are_refused_by_name(text: str, complaint: str, folder: Path) -> None:
    (folder / "binary").write_bytes(b"\x89PNG\xff\xfe")
    (folder / "nul").write_bytes(b"a\0b")
    (folder / "large").write_bytes(b"x" * (MAX_BYTES + 1))
    os.mkfifo(folder / "pipe")
    for name in ("empty", "many", "big"):
        (folder / name).mkdir()
    for number in range(101):
        (folder / "many" / f"{number}").write_text("x")
    for number in range(2):
        (folder / "big" / f"{number}").write_bytes(b"x" * (150 << 10))
    with pytest.raises(UsageError, match=complaint) as caught:
        take_attachments(text)
    assert "\n" not in str(caught.value)


@pytest.fixture
def tree(folder: Path) -> Path:
    for name in ("lib/a.py", "lib/deep/b.py", "lib/deep/c.md", "lib/.hidden/d.py", "lib/.e.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    (folder / "lib" / "image").write_bytes(b"\xff\xfe")
    return folder


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("see @lib/", ["lib/a.py", "lib/deep/b.py", "lib/deep/c.md"]),
        ("see @lib/deep, please", ["lib/deep/b.py", "lib/deep/c.md"]),
        ("see @lib/*.py", ["lib/a.py"]),
        ("see @lib/**/*.py.", ["lib/a.py", "lib/deep/b.py"]),
        ("see @lib/nothing*", []),
        ("why @a/b/c or @lib", []),
        ("/file lib/deep\nsee @lib/deep/b.py", ["lib/deep/b.py", "lib/deep/c.md", "b.py"]),
    ],
)
@pytest.mark.usefixtures("tree")
def test_folders_and_patterns_stand_for_their_text_files(text: str, names: list[str]) -> None:
    _, attachments = take_attachments(text)
    assert [attachment.name for attachment in attachments] == names
    assert all(attachment.text.startswith("text of lib/") for attachment in attachments)


@pytest.mark.parametrize(
    "name", ["~/**/*.zzz", "~/lib/", "lib/**/*.zzz", "lib/*/*/*.py", "/**/*.zzz", "lib/[d]*/*.zzz"]
)
@pytest.mark.usefixtures("tree")
def test_a_search_of_many_entries_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries count whether they match or not."""
    monkeypatch.setattr(attachments_module, "_MAX_ENTRIES", 4)
    with pytest.raises(UsageError, match="too many files and folders to search"):
        take_attachments(f"see @{name}")


@pytest.mark.usefixtures("tree")
def test_only_folders_that_a_pattern_names_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments_module, "_MAX_ENTRIES", 4)
    assert [attachment.name for attachment in take_attachments("@lib/deep/*.py")[1]] == ["lib/deep/b.py"]


@pytest.mark.parametrize(
    "pattern",
    ["*", "**", "**/*", "*/*", "lib/**/*.py", "lib/.*", "lib/.h*/*", "./**/b.*", "lib/**/deep/*", "[ln]*", "*/../*.txt",
     "**/deep/b.py", "lib/*/"],
)  # fmt: skip
def test_patterns_match_the_files_that_glob_matches(tree: Path, pattern: str) -> None:
    for name in (pattern, f"{tree}/{pattern}"):
        matches = glob.glob(str(Path(name)), recursive=True)  # noqa: PTH207
        assert (attachments_module.files_of(name) or []) == sorted({path for path in matches if Path(path).is_file()})


def test_an_edit_keeps_or_drops_the_files_of_a_folder_with_its_name(tree: Path) -> None:
    content, attachments = parse_message("see @lib/deep/")
    old = Message(1, "s", None, "user", content, 0.0, attachments=attachments)
    shutil.rmtree(tree / "lib")
    assert parse_message("look at @lib/deep/ again", old)[1] == attachments
    assert parse_message("never mind", old)[1] == ()


def test_a_fence_is_longer_than_any_in_the_file() -> None:
    text = with_attachments("Why?", [Attachment("a.md", "````\ncode\n````\n"), Attachment("b", "plain")])
    assert text == "File a.md:\n`````\n````\ncode\n````\n`````\n\nFile b:\n```\nplain\n```\n\nWhy?"
    assert with_attachments("", [Attachment("b", "plain")]) == "File b:\n```\nplain\n```"
