"""A crash of the terminal UI: one line, and a report without the values of variables."""

from pathlib import Path

import pytest

from headrace.app.tui.textual_overrides.crash import write_report


def test_a_crash_is_one_line_and_a_report_without_the_values_of_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))

    def crash(text: str) -> str:
        return text.split()[99]

    try:
        crash("prompt " * 5)
    except IndexError as error:
        line = write_report(error)
    (report,) = (tmp_path / "cache/crashes").iterdir()
    assert report.name in line
    assert "\n" not in line
    assert "IndexError" in line
    assert "IndexError" in report.read_text()
    assert "prompt prompt" not in report.read_text() + line
    assert report.stat().st_mode & 0o077 == 0


def test_a_crash_without_a_place_for_its_report_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    (tmp_path / "cache").touch()
    assert "ValueError: two lines" in write_report(ValueError("two lines"))
