"""Broken and hostile GGUF files: each gives one `CheckpointError`, without a crash, a hang or a large allocation."""

import contextlib
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.models.gguf import convert_gguf
from headrace.models.gguf.architecture import Contents
from headrace.models.gguf.architectures import architecture_of
from headrace.models.gguf.config import generation_config, model_config
from headrace.models.gguf.container import Container, open_container
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.names import targets
from headrace.models.gguf.tokenizer import build_tokenizer, tokenizer_config
from headrace.models.gguf.vocabulary import read_vocabulary
from headrace.models.registry.resolve import resolve
from headrace.models.registry.store import Store
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from tests.fuzz.mutate import changed
from tests.support.gguf_layered_models import LAYERED, write_layered
from tests.support.gguf_models import VARIANTS, write_gguf

SMALL: dict[str, Any] = {
    "hidden": 32, "inner": 32, "heads": 2, "kv_heads": 1, "layers": 1, "head_dim": 16, "vocabulary": "minimal"
}  # fmt: skip
U8 = 0
I32 = 5
F32 = 6
BOOL = 7
STRING = 8
ARRAY = 9
U64 = 10
Tensor = tuple[bytes, list[int], int, int]


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """A MemoryError for whoever asks for more than half a gigabyte."""
    if sys.platform != "linux":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (512 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def raw_gguf(
    pairs: list[bytes] | None = None,
    tensors: list[Tensor] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 256,
) -> bytes:
    """A GGUF file by hand: metadata pairs, (name, dims, type, offset) tensors, and `data` bytes of zeros."""
    pairs = [pair(b"general.architecture", STRING, text(b"llama"))] if pairs is None else pairs
    tensors = tensors or []
    tensor_count, key_count = counts or (len(tensors), len(pairs))
    head = magic + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(pairs)
    for name, dims, kind, offset in tensors:
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(data)


BIG = 2**63
F32_TYPE = 0
Q4_0_TYPE = 2
NVFP4_TYPE = 40
I64_TYPE = 27

# Files and their errors. Large files are made by the tests alone: all processes import this module.
BROKEN: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "empty": (b"", "too short"),
    "short": (b"GGUF\3\0\0\0", "too short"),
    "another format": (raw_gguf(magic=b"PK\3\4"), "wrong magic"),
    "version 1": (raw_gguf(version=1), "version 1 is not supported"),
    "version 4": (raw_gguf(version=4), "version 4 is not supported"),
    "big-endian": (raw_gguf(version=3 << 24), "big-endian"),
    "tensor count": (raw_gguf(counts=(BIG, 1)), f"claims {BIG} tensors"),
    "key count": (raw_gguf(counts=(0, BIG)), f"claims {BIG} metadata keys"),
    "one key too many": (raw_gguf(counts=(0, 5)), "ends in the middle|unknown value type|appears twice"),
    "key length": (raw_gguf([struct.pack("<Q", BIG)]), "metadata key is"),
    "key not text": (raw_gguf([pair(b"\xff", U8, b"\0")]), "key is not plain text"),
    "escape in a name": (raw_gguf(tensors=[(b"\x1b[2J", [8], NVFP4_TYPE, 0)]), "name is not plain text"),
    "text length": (raw_gguf([pair(b"k", STRING, struct.pack("<Q", BIG))]), "ends in the middle of k"),
    "text not text": (raw_gguf([pair(b"k", STRING, text(b"\xff\xfe"))]), "unreadable GGUF metadata"),
    "value type": (raw_gguf([pair(b"k", 13, b"")]), "unknown value type 13"),
    "boolean": (raw_gguf([pair(b"k", BOOL, b"\2")]), "neither 0 nor 1"),
    "duplicate key": (raw_gguf([pair(b"k", U8, b"\0")] * 2), "appears twice"),
    "reserved key": (raw_gguf([pair(b"GGUF.version", U8, b"\0")]), "reserved"),
    "array length": (raw_gguf([pair(b"k", ARRAY, struct.pack("<IQ", U8, BIG))]), f"claims {BIG} elements of k"),
    "array of texts": (raw_gguf([pair(b"k", ARRAY, struct.pack("<IQ", STRING, 100))]), "claims 100 elements"),
    "array of arrays": (raw_gguf([pair(b"k", ARRAY, struct.pack("<IQIQ", ARRAY, 1, U8, 1))]), "array of arrays"),
    "array type": (raw_gguf([pair(b"k", ARRAY, struct.pack("<IQ", 99, 1))]), "unknown element type 99"),
    "huge array": (raw_gguf([pair(b"k", ARRAY, struct.pack("<IQ", U8, 3 << 20) + bytes(3 << 20))]), "more than"),
    "alignment 0": (raw_gguf([pair(b"general.alignment", 4, struct.pack("<I", 0))]), "alignment is 0"),
    "alignment 48": (raw_gguf([pair(b"general.alignment", 4, struct.pack("<I", 48))]), "alignment is 48"),
    "alignment text": (raw_gguf([pair(b"general.alignment", STRING, text(b"32"))]), "not a 32-bit number"),
    "split": (raw_gguf([pair(b"split.count", 2, struct.pack("<H", 3))]), "one part of a split"),
    "split, not a number": (
        raw_gguf([pair(b"split.count", 12, struct.pack("<d", float("nan")))]),
        "one part of a split",
    ),
    "a text like a book": (raw_gguf([pair(b"k", STRING, text(bytes(5 << 20)))]), "a text of k is 5242880 bytes long"),
    "texts like a library": (
        lambda: raw_gguf([pair(b"%d" % i, STRING, text(bytes(3 << 20))) for i in range(20)]),
        "48 MiB",
    ),
    "very many keys": (lambda: raw_gguf([pair(b"%d" % i, U8, b"\0") for i in range(1 << 15)]), "32768 metadata keys"),
    "very many tensors": (lambda: raw_gguf(counts=(1 << 17, 1), data=25 << 17), "131072 tensors"),
    "no dimensions": (raw_gguf(tensors=[(b"t", [], F32_TYPE, 0)]), "0 dimensions"),
    "many dimensions": (raw_gguf(tensors=[(b"t", [1] * 5, F32_TYPE, 0)]), "5 dimensions"),
    "dimension 0": (raw_gguf(tensors=[(b"t", [0, 4], F32_TYPE, 0)]), "not a multiple"),
    "dimensions wrap": (raw_gguf(tensors=[(b"t", [2**32, 2**32], F32_TYPE, 0)]), "past the end"),
    "not whole blocks": (raw_gguf(tensors=[(b"t", [48], Q4_0_TYPE, 0)]), "block of 32"),
    "offset": (raw_gguf(tensors=[(b"t", [8], F32_TYPE, BIG)]), "past the end"),
    "offset unaligned": (raw_gguf(tensors=[(b"t", [8], F32_TYPE, 4)]), "not aligned to 32"),
    "truncated data": (raw_gguf(tensors=[(b"t", [64], F32_TYPE, 0)], data=255), "past the end"),
    "overlap": (raw_gguf(tensors=[(b"t", [16], F32_TYPE, 0), (b"u", [8], F32_TYPE, 32)]), "t and u overlap"),
    "duplicate tensor": (raw_gguf(tensors=[(b"t", [8], 0, 0), (b"t", [8], 0, 32)]), "same name"),
    "tensor type": (raw_gguf(tensors=[(b"x.weight", [256], NVFP4_TYPE, 0)]), "tensor x.weight is NVFP4, which"),
    "integer tensor": (raw_gguf(tensors=[(b"x", [8], I64_TYPE, 0)]), "tensor x is I64, which"),
    "unknown tensor type": (raw_gguf(tensors=[(b"x", [8], 777, 0)]), "tensor x is type 777, which"),
    "no architecture": (raw_gguf([]), "lacks general.architecture"),
    "architecture type": (raw_gguf([pair(b"general.architecture", U8, b"\1")]), "should be a text"),
}


def test_a_pipe_in_place_of_a_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pipe.gguf"
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        resolve(str(file), store=Store(tmp_path / "store"))


def broken(case: str) -> tuple[bytes, str]:
    """Return a file of `BROKEN` and its error."""
    content, message = BROKEN[case]
    return content if isinstance(content, bytes) else content(), message


@pytest.mark.parametrize("case", BROKEN)
def test_each_broken_file_has_its_message(case: str, tmp_path: Path) -> None:
    content, message = broken(case)
    (path := tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        convert_gguf(path, tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_files_of_other_formats_and_broken_ones_have_different_errors(tmp_path: Path) -> None:
    foreign = {"version 1", "version 4", "big-endian", "tensor type", "integer tensor", "unknown tensor type"}
    for case in BROKEN:
        content, _ = broken(case)
        (path := tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            convert_gguf(path, tmp_path)
        assert isinstance(caught.value, UnsupportedModelError) == (case in foreign), case


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(CheckpointError):
            open_container(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "llama", **SMALL).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (*range(0, 1500, 7), *range(1500, len(whole), 997)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            convert_gguf(path, tmp_path)


@contextlib.contextmanager
def scratch(content: bytes) -> Iterator[tuple[Path, Path]]:
    directory = Path(tempfile.mkdtemp())
    try:
        (path := directory / "m.gguf").write_bytes(content)
        (target := directory / "out").mkdir()
        yield path, target
    finally:
        shutil.rmtree(directory)


def whole_file(variant: str = "llama", **changes: Any) -> bytes:
    with scratch(b"") as (path, _):
        return write_gguf(path, variant, **{**SMALL, **changes}).read_bytes()


WHOLE = whole_file()
HEADER = WHOLE.index(b"output.weight") + 64
NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 31, 32, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
)
PLACES = st.integers(0, HEADER)
MUTATIONS = st.one_of(
    st.tuples(st.just("u8"), PLACES, st.integers(0, 255)),
    st.tuples(st.just("u32"), PLACES, NUMBERS),
    st.tuples(st.just("u64"), PLACES, NUMBERS),
    st.tuples(st.just("cut"), PLACES, st.integers(1, 64)),
    st.tuples(st.just("grow"), PLACES, st.integers(1, 64)),
)


def test_the_gguf_to_be_mutated_converts() -> None:
    with scratch(WHOLE) as (path, target):
        convert_gguf(path, target)


@given(st.lists(MUTATIONS, min_size=1, max_size=3))
def test_a_mutated_file_converts_or_is_refused(mutations: list[tuple[str, int, int]]) -> None:
    content = WHOLE
    for mutation in mutations:
        content = changed(content, *mutation)
    with scratch(content) as (path, target), contextlib.suppress(CheckpointError):
        convert_gguf(path, target)


@given(st.binary(max_size=300))
@example(b"\1" + bytes(300))
def test_arbitrary_bytes_after_the_magic_are_refused(content: bytes) -> None:
    with scratch(b"GGUF\3\0\0\0" + content) as (path, target), pytest.raises(CheckpointError):
        convert_gguf(path, target)


SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**64 - 1), st.integers(-3, 300), st.floats(), st.text(max_size=8)
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=6), st.lists(st.text(max_size=3), max_size=6))


LAYERED_VARIANTS = ("qwen35moe", "gemma4", "nemotron_h_moe", "deepseek2", "granitehybrid-moe")


@cache
def container_of(variant: str) -> Container:
    """Return the header of a small file of this variant. It outlives the file."""
    layered = variant in LAYERED
    with scratch(b"" if layered else whole_file(variant, layers=1)) as (path, _):
        return open_container(write_layered(path, variant) if layered else path)


@pytest.mark.sampled
@pytest.mark.parametrize("variant", ["llama-linear", "qwen2-yarn", "gemma3", *LAYERED_VARIANTS])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_metadata_of_the_wrong_kind_is_refused(variant: str, data: st.DataObject) -> None:
    container = container_of(variant)
    values = dict(container.metadata)
    more = "tokenizer.ggml.pre" if variant in LAYERED else f"{VARIANTS[variant][0]}.rope.dimension_count"
    keys = st.sampled_from(sorted({*values, more, "general.sampling.temp"}))
    values |= data.draw(st.dictionaries(keys, VALUES, min_size=1, max_size=2))
    with contextlib.suppress(CheckpointError):
        metadata = Metadata(values)
        vocabulary = read_vocabulary(metadata)
        shapes = {name: tensor.shape for name, tensor in container.tensors.items()}
        config = model_config(metadata, Contents(shapes, vocab_size=5))
        targets(architecture_of(metadata), config, shapes)
        _, special = build_tokenizer(metadata, vocabulary)
        tokenizer_config(vocabulary, special, 256)
        generation_config(metadata, special)
