"""Writers of all stored data, each with a check after a failure.

A writer says what is promised from now on (`Promise`: a line that `check` understands). After a fault, `check` must
find all of that, and nothing unreadable; `tidy` says whether the writer could clean up behind itself. What runs a
writer in a child, under a fault of some kind, is `attempt`.
"""

import json
import os
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.app.batch.output import ResultFile
from headrace.app.batch.parse import BatchDefaults, BatchLine, parse_lines
from headrace.app.batch.result import digest_of
from headrace.app.config.presets import Preset, delete_preset, load_presets, save_preset
from headrace.app.config.settings import load_settings, save_setting
from headrace.app.sessions.store import SessionStore
from headrace.models.registry.store import Store
from headrace.runtime.errors import HeadraceError
from headrace.runtime.kv.disk import DiskStore, StoredBlock, file_names
from headrace.runtime.ops import BLOCK

DONE = 0
FAILED = 3
FOREIGN = 4
Promise = Callable[[str], None]


def write_sessions(folder: Path, promise: Promise) -> None:
    with closing(SessionStore(folder / "sessions.db")) as store:
        session = store.create()
        parent = None
        for number in range(6):
            asked = store.add(session.id, parent, "user", f"question {number} " + "why " * 300)
            promise(f"{asked.id} {len(asked.content)}")
            said = store.begin_answer(session.id, asked.id, "m")
            store.grow(said.id, "word " * 400, durable=True)
            promise(f"{said.id} 2000")
            store.finish(said.id, "stop")
            parent = said.id


def check_sessions(folder: Path, promised: list[str], **_: bool) -> None:
    with closing(SessionStore(folder / "sessions.db")) as store:
        assert [row[0] for row in store.db.rows("PRAGMA integrity_check")] == ["ok"]
        for line in promised:
            number, length = map(int, line.split())
            assert len(store.message(number).content) >= length, f"message {number} lost some of its text"


_LINES: list[Any] = parse_lines([json.dumps({"id": i, "prompt": "x"}).encode() for i in range(30)], BatchDefaults())


def write_batch(folder: Path, promise: Promise) -> None:
    file = ResultFile(folder / "out.jsonl")
    try:
        file.begin({line.digest: line.number for line in _LINES}, in_order=True)
        for line in reversed(_LINES):
            if line.digest not in file.answered:
                file.write(line, _result(line))
                promise(line.digest)
    finally:
        file.close()


def _result(line: BatchLine) -> dict[str, Any]:
    return {"line": line.number, "request": line.digest, "text": "said " * 40, "error": None}


def check_batch(folder: Path, promised: list[str], *, tidy: bool) -> None:
    path = folder / "out.jsonl"
    kept = (
        [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.exists() else []
    )
    digests = [digest_of(json.loads(line))[0] for line in kept]
    assert len(digests) == len(set(digests)), "a result is there twice"
    assert set(promised) <= set(digests), "a result is gone"
    write_batch(folder, lambda _: None)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [_result(line) for line in _LINES]
    assert not tidy or [each.name for each in folder.iterdir()] == ["out.jsonl"], "something half written was left"


_BLOCK = StoredBlock(b"b" * 16, b"k" * 16, tuple(range(BLOCK)), bytes(BLOCK), (bytes(20_000), None))


def write_kv(folder: Path, promise: Promise) -> None:
    store = DiskStore(folder / "kv", 1 << 20)
    for number in range(3):
        place = next(iter(file_names(bytes([number]), _BLOCK.tokens)))[0]
        if store.put(place, _BLOCK):
            promise(place.hex())


def check_kv(folder: Path, promised: list[str], *, tidy: bool) -> None:
    store = DiskStore(folder / "kv", 1 << 20)
    for path in folder.glob("kv/*"):
        assert not tidy or not path.suffix, "something half written was left"
        assert path.suffix or store.get(bytes.fromhex(path.name)) == _BLOCK
    assert all(store.get(bytes.fromhex(place)) == _BLOCK for place in promised)


_THEMES = ("one", "two" * 500, "three")


def write_settings(folder: Path, promise: Promise) -> None:
    for theme in _THEMES:
        save_setting("screen", "theme", theme, folder / "settings.toml")
        promise(theme)


def check_settings(folder: Path, promised: list[str], *, tidy: bool) -> None:
    """The theme in place may be newer than the promised one: renamed, and then the folder's fsync failed."""
    found = load_settings(folder / "settings.toml").screen.theme
    themes = ("", *_THEMES)
    assert found in themes[len(promised) : len(promised) + (1 if tidy else 2)]
    names = {path.name for path in folder.iterdir()}
    assert not tidy or names <= {"settings.toml", ".settings.toml.lock"}, "something half written was left"


def write_presets(folder: Path, promise: Promise) -> None:
    for name in _THEMES:
        save_preset(name[:40], Preset(name), folder / "presets.toml")
        promise(name[:40])
    delete_preset(_THEMES[0], folder / "presets.toml")
    promise("")


def check_presets(folder: Path, promised: list[str], *, tidy: bool) -> None:
    names = [name[:40] for name in _THEMES]
    states = [names[:count] for count in range(len(names) + 1)] + [names[1:]]
    found = load_presets(folder / "presets.toml")
    assert list(found) in states[len(promised) : len(promised) + (1 if tidy else 2)]
    assert all(preset.system[:40] == name for name, preset in found.items())


def write_models(folder: Path, promise: Promise) -> None:
    def build(directory: Path) -> dict[str, Any]:
        (directory / "config.json").write_text("{}" + " " * 3000)
        (directory / "model.safetensors").write_bytes(bytes(9000))
        return {"source": "x"}

    store = Store(folder / "models")
    there = {model.name for model in store.list()}
    for name in ("one", "two"):
        if name not in there:
            store.install(name, build)
        promise(name)
    store.remove("one")
    promise("")


def check_models(folder: Path, promised: list[str], *, tidy: bool) -> None:
    found = [model.name for model in Store(folder / "models").list()]
    states = [[], ["one"], ["one", "two"], ["two"]]
    assert found in states[len(promised) : len(promised) + (1 if tidy else 2)]
    for name in found:
        assert (folder / "models" / name / "model.safetensors").read_bytes() == bytes(9000)
        assert len((folder / "models" / name / "config.json").read_bytes()) == 3002
    assert not tidy or not list(folder.glob("models/.partial/*"))


@dataclass(frozen=True, slots=True)
class Writer:
    """`most`: the size of a file, in bytes, beyond which a limit makes no difference."""

    write: Callable[[Path, Promise], None]
    check: Callable[..., None]
    most: int


WRITERS = {
    "sessions": Writer(write_sessions, check_sessions, 400_000),
    "batch": Writer(write_batch, check_batch, 12_000),
    "kv": Writer(write_kv, check_kv, 24_000),
    "settings": Writer(write_settings, check_settings, 6_000),
    "presets": Writer(write_presets, check_presets, 3_000),
    "models": Writer(write_models, check_models, 12_000),
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """Its exit code, its promises before, and the fault of the files left (a traceback, or nothing)."""

    code: int
    promised: list[str]
    wrong: str


def attempt(writer: Writer, folder: Path, prepare: Callable[[], None], *, tidy: bool) -> Attempt:
    """Write in a child, once `prepare` has been called there, and look at what is left."""
    folder.mkdir(parents=True)
    listen, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(listen)
        prepare()
        os._exit(_ending(writer, folder, say))
    os.close(say)
    with os.fdopen(listen) as promises:
        promised = promises.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        writer.check(folder, promised, tidy=tidy)
    except Exception:
        return Attempt(code, promised, traceback.format_exc())
    return Attempt(code, promised, "")


def _ending(writer: Writer, folder: Path, say: int) -> int:
    try:
        writer.write(folder, lambda words: (os.write(say, f"{words}\n".encode()), None)[1])
    except HeadraceError as error:
        return FAILED if "\n" not in str(error) else FOREIGN
    except BaseException:
        traceback.print_exc()
        return FOREIGN
    return DONE
