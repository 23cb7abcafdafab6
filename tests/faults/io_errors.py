"""All writers while calls that change files fail: promised data is there and readable.

Run as `python -m tests.faults.io_errors FOLDER [STEP]`: each writer runs once for each call it makes that changes a
file (open for writing, write, sync, rename, mkdir, unlink and their kin), STEP calls apart, and that call fails, alone
or with all that follow, for want of room (ENOSPC) or for good (EIO), or writes half of what it was to, as a call may:
nothing has failed then, and the rest takes another. Then, with a sound disk again, the writer runs once more. Prints a
line of JSON for each kind, as `full_disk` does. Linux; the calls are caught by a library that is compiled for it
(`io_errors.cpp`) and loaded before libc.
"""

import ctypes
import errno
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

from tests.faults.writers import DONE, FAILED, WRITERS, Writer, attempt

SOURCE = Path(__file__).with_suffix(".cpp")
NEVER = 1 << 40
SHORT = 0  # in the place of an errno: a write of half the bytes


def build(folder: Path) -> Path:
    """Compile the library that catches calls; raises CalledProcessError with what the compiler said."""
    library = folder / "io_errors.so"
    command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def arm(folder: Path, at: int, error: int, *, for_good: bool) -> None:
    """In this process, from now on: the at-th call under `folder` fails, and maybe all behind it.

    error: an errno, SHORT, or the negative number of a signal that comes before that call.
    """
    ctypes.CDLL(None).io_errors_arm(os.fsencode(folder), ctypes.c_long(at), error, int(for_good))


def count(writer: Writer, folder: Path) -> int:
    """Return the number of calls of a writer without failures."""
    arm(folder, NEVER, errno.EIO, for_good=False)
    folder.mkdir()
    writer.write(folder, lambda _: None)
    calls = ctypes.CDLL(None).io_errors_calls
    calls.restype = ctypes.c_long
    found = int(calls())
    arm(Path(), NEVER, 0, for_good=False)
    return found


def one(writer: Writer, folder: Path, at: int, error: int, *, for_good: bool) -> tuple[int, str]:
    """(how it ended, what is wrong with what it left or with going on)."""
    done = attempt(writer, folder, lambda: arm(folder, at, error, for_good=for_good), tidy=False)
    if done.wrong:
        return done.code, done.wrong
    if error == SHORT and done.code != DONE:
        return done.code, "a short write was taken for a failure"
    try:
        promised = list(done.promised)
        writer.write(folder, promised.append)
        writer.check(folder, list(dict.fromkeys(promised)), tidy=False)
    except Exception:
        return done.code, f"going on: {traceback.format_exc()}"
    return done.code, ""


def main(folder: Path, step: int) -> None:
    for kind, writer in WRITERS.items():
        codes = []
        wrong = []
        for at in range(0, count(writer, folder / kind), step):
            for error in (errno.EIO, errno.ENOSPC, SHORT):
                for for_good in (False, True):
                    name = f"{kind}-{at}-{error}-{for_good}"
                    code, problem = one(writer, folder / name, at, error, for_good=for_good)
                    codes.append(code)
                    wrong += [f"{name}: {problem}"] if problem else []
        told = {name: codes.count(code) for name, code in (("done", DONE), ("failed", FAILED))}
        print(json.dumps({"kind": kind, **told, "foreign": len(codes) - sum(told.values()), "wrong": wrong[:3]}))


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve()
    if "io_errors.so" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = str(build(where))
        os.execv(sys.executable, [sys.executable, "-m", "tests.faults.io_errors", *sys.argv[1:]])
    main(where, int(sys.argv[2]) if len(sys.argv) > 2 else 1)
