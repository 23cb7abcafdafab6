"""A verification from model to document; Ctrl-C ends it with the finished checks.

`headrace verify` and `bench --report mac` call `verify`; `headrace verify --server` calls `verify_interfaces`.
`checks.py` and `interfaces.py` have the checks, `serving.py` the ways to serve, `trace.py` the comparison, `report.py`
the document.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from headrace.app.output.progress import NumberedStages, drawn_progress
from headrace.app.verify.checks import CheckResult, Plan, Verification
from headrace.app.verify.expectation import expectation
from headrace.app.verify.interfaces import Interfaces
from headrace.app.verify.report import VerifyDocument, document
from headrace.models.loading.load import LoadedModel


def verify(loaded: LoadedModel, plan: Plan, here: LoadedModel | None = None) -> VerifyDocument:
    """Run all checks with progress on stderr. here: see `Verification`.

    Raises UsageError for too short a context, and the engine's errors.
    """
    expected = expectation(loaded)
    begun = document(loaded.name, expected, plan)
    return _checked(begun, lambda stages: Verification(loaded, expected, plan, stages.tick, here).run(stages.begin))


def verify_interfaces(
    load: Callable[[], LoadedModel], plan: Plan, path: Path, options: Mapping[str, object]
) -> VerifyDocument:
    """Compare the interfaces: see `Interfaces`. load: loads the model; it is freed before the checks load it again."""
    loaded = load()
    expected = expectation(loaded)
    begun = document(loaded.name, expected, plan, interfaces=True)
    checks = Interfaces(loaded, expected, plan, path, options)
    del loaded  # frees the weights: `checks` keeps the tokenizer alone
    return _checked(begun, lambda stages: checks.run(stages.begin))


def _checked(begun: VerifyDocument, run: Callable[[NumberedStages], Iterator[CheckResult]]) -> VerifyDocument:
    """Return the document `begun` with the results of `run`. An interrupted verification has not passed."""
    checks = list[CheckResult]()
    interrupted = False
    try:
        with drawn_progress() as progress:
            for check in run(NumberedStages("check", progress)):
                checks.append(check)
    except KeyboardInterrupt:
        interrupted = True
    passed = all(check.passed for check in checks) and not interrupted
    return replace(begun, passed=passed, interrupted=interrupted, checks=checks)
