"""Everything that is kept, written while no file may grow beyond a limit: what was promised is there, and can be read.

Run as `python -m tests.faults.full_disk FOLDER [STEP]`: for each kind of writer and each limit, STEP bytes apart, a
child writes until it is done or fails. Prints a line of JSON for each kind: how often it was done, failed in our own
words, failed otherwise, and what was wrong with what it left. Linux gives EFBIG where a full disk gives ENOSPC; to a
writer both are an OSError in the middle of a write.
"""

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from headrace.app.batch.line import Defaults, Line
from headrace.app.batch.output import ResultFile
from headrace.app.batch.parse import parse_lines
from headrace.app.batch.result import digest_of
from headrace.app.sessions.store import SessionStore
from headrace.app.settings import load_settings, save_setting
from headrace.models.registry.store import Store
from headrace.runtime.errors import HeadraceError
from headrace.runtime.kv.disk import DiskStore, Stored, places
from headrace.runtime.ops import BLOCK

DONE, FAILED, FOREIGN = 0, 3, 4
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


def check_sessions(folder: Path, promised: list[str]) -> None:
    with closing(SessionStore(folder / "sessions.db")) as store:
        assert [row[0] for row in store.db.rows("PRAGMA integrity_check")] == ["ok"]
        for line in promised:
            number, length = map(int, line.split())
            assert len(store.message(number).content) >= length, f"message {number} lost some of its text"


_LINES: list[Any] = parse_lines([json.dumps({"id": i, "prompt": "x"}).encode() for i in range(30)], Defaults())


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


def _result(line: Line) -> dict[str, Any]:
    return {"line": line.number, "request": line.digest, "text": "said " * 40, "error": None}


def check_batch(folder: Path, promised: list[str]) -> None:
    path = folder / "out.jsonl"
    kept = (
        [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.exists() else []
    )
    digests = [digest_of(json.loads(line))[0] for line in kept]
    assert len(digests) == len(set(digests)), "a result is there twice"
    assert set(promised) <= set(digests), "a result is gone"
    write_batch(folder, lambda _: None)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [_result(line) for line in _LINES]
    assert [each.name for each in folder.iterdir()] == ["out.jsonl"], "something half written was left"


_BLOCK = Stored(b"b" * 16, b"k" * 16, tuple(range(BLOCK)), bytes(BLOCK), (bytes(20_000), None))


def write_kv(folder: Path, promise: Promise) -> None:
    store = DiskStore(folder / "kv", 1 << 20)
    for number in range(3):
        place = next(iter(places(bytes([number]), _BLOCK.tokens)))[0]
        if store.put(place, _BLOCK):
            promise(place.hex())


def check_kv(folder: Path, promised: list[str]) -> None:
    store = DiskStore(folder / "kv", 1 << 20)
    for path in folder.glob("kv/*"):
        assert not path.suffix, "something half written was left"
        assert store.get(bytes.fromhex(path.name)) == _BLOCK
    assert all(store.get(bytes.fromhex(place)) == _BLOCK for place in promised)


def write_settings(folder: Path, promise: Promise) -> None:
    for theme in ("one", "two" * 500, "three"):
        save_setting("screen", "theme", theme, folder / "settings.toml")
        promise(theme)


def check_settings(folder: Path, promised: list[str]) -> None:
    assert load_settings(folder / "settings.toml").screen.theme == (promised[-1] if promised else "")
    assert [path.name for path in folder.iterdir()] in ([], ["settings.toml"]), "something half written was left"


def write_models(folder: Path, promise: Promise) -> None:
    def build(directory: Path) -> dict[str, Any]:
        (directory / "config.json").write_text("{}" + " " * 3000)
        (directory / "model.safetensors").write_bytes(bytes(9000))
        return {"source": "x"}

    for name in ("one", "two"):
        Store(folder / "models").install(name, build)
        promise(name)


def check_models(folder: Path, promised: list[str]) -> None:
    assert [model.name for model in Store(folder / "models").list()] == promised
    assert not list(folder.glob("models/.partial/*"))


# Name -> (what writes, what looks at the rest, the largest limit that makes a difference).
KINDS: dict[str, tuple[Callable[[Path, Promise], None], Callable[[Path, list[str]], None], int]] = {
    "sessions": (write_sessions, check_sessions, 400_000),
    "batch": (write_batch, check_batch, 12_000),
    "kv": (write_kv, check_kv, 24_000),
    "settings": (write_settings, check_settings, 6_000),
    "models": (write_models, check_models, 12_000),
}


def attempt(kind: str, folder: Path, limit: int) -> tuple[int, str]:
    """(how it ended, what is wrong with what it left)."""
    write, check, _ = KINDS[kind]
    folder.mkdir(parents=True)
    listen, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(listen)
        os._exit(_limited(write, folder, limit, say))
    os.close(say)
    with os.fdopen(listen) as promises:
        promised = promises.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        check(folder, promised)
    except Exception:
        return code, traceback.format_exc()
    return code, ""


def _limited(write: Callable[[Path, Promise], None], folder: Path, limit: int, say: int) -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write(folder, lambda words: (os.write(say, f"{words}\n".encode()), None)[1])
    except HeadraceError as error:
        return FAILED if "\n" not in str(error) else FOREIGN
    except BaseException:
        traceback.print_exc()
        return FOREIGN
    return DONE


def limits(kind: str, step: int) -> Iterator[int]:
    most = KINDS[kind][2]
    yield from range(0, most, max(1, most // 200 if step == 0 else step))
    yield resource.RLIM_INFINITY


def main(folder: Path, step: int) -> None:
    for kind in KINDS:
        codes, wrong = [], []
        for number, limit in enumerate(limits(kind, step)):
            code, problem = attempt(kind, folder / f"{kind}{number}", limit)
            codes.append(code)
            wrong += [f"limit {limit}: {problem}"] if problem else []
        told = {name: codes.count(code) for name, code in (("done", DONE), ("failed", FAILED))}
        print(json.dumps({"kind": kind, **told, "foreign": len(codes) - sum(told.values()), "wrong": wrong[:3]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
