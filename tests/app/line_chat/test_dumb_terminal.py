"""`headrace` on TERM=dumb, with --plain and with --inline: the real command on a terminal, with a tiny model."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from headrace.app.sessions.store import SessionStore
from tests.support.terminal import spawn_headrace
from tests.support.tiny_chat import write_chat_model

PROMPT = "\r\n> "
LETTERS = {str(ord(letter) - 33): 100 for letter in "abcdefghijklmnopqrstuvwxyz"}  # endless words
_REDRAWN_PROMPT = "[\r\n]> $"  # after a progress line that was cleared, too
_FIGURES = r"\(\d[\d,]* tokens[^)]*\)"
Start = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    started = []

    def spawn(*arguments: str, term: str = "dumb") -> "pexpect.spawn[str]":
        monkeypatch.setenv("TERM", term)
        child = spawn_headrace(*arguments, folder=str(tmp_path))
        started.append(child)
        return child

    yield spawn
    for child in started:
        child.close(force=True)


def test_a_chat_on_a_dumb_terminal(start: Start, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny", context=1_000_000)
    store = SessionStore()
    session = store.create(model=str(model), sampling={"temperature": 0, "logit_bias": LETTERS, "max_tokens": 9})
    chat = start("--resume", session.id, "--context", "100000")
    chat.expect(PROMPT)
    printed = str(chat.before)
    for sent in ("first", "one\ntwo\nthree"):  # the second as if pasted
        chat.send(f"{sent}\n")
        chat.expect(r"[a-z]{9}\r\n\(9 tokens[^)]*, limit reached\)")
        printed += str(chat.before) + str(chat.after)
        chat.expect(PROMPT)
    chat.sendline("x" * 5000)
    chat.expect("is the most a terminal takes")
    chat.expect(PROMPT)
    chat.sendintr()
    chat.expect("Ctrl-C again quits")
    chat.expect(PROMPT)
    chat.sendeof()
    chat.expect(f"saved: headrace chat --resume {session.id}\r\n")
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0
    assert not re.search("[\x1b\b]|\r(?!\n)", printed)
    contents = [message.content for message in store.branch(session.id)]
    store.close()
    assert contents[::2] == ["first", "one\ntwo\nthree"]


def test_an_empty_chat_prints_no_resume_command(start: Start, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny")
    chat = start("-m", str(model))
    chat.expect(PROMPT)
    chat.sendeof()
    chat.expect(pexpect.EOF)
    assert "saved:" not in str(chat.before)


def test_an_endless_answer_is_stopped_and_resumed(start: Start, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny", context=1_000_000)
    store = SessionStore()
    session = store.create(model=str(model), sampling={"temperature": 0, "logit_bias": LETTERS})
    chat = start("--plain", "--resume", session.id, "--context", "100000", term="xterm")
    chat.expect(PROMPT)
    chat.sendline("go")
    chat.expect("go\r\n[a-z]{20}")
    chat.sendintr()
    chat.expect(r"tokens[^)]*stopped\)")
    chat.expect(PROMPT)
    chat.sendeof()
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0
    answer = store.branch(session.id)[-1]
    store.close()
    assert (answer.partial, answer.finish_reason) == (True, "cancelled")
    chat = start("--resume", "last")
    chat.expect(f"session {session.id}, 2 messages; the last ones:\r\n> go\r\n[a-z]{{20}}")
    chat.expect(PROMPT)
    chat.sendline("/quit")
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0


@pytest.mark.sampled
@pytest.mark.parametrize("no_color", ["", "1"])
def test_an_inline_chat_keeps_answers_in_the_scrollback(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_color: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    model = write_chat_model(tmp_path / "tiny", context=1_000_000)
    store = SessionStore()
    session = store.create(model=str(model), sampling={"temperature": 0, "logit_bias": LETTERS})
    asked = store.add(session.id, None, "user", "first")
    answer = store.begin_answer(session.id, asked.id, "tiny")
    store.grow(answer.id, "**bold** text")
    store.finish(answer.id, "stop")
    store.close()
    chat = start("--inline", "--resume", session.id, "--context", "100000", term="xterm-256color")
    chat.expect("> first\r\n" + ("bold text\r\n" if no_color else r"\x1b\[1mbold\x1b\[0m text\r\n"))
    chat.expect(_REDRAWN_PROMPT)
    chat.sendline("go")
    chat.expect(r"\x1b\[[0-9]+A\r\x1b\[J")  # the growing answer is drawn again
    assert "\x1b[?1049h" not in str(chat.before), "the whole screen is taken"
    chat.send("typed ahead\n")
    chat.sendintr()
    chat.expect(r"tokens[^)]*stopped\)")
    assert "typed" not in str(chat.before), "it would stand in the answer"
    chat.expect(_REDRAWN_PROMPT)
    chat.sendintr()
    chat.expect(r"tokens[^)]*stopped\)|Ctrl-C again quits")
    chat.expect(_REDRAWN_PROMPT)
    assert chat.getecho()
    chat.sendeof()
    chat.expect(f"saved: headrace chat --resume {session.id}\r\n")
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0
