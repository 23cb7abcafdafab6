"""Speculation by option, setting and batch line, in the request that reaches the engine."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.app.cli.batch import batch
from headrace.app.cli.run.answer_report import RunReport, summary_line, table
from headrace.app.cli.run.command import run
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from tests.support.tiny_chat import write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Request]:
    """Every request that reaches an engine."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    found: list[Request] = []
    check = Engine.check
    monkeypatch.setattr(Engine, "check", lambda engine, request: found.append(request) or check(engine, request))
    return found


@pytest.mark.parametrize(
    ("options", "settings", "expected"),
    [
        ((), "", "auto"),
        (("--speculate", "off"), "", "off"),
        ((), '[sampling]\nspeculate = "off"\n', "off"),
        (("--speculate", "ngram"), '[sampling]\nspeculate = "off"\n', "ngram"),
        (("--speculate", "off", "--raw"), "", "off"),
        (("--speculate", "off", "--samples", "2", "-t", "1"), "", "off"),
    ],
)
def test_run_requests_the_chosen_speculation(
    model: Path, asked: list[Request], tmp_path: Path, options: tuple[str, ...], settings: str, expected: str
) -> None:
    (tmp_path / "home" / "config").mkdir(parents=True)
    (tmp_path / "home" / "config" / "settings.toml").write_text(settings)
    arguments = ["hi", "-m", str(model), "-n", "2", *options]
    assert CliRunner().invoke(run, arguments, catch_exceptions=False, standalone_mode=False).return_value == 0
    assert {request.speculate for request in asked} == {expected}


def test_a_batch_asks_line_by_line(model: Path, asked: list[Request], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b", "speculate": "ngram"}) + "\n")
    arguments = [str(source), "-m", str(model), "-n", "2", "--speculate", "off"]
    assert CliRunner().invoke(batch, arguments, catch_exceptions=False, standalone_mode=False).return_value == 0
    assert sorted(request.speculate for request in asked) == ["ngram", "off"]
    done = CliRunner().invoke(batch, [str(source), "-m", str(model), "-n", "150", "-t", "0"], standalone_mode=False)
    assert "draft tokens accepted (" in done.stderr


def test_an_answers_figures_count_tokens_and_steps_separately(
    model: Path, asked: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[RunReport] = []
    monkeypatch.setattr("headrace.app.cli.run.answer_report.print_report", lambda report, _: reports.append(report))
    for choice in ("ngram", "off"):
        arguments = ["hi", "-m", str(model), "-n", "200", "-t", "0", "--stats", "--speculate", choice]
        CliRunner().invoke(run, arguments, catch_exceptions=False, standalone_mode=False)
    guessed, plain = reports
    assert guessed.answer.text == plain.answer.text
    summary = guessed.summary
    assert summary.accepted > 0, "a tiny model goes round in circles, which can be guessed"
    said = f"{summary.completion_tokens / summary.steps:.2f}"
    assert f" · {said} tok/step · " in summary_line(guessed)
    assert dict(table(guessed))["draft tokens"].startswith(f"{summary.accepted} of {summary.proposed} accepted (")
    assert "steps/s" in dict(table(guessed))["roofline"]
    assert "tok/step" not in summary_line(plain)
    assert "draft tokens" not in dict(table(plain))
    assert [request.speculate for request in asked] == ["ngram", "off"]
