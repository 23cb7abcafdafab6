"""The documented JSON schemas and exit codes against what the commands really emit."""

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import to_builtins

from headrace.app.bench.compare import checked, compare_documents
from headrace.app.cli.bench.command import bench
from headrace.app.cli.run.command import run
from tests.app.cli.test_bench import LLAMA_BENCH
from tests.support.tiny_chat import write_chat_model
from tests.test_house import ROOT

Rows = dict[str, set[str]]
"""Documented key -> everything in backticks in its row's meaning."""

FREE = {"versions", "quantization", "logit_bias"}  # keyed by package, by format, by token


def sections(file: str) -> dict[str, Rows]:
    """The tables of a document by heading."""
    found: dict[str, Rows] = {}
    for part in re.split(r"^## ", (ROOT / "docs" / file).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        rows: Rows = {}
        for line in re.findall(r"^\| `.*$", body, flags=re.MULTILINE):
            keys, meaning = line.strip("| ").split(" | ", 1)
            rows |= {key: set(re.findall(r"`([^`]+)`", meaning)) for key in re.findall(r"`([^`]+)`", keys)}
        found[heading.replace("`", "")] = rows
    return found


def check(rows: Rows, node: dict[str, Any], own_section: tuple[str, ...] = ()) -> None:
    """Every key of `node` has a row, every row a key, and a row names the keys below its own unless a section does."""
    assert node.keys() == rows.keys()
    for key, value in node.items():
        below = value[0] if isinstance(value, list) and value else value
        if isinstance(below, dict) and key not in FREE and key not in own_section:
            assert below.keys() <= rows[key], key


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return write_chat_model(tmp_path / "tiny")


def output(command: Any, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def test_the_json_of_run_is_documented(model: Path) -> None:
    described = sections("run-json.md")
    found = output(run, "hi", "-m", str(model), "-n", "3", "--json", "--steps", "--logprobs", "2")
    check(described["Document"], found, own_section=("steps",))
    check(described["A record of steps"], found["steps"][0])


def test_the_json_of_bench_is_documented(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = sections("bench-json.md")
    program = tmp_path / "llama-bench"
    gguf = tmp_path / "some.gguf"
    program.write_text(LLAMA_BENCH.format(python=sys.executable))
    program.chmod(0o755)
    gguf.write_bytes(b"GGUF")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    peer = ("--vs", "llama.cpp", "--llama-model", str(gguf), "--profile")
    found = output(bench, "-m", str(model), "-p", "8", "-n", "4", "-d", "0,256", "-r", "2", "--json", *peer)
    elsewhere = ("device", "model", "models", "results", "ratios", "peer_agreement", "profile", "step_cost", "engines")
    check(described["Document"], found, own_section=elsewhere)
    check(described["device"], found["device"])
    check(described["model and an entry of models"], found["model"])
    for entry in found["results"]:
        check(described["An entry of results"], entry, own_section=("repetitions",))
        check(described["An entry of repetitions"], entry["repetitions"][0])
    check(described["An entry of engines"], found["engines"][1], own_section=("settings",))
    check(described["An entry of ratios"], found["ratios"][0])
    check(described["An entry of peer_agreement"], found["peer_agreement"][0])
    check(described["profile"], found["profile"])
    if found["step_cost"] is not None:  # two depths of a tiny model need not make a line
        check(described["step_cost"], found["step_cost"])
    run_document = checked(found, "the run")
    compared = to_builtins(compare_documents(run_document, run_document))
    check(described["The document of bench compare"], compared, own_section=("tests",))
    check(described["An entry of tests"], compared["tests"][0])


def test_the_json_of_bench_with_speculation_is_documented(model: Path) -> None:
    described = sections("bench-json.md")
    found = output(bench, "-m", str(model), "--speculate", "--workload", "prose", "-r", "1", "--json")
    elsewhere = ("device", "model", "models", "results", "run_costs", "identity", "engines")
    check(described["Document"], found, own_section=elsewhere)
    for entry in found["results"]:
        check(described["An entry of results"], entry, own_section=("repetitions", "speculation"))
        check(described["speculation of an entry"], entry["speculation"])
        check(described["An entry of repetitions"], entry["repetitions"][0])
    check(described["run_costs"], found["run_costs"])
    assert {"same", "reason"} == found["identity"]["expected"]["tiny"].keys()
    check(described["identity"], found["identity"], own_section=("expected",))


def test_exit_codes_are_documented() -> None:
    codes = {"0", "1", "2", *(str(128 + number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))}
    table = re.findall(r"^\| (\d+) \|", (ROOT / "docs/cli.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(table) == codes
