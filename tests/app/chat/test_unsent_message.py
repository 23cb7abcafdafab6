"""Attachments of the message being typed."""

from pathlib import Path

import pytest

from headrace.app.chat import attachments, unsent_message
from headrace.app.sessions.records import Session


def test_a_folder_is_read_once_while_keys_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.txt").write_text("one")
    read: list[str] = []
    real = attachments.read_attachment
    monkeypatch.setattr(attachments, "read_attachment", lambda name: read.append(name) or real(name))
    now = [10.0]
    monkeypatch.setattr(unsent_message.time, "monotonic", lambda: now[0])
    session = Session("s", "", 0.0, 0.0)
    typed = unsent_message.UnsentMessage()
    for text in ("see", "see t", "see this"):
        asked = typed.prefetch(f"@{tmp_path}/ {text}", session, [])
        assert asked is not None
        assert asked.files == ("one",)
    assert len(read) == 1
    (tmp_path / "one.txt").write_text("two")
    now[0] += 10.0
    asked = typed.prefetch(f"@{tmp_path}/ see this", session, [])
    assert asked is not None
    assert asked.files == ("two",)
