"""The default command, the short names, and the error of a wrong one. In this process."""

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pexpect
import pytest
from click.shell_completion import ShellComplete

from headrace.app.bench.measure.workloads import load_workloads
from headrace.app.cli import chat, commands, completion, models
from headrace.app.cli.commands import cli, run_command_line
from headrace.app.cli.run import command as run
from headrace.app.config.settings import Settings
from headrace.app.predict.chip_names import chip_targets
from headrace.app.sessions.store import SessionStore, database_path
from headrace.runtime.errors import UsageError
from tests.support.ollama import add_to_ollama
from tests.support.patience import PATIENCE_S
from tests.test_readme import subcommands

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
    """The commands that ran, each with its options."""
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
        (["-m", "x", "hi"], ("run", {"model": "x", "words": ("hi",)})),
        (["--json", "hi"], ("run", {"as_json": True, "words": ("hi",)})),
        (["run"], ("chat", {})),
        (["run", "-m", "x"], ("chat", {"model": "x"})),
        (["run", "--json"], ("run", {"as_json": True})),
        (["run", "hi"], ("run", {"words": ("hi",)})),
        (["Why is the sky blue?"], ("run", {"words": ("Why is the sky blue?",)})),
        (["List three rivers", "-n", "9"], ("run", {"words": ("List three rivers",), "max_tokens": 9})),
        (["run", "-"], ("run", {"words": ("-",)})),
        (["run", "Why", "so", "blue?", "-n", "9"], ("run", {"words": ("Why", "so", "blue?"), "max_tokens": 9})),
        (
            ["-t", "0.5", "--seed", "1", "-s", "Be brief."],
            ("chat", {"temperature": 0.5, "seed": 1, "system": "Be brief."}),
        ),
        (["--temp", "0.5"], ("chat", {"temperature": 0.5})),
        (["chat", "--ctx-size", "512"], ("chat", {"context": 512})),
        (["list", "qwen"], ("list", {"filter": "qwen"})),
        (["pull", "x"], ("pull", {"name": "x"})),
        (["list", "--json"], ("list", {"as_json": True})),
        (["rm", "x", "--yes"], ("rm", {"name": "x", "yes": True})),
    ],
)
def test_command_lines_on_a_terminal_run_the_expected_command(
    arguments: list[str], meant: Call, headrace: Headrace, calls: list[Call]
) -> None:
    assert headrace(*arguments) == 0
    assert calls == [meant]


def test_a_wrong_option_is_named_beside_one_that_only_the_chat_takes(
    headrace: Headrace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace("--plain", "--bogus") == 2
    assert "--bogus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ([], ("run", {})),
        (["-"], ("run", {"words": ("-",)})),
        (["-m", "x"], ("run", {"model": "x"})),
        (["run"], ("run", {})),
        (["-m", "x", "and this?"], ("run", {"model": "x", "words": ("and this?",)})),
        (["Why is the sky blue?"], ("run", {"words": ("Why is the sky blue?",)})),
    ],
)
def test_command_lines_in_a_pipe_run_the_expected_command(
    arguments: list[str], meant: Call, headrace: Headrace, calls: list[Call]
) -> None:
    assert headrace(*arguments, stdin=False) == 0
    assert calls == [meant]


def test_options_of_llama_cpp_are_accepted(headrace: Headrace, calls: list[Call]) -> None:
    arguments = ("--temp", "0.5", "--ctx-size", "512", "--repeat-penalty=1.1", "--n-predict", "9")
    assert headrace("run", "hi", *arguments) == 0
    given = {"temperature": 0.5, "context": 512, "repetition_penalty": 1.1, "max_tokens": 9}
    assert calls == [("run", {"words": ("hi",), **given})]


def test_options_of_the_chat_are_stored_in_its_session(tmp_path: Path) -> None:
    none = dict.fromkeys(chat.ChatArguments.__struct_fields__)
    store = SessionStore(tmp_path / "sessions.db")
    given = chat.ChatArguments(**{**none, "model": "m", "system": "Be brief.", "temperature": 0.5, "seed": 7})
    made = chat._session(store, given, Settings())
    assert (made.model, made.system, made.sampling) == ("m", "Be brief.", {"temperature": 0.5, "seed": 7})
    store.add(made.id, None, "user", "hi")
    again = chat._session(store, chat.ChatArguments(**{**none, "resume": "last", "system": "", "seed": 8}), Settings())
    assert (again.id, again.system, again.sampling) == (made.id, "", {"temperature": 0.5, "seed": 8})
    store.close()
    with pytest.raises(UsageError, match="--temperature"):
        _ = chat.ChatArguments(**{**none, "temperature": -1.0}).sampling


def test_a_refused_chat_changes_no_session(headrace: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")  # --plain changes it
    monkeypatch.setattr(sys, "stderr", Stream(terminal=True))
    with closing(SessionStore(database_path())) as store:
        made = store.create(model="m", system="Be brief.", sampling={})
        store.add(made.id, None, "user", "hi")
        before = store.session(made.id)
        for given in (["--resume", "last", "-m", "other", "-s", "Be long."], ["-m", "other"]):
            assert headrace("chat", "--plain", "--connect", "ftp://server", *given) != 0
            assert headrace("chat", "--plain", "--seed", "-1", *given) != 0
        assert store.session(made.id) == before
        assert store.find("last").id == made.id


def test_a_chat_with_a_server_asks_for_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "agree_to_copy", lambda *_, **__: pytest.fail("asked"))
    none = dict.fromkeys(chat.ChatArguments.__struct_fields__)
    with closing(SessionStore(tmp_path / "sessions.db")) as store:
        made = chat._session(store, chat.ChatArguments(**{**none, "connect": "http://server"}), Settings())
        store.add(made.id, None, "user", "hi")
        again = chat.ChatArguments(**{**none, "connect": "http://server", "resume": "last"})
        assert chat._session(store, again, Settings()).id == made.id


def test_a_chat_with_a_server_asks_for_no_copy_of_a_draft(
    headrace: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stderr", Stream(terminal=True))
    asked: list[str | None] = []
    monkeypatch.setattr(chat, "agree_to_copy", lambda name, **_: asked.append(name))
    monkeypatch.setattr(chat, "_line_chat", lambda *_: 0)
    assert headrace("chat", "--inline", "--connect", "http://server", "--draft", "small.gguf") == 0
    assert asked == []
    assert headrace("chat", "--inline", "--draft", "small.gguf") == 0
    assert "small.gguf" in asked


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["help"], "Usage: headrace [OPTIONS] COMMAND"),
        (["help", "models"], "Usage: headrace models [OPTIONS] COMMAND"),
        (["help", "models", "show"], "Usage: headrace models show"),
        (["version"], "headrace "),
    ],
)
def test_the_words_help_and_version_work_like_the_flags(
    arguments: list[str], shown: str, headrace: Headrace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace(*arguments) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_without_terminal_and_input_help_is_printed(
    headrace: Headrace, calls: list[Call], capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace(stdout=False) == 2
    assert "Commands:" in capsys.readouterr().out
    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["modles", "list"], "did you mean models?"),
        (["download", "qwen3-4b"], "did you mean pull?"),
        (["info"], "did you mean show?"),
        (["serach", "words"], "did you mean sessions search?"),
        (["Hello"], "`headrace run PROMPT` answers a prompt"),
        (["--nonsense"], "`headrace --help` shows the options"),
    ],
)
def test_an_unknown_command_is_one_line_and_a_hint(
    arguments: list[str], words: str, headrace: Headrace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "no such" in said.err
    assert words in said.err
    assert len(said.err.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bench -o json", "`--json` prints"),
        ("bench -o csv", "`--json` prints"),
        ("bench --save x.json", "`--json > FILE`"),
        ("models info smollm2-135m", "did you mean headrace models show?"),
        ("models remove smollm2-135m", "did you mean headrace models rm?"),
        ("models LIST", "did you mean headrace models list?"),
        ("predict qwen3-4b", "a model goes after -m: headrace predict -m qwen3-4b"),
        ("bench Qwen3-4B", "a model goes after -m: headrace bench -m Qwen3-4B"),
        ("predict org/name", "a model goes after -m: headrace predict -m org/name"),
        ("bench ./m.gguf", "a model goes after -m: headrace bench -m ./m.gguf"),
        ("chat hello", "`headrace chat --help` shows the options"),
        ("chat notes/x.md", "`headrace chat --help` shows the options"),
        ("bench ./notes", "`headrace bench --help` shows the options"),
        ("batch a.jsonl ./b.jsonl", "`headrace batch --help` shows the options"),
        ("batch a.jsonl org/name", "`headrace batch --help` shows the options"),
        ("fit qwen3-4b", "`headrace fit --help` shows the options"),
        ("pull --quantize four", "`headrace pull --help` shows the options"),
        ("sessions delete last", "did you mean headrace sessions rm?"),
        ("sessions export last --json", "`--format json`"),
        ("run --group-size 64 hi", "`headrace pull NAME --quantize 4`"),
        ("predict --acceptance 0.7", "`headrace bench --speculate`"),
        ("verify --server", "`run --json`"),
    ],
)
def test_a_removed_command_or_option_has_a_hint(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments.split()])
    assert run_command_line() == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 2


def test_an_invalid_environment_variable_stops_every_command(
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
    assert calls == [("run", {"words": ("hi",)})]


def completed(*words: str, kind: type[ShellComplete] = completion.Bash) -> list[str]:
    """Return the shell's completions of the last of `words`."""
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


def test_the_shell_completes_models_of_other_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "headrace"))
    monkeypatch.setenv("HOME", str(tmp_path))
    add_to_ollama(tmp_path, "registry.ollama.ai/library/tiny/1b")
    assert completed("run", "-m", "ti") == ["tiny:1b"]
    assert completed("models", "rm", "ti") == []


def test_file_names_are_left_to_the_shell() -> None:
    for before in (
        ["run"], ["run", "-f"], ["batch"], ["batch", "-o"], ["bench", "--report"], ["bench", "--text"],
        ["bench", "compare"], ["bench", "--llama-model"], ["sessions", "export", "last", "-o"],
    ):  # fmt: skip
        assert completed(*before, "no") == ["file:no"]
    assert completed("run", "-f", "a", "-f", "") == ["file:"]


def test_values_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert completed("run", "@no") == ["@notes.txt"]
    assert completed("run", f"@{tmp_path.parent}/{tmp_path.name[:-1]}")[0].startswith(f"@{tmp_path.parent}/")
    assert completed("run", "@missing/") == []
    assert completed("run", "--kv", "q") == ["q8", "q4"]
    assert completed("--kv", "k") == ["k8v4"]
    assert completed("bench", "--kv", "f16,q") == ["f16,q8", "f16,q4"]
    assert "m4max" in completed("predict", "--chip", "m4")
    assert completed("fit", "--chip", "rtx4090")[0] == "rtx4090"
    assert all(chip_targets(name) for name in completed("predict", "--chip", ""))
    assert completed("predict", "-m", "smollm2-135") == ["smollm2-135m"]
    assert completed("bench", "--workload", "") == list(load_workloads())
    assert completed("sessions", "show", "") == []
    assert list(tmp_path.iterdir()) == [tmp_path / "notes.txt"]  # a Tab creates nothing
    store = SessionStore()
    kept = store.rename(store.create().id, "two\nlines")
    store.add(kept.id, None, "user", "hi")
    store.close()
    for before in (["sessions", "show"], ["sessions", "rm"], ["run", "--resume"], ["chat", "--resume"]):
        assert completed(*before, "") == ["last", kept.id]
        assert completed(*before, kept.id[:4]) == [kept.id]


def test_no_completion_imports_mlx() -> None:
    script = """
import inspect, sys
from headrace.app.cli import completion

def is_completer(value):
    return inspect.isfunction(value) and list(inspect.signature(value).parameters)[-1:] == ["incomplete"]

completers = dict(inspect.getmembers(completion, is_completer))
for complete in completers.values():
    complete(None, None, "")
assert {"model_names", "session_ids", "chip_names"} <= set(completers)
assert not {"mlx", "numpy", "textual"} & set(sys.modules), list(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_words_are_replaced_as_the_shell_splits_them() -> None:
    assert completed("run", "--kv", "=", "k8") == ["k8v4"]
    assert completed("run", "@", str(Path(__file__).parent)[:-1])[0].startswith("@/")
    for kind in (completion.Zsh, completion.Fish):
        assert completed("run", "--kv=k8", kind=kind) == ["--kv=k8v4"]
        assert completed("run", "--kv", "k8", kind=kind) == ["k8v4"]


@pytest.mark.parametrize(
    ("shell", "arguments", "setup"),
    [
        ("bash", ["--norc", "--noprofile", "-i"], 'eval "$({0} completion bash)"'),
        ("zsh", ["-f", "-i"], 'eval "$({0} completion zsh)"'),  # without compinit
        ("fish", ["--no-config", "-i"], "{0} completion fish | source"),
    ],
)
def test_a_real_shell_completes(
    shell: str, arguments: list[str], setup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Path(sys.executable).with_name("headrace")
    if shutil.which(shell) is None or not program.exists():
        pytest.skip(f"needs {shell} and the installed command")
    (tmp_path / "requests-of-today.jsonl").touch()
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    add_to_ollama(tmp_path, "registry.ollama.ai/library/tuned/3b-chat")
    for name, value in {"HEADRACE_HOME": tmp_path / "home", "HOME": tmp_path, "TERM": "xterm"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    child = pexpect.spawn(
        shell, arguments, encoding="utf-8", timeout=PATIENCE_S, cwd=str(tmp_path), dimensions=(30, 120)
    )
    child.sendline(f"{setup.format(program.name)}; echo setup-{{done,}}")
    child.expect("setup-done")
    typed_words = {
        "batch req": "uests-of-today.jsonl",
        "run --kv k8": "v4",
        "run @req": "uests-of",
        "run -m tuned:3": "b-chat",
        "run --model=tuned:": "3b-chat",
    }
    for typed, expected in typed_words.items():
        child.send(f"headrace {typed}\t")
        child.expect(expected)
        child.send("\x15")
    child.close(force=True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_every_shell(shell: str, headrace: Headrace, capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("completion", shell) == 0
    assert f"_HEADRACE_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_a_python_for_intel_macs_is_one_line_before_mlx_is_imported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    monkeypatch.setattr(sys, "argv", ["headrace", "run", "hi"])
    assert run_command_line() == 1
    assert "arm64" in capfd.readouterr().err
    monkeypatch.setattr(sys, "argv", ["headrace", "doctor", "--help"])
    assert run_command_line() == 0


def test_a_system_without_another_thread_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(cli, "main", fail)
    assert run_command_line() == 1
    assert "ulimit -u" in capsys.readouterr().err


def test_metavars_of_all_options_have_one_form() -> None:
    """A word in capitals, or the choices; a list has a comma and dots behind it."""
    form = re.compile(r"[\w.-]+(=[A-Z]+)?(\|[\w.-]+)*(,\.\.\.)?")
    for command in subcommands(cli):
        for option in command.params:
            if isinstance(option, click.Option) and not option.is_flag and option.nargs == 1 and not option.hidden:
                name = option.make_metavar(click.Context(command))
                assert form.fullmatch(name), (command.name, option.opts, name)


def test_top_needs_a_terminal_and_a_server(headrace: Headrace, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    address = "http://127.0.0.1:9"  # nothing answers there
    monkeypatch.setenv("TERM", "xterm")
    assert headrace("top", address) == 2  # standard error is no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert headrace("top", address) == 1
    assert "is `headrace serve` running there?" in capsys.readouterr().err
