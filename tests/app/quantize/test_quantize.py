"""`headrace quantize` on tiny random models: budget, equality with mlx-lm, resume, interrupts and errors."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import pytest
from click.testing import CliRunner, Result

from headrace.app.cli.commands import run_command_line
from headrace.app.cli.models import models
from headrace.app.cli.quantize import quantize
from headrace.app.quantize import quantize as run_module
from headrace.app.quantize import sensitivity
from headrace.models.checkpoint.quantization import Quantization
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.loading.keep_quantized import keep_quantized
from headrace.models.loading.load import load_model
from headrace.models.registry.resolve import resolve
from headrace.models.registry.store import Store
from headrace.runtime.errors import HeadraceError, UsageError
from tests.support.alone import new_cache
from tests.support.commands import headrace
from tests.support.gguf_models import write_gguf
from tests.support.tiny import VARIANTS
from tests.support.tiny_chat import write_chat_model

_SHORT = 24  # tokens measured and scored


@pytest.fixture(autouse=True)
def _few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(run_module, "MEASURED", _SHORT)
    monkeypatch.setattr(run_module, "SCORED", _SHORT)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A model of one layer: six parts."""
    return write_chat_model(tmp_path / "tiny", num_hidden_layers=1, intermediate_size=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("measured") / "tiny", num_hidden_layers=2)


@pytest.fixture
def measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose parts are measured by the first test that needs it."""
    monkeypatch.setenv("HEADRACE_HOME", str(model.parent / "home"))
    return model


def run(*arguments: object) -> Result:
    return CliRunner().invoke(quantize, [*map(str, arguments)], catch_exceptions=False, standalone_mode=False)


def document(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return found


def headrace_logits(directory: Path, tokens: list[int]) -> mx.array:
    network = load_model(directory, name="tiny").network
    cache = new_cache(network, 64)
    cache.reserve(len(tokens))
    return network.logits(network.layers(network.embed(mx.array([tokens])), cache))


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [2.6, 3.5, 4.5, 6.25, 8.5])
def test_the_budget_of_bits_is_kept_and_used(measured: Path, tmp_path: Path, bits: float) -> None:
    found = document(measured, "--bits", bits, "-o", tmp_path / "out")
    written = open_checkpoint(tmp_path / "out")
    weights = sum(info.nbytes // 4 for info in open_checkpoint(measured).tensors.values())
    assert found["weight_bytes"] == written.nbytes
    assert found["bits_per_weight"] == pytest.approx(written.nbytes * 8 / weights)
    assert bits - 0.3 < found["bits_per_weight"] <= bits


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["llama", "qwen3", "llama-biased"])
def test_the_result_is_the_same_model_in_mlx_lm(tmp_path: Path, family: str) -> None:
    from mlx_lm.utils import load

    source = write_chat_model(tmp_path / family, **VARIANTS[family])
    document(source, "--bits", 4.2, "-o", tmp_path / "out")
    model, *_ = load(str(tmp_path / "out"))
    theirs = model(mx.array([[5, 6, 7]]))[0, -1].astype(mx.float32)
    ours = headrace_logits(tmp_path / "out", [5, 6, 7])[0].astype(mx.float32)
    assert mx.abs(ours - theirs).max().item() < 0.02 * mx.abs(theirs).max().item()


def test_projections_of_one_input_share_a_format(measured: Path, tmp_path: Path) -> None:
    modules = document(measured, "--bits", 4.1, "-o", tmp_path / "out")["modules"]
    attention = [modules[f"model.layers.1.self_attn.{name}_proj"] for name in "qkv"]
    assert attention[0] == attention[1] == attention[2]
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert {name: entry for name, entry in section.items() if isinstance(entry, dict)} == modules


def test_the_store_has_the_result_and_its_figures(measured: Path) -> None:
    found = document(measured, "--bits", 4.5)
    assert found["name"] == "tiny-4.5bit"
    assert Store().get("tiny-4.5bit") is not None
    shown = CliRunner().invoke(models, ["show", "tiny-4.5bit"], catch_exceptions=False).output
    assert f"{found['kl']['value']:.4f} nats of KL" in shown
    for speed in (found["predicted"]["tokens_per_second"], found["measured_tokens_per_second"]):
        assert f"{speed:.1f} tok/s" in shown
    listed = CliRunner().invoke(models, ["list", "tiny-4.5bit"], catch_exceptions=False).output
    assert f"{found['bits_per_weight']:.2f} bits, mixed" in listed
    with pytest.raises(UsageError, match="installed already"):
        run(measured, "--bits", 4.5)


def test_the_figures_are_printed(measured: Path, tmp_path: Path) -> None:
    printed = run(measured, "--bits", 4.5, "-o", tmp_path / "out").output
    for label in ("Bits a weight", "Decode step", "Predicted", "Measured", "KL", "Top-1 agreement", "Directory"):
        assert label in printed


def interrupting(monkeypatch: pytest.MonkeyPatch, call: int) -> list[str]:
    """Raise an interrupt in place of the `call`-th measurement; return the list of the parts measured."""
    measured: list[str] = []
    original = sensitivity.trial

    def trial(plain: Any, decoder: Any, part: Any, importance: Any) -> Any:
        if len(measured) == call:
            os.kill(os.getpid(), signal.SIGINT)
        measured.append(part.name)
        return original(plain, decoder, part, importance)

    monkeypatch.setattr(sensitivity, "trial", trial)
    return measured


def test_an_interrupted_run_leaves_no_file_and_resumes(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = document(plain, "--bits", 4.5, "-o", tmp_path / "whole")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "second"))
    with monkeypatch.context() as patched:
        interrupting(patched, 3)
        with pytest.raises(click.exceptions.Abort) as raised:
            run(plain, "--bits", 4.5, "-o", tmp_path / "out")
    assert str(raised.value.__cause__).startswith("interrupted: 3 of 6 parts are measured and kept")
    assert sorted(entry.name for entry in tmp_path.iterdir() if "out" in entry.name) == []
    measured = interrupting(monkeypatch, 99)
    again = document(plain, "--bits", 4.5, "-o", tmp_path / "out")
    assert len(measured) == 3
    assert again["modules"] == parts["modules"]
    assert again["kl"] == parts["kl"]


def test_measurements_serve_other_budgets_but_no_changed_weights(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document(plain, "--bits", 4.5, "-o", tmp_path / "first")
    measured = interrupting(monkeypatch, 99)
    document(plain, "--bits", 3.5, "-o", tmp_path / "second")
    assert measured == []
    os.utime(plain / "model.safetensors", (1, 1))
    document(plain, "--bits", 3.5, "-o", tmp_path / "third")
    assert len(measured) == 6


def test_a_failed_write_leaves_nothing(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module, "write_mixed", full)
    with pytest.raises(HeadraceError, match=r"cannot be written: No space left on device"):
        run(measured, "--bits", 4.5, "-o", tmp_path / "out")
    assert not [entry for entry in tmp_path.iterdir() if "out" in entry.name]


def test_an_interrupt_has_exit_code_130(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupting(monkeypatch, 0)
    arguments = ["quantize", str(plain), "--bits", "4.5", "-o", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
    assert run_command_line() == 130
    errors = capsys.readouterr().err
    assert "interrupted: 0 of 6 parts are measured and kept; the same command goes on" in errors
    assert "Traceback" not in errors


def test_memory_leaves_room_for_kv_and_the_program(measured: Path, tmp_path: Path) -> None:
    from headrace.models.cost.costs import working_memory
    from headrace.models.cost.shape_sources import shape_of_checkpoint

    shape = shape_of_checkpoint(open_checkpoint(measured))
    memory = working_memory(shape) + shape.cost.kv_bytes(4096) + 120_000
    found = document(measured, "--memory", f"{memory / 1e6}MB", "-o", tmp_path / "out")
    assert 100_000 < found["weight_bytes"] <= 120_000


def test_a_speed_is_predicted_for_the_chip(measured: Path, tmp_path: Path) -> None:
    slow = document(measured, "--at-least", "100 tok/s", "--chip", "M4 Pro", "-o", tmp_path / "slow")
    assert slow["predicted"]["tokens_per_second"] >= 100
    assert slow["predicted"]["target"].startswith("M4 Pro")


def test_an_impossible_speed_is_refused_before_the_weights_are_read(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "load_resolved", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(UsageError, match=r"reaches .* tok/s at most on M4 Pro"):
        run(plain, "--at-least", "1000000000", "--chip", "M4 Pro", "-o", tmp_path / "fast")
    with pytest.raises(UsageError, match="cannot be read"):
        run(plain, "--bits", "4", "--text", tmp_path / "none", "-o", tmp_path / "fast")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one of --bits, --memory and --at-least"),
        (("--bits", "4", "--memory", "12GB"), "takes one budget, not --bits and --memory"),
        (("--bits", "1.5"), "--bits must be from 2 to 9, not 1.5"),
        (("--bits", "nan"), "--bits must be from 2 to 9"),
        (("--memory", "lots"), "--memory must be a size, not 'lots'"),
        (("--memory", "0GB"), "--memory must be a size"),
        (("--at-least", "fast"), "--at-least must be a speed, not 'fast'"),
        (("--bits", "2"), "takes .* at least"),
        (("--memory", "1MB"), "takes .* at least"),
    ],
)
def test_impossible_budgets_are_refused(plain: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(plain, *arguments, "-o", tmp_path / "out")


def test_an_existing_folder_is_not_written(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        run(plain, "--bits", 4.5, "-o", tmp_path / "out")
    with pytest.raises(UsageError, match="is not a folder"):
        run(plain, "--bits", 4.5, "-o", tmp_path / "none" / "out")
    with pytest.raises(UsageError, match="--as names a model of the store"):
        run(plain, "--bits", 4.5, "-o", tmp_path / "new", "--as", "name")


def test_a_folder_that_cannot_be_written_is_named_before_the_work(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, whom no mode stops
    monkeypatch.setattr(run_module, "resolve", None)
    with pytest.raises(UsageError, match="cannot be written"):
        run(plain, "--bits", 4.5, "-o", tmp_path / "out")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_json_of_a_path_that_is_not_utf_8_is_refused_before_the_work(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "resolve", None)
    strange = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(UsageError, match="is not UTF-8, as JSON has to be"):
        run(plain, "--bits", 4.5, "-o", strange, "--json")
    with pytest.raises(UsageError, match="is not UTF-8, as JSON has to be"):
        run(strange, "--bits", 4.5, "--json")
    monkeypatch.setenv("HEADRACE_HOME", str(strange))  # the result's place without -o
    with pytest.raises(UsageError, match="is not UTF-8, as JSON has to be"):
        run(plain, "--bits", 4.5, "--json")


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model", vocab_size=96)
    with pytest.raises(UsageError, match="the text has token ids outside the vocabulary of 96"):
        run(model, "--bits", 4.5)


def test_a_quantized_model_is_refused_by_name(plain: Path) -> None:
    kept = keep_quantized(resolve(str(plain)), Quantization(4, 32))
    with pytest.raises(UsageError, match=f"{kept.name} is quantized already"):
        run(kept.name, "--bits", 3.5)


def test_a_quantized_gguf_is_refused_before_it_is_installed(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny-Q8_0.gguf", "llama", matrices="Q8_0")
    with pytest.raises(UsageError, match=r"tiny-Q8_0\.gguf is quantized already"):
        run(file, "--bits", 3.5)
    assert Store().names() == []
    assert not (Store().root / ".gguf.json").exists()  # not hashed either


def test_a_short_text_is_refused(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(UsageError, match=r"short.txt has 9 tokens, and 49 are needed"):
        run(plain, "--bits", 4.5, "--text", tmp_path / "short.txt", "-o", tmp_path / "out")


def test_an_error_is_one_line_with_a_hint(plain: Path) -> None:
    done = headrace("quantize", plain, "--bits", "1", home=plain.parent / "home", code=2)
    assert done.stderr.splitlines() == [
        "headrace: --bits must be from 2 to 9, not 1",
        "  hint: scales and biases count, too: 4 bits take 4.5",
    ]
