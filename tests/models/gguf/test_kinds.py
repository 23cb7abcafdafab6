"""GGUF files that are no language model: refused by their kind, with a hint, before anything else about them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from headrace.app.cli.commands import cli
from headrace.models.gguf import convert_gguf
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from tests.faults.test_gguf import raw_gguf
from tests.support.gguf_models import header, write_gguf


def write_other(path: Path, architecture: str, kind: str = "") -> Path:
    """Write a file of one small tensor. kind: its `general.type`."""
    writer = gguf.GGUFWriter(path, architecture)
    if not architecture:
        writer.kv_data[0].pop("general.architecture", None)
    if kind:
        writer.add_type(kind)
    writer.add_tensor("blk.0.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_vocabulary(path: Path) -> Path:
    writer = header(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "kind", "message"),
    [
        ("llama", "adapter", "m.gguf is an adapter"),
        ("clip", "mmproj", "m.gguf is the vision or audio part of a model"),
        ("clip", "", "m.gguf is the vision or audio part of a model"),
        ("", "imatrix", "m.gguf is an importance matrix"),
        ("controlvector", "", "m.gguf is a control vector"),
        ("eagle3", "model", "m.gguf is a draft model of another one"),
        ("bert", "model", "m.gguf is an embedding model (bert)"),
        ("t5", "model", "m.gguf is an encoder-decoder model (t5)"),
        ("llada", "model", "m.gguf is a diffusion model of text (llada)"),
        ("pockettts", "model", "m.gguf is a speech model (pockettts)"),
        ("flux", "", "m.gguf is an image model (flux)"),
        ("whisper", "", "GGUF architecture 'whisper' is not supported"),
    ],
)
def test_other_kinds_are_refused_by_name(architecture: str, kind: str, message: str, tmp_path: Path) -> None:
    path = write_other(tmp_path / "m.gguf", architecture, kind)
    with pytest.raises(CheckpointError) as caught:
        convert_gguf(path, tmp_path)
    assert str(caught.value) == message
    assert caught.value.hint


def test_a_vocabulary_alone_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf has no tensors: it is the vocabulary of a llama"):
        convert_gguf(write_vocabulary(tmp_path / "m.gguf"), tmp_path)


def test_the_kind_is_named_rather_than_a_missing_chat_template(tmp_path: Path) -> None:
    answer = CliRunner().invoke(cli, ["run", "-m", str(write_other(tmp_path / "m.gguf", "bert")), "Hello"])
    assert "is an embedding model" in str(answer.exception)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "pointer of Git LFS"),
        (b"<!DOCTYPE html><html><title>Not found</title></html>", "web page"),
        (b"tjgg\3\0\0\0" + bytes(64), "from before GGUF"),
    ],
)
def test_files_of_other_formats_come_with_a_hint(content: bytes, hint: str, tmp_path: Path) -> None:
    (path := tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="wrong magic") as caught:
        convert_gguf(path, tmp_path)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("number", "name", "instead"),
    [
        (31, "Q4_0_4_4", "Q4_0"),
        (36, "I2_S of bitnet.cpp", "Q8_0"),
        (40, "NVFP4", "Q4_K_M"),
        (139, "type 139 of ik_llama.cpp", "Q4_K_M"),
        (777, "type 777", "Q4_K_M"),
    ],
)
def test_tensor_types_of_other_programs_come_with_the_file_to_take(
    number: int, name: str, instead: str, tmp_path: Path
) -> None:
    (path := tmp_path / "m.gguf").write_bytes(raw_gguf(tensors=[(b"x", [256], number, 0)]))
    with pytest.raises(UnsupportedModelError) as caught:
        convert_gguf(path, tmp_path)
    assert str(caught.value) == f"m.gguf: tensor x is {name}, which headrace cannot convert"
    assert (caught.value.hint or "").startswith(f"take the {instead} file of this model")


def test_bytes_after_the_last_tensor_change_nothing(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", "llama")
    (longer := tmp_path / "longer.gguf").write_bytes(plain.read_bytes() + b"signature")
    for path in (plain, longer):
        path.with_suffix("").mkdir()
        convert_gguf(path, path.with_suffix(""))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "longer")]
    assert weights[0] == weights[1]
