"""Valid GGUF files, against the gguf package's reader."""

import struct
from pathlib import Path

import gguf
import pytest

from headrace.models.gguf.container import open_container
from headrace.models.gguf.header import StringList
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.vocabulary import read_vocabulary
from headrace.runtime.errors import CheckpointError
from tests.models.gguf.build import VARIANTS, write_gguf


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
def test_metadata_and_tensors_equal_those_of_the_gguf_library(variant: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", variant)
    container = open_container(path)
    reader = gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    ours = {
        key: value.decode() if isinstance(value, StringList) else value for key, value in container.metadata.items()
    }
    assert ours == theirs
    assert [type(value) for value in ours.values()] == [type(value) for value in theirs.values()]
    assert list(container.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        found = container.tensors[tensor.name]
        assert (found.type, found.shape) == (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())))
        assert found.data.tobytes() == tensor.data.tobytes()


def test_tokens_that_are_no_utf_8_are_refused_when_they_are_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    content = path.read_bytes()
    token = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()[5].encode()
    path.write_bytes(content.replace(struct.pack("<Q", len(token)) + token, struct.pack("<Q", len(token)) + b"\xff", 1))
    with pytest.raises(CheckpointError, match="UTF-8"):
        read_vocabulary(Metadata(open_container(path).metadata))


def test_the_reader_of_the_gguf_library_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trusts counts and lengths."""
    path = write_gguf(tmp_path / "m.gguf", "llama")
    monkeypatch.delattr(gguf.GGUFReader, "__init__")
    assert open_container(path).tensors
