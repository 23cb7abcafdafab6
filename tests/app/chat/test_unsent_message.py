"""Attachments of the message being typed."""

from pathlib import Path

import pytest

from headrace.app.chat import attachments, unsent_message
from headrace.app.chat.answer_setup import answer_request
from headrace.app.engine.events import PromptCounted
from headrace.app.sessions.records import Message, Session


def test_a_folder_is_not_read_again_for_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.txt").write_text("one")
    read: list[str] = []
    real = attachments.read_attachment
    monkeypatch.setattr(attachments, "read_attachment", lambda name: read.append(name) or real(name))
    now = [10.0]
    monkeypatch.setattr(unsent_message.time, "monotonic", lambda: now[0])
    session = Session("s", "", 0.0, 0.0)
    typed = unsent_message.UnsentMessage()
    for text in ("see", "see t", "see this"):
        asked = typed.update(f"@{tmp_path}/ {text}", session, [])
        assert asked is not None
        assert asked.files == ("one",)
    assert len(read) == 1
    (tmp_path / "one.txt").write_text("two")
    now[0] += 10.0
    asked = typed.update(f"@{tmp_path}/ see this", session, [])
    assert asked is not None
    assert asked.files == ("two",)


def test_a_prefetched_prompt_equals_the_sent_one() -> None:
    sampling = {"thinking": "on", "chat_template_kwargs": '{"preserve_thinking": true}'}
    session = Session("s", "", 0.0, 0.0, sampling=sampling)
    asked = unsent_message.UnsentMessage().update("why?", session, [])
    sent = answer_request(1, session, [Message(1, "s", None, "user", "why?", 0.0)])
    assert asked is not None
    assert asked.messages == sent.messages
    assert (asked.thinking, asked.variables) == (sent.options.thinking, sent.options.chat_template_kwargs)
    assert asked.variables == {"preserve_thinking": True}


def test_invalid_settings_prefetch_nothing() -> None:
    session = Session("s", "", 0.0, 0.0, sampling={"temperature": -1})
    assert unsent_message.UnsentMessage().update("why?", session, []) is None


def test_counts_of_files_stay_until_they_are_counted_again(tmp_path: Path) -> None:
    """A pause in typing asks for the same counts again, and a changed text for new ones."""
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(name)
    session = Session("s", "", 0.0, 0.0)
    typed = unsent_message.UnsentMessage()
    asked = typed.update(f"@{tmp_path}/one.txt", session, [])
    assert asked is not None
    assert typed.file_tokens == [None]
    typed.take_count(PromptCounted(asked.id, 100, 400, 50, (7,)))
    typed.update(f"@{tmp_path}/one.txt", session, [])
    assert typed.file_tokens == [7]
    again = typed.update(f"@{tmp_path}/two.txt and @{tmp_path}/one.txt", session, [])
    assert typed.file_tokens == [None, 7]
    assert again is not None
    typed.take_count(PromptCounted(asked.id, 100, 400, 50, (1, 1)))  # of the text before
    assert typed.file_tokens == [None, 7]
    typed.take_count(PromptCounted(again.id, 100, 400, 50, (8, 9)))
    assert typed.file_tokens == [8, 9]


def test_a_count_of_a_sent_message_is_ignored() -> None:
    typed = unsent_message.UnsentMessage()
    asked = typed.update("why?", Session("s", "", 0.0, 0.0), [])
    assert asked is not None
    typed.sent()
    typed.take_count(PromptCounted(asked.id, 100, 400, 50))
    assert typed.counted is None
    assert typed.count_of("why?") is None
