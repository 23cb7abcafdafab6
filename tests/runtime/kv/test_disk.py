"""Blocks kept on disk come back bit for bit or not at all, whatever happens to the files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.kv.disk import DiskStore, StoredBlock, file_names
from headrace.runtime.ops import BLOCK

PLACE = b"p" * 16
KEY = b"k" * 16
BLOCK_OF_TWO = StoredBlock(b"b" * 16, KEY, (1, -2, 3), b"\0\0\1", (b"keys and values", None, b""))


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", max_bytes=10_000)


def test_a_stored_block_is_read_back(store: DiskStore, tmp_path: Path) -> None:
    assert store.get(PLACE) is None
    assert not store.has(PLACE, KEY)
    assert store.put(PLACE, BLOCK_OF_TWO)
    assert store.get(PLACE) == BLOCK_OF_TWO
    assert store.has(PLACE, KEY)
    assert not store.has(PLACE, b"x" * 16)
    (file,) = (tmp_path / "kv").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert (tmp_path / "kv").stat().st_mode & 0o077 == 0
    store.clear()
    assert store.get(PLACE) is None


@given(data=st.data())
def test_a_changed_file_is_a_miss(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = DiskStore(tmp_path_factory.mktemp("kv"), max_bytes=10_000)
    store.put(PLACE, BLOCK_OF_TWO)
    path = store._path(PLACE)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert store.get(PLACE) is None


@given(st.binary(max_size=200))
def test_malformed_block_content_with_a_valid_digest_is_a_miss(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes
) -> None:
    from hashlib import blake2b

    store = DiskStore(tmp_path_factory.mktemp("kv"), max_bytes=10_000)
    content = b"headkv\0\3" + noise
    store._path(PLACE).write_bytes(content + blake2b(content, digest_size=16).digest())
    found = store.get(PLACE)
    assert found is None or len(found.decode_written) == len(found.tokens)


def test_a_block_of_an_older_format_is_a_miss(store: DiskStore) -> None:
    from hashlib import blake2b

    store.put(PLACE, BLOCK_OF_TWO)
    path = store._path(PLACE)
    content = path.read_bytes()[:-16].replace(b"headkv\0\3", b"headkv\0\2")  # packed heads as they are
    path.write_bytes(content + blake2b(content, digest_size=16).digest())
    assert store.get(PLACE) is None
    assert not store.has(PLACE, KEY)


def test_a_damaged_block_is_written_again(store: DiskStore) -> None:
    store.put(PLACE, BLOCK_OF_TWO)
    path = store._path(PLACE)
    path.write_bytes(path.read_bytes()[:-1] + b"x")  # its head is sound
    assert store.get(PLACE) is None
    assert not store.has(PLACE, KEY)
    assert store.put(PLACE, BLOCK_OF_TWO)
    assert store.get(PLACE) == BLOCK_OF_TWO


def test_the_least_recently_used_block_is_evicted(store: DiskStore) -> None:
    big = StoredBlock(b"b" * 16, KEY, (1,), b"\0", (bytes(3000),))
    names = [bytes([i]) * 16 for i in range(5)]
    for age, name in enumerate(names):
        store.put(name, big)
        os.utime(store._path(name), (1000 + age, 1000 + age))
    assert store.get(names[0]) == big  # used now
    store.trim()
    assert [store.get(name) is not None for name in names] == [True, False, False, True, True]
    assert store.nbytes <= 10_000


def test_partial_files_of_dead_processes_are_removed(store: DiskStore) -> None:
    store.put(PLACE, BLOCK_OF_TWO)
    half = store._path(PLACE).with_suffix(".123")
    half.write_bytes(b"half")
    store.trim()
    assert half.exists()
    os.utime(half, (1000, 1000))
    store.trim()
    assert not half.exists()
    assert store.get(PLACE) == BLOCK_OF_TWO


@pytest.mark.parametrize("call", ["open", "write", "replace", "mkdir"])
def test_a_full_disk_keeps_stored_blocks(store: DiskStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store.put(PLACE, BLOCK_OF_TWO)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    class FullFile:
        def __init__(self, descriptor: int, *_: object) -> None:
            os.close(descriptor)

        def __enter__(self) -> "FullFile":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        write = full

    with monkeypatch.context() as patched:
        if call == "open":
            patched.setattr(os, "open", full)
        elif call == "write":
            patched.setattr(os, "fdopen", FullFile)
        else:
            patched.setattr(Path, call, full)
        assert not store.put(PLACE, StoredBlock(b"o" * 16, b"o" * 16, (), b"", ()))
    assert store.get(PLACE) == BLOCK_OF_TWO
    assert [path.name for path in store._folder.iterdir()] == [PLACE.hex()]


def test_an_unusable_folder_is_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = DiskStore(tmp_path / "file" / "kv", max_bytes=100)
    assert not store.put(PLACE, BLOCK_OF_TWO)
    assert store.get(PLACE) is None
    assert store.nbytes == 0
    store.trim()


WRITE_OFTEN = """
import sys
from pathlib import Path
from headrace.runtime.kv.disk import DiskStore, StoredBlock
value, store = int(sys.argv[2]), DiskStore(Path(sys.argv[1]), max_bytes=100_000)
for _ in range(200):
    store.put(b"p" * 16, StoredBlock(b"k" * 16, b"k" * 16, (value,) * 50, bytes(50), (bytes([value]) * 20_000,)))
    store.trim()
"""


def test_two_processes_write_the_same_block(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITE_OFTEN, tmp_path, str(value)]) for value in (1, 2)]
    store = DiskStore(tmp_path, max_bytes=100_000)
    seen = 0
    while any(writer.poll() is None for writer in writers):
        found = store.get(PLACE)
        if found is not None:
            assert found.groups == (bytes([found.tokens[0]]) * 20_000,)
            seen += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen
    assert [path.name for path in tmp_path.iterdir()] == [PLACE.hex()]


def test_a_blocks_name_depends_on_all_tokens_before_it() -> None:
    tokens = list(range(2 * BLOCK + 5))
    first = list(file_names(b"r" * 16, tokens))
    assert [list(part) for _, part in first] == [tokens[:BLOCK], tokens[BLOCK : 2 * BLOCK], tokens[2 * BLOCK :]]
    longer = list(file_names(b"r" * 16, [*tokens, 7]))
    assert [place for place, _ in longer] == [place for place, _ in first]  # the end is the same place
    changed = list(file_names(b"r" * 16, [9, *tokens[1:]]))
    other = list(file_names(b"s" * 16, tokens))
    assert not {place for place, _ in first} & {place for place, _ in [*changed, *other]}
