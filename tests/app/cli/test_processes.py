"""Every command once in an interpreter of its own. Other tests fork a process that has imported the modules."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from headrace.app.cli.commands import cli
from headrace.models.text.tokenizers_library import load_tokenizer
from tests.support.commands import HEADRACE, headrace
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import write_chat_model

COMMANDS = {
    "batch": ("batch", "REQUESTS", "-m", "MODEL"),
    "bench": ("bench", "-m", "MODEL", "-p", "4", "-n", "4", "-r", "1"),
    "chat": ("chat", "--help"),
    "completion": ("completion", "bash"),
    "doctor": ("doctor",),
    "explain": ("explain", "mbu"),
    "fit": ("fit",),
    "launch": ("launch", "--help"),
    "list": ("list",),
    "models": ("models", "list"),
    "paths": ("paths",),
    "predict": ("predict", "-m", "MODEL"),
    "pull": ("pull", "--help"),
    "quantize": ("quantize", "--help"),
    "rm": ("rm", "--help"),
    "run": ("run", "hi", "-m", "MODEL", "-n", "2"),
    "serve": ("serve", "--help"),
    "show": ("show", "MODEL"),
    "sessions": ("sessions", "list", "--json"),
    "tokenize": ("tokenize", "hi", "-m", "MODEL"),
    "top": ("top", "--help"),
    "verify": ("verify", "-m", "MODEL", "--tokens", "4", "--sequences", "2"),
}


def test_every_command_has_a_row() -> None:
    assert set(COMMANDS) == set(cli.list_commands(click.Context(cli)))


@pytest.mark.sampled
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_in_a_new_interpreter(command: str, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny")
    (requests := tmp_path / "requests.jsonl").write_text('{"prompt": "hi", "max_tokens": 2}\n')
    given = {"MODEL": str(model), "REQUESTS": str(requests)}
    done = subprocess.run(
        [*HEADRACE, *(given.get(argument, argument) for argument in COMMANDS[command])],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S,
        env={**os.environ, "HEADRACE_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr


def test_a_forked_command_has_its_own_environment_folder_and_streams(tmp_path: Path) -> None:
    first = headrace("paths", home=tmp_path / "first")
    second = headrace("paths", home=tmp_path / "second")
    assert (first.returncode, first.stderr) == (second.returncode, second.stderr) == (0, "")
    assert str(tmp_path / "first") in first.stdout
    assert str(tmp_path / "second") in second.stdout
    assert headrace("nonsense", home=tmp_path).returncode == 2


@pytest.mark.skipif(sys.platform != "linux", reason="commands are forked on Linux alone")
def test_commands_are_forked_after_a_tokenizer_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_tokenizer(write_chat_model(tmp_path / "tiny") / "tokenizer.json")
    monkeypatch.setattr(
        "tests.support.commands.subprocess.run", lambda *_, **__: pytest.fail("an interpreter was started")
    )
    assert headrace("paths", home=tmp_path).returncode == 0
