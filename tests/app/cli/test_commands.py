"""Which command is meant where none is named, the short names, and what is said of a wrong one. In this process."""

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from click.shell_completion import get_completion_class

from headrace.app.cli import chat, commands, models, run
from headrace.app.cli.commands import cli, run_command_line

Call = tuple[str, dict[str, Any]]
Headrace = Callable[..., int]


class Stream(io.StringIO):
    """Standard input or output that is a terminal, or is not."""

    def __init__(self, text: str = "", *, terminal: bool) -> None:
        super().__init__(text)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch) -> Headrace:
    def headrace(*arguments: str, stdin: bool = True, stdout: bool = True) -> int:
        """The exit code; whether standard input and output are terminals."""
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        monkeypatch.setattr(sys, "stdin", Stream(terminal=stdin))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: stdout, raising=False)
        return run_command_line()

    return headrace


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Which command was run, and with which options."""
    made: list[Call] = []

    def note(name: str) -> Callable[..., None]:
        return lambda **options: made.append((name, {key: value for key, value in options.items() if value}))

    for name, command in {"chat": chat.chat, "run": run.run, "pull": models.pull, "list": models.list_models}.items():
        monkeypatch.setattr(command, "callback", note(name))
    monkeypatch.setattr(models.rm, "callback", note("rm"))
    return made


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ([], ("chat", {})),
        (["-m", "x"], ("chat", {"model": "x"})),
        (["-mx"], ("chat", {"model": "x"})),
        (["--model=x"], ("chat", {"model": "x"})),
        (["--resume", "last"], ("chat", {"resume": "last"})),
        (["-m", "x", "hi"], ("run", {"model": "x", "prompt": "hi"})),
        (["--json", "hi"], ("run", {"as_json": True, "prompt": "hi"})),
        (["pull", "x"], ("pull", {"name": "x"})),
        (["list", "--json"], ("list", {"as_json": True})),
        (["rm", "x", "--yes"], ("rm", {"name": "x", "yes": True})),
    ],
)
def test_what_is_meant_on_a_terminal(arguments: list[str], meant: Call, headrace: Headrace, calls: list[Call]) -> None:
    assert headrace(*arguments) == 0
    assert calls == [meant]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ([], ("run", {})),
        (["-"], ("run", {"prompt": "-"})),
        (["-m", "x"], ("run", {"model": "x"})),
        (["-m", "x", "and this?"], ("run", {"model": "x", "prompt": "and this?"})),
    ],
)
def test_what_is_meant_in_a_pipe(arguments: list[str], meant: Call, headrace: Headrace, calls: list[Call]) -> None:
    assert headrace(*arguments, stdin=False) == 0
    assert calls == [meant]


def test_with_nothing_to_read_and_nobody_to_look_there_is_the_help(
    headrace: Headrace, calls: list[Call], capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace(stdout=False) == 2
    assert "Commands:" in capsys.readouterr().out
    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["modles", "list"], "did you mean models?"),
        (["Why is the sky blue?"], "`headrace run PROMPT` answers a prompt"),
        (["--nonsense"], "`headrace --help` shows the options"),
    ],
)
def test_what_is_no_command_is_one_line_and_a_hint(
    arguments: list[str], words: str, headrace: Headrace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "No such" in said.err
    assert words in said.err
    assert len(said.err.splitlines()) == 2


def test_an_environment_that_means_nothing_stops_every_command(
    headrace: Headrace, calls: list[Call], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HEADRACE_EXACT", "HEADRACE_DEBUG"):
        monkeypatch.setenv(name, "maybe")
        assert headrace("run", "hi") == 2
        error = capsys.readouterr().err
        assert name in error
        assert "'maybe'" in error
        monkeypatch.delenv(name)
    monkeypatch.setenv("HEADRACE_THREAD", "2")
    assert headrace("run", "hi") == 0
    assert (
        capsys.readouterr().err == "headrace: HEADRACE_THREAD is not read by headrace; did you mean HEADRACE_THREADS?\n"
    )
    assert calls == [("run", {"prompt": "hi"})]


def completed(*words: str) -> list[str]:
    """What the shell is offered for the last of `words`."""
    kind = get_completion_class("bash")
    assert kind is not None
    offered = kind(cli, {}, commands.PROGRAM, "_HEADRACE_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [f"{item.type}:{item.value}" if item.type != "plain" else item.value for item in offered]


def test_the_shell_completes_commands_options_and_model_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    for name in ("my-own", "org--theirs"):
        entry = tmp_path / "data" / "models" / name
        entry.mkdir(parents=True)
    assert {"run", "chat", "pull", "completion"} <= set(completed(""))
    assert completed("mod") == ["models"]
    assert completed("run", "--temp") == ["--temperature"]
    for before in (["run", "-m"], ["chat", "--model"], ["-m"], ["models", "show"], ["pull"]):
        assert completed(*before, "my") == ["my-own"]
        assert completed(*before, "smol")[0] == "smollm2-135m"
    assert completed("run", "-m", "org/") == ["org/theirs"]
    assert completed("models", "rm", "") == ["my-own", "org/theirs"]
    assert completed("run", "-m", "./x") == ["file:./x"]
    assert completed("run", "-m", "zzz") == ["file:zzz"]
    monkeypatch.setenv("HEADRACE_HOME", "/dev/null")
    assert completed("run", "-m", "my") == ["file:my"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_every_shell(shell: str, headrace: Headrace, capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("completion", shell) == 0
    assert f"_HEADRACE_COMPLETE={shell}_complete" in capsys.readouterr().out
