"""Fuzzing: python -m tests.fuzz [TARGET...] --seconds N --seed S: all targets, or these, for N seconds altogether.

Prints a line per target, saves the first inputs of every kind of problem in a folder, and exits with 1 if there is one.
`--only NUMBER` runs a single input of one target in this process and prints the result.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.fuzz.driver import Report, fuzz
from tests.fuzz.target import TARGETS, chance_of, make_target
from tests.fuzz.worker import attempt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at a time")
    parser.add_argument("--save", type=Path, default=Path("build/fuzz"), help="where inputs with a problem go")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this input of one target here")
    given = parser.parse_args()
    names = given.targets or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no such target: {', '.join(unknown)}")
    if given.only is not None:
        return _only(names[0], given.seed, given.only)
    reports = []
    for report in fuzz(names, seed=given.seed, seconds=given.seconds, jobs=given.jobs, saved=given.save):
        reports.append(report)
        _show(report)
    found = sum(sum(report.problems.values()) for report in reports)
    print(f"{sum(report.inputs for report in reports):,} inputs to {len(reports)} targets, {found} with a problem")
    if found:
        print(f"saved in {given.save}")
    return 1 if found else 0


def _show(report: Report) -> None:
    rate = report.inputs / report.seconds if report.seconds else 0
    print(
        f"{report.name:18} {report.inputs:>10,} inputs {rate:>9,.0f}/s {sum(report.problems.values()):>6} problems",
        flush=True,
    )
    for kind, count in report.problems.most_common():
        print(f"    {count:>6} x {kind}")


def _only(name: str, seed: int, number: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        target = make_target(name, Path(folder))
        given = target.make(chance_of(name, seed, number))
        print(ascii(given)[:20_000])
        problem = attempt(target, given)
    print(problem or "nothing came out that should not")
    return 1 if problem else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # MLX aborts at exit where a thread that computed is gone: those that made a finding's input again
