"""Output files: replaced as a whole or left unchanged."""

import errno
import os
from pathlib import Path

import pytest

from headrace.app.output.output_file import write_output
from headrace.runtime.errors import HeadraceError, UsageError


def test_a_new_file_and_one_in_the_place_of_another(tmp_path: Path) -> None:
    file = tmp_path / "talk.md"
    for text in ("a mill\n", "ein Mühlrad\n"):
        write_output(file, text)
        assert file.read_text("utf-8") == text
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_device_is_written_to_and_not_replaced() -> None:
    write_output(Path(os.devnull), "text")
    with pytest.raises(HeadraceError, match="No space left") as caught:
        write_output(Path("/dev/full"), "text")
    assert caught.value.exit_code == 1
    assert Path("/dev/full").is_char_device()


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.md"
    write_output(file, "old\n")

    def failing(_self: Path, _target: Path) -> Path:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(HeadraceError, match="Input/output error") as caught:
        write_output(file, "new\n")
    assert caught.value.exit_code == 1
    assert file.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [file]


def test_an_output_path_that_cannot_exist_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "talk.md", tmp_path):
        with pytest.raises(UsageError, match="cannot be written"):
            write_output(path, "text")
    assert list(tmp_path.iterdir()) == []
