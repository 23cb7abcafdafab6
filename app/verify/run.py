"""A verification from model to document; Ctrl-C ends it with the finished checks."""

from headrace.app.output.progress_line import ProgressLine
from headrace.app.verify.checks import Plan, Row, Verification
from headrace.app.verify.expectation import expectation
from headrace.app.verify.report import Document, document
from headrace.models.loading.load import LoadedModel


def verify(loaded: LoadedModel, plan: Plan) -> Document:
    """Run all checks with progress on stderr. Raises UsageError for too short a context, and the engine's errors."""
    expected, rows, interrupted = expectation(loaded), list[Row](), False
    progress = ProgressLine("check")
    try:
        verification = Verification(loaded, expected, plan, progress.tick)
        for row in verification.run(progress.begin):
            rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        progress.clear()
    return document(loaded, expected, plan, rows, interrupted=interrupted)
