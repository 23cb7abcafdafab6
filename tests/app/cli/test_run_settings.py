"""`headrace run` with settings, files, and conversations that are kept and gone on with. Tiny model, in-process."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result

from headrace.app.cli.run.command import run
from headrace.app.cli.run.prompt import read_prompt
from headrace.app.sessions.store import SessionStore
from headrace.runtime import ops
from headrace.runtime.errors import ContextLimitError, SessionError, UsageError
from headrace.runtime.ops import native
from tests.support.tiny_chat import IM_END, write_chat_model

Ask = Callable[..., dict[str, Any]]
TALKS = ("--logit-bias", f"{IM_END}=-100")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "chat", context=1024)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HEADRACE_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home" / "config").mkdir(parents=True)
    return tmp_path / "home"


def invoke(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(run, [*arguments, *TALKS], input=stdin, catch_exceptions=False, standalone_mode=False)


@pytest.fixture
def ask(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    assert home.is_dir()
    monkeypatch.setenv("HEADRACE_MODEL", str(model))

    def ask(*arguments: str, stdin: str = "") -> dict[str, Any]:
        answer = json.loads(invoke(*arguments, "--json", stdin=stdin).stdout)
        assert isinstance(answer, dict)
        return answer

    return ask


def write_settings(home: Path, text: str) -> None:
    (home / "config" / "settings.toml").write_text(text)


def test_settings_are_defaults_of_options(ask: Ask, home: Path, model: Path) -> None:
    plain = ask("hi", "-n", "2")
    write_settings(
        home, '[chat]\nmodel = "nowhere"\nsystem = "Be brief."\n[sampling]\nmax_tokens = 3\nseed = 7\ntop_k = 5'
    )
    answer = ask("hi")
    assert (answer["completion_tokens"], answer["sampling"]["seed"], answer["sampling"]["top_k"]) == (3, 7, 5)
    assert (answer["sampling"]["temperature"], answer["sampling_source"]) == (0, "default")
    assert answer["prompt_tokens"] == plain["prompt_tokens"] + len("system\nBe brief.\n") + 2
    other = ask("hi", "-n", "4", "--seed", "8", "-s", "", "-m", str(model))
    assert (other["completion_tokens"], other["sampling"]["seed"], other["sampling"]["top_k"]) == (4, 8, 5)
    assert other["prompt_tokens"] == plain["prompt_tokens"]
    assert ask("hi", "-n", "2", "--raw")["prompt_tokens"] == 2  # no place for the settings' system prompt
    write_settings(home, "[chat]\ncontext = 64")
    assert ask("hi")["ended_by"] == "context_limit"


def test_the_models_name_comes_from_the_settings_last(home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_settings(home, f"[chat]\nmodel = '{model}'")
    assert invoke("hi", "-n", "1").exit_code == 0
    for given in ([], ["-m", "./nowhere"]):
        monkeypatch.setenv("HEADRACE_MODEL", "./elsewhere")
        with pytest.raises(Exception, match="nowhere" if given else "elsewhere"):
            invoke("hi", *given)


def test_how_kv_are_stored_comes_from_the_command_line_or_the_settings(
    ask: Ask, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ops.select().kv_format(mx.float32).name
    monkeypatch.setattr(ops.select(), "supports_packed", lambda _head_dim: False)
    assert ask("hi", "-n", "1")["kv_format"] == usual
    with pytest.raises(UsageError, match="q8"):
        ask("hi", "--kv", "q8")
    write_settings(home, "[chat]\nkv = 'q4'")
    with pytest.raises(UsageError, match="q4"):
        ask("hi")
    assert ask("hi", "-n", "1", "--kv", "auto")["kv_format"] == usual


@pytest.mark.skipif(not ops.select().supports_packed(32), reason="needs operations that read packed K/V")
def test_packed_kv_have_their_bytes_and_answer(ask: Ask) -> None:
    usual = ask("hi", "-n", "8", "-t", "0")
    packed = ask("hi", "-n", "8", "-t", "0", "--kv", "q8")
    assert packed["kv_format"] == "q8"
    assert packed["kv_bytes_per_token"] * 32 == usual["kv_bytes_per_token"] * 17
    assert packed["completion_tokens"] == 8


def test_files_go_before_the_prompt_and_piped_text_names_none(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the mill")
    (tmp_path / "more.txt").write_text("the stream")
    plain = ask("What? @notes.txt", "-n", "1", "--raw")["prompt_tokens"]
    assert plain == len("What? @notes.txt")
    once = ask("What? @notes.txt", "-n", "1")["prompt_tokens"]
    assert once > ask("What? @notes_txt", "-n", "1")["prompt_tokens"]
    assert ask("What? @notes.txt", "-f", "notes.txt", "-n", "1")["prompt_tokens"] == once  # the same file
    assert ask("What? @notes.txt", "-f", "more.txt", "-n", "1")["prompt_tokens"] > once
    piped = ask("-", "-n", "1", stdin="What? @notes.txt")["prompt_tokens"]
    assert piped < once
    assert ask("-f", "notes.txt", "-n", "1")["prompt_tokens"] > 0
    with pytest.raises(UsageError, match=r"missing\.txt"):
        invoke("hi", "-f", "missing.txt")


@pytest.mark.parametrize(("given", "listed"), [("notes", True), ("notes/*.txt", True), ("notes/a.txt", False)])
def test_attached_files_are_listed_unless_they_were_named(ask: Ask, tmp_path: Path, given: str, listed: bool) -> None:
    del ask  # it chooses the model
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("the mill")
    assert ("attached: notes/a.txt" in invoke("hi", "-f", given, "-n", "1").stderr) == listed


def test_a_dash_as_prompt_reads_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        buffer = io.BytesIO(b"typed\n")

        @staticmethod
        def isatty() -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    assert read_prompt("-") == ("typed", ())
    assert read_prompt("said") == ("said", ())


def test_an_answer_is_kept_where_that_is_asked_for(ask: Ask, home: Path) -> None:
    assert ask("one", "-n", "2")["session"] is None
    assert not (home / "data" / "sessions.db").exists()
    kept = ask("two", "-n", "2", "--save", "-s", "Be brief.", "-t", "0.5", "--seed", "1")
    write_settings(home, "[run]\nsave = true")
    assert ask("three", "-n", "2", "--no-save")["session"] is None
    assert ask("four", "-n", "2")["session"] is not None
    store = SessionStore()
    assert [entry.session.title for entry in store.sessions()] == ["four", "two"]
    session = store.session(kept["session"])
    assert (session.system, session.sampling) == ("Be brief.", {})
    assert kept["sampling_source"] == "options"
    question, said = store.branch(session.id)
    assert (question.content, said.content, said.partial) == ("two", kept["text"], True)  # a token limit cut it short
    assert said.metrics is not None
    assert said.metrics.completion_tokens == 2
    store.close()


def test_the_last_conversation_is_continued(ask: Ask, home: Path) -> None:
    write_settings(home, "[sampling]\nmax_tokens = 4")
    first = ask("one", "-n", "2", "--save", "-s", "Be brief.")
    second = ask("two", "-c", "-n", "3")
    assert second["session"] == first["session"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + len("two")
    third = ask("three", "--resume", first["session"][:4], "--no-save")
    assert (third["session"], third["completion_tokens"]) == (None, 4)  # -n counted for its call
    store = SessionStore()
    assert [message.content for message in store.branch(first["session"])] == [
        "one",
        first["text"],
        "two",
        second["text"],
    ]
    assert len(store.sessions()) == 1
    store.close()
    with pytest.raises(ContextLimitError) as raised:
        invoke("x" * 2000, "-c")
    assert raised.value.hint == "begin a new conversation"


@pytest.mark.skipif(not native.status().available, reason="only the kernels' K/V are in blocks")
def test_a_continued_conversation_uses_its_stored_kv(ask: Ask, home: Path) -> None:
    first = ask("one", "-n", "40", "-t", "0", "--save")
    second = ask("two", "-c", "-n", "8", "-t", "0", "--no-save")
    assert (first["cached_tokens"], ask("one", "-n", "1")["cached_tokens"]) == (0, 0)
    assert second["cached_tokens"] >= first["prompt_tokens"]
    kept = sorted((home / "cache" / "chats").iterdir())
    ask("other", "-n", "1")
    assert sorted((home / "cache" / "chats").iterdir()) == kept
    for file in kept:
        file.unlink()
    again = ask("two", "-c", "-n", "8", "-t", "0")
    assert (again["cached_tokens"], again["tokens"]) == (0, second["tokens"])


def test_nothing_is_stored_before_the_answer_begins(ask: Ask) -> None:
    with pytest.raises(ContextLimitError) as raised:
        ask("x" * 2000, "--save")
    assert raised.value.hint == "shorten the prompt"
    with pytest.raises(SessionError, match="conversation"):
        ask("hi", "-c")
    store = SessionStore()
    assert store.sessions() == []
    store.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--raw", "-c"], "--raw"),
        (["--raw", "--save"], "--raw"),
        (["--raw", "-f", "x"], "--raw"),
        (["-c", "--resume", "x"], "--resume"),
        (["-q", "--stats"], "--quiet"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        invoke("hi", *options)


def test_the_closing_line_warns_of_slow_kernels_unless_quiet(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is for terminals: standard error is made one."""
    monkeypatch.setattr(
        "click.testing._NamedTextIOWrapper.isatty", lambda stream: stream.name == "<stderr>", raising=False
    )
    monkeypatch.setenv("NO_COLOR", "1")
    ask("hi", "-n", "1")
    assert "see doctor" not in invoke("hi", "-n", "2").stderr
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    (line,) = invoke("hi", "-n", "2").stderr.splitlines()
    assert line.startswith("2 tokens · ")
    assert "see doctor" in line
    assert len(line) <= 80
    assert invoke("hi", "-n", "2", "-q").stderr == ""
