"""`headrace batch` and `run --samples` as people run them: files, pipes, signals, exit codes. Tiny model."""

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.app.cli.batch import batch
from headrace.app.cli.run.command import run
from headrace.runtime.errors import HeadraceError, UsageError
from tests.support.commands import HEADRACE, ForkedProcess
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import IM_END, write_chat_model
from tests.test_docs import check, sections

LONG = {str(IM_END): -100}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "chat")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(batch, arguments, input=stdin, catch_exceptions=False, standalone_mode=False)


def results(text: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (text.read_text() if isinstance(text, Path) else text).splitlines()]


def test_an_invalid_line_is_an_error_and_the_others_are_answered(model: Path, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in", {"prompt": "a", "id": "x"}, "nonsense", {"prompt": "b", "max_token": 3}, {"prompt": "c"}
    )
    done = invoke(source, "-m", str(model), "-n", "4", "--in-order")
    said = results(done.stdout)
    assert done.return_value == 1
    assert [one["line"] for one in said] == [1, 2, 3, 4]
    assert [bool(one["error"]) for one in said] == [False, True, True, False]
    assert (said[0]["id"], said[0]["model"], said[0]["usage"]["completion_tokens"]) == ("x", model.name, 4)
    assert "4 lines: 2 answered, 2 failed" in done.stderr
    assert re.search(r"^line 3: .*'max_token'", done.stderr, flags=re.MULTILINE)
    assert re.search(r"^TTFT .* m?s +\d.* m?s$", done.stderr, flags=re.MULTILINE)


def test_a_batch_reads_standard_input_and_writes_standard_output(model: Path) -> None:
    done = invoke("-", "-m", str(model), "-n", "2", "-q", stdin='\ufeff{"prompt": "é"}\r\n\n{"prompt": "b"}')
    assert (done.return_value, done.stderr) == (0, "")
    assert {one["line"] for one in results(done.stdout)} == {1, 3}


def test_a_finished_batch_loads_no_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in", {"prompt": "a"})
    out = tmp_path / "out"
    arguments = (source, "-o", str(out), "-m", str(model), "-n", "2")
    assert invoke(*arguments).return_value == 0
    before = out.read_bytes()
    monkeypatch.setattr("headrace.models.loading.load.load_model", None)
    done = invoke(*arguments, "--json")
    summary = json.loads(done.stdout)
    assert (summary["kept"], summary["answered"], summary["left"], done.return_value) == (1, 0, 0, 0)
    assert out.read_bytes() == before
    assert invoke(write(tmp_path / "none"), "-m", str(model)).return_value == 0


def test_failed_and_new_lines_are_answered_on_resume(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    out = tmp_path / "out"
    arguments = (str(source), "-o", str(out), "-m", str(model), "-n", "2", "--in-order")
    write(source, {"prompt": "a"}, {"promt": "b"})
    assert invoke(*arguments).return_value == 1
    write(source, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    done = invoke(*arguments)
    assert "3 lines: 2 answered, 1 kept from before" in done.stderr
    assert [(one["line"], one["error"]) for one in results(out)] == [(1, None), (2, None), (3, None)]


def test_results_of_other_requests_are_refused(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in", {"prompt": "a"})
    out = tmp_path / "out"
    arguments = (source, "-o", str(out), "-m", str(model), "-q")
    invoke(*arguments, "-n", "2")
    before = out.read_bytes()
    for changed in (("-n", "3"), ("-n", "2", "-s", "short"), ("-n", "2", "--context", "99")):
        with pytest.raises(UsageError, match="out"):
            invoke(*arguments, *changed)
    write(tmp_path / "in", {"prompt": "b"})
    with pytest.raises(UsageError, match="out"):
        invoke(*arguments, "-n", "2")
    assert out.read_bytes() == before


def test_a_model_that_was_retrained_in_place_does_not_resume_its_batch(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "chat")
    source = write(tmp_path / "in", {"prompt": "a"}, {"prompt": "b"})
    out = str(tmp_path / "out")
    invoke(source, "-m", str(model), "-n", "2", "-o", out, "-q")
    first, _ = Path(out).read_text().splitlines()
    Path(out).write_text(first + "\n")
    shutil.rmtree(model)
    write_chat_model(model, seed=1)
    with pytest.raises(UsageError, match="all 1 results are of other requests") as failed:
        invoke(source, "-m", str(model), "-n", "2", "-o", out, "-q")
    assert "its files" in str(failed.value.hint)
    assert Path(out).read_text() == first + "\n"


def test_resuming_a_batch_answers_changed_lines_only(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    out = tmp_path / "out"
    arguments = (str(source), "-o", str(out), "-m", str(model), "-n", "2", "--in-order")
    write(source, *({"prompt": prompt, "id": prompt} for prompt in "abc"))
    invoke(*arguments)
    before = results(out)
    write(source, {"prompt": "a", "id": "a"}, {"prompt": "B", "id": "b"}, {"prompt": "c", "id": "c"})
    done = invoke(*arguments)
    assert "3 lines: 1 answered, 2 kept from before" in done.stderr
    assert str(out) + ".replaced" in done.stderr
    after = results(out)
    assert [one["id"] for one in after] == ["a", "b", "c"]
    assert [now == then for now, then in zip(after, before, strict=True)] == [True, False, True]
    assert results(tmp_path / "out.replaced") == [before[1]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("./nowhere",), "nowhere"),
        (("in", "--json"), "--json"),
        (("in", "--raw", "-s", "x"), "--raw"),
        (("in", "-t", "-1"), "--temperature"),
        (("in", "--stop", ""), "--stop"),
        (("in", "-o", "in"), "line 1"),
        (("in", "-m", "./nowhere"), "nowhere"),
    ],
)
def test_usage_errors_name_the_argument(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", {"prompt": "a"})
    with pytest.raises(HeadraceError, match=re.escape(said)):
        invoke(*arguments)


def test_a_line_may_name_the_model_that_runs_and_no_other_unless_that_was_given(model: Path, tmp_path: Path) -> None:
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    source = write(tmp_path / "in", {"custom_id": "q", "body": body})
    (said,) = results(invoke(source, "-m", str(model)).stdout)
    assert said["response"]["body"]["model"] == model.name
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_MODEL", str(model))
        done = invoke(source)
    assert done.return_value == 1
    assert "gpt-4o" in results(done.stdout)[0]["error"]["message"]


def test_results_and_summary_have_the_documented_keys(model: Path, tmp_path: Path) -> None:
    described = sections("batch.md")
    source = write(tmp_path / "in", {"prompt": "a"}, {"prompt": "b", "id": 1, "temperature": 2})
    out = tmp_path / "out"
    summary = json.loads(invoke(source, "-o", str(out), "-m", str(model), "-n", "3", "--json").stdout)
    check(described["The summary"], summary)
    always = {key: row for key, row in described["A result"].items() if key not in ("tool_calls", "unchecked_tools")}
    for one in results(out):
        check(always, one)
        assert one["timing"]["itl_ms"].keys() <= described["A result"]["timing"]
    assert set(described["A request"]) >= {
        "prompt",
        "messages",
        "id",
        "stop",
        "logit_bias",
        "seed",
        "thinking",
        "speculate",
        "raw",
    }


def test_a_batch_uses_the_models_recommendation_and_reports_it(warm: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in", {"prompt": "a"}, {"prompt": "b", "temperature": 0})
    out = str(tmp_path / "out")
    summary = json.loads(invoke(source, "-o", out, "-m", str(warm), "-n", "3", "--in-order", "--json").stdout)
    assert (summary["sampling"]["temperature"], summary["sampling_source"]) == (0.6, "model")
    one, two = results(Path(out))
    assert (one["sampling"]["temperature"], one["sampling"]["seed"], two["seed"]) == (0.6, one["seed"], None)
    line = {"prompt": "a", "temperature": 0.6, "top_k": 9, "seed": one["seed"]}
    done = invoke("-", "-m", str(warm), "-n", "3", stdin=json.dumps(line))
    assert results(done.stdout)[0]["text"] == one["text"]
    assert "temperature 0.6 · top_k 9" in done.stderr


def start(*arguments: str, **more: Any) -> "subprocess.Popen[bytes]":
    command = [*HEADRACE, "batch", *arguments]
    return ForkedProcess(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no results came"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_batch_resumes_without_answering_twice(number: signal.Signals, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "endless", context=1_000_000)
    lines = [{"prompt": str(index), "max_tokens": 3} for index in range(6)]
    endless = {"prompt": "x", "max_tokens": 900_000, "logit_bias": LONG}
    source = tmp_path / "in"
    out = tmp_path / "out"
    write(source, *lines, *[endless] * 3)
    arguments = (str(source), "-o", str(out), "-m", str(model), "--parallel", "3")
    process = start(*arguments)
    wait_for_lines(out, 4)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert b"left" in errors
        assert b"Traceback" not in errors
    kept = {one["line"] for one in results(out)}
    assert kept <= set(range(1, 7))
    with out.open("ab") as torn:
        torn.write(b'{"line": 9, "id": null, "requ')
    write(source, *lines)
    done = invoke(*arguments, "--in-order")
    assert done.return_value == 0
    assert f"{len(kept)} kept from before" in done.stderr
    assert [one["line"] for one in results(out)] == list(range(1, 7))


def test_a_closed_pipe_ends_the_batch_silently(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in", *[{"prompt": str(index), "max_tokens": 50} for index in range(40)])
    process = start(source, "-m", str(model), "-q", "--parallel", "2")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait(PATIENCE_S)) == (b"", 0)
    process.stderr.close()


def sampled(*arguments: str) -> Result:
    return CliRunner().invoke(run, arguments, input="", catch_exceptions=False, standalone_mode=False)


def test_samples_are_answers_of_successive_seeds(model: Path) -> None:
    asked = ("hi", "-m", str(model), "-n", "8", "-t", "1.5", "--seed", "5")
    found = json.loads(sampled(*asked, "--samples", "3", "--json").stdout)
    assert [one["seed"] for one in found["samples"]] == [5, 6, 7]
    assert len({one["text"] for one in found["samples"]}) == 3
    assert found["samples"][1]["text"] == json.loads(sampled(*asked[:-1], "6", "--json").stdout)["text"]
    assert found["completion_tokens"] == sum(one["completion_tokens"] for one in found["samples"])
    assert found.keys() == sections("run-json.md")["With --samples"].keys()
    shown = sampled(*asked, "--samples", "2").stdout
    assert re.findall(r"^--- .*$", shown, flags=re.MULTILINE) == ["--- 1 of 2, seed 5 ---", "--- 2 of 2, seed 6 ---"]


@pytest.fixture
def warm(model: Path) -> Iterator[Path]:
    """The model, with a recommendation of its own."""
    file = model / "generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "temperature": 0.6, "top_k": 9}))
    yield model
    file.write_text(before)


def test_samples_follow_the_model_and_greedy_decoding_is_refused(model: Path, warm: Path) -> None:
    found = json.loads(sampled("hi", "-m", str(warm), "-n", "8", "--samples", "2", "--json").stdout)
    assert (found["sampling"]["temperature"], found["sampling"]["top_k"], found["sampling_source"]) == (0.6, 9, "model")
    for recommended in ({}, {"do_sample": False}):
        (model / "generation_config.json").write_text(json.dumps(recommended))
        with pytest.raises(UsageError, match="greedy"):
            sampled("hi", "-m", str(model), "--samples", "2")
    with pytest.raises(UsageError, match="greedy"):
        sampled("hi", "-m", str(model), "-t", "0", "--samples", "2")
    with pytest.raises(UsageError, match="--samples"):
        sampled("hi", "-m", str(model), "--samples", "2", "--save")
    with pytest.raises(HeadraceError, match="context"):
        sampled("x" * 9000, "-m", str(model), "-t", "1", "--samples", "2")
