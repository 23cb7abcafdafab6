"""Valid GGUF files, against the gguf package's reader."""

import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.models.gguf import header
from headrace.models.gguf.container import open_container
from headrace.models.gguf.header import StringList
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.vocabulary import read_vocabulary
from headrace.runtime.errors import CheckpointError
from tests.support.gguf_models import VARIANTS, write_gguf


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


@given(st.lists(st.binary(max_size=20) | st.binary(min_size=250, max_size=260), min_size=1), st.integers(0, 40))
@example([b"a" * 255, b"\0" * 6], 0)
@example([b"\x01" + b"\0" * 7], 0)
def test_the_fast_search_for_ends_of_gguf_texts_equals_the_plain_one(texts: list[bytes], lost: int) -> None:
    content = b"???" + b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    limit = max(3, len(content) - lost)
    each = header._ends_of_texts(content, 3, len(texts), limit)
    together = header._ends_of_short_texts(content, 3, len(texts), limit)
    if together is None:
        plain = all(0 < len(text) < 256 and b"\0" not in text for text in texts)
        assert not plain or lost or sum(len(text) + 8 for text in texts) > 32 * len(texts)
    else:
        assert together == each


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
