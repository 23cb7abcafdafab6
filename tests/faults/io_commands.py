"""Whole commands while calls that change files fail: exit code 0 means complete, else one line; a second run succeeds.

Run as `python -m tests.faults.io_commands FOLDER [STEP [COMMAND...]]`: every command, its output redirected to a file,
runs once for each call it makes that changes a file, STEP calls apart, and that call fails, alone or with all that
follow, for want of room (ENOSPC) or for good (EIO); or this call and all that follow write half of what they were to;
or a signal comes before it: Ctrl-C, SIGTERM, SIGKILL. Whatever happens, what was there before must be there; and with
a sound disk again the same command must succeed and leave what it leaves where nothing ever failed. Prints a line of
JSON for each command, as `io_errors` does. Linux.
"""

import ctypes
import errno
import hashlib
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.app.sessions.store import SessionStore
from headrace.models.registry.store import Store
from tests.faults.io_errors import NEVER, SHORT, arm, build
from tests.fuzz.forked import FORKS, run_on
from tests.support.checkpoints import shard, tensor
from tests.support.hub_server import HubServer
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import IM_END, write_chat_model

_ANSWER = ["-n", "8", "-t", "0", "--logit-bias", f"{IM_END}=-100", "-q"]


@dataclass(frozen=True, slots=True)
class Fault:
    """`error`, `for_good`: as `arm` has them."""

    at: int
    error: int
    for_good: bool

    @property
    def codes(self) -> set[int]:
        """Allowed exit codes. 0: done, or possible without the call."""
        if self.error == SHORT:
            return {0}
        return {0, 1} if self.error > 0 else {0, _ENDINGS[-self.error]}


_ENDINGS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
_FAULTS = [
    *((error, for_good) for error in (errno.EIO, errno.ENOSPC) for for_good in (False, True)),
    (SHORT, True),
    *((-number, False) for number in _ENDINGS),
]


@dataclass(frozen=True, slots=True)
class Command:
    """`made`: what it leaves in its folder, comparable; raises where that cannot be read."""

    arguments: list[str]
    made: Callable[[Path], Any]
    before: Callable[[Path], None] = lambda _: None


def stdout(work: Path) -> str:
    return (work / "stdout").read_text("utf-8")


def said(work: Path) -> list[Any]:
    """The answer, and the conversations that are kept: whose texts, in their order."""
    return [stdout(work), conversations(work)[1:]]


def conversations(work: Path) -> list[list[str]]:
    with closing(SessionStore(work / "home" / "data" / "sessions.db")) as store:
        assert [row[0] for row in store.db.rows("PRAGMA integrity_check")] == ["ok"]
        rows = store.db.rows("SELECT session_id, id FROM messages ORDER BY id")
        found: dict[str, list[str]] = {}
        for session, number in rows:
            found.setdefault(session, []).append(store.message(number).content)
    return list(found.values())


def results(work: Path) -> dict[str, str]:
    return {line["id"]: line["text"] for line in map(json.loads, (work / "out").read_text("utf-8").splitlines())}


def file(work: Path) -> bytes:
    return (work / "out").read_bytes()


def models(work: Path) -> dict[str, str]:
    """Files of installed models by what is in them, but for the record of where they came from and when."""
    store = Store(work / "home" / "data" / "models")
    found = [model for name in store.names() if (model := store.get(name)) is not None]
    files = [path for model in found for path in sorted(model.path.iterdir()) if not path.name.startswith(".")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.name in _HUB}


def benched(work: Path) -> list[Any]:
    """The document on standard output, and the page: not its figures, which differ."""
    page = (work / "out").read_text("utf-8").rstrip()
    return [sorted(json.loads(stdout(work))), page[-len("</html>") :]]


def settings(work: Path) -> str:
    return (work / "home" / "config" / "settings.toml").read_text("utf-8")


_HUB: set[str] = set()  # names of the files that the hub has


def commands(folder: Path, hub: HubServer) -> dict[str, Command]:
    model = str(folder / "model")
    out = str(folder / "work" / "out")
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"id": f"q{i}", "prompt": f"question {i}"}) + "\n" for i in range(6)))
    files = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    hub.add("org/whole", dict(files))
    extra = {"model-00002-of-00002.safetensors": shard({"extra": tensor("U8", [400_000], 0)}, 400_000)}
    weights = files.pop("model.safetensors")
    parts = {"model-00001-of-00002.safetensors": weights, **extra}
    names = [name for name in json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")]) if name[:2] != "__"]
    index = {"weight_map": {**dict.fromkeys(names, min(parts)), "extra": max(parts)}}
    hub.add("org/parts", {**files, **parts, "model.safetensors.index.json": json.dumps(index).encode()})
    for repo in hub.repos.values():
        _HUB.update(repo.files)

    def begun(work: Path) -> None:
        """A download that broke off half-way, some of its files there."""
        code, told, _ = end(folder, ["models", "pull", "org/parts", "-q"], Fault(80, errno.EIO, for_good=True))
        assert code == 1, told
        assert any(path.stat().st_size for path in (work / "cache").rglob("blobs/*")), "nothing to go on with"

    def there(work: Path) -> None:
        (work / "out").write_text("what was there")

    pull = ["models", "pull", "-q"]
    export = ["sessions", "export", "last", "-o", out]
    bench = ["bench", "-m", model, "-p", "8", "-n", "4", "-d", "0", "-r", "1", "--no-pg", "--json"]
    return {
        "run": Command(["run", "hi", "-m", model, "--save", *_ANSWER], said),
        "batch": Command(["batch", str(source), "-o", out, "-m", model, *_ANSWER], results),
        "pull": Command([*pull, "org/whole"], models),
        "pull of parts": Command([*pull, "org/parts"], models),
        "pull resumed": Command([*pull, "org/parts"], models, begun),
        "export": Command(export, file),
        "export over": Command([*export, "--force"], file, there),
        "doctor": Command(["sessions", "doctor", "--export", out], file),
        "bench": Command([*bench, "--report", out], benched),
        "settings": Command(["paths", "--write-settings"], settings),
    }


def end(folder: Path, arguments: list[str], fault: Fault | None) -> tuple[int, str, int]:
    """(exit code, what it said on standard error, how many calls it made that change files)."""
    process = FORKS.Process(target=_run, args=(folder, arguments, fault))
    process.start()
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    calls = folder / "calls"
    counted = int(calls.read_text()) if calls.exists() else 0
    return process.exitcode or 0, (folder / "stderr").read_text("utf-8", "replace"), counted


def _run(folder: Path, arguments: list[str], fault: Fault | None) -> None:
    """In the fork: the command, its output in a file of the folder where calls fail."""
    streams = [
        os.open(os.devnull, os.O_RDONLY),
        os.open(folder / "work" / "stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
        os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
    ]
    wanted = fault or Fault(NEVER, errno.EIO, for_good=False)
    arm(folder / "work", wanted.at, wanted.error, for_good=wanted.for_good)
    code: Any = 0
    try:
        run_on(arguments, streams)
    except SystemExit as end:
        code = end.code
    calls = ctypes.CDLL(None).io_errors_calls
    calls.restype = ctypes.c_long
    (folder / "calls").write_text(str(calls()))
    os._exit(code)  # the end of a multiprocessing child would flush what the command has given up


def one(folder: Path, command: Command, fault: Fault, expected: Any) -> tuple[int, str]:
    """(exit code, what is wrong with it, with what it left or with the same command again)."""
    begin(folder, command)
    kept = conversations(folder / "work")[0]
    code, told, _ = end(folder, command.arguments, fault)
    if code not in fault.codes:
        return code, f"ends with {code}: {told[-800:]}"
    if "Traceback" in told:
        return code, f"a traceback: {told[-800:]}"
    errors = [line for line in told.splitlines() if line.startswith("headrace: ")]
    if code == 1 and len(errors) != 1:
        return code, f"{len(errors)} lines that say why: {told[-800:]}"
    if code == 0 and command.made(folder / "work") != expected:
        return code, f"ends with 0 and is not whole: {told[-800:]}"
    if conversations(folder / "work")[0] != kept:
        return code, "a conversation of before is gone"
    if command.before.__name__ == "there" and code and file(folder / "work") not in (b"what was there", expected):
        return code, "the file that was there is neither the old one nor the new one"
    if code == 0:
        return code, ""
    if "--export" in command.arguments and (folder / "work" / "out").exists():
        whole = file(folder / "work") == expected
        return code, "" if whole else "half a file is there, that the next one will not replace"
    code_again, told, _ = end(folder, command.arguments, None)
    made = command.made(folder / "work") if code_again == 0 else None
    if "run" in command.arguments and made is not None:
        made[1] = made[1][-1:]  # what was said when a call failed may be kept, too
    if made != expected:
        return code, f"again, it ends with {code_again}: {told[-800:]}"
    return code, ""


def begin(folder: Path, command: Command) -> None:
    """The folder as it is before the command: a conversation, and what the command finds of its own."""
    shutil.rmtree(folder / "work", ignore_errors=True)
    shutil.copytree(folder / "start", folder / "work")
    command.before(folder / "work")


def main(folder: Path, step: int, only: list[str]) -> None:
    write_chat_model(folder / "model")
    (folder / "start").mkdir()
    with HubServer() as hub:
        work = folder / "work"
        cache = str(folder / "work" / "cache")
        os.environ |= {"HEADRACE_HOME": str(work / "home"), "HF_HUB_CACHE": cache, "HF_HOME": cache}
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        work.mkdir()
        code, told, _ = end(folder, ["run", "first", "-m", str(folder / "model"), "--save", *_ANSWER], None)
        assert code == 0, told
        (folder / "start").rmdir()
        work.rename(folder / "start")
        for name, command in commands(folder, hub).items():
            if not only or name in only:
                print(json.dumps(every(folder, name, command, step)), flush=True)


def every(folder: Path, name: str, command: Command, step: int) -> dict[str, Any]:
    begin(folder, command)
    code, told, calls = end(folder, command.arguments, None)
    assert (code, calls > 0) == (0, True), told
    expected = command.made(folder / "work")
    codes: Counter[int] = Counter()
    wrong = []
    for at in range(0, calls, step):
        for error, for_good in _FAULTS:
            fault = Fault(at, error, for_good)
            ended, problem = one(folder, command, fault, expected)
            codes[ended] += 1
            wrong += [f"{fault}: {problem}"] if problem else []
    failed = codes.total() - codes[0]
    return {"kind": name, "calls": calls, "done": codes[0], "failed": failed, "wrong": len(wrong), "some": wrong[:6]}


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve()
    if "io_errors.so" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = str(build(where))
        os.execv(sys.executable, [sys.executable, "-m", "tests.faults.io_commands", *sys.argv[1:]])
    main(where, int(sys.argv[2]) if len(sys.argv) > 2 else 1, sys.argv[3:])
