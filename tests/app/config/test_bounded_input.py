"""Bounded reads: files to their end, endless devices refused."""

import io
import os
import sys
from pathlib import Path

import pytest

from headrace.app.config.bounded_input import decoded, json_object, read_bounded, read_grammar_file
from headrace.runtime.errors import UsageError


def test_files_and_standard_input_are_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(3 << 20)
    file = tmp_path / "file"
    file.write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert read_bounded(file, len(content)) == content
    assert read_bounded(None, len(content)) == content
    assert not sys.stdin.closed
    with pytest.raises(UsageError, match=r"file .*3\.00 MiB"):
        read_bounded(file, len(content) - 1)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no such device")
def test_an_endless_device_is_refused() -> None:
    with pytest.raises(UsageError, match="/dev/zero"):
        read_bounded(Path("/dev/zero"), 9 << 20)


@pytest.mark.parametrize("name", ["nowhere", ".", "a\0b"])
def test_an_unreadable_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_bounded(tmp_path / name, 9)


@pytest.mark.parametrize("name", ["~nobody-has-this-name/schema.json", "~a\0b", "x" * 5000])
def test_grammar_files_that_cannot_be_paths_are_named(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_grammar_file(name)


def test_one_end_of_file_on_a_terminal_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = os.openpty()
    os.write(controller, b"typed\n\x04")  # a second Ctrl-D would never come
    with os.fdopen(controller, "wb"), os.fdopen(terminal, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert read_bounded(None, 100) == b"typed\n"


def test_text_is_utf_8_with_or_without_a_mark() -> None:
    assert decoded("﻿é".encode(), "notes") == decoded("é".encode(), "notes") == "é"
    with pytest.raises(UsageError, match="notes is UTF-16, not UTF-8 text"):
        decoded("é".encode("utf-16"), "notes")
    with pytest.raises(UsageError, match=r"notes is not UTF-8 text \(byte 1\)"):
        decoded(b"a\xff", "notes")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "the body is nested too deeply"),
        (b'{"a": 1,\n}', "the body is not JSON: .* at line 2, column 1"),
        (b'{"a": NaN}', "the body is not JSON: NaN is not a JSON number"),
        (b'{"a": ' + b"1" * 5000 + b"}", "the body is not JSON: a number is too long"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b'{"digits": 1, "digits": 2}', "appears twice"),
        (b"[1]", "the body must be a JSON object"),
    ],
)
def test_json_that_is_no_object_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        json_object(data, "the body", unique=True)
