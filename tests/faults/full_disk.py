"""All writers under a file size limit: promised data is there and readable.

Run as `python -m tests.faults.full_disk FOLDER [STEP]`: for each kind of writer and each limit, at most STEP bytes
apart, a child writes until it is done or fails. Prints a line of JSON for each kind: how often it was done, failed in
our own words, failed otherwise, and what was wrong with what it left. Linux gives EFBIG where a full disk gives ENOSPC;
to a writer both are an OSError in the middle of a write.
"""

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.faults.writers import DONE, FAILED, WRITERS, attempt


def limits(kind: str, step: int) -> Iterator[int]:
    most = WRITERS[kind].most
    yield from range(0, most, max(1, most // 200 if step == 0 else min(step, most // 8)))
    yield resource.RLIM_INFINITY


def main(folder: Path, step: int) -> None:
    for kind, writer in WRITERS.items():
        codes = []
        wrong = []
        for number, limit in enumerate(limits(kind, step)):
            allowed = (limit, resource.RLIM_INFINITY)
            done = attempt(
                writer,
                folder / f"{kind}{number}",
                lambda allowed=allowed: resource.setrlimit(resource.RLIMIT_FSIZE, allowed),  # type: ignore[misc]
                tidy=True,
            )
            codes.append(done.code)
            wrong += [f"limit {limit}: {done.wrong}"] if done.wrong else []
        told = {name: codes.count(code) for name, code in (("done", DONE), ("failed", FAILED))}
        print(json.dumps({"kind": kind, **told, "foreign": len(codes) - sum(told.values()), "wrong": wrong[:3]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
