"""`--draft`: a draft model leaves answers unchanged."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.app.answer.options import AnswerOptions
from headrace.app.cli.batch import batch
from headrace.app.cli.model_options import LoadArguments
from headrace.app.cli.run.command import run
from headrace.app.config.load_options import ModelSpec
from headrace.app.config.settings import ChatSettings, Settings
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import Delta
from headrace.app.engine.host import EngineHost
from headrace.models.loading.draft import check_memory, load_draft
from headrace.models.loading.load import load_model
from headrace.models.registry.resolve import resolve
from headrace.runtime.engine.request import CancelFlag
from headrace.runtime.errors import NotEnoughMemoryError, UsageError
from headrace.runtime.machine.memory import MemoryBudget
from headrace.runtime.metrics.cost import LayerKV
from tests.support.hosted import begin
from tests.support.tiny_chat import write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokens but one."""
    folder = write_chat_model(tmp_path_factory.mktemp("models") / "other", seed=1)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<unk>", "<odd>"))
    return folder


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))


def output(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(run, arguments, catch_exceptions=False, standalone_mode=False)
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


@pytest.mark.sampled
@pytest.mark.parametrize("options", [(), ("-t", "1", "--seed", "3")])
def test_an_answer_is_the_same_with_a_draft(model: Path, options: tuple[str, ...]) -> None:
    asked = ("hi", "-m", str(model), "-n", "80", "--json", "--steps", *options)
    alone = output(*asked, "--speculate", "off")
    drafted = output(*asked, "--draft", str(model))
    assert drafted["tokens"] == alone["tokens"]
    assert {step["source"] for step in alone["steps"]} == {None}
    assert {step["source"] for step in drafted["steps"]} <= {None, "draft"}
    assert drafted["decode_steps"] + drafted["accepted_tokens"] == alone["decode_steps"]


def test_a_draft_with_too_much_kv_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = [LayerKV(2, 64), LayerKV(1, 32)]  # the model's, the draft's
    for free, fits in ((160 * 100, True), (160 * 60, False)):
        found = MemoryBudget(total=1 << 30, free=free, reserve=0, source="available RAM")
        monkeypatch.setattr("headrace.models.loading.draft.memory.budget", lambda found=found: found)
        with nullcontext() if fits else pytest.raises(NotEnoughMemoryError, match="100") as raised:
            check_memory(kv, 100, "tiny")
    assert raised.value.hint == "a context of 60 tokens would fit: --context 60"


def test_batch_and_settings_accept_a_draft_model(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b", "speculate": "off"}\n')

    def answers(*options: str) -> list[str]:
        arguments = [str(source), "-m", str(model), "-n", "20", "--in-order", *options]
        done = CliRunner().invoke(batch, arguments, catch_exceptions=False, standalone_mode=False)
        return [json.loads(line)["text"] for line in done.stdout.splitlines()]

    alone = answers("--speculate", "off")
    assert answers("--draft", str(model)) == alone
    (tmp_path / "home" / "config").mkdir(parents=True, exist_ok=True)
    (tmp_path / "home" / "config" / "settings.toml").write_text('[chat]\ndraft = "/nowhere"\n')
    with pytest.raises(Exception, match="/nowhere"):
        answers()
    assert answers("--speculate", "off") == alone, "an unused draft is not loaded"


def test_a_draft_of_other_tokens_is_one_clear_error(model: Path, other: Path) -> None:
    loaded = load_model(model, name="tiny")
    with pytest.raises(UsageError, match=r"259.*<odd>.*<unk>") as raised:
        load_draft(resolve(str(other)), loaded)
    assert raised.value.hint is not None
    assert load_draft(resolve(str(model)), loaded).network.vocab_size == loaded.network.vocab_size


def test_the_draft_model_of_the_command_line_overrides_the_settings() -> None:
    small = Settings(chat=ChatSettings(draft="small"))
    assert LoadArguments().chosen_draft(Settings(), None) is None
    assert LoadArguments().chosen_draft(small, None) == "small"
    assert LoadArguments(draft="tiny").chosen_draft(small, None) == "tiny"
    assert LoadArguments().chosen_draft(small, "off") is None
    with pytest.raises(UsageError, match="--draft"):
        LoadArguments(draft="tiny").chosen_draft(Settings(), "ngram")


def said(host: EngineHost, **options: Any) -> tuple[str, set[str | None]]:
    """Return an answer and the sources of its draft tokens."""
    events: list[Any] = []
    messages = [{"role": "user", "content": "hi"}]
    begin(host, Generate(1, messages, AnswerOptions(max_tokens=40, **options)), CancelFlag(), events.append)
    while host.busy:
        host.step(events.append)
    deltas = [event for event in events if isinstance(event, Delta)]
    return "".join(one.text for one in deltas), {record.source for one in deltas for record in one.records}


def test_the_chat_takes_a_draft_and_does_without_one_that_does_not_fit(model: Path, other: Path) -> None:
    def host(draft: Path | None) -> EngineHost:
        spec = ModelSpec(str(model), context=400, draft=None if draft is None else str(draft))
        return EngineHost.load(spec, lambda *_: None)

    plain = host(None)
    drafted = host(model)
    assert drafted.card().notes == plain.card().notes == ()
    expected, sources = said(plain, speculate="off")
    assert sources == {None}
    text, sources = said(drafted)
    assert text == expected
    assert sources <= {None, "draft"}
    misfit = host(other)
    assert any("without the draft" in note for note in misfit.card().notes)
    assert said(misfit)[0] == expected
