"""The public Python API: locked names and signatures, documented examples, imports."""

import inspect
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import headrace
from headrace import CancelFlag, Completed, HeadraceError, Model, SamplingParams, StepRecord, TextChunk, load, predict
from headrace.runtime.errors import ContextLimitError, EngineError, UsageError
from tests.conftest import TEST_HOME
from tests.patience import PATIENCE_S
from tests.test_house import ROOT
from tests.tiny_chat import IM_END, write_chat_model

QUESTION = [{"role": "user", "content": "hi"}]
NEVER_ENDING = SamplingParams(logit_bias={IM_END: -100.0})

# Names that programs rely on. Adding is free; renaming or removing breaks programs.
SIGNATURES = {
    "load": ["name", "context", "quantize", "group_size", "kv", "force", "progress"],
    "predict": ["name", "chip", "memory_gb", "context", "batch"],
    "Model.chat": ["self", "messages", "max_tokens", "sampling", "stop", "thinking", "cancel"],
    "Model.complete": ["self", "text", "max_tokens", "sampling", "stop", "cancel"],
    "Model.count_tokens": ["self", "text"],
}
NAMES = {
    *("CancelFlag", "Completed", "HeadraceError", "Model", "Prediction", "SamplingParams", "StepRecord", "Summary"),
    *("TextChunk", "load", "predict"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def model(directory: Path) -> Model:
    return load(str(directory))


def test_the_names_are_locked() -> None:
    assert set(headrace.__all__) == NAMES
    assert set(dir(headrace)) >= NAMES
    for name in NAMES:
        assert getattr(headrace, name).__doc__
    with pytest.raises(AttributeError, match="unload"):
        _ = headrace.unload  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signatures_are_locked(name: str) -> None:
    found = headrace
    for part in name.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters.values()  # type: ignore[arg-type]
    assert [parameter.name for parameter in parameters] == SIGNATURES[name]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) == 1 + ("self" in positional)


def test_type_checkers_see_the_same_names() -> None:
    source = inspect.getsource(headrace)
    for module, names in re.findall(r"^    from headrace\.([\w.]+) import (.+)$", source, flags=re.MULTILINE):
        assert set(names.split(", ")) == set(headrace._HOMES[module])
    assert {name for names in headrace._HOMES.values() for name in names} == NAMES


def test_importing_it_imports_nothing_else() -> None:
    code = (
        "import sys; old = set(sys.modules); import headrace, json; print(json.dumps(sorted(set(sys.modules) - old)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = {name for name in json.loads(done.stdout) if not name.startswith("json")}
    assert not {"mlx", "textual", "click", "numpy"} & {name.partition(".")[0] for name in ours}
    assert {name for name in ours if name.startswith("headrace")} == {"headrace"}


def example(page: str = "README.md") -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_readme_example_runs(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import redirect_stdout
    from io import StringIO

    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    code = example()
    assert len(code.splitlines()) <= 12
    said = StringIO()
    with redirect_stdout(said):
        exec(compile(code.replace('"smollm2-135m"', repr(str(directory))), "README.md", "exec"), {})
    first, *_, last = said.getvalue().splitlines()
    assert re.fullmatch(r"\d+ tokens, [\d.]+ tok/s at most.*", first)
    assert re.match(r" (stop|length) ", last)


@pytest.mark.real
@pytest.mark.parametrize(("page", "word"), [("README.md", "sky"), ("docs/python.md", "tok/s")])
def test_examples_run_as_they_stand(default_model: Path, page: str, word: str) -> None:
    assert default_model.is_dir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example(page)],
        env={**os.environ, "HEADRACE_HOME": str(TEST_HOME)}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert word in done.stdout


def test_an_answer_is_text_with_its_step_records(model: Model) -> None:
    *chunks, end = model.chat(QUESTION, max_tokens=7, sampling=NEVER_ENDING)
    assert isinstance(end, Completed)
    steps = [chunk.step for chunk in chunks if isinstance(chunk, TextChunk)]
    assert sum(len(step.tokens) for step in steps) == end.finished.summary.completion_tokens == 7
    records = [step.record for step in steps]
    assert all(isinstance(record, StepRecord) for record in records)
    assert [record.index for record in records] == list(range(end.finished.summary.steps))
    assert records[0].context == model.count_tokens(QUESTION)
    assert end.finished.reason == "length"


def test_a_text_alone_is_one_user_message_and_complete_uses_no_template(model: Model) -> None:
    def text(parts: headrace.app.api.Answer) -> str:
        return "".join(part.text for part in parts)

    told = {"max_tokens": 6, "sampling": NEVER_ENDING}
    assert text(model.chat("hi", **told)) == text(model.chat(QUESTION, **told))  # type: ignore[arg-type]
    *_, end = model.complete("hi", **told)  # type: ignore[arg-type]
    assert isinstance(end, Completed)
    assert end.finished.summary.prompt_tokens == model.count_tokens("hi") == 2


def test_closing_the_iterator_ends_the_generation(model: Model) -> None:
    parts = model.chat(QUESTION, sampling=NEVER_ENDING)
    next(parts)
    with pytest.raises(EngineError, match="generating"):
        next(model.chat(QUESTION))
    parts.close()
    *_, end = model.chat(QUESTION, max_tokens=2)
    assert isinstance(end, Completed)
    assert end.finished.summary.reused_tokens == model.count_tokens(QUESTION) - 1  # the prefix is kept


def test_a_cancel_flag_ends_it_too(model: Model) -> None:
    cancel = CancelFlag()
    parts = model.chat(QUESTION, sampling=NEVER_ENDING, cancel=cancel)
    next(parts)
    cancel.set()
    *_, end = parts
    assert isinstance(end, Completed)
    assert end.finished.reason == "cancelled"


def test_malformed_requests_are_refused_immediately(directory: Path, model: Model) -> None:
    with pytest.raises(UsageError, match="max_tokens"):
        model.chat(QUESTION, max_tokens=0)
    with pytest.raises(UsageError, match="stop"):
        model.chat(QUESTION, stop=[""])
    with pytest.raises(ContextLimitError):
        load(str(directory), context=16).chat("x" * 100)
    with pytest.raises(HeadraceError):
        load(str(directory / "nothing"))


def test_another_thread_is_refused(model: Model) -> None:
    raised: list[BaseException] = []

    def use() -> None:
        try:
            list(model.chat(QUESTION, max_tokens=1))
        except HeadraceError as error:
            raised.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert [type(error) for error in raised] == [EngineError]


def test_predictions_need_no_weights(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    told = predict("qwen3-8b", chip="M4 Max (40-core)", memory_gb=64, context=2048)
    assert told.expected is not None
    assert 0 < told.expected < told.roofline
    assert told.fits
    assert told.context == 2048
    more = predict("qwen3-8b", chip="M4 Max (40-core)", memory_gb=64, context=8192)
    assert more.step_bytes > told.step_bytes
    assert more.memory > told.memory
    assert predict(str(directory), chip="RTX 4090").expected is None


def test_strict_type_checkers_see_the_types(tmp_path: Path) -> None:
    mypy = pytest.importorskip("mypy.api")
    program = tmp_path / "program.py"
    program.write_text(example() + "reveal_type(model)\nreveal_type(part)\nreveal_type(predict)\n")
    out, errors, status = mypy.run(
        ["--strict", "--config-file=", "--ignore-missing-imports", f"--cache-dir={tmp_path / 'cache'}", str(program)]
    )
    assert (errors, status) == ("", 0), out
    assert 'Revealed type is "headrace.app.api.Model"' in out
    assert "headrace.models.text.answer.TextChunk | headrace.models.text.answer.Completed" in out
    assert "Any" not in out
