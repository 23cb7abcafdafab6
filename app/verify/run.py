"""A verification from model to document; Ctrl-C ends it with the finished checks."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from headrace.app.output.progress import NumberedStages, drawn_progress
from headrace.app.verify.checks import Plan, Row, Verification
from headrace.app.verify.expectation import expectation
from headrace.app.verify.interfaces import Interfaces
from headrace.app.verify.report import About, VerifyDocument, document
from headrace.models.loading.load import LoadedModel


def verify(loaded: LoadedModel, plan: Plan, here: LoadedModel | None = None) -> VerifyDocument:
    """Run all checks with progress on stderr. here: see `Verification`.

    Raises UsageError for too short a context, and the engine's errors.
    """
    expected = expectation(loaded)
    about = About(loaded.name, loaded.tokenizer, expected, plan)
    return _document(about, lambda stages: Verification(loaded, expected, plan, stages.tick, here).run(stages.begin))


def verify_interfaces(
    load: Callable[[], LoadedModel], plan: Plan, path: Path, options: Mapping[str, object]
) -> VerifyDocument:
    """Compare the interfaces: see `Interfaces`. load: the model; its memory is freed before the checks load it."""
    loaded = load()
    expected = expectation(loaded)
    about = About(loaded.name, loaded.tokenizer, expected, plan, between_interfaces=True)
    checks = Interfaces(loaded, expected, plan, path, options)
    del loaded
    return _document(about, lambda stages: checks.run(stages.begin))


def _document(about: About, run: Callable[[NumberedStages], Iterator[Row]]) -> VerifyDocument:
    rows = list[Row]()
    interrupted = False
    try:
        with drawn_progress() as progress:
            for row in run(NumberedStages("check", progress)):
                rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
    return document(about, rows, interrupted=interrupted)
