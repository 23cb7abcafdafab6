"""The identity checks find nothing where there is nothing, and a row that its neighbours change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result

from headrace.app.cli.verify import verify
from headrace.app.verify.checks import KVChange, Verification, VerifyPlan
from headrace.app.verify.expectation import expectation
from headrace.app.verify.trace import Trace, compare
from headrace.models.gguf import convert_gguf
from headrace.models.loading.load import LoadedModel, load_model
from headrace.models.network.decoder import Decoder
from headrace.runtime import ops
from headrace.runtime.engine.prompt_chunks import SMALLEST, ChunkBudget
from headrace.runtime.engine.request import TokenLogprobs
from headrace.runtime.ops import native
from tests.support.commands import headrace
from tests.support.gguf_layered_models import write_layered
from tests.support.tiny import quantize_model
from tests.support.tiny_chat import write_byte_tokenizer, write_chat_model
from tests.test_docs import check, sections

SMALL = ("--tokens", "8", "--sequences", "4")
needs_kernels = pytest.mark.skipif(not native.status().available, reason="needs the native kernels")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("plain") / "tiny", context=600)


@pytest.fixture(scope="module")
def model(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantized, so that its rows keep their bits on the native kernels."""
    directory = quantize_model(plain, tmp_path_factory.mktemp("quantized") / "tiny")
    write_byte_tokenizer(directory)
    return directory


@pytest.fixture(autouse=True)
def _reset_fallbacks() -> None:
    native.fallbacks.clear()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(verify, arguments, catch_exceptions=False, standalone_mode=False)


def load(path: Path) -> LoadedModel:
    return load_model(path, name="tiny")


@needs_kernels
def test_a_pipeline_of_two_ranks_has_the_bits_of_one_machine(model: Path) -> None:
    hosts = ("--hosts", "localhost,localhost", "--split", "pipeline")
    done = headrace("verify", "-m", model, *hosts, *SMALL, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["exact_expected"]
    results = {row["name"]: row["result"] for row in found["checks"]}
    assert set(results.values()) == {"equal"}
    assert "alone, on this machine only" in results
    assert "after a restart, K/V from disk" not in results


@needs_kernels
def test_batching_does_not_change_bits(model: Path) -> None:
    done = invoke("-m", str(model), *SMALL, "--json")
    found = json.loads(done.stdout)
    check(found, sections("verify.md")["The document"])
    assert done.return_value == 0
    assert found["passed"]
    assert found["exact_expected"], found["expectation"]
    assert {row["result"] for row in found["checks"]} == {"equal"}
    names = [row["name"] for row in found["checks"]]
    assert {"2 at a time", "4 at a time", "with a shared prefix", "prompts token by token"} <= set(names)
    assert any(name.startswith("threads: ") for name in names)
    notes = {row["name"]: row["note"] for row in found["checks"]}
    assert notes["short of memory, preempted"].startswith("preemptions: ")
    assert not notes["with a shared prefix"].startswith("0 ")
    assert not notes["after a restart, K/V from disk"].startswith("0 ")
    entries = {row["name"]: row["kv_entries"] for row in found["checks"]}
    assert entries.pop("alone, by another call") == 0
    assert all(entries.values())


@needs_kernels
def test_verify_finds_a_kv_block_changed_on_disk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.runtime.kv import disk

    stored = disk._bytes

    def damaged(pool: Any, group: int, block: int | None, entries: int) -> bytes | None:
        content = stored(pool, group, block, entries)
        return None if content is None else bytes([content[0] ^ 1]) + content[1:]

    monkeypatch.setattr(disk, "_bytes", damaged)
    loaded = load(model)
    rows = {row.name: row for row in Verification(loaded, expectation(loaded), VerifyPlan(4, 2)).run()}
    (wrong,) = (row for row in rows.values() if not row.passed)
    assert wrong.name == "after a restart, K/V from disk"
    assert KVChange(1, 0) in wrong.kv_changes


@needs_kernels
def test_verify_finds_one_flipped_bit_of_any_logit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Decoder.logits

    def broken(self: Decoder, x: mx.array) -> mx.array:
        rows = logits(self, x)  # (rows, V)
        if rows.shape[0] < 2:
            return rows
        least = mx.arange(rows.shape[1]) == mx.argmin(rows, axis=1, keepdims=True)
        return mx.where(least, rows * (1 + 2e-7), rows)

    monkeypatch.setattr(Decoder, "logits", broken)
    loaded = load(model)
    rows = list(Verification(loaded, expectation(loaded), VerifyPlan(6, 4)).run())
    assert "4 at a time" in [row.name for row in rows if not row.passed]
    assert not any(row.flips for row in rows)


@pytest.mark.sampled
@pytest.mark.skipif(not ops.select().supports_packed(32), reason="needs operations that read packed K/V")
@pytest.mark.parametrize("kv", ["q8", "k8v4", "q4"])
def test_every_bit_is_the_same_in_every_format(model: Path, kv: str) -> None:
    found = json.loads(invoke("-m", str(model), *SMALL, "--json", "--kv", kv).stdout)
    assert found["exact_expected"], found["expectation"]
    assert {row["result"] for row in found["checks"]} == {"equal"}


@needs_kernels
def test_verify_finds_a_row_that_changes_in_a_batch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Decoder.logits

    def broken(self: Decoder, x: mx.array) -> mx.array:
        rows = logits(self, x)  # (rows, V)
        return rows if rows.shape[0] < 3 else mx.concatenate([rows[:2], rows[2:] * 1.0001])

    monkeypatch.setattr(ChunkBudget, "budget", lambda *_: SMALLEST)  # the last is read when the first has ended
    monkeypatch.setattr(Decoder, "logits", broken)
    done = invoke("-m", str(model), *SMALL)
    assert done.return_value == 1
    assert "NOT equal: 4 at a time; " in " ".join(done.stdout.split())
    wrong = [line for line in done.stdout.splitlines() if " differs " in line]
    assert not any("2 at a time" in line or "alone" in line for line in wrong)


def test_answers_are_close_where_equal_bits_are_not_expected(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(plain)
    expected = expectation(loaded)
    assert not expected.exact
    rows = list(Verification(loaded, expected, VerifyPlan(6, 3)).run())
    assert {row.result for row in rows} <= {"equal", "close", "near ties"}
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, x: logits(self, x) * (1.0 if x.shape[0] < 2 else 0.5))
    assert "differs" in {row.result for row in Verification(loaded, expected, VerifyPlan(6, 3)).run()}


@needs_kernels
def test_convolutions_do_not_depend_on_other_rows(tmp_path: Path) -> None:
    (target := tmp_path / "hybrid").mkdir()
    convert_gguf(write_layered(tmp_path / "m.gguf", "falcon-h1", matrices="Q8_0"), target)
    assert expectation(load_model(target, name="hybrid")).exact


def test_ctrl_c_prints_the_finished_checks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.app.verify import checks

    run: Callable[..., Any] = checks.Verification.run

    def interrupted(self: Verification, begin: Any) -> Any:
        for number, row in enumerate(run(self, begin)):
            if number == 2:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(checks.Verification, "run", interrupted)
    done = invoke("-m", str(model), *SMALL)
    assert done.return_value == 130
    assert "interrupted after 2 checks" in done.stdout


def trace(*steps: tuple[int, float, float]) -> Trace:
    """Tokens with the log probabilities of the tokens 0 and 1."""
    said = Trace()
    for token, zero, one in steps:
        said.tokens.append(token)
        said.logprobs.append(TokenLogprobs((zero, one)[token], [(0, zero), (1, one)]))
    return said


def test_answers_are_compared_up_to_the_first_flip() -> None:
    first = trace((0, -0.1, -3.0), (1, -0.7, -0.69), (0, -0.2, -2.0))
    assert compare(0, first, trace((0, -0.1, -3.0), (1, -0.7, -0.69), (0, -0.2, -2.0))).same_bits
    flipped = compare(5, first, trace((0, -0.1, -3.0), (0, -0.69, -0.71), (1, -9.0, -0.1)))
    assert flipped.flip is not None
    assert (flipped.tokens, flipped.flip.sequence, flipped.flip.position) == (2, 5, 1)
    assert flipped.flip.margin == pytest.approx(0.01)
    assert flipped.gap == pytest.approx(0.02)
    assert compare(0, first, trace((0, -0.1, -3.0))).missing == 2
    longer = compare(0, trace((0, -0.1, -3.0)), first)
    assert (longer.same_bits, longer.missing) == (False, 2)
    assert compare(0, first, trace((0, -0.1, -3.0)), cut=True).same_bits
    assert not compare(0, first, trace((0, -0.1, -3.0001)), cut=True).same_bits


def test_verify_runs_as_a_process(model: Path, tmp_path: Path) -> None:
    done = headrace("verify", "-m", model, "--tokens", "4", "--sequences", "2", home=tmp_path, code=0)
    assert "2 at a time" in done.stdout
    assert "check 1 of " in done.stderr
