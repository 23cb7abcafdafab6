"""The public Python API: locked names and signatures, documented examples, imports."""

import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

import headrace
from headrace import CancelFlag, Completed, HeadraceError, Model, SamplingParams, StepRecord, TextChunk, load, predict
from headrace.app.answer.options import OPTIONS
from headrace.app.api import OptionKeywords
from headrace.runtime.errors import ContextLimitError, UsageError
from headrace.runtime.ops import native
from tests.conftest import TEST_HOME
from tests.support.adapters import write_adapter
from tests.support.pages import blocks
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import IM_END, write_chat_model
from tests.test_house import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:headrace runs slow:RuntimeWarning")  # an install without kernels
QUESTION = [{"role": "user", "content": "hi"}]
NEVER_ENDING = SamplingParams(logit_bias={IM_END: -100.0})

# Names that programs rely on. Adding is free; renaming or removing breaks programs.
SIGNATURES = {
    "load": ["name", "adapter", "context", "kv", "activations", "force", "progress"],
    "predict": ["name", "chip", "memory_gb", "context", "batch"],
    "Model.chat": ["self", "messages", "sampling", "cancel", "options"],
    "Model.complete": ["self", "text", "sampling", "cancel", "options"],
    "Model.generate": ["self", "messages", "raw", "sampling", "cancel", "options"],
    "Model.batch": ["self", "prompts", "raw", "sampling", "cancel", "options"],
    "Model.agenerate": ["self", "messages", "raw", "sampling", "cancel", "options"],
    "Model.count_tokens": ["self", "text"],
    "Model.token_text": ["self", "token"],
    "Model.close": ["self"],
}
NAMES = {
    *("AnswerStream", "CancelFlag", "Completed", "Generation", "Model", "Prediction", "SamplingParams", "StepRecord"),
    *("Summary", "TextChunk", "load", "predict"),
    *("CheckpointError", "ContextLimitError", "EngineError", "FetchError", "HeadraceError", "ModelNotFoundError"),
    *("NotEnoughMemoryError", "UnsupportedModelError", "UsageError"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(directory: Path) -> Iterator[Model]:
    with load(str(directory)) as model:
        yield model


def test_exported_names_are_the_reviewed_ones() -> None:
    assert set(headrace.__all__) == NAMES
    assert set(dir(headrace)) >= NAMES
    for name in NAMES:
        assert getattr(headrace, name).__doc__
    with pytest.raises(AttributeError, match="unload"):
        _ = headrace.unload  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameter_names_are_the_reviewed_ones(name: str) -> None:
    found = headrace
    for part in name.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters.values()  # type: ignore[arg-type]
    assert [parameter.name for parameter in parameters] == SIGNATURES[name]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) == (name != "Model.close") + ("self" in positional)


def test_load_takes_an_adapter(directory: Path, tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    write_adapter(lora, directory, size=1.0)
    with load(str(directory)) as base, load(directory, adapter=lora) as model, load(f"{directory}+{lora}") as same:
        assert model.name == same.name == f"{base.name}+lora"
        answers = [each.generate(QUESTION, max_tokens=8).tokens for each in (base, model, same)]
    assert answers[1] == answers[2] != answers[0]
    for name, adapter, message in [
        (f"{directory}+{lora}", lora, "has an adapter already"),
        (directory, 3, "adapter must be a text or a path, not 3"),
        (directory, "", "adapter is empty"),
    ]:
        with pytest.raises(UsageError, match=message):
            load(name, adapter=adapter)  # type: ignore[arg-type]


def test_every_option_is_a_keyword() -> None:
    assert list(OptionKeywords.__annotations__) == list(OPTIONS)


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_error_that_is_documented_is_exported(name: str) -> None:
    found: Any = headrace
    for part in name.split("."):
        found = getattr(found, part)
    assert set(re.findall(r"\w+Error\b", found.__doc__)) <= NAMES


def test_type_checkers_see_the_same_names() -> None:
    source = inspect.getsource(headrace)
    found = re.findall(r"^    from headrace\.([\w.]+) import ([\w, ]+|\([^)]+\))$", source, flags=re.MULTILINE)
    assert {module: set(re.findall(r"\w+", names)) for module, names in found} == {
        module: set(names) for module, names in headrace._HOMES.items()
    }
    assert {name for names in headrace._HOMES.values() for name in names} == NAMES


def test_importing_headrace_loads_no_mlx_textual_click_or_numpy() -> None:
    code = (
        "import sys; old = set(sys.modules); import headrace, json; print(json.dumps(sorted(set(sys.modules) - old)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = {name for name in json.loads(done.stdout) if not name.startswith("json")}
    assert not {"mlx", "textual", "click", "numpy"} & {name.partition(".")[0] for name in ours}
    assert {name for name in ours if name.startswith("headrace")} == {"headrace"}


def test_the_readme_example_runs(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import redirect_stdout
    from io import StringIO

    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    [code] = blocks("README.md", "python")
    assert len(code.splitlines()) <= 12
    said = StringIO()
    with redirect_stdout(said):
        exec(compile(code.replace('"smollm2-135m"', repr(str(directory))), "README.md", "exec"), {})
    first, *_, last = said.getvalue().splitlines()
    assert re.fullmatch(r"\d+ tokens, [\d.]+ tok/s at most.*", first)
    assert re.match(r" (stop|length) ", last)


@pytest.mark.sampled
@pytest.mark.real
@pytest.mark.parametrize(
    ("page", "word"), [("README.md", "sky"), ("docs/python.md", "tok/s"), ("docs/structured.md", " wrote Emma in ")]
)
def test_the_first_python_example_of_each_page_runs(default_model: Path, page: str, word: str) -> None:
    assert default_model.is_dir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::RuntimeWarning", "-c", blocks(page, "python")[0]],
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
    def text(parts: headrace.AnswerStream) -> str:
        return "".join(part.text for part in parts)

    told = {"max_tokens": 6, "sampling": NEVER_ENDING}
    assert text(model.chat("hi", **told)) == text(model.chat(QUESTION, **told))  # type: ignore[arg-type]
    *_, end = model.complete("hi", **told)  # type: ignore[arg-type]
    assert isinstance(end, Completed)
    assert end.finished.summary.prompt_tokens == model.count_tokens("hi") == 2


LIVELY = {"temperature": 0.9, "seed": 3, "max_tokens": 9, "logit_bias": {IM_END: -100.0}}


def test_options_are_keywords_too(model: Model) -> None:
    sampled = SamplingParams(temperature=0.9, seed=3, logit_bias={IM_END: -100.0})
    told: Any = LIVELY
    *_, end = model.chat("hi", **told)
    *_, same = model.chat("hi", sampling=replace(sampled, temperature=0.1), temperature=0.9, max_tokens=9)
    assert isinstance(end, Completed)
    assert isinstance(same, Completed)
    assert model.generate("hi", **told).text == model.generate("hi", sampling=sampled, max_tokens=9).text
    with pytest.raises(UsageError, match="temprature"):
        model.chat("hi", temprature=1)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="top_p"):
        model.generate("hi", top_p=2)
    with pytest.raises(UsageError, match="thinking"):
        model.complete("hi", thinking=True)


def test_one_text_is_one_stop_string(model: Model) -> None:
    told: Any = LIVELY
    text = model.generate("hi", **told).text
    stop = next(piece for piece in (text[at : at + 2] for at in range(1, 9)) if text.index(piece) > 0)
    one = model.generate("hi", **told, stop=stop)
    assert (one.text, one.reason, one.ended_by) == (text[: text.index(stop)], "stop", "stop_string")
    assert one.finished.stop_string == stop
    assert model.generate("hi", **told, stop=["nowhere", stop]).text == one.text


def test_greedy_answers_have_no_recommended_repetition_penalty(tmp_path: Path) -> None:
    directory = write_chat_model(tmp_path / "model")
    recommended = {"eos_token_id": IM_END, "temperature": 0.7, "repetition_penalty": 1.3}
    (directory / "generation_config.json").write_text(json.dumps(recommended))
    with load(str(directory)) as model:
        greedy = model.generate("hi", temperature=0, max_tokens=2).sampling
        sampled = model.generate("hi", max_tokens=2).sampling
        given = model.generate("hi", sampling=model.sampling, temperature=0, max_tokens=2).sampling
    assert (greedy.temperature, greedy.repetition_penalty) == (0, 1)
    assert (sampled.temperature, sampled.repetition_penalty) == (0.7, 1.3)
    assert (given.temperature, given.repetition_penalty) == (0, 1.3)


def test_a_finished_answer_has_a_summary(model: Model) -> None:
    told: Any = LIVELY
    whole = model.generate(QUESTION, **told)
    assert "".join(part.text for part in model.chat(QUESTION, **told)) == whole.text == str(whole)
    assert (whole.reason, whole.ended_by, whole.summary.completion_tokens) == ("length", "max_tokens", 9)
    assert (whole.sampling.temperature, whole.sampling.seed, whole.finished.seed) == (0.9, 3, 3)
    assert model.generate("hi", raw=True, **told).summary.prompt_tokens == 2
    with pytest.raises(UsageError, match="raw"):
        model.generate(QUESTION, raw=True)


def test_a_batch_answers_in_order_as_each_prompt_alone(model: Model) -> None:
    told: Any = LIVELY
    prompts = ["one", QUESTION, "three " * 9]
    texts = [model.generate(prompt, **told).text for prompt in prompts]
    assert [one.text for one in model.batch(prompts, **told)] == texts
    stops = {**told, "stop": texts[0][3:5]}
    stopped = model.batch(prompts, **stops)
    assert stopped[0].ended_by == "stop_string"  # which ends no other answer
    assert [one.text for one in stopped] == [model.generate(prompt, **stops).text for prompt in prompts]
    assert model.batch([]) == []
    assert model.batch(iter("ab"), raw=True, **told)[1].text == model.generate("b", raw=True, **told).text
    with pytest.raises(ContextLimitError):
        model.batch(["hi", "x" * 9000], **told)
    cancel = CancelFlag()
    cancel.set()
    assert [one.reason for one in model.batch(["a", "b"], cancel=cancel)] == ["cancelled"] * 2
    assert model.generate("one", **told).text == texts[0]


def test_tools_are_called_and_their_results_sent_back(model: Model) -> None:
    clock = {
        "type": "function",
        "function": {"name": "time", "parameters": {"properties": {"zone": {"enum": ["UTC"]}}}},
    }
    asked: dict[str, Any] = {"tools": [clock], "tool_choice": "required", "max_tokens": 200, "seed": 1}
    found = model.generate(QUESTION, **asked)
    assert {call.name for call in found.calls} == {"time"}
    assert all(json.loads(call.arguments) in ({}, {"zone": "UTC"}) for call in found.calls)
    streamed = [call for part in model.chat(QUESTION, **asked) for call in part.calls]
    assert streamed == list(found.calls)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "12:00"} for call in found.message["tool_calls"]]
    more = model.generate([*QUESTION, found.message, *results], tools=[clock], max_tokens=3)
    assert more.calls == ()
    assert more.summary.prompt_tokens > found.summary.prompt_tokens
    lost_call = model.generate([*QUESTION, *results], tools=[clock], max_tokens=3)  # the result becomes text
    assert lost_call.summary.prompt_tokens > found.summary.prompt_tokens
    with pytest.raises(UsageError, match="tools needs a conversation"):
        model.complete("hi", tools=[clock])


def test_tokens_are_reported_with_their_log_probabilities(model: Model) -> None:
    found = model.generate("hi", max_tokens=5, logprobs=2, sampling=NEVER_ENDING)
    assert len(found.tokens) == len(found.logprobs) == 5
    assert all(
        len(one.top) == 2 and one.top[0][0] == token for token, one in zip(found.tokens, found.logprobs, strict=True)
    )
    texts = [model.token_text(token) for token in found.tokens]
    assert [report.text for report in found.reports] == texts
    assert [report.logprob for report in found.reports] == [one.chosen for one in found.logprobs]
    best = [(model.token_text(token), value) for token, value in found.logprobs[0].top]
    assert found.reports[0].top == best
    plain = model.generate("hi", max_tokens=5, sampling=NEVER_ENDING)
    assert (plain.logprobs, plain.reports) == ([], [])
    with pytest.raises(UsageError, match="logprobs"):
        model.generate("hi", logprobs=-1)


def test_an_install_without_kernels_warns(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    monkeypatch.setattr(
        "headrace.app.api.ops.native.status", lambda: native.NativeStatus(False, "no compiler was found")
    )
    with pytest.warns(RuntimeWarning, match="no compiler"):
        load(str(directory)).close()
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    load(str(directory)).close()  # asked for


def test_closing_the_iterator_ends_the_generation(model: Model) -> None:
    parts = model.chat(QUESTION, sampling=NEVER_ENDING)
    next(parts)
    parts.close()
    assert list(parts) == []
    *_, end = model.chat(QUESTION, max_tokens=2)
    assert isinstance(end, Completed)
    assert end.finished.summary.reused_tokens == model.count_tokens(QUESTION) - 1  # the prefix is kept


def test_a_cancel_flag_ends_a_streamed_answer(model: Model) -> None:
    cancel = CancelFlag()
    parts = model.chat(QUESTION, sampling=NEVER_ENDING, cancel=cancel)
    next(parts)
    cancel.set()
    *_, end = parts
    assert isinstance(end, Completed)
    assert end.finished.reason == "cancelled"


SAMPLING: Any = {"temperature": 0.5}
WRONG: list[tuple[str, Callable[[Model], Any], str]] = [
    ("no messages", lambda model: model.generate(cast(Any, None)), "messages must be a text"),
    ("a number", lambda model: model.chat(cast(Any, 5)), "messages must be a text"),
    ("bytes", lambda model: model.chat(cast(Any, b"hi")), "messages must be a text"),
    ("an empty list", lambda model: model.generate([]), "at least one message"),
    ("a list of texts", lambda model: model.generate(cast(Any, ["hi"])), r"messages\[0\] must be an object"),
    ("a message without content", lambda model: model.generate([{"role": "user"}]), r"messages\[0\] needs content"),
    ("a content of None", lambda model: model.chat([*QUESTION, {"role": "user", "content": None}]), r"\[1\] needs"),
    (
        "a number as content",
        lambda model: model.chat([{"role": "user", "content": 5}]),
        r"\[0\].content must be a text",
    ),
    ("an image", lambda model: model.chat([{"role": "user", "content": [{"type": "image"}]}]), "only text"),
    ("no role", lambda model: model.chat([{"content": "hi"}]), "role"),
    ("an unknown role", lambda model: model.chat([{"role": "robot", "content": "hi"}]), "role"),
    ("no text to continue", lambda model: model.complete(cast(Any, None)), "raw prompt must be a text"),
    ("nothing to count", lambda model: model.count_tokens(cast(Any, None)), "messages must be a text"),
    ("one text as prompts", lambda model: model.batch("hi"), "prompts must be a list"),
    ("no prompts", lambda model: model.batch(cast(Any, None)), "prompts must be a list"),
    ("a conversation as prompts", lambda model: model.batch(cast(Any, QUESTION)), r"prompts\[0\] must be a text"),
    ("a token that is none", lambda model: model.token_text(10**9), "token must be"),
    ("a token as text", lambda model: model.token_text(cast(Any, "a")), "token must be"),
    ("a mapping as sampling", lambda model: model.chat("hi", sampling=SAMPLING), "sampling must be a SamplingParams"),
    ("an event as flag", lambda model: model.chat("hi", cancel=cast(Any, threading.Event())), "must be a CancelFlag"),
    ("a text as temperature", lambda _: SamplingParams(temperature=cast(Any, "hot")), "temperature must be a number"),
    ("a list as bias", lambda _: SamplingParams(logit_bias=cast(Any, [1])), "logit_bias must be"),
    ("a text as seed", lambda _: SamplingParams(seed=cast(Any, "1")), "seed must be a whole number"),
    ("a number as stop", lambda model: model.chat("hi", stop=cast(Any, 5)), "stop must be"),
    ("a number as tools", lambda model: model.chat("hi", tools=cast(Any, 5)), "tools must be"),
    ("a number as schema", lambda model: model.chat("hi", schema=5), "schema must be"),
    ("a text as log probabilities", lambda model: model.chat("hi", logprobs=cast(Any, "x")), "logprobs must be"),
    ("a number as model", lambda _: load(cast(Any, 5)), "name of a model"),
    ("no model", lambda _: load(""), "name of a model"),
    ("a text as context", lambda _: load(context=cast(Any, "x")), "context must be"),
    ("half a context", lambda _: load(context=cast(Any, 0.5)), "context must be"),
    ("a number as K/V format", lambda _: load(kv=cast(Any, 8)), "K/V"),
    ("no activations", lambda _: load(activations=cast(Any, None)), "activations"),
    ("a text as force", lambda _: load(force=cast(Any, "yes")), "force must be"),
    ("a number as progress", lambda _: load(progress=cast(Any, 5)), "progress must be"),
    ("a number as chip", lambda _: predict(chip=cast(Any, 5)), "chip must be"),
    ("no batch", lambda _: predict(batch=0), "batch must be"),
    ("a negative context", lambda _: predict(context=-1), "context must be"),
    (
        "a chip of several variants",
        lambda _: predict("qwen3-8b", chip="M4 Max"),
        r"M4 Max \(32-core\), M4 Max \(40-core\)",
    ),
    ("a text as memory", lambda _: predict(chip="M4 Max (40-core)", memory_gb=cast(Any, "64")), "memory_gb must be"),
]


@pytest.mark.parametrize(("use", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_arguments_are_refused_by_name(model: Model, use: Callable[[Model], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        use(model)


def test_text_parts_of_a_message_are_joined_by_line_breaks(model: Model) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    told: Any = LIVELY
    assert model.generate([{"role": "user", "content": parts}], **told).text == model.generate("h\ni", **told).text


def test_load_accepts_a_path_and_activation_bits(directory: Path) -> None:
    with load(directory, activations=16) as model:
        assert model.name == directory.name


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert headrace.__version__ == version("headrace")


def test_malformed_requests_are_refused_immediately(directory: Path, model: Model) -> None:
    with pytest.raises(UsageError, match="max_tokens"):
        model.chat(QUESTION, max_tokens=0)
    with pytest.raises(UsageError, match="stop"):
        model.chat(QUESTION, stop=[""])
    with load(str(directory), context=16) as short, pytest.raises(ContextLimitError):
        short.chat("x" * 100)
    with pytest.raises(HeadraceError):
        load(str(directory / "nothing"))


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


@pytest.mark.nightly
def test_strict_type_checkers_see_the_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        blocks("README.md", "python")[0] + "reveal_type(model)\nreveal_type(part)\nreveal_type(predict)\n"
    )
    # With the project's own options, also strict, and so its cache: without that it takes half a minute.
    settings = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}"]
    # In a process of its own: mypy raises the recursion limit of the one that it runs in.
    ended = subprocess.run([sys.executable, "-m", "mypy", *settings, str(program)], capture_output=True, text=True)
    assert (ended.stderr, ended.returncode) == ("", 0), ended.stdout
    assert 'Revealed type is "headrace.app.api.Model"' in ended.stdout
    assert "headrace.models.text.events.TextChunk | headrace.models.text.events.Completed" in ended.stdout
    assert "Any" not in ended.stdout
