"""Files that are only shortcuts: anything may be in them, and not being able to write them is no error."""

from pathlib import Path

import pytest

from headrace.runtime.config.cache_file import read_cache, write_cache


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "cache.json"
    assert read_cache(file) == {}
    for content in ({"a": [1, 2.5, None]}, {}):
        write_cache(file, content)
        assert read_cache(file) == content
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"\xff\xfe", b"[" * 100_000])
def test_whatever_is_wrong_reads_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cache.json").write_bytes(content)
    assert read_cache(tmp_path / "cache.json") == {}


def test_where_nothing_can_be_written_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_cache(tmp_path / "file" / "cache.json", {"a": 1})
    (tmp_path / "cache.json").mkdir()
    write_cache(tmp_path / "cache.json", {"a": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.json", "file"]
