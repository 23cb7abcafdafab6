"""The integrity check of an installed model: once, paused during decoding, with damage reported."""

import json
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace.models.registry import background_check as module
from headrace.models.registry.background_check import BackgroundCheck
from headrace.models.registry.checksums import RECHECK_DAYS
from headrace.models.registry.resolve import ResolvedModel, resolve
from headrace.models.registry.store import Store
from headrace.runtime.errors import CheckpointError
from tests.support.checkpoints import write
from tests.support.gguf_models import write_gguf
from tests.support.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def model() -> ResolvedModel:
    Store().install("mine", lambda folder: {"source": str(write(folder))})
    return resolve("mine")


def checked(model: ResolvedModel) -> BackgroundCheck:
    check = BackgroundCheck(model)
    check.start()
    check.wait(PATIENCE_S)
    return check


def rot(model: ResolvedModel) -> None:
    """A flipped bit that neither a size nor a time tells of."""
    weights = model.path / "model.safetensors"
    facts = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def test_an_intact_model_is_read_once(model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BackgroundCheck(model).unread_bytes > 0
    assert checked(model).damage is None
    monkeypatch.setattr(module, "content_problems", lambda *_: pytest.fail("read again"))
    again = checked(model)
    assert (again.unread_bytes, again.damage) == (0, None)


def test_a_gguf_that_was_hashed_for_its_import_is_not_read_again(home: Path) -> None:
    file = write_gguf(home / "m.gguf", "llama")
    model = resolve(str(file))
    size = file.stat().st_size
    unread = BackgroundCheck(model).unread_bytes
    assert unread < size
    Store().remove(str(model.stored_as))
    (home / "cache" / "checked.json").unlink()
    # Its digest is known by size and time, so it has not been read this time.
    assert BackgroundCheck(resolve(str(file))).unread_bytes == unread + size


def test_damage_is_reported_and_cached(model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rot(model)
    check = BackgroundCheck(model)
    told = list[CheckpointError]()
    assert check.damage is None
    check.start(told.append)
    check.wait(PATIENCE_S)
    assert [str(damage) for damage in told] == [str(check.damage)]
    assert "mine is damaged" in str(check.damage)
    assert "model.safetensors" in str(check.damage)
    assert check.damage is not None
    assert "`headrace models rm mine`" in (check.damage.hint or "")
    monkeypatch.setattr(module, "content_problems", lambda *_: pytest.fail("read again"))
    assert str(BackgroundCheck(model).damage) == str(check.damage)
    told.clear()
    again = BackgroundCheck(model)
    again.start(told.append)
    again.wait(PATIENCE_S)
    assert len(told) == 1


def test_a_file_that_was_touched_is_read_again(model: ResolvedModel) -> None:
    checked(model)
    rot(model)
    assert checked(model).damage is None  # what a memory by times cannot see
    os.utime(model.path / "model.safetensors", (0, 0))  # now may be when it was written, for a coarse clock of files
    assert checked(model).damage is not None


def test_old_results_are_checked_again(model: ResolvedModel, home: Path) -> None:
    checked(model)
    file = home / "cache" / "checked.json"
    stored = json.loads(file.read_text())
    long_ago = datetime.now(UTC) - timedelta(days=RECHECK_DAYS + 1)
    for entry in stored["files"].values():
        entry["day"] = long_ago.strftime("%Y-%m-%d")
    file.write_text(json.dumps(stored))
    assert BackgroundCheck(model).unread_bytes > 0


def test_reading_pauses_during_decoding(model: ResolvedModel) -> None:
    rot(model)
    check = BackgroundCheck(model)
    with check.paused():
        check.start()
        check.wait(0.05)
        assert check.damage is None
    check.wait(PATIENCE_S)
    assert check.damage is not None


def test_checksums_are_read_by_one_thread_of_idle_priority(
    model: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    def look(*_: object) -> list[str]:
        policy = os.sched_getscheduler(threading.get_native_id()) if hasattr(os, "sched_getscheduler") else -1
        seen.append((threading.current_thread().name, policy))
        return []

    monkeypatch.setattr(module, "content_problems", look)
    before = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else -1
    checked(model)
    assert {name for name, _ in seen} == {"checksums"}
    if hasattr(os, "SCHED_IDLE"):
        assert {policy for _, policy in seen} == {os.SCHED_IDLE}
        assert os.sched_getscheduler(0) == before


def test_unreadable_files_are_reported_and_not_cached(model: ResolvedModel) -> None:
    (model.path / "model.safetensors").unlink()
    assert "cannot be read" in str(checked(model).damage)
    assert BackgroundCheck(model).problems == []


def test_a_model_that_was_never_recorded_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "plain")
    check = checked(resolve(str(tmp_path / "plain")))
    assert (check.unread_bytes, check.damage) == (0, None)


@pytest.mark.parametrize("content", ["", "[]", '{"files": 7}', '{"files": {"x": 1}}'])
def test_a_broken_cache_reads_as_empty(model: ResolvedModel, home: Path, content: str) -> None:
    checked(model)
    (home / "cache" / "checked.json").write_text(content)
    assert BackgroundCheck(model).unread_bytes > 0
    assert checked(model).damage is None
