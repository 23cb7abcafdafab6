"""ARCHITECTURE's way of a prompt is the one that `headrace run` takes: its functions run, in this order."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest
from click.testing import CliRunner

from headrace.app.cli.run.command import run
from tests.support.pages import PAGES
from tests.support.tiny_chat import write_chat_model


def way() -> list[str]:
    """Return the functions of the page's table, in order; the class is left out where the page leaves it out."""
    section = re.search(r"^## The way of a prompt\n(.*?)^## ", PAGES["ARCHITECTURE.md"], re.MULTILINE | re.DOTALL)
    assert section is not None
    rows = re.findall(r"^\| `.*? \| (`.*?) \|", section[1], re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_a_prompt_takes_the_way_in_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    model = write_chat_model(tmp_path / "tiny")
    notes = tmp_path / "notes.txt"
    notes.write_text("Rivers")
    left = way()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if left and event == "call" and f".{frame.f_code.co_qualname}".endswith(f".{left[0]}"):
            del left[0]

    sys.setprofile(watch)
    try:
        done = CliRunner().invoke(run, [f"Name three: @{notes}", "-m", str(model), "-n", "2"], catch_exceptions=False)
    finally:
        sys.setprofile(None)
    assert done.exit_code == 0
    assert not left
