"""ik_llama.cpp as a peer: a sweep a round, the faster weights for each test. The fake prints as its programs do."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.app.bench.measure import peers
from headrace.runtime.errors import UsageError
from tests.bench import vs_ik_llama
from tests.support.tiny_chat import write_chat_model

FAKE = """#!/usr/bin/env python3
import json, os, sys

options = sys.argv[1:]
value = lambda name: int(options[options.index(name) + 1])
repacked = "-rtr" in options
with open(os.environ["FAKE_RUNS"], "a") as out:
    out.write(os.path.basename(sys.argv[0]) + " " + str(repacked) + chr(10))
if "sweep" in sys.argv[0]:
    chunk = value("-ub")
    for number in range(0, value("-c") // chunk, value("--sweep-stride")):
        seconds = 0.1 if repacked else 0.2  # of prompts
        row = {"pp": chunk, "tg": value("-n"), "n_kv": number * chunk, "t_pp": seconds, "t_tg": 0.3 - seconds}
        print(json.dumps(row), file=sys.stderr)
else:
    print("| PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |", file=sys.stderr)
    print(f"| 1 | {value('-ntg')} | 3 | 99 | 0.5 | 6.0 | {0.3 if repacked else 0.6} | 1 | 1 | 1 |", file=sys.stderr)
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison of a tiny model with the fake programs."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FAKE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(peers, "OPENERS", dict(peers.OPENERS))
    programs = tmp_path / "build" / "bin"
    programs.mkdir(parents=True)
    for name in ("llama-sweep-bench", "llama-batched-bench"):
        (programs / name).write_text(FAKE)
        (programs / name).chmod(0o755)
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    model = write_chat_model(tmp_path / "tiny")
    return [str(tmp_path / "some.gguf"), str(tmp_path / "build"), "-m", str(model), "-n", "4", "-r", "2", "--json"]


def measured(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """Run the script and return its document."""
    monkeypatch.setattr(sys, "argv", ["vs_ik_llama", *arguments])
    vs_ik_llama.main()
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_each_test_uses_the_faster_weights_of_a_sweep(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = measured([*arguments, "-p", "8", "-d", "0,16", "--batch", "3"], monkeypatch, capsys)
    theirs = next(engine for engine in document["engines"] if engine["engine"] == vs_ik_llama.ENGINE)
    chosen = {name.removesuffix(" with"): value for name, value in theirs["settings"].items() if "with" in name}
    assert chosen == {
        "pp8": "repacked weights",
        "pp8 @ d16": "repacked weights",
        "tg4": "weights as in the file",
        "tg4 @ d16": "weights as in the file",
        "tg48 x3": "repacked weights",
    }
    speeds = {
        (result["test"], result["depth"]): result["samples"]
        for result in document["results"]
        if result["engine"] == vs_ik_llama.ENGINE
    }
    assert speeds["pp8", 16] == pytest.approx([80.0, 80.0])
    assert speeds["tg4", 0] == pytest.approx([40.0, 40.0])
    assert speeds["tg48 x3", 0] == pytest.approx([480.0, 480.0])
    runs = (tmp_path / "runs").read_text().split("\n")
    # Two ways to warm up, and one run of each for a round
    assert runs.count("llama-sweep-bench True") == runs.count("llama-sweep-bench False") == 3
    assert runs.count("llama-batched-bench True") == 3


@pytest.mark.parametrize("numbers", [["-p", "8", "-d", "0,12"], ["-p", "8,16"], ["-p", "8", "-d", "0,8,16"]])
def test_numbers_that_a_sweep_does_not_have_are_refused(
    arguments: list[str], numbers: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError):
        measured([*arguments, *numbers], monkeypatch, capsys)


def test_a_missing_program_is_named(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "build" / "bin" / "llama-sweep-bench").unlink()
    document = measured([*arguments, "-p", "8", "-d", "0"], monkeypatch, capsys)
    assert any("llama-sweep-bench failed" in note for note in document["notes"])
