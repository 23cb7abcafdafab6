"""The model store: complete or absent models, one builder at a time, nothing outside it touched."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.models.registry.store import Store, directory_bytes
from headrace.runtime.errors import CheckpointError, FetchError, HeadraceError, UsageError
from tests.support.checkpoints import write
from tests.support.patience import PATIENCE_S

NAME = "tiny-1"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


def build(directory: Path) -> dict[str, Any]:
    write(directory)
    return {"source": "a test", "licence": "MIT"}


def leftovers(store: Store) -> list[str]:
    partial = store.root / ".partial"
    return sorted(path.name for path in partial.iterdir()) if partial.exists() else []


def test_an_installed_model_is_listed_until_it_is_removed(store: Store) -> None:
    assert store.get(NAME) is None
    assert store.list() == []
    model = store.install(NAME, build)
    assert model.path == model.entry == store.root / NAME
    assert model.origin["licence"] == "MIT"
    assert model.origin["installed"].endswith("Z")
    assert store.get(NAME) == model
    assert store.list() == [model]
    assert leftovers(store) == []
    size = directory_bytes(model.path)
    assert store.remove(NAME) == size > 36
    assert store.get(NAME) is None
    assert store.remove(NAME) == 0


def test_a_file_in_place_of_the_store_is_named(store: Store) -> None:
    store.root.write_text("")
    for read in (store.names, store.list):
        with pytest.raises(HeadraceError) as caught:
            read()
        assert str(caught.value) == f"the models in {store.root} cannot be read: {os.strerror(errno.ENOTDIR)}"
        assert "HEADRACE_HOME" in (caught.value.hint or "")


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_new_folder_of_models_on_a_mac_is_left_out_of_backups(
    store: Store, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("headrace.models.registry.store.run_tool", lambda *command: asked.append(command))
    monkeypatch.setattr(sys, "platform", platform)
    store.install(NAME, build)
    store.install("tiny-2", build)
    assert asked == [("/usr/bin/tmutil", "addexclusion", str(store.root))] * (platform == "darwin")


@pytest.mark.parametrize("snapshot", ["x" * 5000, "/" + "x/" * 5000, "\0", 5, ["x"]])
def test_a_snapshot_that_cannot_be_a_folder_is_a_broken_or_missing_model(store: Store, snapshot: object) -> None:
    entry = store.root / "long"
    entry.mkdir(parents=True)
    (entry / "headrace.json").write_text(json.dumps({"snapshot": snapshot}))
    with suppress(CheckpointError):
        assert store.get("long") is None
    assert store.list() == []


def test_facts_written_by_the_builder_are_kept(store: Store) -> None:
    def converting(directory: Path) -> dict[str, Any]:
        write(directory)
        (directory / "headrace.json").write_text(json.dumps({"tensor_types": ["Q4_1"], "licence": "from the file"}))
        return {"source": "here", "licence": None}

    origin = store.install(NAME, converting).origin
    assert (origin["tensor_types"], origin["source"], origin["licence"]) == (["Q4_1"], "here", "from the file")


def test_second_install_does_not_build_again(store: Store) -> None:
    store.install(NAME, build)

    def never(_: Path) -> dict[str, Any]:
        raise AssertionError("built twice")

    assert store.install(NAME, never).name == NAME


def test_replace_swaps_the_model(store: Store) -> None:
    store.install(NAME, build)

    def newer(directory: Path) -> dict[str, Any]:
        return {**build(directory), "source": "newer"}

    assert store.install(NAME, newer, replace=True).origin["source"] == "newer"
    assert leftovers(store) == []


@pytest.mark.parametrize("error", [FetchError("no network"), KeyboardInterrupt(), RuntimeError("bug")])
def test_failed_build_leaves_nothing(store: Store, error: BaseException) -> None:
    def failing(directory: Path) -> dict[str, Any]:
        write(directory)
        raise error

    with pytest.raises(type(error)):
        store.install(NAME, failing)
    assert store.get(NAME) is None
    assert leftovers(store) == []


def test_failed_replacement_keeps_the_old_model(store: Store) -> None:
    old = store.install(NAME, build)

    def failing(_: Path) -> dict[str, Any]:
        raise FetchError("no network")

    with pytest.raises(FetchError):
        store.install(NAME, failing, replace=True)
    assert store.get(NAME) == old


def test_a_build_without_config_is_no_model(store: Store) -> None:
    with pytest.raises(CheckpointError):
        store.install(NAME, lambda _: {})
    assert store.get(NAME) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_disk_errors_are_one_line(store: Store, number: int) -> None:
    def full(_: Path) -> dict[str, Any]:
        raise OSError(number, os.strerror(number))

    with pytest.raises(HeadraceError) as caught:
        store.install(NAME, full)
    assert "\n" not in str(caught.value)
    assert leftovers(store) == []


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", ".partial", ".locks", "a\0b", "a b", "-x", "x..y", "x" * 300]
)
def test_path_tricks_are_refused(store: Store, name: str) -> None:
    operations: list[Callable[[], object]] = [
        lambda: store.get(name),
        lambda: store.remove(name),
        lambda: store.install(name, build),
    ]
    for operation in operations:
        with pytest.raises(UsageError):
            operation()


def test_links_in_the_store_are_not_followed(store: Store, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside")
    (outside / "headrace.json").write_text("{}")
    store.root.mkdir(parents=True)
    (store.root / NAME).symlink_to(outside)
    assert store.get(NAME) is None
    assert store.list() == []
    store.remove(NAME)
    assert not (store.root / NAME).is_symlink()
    assert (outside / "model.safetensors").exists()


def test_removing_a_model_keeps_the_files_that_its_links_point_to(store: Store, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside")
    model = store.install(NAME, build)
    (model.path / "link").symlink_to(outside)
    store.remove(NAME)
    assert (outside / "model.safetensors").exists()


def test_hub_entries_point_to_a_snapshot_of_the_cache(store: Store, tmp_path: Path) -> None:
    snapshot = write(tmp_path / "hub" / "snapshots" / "abc")
    model = store.install(NAME, lambda _: {"snapshot": str(snapshot)})
    assert model.path == snapshot
    (snapshot / "config.json").unlink()  # the hub cache was cleaned
    assert store.get(NAME) is None
    assert store.remove(NAME) > 0
    assert snapshot.exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_broken_entry_names_the_command_that_removes_it(store: Store, content: bytes) -> None:
    model = store.install(NAME, build)
    (model.path / "headrace.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        store.get(NAME)
    assert f"models rm {NAME}" in str(caught.value.hint)
    assert store.list() == []
    store.remove(NAME)
    assert store.get(NAME) is None


def test_leftovers_of_a_crash_are_deleted(store: Store) -> None:
    """A process killed while building leaves its partial directory; the next install of anything clears it."""
    script = (
        "import os, signal; from pathlib import Path; from headrace.models.registry.store import Store\n"
        "def build(directory):\n"
        "    (directory / 'half').write_bytes(bytes(1000))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"Store(Path({str(store.root)!r})).install('crashed', build)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    assert leftovers(store) == ["crashed"]
    assert store.get("crashed") is None
    store.install(NAME, build)
    assert leftovers(store) == []


def _slow_install(root: Path, mark: Path) -> None:
    def build_slowly(directory: Path) -> dict[str, Any]:
        with mark.open("a") as file:
            file.write("x")
        time.sleep(0.3)
        return build(directory)

    Store(root).install(NAME, build_slowly)


def test_two_processes_build_once(store: Store, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_slow_install, args=(store.root, mark)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert mark.read_text() == "x"
    assert store.get(NAME) is not None


@contextmanager
def installing(store: Store, name: str) -> Iterator[Callable[[], None]]:
    """Another process in the middle of installing `name`; calling what is yielded lets it finish."""
    script = (
        "import sys; from pathlib import Path; from headrace.models.registry.store import Store\n"
        "def build(directory):\n"
        "    print('building', flush=True); sys.stdin.readline()\n"
        "    (directory / 'config.json').write_text('{}'); return {'source': 'the other process'}\n"
        f"Store(Path({str(store.root)!r})).install({name!r}, build, replace=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        stdin = other.stdin
        assert other.stdout.readline() == "building\n"

        def finish() -> None:
            stdin.write("\n")
            stdin.flush()

        yield finish
        assert other.wait(PATIENCE_S) == 0


def test_a_model_being_installed_is_not_removed(store: Store) -> None:
    store.install("busy", build)
    with installing(store, "busy") as finish:
        with pytest.raises(HeadraceError, match="another headrace"):
            store.remove("busy")
        store.install(NAME, build)
        assert leftovers(store) == ["busy"]
        finish()
    assert store.get("busy") is not None


def test_an_install_waits_for_another_process_and_uses_its_result(store: Store) -> None:
    with installing(store, NAME) as finish:

        def progress(stage: str, _done: int, _total: int | None, /) -> None:
            assert "waiting" in stage
            finish()

        assert store.install(NAME, build, progress=progress).origin["source"] == "the other process"
