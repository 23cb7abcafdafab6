"""Pipes, devices, huge files and millions of values in place of the files next to the weights."""

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.checkpoint.side_file import read_json_object
from headrace.models.checkpoint.validation import check_sound
from headrace.models.loading import load
from headrace.models.loading.recommended import generation_defaults
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tokenizers_library import load_tokenizer
from headrace.runtime.errors import CheckpointError
from tests.support.tiny import write_model
from tests.support.tiny_chat import write_byte_tokenizer, write_chat_model

MORE = "additional_chat_templates/more.jinja"
READ = ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json", MORE)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path)
    (tmp_path / MORE).parent.mkdir()
    return tmp_path


def pipe(file: Path) -> None:
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def huge(file: Path) -> None:
    file.touch()
    os.truncate(file, 3 << 30)  # sparse


def folder(file: Path) -> None:
    file.mkdir()


def loop(file: Path) -> None:
    file.symlink_to(file.name)


@pytest.mark.parametrize("name", READ)
def test_links_out_of_the_directory_are_refused(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret"
    file = directory / name
    elsewhere.write_bytes(file.read_bytes() if file.exists() else b"{{ messages }}")
    file.unlink(missing_ok=True)
    file.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="link out of the model directory"):
        Tokenizer.load(directory)


def test_a_linked_folder_of_templates_is_refused(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "more.jinja").write_text("x")
    (directory / MORE).parent.rmdir()
    (directory / MORE).parent.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="link out of the model directory"):
        Tokenizer.load(directory)


def test_links_of_a_hub_snapshot_lead_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blobs = tmp_path / "models--a--b" / "blobs"
    (snapshot / MORE).parent.mkdir(parents=True)
    blobs.mkdir()
    write_byte_tokenizer(snapshot)
    (snapshot / MORE).write_text("x")
    for number, name in enumerate(READ):
        (snapshot / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(blobs / str(number))
    assert Tokenizer.load(snapshot).encode("a")


def to_nothing(file: Path) -> None:
    """As in a hub cache whose blobs were deleted."""
    file.symlink_to("gone")


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("put", [pipe, endless, huge, folder, loop, to_nothing])
def test_broken_side_files_are_one_line(directory: Path, name: str, put: Callable[[Path], None]) -> None:
    file = directory / name
    file.unlink(missing_ok=True)
    put(file)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"^{Path(name).name} (cannot|is a link)") as caught:
            Tokenizer.load(directory)
        assert "\n" not in str(caught.value)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50e6


@pytest.mark.parametrize("put", [pipe, folder, to_nothing])
def test_a_broken_file_of_recommended_sampling_is_refused(directory: Path, put: Callable[[Path], None]) -> None:
    put(directory / "generation_config.json")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        generation_defaults(directory)


@pytest.mark.sampled
@pytest.mark.parametrize("value", ["[]", "{}", "1.5", "[[]]"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_millions_of_values_are_refused_before_they_are_made(tmp_path: Path, name: str, value: str) -> None:
    write_model(tmp_path, "llama")
    write_byte_tokenizer(tmp_path)
    size = 30 << 20
    (tmp_path / name).write_text('{"weight_map": [' + (value + ",") * (size // (len(value) + 1)) + value + "]}")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="values"):
            (open_checkpoint if "index" in name else Tokenizer.load)(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 120e6


@pytest.mark.parametrize("left", [None, 0, 0.5, 0.999])
def test_weights_that_shrink_while_they_are_read_are_one_line(
    left: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_chat_model(tmp_path / "model")
    shard = directory / "model.safetensors"
    sized = load.shape_to_run

    def shrinking(*args: Any) -> Any:
        if left is None:
            shard.unlink()
        else:
            os.truncate(shard, int(shard.stat().st_size * left))
        return sized(*args)

    monkeypatch.setattr(load, "shape_to_run", shrinking)
    with pytest.raises(CheckpointError):
        load.load_model(directory, name="model")


def test_a_pipe_in_the_store_is_damage(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    pipe(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        check_sound(tmp_path)


def test_long_texts_with_commas_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"chat_template": 'a, b, [c], {d} "' * 500_000}))
    assert len(read_json_object(tmp_path / "x.json")["chat_template"]) == 8_000_000


def test_a_long_text_of_escapes_without_an_end_takes_no_time(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": [' + "," * 900_000 + '"' + '\\"' * 10_000_000)
    with pytest.raises(CheckpointError, match="values"):
        read_json_object(tmp_path / "x.json")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32"])
@pytest.mark.parametrize("read", [read_json_object, load_tokenizer])
def test_millions_of_values_in_utf_16_are_refused_before_they_are_made(
    tmp_path: Path, read: Callable[[Path], object], encoding: str
) -> None:
    """The quote in a string of UTF-16 hides all values after it from a count by bytes."""
    suspect = b"::12345678".decode("utf-16-le")  # bytes for which `load_tokenizer` reads the values itself
    text = f'{{"a": "\\"{suspect}", "b": [' + ",".join(["{}"] * 1_000_000) + "]}"
    (tmp_path / "x.json").write_bytes(text.encode(encoding))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"x\.json cannot be read"):
            read(tmp_path / "x.json")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60e6


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32"])
def test_a_tokenizer_file_in_another_encoding_is_damage(tmp_path: Path, encoding: str) -> None:
    write_model(tmp_path, "llama")
    (tmp_path / "tokenizer.json").write_text("{}", encoding=encoding)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        check_sound(tmp_path)
