"""`headrace bench`, `predict` and `fit` as their users run them, on a tiny model that decodes in microseconds."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.app.bench.compare import checked
from headrace.app.bench.measure.own import OwnEngine
from headrace.app.bench.show.formats import markdown
from headrace.app.bench.show.html_report import html
from headrace.app.bench.show.phrases import interval
from headrace.app.cli.bench.command import bench
from headrace.app.cli.predict import fit, predict
from headrace.runtime import ops
from headrace.runtime.errors import EngineError, HeadraceError, UsageError
from tests.support.damaged import install_damaged
from tests.support.patience import PATIENCE_S
from tests.support.terminal import spawn_headrace
from tests.support.tiny import config_of
from tests.support.tiny_chat import write_chat_model

SHORT = ("-p", "8", "-n", "4", "-r", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments, catch_exceptions=False, standalone_mode=False)


def test_the_last_line_of_json_is_the_document(model: Path) -> None:
    done = run("-m", str(model), *SHORT, "-d", "0,16", "--json")
    document = json.loads(done.stdout)
    names = [(entry["test"], entry["depth"]) for entry in document["results"]]
    assert names == [("pp8", 0), ("tg4", 0), ("pp8+tg4", 0), ("pp8", 16), ("tg4", 16), ("pp8+tg4", 16)]
    decode = document["results"][4]
    per_token = document["model"]["kv_bytes_per_token"]
    assert decode["weight_bytes_per_step"] == document["model"]["weight_bytes_per_step"]
    # Three intervals at depth 16: steps with 17, 18 and 19 entries behind them read one more each and write one.
    assert decode["kv_bytes_per_step"] == pytest.approx(per_token * ((18 + 19 + 20) / 3 + 1))
    assert len(decode["repetitions"]) == 2
    assert len(decode["repetitions"][0]["itl_ms"]) == 3
    assert document["device"]["measured_peak"]["passes"] > 0
    assert not document["interrupted"]


def test_a_profile_of_another_decoder_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = write_chat_model(tmp_path / "stock", rope_traditional=True)  # mlx-lm's class runs it
    monkeypatch.setattr(OwnEngine, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(UsageError, match="--profile"):
        run("-m", str(stock), *SHORT, "--profile")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize(
    "options",
    ["-m", "--quality --text", "--quality --against", "--speculate --draft", "--vs llama.cpp --llama-model", "--hosts"],
)
def test_json_of_a_path_that_is_not_utf_8_is_refused_before_the_work(options: str) -> None:
    with pytest.raises(UsageError, match="is not UTF-8, as JSON has to be"):
        run("--json", *options.split(), os.fsdecode(b"./no such folder \xff"))


def test_batch_results_and_scaling_are_in_every_output_format(model: Path) -> None:
    arguments = ("-m", str(model), "-p", "0", "-n", "4", "-r", "2", "--batch", "1,3")
    document = json.loads(run(*arguments, "--json").stdout)
    three = document["results"][1]
    assert [entry["batch"] for entry in document["results"]] == [1, 3]
    assert three["test"] == "tg4 x3"
    assert three["tokens_per_second_each"] == pytest.approx(three["tokens_per_second"]["mean"] / 3)
    (scaled,) = document["scaling"]
    assert scaled["batch"] == 3
    assert scaled["step_time"]["mean"] == pytest.approx(3 / scaled["speedup"]["mean"])
    assert document["step_cost"] is None or all("x3" not in point["label"] for point in document["step_cost"]["points"])
    table = run(*arguments, "-o", "table").stdout
    assert "each" in table
    assert "x of one sequence" in " ".join(table.split())
    markdown = run(*arguments).stdout
    assert "tok/s each" in markdown
    assert "- tg4 x3 (headrace): " in markdown
    joined = run(
        "-m", str(model), "-p", "0", "-n", "0", "--batch", "2", "--arrivals", "16", "-r", "2", "-o", "table"
    ).stdout
    assert "pp16 into tg64 x2 (headrace): ITL p95 from" in " ".join(joined.split())
    with pytest.raises(UsageError, match="--arrivals"):
        run(*arguments, "--arrivals", "16", "--vs", "mlx-lm")
    with pytest.raises(UsageError, match="llama-bench"):
        run(*arguments, "--vs", "llama.cpp")


def test_several_models_are_measured_side_by_side(model: Path, tmp_path: Path) -> None:
    other = write_chat_model(tmp_path / "other")
    document = json.loads(run("-m", str(model), "-m", str(other), *SHORT, "--no-pg", "--json").stdout)
    assert {entry["model"] for entry in document["results"]} == {"tiny", "other"}
    with pytest.raises(UsageError, match="-m"):
        run("-m", str(model), "-m", str(model), *SHORT)


def test_markdown_is_printed_into_a_pipe(model: Path) -> None:
    done = run("-m", str(model), *SHORT, "--profile")
    assert done.stdout.startswith("| model | test | tok/s |")
    assert "\x1b" not in done.stdout
    assert re.search(r"one step at depth 0: parts .* ms", done.stdout)


def test_compare_exits_with_1_for_a_slower_run(model: Path, tmp_path: Path) -> None:
    document = json.loads(run("-m", str(model), "-p", "0", "-n", "2", "-r", "4", "--json").stdout)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, speed in zip(files, (100.0, 90.0), strict=True):  # not what a busy machine happened to take
        for number, one in enumerate(document["results"][0]["repetitions"]):
            one |= {"typical_tokens_per_second": speed + number / 10, "memory_gb_s": 20.0}
        file.write_text(json.dumps(document))
    a, b = map(str, files)
    assert run("compare", a, a).return_value == 0
    assert run("compare", a, b).return_value == 1
    assert json.loads(run("compare", b, a, "--json").stdout)["tests"][0]["verdict"] == "faster"


def test_one_round_has_no_interval(model: Path) -> None:
    document = json.loads(run("-m", str(model), "-p", "0", "-n", "4", "-r", "1", "--json").stdout)
    run_document = checked(document, "the run")
    speed = run_document.results[0].tokens_per_second
    assert (speed.low, speed.high) == (None, None)
    assert interval(speed, str) == ""
    assert "±" not in markdown(run_document)
    assert html(run_document)


def test_a_report_is_written(model: Path, tmp_path: Path) -> None:
    run("-m", str(model), *SHORT, "--report", str(tmp_path / "out.html"))
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("path", "words"),
    [(".", "directory"), ("", "directory"), ("nowhere/out.html", "nowhere"), ("sealed/x", "sealed/x")],
)
def test_a_report_that_could_not_be_written_is_an_error_before_the_run(
    path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sealed").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, whom no mode stops
    monkeypatch.setattr("headrace.app.bench.measure.run.run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(UsageError, match=words):
        run(*SHORT, "--report", path)


def test_a_report_without_its_library_is_an_error_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.app.bench.show.html_report.find_spec", lambda _: None)
    monkeypatch.setattr("headrace.app.bench.measure.run.run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(UsageError, match="matplotlib"):
        run(*SHORT, "--report", str(tmp_path / "out.html"))


def test_progress_in_a_pipe_is_a_line_for_each_warm_up_and_round(model: Path) -> None:
    done = run("-m", str(model), *SHORT, "--no-pg")
    lines = [line for line in done.stderr.splitlines() if " · headrace " in line]  # not of a slow load
    stages = [line.partition(" · headrace ")[0] for line in lines]
    assert stages == ["warm-up: pp8", "warm-up: tg4", "round 1: pp8", "round 2: tg4"]


def test_a_missing_peer_ends_the_run_before_measuring(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"GGUF")
    wanted = ("-m", str(model), *SHORT, "--vs", "llama.cpp")
    with pytest.raises(EngineError, match=r"llama\.cpp.*GGUF") as caught:
        run(*wanted)
    assert caught.value.exit_code == 1
    with pytest.raises(EngineError, match="llama-bench"):
        run(*wanted, "--llama-model", str(gguf))
    with pytest.raises(EngineError, match="/nowhere/python"):
        run(*wanted, "--llama-model", str(gguf), "--llama-python", "/nowhere/python")


def test_a_peer_that_fails_in_warm_up_fails_the_command_after_our_own_figures(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_told = LLAMA_BENCH.replace("print(", "options['-p'] == '1' or sys.exit(3)\nprint(")
    _llama_bench(tmp_path, only_told.format(python=sys.executable), monkeypatch)
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"GGUF")
    printed: list[str] = []
    monkeypatch.setattr("click.echo", lambda text="", **_: printed.append(str(text)))
    with pytest.raises(EngineError, match=r"llama\.cpp"):
        run("-m", str(model), *SHORT, "--no-pg", "--vs", "llama.cpp", "--llama-model", str(gguf))
    assert any(text.startswith("| model | test") for text in printed)


@pytest.mark.skipif(not ops.select().supports_packed(32), reason="needs operations that read packed K/V")
def test_formats_of_kv_are_measured_side_by_side(model: Path) -> None:
    document = json.loads(run("-m", str(model), "-p", "8", "-n", "4", "-r", "2", "--json", "--kv", "f16,q8").stdout)
    names = [f"{model.name} f16", f"{model.name} q8"]
    assert [entry["name"] for entry in document["models"]] == names
    assert [entry["kv_format"] for entry in document["models"]][1] == "q8"
    assert [engine["settings"]["kv_type"] for engine in document["engines"]][1] == "q8"
    assert {(ratio["model"], ratio["over"]) for ratio in document["kv_ratios"]} == {(names[1], names[0])}
    assert [ratio["test"] for ratio in document["kv_ratios"]] == ["pp8", "tg4", "pp8+tg4"]
    f16, q8 = (entry for entry in document["results"] if entry["test"] == "tg4")
    assert q8["kv_bytes_per_step"] == pytest.approx(f16["kv_bytes_per_step"] * 17 / 32)
    assert q8["weight_bytes_per_step"] == f16["weight_bytes_per_step"]
    alone = json.loads(run("-m", str(model), *SHORT, "--json", "--kv", "q8").stdout)
    assert [(entry["name"], entry["kv_format"]) for entry in alone["models"]] == [(model.name, "q8")]
    assert alone["kv_ratios"] == []


LLAMA_BENCH = """#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
tokens = int(options["-p"]) + int(options["-n"]) + sum(map(int, options.get("-pg", "0,0").split(",")))
threads = int(options["-t"])
print(json.dumps([{{"samples_ns": [tokens * 10**7], "avg_ts": 100.0, "n_threads": threads, "flash_attn": True}}]))
"""


def _llama_bench(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in on the PATH."""
    program = folder / "llama-bench"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_figures_of_llama_bench_on_the_path_are_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _llama_bench(tmp_path, LLAMA_BENCH.format(python=sys.executable), monkeypatch)
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"GGUF")
    done = run("-m", str(model), *SHORT, "--json", "--vs", "llama.cpp", "--llama-model", str(gguf))
    document = json.loads(done.stdout)
    theirs = [entry for entry in document["results"] if entry["engine"] == "llama.cpp"]
    assert [entry["tokens_per_second"]["mean"] for entry in theirs] == pytest.approx([100.0, 100.0, 100.0])
    assert [ratio["pairs"] for ratio in document["ratios"]] == [2, 2, 2]
    assert all(said["measured_over_own"] == pytest.approx(1) for said in document["peer_agreement"])
    assert any("weights (" in note for note in document["notes"])


@pytest.mark.peer
def test_speeds_of_mlx_lm_agree_with_its_own_alone_and_in_a_batch(model: Path) -> None:
    lengths = ("-p", "32", "-n", "32", "-d", "0,16", "--batch", "1,9", "-r", "2", "--no-pg")
    document = json.loads(run("-m", str(model), *lengths, "--vs", "mlx-lm", "--json").stdout)
    theirs = [entry for entry in document["results"] if entry["engine"] == "mlx-lm"]
    assert [(entry["test"], entry["depth"], len(entry["repetitions"])) for entry in theirs] == [
        (test, depth, 2) for depth in (0, 16) for test in ("pp32", "tg32", "tg32 x9")
    ], document["notes"]
    assert {len(entry["repetitions"][0]["itl_ms"]) for entry in theirs if entry["batch"] == 9} == {31}
    assert [(ratio["test"], ratio["depth"]) for ratio in document["ratios"]][2::3] == [("tg32 x9", 0), ("tg32 x9", 16)]
    # Loose: where the machine is busy, a pause between their clock reading and ours counts for one side only.
    assert all(0.5 < said["measured_over_own"] < 2 for said in document["peer_agreement"])
    assert {entry["threads_told"] for entry in document["engines"]} - {None}, "nobody says how many threads"


def test_ctrl_c_prints_finished_tests(model: Path) -> None:
    import pexpect

    arguments = ("bench", "-m", str(model), "-p", "8", "-n", "4", "-r", "100000")
    child = spawn_headrace(*arguments, dimensions=(40, 80))
    child.expect("round 3 ")
    child.sendintr()
    child.expect("interrupted in round")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130


@pytest.mark.parametrize(
    "arguments",
    [
        ("-p", "x"), ("-p", ""), ("-n", " "), ("-d", ""), ("-n", "1"), ("--llama-python", "x"), ("-m", "/nowhere"),
        ("-d", "-1"),
    ],
)  # fmt: skip
def test_impossible_options_are_a_one_line_error(arguments: tuple[str, ...]) -> None:
    with pytest.raises(HeadraceError) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)


def test_predict_works_from_a_config_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3")))
    arguments = ["-m", str(tmp_path), "--chip", "M4 Max (40-core)", "--context", "0,100"]
    found = json.loads(CliRunner().invoke(predict, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert [one["context"] for one in found["targets"][0]["predictions"]] == [0, 100]
    shown = CliRunner().invoke(predict, arguments, catch_exceptions=False).stdout
    assert "M4 Max (40-core)" in shown
    assert "4 sequences per step" in shown
    assert "K/V per token\n" in shown, "in a pipe no line is wrapped"
    shared = [*arguments[:-2], "--context", "100", "--users", "1,8"]
    together = json.loads(CliRunner().invoke(predict, [*shared, "--json"], catch_exceptions=False).stdout)
    assert [one["batch"] for one in together["targets"][0]["predictions"]] == together["users"] == [1, 8]
    table = CliRunner().invoke(predict, shared, catch_exceptions=False).stdout
    assert "per user" in table
    assert "100 tokens each fit" in table
    assert isinstance(CliRunner().invoke(predict, [*arguments, "--users", "1"]).exception, UsageError)
    explained = CliRunner().invoke(predict, [*arguments, "--explain"], catch_exceptions=False).stdout
    assert "101 x 4 x 32" in explained
    assert "Prefill of 512 tokens" in explained


def test_fit_marks_catalog_models_by_whether_they_fit() -> None:
    shown = CliRunner().invoke(fit, ["--chip", "M2 (8-core)", "--memory", "8"], catch_exceptions=False).stdout
    assert re.search(r"smollm2-135m .*✓", shown)
    assert re.search(r"qwen2.5-32b .*✗", shown)


def test_damaged_weights_are_noted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.app.bench.measure.run._CHECK_S", PATIENCE_S)
    install_damaged(model)
    notes = json.loads(run("-m", "mine", *SHORT, "--no-pg", "--json").stdout)["notes"]
    assert any("mine is damaged" in note for note in notes)
