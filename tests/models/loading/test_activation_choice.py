"""8-bit activations by their measured divergence: when they are taken, and what users are told."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import load
from headrace.app.cli.load_for_answers import load_with_notes
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.host import EngineHost
from headrace.models.loading import activation_choice
from headrace.models.loading.load import LoadedModel, load_model
from headrace.models.registry.resolve import resolve
from headrace.runtime import ops
from headrace.runtime.config.files import write_cache
from headrace.runtime.ops import native, reference
from tests.support.kernels import on_instruction_set
from tests.support.tiny import quantize_model
from tests.support.tiny_chat import write_byte_tokenizer, write_chat_model

needs_kernels = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    quantized = quantize_model(write_chat_model(tmp_path / "plain"), tmp_path / "quantized")
    write_byte_tokenizer(quantized)
    return quantized


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collect the divergences that are measured, on kernels that count as fast with bytes."""
    found: list[float] = []
    measure = activation_choice._measured_kl

    def recorded(*arguments) -> float:  # type: ignore[no-untyped-def]
        found.append(measure(*arguments))
        return found[-1]

    monkeypatch.setattr(activation_choice, "_measured_kl", recorded)
    monkeypatch.setattr(activation_choice, "_FASTER_WIDTHS", {native.status().instruction_set: {4}})
    monkeypatch.setattr(activation_choice, "MAX_KL", 10.0)  # nats, more than a tiny network's
    return found


def _loaded(directory: Path) -> LoadedModel:
    return load_model(directory, name="tiny", activations="auto")


@needs_kernels
def test_a_small_divergence_is_measured_once(directory: Path, measured: list[float]) -> None:
    model = _loaded(directory)
    assert model.activations == 8
    [note] = model.notes
    assert f"{measured[0]:.2g}" in note
    assert 0 < measured[0] < 1
    again = _loaded(directory)
    assert (again.activations, again.notes, len(measured)) == (8, [], 1)


@needs_kernels
def test_a_large_divergence_leaves_16_bits(
    directory: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_choice, "MAX_KL", 0.0)
    for _ in range(2):
        model = _loaded(directory)
        assert model.activations == 16
        [note] = model.notes
        assert f"{measured[0]:.2g}" in note
    assert len(measured) == 1


@needs_kernels
def test_changed_weights_and_broken_measurements_are_measured_again(directory: Path, measured: list[float]) -> None:
    _loaded(directory)
    os.utime(directory / "model.safetensors", ns=(1, 1))
    _loaded(directory)
    assert len(measured) == 2
    for file in activation_choice._cache_folder().iterdir():
        write_cache(file, {"kl": "0.1"})
    _loaded(directory)
    assert len(measured) == 3


@needs_kernels
def test_the_divergences_of_models_used_last_are_kept(
    directory: Path, measured: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "divergences"
    monkeypatch.setattr(activation_choice, "_MAX_MODELS", 3)
    monkeypatch.setattr(activation_choice, "_cache_folder", lambda: folder)
    _loaded(directory)
    [file] = folder.iterdir()
    others = [folder / "a.json", folder / "b.json"]
    for age, path in enumerate([file, *others]):  # this model's is the oldest, until it is used
        write_cache(path, {"kl": 0.1})
        os.utime(path, (age, age))
    _loaded(directory)
    os.utime(directory / "model.safetensors", ns=(1, 1))
    _loaded(directory)
    remaining = set(folder.iterdir())
    assert len(remaining) == 3
    assert {file, others[1]} < remaining
    assert len(measured) == 2


def test_kernels_that_do_not_round_keep_16_bits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "select", lambda *_: reference)
    model = _loaded(directory)
    assert model.activations == 16
    assert "reference" in model.notes[-1]


@needs_kernels
def test_kernels_without_fast_products_of_bytes_keep_16_bits(
    directory: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_choice, "_FASTER_WIDTHS", {})
    model = _loaded(directory)
    assert (model.activations, measured) == (16, [])
    assert str(native.status().instruction_set) in model.notes[-1]


@pytest.fixture
def avx2() -> Iterator[str]:
    yield from on_instruction_set("avx2")


@needs_kernels
@pytest.mark.usefixtures("avx2")
def test_8_bit_weights_keep_16_bits_on_avx2(tmp_path: Path) -> None:
    quantized = quantize_model(write_chat_model(tmp_path / "plain"), tmp_path / "quantized", {"bits": 8})
    write_byte_tokenizer(quantized)
    model = _loaded(quantized)
    assert model.activations == 16
    assert "with weights of 8 bits on the avx2 kernels" in model.notes[-1]


@needs_kernels
def test_a_text_with_ids_beyond_the_vocabulary_leaves_16_bits(tmp_path: Path, measured: list[float]) -> None:
    quantized = quantize_model(write_chat_model(tmp_path / "plain", vocab_size=96), tmp_path / "quantized")
    write_byte_tokenizer(quantized)
    model = _loaded(quantized)
    assert (model.activations, measured) == (16, [])
    assert "outside the model's vocabulary" in model.notes[-1]


@needs_kernels
def test_commands_the_engine_and_the_api_choose_alike(
    directory: Path, measured: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    stages: list[str] = []
    host = EngineHost.load(ModelSpec(str(directory), activations="auto"), lambda stage, *_: stages.append(stage))
    assert host.card().activations == 8
    assert "measuring 8-bit activations" in stages
    assert load_with_notes(resolve(str(directory)), ModelSpec(activations="auto")).activations == 8
    with load(str(directory), activations="auto") as model:
        assert model.generate("hi", max_tokens=1).tokens
    assert len(measured) == 1
    assert "divergence" not in capsys.readouterr().err  # told once, where it was measured
