"""Run the tests against deliberate faults, one at a time, in a copy of the tree.

    python -m tests.faults.deliberate                  # the whole list
    python -m tests.faults.deliberate --sample 20      # every n-th fault
    python -m tests.faults.deliberate ID ...           # these
    python -m tests.faults.deliberate --guards 5       # by the five nearest guards of each file (tests/guards.py)

Sampled tests run the cases that the whole suite runs. Prints a line for each fault: caught and the first test
that failed, NOT CAUGHT, error (the tests could not be collected) or hung. Exit code 1 unless all were caught.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from headrace.runtime import _native
from tests.faults.deliberate.faults import ROOT, Fault, faults
from tests.guards import Imports

_LIMIT_S = 900
_RESULTS = {0: "NOT CAUGHT", 1: "caught"}  # by pytest's exit code
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)  # FAILED tests/app/test_a.py::test_b - ValueError
# An editable installation finds the packages of the original tree first.
_SITE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
"""


class Outcome(NamedTuple):
    """A run of tests against one fault. test: the first that failed, "" if none did."""

    result: str
    test: str = ""


def environment(tree: Path) -> dict[str, str]:
    """Return the variables with which Python imports `tree`, and the kernels there find MLX's library."""
    library = Path(mx.__file__).parent / "lib"
    return {**os.environ, "PYTHONPATH": str(tree), "LD_LIBRARY_PATH": str(library)}


def copy_tree(target: Path) -> None:
    """Copy the tracked and new files, and the built kernels."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    if _native.__file__ is not None:
        shutil.copy2(_native.__file__, target / "runtime")
    (target / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    code = "import headrace.runtime._native as native; print(native.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=target, env=environment(target), capture_output=True, text=True
    )
    assert Path(found.stdout.strip()).is_relative_to(target), f"the copy is not used: {found.stdout}{found.stderr}"


def run_tests(tree: Path, tests: Sequence[str]) -> Outcome:
    """Run tests in `tree` until one fails."""
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--sampled", "--hypothesis-profile", "faults"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment(tree), capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return Outcome("hung")
    failed = _FAILED.search(done.stdout)
    return Outcome(_RESULTS.get(done.returncode, "error"), failed[1] if failed else "")


def check(tree: Path, fault: Fault, tests: Sequence[str]) -> Outcome:
    """Apply the fault, run tests one by one until one fails, restore the file.

    In one run, pytest would sort a named test into the order of its file.
    """
    file = tree / fault.file
    original = file.read_text(encoding="utf-8")
    outcome = Outcome("NOT CAUGHT")
    try:
        file.write_text(fault.applied(tree), encoding="utf-8")
        for test in tests:
            outcome = run_tests(tree, [test])
            if outcome.result != "NOT CAUGHT":
                break
        return outcome
    finally:
        file.write_text(original, encoding="utf-8")


def chosen(ids: Sequence[str], sample: int | None) -> list[Fault]:
    known = faults()
    if ids:
        by_id = {fault.id: fault for fault in known}
        return [by_id[name] for name in ids]
    return known if sample is None else known[:: max(1, len(known) // sample)][:sample]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests against deliberate faults.")
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--sample", type=int, metavar="N", help="N faults, evenly spread over the list")
    parser.add_argument("--clean", action="store_true", help="the tests on the unchanged tree instead")
    parser.add_argument("--guards", type=int, metavar="N", help="the N nearest guards of each file, not its tests here")
    arguments = parser.parse_args()
    wanted = chosen(arguments.ids, arguments.sample)
    tests_of = {fault.id: fault.tests for fault in wanted}
    if arguments.guards:
        imports = Imports()
        tests_of = {fault.id: tuple(imports.guards(fault.file)[: arguments.guards]) for fault in wanted}
    with tempfile.TemporaryDirectory(prefix="headrace-faults-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        if arguments.clean:
            clean = run_tests(tree, sorted({test for tests in tests_of.values() for test in tests})).result
            print({"NOT CAUGHT": "all pass"}.get(clean, "not all pass"))
            return clean != "NOT CAUGHT"
        num_caught = 0
        for fault in wanted:
            begun = time.monotonic()
            result, test = check(tree, fault, tests_of[fault.id])
            num_caught += result == "caught"
            print(f"{result:10}  {time.monotonic() - begun:5.0f} s  {fault.id}  {fault.file}  {test}", flush=True)
    print(f"{num_caught} of {len(wanted)} caught")
    return num_caught != len(wanted)


if __name__ == "__main__":
    sys.exit(main())
