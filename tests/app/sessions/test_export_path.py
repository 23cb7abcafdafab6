"""Paths of exports from the chat."""

from pathlib import Path

import pytest

from headrace.app.sessions.export import export_path
from headrace.runtime.errors import UsageError


def test_an_export_creates_no_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        export_path("1", str(tmp_path / "missing" / "chat.md"))
    with pytest.raises(UsageError):
        export_path("1", f"{'x' * 300}/chat.md")
    assert export_path("1", str(tmp_path / "chat.md")) == tmp_path / "chat.md"
