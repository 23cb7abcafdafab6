"""Cache files with any content, and folders that cannot be written."""

import os
from pathlib import Path

import pytest

from headrace.runtime.config.cache_file import read_cache, touch_cache, write_cache


def test_written_content_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "cache.json"
    assert read_cache(file) == {}
    for content in ({"a": [1, 2.5, None]}, {}):
        write_cache(file, content)
        assert read_cache(file) == content
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"\xff\xfe", b"[" * 100_000])
def test_broken_files_read_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cache.json").write_bytes(content)
    assert read_cache(tmp_path / "cache.json") == {}


def test_the_least_recently_used_files_go(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.json" for name in "abcd"]
    for age, file in enumerate(files):
        write_cache(file, {})
        os.utime(file, (age, age))
    (tmp_path / "other").touch()
    touch_cache(files[1], 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "c.json", "d.json", "other"]
    touch_cache(tmp_path / "new.json", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "d.json", "other"]
    touch_cache(tmp_path / "missing" / "new.json", 3)


def test_failed_writes_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_cache(tmp_path / "file" / "cache.json", {"a": 1})
    (tmp_path / "cache.json").mkdir()
    write_cache(tmp_path / "cache.json", {"a": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.json", "file"]
