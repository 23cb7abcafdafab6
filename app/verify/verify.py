"""A verification from model to document, and the document as a table; docs/verify.md describes both.

`headrace verify` and `bench --report mac` call `verify`. Ctrl-C ends it with the finished checks. `checks.py` has the
checks, `serving.py` the ways to serve, `trace.py` the comparison.

Guard: tests/app/verify/test_verify.py.
"""

from msgspec import Struct
from rich.text import Text

from headrace.app.output.progress import NumberedStages, drawn_progress
from headrace.app.output.tables import Column, print_lines, print_table
from headrace.app.verify.checks import CheckResult, Verification, VerifyPlan
from headrace.app.verify.expectation import expectation
from headrace.app.verify.trace import TOP, Flip
from headrace.app.versions import versions
from headrace.models.loading.load import LoadedModel
from headrace.runtime import ops
from headrace.runtime.ops import native

SCHEMA = "headrace-verify/1"
_FLIPS = 10  # shown in the table's notes
# Results of `checks.CheckResult`, each with its colour.
_STYLES = {"equal": "green", "close": "green", "near ties": "yellow", "differs": "bold red"}


class VerifyDocument(Struct, frozen=True, kw_only=True):
    """The document of `headrace verify`, see docs/verify.md."""

    schema: str = SCHEMA
    model: str
    passed: bool
    interrupted: bool
    exact_expected: bool
    tolerance: float
    expectation: str
    tokens: int
    sequences: int
    seed: int
    top: int = TOP
    kernels: dict[str, str]
    threads: int | None
    checks: list[CheckResult]
    versions: dict[str, str]


def verify(loaded: LoadedModel, plan: VerifyPlan, here: LoadedModel | None = None) -> VerifyDocument:
    """Run all checks with progress on stderr. An interrupted verification has not passed.

    here: see `Verification`.
    Raises UsageError for too short a context, and the engine's errors.
    """
    expected = expectation(loaded)
    checks: list[CheckResult] = []
    interrupted = False
    try:
        with drawn_progress() as progress:
            stages = NumberedStages("check", progress)
            for check in Verification(loaded, expected, plan, stages.tick, here).run(stages.begin):
                checks.append(check)
    except KeyboardInterrupt:
        interrupted = True
    return VerifyDocument(
        model=loaded.name,
        passed=all(check.passed for check in checks) and not interrupted,
        interrupted=interrupted,
        exact_expected=expected.exact,
        tolerance=expected.tolerance,
        expectation=expected.reason,
        tokens=plan.tokens,
        sequences=plan.sequences,
        seed=plan.seed,
        kernels=ops.describe(),
        threads=native.status().threads,
        checks=checks,
        versions=versions(),
    )


def show(document: VerifyDocument) -> None:
    """Print a line per check on standard output, then the summary."""
    checks = document.checks
    columns = [
        Column("check", [check.name for check in checks], right=False),
        Column("result", [Text(check.result, style=_STYLES[check.result]) for check in checks], right=False),
        Column("sequences", [str(check.sequences) for check in checks], 2),
        Column("tokens", [f"{check.tokens:,}" for check in checks], 1),
        Column("K/V entries", [f"{check.kv_entries:,}" for check in checks], 5),
        Column("largest gap", [gap_text(check.largest_gap) for check in checks], 3),
        Column("", [check.note for check in checks], 4, right=False),
    ]
    if checks:
        print_table(columns)
    print_lines([Text(line) for line in summary(document)])


def summary(document: VerifyDocument) -> list[str]:
    """Return the summary's lines."""
    checks = document.checks
    compared = f"tokens, all logits, log probabilities of the {document.top} most likely tokens"
    if any(check.kv_entries for check in checks):
        compared += ", K/V entries"
    lines = [f"{document.model}: {document.expectation}", f"compared with each answer alone: {compared}"]
    flips = [(check, flip) for check in checks for flip in check.flips]
    lines += [_flip_line(check, flip) for check, flip in flips[:_FLIPS]]
    if len(flips) > _FLIPS:
        lines.append(f"and {len(flips) - _FLIPS} more (--json has all)")
    lines += [_change_line(check) for check in checks if check.kv_changes]
    wrong = [check.name for check in checks if check.result == "differs"]
    if wrong:
        lines.append(f"NOT equal: {'; '.join(wrong)}")
    elif checks and not document.interrupted:
        is_equal = all(check.result == "equal" for check in checks)
        lines.append("all checks: equal bits" if is_equal else "all checks: equal, apart from near-ties")
    if document.interrupted:
        lines.append(f"interrupted after {len(checks)} checks")
    return lines


def gap_text(gap: float) -> str:
    """Format a difference of natural logarithms."""
    return f"{gap:.2g}" if gap else "0"


def _change_line(check: CheckResult) -> str:
    first = check.kv_changes[0]
    return (
        f"{check.name}: {check.changed_kv_entries:,} K/V entries differ, "
        f"in sequence {first.sequence + 1} from entry {first.position + 1} on"
    )


def _flip_line(check: CheckResult, flip: Flip) -> str:
    margin = f"not among the {TOP} most likely"
    if flip.margin is not None:
        margin = f"less likely by {gap_text(flip.margin)}"
    return (
        f"{check.name}: sequence {flip.sequence + 1}, token {flip.position + 1}: {flip.got_text!r} "
        f"instead of {flip.expected_text!r}, {margin}"
    )
