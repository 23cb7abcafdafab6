"""Two commands on one home at once: each succeeds as alone, or fails with one line.

Run as `python -m tests.faults.pairs FOLDER [TIMES [PAIR...]]`: both commands of a pair begin within a few hundredths of
a second, TIMES times. Afterwards what they made is there and whole, and so is what was there before. Prints a line of
JSON for each pair. Linux and macOS.
"""

import json
import os
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.app.config.settings import default_text
from headrace.models.registry.store import Store
from tests.faults.io_commands import conversations, results, settings
from tests.fuzz.forked import FORKS, run_on
from tests.support.hub_server import HubServer
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import IM_END, write_chat_model

_ANSWER = ["-n", "8", "-t", "0", "--logit-bias", f"{IM_END}=-100", "-q"]
_APART_S = 0.06  # between two beginnings, at most
_REPO = "org/whole"


@dataclass(frozen=True, slots=True)
class Pair:
    """`check` is given the folder and how both ended, and raises AssertionError for what should not be left so.

    codes: what they may end with. fresh: on a home where nothing is yet.
    """

    first: list[str]
    second: list[str]
    check: Callable[[Path, tuple[int, int]], None]
    codes: tuple[tuple[int, int], ...] = ((0, 0),)
    fresh: bool = False


def pairs(folder: Path) -> dict[str, Pair]:
    """Return the pairs by name; a folder of requests is written for them."""
    model = str(folder / "model")
    out = str(folder / "work" / "out")
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"id": f"q{i}", "prompt": f"question {i}"}) + "\n" for i in range(6)))
    run = ["run", "hi", "-m", model, "--save", *_ANSWER]
    batch = ["batch", str(source), "-o", out, "-m", model, *_ANSWER]
    pull = ["models", "pull", "-q", _REPO]
    doctor = ["sessions", "doctor", "--export", out]
    write = ["paths", "--write-settings"]
    one_is_refused = ((0, 0), (0, 2), (2, 0))
    return {
        "first starts": Pair(run, run, _kept(2), fresh=True),
        "runs": Pair(run, run, _kept(3)),
        "run, rm": Pair(run, ["sessions", "rm", "last", "--yes"], _removed, ((0, 0), (1, 0))),
        "run, doctor": Pair(run, doctor, _exported),
        "doctors": Pair(doctor, doctor, _exported, one_is_refused),
        "run, export": Pair(run, ["sessions", "export", "last", "-o", out], _exported),
        "settings": Pair(write, write, _documented, fresh=True),
        "pulls": Pair(pull, pull, _pulled),
        "pull, rm": Pair(pull, ["models", "rm", _REPO, "--yes"], _pulled_or_not, ((0, 0), (0, 1), (0, 2))),
        "batches": Pair(batch, batch, _answered, one_is_refused),
    }


def _kept(count: int) -> Callable[[Path, tuple[int, int]], None]:
    def check(work: Path, _: tuple[int, int]) -> None:
        found = conversations(work)
        assert [len(messages) for messages in found] == [2] * count, found
        assert len({messages[1] for messages in found if messages[0] == "hi"}) == 1, found

    return check


def _removed(work: Path, codes: tuple[int, int]) -> None:
    """`last` was the one before, or the one that is being written: whoever writes is told then, or was done."""
    found = conversations(work)
    assert [len(messages) for messages in found] == [2], found
    assert not codes[0] or found[0][0] == "first"


def _exported(work: Path, _: tuple[int, int]) -> None:
    text = (work / "out").read_text("utf-8")
    assert "first" in text or "hi" in text  # the one before, or the one that is being written
    assert conversations(work)[0][0] == "first"


def _documented(work: Path, _: tuple[int, int]) -> None:
    assert settings(work) == default_text()


def _pulled(work: Path, _: tuple[int, int]) -> None:
    store = Store(work / "home" / "data" / "models")
    (found,) = (model for name in store.names() if (model := store.get(name)) is not None)
    for file in (work.parent / "model").iterdir():
        assert (found.path / file.name).read_bytes() == file.read_bytes()


def _pulled_or_not(work: Path, _: tuple[int, int]) -> None:
    if Store(work / "home" / "data" / "models").names():
        _pulled(work, (0, 0))


def _answered(work: Path, _: tuple[int, int]) -> None:
    assert len(results(work)) == 6


def _one(folder: Path, pair: Pair, chance: random.Random) -> tuple[tuple[int, ...], str]:
    """(how both ended, what is wrong)."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder / ("fresh" if pair.fresh else "start"), work)
    running = []
    for number, arguments in enumerate((pair.first, pair.second)):
        running.append(FORKS.Process(target=_run, args=(folder, arguments, number)))
        running[-1].start()
        time.sleep(chance.uniform(0, _APART_S))
    for process in running:
        process.join(PATIENCE_S)
        process.kill()
        process.join()
    first, second = (process.exitcode for process in running)
    told = [(folder / f"stderr{number}").read_text("utf-8", "replace") for number in range(2)]
    try:
        assert (first, second) in pair.codes
        assert not any("Traceback" in text for text in told)
        for code, text in zip((first, second), told, strict=True):
            assert len([line for line in text.splitlines() if line.startswith("headrace: ")]) == (code != 0)
        pair.check(work, (first, second))
    except Exception:
        return (first, second), f"{traceback.format_exc()[-600:]} {told}"
    return (first, second), ""


def _run(folder: Path, arguments: list[str], number: int) -> None:
    """In a fork."""
    streams = [
        os.open(os.devnull, os.O_RDONLY),
        os.open(os.devnull, os.O_WRONLY),
        os.open(folder / f"stderr{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
    ]
    code: Any = 0
    try:
        run_on(arguments, streams)
    except SystemExit as end:
        code = end.code
    os._exit(code)


def main(folder: Path, times: int, only: list[str]) -> None:
    write_chat_model(folder / "model")
    home = folder / "work" / "home"
    cache = str(folder / "work" / "cache")
    (folder / "fresh").mkdir()
    (folder / "start").mkdir()
    with HubServer() as hub:
        os.environ |= {"HEADRACE_HOME": str(home), "HF_HUB_CACHE": cache, "HF_HOME": cache}
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        hub.add(_REPO, {path.name: path.read_bytes() for path in (folder / "model").iterdir()})
        first = FORKS.Process(
            target=_run, args=(folder, ["run", "first", "-m", str(folder / "model"), "--save", *_ANSWER], 0)
        )
        first.start()
        first.join()
        assert first.exitcode == 0, (folder / "stderr0").read_text()
        (folder / "start").rmdir()
        (folder / "work").rename(folder / "start")
        for name, pair in pairs(folder).items():
            if not only or name in only:
                chance = random.Random(name)
                codes = Counter[str]()
                wrong = []
                for _ in range(times):
                    ended, problem = _one(folder, pair, chance)
                    codes[str(ended)] += 1
                    wrong += [problem] if problem else []
                told = {"pair": name, "ended": codes, "wrong": len(wrong), "some": wrong[:3]}
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 20, sys.argv[3:])
