"""A verification as table and as JSON document."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from msgspec import Struct
from rich.text import Text

from headrace.app.output.tables import Column, print_lines, table_lines
from headrace.app.verify.checks import KVChange, Plan, Row
from headrace.app.verify.expectation import Expectation
from headrace.app.verify.trace import TOP, Flip
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime import ops
from headrace.runtime.ops import native

SCHEMA = "headrace-verify/1"
_FLIPS = 10  # shown in the table's notes
_STYLES = {"equal": "green", "close": "green", "near ties": "yellow", "differs": "bold red"}


@dataclass(frozen=True, slots=True)
class About:
    """The subject of a verification. between_interfaces: answers are compared with those of `run`."""

    model: str
    tokenizer: Tokenizer
    expected: Expectation
    plan: Plan
    between_interfaces: bool = False


class FlipWithText(Struct, frozen=True, kw_only=True):
    """A `Flip`, with the text of its tokens."""

    sequence: int
    position: int
    expected: int
    got: int
    margin: float | None
    expected_text: str
    got_text: str


class CheckResult(Struct, frozen=True, kw_only=True):
    """An entry of `checks`, see docs/verify.md."""

    name: str
    result: str
    sequences: int
    tokens: int
    missing_tokens: int
    kv_entries: int
    changed_kv_entries: int
    largest_gap: float
    flips: list[FlipWithText]
    kv_changes: list[KVChange]
    note: str


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
    interfaces: bool
    kernels: dict[str, str]
    threads: int | None
    checks: list[CheckResult]
    versions: dict[str, str]


def document(about: About, rows: Sequence[Row], *, interrupted: bool) -> VerifyDocument:
    """Return the document. Flipped tokens come with their text."""
    from headrace.app.versions import versions

    return VerifyDocument(
        model=about.model,
        passed=all(row.passed for row in rows) and not interrupted,
        interrupted=interrupted,
        exact_expected=about.expected.exact,
        tolerance=about.expected.tolerance,
        expectation=about.expected.reason,
        tokens=about.plan.tokens,
        sequences=about.plan.sequences,
        seed=about.plan.seed,
        interfaces=about.between_interfaces,
        kernels=ops.describe(),
        threads=native.status().threads,
        checks=[_result(row, about.tokenizer) for row in rows],
        versions=versions(),
    )


def _result(row: Row, tokenizer: Tokenizer) -> CheckResult:
    compared = row.comparisons
    return CheckResult(
        name=row.name,
        result=row.verdict,
        sequences=len(compared),
        tokens=sum(comparison.tokens for comparison in compared),
        missing_tokens=sum(comparison.missing for comparison in compared),
        kv_entries=sum(comparison.entries for comparison in compared),
        changed_kv_entries=sum(len(comparison.changed) for comparison in compared),
        largest_gap=max((comparison.gap for comparison in compared), default=0.0),
        flips=[_with_text(comparison.flip, tokenizer) for comparison in compared if comparison.flip is not None],
        kv_changes=row.kv_changes,
        note=row.note,
    )


def _with_text(flip: Flip, tokenizer: Tokenizer) -> FlipWithText:
    def text(token: int) -> str:
        return tokenizer.decode([token], skip_special=False) if token >= 0 else "?"

    return FlipWithText(**asdict(flip), expected_text=text(flip.expected), got_text=text(flip.got))


def show(document: VerifyDocument, width: int | None) -> None:
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
        print_lines(table_lines(columns, width))
    print_lines([Text(line) for line in summary(document)])


def summary(document: VerifyDocument) -> list[str]:
    """Return the summary's lines."""
    checks = document.checks
    entries = ", K/V entries" if any(check.kv_entries for check in checks) else ""
    reference = "run" if document.interfaces else "each answer alone"
    logits = "" if document.interfaces else "all logits, "
    compared = f"tokens, {logits}log probabilities of the {document.top} most likely tokens{entries}"
    lines = [f"{document.model}: {document.expectation}", f"compared with {reference}: {compared}"]
    flips = [(check, flip) for check in checks for flip in check.flips]
    lines += [_flip_line(check, flip) for check, flip in flips[:_FLIPS]]
    if len(flips) > _FLIPS:
        lines.append(f"and {len(flips) - _FLIPS} more (--json has all)")
    lines += [_change_line(check) for check in checks if check.kv_changes]
    wrong = [check.name for check in checks if check.result == "differs"]
    if wrong:
        lines.append(f"NOT equal: {'; '.join(wrong)}")
    elif checks and not document.interrupted:
        same = all(check.result == "equal" for check in checks)
        lines.append("all checks: equal bits" if same else "all checks: equal, apart from near-ties")
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


def _flip_line(check: CheckResult, flip: FlipWithText) -> str:
    margin = f"not among the {TOP} most likely" if flip.margin is None else f"less likely by {gap_text(flip.margin)}"
    return (
        f"{check.name}: sequence {flip.sequence + 1}, token {flip.position + 1}: {flip.got_text!r} "
        f"instead of {flip.expected_text!r}, {margin}"
    )
