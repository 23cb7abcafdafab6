"""Run the tests against deliberate faults, one at a time, in a copy of the tree.

    python -m tests.faults.deliberate                  # the whole list
    python -m tests.faults.deliberate --sample 20      # every n-th fault
    python -m tests.faults.deliberate ID ...           # these

Prints a line for each fault: caught, NOT CAUGHT, error (the tests could not be collected) or hung.
Exit code 1 unless all were caught.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from headrace.runtime import _native
from tests.faults.deliberate.faults import ROOT, Fault, faults

_LIMIT_S = 900
_RESULTS = {0: "NOT CAUGHT", 1: "caught"}
# An editable installation finds the packages of the original tree first.
_SITE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
"""


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


def run_tests(tree: Path, tests: Sequence[str]) -> str:
    """Return the result of the tests in `tree`."""
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile", "faults"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return "hung"
    return _RESULTS.get(done.returncode, "error")


def check(tree: Path, fault: Fault) -> str:
    """Apply the fault, run its tests, restore the file; return the result."""
    file = tree / fault.file
    original = file.read_text(encoding="utf-8")
    try:
        file.write_text(fault.applied(tree), encoding="utf-8")
        return run_tests(tree, fault.tests)
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
    arguments = parser.parse_args()
    wanted = chosen(arguments.ids, arguments.sample)
    with tempfile.TemporaryDirectory(prefix="headrace-faults-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        if arguments.clean:
            tests = sorted({test for fault in wanted for test in fault.tests})
            clean = run_tests(tree, tests)
            print({"NOT CAUGHT": "all pass"}.get(clean, "not all pass"))
            return clean != "NOT CAUGHT"
        results = []
        for fault in wanted:
            begun = time.monotonic()
            results.append(check(tree, fault))
            print(f"{results[-1]:10}  {time.monotonic() - begun:5.0f} s  {fault.id}  {fault.file}", flush=True)
    print(f"{results.count('caught')} of {len(results)} caught")
    return results.count("caught") != len(results)


if __name__ == "__main__":
    sys.exit(main())
